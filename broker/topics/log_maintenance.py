"""Periodic maintenance of logs: retention, rolls, flushes, checkpoints, expiry of producers.

Rules
- Each task is a loop with its own period, so a slow or failing task never stops another, and none
  waits for a clean.
- Work on files is a loop for each data directory, so a disk that hangs stops the tasks of its own
  partitions only.
- If a task fails for a partition, it logs the error and goes on with the others.
- After a jump of the wall clock (clock_watch.py), or a start more than ten minutes after the time
  that the last run noted, retention is suspended until the clock has been steady for ten minutes.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from broker.counters import BrokerStats
from broker.event_loop.directory_threads import HANG_SECONDS, DirectoryThreads
from broker.event_loop.gc_pauses import FullCollections
from broker.event_loop.loop_turns import Turns, yield_to_loop
from broker.logging import RateLimitedLogger
from broker.max_min_share import max_min_share
from broker.topics.checkpoint_writer import CheckpointWriter
from broker.topics.clock_watch import CONFIRM_MS, ClockWatch
from broker.topics.partition import Partition
from storage.directory.log_directory import LogDirectory
from storage.env import Env
from storage.errors import (
    DirectoryStalledError,
    LogClosedError,
    LogDirectoryError,
    NoRoomError,
    StorageError,
)
from storage.format.producer_state import ALL_PRODUCERS_MAX
from storage.log.log_producers import LogProducers
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition

logger = structlog.get_logger("broker.log_maintenance")
limited_logger = RateLimitedLogger(logger)

# The periods of the tasks, which are the maximum delay until an event is noticed.
WATCH_SECONDS = 1.0  # jumped clock, directory that failed or hangs
ROLL_SECONDS = 1.0  # idle segments
FLUSH_SECONDS = 1.0  # flush.ms
PURGE_SECONDS = 1.0  # file.delete.delay.ms
GARBAGE_SECONDS = 0.25  # a look whether a full collection of cyclic garbage is due
DISK_SECONDS = 10.0  # free space in the metrics
LIMIT_PRODUCERS_SECONDS = 5.0  # a client may invent some 10,000 producer ids a second
EXPIRE_PRODUCERS_SECONDS = 600.0  # Kafka's producer.id.expiration.check.interval.ms
# Python's own thresholds of young and middle collections. Full collections run on the timer only:
# Python would run them during a large request, and each thousand of its rows costs 0.2 ms.
COLLECTION_THRESHOLDS = (700, 10, 1 << 30)
# Without disk space for a checkpoint, each segment is removed with a sync on the event loop.
UNNOTED_SEGMENTS_MAX = 16  # of a partition, per round
EXPIRED_PER_TURN = 32  # segments removed in one turn of the loop: three or four renames each, 1 ms
# A clock that was set forward while the broker was down looks like a pause. After a longer one than
# this, retention waits for CONFIRM_MS.
PLAUSIBLE_PAUSE_MS = 600_000


@dataclass(slots=True)
class LogMaintenanceStats:
    """Counts since the start."""

    segments_expired: int = 0
    bytes_expired: int = 0
    segments_rolled: int = 0
    flushes: int = 0
    clock_jumps: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class _Expiry:
    """Expired segments of one partition that are still on disk."""

    partition: Partition
    start_offset: int  # the new log start offset; expired segments are below it
    was_damaged: bool


@dataclass(frozen=True, slots=True)
class DiskSize:
    """The size of the file system of a data directory."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Periods:
    """The periods of tasks that have a setting, in seconds."""

    retention: float
    checkpoint: float


class LogMaintenance:
    """Runs the maintenance tasks on their timers."""

    def __init__(
        self,
        env: Env,
        manager: LogManager,
        partitions: Callable[[], Iterable[Partition]],
        checkpoint_writer: CheckpointWriter,
        threads: DirectoryThreads,
        *,
        fail_directory: Callable[[LogDirectoryError], None],
        periods: Periods,
        producer_expiration_ms: int,
        clock: ClockWatch,
        note_time: Callable[[], Awaitable[None]],
        damage_gone: Callable[[TopicPartition], None],
        broker_stats: BrokerStats,
    ) -> None:
        self._env = env
        self._manager = manager
        self._partitions = partitions
        self._checkpoint_writer = checkpoint_writer
        self.threads = threads
        self._hanging: set[str] = set()  # directories, as logged
        self._fail_directory = fail_directory
        self._periods = periods
        self.producer_expiration_ms = producer_expiration_ms  # producer.id.expiration.ms
        self._tasks: list[asyncio.Task[None]] = []
        # Under way, with their data directory; None: of all directories.
        self._rounds: dict[asyncio.Future[None], LogDirectory | None] = {}
        self._note_time = note_time
        self._damage_gone = damage_gone
        self._broker_stats = broker_stats
        self._collections = FullCollections()
        self._thresholds = gc.get_threshold()
        self.clock = clock
        self.stats = LogMaintenanceStats()
        self.disks: dict[str, DiskSize] = {}  # by data directory, as measured last

    def start(self) -> None:
        """Start every timer."""
        gc.set_threshold(*COLLECTION_THRESHOLDS)
        self._broker_stats.gc_pauses.start()
        for name, seconds, work in (
            ("clock", WATCH_SECONDS, self.watch_clock),
            ("directories", WATCH_SECONDS, self.watch_directories),
            ("collect garbage", GARBAGE_SECONDS, self.collect_garbage),
            ("note time", self._periods.checkpoint, self._note_time),
            ("limit producers", LIMIT_PRODUCERS_SECONDS, self.limit_producers),
            ("expire producers", EXPIRE_PRODUCERS_SECONDS, self.expire_producers),
        ):
            self.repeat(name, seconds, work)
        for name, seconds, work_in in (
            ("retention", self._periods.retention, self.expire),
            ("roll", ROLL_SECONDS, self.roll),
            ("flush", FLUSH_SECONDS, self.flush),
            ("purge", PURGE_SECONDS, self.purge),
            ("disks", DISK_SECONDS, self.measure_disks),
            ("checkpoint", self._periods.checkpoint, self.checkpoint),
        ):
            for directory in self._manager.table.directories:
                self.repeat(name, seconds, partial(work_in, directory), directory=directory)

    def repeat(
        self,
        name: str,
        seconds: float,
        work: Callable[[], Awaitable[object]],
        *,
        is_by_age: bool = False,
        directory: LogDirectory | None = None,
    ) -> None:
        """Start one more timer, for `work` of another part of the broker.

        `is_by_age`: it deletes data by its age, so it waits while the clock is not trusted.
        `directory`: the data directory whose files it uses; None: any.
        """
        repeated = self._repeat(name, seconds, work, is_by_age=is_by_age, directory=directory)
        self._tasks.append(asyncio.create_task(repeated, name=name))

    async def stop(self) -> None:
        """Stop the timers and wait for the running rounds.

        A round is never cancelled: its thread would continue to write files while the logs are
        being closed. That of an offline directory may never end, and its logs are not closed.
        """
        gc.set_threshold(*self._thresholds)
        self._broker_stats.gc_pauses.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        rounds = self._rounds.items()
        ending = [each for each, directory in rounds if directory is None or directory.is_online]
        await asyncio.gather(*ending, return_exceptions=True)

    def clock_trusted(self) -> bool:
        """Compare the clocks now, and return whether data may be deleted by its age.

        Read the wall time before: a jump between a comparison and the reading would go unnoticed.
        """
        self._compare_clocks()
        return self.clock.trusted(self._env.monotonic() * 1000)

    def trusted_wall_ms(self) -> int | None:
        """Return the wall time, None while it is not trusted."""
        now_ms = self._env.wall_ms()
        return now_ms if self.clock_trusted() else None

    def check_pause(self, last_wall_ms: int) -> None:
        """Suspend retention for a while unless the wall clock agrees with that of the last run.

        It should be ahead of `last_wall_ms`, the time that the metadata noted last, but not far.
        """
        passed_ms = self._env.wall_ms() - last_wall_ms
        if not 0 <= passed_ms <= PLAUSIBLE_PAUSE_MS:
            self.clock.distrust(self._env.monotonic() * 1000)
            logger.warning(
                "retention suspended",
                reason="wall clock differs from last run",
                passed_ms=passed_ms,
                for_ms=CONFIRM_MS,
            )

    async def watch_clock(self) -> None:
        """Compare wall time with monotonic time."""
        self._compare_clocks()

    def _compare_clocks(self) -> None:
        jump = self.clock.check(self._env.wall_ms(), self._env.monotonic() * 1000)
        if jump:
            self.stats.clock_jumps += 1
            logger.warning(
                "retention suspended", reason="wall clock jumped", jump_ms=jump, for_ms=CONFIRM_MS
            )

    async def watch_directories(self) -> None:
        """Report directories that failed where no caller reported it, as in a thread.

        Log when a directory begins to hang, and when it answers again.
        """
        for directory in self._manager.table.directories:
            path = directory.path
            if directory.offline_reason is not None:
                self._fail_directory(LogDirectoryError(path, directory.offline_reason))
            elif self.threads.hangs(path) and path not in self._hanging:
                self._hanging.add(path)
                logger.error("data directory hangs", directory=path, for_seconds=HANG_SECONDS)
            elif path in self._hanging and not self.threads.hangs(path):
                self._hanging.discard(path)
                logger.info("data directory answers again", directory=path)

    # With `only`, the tasks work on the partitions of one data directory.

    async def expire(self, only: LogDirectory | None = None) -> None:
        """Apply retention by time, size and log start offset.

        The new log start offsets are made durable before segments are removed, with one checkpoint
        for each data directory. Otherwise a power failure could restore a value whose tombstone, in
        a later segment, was removed.
        """
        now_ms = self._env.wall_ms()  # for all partitions: the clock may be set meanwhile
        trusted = self.clock_trusted()
        begun: dict[LogDirectory, dict[Partition, _Expiry]] = {}

        def begin(partition: Partition) -> None:
            log = partition.log
            was_damaged = bool(log.damage.ranges)
            expired = partition.change(partial(log.retention.begin, now_ms, clock_trusted=trusted))
            log_directory = self._manager.table.find_directory(partition.partition)
            if expired and log_directory is not None:
                expiry = _Expiry(partition, log.log_start_offset, was_damaged)
                begun.setdefault(log_directory, {})[partition] = expiry

        await self._for_each("retention", begin, only)
        for log_directory, expiries in begun.items():
            for partition in tuple(expiries):
                # With names: a sync of the folder by `_remove_some` would block the loop.
                if not await self._checkpoint_writer.flush_to(
                    partition, expiries[partition].start_offset, with_names=True
                ):
                    del expiries[partition]  # readers do not see it; the next round removes it
            try:
                await self._checkpoint_writer.write(log_directory)
            except NoRoomError:
                await self._finish_expiries(expiries, are_noted=False)
            except LogDirectoryError as error:
                self._fail_directory(error)
            else:
                await self._finish_expiries(expiries, are_noted=True)

    async def _finish_expiries(
        self, expiries: Mapping[Partition, _Expiry], *, are_noted: bool
    ) -> None:
        """Remove expired segments, some in each turn of the loop.

        `are_noted`: a checkpoint contains the new log start offsets.
        """
        for expiry in expiries.values():
            removed = freed = 0
            may_be_more = True
            while may_be_more:
                segments = size_bytes = 0
                with self._reported("retention", expiry.partition):
                    segments, size_bytes = self._remove_some(expiry, is_noted=are_noted)
                await yield_to_loop()
                removed, freed = removed + segments, freed + size_bytes
                may_be_more = are_noted and segments == EXPIRED_PER_TURN
            if removed:
                self._note_expired(expiry, removed, freed)

    def _remove_some(self, expiry: _Expiry, *, is_noted: bool) -> tuple[int, int]:
        """Remove segments; return their number and bytes."""
        log, now_ms = expiry.partition.log, self._env.wall_ms()
        segments, size_bytes = len(log.segments), log.segments.size_bytes
        retention = log.retention
        if is_noted:
            finish = partial(
                retention.finish, now_ms, expiry.start_offset, segments_max=EXPIRED_PER_TURN
            )
            expiry.partition.change(finish)
        else:
            expire = partial(
                retention.expire, now_ms, clock_trusted=False, segments_max=UNNOTED_SEGMENTS_MAX
            )
            expiry.partition.change(expire)
        return segments - len(log.segments), size_bytes - log.segments.size_bytes

    def _note_expired(self, expiry: _Expiry, removed: int, freed: int) -> None:
        log = expiry.partition.log
        if expiry.was_damaged and not log.damage.ranges:
            self._damage_gone(expiry.partition.partition)
        self.stats.segments_expired += removed
        self.stats.bytes_expired += freed
        logger.info(
            "segments expired",
            partition=str(expiry.partition.partition),
            segments=removed,
            bytes=freed,
            log_start_offset=log.log_start_offset,
        )

    async def roll(self, only: LogDirectory | None = None) -> None:
        """Roll active segments that are old enough, including those without appends."""

        def work(partition: Partition) -> None:
            if partition.log.roller.roll_if_due(self._env.wall_ms(), partition.roll):
                self.stats.segments_rolled += 1

        await self._for_each("roll", work, only)

    async def flush(self, only: LogDirectory | None = None) -> None:
        """Flush the logs that are due (LogFlusher.is_due), in a thread."""
        async for partition in self._partitions_in(only):
            if not partition.log.flusher.is_due(self._env.wall_ms()):
                continue
            self.stats.flushes += 1
            await self._checkpoint_writer.flush_to(partition, partition.log.log_end_offset)

    async def purge(self, only: LogDirectory | None = None) -> None:
        """Remove `.deleted` files whose delay is over, and folders of deleted topics."""
        async for partition in self._partitions_in(only):
            due = partition.log.retention.take_deleted(self._env.wall_ms())
            if due:
                try:
                    await self.threads.run(
                        partition.log.log_directory.path,
                        partial(partition.log.retention.unlink_deleted, due),
                    )
                except LogDirectoryError as error:
                    self._fail_directory(error)
        for directory in self._directories(only):
            purge = partial(self._manager.purge_deleted, self._env.wall_ms(), directory)
            while await self.threads.run(directory.path, purge):
                pass

    async def measure_disks(self, only: LogDirectory | None = None) -> None:
        """Measure size and free space of each data directory's file system."""
        for directory in self._directories(only):
            size = None
            if directory.is_online:
                path = directory.path
                size = await self.threads.run(path, partial(self._disk_size, path))
            self.disks.pop(directory.path, None)
            if size is not None:
                self.disks[directory.path] = size

    def _disk_size(self, path: str) -> DiskSize | None:
        try:
            return DiskSize(self._env.total_bytes(path), self._env.free_bytes(path))
        except OSError as error:  # reads and writes decide whether the directory failed
            logger.debug("disk not measured", directory=path, reason=str(error))
            return None

    async def checkpoint(self, only: LogDirectory | None = None) -> None:
        """Write the checkpoints of all logs."""
        for directory in self._directories(only):
            if directory.is_online:
                await self._checkpoint_writer.write(directory)

    async def collect_garbage(self) -> None:
        """Free cyclic garbage, if possible while no large request has its rows in memory."""
        is_large_request = self._broker_stats.large_requests > 0
        self._collections.collect_if_due(is_large_request=is_large_request)

    async def expire_producers(self) -> None:
        """Forget idempotent producers without an append for producer.id.expiration.ms."""
        now = self._env.wall_ms()
        if self.clock_trusted():
            await self._for_each_producers(
                "expire producers",
                lambda producers: producers.expire(now, self.producer_expiration_ms),
            )

    async def limit_producers(self) -> None:
        """Forget idle producers of the logs with most, while all logs have too many together."""
        counts = [
            partition.log.producers.states.idle_count
            async for partition in self._partitions_in(None)
        ]
        share = max_min_share(counts, ALL_PRODUCERS_MAX)
        if share is not None:
            await self._for_each_producers(
                "limit producers", lambda producers: producers.forget_idle(share)
            )

    async def _for_each_producers(self, task: str, work: Callable[[LogProducers], object]) -> None:
        """Call `work` for the producers of each partition, unless they belong to an append."""

        def change(partition: Partition) -> None:
            if not self.threads.is_stalled(partition.log.log_directory.path):
                work(partition.log.producers)

        await self._for_each(task, change)

    def _directories(self, only: LogDirectory | None) -> Iterable[LogDirectory]:
        return self._manager.table.directories if only is None else (only,)

    async def _partitions_in(self, only: LogDirectory | None) -> AsyncIterator[Partition]:
        """Yield each partition, in turns; with `only`, those of one data directory."""
        async for partition in Turns().over(self._partitions()):
            if only is None or partition.log.log_directory is only:
                yield partition

    async def _for_each(
        self, task: str, work: Callable[[Partition], object], only: LogDirectory | None = None
    ) -> None:
        """Call `work` for each partition, in turns."""
        async for partition in self._partitions_in(only):
            with self._reported(task, partition):
                work(partition)

    @contextmanager
    def _reported(self, task: str, partition: Partition) -> Iterator[None]:
        """Report storage errors of the block instead of raising them."""
        try:
            yield
        except LogDirectoryError as error:
            self._fail_directory(error)
        except (LogClosedError, DirectoryStalledError):
            pass  # the topic is being deleted, or the next round tries again
        except StorageError as error:
            self.stats.errors += 1
            # On a full disk this is a line for each partition and turn.
            limited_logger.error(
                "task failed",
                subject=task,
                task=task,
                partition=str(partition.partition),
                reason=str(error),
            )

    async def _repeat(
        self,
        name: str,
        seconds: float,
        work: Callable[[], Awaitable[object]],
        *,
        is_by_age: bool,
        directory: LogDirectory | None,
    ) -> None:
        while True:
            await asyncio.sleep(seconds)
            work_round = self._round(name, work, is_by_age=is_by_age)
            current = asyncio.ensure_future(self._broker_stats.measured(name, work_round))
            self._rounds[current] = directory
            current.add_done_callback(self._rounds.pop)
            await asyncio.shield(current)

    async def _round(
        self, name: str, work: Callable[[], Awaitable[object]], *, is_by_age: bool
    ) -> None:
        try:
            if not is_by_age or self.clock_trusted():
                await work()  # which reads the wall time first of all
        except LogDirectoryError as error:
            self._fail_directory(error)
        except StorageError as error:
            self.stats.errors += 1
            logger.error("task failed", task=name, reason=str(error))
        except Exception:
            # Supervised: a bug in one round must not silently end all later rounds.
            self.stats.errors += 1
            logger.exception("task failed", task=name)
