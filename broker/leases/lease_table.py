"""The remote compactions with their leases: which exist, which are valid, and how they end.

Rules
- At most one compacting lease exists for a partition. Leases for reading do not count.
- A lease is valid for one generation of one log. It becomes stale if the log gets another
  generation, or if its output can no longer be published before the time from which delete horizons
  count (cleaner/planning/remote_plan.py).
- When a lease ends, the broker removes its files and its cleaner resumes.
- Remote compactions that ended stay listed for a while, so that late requests get the reason.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from broker.counters import BrokerStats
from broker.event_loop.directory_threads import DirectoryThreads
from broker.leases.lease_folder import is_token, remove_lease_folder
from broker.leases.model import LeasedPartition, LeaseError, RemoteCompaction
from broker.topics.topics import Topics
from cleaner.lease_states import LeaseState
from cleaner.remote_compaction import AdoptOutcome, AdoptResult, Purpose
from storage.env import Env
from storage.model import TopicPartition

ENDED_MAX: Final = 200  # remote compactions that stay listed after their end
PUBLISH_MS: Final = 60_000  # that publication may take after verification

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


class LeaseTable:
    """All remote compactions and their leases."""

    def __init__(
        self, env: Env, topics: Topics, threads: DirectoryThreads, broker_stats: BrokerStats
    ) -> None:
        self.stats = LeaseStats()
        self.is_stopping = False
        self.tasks: set[asyncio.Task[Any]] = set()  # in the background, without adoptions
        self._env = env
        self._topics = topics
        self._threads = threads
        self._broker_stats = broker_stats
        self._alive: dict[str, RemoteCompaction] = {}
        self._ended: OrderedDict[str, RemoteCompaction] = OrderedDict()
        self._leased: dict[TopicPartition, str] = {}  # ids of the compacting leases

    async def measured(self, work: Awaitable[_T]) -> _T:
        """Return the result of work on leases; its turns of the loop are measured."""
        return await self._broker_stats.measured("leases", work)

    def start_task(self, work: Awaitable[_T], name: str) -> asyncio.Task[_T]:
        """Start work in the background, which is in `tasks` until it is done."""
        task = asyncio.create_task(self.measured(work), name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # Lookup -----------------------------------------------------------------------------------

    def all(self) -> list[RemoteCompaction]:
        """Return every remote compaction, including those that ended recently, oldest first."""
        return [*self._ended.values(), *self._alive.values()]

    def alive(self) -> list[RemoteCompaction]:
        """Return every remote compaction that has not ended."""
        return list(self._alive.values())

    def get(self, compaction_id: str) -> RemoteCompaction | None:
        """Return a remote compaction that has not ended; None if there is none."""
        return self._alive.get(compaction_id)

    def find(self, compaction_id: str) -> RemoteCompaction:
        """Return a remote compaction, which may have ended recently. Raises LeaseError 404."""
        compaction = self._alive.get(compaction_id) or self._ended.get(compaction_id)
        if compaction is None:
            raise LeaseError(404, f"there is no remote compaction {compaction_id[:100]}")
        return compaction

    def authorize(self, compaction_id: str, partition: int, token: str) -> LeasedPartition:
        """Return a leased partition if the token allows access to its files. Raises LeaseError."""
        compaction = self._alive.get(compaction_id) or self._ended.get(compaction_id)
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
        self.end_if_stale(part)
        if not part.is_alive:
            status = 409 if part.state is LeaseState.STALE else 410
            compaction_id = part.record.compaction_id
            raise LeaseError(
                status, f"the lease of {part.where} to {compaction_id} has ended: {part.reason}"
            )

    def owns(self, compaction_id: str, partition: TopicPartition) -> bool:
        """Return whether a remote compaction has a lease of a partition that has not ended."""
        compaction = self._alive.get(compaction_id)
        part = None if compaction is None else compaction.parts.get(partition.partition)
        return part is not None and part.is_alive and part.where == partition

    def why_stale(self, part: LeasedPartition) -> str:
        """Return why a lease is not valid any more; empty if it is."""
        if self.is_stopping:
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

    # Compacting leases ------------------------------------------------------------------------

    def holder(self, partition: TopicPartition) -> str | None:
        """Return the id of the remote compaction that leases a partition; None if none does."""
        return self._leased.get(partition)

    def reserve(self, partitions: Iterable[TopicPartition], compaction_id: str) -> None:
        """Let no other remote compaction lease the partitions. Raises LeaseError 409."""
        partitions = tuple(partitions)
        for partition in partitions:
            holder = self._leased.get(partition)
            if holder is not None:
                raise LeaseError(409, self._leased_text(partition, holder))
        self._leased.update((partition, compaction_id) for partition in partitions)

    def release(self, partition: TopicPartition, compaction_id: str) -> None:
        """Let others lease a partition again, if this remote compaction has it."""
        if self._leased.get(partition) == compaction_id:
            del self._leased[partition]

    def _leased_text(self, partition: TopicPartition, compaction_id: str) -> str:
        """Return which remote compaction leases a partition, until when, and how to end it."""
        compaction = self._alive.get(compaction_id)
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

    # Begin and end ----------------------------------------------------------------------------

    def add(self, compaction: RemoteCompaction) -> None:
        """List a remote compaction."""
        self._alive[compaction.compaction_id] = compaction

    def add_ended(self, compaction: RemoteCompaction) -> None:
        """List a remote compaction that has ended, for a while."""
        self._ended[compaction.compaction_id] = compaction
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def end_if_stale(self, part: LeasedPartition) -> None:
        """End a lease that has become stale."""
        if part.state is LeaseState.OPEN and not self.is_stopping:
            reason = self.why_stale(part)
            if reason:
                self.end(part, LeaseState.STALE, reason)

    def end(self, part: LeasedPartition, state: LeaseState, reason: str) -> None:
        """End a lease now and remove its files in the background."""
        self._mark(part, state, reason)
        outcome = _OUTCOMES.get(state)
        if outcome is not None and part.record.purpose is Purpose.COMPACT:
            part.result = AdoptResult(part.where, outcome, reason)
        self.start_task(self.clear(part), f"sweep {part.where}")

    async def end_now(self, part: LeasedPartition, state: LeaseState, reason: str) -> None:
        """End a lease and remove its files before returning."""
        self._mark(part, state, reason)
        await self.clear(part)

    def _mark(self, part: LeasedPartition, state: LeaseState, reason: str) -> None:
        part.state, part.reason, part.takes_files = state, reason, False
        compaction_id = part.record.compaction_id
        self.release(part.where, compaction_id)
        compaction = self._alive.get(compaction_id)
        if compaction is not None and not compaction.is_alive:
            del self._alive[compaction_id]
            self.add_ended(compaction)
        logger.info(
            "lease ended",
            partition=str(part.where),
            compaction_id=compaction_id,
            state=state.value,
            reason=reason,
        )

    async def clear(self, part: LeasedPartition) -> None:
        """Resume the cleaner and remove the files. Those of a deleted topic go with the topic."""
        await part.pauses.aclose()
        async with part.writing:  # otherwise a write in progress would create the lease again
            try:
                remove = partial(remove_lease_folder, self._env, part.folder)
                await self._threads.run(part.folder, remove)
            except OSError as error:  # the sweeper tries again
                logger.warning("lease files not removed", folder=part.folder, reason=str(error))
