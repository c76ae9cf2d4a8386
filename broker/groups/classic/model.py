"""The types of classic groups: members, states, events, effects, answers.

Rules. All values are frozen, and mappings inside them never change.
A *waiter* is the number of a request without an answer; LiveClassicGroup maps it to the request.
Source of the behaviour: Kafka's classic group protocol (KIP-62 sessions and rebalance timeouts,
KIP-345 static members, KIP-394 member ids first, KIP-814 skipped assignments).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from broker.quotas.memory_budget import memory_of_text
from protocol.errors import ErrorCode

NO_MEMBER_ID = ""
NO_ASSIGNMENT = b""

Protocols = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The settings that the state machine uses."""

    # Kafka's code has 3000 ms, its server.properties 0. With 0 the first poll of a single consumer
    # returns at once; the cost is one short rebalance for each consumer that starts later.
    initial_rebalance_delay_ms: int = 0
    # Kafka has no bound; a group record holds all members, and 2,000 of them fill 1 MB.
    max_group_size: int = 2_000
    # Ids given out with MEMBER_ID_REQUIRED and not used yet; each expires by its timer.
    max_pending_members: int = 4_000
    # A new member cannot send heartbeats, because it does not know its id (Kafka: 5 minutes).
    new_member_join_timeout_ms: int = 300_000


# Of memory, for each member beside its metadata and names.
MEMBER_BYTES: Final = 1_000


def memory_of(protocols: Protocols, *names: str | None) -> int:
    """Return about how many bytes of memory a member with these protocols and names takes."""
    return (
        MEMBER_BYTES
        + sum(memory_of_text(name) for name in names if name is not None)
        + sum(memory_of_text(name) + len(metadata) for name, metadata in protocols)
    )


def stored_bytes(members: Iterable[tuple[Protocols, bytes]]) -> int:
    """Return how many bytes of metadata and assignments the record of a group has at most.

    `members` are protocols and assignments. The record has the metadata for the protocol that is
    elected, and which one that is can change with every member.
    """
    assignments, metadata_of = 0, Counter[str]()
    for protocols, assignment in members:
        assignments += len(assignment)
        for name, metadata in protocols:
            metadata_of[name] += len(metadata)
    return assignments + max(metadata_of.values(), default=0)


@dataclass(frozen=True, slots=True)
class Member:
    """One member. `protocols`: (name, metadata) in the order of its preference."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    assignment: bytes = NO_ASSIGNMENT
    join_waiter: int | None = None
    sync_waiter: int | None = None
    is_new: bool = False  # no finished join has returned its id yet

    def metadata(self, protocol_name: str | None) -> bytes:
        """Return the member's metadata for a protocol; empty if it does not support it."""
        wanted = protocol_name or ""
        for name, metadata in self.protocols:
            if name == wanted:
                return metadata
        return b""

    @property
    def memory_bytes(self) -> int:
        """Return about how many bytes of memory it takes."""
        return len(self.assignment) + memory_of(self.protocols, self.instance_id, self.client_id)

    @property
    def stored(self) -> tuple[Protocols, bytes]:
        """Return what `stored_bytes` counts."""
        return self.protocols, self.assignment

    @property
    def waits(self) -> bool:
        """Return whether it waits for an answer; then it need not send heartbeats."""
        return self.join_waiter is not None or self.sync_waiter is not None


@dataclass(frozen=True, slots=True)
class Group:
    """The data that all states share. `generation` counts finished joins."""

    group_id: str
    generation: int = 0
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    pending: frozenset[str] = frozenset()
    since_ms: int = -1  # wall time of the last change of state; -1 if an old record has none

    def static_member(self, instance_id: str) -> Member | None:
        """Return the member with this group.instance.id."""
        for member in self.members.values():
            if member.instance_id == instance_id:
                return member
        return None

    @property
    def rebalance_timeout_ms(self) -> int:
        """Return the longest timeout of the members; 0 without members."""
        return max((m.rebalance_timeout_ms for m in self.members.values()), default=0)

    @property
    def all_joined(self) -> bool:
        """Return whether every member has joined."""
        return not self.pending and all(m.join_waiter is not None for m in self.members.values())


# States -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Empty:
    """A group without members; it may have offsets."""

    group: Group


@dataclass(frozen=True, slots=True)
class PreparingRebalance:
    """The group waits for members to join. `initial`: a new group, during its initial delay."""

    group: Group
    initial: bool = False
    delay_ms: int = 0
    remaining_ms: int = 0
    member_added: bool = False  # a member joined during the delay, so the delay may be repeated


@dataclass(frozen=True, slots=True)
class CompletingRebalance:
    """The generation is formed; the group waits for the leader's assignment and stores it."""

    group: Group
    unsynced: frozenset[str]
    assignment: Mapping[str, bytes] | None = None  # the leader's, not stored yet


@dataclass(frozen=True, slots=True)
class Stable:
    """Every member has its assignment, or can fetch it."""

    group: Group
    unsynced: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Dead:
    """A deleted or unloaded group; responses make clients find the coordinator again."""

    group: Group


Live = Empty | PreparingRebalance | CompletingRebalance | Stable
State = Live | Dead


# Events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinRequested:
    """A JoinGroup request. A member without an id gets `new_member_id`."""

    waiter: int
    member_id: str
    new_member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    id_required: bool  # JoinGroup v4+: the member gets an id first and joins with it (KIP-394)
    may_skip_assignment: bool  # JoinGroup v9+ (KIP-814)

    @property
    def memory_bytes(self) -> int:
        """Return about how many bytes of memory the member takes."""
        return memory_of(self.protocols, self.instance_id, self.client_id)


@dataclass(frozen=True, slots=True)
class SyncRequested:
    """A SyncGroup request; only the leader's assignments count."""

    waiter: int
    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None
    protocol_name: str | None
    assignments: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """A Heartbeat request."""

    waiter: int
    member_id: str
    instance_id: str | None
    generation: int


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """An OffsetCommit or TxnOffsetCommit that needs permission; it counts as a heartbeat."""

    waiter: int
    member_id: str
    instance_id: str | None
    generation: int
    is_transactional: bool = False
    knows_epochs: bool = True  # False: OffsetCommit before version 9, which has generations only


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """A LeaveGroup request: (member id, instance id) each; one of them may be missing."""

    waiter: int
    members: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class SessionsExpired:
    """Members were silent for their session timeouts, or pending ids were not used in time."""

    member_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JoinTimeout:
    """The time for members to join is over."""


@dataclass(frozen=True, slots=True)
class SyncTimeout:
    """The time for members to sync is over."""


@dataclass(frozen=True, slots=True)
class GroupStored:
    """A StoreGroup effect succeeded or failed."""

    generation: int
    error: ErrorCode
    reply: "Reply | None"


@dataclass(frozen=True, slots=True)
class WaiterGone:
    """The connection that waited for this answer has closed."""

    waiter: int


@dataclass(frozen=True, slots=True)
class Deleted:
    """An administrator deletes the empty group, or its last offset expired."""


@dataclass(frozen=True, slots=True)
class DeletionFailed:
    """The tombstones of a deletion could not be written."""


@dataclass(frozen=True, slots=True)
class Unloaded:
    """The group's partition of __consumer_offsets is no longer served, or it has another protocol.

    Members that wait get the error.
    """

    error: ErrorCode = ErrorCode.NOT_COORDINATOR


Event = (
    JoinRequested
    | SyncRequested
    | HeartbeatReceived
    | CommitRequested
    | LeaveRequested
    | SessionsExpired
    | JoinTimeout
    | SyncTimeout
    | GroupStored
    | WaiterGone
    | Deleted
    | DeletionFailed
    | Unloaded
)


# Answers and effects ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """The answer to JoinGroup. `members`: (id, instance id, metadata), for the leader only."""

    error: ErrorCode
    member_id: str = NO_MEMBER_ID
    generation: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """The answer to SyncGroup."""

    error: ErrorCode
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = NO_ASSIGNMENT


@dataclass(frozen=True, slots=True)
class LeaveAnswer:
    """The answer to LeaveGroup: (member id, instance id, error) for each row of the request."""

    error: ErrorCode
    members: tuple[tuple[str, str | None, ErrorCode], ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """The answer to Heartbeat, and to the question whether a commit is allowed."""

    error: ErrorCode


Answer = JoinAnswer | SyncAnswer | LeaveAnswer | ErrorAnswer


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a waiting request."""

    waiter: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class StartSession:
    """Restart a member's session timer: send SessionsExpired after `timeout_ms`."""

    member_id: str
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class StopSession:
    """Stop a member's session timer."""

    member_id: str


@dataclass(frozen=True, slots=True)
class StartJoinTimer:
    """Restart the join timer: send JoinTimeout after `timeout_ms`."""

    timeout_ms: int


@dataclass(frozen=True, slots=True)
class StopJoinTimer:
    """Stop the join timer."""


@dataclass(frozen=True, slots=True)
class StartSyncTimer:
    """Restart the sync timer: send SyncTimeout after `timeout_ms`."""

    timeout_ms: int


@dataclass(frozen=True, slots=True)
class StopSyncTimer:
    """Stop the sync timer."""


@dataclass(frozen=True, slots=True)
class StoreGroup:
    """Write the group's metadata record, then send GroupStored with the same `reply`."""

    group: Group
    reply: Reply | None = None


Effect = (
    Reply
    | StartSession
    | StopSession
    | StartJoinTimer
    | StopJoinTimer
    | StartSyncTimer
    | StopSyncTimer
    | StoreGroup
)

Effects = tuple[Effect, ...]
Step = tuple[State, Effects]


class IllegalGroupTransitionError(AssertionError):
    """An event that cannot happen in this state: a bug."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{type(event).__name__} in {type(state).__name__}")
        self.state = state
        self.event = event
