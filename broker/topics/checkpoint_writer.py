"""Writes the checkpoints, and makes new log start offsets durable before a caller relies on them.

Rules
- Callers raise the start in memory first. A start is durable when the log is flushed up to it and a
  checkpoint names it: a checkpoint contains no log start offset beyond the flushed records.
- Writes are shared. Callers that arrive while the checkpoints of a directory are being written wait
  for one more write, however many they are.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import structlog

from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.loop_turns import run_in_turns
from broker.topics.partition import Partition
from broker.topics.topics import TopicError
from storage.directory.log_directory import LogDirectory
from storage.errors import (
    LogClosedError,
    LogDirectoryError,
    NoRoomError,
    OfflinePartitionError,
    TruncatedLogError,
)
from storage.log.log import Log
from storage.manager.partition_table import PartitionTable

logger = structlog.get_logger("broker.checkpoint_writer")


class CheckpointWriter:
    """Flushes logs up to their start and writes checkpoints."""

    def __init__(
        self,
        table: PartitionTable,
        threads: DirectoryThreads,
        fail_directory: Callable[[LogDirectoryError], None],
    ) -> None:
        self._table = table
        self._threads = threads
        self._fail_directory = fail_directory
        self._durable: WeakKeyDictionary[Log, int] = WeakKeyDictionary()
        self._writing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by directory
        self._begun: Counter[str] = Counter()  # writes, by directory
        self._written: Counter[str] = Counter()  # the last write that succeeded, by directory

    async def flush_to(
        self, partition: Partition, offset: int, *, with_names: bool = False
    ) -> bool:
        """Flush a log unless it is durable up to `offset`; return whether it is durable then.

        `with_names`: also if the names of its files are not durable.
        """
        log = partition.log
        if log.recovery_point >= offset and not (with_names and log.flusher.has_unsynced_names):
            return True
        try:
            await partition.flush()
        except LogDirectoryError as error:
            self._fail_directory(error)
        except (OfflinePartitionError, TopicError, LogClosedError, TruncatedLogError) as error:
            # The failure was logged before, the topic was deleted, or what is left is durable.
            logger.debug("not flushed", partition=str(partition.partition), reason=str(error))
        return partition.log.recovery_point >= offset

    async def write(self, log_directory: LogDirectory) -> None:
        """Write the checkpoints as they are now, or wait until another caller has written them.

        Raises NoRoomError, LogDirectoryError.
        """
        path = log_directory.path
        number = self._begun[path] + 1  # of the next write
        async with self._writing[path]:
            if self._written[path] >= number:
                return
            self._begun[path] += 1
            number = self._begun[path]
            task = await run_in_turns(self._table.checkpoint_slices(log_directory))
            await self._threads.sync(path, task.run)
            if log_directory.offline_reason is not None:  # then the checkpoint left it out
                raise LogDirectoryError(path, log_directory.offline_reason)
            self._written[path] = number

    async def make_durable(self, partitions: Iterable[Partition]) -> set[Partition]:
        """Make the log starts of partitions durable; return the partitions where that failed.

        A failed directory is reported. A caller may try again later if there is no room.
        """
        failed: set[Partition] = set()
        waiting: dict[LogDirectory, dict[Partition, tuple[Log, int]]] = {}
        for partition in partitions:
            log, start = partition.log, partition.log.log_start_offset
            if self._durable.get(log, -1) >= start:
                continue
            log_directory = self._table.find_directory(partition.partition)
            if log_directory is None or not await self.flush_to(partition, start):
                failed.add(partition)
            else:
                waiting.setdefault(log_directory, {})[partition] = (log, start)
        for log_directory, starts in waiting.items():
            try:
                await self.write(log_directory)
            except (NoRoomError, LogDirectoryError) as error:
                failed.update(starts)
                if isinstance(error, LogDirectoryError):
                    self._fail_directory(error)
                else:
                    logger.warning("checkpoint not written", reason=str(error))
            else:
                self._durable.update(starts.values())
        return failed
