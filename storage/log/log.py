"""The log of one partition: `Log` appends; objects that it owns read, roll, flush and expire.

Rules
- All changes happen on the event loop; only `FlushTask.run` and slices run in threads.
- When `append` returns, the batch is in the page cache; when it raises, the log does not have it.
  The high watermark is the log end offset, or with `varve.flush.on.ack` the end of the synced data.
- `append_part` writes the first parts of a large batch after the end, and moves no offset.
- Log start <= high watermark <= log end; recovery point <= log end. A reader gets nothing at or
  above its end offset.
- An offline directory and a closed log accept no appends.
- The generation changes with everything that invalidates planned work: truncation, a change of the
  cleanup policy, a skip of damage. A new log has a new generation. Retention and cleaning do not
  change it.

The parts: `reader` (log_reader.py), `roller` (roll.py), `flusher` (flush.py), `retention`
(retention.py), `swap` (swap.py), `damage` (log_damage.py) and `epochs` (log_epochs.py). They share
the `LogState`, and a caller takes the part that it needs. truncation.py truncates the files. The
last stable offset follows from log_producers.py: it rises with the high watermark.

The caller checks batches before it appends them.
"""

import errno
from typing import Final

from config.topics.keys import TopicConfig
from storage.directory.log_directory import LogDirectory
from storage.errors import (
    LogDirectoryError,
    NoRoomError,
    OffsetOutOfRangeError,
    PartitionFolderError,
    StorageError,
    is_scarcity,
)
from storage.format.batch import (
    LENGTH_END,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
    WritableBuffer,
    stamp,
    stamp_log_append_time,
)
from storage.log.deletion import ScheduledDeletions
from storage.log.flush import LogFlusher
from storage.log.folder_stamp import folder_stamp
from storage.log.log_damage import LogDamage
from storage.log.log_epochs import LogEpochs
from storage.log.log_producers import LogProducers
from storage.log.log_reader import LogReader
from storage.log.log_state import LogContext, LogState, index_limits
from storage.log.retention import LogRetention
from storage.log.roll import LogRoller
from storage.log.swap import LogSwap
from storage.log.truncation import truncate_segments
from storage.model import AppendInfo, SegmentFacts, TopicPartition
from storage.recovery.load_log import LoadedLog
from storage.segments.batch_scan import intact_batch
from storage.segments.content_ids import write_content_ids
from storage.segments.offset_lookup import locate_intact
from storage.segments.producer_snapshots import load_states, write_snapshot
from storage.segments.segment import Segment
from storage.segments.segment_list import SegmentList

LOG_APPEND_TIME_TYPE: Final = "LogAppendTime"


class Log:
    """An open log. Times are wall time in ms; sizes and positions are bytes.

    Every method that uses the disk raises LogDirectoryError if the disk fails.
    """

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
        state = LogState(context, partition, topic_id, directory, config, loaded=loaded)
        self._state = state
        self._deletions = ScheduledDeletions(context.env, directory)
        self.epochs = LogEpochs(state, loaded.epochs, is_stale=loaded.epochs_learned)
        self.reader = LogReader(state, self.epochs)
        self.flusher = LogFlusher(state)
        self.roller = LogRoller(state, self.flusher)
        self.retention = LogRetention(
            state, self.flusher, self.roller, self.epochs, self._deletions
        )
        self.swap = LogSwap(state, self.flusher)
        self.damage = LogDamage(state)
        self._durable: tuple[int, bytes] | None = None  # its end and its folder at `note_durable`
        self._stamps_time = False
        self._is_acked_by_flush = False
        self._apply_config(config)
        if config.varve_flush_on_ack and self.flusher.has_unsynced_data:
            state.high_watermark = state.recovery_point

    # What it is

    @property
    def partition(self) -> TopicPartition:
        """Return topic and number of the partition."""
        return self._state.partition

    @property
    def topic_id(self) -> bytes:
        """Return the id of the topic."""
        return self._state.topic_id

    @property
    def directory(self) -> str:
        """Return the partition folder."""
        return self._state.directory

    @property
    def log_directory(self) -> LogDirectory:
        """Return the log directory of the folder."""
        return self._state.log_directory

    @property
    def config(self) -> TopicConfig:
        """Return the config of the topic."""
        return self._state.config

    @property
    def generation(self) -> str:
        """Return the id of its present generation."""
        return self._state.generation

    @property
    def leader_epoch(self) -> int:
        """Return the leader epoch in which batches are appended."""
        return self._state.leader_epoch

    @property
    def is_deleted(self) -> bool:
        """Return whether its folder was or is being renamed."""
        return self._state.is_deleted

    @property
    def log_start_offset(self) -> int:
        """Return the first offset that readers get."""
        return self._state.log_start_offset

    @property
    def log_end_offset(self) -> int:
        """Return the offset of the next append."""
        return self._state.log_end_offset

    @property
    def high_watermark(self) -> int:
        """Return the end of what readers get."""
        return self._state.high_watermark

    @property
    def last_stable_offset(self) -> int:
        """Return the start of the oldest undecided transaction, else the high watermark."""
        return self._state.last_stable_offset

    @property
    def recovery_point(self) -> int:
        """Return the end of what a start after a crash takes as intact."""
        return self._state.recovery_point

    @property
    def segments(self) -> SegmentList:
        """Return the segments; the last one is active."""
        return self._state.segments

    @property
    def producers(self) -> LogProducers:
        """Return the state of the idempotent and transactional producers."""
        return self._state.producers

    def segment_facts(self) -> tuple[SegmentFacts, ...]:
        """Return the facts of each segment for planning; the last one is active."""
        return self._state.segment_facts()

    # Settings

    def update_config(self, config: TopicConfig) -> None:
        """Apply a new config.

        A new generation begins if the log becomes compacted or stops being compacted; other changes
        leave a running clean valid.
        """
        state, old = self._state, self._state.config
        if (old.compacts, old.policy_known) != (config.compacts, config.policy_known):
            state.begin_generation()
        if old.varve_decompressed_batch_bytes != config.varve_decompressed_batch_bytes:
            self.damage.forget_uncleanable()
        self._apply_config(config)

    def _apply_config(self, config: TopicConfig) -> None:
        state = self._state
        state.config = config
        self._stamps_time = config.message_timestamp_type == LOG_APPEND_TIME_TYPE
        self._is_acked_by_flush = config.varve_flush_on_ack
        limits = index_limits(config)
        for segment in state.segments:
            segment.set_limits(limits)
        self.roller.apply_config()
        if not config.varve_flush_on_ack:
            state.raise_high_watermark(state.log_end_offset)

    # Appending

    def append(
        self,
        records: WritableBuffer,
        header: BatchHeader,
        *,
        now_ms: int,
        in_transaction: bool = False,
        by_coordinator: bool = False,
    ) -> AppendInfo:
        """Set the offsets of a checked batch and write it at the end.

        For a duplicate of an idempotent producer, return the original offsets and write nothing.
        `in_transaction`: its transaction is open on this partition. `by_coordinator`: likewise, and
        the batch has no running sequence, because a coordinator wrote it for the producer. A batch
        may have the append time `now_ms` already.

        Raises OutOfOrderSequenceError, InvalidProducerEpochError, InvalidTransactionStateError,
        NoRoomError or LogDirectoryError (nothing was appended), LogClosedError.
        """
        state = self._state
        if state.is_closed or state.log_directory.offline_reason is not None:
            state.refuse()
        has_producer = header.producer_id >= 0
        if has_producer and not header.is_control:
            duplicate = state.producers.check(
                header, in_transaction=in_transaction, by_coordinator=by_coordinator
            )
            if duplicate is not None:
                append_ms = duplicate.timestamp_ms if self._stamps_time else -1
                return AppendInfo(
                    duplicate.first_offset,
                    duplicate.last_offset,
                    append_ms,
                    state.log_start_offset,
                    True,
                )
        if not self.epochs.is_entered:
            self.epochs.enter_or_undo()
        first_offset = state.log_end_offset
        timestamp_ms = header.max_timestamp
        append_ms = -1
        stamp(records, 0, first_offset, state.leader_epoch)
        if self._stamps_time:
            if not header.attributes & LOG_APPEND_TIME:
                stamp_log_append_time(records, now_ms)
            timestamp_ms = append_ms = now_ms
        self._write(records, header, first_offset, timestamp_ms, now_ms)
        return AppendInfo(first_offset, state.log_end_offset - 1, append_ms, state.log_start_offset)

    def append_part(self, records: memoryview, header: BatchHeader, *, now_ms: int) -> bool:
        """Write the next part of a large batch after the end; `append` writes the last one.

        Return whether only that is left. Any other change of the active segment removes the parts;
        then the next call, or `append`, begins anew. Raises NoRoomError, LogDirectoryError (the log
        is as before) or LogClosedError.
        """
        state = self._state
        if state.is_closed or state.log_directory.offline_reason is not None:
            state.refuse()
        stamp(records, 0, state.log_end_offset, state.leader_epoch)
        next_offset = state.log_end_offset + header.last_offset_delta + 1
        segment = state.segments.active
        end_bytes = segment.size_bytes + header.size_bytes
        rule = self.roller.rule
        if segment.is_full or rule.is_due(end_bytes, header.max_timestamp, now_ms, next_offset):
            self.roller.roll_for(end_bytes, next_offset, now_ms)
            segment = state.segments.active
        try:
            return segment.append_part(records)
        except OSError as error:
            raise self._undo_append(segment, error) from error

    @property
    def has_parts(self) -> bool:
        """Return whether parts of a batch are after the end."""
        return self._state.segments.active.has_parts

    def drop_last_parts(self) -> bool:
        """Remove the last parts of a batch that is not appended; return whether some are left.

        Raises LogDirectoryError.
        """
        state = self._state
        if state.is_closed:
            return False  # `close` has removed them; a deleted log needs no change
        try:
            return state.segments.active.drop_last_parts()
        except OSError as error:
            raise state.fail_log("truncation of", error) from error

    def append_replica(self, records: WritableBuffer, header: BatchHeader, *, now_ms: int) -> None:
        """Write a batch of another copy of this log as it is: with its offsets, epoch and times.

        Raises NoRoomError or LogDirectoryError; nothing was appended then.
        """
        end_offset = self._state.log_end_offset
        assert header.base_offset >= end_offset, (header.base_offset, end_offset)
        if not self.epochs.is_entered:
            self.epochs.enter()
        self._write(records, header, header.base_offset, header.max_timestamp, now_ms)

    def _write(
        self,
        records: WritableBuffer,
        header: BatchHeader,
        first_offset: int,
        timestamp_ms: int,
        now_ms: int,
    ) -> None:
        """Write a batch with its final offsets to the active segment; roll first if it is due."""
        state = self._state
        next_offset = first_offset + header.last_offset_delta + 1
        size_bytes = header.batch_length + LENGTH_END
        segment = state.segments.active
        rule = self.roller.rule
        end_bytes = segment.size_bytes + size_bytes
        if segment.is_full or rule.is_due(end_bytes, timestamp_ms, now_ms, next_offset):
            self.roller.roll_for(end_bytes, next_offset, now_ms)
            segment, rule = state.segments.active, self.roller.rule
        try:
            segment.append(records, size_bytes, next_offset - 1, timestamp_ms)
        except OSError as error:
            raise self._undo_append(segment, error) from error
        segment.last_modified_ms = now_ms
        if not rule.is_begun:
            rule.begin(timestamp_ms, now_ms)
        state.log_end_offset = next_offset
        if header.producer_id >= 0:
            self._note_producer(records, header, first_offset, timestamp_ms, now_ms)
        if header.attributes & TRANSACTIONAL:
            segment.has_transactions = True
        if not self._is_acked_by_flush:
            state.raise_high_watermark(next_offset)

    def _undo_append(self, segment: Segment, error: OSError) -> StorageError:
        """Undo a failed append; if that fails as well, the log accepts no more appends.

        If there was no room and the files are unchanged, only this append failed.
        """
        failure = self._state.failed("append to", error)
        try:
            segment.cut_back(segment.size_bytes)
            if is_scarcity(error) and segment.is_cut():
                return NoRoomError(error, segment.path)
        except OSError as second:
            return self._state.fail_log(f"undoing a failed append ({error}) to", second)
        return failure

    def _note_producer(
        self,
        records: WritableBuffer,
        header: BatchHeader,
        first_offset: int,
        timestamp_ms: int,
        now_ms: int,
    ) -> None:
        state = self._state
        whole = bytes(records) if header.is_control else b""
        entry = state.producers.note_append(whole, header, first_offset, timestamp_ms, now_ms)
        if entry is None:
            return
        try:
            state.segments.active.txn_index.append(entry)
        except OSError as error:
            # The marker is in the log, its entry in memory. It is written with the next entry or at
            # the roll; after a kill, recovery rebuilds it from the marker.
            if not is_scarcity(error):
                raise state.fail_log("transaction index of", error) from error

    # Rolling and flushing

    def roll(self, now_ms: int) -> None:
        """Close the active segment; see `LogRoller.roll`."""
        self.roller.roll(now_ms)

    def flush(self) -> None:
        """Make everything durable now; see `LogFlusher` for a flush in a thread."""
        self.flusher.flush()

    # Shortening

    def delete_records(self, before_offset: int) -> int:
        """Move the log start to `before_offset`; return the new log start offset.

        Raises OffsetOutOfRangeError above the high watermark. An offset below the start changes
        nothing.
        """
        state = self._state
        if before_offset > state.high_watermark:
            raise OffsetOutOfRangeError(before_offset, state.log_start_offset, state.high_watermark)
        self.retention.raise_log_start(before_offset)
        return state.log_start_offset

    def begin_generation(self) -> None:
        """Invalidate all work that is planned for this log."""
        self._state.begin_generation()

    def lower_recovery_point(self, offset: int) -> None:
        """Let the next start verify all batches from `offset` on.

        Write the checkpoint after it and before `truncate_to`: recovery never ends a log below the
        recovery point that it finds.
        """
        self._state.recovery_point = min(self._state.recovery_point, offset)

    def find_transaction_over(self, offset: int) -> tuple[int, int] | None:
        """Return the oldest transaction that begins below `offset` and does not end below it.

        Return its producer id and first offset. May run in a thread. Raises StorageError, OSError.
        """
        state = self._state
        states = load_states(state.env, state.directory, state.segments.since(0), offset)
        transaction = LogProducers(states).open_transaction()
        return None if transaction is None else transaction[:2]

    def find_batch_over(self, offset: int) -> range | None:
        """Return the offsets of the batch that begins below `offset` and does not end below it.

        May run in a thread. Raises StorageError, OSError.
        """
        segment = self._state.segments.since(offset)[0]
        for position, header, _, _ in segment.readable_batches(0):
            if header.next_offset <= offset:
                continue
            # The header of a damaged batch alone may claim to have the offset.
            if intact_batch(segment.file, position, segment.size_bytes) is not None:
                is_over = header.base_offset < offset
                return range(header.base_offset, header.next_offset) if is_over else None
        return None

    def truncate_to(self, offset: int, *, now_ms: int) -> bool:
        """Truncate the log to end at `offset`; return False if it already ends there or before.

        Below the first segment, all data is deleted and the log restarts at `offset`. Durable on
        return. Raises DamagedSegmentError if damage hides the position, and NoRoomError if file
        descriptors are short; nothing is changed then.
        """
        assert offset >= 0
        state = self._state
        if offset >= state.log_end_offset:
            return False
        if not state.env.has_spare_descriptors(for_new_log=True):
            raise NoRoomError(OSError(errno.EMFILE, "too many open files"), state.directory)
        cut = locate_intact(state.segments[state.segments.index_of(offset)], offset)
        state.begin_generation()
        self.flusher.begin_truncation()
        try:
            truncate_segments(state, self._deletions, offset, cut, now_ms)
        except OSError as error:
            raise state.fail_log("truncation of", error) from error
        self.flusher.end_truncation()
        self.roller.begin_rule()
        self.epochs.truncate_to(offset)
        return True

    # Moving to another log directory (storage/manager/replica_copy.py)

    def replace_replica(self, old: "Log", directory: str) -> None:
        """Become the replica: take over the state of the old one, which has the same records.

        The folder of this copy was renamed to `directory`.
        """
        state, old_state = self._state, old._state
        assert state.log_end_offset == old_state.log_end_offset, (
            state.log_end_offset,
            old_state.log_end_offset,
        )
        state.directory = directory
        self._deletions.relocate(directory)
        for segment in state.segments:
            segment.relocate(directory)
        self.update_config(old_state.config)
        state.producers = old_state.producers
        self.epochs.take_over(old.epochs)
        # The next flush raises both: it begins when the rename of the folder is durable.
        state.high_watermark = old_state.high_watermark
        state.recovery_point = old_state.recovery_point
        state.log_start_offset = old_state.log_start_offset
        # The folder's own name is durable when the caller has synced it.
        self.flusher.note_names()

    # Closing

    def failure(self, error: OSError) -> LogDirectoryError:
        """Return the failure for an OSError in the partition folder."""
        return self.log_directory.failure(self.directory, "access to", error)

    def fail(self, failure: PartitionFolderError) -> None:
        """Reject all operations from now on: the partition folder failed."""
        self._state.fail(failure)

    def mark_deleted(self) -> None:
        """Reject all operations from now on: the folder is being deleted."""
        self._state.is_deleted = True
        self._state.is_closed = True
        # The callback refers to this log: without the cycle, its files are closed when the last
        # reader ends, and not by a collection of cyclic garbage on the event loop.
        self.roller.on_roll = None

    @property
    def is_closed(self) -> bool:
        """Return whether it was closed or deleted, or is being closed."""
        return self._state.is_closed

    def note_durable(self) -> None:
        """Record that everything in its folder is durable, and is what a clean stop leaves there.

        Raises OSError.
        """
        self.flusher.note_durable()
        self._durable = self._present()

    def _present(self) -> tuple[int, bytes]:
        state = self._state
        return state.log_end_offset, folder_stamp(state.env, state.directory)

    def _is_as_noted(self) -> bool:
        """Return whether nothing was changed since `note_durable`. Raises OSError."""
        flusher = self.flusher
        return (
            self._durable is not None
            and flusher.is_flushed
            and not flusher.has_unsynced_removals
            and not self.epochs.is_stale
            and self._present() == self._durable
        )

    def close(self) -> None:
        """Flush everything and close the files, as at a clean stop.

        A log without a change since its folder was durable has nothing to write and to sync.
        """
        state = self._state
        if state.is_closed:
            return
        if state.log_directory.offline_reason is not None:
            state.refuse()
        state.is_closed = True
        try:
            if self._is_as_noted():
                return
            state.segments.active.seal()
            write_snapshot(state.env, state.directory, state.log_end_offset, state.producers.states)
        except OSError as error:
            raise state.fail_log("close of", error) from error
        self.flusher.note_names()
        try:
            self.epochs.write_if_stale()
            self.flusher.flush()
        except NoRoomError as error:
            raise state.fail_log("close of", error) from error
        try:
            write_content_ids(state.env, state.directory, state.segments.closed)
        except OSError as error:
            raise state.fail_log("close of", error) from error
