"""Verify logs, skip damaged ranges and truncate logs on an operator's request.

Rules
- A request verifies a part of bounded size and time. Parts are read one at a time, in a thread, so
  that verification does not take the disk from clients. Clients take turns.
- Damage is recorded in the log as soon as it is found: from then on fetches in it are refused.
- A skip removes one damaged range from its segment (storage/swap/remove_damage.py). It is
  durable when the broker answers, and the broker logs it. It cannot be undone; the bytes are kept
  in a file.
- A truncation removes all records from an offset on and no others. A log ends between two batches,
  so an offset inside a batch is refused, and so is one inside a transaction. It aborts a running
  clean and changes the generation of the log, so that planned work and leases of the log become
  invalid. The recovery point is lowered durably first: after a crash the log ends at the offset, or
  contains records that it had before. No flush raises it meanwhile.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog

from broker.cleaning.cleaner_host import BrokerCleanerHost
from broker.damage.damaged_reads import damage_at, damage_fields
from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.fair_slots import FairSlots
from broker.topics.partition import Partition
from cleaner.job import new_job_id
from config.topics.names import INTERNAL_TOPICS
from storage.directory.log_directory import LogDirectory
from storage.env import Env, remove_if_there
from storage.errors import TruncatedLogError
from storage.format import filenames
from storage.log.log import Log
from storage.manager.partition_table import PartitionTable
from storage.model import TopicPartition
from storage.segments.damage import DamagedSegment
from storage.swap.remove_damage import SkipPlan, write_without_damage
from storage.swap.swap_journal import plan_swap

logger = structlog.get_logger("broker.log_repair")

PART_BYTES: Final = 64 << 20  # of one request to verify: a fraction of a second, from the cache
PART_SECONDS: Final = 5.0
STEP_BYTES: Final = 8 << 20  # of one read in the thread

Pause = Callable[[TopicPartition, str], AbstractAsyncContextManager[None]]


class NotDamagedError(Exception):
    """No damage is known at this offset."""


class SkipRefusedError(Exception):
    """The range cannot be skipped now."""


class TruncationRefusedError(Exception):
    """The log cannot be truncated to this offset."""


@dataclass(slots=True)
class VerifiedOffsets:
    """The result of verifying a part of a log: `first_offset` up to `next_offset`."""

    first_offset: int
    next_offset: int
    end_offset: int
    size_bytes: int = 0
    batches: int = 0
    records: int = 0
    damage: list[DamagedSegment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SkippedRange:
    """A damaged range that was removed from the log; its bytes are in the file `kept_as`."""

    damage: DamagedSegment
    kept_as: str


@dataclass(frozen=True, slots=True)
class Truncation:
    """A truncated log: the offsets `[end_offset, former_end_offset)` are gone."""

    end_offset: int
    former_end_offset: int
    acknowledged: int  # offsets of these that were below the high watermark


class LogRepair:
    """Verifies, repairs and truncates logs."""

    def __init__(
        self,
        env: Env,
        table: PartitionTable,
        cleaning: BrokerCleanerHost,
        threads: DirectoryThreads,
        *,
        pause: Pause,
        write_checkpoints: Callable[[LogDirectory], Awaitable[None]],
        forget_records: Callable[[TopicPartition, int], Awaitable[None]],
        view_horizon: Callable[[TopicPartition], int],
        erasure_end: Callable[[TopicPartition], int],
    ) -> None:
        """`write_checkpoints` is CheckpointWriter.write.

        `forget_records` is CleanerStateStore.forget_records.
        `view_horizon` returns the end of the offsets that a partition's view has; 0 without.
        `erasure_end` returns the end of the offsets that open erasures need; 0 without.
        """
        self._env = env
        self._table = table
        self._cleaning = cleaning
        self._threads = threads
        self._pause = pause
        self._write_checkpoints = write_checkpoints
        self._forget_records = forget_records
        self._view_horizon = view_horizon
        self._erasure_end = erasure_end
        self._reading = FairSlots(1)

    async def verify(
        self,
        partition: Partition,
        offset: int | None,
        end_offset: int | None,
        client: Hashable = None,
    ) -> VerifiedOffsets:
        """Verify a part of a log from `offset` on, by default from its start; see VerifiedOffsets.

        Raises StorageError, OSError.
        """
        log = partition.log
        start = max(log.log_start_offset, offset or 0)
        end = log.log_end_offset if end_offset is None else end_offset
        end = min(end, log.log_end_offset)
        verified_offsets = VerifiedOffsets(start, start, end)
        async with self._reading.slot(client):
            deadline = self._env.monotonic() + PART_SECONDS
            is_border = False
            while (
                verified_offsets.next_offset < end
                and verified_offsets.size_bytes < PART_BYTES
                and self._env.monotonic() < deadline
            ):
                is_border = await self._step(log, verified_offsets, is_border=is_border)
        return verified_offsets

    async def _step(self, log: Log, verified_offsets: VerifiedOffsets, *, is_border: bool) -> bool:
        """Pass over a known damaged range, or verify some bytes.

        Return whether a batch ends at the next offset.
        """
        step = log.damage.verify_step(verified_offsets.next_offset, is_border=is_border)
        if step.damage is not None:
            verified_offsets.damage.append(step.damage)
            verified_offsets.next_offset = max(
                verified_offsets.next_offset + 1, step.damage.next_offset
            )
            return False
        part = await self._threads.run(log.directory, partial(step.run, STEP_BYTES))
        verified_offsets.size_bytes += part.end_position - part.position
        verified_offsets.batches += part.batches
        verified_offsets.records += part.records
        next_offset = part.next_offset
        if part.damage:
            damage = log.damage.note_finding(step.segment, part.end_position, part.damage)
            if damage is not None:
                logger.error("damage found", partition=str(log.partition), **damage_fields(damage))
        elif part.end_position >= step.segment.size_bytes:
            next_offset = step.offsets.stop
        # If nothing was read, the segment has been replaced; the next step reads the new one.
        verified_offsets.next_offset = max(verified_offsets.next_offset, next_offset)
        return True

    async def skip(self, partition: Partition, offset: int) -> SkippedRange:
        """Remove the damaged range that contains `offset` from the log; durable when this returns.

        Raises NotDamagedError, SkipRefusedError, StorageError.
        """
        log = partition.log
        async with self._pause(partition.partition, "an operator skips damage"):
            damage = damage_at(log, offset)
            if damage is None:
                raise NotDamagedError(
                    f"no damage is known at offset {offset} of {partition.partition}. "
                    "Run `varve log verify` to look for it."
                )
            if log.damage.examine(damage) != damage:
                raise SkipRefusedError(
                    f"the damage at offset {offset} has changed since it was found. Run "
                    "`varve log verify` again before you skip it."
                )
            if log.swap.is_running:
                raise SkipRefusedError(f"{partition.partition} is being cleaned. Try again.")
            if damage.base_offset == log.segment_facts()[-1].base_offset:
                partition.roll(self._env.wall_ms())
            task = log.flusher.begin()
            await self._threads.sync(log.log_directory.path, task.run)
            log.flusher.done(task)
            skipped = await self._cut(partition, damage)
        logger.warning(
            "damage skipped by an operator",
            partition=str(partition.partition),
            **damage_fields(damage),
            kept_as=skipped.kept_as,
        )
        return skipped

    async def truncate(self, partition: Partition, offset: int, *, force: bool) -> Truncation:
        """Remove all records from `offset` on; durable when this returns.

        Below the high watermark this needs `force`, because it removes acknowledged records. Raises
        TruncationRefusedError, StorageError, OSError.
        """
        reason = "an operator truncates the log"
        async with self._pause(partition.partition, reason), partition.flushing:
            log = partition.log
            self._check_truncation(partition, offset, force=True)
            await self._check_batch(log, offset)
            await self._check_transactions(log, offset)
            self._check_truncation(partition, offset, force=force)  # nothing else is in the way
            log.lower_recovery_point(offset)
            cleaned = self._table.cleaner_offsets.get(partition.partition, 0)
            if cleaned > offset:
                self._table.cleaner_offsets[partition.partition] = offset
            await self._write_checkpoints(log.log_directory)
            await self._forget_records(partition.partition, offset)
            # Records may have been appended meanwhile. From here on there is no await.
            truncation = self._check_truncation(partition, offset, force=force)
            truncate = partial(log.truncate_to, offset, now_ms=self._env.wall_ms())
            await partition.wait_change(partial(partition.change, truncate))
            partition.fail_waiters(TruncatedLogError(partition.partition, offset))
        logger.warning(
            "log truncated by an operator",
            partition=str(partition.partition),
            end_offset=truncation.end_offset,
            former_end_offset=truncation.former_end_offset,
            acknowledged=truncation.acknowledged,
        )
        return truncation

    def _check_truncation(self, partition: Partition, offset: int, *, force: bool) -> Truncation:
        log, name = partition.log, partition.partition
        if name.topic in INTERNAL_TOPICS:
            raise TruncationRefusedError(f"{name} is internal: the broker keeps its state in it")
        if log.swap.is_running:
            raise TruncationRefusedError(f"the log of {name} is being repaired. Try again.")
        if offset >= log.log_end_offset:
            raise TruncationRefusedError(
                f"the log of {name} ends at offset {log.log_end_offset}: there is nothing to remove"
            )
        if offset < log.log_start_offset:
            raise TruncationRefusedError(
                f"the log of {name} starts at offset {log.log_start_offset}. Truncate it to that "
                "offset to remove all records."
            )
        horizon = self._view_horizon(name)
        if horizon > offset:
            raise TruncationRefusedError(
                f"the compacted view of {name} contains records below offset {horizon} and would "
                "keep removed ones. Set varve.view to none, truncate, then set it to compacted."
            )
        erasure_end = self._erasure_end(name)
        if erasure_end > offset:
            raise TruncationRefusedError(
                f"an erasure of a key in {name} is open, and needs its tombstone below offset "
                f"{erasure_end}. `varve erase {name.topic} --status` names it: wait until it is "
                "complete, or cancel it."
            )
        acknowledged = max(0, log.high_watermark - offset)
        if acknowledged and not force:
            older_values = ""
            if log.config.compacts:
                older_values = (
                    " Cleans may have removed older records of their keys: such a key is then "
                    "gone, or has an older value again, even if it was deleted."
                )
            raise TruncationRefusedError(
                f"this removes offsets {offset} to {log.log_end_offset - 1} of {name}, of which "
                f"{acknowledged} are acknowledged to producers.{older_values} Nothing was changed. "
                "To remove them, use `--force` (in the HTTP API: `force`)."
            )
        return Truncation(offset, log.log_end_offset, acknowledged)

    async def _check_batch(self, log: Log, offset: int) -> None:
        """Raise TruncationRefusedError if the truncation would remove records below the offset."""
        batch = await self._threads.run(log.directory, partial(log.find_batch_over, offset))
        if batch is None:
            return
        first_offset = max(batch.start, log.log_start_offset)
        if first_offset < offset:
            raise TruncationRefusedError(
                f"offset {offset} of {log.partition} is inside a batch of offsets {batch.start} to "
                f"{batch.stop - 1}, and a log ends between two batches. Truncate to offset "
                f"{first_offset}, which also removes offsets {first_offset} to {offset - 1}, or to "
                f"offset {batch.stop}, which keeps the batch."
            )

    async def _check_transactions(self, log: Log, offset: int) -> None:
        """Raise TruncationRefusedError if the truncation would remove a part of a transaction.

        If its records stayed without its marker, the next marker of the producer would decide them.
        """
        find = partial(log.find_transaction_over, offset)
        transaction = await self._threads.run(log.directory, find)
        if transaction is not None:
            producer_id, first_offset = transaction
            raise TruncationRefusedError(
                f"a transaction of producer {producer_id} begins at offset {first_offset} of "
                f"{log.partition} and does not end below offset {offset}. Truncate to offset "
                f"{first_offset}, which removes it whole, or to an offset after its end."
            )

    async def _cut(self, partition: Partition, damage: DamagedSegment) -> SkippedRange:
        log = partition.log
        facts = next(
            (
                facts
                for facts in log.segment_facts()[:-1]
                if facts.base_offset == damage.base_offset
            ),
            None,
        )
        if facts is None:
            raise NotDamagedError(
                f"the damaged segment {damage.path} does not exist any more: retention deleted it"
            )
        others = [
            damaged_segment
            for damaged_segment in log.damage.ranges
            if damaged_segment.base_offset == damage.base_offset
            and not damage.holds(damaged_segment.position)
        ]
        plan = SkipPlan(
            directory=log.directory,
            base_offset=damage.base_offset,
            size_bytes=facts.size_bytes,
            damage=damage,
            job_id=f"skip-{new_job_id(self._env)}",
            other_files=tuple(n for n in facts.files if n.endswith(filenames.TXN_INDEX)),
        )
        async with self._pinned(log, damage.base_offset):
            try:
                write = partial(write_without_damage, self._env, plan)
                output = await self._threads.run(log.directory, write)
            except OSError as error:
                kinds = filenames.SEGMENT_KINDS
                copies = [filenames.cleaned_name(plan.base_offset, k, plan.job_id) for k in kinds]
                for name in (*copies, plan.kept_as):
                    remove_if_there(self._env, f"{plan.directory}/{name}")
                raise SkipRefusedError(f"the segment cannot be copied: {error}") from error
            swap = plan_swap(log.directory, [facts], [] if output is None else [output])
            await self._cleaning.swap(log, swap)
        log.begin_generation()
        self._restore_damage(log, damage, others)
        partition.wake()
        return SkippedRange(damage, f"{log.directory}/{plan.kept_as}")

    @asynccontextmanager
    async def _pinned(self, log: Log, base_offset: int) -> AsyncIterator[None]:
        """Keep retention from deleting a segment until it has been replaced."""
        log.swap.pin([base_offset])
        try:
            yield
        finally:
            if log.swap.is_running:
                log.swap.unpin([base_offset])

    def _restore_damage(self, log: Log, cut: DamagedSegment, others: list[DamagedSegment]) -> None:
        """Record the other damaged ranges of the segment at their new positions."""
        cut_bytes = cut.end_position - cut.position
        for damage in others:
            position = damage.position - (cut_bytes if damage.position > cut.position else 0)
            log.damage.mark(damage.path, position, damage.reason)
