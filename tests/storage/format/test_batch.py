"""Record batches: what is read, what is built, and what hostile bytes lead to."""

import struct
from pathlib import Path

import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AioBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AioBuilder
from hypothesis import example, given
from hypothesis import strategies as st

from storage.errors import CorruptBatchError, StorageError, UnsupportedMagicError
from storage.format.batch import (
    CONTROL,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
    ControlType,
    Record,
    build_batch,
    control_type,
    crc_of,
    decode_records,
    marker_coordinator_epoch,
    marker_record,
    read_header,
    read_varint,
    read_varlong,
    stamp,
    stamp_log_append_time,
    unpack_header,
    verify_crc,
    walk_headers,
    write_varint,
)
from tests.support.formats import (
    CODECS,
    MALFORMED,
    RECORDS,
    START_MS,
    PyBatch,
    PyBuilder,
    as_kafka_prints,
    ask_kafka,
    golden_bytes,
)
from tests.support.storage.empty_batch import empty_batch

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
NULLABLE_BYTES = st.none() | st.binary(max_size=40)
HEADERS = st.lists(st.tuples(st.text(max_size=5), NULLABLE_BYTES), max_size=3).map(tuple)


@st.composite
def record_lists(draw: st.DrawFn) -> list[Record]:
    gaps = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=12))
    offset = draw(st.integers(0, 1 << 40))
    records = []
    for gap in gaps:
        offset += gap
        timestamp = draw(st.integers(-1, 1 << 45))
        key, value = draw(NULLABLE_BYTES), draw(NULLABLE_BYTES)
        records.append(Record(offset, timestamp, key, value, draw(HEADERS)))
    return records


def small_batch(**changes: int) -> bytearray:
    """A valid batch of two records with header fields replaced and the CRC renewed."""
    batch = build_batch([Record(7, START_MS, b"a", b"1"), Record(8, START_MS, b"b", b"2")])
    header = read_header(batch)._replace(**changes)
    struct.pack_into(">qiibIhiqqqhii", batch, 0, *header)
    crc = crc_of(batch, 0, len(batch))
    struct.pack_into(">I", batch, 17, crc)
    return batch


# Kafka's own bytes


@pytest.mark.parametrize("codec", CODECS)
def test_batches_of_kafka_are_read_as_written(codec: str) -> None:
    raw = golden_bytes(f"batch-{codec}.bin")
    header = read_header(raw)
    assert header.size_bytes == len(raw)
    assert verify_crc(raw, 0, header)
    assert header.codec == CODECS.index(codec)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 1, 30)
    assert (header.last_sequence, header.next_offset) == (34, 47)
    assert decode_records(raw, header) == RECORDS


@pytest.mark.parametrize("name", ["batch-none.bin", "batch-delete-horizon.bin"])
def test_an_uncompressed_batch_is_built_byte_for_byte_as_kafka_does(name: str) -> None:
    raw = golden_bytes(name)
    header = read_header(raw)
    horizon = header.base_timestamp if header.has_delete_horizon else None
    built = build_batch(
        RECORDS,
        producer_id=7,
        producer_epoch=1,
        base_sequence=30,
        partition_leader_epoch=header.partition_leader_epoch,
        delete_horizon_ms=horizon,
    )
    assert built == raw


def test_a_delete_horizon_stands_in_the_base_timestamp_and_times_survive() -> None:
    raw = golden_bytes("batch-delete-horizon.bin")
    header = read_header(raw)
    assert header.has_delete_horizon
    assert header.base_timestamp == START_MS + 86_400_000
    assert decode_records(raw, header) == RECORDS


def test_an_empty_batch_is_what_kafka_writes() -> None:
    raw = golden_bytes("batch-empty.bin")
    header = read_header(raw)
    assert decode_records(raw, header) == []
    before = build_batch(
        [Record(102, START_MS, b"k", b"v")],
        base_offset=100,
        last_offset_delta=4,
        codec=4,
        producer_id=7,
        producer_epoch=1,
        base_sequence=30,
        attributes=TRANSACTIONAL,
        partition_leader_epoch=3,
        delete_horizon_ms=START_MS + 5,
        max_timestamp=START_MS,
    )
    assert empty_batch(read_header(before)) == raw


def test_log_append_time_replaces_every_records_time() -> None:
    raw = golden_bytes("batch-log-append-time.bin")
    header = read_header(raw)
    assert header.is_log_append_time
    assert decode_records(raw, header) == [Record(5, START_MS + 9, b"key", b"value")]


@pytest.mark.parametrize("kind", [ControlType.ABORT, ControlType.COMMIT])
def test_markers_of_kafka_are_understood_and_built_alike(kind: ControlType) -> None:
    raw = golden_bytes(f"marker-{kind.name.lower()}.bin")
    header = read_header(raw)
    [record] = decode_records(raw, header)
    assert header.is_control
    assert header.is_transactional
    assert (control_type(record), marker_coordinator_epoch(record)) == (kind, 11)
    marker = marker_record(kind, 11, START_MS)._replace(offset=header.base_offset)
    built = build_batch(
        [marker],
        producer_id=9,
        producer_epoch=2,
        attributes=TRANSACTIONAL | CONTROL,
        partition_leader_epoch=4,
    )
    assert built == raw


@pytest.mark.parametrize("magic", [0, 1])
def test_old_message_formats_are_named(magic: int) -> None:
    raw = golden_bytes(f"messages-v{magic}.bin")
    with pytest.raises(UnsupportedMagicError) as caught:
        list(walk_headers(raw))
    assert (caught.value.magic, caught.value.position) == (magic, 0)
    assert list(walk_headers(raw[:-1])) == []
    damaged = bytearray(raw)
    damaged[-1] ^= 1
    with pytest.raises(CorruptBatchError) as caught_damage:
        list(walk_headers(damaged))
    assert not isinstance(caught_damage.value, UnsupportedMagicError)
    with pytest.raises(UnsupportedMagicError):
        read_header(raw + bytes(HEADER_BYTES))


def test_kafka_reads_what_is_built_here(tmp_path: Path) -> None:
    batches = []
    expected = []
    for codec in range(5):
        for attributes, horizon in (
            (0, None),
            (TRANSACTIONAL, START_MS + 7),
            (LOG_APPEND_TIME, None),
        ):
            batch = build_batch(
                RECORDS,
                codec=codec,
                producer_id=3,
                producer_epoch=2,
                base_sequence=(1 << 31) - 2,
                attributes=attributes,
                delete_horizon_ms=horizon,
                last_offset_delta=9,
            )
            header = read_header(batch)
            batches += [batch, empty_batch(header)]
            expected += as_kafka_prints(header, decode_records(batch, header))
            expected += as_kafka_prints(read_header(batches[-1]), [])
    path = tmp_path / "batches"
    path.write_bytes(b"".join(batches))
    assert ask_kafka("read", path).splitlines() == expected


# Other people's encoders


@pytest.mark.parametrize("codec", range(5))
def test_batches_of_aiokafka_are_read(codec: int) -> None:
    builder = AioBuilder(2, codec, 0, 5, 6, 7, 1 << 20)
    for n in range(50):
        assert builder.append(n, START_MS + n, b"k%d" % n, b"v" * 40, [("h", b"x")]) is not None
    raw = builder.build()
    header = read_header(raw)
    assert verify_crc(raw, 0, header)
    assert header.codec == codec
    expected = [Record(n, START_MS + n, b"k%d" % n, b"v" * 40, (("h", b"x"),)) for n in range(50)]
    assert decode_records(raw, header) == expected


@pytest.mark.parametrize("codec", [0, 1, 3, 4])
def test_batches_of_kafka_python_are_read(codec: int) -> None:
    builder = PyBuilder(2, codec, 0, 5, 6, 7, 1 << 20)
    for n in range(50):
        assert builder.append(n, START_MS + n, b"k%d" % n, None, []) is not None
    raw = bytes(builder.build())
    header = read_header(raw)
    assert verify_crc(raw, 0, header)
    assert header.codec == codec
    assert decode_records(raw, header) == [
        Record(n, START_MS + n, b"k%d" % n, None) for n in range(50)
    ]


@pytest.mark.parametrize("codec", range(5))
def test_aiokafka_and_kafka_python_read_our_batches(codec: int) -> None:
    raw = bytes(build_batch(RECORDS, codec=codec))
    readers = [AioBatch(raw)]
    if codec != 2:  # kafka-python needs a snappy library of its own
        readers.append(PyBatch(raw))
    for reader in readers:
        assert reader.validate_crc()
        read = [Record(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in reader]
        assert read == RECORDS


# Round trips and rules of our own


@given(record_lists(), st.sampled_from(range(5)), st.none() | st.integers(0, 1 << 44))
def test_what_is_built_is_what_is_read(
    records: list[Record], codec: int, horizon: int | None
) -> None:
    batch = build_batch(records, codec=codec, delete_horizon_ms=horizon)
    header = read_header(batch)
    assert verify_crc(batch, 0, header)
    assert (header.base_offset, header.last_offset) == (records[0].offset, records[-1].offset)
    assert header.max_timestamp == max(record.timestamp for record in records)
    assert decode_records(batch, header) == records
    shifted = b"\xff" * 5 + batch + b"\xff"
    assert decode_records(memoryview(shifted), read_header(shifted, 5), 5) == records


def test_stamping_leaves_the_crc_valid() -> None:
    batch = small_batch()
    window = memoryview(bytearray(3) + batch)
    stamp(window, 3, 1 << 40, 12)
    header = read_header(window, 3)
    assert (header.base_offset, header.partition_leader_epoch) == (1 << 40, 12)
    assert verify_crc(window, 3, header)


def test_stamping_log_append_time_renews_the_crc() -> None:
    batch = small_batch()
    stamp_log_append_time(batch, START_MS + 500)
    header = read_header(batch)
    assert verify_crc(batch, 0, header)
    assert {record.timestamp for record in decode_records(batch, header)} == {START_MS + 500}


def test_a_header_key_that_is_no_text_stays_bytes() -> None:
    records = [Record(0, 0, b"k", b"v", ((b"\xff\xfe", b"x"),))]
    batch = build_batch(records)
    assert decode_records(batch, read_header(batch)) == records


def test_sequences_wrap_at_the_largest_int32() -> None:
    header = read_header(small_batch(base_sequence=(1 << 31) - 1, last_offset_delta=1))
    assert header.last_sequence == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_length": 48},
        {"batch_length": -1},
        {"magic": 3},
        {"magic": -1},
        {"last_offset_delta": -1},
        {"record_count": -1},
        {"record_count": 3},
        {"base_offset": -1},
        {"base_offset": (1 << 63) - 1},
    ],
)
def test_headers_that_no_batch_can_have_are_corrupt(changes: dict[str, int]) -> None:
    batch = small_batch(**changes)
    with pytest.raises(CorruptBatchError) as caught:
        read_header(batch)
    assert not isinstance(caught.value, UnsupportedMagicError)


def test_zeros_are_damage_and_no_old_format() -> None:
    for size in (17, 61, 200):
        with pytest.raises(CorruptBatchError) as caught:
            list(walk_headers(bytes(size)))
        assert not isinstance(caught.value, UnsupportedMagicError)


def test_the_walk_yields_whole_batches_and_ends_at_a_partial_one() -> None:
    item, two = small_batch(), small_batch(base_offset=9)
    data = item + two
    for end in range(len(data) + 1):
        walked = [position for position, _ in walk_headers(data, 0, end)]
        assert walked == [at for at in (0, len(item)) if end >= at + len(item)]
    assert [at for at, _ in walk_headers(memoryview(data), len(item))] == [len(item)]


def test_the_walk_names_the_place_of_damage() -> None:
    data = small_batch() + bytes(100)
    walk = walk_headers(data)
    assert next(walk)[0] == 0
    with pytest.raises(CorruptBatchError) as caught:
        next(walk)
    assert caught.value.position == len(small_batch())


# Hostile bytes


@given(st.binary(max_size=200), st.integers(0, 4))
def test_any_bytes_give_records_or_an_error_of_ours(data: bytes, codec: int) -> None:
    header = unpack_header(small_batch())._replace(
        batch_length=49 + len(data), attributes=codec, record_count=2
    )
    batch = bytes(HEADER_BYTES) + data
    try:
        records = decode_records(batch, header, limit_bytes=10_000)
    except StorageError:
        return
    assert len(records) == 2


@given(record_lists(), st.data())
def test_a_flipped_bit_is_caught_by_the_crc_or_lies_outside_it(
    records: list[Record], data: st.DataObject
) -> None:
    batch = build_batch(records, codec=data.draw(st.integers(0, 4)))
    bit = data.draw(st.integers(0, len(batch) * 8 - 1))
    batch[bit // 8] ^= 1 << bit % 8
    try:
        header = read_header(batch)
    except CorruptBatchError:
        return
    if verify_crc(batch, 0, header):
        assert bit // 8 < 16  # base offset and leader epoch; the length would have been noticed
    try:
        decode_records(batch, header, limit_bytes=1 << 20)
    except StorageError:
        return


@given(record_lists(), st.data())
def test_a_truncated_batch_is_never_read(records: list[Record], data: st.DataObject) -> None:
    batch = build_batch(records)
    cut = batch[: data.draw(st.integers(0, len(batch) - 1))]
    assert list(walk_headers(cut)) == []
    try:
        header = read_header(cut)
    except CorruptBatchError:
        assert len(cut) < HEADER_BYTES
        return
    assert not verify_crc(cut, 0, header)
    with pytest.raises(CorruptBatchError):
        decode_records(cut, header)


@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_records_are_corrupt(body: bytes) -> None:
    header = BatchHeader(
        base_offset=0,
        batch_length=49 + len(body),
        partition_leader_epoch=0,
        magic=2,
        crc=0,
        attributes=0,
        last_offset_delta=0,
        base_timestamp=0,
        max_timestamp=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        record_count=1,
    )
    with pytest.raises(CorruptBatchError):
        decode_records(bytes(HEADER_BYTES) + body, header)


@pytest.mark.parametrize("timestamp", [-(1 << 63), -(1 << 63) + START_MS, -1, (1 << 63) - 1])
@pytest.mark.parametrize("horizon_ms", [0, START_MS, (1 << 63) - 1])
def test_a_time_farther_from_the_horizon_than_64_bits_can_tell_survives(
    timestamp: int, horizon_ms: int
) -> None:
    """Delta and sum wrap, as in Java."""
    records = [Record(0, timestamp, b"k", None)]
    batch = build_batch(records, delete_horizon_ms=horizon_ms)
    assert decode_records(batch, read_header(batch)) == records


def test_log_append_time_needs_no_sum() -> None:
    batch = build_batch([Record(0, 5, b"k", b"v")], attributes=LOG_APPEND_TIME, max_timestamp=7)
    header = read_header(batch)._replace(base_timestamp=(1 << 63) - 1)
    assert decode_records(batch, header)[0].timestamp == 7


@given(INT64)
@example(1 << 31)
@example(-(1 << 31) - 1)
def test_numbers_come_back(value: int) -> None:
    out = bytearray()
    write_varint(out, value)
    assert read_varlong(out, 0, len(out)) == (value, len(out))
    with pytest.raises(CorruptBatchError):
        read_varlong(out, 0, len(out) - 1)
    if -(1 << 31) <= value < 1 << 31:
        assert read_varint(out, 0, len(out)) == (value, len(out))
    else:
        with pytest.raises(CorruptBatchError):
            read_varint(out, 0, len(out))


@pytest.mark.parametrize(
    "key", [None, b"", b"\x00\x00\x00", b"\xff\xff\x00\x00", b"\x00\x00\xff\xff"]
)
def test_control_keys_that_are_none_are_corrupt(key: bytes | None) -> None:
    with pytest.raises(CorruptBatchError):
        control_type(Record(0, 0, key, b""))


def test_an_unknown_control_type_is_told_as_it_is() -> None:
    assert control_type(Record(0, 0, b"\x00\x00\x00\x63", b"")) == 99
