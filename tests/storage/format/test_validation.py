"""What a producer may send: each rule, their order, and that nothing passes that cannot be read."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.topics.keys import TopicConfig
from storage.errors import (
    CorruptBatchError,
    DecompressionLimitError,
    InvalidOffsetsError,
    InvalidRecordError,
    InvalidTimestampError,
    MessageTooLargeError,
    MissingKeyError,
    RecordListTooLargeError,
    StorageError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)
from storage.format.batch import (
    CONTROL,
    DELETE_HORIZON,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
    Record,
    build_batch,
    crc_of,
    decode_records,
    read_header,
)
from storage.format.compression import ZSTD, compress
from storage.format.validation import (
    FAILURES_NAMED_MAX,
    check_produced,
    check_records,
)
from storage.kernels.records import check_records_kernel
from tests.support.formats import START_MS, golden_bytes

NOW_MS = START_MS
PLAIN = TopicConfig()
COMPACTED = TopicConfig(cleanup_policy=("compact",))
HEADER = struct.Struct(">qiibIhiqqqhii")


def records_of(count: int, *, key: bytes | None = b"k", step_ms: int = 0) -> list[Record]:
    return [Record(n, NOW_MS + n * step_ms, key, b"v" * 20) for n in range(count)]


def batch_with(**changes: int) -> bytearray:
    """A valid batch with header fields replaced, and a CRC that is right unless it is given."""
    batch = build_batch(records_of(2), partition_leader_epoch=-1)
    HEADER.pack_into(batch, 0, *read_header(batch)._replace(**changes))
    if "crc" not in changes:
        struct.pack_into(">I", batch, 17, crc_of(batch, 0, len(batch)))
    return batch


def check(
    batch: bytes | bytearray, config: TopicConfig = PLAIN, *, produce_version: int = 9
) -> BatchHeader:
    return check_produced(memoryview(batch), config, produce_version=produce_version)


def refuse(
    records: Sequence[Record], config: TopicConfig, error: type[StorageError], codec: int = 0
) -> StorageError:
    batch = build_batch(records, codec=codec)
    header = check(batch, config)
    with pytest.raises(error) as caught:
        check_records(batch, header, config, NOW_MS)
    assert type(caught.value) is error
    return caught.value


# Headers


def test_a_good_batch_passes_and_gives_its_header() -> None:
    batch = build_batch(records_of(3), codec=ZSTD, producer_id=4, producer_epoch=0, base_sequence=0)
    assert check(batch) == read_header(batch)


BAD_HEADERS: list[tuple[dict[str, int], type[StorageError]]] = [
    ({"magic": 0}, UnsupportedMagicError),
    ({"magic": 1}, UnsupportedMagicError),
    ({"magic": 3}, UnsupportedMagicError),
    ({"batch_length": 48}, CorruptBatchError),
    ({"batch_length": -1}, CorruptBatchError),
    ({"batch_length": (1 << 31) - 1}, InvalidRecordError),
    ({"base_offset": 1}, InvalidRecordError),
    ({"base_offset": -1}, InvalidRecordError),
    ({"crc": 1}, CorruptBatchError),
    ({"record_count": 0}, InvalidOffsetsError),
    ({"record_count": -1}, InvalidOffsetsError),
    ({"record_count": 1}, InvalidOffsetsError),
    ({"record_count": 3}, InvalidOffsetsError),
    ({"last_offset_delta": -1}, InvalidOffsetsError),
    ({"last_offset_delta": (1 << 31) - 1, "record_count": -(1 << 31)}, InvalidOffsetsError),
    ({"last_offset_delta": 999, "record_count": 1000}, InvalidOffsetsError),
    ({"producer_id": 1}, InvalidOffsetsError),
    ({"producer_id": 1, "producer_epoch": 0}, InvalidOffsetsError),
    ({"producer_id": 1, "base_sequence": 0}, InvalidOffsetsError),
    ({"attributes": 5}, UnsupportedCompressionError),
    ({"attributes": 7}, UnsupportedCompressionError),
    ({"attributes": CONTROL}, InvalidOffsetsError),
    ({"attributes": LOG_APPEND_TIME}, InvalidTimestampError),
    ({"attributes": DELETE_HORIZON}, InvalidRecordError),
    ({"attributes": TRANSACTIONAL}, InvalidRecordError),
]


@pytest.mark.parametrize(("changes", "error"), BAD_HEADERS)
def test_headers_that_a_producer_may_not_send(
    changes: dict[str, int], error: type[StorageError]
) -> None:
    with pytest.raises(error) as caught:
        check(batch_with(**changes))
    assert type(caught.value) is error


@pytest.mark.parametrize("size", [0, 1, 16, 17, 60])
def test_less_than_a_header_is_no_batch(size: int) -> None:
    with pytest.raises(InvalidRecordError):
        check(build_batch(records_of(1))[:size])


@pytest.mark.parametrize("magic", [0, 1])
def test_kafkas_old_messages_are_named_even_where_they_are_short(magic: int) -> None:
    with pytest.raises(UnsupportedMagicError) as caught:
        check(golden_bytes(f"messages-v{magic}.bin"))
    assert caught.value.magic == magic


def test_exactly_one_whole_batch_is_taken() -> None:
    batch = build_batch(records_of(1))
    for data in (batch[:-1], batch + b"\0", batch + batch):
        with pytest.raises(InvalidRecordError):
            check(data)


def test_zstd_needs_produce_7() -> None:
    batch = build_batch(records_of(1), codec=ZSTD)
    with pytest.raises(UnsupportedCompressionError):
        check(batch, produce_version=6)
    assert check(batch, produce_version=7).codec == ZSTD


def test_the_size_limits_count_the_whole_batch_as_it_came() -> None:
    batch = build_batch(records_of(1000), codec=ZSTD)
    size = len(batch)
    assert check(batch, TopicConfig(max_message_bytes=size, segment_bytes=size))
    with pytest.raises(MessageTooLargeError) as too_large:
        check(batch, TopicConfig(max_message_bytes=size - 1))
    assert (too_large.value.size_bytes, too_large.value.limit_bytes) == (size, size - 1)
    with pytest.raises(RecordListTooLargeError):
        check(batch, TopicConfig(segment_bytes=size - 1))


def test_the_first_rule_that_is_broken_is_the_one_that_is_named() -> None:
    """The order of Kafka: each batch breaks one rule more, an earlier one."""
    tiny = TopicConfig(max_message_bytes=10, segment_bytes=10)
    changes = {"attributes": LOG_APPEND_TIME}
    steps: list[tuple[dict[str, int], TopicConfig, type[StorageError]]] = [
        ({}, PLAIN, InvalidTimestampError),
        ({"attributes": LOG_APPEND_TIME | 5}, PLAIN, UnsupportedCompressionError),
        ({"producer_id": 1}, PLAIN, InvalidOffsetsError),
        ({}, TopicConfig(segment_bytes=10), RecordListTooLargeError),
        ({"crc": 1}, TopicConfig(segment_bytes=10), CorruptBatchError),
        ({}, tiny, MessageTooLargeError),
        ({"base_offset": 1}, tiny, InvalidRecordError),
        ({"attributes": LOG_APPEND_TIME | ZSTD}, tiny, UnsupportedCompressionError),
        ({"magic": 1}, tiny, UnsupportedMagicError),
    ]
    for more, config, error in steps:
        changes |= more
        with pytest.raises(error) as caught:
            check(batch_with(**changes), config, produce_version=6)
        assert type(caught.value) is error


@given(st.binary(max_size=150), st.booleans())
def test_any_bytes_give_a_header_or_an_error_of_ours(data: bytes, sealed: bool) -> None:
    batch = bytearray(data)
    if sealed and len(batch) >= 61:
        batch[:12] = struct.pack(">qi", 0, len(batch) - 12)
        batch[16] = 2
        struct.pack_into(">I", batch, 17, crc_of(batch, 0, len(batch)))
    try:
        header = check(batch)
    except StorageError:
        return
    assert header.size_bytes == len(batch)
    assert 0 < header.record_count == header.last_offset_delta + 1


HOUR_MS = 3_600_000


# Records


@pytest.mark.parametrize("codec", range(5))
def test_good_records_pass(codec: int) -> None:
    batch = build_batch(records_of(50), codec=codec)
    header = check(batch, COMPACTED)
    for data in (batch, bytes(batch), memoryview(batch)):
        check_records(data, header, COMPACTED, NOW_MS)
    kernel: Any = check_records_kernel
    assert len(kernel.signatures) == 1, "compiled twice for one purpose"


@pytest.mark.parametrize("codec", range(5))
def test_a_compacted_topic_names_the_records_without_a_key(codec: int) -> None:
    records = records_of(10)
    for index in (3, 7):
        records[index] = records[index]._replace(key=None)
    error = refuse(records, COMPACTED, MissingKeyError, codec)
    assert isinstance(error, MissingKeyError)
    assert error.batch_indexes == (3, 7)
    check_records(build_batch(records), check(build_batch(records)), PLAIN, NOW_MS)


def test_an_empty_key_is_a_key_and_a_tombstone_is_welcome() -> None:
    batch = build_batch([Record(0, NOW_MS, b"", None)])
    check_records(batch, check(batch, COMPACTED), COMPACTED, NOW_MS)


def test_only_so_many_records_are_named() -> None:
    records = records_of(FAILURES_NAMED_MAX + 50, key=None)
    error = refuse(records, COMPACTED, MissingKeyError)
    assert isinstance(error, MissingKeyError)
    assert error.batch_indexes == tuple(range(FAILURES_NAMED_MAX))


def test_times_outside_the_window_are_named() -> None:
    records = records_of(3, step_ms=HOUR_MS)
    error = refuse(records, PLAIN, InvalidTimestampError)
    assert isinstance(error, InvalidTimestampError)
    assert error.batch_indexes == (2,)
    stamped = TopicConfig(cleanup_policy=("compact",), message_timestamp_type="LogAppendTime")
    batch = build_batch(records)
    check_records(batch, check(batch, stamped), stamped, NOW_MS)


def test_old_times_count_where_the_topic_says_so() -> None:
    config = TopicConfig(message_timestamp_before_max_ms=1000)
    for age_ms in (1000, 1001):
        batch = build_batch([Record(0, NOW_MS - age_ms, b"k", b"v")])
        if age_ms == 1000:
            check_records(batch, check(batch), config, NOW_MS)
        else:
            refuse([Record(0, NOW_MS - age_ms, b"k", b"v")], config, InvalidTimestampError)


def test_a_header_does_not_hide_the_time_of_a_record() -> None:
    batch = build_batch(records_of(3, step_ms=HOUR_MS))
    HEADER.pack_into(batch, 0, *read_header(batch)._replace(max_timestamp=NOW_MS))
    struct.pack_into(">I", batch, 17, crc_of(batch, 0, len(batch)))
    with pytest.raises(InvalidTimestampError):
        check_records(batch, check(batch), PLAIN, NOW_MS)


def test_a_batch_that_unpacks_to_more_than_the_topic_allows_is_refused() -> None:
    records = [Record(0, NOW_MS, b"k", bytes(100_000))]
    small = TopicConfig(cleanup_policy=("compact",), varve_decompressed_batch_bytes=100_000)
    for codec in range(1, 5):
        refuse(records, small, DecompressionLimitError, codec)
    batch = build_batch(records, codec=1)
    check_records(batch, check(batch), PLAIN, NOW_MS)


def resealed(body: bytes, header: BatchHeader) -> bytearray:
    batch = bytearray(HEADER.pack(*header._replace(batch_length=49 + len(body)))) + body
    struct.pack_into(">I", batch, 17, crc_of(batch, 0, len(batch)))
    return batch


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: body + b"\0",
        lambda body: body[:-1],
        lambda body: body[:20] + b"\xff" * 12 + body[32:],
    ],
)
@pytest.mark.parametrize("config", [PLAIN, COMPACTED], ids=["delete", "compact"])
@pytest.mark.parametrize("codec", range(5))
def test_spoilt_records_under_a_right_crc_are_invalid(
    codec: int, config: TopicConfig, spoil: Callable[[bytes], bytes]
) -> None:
    plain = build_batch(records_of(4))
    header = read_header(plain)._replace(attributes=codec)
    inside = resealed(compress(codec, spoil(bytes(plain[61:]))), header)
    outside = resealed(spoil(compress(codec, plain[61:])), header)
    for batch in (inside, outside):
        with pytest.raises(InvalidRecordError):
            check_records(batch, check(batch, config), config, NOW_MS)


@given(st.integers(0, 4), st.data())
def test_what_passes_can_be_read(codec: int, data: st.DataObject) -> None:
    plain = bytearray(build_batch(records_of(5)))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(61, len(plain) - 1))
        plain[at] = data.draw(st.integers(0, 255))
    header = read_header(plain)._replace(attributes=codec)
    batch = resealed(compress(codec, plain[61:]), header)
    try:
        header = check(batch, COMPACTED)
        check_records(batch, header, COMPACTED, NOW_MS)
    except StorageError:
        return
    records = decode_records(batch, header)
    assert [record.offset for record in records] == list(range(5))
    assert all(record.key is not None for record in records)


@pytest.mark.parametrize("codec", range(1, 5))
def test_the_lower_of_two_limits_counts_for_what_a_batch_unpacks_to(codec: int) -> None:
    batch = build_batch([Record(0, NOW_MS, b"k", bytes(100_000))], codec=codec)
    header = check(batch)
    for topic_bytes, limit_bytes in ((100_000, 200_000), (200_000, 100_000)):
        config = TopicConfig(varve_decompressed_batch_bytes=topic_bytes)
        with pytest.raises(DecompressionLimitError):
            check_records(batch, header, config, NOW_MS, limit_bytes=limit_bytes)
    ample = TopicConfig(varve_decompressed_batch_bytes=200_000)
    check_records(batch, header, ample, NOW_MS, limit_bytes=200_000)
