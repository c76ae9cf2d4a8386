"""The types of classic groups: the group, states, events, effects, answers.

Rules. All values are frozen, and mappings inside them never change.
A *waiter* is the number of a request without an answer; LiveClassicGroup maps it to the request.
Source of the behaviour: Kafka's classic group protocol (KIP-62 sessions and rebalance timeouts,
KIP-345 static members, KIP-394 member ids first, KIP-814 skipped assignments).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from broker.groups.classic.members import NO_ASSIGNMENT, Member, Members, Protocols, memory_of
from protocol.errors import ErrorCode

UNKNOWN_WAITER = 0  # of a request that its group has not numbered yet
NO_MEMBER_ID = ""


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


@dataclass(frozen=True, slots=True)
class Group:
    """The data that all states share. `generation` counts finished joins.

    What one step may change for all members is in mappings of the group, by member id, and not in
    the members, so no step creates each member again.
    """

    group_id: str
    generation: int = 0
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str | None = None
    members: Members = field(default_factory=Members.of)
    assignments: Mapping[str, bytes] = field(default_factory=dict)  # a missing one is empty
    joins: Mapping[str, int] = field(default_factory=dict)  # waiters of JoinGroup
    syncs: Mapping[str, int] = field(default_factory=dict)  # waiters of SyncGroup
    new: frozenset[str] = frozenset()  # members whose ids no finished join has returned yet
    pending: frozenset[str] = frozenset()
    since_ms: int = -1  # wall time of the last change of state; -1 if an old record has none

    def assignment(self, member_id: str) -> bytes:
        """Return the assignment of a member."""
        return self.assignments.get(member_id, NO_ASSIGNMENT)

    def static_member(self, instance_id: str) -> Member | None:
        """Return the member with this group.instance.id."""
        return self.members.with_instance(instance_id)

    def has_assignments_of(self, before: "Group") -> bool:
        """Return whether the members and what they have are still those of an earlier value."""
        return (
            self.members is before.members
            and self.assignments is before.assignments
            and self.generation == before.generation
        )

    @property
    def rebalance_timeout_ms(self) -> int:
        """Return the longest timeout of the members; 0 without members."""
        return max((m.rebalance_timeout_ms for m in self.members.values()), default=0)

    @property
    def all_joined(self) -> bool:
        """Return whether every member has joined."""
        return not self.pending and len(self.joins) == len(self.members)


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
class Replies:
    """Answer the waiting requests of members, which may be thousands, by id."""

    waiters: Mapping[str, int]
    answer: Callable[[str], Answer]

    def __iter__(self) -> Iterator[Reply]:
        """Yield the replies; each answer is made when its turn comes."""
        return (Reply(waiter, self.answer(key)) for key, waiter in self.waiters.items())


@dataclass(frozen=True, slots=True)
class StartSessions:
    """Restart the session timers of members: send SessionsExpired after these times (ms)."""

    timeouts_ms: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StopSessions:
    """Stop the session timers of members."""

    member_ids: Collection[str]


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
    | Replies
    | StartSessions
    | StopSessions
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
