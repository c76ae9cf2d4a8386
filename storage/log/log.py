"""The log of one partition: append, read, roll, flush, retention, truncation.

Rules
- All changes happen on the event loop; only `FlushTask.run` and slices run in threads.
- When `append` returns, the batch is in the page cache; when it raises, the log does not have it.
  The high watermark is the log end offset, or with `varve.flush.on.ack` the end of the synced data.
- Log start <= high watermark <= log end; recovery point <= log end. A reader gets nothing at or
  above its end offset.
- An offline directory and a closed log accept no appends.
- The generation changes with everything that invalidates planned work: truncation, a change of the
  cleanup policy, a skip of damage. A new log has a new generation. Retention and cleaning do not
  change it.
- Retention removes segments from the front only. After a crash, no reader sees an older removed
  segment without the newer ones: a deleted value would return without its tombstone.

The caller checks batches before it appends them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from config.topics.keys import TopicConfig
from storage.env import Env, write_file_atomically
from storage.errors import (
    LogClosedError,
    LogDirectoryError,
    NoRoomError,
    OffsetOutOfRangeError,
    PartitionFolderError,
    StorageError,
    is_out_of_descriptors,
    is_scarcity,
)
from storage.format import filenames
from storage.format.batch import (
    LENGTH_END,
    TRANSACTIONAL,
    BatchHeader,
    WritableBuffer,
    stamp,
    stamp_log_append_time,
)
from storage.format.index import INTERVAL_BYTES_MAX, IndexLimits
from storage.log.deletion import ScheduledDeletions
from storage.log.flush import FlushTask, plan_flush
from storage.log.log_view import LogContext, ReadableLog
from storage.log.roll import RollRule, create_next_segment
from storage.model import AppendInfo, TopicPartition
from storage.recovery.load_log import LoadedLog
from storage.segments.damage import DamagedSegment, damage_checksum
from storage.segments.fetch_slice import FetchSlice
from storage.segments.index_load import IndexLoad
from storage.segments.producer_snapshots import (
    load_states,
    remove_snapshots,
    snapshots_in,
    write_snapshot,
)
from storage.segments.retention import ExpiredSegment, plan_expiry
from storage.segments.segment import Segment
from storage.segments.swap import SwapPlan, cleaned_content_id

__all__ = ["DamagedSegment", "FetchSlice", "FlushTask", "Log", "LogContext", "index_limits"]

# Indexes of closed segments that were not used for this time are dropped from memory.
INDEX_IDLE_MS: Final = 30_000
WriteFile = Callable[[Env, str, bytes], None]
LOG_APPEND_TIME_TYPE: Final = "LogAppendTime"


def index_limits(config: TopicConfig) -> IndexLimits:
    """Return the limits of indexes in the topic's config, with the largest interval in use."""
    interval_bytes = min(config.index_interval_bytes, INTERVAL_BYTES_MAX)
    return IndexLimits(interval_bytes, config.segment_index_bytes)


class Log(ReadableLog):
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
        super().__init__(context, partition, topic_id, directory, config, loaded=loaded)
        self._new_generation = context.new_generation
        self.generation = context.new_generation()
        self.is_being_swapped = False  # true from `pin` on
        self.on_roll: Callable[[], None] | None = None  # called after a roll
        self._scheduled_deletions = ScheduledDeletions(self._env, directory)
        self._is_closed = False
        self._folder_failure: PartitionFolderError | None = None
        self._history = 0  # number of truncations; one makes earlier flushes void
        self._names = 1  # number of changes of file names; opening counts as one
        self._names_synced = 0  # changes that are durable
        self._removals = 0  # segment removals by retention; durable after a sync
        self._removals_synced = 0
        self._unsynced = [segment for segment in loaded.segments if segment.needs_sync]
        self._flushed_ms = self._env.wall_ms()
        self._indexes_checked_ms = 0
        # An epoch is recorded at its first append: an epoch without records needs no entry.
        self._epoch_is_entered = False
        self._epochs_are_stale = False  # the file has removed epochs; recovery drops them
        if self._active not in self._unsynced:
            self._unsynced.append(self._active)
        self._roll_rule = self._rule_for(self._active)
        self._stamps_time = False
        self._is_acked_by_flush = False
        self._apply_config(config)
        if config.varve_flush_on_ack and self._has_unsynced():
            self.high_watermark = self.recovery_point

    def _has_unsynced(self) -> bool:
        return any(segment.needs_sync for segment in self._unsynced)

    # Settings

    def update_config(self, config: TopicConfig) -> None:
        """Apply a new config.

        A new generation begins if the log becomes compacted or stops being compacted; other changes
        leave a running clean valid.
        """
        old = self.config
        if (old.compacts, old.policy_known) != (config.compacts, config.policy_known):
            self.generation = self._new_generation()
        if old.varve_decompressed_batch_bytes != config.varve_decompressed_batch_bytes:
            for segment in self._segments:
                segment.uncleanable = ()  # the next clean finds them again
        self._apply_config(config)

    def _apply_config(self, config: TopicConfig) -> None:
        self.config = config
        self._stamps_time = config.message_timestamp_type == LOG_APPEND_TIME_TYPE
        self._is_acked_by_flush = config.varve_flush_on_ack
        limits = index_limits(config)
        for segment in self._segments:
            segment.set_limits(limits)
        begun_ms = self._roll_rule.begun_ms
        self._roll_rule = self._rule_for(self._active)
        self._roll_rule.begun_ms = begun_ms
        if not config.varve_flush_on_ack:
            self._raise_high_watermark(self.log_end_offset)

    def _rule_for(self, segment: Segment) -> RollRule:
        """Return the roll rule of a segment that may have batches."""
        jitter = 0.0
        if self.config.segment_jitter_ms:
            jitter = int.from_bytes(self._env.random_bytes(4), "big") / (1 << 32)
        rule = RollRule(self.config, segment.base_offset, jitter)
        if segment.size_bytes:
            first_ms = segment.first_timestamp_ms
            # The time of its first append is unknown. The segment may be older than its last change
            # and its timestamps show; closing it too early costs one small segment.
            begun_ms = segment.last_modified_ms
            rule.begin(first_ms, min(first_ms, begun_ms) if first_ms >= 0 else begun_ms)
        return rule

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
        the batch has no running sequence, because a coordinator wrote it for the producer.

        Raises OutOfOrderSequenceError, InvalidProducerEpochError, InvalidTransactionStateError,
        NoRoomError or LogDirectoryError (nothing was appended), LogClosedError.
        """
        if self._log_directory.offline_reason is not None or self._is_closed:
            self._refuse()
        has_producer = header.producer_id >= 0
        if has_producer and not header.is_control:
            duplicate = self._producers.check(
                header, verified=in_transaction, by_coordinator=by_coordinator
            )
            if duplicate is not None:
                append_ms = duplicate.timestamp_ms if self._stamps_time else -1
                return AppendInfo(
                    duplicate.first_offset,
                    duplicate.last_offset,
                    append_ms,
                    self.log_start_offset,
                    True,
                )
        if not self._epoch_is_entered:
            try:
                self.enter_epoch()
            except NoRoomError:
                self._epochs.truncate_from_end(self.log_end_offset)  # as on disk
                raise
        first_offset = self.log_end_offset
        timestamp_ms = header.max_timestamp
        append_ms = -1
        stamp(records, 0, first_offset, self.leader_epoch)
        if self._stamps_time:
            stamp_log_append_time(records, 0, now_ms)
            timestamp_ms = append_ms = now_ms
        self._write(records, header, first_offset, timestamp_ms, now_ms)
        return AppendInfo(first_offset, self.log_end_offset - 1, append_ms, self.log_start_offset)

    def append_replica(self, records: WritableBuffer, header: BatchHeader, *, now_ms: int) -> None:
        """Write a batch of another copy of this log as it is: with its offsets, epoch and times.

        Raises NoRoomError or LogDirectoryError; nothing was appended then.
        """
        assert header.base_offset >= self.log_end_offset, (header.base_offset, self.log_end_offset)
        if not self._epoch_is_entered:
            self.enter_epoch()
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
        next_offset = first_offset + header.last_offset_delta + 1
        size_bytes = header.batch_length + LENGTH_END
        segment = self._active
        rule = self._roll_rule
        if segment.is_full or rule.is_due(
            segment.size_bytes + size_bytes, timestamp_ms, now_ms, next_offset
        ):
            self.roll(now_ms)
            segment, rule = self._active, self._roll_rule
        try:
            segment.append(records, size_bytes, next_offset - 1, timestamp_ms)
        except OSError as error:
            raise self._undo_append(segment, error) from error
        segment.last_modified_ms = now_ms
        if not rule.is_begun:
            rule.begin(timestamp_ms, now_ms)
        self.log_end_offset = next_offset
        if header.producer_id >= 0:
            self._note_producer(records, header, first_offset, timestamp_ms, now_ms)
        if not self._is_acked_by_flush:
            self.high_watermark = next_offset
        if header.attributes & TRANSACTIONAL:
            segment.has_transactions = True
            self._producers.settle(self.high_watermark)

    def fail(self, failure: PartitionFolderError) -> None:
        """Reject all operations from now on: the partition folder failed."""
        self._folder_failure = self._folder_failure or failure
        self._is_closed = True

    def _fail_log(self, action: str, error: OSError) -> StorageError:
        """Stop writing after a failure whose extent only recovery can find out.

        Return the error to raise. The partition folder or the whole directory goes offline.
        """
        failure = self._failed(action, error)
        if is_out_of_descriptors(error):
            failure = self._log_directory.failure(self.directory, action, error)
        if isinstance(failure, PartitionFolderError):
            self.fail(failure)
        elif isinstance(failure, LogDirectoryError):
            self._log_directory.fail(failure.reason)
        return failure

    def _refuse(self) -> None:
        if self._folder_failure is not None:
            raise PartitionFolderError(self.directory, self._folder_failure.reason)
        if self._is_closed:
            raise LogClosedError(self.directory)
        raise LogDirectoryError(self._log_directory.path, self._log_directory.offline_reason or "")

    def _undo_append(self, segment: Segment, error: OSError) -> StorageError:
        """Undo a failed append; if that fails as well, the log accepts no more appends.

        If there was no room and the files are unchanged, only this append failed.
        """
        failure = self._failed("append to", error)
        try:
            segment.cut_back(segment.size_bytes)
            if is_scarcity(error) and segment.is_cut():
                return NoRoomError(error, segment.path)
        except OSError as second:
            return self._fail_log(f"undoing a failed append ({error}) to", second)
        return failure

    def _note_producer(
        self,
        records: WritableBuffer,
        header: BatchHeader,
        first_offset: int,
        timestamp_ms: int,
        now_ms: int,
    ) -> None:
        whole = bytes(records) if header.is_control else b""
        entry = self._producers.note_append(whole, header, first_offset, timestamp_ms, now_ms)
        if entry is None:
            return
        try:
            self._active.txn_index.append(entry)
        except OSError as error:
            # The marker is in the log, its entry in memory. It is written with the next entry or at
            # the roll; after a kill, recovery rebuilds it from the marker.
            if not is_scarcity(error):
                raise self._fail_log("transaction index of", error) from error

    def enter_epoch(self, write: WriteFile = write_file_atomically) -> None:
        """Record durably where the current leader epoch begins.

        This happens at creation or opening, so that the first append needs no sync, and after a
        truncation at the next append. With another `write`, the caller makes it durable.
        """
        if self._epochs.assign(self.leader_epoch, self.log_end_offset):
            self._write_epochs(write)
        self._epoch_is_entered = True

    def _write_epochs(self, write: WriteFile = write_file_atomically) -> None:
        path = f"{self.directory}/{filenames.LEADER_EPOCH_CHECKPOINT}"
        try:
            write(self._env, path, self._epochs.encode())
        except NoRoomError:
            raise
        except OSError as error:
            raise self._failed("leader epochs of", error) from error
        self._epochs_are_stale = False

    def _raise_high_watermark(self, offset: int) -> None:
        self.high_watermark = max(self.high_watermark, offset)
        self._producers.settle(self.high_watermark)

    # Rolling

    def roll(self, now_ms: int) -> None:
        """Close the active segment and start a new one at the log end offset.

        An empty active segment stays. Raises NoRoomError if nothing was changed.
        """
        old = self._active
        base_offset = self.log_end_offset
        if base_offset == old.base_offset:
            return
        try:
            new = create_next_segment(
                old, self._env, base_offset, index_limits(self.config), self._producers.states
            )
        except NoRoomError:
            raise
        except OSError as error:
            # A part may be done; only recovery can find out which.
            raise self._fail_log("roll of", error) from error
        new.last_modified_ms = now_ms
        self._names += 1
        self._segments.add(new)
        self._active = new
        self._unsynced.append(new)
        self._roll_rule = self._rule_for(new)
        if self.on_roll is not None:
            self.on_roll()

    def roll_if_due(self, now_ms: int) -> bool:
        """Roll the active segment if it is old enough; called periodically."""
        if self._is_closed or self._log_directory.offline_reason is not None:
            return False
        if now_ms - self._indexes_checked_ms >= INDEX_IDLE_MS:
            self._indexes_checked_ms = now_ms
            for segment in self._segments:
                segment.drop_idle_indexes()
        if not (self.config.compacts or self.config.deletes):
            return False  # nothing needs the segment to be closed
        if not self._roll_rule.is_idle_due(now_ms):
            return False
        self.roll(now_ms)
        return True

    @property
    def active_due_ms(self) -> int | None:
        """Return the wall time of the next `roll_if_due`; None for an empty segment."""
        return self._roll_rule.idle_due_ms

    # Durability

    @property
    def is_flushed(self) -> bool:
        """Return whether all appended data is durable.

        Segments recovered below the recovery point also need a sync.
        """
        return self.recovery_point >= self.log_end_offset and not self._has_unsynced()

    def flush_due(self, now_ms: int) -> bool:
        """Return whether flush.messages, flush.ms or a closed segment need a flush."""
        unflushed = self.log_end_offset - self.recovery_point
        if unflushed <= 0:
            return False
        return (
            unflushed >= self.config.flush_messages
            or now_ms - self._flushed_ms >= self.config.flush_ms
            or len(self._unsynced) > 1
        )

    def flush_begin(self) -> FlushTask:
        """Plan a flush of everything appended so far.

        Run the task in any thread, then pass it to `flush_done`. Raises LogDirectoryError.
        """
        if self._log_directory.offline_reason is not None or self._folder_failure is not None:
            self._refuse()
        files, segments = plan_flush(self._unsynced)
        return FlushTask(
            env=self._env,
            log_directory=self._log_directory,
            directory=self.directory,
            end_offset=self.log_end_offset,
            files=files,
            with_names=self._names != self._names_synced or self.has_unsynced_removals,
            names=self._names,
            removals=self._removals,
            segments=segments,
            history=self._history,
            give_up=self._fail_log,
        )

    def flush_done(self, task: FlushTask) -> None:
        """Advance the recovery point and the high watermark after a successful flush."""
        self._flushed_ms = self._env.wall_ms()
        if task.history != self._history:
            return  # the log was truncated meanwhile
        self._names_synced = max(self._names_synced, task.names)
        self._removals_synced = max(self._removals_synced, task.removals)
        for flushed in task.segments:
            flushed.segment.note_synced(flushed.size_bytes, was_sealed=flushed.was_sealed)
        self._unsynced = [
            segment for segment in self._unsynced if segment is self._active or segment.needs_sync
        ]
        self.recovery_point = max(self.recovery_point, task.end_offset)
        self._raise_high_watermark(task.end_offset)

    def flush(self) -> None:
        """Flush everything now."""
        task = self.flush_begin()
        task.run()
        self.flush_done(task)

    def expire_producers(self, now_ms: int, expiration_ms: int) -> int:
        """Drop producers that were idle for this time; return how many."""
        return self._producers.expire(now_ms, expiration_ms)

    # Shortening

    def delete_records(self, before_offset: int) -> int:
        """Move the log start to `before_offset`; return the new log start offset.

        Raises OffsetOutOfRangeError above the high watermark. An offset below the start changes
        nothing.
        """
        if before_offset > self.high_watermark:
            raise OffsetOutOfRangeError(before_offset, self.log_start_offset, self.high_watermark)
        self._raise_log_start(before_offset)
        return self.log_start_offset

    def _raise_log_start(self, offset: int) -> None:
        if offset > self.log_start_offset:
            self.log_start_offset = offset
            if self._epochs.truncate_from_start(offset):
                self._epochs_are_stale = True

    def begin_expiry(self, now_ms: int, *, clock_trusted: bool = True) -> list[ExpiredSegment]:
        """Plan retention (storage/segments/retention.py) and move the log start behind it.

        Readers no longer see these segments, but their files stay until `finish_expiry`. Segments
        in a swap, and all behind them, wait for the next round.
        """
        if self._is_closed or self._log_directory.offline_reason is not None:
            return []
        expired = list(
            plan_expiry(
                self.segment_facts(),
                self.config,
                log_start_offset=self.log_start_offset,
                high_watermark=self.high_watermark,
                now_ms=now_ms,
                clock_trusted=clock_trusted,
            )
        )
        going = self._segments.since(0)[: len(expired)]
        pinned = next((i for i, segment in enumerate(going) if segment.is_pinned), len(going))
        expired = expired[:pinned]
        if expired and len(expired) == len(self._segments):
            try:
                self.roll(now_ms)
            except NoRoomError:  # the others are removed all the same and make room
                expired.pop()
        if expired:
            self._raise_log_start(expired[-1].facts.next_base_offset)
        return expired

    def finish_expiry(
        self, now_ms: int, noted_start_offset: int, *, segments_max: int | None = None
    ) -> int:
        """Remove at most `segments_max` segments entirely below an offset; return how many.

        The checkpoint of the directory has `noted_start_offset` as log start, durably. So they can
        be removed in one step: a crash may restore any of them, but no reader sees them.
        """
        if self._is_closed or self._log_directory.offline_reason is not None:
            return 0
        going = self._segments_below(min(noted_start_offset, self.log_start_offset))[:segments_max]
        if going:
            self._remove_front(going, now_ms, start_is_noted=True)
        return len(going)

    def expire(
        self, now_ms: int, *, clock_trusted: bool = True, segments_max: int | None = None
    ) -> list[ExpiredSegment]:
        """Run retention without a log start in the checkpoint.

        Each segment is removed durably before the next one, oldest first: otherwise a crash could
        restore a value without its tombstone in a later segment. At most `segments_max` are
        removed; the others are hidden until the next round.
        """
        expired = self.begin_expiry(now_ms, clock_trusted=clock_trusted)
        going = self._segments_below(self.log_start_offset) if expired else []
        for segment in going[:segments_max]:
            self._remove_front([segment], now_ms, start_is_noted=False)
        return expired

    def _segments_below(self, offset: int) -> list[Segment]:
        """Return the closed segments entirely below an offset, up to a pinned one."""
        going: list[Segment] = []
        for segment, end in zip(self._segments, self._segments.bases[1:], strict=False):
            if end > offset or segment.is_pinned:
                break
            going.append(segment)
        return going

    def _remove_front(self, going: Sequence[Segment], now_ms: int, *, start_is_noted: bool) -> None:
        """Rename the files of segments at the front.

        Earlier removals are synced first, unless the log start offset is durable.
        """
        delay_ms = self.config.file_delete_delay_ms
        try:
            # Sync the names: otherwise a crash may leave no active segment.
            removals_count = not start_is_noted and self.has_unsynced_removals
            if self._names != self._names_synced or removals_count:
                self._env.sync_dir(self.directory)
                self._names_synced, self._removals_synced = self._names, self._removals
            self._removals += 1
            self._scheduled_deletions.schedule(
                [segment.base_offset for segment in going], now_ms + delay_ms
            )
        except OSError as error:
            raise self._failed("retention of", error) from error
        self._segments.replace(going, ())
        self._unsynced = [segment for segment in self._unsynced if segment not in going]

    @property
    def has_unsynced_removals(self) -> bool:
        """Return whether a crash could restore segments that retention removed."""
        return self._removals != self._removals_synced

    def purge_deleted(self, now_ms: int) -> int:
        """Unlink the files whose delay is over; return how many."""
        due = self.take_deleted(now_ms)
        self.unlink_deleted(due)
        return len(due)

    def take_deleted(self, now_ms: int) -> list[str]:
        """Remove and return the files whose delay is over, for `unlink_deleted`."""
        return self._scheduled_deletions.take_due(now_ms)

    def unlink_deleted(self, paths: Sequence[str]) -> None:
        """Unlink these files. May run in a thread: a cached file takes 0.3 ms a megabyte."""
        try:
            self._scheduled_deletions.unlink(paths)
        except OSError as error:
            raise self._failed("retention of", error) from error

    def lower_recovery_point(self, offset: int) -> None:
        """Let the next start verify all batches from `offset` on.

        Write the checkpoint after it and before `truncate_to`: recovery never ends a log below the
        recovery point that it finds.
        """
        self.recovery_point = min(self.recovery_point, offset)

    def truncate_to(self, offset: int, *, now_ms: int) -> bool:
        """Truncate the log to end at `offset`; return False if it already ends there or before.

        Below the first segment, all data is deleted and the log restarts at `offset`. Durable on
        return. Raises DamagedSegmentError if damage hides the position; nothing is changed then.
        """
        assert offset >= 0
        if offset >= self.log_end_offset:
            return False
        segments = self._segments.since(0)[: self._segments.index_of(offset) + 1]
        cut = segments[-1].locate(offset)
        self.generation = self._new_generation()
        self._history += 1
        self._names += 1
        try:
            self._truncate_segments(offset, cut, now_ms)
        except OSError as error:
            raise self._fail_log("truncation of", error) from error
        return True

    def _truncate_segments(self, offset: int, cut: int, now_ms: int) -> None:
        limits = index_limits(self.config)
        going = [segment for segment in self._segments if segment.base_offset > offset]
        bases = [segment.base_offset for segment in going]
        remove_snapshots(
            self._env,
            self.directory,
            [item for item in snapshots_in(self._env, self.directory) if item > offset],
        )
        self._scheduled_deletions.schedule(bases, now_ms + self.config.file_delete_delay_ms)
        if len(going) == len(self._segments):
            new = Segment(self._env, self.directory, offset, limits, create=True)
            self._segments.replace(going, [new])
        else:
            self._segments.replace(going, ())
            self._segments.active.cut_back(cut)
            self._segments.active.open_for_append()
            entries = self._segments.active.txn_index.entries
            txn_index_entries = [entry for entry in entries if entry.last_offset < offset]
            if txn_index_entries != entries:
                self._segments.active.write_txn_entries(txn_index_entries)
        self._active = self._segments.active
        self._active.file.sync()
        self._env.sync_dir(self.directory)
        states = load_states(self._env, self.directory, self._segments.since(0), offset)
        self._producers.replace(states)
        self._unsynced = [
            segment for segment in self._segments if segment is self._active or segment.needs_sync
        ]
        self.log_end_offset = offset
        self.high_watermark = min(self.high_watermark, offset)
        self.recovery_point = min(self.recovery_point, offset)
        self.log_start_offset = min(self.log_start_offset, offset)
        self._roll_rule = self._rule_for(self._active)
        if self._epochs.truncate_from_end(offset):
            self._write_epochs()
        self._epoch_is_entered = False

    # Cleaning

    def are_flushed(self, base_offsets: Iterable[int]) -> bool:
        """Return whether these segments are durable; a removed segment does not count."""
        segments = [self._segments.find(base_offset) for base_offset in base_offsets]
        return all(
            segment is None or segment.synced_bytes == segment.size_bytes for segment in segments
        )

    def index_loads(self, base_offsets: Iterable[int]) -> list[IndexLoad]:
        """Return what to load before `pin`, so that it reads no files."""
        segments = [self._segments.find(base_offset) for base_offset in base_offsets]
        return [
            IndexLoad(segment)
            for segment in segments
            if segment is not None and not segment.has_indexes
        ]

    def pin(self, base_offsets: Iterable[int]) -> None:
        """Pin segments whose file names a swap gives to other files; retention skips them.

        They must be flushed, because after a crash the swap compares their sizes. Call
        `replace_segments` or `unpin` afterwards. Raises OSError, and then pins nothing.
        """
        base_offsets = tuple(base_offsets)
        assert not self.is_being_swapped
        assert self.are_flushed(base_offsets)
        self.is_being_swapped = True
        try:
            for base_offset in base_offsets:
                segment = self._segments.find(base_offset)
                assert segment is not None
                assert segment is not self._active
                segment.pin()  # loads its indexes
        except OSError:
            self.unpin(base_offsets)
            raise

    def unpin(self, base_offsets: Iterable[int]) -> None:
        """Undo `pin` after a swap that did not happen."""
        self.is_being_swapped = False
        for base_offset in base_offsets:
            segment = self._segments.find(base_offset)
            if segment is not None:
                segment.unpin()

    def open_outputs(self, plan: SwapPlan) -> list[Segment]:
        """Open the published outputs of a swap; may run in a thread.

        Raises NoRoomError without descriptors or space, and can then be called again.
        """
        new: list[Segment] = []
        try:
            for output in plan.outputs:
                segment = Segment(
                    self._env,
                    self.directory,
                    output.base_offset,
                    index_limits(self.config),
                    create=False,
                    content_id=cleaned_content_id(plan.job_id, output.base_offset),
                )
                segment.load_or_rebuild()
                new.append(segment)
        except OSError as error:
            if is_scarcity(error):
                raise NoRoomError(error, self.directory) from error
            raise self._fail_log("swap in", error) from error
        return new

    def replace_segments(
        self, plan: SwapPlan, opened: Sequence[Segment] | None = None
    ) -> list[Segment]:
        """Replace segments with the outputs of an executed swap; return the old segments.

        `opened`: the outputs, if `open_outputs` opened them before.

        Slices of the old segments stay readable, because their files are open. Drop the last
        reference in a thread: freeing their pages takes 20 ms for 64 MB.
        """
        segments = [self._segments.find(base) for base in plan.source_base_offsets]
        gone = [segment for segment in segments if segment is not None]
        segments.clear()
        new = self.open_outputs(plan) if opened is None else opened
        self._segments.replace(gone, new)
        self.is_being_swapped = False
        self._unsynced = [segment for segment in self._unsynced if segment not in gone]
        self._unsynced[:0] = [segment for segment in new if segment.needs_sync]
        return gone

    def mark_damaged(self, path: str, position: int, reason: str) -> DamagedSegment | None:
        """Record bytes that the cleaner could not use; None if the file is not part of the log.

        Intact batches stay readable, see `Segment.note_finding`.
        """
        for segment in self._segments:
            if segment.path == path and position < segment.size_bytes:
                return self.note_finding(segment, position, reason)
        return None

    def note_finding(self, segment: Segment, position: int, reason: str) -> DamagedSegment | None:
        """Like `mark_damaged`; None if the segment was removed or replaced meanwhile."""
        if self._segments.find(segment.base_offset) is not segment:
            return None
        return segment.note_finding(position, reason, self._end_of(segment))

    def examine(self, damage: DamagedSegment) -> DamagedSegment | None:
        """Check known damage again; return its current range, None if there is none.

        Raises OSError.
        """
        segment = self._segments.find(damage.base_offset)
        if segment is None or segment.path != damage.path or damage not in self.damaged:
            return None
        damaged_segment = segment.note_finding(
            damage.position, damage.reason, self._end_of(segment)
        )
        if damaged_segment.is_served:
            segment.damages = tuple(
                damaged_segment
                for damaged_segment in segment.damages
                if damaged_segment.position != damage.position
            )
            return None
        return next(
            (damage for damage in self.damaged if damage.position == damaged_segment.position), None
        )

    def checksum_of(self, damage: DamagedSegment) -> int | None:
        """Return a checksum of the damaged bytes; None if the segment was removed or replaced.

        Raises OSError.
        """
        segment = self._segments.find(damage.base_offset)
        if segment is None or segment.path != damage.path:
            return None
        return damage_checksum(segment.file, range(damage.position, damage.end_position))

    def restore_damage(
        self, *, base_offset: int, positions: range, offsets: range, checksum: int, reason: str
    ) -> None:
        """Add a range that was known before a restart, if the log has the same bytes there.

        Ranges that recovery found take precedence. Raises OSError.
        """
        segment = self._segments.find(base_offset)
        if segment is None or positions.stop > segment.size_bytes:
            return
        overlaps = any(
            damage.position < positions.stop and positions.start < damage.end_position
            for damage in segment.damages
        )
        if overlaps or damage_checksum(segment.file, positions) != checksum:
            return
        segment.add_damage(
            DamagedSegment(
                segment.path,
                base_offset,
                positions.start,
                positions.stop,
                reason,
                offsets.start,
                offsets.stop,
            )
        )

    def begin_generation(self) -> None:
        """Invalidate all work that is planned for this log."""
        self.generation = self._new_generation()

    # Moving to another log directory (storage/manager/replica_copy.py)

    @property
    def closed_segments(self) -> tuple[Segment, ...]:
        """Return the segments that change no more, except that retention or a swap removes them."""
        return tuple(self._segments)[:-1]

    @property
    def active_base_offset(self) -> int:
        """Return the base offset of the active segment."""
        return self._active.base_offset

    @property
    def active_content_id(self) -> int:
        """Return the content id of the active segment (SegmentFacts); truncation changes it."""
        return self._active.content_id

    def replace_replica(self, old: "Log", directory: str) -> None:
        """Become the replica: take over the state of the old one, which has the same records.

        The folder of this copy was renamed to `directory`.
        """
        assert self.log_end_offset == old.log_end_offset, (self.log_end_offset, old.log_end_offset)
        self.directory = directory
        self._scheduled_deletions = ScheduledDeletions(self._env, directory)
        for segment in self._segments:
            segment.relocate(directory)
        self.update_config(old.config)
        self._producers, self._epochs = old._producers, old._epochs
        # The next flush raises both: it begins when the rename of the folder is durable.
        self.high_watermark, self.recovery_point = old.high_watermark, old.recovery_point
        self.log_start_offset = old.log_start_offset
        self._names += 1  # the folder's own name is durable when the caller has synced it

    # Closing

    def mark_deleted(self) -> None:
        """Reject all operations from now on: the folder is being deleted."""
        self.is_deleted = True
        self._is_closed = True

    def close(self) -> None:
        """Flush everything and close the files, as at a clean stop."""
        if self._is_closed:
            return
        if self._log_directory.offline_reason is not None:
            self._refuse()
        self._is_closed = True
        try:
            self._active.seal()
            write_snapshot(self._env, self.directory, self.log_end_offset, self._producers.states)
        except OSError as error:
            raise self._fail_log("close of", error) from error
        self._names += 1
        try:
            if self._epochs_are_stale:
                self._write_epochs()
            self.flush()
        except NoRoomError as error:
            raise self._fail_log("close of", error) from error
