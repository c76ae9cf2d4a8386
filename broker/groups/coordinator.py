"""The group coordinator: consumer groups, their committed offsets, and the log that stores both.

Rules
- Only the event loop calls the coordinator and its parts. Only broker/groups/classic/state.py and
  broker/groups/consumer/state.py change a group's state.
- Acknowledged data is in the log: a committed offset is answered and visible after its append.
- Records of one group are appended in the order in which they were decided.
- Every wait ends: joins and syncs by their timers, appends by `append_timeout_ms`, waits of a
  closed connection by cancellation.
- A group is served while its partition of __consumer_offsets is active. While the partition is
  loading or offline, requests get an error that says so.

The partition of a group, and the load of a partition: broker/topics/internal_topic.py.

The coordinator does not know the wire format of requests, nor which topics exist.
"""

from collections.abc import Callable, Iterable, Iterator

from broker.groups.classic.model import State
from broker.groups.clock import Clock
from broker.groups.consumer.model import ConsumerGroup, TopicLookup, TopicMetadata
from broker.groups.deletion import GroupDeletion
from broker.groups.group_factory import GroupFactory
from broker.groups.group_log import GroupLog
from broker.groups.large_group_turns import LargeGroupTurns
from broker.groups.live_classic_group import GroupStats, LiveClassicGroup
from broker.groups.member_requests import MemberRequests, random_id
from broker.groups.offset_commits import OffsetCommits
from broker.groups.partition_loading import PartitionLoading
from broker.groups.served_groups import ServedGroups
from broker.groups.settings import CoordinatorSettings
from broker.groups.summary import GroupSummary
from broker.groups.topic_regex import TopicRegexes
from broker.quotas.memory_budget import MemoryBudget
from broker.topics.internal_topic import KeyedLog, PartitionState
from protocol.errors import ErrorCode


class NoTopics:
    """For a coordinator whose members assign partitions themselves."""

    def topic(self, name: str) -> TopicMetadata | None:
        """Return None."""
        return None

    def names(self) -> Iterable[str]:
        """Return no name."""
        return ()


class GroupCoordinator:
    """All consumer groups of this broker.

    Its parts: `members` answers the requests of members, `offsets` commits and reads offsets,
    `deletion` deletes groups and offsets, and `loading` starts and stops serving partitions.
    """

    def __init__(
        self,
        store: KeyedLog,
        clock: Clock,
        settings: CoordinatorSettings | None = None,
        new_id: Callable[[], str] = random_id,
        topics: TopicLookup | None = None,
    ) -> None:
        self.settings = settings = settings or CoordinatorSettings()
        self.stats = stats = GroupStats()
        topics = topics or NoTopics()
        metadata = MemoryBudget(settings.max_metadata_bytes)
        served = self._served = ServedGroups(
            store, settings.max_groups, metadata, MemoryBudget(settings.max_offsets_bytes)
        )
        log = self._log = GroupLog(store, clock, stats, settings.append_timeout_ms)
        turns = LargeGroupTurns(metadata.owner)
        factory = GroupFactory(
            served,
            log,
            settings=settings,
            clock=clock,
            topics=topics,
            metadata=metadata,
            stats=stats,
            turns=turns,
        )
        self.members = MemberRequests(
            served,
            factory,
            settings=settings,
            metadata=metadata,
            regexes=TopicRegexes(topics, clock.wall_ms),
            turns=turns,
            new_id=new_id,
        )
        self.offsets = OffsetCommits(served, factory, log, topics, stats)
        retention_ms = settings.offsets_retention_ms
        self.deletion = GroupDeletion(served, log, topics, stats, retention_ms=retention_ms)
        self.loading = PartitionLoading(served, factory, self.offsets, self.deletion, stats)
        self._partition_count = store.partition_count

    async def close(self) -> None:
        """Answer all waiting members with an error, and wait for appends until they time out."""
        for partition in range(self._partition_count):
            self.loading.deactivate(partition, PartitionState.OFFLINE)
        self.deletion.stop()
        self.members.stop()
        self.offsets.stop()
        await self._log.close()

    def availability(self, group_id: str) -> ErrorCode:
        """Return NONE if the group's partition is served, else the error for the client."""
        return self._served.availability(group_id)

    def partition_of(self, group_id: str) -> int:
        """Return the partition of __consumer_offsets that stores a group."""
        return self._served.partition_of(group_id)

    def describe(self, group_id: str) -> tuple[ErrorCode, State | ConsumerGroup | None]:
        """Return the state of a group; None if it does not exist."""
        error = self.availability(group_id)
        live = self._served.get(group_id)
        if error is not ErrorCode.NONE or live is None:
            return error, None
        if isinstance(live, LiveClassicGroup):
            return error, live.state
        return error, None if live.is_dead else live.group

    def groups(self) -> Iterator[GroupSummary]:
        """Yield all groups that are served."""
        for live in self._served:
            if not live.is_dead:
                yield live.summary()

    @property
    def count(self) -> int:
        """Return how many groups are served."""
        return len(self._served)

    @property
    def is_loading(self) -> bool:
        """Return whether a partition is still being loaded."""
        return self._served.partitions.any_loading
