"""Validation of produced batches: Kafka's rules in Kafka's order.

`check_produced` checks the header and the CRC, `check_records` every record, in a compiled kernel.
Both run for each batch on every topic: a client stops at a malformed record, and a topic may become
compacted or get a view later. So the records of every accepted batch are well-formed and decompress
within the topic's limit; on a compacted topic all have keys.

The header's largest timestamp is not checked: some clients write -1. Retention, rolls and lags
depend on it, so the caller replaces it by that of the records, as Kafka's LogValidator does.

Sources: the Kafka protocol guide, KIP-467 (errors of single records), KIP-937 (timestamps).
"""

from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from config.topics.keys import TopicConfig
from storage.errors import (
    CorruptBatchError,
    InvalidOffsetsError,
    InvalidRecordError,
    InvalidTimestampError,
    MessageTooLargeError,
    MissingKeyError,
    RecordListTooLargeError,
    UnsupportedCompressionError,
    UnsupportedMagicError,
)
from storage.format.batch import (
    BATCH_LENGTH_MIN,
    CONTROL,
    CRC_COVERS_FROM,
    DELETE_HORIZON,
    HEADER_BYTES,
    LENGTH_END,
    LOG_APPEND_TIME,
    MAGIC,
    MAGIC_POSITION,
    RECORD_BYTES_MIN,
    TRANSACTIONAL,
    BatchHeader,
    Buffer,
    unpack_header,
    unpack_records,
)
from storage.format.compression import ZSTD

# Records named in one error: enough to find the cause, few enough for one response.
FAILURES_NAMED_MAX: Final = 100
_ZSTD_FROM_PRODUCE: Final = 7  # KIP-110
_CREATE_TIME: Final = "CreateTime"
_SMALLEST_INT64: Final = -(1 << 63)
_LARGEST_INT64: Final = (1 << 63) - 1
_NAMES_NONE: Final = np.zeros(0, dtype=np.int64)
_REFUSED_FLAGS: Final = CONTROL | LOG_APPEND_TIME | DELETE_HORIZON


def check_produced(
    records: memoryview, config: TopicConfig, *, produce_version: int
) -> BatchHeader:
    """Check that the produced records of one partition are one batch; return its header.

    Raises, in this order of precedence: InvalidRecordError (no or several batches, base offset),
    UnsupportedMagicError, UnsupportedCompressionError (zstd before Produce 7),
    MessageTooLargeError, CorruptBatchError (CRC), RecordListTooLargeError, InvalidOffsetsError
    (counts, sequences), UnsupportedCompressionError (unknown codec), InvalidRecordError (flags),
    InvalidTimestampError (timestamp type set by the client).
    """
    size_bytes = len(records)
    if size_bytes < HEADER_BYTES:
        raise _no_batch(records)
    header = unpack_header(records)
    (
        base_offset,
        batch_length,
        _,
        magic,
        crc,
        attributes,
        last_delta,
        _,
        _,
        producer_id,
        producer_epoch,
        base_sequence,
        count,
    ) = header
    if magic != MAGIC or batch_length < BATCH_LENGTH_MIN or batch_length + LENGTH_END != size_bytes:
        raise _no_single_batch(header, size_bytes)
    codec = attributes & 0x07
    if codec == ZSTD and produce_version < _ZSTD_FROM_PRODUCE:
        raise UnsupportedCompressionError(codec)
    if base_offset != 0:
        raise InvalidRecordError(f"base offset {base_offset} in a produced batch")
    if size_bytes > config.max_message_bytes:
        raise MessageTooLargeError(size_bytes, config.max_message_bytes)
    if crc32c(records[CRC_COVERS_FROM:]) != crc:
        raise CorruptBatchError("the CRC does not match")
    if size_bytes > config.segment_bytes:
        raise RecordListTooLargeError(size_bytes, config.segment_bytes)
    if count <= 0 or count != last_delta + 1:
        raise InvalidOffsetsError(f"{count} records with last offset delta {last_delta}")
    if codec == 0 and count * RECORD_BYTES_MIN > size_bytes - HEADER_BYTES:
        raise InvalidOffsetsError(f"{count} records cannot fit in {size_bytes} bytes")
    if producer_id >= 0 and (base_sequence < 0 or producer_epoch < 0):
        raise InvalidOffsetsError(f"producer {producer_id} without sequence or epoch")
    if codec > ZSTD:
        raise UnsupportedCompressionError(codec)
    if attributes & _REFUSED_FLAGS or (attributes & TRANSACTIONAL and producer_id < 0):
        raise _refused_flag(attributes)
    return header


def _no_batch(records: memoryview) -> Exception:
    if len(records) > MAGIC_POSITION and records[MAGIC_POSITION] in (0, 1):
        return UnsupportedMagicError(records[MAGIC_POSITION])
    return InvalidRecordError("no whole batch")


def _no_single_batch(header: BatchHeader, size_bytes: int) -> Exception:
    if header.magic != MAGIC:
        return UnsupportedMagicError(header.magic)
    if header.batch_length < BATCH_LENGTH_MIN:
        return CorruptBatchError(f"batch length {header.batch_length}")
    if header.size_bytes > size_bytes:
        return InvalidRecordError("no whole batch")
    return InvalidRecordError("more than one batch, or bytes after it")


def _refused_flag(attributes: int) -> Exception:
    if attributes & CONTROL:
        # Kafka's metrics count it as an invalid offset.
        return InvalidOffsetsError("a client may not write control records")
    if attributes & LOG_APPEND_TIME:
        return InvalidTimestampError("a client may not set the timestamp type LogAppendTime")
    if attributes & DELETE_HORIZON:
        return InvalidRecordError("a client may not set a delete horizon")
    return InvalidRecordError("a transactional batch without a producer id")


class CheckedRecords(NamedTuple):
    """The records of a batch, all of them valid."""

    unpacked: memoryview
    max_timestamp: int  # of the records in ms, whatever the header says


def check_records(
    records: memoryview | bytes | bytearray,
    header: BatchHeader,
    config: TopicConfig,
    now_ms: int,
    *,
    limit_bytes: int = _LARGEST_INT64,
) -> CheckedRecords:
    """Check all records of a batch that passed `check_produced`.

    May run in a thread. Raises InvalidTimestampError, MissingKeyError, InvalidOffsetsError or
    InvalidRecordError with the indexes of the first 100 invalid records, and
    DecompressionLimitError. `limit_bytes` may be below the topic's limit for decompressed
    batches.
    """
    unpacked: Buffer = records
    position = HEADER_BYTES
    if header.codec:
        unpacked = _unpack(records, header, min(limit_bytes, config.varve_decompressed_batch_bytes))
        position = 0
    first_ms, last_ms = _SMALLEST_INT64, _LARGEST_INT64
    if config.message_timestamp_type == _CREATE_TIME:
        first_ms = now_ms - config.message_timestamp_before_max_ms
        last_ms = min(now_ms + config.message_timestamp_after_max_ms, _LARGEST_INT64)
    check = _records_kernel()
    rules = header.record_count, header.base_timestamp, first_ms, last_ms, config.compacts
    # Read-only: one type for all callers, so one compiled kernel.
    data = memoryview(unpacked).toreadonly()
    code, _, max_timestamp = check(data, position, *rules, _NAMES_NONE)
    if code:
        failed = np.zeros(FAILURES_NAMED_MAX, dtype=np.int64)
        code, failures, _ = check(data, position, *rules, failed)
        raise _invalid_records(code, failed[:failures].tolist())
    return CheckedRecords(data[position:], max_timestamp)


@cache
def _records_kernel() -> Callable[..., tuple[int, int, int]]:
    from storage.kernels.records import check_records_kernel  # it imports the compiler

    return check_records_kernel


def _unpack(
    records: memoryview | bytes | bytearray, header: BatchHeader, limit_bytes: int
) -> Buffer:
    try:
        return unpack_records(records, header, 0, limit_bytes)
    except CorruptBatchError as error:
        # The CRC matches, so a retry would send the same bytes: a final error (87, not 2).
        raise InvalidRecordError(f"cannot be decompressed: {error.reason}") from error


def _invalid_records(code: int, indexes: list[int]) -> InvalidRecordError:
    from storage.kernels.records import RecordCode

    match RecordCode(code):
        case RecordCode.TIMESTAMP:
            return InvalidTimestampError("timestamps outside the topic's window", indexes)
        case RecordCode.NULL_KEY:
            return MissingKeyError("a compacted topic takes no records without a key", indexes)
        case RecordCode.OFFSETS:
            return InvalidOffsetsError("offset deltas are not 0, 1, 2, ...", indexes)
        case RecordCode.LEFT_OVER:
            return InvalidRecordError("bytes after the last record")
        case _:
            return InvalidRecordError("a record is malformed", indexes)
