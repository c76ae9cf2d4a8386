"""Leasing one partition after the other: who may, what is planned, and the links that pin it.

Rules
- What is planned is flushed before: a run never knows more than its log after a loss of power.
- Where the run compacts the broker's cleaner is held off from here on. To read, no clean is given
  up: if one puts other files under the names of segments while they are linked, they are linked
  anew. A mixture could bring deleted keys back.
- Retention may take a segment before it is linked: then what is left is planned anew.
- A lease stands durably before anybody is told of it.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from typing import Final

from broker.cleaning.cleaner_host import BrokerCleanerHost
from broker.leases.lease_folder import (
    IN,
    LeaseRecord,
    digest_of,
    lease_path,
    link_inputs,
    make_folders,
    remove_run,
    sources_of,
    write_lease,
)
from broker.leases.model import LeasedPartition, LeaseError, RemoteCompaction
from broker.topics.partition import OfflinePartitionError, Partition
from broker.topics.topics import TopicError, Topics
from cleaner.host import LogFacts
from cleaner.job import CleanJob
from cleaner.planning.remote_plan import reading_job
from cleaner.remote_compaction import LeasePlan, PartitionPlan, Purpose
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.settings import CleanerSettings
from storage.env import Env
from storage.errors import LogDirectoryError, NoRoomError, StorageError
from storage.model import TopicPartition

ATTEMPTS: Final = 5  # at linking what retention may take, and the cleaner replace
TOKEN_BYTES: Final = 32

PausePartition = Callable[[TopicPartition, str], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What somebody asks for. `partitions` None: all of the topic."""

    topic: str
    partitions: tuple[int, ...] | None
    purpose: Purpose
    roll: bool
    ttl_seconds: int


class _SwappedError(Exception):
    """The cleaner replaced segments while they were linked."""


class LeaseIssuer:
    """Plans and stages."""

    def __init__(
        self,
        env: Env,
        topics: Topics,
        cleaning: BrokerCleanerHost,
        pool: CleanerPool,
        *,
        settings: Callable[[], CleanerSettings],
        fail_directory: Callable[[LogDirectoryError], None],
    ) -> None:
        self._env = env
        self._topics = topics
        self._cleaning = cleaning
        self._pool = pool
        self._settings = settings
        self._fail_directory = fail_directory

    def new_compaction_id(self) -> str:
        """One that no other run has, and that may be part of a file's name."""
        return f"{self._env.wall_ms():x}-{self._env.random_bytes(4).hex()}"

    def facts_of(self, partition: Partition) -> LogFacts | None:
        """What the planner goes by."""
        return self._cleaning.facts_of(partition.partition)

    def find(self, request: LeaseRequest) -> list[Partition]:
        """The partitions that are meant. Raises LeaseError."""
        topic = self._topics.get(request.topic)
        if topic is None:
            raise LeaseError(404, f"there is no topic {request.topic[:300]}")
        numbers = request.partitions
        if numbers is None:
            numbers = tuple(sorted(topic.partitions.keys() | topic.offline.keys()))
        result = []
        for number in sorted(set(numbers)):
            partition = topic.partitions.get(number)
            if partition is None and number not in topic.offline:
                reason = f"topic {topic.name} has {topic.partition_count} partitions, from 0 on"
                raise LeaseError(404, reason)
            if partition is None:
                reason = f"{topic.name}-{number} is offline: {topic.offline[number]}"
                raise LeaseError(409, reason)
            if request.purpose is Purpose.COMPACT:
                self._check_cleanable(partition)
            result.append(partition)
        return result

    def _check_cleanable(self, partition: Partition) -> None:
        topic_partition, config = partition.partition, partition.log.config
        if not config.policy_known:
            reason = f"the cleanup.policy of {topic_partition} is not known: nobody gave one yet"
            raise LeaseError(400, reason)
        if not config.compacts:
            policy = ",".join(config.cleanup_policy) or "empty"
            raise LeaseError(
                400, f"{topic_partition} is not compacted: its cleanup.policy is {policy}"
            )
        if self._pool.operator.is_paused(topic_partition):
            raise LeaseError(409, f"{topic_partition} is paused by an operator: resume it first")

    def begin(self, request: LeaseRequest, compaction_id: str) -> tuple[RemoteCompaction, str]:
        """A run without partitions, and its token."""
        token = secrets.token_hex(TOKEN_BYTES)
        compaction = RemoteCompaction(
            compaction_id=compaction_id,
            topic=request.topic,
            purpose=request.purpose,
            created_ms=self._env.wall_ms(),
            ttl_seconds=request.ttl_seconds,
            token_digest=digest_of(token),
            deadline=0.0,
            expires_ms=0,
        )
        return compaction, token

    def plan_of(
        self, compaction: RemoteCompaction, token: str, plans: tuple[PartitionPlan, ...]
    ) -> LeasePlan:
        """What whoever asked is told."""
        return LeasePlan(
            compaction.compaction_id,
            compaction.topic,
            compaction.purpose,
            compaction.created_ms,
            compaction.expires_ms,
            token,
            plans,
        )

    async def lease(
        self, request: LeaseRequest, compaction: RemoteCompaction, partition: Partition
    ) -> LeasedPartition | None:
        """Lease one partition; None where there is nothing to do. Raises LeaseError.

        Whoever gets it lets go of its `holds`.
        """
        topic_partition = partition.partition
        async with AsyncExitStack() as holds:
            if request.purpose is Purpose.COMPACT:
                hold = self._pool.control.paused(
                    topic_partition, lease_pause_reason(compaction.compaction_id)
                )
                await holds.enter_async_context(hold)
            try:
                part = await self._staged(request, compaction, partition)
            except OfflinePartitionError as error:
                raise LeaseError(409, str(error)) from error
            except LogDirectoryError as error:
                self._fail_directory(error)
                raise LeaseError(409, f"{topic_partition} is offline: {error}") from error
            except NoRoomError as error:
                raise LeaseError(507, f"there is no room: {error}") from error
            except _SwappedError as error:
                raise LeaseError(503, str(error)) from error
            except (StorageError, TopicError, OSError) as error:
                raise LeaseError(409, f"{topic_partition} cannot be leased: {error}") from error
            if part is not None:
                part.pauses = holds.pop_all()
            return part

    async def _staged(
        self, request: LeaseRequest, compaction: RemoteCompaction, partition: Partition
    ) -> LeasedPartition | None:
        self._check_there(partition)
        if request.roll:
            partition.log.roll(self._env.wall_ms())
        for attempt in range(ATTEMPTS):
            await partition.flush()
            await self._wait_for_swap(partition)
            facts = self._cleaning.facts_of(partition.partition)
            assert facts is not None, partition.partition
            job, dirty_bytes = self._plan(
                request.purpose, facts, partition, compaction.compaction_id
            )
            if job is None:
                return None
            folder = lease_path(partition.log.directory, compaction.compaction_id)
            make_folders(self._env, folder)
            try:
                return await self._link(compaction, partition, facts, job, dirty_bytes=dirty_bytes)
            except BaseException as error:
                await asyncio.to_thread(remove_run, self._env, folder)
                is_passing = isinstance(error, FileNotFoundError | _SwappedError)
                if attempt == ATTEMPTS - 1 or not is_passing:
                    raise
        raise AssertionError

    async def _wait_for_swap(self, partition: Partition) -> None:
        """Until the cleaner is not just putting files in place. Raises LeaseError."""
        is_over = await self._cleaning.wait_for_swap(partition)
        self._check_there(partition)
        if not is_over:
            raise LeaseError(503, f"the cleaner is busy with {partition.partition}: ask again")

    async def _link(
        self,
        compaction: RemoteCompaction,
        partition: Partition,
        facts: LogFacts,
        job: CleanJob,
        *,
        dirty_bytes: int,
    ) -> LeasedPartition:
        folder = lease_path(facts.directory, compaction.compaction_id)
        sources = sources_of(job)
        bases = [base for base, _ in sources]
        swaps = self._cleaning.swaps_begun(facts.partition)
        mtimes = await asyncio.to_thread(link_inputs, self._env, facts.directory, folder, bases)
        self._check_there(partition)
        if self._cleaning.swaps_begun(facts.partition) != swaps:
            raise _SwappedError(f"{facts.partition} is cleaned all the time: ask again")
        record = LeaseRecord(
            compaction_id=compaction.compaction_id,
            topic=compaction.topic,
            purpose=compaction.purpose,
            created_ms=compaction.created_ms,
            ttl_seconds=compaction.ttl_seconds,
            token_digest=compaction.token_digest,
            plan=PartitionPlan(
                job=replace(job, directory=f"{folder}/{IN}"),
                topic_id=facts.topic_id,
                inputs_bytes=sum(size_bytes for _, size_bytes in sources),
            ),
            dirty_bytes=dirty_bytes,
            log_end_offset=facts.log_end_offset,
            checkpoint_offset=facts.checkpoint_offset,
            mtimes_ms=mtimes,
        )
        await asyncio.to_thread(write_lease, self._env, folder, record)
        self._check_there(partition)
        if partition.log.generation != facts.generation:
            raise LeaseError(409, f"{partition.partition} was cut or changed meanwhile")
        return LeasedPartition(partition, record, folder, facts.generation)

    def _plan(
        self, purpose: Purpose, facts: LogFacts, partition: Partition, compaction_id: str
    ) -> tuple[CleanJob | None, int]:
        if purpose is Purpose.COMPACT:
            return self._pool.remote.plan(facts, compaction_id)
        inputs = self._cleaning.job_inputs(
            facts.partition, facts.log_start_offset, facts.log_end_offset
        )
        job = reading_job(
            facts,
            inputs,
            self._settings(),
            decided_offset=min(partition.log.high_watermark, partition.log.last_stable_offset),
            now_ms=self._env.wall_ms(),
            job_id=compaction_id,
        )
        return job, 0

    def _check_there(self, partition: Partition) -> None:
        if self._topics.partition(partition.partition) is not partition:
            raise LeaseError(404, f"{partition.partition} has just gone away")


def lease_pause_reason(compaction_id: str) -> str:
    """Why the pool gave up what it was doing with a partition, for its history."""
    return f"run {compaction_id} took it"
