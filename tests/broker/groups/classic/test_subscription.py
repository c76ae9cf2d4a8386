"""What clients write into the embedded consumer protocol, read by the coordinator."""

import struct

import pytest

from broker.groups.classic.model import Group, Member
from broker.groups.classic.subscription import (
    ENTRIES_MAX,
    InvalidMetadataError,
    decode_assignment,
    decode_subscription,
    subscribed_topics,
)


def metadata(names: int) -> bytes:
    return struct.pack(">hi", 0, names) + b"\0\1a" * names + struct.pack(">i", -1)


def test_a_subscription_has_a_limited_number_of_topics() -> None:
    assert decode_subscription(metadata(ENTRIES_MAX)).topics == {"a"}
    with pytest.raises(InvalidMetadataError, match=str(ENTRIES_MAX)):
        decode_subscription(metadata(ENTRIES_MAX + 1))


def test_an_assignment_has_a_limited_number_of_partitions() -> None:
    count = ENTRIES_MAX
    data = struct.pack(">hi", 0, 1) + b"\0\1a" + struct.pack(">i", count) + bytes(4 * count + 4)
    with pytest.raises(InvalidMetadataError, match=str(ENTRIES_MAX)):
        decode_assignment(data)


def test_the_limit_of_topics_is_for_all_members_of_a_group() -> None:
    def group(*names: int) -> Group:
        members = {
            str(index): Member(
                member_id=str(index),
                instance_id=None,
                client_id="",
                client_host="",
                session_timeout_ms=1,
                rebalance_timeout_ms=1,
                protocols=(("range", metadata(count)),),
            )
            for index, count in enumerate(names)
        }
        return Group("g", protocol_type="consumer", protocol_name="range", members=members)

    half = ENTRIES_MAX // 2
    assert subscribed_topics(group(half, half)) == {"a"}
    assert subscribed_topics(group(half, half, 1)) is None
