"""Keys and values of the records in __consumer_offsets, byte for byte as Kafka's.

Key versions 0 and 1 name an offset (group, topic, partition), 2 a classic group; later ones belong
to newer kinds of group and are skipped. Offset values are written as v3 (v1 where a client gave a
retention time of its own), group values as v3, which every Kafka since 2.3 reads. Kafka 4.3 itself
writes offsets as v4, whose one addition is the topic's id in a tagged field.

Bytes are not trusted: whatever does not follow its format is an InvalidGroupRecordError.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from protocol import record_codec
from protocol.errors import ProtocolError
from protocol.messages import (
    GroupMetadataKey,
    GroupMetadataValue,
    GroupMetadataValueMember,
    Message,
    OffsetCommitKey,
    OffsetCommitValue,
)

OFFSET_KEY_VERSION = 1
GROUP_KEY_VERSION = 2
OFFSET_VALUE_VERSION = 3
OFFSET_VALUE_VERSION_EXPIRING = 1
GROUP_VALUE_VERSION = 3
MEMBERS_PER_SLICE: Final = 256  # of a group that is encoded in slices, in a millisecond

M = TypeVar("M", bound=Message)


class InvalidGroupRecordError(Exception):
    """The bytes of a record are no key or value of this topic."""


@dataclass(frozen=True, slots=True)
class OffsetKey:
    """Names the committed offset of a group for a partition."""

    group_id: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Names a group's metadata record."""

    group_id: str


# One committed offset: offset, leader epoch, metadata, time of the commit, expiry time (ms). There
# may be a million of them. Each full collection of cyclic garbage visits every instance of a class,
# also of a NamedTuple; it stops visiting plain tuples of numbers and text.
CommittedOffset: TypeAlias = tuple[int, int, str, int, int]


def committed_offset(
    offset: int,
    leader_epoch: int = -1,
    metadata: str = "",
    commit_timestamp_ms: int = -1,
    expire_timestamp_ms: int = -1,
) -> CommittedOffset:
    """Return a committed offset with its metadata, as the client sent it; -1: not given."""
    return offset, leader_epoch, metadata, commit_timestamp_ms, expire_timestamp_ms


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A member in a group's record: `subscription` is its metadata for the chosen protocol."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group as of its last finished rebalance."""

    protocol_type: str
    generation: int
    protocol_name: str | None
    leader: str | None
    since_ms: int
    members: tuple[MemberRecord, ...]


def encode_offset_key(key: OffsetKey) -> bytes:
    """Return the key of a committed offset, version 1."""
    message = OffsetCommitKey(group=key.group_id, topic=key.topic, partition=key.partition)
    return record_codec.encode(message, OFFSET_KEY_VERSION)


def encode_group_key(group_id: str) -> bytes:
    """Return the key of a group's metadata, version 2."""
    return record_codec.encode(GroupMetadataKey(group=group_id), GROUP_KEY_VERSION)


def encode_offset_value(value: CommittedOffset) -> bytes:
    """Return version 3; version 1, without a leader epoch, for an offset that expires by itself."""
    offset, leader_epoch, metadata, commit_timestamp_ms, expire_timestamp_ms = value
    message = OffsetCommitValue(
        offset=offset,
        leader_epoch=leader_epoch,
        metadata=metadata,
        commit_timestamp=commit_timestamp_ms,
        expire_timestamp=expire_timestamp_ms,
    )
    expires = expire_timestamp_ms >= 0
    version = OFFSET_VALUE_VERSION_EXPIRING if expires else OFFSET_VALUE_VERSION
    return record_codec.encode(message, version)


def encode_group_value_sliced(record: GroupRecord) -> Generator[None, None, bytes]:
    """Return a group's metadata, version 3, with pauses."""
    message = GroupMetadataValue(
        protocol_type=record.protocol_type,
        generation=record.generation,
        protocol=record.protocol_name,
        leader=record.leader,
        current_state_timestamp=record.since_ms,
        members=[],
    )
    for number, member in enumerate(record.members, 1):
        message.members.append(
            GroupMetadataValueMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout=member.rebalance_timeout_ms,
                session_timeout=member.session_timeout_ms,
                subscription=member.subscription,
                assignment=member.assignment,
            )
        )
        if number % MEMBERS_PER_SLICE == 0:
            yield
    return (yield from record_codec.encode_sliced(message, GROUP_VALUE_VERSION))


def decode_key(data: bytes) -> OffsetKey | GroupKey | None:
    """Return the key, or None if its version is unknown. Raises InvalidGroupRecordError."""
    group = _decode(GroupMetadataKey, data)
    if group is not None:
        return GroupKey(group.group)
    key = _decode(OffsetCommitKey, data)
    return None if key is None else OffsetKey(key.group, key.topic, key.partition)


def decode_offset_value(data: bytes) -> CommittedOffset | None:
    """Return an offset, or None if its version is unknown. Raises InvalidGroupRecordError."""
    value = _decode(OffsetCommitValue, data)
    if value is None:
        return None
    return committed_offset(
        value.offset,
        value.leader_epoch,
        value.metadata,
        value.commit_timestamp,
        value.expire_timestamp,
    )


def decode_group_value(data: bytes) -> GroupRecord | None:
    """Return a group, or None if its version is unknown. Raises InvalidGroupRecordError."""
    value = _decode(GroupMetadataValue, data)
    if value is None:
        return None
    return GroupRecord(
        value.protocol_type,
        value.generation,
        value.protocol,
        value.leader,
        value.current_state_timestamp,
        tuple(_member(member) for member in value.members),
    )


def _member(member: GroupMetadataValueMember) -> MemberRecord:
    timeout_ms = member.rebalance_timeout
    if timeout_ms < 0:
        timeout_ms = member.session_timeout  # version 0 has one timeout for both
    return MemberRecord(
        member.member_id,
        member.group_instance_id,
        member.client_id,
        member.client_host,
        timeout_ms,
        member.session_timeout,
        member.subscription,
        member.assignment,
    )


def _decode(kind: type[M], data: bytes) -> M | None:
    try:
        return record_codec.decode(kind, data)
    except ProtocolError as error:
        raise InvalidGroupRecordError(error.reason) from error
