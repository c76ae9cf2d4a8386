"""Members of the consumer rebalance protocol, as clients behave, against a coordinator."""

from dataclasses import dataclass, field

from broker.groups.consumer.model import (
    NO_PARTITIONS,
    Assignment,
    ConsumerGroup,
    Heartbeat,
    HeartbeatAnswer,
    TopicMetadata,
)
from broker.groups.topic_regex import EVERYTHING, TopicViewer
from protocol.errors import ErrorCode
from tests.support.broker.groups.group_world import World

REBALANCE_MS = 30_000
NO_TOPICS: frozenset[str] = frozenset()


@dataclass
class FakeTopics:
    """Topics that a test creates, grows and deletes."""

    counts: dict[str, int] = field(default_factory=dict)

    def topic(self, name: str) -> TopicMetadata | None:
        count = self.counts.get(name)
        return None if count is None else TopicMetadata(name, self.id_of(name), count)

    def names(self) -> list[str]:
        return list(self.counts)

    def existing(self) -> dict[str, TopicMetadata]:
        return {n: topic for n in sorted(self.counts) if (topic := self.topic(n)) is not None}

    def id_of(self, name: str) -> bytes:
        return name.encode().ljust(16, b"\0")


@dataclass
class Client:
    """One consumer: it owns what it was assigned, and gives up what it is asked for."""

    world: World
    member_id: str
    topics: frozenset[str] = frozenset({"orders"})
    instance_id: str | None = None
    regex: str | None = None
    assignor: str | None = None
    group_id: str = "g"
    epoch: int = 0
    owned: Assignment = NO_PARTITIONS
    missed_answer: bool = False  # then the next heartbeat has every field
    viewer: TopicViewer = EVERYTHING
    user: str | None = None

    async def heartbeat(self) -> HeartbeatAnswer:
        """Send a heartbeat as a client does, and follow the answer."""
        is_join = self.epoch == 0
        is_full = is_join or self.missed_answer
        answer = await self.send(
            self.epoch,
            rebalance_timeout_ms=REBALANCE_MS if is_full else -1,
            topics=self.topics if is_full else None,
            regex=self.regex if is_full else None,
            owned=NO_PARTITIONS if is_join else self.owned,
        )
        self._follow(answer)
        return answer

    async def subscribe(self, topics: frozenset[str]) -> HeartbeatAnswer:
        """Change the subscription."""
        self.topics = topics
        if self.epoch == 0:
            return await self.heartbeat()
        answer = await self.send(self.epoch, topics=topics, owned=self.owned)
        self._follow(answer)
        return answer

    async def leave(self, epoch: int = -1) -> HeartbeatAnswer:
        """Leave the group."""
        answer = await self.send(epoch)
        self.epoch, self.owned = 0, NO_PARTITIONS
        return answer

    async def send(
        self,
        epoch: int,
        *,
        rebalance_timeout_ms: int = -1,
        topics: frozenset[str] | None = None,
        regex: str | None = None,
        owned: Assignment | None = None,
    ) -> HeartbeatAnswer:
        request = Heartbeat(
            member_id=self.member_id,
            epoch=epoch,
            instance_id=self.instance_id,
            rack_id=None,
            client_id="client",
            client_host="/127.0.0.1",
            rebalance_timeout_ms=rebalance_timeout_ms,
            topics=topics,
            regex=regex,
            assignor=self.assignor,
            owned=owned,
        )
        members = self.world.coordinator.members
        return await members.consumer_heartbeat(self.group_id, request, self.viewer, self.user)

    def _follow(self, answer: HeartbeatAnswer) -> None:
        self.missed_answer = answer.error is not ErrorCode.NONE
        match answer.error:
            case ErrorCode.NONE:
                self.epoch = answer.epoch
                if answer.assignment is not None:
                    self.owned = answer.assignment
            case ErrorCode.FENCED_MEMBER_EPOCH | ErrorCode.UNKNOWN_MEMBER_ID:
                self.epoch, self.owned = 0, NO_PARTITIONS
            case ErrorCode.GROUP_ID_NOT_FOUND:
                self.epoch, self.owned = 0, NO_PARTITIONS


def group(world: World, group_id: str = "g") -> ConsumerGroup:
    error, described = world.coordinator.describe(group_id)
    assert error is ErrorCode.NONE
    assert isinstance(described, ConsumerGroup)
    return described


async def converge(*clients: Client, rounds: int = 12) -> None:
    """Let every client send heartbeats until nothing changes any more."""
    for _ in range(rounds):
        for client in clients:
            await client.heartbeat()


def make_world(**counts: int) -> tuple[World, FakeTopics]:
    """Return a world with topics that have so many partitions; by default one with six."""
    topics = FakeTopics(counts or {"orders": 6})
    return World(topics=topics), topics


def check_restart(world: World) -> None:
    """Check that a restart finds the group as it is."""
    before = group(world)
    world.restart()
    assert group(world) == before


def names(first: int, count: int) -> frozenset[str]:
    """Return the names of topics that do not exist."""
    return frozenset(f"t{index:06}" for index in range(first, first + count))
