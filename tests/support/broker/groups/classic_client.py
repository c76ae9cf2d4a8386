"""Members that use the classic protocol, as clients behave, against a coordinator."""

import asyncio
from dataclasses import dataclass, field

from broker.groups.classic.model import HeartbeatReceived, JoinAnswer, LeaveRequested, SyncRequested
from broker.groups.classic.subscription import (
    decode_assignment_sliced,
    decode_subscription_sliced,
    encode_assignment_sliced,
)
from protocol.errors import ErrorCode
from storage.slices import run_at_once
from tests.support.broker.groups.group_machine import join_request
from tests.support.broker.groups.group_world import World
from tests.support.clocks.virtual_clock import settle

Owned = frozenset[tuple[str, int]]
NOTHING: Owned = frozenset()
LOST = (
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.ILLEGAL_GENERATION,
    ErrorCode.FENCED_INSTANCE_ID,
)


def subscription(topics: frozenset[str], owned: Owned = NOTHING, version: int = 1) -> bytes:
    """Return ConsumerProtocolSubscription 1 of these topics."""
    names = sorted(topics)
    parts = [version.to_bytes(2), len(names).to_bytes(4)]
    parts += [len(name).to_bytes(2) + name.encode() for name in names]
    parts.append((-1).to_bytes(4, signed=True))
    by_topic: dict[str, list[int]] = {}
    for name, index in sorted(owned):
        by_topic.setdefault(name, []).append(index)
    parts.append(run_at_once(encode_assignment_sliced(version, by_topic))[2:-4])
    return b"".join(parts)


@dataclass
class ClassicClient:
    """One consumer. An eager one gives up its partitions before it joins."""

    world: World
    client_id: str
    topics: frozenset[str] = frozenset({"orders"})
    instance_id: str | None = None
    is_cooperative: bool = False
    protocol: str = "range"
    group_id: str = "g"
    member_id: str = ""
    generation: int = -1
    owned: Owned = NOTHING
    round: "asyncio.Task[None] | None" = field(default=None, repr=False)

    async def step(self) -> None:
        """Send a heartbeat, and join again if the answer says so; a join may go on waiting."""
        if self.round is None or self.round.done():
            if self.round is not None:
                self.round.result()
            self.round = asyncio.ensure_future(self._heartbeat())
        await settle()

    def heartbeat(self) -> ErrorCode:
        request = HeartbeatReceived(0, self.member_id, self.instance_id, self.generation)
        return self.world.coordinator.members.heartbeat(self.group_id, request)

    async def leave(self) -> ErrorCode:
        self.crash()
        leaver = ((self.member_id, self.instance_id),)
        answer = await self.world.coordinator.members.leave(
            self.group_id, LeaveRequested(0, leaver)
        )
        self.member_id, self.generation, self.owned = "", -1, NOTHING
        return answer.members[0][2] if answer.members else answer.error

    def crash(self) -> None:
        """Stop without a word."""
        if self.round is not None:
            self.round.cancel()

    async def join(self) -> JoinAnswer:
        """Send JoinGroup until it has a member id."""
        if not self.is_cooperative:
            self.owned = NOTHING
        while True:
            request = join_request(
                self.member_id,
                instance_id=self.instance_id,
                client_id=self.client_id,
                protocols=((self.protocol, subscription(self.topics, self.owned)),),
            )
            answer = await self.world.coordinator.members.join(self.group_id, request)
            if answer.error is not ErrorCode.MEMBER_ID_REQUIRED:
                break
            self.member_id = answer.member_id
        self._follow(answer.error)
        if answer.error is ErrorCode.NONE:
            self.member_id, self.generation = answer.member_id, answer.generation
        return answer

    async def sync(self, assignments: dict[str, bytes]) -> ErrorCode:
        """Send SyncGroup; return its error."""
        request = SyncRequested(
            *(0, self.member_id, self.instance_id, self.generation, "consumer", self.protocol),
            assignments,
        )
        answer = await self.world.coordinator.members.sync(self.group_id, request)
        self._follow(answer.error)
        if answer.error is ErrorCode.NONE:
            partitions = run_at_once(decode_assignment_sliced(answer.assignment)).partitions
            self.owned = frozenset((name, i) for name, row in partitions.items() for i in row)
        return answer.error

    async def _heartbeat(self) -> None:
        if self.generation >= 0:
            error = self.heartbeat()
            if error is ErrorCode.NONE:
                return
            if error is not ErrorCode.REBALANCE_IN_PROGRESS:
                self._follow(error)
        while True:
            joined = await self.join()
            if joined.error is not ErrorCode.NONE:
                return
            before = self.owned
            is_leader = joined.leader == self.member_id
            error = await self.sync(self._assign(joined) if is_leader else {})
            if error is not ErrorCode.NONE or before <= self.owned:
                return

    def _follow(self, error: ErrorCode) -> None:
        if error is ErrorCode.NONE:
            return
        self.generation = -1
        if error in LOST:
            self.owned = NOTHING
        if error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
            self.member_id = ""

    def _assign(self, joined: JoinAnswer) -> dict[str, bytes]:
        """Divide the partitions; none goes to a member while another still owns it."""
        subscriptions = {
            m: run_at_once(decode_subscription_sliced(metadata))
            for m, _, metadata in joined.members
        }
        owners = {
            (name, index): member
            for member, each in subscriptions.items()
            for name, indexes in each.owned.items()
            for index in indexes
        }
        result: dict[str, dict[str, list[int]]] = {member: {} for member in subscriptions}
        assert self.world.topics is not None
        for name in sorted(frozenset().union(*(each.topics for each in subscriptions.values()))):
            members = sorted(m for m, each in subscriptions.items() if name in each.topics)
            topic = self.world.topics.topic(name)
            for index in range(topic.partition_count if topic else 0):
                member = members[index % len(members)]
                if owners.get((name, index), member) == member:
                    result[member].setdefault(name, []).append(index)
        return {
            member: run_at_once(encode_assignment_sliced(1, each))
            for member, each in result.items()
        }
