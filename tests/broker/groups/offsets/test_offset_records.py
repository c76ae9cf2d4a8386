"""Records of __consumer_offsets. The golden bytes were made by Kafka 4.3.0's own serializers."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.groups.offsets.offset_records import (
    GroupKey,
    GroupRecord,
    InvalidGroupRecordError,
    MemberRecord,
    OffsetKey,
    committed_offset,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_group_key,
    encode_group_value_sliced,
    encode_offset_key,
    encode_offset_value,
)
from storage.slices import run_at_once

OFFSET_KEY = "0001000367c3a900066f726465727300000003"
GROUP_KEY = "0002000367c3a9"
OFFSET_VALUES = {
    0: "0000fffffffffffffffe00056dc3a974610000018bcfe56800",
    1: "0001fffffffffffffffe00056dc3a974610000018bcfe568000000018bcfe65260",
    2: "0002fffffffffffffffe00056dc3a974610000018bcfe56800",
    3: "0003fffffffffffffffe0000000500056dc3a974610000018bcfe56800",
    # with the topic id as tagged field 0
    4: "0004fffffffffffffffe00000005066dc3a974610000018bcfe56800"
    "01001000000000000000010000000000000002",
}
GROUP_VALUES = {
    0: "00000008636f6e73756d657200000007000572616e67650003632d31000000020003632d31000163000a"
    "2f3132372e302e302e310000271000000002010200000001030003692d3200016400042f3a3a3100004e"
    "200000000000000000",
    1: "00010008636f6e73756d657200000007000572616e67650003632d31000000020003632d31000163000a"
    "2f3132372e302e302e310000ea600000271000000002010200000001030003692d3200016400042f3a3a"
    "310001117000004e200000000000000000",
    2: "00020008636f6e73756d657200000007000572616e67650003632d310000018bcfe56800000000020003"
    "632d31000163000a2f3132372e302e302e310000ea600000271000000002010200000001030003692d32"
    "00016400042f3a3a310001117000004e200000000000000000",
    3: "00030008636f6e73756d657200000007000572616e67650003632d310000018bcfe56800000000020003"
    "632d31ffff000163000a2f3132372e302e302e310000ea60000027100000000201020000000103000369"
    "2d3200016900016400042f3a3a310001117000004e200000000000000000",
    4: "000409636f6e73756d6572000000070672616e676504632d310000018bcfe568000304632d310002630b"
    "2f3132372e302e302e310000ea600000271003010202030004692d3202690264052f3a3a310001117000"
    "004e2001010000",
}
EMPTY_GROUP_VALUE = "00030008636f6e73756d657200000008ffffffff0000018bcfe5680000000000"
AT_MS = 1_700_000_000_000


def _group(version: int) -> GroupRecord:
    timeouts = (60_000, 70_000) if version >= 1 else (10_000, 20_000)
    return GroupRecord(
        "consumer",
        7,
        "range",
        "c-1",
        AT_MS if version >= 2 else -1,
        (
            MemberRecord("c-1", None, "c", "/127.0.0.1", timeouts[0], 10_000, b"\1\2", b"\3"),
            MemberRecord(
                "i-2", "i" if version >= 3 else None, "d", "/::1", timeouts[1], 20_000, b"", b""
            ),
        ),
    )


def test_keys_are_kafkas_bytes() -> None:
    assert encode_offset_key(OffsetKey("gé", "orders", 3)).hex() == OFFSET_KEY
    assert encode_group_key("gé").hex() == GROUP_KEY
    assert decode_key(bytes.fromhex(OFFSET_KEY)) == OffsetKey("gé", "orders", 3)
    assert decode_key(bytes.fromhex(GROUP_KEY)) == GroupKey("gé")


def test_version_0_of_an_offset_key_is_read_as_version_1() -> None:
    assert decode_key(bytes.fromhex("0000" + OFFSET_KEY[4:])) == OffsetKey("gé", "orders", 3)


@pytest.mark.parametrize("version", [3, 4, 5, 8, 15, -1])
def test_an_unknown_key_version_is_none_of_ours(version: int) -> None:
    assert decode_key(version.to_bytes(2, "big", signed=True) + b"whatever") is None


@pytest.mark.parametrize("version", OFFSET_VALUES)
def test_every_version_of_an_offset_value_is_read(version: int) -> None:
    value = decode_offset_value(bytes.fromhex(OFFSET_VALUES[version]))
    epoch = 5 if version >= 3 else -1
    expires_ms = AT_MS + 60_000 if version == 1 else -1
    assert value == committed_offset(-2, epoch, "méta", AT_MS, expires_ms)


def test_an_offset_is_written_as_version_3() -> None:
    value = committed_offset(-2, 5, "méta", AT_MS)
    assert encode_offset_value(value).hex() == OFFSET_VALUES[3]


def test_an_offset_with_a_retention_time_of_its_own_is_written_as_version_1() -> None:
    value = committed_offset(-2, 5, "méta", AT_MS, AT_MS + 60_000)
    assert encode_offset_value(value).hex() == OFFSET_VALUES[1]


@pytest.mark.parametrize("version", GROUP_VALUES)
def test_every_version_of_a_group_value_is_read(version: int) -> None:
    assert decode_group_value(bytes.fromhex(GROUP_VALUES[version])) == _group(version)


def test_a_group_is_written_as_version_3() -> None:
    assert run_at_once(encode_group_value_sliced(_group(3))).hex() == GROUP_VALUES[3]


def test_an_empty_group_has_neither_protocol_nor_leader() -> None:
    empty = GroupRecord("consumer", 8, None, None, AT_MS, ())
    assert run_at_once(encode_group_value_sliced(empty)).hex() == EMPTY_GROUP_VALUE
    assert decode_group_value(bytes.fromhex(EMPTY_GROUP_VALUE)) == empty


def test_unknown_value_versions_are_none_of_ours() -> None:
    assert decode_offset_value(b"\x00\x05" + bytes(40)) is None
    assert decode_group_value(b"\x00\x05" + bytes(40)) is None
    assert decode_group_value(b"\xff\xff" + bytes(40)) is None


@pytest.mark.parametrize("golden", [OFFSET_KEY, GROUP_KEY])
def test_a_key_cut_anywhere_is_invalid(golden: str) -> None:
    data = bytes.fromhex(golden)
    for end in range(len(data)):
        with pytest.raises(InvalidGroupRecordError):
            decode_key(data[:end])


@pytest.mark.parametrize("version", OFFSET_VALUES)
def test_an_offset_value_cut_anywhere_is_invalid(version: int) -> None:
    data = bytes.fromhex(OFFSET_VALUES[version])
    for end in range(len(data)):
        with pytest.raises(InvalidGroupRecordError):
            decode_offset_value(data[:end])


@pytest.mark.parametrize("version", GROUP_VALUES)
def test_a_group_value_cut_anywhere_is_invalid(version: int) -> None:
    data = bytes.fromhex(GROUP_VALUES[version])
    for end in range(len(data)):
        with pytest.raises(InvalidGroupRecordError):
            decode_group_value(data[:end])


@given(st.binary(max_size=60), st.integers(0, 4))
def test_any_bytes_are_read_or_refused(data: bytes, version: int) -> None:
    for decode in (decode_key, decode_offset_value, decode_group_value):
        with suppress(InvalidGroupRecordError):  # nothing else may come out
            decode(version.to_bytes(2, "big") + data)


def test_a_count_of_members_that_cannot_be_is_refused_before_it_is_believed() -> None:
    head = bytes.fromhex("00030000" + "00000001" + "ffff" + "ffff" + "00" * 8)
    with pytest.raises(InvalidGroupRecordError, match="members"):
        decode_group_value(head + b"\x7f\xff\xff\xff")


_TEXT = st.text(max_size=20)
_INT32 = st.integers(-(2**31), 2**31 - 1)
_INT64 = st.integers(-(2**63), 2**63 - 1)


@given(_TEXT, _TEXT, _INT32)
def test_offset_keys_round_trip(group_id: str, topic: str, partition: int) -> None:
    key = OffsetKey(group_id, topic, partition)
    assert decode_key(encode_offset_key(key)) == key


@given(_INT64, _INT32, _TEXT, _INT64)
def test_offset_values_round_trip(offset: int, epoch: int, metadata: str, at_ms: int) -> None:
    value = committed_offset(offset, epoch, metadata, at_ms)
    assert decode_offset_value(encode_offset_value(value)) == value


_MEMBERS = st.builds(
    MemberRecord,
    _TEXT,
    st.none() | _TEXT,
    _TEXT,
    _TEXT,
    st.integers(0, 2**31 - 1),
    _INT32,
    st.binary(max_size=9),
    st.binary(max_size=9),
)


@given(
    st.builds(
        GroupRecord,
        _TEXT,
        _INT32,
        st.none() | _TEXT,
        st.none() | _TEXT,
        _INT64,
        st.lists(_MEMBERS, max_size=4).map(tuple),
    )
)
def test_group_values_round_trip(record: GroupRecord) -> None:
    assert decode_group_value(run_at_once(encode_group_value_sliced(record))) == record
