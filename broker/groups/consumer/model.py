"""The types of consumer groups: members, groups, requests and answers.

Rules. All values are frozen, and mappings inside them never change. Names and numbers are those of
Kafka's records and of KIP-848: the group epoch counts changes of members, subscriptions and topics;
the assignment epoch is the group epoch that the target assignment was computed for; a member has
the assignment epoch when it has revoked what the target assignment takes from it.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, Protocol

from broker.groups.classic.members import Protocols, memory_of
from protocol.errors import ErrorCode

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2  # the member will return with the same instance id

# A topic id (16 bytes) and a partition index.
PartitionId = tuple[bytes, int]
Assignment = frozenset[PartitionId]
NO_PARTITIONS: Final[Assignment] = frozenset()
NAME_BYTES: Final = 128  # of memory, for each name in a subscription
CONSUMER_MEMBER_BYTES: Final = 4_000  # of memory, for each member beside its subscription


class MemberState(IntEnum):
    """How far a member is from its target assignment; the numbers are those of its record."""

    STABLE = 0
    UNREVOKED_PARTITIONS = 1  # the member has not yet confirmed that it revoked partitions
    UNRELEASED_PARTITIONS = 2  # the member waits for partitions that others have not revoked


class GroupState(IntEnum):
    """The states that Kafka shows of a consumer group."""

    EMPTY = 0
    ASSIGNING = 1  # the target assignment is older than the group epoch
    RECONCILING = 2  # some members do not have their target assignment yet
    STABLE = 3

    @property
    def label(self) -> str:
        """Return the name on the wire: Empty, Assigning, Reconciling, Stable."""
        return self.name.capitalize()


@dataclass(frozen=True, slots=True)
class ResolvedRegex:
    """The topics that a regular expression matched at a time (wall ms)."""

    topics: frozenset[str]
    resolved_ms: int


@dataclass(frozen=True, slots=True)
class ClassicProtocol:
    """What a member that uses the classic protocol said when it joined (JoinGroup)."""

    session_timeout_ms: int
    protocols: Protocols  # (name, metadata) in the order of its preference, at least one

    @property
    def memory_bytes(self) -> int:
        """Return about how many bytes of memory it takes."""
        return memory_of(self.protocols)


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    """One member.

    `assigned` and `pending_revocation` map a partition to the member epoch at which the member got
    it; a partition is in one of them at most.
    """

    member_id: str
    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    topics: frozenset[str] = frozenset()
    regex: str | None = None
    assignor: str | None = None
    classic: ClassicProtocol | None = None
    epoch: int = JOIN_EPOCH
    previous_epoch: int = LEAVE_EPOCH
    state: MemberState = MemberState.STABLE
    assigned: Mapping[PartitionId, int] = field(default_factory=dict)
    pending_revocation: Mapping[PartitionId, int] = field(default_factory=dict)

    @property
    def has_left(self) -> bool:
        """Return whether this static member has left and may return."""
        return self.epoch == LEAVE_STATIC_EPOCH

    def owned(self) -> Iterator[PartitionId]:
        """Yield the partitions that no other member may get yet."""
        yield from self.assigned
        yield from self.pending_revocation


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """A consumer group. `owners` is derived: which member owns a partition at present."""

    group_id: str
    epoch: int = 0
    metadata_hash: int = 0  # of the subscribed topics, see `subscription.metadata_hash`
    assignment_epoch: int = 0
    members: Mapping[str, ConsumerMember] = field(default_factory=dict)
    targets: Mapping[str, Assignment] = field(default_factory=dict)
    regexes: Mapping[str, ResolvedRegex] = field(default_factory=dict)
    owners: Mapping[PartitionId, str] = field(default_factory=dict)

    @property
    def state(self) -> GroupState:
        """Return the state that Kafka shows."""
        if not self.members:
            return GroupState.EMPTY
        if self.epoch > self.assignment_epoch:
            return GroupState.ASSIGNING
        settled = all(
            member.state is MemberState.STABLE and member.epoch == self.assignment_epoch
            for member in self.members.values()
        )
        return GroupState.STABLE if settled else GroupState.RECONCILING

    @property
    def memory_bytes(self) -> int:
        """Return about how much memory the members take; equal sets of names count once."""
        members = self.members.values()
        names = sum(map(len, {id(member.topics): member.topics for member in members}.values()))
        classic = [member.classic for member in members if member.classic is not None]
        return (
            NAME_BYTES * names
            + CONSUMER_MEMBER_BYTES * len(members)
            + sum(protocol.memory_bytes for protocol in classic)
        )

    def static_member(self, instance_id: str) -> ConsumerMember | None:
        """Return the member with this group.instance.id."""
        for member in self.members.values():
            if member.instance_id == instance_id:
                return member
        return None

    def subscribed_topics(self, member: ConsumerMember) -> frozenset[str]:
        """Return the names of a member's topics, those of its regular expression included."""
        resolved = self.regexes.get(member.regex) if member.regex else None
        return member.topics if resolved is None else member.topics | resolved.topics

    def subscriptions(self) -> Mapping[tuple[frozenset[str], str | None], frozenset[str]]:
        """Return the names of each distinct subscription: a member's topics and expression."""
        distinct = {(member.topics, member.regex): member for member in self.members.values()}
        return {key: self.subscribed_topics(member) for key, member in distinct.items()}

    def all_topics(self) -> frozenset[str]:
        """Return the names of the topics of all members."""
        first, *others = self.subscriptions().values() or (frozenset[str](),)
        return first.union(*others) if others else first  # thousands of names are not copied

    def count_names(self) -> int:
        """Return the number of names in all subscriptions; equal ones count once."""
        return sum(map(len, self.subscriptions().values()))

    def shared(self, topics: frozenset[str]) -> frozenset[str]:
        """Return an equal set of names that a member has already; else `topics`.

        Members of large groups are compared often, and equal sets are compared name by name.
        """
        equal = (member.topics for member in self.members.values() if member.topics == topics)
        return next(equal, topics)

    def with_member(self, member: ConsumerMember) -> "ConsumerGroup":
        """Return the group with this member added or replaced."""
        before = self.members.get(member.member_id)
        return replace(
            self,
            members={**self.members, member.member_id: member},
            owners=_owners_after(self.owners, before, member),
        )

    def without_member(self, member_id: str) -> "ConsumerGroup":
        """Return the group without a member and its target assignment."""
        return self.without_members((member_id,))

    def without_members(self, member_ids: Iterable[str]) -> "ConsumerGroup":
        """Return the group without members; takes as long for all of them as for one."""
        gone = frozenset(member_ids)
        if not gone:
            return self
        members = {key: value for key, value in self.members.items() if key not in gone}
        owners: dict[PartitionId, str] = {}  # a group may have 10,000 partitions
        if len(members) < len(gone):
            for key, member in members.items():
                owners.update(dict.fromkeys(_partitions_of(member), key))
        else:
            owners.update(self.owners)
            for key in gone:
                for partition in _partitions_of(self.members[key]):
                    owners.pop(partition, None)
        return replace(
            self,
            members=members,
            targets={key: value for key, value in self.targets.items() if key not in gone},
            owners=owners,
        )


def _owners_after(
    owners: Mapping[PartitionId, str], before: ConsumerMember | None, after: ConsumerMember
) -> Mapping[PartitionId, str]:
    """Return the owners after a member changed; the same ones if it owns what it owned.

    A group may have 10,000 partitions: the work grows with those that get another owner.
    """
    lost, gained = _partitions_of(before), _partitions_of(after)
    if before is not None:
        is_same = before.assigned is after.assigned
        if is_same and before.pending_revocation is after.pending_revocation:
            return owners
        lost, gained = lost - gained, gained - lost
    if not lost and not gained:
        return owners
    changed = dict(owners)
    for partition in lost:
        changed.pop(partition, None)
    changed.update(dict.fromkeys(gained, after.member_id))
    return changed


def _partitions_of(member: ConsumerMember | None) -> Set[PartitionId]:
    if member is None:
        return NO_PARTITIONS
    if not member.pending_revocation:
        return member.assigned.keys()
    return member.assigned.keys() | member.pending_revocation.keys()


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """What an assignor needs to know of a topic."""

    name: str
    topic_id: bytes
    partition_count: int


class TopicLookup(Protocol):
    """The topics that members can subscribe to."""

    def topic(self, name: str) -> TopicMetadata | None:
        """Return the topic or view with this name; None if there is none."""
        ...

    def names(self) -> Iterable[str]:
        """Return the names of all topics."""
        ...


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A ConsumerGroupHeartbeat request; None where the client says "unchanged"."""

    member_id: str
    epoch: int
    instance_id: str | None
    rack_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int  # -1: unchanged
    topics: frozenset[str] | None
    regex: str | None  # "": the member has no regular expression any more
    assignor: str | None
    owned: Set[PartitionId] | None

    @property
    def is_full(self) -> bool:
        """Return whether the client sent every field, and so wants its assignment."""
        has_subscription = self.topics is not None or self.regex is not None
        is_complete = self.rebalance_timeout_ms != -1 and has_subscription
        return self.epoch == JOIN_EPOCH or (is_complete and self.owned is not None)

    @property
    def leaves(self) -> bool:
        """Return whether the member leaves the group, for good or for a while."""
        return self.epoch < JOIN_EPOCH

    @property
    def reports_nothing(self) -> bool:
        """Return whether a member only says that it is alive: nearly all heartbeats do."""
        fields = (self.topics, self.regex, self.assignor, self.owned)
        is_unchanged = self.rebalance_timeout_ms == -1 and fields == (None,) * len(fields)
        return self.epoch > JOIN_EPOCH and is_unchanged


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """The answer to a heartbeat; `assignment` is None where it has not changed."""

    error: ErrorCode
    message: str | None = None
    member_id: str | None = None
    epoch: int = 0
    assignment: Assignment | None = None


class MembershipError(Exception):
    """A refused heartbeat; `code` and the text go to the client."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
