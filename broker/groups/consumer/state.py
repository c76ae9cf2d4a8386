"""The state machine of a consumer group: pure functions from a group to the next group.

Rules
- Every change of members, subscriptions or subscribed topics increments the group epoch.
- A target assignment belongs to one group epoch; only the owner of a partition keeps others from
  getting it (reconciliation.py).
- A refused request changes nothing and raises MembershipError.

Source: KIP-848. One rule differs from Kafka: a member that joins again with its own id gives up its
partitions and stays, where Kafka refuses it until its session expires
(docs/decisions/0031-consumer-groups.md).
"""

import hashlib
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from broker.groups.consumer.assignors import ASSIGNORS, DEFAULT_ASSIGNOR, Assignor, Subscriber
from broker.groups.consumer.model import (
    JOIN_EPOCH,
    LEAVE_STATIC_EPOCH,
    NO_PARTITIONS,
    Assignment,
    ConsumerGroup,
    ConsumerMember,
    Heartbeat,
    MembershipError,
    MemberState,
    PartitionId,
    ResolvedRegex,
    TopicMetadata,
)
from protocol.errors import ErrorCode

EPOCH_MAX: Final = 2**31 - 1
# Names in the subscriptions of one group: 40 ms of work when a member changes its subscription.
# Three times the topics of a broker with the default of limits.partitions.
NAMES_MAX: Final = 30_000
# Different expressions of one group. A heartbeat may resolve all of them: each is compared with the
# names of all topics every ten seconds, whether it matches any or not.
REGEXES_MAX: Final = 100
TOPICS_PER_SLICE: Final = 2_000  # hashed in a millisecond
UNKNOWN_MEMBER: Final = "member {} is not a member of group {}"


@dataclass(frozen=True, slots=True)
class MemberUpdate:
    """A group after the fields of a heartbeat; `member` is not reconciled yet.

    `is_changed`: members or subscriptions have changed, so the group needs the next epoch.
    """

    group: ConsumerGroup
    member: ConsumerMember
    is_changed: bool


def update_member(
    group: ConsumerGroup,
    request: Heartbeat,
    regexes: Mapping[str, ResolvedRegex],
    max_members: int,
) -> MemberUpdate:
    """Return the group with the fields of a heartbeat. Raises MembershipError.

    `regexes`: the regular expression of the request, and those that were resolved just now.
    """
    before = group
    group, member = _find_or_create(group, request, max_members)
    updated = replace(
        member,
        instance_id=request.instance_id or member.instance_id,
        rack_id=member.rack_id if request.rack_id is None else request.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        rebalance_timeout_ms=(
            member.rebalance_timeout_ms
            if request.rebalance_timeout_ms < 0
            else request.rebalance_timeout_ms
        ),
        topics=member.topics if request.topics is None else group.shared(request.topics),
        regex=member.regex if request.regex is None else request.regex or None,
        assignor=member.assignor if request.assignor is None else request.assignor,
        classic=None,
    )
    if updated != group.members.get(updated.member_id):
        group = group.with_member(updated)
    group = with_regexes(group, regexes)
    is_new = updated.member_id not in before.members and not _is_replacement(before, updated)
    is_changed = (
        is_new
        or (updated.topics, updated.regex) != (member.topics, member.regex)
        or group.regexes != before.regexes
    )
    if is_changed:
        check_names(before, group)
    return MemberUpdate(group, updated, is_changed)


def check_names(before: ConsumerGroup, after: ConsumerGroup) -> None:
    """Refuse subscriptions that make a group too expensive. Raises MembershipError."""
    names = after.count_names()
    if names > NAMES_MAX and names > before.count_names():
        raise MembershipError(
            ErrorCode.INVALID_REQUEST,
            f"the subscriptions of group {after.group_id} have {names} topics, more than"
            f" {NAMES_MAX}, the limit; subscribe by a regular expression, or use more groups",
        )
    if len(after.regexes) > max(REGEXES_MAX, len(before.regexes)):
        raise MembershipError(
            ErrorCode.INVALID_REQUEST,
            f"group {after.group_id} has {REGEXES_MAX} different regular expressions, its limit",
        )


def _find_or_create(
    group: ConsumerGroup, request: Heartbeat, max_members: int
) -> tuple[ConsumerGroup, ConsumerMember]:
    is_join = request.epoch == JOIN_EPOCH
    if request.instance_id is not None:
        static = group.static_member(request.instance_id)
        if static is not None and static.member_id != request.member_id:
            return _return_static(group, static, request)
        if static is None and not is_join:
            raise _unknown(group, request)
    member = group.members.get(request.member_id)
    if member is None:
        if not is_join:
            raise _unknown(group, request)
        if len(group.members) >= max_members:
            raise MembershipError(
                ErrorCode.GROUP_MAX_SIZE_REACHED, f"the group has {max_members} members, its limit"
            )
        return group, _new_member(request)
    if is_join:
        return group, replace(
            member,
            epoch=JOIN_EPOCH,
            previous_epoch=JOIN_EPOCH,
            state=MemberState.STABLE,
            assigned={},
            pending_revocation={},
        )
    _check_epoch(member, request)
    return group, member


def _return_static(
    group: ConsumerGroup, static: ConsumerMember, request: Heartbeat
) -> tuple[ConsumerGroup, ConsumerMember]:
    """Give the place of a static member that left to the process that returned in its name."""
    if request.epoch != JOIN_EPOCH:
        raise MembershipError(
            ErrorCode.FENCED_INSTANCE_ID,
            f"instance id {request.instance_id} belongs to another member now",
        )
    if not static.has_left and static.classic is None:
        raise MembershipError(
            ErrorCode.UNRELEASED_INSTANCE_ID,
            f"instance id {request.instance_id} is still in use by member {static.member_id}",
        )
    return replace_static(group, static, request.member_id)


def replace_static(
    group: ConsumerGroup, static: ConsumerMember, member_id: str
) -> tuple[ConsumerGroup, ConsumerMember]:
    """Return the group with a static member under its new id; it keeps its target."""
    target = group.targets.get(static.member_id, NO_PARTITIONS)
    member = replace(
        static,
        member_id=member_id,
        epoch=JOIN_EPOCH,
        previous_epoch=JOIN_EPOCH,
        pending_revocation={},
    )
    group = group.without_member(static.member_id).with_member(member)
    return replace(group, targets={**group.targets, member.member_id: target}), member


def _is_replacement(before: ConsumerGroup, member: ConsumerMember) -> bool:
    return member.instance_id is not None and before.static_member(member.instance_id) is not None


def _new_member(request: Heartbeat) -> ConsumerMember:
    return ConsumerMember(
        member_id=request.member_id,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
    )


def _unknown(group: ConsumerGroup, request: Heartbeat) -> MembershipError:
    text = UNKNOWN_MEMBER.format(request.member_id, group.group_id)
    return MembershipError(ErrorCode.UNKNOWN_MEMBER_ID, text)


def _check_epoch(member: ConsumerMember, request: Heartbeat) -> None:
    """Raise MembershipError unless the client has the member's epoch.

    A client with the previous epoch has missed an answer; it may go on if it owns nothing that the
    member does not.
    """
    if request.epoch == member.epoch:
        return
    missed_answer = request.epoch < member.epoch and request.epoch == member.previous_epoch
    if missed_answer and request.owned is not None and request.owned <= member.assigned.keys():
        return
    raise MembershipError(
        ErrorCode.FENCED_MEMBER_EPOCH,
        f"the member has epoch {member.epoch}, not {request.epoch}; it must give up its partitions"
        " and join again",
    )


def with_regexes(group: ConsumerGroup, resolved: Mapping[str, ResolvedRegex]) -> ConsumerGroup:
    """Keep the regular expressions in use, with the topics that they match now."""
    in_use = {member.regex for member in group.members.values() if member.regex}
    regexes: dict[str, ResolvedRegex] = {}
    for regex in in_use:
        before, now = group.regexes.get(regex), resolved.get(regex)
        if now is None or (before is not None and before.topics == now.topics):
            now = before
        if now is not None:
            regexes[regex] = now
    return group if regexes == group.regexes else replace(group, regexes=regexes)


def _next_epoch(group: ConsumerGroup) -> ConsumerGroup:
    return replace(group, epoch=group.epoch + 1 if group.epoch < EPOCH_MAX else 1)


# Topics and target assignments --------------------------------------------------------------------


def with_next_epoch(group: ConsumerGroup, metadata_hash: int, *, is_changed: bool) -> ConsumerGroup:
    """Return the group with the next epoch if it or a subscribed topic has changed."""
    if metadata_hash == group.metadata_hash and not is_changed:
        return group
    return _next_epoch(replace(group, metadata_hash=metadata_hash))


def with_metadata_hash(group: ConsumerGroup, metadata_hash: int) -> ConsumerGroup:
    """Return the group with the hash of its topics, in its epoch."""
    if metadata_hash == group.metadata_hash:
        return group
    return replace(group, metadata_hash=metadata_hash)


def metadata_hash_sliced(topics: Iterable[TopicMetadata]) -> Generator[None, None, int]:
    """Return a number (int64) that changes with the subscribed topics that exist; 0 for none.

    `topics` are sorted by name. Kafka computes another number; after a change of broker the group
    is assigned once more.
    """
    digest, count = hashlib.blake2b(digest_size=8), 0
    for count, topic in enumerate(topics, 1):
        digest.update(topic.topic_id + topic.partition_count.to_bytes(4))
        if count % TOPICS_PER_SLICE == 0:
            yield
    return int.from_bytes(digest.digest(), signed=True) if count else 0


def _subscribed(
    group: ConsumerGroup, topics: Mapping[str, TopicMetadata]
) -> dict[str, TopicMetadata]:
    names = group.all_topics()
    return {name: topic for name, topic in topics.items() if name in names}


@dataclass(frozen=True, slots=True)
class AssignmentTask:
    """The input of an assignor, for one group epoch; `compute` may run in a thread."""

    epoch: int
    assignor: Assignor
    members: tuple[Subscriber, ...]
    topics: Mapping[str, TopicMetadata]

    def compute(self) -> Mapping[str, Assignment]:
        """Return the target of each member."""
        return self.assignor(self.members, self.topics)


def assignment_size(group: ConsumerGroup, topics: Mapping[str, TopicMetadata]) -> int:
    """Return about how many steps an assignor takes; `topics` are those of the group, by name.

    `uniform` looks at the subscribers of each topic unless all members have the same topics.
    """
    members = len(group.members)
    partitions = sum(topic.partition_count for topic in topics.values())
    distinct = {(member.topics, member.regex) for member in group.members.values()}
    return members + partitions + (0 if len(distinct) <= 1 else members * len(topics))


def assignment_task(group: ConsumerGroup, topics: Mapping[str, TopicMetadata]) -> AssignmentTask:
    """Return what has to be computed for the present group epoch; `topics` as before.

    Names of topics that do not exist are left out: clients may subscribe to any number of them.
    """
    topics = _subscribed(group, topics)
    equal: dict[frozenset[str], frozenset[str]] = {}  # see ConsumerGroup.shared
    subscriptions: dict[tuple[frozenset[str], str | None], frozenset[str]] = {}
    for key, names in group.subscriptions().items():
        existing = frozenset(filter(topics.__contains__, names))
        subscriptions[key] = equal.setdefault(existing, existing)
    members = tuple(
        Subscriber(
            member.member_id,
            member.instance_id,
            subscriptions[member.topics, member.regex],
            group.targets.get(member.member_id, NO_PARTITIONS),
        )
        for member in group.members.values()
    )
    return AssignmentTask(group.epoch, ASSIGNORS[preferred_assignor(group)], members, topics)


def preferred_assignor(group: ConsumerGroup) -> str:
    """Return the assignor that most members name; the default if none does.

    Members of a group that a Kafka broker stored may name one that only that broker has.
    """
    votes: dict[str, int] = {}
    for member in group.members.values():
        if member.assignor in ASSIGNORS:
            votes[member.assignor] = votes.get(member.assignor, 0) + 1
    return max(votes, key=votes.__getitem__, default=DEFAULT_ASSIGNOR)


def with_targets(
    group: ConsumerGroup, epoch: int, targets: Mapping[str, Assignment]
) -> ConsumerGroup:
    """Return the group with a target assignment for `epoch`, unless a later one is there."""
    if epoch <= group.assignment_epoch:
        return group
    present = {key: value for key, value in targets.items() if key in group.members}
    return replace(group, assignment_epoch=epoch, targets=present)


# Leaving ------------------------------------------------------------------------------------------


def without_members(group: ConsumerGroup, member_ids: Iterable[str]) -> ConsumerGroup:
    """Return the group after members left or their sessions expired."""
    return _next_epoch(with_regexes(group.without_members(member_ids), {}))


def after_leave(group: ConsumerGroup, request: Heartbeat) -> ConsumerGroup:
    """Return the group after a heartbeat with epoch -1 or -2. Raises MembershipError."""
    member = group.members.get(request.member_id)
    if request.instance_id is not None:
        static = group.static_member(request.instance_id)
        if static is not None and static.member_id != request.member_id:
            raise MembershipError(
                ErrorCode.FENCED_INSTANCE_ID,
                f"instance id {request.instance_id} belongs to another member now",
            )
        member = static
    if member is None:
        raise _unknown(group, request)
    if request.epoch == LEAVE_STATIC_EPOCH:
        # The member keeps its partitions until its session expires or its process returns.
        return group.with_member(
            replace(
                member,
                epoch=LEAVE_STATIC_EPOCH,
                previous_epoch=member.epoch,
                pending_revocation={},
            )
        )
    return without_members(group, [member.member_id])


def commit_error(
    group: ConsumerGroup,
    member_id: str,
    epoch: int,
    partitions: Iterable[PartitionId],
    *,
    knows_epochs: bool,
) -> ErrorCode:
    """Return NONE if a client may commit offsets of these partitions.

    A client without a member id or epoch is an administrator, or assigns its partitions itself; it
    may commit while the group is empty. A member may commit with an earlier epoch what it has owned
    since then (KIP-1251), but not by a request that has no epochs.
    """
    if epoch < 0 and not group.members:
        return ErrorCode.NONE
    member = group.members.get(member_id)
    if member is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    if not knows_epochs and member.classic is None:
        return ErrorCode.UNSUPPORTED_VERSION
    if epoch == member.epoch:
        return ErrorCode.NONE
    owned_since = {**member.assigned, **member.pending_revocation}
    is_owner = all(owned_since.get(partition, epoch + 1) <= epoch for partition in partitions)
    if 0 <= epoch < member.epoch and is_owner:
        return ErrorCode.NONE
    is_classic = member.classic is not None
    return ErrorCode.ILLEGAL_GENERATION if is_classic else ErrorCode.STALE_MEMBER_EPOCH


def fetch_error(group: ConsumerGroup, member_id: str, epoch: int) -> ErrorCode:
    """Return NONE if a client may fetch offsets as this member: it has the member's epoch."""
    member = group.members.get(member_id)
    if member is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    if epoch == member.epoch:
        return ErrorCode.NONE
    is_classic = member.classic is not None
    return ErrorCode.ILLEGAL_GENERATION if is_classic else ErrorCode.STALE_MEMBER_EPOCH
