"""Members of consumer groups that use the classic protocol, and changes of a group's protocol.

Pure functions. A classic member moves towards its target assignment as the others do: JoinGroup is
its heartbeat with all fields, SyncGroup gives it its current assignment, and Heartbeat tells it
when to join again. Its generation is its member epoch. The group has no leader.

- Upgrade: the first member with the consumer protocol converts a classic group. The assignment of
  the classic group becomes the target assignment and the current one.
- A member gets no partition of a topic that it, or the client that upgrades the group, may not
  describe: the assignment would show that the topic exists and how many partitions it has.
- Downgrade: without a member that uses the consumer protocol, the group becomes a classic one; each
  member keeps its target assignment until the rebalance that follows.

Source: KIP-848 and the group coordinator of Kafka 4.3.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from broker.groups.classic.members import Member, Members, ProtocolTotals
from broker.groups.classic.membership import outgrows_record
from broker.groups.classic.model import NO_MEMBER_ID, Group, JoinRequested, SyncRequested
from broker.groups.classic.subscription import (
    CONSUMER_PROTOCOL_TYPE,
    InvalidMetadataError,
    MemberAssignment,
    Subscription,
    TopicPartitions,
    decode_assignment_sliced,
    decode_subscription_sliced,
    encode_assignment_sliced,
    subscription_version,
)
from broker.groups.consumer.model import (
    NO_PARTITIONS,
    Assignment,
    ClassicProtocol,
    ConsumerGroup,
    ConsumerMember,
    MembershipError,
    MemberState,
    PartitionId,
    TopicLookup,
)
from broker.groups.consumer.state import (
    MemberUpdate,
    check_names,
    replace_static,
    with_regexes,
)
from protocol.errors import ErrorCode
from storage.slices import run_at_once

# librdkafka repeats in an assignment what the member owned. The broker knows this itself.
STICKY_PROTOCOLS: Final = frozenset(("sticky", "cooperative-sticky"))

# Metadata and assignments that one upgrade reads, in turns. A classic group is one record of
# __consumer_offsets, so a group that is stored has hardly more than 1 MB.
UPGRADE_BYTES_MAX: Final = 512 << 10
MEMBERS_PER_SLICE: Final = 128  # that are read, in a millisecond
NAMES_PER_SLICE: Final = 512  # of topics that are looked up, in a millisecond
PARTITIONS_PER_SLICE: Final = 2_048  # of an assignment that is encoded, in a millisecond

# Joining ------------------------------------------------------------------------------------------


def join_error(
    group: ConsumerGroup, request: JoinRequested, max_members: int, max_record_bytes: int
) -> ErrorCode:
    """Return NONE if a classic member with this request may join, or join again.

    `max_record_bytes` is the limit of the classic group that the group may become.
    """
    if len(group.members) >= max_members and request.member_id not in group.members:
        return ErrorCode.GROUP_MAX_SIZE_REACHED
    names = {name for name, _ in request.protocols}
    if request.protocol_type != CONSUMER_PROTOCOL_TYPE or not names:
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    totals = ProtocolTotals().changed(
        (), [each.classic.protocols for each in group.members.values() if each.classic is not None]
    )
    shared = totals.supported_by_all()
    if shared is not None and shared.isdisjoint(names):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    member = group.members.get(request.member_id)
    if request.instance_id is not None:
        member = group.static_member(request.instance_id) or member
    before = member.classic.protocols if member is not None and member.classic is not None else ()
    if outgrows_record(totals, before, request.protocols, limit_bytes=max_record_bytes):
        return ErrorCode.UNKNOWN_SERVER_ERROR
    return ErrorCode.NONE


def update_member(
    group: ConsumerGroup, request: JoinRequested, subscription: Subscription
) -> MemberUpdate:
    """Return the group with the fields of a JoinGroup request. Raises MembershipError."""
    before = group
    group, member = _find_or_create(group, request)
    updated = replace(
        member,
        instance_id=request.instance_id or member.instance_id,
        rack_id=subscription.rack_id or member.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        topics=group.shared(subscription.topics),
        regex=None,
        classic=ClassicProtocol(request.session_timeout_ms, request.protocols),
    )
    if updated != group.members.get(updated.member_id):
        group = group.with_member(updated)
    group = with_regexes(group, {})
    is_changed = (
        len(group.members) > len(before.members)
        or (updated.topics, updated.regex) != (member.topics, member.regex)
        or group.regexes != before.regexes
    )
    if is_changed:
        check_names(before, group)
    return MemberUpdate(group, updated, is_changed)


def _find_or_create(
    group: ConsumerGroup, request: JoinRequested
) -> tuple[ConsumerGroup, ConsumerMember]:
    member_id = request.member_id or request.new_member_id
    if request.instance_id is not None:
        static = group.static_member(request.instance_id)
        if request.member_id:
            return group, _validate(group, request.member_id, request.instance_id)
        if static is not None:
            return replace_static(group, static, member_id)
    member = group.members.get(member_id)
    if member is None:
        member = ConsumerMember(
            member_id=member_id,
            instance_id=request.instance_id,
            rack_id=None,
            client_id=request.client_id,
            client_host=request.client_host,
            rebalance_timeout_ms=request.rebalance_timeout_ms,
        )
    return group, member


def owned_partitions_sliced(
    subscription: Subscription, topics: TopicLookup
) -> Generator[None, None, Assignment]:
    """Return what a member says that it owns, of the topics that exist. Pauses."""
    owned: set[PartitionId] = set()
    entries = 0  # since the last pause
    for name, indexes in subscription.owned.items():
        owned.update(_partition_ids({name: indexes}, topics))
        entries += 1 + len(indexes)
        if entries >= PARTITIONS_PER_SLICE:
            yield
            entries = 0
    return frozenset(owned)


# Other requests -----------------------------------------------------------------------------------


def find_member(
    group: ConsumerGroup, member_id: str, instance_id: str | None, generation: int
) -> ConsumerMember:
    """Return the classic member that sent a request. Raises MembershipError."""
    member = _validate(group, member_id, instance_id)
    if member.classic is None:
        raise MembershipError(ErrorCode.UNKNOWN_MEMBER_ID, "the member uses the consumer protocol")
    if generation != member.epoch:
        raise MembershipError(
            ErrorCode.ILLEGAL_GENERATION, f"the member has generation {member.epoch}"
        )
    return member


def _validate(group: ConsumerGroup, member_id: str, instance_id: str | None) -> ConsumerMember:
    member = group.members.get(member_id)
    if instance_id is not None:
        member = group.static_member(instance_id)
        if member is not None and member.member_id != member_id:
            raise MembershipError(
                ErrorCode.FENCED_INSTANCE_ID, f"instance id {instance_id} belongs to another member"
            )
    if member is None:
        raise MembershipError(
            ErrorCode.UNKNOWN_MEMBER_ID, f"member {member_id} is not in group {group.group_id}"
        )
    return member


def find_leaver(group: ConsumerGroup, member_id: str, instance_id: str | None) -> str:
    """Return the id of a member that LeaveGroup names. Raises MembershipError."""
    if instance_id is not None and member_id == NO_MEMBER_ID:
        # An administrator removes a static member by its instance id alone.
        static = group.static_member(instance_id)
        if static is not None:
            return static.member_id
    return _validate(group, member_id, instance_id).member_id


def sync_error(group: ConsumerGroup, member: ConsumerMember, request: SyncRequested) -> ErrorCode:
    """Return NONE if a member may have its assignment, REBALANCE_IN_PROGRESS to join again."""
    if request.protocol_type not in (None, CONSUMER_PROTOCOL_TYPE):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    if request.protocol_name not in (None, protocol_name(member)):
        return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    is_behind = member.epoch < group.epoch
    # A member that has to revoke partitions has joined already: it learns what by this assignment.
    if is_behind and member.state is not MemberState.UNREVOKED_PARTITIONS:
        return ErrorCode.REBALANCE_IN_PROGRESS
    return ErrorCode.NONE


def must_rejoin(group: ConsumerGroup, member: ConsumerMember) -> bool:
    """Return whether a member gets its next assignment by joining again."""
    if member.epoch < group.epoch or member.state is MemberState.UNREVOKED_PARTITIONS:
        return True
    if member.state is not MemberState.UNRELEASED_PARTITIONS:
        return False
    target = group.targets.get(member.member_id, NO_PARTITIONS)
    return all(group.owners.get(p, member.member_id) == member.member_id for p in target)


def protocol_name(member: ConsumerMember) -> str:
    """Return the protocol that the broker names to a classic member: its first."""
    assert member.classic is not None
    return member.classic.protocols[0][0]


def current_assignment(member: ConsumerMember, names: Mapping[bytes, str]) -> bytes:
    """Return the answer to SyncGroup: the partitions that the member owns now.

    `names` are those of its topics that exist, by id.
    """
    assert member.classic is not None
    version = _subscription_version(member.classic.protocols[0][1])
    return run_at_once(_encode_sliced(version, member.assigned, names))


# Changes of the protocol --------------------------------------------------------------------------


def uses_classic_only(group: ConsumerGroup) -> bool:
    """Return whether the group has members, all of which use the classic protocol."""
    members = group.members.values()
    return bool(members) and all(member.classic is not None for member in members)


def upgraded_sliced(
    group: Group, topics: TopicLookup, may_describe: Callable[[str], bool]
) -> Generator[None, None, ConsumerGroup]:
    """Return a classic group as a consumer group, with pauses. Raises MembershipError.

    Subscriptions lose topics that the client may not describe until their members join again.
    """
    decoded = yield from _decode_sliced(group)
    visible = yield from _visible_sliced([each for each, _ in decoded], may_describe)
    members: dict[str, ConsumerMember] = {}
    targets: dict[str, Assignment] = {}
    owners: dict[PartitionId, str] = {}
    shared: dict[frozenset[str], frozenset[str]] = {}  # see ConsumerGroup.shared
    rows = zip(group.members.values(), decoded, strict=True)
    for number, (member, (subscription, assignment)) in enumerate(rows, 1):
        partitions: set[PartitionId] = set()
        for count, (name, indexes) in enumerate(assignment.partitions.items(), 1):
            if name in visible:
                partitions.update(_partition_ids({name: indexes}, topics))
            if count % NAMES_PER_SLICE == 0:
                yield
        target = frozenset(partitions) - owners.keys()
        owners |= dict.fromkeys(target, member.member_id)
        names = subscription.topics & visible
        targets[member.member_id] = target
        members[member.member_id] = ConsumerMember(
            member_id=member.member_id,
            instance_id=member.instance_id,
            rack_id=subscription.rack_id,
            client_id=member.client_id,
            client_host=member.client_host,
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            topics=shared.setdefault(names, names),
            classic=ClassicProtocol(member.session_timeout_ms, member.protocols),
            epoch=group.generation,
            previous_epoch=group.generation,
            assigned=dict.fromkeys(target, group.generation),
        )
        if number % MEMBERS_PER_SLICE == 0 or len(target) > NAMES_PER_SLICE:
            yield
    result = ConsumerGroup(
        group.group_id,
        epoch=group.generation,
        assignment_epoch=group.generation,
        members=members,
        targets=targets,
        owners=owners,
    )
    check_names(ConsumerGroup(group.group_id), result)
    return result


def _decode_sliced(
    group: Group,
) -> Generator[None, None, list[tuple[Subscription, MemberAssignment]]]:
    """Return what the members of a classic group subscribe to and what they have."""
    if group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        raise _not_upgradable(group, "its members do not use the embedded consumer protocol")
    name = group.protocol_name or group.members.protocols.elected()
    size_bytes = sum(len(m.metadata(name)) for m in group.members.values())
    size_bytes += sum(map(len, group.assignments.values()))
    if size_bytes > UPGRADE_BYTES_MAX:
        reason = f"the metadata of its members has {size_bytes} bytes, more than"
        raise _not_upgradable(group, f"{reason} {UPGRADE_BYTES_MAX}, the limit")
    decoded = []
    for number, member in enumerate(group.members.values(), 1):
        try:
            assignment = yield from decode_assignment_sliced(group.assignment(member.member_id))
            if len(assignment.partitions) > NAMES_PER_SLICE:
                yield
            subscription = yield from decode_subscription_sliced(member.metadata(name))
        except InvalidMetadataError as error:
            text = f"the metadata of a member is invalid: {error}"
            raise _not_upgradable(group, text) from error
        if assignment.user_data and name not in STICKY_PROTOCOLS:
            raise _not_upgradable(group, "its assignor keeps data of its own")
        decoded.append((subscription, assignment))
        if number % MEMBERS_PER_SLICE == 0 or len(subscription.topics) > NAMES_PER_SLICE:
            yield
    return decoded


def _visible_sliced(
    subscriptions: Sequence[Subscription], may_describe: Callable[[str], bool]
) -> Generator[None, None, frozenset[str]]:
    """Return the subscribed topics that the client may describe."""
    visible: dict[str, bool] = {}
    for number, subscription in enumerate(subscriptions, 1):
        for name in subscription.topics:
            if name not in visible:
                visible[name] = may_describe(name)
                if len(visible) % NAMES_PER_SLICE == 0:
                    yield
        if number % MEMBERS_PER_SLICE == 0:
            yield
    return frozenset(name for name, is_visible in visible.items() if is_visible)


def _not_upgradable(group: Group, reason: str) -> MembershipError:
    text = f"classic group {group.group_id} cannot become a consumer group: {reason}"
    return MembershipError(ErrorCode.GROUP_ID_NOT_FOUND, text)


def downgraded_sliced(
    group: ConsumerGroup, topics: TopicLookup, now_ms: int
) -> Generator[None, None, Group]:
    """Return a consumer group as a classic one, with pauses.

    Its members keep their target assignments.
    """
    names: dict[bytes, str] = {}
    for number, name in enumerate(group.all_topics(), 1):
        topic = topics.topic(name)
        if topic is not None:
            names[topic.topic_id] = name
        if number % NAMES_PER_SLICE == 0:
            yield
    members, rows = Members.of(), tuple(group.members.values())
    for first in range(0, len(rows), MEMBERS_PER_SLICE):
        some = rows[first : first + MEMBERS_PER_SLICE]
        members = members.changed((), [_classic_member(member) for member in some])
        yield
    protocol = members.protocols.elected()
    encoded: dict[tuple[int, Assignment], bytes] = {}
    assignments: dict[str, bytes] = {}
    for number, (key, member) in enumerate(members.items(), 1):
        version = _subscription_version(member.metadata(protocol))
        target = group.targets.get(key, NO_PARTITIONS)
        if (version, target) not in encoded:
            encoded[version, target] = yield from _encode_sliced(version, target, names)
        assignments[key] = encoded[version, target]
        if number % MEMBERS_PER_SLICE == 0 or len(target) > NAMES_PER_SLICE:
            yield
    return Group(
        group.group_id,
        generation=group.epoch,
        protocol_type=CONSUMER_PROTOCOL_TYPE,
        protocol_name=protocol,
        leader=next(iter(members)),
        members=members,
        assignments=assignments,
        since_ms=now_ms,
    )


def _classic_member(member: ConsumerMember) -> Member:
    assert member.classic is not None
    return Member(
        member_id=member.member_id,
        instance_id=member.instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        session_timeout_ms=member.classic.session_timeout_ms,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        protocols=member.classic.protocols,
    )


# Small parts --------------------------------------------------------------------------------------


def _partition_ids(partitions: TopicPartitions, topics: TopicLookup) -> Iterable[PartitionId]:
    for name, indexes in partitions.items():
        topic = topics.topic(name)
        if topic is not None:
            for index in indexes:
                if 0 <= index < topic.partition_count:
                    yield topic.topic_id, index


def _subscription_version(metadata: bytes) -> int:
    try:
        return subscription_version(metadata)
    except InvalidMetadataError:  # of a protocol that the group did not use before
        return 0


def _encode_sliced(
    version: int, partitions: Iterable[PartitionId], names: Mapping[bytes, str]
) -> Generator[None, None, bytes]:
    by_name = defaultdict[str, list[int]](list)
    for number, (topic_id, index) in enumerate(partitions, 1):
        name = names.get(topic_id)
        if name is not None:
            by_name[name].append(index)
        if number % PARTITIONS_PER_SLICE == 0:
            yield
    return (yield from encode_assignment_sliced(version, by_name))
