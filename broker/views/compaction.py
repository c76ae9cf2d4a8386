"""Making a view: one run, from its sources to the publication.

Rules
- A run stages its sources, works beside the log, publishes by one rename, and then the readers are
  taken over. A run that fails or is given up leaves the view as it was, and says why.
- Nothing of the log is touched or held up: appends, retention and cleaning go on. The sources are
  linked between two swaps of the cleaner: if one begins meanwhile, they are linked again, since a
  mixture could bring deleted keys back. Only where they have to be copied, which may take longer
  than the time between two swaps, the cleaner is held off in the last attempt.
- From before the sources are linked the log's cleaner stays below the horizon to come, until the
  manifest is durable and taken over, or the run is given up. If that fails in between, it is not
  known which version the disk holds, and it is read again (broker/views/views.py).
- What is compacted is flushed before: a view never knows more than its log after a loss of power.
- A run keeps to the settings that it began with: its rounds, and what the manifest says, are of one
  strategy. A change meanwhile makes the next one.
- A view whose strategy was changed is made anew of the log, if all that it was made of is still
  there; else it is refused, since what would be lost is nowhere else.
"""

import asyncio
import os.path
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import structlog

from broker.cleaning.cleaner_host import BrokerCleanerHost
from broker.topics.topics import Topics
from broker.views.staging import facts_of_output, facts_of_tail, joined, section_of, tail_of
from broker.views.status import NO_PROGRESS, LastCompaction, ViewProgress, progress_of
from broker.views.views import ViewPartition, Views
from cleaner.job import CleanAbortedError, CleanedGroup
from cleaner.planning.view_plan import ViewRound, ViewSection, stages_of, view_job
from cleaner.workers.budget_share import Share
from cleaner.workers.dedicated_worker import CleanedJob, JobRunner
from config.settings import CleanerSettings
from config.topic_keys import TopicConfig
from storage.env import Env
from storage.errors import (
    InvalidViewError,
    LogDirectoryError,
    NoRoomError,
    is_folder_error,
    is_out_of_descriptors,
)
from storage.model import TopicPartition
from storage.segments.retention import SegmentFacts
from storage.segments.swap import CleanedFile
from storage.view.deleted_keys import DELETED_KEYS_NAME
from storage.view.ledger import (
    Ledger,
    LinkedKeys,
    LinkedSource,
    Source,
    describe_segment,
    make_staging_folder,
    publish,
    remove_run,
    settle_deleted_keys,
    settle_group,
    stage,
    view_path,
)
from storage.view.manifest import DeletedKeys, ViewManifest

ROUNDS_MAX: Final = 1000  # of one run: the map is smaller than the keys by so much at the most
ATTEMPTS: Final = 5  # at linking what retention may take, and the cleaner replace
MISSED_MAX: Final = 100  # gaps that a manifest names: the newest
ANEW: Final = "it can be made anew from what the log holds (--from-scratch)"

logger = structlog.get_logger("broker.views")

PausePartition = Callable[[TopicPartition], AbstractAsyncContextManager[None]]
StartWorker = Callable[[], AbstractAsyncContextManager[JobRunner]]
Shares = Callable[[], AbstractAsyncContextManager[Share]]


class ViewError(Exception):
    """A compaction that cannot be made; for people."""


class _SwappedError(ViewError):
    """The cleaner replaced segments while they were linked."""


@dataclass(frozen=True, slots=True)
class ViewTools:
    """What a run needs of the rest of the broker."""

    worker: StartWorker
    share: Shares  # of the budgets, for what is copied without a worker
    pause: PausePartition  # the cleaner off a partition
    cleaning: BrokerCleanerHost  # for the swaps of the log
    fail_directory: Callable[[LogDirectoryError], None]
    hash_key: Callable[[], bytes]
    settings: Callable[[], CleanerSettings]
    clock_trusted: Callable[[], bool]


@dataclass(slots=True)
class _ViewCompaction:
    """One compaction under way."""

    view: ViewPartition
    config: TopicConfig  # as it was when it began
    compaction_id: str
    now_ms: int  # of all its rounds
    clock_trusted: bool
    section: ViewSection
    directory: str
    staged: list[Source]
    sources: tuple[SegmentFacts, ...]
    crcs: dict[int, int]  # of log files, by base offset, where known
    log_start_offset: int  # records below it go; 0 with a ledger, whose originals may have gone
    deleted: DeletedKeys | None
    runner: JobRunner | None = None
    share: Share | None = None
    records: int = 0
    is_aborted: bool = False
    progress: ViewProgress = field(default=NO_PROGRESS)

    def abort(self) -> None:
        """Have it end at its next step."""
        self.is_aborted = True
        if self.share is not None:
            self.share.abort()
        if self.runner is not None:
            self.runner.abort()


class ViewCompactor:
    """Makes one view at a time."""

    def __init__(self, env: Env, topics: Topics, views: Views, tools: ViewTools) -> None:
        self._env = env
        self._topics = topics
        self._views = views
        self._tools = tools
        self._compaction: _ViewCompaction | None = None
        self._logged_copies: set[TopicPartition] = set()

    @property
    def partition(self) -> TopicPartition | None:
        """Whose view is being made."""
        return None if self._compaction is None else self._compaction.view.base.partition

    @property
    def progress(self) -> ViewProgress:
        """How far that is."""
        return NO_PROGRESS if self._compaction is None else self._compaction.progress

    def abort(self) -> None:
        """Give up what is under way."""
        if self._compaction is not None:
            self._compaction.abort()

    async def compact(
        self, view: ViewPartition, last: LastCompaction, *, on_demand: bool, from_scratch: bool
    ) -> None:
        """Compact a view up to what is decided.

        Raises ViewError, CleanAbortedError, JobFailedError, StorageError, OSError.
        """
        base, partition_log = view.base, view.base.log
        if on_demand:
            partition_log.roll(self._env.wall_ms())
        await base.flush()
        config = partition_log.config
        previous = None if from_scratch else _carried_over(view)
        is_anew = view.log.ledger is not None and previous is None
        generation = partition_log.generation
        is_wanted = from_scratch or is_anew
        try:
            compaction = await self._staged(view, config, last, previous, is_wanted=is_wanted)
            if compaction is None:
                return
            try:
                await self._rounds(compaction, last, generation)
                self._check_wanted(view, generation)
                manifest = await asyncio.to_thread(self._describe, compaction, previous)
                self._check_wanted(view, generation)
            except BaseException:
                await self._discard(compaction)
                raise
            finally:
                self._compaction = None
            await self._publish(compaction, manifest, last)
        finally:
            self._views.unstage(base.partition)
        logger.info(
            "view compacted",
            partition=str(base.partition),
            strategy=manifest.strategy,
            horizon=manifest.horizon,
            records=manifest.records,
            bytes=manifest.size_bytes,
            backlog_bytes=compaction.section.size_bytes,
            missed=len(manifest.missed),
        )

    def _check_wanted(self, view: ViewPartition, generation: str) -> None:
        """Raises ViewError where a run has become void."""
        base = view.base
        is_there = self._topics.partition(base.partition) is base
        if not is_there or base.log.generation != generation:
            raise ViewError("the log was replaced or cut meanwhile")
        if self._views.partition(base.partition) is not view:
            raise ViewError("the view was switched off meanwhile")

    # Staging ------------------------------------------------------------------------------

    async def _staged(
        self,
        view: ViewPartition,
        config: TopicConfig,
        last: LastCompaction,
        previous: Ledger | None,
        *,
        is_wanted: bool,
    ) -> _ViewCompaction | None:
        """A run with its sources in place; None if there is nothing to do and it is not wanted.

        Retention may take sources before they are linked, and the cleaner replace them: then what
        is left is looked at again.
        """
        partition, cleaning = view.base.partition, self._tools.cleaning
        for attempt in range(1, ATTEMPTS + 1):
            is_last = attempt == ATTEMPTS
            copies = is_last and partition in self._logged_copies
            async with self._tools.pause(partition) if copies else nullcontext():
                if not await cleaning.wait_for_swap(view.base):
                    raise ViewError("the cleaner is busy replacing segments; it is tried again")
                section = section_of(view, 0 if previous is None else previous.horizon)
                if section.horizon <= view.log.horizon and not is_wanted:
                    return None
                self._views.stage(partition, section.horizon)
                compaction = self._compaction = self._begin(view, config, section, previous)
                try:
                    await self._stage(compaction, last)
                except BaseException as error:
                    self._compaction = None
                    await self._discard(compaction)
                    if is_last or not isinstance(error, FileNotFoundError | _SwappedError):
                        raise
                else:
                    return compaction
        raise AssertionError

    async def _stage(self, compaction: _ViewCompaction, last: LastCompaction) -> None:
        partition = compaction.view.base.partition
        swaps = self._tools.cleaning.swaps_begun(partition)
        async with self._tools.share() as share:
            compaction.share = share
            if compaction.is_aborted:
                raise CleanAbortedError
            compaction.progress = ViewProgress(0, "stage", 0, 0)
            try:
                done = await asyncio.to_thread(
                    stage, self._env, compaction.directory, compaction.staged, share.charge
                )
            except InvalidViewError as error:
                raise ViewError(f"{error}; {ANEW}") from error
        compaction.share = None
        last.bytes_copied += done.copied_bytes
        if done.reason and partition not in self._logged_copies:
            self._logged_copies.add(partition)
            logger.warning(
                "view sources are copied, not linked",
                partition=str(partition),
                bytes=done.copied_bytes,
                reason=done.reason,
            )
        if self._tools.cleaning.swaps_begun(partition) != swaps:
            raise _SwappedError("the cleaner replaced segments while they were linked")

    def _begin(
        self,
        view: ViewPartition,
        config: TopicConfig,
        section: ViewSection,
        previous: Ledger | None,
    ) -> _ViewCompaction:
        """Make the run's folder, here on the loop: a topic that is there now keeps its folder."""
        log = view.base.log
        staged: list[Source] = []
        sources: list[SegmentFacts] = []
        crcs: dict[int, int] = {}
        deleted = None if previous is None else previous.manifest.deleted
        if previous is not None:
            folder = f"{view_path(log.directory)}/{previous.manifest.compaction_id}"
            staged += [LinkedSource(folder, s.base_offset) for s in previous.manifest.segments]
            sources += previous.facts()
            crcs = {s.base_offset: s.crc for s in previous.manifest.segments}
            if deleted is not None:
                staged.append(LinkedKeys(folder, deleted))
        for segment in section.segments:
            if segment.base_offset >= section.first_dirty_offset:
                staged.append(LinkedSource(log.directory, segment.base_offset))
                sources.append(segment)
            elif (tail := tail_of(log, segment, section.first_dirty_offset)) is not None:
                staged.append(tail)
                sources.append(facts_of_tail(segment, tail))
        now_ms = self._env.wall_ms()
        compaction_id = f"{now_ms:x}-{self._env.random_bytes(4).hex()}"
        return _ViewCompaction(
            view=view,
            config=config,
            compaction_id=compaction_id,
            now_ms=now_ms,
            clock_trusted=self._tools.clock_trusted(),
            section=section,
            directory=make_staging_folder(self._env, log.directory, compaction_id),
            staged=staged,
            sources=joined(sources, section),
            crcs=crcs,
            log_start_offset=section.first_dirty_offset if previous is None else 0,
            deleted=deleted,
        )

    # Rounds -------------------------------------------------------------------------------

    async def _rounds(
        self, compaction: _ViewCompaction, last: LastCompaction, generation: str
    ) -> None:
        """Jobs until all of the section was indexed: a full map makes more than one."""
        first = compaction.section.first_dirty_offset
        if not compaction.sources:
            return
        async with self._tools.worker() as runner:
            compaction.runner = runner
            for number in range(ROUNDS_MAX):
                if compaction.is_aborted:
                    raise CleanAbortedError
                done = await self._round(compaction, runner, number, first, generation)
                last.bytes_read += done.report.bytes_read
                last.bytes_written += done.report.bytes_written
                last.without_version += done.report.records_without_version
                for path, position, why in done.report.damaged:
                    raise ViewError(f"{path} is damaged at byte {position}: {why}")
                await asyncio.to_thread(self._settle, compaction, done)
                compaction.records = done.report.records_after
                if done.report.next_dirty_offset >= compaction.section.horizon:
                    return
                first = done.report.next_dirty_offset
        raise ViewError(f"not done after {ROUNDS_MAX} rounds; raise cleaner.dedupe_buffer_bytes")

    async def _round(
        self,
        compaction: _ViewCompaction,
        runner: JobRunner,
        number: int,
        first: int,
        generation: str,
    ) -> CleanedJob:
        log, deleted = compaction.view.base.log, compaction.deleted
        saved_state = None
        if deleted is not None:
            saved_state = CleanedFile(DELETED_KEYS_NAME, deleted.size_bytes, deleted.crc)
        aborted = log.aborted_transactions(
            compaction.section.first_dirty_offset, compaction.section.horizon
        )
        part = ViewRound(
            partition=compaction.view.base.partition,
            directory=compaction.directory,
            generation=generation,
            job_id=f"{compaction.compaction_id}-{number}",
            sources=compaction.sources,
            first_dirty_offset=first,
            horizon=compaction.section.horizon,
            log_start_offset=compaction.log_start_offset,
            now_ms=compaction.now_ms,
            hash_key=self._tools.hash_key(),
            aborted=tuple(aborted),
            deleted_keys=saved_state,
            clock_trusted=compaction.clock_trusted,
        )
        job = view_job(part, compaction.config, self._tools.settings())
        stages = stages_of(job)
        compaction.progress = ViewProgress(number + 1, "map", 0, sum(stages.values()))

        def on_progress(name: str, done_bytes: int, total_bytes: int) -> None:
            compaction.progress = progress_of(number + 1, stages, name, done_bytes, total_bytes)

        return await runner.run(job, on_progress)

    def _settle(self, compaction: _ViewCompaction, done: CleanedJob) -> None:
        """Put a round's outputs in the place of their sources; in a thread."""
        all_facts = {source.base_offset: source for source in compaction.sources}
        for group in done.groups:
            self._settle_group(compaction, group, all_facts)
        compaction.sources = joined(
            [all_facts[base] for base in sorted(all_facts)], compaction.section
        )
        compaction.deleted = settle_deleted_keys(
            self._env, compaction.directory, done.report.deleted_keys
        )

    def _settle_group(
        self, compaction: _ViewCompaction, group: CleanedGroup, all_facts: dict[int, SegmentFacts]
    ) -> None:
        settle_group(self._env, compaction.directory, group.source_base_offsets, group.output)
        gone = [all_facts.pop(base) for base in group.source_base_offsets]
        for base in group.source_base_offsets:
            compaction.crcs.pop(base, None)
        if group.output is not None:
            made = facts_of_output(gone, group.output)
            all_facts[made.base_offset] = made
            compaction.crcs[made.base_offset] = group.output.files[0].crc

    # Publication --------------------------------------------------------------------------

    def _describe(self, compaction: _ViewCompaction, previous: Ledger | None) -> ViewManifest:
        """Return the manifest of a finished run; in a thread."""
        config, log = compaction.config, compaction.view.base.log
        missed: tuple[tuple[int, int], ...] = ()
        first_offset = compaction.section.first_dirty_offset
        if previous is not None:
            missed = previous.manifest.missed
            first_offset = previous.manifest.first_offset
        if compaction.section.missed is not None:
            missed = (*missed, compaction.section.missed)[-MISSED_MAX:]
        return ViewManifest(
            topic_id=log.topic_id,
            compaction_id=compaction.compaction_id,
            horizon=compaction.section.horizon,
            segments=tuple(
                describe_segment(
                    self._env,
                    compaction.directory,
                    source.base_offset,
                    source.next_base_offset,
                    compaction.crcs.get(source.base_offset),
                )
                for source in compaction.sources
                if source.size_bytes
            ),
            records=compaction.records,
            made_ms=self._env.wall_ms(),
            null_key=config.varve_view_null_key,
            strategy=config.varve_view_strategy,
            missed=missed,
            version_header=_header_of(config),
            first_offset=first_offset,
            deleted=compaction.deleted,
        )

    async def _discard(self, compaction: _ViewCompaction) -> None:
        try:
            await asyncio.to_thread(remove_run, self._env, compaction.directory)
        except OSError as error:
            logger.warning(
                "view compaction files not removed",
                directory=compaction.directory,
                reason=str(error),
            )

    async def _publish(
        self, compaction: _ViewCompaction, manifest: ViewManifest, last: LastCompaction
    ) -> None:
        """Make a finished run the view. From here on its folder belongs to the manifest."""
        view, partition = compaction.view, compaction.view.base.partition
        try:
            try:
                await asyncio.to_thread(publish, self._env, view.log.directory, manifest)
            except NoRoomError:  # the old manifest stands; each attempt would leave a folder
                await self._discard(compaction)
                raise
            except BaseException as error:
                view.log.is_known = False
                self._fail_directory(view, error)
                raise
            try:
                await self._take_over(view, last)
            except BaseException:
                view.log.is_known = False
                raise
        finally:
            present = self._views.partition(partition)
            if present is not None and present is not view:
                present.log.is_known = False  # it was opened before there was this version

    def _fail_directory(self, view: ViewPartition, error: BaseException) -> None:
        """Take the data directory offline where a sync of it may have failed.

        A folder that is missing, or may not be used, is no failed sync.
        """
        is_there = self._topics.partition(view.base.partition) is view.base
        if not is_there or not isinstance(error, OSError) or is_folder_error(error):
            return
        if not is_out_of_descriptors(error):
            home, reason = os.path.dirname(view.log.directory), f"publication of a view: {error}"
            self._tools.fail_directory(LogDirectoryError(home, reason))

    async def _take_over(self, view: ViewPartition, last: LastCompaction) -> None:
        """Have readers go on with what was published."""
        replaced = view.log.ledger
        ledger = await asyncio.to_thread(self._views.load, view.base)
        if ledger is None:
            raise ViewError("what was published is not there")
        view.log.ledger, view.log.failure, view.log.is_known = ledger, None, True
        if replaced is not None:
            last.retired.append((replaced.manifest.compaction_id, weakref.ref(replaced)))


def _header_of(config: TopicConfig) -> str:
    return config.varve_view_version_header if config.varve_view_strategy == "header" else ""


def is_outdated(view: ViewPartition) -> bool:
    """Return whether the ledger was made by another rule than the topic now asks for."""
    if view.log.ledger is None:
        return False
    manifest, config = view.log.ledger.manifest, view.log.config
    present = (config.varve_view_strategy, _header_of(config))
    return (manifest.strategy, manifest.version_header) != present


def _carried_over(view: ViewPartition) -> Ledger | None:
    """Return the ledger that the next one is made of; None: the log alone. Raises ViewError."""
    ledger, log = view.log.ledger, view.base.log
    if ledger is None or not is_outdated(view):
        return ledger
    manifest = ledger.manifest
    change = f"its strategy was changed from {manifest.strategy} to {_rule_of(view.log.config)}"
    if log.config.compacts:
        missing = "the topic is compacted itself, by offset"
    elif log.log_start_offset > manifest.first_offset:
        missing = f"what it was made of has expired up to offset {log.log_start_offset}"
    else:
        return None
    raise ViewError(f"{change}, and {missing}; set it back, or {ANEW}")


def _rule_of(config: TopicConfig) -> str:
    header = _header_of(config)
    return f"{config.varve_view_strategy} {header}" if header else config.varve_view_strategy
