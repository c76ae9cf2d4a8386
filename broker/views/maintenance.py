"""Background maintenance of compacted views: delete obsolete files and compact views that are due.

Rules
- A replaced ledger is removed when nothing reads it any more. At most RETIRED_MAX ledgers of one
  view wait for that; then their readers move to the current one. An erasure does not wait for
  readers: it moves them at once (scheduler.py:move_readers).
- If a topic loses its view or is deleted, the next round removes the files, and repeats until they
  are gone. The topic is not cleaned before that.
- If the version of a view on disk is unknown, each round reads it again.
- The manifest of a view is written again if it or its copy is missing, or if the topic becomes
  compacted: the manifest says so before the topic is cleaned.
- A view is due when enough data is after its horizon, well before any of it expires, and when its
  strategy changed. After a failure it waits.
- Topics take turns, so that one with many views does not delay those of others. A round begins
  compactions for COMPACT_SECONDS; the next one looks anew what is due.
"""

import asyncio
import itertools
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.loop_turns import Turns
from broker.topics.partition import Partition
from broker.topics.topics import Topics
from broker.views.compaction import is_outdated
from broker.views.file_locks import ViewFileLocks
from broker.views.staging import expires_soon, section_of
from broker.views.status import LastCompaction
from broker.views.view_partition import ViewPartition
from broker.views.views import Views
from storage.env import Env
from storage.errors import InvalidViewError
from storage.model import TopicPartition
from storage.view.ledger import Ledger, remove_view, sweep

LOOP_SHARE: Final = 32  # partitions per turn of the event loop
COMPACT_SECONDS: Final = 5.0  # after that, a round begins no other compaction
RETIRED_MAX: Final = 4  # replaced ledgers of one view that wait for their readers

logger = structlog.get_logger("broker.views")

Compact = Callable[[TopicPartition], Awaitable[None]]
WriteAgain = Callable[[ViewPartition], Awaitable[None]]


class ViewMaintenance:
    """Maintains all views in rounds."""

    def __init__(
        self,
        env: Env,
        topics: Topics,
        views: Views,
        threads: DirectoryThreads,
        *,
        locks: ViewFileLocks,
        last: dict[Partition, LastCompaction],
        compact: Compact,
        write_again: WriteAgain,
    ) -> None:
        """`locks` serialise changes to the files of views. `compact` starts a compaction.

        `write_again` writes the manifest of a view.
        `last` is by partition, not by its name: a deleted topic may be created again.
        """
        self._env = env
        self._topics = topics
        self._views = views
        self._threads = threads
        self._locks = locks
        self._last = last
        self._compact = compact
        self._write_again = write_again
        self._known_views: dict[TopicPartition, bool] = {}  # at the last round
        self._not_removed: set[TopicPartition] = set()  # partitions for which that was logged
        self._not_written: set[TopicPartition] = set()  # likewise, for their manifests
        self._numbers = itertools.count(1)  # of compactions
        self._turns: dict[str, int] = {}  # the number of each topic's last one

    async def tidy(self) -> bool:
        """Remove obsolete files and compact due views; return whether more are due."""
        due: list[TopicPartition] = []
        existing: dict[TopicPartition, bool] = self._known_views
        present: set[TopicPartition] = set()
        for index, partition in enumerate(self._topics.partitions()):
            if index % LOOP_SHARE == LOOP_SHARE - 1:
                await asyncio.sleep(0)
            topic_partition = partition.partition
            present.add(topic_partition)
            view = self._views.partition(topic_partition)
            if view is not None:
                await self._maintain(view, is_new=not existing.get(topic_partition))
                if self._is_due(view):
                    due.append(topic_partition)
            elif _is_off(partition):
                if not self._views.is_clear(partition):
                    await self._drop(partition)
            elif not existing.get(topic_partition, True):
                pass  # it was logged when the view was removed
            elif (reason := self._conflict_of(topic_partition)) is not None:
                logger.error(
                    "view cannot be offered", partition=str(topic_partition), reason=reason
                )
            existing[topic_partition] = view is not None
        for topic_partition in existing.keys() - present:
            del existing[topic_partition]
        turns = Turns()
        unserved = [
            partition
            async for partition in turns.over(tuple(self._last))
            if self._topics.partition(partition.partition) is not partition
        ]
        while unserved:  # a log closes its files with its last reference
            self._last.pop(unserved.pop(), None)
            await turns.take()
        self._not_removed &= present
        self._not_written &= present
        await self._views.forget(present)
        return await self._compact_due(due)

    async def _maintain(self, view: ViewPartition, *, is_new: bool) -> None:
        """Bring memory and files of a view up to date, without compacting it."""
        if not view.log.is_known:
            await self._read_again(view)
        if is_new or self._has_retired(view.base):
            await self._sweep(view)
        if view.log.ledger is not None:
            view.log.ledger.drop_idle_indexes()
        if _is_to_be_written(view):
            await self._write_manifest(view)

    async def _compact_due(self, due: list[TopicPartition]) -> bool:
        """Compact views, a topic after the other; return whether there was no time for all."""
        waiting: dict[str, deque[TopicPartition]] = {}
        for partition in sorted(due, key=self._ended_ms):
            waiting.setdefault(partition.topic, deque()).append(partition)
        self._turns = {topic: self._turns.get(topic, 0) for topic in waiting}
        ends_at = self._env.monotonic() + COMPACT_SECONDS
        while waiting and self._env.monotonic() < ends_at:
            topic = min(waiting, key=self._turns.__getitem__)
            self._turns[topic] = next(self._numbers)
            partition = waiting[topic].popleft()
            if not waiting[topic]:
                del waiting[topic]
            view = self._views.partition(partition)
            if view is not None and self._is_due(view):
                await self._compact(partition)
        return bool(waiting)

    def _ended_ms(self, partition: TopicPartition) -> int:
        """Return when the last compaction of a view ended; -1 if there was none."""
        served = self._topics.partition(partition)
        last = None if served is None else self._last.get(served)
        return -1 if last is None else last.ended_ms

    def _conflict_of(self, partition: TopicPartition) -> str | None:
        """Return why a topic with `varve.view` has no view; None if the partition went offline."""
        topic = self._topics.get(partition.topic)
        if topic is None or not topic.config.has_view:
            return None
        return self._views.conflict(topic)

    def _is_due(self, view: ViewPartition) -> bool:
        requested = view.log.config.varve_view_min_bytes
        last = self._last.get(view.base)
        if requested < 0 or view.log.failure is not None:
            return False
        if last is not None and last.failures and self._env.monotonic() < last.retry_at:
            return False
        if is_outdated(view):
            return True
        section = section_of(view, view.log.horizon)
        if not section.segments:
            return False
        return section.size_bytes >= requested or expires_soon(
            section.segments[0],
            view.base.log.segment_facts(),
            view.log.config,
            self._env.wall_ms(),
        )

    async def _drop(self, partition: Partition) -> None:
        """Remove the files of a view that was switched off."""
        topic_partition = partition.partition
        async with self._locks.changing(topic_partition):
            if self._topics.partition(topic_partition) is not partition or not _is_off(partition):
                return  # it changed while this waited for a compaction
            directory = partition.log.directory  # a move may have ended meanwhile
            try:
                remove = partial(remove_view, self._env, directory)
                if await self._threads.run(directory, remove):
                    logger.info("view removed", partition=str(topic_partition))
            except OSError as error:
                if topic_partition not in self._not_removed:
                    logger.error(
                        "view not removed", partition=str(topic_partition), reason=str(error)
                    )
                self._not_removed.add(topic_partition)
                return  # the next round tries again; until then the topic is not cleaned
            self._not_removed.discard(topic_partition)
            self._views.files_removed(partition)
        self._last.pop(partition, None)

    async def _read_again(self, view: ViewPartition) -> None:
        async with self._locks.changing(view.base.partition):
            if not view.log.is_known:
                await self._views.read_again(view)

    async def _write_manifest(self, view: ViewPartition) -> None:
        """Write the manifest again; a topic that became compacted is not cleaned before."""
        partition = view.base.partition
        async with self._locks.changing(partition):
            if self._views.partition(partition) is not view or not _is_to_be_written(view):
                return  # it changed while this waited for a compaction
            is_restored = view.log.ledger is not None and not view.log.ledger.has_manifest
            try:
                await self._write_again(view)
            except OSError as error:  # the next round tries again
                if partition not in self._not_written:
                    logger.error(
                        "view manifest not written", partition=str(partition), reason=str(error)
                    )
                self._not_written.add(partition)
            else:
                self._not_written.discard(partition)
                if is_restored:
                    logger.warning("view manifest restored from its copy", partition=str(partition))

    def _has_retired(self, partition: Partition) -> bool:
        """Return whether a replaced ledger can be removed now."""
        last = self._last.get(partition)
        if last is None:
            return False
        is_unread = not all(_is_read(ledger) for _, ledger in last.retired)
        return is_unread or len(last.retired) > RETIRED_MAX

    async def _sweep(self, view: ViewPartition) -> None:
        """Remove unused folders of compactions."""
        partition, directory = view.base.partition, view.base.log.directory
        if view.log.failure is not None or not view.log.is_known:
            return  # the manifest is unreadable: keep everything
        async with self._locks.changing(partition):
            last = self._last.setdefault(view.base, LastCompaction())
            alive = [
                (compaction_id, ledger)
                for compaction_id, ledger in last.retired
                if _is_read(ledger)
            ]
            for _, ledger in alive[:-RETIRED_MAX]:
                result = ledger()
                if result is not None:
                    result.is_revoked = True
            last.retired = alive[-RETIRED_MAX:]
            keep = [compaction_id for compaction_id, _ in last.retired]
            if view.log.ledger is not None:
                keep.append(view.log.ledger.manifest.compaction_id)
            try:
                sweep_view = partial(sweep, self._env, directory, keep)
                removed = await self._threads.run(directory, sweep_view)
            except (InvalidViewError, OSError) as error:
                logger.warning("old views not removed", partition=str(partition), reason=str(error))
            else:
                if removed:
                    logger.debug(
                        "old views removed", partition=str(partition), compactions=len(removed)
                    )


def _is_read(ledger: weakref.ref[Ledger]) -> bool:
    """Return whether a replaced ledger has readers, which may stay."""
    present = ledger()
    return present is not None and not present.is_revoked


def _is_to_be_written(view: ViewPartition) -> bool:
    """Return whether the manifest or its copy is missing, or does not have the present policy."""
    ledger = view.log.ledger
    if ledger is None or not view.log.is_known:
        return False
    is_outdated_policy = view.log.config.compacts and not ledger.manifest.log_compacted
    return is_outdated_policy or not ledger.has_manifest or not ledger.has_copy


def _is_off(partition: Partition) -> bool:
    config = partition.log.config
    return config.policy_known and not config.has_view
