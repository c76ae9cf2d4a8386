"""The codec of Produce, written by hand: it does not copy records.

`decode_produce` reads versions 3 to 13 from the receive buffer. The records of a partition are a
slice of that buffer: writable, because the log stamps offsets in place, and valid as long as the
frame. Any bytes decode to a request or raise ProtocolError. Tests compare this codec with the table
`PRODUCE` in `tables/records.py`.

`decode_produce_sliced` decodes a request of more than WHOLE_ROWS_MAX rows from that table, with
pauses. Rows are topics, partitions and tagged fields.
"""

import struct
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, NoReturn, cast

from protocol.codec import RequestHeader, decode_body_sliced
from protocol.errors import ProtocolError, SlicesNeededError
from protocol.limits import STRING_BYTES_MAX, WHOLE_ROWS_MAX
from protocol.messages import ProduceRequest as ProduceBody
from protocol.table_compiler import (
    ELEMENTS_PER_SLICE,
    SHORT_READ_ERRORS,
    read_long_varint,
    skip_tags,
    varint,
)
from storage.slices import run_at_once

FIRST_FLEXIBLE_VERSION: Final = 9
FIRST_TOPIC_ID_VERSION: Final = 13

TopicRef = str | bytes  # a name, or from version 13 on a topic id of 16 bytes
PartitionRecords = tuple[int, memoryview | None]

_LENGTH: Final = struct.Struct(">h")
_ACKS: Final = struct.Struct(">hii")  # acks, timeout, number of topics
_FLEXIBLE_ACKS: Final = struct.Struct(">hi")
_COUNT: Final = struct.Struct(">i")
_PARTITION: Final = struct.Struct(">ii")  # index, size of records
_PRODUCED: Final = struct.Struct(">ihqq")  # index, error code, base offset, log append time
_OFFSET: Final = struct.Struct(">q")


class ProduceRequest(NamedTuple):
    """A decoded request. `topics` has the partitions of each topic with their records."""

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[tuple[TopicRef, list[PartitionRecords]]]


class ProducedPartition(NamedTuple):
    """The result for one partition. Offsets and times are -1 after most errors.

    `record_errors` (index in the batch, message) and `error_message` are sent from version 8 on
    (KIP-467).
    """

    partition: int
    error_code: int = 0
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    record_errors: Sequence[tuple[int, str | None]] = ()
    error_message: str | None = None


def decode_produce(header: RequestHeader, frame: memoryview) -> ProduceRequest:
    """Decode a Produce request, versions 3 to 13.

    Raises ProtocolError, or SlicesNeededError if `decode_produce_sliced` has to decode it.
    """
    try:
        if header.api_version >= FIRST_FLEXIBLE_VERSION:
            return _decode_flexible(frame, header.body_position, header.api_version)
        return _decode_classic(frame, header.body_position)
    except ProtocolError as error:
        raise _error(error.reason, header.api_version, error.position) from None
    except SHORT_READ_ERRORS as error:
        reason = "string is not UTF-8" if isinstance(error, UnicodeDecodeError) else "cut short"
        raise _error(reason, header.api_version) from None


def decode_produce_sliced(
    header: RequestHeader, frame: memoryview, max_rows: int
) -> Generator[None, None, ProduceRequest]:
    """Decode a Produce request of many rows, with pauses. Raises ProtocolError."""
    body = yield from decode_body_sliced(header, frame, max_rows)
    assert isinstance(body, ProduceBody)
    by_id = header.api_version >= FIRST_TOPIC_ID_VERSION
    topics: list[tuple[TopicRef, list[PartitionRecords]]] = []
    rows = 0
    for topic in body.topic_data:
        partitions: list[PartitionRecords] = []
        topics.append((topic.topic_id if by_id else topic.name, partitions))
        rows += 1
        for partition in topic.partition_data:
            # A view of the frame; the table's type (bytes) applies to decoding without pauses.
            partitions.append((partition.index, cast("memoryview | None", partition.records)))
            rows += 1
            if rows >= ELEMENTS_PER_SLICE:
                rows = 0
                yield
        if rows >= ELEMENTS_PER_SLICE:
            rows = 0
            yield
    return ProduceRequest(body.transactional_id, body.acks, body.timeout_ms, topics)


def _error(reason: str, version: int, position: int = -1) -> ProtocolError:
    return ProtocolError(f"Produce: {reason}", 0, version, position)


def _refuse(subject: str, length: int, position: int) -> NoReturn:
    raise ProtocolError(f"{subject}: length {length} is wrong", position=position)


def _decode_classic(frame: memoryview, p: int) -> ProduceRequest:
    end = len(frame)
    remaining = WHOLE_ROWS_MAX
    (n,) = _LENGTH.unpack_from(frame, p)
    p += 2
    transactional_id = None
    if n != -1:
        if n < 0 or p + n > end:
            _refuse("transactional id", n, p)
        transactional_id = str(frame[p : p + n], "utf-8")
        p += n
    acks, timeout_ms, topic_count = _ACKS.unpack_from(frame, p)
    p += 10
    if topic_count < 0 or topic_count * 6 > end - p:
        _refuse("topics", topic_count, p)
    remaining -= topic_count
    if remaining < 0:
        raise SlicesNeededError
    topics: list[tuple[TopicRef, list[PartitionRecords]]] = []
    for _ in range(topic_count):
        (n,) = _LENGTH.unpack_from(frame, p)
        p += 2
        if n < 0 or p + n > end:
            _refuse("topic", n, p)
        topic = frame[p : p + n].tobytes().decode()
        p += n
        (partition_count,) = _COUNT.unpack_from(frame, p)
        p += 4
        if partition_count < 0 or partition_count * 8 > end - p:
            _refuse("partitions", partition_count, p)
        remaining -= partition_count
        if remaining < 0:
            raise SlicesNeededError
        partitions: list[PartitionRecords] = []
        for _ in range(partition_count):
            index, n = _PARTITION.unpack_from(frame, p)
            p += 8
            if n < 0 or p + n > end:
                if n != -1:
                    _refuse("records", n, p)
                partitions.append((index, None))
                continue
            partitions.append((index, frame[p : p + n]))
            p += n
        topics.append((topic, partitions))
    return tuple.__new__(ProduceRequest, (transactional_id, acks, timeout_ms, topics))


# Decodes a whole request without calls, because every produced batch passes here.
def _decode_flexible(frame: memoryview, p: int, version: int) -> ProduceRequest:  # noqa: C901, PLR0912, PLR0915
    end = len(frame)
    n = frame[p]
    p += 1
    if n > 127:
        n, p = read_long_varint(frame, p, n)
    transactional_id = None
    if n:
        if p + n - 1 > end or n - 1 > STRING_BYTES_MAX:
            _refuse("transactional id", n - 1, p)
        transactional_id = str(frame[p : p + n - 1], "utf-8")
        p += n - 1
    acks, timeout_ms = _FLEXIBLE_ACKS.unpack_from(frame, p)
    p += 6
    n = frame[p]
    p += 1
    if n > 127:
        n, p = read_long_varint(frame, p, n)
    by_id = version >= FIRST_TOPIC_ID_VERSION
    if not n or (n - 1) * (18 if by_id else 3) > end - p:
        _refuse("topics", n - 1, p)
    remaining = WHOLE_ROWS_MAX - n + 1
    if remaining < 0:
        raise SlicesNeededError
    topics: list[tuple[TopicRef, list[PartitionRecords]]] = []
    topic: TopicRef
    for _ in range(n - 1):
        if by_id:
            topic = bytes(frame[p : p + 16])
            p += 16
        else:
            n = frame[p]
            p += 1
            if n > 127:
                n, p = read_long_varint(frame, p, n)
            if not n or p + n - 1 > end or n - 1 > STRING_BYTES_MAX:
                _refuse("topic", n - 1, p)
            topic = frame[p : p + n - 1].tobytes().decode()
            p += n - 1
        n = frame[p]
        p += 1
        if n > 127:
            n, p = read_long_varint(frame, p, n)
        if not n or (n - 1) * 6 > end - p:
            _refuse("partitions", n - 1, p)
        remaining -= n - 1
        if remaining < 0:
            raise SlicesNeededError
        partitions, p, remaining = _flexible_partitions(frame, p, n - 1, remaining)
        topics.append((topic, partitions))
        n = frame[p]
        p += 1
        if n:
            remaining -= n
            if remaining < 0:
                raise SlicesNeededError
            p = skip_tags(frame, p, n)
    if frame[p]:
        skip_tags(frame, p + 1, frame[p])
    return tuple.__new__(ProduceRequest, (transactional_id, acks, timeout_ms, topics))


def _flexible_partitions(
    frame: memoryview, p: int, count: int, remaining: int
) -> tuple[list[PartitionRecords], int, int]:
    """Return the partitions, the position after them, and the rows that are left."""
    end = len(frame)
    partitions: list[PartitionRecords] = []
    for _ in range(count):
        (index,) = _COUNT.unpack_from(frame, p)
        n = frame[p + 4]
        p += 5
        if n > 127:
            n, p = read_long_varint(frame, p, n)
        if n:
            stop = p + n - 1
            if stop > end:
                _refuse("records", n - 1, p)
            partitions.append((index, frame[p:stop]))
            p = stop
        else:
            partitions.append((index, None))
        n = frame[p]
        p += 1
        if n:
            remaining -= n
            if remaining < 0:
                raise SlicesNeededError
            p = skip_tags(frame, p, n)
    return partitions, p, remaining


def encode_produced(
    version: int,
    correlation_id: int,
    topic: TopicRef,
    produced: ProducedPartition,
    throttle_time_ms: int = 0,
) -> bytes:
    """Encode the response for a single partition, the usual request, with its size."""
    if produced.record_errors or produced.error_message is not None:
        rows = [(topic, [produced])]
        return encode_produce_response(version, correlation_id, rows, throttle_time_ms)
    name = topic if isinstance(topic, bytes) else topic.encode()
    partition, error_code, base_offset, append_time_ms, log_start, _, _ = produced
    pack, size = _single(version, len(name))
    if version >= FIRST_FLEXIBLE_VERSION:
        if version < FIRST_TOPIC_ID_VERSION:
            name = varint(len(name) + 1) + name
        return pack(
            size, correlation_id, 2, name, 2, partition, error_code, base_offset, append_time_ms,
            log_start, 1, throttle_time_ms,
        )  # fmt: skip
    values = (
        size, correlation_id, 1, len(name), name, 1, partition, error_code, base_offset,
        append_time_ms,
    )  # fmt: skip
    if version >= 8:
        return pack(*values, log_start, 0, -1, throttle_time_ms)
    if version >= 5:
        return pack(*values, log_start, throttle_time_ms)
    return pack(*values, throttle_time_ms)


@lru_cache(maxsize=4096)  # bounded: clients may send names of topics that do not exist
def _single(version: int, name_bytes: int) -> tuple[Callable[..., bytes], int]:
    """Return the layout and size of a response for one partition without error messages."""
    if version >= FIRST_TOPIC_ID_VERSION:
        layout = struct.Struct(">iixB16sBihqqqBxxxix")
    elif version >= FIRST_FLEXIBLE_VERSION:
        named = name_bytes + len(varint(name_bytes + 1))
        layout = struct.Struct(f">iixB{named}sBihqqqBxxxix")
    else:
        rest = "" if version < 5 else "q" if version < 8 else "qih"
        layout = struct.Struct(f">iiih{name_bytes}siihqq{rest}i")
    return layout.pack, layout.size - 4


def encode_produce_response(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[TopicRef, Sequence[ProducedPartition]]],
    throttle_time_ms: int = 0,
) -> bytes:
    """Encode a response with its size. It has no tagged fields."""
    slices = encode_produce_response_sliced(version, correlation_id, topics, throttle_time_ms)
    return b"".join(run_at_once(slices))


def encode_produce_response_sliced(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[TopicRef, Sequence[ProducedPartition]]],
    throttle_time_ms: int = 0,
) -> Generator[None, None, list[bytes]]:
    """Like `encode_produce_response`, with pauses; return parts in wire order."""
    flexible = version >= FIRST_FLEXIBLE_VERSION
    out = [_COUNT.pack(correlation_id), b"\0" if flexible else b""]
    out.append(_count(len(topics), flexible))
    parts: list[bytes] = []
    rows = 0
    for topic, partitions in topics:
        out.append(topic_bytes(topic, version, FIRST_FLEXIBLE_VERSION))
        out.append(_count(len(partitions), flexible))
        rows += 1
        for produced in partitions:
            _encode_partition(out, version, produced)
            rows += 1 + len(produced.record_errors)
            if rows >= ELEMENTS_PER_SLICE:
                rows = 0
                parts.append(b"".join(out))
                out.clear()
                yield
        if flexible:
            out.append(b"\0")
        if rows >= ELEMENTS_PER_SLICE:
            rows = 0
            parts.append(b"".join(out))
            out.clear()
            yield
    out.append(_COUNT.pack(throttle_time_ms))
    if flexible:
        out.append(b"\0")
    parts.append(b"".join(out))
    parts[0] = _COUNT.pack(sum(map(len, parts))) + parts[0]
    return parts


def _encode_partition(out: list[bytes], version: int, produced: ProducedPartition) -> None:
    partition, error_code, base_offset, append_time_ms, log_start, errors, message = produced
    out.append(_PRODUCED.pack(partition, error_code, base_offset, append_time_ms))
    if version >= 5:
        out.append(_OFFSET.pack(log_start))
    if version < 8:
        return
    flexible = version >= FIRST_FLEXIBLE_VERSION
    out.append(_count(len(errors), flexible))
    for batch_index, text in errors:
        out.append(_COUNT.pack(batch_index))
        out.append(_nullable_string(text, flexible))
        if flexible:
            out.append(b"\0")
    out.append(_nullable_string(message, flexible))
    if flexible:
        out.append(b"\0")


def _count(value: int, flexible: bool) -> bytes:
    return varint(value + 1) if flexible else _COUNT.pack(value)


def _nullable_string(text: str | None, flexible: bool) -> bytes:
    if text is None:
        return b"\0" if flexible else b"\xff\xff"
    data = text.encode()
    return (varint(len(data) + 1) if flexible else _LENGTH.pack(len(data))) + data


def topic_bytes(topic: TopicRef, version: int, first_flexible_version: int) -> bytes:
    """Encode the id (16 bytes) or the name of a topic."""
    if isinstance(topic, bytes):
        return topic
    return _nullable_string(topic, version >= first_flexible_version)
