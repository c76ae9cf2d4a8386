"""Columns from record batches: the same as one record after another, read by plain Python."""

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c

from pipeline.records import columns as columns_module
from pipeline.records import decode as decode_module
from pipeline.records.columns import ALL_COLUMNS, COLUMNS, arrow_schema
from pipeline.records.decode import (
    BatchDecoder,
    Selection,
    decode_batches,
    decode_segment,
    with_slack,
)
from storage.env import RealEnv
from storage.errors import CorruptBatchError, DamagedSegmentError, UnsupportedMagicError
from storage.format.batch import (
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    decode_records,
    marker_record,
    read_header,
    verify_crc,
    walk_headers,
)
from storage.format.filenames import INDEX, LOG, file_name
from storage.format.index import OffsetIndex
from storage.format.txn_index import TxnIndexEntry
from tests.support.draws import cases
from tests.support.formats import MALFORMED, RECORDS, golden_bytes
from tests.support.storage import hostile_batches
from tests.support.storage.empty_batch import empty_batch

START_MS = 1_700_000_000_000
CODECS = range(5)
Row = dict[str, Any]


def model(
    data: bytes,
    *,
    first: int = 0,
    end: int = 1 << 62,
    aborted: Sequence[TxnIndexEntry] = (),
    keep: Callable[[int], bool] = lambda _: True,
) -> list[Row]:
    """What a reader that takes its time finds."""
    rows: list[Row] = []
    for position, header in walk_headers(data):
        assert verify_crc(data, position, header)
        if header.is_control or any(
            header.is_transactional
            and header.producer_id == entry.producer_id
            and entry.first_offset <= header.last_offset
            and header.base_offset <= entry.last_offset
            for entry in aborted
        ):
            continue
        rows += [
            _row(record, header.is_log_append_time)
            for record in decode_records(data, header, position)
            if first <= record.offset < end and keep(record.offset)
        ]
    return rows


def _row(record: Record, is_log_append_time: bool) -> Row:
    headers = [
        {"key": k if isinstance(k, str) else k.decode(errors="replace"), "value": v}
        for k, v in record.headers
    ]
    return {
        "key": record.key,
        "value": record.value,
        "topic": "orders",
        "partition": 3,
        "offset": record.offset,
        "timestamp": record.timestamp * 1000,
        "timestampType": int(is_log_append_time),
        "headers": headers or None,
    }


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[Row]:
    rows: list[Row] = []
    for batch in batches:
        batch.validate(full=True)
        if "timestamp" in batch.schema.names:
            at = batch.schema.get_field_index("timestamp")
            batch = batch.set_column(at, "timestamp", batch.column(at).cast(pa.int64()))
        rows += batch.to_pylist()
    return rows


def decoded(data: bytes, **options: Any) -> list[Row]:
    options.setdefault("columns", ALL_COLUMNS)
    return rows_of(decode_batches(data, Selection("orders", 3, **options)))


class Author:
    """Writes a random log of transactions, plain batches, emptied ones and markers."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.data = bytearray()
        self.next_offset = self.chance.choice((0, 5, 1 << 40))
        self.aborted: list[TxnIndexEntry] = []
        self._open: dict[int, int] = {}

    def write(self, batches: int) -> bytes:
        for _ in range(batches):
            self.chance.choice((self._plain, self._plain, self._transactional, self._marker))()
        return bytes(self.data)

    def _record(self, offset: int) -> Record:
        chance = self.chance
        key = chance.choice((None, b"", chance.randbytes(chance.randrange(1, 60))))
        value = chance.choice((None, b"", chance.randbytes(chance.randrange(1, 300))))
        names: tuple[str | bytes, ...] = ("trace", "ü", "", b"\xff\xfe")
        headers = tuple(
            (chance.choice(names), chance.choice((None, b"", b"x" * chance.randrange(50))))
            for _ in range(chance.choice((0, 0, 1, 3)))
        )
        return Record(offset, START_MS + chance.randrange(-(10**6), 10**9), key, value, headers)

    def _records(self) -> list[Record]:
        records = []
        for _ in range(self.chance.randrange(1, 40)):
            self.next_offset += self.chance.choice((0, 0, 0, 7))  # as compaction leaves them
            records.append(self._record(self.next_offset))
            self.next_offset += 1
        return records

    def _plain(self) -> None:
        chance = self.chance
        records = self._records()
        batch = (
            build_batch(
                records,
                base_offset=records[0].offset - chance.randrange(min(3, records[0].offset + 1)),
                last_offset_delta=None,
                codec=chance.choice(CODECS),
                attributes=chance.choice((0, LOG_APPEND_TIME)),
                delete_horizon_ms=chance.choice((None, START_MS + 5)),
            )
            if not self.data
            else build_batch(
                records,
                codec=chance.choice(CODECS),
                attributes=chance.choice((0, LOG_APPEND_TIME)),
                delete_horizon_ms=chance.choice((None, START_MS + 5)),
            )
        )
        self.data += empty_batch(read_header(batch)) if chance.random() < 0.1 else batch

    def _transactional(self) -> None:
        producer = self.chance.randrange(4)
        records = self._records()
        self._open.setdefault(producer, records[0].offset)
        self.data += build_batch(
            records,
            codec=self.chance.choice(CODECS),
            producer_id=producer,
            producer_epoch=1,
            base_sequence=0,
            attributes=TRANSACTIONAL,
        )

    def _marker(self) -> None:
        if not self._open:
            return
        producer = self.chance.choice(list(self._open))
        first = self._open.pop(producer)
        kind = self.chance.choice((ControlType.ABORT, ControlType.COMMIT))
        offset = self.next_offset
        self.next_offset += 1
        record = marker_record(kind, 0, START_MS)._replace(offset=offset)
        self.data += build_batch(
            [record], producer_id=producer, producer_epoch=1, attributes=TRANSACTIONAL | CONTROL
        )
        if kind == ControlType.ABORT:
            self.aborted.append(TxnIndexEntry(producer, first, offset, offset))


def test_a_time_beyond_64_bits_from_the_horizon_does_not_hide_its_record() -> None:
    records = [Record(0, -(1 << 63) + 5, b"gone", None), Record(1, 50, b"k", b"v")]
    data = bytes(build_batch(records, delete_horizon_ms=START_MS))
    assert decoded(data, columns=("key", "offset")) == [
        {"key": b"gone", "offset": 0},
        {"key": b"k", "offset": 1},
    ]


@pytest.mark.parametrize("seed", range(cases(few=2, many=12)))
def test_columns_equal_records_read_one_by_one(seed: int) -> None:
    print("seed", seed)
    author = Author(seed)
    data = author.write(40)
    chance = author.chance
    start, stop = sorted(chance.randrange(author.next_offset + 2) for _ in range(2))
    selections: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({}, model(data)),
        ({"aborted": author.aborted}, model(data, aborted=author.aborted)),
        ({"first_offset": start, "end_offset": stop}, model(data, first=start, end=stop)),
        ({"keep": lambda offsets: offsets % 3 == 1}, model(data, keep=lambda at: at % 3 == 1)),
    ]
    for batch_rows in (1, 7, 50, 16384):
        for selection, rows in selections:
            assert decoded(data, batch_rows=batch_rows, **selection) == rows


def test_every_codec_of_kafka_itself_is_read() -> None:
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        rows = decoded(golden_bytes(f"batch-{codec}.bin"))
        assert [row["key"] for row in rows] == [record.key for record in RECORDS]
        assert [row["value"] for row in rows] == [record.value for record in RECORDS]
        assert [row["offset"] for row in rows] == [record.offset for record in RECORDS]
        assert rows[0]["headers"] == [
            {"key": "name", "value": b"text"},
            {"key": "", "value": None},
        ]
        assert rows[1]["headers"] is None


@pytest.mark.parametrize("columns", [("offset",), ("value", "key"), ("headers",), COLUMNS])
def test_only_the_columns_asked_for_come_in_their_order(columns: tuple[str, ...]) -> None:
    data = Author(3).write(20)
    expected = [{name: row[name] for name in columns} for row in model(data)]
    for batch in decode_batches(data, Selection("orders", 3, columns)):
        assert batch.schema.equals(arrow_schema(columns))
    assert decoded(data, columns=columns) == expected


def test_a_column_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown column 'kee'"):
        list(decode_batches(b"", Selection("t", 0, ("kee",))))
    with pytest.raises(ValueError, match="named twice"):
        arrow_schema(("key", "key"))


def test_what_was_handed_out_is_not_written_to_again() -> None:
    data = Author(8).write(60)
    batches = list(decode_batches(data, Selection("orders", 3, batch_rows=11)))
    assert [value for batch in batches for value in batch.column("value").to_pylist()] == [
        row["value"] for row in model(data)
    ]


def test_a_batch_cut_short_at_the_end_is_left_out() -> None:
    batches = [bytes(hostile_batches.batch(count=3)), bytes(hostile_batches.batch(count=2))]
    second = bytearray(batches[1])
    struct.pack_into(">q", second, 0, 3)
    data = batches[0] + bytes(second)
    for cut in (1, 60, len(second) - 1):
        assert len(decoded(data[: len(batches[0]) + cut])) == 3
    assert len(decoded(data)) == 5


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("codec", CODECS)
def test_a_malformed_record_is_an_error_with_its_place(body: bytes, codec: int) -> None:
    good = bytes(hostile_batches.batch(count=1))
    packed = hostile_batches.PACKERS[("none", "gzip", "snappy", "lz4", "zstd")[codec]](body)
    bad = bytearray(hostile_batches.with_body(packed, codec=codec))
    struct.pack_into(">q", bad, 0, 1)
    with pytest.raises(CorruptBatchError) as caught:
        decoded(good + bytes(bad))
    assert caught.value.position == len(good)
    assert caught.value.reason


@pytest.mark.parametrize("codec", [name for name in hostile_batches.CODECS if name != "none"])
def test_a_batch_that_unpacks_without_end_is_refused(codec: str) -> None:
    decoder = BatchDecoder(Selection("t", 0, unpacked_bytes_max=1 << 20))
    data = hostile_batches.with_body(
        hostile_batches.bomb(codec), codec=hostile_batches.CODECS[codec]
    )
    with pytest.raises(CorruptBatchError, match="1048576"):
        list(decoder.decode(with_slack(data), 0, len(data)))


def test_an_old_format_is_named() -> None:
    data = bytearray(hostile_batches.batch())
    data[16] = 1
    with pytest.raises(UnsupportedMagicError):
        decoded(bytes(data))


@pytest.mark.parametrize("seed", range(cases(few=10, many=40)))
def test_flipped_bytes_are_noticed_or_outside_the_checksum(seed: int) -> None:
    """Base offset and leader epoch alone are not covered by it."""
    print("seed", seed)
    chance = random.Random(seed)
    data = Author(seed).write(10)
    if not data:
        return
    damaged = bytearray(data)
    damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    try:
        results = decoded(bytes(damaged))
    except CorruptBatchError:
        return
    values = [row["value"] for row in model(data)]
    assert [row["value"] for row in results] == values[: len(results)]


@pytest.mark.parametrize("seed", range(cases(few=12, many=60)))
def test_bytes_with_a_right_checksum_and_wrong_content_never_lead_outside(seed: int) -> None:
    print("seed", seed)
    chance = random.Random(seed)
    records = [Record(n, START_MS, b"k" * 9, b"v" * 30, (("h", b"1"),)) for n in range(5)]
    data = build_batch(records)
    for _ in range(chance.randrange(1, 6)):
        data[chance.randrange(21, len(data))] = chance.choice((0, 1, 2, 127, 128, 255))
    struct.pack_into(">I", data, 17, crc32c(memoryview(data)[21:]))
    try:
        results = decoded(bytes(data))
    except CorruptBatchError:
        return
    assert results == model(bytes(data))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_time_that_microseconds_do_not_hold_becomes_the_nearest(sign: int) -> None:
    """Otherwise one record would keep all others from the reader."""
    largest_ms = ((1 << 63) - 1) // 1000
    times = [START_MS, sign * (1 << 62), sign * largest_ms]
    data = bytes(build_batch([Record(n, time, b"k", b"v") for n, time in enumerate(times)]))
    nearest = sign * largest_ms * 1000
    assert [row["timestamp"] for row in decoded(data)] == [START_MS * 1000, nearest, nearest]
    assert [row["timestampMs"] for row in decoded(data, columns=("timestampMs",))] == times


def test_no_time_stays_what_it_is_in_spark() -> None:
    data = bytes(build_batch([Record(0, -1, b"k", b"v")]))
    assert decoded(data)[0]["timestamp"] == -1000


def test_large_values_do_not_add_up_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "BATCH_BYTES", 1000)
    records = [Record(n, START_MS, b"k", bytes(n * 100)) for n in range(30)]
    data = bytes(build_batch(records))
    batches = list(decode_batches(data, Selection("t", 0)))
    assert len(batches) > 20
    assert [v for b in batches for v in b.column("value").to_pylist()] == [
        record.value for record in records
    ]


# segments


def _segment(folder: Path, data: bytes, base: int = 0) -> str:
    path = folder / file_name(base, LOG)
    path.write_bytes(data)
    return str(path)


FILE_OPTIONS = ("size_bytes", "next_base_offset")


def _of_segment(path: str, **options: Any) -> list[Row]:
    file_options = {name: options.pop(name) for name in FILE_OPTIONS if name in options}
    selection = Selection("orders", 3, **{"columns": ALL_COLUMNS, **options})
    return rows_of(decode_segment(RealEnv(), path, selection, **file_options))


def test_a_segment_is_read_through_a_small_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_module, "READ_BYTES", 2000)
    data = Author(5).write(60)
    assert _of_segment(_segment(tmp_path, data)) == model(data)


def test_damage_in_a_segment_names_the_file_and_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_module, "READ_BYTES", 2000)
    author = Author(6)
    data = bytearray(author.write(60))
    position, header = list(walk_headers(data))[-3]
    data[position + header.size_bytes - 1] ^= 1
    path = _segment(tmp_path, bytes(data))
    with pytest.raises(DamagedSegmentError) as caught:
        _of_segment(path)
    assert (caught.value.path, caught.value.position) == (path, position)
    assert caught.value.reason == "the checksum does not match"


def test_a_segment_that_is_cut_short_is_damaged(tmp_path: Path) -> None:
    data = bytes(hostile_batches.batch(count=50))
    with pytest.raises(DamagedSegmentError, match="cut short"):
        _of_segment(_segment(tmp_path, data[:-1]))


def test_batches_of_another_segment_are_damage(tmp_path: Path) -> None:
    data = bytes(build_batch([Record(5, 0, b"k", b"v")]))
    with pytest.raises(DamagedSegmentError, match="offsets"):
        _of_segment(_segment(tmp_path, data, base=7))
    with pytest.raises(DamagedSegmentError, match="offsets"):
        _of_segment(_segment(tmp_path, data), next_base_offset=5)


def test_a_segment_that_is_not_there_is_no_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _of_segment(str(tmp_path / file_name(0, LOG)))
    with pytest.raises(ValueError, match="is not the file name of a segment"):
        _of_segment(str(tmp_path / "orders.log"))
    assert _of_segment(_segment(tmp_path, b"")) == []


def _indexed(folder: Path, batches: int) -> tuple[str, bytes, OffsetIndex]:
    data = bytearray()
    index = OffsetIndex()
    raw = b""
    for n in range(batches):
        records = [Record(10 * n + i, START_MS, b"k%d" % i, b"v") for i in range(10)]
        if data:
            raw += index.append(10 * n + 9, len(data))
        data += build_batch(records)
    (folder / file_name(0, INDEX)).write_bytes(raw)
    return _segment(folder, bytes(data)), bytes(data), index


def test_a_range_of_offsets_begins_where_the_index_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data, _ = _indexed(tmp_path, 200)
    opened: list[int] = []
    open_source = decode_module.SourceReader.open

    def spied(self: Any, source: Any, position: int = 0) -> None:
        opened.append(position)
        open_source(self, source, position)

    monkeypatch.setattr(decode_module.SourceReader, "open", spied)
    results = _of_segment(path, first_offset=1995, end_offset=1998)
    assert [row["offset"] for row in results] == [1995, 1996, 1997]
    assert opened[0] > len(data) * 0.98


def test_an_index_that_lies_costs_time_and_no_rows(tmp_path: Path) -> None:
    path, data, _ = _indexed(tmp_path, 50)
    index_path = tmp_path / file_name(0, INDEX)
    good = index_path.read_bytes()
    expected = model(data, first=205)
    lies = [
        b"",
        good[:-3],
        struct.pack(">ii", 3, len(data) - 70),  # no batch begins there
        struct.pack(">ii", 3, good[-1] | good[-2] << 8 | good[-3] << 16),  # one after what is asked
        struct.pack(">ii", 3, 1 << 30),
    ]
    for lie in lies:
        index_path.write_bytes(lie)
        assert _of_segment(path, first_offset=205) == expected
    index_path.unlink()
    assert _of_segment(path, first_offset=205) == expected


def test_headers_are_not_looked_at_where_they_are_not_asked_for() -> None:
    data = bytes(build_batch([Record(0, 0, b"k", b"v", ((b"\xff", b"1"),))]))
    assert decoded(data)[0]["headers"] == [{"key": "�", "value": b"1"}]
    assert decoded(data, columns=COLUMNS)[0]["key"] == b"k"


def test_a_binary_column_grows_with_what_is_put_into_it() -> None:
    column = columns_module.BinaryColumn(2)
    text = with_slack(b"0123456789" * 20_000)
    starts = np.arange(1000, dtype=np.int64)
    sizes = np.full(1000, 150, dtype=np.int64)
    sizes[::7] = -1
    column.append(text, starts, sizes, 0, 1000)
    array = column.finish(pa.binary())
    array.validate(full=True)
    assert array.null_count == 143
    assert array[999].as_py() == bytes(text[999 : 999 + 150])
