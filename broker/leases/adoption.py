"""Adopt the output of a remote compaction: check the manifest, verify the files, publish them.

Rules
- Output is not trusted. The manifest is checked against the lease. A worker process runs the job
  again and compares its result with the files (cleaner/engine/verify_job.py), through links
  that no client can address.
- The log does not change before this comparison has succeeded. The lease is checked again directly
  before publication.
- Output is published like any clean (broker/cleaning/cleaner_host.py): one journal for all groups.
  Meanwhile, deletion and changes of the partition wait, as they do for the cleaner.
- A refused adoption leaves no file in the partition's folder.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final

import structlog

from broker.cleaning.cleaner_host import BrokerCleanerHost
from broker.cleaning.dedicated_workers import StartWorker
from broker.event_loop.directory_threads import DirectoryThreads
from broker.leases.lease_folder import (
    CheckFolders,
    discard_check,
    link_outputs,
    link_sources,
    make_check_folders,
    move_outputs,
    read_manifest,
)
from broker.leases.model import LeasedPartition
from cleaner.host import VOID_REASONS, PublishOutcome, void_outcome
from cleaner.job import CleanAbortedError, CleanedGroup, CleanReport
from cleaner.remote_compaction import (
    AdoptOutcome,
    AdoptResult,
    MalformedPlanError,
    OutputManifest,
    is_cleaned_name,
    is_folder,
    is_scratch_folder,
)
from cleaner.scheduler.clean_attempt import remove_unpublished
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.scheduler.control import PartitionBusyError
from cleaner.scheduler.history import build_record, describe_damage
from cleaner.verification import InvalidOutputError, VerifyReport
from cleaner.workers.dedicated_worker import JobFailedError
from storage.env import Env
from storage.errors import StorageError, SwapRefusedError

BUSY_SECONDS: Final = 10.0  # that publication waits for a change of the topic
BUSY_STEP_SECONDS: Final = 0.05
ENGINE_CHARS_MAX: Final = 40

logger = structlog.get_logger("broker.leases")


class _RefusedError(Exception):
    """The adoption ends with this outcome for this reason; the log was not changed."""

    def __init__(self, outcome: AdoptOutcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class AdoptionFailedError(Exception):
    """The output could not be verified, for example because the worker failed.

    The log was not changed. The client may try again.
    """


class Adopter:
    """Adopts the output of leased partitions."""

    def __init__(
        self,
        env: Env,
        cleaning: BrokerCleanerHost,
        pool: CleanerPool,
        threads: DirectoryThreads,
        worker: StartWorker,
    ) -> None:
        self._env = env
        self._cleaning = cleaning
        self._pool = pool
        self._threads = threads
        self._worker = worker

    async def adopt(self, part: LeasedPartition, why_stale: Callable[[], str]) -> AdoptResult:
        """Verify and publish output; `why_stale` returns "" while the lease is valid.

        Never cancelled once it runs. Raises AdoptionFailedError.
        """
        try:
            return await self._adopt(part, why_stale)
        except _RefusedError as error:
            logger.warning(
                "output not adopted",
                partition=str(part.where),
                compaction_id=part.record.compaction_id,
                outcome=error.outcome.value,
                reason=error.reason,
            )
            return AdoptResult(part.where, error.outcome, error.reason)

    async def _adopt(self, part: LeasedPartition, why_stale: Callable[[], str]) -> AdoptResult:
        env = self._env
        try:
            read = partial(read_manifest, env, part.folder, part.job)
            manifest = await self._threads.run(part.folder, read)
        except MalformedPlanError as error:
            raise _RefusedError(AdoptOutcome.INVALID, str(error)) from error
        except OSError as error:
            raise AdoptionFailedError(str(error)) from error
        if manifest is None:
            reason = "no output was submitted: there is no manifest"
            raise _RefusedError(AdoptOutcome.NOTHING, reason)
        part.takes_files = False
        _check_claims(part, manifest)
        await self._discard(part)  # links that an earlier adoption could not remove
        _check_stale(why_stale)
        try:
            check = part.partition.make_folder(partial(make_check_folders, env, part.folder))
        except (OSError, StorageError) as error:
            raise AdoptionFailedError(str(error)) from error
        try:
            verified = await self._verify(part, manifest, check, why_stale)
            published = await self._publish(part, manifest.groups, check, why_stale)
        finally:
            await self._discard(part)
        self._settle(part, manifest, verified, published)
        return AdoptResult(
            partition=part.where,
            outcome=AdoptOutcome.ADOPTED,
            groups_published=published,
            bytes_before=verified.report.bytes_before,
            bytes_after=verified.report.bytes_after,
            verify_seconds=round(verified.seconds, 3),
        )

    async def _discard(self, part: LeasedPartition) -> None:
        try:
            await self._threads.run(part.folder, partial(discard_check, self._env, part.folder))
        except OSError as error:  # removed with the lease
            logger.warning("verification links not removed", folder=part.folder, reason=str(error))

    # Verification ---------------------------------------------------------------------------

    async def _verify(
        self,
        part: LeasedPartition,
        manifest: OutputManifest,
        check: CheckFolders,
        why_stale: Callable[[], str],
    ) -> VerifyReport:
        """Raises _RefusedError, AdoptionFailedError."""
        job = replace(part.job, directory=check.sources)
        try:
            for link in (
                partial(link_sources, self._env, part.directory, part.folder, check, job),
                partial(
                    link_outputs, self._env, part.folder, check, manifest.groups, manifest.folders
                ),
            ):
                await self._threads.run(part.folder, link)
            async with self._worker() as runner:
                part.runner = runner
                _check_stale(why_stale)  # a stop aborts the verifications that have begun
                folders = [check.outputs] * len(manifest.groups)
                verified = await runner.verify(job, manifest.groups, folders)
        except InvalidOutputError as error:
            raise _RefusedError(
                AdoptOutcome.INVALID, _with_known_paths(str(error), check, part)
            ) from error
        except (JobFailedError, OSError) as error:
            raise AdoptionFailedError(_with_known_paths(str(error), check, part)) from error
        except CleanAbortedError as error:
            raise AdoptionFailedError("the verification was aborted") from error
        finally:
            part.runner = None
        return replace(verified, report=_localized_report(verified.report, check, part))

    # Publication ----------------------------------------------------------------------------

    async def _publish(
        self,
        part: LeasedPartition,
        groups: tuple[CleanedGroup, ...],
        check: CheckFolders,
        why_stale: Callable[[], str],
    ) -> int:
        """Publish the groups; return how many were published.

        Raises _RefusedError, AdoptionFailedError.
        """
        busy = ""
        for _ in range(int(BUSY_SECONDS / BUSY_STEP_SECONDS)):
            _check_stale(why_stale)
            try:
                with self._pool.control.adopting(part.where):
                    return await self._publish_now(part, groups, check)
            except PartitionBusyError as error:
                busy = str(error)
            await asyncio.sleep(BUSY_STEP_SECONDS)
        raise AdoptionFailedError(busy)

    async def _publish_now(
        self, part: LeasedPartition, groups: tuple[CleanedGroup, ...], check: CheckFolders
    ) -> int:
        job = replace(part.job, directory=part.directory, generation=part.generation)
        try:
            move = partial(move_outputs, self._env, check.outputs, part.directory, groups)
            await self._threads.run(part.directory, move)
        except OSError as error:  # there is no journal yet, so moved files can go
            await remove_unpublished(self._env, job)
            raise AdoptionFailedError(str(error)) from error
        try:
            if groups:
                await self._pool.state_store.prepare_publication(part.where, job.end_offset)
            outcomes = await self._cleaning.publish(job, groups) if groups else ()
        except SwapRefusedError as error:
            await remove_unpublished(self._env, job)
            if error.lacks_room:  # the upload keeps its own links to the files
                raise AdoptionFailedError(f"publication refused: {error}") from error
            raise _RefusedError(AdoptOutcome.STALE, f"publication refused: {error}") from error
        except (StorageError, OSError) as error:
            # Keep the files: if there is a journal, the next start needs them.
            raise _RefusedError(AdoptOutcome.STALE, f"publication failed: {error}") from error
        published = outcomes.count(PublishOutcome.PUBLISHED)
        if published < len(groups):
            await remove_unpublished(self._env, job)
        void = void_outcome(outcomes)
        if void is not None:
            reason = VOID_REASONS[void]
            if void is PublishOutcome.LATE:
                reason += "; start another remote compaction"
            raise _RefusedError(AdoptOutcome.STALE, reason)
        return published

    def _settle(
        self,
        part: LeasedPartition,
        manifest: OutputManifest,
        verified: VerifyReport,
        published: int,
    ) -> None:
        """Record a publication: checkpoint, cleaner state, history, log line."""
        facts = self._cleaning.facts_of(part.where)
        if facts is None or facts.generation != part.generation:
            return  # the log was truncated or deleted directly after publication
        report, engine = verified.report, _printable_ascii(manifest.engine) or "remote"
        job = replace(part.job, directory=part.directory, generation=part.generation)
        damage = describe_damage(report.damaged) if report.damaged else ""
        record = build_record(
            job,
            report,
            outcome="damaged" if damage else "finished",
            reason=damage,
            started_ms=part.record.created_ms,
            finished_ms=self._env.wall_ms(),
            published=published,
            dropped=len(manifest.groups) - published,
            dirty_bytes=part.record.dirty_bytes,
            next_dirty_offset=report.next_dirty_offset,
        )
        record = replace(record, bytes_read=report.bytes_read, engine=engine)
        self._pool.remote.adopted(facts, job, report, record)
        self._cleaning.finished(job, report, damage=damage, engine=engine)


def _printable_ascii(reported: str) -> str:
    """Return a text from a manifest without characters that affect a terminal."""
    return "".join(c if " " <= c <= "~" else "?" for c in reported[:ENGINE_CHARS_MAX])


def _check_stale(why_stale: Callable[[], str]) -> None:
    reason = why_stale()
    if reason:
        raise _RefusedError(AdoptOutcome.STALE, reason)


def _check_claims(part: LeasedPartition, manifest: OutputManifest) -> None:
    """Check the manifest against the lease. Raises _RefusedError."""
    job = part.job
    if manifest.generation != job.generation:
        reason = f"the output was made from generation {manifest.generation[:80]!r} of the log"
        raise _RefusedError(AdoptOutcome.STALE, reason)
    reason = why_wrong(part, manifest)
    if reason:
        raise _RefusedError(AdoptOutcome.INVALID, f"its manifest is wrong: {reason}")


def why_wrong(part: LeasedPartition, manifest: OutputManifest) -> str:
    """Return why a manifest does not match its lease; empty if it does. Pure."""
    job, claimed = part.job, chain.from_iterable(g.source_base_offsets for g in manifest.groups)
    planned = {tuple(source.base_offset for source in group) for group in job.groups}
    for subject, reported, leased in (
        ("remote compaction", manifest.compaction_id, job.job_id),
        ("partition", manifest.partition, job.partition),
        ("topic id", manifest.topic_id.hex(), part.record.plan.topic_id.hex()),
        ("end offset", manifest.end_offset, job.end_offset),
    ):
        if reported != leased:
            return f"{subject} {str(reported)[:300]!r} instead of {str(leased)!r}"
    if len(manifest.folders) != len(manifest.groups):
        return f"{len(manifest.groups)} groups in {len(manifest.folders)} folders"
    for name in manifest.folders:
        if not is_folder(name) or is_scratch_folder(name):
            return f"{name[:100]!r} is not an output folder"
    if max(claimed, default=-1) >= job.end_offset:
        return f"a group lies at or beyond the end offset {job.end_offset}"
    for group in manifest.groups:
        if group.source_base_offsets not in planned:
            return f"no group of the job has the sources {str(group.source_base_offsets)[:100]}"
        output = group.output
        if output is None:
            continue
        first = group.source_base_offsets[0]
        if (output.base_offset, output.job_id) != (first, job.job_id):
            return f"the output of segment {first} belongs to another segment or job"
        for file in output.files:
            prefix = f"{first:020d}."
            if not is_cleaned_name(file.name, job.job_id) or not file.name.startswith(prefix):
                return f"{file.name[:100]!r} is not a file of the output of segment {first}"
    return ""


def _localized_report(
    report: CleanReport, check: CheckFolders, part: LeasedPartition
) -> CleanReport:
    """Return the report with the paths of the log's own files."""
    damaged = tuple(
        damage._replace(path=_with_known_paths(damage.path, check, part))
        for damage in report.damaged
    )
    return replace(report, generation=part.generation, damaged=damaged)


def _with_known_paths(text: str, check: CheckFolders, part: LeasedPartition) -> str:
    """Replace the folders of links in a text by the folders that clients know."""
    return text.replace(check.sources, part.directory).replace(check.outputs, f"{part.folder}/out")
