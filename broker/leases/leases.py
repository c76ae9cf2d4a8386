"""Remote compactions and their leases: grant, renew, adopt, end. The event loop owns them.

A remote compaction leases partitions of one topic to a process outside the broker.

Rules
- At most one compacting lease exists for a partition. Leases for reading do not count.
- A lease blocks only the broker's own cleaner, and only while it lasts. Appends, retention,
  truncation, deletion and config changes go on.
- A lease is valid for one generation of one log. It becomes stale if the log gets another
  generation, or if its output can no longer be published before the time from which delete horizons
  count (cleaner/planning/remote_plan.py).
- A lease that is not renewed in time expires: the cleaner resumes and the broker removes its files.
  Expiry does not interrupt an adoption, which has time limits of its own.
- After a restart the broker resumes a lease if nothing has changed: the same topic, the same
  segments, and no records lost at the log's end. A resumed lease gets its full time again. The
  broker sweeps the files of every other lease.
- Remote compactions that ended stay listed for a while, so that late requests get the reason.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import structlog

from broker.counters import BrokerStats
from broker.leases.adoption import Adopter, AdoptionFailedError
from broker.leases.lease_folder import (
    LeaseRecord,
    is_token,
    leases_path,
    list_lease_folders,
    remove_if_empty,
    remove_lease_folder,
    write_lease,
)
from broker.leases.lease_issuer import LeaseIssuer, LeaseRequest, PausePartition, lease_pause_reason
from broker.leases.model import ENDS, LeasedPartition, LeaseError, RemoteCompaction
from broker.leases.resumption import StagedLease, find_staged_leases, why_not_resumed
from broker.loop_turns import run_to_end
from broker.topics.partition import Partition
from broker.topics.topics import Topics
from cleaner.job import new_job_id
from cleaner.lease_states import LeaseState
from cleaner.remote_compaction import AdoptOutcome, AdoptResult, LeasePlan, Purpose
from storage.env import Env
from storage.model import TopicPartition

WATCH_SECONDS: Final = 1.0  # between two checks for leases that have expired
SWEEP_SECONDS: Final = 60.0  # between two sweeps of folders without a lease
COMPACTIONS_MAX: Final = 32  # at the same time; each may pin all segments of its topic
ENDED_MAX: Final = 200  # remote compactions that stay listed after their end
TTL_SECONDS_MIN: Final = 1
TTL_SECONDS_MAX: Final = 3600
PUBLISH_MS: Final = 60_000  # that publication may take after verification
ADOPT_ANSWER_SECONDS: Final = 15.0  # longest wait for an adoption before a response

_GIVEN_UP: Final = (LeaseState.EXPIRED, LeaseState.ABANDONED)
_OUTCOMES: Final = {
    LeaseState.STALE: AdoptOutcome.STALE,
    LeaseState.EXPIRED: AdoptOutcome.EXPIRED,
}

_T = TypeVar("_T")

logger = structlog.get_logger("broker.leases")


@dataclass(slots=True)
class LeaseStats:
    """Counts since the start of the broker."""

    opened: int = 0
    resumed: int = 0
    expired: int = 0  # leases that expired
    swept: int = 0  # folders without a lease that were removed
    outcomes: dict[AdoptOutcome, int] = field(
        default_factory=lambda: dict.fromkeys(AdoptOutcome, 0)
    )
    bytes_sent: int = 0
    bytes_received: int = 0


class Leases:
    """All remote compactions and their leases."""

    def __init__(
        self,
        env: Env,
        topics: Topics,
        issuer: LeaseIssuer,
        adopter: Adopter,
        *,
        pause: PausePartition,
        broker_stats: BrokerStats,
    ) -> None:
        self._broker_stats = broker_stats
        self.stats = LeaseStats()
        self._env = env
        self._topics = topics
        self._issuer = issuer
        self._adopter = adopter
        self._pause = pause
        self._leases: dict[str, RemoteCompaction] = {}
        self._ended: OrderedDict[str, RemoteCompaction] = OrderedDict()
        self._leased: dict[TopicPartition, str] = {}  # ids of the compacting leases
        self._opening: set[str] = set()  # ids whose folders are being created
        self._begun = 0  # number of requests for leases in progress
        self._adoptions: dict[tuple[str, int], asyncio.Task[AdoptResult]] = {}
        self._lock = asyncio.Lock()  # one adoption at a time: it needs the memory of a worker
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False

    async def _measured(self, work: Awaitable[_T]) -> _T:
        return await self._broker_stats.measured("leases", work)

    # Starting and ending ----------------------------------------------------------------------

    async def start(self) -> None:
        """Resume the leases of an earlier process that are still valid; sweep the others.

        Call this before clients can append.
        """
        for partition in tuple(self._topics.partitions()):
            await self._resume_partition(partition)
        for compaction in tuple(self._leases.values()):
            logger.info(
                "lease resumed",
                compaction_id=compaction.compaction_id,
                partitions=len(compaction.parts),
            )
        self._watcher = asyncio.create_task(self._measured(self._watch()), name="leases")

    async def stop(self) -> None:
        """Abort verifications and wait for publications; leases stay for the next start."""
        self._stopping = True
        for compaction in self._leases.values():
            for part in compaction.parts.values():
                if part.runner is not None:
                    part.runner.abort()
        await asyncio.gather(*self._adoptions.values(), *self._tasks, return_exceptions=True)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for compaction in self._leases.values():
            for part in compaction.parts.values():
                await part.pauses.aclose()

    async def _resume_partition(self, partition: Partition) -> None:
        directory = partition.log.directory
        try:
            staged_leases = await asyncio.to_thread(find_staged_leases, self._env, directory)
            # Newest first: an older lease may have ended without the removal of its files.
            for staged in sorted(staged_leases, key=_created_ms, reverse=True):
                reason = why_not_resumed(staged, self._issuer.facts_of(partition))
                if not reason and staged.record is not None:
                    reason = self._conflict(staged.record)
                if not reason:
                    await self._resume(staged, partition)
                    continue
                await asyncio.to_thread(remove_lease_folder, self._env, staged.folder)
                self.stats.swept += 1
                logger.warning("lease not resumed", folder=staged.folder, reason=reason)
            await asyncio.to_thread(remove_if_empty, self._env, directory)
        except OSError as error:
            where = str(partition.partition)
            logger.error("leases not loaded", partition=where, reason=str(error))

    def _conflict(self, record: LeaseRecord) -> str:
        other = self._leased.get(record.plan.job.partition)
        if record.purpose is not Purpose.COMPACT or other is None:
            return ""
        return f"remote compaction {other} leases its partition"

    async def _resume(self, staged: StagedLease, partition: Partition) -> None:
        record = staged.record
        assert record is not None
        compaction = self._leases.get(record.compaction_id)
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
            self._leases[compaction.compaction_id] = compaction
            self.stats.resumed += 1
        part = LeasedPartition(partition, record, staged.folder, partition.log.generation)
        part.takes_files = not staged.has_manifest
        part.staged_bytes = staged.staged_bytes
        if compaction.purpose is Purpose.COMPACT:
            self._leased[part.where] = compaction.compaction_id
            await part.pauses.enter_async_context(
                self._pause(part.where, lease_pause_reason(compaction.compaction_id))
            )
        compaction.parts[part.where.partition] = part

    # Opening ----------------------------------------------------------------------------------

    async def open(self, request: LeaseRequest) -> LeasePlan:
        """Lease partitions. Raises LeaseError."""
        if self._stopping:
            raise LeaseError(503, "the broker is stopping")
        if not TTL_SECONDS_MIN <= request.ttl_seconds <= TTL_SECONDS_MAX:
            bounds = f"{TTL_SECONDS_MIN} to {TTL_SECONDS_MAX}"
            raise LeaseError(400, f"ttl_seconds: expected {bounds}, not {request.ttl_seconds}")
        if len(self._leases) + self._begun >= COMPACTIONS_MAX:
            raise LeaseError(
                429, f"there are {COMPACTIONS_MAX} remote compactions already: end one"
            )
        task = asyncio.create_task(
            self._measured(self._open(request)), name=f"lease {request.topic}"
        )
        self._begun += 1
        self._tasks.add(task)
        task.add_done_callback(self._open_done)
        return await run_to_end(task)

    def _open_done(self, task: asyncio.Task[LeasePlan]) -> None:
        self._begun -= 1
        self._tasks.discard(task)

    async def _open(self, request: LeaseRequest) -> LeasePlan:
        partitions = self._issuer.find(request)
        compaction_id = new_job_id(self._env)
        compacts = request.purpose is Purpose.COMPACT
        if compacts:
            for partition in partitions:
                other = self._leased.get(partition.partition)
                if other is not None:
                    raise LeaseError(409, self._leased_text(partition.partition, other))
            self._leased.update((partition.partition, compaction_id) for partition in partitions)
        self._opening.add(compaction_id)
        parts: list[LeasedPartition] = []
        compaction, token = self._issuer.begin(request, compaction_id)
        try:
            for partition in partitions:
                part = await self._issuer.lease(request, compaction, partition)
                if part is not None:
                    parts.append(part)
                elif compacts:
                    del self._leased[partition.partition]
        except BaseException:
            for part in parts:
                await self._release(part)
                await self._remove(part)
            for partition in partitions:
                if self._leased.get(partition.partition) == compaction_id:
                    del self._leased[partition.partition]
            raise
        finally:
            self._opening.discard(compaction_id)
        compaction.parts = {part.where.partition: part for part in parts}
        self._renew(compaction, request.ttl_seconds)
        self.stats.opened += 1
        if parts:
            self._leases[compaction_id] = compaction
        else:
            self._keep_ended(compaction)
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

    def _leased_text(self, partition: TopicPartition, compaction_id: str) -> str:
        """Return which remote compaction leases a partition, until when, and how to end it."""
        compaction = self._leases.get(compaction_id)
        if compaction is None:
            return (
                f"{partition} is being leased to remote compaction {compaction_id}: try again in a "
                "moment"
            )
        remaining = max(round(compaction.deadline - self._env.monotonic()), 0)
        until = f"{datetime.fromtimestamp(compaction.expires_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
        return (
            f"{partition} is leased to remote compaction {compaction_id} until {until} "
            f"({remaining} s from now), and longer if its process renews the lease. If that "
            f"process is gone, end the lease with `varve leases end {compaction_id}`"
        )

    # Lookup -----------------------------------------------------------------------------------

    def all(self) -> list[RemoteCompaction]:
        """Return every remote compaction, including those that ended recently, oldest first."""
        return [*self._ended.values(), *self._leases.values()]

    def alive(self) -> list[RemoteCompaction]:
        """Return every remote compaction that has not ended."""
        return list(self._leases.values())

    def find(self, compaction_id: str) -> RemoteCompaction:
        """Return a remote compaction, which may have ended recently. Raises LeaseError 404."""
        compaction = self._leases.get(compaction_id) or self._ended.get(compaction_id)
        if compaction is None:
            raise LeaseError(404, f"there is no remote compaction {compaction_id[:100]}")
        return compaction

    def authorize(self, compaction_id: str, partition: int, token: str) -> LeasedPartition:
        """Return a leased partition if the token allows access to its files. Raises LeaseError."""
        compaction = self._leases.get(compaction_id) or self._ended.get(compaction_id)
        if compaction is None or not is_token(token, compaction.token_digest):
            # Without the token, no client can find out which remote compactions exist.
            raise LeaseError(
                401 if not token else 404, "no remote compaction has this ID and this token"
            )
        part = compaction.parts.get(partition)
        if part is None:
            raise LeaseError(404, f"{compaction_id} leases no partition {partition}")
        self.check_alive(part)
        return part

    def check_alive(self, part: LeasedPartition) -> None:
        """Raise LeaseError if the lease has ended or is stale."""
        self._end_if_stale(part)
        if not part.is_alive:
            status = 409 if part.state is LeaseState.STALE else 410
            compaction_id = part.record.compaction_id
            raise LeaseError(
                status, f"the lease of {part.where} to {compaction_id} has ended: {part.reason}"
            )

    def _end_if_stale(self, part: LeasedPartition) -> None:
        """End a lease that has become stale."""
        if part.state is LeaseState.OPEN and not self._stopping:
            reason = self.why_stale(part)
            if reason:
                self._end(part, LeaseState.STALE, reason)

    def why_stale(self, part: LeasedPartition) -> str:
        """Return why a lease is not valid any more; empty if it is."""
        if self._stopping:
            return "the broker is stopping"
        partition = self._topics.partition(part.where)
        if partition is not part.partition:
            return "the partition was deleted or is offline"
        if partition.log.generation != part.generation:
            return "the log was truncated or moved, or its cleanup policy changed"
        by_ms = part.job.published_by_ms
        if by_ms is not None and self._env.wall_ms() > by_ms - PUBLISH_MS:
            return (
                "the remote compaction took too long: its tombstones would be removed before "
                "delete.retention.ms is over; start another one"
            )
        return ""

    # Renewal ----------------------------------------------------------------------------------

    def renew(self, compaction_id: str, ttl_seconds: int | None) -> RemoteCompaction:
        """Renew the leases of a remote compaction from now on. Raises LeaseError."""
        compaction = self.find(compaction_id)
        requested = compaction.ttl_seconds if ttl_seconds is None else ttl_seconds
        if not TTL_SECONDS_MIN <= requested <= TTL_SECONDS_MAX:
            raise LeaseError(
                400,
                f"ttl_seconds: expected {TTL_SECONDS_MIN} to {TTL_SECONDS_MAX}, not {requested}",
            )
        for part in compaction.parts.values():
            self._end_if_stale(part)
        if not compaction.is_alive:
            raise self._ended_error(compaction)
        self._renew(compaction, requested)
        return compaction

    def _renew(self, compaction: RemoteCompaction, ttl_seconds: int) -> None:
        if compaction.ttl_seconds != ttl_seconds:
            task = asyncio.create_task(self._save_ttl(compaction, ttl_seconds), name="lease ttl")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
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
                    await asyncio.to_thread(write_lease, self._env, part.folder, part.record)
                except OSError as error:  # after a restart the earlier lifetime applies
                    logger.warning(
                        "lease not written", partition=str(part.where), reason=str(error)
                    )

    def _ended_error(self, compaction: RemoteCompaction) -> LeaseError:
        is_stale = any(part.state is LeaseState.STALE for part in compaction.parts.values())
        return LeaseError(
            409 if is_stale else 410, f"{compaction.compaction_id} has ended: {compaction.reason}"
        )

    def abandon(self, compaction_id: str) -> RemoteCompaction:
        """End all leases but those whose output is being adopted. Raises LeaseError."""
        compaction = self.find(compaction_id)
        if not compaction.is_alive and compaction.parts:
            raise self._ended_error(compaction)
        for part in compaction.parts.values():
            if part.state is LeaseState.OPEN:
                self._end(part, LeaseState.ABANDONED, "a request ended its lease")
        logger.info("remote compaction ended", compaction_id=compaction_id)
        return compaction

    # Adoption ---------------------------------------------------------------------------------

    async def adopt(
        self, compaction_id: str, partition: int | None
    ) -> tuple[bool, list[AdoptResult], RemoteCompaction]:
        """Verify and publish uploaded output, or join an adoption in progress.

        Returns whether all partitions are done, the results so far, and the remote compaction.
        Raises LeaseError.
        """
        compaction = self.find(compaction_id)
        if compaction.purpose is not Purpose.COMPACT:
            raise LeaseError(
                409, f"{compaction_id} leases partitions for reading: it has no output"
            )
        if partition is not None and partition not in compaction.parts:
            raise LeaseError(404, f"{compaction_id} leases no partition {partition}")
        parts = [
            part
            for number, part in compaction.parts.items()
            if partition is None or number == partition
        ]
        for part in parts:
            self._end_if_stale(part)
        if parts and all(part.state in _GIVEN_UP for part in parts):
            raise self._ended_error(compaction)
        tasks = [self._adoption(part) for part in parts if part.is_alive]
        if tasks:
            await asyncio.wait(tasks, timeout=ADOPT_ANSWER_SECONDS)
        results, failures = [], []
        for task in tasks:
            if task.done() and task.exception() is not None:
                failures.append(str(task.exception()))
            elif task.done() and task.result().outcome is AdoptOutcome.NOTHING:
                results.append(task.result())
        if failures:
            raise LeaseError(503, "; ".join(failures))
        results += [part.result for part in parts if part.result is not None]
        return all(task.done() for task in tasks), results, compaction

    def _adoption(self, part: LeasedPartition) -> asyncio.Task[AdoptResult]:
        key = part.record.compaction_id, part.where.partition
        task = self._adoptions.get(key)
        if task is None:
            task = asyncio.create_task(
                self._measured(self._adopt(part)), name=f"adopt {part.where}"
            )
            part.state = LeaseState.ADOPTING
            self._adoptions[key] = task
            task.add_done_callback(lambda done: self._adoption_done(key, done))
        return task

    def _adoption_done(self, key: tuple[str, int], task: asyncio.Task[AdoptResult]) -> None:
        del self._adoptions[key]
        if not task.cancelled():
            task.exception()  # it is logged, and clients that wait get it

    async def _adopt(self, part: LeasedPartition) -> AdoptResult:
        try:
            async with self._lock:
                result = await self._adopter.adopt(part, lambda: self.why_stale(part))
        except AdoptionFailedError as error:
            part.state = LeaseState.OPEN
            logger.warning("adoption failed", partition=str(part.where), reason=str(error))
            raise
        except BaseException:
            part.state = LeaseState.OPEN
            logger.exception("adoption failed", partition=str(part.where))
            raise
        self.stats.outcomes[result.outcome] += 1
        if result.outcome is AdoptOutcome.NOTHING:
            part.state = LeaseState.OPEN
            return result
        if self._stopping and result.outcome is AdoptOutcome.STALE:
            part.state = LeaseState.OPEN  # the next start decides whether the lease is valid
            raise AdoptionFailedError(result.reason)
        part.result = result
        reason = result.reason or "its output was adopted"
        await self._end_now(part, ENDS[result.outcome], reason)
        return result

    # End --------------------------------------------------------------------------------------

    def _end(self, part: LeasedPartition, state: LeaseState, reason: str) -> None:
        """End a lease now and remove its files in the background."""
        self._mark(part, state, reason)
        outcome = _OUTCOMES.get(state)
        if outcome is not None and part.record.purpose is Purpose.COMPACT:
            part.result = AdoptResult(part.where, outcome, reason)
        task = asyncio.create_task(self._measured(self._clear(part)), name=f"sweep {part.where}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_now(self, part: LeasedPartition, state: LeaseState, reason: str) -> None:
        """End a lease and remove its files before returning."""
        self._mark(part, state, reason)
        await self._clear(part)

    def _mark(self, part: LeasedPartition, state: LeaseState, reason: str) -> None:
        part.state, part.reason, part.takes_files = state, reason, False
        compaction_id = part.record.compaction_id
        if self._leased.get(part.where) == compaction_id:
            del self._leased[part.where]
        compaction = self._leases.get(compaction_id)
        if compaction is not None and not compaction.is_alive:
            del self._leases[compaction_id]
            self._keep_ended(compaction)
        logger.info(
            "lease ended",
            partition=str(part.where),
            compaction_id=compaction_id,
            state=state.value,
            reason=reason,
        )

    async def _clear(self, part: LeasedPartition) -> None:
        await self._release(part)
        await self._remove(part)

    async def _release(self, part: LeasedPartition) -> None:
        await part.pauses.aclose()

    async def _remove(self, part: LeasedPartition) -> None:
        """Remove the files of a lease. Those of a deleted topic are removed with the topic."""
        async with part.writing:  # otherwise a write in progress would create the lease again
            try:
                await asyncio.to_thread(remove_lease_folder, self._env, part.folder)
            except OSError as error:  # the sweeper tries again
                logger.warning("lease files not removed", folder=part.folder, reason=str(error))

    def _keep_ended(self, compaction: RemoteCompaction) -> None:
        self._ended[compaction.compaction_id] = compaction
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    # Background -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        swept_at = self._env.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                self.expire_due()
                now = self._env.monotonic()
                if now - swept_at >= SWEEP_SECONDS:
                    swept_at = now
                    await self.sweep()
            except Exception:
                logger.exception("lease check failed")  # the next round tries again

    def expire_due(self) -> None:
        """End leases that have expired or become stale."""
        now = self._env.monotonic()
        for compaction in tuple(self._leases.values()):
            has_expired = now >= compaction.deadline
            for part in compaction.parts.values():
                self._end_if_stale(part)
                if has_expired and part.state is LeaseState.OPEN:
                    self._end(part, LeaseState.EXPIRED, "its lease was not renewed in time")
                    self.stats.expired += 1

    async def sweep(self) -> None:
        """Remove folders that belong to no lease."""
        for partition in tuple(self._topics.partitions()):
            directory = partition.log.directory
            try:
                for name in await asyncio.to_thread(list_lease_folders, self._env, directory):
                    if name in self._opening or self._owns(name, partition.partition):
                        continue
                    folder = f"{leases_path(directory)}/{name}"
                    await asyncio.to_thread(remove_lease_folder, self._env, folder)
                    self.stats.swept += 1
                    logger.info("folder without lease removed", folder=folder)
            except OSError as error:
                where = str(partition.partition)
                logger.warning("lease folders not swept", partition=where, reason=str(error))

    def _owns(self, compaction_id: str, partition: TopicPartition) -> bool:
        compaction = self._leases.get(compaction_id)
        part = None if compaction is None else compaction.parts.get(partition.partition)
        return part is not None and part.is_alive and part.where == partition


def _created_ms(staged: StagedLease) -> int:
    return -1 if staged.record is None else staged.record.created_ms
