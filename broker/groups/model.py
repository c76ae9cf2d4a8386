"""The words of the group state machine: members, states, events, effects, answers.

Rules: everything here is frozen, and a mapping inside it is never changed after it was put there.
A *waiter* is the number of a request whose answer is owed; only the shell knows whose it is.
Source of the behaviour: Kafka's classic group protocol (KIP-62 sessions and rebalance timeouts,
KIP-345 static members, KIP-394 member ids first, KIP-814 skipped assignments).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.errors import ErrorCode

NO_MEMBER_ID = ""
NO_ASSIGNMENT = b""

Protocols = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class GroupRules:
    """What an operator may set about groups, as far as the state machine minds."""

    # Kafka's code says 3000 ms, the server.properties it ships says 0. Here 0: the first poll of a
    # lone consumer answers at once, and the price is one short rebalance per late starter.
    initial_rebalance_delay_ms: int = 0
    # Kafka has no bound; a group record holds all members, and 2,000 of them fill 1 MB.
    max_group_size: int = 2_000
    # Ids given out by MEMBER_ID_REQUIRED that nobody came back with yet; each leaves by its timer.
    max_pending_members: int = 4_000
    # A first join cannot heartbeat: it does not know its id yet (Kafka's 5 minutes).
    new_member_join_timeout_ms: int = 300_000


@dataclass(frozen=True, slots=True)
class Member:
    """One member; `protocols` in the order of its preference, with its metadata for each."""

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
    is_new: bool = False  # has never been told its id by a finished join

    def metadata(self, protocol_name: str | None) -> bytes:
        """The metadata of this member for the protocol; empty if it does not speak it."""
        return dict(self.protocols).get(protocol_name or "", b"")

    @property
    def waits(self) -> bool:
        """Whether an answer is owed to it; then it need not heartbeat."""
        return self.join_waiter is not None or self.sync_waiter is not None


@dataclass(frozen=True, slots=True)
class Group:
    """What all states have in common. `generation` counts finished joins."""

    group_id: str
    generation: int = 0
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    pending: frozenset[str] = frozenset()
    since_ms: int = -1  # wall clock of the last change of state; -1 where an old record has none

    def static_member(self, instance_id: str) -> Member | None:
        """The member that holds this group.instance.id."""
        for member in self.members.values():
            if member.instance_id == instance_id:
                return member
        return None

    @property
    def rebalance_timeout_ms(self) -> int:
        """The longest of the members' timeouts, 0 without members."""
        return max((m.rebalance_timeout_ms for m in self.members.values()), default=0)

    @property
    def all_joined(self) -> bool:
        """Whether nobody is missing in the join phase."""
        return not self.pending and all(m.join_waiter is not None for m in self.members.values())


# States -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Empty:
    """No members; perhaps offsets."""

    group: Group


@dataclass(frozen=True, slots=True)
class PreparingRebalance:
    """Members are to join. `initial`: out of Empty, which waits for its delay to pass."""

    group: Group
    initial: bool = False
    delay_ms: int = 0
    remaining_ms: int = 0
    member_added: bool = False  # during the initial delay, which may then be given once more


@dataclass(frozen=True, slots=True)
class CompletingRebalance:
    """The generation stands; the leader's assignment is awaited, then stored."""

    group: Group
    unsynced: frozenset[str]
    assignment: Mapping[str, bytes] | None = None  # given by the leader, not yet stored


@dataclass(frozen=True, slots=True)
class Stable:
    """Everyone has, or may fetch, its assignment."""

    group: Group
    unsynced: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Dead:
    """Deleted or unloaded; whoever still asks is sent to look for the coordinator again."""

    group: Group


Live = Empty | PreparingRebalance | CompletingRebalance | Stable
State = Live | Dead


# Events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinRequested:
    """JoinGroup. `new_member_id` is what a member without an id is to be called."""

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
    id_required: bool  # JoinGroup v4+: an id first, then membership (KIP-394)
    may_skip_assignment: bool  # JoinGroup v9+ (KIP-814)


@dataclass(frozen=True, slots=True)
class SyncRequested:
    """SyncGroup; only the leader's assignments count."""

    waiter: int
    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None
    protocol_name: str | None
    assignments: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """Heartbeat."""

    waiter: int
    member_id: str
    instance_id: str | None
    generation: int


@dataclass(frozen=True, slots=True)
class CommitRequested:
    """The question whether this OffsetCommit is allowed; it counts as a heartbeat."""

    waiter: int
    member_id: str
    instance_id: str | None
    generation: int


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """LeaveGroup: (member id, instance id) each; the id may be empty if the instance id is not."""

    waiter: int
    members: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class SessionExpired:
    """A member, or an id given out and never used, was not heard of in time."""

    member_id: str


@dataclass(frozen=True, slots=True)
class JoinTimeout:
    """The time to join is over."""


@dataclass(frozen=True, slots=True)
class SyncTimeout:
    """The time to sync is over."""


@dataclass(frozen=True, slots=True)
class GroupStored:
    """A StoreGroup was carried out, or failed."""

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
    """The offsets partition of this group went away."""


Event = (
    JoinRequested
    | SyncRequested
    | HeartbeatReceived
    | CommitRequested
    | LeaveRequested
    | SessionExpired
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
    """JoinGroup's; `members` (id, instance id, metadata) for the leader only."""

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
    """SyncGroup's."""

    error: ErrorCode
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = NO_ASSIGNMENT


@dataclass(frozen=True, slots=True)
class LeaveAnswer:
    """LeaveGroup's: (member id, instance id, error) for each that was named."""

    error: ErrorCode
    members: tuple[tuple[str, str | None, ErrorCode], ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """Heartbeat's, and the verdict on a commit."""

    error: ErrorCode


Answer = JoinAnswer | SyncAnswer | LeaveAnswer | ErrorAnswer


@dataclass(frozen=True, slots=True)
class Reply:
    """Give the waiter its answer."""

    waiter: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class StartSession:
    """(Re)start the member's timer: SessionExpired in `timeout_ms`."""

    member_id: str
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class StopSession:
    """Forget the member's timer."""

    member_id: str


@dataclass(frozen=True, slots=True)
class StartJoinTimer:
    """(Re)start the group's timer: JoinTimeout in `timeout_ms`."""

    timeout_ms: int


@dataclass(frozen=True, slots=True)
class StopJoinTimer:
    """Forget the join timer."""


@dataclass(frozen=True, slots=True)
class StartSyncTimer:
    """(Re)start the group's timer: SyncTimeout in `timeout_ms`."""

    timeout_ms: int


@dataclass(frozen=True, slots=True)
class StopSyncTimer:
    """Forget the sync timer."""


@dataclass(frozen=True, slots=True)
class StoreGroup:
    """Write the group's metadata record, then tell GroupStored with the same `reply`."""

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


class IllegalTransitionError(AssertionError):
    """An event that cannot happen in this state: a mistake of ours."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{type(event).__name__} in {type(state).__name__}")
        self.state = state
        self.event = event
