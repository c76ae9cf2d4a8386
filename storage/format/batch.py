"""Record batches of format v2 (magic 2): reading, checking, stamping, building.

`read_header` rejects impossible values, so sizes and offsets computed from a header are safe to
use; it does not check the bytes after the header. The CRC covers byte 21 to the end: base offset
and leader epoch can be written in place, every other change needs a new CRC. This module decodes
records in plain Python, for tools, groups and rebuilt batches. The hot paths use compiled kernels.

Layout: reference "Record Batch" of the Kafka protocol guide; delete horizon: KIP-534.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from crc32c import crc32c

from storage.errors import CorruptBatchError, UnsupportedMagicError
from storage.format.compression import compress as compress_records
from storage.format.compression import decompress

HEADER_BYTES: Final = 61
LENGTH_END: Final = 12  # batchLength counts the bytes after itself
CRC_POSITION: Final = 17
CRC_COVERS_FROM: Final = 21
MAGIC_POSITION: Final = 16
MAGIC: Final = 2
BATCH_LENGTH_MIN: Final = HEADER_BYTES - LENGTH_END
RECORD_BYTES_MIN: Final = 7  # seven fields of one byte each

CODEC_MASK: Final = 0x07
LOG_APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20
DELETE_HORIZON: Final = 0x40

NO_TIMESTAMP: Final = -1
NO_PRODUCER_ID: Final = -1
NO_SEQUENCE: Final = -1

LARGEST_INT32: Final = (1 << 31) - 1
LARGEST_INT64: Final = (1 << 63) - 1

# The default of varve.decompressed.batch.bytes, the maximum decompressed size of a batch.
UNPACKED_BYTES_MAX: Final = 64 << 20

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_OFFSET: Final = struct.Struct(">q")
_INT32: Final = struct.Struct(">i")
_CRC: Final = struct.Struct(">I")
_ATTRIBUTES_POSITION: Final = 21
_MAX_TIMESTAMP_POSITION: Final = 35
_ATTRIBUTES: Final = struct.Struct(">h")
_CONTROL_KEY: Final = struct.Struct(">hh")  # version, type
_MARKER_VALUE: Final = struct.Struct(">hi")  # version, coordinator epoch
# The minimum of bytes after the length field of a message of the formats v0 and v1.
_OLD_LENGTH_MIN: Final = (14, 22)

Buffer: TypeAlias = bytes | bytearray | memoryview
WritableBuffer: TypeAlias = bytearray | memoryview


class BatchHeader(NamedTuple):
    """The 61 bytes in front of a batch, in the order of the format."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        """Return the whole batch, header included."""
        return self.batch_length + LENGTH_END

    @property
    def last_offset(self) -> int:
        """Return the last offset of this batch, even if compaction removed its record."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Return the first offset after this batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        """Return the sequence of the last record, -1 without; 0 follows 2147483647."""
        if self.base_sequence < 0:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & LARGEST_INT32

    @property
    def codec(self) -> int:
        """Return the compression id, 0 to 7; only 0 to 4 exist."""
        return self.attributes & CODEC_MASK

    @property
    def is_transactional(self) -> bool:
        """Return whether the batch belongs to a transaction (its markers do, too)."""
        return self.attributes & TRANSACTIONAL != 0

    @property
    def is_control(self) -> bool:
        """Return whether the batch holds control records."""
        return self.attributes & CONTROL != 0

    @property
    def has_delete_horizon(self) -> bool:
        """Return whether baseTimestamp is the delete horizon (KIP-534) and not a record's time."""
        return self.attributes & DELETE_HORIZON != 0

    @property
    def is_log_append_time(self) -> bool:
        """Return whether every record has maxTimestamp as its time."""
        return self.attributes & LOG_APPEND_TIME != 0


class ControlType(IntEnum):
    """The types of control records. The cleaner keeps records of unknown types."""

    ABORT = 0
    COMMIT = 1
    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6


class Record(NamedTuple):
    """One record. A null value is a tombstone. A header key that is not UTF-8 stays bytes."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str | bytes, bytes | None], ...] = ()


class RecordView(NamedTuple):
    """One record, of which nothing is copied. `headers` is their number and what follows it."""

    offset: int
    timestamp: int
    key: memoryview | None
    value: memoryview | None
    headers: memoryview


def unpack_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Return the header without any check; the caller guarantees 61 bytes."""
    return BatchHeader._make(_HEADER.unpack_from(buffer, position))


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Read and check a header; the buffer need not contain the bytes after it.

    Raises UnsupportedMagicError for formats 0 and 1, CorruptBatchError for fewer than 61 bytes or
    an impossible value.
    """
    if len(buffer) - position < HEADER_BYTES:
        raise CorruptBatchError("the header is cut short", position)
    header = BatchHeader._make(_HEADER.unpack_from(buffer, position))
    base_offset, batch_length, _, magic, _, _, last_delta, _, _, _, _, _, count = header
    if (
        magic != MAGIC
        or batch_length < BATCH_LENGTH_MIN
        or not 0 <= count <= last_delta + 1
        or last_delta < 0
        or not 0 <= base_offset <= LARGEST_INT64 - LARGEST_INT32
    ):
        raise _impossible(header, position)
    return header


def _impossible(header: BatchHeader, position: int) -> CorruptBatchError:
    if _is_old_format(header.magic, header.batch_length):
        return UnsupportedMagicError(header.magic, position)
    if header.magic != MAGIC:
        return CorruptBatchError(f"magic {header.magic}", position)
    if header.batch_length < BATCH_LENGTH_MIN:
        return CorruptBatchError(f"batch length {header.batch_length}", position)
    if header.last_offset_delta < 0:
        return CorruptBatchError(f"last offset delta {header.last_offset_delta}", position)
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        return CorruptBatchError(f"record count {header.record_count}", position)
    return CorruptBatchError(f"base offset {header.base_offset}", position)


def _is_old_format(magic: int, length: int) -> bool:
    # An impossible length (most often zeros) is damage, not an old format.
    return magic in (0, 1) and length >= _OLD_LENGTH_MIN[magic]


def crc_of(buffer: Buffer, position: int, size_bytes: int) -> int:
    """Return the CRC-32C of the batch of `size_bytes` at `position`, over bytes 21 to its end."""
    with memoryview(buffer) as view:
        crc: int = crc32c(view[position + CRC_COVERS_FROM : position + size_bytes])
        return crc


def verify_crc(buffer: Buffer, position: int, header: BatchHeader) -> bool:
    """Return whether the buffer has the whole batch and its CRC matches its header."""
    size_bytes = header.batch_length + LENGTH_END
    if len(buffer) - position < size_bytes:
        return False
    return crc_of(buffer, position, size_bytes) == header.crc


def walk_headers(
    buffer: Buffer, position: int = 0, end: int | None = None
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header) of the whole batches in `[position, end)`; stop at a partial one.

    Raises CorruptBatchError at bytes that are not a batch, UnsupportedMagicError at an intact
    message of format 0 or 1.
    """
    stop = len(buffer) if end is None else end
    assert stop <= len(buffer)
    while stop - position > MAGIC_POSITION:
        if stop - position < HEADER_BYTES or buffer[position + MAGIC_POSITION] != MAGIC:
            if _skip_short(buffer, position, stop):
                return
            raise _impossible_short(buffer, position)
        header = read_header(buffer, position)
        next_position = position + header.batch_length + LENGTH_END
        if next_position > stop:
            return
        yield position, header
        position = next_position


def _skip_short(buffer: Buffer, position: int, stop: int) -> bool:
    """Return whether the remaining bytes can be the beginning of a longer batch."""
    length: int = _INT32.unpack_from(buffer, position + 8)[0]
    magic = buffer[position + MAGIC_POSITION]
    plausible = (magic == MAGIC and length >= BATCH_LENGTH_MIN) or _is_old_format(magic, length)
    return plausible and position + LENGTH_END + length > stop


def _impossible_short(buffer: Buffer, position: int) -> CorruptBatchError:
    """Return the error for bytes that are not a whole batch: an old message, or damage."""
    length: int = _INT32.unpack_from(buffer, position + 8)[0]
    magic = buffer[position + MAGIC_POSITION]
    if _is_old_format(magic, length):
        crc: int = _CRC.unpack_from(buffer, position + 12)[0]
        with memoryview(buffer) as view:
            covered = view[position + MAGIC_POSITION : position + LENGTH_END + length]
            if zlib.crc32(covered) == crc:
                return UnsupportedMagicError(magic, position)
    return CorruptBatchError(f"no batch: magic {magic}, length {length}", position)


def stamp(buffer: WritableBuffer, position: int, base_offset: int, leader_epoch: int) -> None:
    """Write the base offset and the leader epoch in place; the CRC does not cover them."""
    _OFFSET.pack_into(buffer, position, base_offset)
    _INT32.pack_into(buffer, position + LENGTH_END, leader_epoch)


def stamp_log_append_time(buffer: WritableBuffer, now_ms: int) -> None:
    """Set the time of every record of the batch at the beginning, and compute its CRC again."""
    header = read_header(buffer)
    _ATTRIBUTES.pack_into(buffer, _ATTRIBUTES_POSITION, header.attributes | LOG_APPEND_TIME)
    _OFFSET.pack_into(buffer, _MAX_TIMESTAMP_POSITION, now_ms)
    _CRC.pack_into(buffer, CRC_POSITION, crc_of(buffer, 0, header.size_bytes))


def correct_max_timestamp(
    buffer: WritableBuffer, header: BatchHeader, max_timestamp: int
) -> BatchHeader:
    """Write the largest timestamp of the records, and a new CRC, into the batch at the beginning.

    Return the corrected header. Costs nothing if the header has this timestamp.
    """
    if header.max_timestamp == max_timestamp:
        return header
    _OFFSET.pack_into(buffer, _MAX_TIMESTAMP_POSITION, max_timestamp)
    crc = crc_of(buffer, 0, header.size_bytes)
    _CRC.pack_into(buffer, CRC_POSITION, crc)
    return header._replace(max_timestamp=max_timestamp, crc=crc)


def read_varint(data: Buffer, position: int, end: int) -> tuple[int, int]:
    """Return a zigzag varint of 32 bits: (value, next position). Raises CorruptBatchError."""
    return _zigzag(data, position, end, 32)


def read_varlong(data: Buffer, position: int, end: int) -> tuple[int, int]:
    """Return a zigzag varint of 64 bits: (value, next position). Raises CorruptBatchError."""
    return _zigzag(data, position, end, 64)


def _zigzag(data: Buffer, position: int, end: int, bits: int) -> tuple[int, int]:
    raw = 0
    shift = 0
    while position < end and shift < bits:
        byte = data[position]
        position += 1
        raw |= (byte & 0x7F) << shift
        if byte < 0x80:
            if raw >> bits:
                break
            return (raw >> 1) ^ -(raw & 1), position
        shift += 7
    raise CorruptBatchError("a number is cut short or too long")


def write_varint(out: bytearray, value: int) -> None:
    """Append `value` as a zigzag varint of up to 64 bits."""
    assert -LARGEST_INT64 - 1 <= value <= LARGEST_INT64
    raw = value << 1 if value >= 0 else (-value << 1) - 1
    while raw > 0x7F:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)


def unpack_records(
    buffer: Buffer,
    header: BatchHeader,
    position: int = 0,
    limit_bytes: int = UNPACKED_BYTES_MAX,
) -> Buffer:
    """Return the record bytes of a batch, decompressed.

    Raises CorruptBatchError, DecompressionLimitError and UnsupportedCompressionError.
    """
    end = position + header.size_bytes
    if header.batch_length < BATCH_LENGTH_MIN or end > len(buffer):
        raise CorruptBatchError("the batch is cut short", position)
    records = memoryview(buffer)[position + HEADER_BYTES : end]
    # An emptied batch may name the codec of its former records and have no bytes.
    if header.codec == 0 or (header.record_count == 0 and not records):
        return records
    return decompress(header.codec, records, limit_bytes)


def decode_records(
    buffer: Buffer,
    header: BatchHeader,
    position: int = 0,
    limit_bytes: int = UNPACKED_BYTES_MAX,
) -> list[Record]:
    """Return the records of one batch, whose CRC the caller has verified.

    Offsets must increase and stay within the batch. `limit_bytes` is the maximum decompressed size.
    Raises CorruptBatchError, DecompressionLimitError and
    UnsupportedCompressionError.
    """
    return list(iterate_records(buffer, header, position, limit_bytes))


def iterate_records(
    buffer: Buffer,
    header: BatchHeader,
    position: int = 0,
    limit_bytes: int = UNPACKED_BYTES_MAX,
) -> Iterator[Record]:
    """Like `decode_records`, one by one: a small batch may contain millions of records."""
    for view in iterate_views(
        unpack_records(buffer, header, position, limit_bytes), header, position
    ):
        _, headers = read_headers(view.headers)
        yield Record(
            view.offset,
            view.timestamp,
            None if view.key is None else bytes(view.key),
            None if view.value is None else bytes(view.value),
            tuple(
                (_text_or_bytes(bytes(name)), None if value is None else bytes(value))
                for name, value in headers
            ),
        )


def iterate_views(records: Buffer, header: BatchHeader, position: int = 0) -> Iterator[RecordView]:
    """Return views of the records that `unpack_records` returned, one by one.

    Headers are not checked. Raises CorruptBatchError.
    """
    data = memoryview(records)
    at = 0
    last_delta = -1
    for _ in range(header.record_count):
        record, delta, at = _decode_record(data, at, header)
        if not last_delta < delta <= header.last_offset_delta:
            raise CorruptBatchError(f"offset delta {delta} after {last_delta}", position)
        last_delta = delta
        yield record
    if at != len(data):
        raise CorruptBatchError("bytes after the last record", position)


def _wrapped(timestamp: int) -> int:
    """Return a sum or difference of timestamps as 64 bits have it, like Java and the kernels.

    A delete horizon and the timestamp of a record may be farther apart than 64 bits can tell. The
    delta is then wrapped, and so is the sum, which is the timestamp again.
    """
    if -LARGEST_INT64 - 1 <= timestamp <= LARGEST_INT64:
        return timestamp
    return (timestamp + LARGEST_INT64 + 1) % (1 << 64) - LARGEST_INT64 - 1


def _decode_record(
    data: memoryview, position: int, header: BatchHeader
) -> tuple[RecordView, int, int]:
    length, at = read_varint(data, position, len(data))
    end = at + length
    if length < RECORD_BYTES_MIN - 1 or end > len(data):
        raise CorruptBatchError(f"record length {length}")
    time_delta, at = read_varlong(data, at + 1, end)  # the attributes byte has no meaning yet
    offset_delta, at = read_varint(data, at, end)
    key, at = _read_bytes(data, at, end)
    value, at = _read_bytes(data, at, end)
    timestamp = _wrapped(header.base_timestamp + time_delta)
    if header.is_log_append_time:
        timestamp = header.max_timestamp
    record = RecordView(header.base_offset + offset_delta, timestamp, key, value, data[at:end])
    return record, offset_delta, end


def _read_bytes(data: memoryview, position: int, end: int) -> tuple[memoryview | None, int]:
    length, at = read_varint(data, position, end)
    if length == -1:
        return None, at
    if length < 0 or length > end - at:
        raise CorruptBatchError(f"field length {length}")
    return data[at : at + length], at + length


def read_headers(
    data: memoryview, headers_max: int | None = None
) -> tuple[int, list[tuple[memoryview, memoryview | None]]]:
    """Return the number of headers of a RecordView, and the first ones as (name, value).

    Raises CorruptBatchError.
    """
    end = len(data)
    count, at = read_varint(data, 0, end)
    if count < 0 or count > end - at:
        raise CorruptBatchError(f"header count {count}")
    headers: list[tuple[memoryview, memoryview | None]] = []
    for _ in range(count if headers_max is None else min(count, headers_max)):
        key, at = _read_bytes(data, at, end)
        if key is None:
            raise CorruptBatchError("a header without a key")
        value, at = _read_bytes(data, at, end)
        headers.append((key, value))
    if len(headers) == count and at != end:
        raise CorruptBatchError("bytes after the headers of a record")
    return count, headers


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _write_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out.append(1)  # zigzag of -1
        return
    write_varint(out, len(value))
    out += value


def encode_record(record: Record, offset_delta: int, timestamp_delta: int) -> bytearray:
    """Return the bytes of one record in a batch, with its length in front."""
    body = bytearray(1)  # attributes
    write_varint(body, timestamp_delta)
    write_varint(body, offset_delta)
    _write_bytes(body, record.key)
    _write_bytes(body, record.value)
    write_varint(body, len(record.headers))
    for key, value in record.headers:
        _write_bytes(body, key.encode() if isinstance(key, str) else key)
        _write_bytes(body, value)
    out = bytearray()
    write_varint(out, len(body))
    return out + body


def build_batch(
    records: Sequence[Record],
    *,
    base_offset: int | None = None,
    codec: int = 0,
    level: int | None = None,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = NO_SEQUENCE,
    attributes: int = 0,
    partition_leader_epoch: int = 0,
    last_offset_delta: int | None = None,
    delete_horizon_ms: int | None = None,
    max_timestamp: int | None = None,
) -> bytearray:
    """Return a batch with its CRC. `attributes` adds flags to those of codec and horizon.

    Base offset and last offset delta come from the records by default; a batch without records
    needs both. With a delete horizon, timestamps are relative to it (KIP-534).
    """
    first = records[0] if records else None
    if base_offset is None:
        assert first is not None, "a batch without records needs a base offset"
        base_offset = first.offset
    if last_offset_delta is None:
        assert records, "a batch without records needs a last offset delta"
        last_offset_delta = records[-1].offset - base_offset
    base_timestamp = NO_TIMESTAMP if first is None else first.timestamp
    if delete_horizon_ms is not None:
        base_timestamp = delete_horizon_ms
        attributes |= DELETE_HORIZON
    if max_timestamp is None:
        max_timestamp = max((record.timestamp for record in records), default=NO_TIMESTAMP)
    data = bytearray()
    for record in records:
        time_delta = _wrapped(record.timestamp - base_timestamp)
        data += encode_record(record, record.offset - base_offset, time_delta)
    body: Buffer = data if codec == 0 or not records else compress_records(codec, data, level)
    header = BatchHeader(
        base_offset=base_offset,
        batch_length=BATCH_LENGTH_MIN + len(body),
        partition_leader_epoch=partition_leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=(attributes & ~CODEC_MASK) | (codec if records else 0),
        last_offset_delta=last_offset_delta,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(records),
    )
    return with_crc(header, body)


def with_crc(header: BatchHeader, body: Buffer) -> bytearray:
    """Return a batch of this header and these record bytes, with its CRC."""
    batch = bytearray(_HEADER.pack(*header))
    batch += body
    _CRC.pack_into(batch, CRC_POSITION, crc32c(memoryview(batch)[CRC_COVERS_FROM:]))
    assert len(batch) == header.size_bytes
    return batch


def control_type(record: Record) -> int:
    """Return the type in the key of a control record: one of ControlType, or an unknown number.

    Raises CorruptBatchError if the key is not that of a control record.
    """
    if record.key is None or len(record.key) < _CONTROL_KEY.size:
        raise CorruptBatchError("the key of a control record is cut short")
    version, kind = _CONTROL_KEY.unpack_from(record.key)
    if version < 0 or kind < 0:
        raise CorruptBatchError(f"control record of version {version}, type {kind}")
    return int(kind)


def marker_coordinator_epoch(record: Record) -> int:
    """Return the coordinator epoch in the value of a marker. Raises CorruptBatchError."""
    if record.value is None or len(record.value) < _MARKER_VALUE.size:
        raise CorruptBatchError("the value of a transaction marker is cut short")
    return int(_MARKER_VALUE.unpack_from(record.value)[1])


def marker_record(kind: ControlType, coordinator_epoch: int, timestamp: int) -> Record:
    """Return a commit or abort marker at offset 0; the append sets its offset."""
    assert kind in (ControlType.ABORT, ControlType.COMMIT)
    key, value = _CONTROL_KEY.pack(0, kind), _MARKER_VALUE.pack(0, coordinator_epoch)
    return Record(0, timestamp, key, value)
