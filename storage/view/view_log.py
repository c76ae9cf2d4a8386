"""A compacted view as a readable log: the ledger below the horizon, the log from there on.

Rules
- Records keep their offsets, so there are gaps. A read of any offset from 0 to the log end returns
  the next existing batch.
- A reader always makes progress. Where no record is left before the log continues (an empty ledger,
  a deleted last key, expired records), it gets an empty batch that ends there, as Kafka's cleaner
  leaves one. It then reaches the log end.
- A reader that began in one version of the ledger reads it to its horizon and continues in the log,
  as long as the log still has those offsets: later deletes follow in the log. A new reader, or one
  that goes back, gets the current version.
- The ledger has committed records only, and no markers.
"""

import os.path

from config.topics.keys import TopicConfig
from storage.env import FileStamp, ReadBuffer, WriteBuffer
from storage.errors import InvalidViewError, LogDirectoryError, OffsetOutOfRangeError
from storage.format.batch import build_batch
from storage.format.txn_index import TxnIndexEntries
from storage.log.log import Log
from storage.model import TimestampOffset
from storage.segments.fetch_slice import NOTHING, FetchSlice
from storage.segments.timestamp_lookup import Search, first_at_or_after, first_of_largest
from storage.view.ledger import Ledger


class CompactedViewLog:
    """The view of one log. `ledger` is None before the first compaction."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.ledger: Ledger | None = None
        self.failure: InvalidViewError | None = None  # why the ledger on disk is invalid
        # False if the version on disk may differ from `ledger`, because reading or publishing it
        # failed. It is read again until it is known.
        self.is_known = True

    # From the log

    @property
    def config(self) -> TopicConfig:
        """Return the config of the topic."""
        return self.log.config

    @property
    def directory(self) -> str:
        """Return the partition folder."""
        return self.log.directory

    @property
    def leader_epoch(self) -> int:
        """Return the leader epoch of the log."""
        return self.log.leader_epoch

    @property
    def high_watermark(self) -> int:
        """Return the high watermark of the log."""
        return self.log.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Return the last stable offset of the log."""
        return self.log.last_stable_offset

    @property
    def horizon(self) -> int:
        """Return the end of the ledger; 0 without one."""
        return 0 if self.ledger is None else self.ledger.horizon

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the ledger."""
        return 0 if self.ledger is None else self.ledger.manifest.size_bytes

    @property
    def log_start_offset(self) -> int:
        """Return the first offset of the ledger, or of the log after it."""
        if self.ledger is None:
            return self.log.log_start_offset
        first = self.ledger.first_offset
        return first if first < self.horizon else self._resumes

    @property
    def _resumes(self) -> int:
        """Return where the log continues after the ledger."""
        return max(self.horizon, self.log.log_start_offset)

    def epoch_of(self, offset: int) -> int:
        """Return the leader epoch of an offset; -1 if the log no longer has it."""
        return self.log.reader.epoch_of(offset)

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the end of an epoch; one that the log no longer has ends at the view's horizon."""
        results = self.log.reader.end_offset_for_epoch(epoch)
        if results == (-1, -1) and 0 <= epoch < self.log.leader_epoch and self.ledger is not None:
            return epoch, self.horizon
        return results

    # Reading

    def check_usable(self) -> None:
        """Raise InvalidViewError if the view is incomplete."""
        if self.failure is not None:
            raise self.failure

    def search_timestamp(self, timestamp_ms: int) -> Search:
        """Search the first record, by offset, with at least this timestamp."""
        self.check_usable()
        limit = self.config.varve_decompressed_batch_bytes
        if self.ledger is not None and self.ledger.segments is not None:
            offset_found = yield from first_at_or_after(
                self.ledger.segments, timestamp_ms, 0, limit
            )
            if offset_found is not None:
                return offset_found
        return (yield from self.log.reader.search_timestamp(timestamp_ms, self._resumes))

    def search_max_timestamp(self) -> Search:
        """Search the first record with the largest timestamp."""
        self.check_usable()
        limit = self.config.varve_decompressed_batch_bytes
        best: TimestampOffset | None = None
        if self.ledger is not None and self.ledger.segments is not None:
            best = yield from first_of_largest(self.ledger.segments, 0, limit)
        offset_found = yield from self.log.reader.search_max_timestamp(self._resumes)
        if best is None or (
            offset_found is not None and offset_found.timestamp_ms > best.timestamp_ms
        ):
            return offset_found
        return best


class ViewCursor:
    """The progress of one reader: the version that it reads, and its position."""

    __slots__ = ("_at", "_follows", "_ledger", "_view")

    def __init__(self, view: CompactedViewLog) -> None:
        self._view = view
        self._ledger: Ledger | None = None
        self._follows = False  # it has read a ledger to its horizon and reads the log
        self._at = -1

    def is_of(self, view: CompactedViewLog) -> bool:
        """Return whether it reads this view: the topic may have been recreated."""
        return self._view is view

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        end_offset: int,
        at_least_one: bool = True,
        in_place: bool = True,
    ) -> FetchSlice:
        """Read batches; see LogReader.read.

        Raises OffsetOutOfRangeError, DamagedSegmentError, InvalidViewError, LogDirectoryError.
        """
        view, log = self._view, self._view.log
        view.check_usable()
        if not 0 <= offset <= log.log_end_offset:
            raise OffsetOutOfRangeError(offset, view.log_start_offset, log.log_end_offset)
        if offset >= end_offset:
            return NOTHING
        ledger = self._source(offset)
        resumes = log.log_start_offset
        if ledger is not None:
            try:
                fetch_slice = ledger.read(
                    offset, max_bytes, at_least_one=at_least_one, in_place=in_place
                )
            except OSError as error:
                directory = os.path.dirname(log.directory)
                raise LogDirectoryError(directory, f"read of a view: {error}") from error
            if fetch_slice.file is not None:  # empty if the next batch exceeds `max_bytes`
                return fetch_slice
            resumes = max(resumes, ledger.horizon)
        resumes = min(resumes, end_offset)
        if offset < resumes:
            return _gap_before(resumes, log.leader_epoch)
        return log.reader.read(
            offset, max_bytes, end_offset=end_offset, at_least_one=at_least_one, in_place=in_place
        )

    def aborted_transactions(self, first: int, end: int) -> TxnIndexEntries:
        """Return those of the log for offsets in the log; a ledger has none."""
        if self._ledger is not None:
            return TxnIndexEntries()
        return self._view.log.reader.aborted_transactions(first, end)

    def aborted_in_slice(
        self, found: FetchSlice, offset: int, end_offset: int, *, in_place: bool = True
    ) -> TxnIndexEntries:
        """As `aborted_transactions`, for the result of `read(offset, ...)`."""
        if self._ledger is not None or isinstance(found.file, _Bytes):
            return TxnIndexEntries()
        return self._view.log.reader.aborted_in_slice(found, offset, end_offset, in_place=in_place)

    def _source(self, offset: int) -> Ledger | None:
        """Return the ledger to read `offset` from; None for the log."""
        if offset < self._at:
            self._ledger, self._follows = None, False  # it starts again
        self._at = offset
        began_in = self._ledger
        if began_in is not None and offset >= began_in.horizon:
            self._ledger, self._follows = None, True
        elif began_in is not None and not began_in.is_revoked:
            return began_in
        if self._follows and offset >= self._view.log.log_start_offset:
            return None
        present = self._view.ledger
        if present is None or offset >= present.horizon:
            self._ledger = None
            self._follows = True
        else:
            self._ledger, self._follows = present, False
        return self._ledger


def _gap_before(offset: int, leader_epoch: int) -> FetchSlice:
    """Return an empty batch with next offset `offset`, which moves a reader over a gap."""
    batch = build_batch(
        (),
        base_offset=offset - 1,
        last_offset_delta=0,
        partition_leader_epoch=leader_epoch,
    )
    return FetchSlice(_Bytes(bytes(batch)), 0, len(batch))


class _Bytes:
    """A read-only File of bytes in memory."""

    path = ""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def pread(self, length: int, position: int) -> bytes:
        """See File."""
        return self._data[position : position + length]

    def pread_into(self, buffer: WriteBuffer, position: int) -> int:
        """See File."""
        data = self.pread(len(buffer), position)
        buffer[: len(data)] = data
        return len(data)

    def pwrite(self, data: ReadBuffer, position: int) -> None:
        """Not supported: the data is read only."""
        raise AssertionError(position)

    def truncate(self, length: int) -> None:
        """Not supported: the data is read only."""
        raise AssertionError(length)

    def sync(self) -> None:
        """Do nothing: it is on no device."""

    def size(self) -> int:
        """See File."""
        return len(self._data)

    def stamp(self) -> FileStamp:
        """Not supported: it is no file of the system."""
        raise AssertionError

    def is_deleted(self) -> bool:
        """Return False: it takes no room on a disk."""
        return False

    def fileno(self) -> int:
        """It has no descriptor."""
        return -1

    def is_cached(self, position: int, length: int) -> bool:
        """Return whether the range exists: all data is in memory."""
        return position + length <= len(self._data)

    def warm(self, position: int, length: int) -> None:
        """Do nothing: the data is in memory."""

    def close(self) -> None:
        """Do nothing: no file is open."""
