"""Moves replicas between the data directories of this broker (AlterReplicaLogDirs, KIP-113).

Rules
- One replica moves at a time; the others wait in order. A move is lost with the process, and the
  replica stays where it is.
- Clients are served all the time. The cleaner is paused for the partition, and the files of its
  view do not change while they are copied.
- The copy becomes the replica in one step on the event loop, when at most SWITCH_BYTES are missing.
- During the switch no fsync of the partition runs: with `varve.flush.on.ack`, a record is
  acknowledged only if it survives in the new folder.
- A failure of the target before the switch ends the move; nothing changes for clients. Lack of room
  ends the move and nothing else.
- The metadata of each data directory says that a replica moves: if the target is missing at the
  next start, no other directory may serve an older copy. So a directory that has no room even for
  the metadata refuses the move, before anything is copied.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Final

import structlog

from broker.event_loop.directory_threads import DirectoryThreads
from broker.topics.metadata_writer import MetadataWriter
from broker.topics.partition import Partition
from broker.topics.topics import Topics
from storage.directory.cluster_metadata import ClusterMetadata
from storage.directory.log_directory import LogDirectory
from storage.env import Env
from storage.errors import LogDirectoryError, NoRoomError, OffsetOutOfRangeError, StorageError
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.manager.replica_copy import CopyStoppedError, ReplicaCopy
from storage.model import TopicPartition

logger = structlog.get_logger("broker.moves")

SWITCH_BYTES: Final = 128 << 10  # copied on the event loop: well below a millisecond
READ_BYTES: Final = 4 << 20  # taken from the log at a time
# Rounds of copying what was appended meanwhile. Each takes a fraction of the time of the previous
# one, unless producers are as fast as the disk.
ROUNDS_MAX: Final = 100
STOP_SECONDS: Final = 0.1  # until a move that waits because of its rate sees that it is cancelled
ATTEMPTS_MAX: Final = 3  # at a log whose generation changes meanwhile
WAITING_MAX: Final = 10_000  # moves
RATE_KEY: Final = "replica.alter.log.dirs.io.max.bytes.per.second"


class ReplicaMoves:
    """The moves that run and that wait."""

    def __init__(
        self,
        env: Env,
        manager: LogManager,
        topics: Topics,
        writer: MetadataWriter,
        threads: DirectoryThreads,
        *,
        pause: Callable[[TopicPartition, str], AbstractAsyncContextManager[None]],
        view_files: Callable[[TopicPartition], AbstractAsyncContextManager[object]],
        opened: Callable[[Partition, Log], None],
        write_checkpoints: Callable[[LogDirectory], Awaitable[None]],
        fail_directory: Callable[[LogDirectoryError], None],
    ) -> None:
        """`pause` stops the cleaner of a partition.

        `view_files` excludes changes of the files of a partition's view. `opened` connects the new
        log of a partition with the parts that use it. `write_checkpoints` is
        CheckpointWriter.write.
        """
        self._env = env
        self._threads = threads
        self._write_checkpoints = write_checkpoints
        self._manager = manager
        self._topics = topics
        self._writer = writer
        self._pause = pause
        self._view_files = view_files
        self._opened = opened
        self._fail_directory = fail_directory
        self._turn = asyncio.Semaphore(1)
        # By partition, not by its name: a deleted topic may be created again.
        self._tasks: dict[Partition, asyncio.Task[None]] = {}
        self._targets: dict[Partition, LogDirectory] = {}
        self._unfinished: set[asyncio.Task[None]] = set()  # also those that were cancelled
        self._current: asyncio.Task[None] | None = None  # whose turn it is
        self._copies: dict[Partition, ReplicaCopy] = {}  # of the running moves
        self.finished = 0
        self.failed = 0

    def request(self, partition: Partition, target: LogDirectory) -> bool:
        """Move a replica, instead of a move that was requested before; False if too many wait.

        A move to the directory where it is only ends the earlier move.
        """
        if self._targets.get(partition) is target:
            return True
        self.cancel(partition)
        name = partition.partition
        if self._manager.table.find_directory(name) is target:
            return True
        if len(self._tasks) >= WAITING_MAX:
            return False
        self._targets[partition] = target
        task = asyncio.create_task(self._run(partition, target), name=f"move {name}")
        self._tasks[partition] = task
        self._unfinished.add(task)
        task.add_done_callback(lambda _: self._forget(partition, task))
        return True

    def cancel(self, partition: Partition) -> None:
        """End the move of a partition, unless it is about to be published."""
        task = self._tasks.pop(partition, None)
        self._targets.pop(partition, None)
        copy = self._copies.get(partition)
        if copy is not None:
            copy.stop()  # its task removes the folder
        if task is not None and (copy is None or task is not self._current):
            task.cancel()

    def copies_in(self, directory: str) -> list[ReplicaCopy]:
        """Return the copies in a data directory that are not yet the replicas."""
        return [copy for copy in self._copies.values() if copy.log_directory.path == directory]

    async def stop(self) -> None:
        """End every move."""
        for partition in tuple(self._tasks):
            self.cancel(partition)
        await asyncio.gather(*self._unfinished, return_exceptions=True)

    def _forget(self, partition: Partition, task: asyncio.Task[None]) -> None:
        self._unfinished.discard(task)
        if self._tasks.get(partition) is task:
            del self._tasks[partition]
            self._targets.pop(partition, None)

    async def _run(self, partition: Partition, target: LogDirectory) -> None:
        name = partition.partition
        async with self._turn:
            self._current = asyncio.current_task()
            began = self._env.monotonic()
            logger.info("replica move started", partition=str(name), to=target.path)
            try:
                async with self._pause(name, "its replica is being moved"):
                    await self._attempt(partition, target)
            except (StorageError, OSError) as error:
                self.failed += 1
                reason = str(error)
                logger.warning(
                    "replica move failed", partition=str(name), to=target.path, reason=reason
                )
                if isinstance(error, LogDirectoryError) and error.directory == target.path:
                    self._fail_directory(error)
                return
            self.finished += 1
            seconds = round(self._env.monotonic() - began, 3)
            logger.info(
                "replica moved", partition=str(name), to=target.path, seconds=seconds,
                bytes=partition.log.segments.size_bytes,
            )  # fmt: skip

    async def _attempt(self, partition: Partition, target: LogDirectory) -> None:
        """Move, again if the log changed in a way that made the copy useless."""
        for attempts_left in reversed(range(ATTEMPTS_MAX)):
            self._check_served(partition)
            if not target.is_online:
                raise LogDirectoryError(target.path, target.offline_reason or "")
            with suppress(NoRoomError):  # the active segment is then copied batch by batch
                partition.roll(self._env.wall_ms())
            await self._writer.run(None, self._finish_earlier, partition)
            await self._writer.run(None, self._check_room)
            check = partial(self._manager.check_free, partition.partition, target)
            await self._threads.run(target.path, check)
            self._check_served(partition)
            copy = self._manager.begin_copy(partition.log, target)
            self._copies[partition] = copy
            try:
                await self._copy(partition, copy)
                async with self._view_files(partition.partition):
                    await self._in_thread(copy, copy.copy_view)
                    await self._writer.run(None, self._switch, partition, copy)
            except (CopyStoppedError, OffsetOutOfRangeError):  # retention overtook the copy
                if copy.is_stopped or not attempts_left:
                    raise
            else:
                return
            finally:
                del self._copies[partition]
                if copy.log is None or partition.log is not copy.log:
                    self._manager.discard_copy(copy)

    async def _finish_earlier(self, partition: Partition) -> None:
        """Remove the source folder of an earlier move whose last step failed for lack of room."""
        self._check_served(partition)
        log, (name, index) = partition.log, partition.partition
        source_id, _ = self._writer.metadata.topics[name].moves.get(index, ("", ""))
        for source in self._manager.table.directories:
            if (
                source.is_online
                and source.directory_id == source_id
                and source is not log.log_directory
            ):
                remove = partial(self._manager.remove_old_replica, log, source)
                await self._threads.run(source.path, remove)

    async def _check_room(self) -> None:
        """Save the metadata as it is now: a change that ran before this one may have changed it."""
        await self._save(self._writer.metadata)

    async def _save(self, metadata: ClusterMetadata) -> None:
        """Save the metadata; for lack of room, raise an error that names the remedy."""
        try:
            await self._writer.save(metadata)
        except NoRoomError as error:
            raise StorageError(
                f"{error}. Each data directory has to store that a replica moves. Free some "
                "kilobytes in this one first, for example with DeleteRecords, then move again."
            ) from error

    def _check_served(self, partition: Partition) -> None:
        """Raise CopyStoppedError if the partition was deleted or is offline."""
        if self._topics.partition(partition.partition) is not partition:
            raise CopyStoppedError(f"{partition.partition} is not served any more")

    async def _copy(self, partition: Partition, copy: ReplicaCopy) -> None:
        """Copy the closed segments, then what was appended meanwhile."""
        await self._in_thread(copy, copy.begin)
        steps: list[Callable[[], None]] = [
            *(partial(copy.copy_segment, segment) for segment in copy.segments),
            copy.copy_damaged_bytes,
        ]
        for step in steps:
            began, before = self._env.monotonic(), copy.copied_bytes
            await self._in_thread(copy, step)
            await self._keep_rate(copy, copy.copied_bytes - before, began)
        await self._in_thread(copy, copy.open)
        await self._catch_up(partition, copy)
        await self._in_thread(copy, copy.flush)

    async def _in_thread(self, copy: ReplicaCopy, call: Callable[[], None]) -> None:
        """Run a step of a copy in a thread of its data directory. Raises what it raises."""
        await self._threads.run(copy.log_directory.path, call)

    async def _keep_rate(self, copy: ReplicaCopy, nbytes: int, began: float) -> None:
        """Wait until the bytes are within the rate, or the move is cancelled."""
        rate = int(self._manager.metadata.broker_dynamic.get(RATE_KEY, 0))
        seconds_left = nbytes / rate - (self._env.monotonic() - began) if rate else 0.0
        while seconds_left > 0 and not copy.is_stopped:
            seconds = min(seconds_left, STOP_SECONDS)
            await asyncio.sleep(seconds)
            seconds_left -= seconds

    async def _catch_up(self, partition: Partition, copy: ReplicaCopy, end_offset: int = 0) -> None:
        """Append what is missing until little is left, and nothing below `end_offset`.

        Raises CopyStoppedError.
        """
        source = copy.source
        for _ in range(ROUNDS_MAX):
            self._check_served(partition)
            copy.check()
            if _end_of(copy) >= end_offset and self._missing_bytes(copy) <= SWITCH_BYTES:
                return
            end_of_round = source.log_end_offset
            while _end_of(copy) < end_of_round:
                missing = source.reader.read(_end_of(copy), READ_BYTES, end_offset=end_of_round)
                if not missing.length:
                    gap = f"[{_end_of(copy)}, {end_of_round})"
                    raise CopyStoppedError(f"the log ends with offsets that have no records: {gap}")
                data = await self._threads.run(source.directory, missing.read)
                await self._in_thread(copy, partial(copy.append, data))
                copy.check()
        raise CopyStoppedError("records are produced faster than they can be copied")

    def _missing_bytes(self, copy: ReplicaCopy) -> int:
        source, end = copy.source, _end_of(copy)
        if end == source.log_end_offset:
            return 0
        missing = source.reader.read(end, SWITCH_BYTES + 1, end_offset=source.log_end_offset)
        return missing.length or SWITCH_BYTES + 1

    async def _switch(self, partition: Partition, copy: ReplicaCopy) -> None:
        """Make the copy the replica; no other change of the metadata runs meanwhile."""
        name, index = partition.partition
        self._check_served(partition)
        log_directory = self._manager.table.find_directory(partition.partition)
        assert log_directory is not None
        source_id, target_id = log_directory.directory_id, copy.log_directory.directory_id
        # The placement, too: an earlier move may not have saved it, for lack of room.
        metadata = self._writer.metadata.with_placement(name, index, source_id)
        await self._save(metadata.with_move(name, index, source_id, target_id))
        assert copy.log is not None
        self._manager.table.add_copy(copy.log)
        async with partition.flushing:
            try:
                await self._prepare(partition, copy)
                log = self._publish(copy)
            except BaseException:
                await self._writer.save(self._writer.metadata.without_move(name, index))
                raise
            partition.log = log
            self._opened(partition, log)
            partition.wake()  # waiting fetches look at the new log
            try:
                sync = partial(self._env.sync_dir, copy.log_directory.path)
                await self._in_thread(copy, sync)
            except OSError as error:
                raise LogDirectoryError(copy.log_directory.path, f"sync: {error}") from error
        with suppress(LogDirectoryError):
            await partition.flush()  # raises the high watermark of `varve.flush.on.ack`
        # From here on a failure is repaired by the next start: the metadata has the move.
        metadata = self._writer.metadata.with_placement(name, index, target_id)
        await self._writer.save(metadata)
        await self._write_checkpoints(copy.log_directory)
        remove = partial(self._manager.remove_old_replica, copy.source, log_directory)
        await self._threads.run(log_directory.path, remove)
        await self._writer.save(self._writer.metadata.without_move(name, index))

    async def _prepare(self, partition: Partition, copy: ReplicaCopy) -> None:
        """Return when the copy can become the replica at once. Raises CopyStoppedError."""
        source = copy.source
        for _ in range(ROUNDS_MAX):
            start_offset = source.log_start_offset
            await self._catch_up(partition, copy, source.recovery_point)
            assert copy.log is not None
            copy.log.retention.raise_log_start(start_offset)
            await self._in_thread(copy, copy.flush)
            await self._write_checkpoints(copy.log_directory)
            self._check_served(partition)
            copy.check()
            is_durable = copy.log.recovery_point >= source.recovery_point
            is_near = self._missing_bytes(copy) <= SWITCH_BYTES
            if is_durable and is_near and source.log_start_offset == start_offset:
                return
        raise CopyStoppedError("the log changes faster than it can be copied")

    def _publish(self, copy: ReplicaCopy) -> Log:
        """Copy the last records and make the copy the replica, in one turn of the event loop.

        Raises CopyStoppedError while an append is pending, which would be in the old log only.
        """
        source = copy.source
        for log_directory in (source.log_directory, copy.log_directory):
            if self._threads.is_stalled(log_directory.path):
                raise CopyStoppedError(f"the disk of {log_directory.path} does not answer")
        while _end_of(copy) < source.log_end_offset:
            missing = source.reader.read(
                _end_of(copy), SWITCH_BYTES, end_offset=source.log_end_offset
            )
            copy.append(missing.read())
        log = copy.publish()
        self._manager.table.replace(source, log)
        return log


def _end_of(copy: ReplicaCopy) -> int:
    assert copy.log is not None
    return copy.log.log_end_offset
