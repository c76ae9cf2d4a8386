"""Arrow columns of records, with the schema of Spark's Kafka source.

Rules
- As in that source, every field is nullable; `binary` and `string` have 32-bit offsets.
- `timestamp` is the nearest time that Spark has. What ranks records by time reads `timestampMs`.
- The memory of a finished Arrow array is never written again: each batch gets new memory.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import Bytes, Ints
from pipeline.records.kernels import (
    Ints32,
    Rows,
    gather,
    locate_headers,
    measure_headers,
)

HEADERS_TYPE: Final = pa.list_(
    pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
)
FIELDS: Final = (
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("topic", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp", pa.timestamp("us", tz="UTC")),
    pa.field("timestampType", pa.int32()),
    pa.field("headers", HEADERS_TYPE),
    pa.field("timestampMs", pa.int64()),  # as in the record; only if it is named
)
NAMES: Final = tuple(field.name for field in FIELDS)
ALL_COLUMNS: Final = NAMES[:-1]  # those of Spark's Kafka source with includeHeaders
COLUMNS: Final = ALL_COLUMNS[:-1]  # without it

TIMESTAMP_MS_MAX: Final = ((1 << 63) - 1) // 1000  # the limit of microseconds in an int64
_FIRST_BYTES: Final = 1 << 16


def arrow_schema(columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """Return the schema of these columns, in this order. Raises ValueError for an unknown one."""
    existing = {field.name: field for field in FIELDS}
    for name in columns:
        if name not in existing:
            raise ValueError(f"unknown column {name!r}; the columns are {', '.join(NAMES)}")
    if len(set(columns)) != len(columns):
        raise ValueError("a column is named twice")
    return pa.schema([existing[name] for name in columns])


class BinaryColumn:
    """A growing column of nullable byte strings."""

    def __init__(self, rows: int) -> None:
        self._rows_hint = rows
        self._bytes_hint = _FIRST_BYTES
        self._begin()

    def _begin(self) -> None:
        rows = self._rows_hint
        self.count = 0
        self.nulls = 0
        self._data: Bytes = np.empty(self._bytes_hint + SLACK_BYTES, dtype=np.uint8)
        self._ends: Ints32 = np.zeros(rows + 1, dtype=np.int32)
        self._validity: Bytes = np.zeros((rows + 7) // 8, dtype=np.uint8)

    @property
    def size_bytes(self) -> int:
        """Return the size of all values so far."""
        return int(self._ends[self.count])

    def append(self, buf: Bytes, starts: Ints, sizes: Ints, first: int, end: int) -> None:
        """Append the bytes of rows [first, end) from `buf`; a size of -1 means null."""
        self._reserve(end - first, int(np.maximum(sizes[first:end], 0).sum()))
        self.nulls += gather(
            buf, starts, sizes, first, end, self._data, self._ends, self._validity, self.count
        )
        self.count += end - first

    def _reserve(self, rows: int, size_bytes: int) -> None:
        needed = self.size_bytes + size_bytes
        if needed > len(self._data) - SLACK_BYTES:
            larger = np.empty(max(needed, 2 * len(self._data)) + SLACK_BYTES, dtype=np.uint8)
            larger[: self.size_bytes] = self._data[: self.size_bytes]
            self._data = larger
        if self.count + rows >= len(self._ends):
            room = max(self.count + rows, 2 * len(self._ends))
            self._ends = np.concatenate((self._ends, np.zeros(room, dtype=np.int32)))
            self._validity = np.concatenate((self._validity, np.zeros(room, dtype=np.uint8)))

    def finish(self, kind: pa.DataType) -> pa.Array:
        """Return the values as an array of `kind`; the column is empty afterwards."""
        size_bytes = self.size_bytes
        validity = pa.py_buffer(self._validity) if self.nulls else None
        buffers = [
            validity,
            pa.py_buffer(self._ends[: self.count + 1]),
            pa.py_buffer(self._data[:size_bytes]),
        ]
        array = pa.Array.from_buffers(kind, self.count, buffers, self.nulls)
        # A little more than last time: batches of a topic have similar sizes.
        self._bytes_hint = max(_FIRST_BYTES, size_bytes + size_bytes // 8)
        self._begin()
        return array


class HeadersColumn:
    """A growing column of headers. A record without any has null, as in Spark's source."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._keys = BinaryColumn(rows)
        self._values = BinaryColumn(rows)
        self._counts: list[Ints] = []
        self.size_bytes = 0

    def append(self, buf: Bytes, rows: Rows, first: int, end: int) -> int:
        """Append the headers of rows [first, end). Return -1, or a row whose headers do not fit."""
        counts: Ints = np.zeros(end, dtype=np.int64)
        bad = measure_headers(buf, rows, first, end, counts)
        if bad >= 0:
            return int(bad)
        counts = counts[first:]
        entries = 2 * int(counts.sum())
        if entries:
            starts: Ints = np.empty(entries, dtype=np.int64)
            sizes: Ints = np.empty(entries, dtype=np.int64)
            locate_headers(buf, rows, first, end, starts, sizes)
            half = entries // 2
            self._keys.append(buf, starts[0::2].copy(), sizes[0::2].copy(), 0, half)
            self._values.append(buf, starts[1::2].copy(), sizes[1::2].copy(), 0, half)
        self._counts.append(counts)
        self.size_bytes = self._keys.size_bytes + self._values.size_bytes + 8 * self._keys.count
        return -1

    def finish(self) -> pa.Array:
        """Return the appended headers as an array; the column is empty afterwards."""
        counts = np.concatenate(self._counts) if self._counts else np.zeros(0, dtype=np.int64)
        self._counts = []
        self.size_bytes = 0
        ends = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=ends[1:])
        pairs = pa.StructArray.from_arrays(
            [_as_text(self._keys.finish(pa.binary())), self._values.finish(pa.binary())],
            fields=list(HEADERS_TYPE.value_type),
        )
        validity = np.packbits(counts > 0, bitorder="little")
        nulls = int((counts == 0).sum())
        buffers = [pa.py_buffer(validity) if nulls else None, pa.py_buffer(ends)]
        return pa.Array.from_buffers(HEADERS_TYPE, len(counts), buffers, nulls, children=[pairs])


def _as_text(keys: pa.Array) -> pa.Array:
    """Return header names as strings; replace invalid UTF-8, as Java does."""
    try:
        return keys.cast(pa.string())
    except pa.ArrowInvalid:
        texts = [key.decode(errors="replace") for key in keys.to_pylist()]
        return pa.array(texts, pa.string())
