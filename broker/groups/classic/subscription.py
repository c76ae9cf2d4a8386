"""The messages of the embedded consumer protocol: subscriptions and assignments of members.

Members with the protocol type `consumer` exchange these bytes with each other. The coordinator
reads them to keep the offsets of topics in use, and for classic members of consumer groups, whose
assignments it writes itself. Source: ConsumerProtocolSubscription and ConsumerProtocolAssignment,
versions 0 to 3; later versions only add fields.
"""

import struct
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from broker.groups.classic.model import Group

CONSUMER_PROTOCOL_TYPE = "consumer"
VERSION_MAX = 3
# Topics and partitions in all messages that are read at once, in 15 ms. The bytes are a client's.
ENTRIES_MAX = 50_000
ENTRIES_PER_SLICE = 2_048  # of a message that is read in slices, in 0.8 ms
MEMBERS_PER_SLICE = 256

NOT_UTF_8: Final = "a name is not UTF-8"

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")

# Partition indexes by topic name.
TopicPartitions = Mapping[str, Sequence[int]]


class InvalidMetadataError(Exception):
    """The bytes of a subscription or assignment do not follow their format."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a member subscribes to, and which partitions it still owns."""

    version: int
    topics: frozenset[str]
    owned: TopicPartitions
    rack_id: str | None


@dataclass(frozen=True, slots=True)
class MemberAssignment:
    """The partitions of a member, and the data of its assignor."""

    partitions: TopicPartitions
    user_data: bytes


def subscribed_topics_sliced(group: Group) -> Generator[None, None, frozenset[str] | None]:
    """Return the topics of all members; None for another protocol type or invalid metadata.

    Pauses after a few hundred members, or a few thousand topics.
    """
    if group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return None
    topics: set[str] = set()
    entries = 0
    try:
        for number, member in enumerate(group.members.values(), 1):
            reader = _Reader(member.metadata(group.protocol_name), entries)
            reader.int16()
            topics |= yield from reader.topics()
            if number % MEMBERS_PER_SLICE == 0 or (
                reader.entries // ENTRIES_PER_SLICE > entries // ENTRIES_PER_SLICE
            ):
                yield
            entries = reader.entries
    except InvalidMetadataError:
        return None
    return frozenset(topics)


def decode_subscription_sliced(metadata: bytes) -> Generator[None, None, Subscription]:
    """Return a member's subscription, with pauses. Raises InvalidMetadataError."""
    reader = _Reader(metadata)
    version = reader.int16()
    topics = frozenset((yield from reader.topics()))
    reader.nullable_bytes()  # the data of the assignor
    owned = (yield from reader.topic_partitions()) if version >= 1 else {}
    if version >= 2:
        reader.int32()  # the generation in which the member got what it owns
    rack_id = reader.nullable_string() if version >= 3 else None
    return Subscription(version, topics, owned, rack_id)


def subscription_version(metadata: bytes) -> int:
    """Return the version of a member's subscription. Raises InvalidMetadataError."""
    return _Reader(metadata).int16()


def decode_assignment_sliced(data: bytes) -> Generator[None, None, MemberAssignment]:
    """Return a member's assignment, with pauses; no bytes are an empty one.

    Raises InvalidMetadataError.
    """
    if not data:
        return MemberAssignment({}, b"")
    reader = _Reader(data)
    reader.int16()
    partitions = yield from reader.topic_partitions()
    return MemberAssignment(partitions, reader.nullable_bytes() or b"")


def encode_assignment_sliced(
    version: int, partitions: TopicPartitions
) -> Generator[None, None, bytes]:
    """Return the assignment in the version of the member's subscription, with pauses."""
    parts = [_INT16.pack(max(0, min(version, VERSION_MAX))), _INT32.pack(len(partitions))]
    for number, (name, indexes) in enumerate(partitions.items(), 1):
        encoded, count = name.encode(), len(indexes)
        numbers = struct.pack(f">{count + 1}i", count, *sorted(indexes))
        parts += (_INT16.pack(len(encoded)), encoded, numbers)
        if number % (ENTRIES_PER_SLICE // 4) == 0:
            yield
    parts.append(_INT32.pack(-1))
    return b"".join(parts)


class _Reader:
    """Reads values one after another.

    Raises InvalidMetadataError at the end of the bytes, and for more than ENTRIES_MAX entries,
    including the `entries` that were read before.
    """

    def __init__(self, data: bytes, entries: int = 0) -> None:
        self.entries = entries
        self._data = data
        self._position = 0

    def int16(self) -> int:
        return self._int(_INT16)

    def int32(self) -> int:
        return self._int(_INT32)

    def topics(self) -> Generator[None, None, set[str]]:
        result: set[str] = set()
        count = self._count()
        for first in range(0, count, ENTRIES_PER_SLICE):
            result.update(self._strings(min(ENTRIES_PER_SLICE, count - first)))
            if first + ENTRIES_PER_SLICE < count:
                yield
        return result

    def topic_partitions(self) -> Generator[None, None, dict[str, list[int]]]:
        result: dict[str, list[int]] = {}
        for number in range(1, self._count() + 1):
            (name,) = self._strings(1)
            count = self._count()
            indexes = self._take(count * _INT32.size)
            result.setdefault(name, []).extend(struct.unpack(f">{count}i", indexes))
            if number % (ENTRIES_PER_SLICE // 4) == 0:
                yield
        return result

    def nullable_bytes(self) -> bytes | None:
        length = self.int32()
        return None if length < 0 else self._take(length)

    def nullable_string(self) -> str | None:
        length = self.int16()
        return None if length < 0 else self._text(length)

    def _strings(self, count: int) -> list[str]:
        """Read so many strings, in one loop: there may be tens of thousands."""
        data, position, strings = self._data, self._position, []
        for _ in range(count):
            if position + 2 > len(data):
                raise self._short()
            (length,) = _INT16.unpack_from(data, position)
            end = position + 2 + length
            if length < 0 or end > len(data):
                raise self._short()
            try:
                strings.append(data[position + 2 : end].decode())
            except UnicodeDecodeError as error:
                raise InvalidMetadataError(NOT_UTF_8) from error
            position = end
        self._position = position
        return strings

    def _text(self, length: int) -> str:
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise InvalidMetadataError(NOT_UTF_8) from error

    def _count(self) -> int:
        count = self.int32()
        if not 0 <= count <= len(self._data) // 2:  # an entry has two bytes at least
            raise InvalidMetadataError(f"{count} entries do not fit")
        self.entries += count
        if self.entries > ENTRIES_MAX:
            raise InvalidMetadataError(f"more than {ENTRIES_MAX} topics and partitions")
        return count

    def _int(self, kind: struct.Struct) -> int:
        number: int = kind.unpack(self._take(kind.size))[0]
        return number

    def _take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            raise self._short()
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _short(self) -> InvalidMetadataError:
        return InvalidMetadataError(f"{len(self._data)} bytes are too few")
