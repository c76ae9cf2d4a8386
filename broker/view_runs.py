"""Compaction of views: on demand and by itself, one at a time, at low priority.

Rules
- A run stages its sources, works beside the log, publishes by one rename, and then the readers are
  taken over. A run that fails or is given up leaves the view as it was, and says why.
- Nothing of the log is touched or held up: appends, retention and cleaning go on.
- What is compacted is flushed before: a view never knows more than its log after a loss of power.
- A ledger that was replaced is removed when nobody reads it any more; of one view at most
  RETIRED_MAX wait for that, then their readers go over to the present one.
- A topic that lost its view, or was deleted, loses the files; that is seen at the next round.
"""

import asyncio
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import structlog

from broker.partition import Partition
from broker.topics import Topics
from broker.view_staging import (
    expires_soon,
    facts_of_output,
    facts_of_tail,
    joined,
    section_of,
    tail_of,
)
from broker.view_status import LastRun, RunState, ViewStatus
from broker.views import ViewPartition, Views
from cleaner.job import CleanAbortedError, CleanedGroup
from cleaner.planning.view_plan import ViewRound, ViewSection, view_job
from cleaner.workers.solo import JobFailedError, JobRunner
from config.settings import CleanerSettings
from storage.env import Env
from storage.errors import StorageError
from storage.model import TopicPartition
from storage.retention import SegmentFacts
from storage.view_ledger import (
    CopiedTail,
    Ledger,
    LinkedSource,
    describe_segment,
    make_run_folder,
    publish,
    remove_run,
    remove_view,
    settle_group,
    stage,
    sweep,
    view_path,
)
from storage.view_manifest import ViewManifest

ROUND_SECONDS: Final = 5.0  # between two looks for views that are due
RETRY_SECONDS: Final = 60.0  # after a failure; doubled with each one, up to an hour
RETRY_SECONDS_MAX: Final = 3600.0
ROUNDS_MAX: Final = 1000  # of one run: the map is smaller than the keys by so much at the most
MISSED_MAX: Final = 100  # gaps that a manifest names: the newest
RETIRED_MAX: Final = 4  # replaced ledgers of one view that may wait for their readers

log = structlog.get_logger("broker.views")

Hold = Callable[[TopicPartition], AbstractAsyncContextManager[None]]
Worker = Callable[[], AbstractAsyncContextManager[JobRunner]]


class ViewError(Exception):
    """A compaction that cannot be made; for people."""


@dataclass(slots=True)
class _Run:
    """One compaction under way."""

    view: ViewPartition
    run_id: str
    section: ViewSection
    directory: str
    staged: list[LinkedSource | CopiedTail]
    sources: tuple[SegmentFacts, ...]
    crcs: dict[int, int]  # of log files, by base offset, where known
    log_start_offset: int  # records below it go; 0 with a ledger, whose originals may have gone
    runner: JobRunner | None = None
    records: int = 0
    is_aborted: bool = False


class ViewRuns:
    """Keeps views compacted."""

    def __init__(
        self,
        env: Env,
        topics: Topics,
        views: Views,
        *,
        worker: Worker,
        hold: Hold,
        hash_key: Callable[[], bytes],
        settings: Callable[[], CleanerSettings],
    ) -> None:
        self._env = env
        self._topics = topics
        self._views = views
        self._worker = worker
        self._hold = hold
        self._hash_key = hash_key
        self._settings = settings
        self._one = asyncio.Lock()
        self._last: dict[TopicPartition, LastRun] = {}
        self._run: _Run | None = None
        self._known_views: dict[TopicPartition, bool] = {}  # at the last round
        self._asked: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False

    # Starting and ending ----------------------------------------------------------------

    def start(self) -> None:
        """Look for due views from now on."""
        self._watcher = asyncio.create_task(self._watch(), name="view-watch")

    async def stop(self) -> None:
        """Give up what is under way, and begin nothing any more."""
        self._stopping = True
        self._abort_run()
        async with self._one:
            pass  # whoever was in the midst of a run has let go
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    # What others ask --------------------------------------------------------------------

    def status(self, topic: str | None = None) -> list[ViewStatus]:
        """Every view, or those of one topic, by topic and partition."""
        rows = [
            self._status_of(partition)
            for view in self._views
            if topic is None or view.base.name == topic
            for partition in view.partitions.values()
        ]
        return sorted(rows, key=lambda row: row.partition)

    def status_of(self, where: TopicPartition) -> ViewStatus:
        """One view. Raises ViewError."""
        return self._status_of(self._known(where))

    def abort(self, where: TopicPartition) -> bool:
        """Give up the compaction of a view, if it is under way."""
        if self._run is None or self._run.view.base.partition != where:
            return False
        self._abort_run()
        return True

    async def compact(self, where: TopicPartition, *, from_scratch: bool = False) -> ViewStatus:
        """Compact one view up to the log's end, as far as that is decided.

        `from_scratch` makes it of what is in the log alone. Raises ViewError.
        """
        view = self._known(where)
        await asyncio.shield(self._ask(where, from_scratch=from_scratch))
        return self._status_of(view)

    def begin(self, where: TopicPartition, *, from_scratch: bool = False) -> None:
        """As `compact`, without waiting: the status tells how it ends. Raises ViewError."""
        self._known(where)
        task = self._ask(where, from_scratch=from_scratch)
        task.add_done_callback(_look_at)

    def _ask(self, where: TopicPartition, *, from_scratch: bool) -> asyncio.Task[None]:
        """It goes on to its end though whoever asked for it leaves. Raises ViewError."""
        last = self._last.setdefault(where, LastRun())
        if last.state in (RunState.WAITING, RunState.RUNNING):
            raise ViewError(f"the view of {where} is being compacted already")
        last.state = RunState.WAITING
        task = asyncio.create_task(self._compact_now(where, from_scratch=from_scratch))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        return task

    async def _compact_now(self, where: TopicPartition, *, from_scratch: bool) -> None:
        try:
            async with self._one:
                await self._compact(self._known(where), on_demand=True, from_scratch=from_scratch)
        finally:
            last = self._last.get(where)
            if last is not None and last.state is RunState.WAITING:
                last.state = RunState.ABORTED  # the view went away, or the broker stops

    def _known(self, where: TopicPartition) -> ViewPartition:
        if self._stopping:
            raise ViewError("the broker is stopping")
        topic = self._topics.get(where.topic)
        if topic is None:
            raise ViewError(f"there is no topic {where.topic}")
        if not topic.config.has_view:
            raise ViewError(f"topic {where.topic} has no view; set varve.view=compacted first")
        hindrance = self._views.hindrance(topic)
        if hindrance is not None:
            raise ViewError(f"topic {where.topic} cannot have a view: {hindrance}")
        view = self._views.partition(where)
        if view is None:
            raise ViewError(f"there is no partition {where} that is served")
        return view

    def _status_of(self, view: ViewPartition) -> ViewStatus:
        where, one = view.base.partition, view.log
        last = self._last.get(where) or LastRun()
        manifest = None if one.ledger is None else one.ledger.manifest
        state = last.state
        if state is RunState.NEVER and one.failure is not None:
            state = RunState.UNUSABLE
        elif state is RunState.NEVER and manifest is not None:
            state = RunState.DONE  # by an earlier life of this broker
        failure = str(one.failure) if one.failure is not None else last.reason
        return ViewStatus(
            partition=where,
            horizon=one.horizon,
            log_start_offset=one.log_start_offset,
            log_end_offset=one.log.log_end_offset,
            ledger_bytes=one.size_bytes,
            ledger_records=manifest.records if manifest else 0,
            ledger_segments=len(manifest.segments) if manifest else 0,
            backlog_bytes=section_of(view, one.horizon).size_bytes,
            made_ms=manifest.made_ms if manifest else -1,
            missed=manifest.missed if manifest else (),
            state=state.value,
            started_ms=last.started_ms,
            ended_ms=last.ended_ms,
            error=failure,
            runs=last.runs,
            failed=last.failed,
            bytes_read=last.bytes_read,
            bytes_written=last.bytes_written,
            is_usable=one.failure is None,
        )

    # By itself --------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                await self.tidy()
            except Exception:
                log.exception("looking for views failed")  # supervised: the next round comes
            await asyncio.sleep(ROUND_SECONDS)

    async def tidy(self) -> None:
        """One round: remove what is of no use, compact what is due."""
        known, present = self._known_views, set()
        for partition in self._topics.partitions():
            where = partition.partition
            present.add(where)
            view = self._views.partition(where)
            if view is not None:
                if not known.get(where) or self._has_retired(where):
                    await self._sweep(view)
                if view.log.ledger is not None:
                    view.log.ledger.drop_idle_indexes()
                if self._is_due(view):
                    await self._compact_quietly(where)
            elif not known.get(where, True):
                pass  # it was seen to at the first round without a view
            elif _is_off(partition):
                await self._drop(partition)
            elif (topic := self._topics.get(where.topic)) is not None and topic.config.has_view:
                reason = self._views.hindrance(topic)
                log.error("view cannot be offered", partition=str(where), reason=reason)
            known[where] = view is not None
        for where in known.keys() - present:
            del known[where]
            self._last.pop(where, None)

    def _is_due(self, view: ViewPartition) -> bool:
        wanted = view.log.config.varve_view_min_bytes
        last = self._last.get(view.base.partition)
        if wanted < 0 or view.log.failure is not None:
            return False
        if last is not None and last.failures and self._env.monotonic() < last.retry_at:
            return False
        section = section_of(view, view.log.horizon)
        if not section.segments:
            return False
        first = section.segments[0]
        return section.size_bytes >= wanted or expires_soon(first, view, self._env.wall_ms())

    async def _compact_quietly(self, where: TopicPartition) -> None:
        last = self._last.get(where)
        if last is not None and last.state is RunState.WAITING:
            return  # somebody asked for it: that comes next
        async with self._one:
            try:
                await self._compact(self._known(where), on_demand=False, from_scratch=False)
            except ViewError as error:
                log.warning("view not compacted", partition=str(where), reason=str(error))

    async def _drop(self, partition: Partition) -> None:
        """Remove the files of a view that is switched off."""
        directory = partition.log.directory
        async with self._one:
            try:
                if await asyncio.to_thread(remove_view, self._env, directory):
                    log.info("view removed", partition=str(partition.partition))
            except OSError as error:
                reason = str(error)
                log.error("view not removed", partition=str(partition.partition), reason=reason)
        self._last.pop(partition.partition, None)

    def _has_retired(self, where: TopicPartition) -> bool:
        last = self._last.get(where)
        return last is not None and any(ledger() is None for _, ledger in last.retired)

    async def _sweep(self, view: ViewPartition) -> None:
        """Remove folders of runs that nobody reads."""
        where, directory = view.base.partition, view.base.log.directory
        if view.log.failure is not None:
            return  # somebody may want to look at it
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
            except OSError as error:
                log.warning("old views not removed", partition=str(where), reason=str(error))
            else:
                if gone:
                    log.debug("old views removed", partition=str(where), runs=len(gone))

    # A run --------------------------------------------------------------------------------

    def _abort_run(self) -> None:
        if self._run is not None:
            self._run.is_aborted = True
            if self._run.runner is not None:
                self._run.runner.abort()

    async def _compact(self, view: ViewPartition, *, on_demand: bool, from_scratch: bool) -> None:
        """One compaction, with its story. Raises ViewError."""
        where = view.base.partition
        last = self._last.setdefault(where, LastRun())
        last.state, last.started_ms, last.reason = RunState.RUNNING, self._env.wall_ms(), ""
        try:
            if view.log.failure is not None and not from_scratch:
                raise ViewError(f"{view.log.failure}; it can be made anew from what the log holds")
            await self._make(view, last, on_demand=on_demand, from_scratch=from_scratch)
        except CleanAbortedError:
            last.state = RunState.ABORTED
            raise ViewError(f"the compaction of the view of {where} was given up") from None
        except (ViewError, JobFailedError, StorageError, OSError) as error:
            last.state, last.reason = RunState.FAILED, str(error)
            pause = min(RETRY_SECONDS * 2**last.failures, RETRY_SECONDS_MAX)
            last.failures += 1
            last.failed += 1
            last.retry_at = self._env.monotonic() + pause
            log.error("view compaction failed", partition=str(where), reason=str(error))
            raise error if isinstance(error, ViewError) else ViewError(str(error)) from error
        else:
            last.state, last.failures = RunState.DONE, 0
            last.runs += 1
        finally:
            last.ended_ms = self._env.wall_ms()

    async def _make(
        self, view: ViewPartition, last: LastRun, *, on_demand: bool, from_scratch: bool
    ) -> None:
        base, one = view.base, view.base.log
        if on_demand:
            one.roll(self._env.wall_ms())
        await base.flush()
        previous = None if from_scratch else view.log.ledger
        generation = one.generation
        run = await self._staged(view, previous, is_wanted=from_scratch)
        if run is None:
            return
        try:
            await self._rounds(run, last, generation)
            if self._topics.partition(base.partition) is not base or one.generation != generation:
                raise ViewError("the log was replaced or cut meanwhile")
            manifest = await asyncio.to_thread(self._describe, run, previous)
        except BaseException:
            await self._discard(run)
            raise
        finally:
            self._run = None
        # From here on the folder belongs to the manifest, also if the disk then fails.
        await asyncio.to_thread(publish, self._env, one.directory, manifest)
        await self._take_over(view, last)
        log.info(
            "view compacted",
            partition=str(base.partition),
            horizon=manifest.horizon,
            records=manifest.records,
            bytes=manifest.size_bytes,
            backlog_bytes=run.section.size_bytes,
            missed=len(manifest.missed),
        )

    async def _staged(
        self, view: ViewPartition, previous: Ledger | None, *, is_wanted: bool
    ) -> _Run | None:
        """A run with its sources in place; None if there is nothing to do and it is not wanted.

        Retention may take sources before they are linked: then what is left is looked at again.
        A clean of the same log would put other files under their names, and is held off.
        """
        base = view.base
        compacts = base.log.config.compacts
        async with self._hold(base.partition) if compacts else nullcontext():
            for last_time in (False, False, True):
                section = section_of(view, 0 if previous is None else previous.horizon)
                if section.horizon <= view.log.horizon and not is_wanted:
                    return None
                run = self._run = self._begin(view, section, previous)
                try:
                    await asyncio.to_thread(stage, self._env, run.directory, run.staged)
                except BaseException as error:
                    self._run = None
                    await self._discard(run)
                    if last_time or not isinstance(error, FileNotFoundError):
                        raise
                else:
                    return run
        return None

    def _begin(self, view: ViewPartition, section: ViewSection, previous: Ledger | None) -> _Run:
        """Make the run's folder, here on the loop: a topic that is there now keeps its folder."""
        one = view.base.log
        staged: list[LinkedSource | CopiedTail] = []
        sources: list[SegmentFacts] = []
        crcs: dict[int, int] = {}
        if previous is not None:
            folder = f"{view_path(one.directory)}/{previous.manifest.run_id}"
            staged += [LinkedSource(folder, s.base_offset) for s in previous.manifest.segments]
            sources += previous.facts()
            crcs = {s.base_offset: s.crc for s in previous.manifest.segments}
        for segment in section.segments:
            if segment.base_offset >= section.first_dirty_offset:
                staged.append(LinkedSource(one.directory, segment.base_offset))
                sources.append(segment)
            elif (tail := tail_of(one, segment, section.first_dirty_offset)) is not None:
                staged.append(tail)
                sources.append(facts_of_tail(segment, tail))
        run_id = f"{self._env.wall_ms():x}-{self._env.random_bytes(4).hex()}"
        directory = make_run_folder(self._env, one.directory, run_id)
        joint = joined(sources, section)
        start = section.first_dirty_offset if previous is None else 0
        return _Run(view, run_id, section, directory, staged, joint, crcs, start)

    async def _rounds(self, run: _Run, last: LastRun, generation: str) -> None:
        """Jobs until all of the section was indexed: a full map makes more than one."""
        first = run.section.first_dirty_offset
        if not run.sources:
            return
        async with self._worker() as runner:
            run.runner = runner
            for number in range(ROUNDS_MAX):
                if run.is_aborted:
                    raise CleanAbortedError
                job = view_job(
                    self._round(run, f"{run.run_id}-{number}", first, generation),
                    run.view.log.config,
                    self._settings(),
                )
                done = await runner.run(job)
                last.bytes_read += done.report.bytes_read
                last.bytes_written += done.report.bytes_written
                for path, position, why in done.report.damaged:
                    raise ViewError(f"{path} is damaged at byte {position}: {why}")
                await asyncio.to_thread(self._settle, run, done.groups)
                run.records = done.report.records_after
                if done.report.next_dirty_offset >= run.section.horizon:
                    return
                first = done.report.next_dirty_offset
        raise ViewError(f"not done after {ROUNDS_MAX} rounds; raise cleaner.dedupe_buffer_bytes")

    def _round(self, run: _Run, run_id: str, first: int, generation: str) -> ViewRound:
        one = run.view.base.log
        aborted = one.aborted_transactions(run.section.first_dirty_offset, run.section.horizon)
        return ViewRound(
            partition=run.view.base.partition,
            directory=run.directory,
            generation=generation,
            run_id=run_id,
            sources=run.sources,
            first_dirty_offset=first,
            horizon=run.section.horizon,
            log_start_offset=run.log_start_offset,
            now_ms=self._env.wall_ms(),
            hash_key=self._hash_key(),
            aborted=tuple(aborted),
        )

    def _settle(self, run: _Run, groups: tuple[CleanedGroup, ...]) -> None:
        """Put a round's outputs in the place of their sources; in a thread."""
        left = {source.base_offset: source for source in run.sources}
        for group in groups:
            settle_group(self._env, run.directory, group.source_base_offsets, group.output)
            gone = [left.pop(base) for base in group.source_base_offsets]
            for base in group.source_base_offsets:
                run.crcs.pop(base, None)
            if group.output is not None:
                made = facts_of_output(gone, group.output)
                left[made.base_offset] = made
                run.crcs[made.base_offset] = group.output.files[0].crc
        run.sources = joined([left[base] for base in sorted(left)], run.section)

    def _describe(self, run: _Run, previous: Ledger | None) -> ViewManifest:
        """The manifest of a finished run; in a thread."""
        config, one = run.view.log.config, run.view.base.log
        missed = () if previous is None else previous.manifest.missed
        if run.section.missed is not None:
            missed = (*missed, run.section.missed)[-MISSED_MAX:]
        return ViewManifest(
            topic_id=one.topic_id,
            run_id=run.run_id,
            horizon=run.section.horizon,
            segments=tuple(
                describe_segment(
                    self._env,
                    run.directory,
                    source.base_offset,
                    source.next_base_offset,
                    run.crcs.get(source.base_offset),
                )
                for source in run.sources
                if source.size_bytes
            ),
            records=run.records,
            made_ms=self._env.wall_ms(),
            null_key=config.varve_view_null_key,
            strategy=config.varve_view_strategy,
            missed=missed,
        )

    async def _discard(self, run: _Run) -> None:
        try:
            await asyncio.to_thread(remove_run, self._env, run.directory)
        except OSError as error:
            log.warning("run not removed", directory=run.directory, reason=str(error))

    async def _take_over(self, view: ViewPartition, last: LastRun) -> None:
        """Have readers go on with what was published."""
        replaced = view.log.ledger
        ledger = await asyncio.to_thread(self._views.load, view.base)
        if ledger is None:
            raise ViewError("what was published is not there")
        view.log.ledger, view.log.failure = ledger, None
        if replaced is not None:
            last.retired.append((replaced.manifest.run_id, weakref.ref(replaced)))


def _look_at(task: asyncio.Task[None]) -> None:
    """What a task without a waiter raised is in the status."""
    if not task.cancelled():
        task.exception()


def _is_off(partition: Partition) -> bool:
    config = partition.log.config
    return config.policy_known and not config.has_view
