"""Keys and values of the records in __consumer_offsets, byte for byte as Kafka's.

Key versions 0 and 1 name an offset (group, topic, partition), 2 a group; later ones belong to newer
kinds of group, which are not ours to judge. Value versions 0-3 are plain, 4 is the first with
compact strings and tagged fields (KIP-482, KIP-915). Written: offset values v3 (v1 where a client
gave a retention time of its own), group values v3, which every Kafka since 2.3 reads. Kafka 4.3
itself writes offsets as v4, whose one addition is the topic's id in a tagged field; it is skipped.
Source: the message schemas OffsetCommitKey, OffsetCommitValue, GroupMetadataKey and
GroupMetadataValue.

Bytes are not trusted: whatever does not follow its format is an InvalidGroupRecordError.
"""

import struct
from dataclasses import dataclass

OFFSET_KEY_VERSION = 1
GROUP_KEY_VERSION = 2
OFFSET_VALUE_VERSION = 3
OFFSET_VALUE_VERSION_EXPIRING = 1
GROUP_VALUE_VERSION = 3
FIRST_FLEXIBLE_VERSION = 4
VALUE_VERSION_MAX = 4
# A member record has at least 3 strings, 2 integers and 2 byte arrays, some of length zero.
MEMBER_BYTES_MIN = 14

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")


class InvalidGroupRecordError(Exception):
    """A record whose bytes are no key or value of this topic."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"{reason} at byte {position}")
        self.reason = reason
        self.position = position


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


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """What a client committed, returned to it as it is. -1 where nothing was given."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_timestamp_ms: int = -1
    expire_timestamp_ms: int = -1


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


# Writing ----------------------------------------------------------------------------------------


def encode_offset_key(key: OffsetKey) -> bytes:
    """The key of a committed offset, version 1."""
    return b"".join(
        (
            _INT16.pack(OFFSET_KEY_VERSION),
            _string(key.group_id),
            _string(key.topic),
            _INT32.pack(key.partition),
        )
    )


def encode_group_key(group_id: str) -> bytes:
    """The key of a group's metadata, version 2."""
    return _INT16.pack(GROUP_KEY_VERSION) + _string(group_id)


def encode_offset_value(value: CommittedOffset) -> bytes:
    """Version 3; version 1, which has no leader epoch, for an offset that expires by itself."""
    expires = value.expire_timestamp_ms >= 0
    version = OFFSET_VALUE_VERSION_EXPIRING if expires else OFFSET_VALUE_VERSION
    parts = [_INT16.pack(version), _INT64.pack(value.offset)]
    if not expires:
        parts.append(_INT32.pack(value.leader_epoch))
    parts += [_string(value.metadata), _INT64.pack(value.commit_timestamp_ms)]
    if expires:
        parts.append(_INT64.pack(value.expire_timestamp_ms))
    return b"".join(parts)


def encode_group_value(record: GroupRecord) -> bytes:
    """A group's metadata, version 3."""
    parts = [
        _INT16.pack(GROUP_VALUE_VERSION),
        _string(record.protocol_type),
        _INT32.pack(record.generation),
        _string(record.protocol_name),
        _string(record.leader),
        _INT64.pack(record.since_ms),
        _INT32.pack(len(record.members)),
    ]
    for member in record.members:
        parts += [
            _string(member.member_id),
            _string(member.instance_id),
            _string(member.client_id),
            _string(member.client_host),
            _INT32.pack(member.rebalance_timeout_ms),
            _INT32.pack(member.session_timeout_ms),
            _bytes(member.subscription),
            _bytes(member.assignment),
        ]
    return b"".join(parts)


def _string(text: str | None) -> bytes:
    if text is None:
        return _INT16.pack(-1)
    raw = text.encode()
    return _INT16.pack(len(raw)) + raw


def _bytes(data: bytes) -> bytes:
    return _INT32.pack(len(data)) + data


# Reading ----------------------------------------------------------------------------------------


def decode_key(data: bytes) -> OffsetKey | GroupKey | None:
    """The key, or None if its version is unknown. Raises InvalidGroupRecordError."""
    reader = _Reader(data)
    version = reader.int16()
    if version in (0, OFFSET_KEY_VERSION):
        return OffsetKey(reader.text(), reader.text(), reader.int32())
    if version == GROUP_KEY_VERSION:
        return GroupKey(reader.text())
    return None


def decode_offset_value(data: bytes) -> CommittedOffset | None:
    """A committed offset, or None if its version is unknown. Raises InvalidGroupRecordError."""
    reader = _Reader(data)
    version = reader.version()
    if version is None:
        return None
    offset = reader.int64()
    leader_epoch = reader.int32() if version >= 3 else -1
    metadata = reader.text()
    commit_timestamp_ms = reader.int64()
    expire_timestamp_ms = reader.int64() if version == 1 else -1
    reader.skip_tagged_fields()
    return CommittedOffset(offset, leader_epoch, metadata, commit_timestamp_ms, expire_timestamp_ms)


def decode_group_value(data: bytes) -> GroupRecord | None:
    """A group's metadata, or None if its version is unknown. Raises InvalidGroupRecordError."""
    reader = _Reader(data)
    version = reader.version()
    if version is None:
        return None
    protocol_type = reader.text()
    generation = reader.int32()
    protocol_name = reader.nullable_text()
    leader = reader.nullable_text()
    since_ms = reader.int64() if version >= 2 else -1
    members = tuple(_read_member(reader, version) for _ in range(reader.member_count()))
    reader.skip_tagged_fields()
    return GroupRecord(protocol_type, generation, protocol_name, leader, since_ms, members)


def _read_member(reader: "_Reader", version: int) -> MemberRecord:
    member_id = reader.text()
    instance_id = reader.nullable_text() if version >= 3 else None
    client_id = reader.text()
    client_host = reader.text()
    rebalance_timeout_ms = reader.int32() if version >= 1 else -1
    session_timeout_ms = reader.int32()
    subscription = reader.data()
    assignment = reader.data()
    reader.skip_tagged_fields()
    if rebalance_timeout_ms < 0:
        # Version 0 knew one timeout for both.
        rebalance_timeout_ms = session_timeout_ms
    return MemberRecord(
        member_id,
        instance_id,
        client_id,
        client_host,
        rebalance_timeout_ms,
        session_timeout_ms,
        subscription,
        assignment,
    )


class _Reader:
    """A bounds-checked walk over one key or value; compact forms from version 4 on."""

    __slots__ = ("_compact", "_data", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._compact = False

    def version(self) -> int | None:
        """The version of a value; None if it is not known."""
        version = self.int16()
        self._compact = version >= FIRST_FLEXIBLE_VERSION
        return version if 0 <= version <= VALUE_VERSION_MAX else None

    def int16(self) -> int:
        return int.from_bytes(self._take(2), "big", signed=True)

    def int32(self) -> int:
        return int.from_bytes(self._take(4), "big", signed=True)

    def int64(self) -> int:
        return int.from_bytes(self._take(8), "big", signed=True)

    def text(self) -> str:
        text = self.nullable_text()
        if text is None:
            raise InvalidGroupRecordError("null where a string belongs", self._position)
        return text

    def nullable_text(self) -> str | None:
        length = self._uvarint() - 1 if self._compact else self.int16()
        if length < 0:
            return None
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise InvalidGroupRecordError("a string that is no UTF-8", self._position) from error

    def data(self) -> bytes:
        length = self._uvarint() - 1 if self._compact else self.int32()
        if length < 0:
            raise InvalidGroupRecordError("null where bytes belong", self._position)
        return self._take(length)

    def member_count(self) -> int:
        count = self._uvarint() - 1 if self._compact else self.int32()
        if not 0 <= count <= (len(self._data) - self._position) // MEMBER_BYTES_MIN:
            raise InvalidGroupRecordError(f"{count} members", self._position)
        return count

    def skip_tagged_fields(self) -> None:
        if not self._compact:
            return
        for _ in range(self._uvarint()):
            self._uvarint()
            self._take(self._uvarint())

    def _uvarint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise InvalidGroupRecordError("a length of more than five bytes", self._position)

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise InvalidGroupRecordError(f"{count} bytes wanted", self._position)
        data = self._data[self._position : end]
        self._position = end
        return data
