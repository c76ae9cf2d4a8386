"""The broker's side of the cleaner: facts for planning, publication of cleaned segments.

Publication checks that the job was planned for this log and that its sources still exist, executes
the swap with a journal in a thread (it syncs), and then replaces the segments in memory. The pool
prevents truncation, deletion and policy changes meanwhile. Retention may run and takes precedence:
only the remaining sources are replaced. If the disk is full, a swap is refused before its journal
is in place, and waits after that.
"""

import asyncio
import os.path
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import structlog

from broker.cleaning.descriptors import run_in_thread
from broker.cleaning.segment_links import SegmentsReplacedError
from broker.event_loop.directory_threads import DirectoryThreads
from broker.topics.partition import Partition
from broker.topics.topics import Topics
from cleaner.host import Foreground, JobInputs, LogFacts, OpenTransaction, PublishOutcome, Undecided
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from config.topics.keys import TopicConfig
from storage.directory.log_directory import LogDirectory
from storage.env import Env
from storage.errors import (
    LogClosedError,
    LogDirectoryError,
    NoRoomError,
    SwapInterruptedError,
    SwapRefusedError,
    is_scarcity,
)
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from storage.segments.content_ids import write_content_ids
from storage.segments.index_load import IndexLoad
from storage.segments.segment import Segment
from storage.swap.swap_journal import SwapPlan, execute_swap, finish_swap, plan_swap

logger = structlog.get_logger("broker.cleaning")

RELEASE_SECONDS: Final = 1.0  # replaced segments keep their pages for this time
SWAP_SECONDS: Final = 60.0  # how long to wait for a running swap
SWAP_STEP_SECONDS: Final = 0.02
CHECKPOINT_SECONDS: Final = 1.0  # after a crash a clean may be repeated, which costs time only


def release_in_background(replaced: list[Segment]) -> None:
    """Release replaced segments in a thread, after the next groups of the job are published.

    Freeing their pages takes 20 ms for 64 MB and delays other disk operations. Kafka keeps deleted
    files for a minute (file.delete.delay.ms).
    """
    loop = asyncio.get_running_loop()
    loop.call_later(RELEASE_SECONDS, loop.run_in_executor, None, replaced.clear)


def _raises_first_base_offset(log: Log, plan: SwapPlan) -> bool:
    """Return whether a log whose start the checkpoint may not have loses its first segment."""
    first = log.segments.first_base_offset
    is_removed = first in plan.source_base_offsets and all(
        output.base_offset != first for output in plan.outputs
    )
    # A start below the first segment is in the checkpoint since an earlier swap.
    return is_removed and log.log_start_offset >= first


class BrokerCleanerHost:
    """The implementation of cleaner.host.CleanerHost with the broker's topics and logs."""

    def __init__(
        self,
        env: Env,
        manager: LogManager,
        topics: Topics,
        threads: DirectoryThreads,
        *,
        fail_directory: Callable[[LogDirectoryError], None],
        clock_trusted: Callable[[], bool],
        foreground: Callable[[], Foreground],
        limit: Callable[[Partition], tuple[int, Undecided]],
        write_checkpoints: Callable[[LogDirectory], Awaitable[None]],
        before_swap: Callable[[Log], None],
    ) -> None:
        """`limit` returns the offset up to which a partition may be cleaned, and the reason.

        `write_checkpoints` is CheckpointWriter.write. `before_swap` is called before segments of a
        log are replaced.
        """
        self._env = env
        self._manager = manager
        self._topics = topics
        self._threads = threads
        self._fail_directory = fail_directory
        self.clock_trusted = clock_trusted
        self._foreground = foreground
        self._limit = limit
        self._write_checkpoints = write_checkpoints
        self._before_swap = before_swap
        # Until the checkpoints of a directory are written, by its path.
        self._checkpoint_timers: dict[str, asyncio.TimerHandle] = {}
        self._flushed_for: dict[TopicPartition, str] = {}  # job id
        self._swaps = Counter[TopicPartition]()  # number of swaps begun
        self._tasks: set[asyncio.Task[None]] = set()

    def facts(self) -> Iterable[LogFacts]:
        """Yield the facts of every served partition.

        A partition whose files cannot be read goes offline, and the others are yielded. Without
        file descriptors, the facts have no segments and say so.
        """
        trusted = self.clock_trusted()
        for partition in self._topics.partitions():
            try:
                facts = self._readable_facts_of(partition, clock_trusted=trusted)
            except NoRoomError as error:
                facts = _unread_facts_of(partition.log, str(error))
            if facts is not None:
                yield facts

    def facts_of(self, partition: TopicPartition) -> LogFacts | None:
        """Return the facts of a partition, None if it is not served."""
        served = self._topics.partition(partition)
        if served is None:
            return None
        return self._readable_facts_of(served, clock_trusted=self.clock_trusted())

    def exists(self, partition: TopicPartition) -> bool:
        """Return whether the metadata names it."""
        entry = self._manager.metadata.topics.get(partition.topic)
        return entry is not None and partition.partition in entry.partitions

    def data_directories(self) -> Iterable[str]:
        """Return the log directories that are online."""
        return [
            directory.path for directory in self._manager.table.directories if directory.is_online
        ]

    def fail_directory(self, directory: str, error: OSError) -> None:
        """Take a log directory offline that has given an error."""
        self._fail_directory(LogDirectoryError(directory, str(error)))

    def _readable_facts_of(self, partition: Partition, *, clock_trusted: bool) -> LogFacts | None:
        """Return the facts; None if the files cannot be read, which takes them offline."""
        try:
            return self._facts_of(partition, clock_trusted=clock_trusted)
        except LogDirectoryError as error:
            self._fail_directory(error)
        except LogClosedError:
            pass  # the topic is being deleted
        return None

    def _facts_of(self, partition: Partition, *, clock_trusted: bool) -> LogFacts:
        log = partition.log
        pending = log.producers.open_transaction()
        # The first of equal bounds: an open transaction above the high watermark bounds nothing.
        undecided_offset, undecided_by = min(
            (log.high_watermark, Undecided.HIGH_WATERMARK),
            (log.last_stable_offset, Undecided.OPEN_TRANSACTION),
            self._limit(partition),
            key=lambda bound: bound[0],
        )
        return LogFacts(
            partition=log.partition,
            directory=log.directory,
            config=log.config,
            segments=log.segment_facts(),
            log_start_offset=log.log_start_offset,
            log_end_offset=log.log_end_offset,
            undecided_offset=undecided_offset,
            undecided_by=undecided_by,
            active_closes_ms=log.roller.due_ms if log.config.compacts else None,
            checkpoint_offset=self._manager.table.cleaner_offsets.get(log.partition),
            generation=log.generation,
            damaged=log.damage.left_by_cleaner,
            clock_trusted=clock_trusted,
            topic_id=log.topic_id,
            data_directory=os.path.dirname(log.directory),
            open_transaction=None if pending is None else OpenTransaction(*pending),
        )

    def hash_key(self) -> bytes:
        """Return the key of the fingerprints by which cleans tell keys apart."""
        return self._manager.metadata.hash_key

    def config_of(self, partition: TopicPartition) -> TopicConfig:
        """Return the present settings of a partition that is served."""
        served = self._topics.partition(partition)
        assert served is not None, partition
        return served.log.config

    async def load_job_inputs(self, partition: TopicPartition) -> bool:
        """See CleanerHost."""
        served = self._topics.partition(partition)
        if served is None:
            return False
        log = served.log
        loads = log.reader.txn_index_loads(log.log_start_offset)
        await self._run_loads(log, loads)
        return bool(loads)

    def job_inputs(self, partition: TopicPartition, first: int, end: int) -> JobInputs:
        """Return hash key, last records of producers, aborted transactions in [first, end)."""
        served = self._topics.partition(partition)
        assert served is not None, partition
        return JobInputs(
            self.hash_key(),
            served.log.producers.packed_last_records(),
            served.log.reader.aborted_transactions(first, end),
        )

    @contextmanager
    def stable_segments(self, partition: TopicPartition) -> Iterator[None]:
        """Raise SegmentsReplacedError at the end of the block if a swap began meanwhile."""
        begun = self._swaps[partition]
        yield
        if self._swaps[partition] != begun:
            raise SegmentsReplacedError(
                f"the cleaner replaced segments of {partition} while they were linked: try again"
            )

    async def wait_for_swap(self, partition: Partition) -> bool:
        """Wait until the partition has no running swap; return False after SWAP_SECONDS.

        Call it before linking segments of the log in a block of `stable_segments`.
        """
        for _ in range(int(SWAP_SECONDS / SWAP_STEP_SECONDS)):
            served = self._topics.partition(partition.partition) is partition
            if not served or not partition.log.swap.is_running:
                return True
            await asyncio.sleep(SWAP_STEP_SECONDS)
        return False

    def foreground(self) -> Foreground:
        """Return the work done for clients so far."""
        return self._foreground()

    def checkpoint(self, partition: TopicPartition, generation: str, offset: int) -> None:
        """Record the first dirty offset, unless the log was replaced."""
        served = self._topics.partition(partition)
        if served is not None and served.log.generation == generation:
            self._manager.table.cleaner_offsets[partition] = offset

    def allow_checkpoints(self, first_dirty_offsets: Mapping[TopicPartition, int | None]) -> None:
        """Let checkpoints name these offsets, and write them shortly afterwards."""
        saved = self._manager.table.saved_cleaner_offsets
        for partition, offset in first_dirty_offsets.items():
            if saved.get(partition) == offset:
                continue
            if offset is None:
                del saved[partition]
                continue
            saved[partition] = offset
            served = self._topics.partition(partition)
            if served is not None:
                self._request_checkpoints(served.log.log_directory)

    def _request_checkpoints(self, log_directory: LogDirectory) -> None:
        """Write checkpoints soon, once for all cleans within a second.

        A directory with a thousand small partitions is not synced a thousand times.
        """
        path = log_directory.path
        if path not in self._checkpoint_timers:
            self._checkpoint_timers[path] = asyncio.get_running_loop().call_later(
                CHECKPOINT_SECONDS, self._begin_checkpoints, log_directory
            )

    def _begin_checkpoints(self, log_directory: LogDirectory) -> None:
        del self._checkpoint_timers[log_directory.path]
        self._begin(self._checkpoint(log_directory), "cleaner-checkpoints")

    async def _checkpoint(self, log_directory: LogDirectory) -> None:
        try:
            await self._write_checkpoints(log_directory)
        except NoRoomError as error:  # the broker writes its checkpoints once a minute as well
            logger.warning("checkpoint not written", reason=str(error))
        except LogDirectoryError as error:
            self._fail_directory(error)

    async def stop(self) -> None:
        """Write no more checkpoints; closing the logs writes the last ones."""
        for timer in self._checkpoint_timers.values():
            timer.cancel()
        self._checkpoint_timers.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def publish(
        self, job: CleanJob, groups: tuple[CleanedGroup, ...]
    ) -> tuple[PublishOutcome, ...]:
        """Replace sources, or what retention left of them, with cleaned groups.

        One journal covers all groups; a group without remaining sources is dropped. The basis of
        the job is made durable first. This is the whole log, once per job: a marker or a later
        value of a key may be anywhere after the group, and must not be lost in a crash that keeps
        the group. It is also the log start offset, if records below it were removed, so that they
        cannot return without their tombstones.

        A job is not published if it reaches beyond the current limit (a view was switched on or its
        strategy changed since planning), or if it took so long that its tombstones would be removed
        too early. Raises SwapRefusedError, LogDirectoryError.
        """
        sources = tuple(base for group in groups for base in group.source_base_offsets)
        partition = self._topics.partition(job.partition)
        is_first = self._flushed_for.get(job.partition) != job.job_id
        if partition is not None and (is_first or not partition.log.swap.are_flushed(sources)):
            await partition.flush()
            self._flushed_for[job.partition] = job.job_id
        if partition is not None:
            # Before the pin, which needs them.
            await self._run_loads(partition.log, partition.log.swap.index_loads(sources))
        if partition is None or partition.log.generation != job.generation:
            return (PublishOutcome.STALE,) * len(groups)
        if job.is_late(self._env.wall_ms()):
            return (PublishOutcome.LATE,) * len(groups)
        if job.end_offset > self._limit(partition)[0]:
            return (PublishOutcome.NEEDED_BY_VIEW,) * len(groups)
        facts = {segment.base_offset: segment for segment in partition.log.segment_facts()[:-1]}
        present = tuple(base for base in sources if base in facts)
        if not present:
            return (PublishOutcome.SOURCES_GONE,) * len(groups)
        # Only retention removes segments of a busy partition, and only at the front.
        assert present == sources[-len(present) :], (job.partition, present)
        cleaned_groups = [group for group in groups if group.source_base_offsets[-1] in facts]
        self._pin(partition.log, present)
        plan = plan_swap(
            partition.log.directory,
            [facts[base] for base in present],
            [group.output for group in cleaned_groups if group.output is not None],
            front_is_gone=cleaned_groups[0].source_base_offsets[0] not in facts,
        )
        needs_checkpoints = len(present) < len(sources) or (
            is_first and job.log_start_offset > partition.log.segments.first_base_offset
        )
        try:
            await self.swap(partition.log, plan, checkpoints_first=needs_checkpoints)
        except SwapRefusedError:
            self._flushed_for.pop(job.partition, None)
            raise
        gone = (PublishOutcome.SOURCES_GONE,) * (len(groups) - len(cleaned_groups))
        return gone + (PublishOutcome.PUBLISHED,) * len(cleaned_groups)

    def _pin(self, log: Log, base_offsets: Sequence[int]) -> None:
        """Pin segments for a swap. Raises SwapRefusedError without room, LogDirectoryError."""
        try:
            log.swap.pin(base_offsets)
        except OSError as error:
            if is_scarcity(error):
                raise SwapRefusedError(
                    log.directory, f"no room: {error}", lacks_room=True
                ) from error
            failed = log.failure(error)
            self._fail_directory(failed)
            raise failed from error

    async def _run_loads(self, log: Log, loads: Iterable[IndexLoad]) -> None:
        """Load indexes of segments in a thread."""
        for load in loads:
            with suppress(OSError):  # who needs it reads it again and reports it
                await self._threads.run(log.directory, load.run)
                load.finish()

    async def swap(self, log: Log, plan: SwapPlan, *, checkpoints_first: bool = False) -> None:
        """Execute the swap of pinned segments and serve its outputs; durable on return.

        With `checkpoints_first`, the checkpoints of its directory are written before. So they are
        if the log begins with a source that leaves no output: a start takes the base offset of the
        first segment for the log start offset if the checkpoint has no other, and consumers below
        would lose their position.

        Raises SwapRefusedError (the segments are unpinned then), LogDirectoryError.
        """
        sources, folder = plan.source_base_offsets, log.directory
        run = partial(self._threads.run, folder)
        self._swaps[log.partition] += 1
        try:
            if checkpoints_first or _raises_first_base_offset(log, plan):
                await self._write_checkpoints(log.log_directory)
            try:
                await run(partial(execute_swap, self._env, plan))
            except SwapInterruptedError:
                await run_in_thread(partial(finish_swap, self._env, plan), folder, run)
            opened = await run_in_thread(partial(log.swap.open_outputs, plan), folder, run)
            await self._threads.wait_unstalled(log.log_directory.path)
        except SwapRefusedError:
            log.swap.unpin(sources)
            raise  # pinned sources cannot disappear: this is another fault
        except NoRoomError as error:  # of the checkpoint; the swap did not begin
            log.swap.unpin(sources)
            raise SwapRefusedError(log.directory, f"no room: {error}", lacks_room=True) from error
        except LogDirectoryError as error:
            self._fail_directory(error)
            raise
        except OSError as error:
            failed = log.failure(error)
            self._fail_directory(failed)
            raise failed from error
        self._before_swap(log)
        release_in_background(log.swap.attach(plan, opened))

    def finished(
        self, job: CleanJob, report: CleanReport, *, damage: str, engine: str = ""
    ) -> None:
        """Log a finished job with Kafka's figures and ours; an error line for new damage.

        `engine` is set if the job did not run on a worker of the pool.
        """
        fields = job_fields(job, report)
        if engine:
            fields["engine"] = engine
        if damage:
            logger.error("clean finished with damage", **fields, reason=damage)
        else:
            logger.info("clean finished", **fields)
        if report.records_without_key:
            logger.warning(
                "records without key dropped",
                partition=str(job.partition),
                records=report.records_without_key,
            )
        if report.spill_refusal:
            logger.warning(
                "keys not spilled",
                partition=str(job.partition),
                reason=report.spill_refusal,
                next_dirty_offset=report.next_dirty_offset,
            )
        partition = self._topics.partition(job.partition)
        if job.by_index and partition is not None:
            self._begin(self._note_contents(partition.log), "content-ids")
        for path, position, reason in report.damaged:
            if partition is not None and partition.log.generation == job.generation:
                noted = partition.log.damage.mark(path, position, reason)
                if noted is not None and noted.is_served and damage:
                    logger.warning(
                        "uncleanable batch found",
                        partition=str(job.partition),
                        path=path,
                        position=position,
                        first_offset=noted.first_offset,
                        next_offset=noted.next_offset,
                        reason=reason,
                        readable=True,
                    )

    def failed(self, partition: TopicPartition, reason: str, retry_at_ms: int) -> None:
        """Log a failed attempt."""
        logger.error(
            "clean failed", partition=str(partition), reason=reason, retry_at_ms=retry_at_ms
        )

    def repair_transaction_indexes(self, partition: TopicPartition) -> None:
        """Begin to rebuild the transaction indexes that contradict the log."""
        self._begin(self._repair_indexes(partition), "transaction-index")

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _note_contents(self, log: Log) -> None:
        """Write the ids of contents, so that a start after a kill can use the key indexes."""
        try:
            write = partial(write_content_ids, self._env, log.directory, log.segments.closed)
            await self._threads.run(log.directory, write)
        except OSError as error:  # the next start reads the segments instead
            logger.info("content ids not written", partition=str(log.partition), reason=str(error))

    async def _repair_indexes(self, partition: TopicPartition) -> None:
        """Rebuild transaction indexes that contradict the log, before the next attempt."""
        served = self._topics.partition(partition)
        if served is None:
            return
        try:
            rewritten = await self._threads.run(
                served.log.directory, served.log.damage.repair_txn_indexes
            )
        except FileNotFoundError:
            return  # retention removed a segment meanwhile: the next attempt finds out
        except OSError as error:
            self._fail_directory(served.log.failure(error))
            return
        logger.warning("transaction indexes rebuilt", partition=str(partition), paths=rewritten)


def _unread_facts_of(log: Log, reason: str) -> LogFacts:
    """Return the facts of a log whose segments cannot be read now."""
    return LogFacts(
        partition=log.partition,
        directory=log.directory,
        config=log.config,
        segments=(),
        log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset,
        undecided_offset=log.log_start_offset,
        checkpoint_offset=None,
        generation=log.generation,
        offline=reason,
        topic_id=log.topic_id,
        data_directory=os.path.dirname(log.directory),
    )


def job_fields(job: CleanJob, report: CleanReport) -> dict[str, object]:
    """Return the fields of a finished job's log line: those of Kafka's LogCleaner.recordStats.

    Kafka's two rates are one here, for all bytes read.
    """
    seconds = report.map_seconds + report.rewrite_seconds
    return {
        "partition": str(job.partition),
        "job_id": job.job_id,
        "first_dirty_offset": job.first_dirty_offset,
        "next_dirty_offset": report.next_dirty_offset,
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
        "records_before": report.records_before,
        "records_after": report.records_after,
        "seconds": round(seconds, 3),
        "size_reduction_percent": _saved(report.bytes_before, report.bytes_after),
        "fewer_records_percent": _saved(report.records_before, report.records_after),
        "bytes_read": report.bytes_read,
        "bytes_written": report.bytes_written,
        "index_seconds": round(report.map_seconds, 3),
        "read_bytes_per_second": round(report.bytes_read / seconds) if seconds else 0,
        "buffer_utilization_percent": round(100 * report.map_utilization, 1),
        "keys": report.keys_indexed,
        "map_full": report.map_full,
        "spilled_bytes": report.spilled_bytes,
        "passes": report.passes,
        "groups": report.groups,
        "tombstones_kept": report.tombstones_kept,
        "tombstones_removed": report.tombstones_removed,
        "records_aborted": report.records_aborted,
        "markers_removed": report.markers_removed,
        "records_without_key": report.records_without_key,
        "expired_only": job.expired_only,
        "damaged": len(report.damaged),
    }


def _saved(before: int, after: int) -> float:
    return round(100 * (1 - after / before), 1) if before else 0.0
