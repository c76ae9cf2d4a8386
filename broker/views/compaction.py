"""One compaction of a view, from its sources to its publication.

Rules
- A compaction stages its sources, works beside the log, publishes with one rename, and then moves
  the readers. A compaction that fails or is aborted leaves the view unchanged and reports why.
- The log is not changed or delayed: appends, retention and cleaning continue. The sources are
  linked between two swaps of the cleaner (broker/cleaning/segment_links.py). If they have to be
  copied, which may take longer than the time between two swaps, the last attempt pauses the
  cleaner.
- From before the sources are linked, the cleaner of the log stays below the new horizon, until the
  manifest is durable and in use, or the compaction is aborted. If publication fails, the version on
  disk is unknown and is read again (broker/views/views.py).
- The sources are flushed first: after a power failure a view is never ahead of its log.
- A compaction uses the settings that it began with, so that all rounds and the manifest have one
  strategy. A change applies to the next compaction.
- A view whose strategy changed is rebuilt from the log, if the log is still complete; otherwise the
  compaction is refused, because data would be lost. The manifest remembers that the topic was
  compacted, and does so durably before the cleaner may remove a record.
"""

import os.path
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

import structlog

from broker.cleaning.cleaner_host import BrokerCleanerHost
from broker.cleaning.dedicated_workers import OpenShare, StartWorker
from broker.cleaning.segment_links import SegmentsReplacedError, link_between_swaps
from broker.event_loop.directory_threads import DirectoryThreads
from broker.topics.topics import Topics
from broker.views.staging import facts_of_output, facts_of_tail, joined, section_of, tail_of
from broker.views.status import NO_PROGRESS, LastCompaction, ViewProgress, progress_of
from broker.views.view_partition import ViewPartition
from broker.views.views import Views
from cleaner.job import CleanAbortedError, CleanedGroup, new_job_id
from cleaner.planning.view_plan import ViewRound, ViewSection, stages_of, view_job
from cleaner.workers.budget_share import BudgetShare
from cleaner.workers.dedicated_worker import CleanedJob, JobRunner
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.env import Env
from storage.errors import (
    CorruptBatchError,
    InvalidViewError,
    LogDirectoryError,
    NoRoomError,
    is_folder_error,
    is_out_of_descriptors,
)
from storage.format import filenames
from storage.format.batch import HEADER_BYTES, read_header
from storage.format.txn_index import TxnIndexEntry
from storage.model import SegmentFacts, TopicPartition
from storage.swap.swap_journal import CleanedFile
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

ROUNDS_MAX: Final = 1000  # of one compaction: the keys fill the map at most this many times
MISSED_MAX: Final = 100  # newest gaps that a manifest names
ANEW: Final = "rebuild it from the records in the log with --from-scratch"

_Result = TypeVar("_Result")

logger = structlog.get_logger("broker.views")

PauseCleaning = Callable[[TopicPartition], AbstractAsyncContextManager[None]]


class ViewError(Exception):
    """The view cannot be compacted; the text is for people."""


@dataclass(frozen=True, slots=True)
class ViewTools:
    """The parts of the broker that a compaction uses."""

    worker: StartWorker
    share: OpenShare  # of the I/O budgets, for copies without a worker
    pause: PauseCleaning  # pauses the cleaner on a partition
    cleaning: BrokerCleanerHost  # knows the swaps of the log
    threads: DirectoryThreads
    fail_directory: Callable[[LogDirectoryError], None]
    settings: Callable[[], CleanerSettings]
    clock_trusted: Callable[[], bool]


@dataclass(slots=True)
class _ViewCompaction:
    """The state of the running compaction."""

    view: ViewPartition
    config: TopicConfig  # at its start
    compaction_id: str
    now_ms: int  # the time of all its rounds
    clock_trusted: bool
    section: ViewSection
    directory: str
    staged: list[Source]
    sources: tuple[SegmentFacts, ...]
    aborted: Sequence[TxnIndexEntry]  # of the section, as the sources have them
    crcs: dict[int, int]  # known CRCs of log files, by base offset
    log_start_offset: int  # drops records below it; 0 if the ledger has records
    deleted: DeletedKeys | None
    runner: JobRunner | None = None
    share: BudgetShare | None = None
    records: int = 0
    is_aborted: bool = False
    progress: ViewProgress = field(default=NO_PROGRESS)

    def abort(self) -> None:
        """Stop it at its next step."""
        self.is_aborted = True
        if self.share is not None:
            self.share.abort()
        if self.runner is not None:
            self.runner.abort()


class ViewCompactor:
    """Compacts one view at a time."""

    def __init__(self, env: Env, topics: Topics, views: Views, tools: ViewTools) -> None:
        self._env = env
        self._topics = topics
        self._views = views
        self._tools = tools
        self._compaction: _ViewCompaction | None = None
        self._logged_copies: set[TopicPartition] = set()

    @property
    def partition(self) -> TopicPartition | None:
        """Return the partition of the running compaction."""
        return None if self._compaction is None else self._compaction.view.base.partition

    @property
    def progress(self) -> ViewProgress:
        """Return the progress of the running compaction."""
        return NO_PROGRESS if self._compaction is None else self._compaction.progress

    def abort(self) -> None:
        """Abort the running compaction."""
        if self._compaction is not None:
            self._compaction.abort()

    async def compact(
        self, view: ViewPartition, last: LastCompaction, *, on_demand: bool, from_scratch: bool
    ) -> None:
        """Compact a view up to the last stable offset.

        Raises ViewError, CleanAbortedError, JobFailedError, StorageError, OSError.
        """
        base, log = view.base, view.base.log
        if on_demand:
            base.roll(self._env.wall_ms())
        await base.flush()
        config = log.config
        previous = None if from_scratch else _carried_over(view)
        is_anew = view.log.ledger is not None and previous is None
        generation = log.generation
        is_wanted = from_scratch or is_anew
        try:
            compaction = await self._staged(view, config, last, previous, is_wanted=is_wanted)
            if compaction is None:
                return
            try:
                await self._rounds(compaction, last, generation)
                self._check_wanted(view, generation)
                manifest = await self._run(
                    compaction, partial(self._describe, compaction, previous)
                )
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
        """Raise ViewError if the compaction is no longer valid."""
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
        """Return the compaction with staged sources; None if there is nothing to do."""
        partition = view.base.partition

        def attempt(is_last: bool) -> AbstractAsyncContextManager[None]:
            copies = is_last and partition in self._logged_copies
            return self._tools.pause(partition) if copies else nullcontext()

        def begin() -> _ViewCompaction | None:
            # Segments may have been closed since the flush; those wait for the next run.
            flushed_end = view.base.log.recovery_point
            horizon = 0 if previous is None else previous.horizon
            section = section_of(view, horizon, end_offset=flushed_end)
            if section.horizon <= view.log.horizon and not is_wanted:
                return None
            self._views.stage(partition, section.horizon)
            self._compaction = self._begin(view, config, section, previous)
            return self._compaction

        async def discard(compaction: _ViewCompaction) -> None:
            self._compaction = None
            await self._discard(compaction)

        try:
            return await link_between_swaps(
                self._tools.cleaning,
                view.base,
                attempt=attempt,
                begin=begin,
                link=lambda compaction: self._stage(compaction, last),
                discard=discard,
            )
        except SegmentsReplacedError as error:
            raise ViewError(str(error)) from error

    async def _stage(self, compaction: _ViewCompaction, last: LastCompaction) -> None:
        partition = compaction.view.base.partition
        async with self._tools.share() as share:
            compaction.share = share
            if compaction.is_aborted:
                raise CleanAbortedError
            compaction.progress = ViewProgress(0, "stage", 0, 0)
            try:
                call = partial(
                    stage, self._env, compaction.directory, compaction.staged, share.charge
                )
                done = await self._run(compaction, call)
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

    def _begin(
        self,
        view: ViewPartition,
        config: TopicConfig,
        section: ViewSection,
        previous: Ledger | None,
    ) -> _ViewCompaction:
        """Create the folder on the event loop, where the topic cannot disappear meanwhile."""
        log = view.base.log
        staged: list[Source] = []
        sources: list[SegmentFacts] = []
        crcs: dict[int, int] = {}
        deleted = None if previous is None else previous.manifest.deleted
        horizon = 0 if previous is None else previous.horizon  # 0: the ledger has no records
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
                if horizon:
                    section = section.from_batch(tail.base_offset, horizon)
        now_ms = self._env.wall_ms()
        compaction_id = new_job_id(self._env)
        return _ViewCompaction(
            view=view,
            config=config,
            compaction_id=compaction_id,
            now_ms=now_ms,
            clock_trusted=self._tools.clock_trusted(),
            section=section,
            directory=view.base.make_folder(
                partial(make_staging_folder, self._env, log.directory, compaction_id)
            ),
            staged=staged,
            sources=joined(sources, section),
            # Now: the cleaner may remove the records and then their markers from the log.
            aborted=log.reader.aborted_transactions(section.first_dirty_offset, section.horizon),
            crcs=crcs,
            log_start_offset=0 if horizon else section.first_dirty_offset,
            deleted=deleted,
        )

    # Rounds -------------------------------------------------------------------------------

    async def _rounds(
        self, compaction: _ViewCompaction, last: LastCompaction, generation: str
    ) -> None:
        """Run jobs until the whole section is indexed; a full map needs several."""
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
                    raise await self._damage_error(compaction, path, position, why)
                await self._run(compaction, partial(self._settle, compaction, done))
                compaction.records = done.report.records_after
                if done.report.next_dirty_offset >= compaction.section.horizon:
                    return
                first = done.report.next_dirty_offset
        raise ViewError(f"not done after {ROUNDS_MAX} rounds; raise cleaner.dedupe_buffer_bytes")

    async def _damage_error(
        self, compaction: _ViewCompaction, path: str, position: int, reason: str
    ) -> ViewError:
        """Record a batch that the view cannot use in its log; say what to do about it."""
        log, (topic, number) = compaction.view.base.log, compaction.view.base.partition
        damage = None
        parsed = filenames.parse_file_name(os.path.basename(path))
        if parsed is not None and parsed.base_offset >= compaction.section.first_dirty_offset:
            offset = await self._run(compaction, partial(_offset_at, self._env, path, position))
            damage = None if offset is None else log.damage.mark_batch(offset, reason)
        if damage is None:
            return ViewError(
                f"{path} is damaged at byte {position}: {reason}. `varve log verify {topic} "
                f"{number}` names the damage of the log. If it has none, {ANEW}"
            )
        text = f"offsets {damage.first_offset} to {damage.next_offset - 1}: {reason}"
        skip = (
            f"`varve log skip {topic} {number} --offset {damage.first_offset}` removes them from "
            "the log; then the next compaction goes past them"
        )
        if damage.is_served:
            return ViewError(
                f"the view cannot tell which keys the batch has, {text}. If it is too large, raise "
                f"varve.decompressed.batch.bytes of the topic. If its records are malformed, {skip}"
            )
        return ViewError(f"the log is damaged, {text}. {skip}")

    async def _round(
        self,
        compaction: _ViewCompaction,
        runner: JobRunner,
        number: int,
        first: int,
        generation: str,
    ) -> CleanedJob:
        deleted = compaction.deleted
        saved_state = None
        if deleted is not None:
            saved_state = CleanedFile(DELETED_KEYS_NAME, deleted.size_bytes, deleted.crc)
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
            hash_key=self._tools.cleaning.hash_key(),
            aborted=compaction.aborted,
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
        """Replace sources with the outputs of a round; runs in a thread."""
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
        sources = [all_facts.pop(base) for base in group.source_base_offsets]
        for base in group.source_base_offsets:
            compaction.crcs.pop(base, None)
        if group.output is not None:
            made = facts_of_output(sources, group.output)
            all_facts[made.base_offset] = made
            compaction.crcs[made.base_offset] = group.output.files[0].crc

    # Publication --------------------------------------------------------------------------

    def _describe(self, compaction: _ViewCompaction, previous: Ledger | None) -> ViewManifest:
        """Return the manifest of a finished compaction; runs in a thread."""
        config, log = compaction.config, compaction.view.base.log
        missed: tuple[tuple[int, int], ...] = ()
        first_offset = compaction.section.first_dirty_offset
        if previous is not None and previous.horizon > 0:  # else it has nothing of the log
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
            log_compacted=config.compacts
            or (previous is not None and previous.manifest.log_compacted),
            leader_epoch=log.reader.epoch_of(compaction.section.horizon - 1),
        )

    async def _run(self, compaction: _ViewCompaction, call: Callable[[], _Result]) -> _Result:
        """Run `call` in a thread of the data directory. Raises what it raises."""
        return await self._tools.threads.run(compaction.directory, call)

    async def _discard(self, compaction: _ViewCompaction) -> None:
        try:
            remove = partial(remove_run, self._env, compaction.directory)
            await self._run(compaction, remove)
        except OSError as error:
            logger.warning(
                "view compaction files not removed",
                directory=compaction.directory,
                reason=str(error),
            )

    async def _publish(
        self, compaction: _ViewCompaction, manifest: ViewManifest, last: LastCompaction
    ) -> None:
        """Publish a finished compaction; its folder then belongs to the manifest."""
        view, partition = compaction.view, compaction.view.base.partition
        try:
            try:
                await self._write_manifest(view, manifest)
            except NoRoomError:  # the old manifest stays; each attempt would leave a folder
                await self._discard(compaction)
                raise
            try:
                await self._take_over(view, last)
            except BaseException:
                view.log.is_known = False
                raise
        finally:
            present = self._views.partition(partition)
            if present is not None and present is not view:
                present.distrust()  # it was opened before this version existed

    async def write_again(self, view: ViewPartition) -> None:
        """Write the manifest and its copy again; if the topic is compacted, they say so then.

        Call it with the lock for the files of the view, whose ledger is known. Raises OSError.
        """
        ledger = view.log.ledger
        assert ledger is not None
        compacted = ledger.manifest.log_compacted or view.log.config.compacts
        manifest = replace(ledger.manifest, log_compacted=compacted)
        await self._write_manifest(view, manifest)
        ledger.manifest = manifest
        ledger.has_manifest = ledger.has_copy = True

    async def _write_manifest(self, view: ViewPartition, manifest: ViewManifest) -> None:
        """Write the manifest. After NoRoomError the old one stays, after others either of them."""
        directory = view.log.directory
        try:
            await self._tools.threads.run(
                directory, partial(publish, self._env, directory, manifest)
            )
        except NoRoomError:
            raise
        except BaseException as error:
            view.log.is_known = False
            self._fail_directory(view, error)
            raise

    def _fail_directory(self, view: ViewPartition, error: BaseException) -> None:
        """Take the log directory offline if a sync may have failed.

        A missing or forbidden folder is not a failed sync.
        """
        is_there = self._topics.partition(view.base.partition) is view.base
        if not is_there or not isinstance(error, OSError) or is_folder_error(error):
            return
        if not is_out_of_descriptors(error):
            directory, reason = (
                os.path.dirname(view.log.directory),
                f"publication of a view: {error}",
            )
            self._tools.fail_directory(LogDirectoryError(directory, reason))

    async def _take_over(self, view: ViewPartition, last: LastCompaction) -> None:
        """Move the readers to the published version."""
        replaced = view.log.ledger
        ledger = await self._tools.threads.run(
            view.log.directory, partial(self._views.load, view.base)
        )
        if ledger is None:
            raise ViewError("the published version of the view is not on disk")
        view.log.ledger, view.log.failure, view.log.is_known = ledger, None, True
        if replaced is not None:
            last.retired.append((replaced.manifest.compaction_id, weakref.ref(replaced)))


def _offset_at(env: Env, path: str, position: int) -> int | None:
    """Return the base offset of a batch; None if its header is damaged. Raises OSError."""
    file = env.open(path)
    try:
        return read_header(file.pread(HEADER_BYTES, position)).base_offset
    except CorruptBatchError:
        return None
    finally:
        file.close()


def _header_of(config: TopicConfig) -> str:
    return config.varve_view_version_header if config.varve_view_strategy == "header" else ""


def is_outdated(view: ViewPartition) -> bool:
    """Return whether the ledger has another strategy than the topic config."""
    if view.log.ledger is None:
        return False
    manifest, config = view.log.ledger.manifest, view.log.config
    present = (config.varve_view_strategy, _header_of(config))
    return (manifest.strategy, manifest.version_header) != present


def _carried_over(view: ViewPartition) -> Ledger | None:
    """Return the ledger to continue from; None to use the log alone. Raises ViewError."""
    ledger, log = view.log.ledger, view.base.log
    if ledger is None or not is_outdated(view):
        return ledger
    manifest = ledger.manifest
    change = f"its strategy was changed from {manifest.strategy} to {_rule_of(view.log.config)}"
    if manifest.log_compacted or log.config.compacts:
        missing = "the topic is or was compacted itself, by offset"
    elif log.log_start_offset > manifest.first_offset:
        missing = f"its source records below offset {log.log_start_offset} have expired"
    else:
        return None
    raise ViewError(f"{change}, and {missing}; set it back, or {ANEW}")


def _rule_of(config: TopicConfig) -> str:
    header = _header_of(config)
    return f"{config.varve_view_strategy} {header}" if header else config.varve_view_strategy
