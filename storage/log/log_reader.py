"""Reads of an open log: records by offset and by time, aborted transactions, leader epochs.

Nothing here changes the log. A read returns nothing at or above the end offset of the caller.
"""

from storage.errors import OffsetOutOfRangeError
from storage.format.txn_index import TxnIndexEntries, aborted_in
from storage.log.log_epochs import LogEpochs
from storage.log.log_state import LogState
from storage.log.txn_index_loads import ensure_loaded, not_loaded, txn_index_loads
from storage.segments.fetch_slice import NOTHING, FetchSlice, find_slice
from storage.segments.index_load import IndexLoad
from storage.segments.segment import Segment
from storage.segments.timestamp_lookup import Search, first_at_or_after, first_of_largest


class LogReader:
    """The reads of one log."""

    __slots__ = ("_epochs", "_state")

    def __init__(self, state: LogState, epochs: LogEpochs) -> None:
        self._state = state
        self._epochs = epochs

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        end_offset: int,
        at_least_one: bool = True,
        in_place: bool = True,
    ) -> FetchSlice:
        """Return the range of whole batches from `offset` on, below `end_offset`, in one file.

        It starts with the batch that contains the offset, or the next one. With `at_least_one` the
        first batch may exceed `max_bytes`. Length 0: there is nothing yet.

        Raises OffsetOutOfRangeError, DamagedSegmentError; without `in_place`, IndexNotReadyError
        if an index has to be loaded or rebuilt first.
        """
        state = self._state
        log_end_offset = state.log_end_offset
        if not state.log_start_offset <= offset <= log_end_offset:
            raise OffsetOutOfRangeError(offset, state.log_start_offset, log_end_offset)
        if offset >= end_offset:
            return NOTHING
        try:
            return find_slice(
                state.segments,
                offset,
                max_bytes,
                end_offset,
                log_end_offset,
                at_least_one=at_least_one,
                in_place=in_place,
            )
        except OSError as error:
            raise state.failed("read of", error) from error

    def search_timestamp(self, timestamp_ms: int, first_offset: int = 0) -> Search:
        """Return a search for the first record from `first_offset` on with at least this timestamp.

        See storage/segments/timestamp_lookup.py. Raises OSError, as do the steps of the search.
        """
        state = self._state
        limit_bytes = state.config.varve_decompressed_batch_bytes
        start = max(first_offset, state.log_start_offset)
        return first_at_or_after(state.segments, timestamp_ms, start, limit_bytes)

    def search_max_timestamp(self, first_offset: int = 0) -> Search:
        """Return a search for the first record with the largest timestamp. Raises OSError."""
        state = self._state
        limit_bytes = state.config.varve_decompressed_batch_bytes
        start = max(first_offset, state.log_start_offset)
        return first_of_largest(state.segments, start, limit_bytes)

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the largest known epoch up to `epoch` and where it ends; (-1, -1) if not known."""
        state = self._state
        if epoch == state.leader_epoch:
            return epoch, state.log_end_offset
        return self._epochs.known.end_offset_for(epoch, state.log_end_offset)

    def epoch_of(self, offset: int) -> int:
        """Return the leader epoch in which `offset` is, or would be, written; -1 if not known."""
        if offset >= self._state.log_end_offset:
            return self._state.leader_epoch
        return self._epochs.known.epoch_of(offset)

    def aborted_transactions(
        self, first: int, end: int, *, in_place: bool = True
    ) -> TxnIndexEntries:
        """Return the aborted transactions that overlap `[first, end)`, in marker order.

        Raises StorageError; without `in_place`, IndexNotReadyError if an index was dropped.
        """
        segments = self._state.segments.since(first)
        entries = (self._txn_entries(segment, in_place=in_place) for segment in segments)
        try:
            return aborted_in(entries, first, end)
        except OSError as error:
            raise self._state.failed("read of", error) from error

    def _txn_entries(self, segment: Segment, *, in_place: bool) -> TxnIndexEntries:
        if not segment.txn_index.is_loaded:
            if not in_place:
                raise not_loaded(self._state, segment)
            ensure_loaded(self._state, segment)
        return segment.use_txn_entries()

    def txn_index_loads(self, first: int) -> list[IndexLoad]:
        """Return what to load before the aborted transactions from an offset on are read."""
        return txn_index_loads(self._state, self._state.segments.since(first))

    def aborted_in_slice(
        self, batches: FetchSlice, offset: int, end_offset: int, *, in_place: bool = True
    ) -> TxnIndexEntries:
        """Return the aborted transactions that overlap the result of `read(offset, ...)`.

        As in Kafka, its records end at the next index entry, or else at the next segment.
        """
        try:
            end = min(end_offset, self._end_of_slice(batches, offset, in_place=in_place))
        except OSError as error:
            raise self._state.failed("read of", error) from error
        return self.aborted_transactions(offset, end, in_place=in_place)

    def _end_of_slice(self, batches: FetchSlice, offset: int, *, in_place: bool) -> int:
        """Return an offset above all records of the slice."""
        state = self._state
        for segment in state.segments.since(offset):
            if segment.file is batches.file:
                end_position = batches.position + batches.length
                if end_position >= segment.size_bytes:
                    return state.end_of(segment)
                indexes = segment.indexes_for(in_place=in_place)
                end = indexes.offset_behind(end_position, segment.file)
                return state.end_of(segment) if end is None else end
        return state.log_end_offset
