"""Writes the key indexes of segments whose keys the broker recorded while it appended them.

A selective clean (docs/decisions/0038) needs the keys of every segment. The broker parses each
record of a compacted topic anyway, so it can record their fingerprints, and the cleaner need not
read the segment for them.

Rules
- The broker records keys only of topics with the strategy `generational` that are not offloaded,
  from the first segment on that is empty when the kernels are loaded. A thread loads the kernels
  when the first such topic appears. The record of a segment ends when its records turn out to be
  small (appended_keys.py).
- The memory for keys is shared among the clients that created the partitions (key_memory.py).
- An index is written in a thread when its segment is closed; the cleaner is woken after that. If
  the write fails, a worker has to read the segment; nothing else is lost.
"""

import asyncio
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

import structlog

from broker.event_loop.directory_threads import DirectoryThreads
from broker.topics.partition import Partition
from cleaner.job import CleanJob, SourceSegment, UnlimitedControl, new_job_id
from cleaner.key_memory import KeyMemory
from cleaner.planning.grouping import index_job, source_of
from cleaner.planning.plan import default_strategy, strategy_of
from cleaner.stats import PoolStats
from config.settings import CleanerSettings
from storage.env import Env
from storage.errors import StorageError
from storage.log.log import Log
from storage.model import TopicPartition

if TYPE_CHECKING:  # these import the compiler
    from cleaner.engine.selective.appended_keys import AppendedKeys
    from cleaner.engine.selective.key_index import SegmentKeys

logger = structlog.get_logger("broker.cleaning")


class KeyRecorder:
    """Begins the record of each segment, and writes the index at its end."""

    def __init__(
        self,
        env: Env,
        threads: DirectoryThreads,
        *,
        hash_key: Callable[[], bytes],
        settings: Callable[[], CleanerSettings],
        stats: PoolStats,
        creator: Callable[[TopicPartition], Hashable | None],
    ) -> None:
        """`creator` returns who created a partition; None for a client without a share."""
        self._env = env
        self._threads = threads
        self._stats = stats
        self._hash_key = hash_key
        self._settings = settings
        self._creator = creator
        self._memory = KeyMemory()
        self._loading: asyncio.Task[bool] | None = None
        self._writes: set[asyncio.Task[None]] = set()

    @property
    def memory_bytes(self) -> int:
        """Return the memory that the keys of active segments take."""
        return self._memory.used_bytes

    def begin(self, partition: Partition) -> None:
        """Begin to record the active segment if it is empty and its topic needs it."""
        if partition.keys is not None:
            partition.keys.discard()
        partition.keys = None
        log, settings = partition.log, self._settings()
        strategy = strategy_of(log.config.varve_cleaner_strategy, default_strategy(settings))
        is_cleaned_here = settings.enabled and not log.config.is_offloaded
        if (
            is_cleaned_here
            and log.config.compacts
            and strategy == "generational"
            and self._is_loaded()
            and log.segments.active.base_offset == log.log_end_offset
        ):
            from cleaner.engine.selective.appended_keys import AppendedKeys

            partition.keys = AppendedKeys(
                self._hash_key(),
                log.log_end_offset,
                self._memory,
                log.segments.active.content_id,
                self._creator(log.partition),
            )

    def rolled(self, partition: Partition, wake: Callable[[], None]) -> None:
        """Write the index of the segment that was just closed; then call `wake`."""
        keys, partition.keys = partition.keys, None
        self.begin(partition)
        if keys is None or not keys.is_usable:
            wake()
            return
        task = asyncio.create_task(self._write(partition.log, keys, wake), name="key-index")
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def stop(self) -> None:
        """Wait for the writes."""
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)
        await asyncio.gather(*self._writes, return_exceptions=True)

    def _is_loaded(self) -> bool:
        """Return whether the kernels are loaded; begin to load them if not."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._load(), name="key-kernels")
        loading = self._loading
        return loading.done() and not loading.cancelled() and loading.result()

    async def _load(self) -> bool:
        """Load the kernels in a thread; return False if that fails, so that none is called."""
        try:
            await asyncio.to_thread(_load_kernels)
        except Exception as error:
            logger.exception("key kernels not loaded", reason=repr(error))
            return False
        return True

    async def _write(self, log: Log, keys: "AppendedKeys", wake: Callable[[], None]) -> None:
        try:
            write = prepare_index(self._env, log, keys, self._settings())
            if write is not None:
                self._stats.key_index_bytes += await self._threads.run(log.directory, write)
        except (OSError, StorageError) as error:
            logger.info("key index not written", partition=str(log.partition), reason=str(error))
        finally:
            keys.discard()
            wake()


def prepare_index(
    env: Env, log: Log, keys: "AppendedKeys", settings: CleanerSettings
) -> Callable[[], int] | None:
    """Return what writes the key index of the last closed segment, and returns its bytes.

    None if `keys` are not those of the whole segment, or if retention has removed it meanwhile.
    """
    if not log.segments.closed:
        return None
    segment = log.segments.closed[-1]
    source = source_of(segment.facts(log.segments.active.base_offset))
    segment_keys = keys.finish()
    recorded = (keys.next_offset, keys.listed_bytes, keys.content_id)
    expected = (source.next_base_offset, source.size_bytes, source.content_id)
    if segment_keys is None or recorded != expected:
        return None
    job = index_job(
        log.partition,
        source,
        log.config,
        settings,
        directory=log.directory,
        generation=log.generation,
        hash_key=keys.hash_key,
        job_id=new_job_id(env),
    )
    return partial(_write_index, env, job, segment_keys, source)


def _load_kernels() -> None:
    from cleaner.engine.selective.appended_keys import warm_up

    warm_up()


def _write_index(env: Env, job: CleanJob, keys: "SegmentKeys", source: SourceSegment) -> int:
    from cleaner.engine.selective.key_index import write_appended_index

    control = _Written()
    write_appended_index(env, job, control, keys, source)
    return control.count


class _Written(UnlimitedControl):
    """Counts the bytes written; nothing is throttled."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def write_bytes(self, count: int) -> None:
        """See JobControl."""
        self.count += count
