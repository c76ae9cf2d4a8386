"""Creates the `Partition` that serves an open log, with its threads and the cleaner's hooks."""

from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from broker.cleaning.descriptors import run_in_thread
from broker.cleaning.key_recorder import KeyRecorder
from broker.counters import BrokerStats
from broker.event_loop.directory_threads import THREADS_MAX, DirectoryThreads
from broker.event_loop.directory_writer import run_on_loop
from broker.event_loop.fair_slots import FairSlots
from broker.topics.partition import Partition
from storage.env import Env
from storage.errors import LogDirectoryError
from storage.log.log import Log


class PartitionOpener:
    """Makes the partition that serves a log."""

    def __init__(
        self,
        env: Env,
        stats: BrokerStats,
        key_recorder: KeyRecorder,
        threads: DirectoryThreads,
        *,
        wake_cleaner: Callable[[], None],
        fail_directory: Callable[[LogDirectoryError], None],
    ) -> None:
        self._env = env
        self._stats = stats
        self._key_recorder = key_recorder
        self._threads = threads
        self._wake_cleaner = wake_cleaner
        self._fail_directory = fail_directory
        # Flushes for clients, by data directory. A client may produce to thousands of partitions;
        # the flushes of others, and the syncs of the broker, wait for no more than a few of them.
        self._flush_slots = defaultdict[str, FairSlots](partial(FairSlots, THREADS_MAX))

    def open(self, log: Log) -> Partition:
        """Return a partition that serves a log."""
        stats = self._stats.topics[log.partition.topic]
        threads = self._threads
        run_change = threads.change if threads.has_writers else None
        partition = Partition(
            log,
            stats,
            self._flush_in_thread,
            self._fail_directory,
            flush_share=self._flush_share,
            run_change=run_change,
            wait_unstalled=threads.wait_unstalled,
        )
        self.connect_to_cleaner(partition, log)
        return partition

    def connect_to_cleaner(self, partition: Partition, log: Log) -> None:
        """Record the keys of a partition's log, and wake the cleaner when a segment is closed."""
        rolled = partial(self._key_recorder.rolled, partition, partial(self._rolled, log))
        log.roller.on_roll = partial(run_on_loop, rolled)
        self._key_recorder.begin(partition)

    def _rolled(self, log: Log) -> None:
        if log.config.compacts:
            self._wake_cleaner()

    def _flush_share(self, log: Log, client: Hashable) -> AbstractAsyncContextManager[None]:
        if client is None:
            return nullcontext()
        return self._flush_slots[log.log_directory.path].slot(client)

    async def _flush_in_thread(self, log: Log) -> None:
        path = log.log_directory.path
        await self._threads.wait_unstalled(path)
        task = log.flusher.begin()
        began = self._env.monotonic()
        await run_in_thread(task.run, log.directory, partial(self._threads.sync, path))
        self._stats.flushes.add(int(1e6 * (self._env.monotonic() - began)))
        await self._threads.wait_unstalled(path)
        log.flusher.done(task)
