"""The scheduler of view compactions: on demand and automatic, one at a time, at low priority.

Rules
- Clients take turns, and the requests of one client wait in their order. They report their
  position. A waiting request is not queued twice. A request during a compaction of the same view is
  queued behind it, so that it covers data produced meanwhile.
- compaction.py runs one compaction, maintenance.py finds views that are due.
"""

import asyncio
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import structlog

from broker.counters import BrokerStats
from broker.event_loop.fair_slots import FairSlots
from broker.topics.partition import Partition
from broker.topics.topics import TopicError, Topics
from broker.views.compaction import ANEW, ViewCompactor, ViewError, ViewTools
from broker.views.file_locks import ViewFileLocks
from broker.views.maintenance import ViewMaintenance
from broker.views.staging import section_of
from broker.views.status import NO_PROGRESS, LastCompaction, ViewState, ViewStatus
from broker.views.view_partition import ViewPartition
from broker.views.views import Views, ViewTopic
from cleaner.job import CleanAbortedError
from cleaner.scheduler.clean_attempt import backoff_ms
from cleaner.workers.dedicated_worker import JobFailedError
from config.topics.names import view_name
from storage.env import Env
from storage.errors import StorageError
from storage.model import TopicPartition

ROUND_SECONDS: Final = 5.0  # between two rounds of maintenance
RETRY_MS: Final = 60_000  # after a failure; doubled with each failure, up to an hour
RETRY_MS_MAX: Final = 3_600_000

logger = structlog.get_logger("broker.views")


@dataclass(slots=True)
class _QueuedCompaction:
    """A compaction in the queue."""

    where: TopicPartition
    from_scratch: bool
    client: Hashable
    task: asyncio.Task[None] | None = None
    is_dropped: bool = False


class ViewScheduler:
    """The queue of compactions, and the timer for views that are due."""

    def __init__(
        self, env: Env, topics: Topics, views: Views, tools: ViewTools, stats: BrokerStats
    ) -> None:
        self._stats = stats
        self._env = env
        self._topics = topics
        self._views = views
        self._locks = ViewFileLocks()
        self._last: dict[Partition, LastCompaction] = {}
        self._compactor = ViewCompactor(env, topics, views, tools)
        self._maintenance = ViewMaintenance(
            env,
            topics,
            views,
            tools.threads,
            locks=self._locks,
            last=self._last,
            compact=self._compact_quietly,
            write_again=self._compactor.write_again,
        )
        self._queue: list[_QueuedCompaction] = []
        self._slots = FairSlots(1)  # for compactions, by client
        self._present_client: Hashable = None  # of the running compaction
        self._places: Mapping[TopicPartition, int] | None = None  # None: the queue has changed
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False

    def files_of(self, partition: TopicPartition) -> asyncio.Lock:
        """Return the lock that excludes changes of the files of a partition's view."""
        return self._locks.files_of(partition)

    # Starting and ending ----------------------------------------------------------------

    def start(self) -> None:
        """Start the rounds of maintenance."""
        self._watcher = asyncio.create_task(
            self._stats.measured("views", self._watch()), name="view-watch"
        )

    async def stop(self) -> None:
        """Abort the running compaction and start no other."""
        self._stopping = True
        self._compactor.abort()
        async with self._locks.turn:
            pass  # wait until the running compaction has ended
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            are_more_due = False
            try:
                are_more_due = await self.tidy()
            except Exception:
                logger.exception("view maintenance failed")  # supervised: the next round follows
            await asyncio.sleep(0 if are_more_due else ROUND_SECONDS)

    async def tidy(self) -> bool:
        """Run one round of maintenance; see ViewMaintenance.tidy."""
        return await self._maintenance.tidy()

    # Requests ---------------------------------------------------------------------------

    def partitions(self, topic: str | None = None) -> Iterator[TopicPartition]:
        """Yield the partitions that have a view, or those of one topic, in any order."""
        for view in self._views_of(topic):
            for partition in tuple(view.partitions.values()):
                yield partition.partition

    def status(self, topic: str | None = None) -> list[ViewStatus]:
        """Return every view, or those of one topic, by topic and partition."""
        return sorted(self.each_status(topic), key=lambda row: row.partition)

    def each_status(self, topic: str | None = None) -> Iterator[ViewStatus]:
        """Yield the status of each view in any order; other tasks may run in between."""
        for view in self._views_of(topic):
            for partition in self._views.partitions_of(view):
                yield self._status_of(partition)

    def _views_of(self, topic: str | None) -> Iterable[ViewTopic]:
        if topic is None:
            return self._views
        view = self._views.get(view_name(topic))
        return () if view is None else (view,)

    def status_of(self, partition: TopicPartition) -> ViewStatus:
        """Return the status of one view. Raises ViewError."""
        return self._status_of(self._existing_view(partition))

    def abort(self, partition: TopicPartition) -> bool:
        """Abort the compaction of a view, if one runs or waits."""
        waiting = [
            queued_compaction
            for queued_compaction in self._queue
            if queued_compaction.where == partition
        ]
        for queued in waiting:
            queued.is_dropped = True
            self._remove(queued)
        is_current = self._compactor.partition == partition
        if is_current:
            self._compactor.abort()
        elif waiting and (served := self._topics.partition(partition)) is not None:
            self._last.setdefault(served, LastCompaction()).state = ViewState.ABORTED
        return is_current or bool(waiting)

    def move_readers(self, partition: TopicPartition) -> None:
        """Move the readers of replaced versions of a view; the next round removes these."""
        served = self._topics.partition(partition)
        last = None if served is None else self._last.get(served)
        for _, replaced in () if last is None else last.retired:
            ledger = replaced()
            if ledger is not None:
                ledger.is_revoked = True

    async def compact(
        self, partition: TopicPartition, *, from_scratch: bool = False, client: Hashable = None
    ) -> ViewStatus:
        """Compact one view up to the last stable offset of the log.

        `from_scratch` rebuilds it from the log alone. Raises ViewError.
        """
        view = self._existing_view(partition)
        await asyncio.shield(self._enqueue(partition, client, from_scratch=from_scratch))
        return self._status_of(view)

    def begin(
        self, partition: TopicPartition, *, from_scratch: bool = False, client: Hashable = None
    ) -> None:
        """Like `compact`, without waiting; the status has the result. Raises ViewError."""
        self._existing_view(partition)
        self._enqueue(partition, client, from_scratch=from_scratch)

    def _enqueue(
        self, partition: TopicPartition, client: Hashable, *, from_scratch: bool
    ) -> asyncio.Task[None]:
        """Queue a compaction. It continues even if the caller is cancelled."""
        for queued in self._queue:
            if queued.where == partition:
                queued.from_scratch |= from_scratch
                assert queued.task is not None
                return queued.task
        queued = _QueuedCompaction(partition, from_scratch, client)
        self._queue.append(queued)
        self._places = None
        queued.task = asyncio.create_task(self._stats.measured("views", self._compact_now(queued)))
        queued.task.add_done_callback(_retrieve_exception)  # all its callers may be cancelled
        return queued.task

    async def _compact_now(self, queued: _QueuedCompaction) -> None:
        try:
            async with self._slots.slot(queued.client), self._locks.changing(queued.where):
                if queued.is_dropped:
                    raise _given_up(queued.where)
                self._present_client = queued.client
                self._remove(queued)
                view = self._existing_view(queued.where)
                await self._compact(view, on_demand=True, from_scratch=queued.from_scratch)
        finally:
            if queued in self._queue:
                self._remove(queued)  # cancelled while it waited

    def _remove(self, queued: _QueuedCompaction) -> None:
        self._queue.remove(queued)
        self._places = None

    def _existing_view(self, partition: TopicPartition) -> ViewPartition:
        if self._stopping:
            raise ViewError("the broker is stopping")
        topic = self._topics.get(partition.topic)
        if topic is None:
            raise ViewError(f"there is no topic {partition.topic}")
        if not topic.config.has_view:
            raise ViewError(f"topic {partition.topic} has no view; set varve.view=compacted first")
        conflict = self._views.conflict(topic)
        if conflict is not None:
            raise ViewError(f"topic {partition.topic} cannot have a view: {conflict}")
        view = self._views.partition(partition)
        if view is None:
            raise ViewError(f"there is no partition {partition} that is served")
        return view

    def _status_of(self, view: ViewPartition) -> ViewStatus:
        partition, log = view.base.partition, view.log
        last = self._last.get(view.base) or LastCompaction()
        manifest = None if log.ledger is None else log.ledger.manifest
        place = self._queue_position(partition)
        progress = (
            self._compactor.progress if self._compactor.partition == partition else NO_PROGRESS
        )
        return ViewStatus(
            partition=partition,
            horizon=log.horizon,
            log_start_offset=log.log_start_offset,
            log_end_offset=log.log.log_end_offset,
            ledger_bytes=log.size_bytes,
            ledger_records=manifest.records if manifest else 0,
            ledger_segments=len(manifest.segments) if manifest else 0,
            strategy=manifest.strategy if manifest else log.config.varve_view_strategy,
            version_header=manifest.version_header
            if manifest
            else log.config.varve_view_version_header,
            null_key=manifest.null_key if manifest else log.config.varve_view_null_key,
            deleted_keys=manifest.deleted.keys if manifest and manifest.deleted else 0,
            backlog_bytes=section_of(view, log.horizon).size_bytes,
            made_ms=manifest.made_ms if manifest else -1,
            missed=manifest.missed if manifest else (),
            state=_state_of(view, last, place).value,
            place=place,
            stage=progress.stage,
            round=progress.round,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
            started_ms=last.started_ms,
            ended_ms=last.ended_ms,
            error=str(log.failure) if log.failure is not None else last.reason,
            compactions=last.compactions,
            failed=last.failed,
            bytes_read=last.bytes_read,
            bytes_written=last.bytes_written,
            bytes_copied=last.bytes_copied,
            records_without_version=last.without_version,
            is_usable=log.failure is None,
        )

    def _queue_position(self, partition: TopicPartition) -> int:
        """Return the position in the queue, from 1 on; 0 if it is not queued."""
        if self._places is None:
            order = _in_turns(self._queue, self._present_client)
            self._places = {queued.where: place for place, queued in enumerate(order, 1)}
        return self._places.get(partition, 0)

    # A run --------------------------------------------------------------------------------

    async def _compact_quietly(self, partition: TopicPartition) -> None:
        if self._queue_position(partition):
            return  # a request is queued
        async with self._slots.slot(self), self._locks.changing(partition):
            try:
                await self._compact(
                    self._existing_view(partition), on_demand=False, from_scratch=False
                )
            except ViewError as error:
                logger.warning("view not compacted", partition=str(partition), reason=str(error))

    async def _compact(self, view: ViewPartition, *, on_demand: bool, from_scratch: bool) -> None:
        """Run one compaction and record its result. Raises ViewError."""
        partition = view.base.partition
        last = self._last.setdefault(view.base, LastCompaction())
        last.state, last.started_ms, last.reason = ViewState.RUNNING, self._env.wall_ms(), ""
        try:
            if not view.log.is_known:
                await self._views.read_again(view)
            if view.log.failure is not None and not from_scratch:
                raise ViewError(f"{view.log.failure}; {ANEW}")
            await self._compactor.compact(
                view, last, on_demand=on_demand, from_scratch=from_scratch
            )
        except CleanAbortedError:
            last.state = ViewState.ABORTED
            raise _given_up(partition) from None
        except (ViewError, JobFailedError, StorageError, TopicError, OSError) as error:
            if view.base.log.is_deleted:  # with its topic
                last.state = ViewState.ABORTED
                raise _given_up(partition) from error
            last.state, last.reason = ViewState.FAILED, str(error)
            last.failures += 1
            last.failed += 1
            delay_ms = backoff_ms(last.failures, RETRY_MS, RETRY_MS_MAX)
            last.retry_at = self._env.monotonic() + delay_ms / 1000
            logger.error("view compaction failed", partition=str(partition), reason=str(error))
            raise error if isinstance(error, ViewError) else ViewError(str(error)) from error
        else:
            last.state, last.failures = ViewState.DONE, 0
            last.compactions += 1
        finally:
            last.ended_ms = self._env.wall_ms()


def _in_turns(
    queue: Iterable[_QueuedCompaction], present_client: Hashable
) -> list[_QueuedCompaction]:
    """Return a queue in the order of the turns, of which one client has the present one."""
    turns = Counter((present_client,))
    ranked = []
    for queued in queue:
        ranked.append((turns[queued.client], queued))
        turns[queued.client] += 1
    return [queued for _, queued in sorted(ranked, key=itemgetter(0))]


def _state_of(view: ViewPartition, last: LastCompaction, place: int) -> ViewState:
    if place and last.state is not ViewState.RUNNING:
        return ViewState.WAITING
    if last.state is not ViewState.NEVER:
        return last.state
    if view.log.failure is not None:
        return ViewState.UNUSABLE
    # Published before the start of this broker.
    return ViewState.NEVER if view.log.ledger is None else ViewState.DONE


def _given_up(partition: TopicPartition) -> ViewError:
    return ViewError(f"the compaction of the view of {partition} was given up")


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a task; without a waiter only the status shows it."""
    if not task.cancelled():
        task.exception()
