"""Consumer groups as records of __consumer_offsets, byte for byte as Kafka's (KIP-848).

What is written is the difference between two values of a group; replaying all records gives the
group again. Bytes are not trusted: whatever does not follow its format is a ProtocolError.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from broker.event_loop.loop_turns import Turns, run_in_turns
from broker.groups.consumer.model import (
    Assignment,
    ClassicProtocol,
    ConsumerGroup,
    ConsumerMember,
    MemberState,
    PartitionId,
    ResolvedRegex,
    TopicMetadata,
)
from protocol import record_codec
from protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupCurrentMemberAssignmentValuePendingPartition,
    ConsumerGroupCurrentMemberAssignmentValueTopicPartition,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerGroupRegularExpressionKey,
    ConsumerGroupRegularExpressionValue,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMemberValueTopicPartition,
    ConsumerGroupTargetAssignmentMetadataKey,
    ConsumerGroupTargetAssignmentMetadataValue,
    Message,
)
from protocol.messages import (
    ConsumerGroupMemberMetadataValueClassicMemberMetadata as ClassicMetadataValue,
)
from protocol.messages import (
    ConsumerGroupMemberMetadataValueClassicProtocol as ClassicProtocolValue,
)

# The version of a key names the kind of record.
METADATA_KEY: Final = 3
MEMBER_KEY: Final = 5
TARGET_METADATA_KEY: Final = 6
TARGET_KEY: Final = 7
CURRENT_KEY: Final = 8
REGEX_KEY: Final = 16

ConsumerKey = (
    ConsumerGroupMetadataKey
    | ConsumerGroupMemberMetadataKey
    | ConsumerGroupTargetAssignmentMetadataKey
    | ConsumerGroupTargetAssignmentMemberKey
    | ConsumerGroupCurrentMemberAssignmentKey
    | ConsumerGroupRegularExpressionKey
)
_KEYS: Final[dict[int, type[ConsumerKey]]] = {
    METADATA_KEY: ConsumerGroupMetadataKey,
    MEMBER_KEY: ConsumerGroupMemberMetadataKey,
    TARGET_METADATA_KEY: ConsumerGroupTargetAssignmentMetadataKey,
    TARGET_KEY: ConsumerGroupTargetAssignmentMemberKey,
    CURRENT_KEY: ConsumerGroupCurrentMemberAssignmentKey,
    REGEX_KEY: ConsumerGroupRegularExpressionKey,
}
VALUE_VERSION: Final = 0
# The version of a resolved expression counts metadata versions of Kafka's controller; there is none
# here, and readers only compare it.
NO_METADATA_VERSION: Final = 0

# Parts of records, at most: a batch with a record and its fields of fixed size, a topic with its id
# and the lengths of its lists, a partition with its epoch, the length of a name.
RECORD_BYTES: Final = 400
TOPIC_BYTES: Final = 27
PARTITION_BYTES: Final = 8
NAME_LENGTH_BYTES: Final = 3

MEMBERS_PER_SLICE: Final = 128  # whose keys are encoded, in a millisecond

M = TypeVar("M", bound=Message)
V = TypeVar("V")


def decode_key(data: bytes) -> ConsumerKey | None:
    """Return the key of a record of a consumer group; None for another kind of record."""
    kind = _KEYS.get(record_codec.read_version(data))
    return None if kind is None else record_codec.decode(kind, data)


# Writing ------------------------------------------------------------------------------------------


async def encode_changes(
    before: ConsumerGroup, after: ConsumerGroup, keys: Iterable[bytes]
) -> dict[bytes, bytes | None]:
    """Return the records that lead from `before` to `after`, and those with these keys, in turns.

    None deletes a record. Without keys, there is no record if nothing changed.
    """
    turns = Turns()
    encoded: dict[bytes, bytes | None] = {}
    for key in keys:
        encoded[key] = await _encode(await _present_value(after, key, turns), turns)
    async for key, value in _changes(before, after, turns):
        encoded[key] = await _encode(value, turns)
    return encoded


async def _encode(value: Message | None, turns: Turns) -> bytes | None:
    await turns.take()
    if value is None:
        return None
    return await run_in_turns(record_codec.encode_sliced(value, VALUE_VERSION))


async def _changes(
    before: ConsumerGroup, after: ConsumerGroup, turns: Turns
) -> AsyncIterator[tuple[bytes, Message | None]]:
    group_id = after.group_id
    for regex in before.regexes.keys() - after.regexes.keys():
        yield _regex_key(group_id, regex), None
    for regex, old_topics, resolved in _replaced(before.regexes, after.regexes):
        if old_topics != resolved:
            yield _regex_key(group_id, regex), _regex_value(resolved)
    async for member_id in turns.over(before.members.keys() - after.members.keys()):
        for key in _member_keys(group_id, member_id):
            yield key, None
    members = _replaced(before.members, after.members)
    async for member_id, old, member in turns.over(members):
        if old is None or _described(old) != _described(member):
            yield _member_key(group_id, member_id), _metadata(member)
    if (before.epoch, before.metadata_hash) != (after.epoch, after.metadata_hash):
        yield _group_key(group_id), _group_metadata(after)
    async for member_id, old_target, target in turns.over(_replaced(before.targets, after.targets)):
        if old_target != target:
            yield _target_key(group_id, member_id), await _target(target, turns)
    if before.assignment_epoch != after.assignment_epoch:
        yield _target_metadata_key(group_id), _target_metadata(after)
    async for member_id, old, member in turns.over(members):
        if old is None or _position(old) != _position(member):
            yield _current_key(group_id, member_id), await _current(member, turns)


def _replaced(before: Mapping[str, V], after: Mapping[str, V]) -> list[tuple[str, V | None, V]]:
    """Return (key, value before, value now) where the value is another object than before."""
    if before is after:
        return []
    keys = [key for key, value in after.items() if before.get(key) is not value]
    return [(key, before.get(key), after[key]) for key in keys]


async def _present_value(group: ConsumerGroup, key: bytes, turns: Turns) -> Message | None:
    match decode_key(key):
        case ConsumerGroupMetadataKey():
            return _group_metadata(group)
        case ConsumerGroupTargetAssignmentMetadataKey():
            return _target_metadata(group)
        case ConsumerGroupMemberMetadataKey(member_id=member_id) if member_id in group.members:
            return _metadata(group.members[member_id])
        case ConsumerGroupTargetAssignmentMemberKey(member_id=member_id) if (
            member_id in group.targets
        ):
            return await _target(group.targets[member_id], turns)
        case ConsumerGroupCurrentMemberAssignmentKey(member_id=member_id) if (
            member_id in group.members
        ):
            return await _current(group.members[member_id], turns)
        case ConsumerGroupRegularExpressionKey(regular_expression=regex) if regex in group.regexes:
            return _regex_value(group.regexes[regex])
    return None


def largest_record_bytes(
    before: ConsumerGroup,
    after: ConsumerGroup,
    member: ConsumerMember,
    topics: Mapping[str, TopicMetadata],
) -> int:
    """Return how many bytes the largest record has at most that a new subscription leads to.

    `member` is the one in `after` that has the subscription; `topics` are those that exist. Its
    assignment may have every partition of its topics.
    """
    texts = (member.instance_id, member.rack_id, member.client_id, member.regex)
    key_bytes = RECORD_BYTES + len((after.group_id + member.member_id).encode())
    protocols = () if member.classic is None else member.classic.protocols
    metadata_bytes = (
        _names_bytes(member.topics)
        + sum(len((text or "").encode()) for text in texts)
        + sum(len(name.encode()) + len(data) for name, data in protocols)
    )
    subscribed = after.subscribed_topics(member)
    counts = [topic.partition_count for name, topic in topics.items() if name in subscribed]
    # A topic may be in the record twice: with partitions that stay, and with those to revoke.
    mentions = 2 * len(counts) - counts.count(1)
    assignment_bytes = TOPIC_BYTES * mentions + PARTITION_BYTES * sum(counts)
    resolved_bytes = [
        _names_bytes(resolved.topics) + len(regex.encode())
        for regex, resolved in after.regexes.items()
        if before.regexes.get(regex) is not resolved
    ]
    return key_bytes + max(metadata_bytes, assignment_bytes, *resolved_bytes)


def _names_bytes(names: Collection[str]) -> int:
    return len("".join(names).encode()) + NAME_LENGTH_BYTES * len(names)


def tombstone_keys_sliced(*values: ConsumerGroup) -> Generator[None, None, list[bytes]]:
    """Return the keys of the records that delete a group, of which the log has several values."""
    group_id = values[0].group_id
    regexes = frozenset[str]().union(*(group.regexes for group in values))
    keys = [_regex_key(group_id, regex) for regex in regexes]
    member_ids = frozenset[str]().union(*(group.members.keys() for group in values))
    member_ids = member_ids.union(*(group.targets.keys() for group in values))
    for number, member_id in enumerate(member_ids, 1):
        keys.extend(_member_keys(group_id, member_id))
        if number % MEMBERS_PER_SLICE == 0:
            yield
    return [*keys, _target_metadata_key(group_id), _group_key(group_id)]


def _group_key(group_id: str) -> bytes:
    return record_codec.encode(ConsumerGroupMetadataKey(group_id=group_id), METADATA_KEY)


def _target_metadata_key(group_id: str) -> bytes:
    key = ConsumerGroupTargetAssignmentMetadataKey(group_id=group_id)
    return record_codec.encode(key, TARGET_METADATA_KEY)


def _member_key(group_id: str, member_id: str) -> bytes:
    key = ConsumerGroupMemberMetadataKey(group_id=group_id, member_id=member_id)
    return record_codec.encode(key, MEMBER_KEY)


def _target_key(group_id: str, member_id: str) -> bytes:
    key = ConsumerGroupTargetAssignmentMemberKey(group_id=group_id, member_id=member_id)
    return record_codec.encode(key, TARGET_KEY)


def _current_key(group_id: str, member_id: str) -> bytes:
    key = ConsumerGroupCurrentMemberAssignmentKey(group_id=group_id, member_id=member_id)
    return record_codec.encode(key, CURRENT_KEY)


def _member_keys(group_id: str, member_id: str) -> list[bytes]:
    """Return the keys of all records of a member, in the order in which they are deleted."""
    return [make(group_id, member_id) for make in (_current_key, _target_key, _member_key)]


def _described(member: ConsumerMember) -> tuple[object, ...]:
    """Return what the metadata record of a member holds."""
    return (
        member.instance_id,
        member.rack_id,
        member.client_id,
        member.client_host,
        member.topics,
        member.regex,
        member.rebalance_timeout_ms,
        member.assignor,
        member.classic,
    )


def _metadata(member: ConsumerMember) -> ConsumerGroupMemberMetadataValue:
    return ConsumerGroupMemberMetadataValue(
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.topics),  # to sort 25,000 takes 8 ms
        subscribed_topic_regex=member.regex,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        server_assignor=member.assignor,
        classic_member_metadata=None if member.classic is None else _classic_value(member.classic),
    )


def _classic_value(classic: ClassicProtocol) -> ClassicMetadataValue:
    return ClassicMetadataValue(
        session_timeout_ms=classic.session_timeout_ms,
        supported_protocols=[
            ClassicProtocolValue(name=name, metadata=metadata)
            for name, metadata in classic.protocols
        ],
    )


def _group_metadata(group: ConsumerGroup) -> ConsumerGroupMetadataValue:
    return ConsumerGroupMetadataValue(epoch=group.epoch, metadata_hash=group.metadata_hash)


def _target_metadata(group: ConsumerGroup) -> ConsumerGroupTargetAssignmentMetadataValue:
    return ConsumerGroupTargetAssignmentMetadataValue(assignment_epoch=group.assignment_epoch)


async def _target(target: Assignment, turns: Turns) -> ConsumerGroupTargetAssignmentMemberValue:
    value = ConsumerGroupTargetAssignmentMemberValue()
    async for topic_id, partitions in each_topic(target, turns):
        value.topic_partitions.append(
            ConsumerGroupTargetAssignmentMemberValueTopicPartition(
                topic_id=topic_id, partitions=partitions
            )
        )
    return value


def _position(member: ConsumerMember) -> tuple[object, ...]:
    """Return what the record of a member's current assignment holds."""
    return (
        member.epoch,
        member.previous_epoch,
        member.state,
        member.assigned,
        member.pending_revocation,
    )


async def _current(
    member: ConsumerMember, turns: Turns
) -> ConsumerGroupCurrentMemberAssignmentValue:
    assigned, pending = member.assigned, member.pending_revocation
    value = ConsumerGroupCurrentMemberAssignmentValue(
        member_epoch=member.epoch,
        previous_member_epoch=member.previous_epoch,
        state=member.state,
    )
    async for topic_id, partitions in each_topic(assigned, turns):
        value.assigned_partitions.append(
            ConsumerGroupCurrentMemberAssignmentValueTopicPartition(
                topic_id=topic_id,
                partitions=partitions,
                assignment_epochs=[assigned[topic_id, index] for index in partitions],
            )
        )
    async for topic_id, partitions in each_topic(pending, turns):
        value.partitions_pending_revocation.append(
            ConsumerGroupCurrentMemberAssignmentValuePendingPartition(
                topic_id=topic_id,
                partitions=partitions,
                assignment_epochs=[pending[topic_id, index] for index in partitions],
            )
        )
    return value


async def each_topic(
    partitions: Iterable[PartitionId], turns: Turns
) -> AsyncIterator[tuple[bytes, list[int]]]:
    """Yield each topic id with its partition indexes, both sorted, in turns: they may be many."""
    topics: dict[bytes, list[int]] = defaultdict(list)
    async for topic_id, index in turns.over(partitions):
        topics[topic_id].append(index)
    await turns.take()
    ordered = sorted(topics)
    async for topic_id in turns.over(ordered):
        yield topic_id, sorted(topics[topic_id])


def _regex_key(group_id: str, regex: str) -> bytes:
    key = ConsumerGroupRegularExpressionKey(group_id=group_id, regular_expression=regex)
    return record_codec.encode(key, REGEX_KEY)


def _regex_value(resolved: ResolvedRegex) -> ConsumerGroupRegularExpressionValue:
    return ConsumerGroupRegularExpressionValue(
        topics=list(resolved.topics), version=NO_METADATA_VERSION, timestamp=resolved.resolved_ms
    )


# Reading ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LoadingGroup:
    """The last value of each record of a group."""

    metadata: ConsumerGroupMetadataValue | None = None
    members: dict[str, ConsumerGroupMemberMetadataValue] = field(default_factory=dict)
    assignment_epoch: int = 0
    targets: dict[str, ConsumerGroupTargetAssignmentMemberValue] = field(default_factory=dict)
    current: dict[str, ConsumerGroupCurrentMemberAssignmentValue] = field(default_factory=dict)
    regexes: dict[str, ConsumerGroupRegularExpressionValue] = field(default_factory=dict)


class ConsumerGroupLoader:
    """Keeps the last value of each key, and builds the groups at the end of the log."""

    def __init__(self) -> None:
        self._groups: dict[str, _LoadingGroup] = defaultdict(_LoadingGroup)

    def add(self, key: ConsumerKey, value: bytes | None) -> None:
        """Add one record; None deletes. Raises ProtocolError."""
        group = self._groups[key.group_id]
        match key:
            case ConsumerGroupMetadataKey():
                group.metadata = _decode(ConsumerGroupMetadataValue, value)
            case ConsumerGroupMemberMetadataKey(member_id=member_id):
                _set(group.members, member_id, _decode(ConsumerGroupMemberMetadataValue, value))
            case ConsumerGroupTargetAssignmentMetadataKey():
                epoch = _decode(ConsumerGroupTargetAssignmentMetadataValue, value)
                group.assignment_epoch = 0 if epoch is None else epoch.assignment_epoch
            case ConsumerGroupTargetAssignmentMemberKey(member_id=member_id):
                target = _decode(ConsumerGroupTargetAssignmentMemberValue, value)
                _set(group.targets, member_id, target)
            case ConsumerGroupCurrentMemberAssignmentKey(member_id=member_id):
                current = _decode(ConsumerGroupCurrentMemberAssignmentValue, value)
                _set(group.current, member_id, current)
            case ConsumerGroupRegularExpressionKey(regular_expression=regex):
                resolved = _decode(ConsumerGroupRegularExpressionValue, value)
                _set(group.regexes, regex, resolved)

    def forget(self, group_id: str) -> None:
        """Forget a group that became a classic group."""
        self._groups.pop(group_id, None)

    def groups(self) -> dict[str, ConsumerGroup]:
        """Return the groups that have a metadata record."""
        return {
            group_id: _build(group_id, group, group.metadata)
            for group_id, group in self._groups.items()
            if group.metadata is not None
        }


def _decode(kind: type[M], value: bytes | None) -> M | None:
    return None if value is None else record_codec.decode(kind, value)


def _set(values: dict[str, V], key: str, value: V | None) -> None:
    if value is None:
        values.pop(key, None)
    else:
        values[key] = value


def _build(
    group_id: str, loading: _LoadingGroup, metadata: ConsumerGroupMetadataValue
) -> ConsumerGroup:
    members = {
        member_id: _member(member_id, value, loading.current.get(member_id))
        for member_id, value in loading.members.items()
    }
    equal: dict[frozenset[str], frozenset[str]] = {}  # see ConsumerGroup.shared
    members = {
        member_id: replace(member, topics=equal.setdefault(member.topics, member.topics))
        for member_id, member in members.items()
    }
    targets = {
        member_id: frozenset(
            (row.topic_id, index) for row in target.topic_partitions for index in row.partitions
        )
        for member_id, target in loading.targets.items()
        if member_id in members
    }
    return ConsumerGroup(
        group_id,
        epoch=metadata.epoch,
        metadata_hash=metadata.metadata_hash,
        assignment_epoch=loading.assignment_epoch,
        members=members,
        targets=targets,
        regexes={
            regex: ResolvedRegex(frozenset(value.topics), value.timestamp)
            for regex, value in loading.regexes.items()
        },
        owners={p: member.member_id for member in members.values() for p in member.owned()},
    )


def _member(
    member_id: str,
    metadata: ConsumerGroupMemberMetadataValue,
    current: ConsumerGroupCurrentMemberAssignmentValue | None,
) -> ConsumerMember:
    member = ConsumerMember(
        member_id=member_id,
        instance_id=metadata.instance_id,
        rack_id=metadata.rack_id,
        client_id=metadata.client_id,
        client_host=metadata.client_host,
        rebalance_timeout_ms=metadata.rebalance_timeout_ms,
        topics=frozenset(metadata.subscribed_topic_names),
        regex=metadata.subscribed_topic_regex,
        assignor=metadata.server_assignor,
        classic=_classic(metadata.classic_member_metadata),
    )
    if current is None:
        return member
    return replace(
        member,
        epoch=current.member_epoch,
        previous_epoch=current.previous_member_epoch,
        state=_state(current.state),
        assigned=_epochs(current.assigned_partitions, current.member_epoch),
        pending_revocation=_epochs(current.partitions_pending_revocation, current.member_epoch),
    )


def _classic(value: ClassicMetadataValue | None) -> ClassicProtocol | None:
    if value is None or not value.supported_protocols:
        return None
    protocols = tuple((row.name, row.metadata) for row in value.supported_protocols)
    return ClassicProtocol(value.session_timeout_ms, protocols)


def _state(number: int) -> MemberState:
    """Return the state; one that a later Kafka has written is reconciled again."""
    try:
        return MemberState(number)
    except ValueError:
        return MemberState.UNRELEASED_PARTITIONS


_Row = (
    ConsumerGroupCurrentMemberAssignmentValueTopicPartition
    | ConsumerGroupCurrentMemberAssignmentValuePendingPartition
)


def _epochs(rows: Iterable[_Row], member_epoch: int) -> Mapping[PartitionId, int]:
    """Return the epoch of each partition; the member's, where Kafka before 4.3 wrote none."""
    result: dict[PartitionId, int] = {}
    for row in rows:
        epochs = row.assignment_epochs
        if epochs is None or len(epochs) != len(row.partitions):
            epochs = [member_epoch] * len(row.partitions)
        for index, epoch in zip(row.partitions, epochs, strict=True):
            result[row.topic_id, index] = epoch
    return result
