import ast
import random
import tracemalloc
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec, messages, stubs
from protocol.api import APIS, ApiKey, advertised, is_supported
from protocol.errors import ErrorCode, ProtocolError, UnsupportedVersionError
from protocol.schema import Direction
from protocol.table_compiler import MAX_ELEMENTS, SharedRows, varint
from tests.support.draws import cases
from tests.support.protocol.messages import api_name, random_body, versions_of
from tests.support.protocol.requests import decode_request
from tests.support.protocol.slices import drained

DIRECTIONS: tuple[Direction, ...] = ("request", "response")


def encode(case: tuple[int, int], direction: Direction, body: messages.Message) -> bytes:
    """A frame without its size."""
    if direction == "request":
        return codec.encode_request(*case, 7, "me", body)[4:]
    return codec.encode_response(*case, 7, body)[4:]


def decode(case: tuple[int, int], direction: Direction, frame: bytes) -> messages.Message:
    if direction == "request":
        return decode_request(*case, frame)[1]
    return codec.decode_response(*case, frame)[1]


def is_refused(case: tuple[int, int], direction: Direction, frame: bytes) -> bool:
    try:
        decode(case, direction, frame)
    except ProtocolError:
        return True
    return False


def header_bytes(case: tuple[int, int], direction: Direction) -> int:
    flexible = APIS[case[0]].is_flexible(case[1])
    if direction == "request":
        return 12 + flexible
    return 4 + (flexible and case[0] != ApiKey.API_VERSIONS)


@pytest.mark.parametrize("api_key", sorted(APIS), ids=api_name)
def test_what_is_encoded_is_decoded_the_same(api_key: int) -> None:
    for case, direction in product(versions_of(api_key), DIRECTIONS):
        rng = random.Random(f"{case} {direction}")
        for _ in range(5):
            body = random_body(rng, *case, direction)
            assert decode(case, direction, encode(case, direction, body)) == body, case


@pytest.mark.parametrize("version", range(14))
def test_shared_rows_have_the_same_bytes_as_other_rows(version: int) -> None:
    rng = random.Random(version)
    body = random_body(rng, ApiKey.METADATA, version, "response", width=4)
    assert isinstance(body, messages.MetadataResponse)
    for topic in body.topics:
        topic.partitions = rows = SharedRows(topic.partitions * 400)
        for _ in codec.encode_rows(ApiKey.METADATA, version, ("topics", "partitions"), rows):
            assert version not in rows.encoded
    shared = codec.encode_response(ApiKey.METADATA, version, 7, body)
    sliced, _ = drained(codec.encode_response_sliced(ApiKey.METADATA, version, 7, body))
    for topic in body.topics:
        topic.partitions = list(topic.partitions)
    assert shared == b"".join(sliced) == codec.encode_response(ApiKey.METADATA, version, 7, body)


@pytest.mark.parametrize("api_key", sorted(APIS), ids=api_name)
def test_a_message_cut_anywhere_is_refused(api_key: int) -> None:
    for case, direction in product(versions_of(api_key), DIRECTIONS):
        rng = random.Random(f"{case} {direction}")
        frame = encode(case, direction, random_body(rng, *case, direction, width=2))
        for length in range(min(len(frame), 400)):
            assert is_refused(case, direction, frame[:length]), (case, length)


@pytest.mark.parametrize("api_key", sorted(APIS), ids=api_name)
def test_bytes_behind_a_message_are_ignored(api_key: int) -> None:
    for case, direction in product(versions_of(api_key), DIRECTIONS):
        rng = random.Random(f"{case} {direction}")
        body = random_body(rng, *case, direction, width=2)
        frame = encode(case, direction, body)
        assert decode(case, direction, frame + b"\xff\0\x80") == body, case


@pytest.mark.parametrize("api_key", sorted(APIS), ids=api_name)
def test_lengths_that_lie_are_refused_before_anything_is_made(api_key: int) -> None:
    fillings = (b"\xff", b"\x7f", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff\x07", b"\0\0\0\x10")
    for case, direction in product(versions_of(api_key), DIRECTIONS):
        frame = encode(case, direction, random_body(random.Random(1), *case, direction))
        decode(case, direction, frame)  # so that the codec is compiled before measuring
        head = frame[: header_bytes(case, direction)]
        for filling in fillings:
            frame = head + filling * 30
            tracemalloc.start()
            try:
                with suppress(ProtocolError):
                    decode(case, direction, frame)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 50_000, case


@pytest.mark.parametrize("api_key", sorted(APIS), ids=api_name)
@settings(max_examples=cases(few=10, many=100), deadline=None)
@given(data=st.data())
def test_random_bytes_raise_nothing_but_protocol_errors(api_key: int, data: st.DataObject) -> None:
    versions = APIS[api_key].versions
    case = (api_key, data.draw(st.integers(versions.first, versions.last)))
    direction = data.draw(st.sampled_from(DIRECTIONS))
    body = random_body(random.Random(0), *case, direction, width=1)
    head = encode(case, direction, body)[: header_bytes(case, direction)]
    try:
        decode(case, direction, head + data.draw(st.binary(max_size=300)))
    except ProtocolError as error:
        refused = error
    else:
        return
    assert (refused.api_key, refused.version) == case


@pytest.mark.parametrize("api_key", sorted(APIS), ids=api_name)
@settings(max_examples=cases(few=10, many=100), deadline=None)
@given(data=st.data())
def test_flipped_bits_raise_nothing_but_protocol_errors(api_key: int, data: st.DataObject) -> None:
    versions = APIS[api_key].versions
    case = (api_key, data.draw(st.integers(versions.first, versions.last)))
    direction = data.draw(st.sampled_from(DIRECTIONS))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    frame = bytearray(encode(case, direction, random_body(rng, *case, direction, width=2)))
    for _ in range(rng.randrange(1, 6)):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    with suppress(ProtocolError):
        if direction == "request":
            codec.decode_body(codec.read_header(frame), frame)
        else:
            decode(case, direction, bytes(frame))


def test_an_array_may_not_announce_more_elements_than_there_are_bytes() -> None:
    """Five bytes that make a codec which believes them ask for 34 GB."""
    head = codec.encode_request(3, 12, 1, None, messages.MetadataRequest())[4:15]
    with pytest.raises(ProtocolError, match="topics: length 2147483646"):
        decode_request(3, 12, head + varint(2**31 - 1))


def test_a_message_has_a_largest_number_of_elements() -> None:
    body = messages.DeleteGroupsRequest(groups_names=[""] * (MAX_ELEMENTS + 1))
    frame = codec.encode_request(42, 2, 1, None, body)[4:]
    with pytest.raises(ProtocolError, match="groups_names"):
        decode_request(42, 2, frame)
    body.groups_names.pop()
    _, again = decode_request(42, 2, codec.encode_request(42, 2, 1, None, body)[4:])
    assert again == body


def test_nested_arrays_share_one_limit_of_elements() -> None:
    topic = messages.DescribeLogDirsRequestTopic(topic="", partitions=[0] * 1_000)
    body = messages.DescribeLogDirsRequest(topics=[topic] * (MAX_ELEMENTS // 1_000))
    frame = codec.encode_request(35, 1, 1, None, body)[4:]
    with pytest.raises(ProtocolError, match="partitions"):
        decode_request(35, 1, frame)


@pytest.mark.parametrize("first", [b"\x80\x80\x80\x80\x80\x01", b"\xff\xff\xff\xff\xff\x01"])
def test_a_varint_has_at_most_five_bytes(first: bytes) -> None:
    head = codec.encode_request(3, 12, 1, None, messages.MetadataRequest())[4:15]
    with pytest.raises(ProtocolError, match="varint"):
        decode_request(3, 12, head + first + bytes(100))


def test_unknown_tagged_fields_are_skipped() -> None:
    frame = codec.encode_request(3, 12, 1, "c", messages.MetadataRequest(topics=None))[4:]
    tagged = frame[:-1] + b"\x02" + b"\x05\x03abc" + varint(300) + varint(200) + bytes(200)
    assert decode_request(3, 12, tagged) == decode_request(3, 12, frame)


def test_unknown_tagged_fields_stand_between_known_ones() -> None:
    own = messages.ApiVersionsResponse(finalized_features_epoch=5, zk_migration_ready=True)
    frame = codec.encode_response(18, 3, 1, own)[4:]
    assert frame[-14:] == b"\x02" + b"\x01\x08" + (5).to_bytes(8, "big") + b"\x03\x01\x01"
    mixed = frame[:-14] + b"\x04\x50\x02ab" + frame[-13:-3] + b"\x63\x00" + frame[-3:]
    assert codec.decode_response(18, 3, mixed) == codec.decode_response(18, 3, frame)


def test_a_known_tagged_field_may_not_run_over_its_size() -> None:
    """Else a short size and a long value would have the same bytes decoded again and again."""
    frame = codec.encode_request(1, 12, 1, None, messages.FetchRequest(cluster_id="abcdef"))[4:]
    assert frame.endswith(b"\x01\x00\x07\x07abcdef")
    short = frame.replace(b"\x00\x07\x07abcdef", b"\x00\x02\x07abcdef")
    with pytest.raises(ProtocolError, match="cluster_id"):
        decode_request(1, 12, short)


def test_tagged_fields_in_the_header_are_skipped() -> None:
    frame = codec.encode_request(12, 4, 9, "me", messages.HeartbeatRequest(group_id="g"))[4:]
    assert frame[12:13] == b"\0"
    tagged = frame[:12] + b"\x01\x07\x02ab" + frame[13:]
    header, body = decode_request(12, 4, tagged)
    assert header.body_position == 17
    assert body == decode_request(12, 4, frame)[1]


@pytest.mark.parametrize("version", [9, 10, 12, 13])
def test_all_topics_as_librdkafka_asks_for_them(version: int) -> None:
    """It writes four bytes where one belongs; up to v10 they end as one unknown tagged field."""
    head = bytes([0, 3, 0, version]) + b"\0\0\0\1" + b"\xff\xff" + b"\0"
    _, body = decode_request(3, version, head + bytes.fromhex("00 000000 01 00 00"))
    assert isinstance(body, messages.MetadataRequest)
    assert body.topics is None


def test_the_client_id_is_a_plain_string_even_in_a_flexible_header() -> None:
    frame = codec.encode_request(18, 3, 5, "kcat", messages.ApiVersionsRequest())[4:]
    assert frame[:15] == b"\0\x12\0\3\0\0\0\5\0\4kcat\0"
    assert codec.read_header(frame) == (18, 3, 5, "kcat", 15)


def test_a_client_may_have_no_id() -> None:
    frame = codec.encode_request(18, 0, 5, None, messages.ApiVersionsRequest())[4:]
    assert codec.read_header(frame) == (18, 0, 5, None, 10)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "too short"),
        (b"\0\x12\0\0\0\0\0\1\0", "too short"),
        (b"\0\x12\0\0\0\0\0\1\0\5abc", "beyond the end"),
        (b"\0\x12\0\0\0\0\0\1\xff\xfe", "negative"),
        (b"\0\x12\0\0\0\0\0\1\0\2\xff\xfe", "UTF-8"),
        (b"\0\x12\0\3\0\0\0\1\xff\xff", "cut short"),
        (b"\0\x12\0\3\0\0\0\1\xff\xff\x01\x05\x70", "beyond the end"),
    ],
)
def test_a_bad_header_is_refused(frame: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        codec.read_header(memoryview(frame))


@pytest.mark.parametrize(("key", "version"), [(18, 5), (18, -1), (0, 2), (4, 0), (999, 0), (-1, 0)])
@pytest.mark.parametrize("rest", [b"", b"\0\2me", b"\0\x7f"])
def test_an_unknown_version_is_named_with_what_an_answer_needs(
    key: int, version: int, rest: bytes
) -> None:
    frame = key.to_bytes(2, "big", signed=True) + version.to_bytes(2, "big", signed=True)
    with pytest.raises(UnsupportedVersionError) as caught:
        codec.read_header(frame + b"\0\0\0\x2a" + rest)
    error = caught.value
    assert (error.api_key, error.version, error.correlation_id) == (key, version, 42)


@pytest.mark.parametrize("version", range(5))
def test_an_api_versions_response_never_has_tags_in_its_header(version: int) -> None:
    frame = codec.encode_response(18, version, 77, messages.ApiVersionsResponse(error_code=35))
    assert frame[4:10] == (77).to_bytes(4, "big") + (35).to_bytes(2, "big")


def test_an_unknown_version_of_api_versions_is_answered_in_version_0() -> None:
    assert codec.encode_unsupported_version(77) == bytes.fromhex(
        "00000010 0000004d 0023 00000001 0012 0000 0004"
    )


def test_what_a_version_does_not_carry_has_its_default() -> None:
    body = messages.JoinGroupRequest(group_id="g", rebalance_timeout_ms=5, reason="why")
    _, again = decode_request(11, 0, codec.encode_request(11, 0, 1, "", body)[4:])
    assert again == messages.JoinGroupRequest(group_id="g")
    assert isinstance(again, messages.JoinGroupRequest)
    assert again.rebalance_timeout_ms == -1
    assert again.group_instance_id is None


def test_two_messages_share_no_default_list() -> None:
    messages.MetadataResponse().topics.append(messages.MetadataResponseTopic())
    assert messages.MetadataResponse().topics == []
    frame = codec.encode_request(9, 8, 1, None, messages.OffsetFetchRequest())[4:]
    message, other = (decode_request(9, 8, frame)[1] for _ in range(2))
    assert isinstance(message, messages.OffsetFetchRequest)
    assert isinstance(other, messages.OffsetFetchRequest)
    assert message.topics is not None
    message.topics.append(messages.OffsetFetchRequestTopic())
    assert other.topics == []


def test_null_where_a_version_knows_none_is_refused() -> None:
    frame = codec.encode_request(3, 1, 1, None, messages.MetadataRequest(topics=None))[4:]
    with pytest.raises(ProtocolError, match="topics"):
        decode_request(3, 0, frame[:3] + b"\0" + frame[4:])


def test_a_message_says_what_it_holds() -> None:
    body = messages.HeartbeatRequest(group_id="g", generation_id=3)
    assert repr(body) == (
        "HeartbeatRequest(group_id='g', generation_id=3, member_id='', group_instance_id=None)"
    )
    assert body != messages.HeartbeatRequest(group_id="g")
    assert body != 3


def test_the_stub_for_type_checkers_has_every_class_and_field() -> None:
    tree = ast.parse(stubs.stub_text())
    stubbed = {
        node.name: {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name != "Message"
    }
    assert stubbed == {name: set(kind.__slots__) for name, kind in messages.CLASSES.items()}


def test_only_what_has_a_handler_is_advertised() -> None:
    assert advertised([18, 3, 3]) == ((3, 0, 13), (18, 0, 4))
    assert not is_supported(ApiKey.FETCH, 12, {3, 18})
    assert is_supported(ApiKey.METADATA, 13, {3, 18})


def test_produce_is_advertised_from_0_and_refused_below_3() -> None:
    assert advertised([ApiKey.PRODUCE]) == ((0, 0, 13),)
    assert not is_supported(ApiKey.PRODUCE, 2, {0})
    assert is_supported(ApiKey.PRODUCE, 3, {0})


@pytest.mark.parametrize("key", [ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_FETCH])
def test_versions_that_are_not_advertised_are_not_taken(key: ApiKey) -> None:
    assert advertised([key])[0].max_version == 10
    assert is_supported(key, 10, {key})
    assert not is_supported(key, 11, {key})


def test_every_api_has_a_name_and_a_table() -> None:
    assert sorted(APIS) == sorted(ApiKey)
    for key in ApiKey:
        assert APIS[key].name.lower() == key.name.replace("_", "").lower()


def test_an_error_code_goes_onto_the_wire_as_its_number() -> None:
    body = messages.HeartbeatResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS)
    assert codec.encode_response(12, 0, 1, body)[-2:] == b"\0\x1b"
