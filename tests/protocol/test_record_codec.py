"""Records of internal topics come back as they were; cut or changed bytes are never an accident."""

import random

import pytest

from protocol import record_codec
from protocol.errors import ProtocolError
from protocol.messages import (
    ConsumerGroupMemberMetadataValue,
    GroupMetadataValue,
    GroupMetadataValueMember,
    Message,
    OffsetCommitKey,
    OffsetCommitValue,
)

MEMBER = GroupMetadataValueMember(
    member_id="m", client_id="c", client_host="/h", session_timeout=9, subscription=b"s"
)
VALUES: list[tuple[Message, range]] = [
    (OffsetCommitKey(group="g", topic="t", partition=3), range(2)),
    (OffsetCommitValue(offset=7, metadata="x", commit_timestamp=5), range(5)),
    (GroupMetadataValue(protocol_type="consumer", generation=4, members=[MEMBER]), range(5)),
]
CASES = [(message, version) for message, versions in VALUES for version in versions]


@pytest.mark.parametrize(("message", "version"), CASES)
def test_a_record_comes_back_as_it_was(message: Message, version: int) -> None:
    data = record_codec.encode(message, version)
    assert record_codec.read_version(data) == version
    assert record_codec.decode(type(message), data) == message


@pytest.mark.parametrize(("message", "version"), CASES)
def test_a_record_that_is_cut_is_an_error(message: Message, version: int) -> None:
    data = record_codec.encode(message, version)
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            record_codec.decode(type(message), data[:end])


@pytest.mark.parametrize(("message", "version"), CASES)
def test_changed_bytes_give_a_record_or_an_error(message: Message, version: int) -> None:
    rng = random.Random(7)
    data = record_codec.encode(message, version)
    for _ in range(300):
        changed = bytearray(data)
        changed[rng.randrange(2, len(data))] = rng.randrange(256)
        try:
            record_codec.decode(type(message), bytes(changed))
        except ProtocolError:
            continue


def test_a_version_without_a_table_is_none() -> None:
    assert record_codec.decode(OffsetCommitValue, b"\x00\x05" + bytes(40)) is None
    assert record_codec.decode(OffsetCommitKey, b"\xff\xff" + bytes(40)) is None


# A member of the consumer protocol, by Kafka 4.3. The last four bytes are a tagged field: null.
KAFKAS_MEMBER = bytes.fromhex("0000 00 00 04726177 022f 020274 01 00000001 0672616e6765 01000100")


def test_a_member_without_classic_metadata_is_as_kafka_writes_it() -> None:
    """Without the tagged field, Kafka reads empty metadata: a classic member whose timeout is 0."""
    member = record_codec.decode(ConsumerGroupMemberMetadataValue, KAFKAS_MEMBER)
    assert member is not None
    assert (member.server_assignor, member.classic_member_metadata) == ("range", None)
    assert record_codec.encode(member, 0) == KAFKAS_MEMBER
    without_tag = KAFKAS_MEMBER[:-4] + b"\0"
    assert record_codec.decode(ConsumerGroupMemberMetadataValue, without_tag) == member
