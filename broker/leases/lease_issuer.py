"""Grant leases of partitions: check the request, plan a job, pin its segments by hard links.

Rules
- The log is flushed before it is planned. A plan never covers records that a power failure loses.
- A compacting lease pauses the broker's cleaner for the partition. A reading lease aborts no clean:
  its segments are linked between two swaps (broker/cleaning/segment_links.py).
- The lease is on disk before a client learns about it.
"""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from broker.cleaning.cleaner_host import BrokerCleanerHost
from broker.cleaning.segment_links import SegmentsReplacedError, link_between_swaps
from broker.event_loop.directory_threads import DirectoryThreads
from broker.leases.lease_folder import (
    IN,
    LeaseRecord,
    hash_token,
    lease_path,
    link_inputs,
    make_folders,
    remove_lease_folder,
    sources_of,
    write_lease,
)
from broker.leases.model import LeasedPartition, LeaseError, RemoteCompaction
from broker.topics.partition import Partition
from broker.topics.topics import TopicError, Topics
from cleaner.host import LogFacts
from cleaner.job import CleanJob
from cleaner.planning.remote_plan import reading_job
from cleaner.remote_compaction import LeasePlan, PartitionPlan, Purpose
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.settings import CleanerSettings
from storage.env import Env
from storage.errors import LogDirectoryError, NoRoomError, OfflinePartitionError, StorageError
from storage.model import TopicPartition

TOKEN_BYTES: Final = 32

PausePartition = Callable[[TopicPartition, str], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A request for leases. `partitions` is None for all partitions of the topic."""

    topic: str
    partitions: tuple[int, ...] | None
    purpose: Purpose
    roll: bool
    ttl_seconds: int


@dataclass(slots=True)
class _StagedJob:
    """A planned job and the folder of its lease."""

    facts: LogFacts
    job: CleanJob
    dirty_bytes: int
    folder: str
    part: LeasedPartition | None = None  # once the lease is written


class LeaseIssuer:
    """Plans leases and creates their folders."""

    def __init__(
        self,
        env: Env,
        topics: Topics,
        cleaning: BrokerCleanerHost,
        pool: CleanerPool,
        threads: DirectoryThreads,
        *,
        settings: Callable[[], CleanerSettings],
        fail_directory: Callable[[LogDirectoryError], None],
    ) -> None:
        self._env = env
        self._topics = topics
        self._cleaning = cleaning
        self._pool = pool
        self._threads = threads
        self._settings = settings
        self._fail_directory = fail_directory

    def facts_of(self, partition: Partition) -> LogFacts | None:
        """Return the facts from which a clean of the partition is planned."""
        return self._cleaning.facts_of(partition.partition)

    def find(self, request: LeaseRequest) -> list[Partition]:
        """Return the partitions that a request names. Raises LeaseError."""
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
                reason = (
                    f"topic {topic.name} has {topic.partition_count} partitions, numbered from 0"
                )
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
            reason = (
                f"the cleanup.policy of {topic_partition} is unknown: set it in the settings file "
                "or with an admin client"
            )
            raise LeaseError(400, reason)
        if not config.compacts:
            policy = ",".join(config.cleanup_policy) or "empty"
            raise LeaseError(
                400, f"{topic_partition} is not compacted: its cleanup.policy is {policy}"
            )
        if self._pool.operator.is_paused(topic_partition):
            raise LeaseError(409, f"{topic_partition} is paused by an operator: resume it first")

    def begin(self, request: LeaseRequest, compaction_id: str) -> tuple[RemoteCompaction, str]:
        """Return a remote compaction without leases, and its token."""
        token = secrets.token_hex(TOKEN_BYTES)
        compaction = RemoteCompaction(
            compaction_id=compaction_id,
            topic=request.topic,
            purpose=request.purpose,
            created_ms=self._env.wall_ms(),
            ttl_seconds=request.ttl_seconds,
            token_digest=hash_token(token),
            deadline=0.0,
            expires_ms=0,
        )
        return compaction, token

    def build_plan(
        self, compaction: RemoteCompaction, token: str, plans: tuple[PartitionPlan, ...]
    ) -> LeasePlan:
        """Return the plan for the client."""
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
        """Lease one partition; return None if there is nothing to do. Raises LeaseError.

        The caller closes the `pauses` of the lease when it ends.
        """
        topic_partition = partition.partition
        async with AsyncExitStack() as pauses:
            if request.purpose is Purpose.COMPACT:
                pause = self._pool.control.paused(
                    topic_partition, lease_pause_reason(compaction.compaction_id)
                )
                await pauses.enter_async_context(pause)
            try:
                part = await self._stage(request, compaction, partition)
            except OfflinePartitionError as error:
                raise LeaseError(409, str(error)) from error
            except LogDirectoryError as error:
                self._fail_directory(error)
                raise LeaseError(409, f"{topic_partition} is offline: {error}") from error
            except NoRoomError as error:
                raise LeaseError(507, f"the disk has too little free space: {error}") from error
            except SegmentsReplacedError as error:
                raise LeaseError(503, str(error)) from error
            except (StorageError, TopicError, OSError) as error:
                raise LeaseError(409, f"{topic_partition} cannot be leased: {error}") from error
            if part is not None:
                part.pauses = pauses.pop_all()
            return part

    async def _stage(
        self, request: LeaseRequest, compaction: RemoteCompaction, partition: Partition
    ) -> LeasedPartition | None:
        self._check_served(partition)
        if request.roll:
            partition.roll(self._env.wall_ms())

        @asynccontextmanager
        async def flushed(_: bool) -> AsyncIterator[None]:
            await partition.flush()
            yield

        staged = await link_between_swaps(
            self._cleaning,
            partition,
            attempt=flushed,
            begin=lambda: self._begin(request.purpose, compaction, partition),
            link=lambda staged: self._link(compaction, partition, staged),
            discard=lambda staged: self._threads.run(
                staged.folder, partial(remove_lease_folder, self._env, staged.folder)
            ),
        )
        return None if staged is None else staged.part

    def _begin(
        self, purpose: Purpose, compaction: RemoteCompaction, partition: Partition
    ) -> _StagedJob | None:
        """Plan the job and create the folder of the lease."""
        self._check_served(partition)
        facts = self._cleaning.facts_of(partition.partition)
        assert facts is not None, partition.partition
        job, dirty_bytes = self._plan(purpose, facts, partition, compaction.compaction_id)
        if job is None:
            return None
        folder = lease_path(partition.log.directory, compaction.compaction_id)
        partition.make_folder(partial(make_folders, self._env, folder))
        return _StagedJob(facts, job, dirty_bytes, folder)

    async def _link(
        self, compaction: RemoteCompaction, partition: Partition, staged: _StagedJob
    ) -> None:
        """Link the sources and write the lease."""
        facts, job, folder = staged.facts, staged.job, staged.folder
        sources = sources_of(job)
        bases = [base for base, _ in sources]
        link = partial(link_inputs, self._env, facts.directory, folder, bases)
        mtimes = await self._threads.run(folder, link)
        self._check_served(partition)
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
            dirty_bytes=staged.dirty_bytes,
            log_end_offset=facts.log_end_offset,
            checkpoint_offset=facts.checkpoint_offset,
            mtimes_ms=mtimes,
        )
        await self._threads.run(folder, partial(write_lease, self._env, folder, record))
        self._check_served(partition)
        if partition.log.generation != facts.generation:
            raise LeaseError(
                409, f"{partition.partition} was truncated or its cleanup policy changed"
            )
        staged.part = LeasedPartition(partition, record, folder, facts.generation)

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

    def _check_served(self, partition: Partition) -> None:
        if self._topics.partition(partition.partition) is not partition:
            raise LeaseError(404, f"{partition.partition} was deleted")


def lease_pause_reason(compaction_id: str) -> str:
    """Return why a job was aborted, for the cleaner's history."""
    return f"remote compaction {compaction_id} leased the partition"
