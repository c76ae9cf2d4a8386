import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol import messages as m
from protocol.errors import ProtocolError, RowLimitError, SlicesNeededError
from protocol.limits import ROWS, STRING_BYTES_MAX, TAGS_PER_SECTION_MAX
from protocol.messages import (
    ProduceRequest,
    ProduceRequestPartition,
    ProduceRequestTopic,
    ProduceResponse,
)
from protocol.produce_codec import (
    ProducedPartition,
    decode_produce,
    decode_produce_sliced,
    encode_produce_response,
    encode_produced,
)
from protocol.table_compiler import ELEMENTS_PER_SLICE, varint
from tests.support.draws import cases
from tests.support.protocol.messages import random_body
from tests.support.protocol.slices import drained

PRODUCE = 0
VERSIONS = range(3, 14)
TOPIC_ID = bytes(range(16))


def request_frame(version: int, body: ProduceRequest, client_id: str | None = "c") -> bytearray:
    return bytearray(codec.encode_request(PRODUCE, version, 7, client_id, body)[4:])


def one_partition(version: int, records: bytes | None = b"records") -> ProduceRequest:
    topic = ProduceRequestTopic(
        name="orders" if version < 13 else "",
        topic_id=TOPIC_ID if version >= 13 else bytes(16),
        partition_data=[ProduceRequestPartition(index=5, records=records)],
    )
    return ProduceRequest(acks=-1, timeout_ms=1500, topic_data=[topic])


def plain(version: int, body: ProduceRequest) -> object:
    """The shape that decode_produce gives, with records as bytes."""
    return (
        body.transactional_id,
        body.acks,
        body.timeout_ms,
        [
            (
                topic.name if version < 13 else topic.topic_id,
                [(part.index, part.records) for part in topic.partition_data],
            )
            for topic in body.topic_data
        ],
    )


def decoded(frame: bytearray) -> object:
    """As the handler decodes it: in slices if it has many rows."""
    view = memoryview(frame)
    header = codec.read_header(view)
    try:
        request = decode_produce(header, view)
    except SlicesNeededError:
        request, _ = drained(decode_produce_sliced(header, view, ROWS))
    return (
        request.transactional_id,
        request.acks,
        request.timeout_ms,
        [
            (topic, [(index, None if data is None else bytes(data)) for index, data in parts])
            for topic, parts in request.topics
        ],
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_hand_written_decoder_reads_what_the_table_writes(version: int) -> None:
    rng = random.Random(version)
    for _ in range(30):
        body = random_body(rng, PRODUCE, version, "request")
        assert isinstance(body, ProduceRequest)
        frame = request_frame(version, body, rng.choice((None, "", "client")))
        assert decoded(frame) == plain(version, body)


@pytest.mark.parametrize("version", VERSIONS)
def test_records_are_writable_slices_of_the_receive_buffer(version: int) -> None:
    frame = request_frame(version, one_partition(version))
    view = memoryview(frame)
    request = decode_produce(codec.read_header(view), view)
    [(_, [(index, records)])] = request.topics
    assert index == 5
    assert records is not None
    assert records.obj is frame
    records[:4] = b"RECO"
    assert frame.count(b"RECOrds") == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_null_records_differ_from_empty_ones(version: int) -> None:
    for records in (None, b""):
        _, _, _, topics = decoded(request_frame(version, one_partition(version, records)))  # type: ignore[misc]
        assert topics[0][1] == [(5, records)]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_request_cut_anywhere_is_refused(version: int) -> None:
    frame = request_frame(version, one_partition(version))
    for length in range(14, len(frame)):
        view = memoryview(frame)[:length]
        try:
            header = codec.read_header(view)
        except ProtocolError:
            continue
        with pytest.raises(ProtocolError):
            decode_produce(header, view)


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=cases(few=10, many=100), deadline=None)
@given(data=st.data())
def test_both_decoders_agree_on_mangled_requests(version: int, data: st.DataObject) -> None:
    """What the table's decoder refuses is refused here; what it reads is read the same."""
    seed = data.draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    body = random_body(rng, PRODUCE, version, "request", width=2)
    assert isinstance(body, ProduceRequest)
    frame = request_frame(version, body)
    head = len(frame) - len(codec.encode_request(PRODUCE, version, 7, "c", ProduceRequest())) + 4
    for _ in range(rng.randrange(4)):
        frame[rng.randrange(head // 4 + 12, len(frame))] = rng.choice((0, 1, 2, 127, 128, 255))
    view = memoryview(frame)
    header = codec.read_header(view)
    try:
        expected = plain(version, codec.decode_body(header, view))  # type: ignore[arg-type]
    except ProtocolError:
        with pytest.raises(ProtocolError):
            decoded(frame)
        return
    assert decoded(frame) == expected


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=cases(few=10, many=100), deadline=None)
@given(body=st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_protocol_errors(version: int, body: bytes) -> None:
    frame = bytearray(version.to_bytes(4, "big") + bytes(4) + b"\xff\xff\0" + body)
    try:
        decoded(frame)
    except ProtocolError as error:
        refused = error
    else:
        return
    assert (refused.api_key, refused.version) == (PRODUCE, version)


@pytest.mark.parametrize("version", [3, 9, 13])
def test_an_array_longer_than_its_bytes_is_refused(version: int) -> None:
    frame = request_frame(version, ProduceRequest(topic_data=[]))
    if version < 9:
        frame[-4:] = (2**31 - 1).to_bytes(4, "big")
    else:
        frame[-2:] = varint(2**31 - 1)
    frame += bytes(1000)
    with pytest.raises(ProtocolError, match="topics"):
        decoded(frame)


@pytest.mark.parametrize("field", ["transactional_id", "topic"])
def test_a_compact_string_has_at_most_32767_bytes(field: str) -> None:
    """As in Kafka: the name of a topic could otherwise be as long as a frame, 100 MB."""
    for length in (STRING_BYTES_MAX, STRING_BYTES_MAX + 1):
        body = one_partition(9)
        if field == "topic":
            body.topic_data[0].name = "t" * length
        else:
            body.transactional_id = "t" * length
        frame = request_frame(9, body)
        if length == STRING_BYTES_MAX:
            assert decoded(frame) == plain(9, body)
        else:
            with pytest.raises(ProtocolError, match=f"length {length} is wrong"):
                decoded(frame)


@pytest.mark.parametrize("version", [3, 9, 13])
@pytest.mark.parametrize("shape", [(1, 5_000), (5_000, 1), (70, 70), (5_000, 0)])
def test_a_request_of_many_rows_is_decoded_in_slices_as_views_of_the_frame(
    version: int, shape: tuple[int, int]
) -> None:
    topics, partitions = shape
    rows = [m.ProduceRequestPartition(index=n, records=b"r%d" % n) for n in range(partitions)]
    name = {"topic_id": TOPIC_ID} if version >= 13 else {"name": "orders"}
    body = ProduceRequest(
        acks=-1,
        timeout_ms=7,
        topic_data=[m.ProduceRequestTopic(**name, partition_data=rows)] * topics,  # type: ignore[arg-type]
    )
    frame = memoryview(request_frame(version, body))
    header = codec.read_header(frame)
    with pytest.raises(SlicesNeededError):
        decode_produce(header, frame)
    request, pauses = drained(decode_produce_sliced(header, frame, ROWS))
    assert pauses >= topics * max(1, partitions) // ELEMENTS_PER_SLICE
    assert (request.acks, request.timeout_ms, request.transactional_id) == (-1, 7, None)
    reference = TOPIC_ID if version >= 13 else "orders"
    assert [item for item, _ in request.topics] == [reference] * topics
    for _, decoded_rows in request.topics:
        assert [(n, bytes(r or b"")) for n, r in decoded_rows] == [
            (n, b"r%d" % n) for n in range(partitions)
        ]
        assert all(isinstance(r, memoryview) and r.obj is frame.obj for _, r in decoded_rows)


@pytest.mark.parametrize("version", [3, 9])
def test_a_request_has_a_largest_number_of_rows_found_before_they_are_built(version: int) -> None:
    """A million empty topics."""
    count = 1_000_000
    frame = request_frame(version, ProduceRequest(topic_data=[]))
    if version < 9:
        frame[-4:] = count.to_bytes(4, "big") + bytes(6 * count)
    else:
        frame[-2:] = varint(count + 1) + b"\1\1\0" * count
    header = codec.read_header(frame)
    with pytest.raises(SlicesNeededError):
        decode_produce(header, memoryview(frame))
    slices = decode_produce_sliced(header, memoryview(frame), ROWS)
    with pytest.raises(RowLimitError, match="1000000 rows are too many"):
        next(slices)


def test_tagged_fields_are_rows_and_a_section_has_few() -> None:
    """Ten million tags: a tag and its size are two bytes."""
    frame = request_frame(9, ProduceRequest(topic_data=[]))
    frame[-1:] = varint(1_000_000) + bytes(2_000_000)
    with pytest.raises(ProtocolError, match="1000000 tagged fields"):
        decoded(frame)
    many = request_frame(9, one_partition(9))
    assert many.endswith(b"\0\0\0")  # tags of the partition, the topic, the request
    row = b"\0\0\0\0\1" + varint(TAGS_PER_SECTION_MAX) + bytes(2 * TAGS_PER_SECTION_MAX)
    body = b"\0\0\1\0\0\0\0\2\2t" + varint(2_001) + row * 2_000 + b"\0\0"
    frame = bytearray(request_frame(9, ProduceRequest(topic_data=[])))
    del frame[codec.read_header(frame).body_position :]
    frame += body
    header = codec.read_header(frame)
    with pytest.raises(RowLimitError, match="tagged fields"):
        drained(decode_produce_sliced(header, memoryview(frame), ROWS))
    request, _ = drained(decode_produce_sliced(header, memoryview(frame), 2_002 + 64 * 2_000))
    assert len(request.topics[0][1]) == 2_000


def random_produced(rng: random.Random, version: int) -> ProducedPartition:
    def long() -> int:
        return rng.randrange(-1, 2**63)

    with_errors = version >= 8 and rng.random() < 0.5
    return ProducedPartition(
        rng.randrange(2**31),
        rng.choice((0, 87)),
        long(),
        long(),
        long() if version >= 5 else -1,
        [(n, rng.choice((None, "null key"))) for n in range(rng.choice((1, 130)))]
        if with_errors
        else (),
        rng.choice((None, "", "why")) if with_errors else None,
    )


def listed(version: int, response: object) -> object:
    assert isinstance(response, ProduceResponse)
    return [
        (
            topic.name if version < 13 else topic.topic_id,
            [
                ProducedPartition(
                    part.index,
                    part.error_code,
                    part.base_offset,
                    part.log_append_time_ms,
                    part.log_start_offset,
                    [(e.batch_index, e.batch_index_error_message) for e in part.record_errors]
                    or (),
                    part.error_message,
                )
                for part in topic.partition_responses
            ],
        )
        for topic in response.responses
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_responses_are_byte_for_byte_what_the_table_writes(version: int) -> None:
    rng = random.Random(version)
    for topic_count in (0, 1, 1, 1, 2, 5, 128):
        topics: list[tuple[str | bytes, list[ProducedPartition]]] = [
            (
                rng.choice(("a", "t" * 126, "t" * 127, "я" * 100)) if version < 13 else TOPIC_ID,
                [
                    random_produced(rng, version)
                    for _ in range(rng.choice((0, 1, 3, 130 // topic_count)))
                ],
            )
            for _ in range(topic_count)
        ]
        throttle = rng.randrange(100)
        frame = encode_produce_response(version, 9, topics, throttle)
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4
        correlation, response = codec.decode_response(PRODUCE, version, frame[4:])
        assert correlation == 9
        assert listed(version, response) == topics
        assert isinstance(response, ProduceResponse)
        assert response.throttle_time_ms == throttle
        assert codec.encode_response(PRODUCE, version, 9, response) == frame


@pytest.mark.parametrize("version", VERSIONS)
def test_the_usual_response_of_one_partition_is_the_same_as_the_general_one(version: int) -> None:
    rng = random.Random(version)
    for length in (1, 5, 126, 127, 128, 249):
        topic: str | bytes = "t" * length if version < 13 else rng.randbytes(16)
        produced = random_produced(rng, version)
        assert encode_produced(version, 3, topic, produced) == encode_produce_response(
            version, 3, [(topic, [produced])]
        )
