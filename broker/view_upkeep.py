"""What is done for views without being asked: removing what is of no use, finding what is due.

Rules
- A ledger that was replaced is removed when nobody reads it any more; of one view at most
  RETIRED_MAX wait for that, then their readers go over to the present one.
- A topic that lost its view, or was deleted, loses the files; that is seen at the next round, and
  tried again at each one until it is done: the topic is not cleaned before.
- A view of which it is not known what the disk holds is read again at each round.
- A view is due when enough has gathered behind its horizon, well before any of that expires, and
  when its strategy was changed. After a failure it waits.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from broker.partition import Partition
from broker.topics import Topics
from broker.view_making import is_outdated
from broker.view_staging import expires_soon, section_of
from broker.view_status import LastRun
from broker.views import ViewPartition, Views
from storage.env import Env
from storage.errors import InvalidViewError
from storage.model import TopicPartition
from storage.view_ledger import remove_view, sweep

LOOP_SHARE: Final = 32  # partitions per turn of the event loop
RETIRED_MAX: Final = 4  # replaced ledgers of one view that may wait for their readers

log = structlog.get_logger("broker.views")

Compact = Callable[[TopicPartition], Awaitable[None]]


class ViewUpkeep:
    """Looks after all views, round by round."""

    def __init__(
        self,
        env: Env,
        topics: Topics,
        views: Views,
        *,
        one: asyncio.Lock,
        last: dict[TopicPartition, LastRun],
        compact: Compact,
    ) -> None:
        """`one`: held by whoever changes the files of a view. `compact` is asked for due views."""
        self._env = env
        self._topics = topics
        self._views = views
        self._one = one
        self._last = last
        self._compact = compact
        self._known_views: dict[TopicPartition, bool] = {}  # at the last round
        self._not_removed: set[TopicPartition] = set()  # of which that was logged

    async def tidy(self) -> None:
        """One round: remove what is of no use, compact what is due."""
        known: dict[TopicPartition, bool] = self._known_views
        present: set[TopicPartition] = set()
        for index, partition in enumerate(tuple(self._topics.partitions())):
            if index % LOOP_SHARE == LOOP_SHARE - 1:
                await asyncio.sleep(0)
            where = partition.partition
            present.add(where)
            view = self._views.partition(where)
            if view is not None:
                if not view.log.is_known:
                    await self._read_again(view)
                if not known.get(where) or self._has_retired(where):
                    await self._sweep(view)
                if view.log.ledger is not None:
                    view.log.ledger.drop_idle_indexes()
                if self._is_due(view):
                    await self._compact(where)
            elif _is_off(partition):
                if not self._views.is_clear(partition):
                    await self._drop(partition)
            elif not known.get(where, True):
                pass  # it was told at the first round without a view
            elif (topic := self._topics.get(where.topic)) is not None and topic.config.has_view:
                reason = self._views.hindrance(topic)
                log.error("view cannot be offered", partition=str(where), reason=reason)
            known[where] = view is not None
        for where in known.keys() - present:
            del known[where]
            self._last.pop(where, None)
        self._not_removed &= present
        self._views.forget(present)

    def _is_due(self, view: ViewPartition) -> bool:
        wanted = view.log.config.varve_view_min_bytes
        last = self._last.get(view.base.partition)
        if wanted < 0 or view.log.failure is not None:
            return False
        if last is not None and last.failures and self._env.monotonic() < last.retry_at:
            return False
        if is_outdated(view):
            return True
        section = section_of(view, view.log.horizon)
        if not section.segments:
            return False
        return section.size_bytes >= wanted or expires_soon(
            section.segments[0],
            view.base.log.segment_facts(),
            view.log.config,
            self._env.wall_ms(),
        )

    async def _drop(self, partition: Partition) -> None:
        """Remove the files of a view that is switched off."""
        where, directory = partition.partition, partition.log.directory
        async with self._one:
            if self._topics.partition(where) is not partition or not _is_off(partition):
                return  # it changed while a compaction was waited for
            try:
                if await asyncio.to_thread(remove_view, self._env, directory):
                    log.info("view removed", partition=str(where))
            except OSError as error:
                if where not in self._not_removed:
                    log.error("view not removed", partition=str(where), reason=str(error))
                self._not_removed.add(where)
                return  # the next round tries again; until then the topic is not cleaned
            self._not_removed.discard(where)
            self._views.files_removed(partition)
        self._last.pop(where, None)

    async def _read_again(self, view: ViewPartition) -> None:
        async with self._one:
            if not view.log.is_known:
                await self._views.read_again(view)

    def _has_retired(self, where: TopicPartition) -> bool:
        last = self._last.get(where)
        return last is not None and any(ledger() is None for _, ledger in last.retired)

    async def _sweep(self, view: ViewPartition) -> None:
        """Remove folders of runs that nobody reads."""
        where, directory = view.base.partition, view.base.log.directory
        if view.log.failure is not None or not view.log.is_known:
            return  # somebody may want to look at it, or it is read again
        async with self._one:
            last = self._last.setdefault(where, LastRun())
            alive = [(run_id, ledger) for run_id, ledger in last.retired if ledger() is not None]
            for _, ledger in alive[:-RETIRED_MAX]:
                found = ledger()
                if found is not None:
                    found.is_revoked = True
            last.retired = alive[-RETIRED_MAX:]
            keep = [run_id for run_id, _ in last.retired]
            if view.log.ledger is not None:
                keep.append(view.log.ledger.manifest.run_id)
            try:
                gone = await asyncio.to_thread(sweep, self._env, directory, keep)
            except (InvalidViewError, OSError) as error:
                log.warning("old views not removed", partition=str(where), reason=str(error))
            else:
                if gone:
                    log.debug("old views removed", partition=str(where), runs=len(gone))


def _is_off(partition: Partition) -> bool:
    config = partition.log.config
    return config.policy_known and not config.has_view
