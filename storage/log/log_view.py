"""The read side of a log: offsets, segments, records by offset and by time.

Nothing here changes the log. Log start <= high watermark <= log end; recovery point <= log end. A
read returns nothing at or above the end offset of the caller.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from config.topics.keys import TopicConfig
from storage.directory.log_directory import LogDirectory
from storage.env import Env
from storage.errors import (
    CorruptBatchError,
    LogClosedError,
    NoRoomError,
    OffsetOutOfRangeError,
    PartitionFolderError,
    StorageError,
    is_out_of_descriptors,
)
from storage.format.batch import HEADER_BYTES, read_header, walk_headers
from storage.format.producer_state import ProducerEntry
from storage.format.txn_index import TxnIndexEntry, aborted_in
from storage.model import TopicPartition
from storage.recovery.load_log import LoadedLog
from storage.segments.damage import DamagedSegment
from storage.segments.fetch_slice import NOTHING, FetchSlice, find_slice
from storage.segments.producer_snapshots import LogProducers
from storage.segments.retention import SegmentFacts
from storage.segments.segment import Segment
from storage.segments.timestamp_lookup import Search, first_at_or_after, first_of_largest
from storage.segments.txn_index_repair import mend
from storage.segments.verify import VerifiedPart, verify_part


@dataclass(frozen=True, slots=True)
class LogContext:
    """The objects that all logs of a log directory share."""

    env: Env
    log_directory: LogDirectory
    new_generation: Callable[[], str]


class VerifyStep(NamedTuple):
    """Bytes `[position, end_position)` of a segment to verify, with the offsets allowed there.

    `damage`: a known damaged range at the first offset; then there are no bytes to verify.
    """

    segment: Segment
    position: int
    end_position: int
    offsets: range
    damage: DamagedSegment | None

    def run(self, max_bytes: int) -> VerifiedPart:
        """Verify about `max_bytes`; may run in a thread. Raises OSError."""
        return verify_part(
            self.segment.file, self.position, self.end_position, self.offsets, max_bytes
        )


class ReadableLog:
    """The readable state of an open log. `Log` changes it."""

    def __init__(
        self,
        context: LogContext,
        partition: TopicPartition,
        topic_id: bytes,
        directory: str,
        config: TopicConfig,
        *,
        loaded: LoadedLog,
    ) -> None:
        self._env = context.env
        self._log_directory = context.log_directory
        self.partition = partition
        self.topic_id = topic_id
        self.directory = directory
        self.is_deleted = False  # its folder was or is being renamed
        self.config = config
        self.leader_epoch = loaded.leader_epoch
        self.log_start_offset = loaded.log_start_offset
        self.log_end_offset = loaded.log_end_offset
        self.recovery_point = loaded.recovery_point
        self.high_watermark = loaded.log_end_offset
        self._segments = loaded.segments
        self._active = loaded.segments.active
        self._producers = LogProducers(loaded.producers)
        self._epochs = loaded.epochs

    def _failed(self, action: str, error: OSError) -> StorageError:
        """Return the error to raise for a failed operation on the partition's files.

        For operations that changed nothing; `Log._give_up` is for partial changes.
        """
        if is_out_of_descriptors(error):
            return NoRoomError(error, self.directory)
        failure = self._log_directory.failure(self.directory, action, error)
        if self.is_deleted and isinstance(failure, PartitionFolderError):
            return LogClosedError(self.directory)  # its folder was renamed under the operation
        return failure

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all log files."""
        return self._segments.size_bytes

    @property
    def first_base_offset(self) -> int:
        """Return the base offset of the first segment; the log may start behind it."""
        return self._segments.bases[0]

    @property
    def segment_count(self) -> int:
        """Return the number of segments, including the active one."""
        return len(self._segments)

    @property
    def last_stable_offset(self) -> int:
        """Return the start of the oldest undecided transaction, else the high watermark."""
        first = self._producers.first_undecided_offset
        if first is None or first >= self.high_watermark:
            return self.high_watermark
        return max(first, self.log_start_offset)

    @property
    def damaged(self) -> tuple[DamagedSegment, ...]:
        """Return the known damaged ranges in offset order."""
        return tuple(
            damage if damage.next_offset >= 0 else damage._replace(next_offset=self.log_end_offset)
            for damage in self._segments.damages
        )

    @property
    def left_by_cleaner(self) -> tuple[DamagedSegment, ...]:
        """Return the damaged and uncleanable ranges, which the cleaner does not change."""
        return (*self.damaged, *self.uncleanable)

    @property
    def uncleanable(self) -> tuple[DamagedSegment, ...]:
        """Return the known ranges that are readable, but cannot be cleaned."""
        return self._segments.uncleanable

    def segment_facts(self) -> tuple[SegmentFacts, ...]:
        """Return the facts of each segment for planning; the last one is active."""
        return self._segments.facts(self.log_end_offset)

    def last_records(self) -> dict[int, tuple[int, int]]:
        """Return producer id -> (epoch, last data offset or -1)."""
        return self._producers.last_records()

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """Return the largest known epoch up to `epoch` and where it ends; (-1, -1) if not known."""
        if epoch == self.leader_epoch:
            return epoch, self.log_end_offset
        return self._epochs.end_offset_for(epoch, self.log_end_offset)

    def epoch_of(self, offset: int) -> int:
        """Return the leader epoch in which `offset` is, or would be, written; -1 if not known."""
        if offset >= self.log_end_offset:
            return self.leader_epoch
        return self._epochs.epoch_of(offset)

    # Reading

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
        if not self.log_start_offset <= offset <= self.log_end_offset:
            raise OffsetOutOfRangeError(offset, self.log_start_offset, self.log_end_offset)
        if offset >= end_offset:
            return NOTHING
        try:
            return find_slice(
                self._segments,
                offset,
                max_bytes,
                end_offset,
                self.log_end_offset,
                at_least_one=at_least_one,
                in_place=in_place,
            )
        except OSError as error:
            raise self._failed("read of", error) from error

    def read_batches(self, offset: int, end_offset: int, max_bytes: int) -> bytes:
        """Return whole batches from `offset` on, at least one if there is any. See `read`."""
        data = self.read(offset, max_bytes, end_offset=end_offset).read()
        end = 0
        for position, header in walk_headers(data):
            end = position + header.size_bytes
        return data[:end]

    def search_timestamp(self, timestamp_ms: int, first_offset: int = 0) -> Search:
        """Return a search for the first record from `first_offset` on with at least this timestamp.

        See storage/segments/timestamp_lookup.py. Raises OSError, as do the steps of the search.
        """
        limit_bytes = self.config.varve_decompressed_batch_bytes
        start = max(first_offset, self.log_start_offset)
        return first_at_or_after(self._segments, timestamp_ms, start, limit_bytes)

    def search_max_timestamp(self, first_offset: int = 0) -> Search:
        """Return a search for the first record with the largest timestamp. Raises OSError."""
        limit_bytes = self.config.varve_decompressed_batch_bytes
        start = max(first_offset, self.log_start_offset)
        return first_of_largest(self._segments, start, limit_bytes)

    def mend_transaction_indexes(self) -> list[str]:
        """Rebuild transaction indexes of closed segments that contradict the log; return paths.

        Reads all headers of the log; call it in a thread. Raises OSError.
        """
        return mend(list(self._segments)[:-1])

    def verify_step(self, offset: int, *, is_border: bool) -> VerifyStep:
        """Return the next step of a verification from `offset` on. Raises OSError.

        `is_border`: a batch ends there; otherwise `offset` may be inside a batch.
        """
        index = self._segments.index_of(offset)
        segment = self._segments[index]
        end_offset = self._end_of(segment)
        for damage in segment.damages:
            next_offset = end_offset if damage.next_offset < 0 else damage.next_offset
            if damage.first_offset <= offset < next_offset:
                damaged_segment = damage._replace(next_offset=next_offset)
                return VerifyStep(segment, 0, 0, range(offset, end_offset), damaged_segment)
        position = segment.locate_readable(offset)
        starts = (damage.position for damage in segment.damages if damage.position >= position)
        end = min(starts, default=segment.size_bytes)
        first_offset = max(segment.base_offset, min(offset, end_offset))
        if not is_border and position < end:
            with suppress(CorruptBatchError):
                header = read_header(segment.file.pread(HEADER_BYTES, position))
                if segment.base_offset <= header.base_offset < offset <= header.last_offset:
                    first_offset = header.base_offset
        return VerifyStep(segment, position, end, range(first_offset, end_offset), None)

    def _end_of(self, segment: Segment) -> int:
        """Return the offset behind all possible offsets of the segment."""
        following = self._segments.since(segment.base_offset)[1:]
        return following[0].base_offset if following else self.log_end_offset

    def aborted_transactions(self, first: int, end: int) -> list[TxnIndexEntry]:
        """Return the aborted transactions that overlap `[first, end)`, in marker order."""
        segments = self._segments.since(first)
        return aborted_in((segment.txn_index.entries for segment in segments), first, end)

    def aborted_in_slice(
        self, found: FetchSlice, offset: int, end_offset: int, *, in_place: bool = True
    ) -> list[TxnIndexEntry]:
        """Return the aborted transactions that overlap the result of `read(offset, ...)`.

        As in Kafka, its records end at the next index entry, or else at the next segment.
        """
        try:
            end = min(end_offset, self._end_of_slice(found, offset, in_place=in_place))
        except OSError as error:
            raise self._failed("read of", error) from error
        return self.aborted_transactions(offset, end)

    def _end_of_slice(self, found: FetchSlice, offset: int, *, in_place: bool) -> int:
        """Return an offset above all records of the slice."""
        for segment in self._segments.since(offset):
            if segment.file is found.file:
                end_position = found.position + found.length
                if end_position >= segment.size_bytes:
                    return self._end_of(segment)
                indexes = segment.indexes_for(in_place=in_place)
                end = indexes.offset_behind(end_position, segment.file)
                return self._end_of(segment) if end is None else end
        return self.log_end_offset

    def producer(self, producer_id: int) -> ProducerEntry | None:
        """Return the state of one producer, read-only; None if the log has none."""
        return self._producers.states.producer(producer_id)

    @property
    def producers(self) -> tuple[ProducerEntry, ...]:
        """Return the state of its producers, read-only."""
        return self._producers.states.producers

    def open_transaction(self) -> tuple[int, int, int] | None:
        """Return the oldest open transaction: producer id, first offset, last write (ms)."""
        return self._producers.open_transaction()
