"""The topics that a consumer group is subscribed to, read from the metadata of its members.

Members exchange this metadata with each other, and the coordinator ignores all but its beginning:
every version of the protocol type `consumer` starts as ConsumerProtocolSubscription v0 (version
int16, topics as an array of strings). Kafka reads it too, to keep the offsets of topics in use.
"""

import struct

from broker.groups.model import Group

CONSUMER_PROTOCOL_TYPE = "consumer"

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")


def subscribed_topics(group: Group) -> frozenset[str] | None:
    """Return the topics of all members; None for another protocol type or invalid metadata."""
    if group.protocol_type != CONSUMER_PROTOCOL_TYPE:
        return None
    topics: set[str] = set()
    for member in group.members.values():
        named = _topics_of(member.metadata(group.protocol_name))
        if named is None:
            return None
        topics |= named
    return frozenset(topics)


def _topics_of(metadata: bytes) -> set[str] | None:
    try:
        _INT16.unpack_from(metadata)
        (count,) = _INT32.unpack_from(metadata, 2)
        if not 0 <= count <= len(metadata) // 2:
            return None
        topics, position = set(), 6
        for _ in range(count):
            (length,) = _INT16.unpack_from(metadata, position)
            position += 2
            raw = metadata[position : position + length]
            if length < 0 or len(raw) < length:
                return None
            topics.add(raw.decode())
            position += length
    except (struct.error, UnicodeDecodeError):
        return None
    return topics
