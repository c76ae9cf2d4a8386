"""Which topics a group of consumers is subscribed to, out of what its members send to each other.

The metadata is opaque to a coordinator but for this: the protocol type `consumer` has a common
beginning in all its versions (ConsumerProtocolSubscription v0: version int16, topics as an array of
strings), and Kafka reads it to keep the offsets of topics in use.
"""

import struct

from broker.groups.model import Group

CONSUMER_PROTOCOL_TYPE = "consumer"

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")


def subscribed_topics(group: Group) -> frozenset[str] | None:
    """The topics of all members; None if the group is of another type or the bytes are not read."""
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
