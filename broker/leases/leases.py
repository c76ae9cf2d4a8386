"""Remote compactions: opened, resumed, renewed and ended. The event loop owns them.

A remote compaction leases partitions of one topic to a process outside the broker. Which leases
exist and are valid: lease_table.py; what becomes of their output: adoption.py, which
running_adoptions.py starts.

Rules
- A lease blocks only the broker's own cleaner, and only while it lasts. Appends, retention,
  truncation, deletion and config changes go on.
- A lease that is not renewed in time expires: the cleaner resumes and the broker removes its files.
  Expiry does not interrupt an adoption, which has time limits of its own.
- After a restart the broker resumes a lease if nothing has changed: the same topic, the same
  segments, and no records lost at the log's end. A resumed lease gets its full time again. The
  broker sweeps the files of every other lease.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from broker.cleaning.cleaner_host import BrokerCleanerHost
from broker.cleaning.dedicated_workers import StartWorker
from broker.counters import BrokerStats
from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.loop_turns import Turns, run_to_end
from broker.leases.adoption import Adopter
from broker.leases.lease_folder import (
    LeaseRecord,
    leases_path,
    list_lease_folders,
    remove_if_empty,
    remove_lease_folder,
    write_lease,
)
from broker.leases.lease_issuer import LeaseIssuer, LeaseRequest, PausePartition, lease_pause_reason
from broker.leases.lease_table import LeaseTable
from broker.leases.model import LeasedPartition, LeaseError, RemoteCompaction, ended_error
from broker.leases.resumption import StagedLease, find_staged_leases, why_not_resumed
from broker.leases.running_adoptions import RunningAdoptions
from broker.topics.partition import Partition
from broker.topics.topics import Topics
from cleaner.job import new_job_id
from cleaner.lease_states import LeaseState
from cleaner.remote_compaction import LeasePlan, Purpose
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.settings import CleanerSettings
from storage.env import Env
from storage.errors import LogDirectoryError

WATCH_SECONDS: Final = 1.0  # between two checks for leases that have expired
SWEEP_SECONDS: Final = 60.0  # between two sweeps of folders without a lease
COMPACTIONS_MAX: Final = 32  # at the same time; each may pin all segments of its topic
TTL_SECONDS_MIN: Final = 1
TTL_SECONDS_MAX: Final = 3600
logger = structlog.get_logger("broker.leases")


class Leases:
    """Grants leases and watches over them."""

    def __init__(
        self,
        env: Env,
        topics: Topics,
        cleaning: BrokerCleanerHost,
        pool: CleanerPool,
        threads: DirectoryThreads,
        *,
        start_worker: StartWorker,
        settings: Callable[[], CleanerSettings],
        fail_directory: Callable[[LogDirectoryError], None],
        broker_stats: BrokerStats,
    ) -> None:
        """`start_worker` starts the worker that verifies uploaded output."""
        self._env = env
        self._topics = topics
        self._threads = threads
        self._pause: PausePartition = pool.control.paused
        self._issuer = LeaseIssuer(
            env, topics, cleaning, pool, threads, settings=settings, fail_directory=fail_directory
        )
        self.table = LeaseTable(env, topics, threads, broker_stats)
        adopter = Adopter(env, cleaning, pool, threads, start_worker)
        self.adoptions = RunningAdoptions(self.table, adopter)
        self._opening: set[str] = set()  # ids whose folders are being created
        self._begun = 0  # number of requests for leases in progress
        self._watchers: list[asyncio.Task[None]] = []

    # Starting and ending ----------------------------------------------------------------------

    async def start(self) -> None:
        """Resume the leases of an earlier process that are still valid; sweep the others.

        Call this before clients can append.
        """
        for partition in await self._partitions_with_leases():
            await self._resume_partition(partition)
        for compaction in self.table.alive():
            logger.info(
                "lease resumed",
                compaction_id=compaction.compaction_id,
                partitions=len(compaction.parts),
            )
        # Two tasks: a sweep waits for every disk.
        for name, watch in (("leases", self._watch()), ("lease sweep", self._sweep_often())):
            self._watchers.append(asyncio.create_task(self.table.measured(watch), name=name))

    async def stop(self) -> None:
        """Abort verifications and wait for publications; leases stay for the next start."""
        self.table.is_stopping = True
        for compaction in self.table.alive():
            for part in compaction.parts.values():
                if part.runner is not None:
                    part.runner.abort()
        await asyncio.gather(*self.adoptions.tasks, *self.table.tasks, return_exceptions=True)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for compaction in self.table.alive():
            for part in compaction.parts.values():
                await part.pauses.aclose()

    async def _partitions_with_leases(self) -> list[Partition]:
        """Return the partitions with a folder of leases, which few have.

        One call in a thread looks at all of a data directory: for a thousand, calls for each take
        a fifth of a second.
        """
        by_directory = defaultdict[str, list[Partition]](list)
        async for partition in Turns().over(self._topics.partitions()):
            by_directory[partition.log.log_directory.path].append(partition)
        leased: list[Partition] = []
        for path, partitions in by_directory.items():
            leased += await self._threads.run(path, partial(_with_leases, self._env, partitions))
        return leased

    async def _resume_partition(self, partition: Partition) -> None:
        directory = partition.log.directory
        try:
            staged_leases = await self._threads.run(
                directory, partial(find_staged_leases, self._env, directory)
            )
            # Newest first: an older lease may have ended without the removal of its files.
            for staged in sorted(staged_leases, key=_created_ms, reverse=True):
                reason = why_not_resumed(staged, self._issuer.facts_of(partition))
                if not reason and staged.record is not None:
                    reason = self._conflict(staged.record)
                if not reason:
                    await self._resume(staged, partition)
                    continue
                remove = partial(remove_lease_folder, self._env, staged.folder)
                await self._threads.run(directory, remove)
                self.table.stats.swept += 1
                logger.warning("lease not resumed", folder=staged.folder, reason=reason)
            await self._threads.run(directory, partial(remove_if_empty, self._env, directory))
        except OSError as error:
            where = str(partition.partition)
            logger.error("leases not loaded", partition=where, reason=str(error))

    def _conflict(self, record: LeaseRecord) -> str:
        other = self.table.holder(record.plan.job.partition)
        if record.purpose is not Purpose.COMPACT or other is None:
            return ""
        return f"remote compaction {other} leases its partition"

    async def _resume(self, staged: StagedLease, partition: Partition) -> None:
        record = staged.record
        assert record is not None
        compaction = self.table.get(record.compaction_id)
        if compaction is None:
            compaction = RemoteCompaction(
                compaction_id=record.compaction_id,
                topic=record.topic,
                purpose=record.purpose,
                created_ms=record.created_ms,
                ttl_seconds=record.ttl_seconds,
                token_digest=record.token_digest,
                deadline=self._env.monotonic() + record.ttl_seconds,
                expires_ms=self._env.wall_ms() + 1000 * record.ttl_seconds,
            )
            self.table.add(compaction)
            self.table.stats.resumed += 1
        part = LeasedPartition(partition, record, staged.folder, partition.log.generation)
        part.takes_files = not staged.has_manifest
        part.staged_bytes = staged.staged_bytes
        if compaction.purpose is Purpose.COMPACT:
            self.table.reserve([part.where], compaction.compaction_id)
            await part.pauses.enter_async_context(
                self._pause(part.where, lease_pause_reason(compaction.compaction_id))
            )
        compaction.parts[part.where.partition] = part

    # Opening ----------------------------------------------------------------------------------

    async def open(self, request: LeaseRequest) -> LeasePlan:
        """Lease partitions. Raises LeaseError."""
        if self.table.is_stopping:
            raise LeaseError(503, "the broker is stopping")
        if not TTL_SECONDS_MIN <= request.ttl_seconds <= TTL_SECONDS_MAX:
            bounds = f"{TTL_SECONDS_MIN} to {TTL_SECONDS_MAX}"
            raise LeaseError(400, f"ttl_seconds: expected {bounds}, not {request.ttl_seconds}")
        if len(self.table.alive()) + self._begun >= COMPACTIONS_MAX:
            raise LeaseError(
                429, f"there are {COMPACTIONS_MAX} remote compactions already: end one"
            )
        task = self.table.start_task(self._open(request), f"lease {request.topic}")
        self._begun += 1
        task.add_done_callback(self._open_done)
        return await run_to_end(task)

    def _open_done(self, task: asyncio.Task[LeasePlan]) -> None:
        self._begun -= 1

    async def _open(self, request: LeaseRequest) -> LeasePlan:
        partitions = self._issuer.find(request)
        compaction_id = new_job_id(self._env)
        compacts = request.purpose is Purpose.COMPACT
        if compacts:
            self.table.reserve([partition.partition for partition in partitions], compaction_id)
        self._opening.add(compaction_id)
        parts: list[LeasedPartition] = []
        compaction, token = self._issuer.begin(request, compaction_id)
        try:
            for partition in partitions:
                part = await self._issuer.lease(request, compaction, partition)
                if part is not None:
                    parts.append(part)
                elif compacts:
                    self.table.release(partition.partition, compaction_id)
        except BaseException:
            for part in parts:
                await self.table.clear(part)
            for partition in partitions:
                self.table.release(partition.partition, compaction_id)
            raise
        finally:
            self._opening.discard(compaction_id)
        compaction.parts = {part.where.partition: part for part in parts}
        self._renew(compaction, request.ttl_seconds)
        self.table.stats.opened += 1
        if parts:
            self.table.add(compaction)
        else:
            self.table.add_ended(compaction)
        logger.info(
            "lease granted",
            compaction_id=compaction_id,
            topic=request.topic,
            purpose=request.purpose.value,
            partitions=len(parts),
            bytes=sum(part.record.plan.inputs_bytes for part in parts),
            ttl_seconds=request.ttl_seconds,
        )
        plans = tuple(part.record.plan for part in parts)
        return self._issuer.build_plan(compaction, token, plans)

    # Renewal ----------------------------------------------------------------------------------

    def renew(self, compaction_id: str, ttl_seconds: int | None) -> RemoteCompaction:
        """Renew the leases of a remote compaction from now on. Raises LeaseError."""
        compaction = self.table.find(compaction_id)
        requested = compaction.ttl_seconds if ttl_seconds is None else ttl_seconds
        if not TTL_SECONDS_MIN <= requested <= TTL_SECONDS_MAX:
            raise LeaseError(
                400,
                f"ttl_seconds: expected {TTL_SECONDS_MIN} to {TTL_SECONDS_MAX}, not {requested}",
            )
        for part in compaction.parts.values():
            self.table.end_if_stale(part)
        if not compaction.is_alive:
            raise ended_error(compaction)
        self._renew(compaction, requested)
        return compaction

    def _renew(self, compaction: RemoteCompaction, ttl_seconds: int) -> None:
        if compaction.ttl_seconds != ttl_seconds:
            self.table.start_task(self._save_ttl(compaction, ttl_seconds), "lease ttl")
        compaction.ttl_seconds = ttl_seconds
        compaction.deadline = self._env.monotonic() + ttl_seconds
        compaction.expires_ms = self._env.wall_ms() + 1000 * ttl_seconds

    async def _save_ttl(self, compaction: RemoteCompaction, ttl_seconds: int) -> None:
        """Write the new time to disk, for leases that the next start resumes."""
        for part in compaction.parts.values():
            async with part.writing:
                if part.state is not LeaseState.OPEN or compaction.ttl_seconds != ttl_seconds:
                    continue  # a later renewal writes its own value
                part.record = replace(part.record, ttl_seconds=ttl_seconds)
                try:
                    write = partial(write_lease, self._env, part.folder, part.record)
                    await self._threads.run(part.folder, write)
                except OSError as error:  # after a restart the earlier lifetime applies
                    logger.warning(
                        "lease not written", partition=str(part.where), reason=str(error)
                    )

    def abandon(self, compaction_id: str) -> RemoteCompaction:
        """End all leases but those whose output is being adopted. Raises LeaseError."""
        compaction = self.table.find(compaction_id)
        if not compaction.is_alive and compaction.parts:
            raise ended_error(compaction)
        for part in compaction.parts.values():
            if part.state is LeaseState.OPEN:
                self.table.end(part, LeaseState.ABANDONED, "a request ended its lease")
        logger.info("remote compaction ended", compaction_id=compaction_id)
        return compaction

    # Background -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                self.expire_due()
            except Exception:
                logger.exception("lease check failed")  # the next round tries again

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except Exception:
                logger.exception("lease sweep failed")  # the next round tries again

    def expire_due(self) -> None:
        """End leases that have expired or become stale."""
        now = self._env.monotonic()
        for compaction in self.table.alive():
            has_expired = now >= compaction.deadline
            for part in compaction.parts.values():
                self.table.end_if_stale(part)
                if has_expired and part.state is LeaseState.OPEN:
                    self.table.end(part, LeaseState.EXPIRED, "its lease was not renewed in time")
                    self.table.stats.expired += 1

    async def sweep(self) -> None:
        """Remove folders that belong to no lease."""
        for partition in await self._partitions_with_leases():
            directory = partition.log.directory
            try:
                names = partial(list_lease_folders, self._env, directory)
                for name in await self._threads.run(directory, names):
                    if name in self._opening or self.table.owns(name, partition.partition):
                        continue
                    folder = f"{leases_path(directory)}/{name}"
                    remove = partial(remove_lease_folder, self._env, folder)
                    await self._threads.run(directory, remove)
                    self.table.stats.swept += 1
                    logger.info("folder without lease removed", folder=folder)
            except OSError as error:
                where = str(partition.partition)
                logger.warning("lease folders not swept", partition=where, reason=str(error))


def _with_leases(env: Env, partitions: Iterable[Partition]) -> list[Partition]:
    return [each for each in partitions if _may_have_leases(env, each.log.directory)]


def _may_have_leases(env: Env, directory: str) -> bool:
    try:
        return env.is_dir(leases_path(directory))
    except OSError:
        return True  # who reads the folder meets the error, and handles it for this partition


def _created_ms(staged: StagedLease) -> int:
    return -1 if staged.record is None else staged.record.created_ms
