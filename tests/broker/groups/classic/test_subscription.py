"""What clients write into the embedded consumer protocol, read by the coordinator."""

import struct

import pytest

from broker.groups.classic.members import Member, Members
from broker.groups.classic.model import Group
from broker.groups.classic.subscription import (
    ENTRIES_MAX,
    ENTRIES_PER_SLICE,
    InvalidMetadataError,
    decode_assignment_sliced,
    decode_subscription_sliced,
    subscribed_topics_sliced,
)
from storage.slices import run_at_once
from tests.support.protocol.slices import drained


def metadata(names: int) -> bytes:
    return struct.pack(">hi", 0, names) + b"\0\1a" * names + struct.pack(">i", -1)


def test_a_subscription_has_a_limited_number_of_topics() -> None:
    assert run_at_once(decode_subscription_sliced(metadata(ENTRIES_MAX))).topics == {"a"}
    with pytest.raises(InvalidMetadataError, match=str(ENTRIES_MAX)):
        run_at_once(decode_subscription_sliced(metadata(ENTRIES_MAX + 1)))


def test_decoding_pauses_after_each_slice() -> None:
    names = [f"t{index}" for index in range(10_000)]
    strings = b"".join(struct.pack(">h", len(name)) + name.encode() for name in names)
    topics = struct.pack(">hi", 1, len(names)) + strings + struct.pack(">i", -1)
    partition = struct.pack(">ii", 1, 7)
    owned = b"".join(struct.pack(">h", len(name)) + name.encode() + partition for name in names)
    data = topics + struct.pack(">i", len(names)) + owned
    subscription, pauses = drained(decode_subscription_sliced(data))
    assert subscription == run_at_once(decode_subscription_sliced(data))
    assert subscription.topics == set(names)
    assert subscription.owned == {name: [7] for name in names}
    assert pauses >= 3 * len(names) // ENTRIES_PER_SLICE


@pytest.mark.parametrize("length", range(30))
def test_a_subscription_cut_anywhere_is_invalid(length: int) -> None:
    data = metadata(2)[:-4] + b"\0\0\0\1x" + struct.pack(">ih", 1, 1) + b"a"
    data = b"\0\1" + data[2:] + struct.pack(">ii", 1, 5)
    assert len(data) >= 30
    assert run_at_once(decode_subscription_sliced(data)).owned == {"a": [5]}
    with pytest.raises(InvalidMetadataError, match=r"bytes are too few|do not fit"):
        run_at_once(decode_subscription_sliced(data[:length]))


def test_an_assignment_has_a_limited_number_of_partitions() -> None:
    count = ENTRIES_MAX
    data = struct.pack(">hi", 0, 1) + b"\0\1a" + struct.pack(">i", count) + bytes(4 * count + 4)
    with pytest.raises(InvalidMetadataError, match=str(ENTRIES_MAX)):
        run_at_once(decode_assignment_sliced(data))


def test_the_limit_of_topics_is_for_all_members_of_a_group() -> None:
    def group(*names: int) -> Group:
        members = Members.of(
            Member(
                member_id=str(index),
                instance_id=None,
                client_id="",
                client_host="",
                session_timeout_ms=1,
                rebalance_timeout_ms=1,
                protocols=(("range", metadata(count)),),
            )
            for index, count in enumerate(names)
        )
        return Group("g", protocol_type="consumer", protocol_name="range", members=members)

    half = ENTRIES_MAX // 2
    assert run_at_once(subscribed_topics_sliced(group(half, half))) == {"a"}
    assert run_at_once(subscribed_topics_sliced(group(half, half, 1))) is None
