"""Decode Kafka record batches into Arrow record batches.

Rules
- Without the list of aborted transactions, rows are those of a `read_uncommitted` consumer. Control
  batches have no rows.
- Rows are in offset order, in Arrow batches of up to `batch_rows` rows and BATCH_BYTES of selected
  columns; a larger record is a batch of its own.
- A damaged batch is an error with its position. Earlier rows may already have been returned.
- Memory: a table of 72 bytes per row, the columns, and one decompressed batch.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import Bytes, Ints
from cleaner.engine.kernels.layout import HEADER_BYTES, LARGEST_BASE_OFFSET, REASONS, Code
from cleaner.engine.kernels.passes.walk import check_records
from cleaner.engine.source import SourceReader
from cleaner.job import SourceSegment
from pipeline.records.columns import (
    ALL_COLUMNS,
    COLUMNS,
    TIMESTAMP_MS_MAX,
    BinaryColumn,
    HeadersColumn,
    arrow_schema,
)
from pipeline.records.fingerprints import fingerprints
from pipeline.records.kernels import (
    COMPRESSED,
    COUNT,
    DONE,
    END,
    FIRST,
    MORE,
    OVERSIZE,
    PREVIOUS,
    ROWS_FULL,
    STATE_SIZE,
    Ints32,
    fill_rows,
    keep_rows,
    new_rows,
    offset_after,
    rows_end_within,
    scan_batches,
)
from pipeline.records.partitioner import partition_of
from storage.env import Env
from storage.errors import (
    CorruptBatchError,
    DamagedSegmentError,
    DecompressionLimitError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)
from storage.format import filenames
from storage.format.batch import (
    UNPACKED_BYTES_MAX,
    BatchHeader,
    Record,
    build_batch,
    read_header,
    unpack_header,
    walk_headers,
)
from storage.format.compression import decompress
from storage.format.index import RELATIVE_OFFSET_MAX, CorruptIndexError, OffsetIndex
from storage.format.txn_index import TxnIndexEntry

BATCH_ROWS: Final = 16384  # best of 4k to 256k when rows go to Spark
BATCH_BYTES: Final = 32 << 20
READ_BYTES: Final = 4 << 20
LARGEST_OFFSET: Final = (1 << 63) - 1

Keep: TypeAlias = Callable[[Ints], npt.NDArray[np.bool_]]
"""Returns for each of these ascending offsets whether to keep its row."""


class _BadRowError(Exception):
    """A record that cannot become a row; the caller adds the position of its batch."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows and columns to decode from the batches of one partition."""

    topic: str
    partition: int
    columns: Sequence[str] = COLUMNS
    first_offset: int = 0
    end_offset: int = LARGEST_OFFSET
    keep: Keep | None = None  # None: every row of the range
    aborted: Sequence[TxnIndexEntry] = ()  # transactions whose records are left out
    batch_rows: int = BATCH_ROWS
    unpacked_bytes_max: int = UNPACKED_BYTES_MAX


class BatchDecoder:
    """Decodes batches into rows. Its position carries over from one call to the next."""

    def __init__(self, selection: Selection) -> None:
        """Raises ValueError for an unknown column."""
        columns, batch_rows = selection.columns, selection.batch_rows
        assert batch_rows > 0
        self.schema = arrow_schema(columns)
        self._columns_selected = frozenset(columns)
        topic = pa.array([selection.topic] * batch_rows, pa.string())
        self._topic = topic if "topic" in columns else None
        self._partition = selection.partition
        self._keep = selection.keep
        self._batch_rows = batch_rows
        self._unpacked_bytes_max = selection.unpacked_bytes_max
        self._rows = new_rows(batch_rows)
        self._aborted: Ints = np.zeros(0, dtype=np.int64)
        self.set_aborted(selection.aborted)
        self._state: Ints = np.zeros(STATE_SIZE, dtype=np.int64)
        self._state[FIRST] = selection.first_offset
        self._state[END] = selection.end_offset
        self._state[fields.SOURCE_END] = LARGEST_OFFSET
        self._columns = {name: BinaryColumn(batch_rows) for name in ("key", "value")}
        self._headers = HeadersColumn(batch_rows)
        self._begin_batch()
        self.is_done = False  # all further offsets are past the range

    def set_aborted(self, aborted: Sequence[TxnIndexEntry]) -> None:
        """Leave out the records of these transactions from here on."""
        rows = sorted(
            (entry.producer_id, entry.first_offset, entry.last_offset) for entry in aborted
        )
        self._aborted = np.array(rows, dtype=np.int64).reshape(-1)

    def expect(self, next_offset: int, end_offset: int = LARGEST_OFFSET) -> None:
        """Treat following batches outside [next_offset, end_offset) as damage."""
        self._state[fields.NEXT_OFFSET] = next_offset
        self._state[fields.SOURCE_END] = end_offset

    def go_to(self, first_offset: int) -> None:
        """Skip rows before `first_offset`; the next batch may start before it."""
        self._state[FIRST] = max(int(self._state[FIRST]), first_offset)
        self.expect(0)

    @property
    def next_offset(self) -> int:
        """Return the offset after the last decoded batch."""
        return int(self._state[fields.NEXT_OFFSET])

    def _begin_batch(self) -> None:
        self._count = 0
        self._offsets: Ints = np.empty(self._batch_rows, dtype=np.int64)
        self._times_ms: Ints = np.empty(self._batch_rows, dtype=np.int64)
        self._kinds = np.empty(self._batch_rows, dtype=np.int32)

    def decode(self, buf: Bytes, at: int, end: int) -> Generator[pa.RecordBatch, None, int]:
        """Yield rows of the whole batches in `buf[at:end]`; return the position after them.

        SLACK_BYTES after `end` must be readable; `buf` may be reused afterwards. Rows that do not
        fill an Arrow batch wait for the next call or `finish`. Raises CorruptBatchError with the
        position in `buf`, UnsupportedMagicError.
        """
        while not self.is_done:
            begin = at
            code, at = scan_batches(buf, at, end, self._rows, self._aborted, self._state)
            try:
                yield from self._take(buf)
            except _BadRowError as error:
                place = _batch_position(buf, begin, error.offset)
                raise CorruptBatchError(error.reason, place) from error
            if code == MORE:
                break
            if code == DONE:
                self.is_done = True
            elif code in (COMPRESSED, OVERSIZE):
                at = yield from self._walk_alone(buf, at)
            elif code != ROWS_FULL:
                raise _damaged(buf, code, at)
        return at

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows."""
        if self._count:
            yield self._batch()

    def _walk_alone(self, buf: Bytes, at: int) -> Generator[pa.RecordBatch, None, int]:
        """Decode a batch that is compressed or larger than the table; its CRC is valid."""
        header = unpack_header(buf.data, at)
        records, begin, end = self._unpacked(buf, at, header)
        count, last_delta = header.record_count, header.last_offset_delta
        if count > self._batch_rows and not check_records(records, begin, end, count, last_delta):
            raise CorruptBatchError(REASONS[Code.BAD_RECORD], at)
        self._state[PREVIOUS] = -1
        index, code = 0, ROWS_FULL
        while code == ROWS_FULL:
            code, begin, index = fill_rows(
                buf, at, records, begin, end, index, self._rows, self._state
            )
            if code not in (DONE, ROWS_FULL):
                raise CorruptBatchError(REASONS[Code(code)], at)
            try:
                yield from self._take(records)
            except _BadRowError as error:
                raise CorruptBatchError(error.reason, at) from error
        self._state[fields.NEXT_OFFSET] = header.next_offset
        return at + header.size_bytes

    def _unpacked(self, buf: Bytes, at: int, header: BatchHeader) -> tuple[Bytes, int, int]:
        """Return (buffer, start and end position of the records)."""
        if header.codec == 0:
            return buf, at + HEADER_BYTES, at + header.size_bytes
        packed = buf.data[at + HEADER_BYTES : at + header.size_bytes]
        try:
            data = decompress(header.codec, packed, self._unpacked_bytes_max)
        except CorruptBatchError as error:
            raise CorruptBatchError(error.reason, at) from error
        except (DecompressionLimitError, UnsupportedCompressionError) as error:
            raise CorruptBatchError(str(error), at) from error
        return with_slack(data), 0, len(data)

    def _take(self, buf: Bytes) -> Iterator[pa.RecordBatch]:
        """Move the rows of the table into the columns."""
        rows = self._rows
        count = int(self._state[COUNT])
        self._state[COUNT] = 0
        if self._keep is not None and count:
            keep = np.ascontiguousarray(self._keep(rows.offsets[:count]), dtype=np.bool_)
            assert keep.shape == (count,)
            count = keep_rows(rows, keep, count)
        first = 0
        while first < count:
            end = self._fitting(first, min(count, first + self._batch_rows - self._count))
            self._append(buf, first, end)
            if self._count == self._batch_rows or end < count:
                yield self._batch()
            first = end

    def _fitting(self, first: int, end: int) -> int:
        """Return the end of the rows from `first` on that fit the current batch; at least one."""
        for name, sizes in (("key", self._rows.key_bytes), ("value", self._rows.value_bytes)):
            if name in self._columns_selected:
                room_bytes = BATCH_BYTES - self._columns[name].size_bytes
                end = rows_end_within(first, end, sizes, room_bytes)
        if "headers" in self._columns_selected:
            header_bytes = self._rows.record_end[:end] - self._rows.headers_at[:end]
            end = rows_end_within(first, end, header_bytes, BATCH_BYTES - self._headers.size_bytes)
        if self._count == 0:
            return max(end, first + 1)
        return end

    def _append(self, buf: Bytes, first: int, end: int) -> None:
        rows = self._rows
        next_count = self._count + end - first
        new = slice(self._count, next_count)
        self._offsets[new] = rows.offsets[first:end]
        self._kinds[new] = rows.kinds[first:end]
        if not self._columns_selected.isdisjoint(("timestamp", "timestampMs")):
            self._times_ms[new] = rows.times_ms[first:end]
        if "key" in self._columns_selected:
            self._columns["key"].append(buf, rows.key_at, rows.key_bytes, first, end)
        if "value" in self._columns_selected:
            self._columns["value"].append(buf, rows.value_at, rows.value_bytes, first, end)
        if "headers" in self._columns_selected:
            bad = self._headers.append(buf, rows, first, end)
            if bad >= 0:
                offset = int(rows.offsets[bad])
                raise _BadRowError(
                    offset, f"headers that do not match the size of the record at offset {offset}"
                )
        self._count = next_count

    def _batch(self) -> pa.RecordBatch:
        arrays = [self._array(field) for field in self.schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        self._begin_batch()
        return batch

    def _array(self, field: pa.Field) -> pa.Array:
        count = self._count
        match field.name:
            case "key" | "value":
                return self._columns[field.name].finish(field.type)
            case "topic":
                assert self._topic is not None
                return self._topic.slice(0, count)
            case "partition":
                return _of_numbers(field, np.full(count, self._partition, dtype=np.int32))
            case "offset":
                return _of_numbers(field, self._offsets[:count])
            case "timestamp":
                # One record with an impossible time must not keep all others from the reader.
                times_ms = np.clip(self._times_ms[:count], -TIMESTAMP_MS_MAX, TIMESTAMP_MS_MAX)
                return _of_numbers(field, times_ms * 1000)
            case "timestampMs":
                return _of_numbers(field, self._times_ms[:count])
            case "timestampType":
                return _of_numbers(field, self._kinds[:count])
            case _:
                return self._headers.finish()


def _of_numbers(field: pa.Field, numbers: Ints | Ints32) -> pa.Array:
    return pa.Array.from_buffers(field.type, len(numbers), [None, pa.py_buffer(numbers)], 0)


def with_slack(data: bytes | bytearray | memoryview) -> Bytes:
    """Return a copy followed by SLACK_BYTES, as the kernels need it."""
    buffer: Bytes = np.empty(len(data) + SLACK_BYTES, dtype=np.uint8)
    buffer[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    buffer[len(data) :] = 0
    return buffer


def _batch_position(buf: Bytes, begin: int, offset: int) -> int:
    """Return the position of the batch with `offset`, from the valid batches after `begin`."""
    for position, header in walk_headers(buf.data, begin):
        if header.last_offset >= offset:
            return position
    raise AssertionError(f"offset {offset} is in none of the batches it was read from")


def _damaged(buf: Bytes, code: int, position: int) -> CorruptBatchError:
    if code == Code.OLD_FORMAT:
        return UnsupportedMagicError(int(buf[position + 16]), position)
    return CorruptBatchError(REASONS[Code(code)], position)


def decode_batches(
    data: bytes | bytearray | memoryview, selection: Selection
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the record batches in `data`; stop at a truncated batch, as in Fetch.

    Raises CorruptBatchError with the position in `data`.
    """
    decoder = BatchDecoder(selection)
    yield from decoder.decode(with_slack(data), 0, len(data))
    yield from decoder.finish()


def decode_segment(
    env: Env,
    path: str,
    selection: Selection,
    *,
    size_bytes: int | None = None,
    next_base_offset: int = LARGEST_BASE_OFFSET,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the first `size_bytes` of a closed segment (None: of all of it).

    The file name gives the base offset. An offset index next to the file is used to start near
    `first_offset`. Raises DamagedSegmentError (path, position in the file, reason),
    FileNotFoundError, OSError, and ValueError for an invalid file name or an unknown column.
    """
    decoder = BatchDecoder(selection)
    folder, _, name = path.rpartition("/")
    base_offset = _base_offset(name)
    source = SourceSegment(
        base_offset=base_offset,
        next_base_offset=next_base_offset,
        size_bytes=env.size(path) if size_bytes is None else size_bytes,
        last_modified_ms=0,
        largest_timestamp_ms=0,
    )
    decoder.expect(base_offset, next_base_offset)
    reader = SourceReader(env, folder, READ_BYTES)
    try:
        begin = _start_position(env, path, source, selection.first_offset)
        reader.open(source, begin)
        if reader.is_gone:
            raise FileNotFoundError(path)
        while not reader.exhausted and not decoder.is_done:
            reader.refill(_free)
            try:
                reader.at = yield from decoder.decode(reader.buffer, reader.at, reader.end)
            except CorruptBatchError as error:
                position = reader.position + error.position - reader.at
                raise DamagedSegmentError(path, position, error.reason) from error
        yield from decoder.finish()
    finally:
        reader.close()


def _free(count: int) -> None:
    """Do not throttle reads."""


def _base_offset(name: str) -> int:
    parsed = filenames.parse_file_name(name)
    if parsed is None or name != filenames.file_name(parsed.base_offset, filenames.LOG):
        raise ValueError(f"{name!r} is not the file name of a segment")
    return parsed.base_offset


def _start_position(env: Env, path: str, source: SourceSegment, first_offset: int) -> int:
    """Return the position of a batch that starts at or before `first_offset`.

    The offset index is a hint: the result is 0 if it is missing, damaged, or contradicts the log.
    """
    relative = first_offset - source.base_offset
    if relative <= 0:
        return 0
    index_path = path.removesuffix(filenames.LOG) + filenames.INDEX
    try:
        raw = env.read_file(index_path)
        index = OffsetIndex.from_bytes(raw, index_path, source.size_bytes)
    except (FileNotFoundError, CorruptIndexError):
        return 0
    position = index.lookup(min(relative, RELATIVE_OFFSET_MAX))[1]
    file = env.open(path)
    try:
        header = read_header(file.pread(HEADER_BYTES, position))
    except CorruptBatchError:
        return 0
    finally:
        file.close()
    return position if source.base_offset <= header.base_offset <= first_offset else 0


def warm_up() -> None:
    """Compile the kernels of this package, or load them from the cache (seconds when cold)."""
    batch = bytes(build_batch([Record(n, 0, b"k", b"v", (("h", b"1"),)) for n in range(3)]))
    for rows in (2, 16):  # a batch larger than the table runs other kernels
        selection = Selection(
            topic="t",
            partition=0,
            columns=ALL_COLUMNS,
            keep=lambda offsets: offsets >= 0,
            batch_rows=rows,
        )
        result = decode_batches(batch, selection)
        assert sum(part.num_rows for part in result) == 3
    offset_after(with_slack(batch), len(batch))
    fingerprints(pa.array([b"k"], pa.binary()), bytes(16))
    partition_of(b"k", 1)
