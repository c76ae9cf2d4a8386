"""The codec of Fetch, written by hand: responses are headers with ranges of files between them.

A response is a list of parts in wire order: bytes, or objects that stand for records (a
`FetchSlice` of the log, or anything else with a `length` in bytes). The size in front includes all
parts, so that sendfile can send each range after its header. Any bytes decode to a request or
raise ProtocolError. Tests compare this codec with the table `FETCH` in `tables/records.py`. The
broker never sends diverging epochs, current leaders, snapshot ids or node endpoints, because it is
a single node.

`decode_fetch_sliced` decodes a request of more than WHOLE_ROWS_MAX rows from that table, and
`encode_fetch_response_sliced` encodes its response, both with pauses.
"""

import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from protocol.codec import RequestHeader, decode_body_sliced
from protocol.errors import ProtocolError, SlicesNeededError
from protocol.limits import TAGS_PER_SECTION_MAX, WHOLE_ROWS_MAX
from protocol.messages import FetchRequest as FetchBody
from protocol.produce_codec import TopicRef, topic_bytes
from protocol.table_compiler import (
    ELEMENTS_PER_SLICE,
    SHORT_READ_ERRORS,
    read_varint,
    skip_tags,
    varint,
)

FIRST_FLEXIBLE_VERSION: Final = 12
FIRST_TOPIC_ID_VERSION: Final = 13

_LENGTH: Final = struct.Struct(">h")
_COUNT: Final = struct.Struct(">i")
_WAIT: Final = struct.Struct(">iiib")  # max wait, min bytes, max bytes, isolation level
_SESSION: Final = struct.Struct(">ii")  # session id, session epoch
_REPLICA_STATE: Final = struct.Struct(">iq")
_ABORTED: Final = struct.Struct(">qq")  # producer id, first offset
_ABORTED_FLEXIBLE: Final = struct.Struct(">qqx")


class RecordRange(Protocol):
    """Records that are sent from their file. `length` counts bytes, 0 for no records."""

    @property
    def length(self) -> int:
        """Return the bytes to send."""
        ...


Records = TypeVar("Records", bound=RecordRange)


class FetchPartition(NamedTuple):
    """The request for one partition. Epochs are -1 if the client sends none."""

    partition: int
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int
    partition_max_bytes: int


@dataclass(slots=True)
class FetchRequest:
    """A decoded request. Up to version 12 topics have names, later ids of 16 bytes.

    `replica_id` is -1 for a consumer; from version 15 on it comes from the tagged replica state.
    `forgotten`: (topic, partition indexes) that an incremental request removes from its session.
    """

    replica_id: int = -1
    max_wait_ms: int = 0
    min_bytes: int = 0
    max_bytes: int = 2**31 - 1
    isolation_level: int = 0
    session_id: int = 0
    session_epoch: int = -1
    topics: list[tuple[TopicRef, list[FetchPartition]]] = field(default_factory=list)
    forgotten: Sequence[tuple[TopicRef, list[int]]] = ()
    rack_id: str = ""
    cluster_id: str | None = None


class FetchedPartition(NamedTuple, Generic[Records]):
    """The response for one partition. With an error, all offsets are -1 and there are no records.

    `aborted_transactions`: transactions that overlap the records, each a tuple that begins with
    producer id and first offset; None (null) if the client reads uncommitted data.
    """

    partition: int
    error_code: int = 0
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted_transactions: Sequence[tuple[int, ...]] | None = None
    records: Records | bytes = b""


def decode_fetch(header: RequestHeader, frame: memoryview | bytes) -> FetchRequest:
    """Decode a Fetch request, versions 4 to 18.

    Raises ProtocolError, or SlicesNeededError if `decode_fetch_sliced` has to decode it.
    """
    # Copy the fields: they are small and outlive the frame (sessions, long polls).
    reader = _Reader(bytes(frame[header.body_position :]), header.api_version)
    try:
        return reader.request()
    except ProtocolError as error:
        reason, position = error.reason, error.position
    except SHORT_READ_ERRORS as error:
        short = not isinstance(error, UnicodeDecodeError)
        reason, position = "cut short" if short else "string is not UTF-8", -1
    raise ProtocolError(f"Fetch: {reason}", 1, header.api_version, position)


def decode_fetch_sliced(
    header: RequestHeader, frame: memoryview, max_rows: int
) -> Generator[None, None, FetchRequest]:
    """Decode a Fetch request of many rows, with pauses. Raises ProtocolError."""
    body = yield from decode_body_sliced(header, frame, max_rows)
    assert isinstance(body, FetchBody)
    version = header.api_version
    by_id = version >= FIRST_TOPIC_ID_VERSION
    replica_id = body.replica_state.replica_id if version >= 15 else body.replica_id
    topics: list[tuple[TopicRef, list[FetchPartition]]] = []
    rows = 0
    for topic in body.topics:
        partitions: list[FetchPartition] = []
        topics.append((topic.topic_id if by_id else topic.topic, partitions))
        for partition in topic.partitions:
            partitions.append(
                FetchPartition(
                    partition.partition,
                    partition.current_leader_epoch,
                    partition.fetch_offset,
                    partition.last_fetched_epoch,
                    partition.log_start_offset,
                    partition.partition_max_bytes,
                )
            )
            rows += 1
            if rows % ELEMENTS_PER_SLICE == 0:
                yield
        rows += 1
        if rows % ELEMENTS_PER_SLICE == 0:
            yield
    forgotten: list[tuple[TopicRef, list[int]]] = []
    for removed in body.forgotten_topics_data:
        forgotten.append((removed.topic_id if by_id else removed.topic, removed.partitions))
        rows += 1
        if rows % ELEMENTS_PER_SLICE == 0:
            yield
    return FetchRequest(
        replica_id=replica_id,
        max_wait_ms=body.max_wait_ms,
        min_bytes=body.min_bytes,
        max_bytes=body.max_bytes,
        isolation_level=body.isolation_level,
        session_id=body.session_id,
        session_epoch=body.session_epoch,
        topics=topics,
        forgotten=forgotten if version >= 7 else (),
        rack_id=body.rack_id,
        cluster_id=body.cluster_id,
    )


def _refuse(subject: str, length: int, position: int) -> NoReturn:
    raise ProtocolError(f"{subject}: length {length} is wrong", position=position)


_PARTITION_LAYOUTS: Final = {  # by the first version that has it
    4: struct.Struct(">iqi"),  # partition, fetch offset, max bytes
    5: struct.Struct(">iqqi"),  # log start offset before max bytes
    9: struct.Struct(">iiqqi"),  # current leader epoch after the partition
    12: struct.Struct(">iiqiqi"),  # last fetched epoch after the fetch offset
}


def _partition_layout(version: int) -> struct.Struct:
    return _PARTITION_LAYOUTS[max(first for first in _PARTITION_LAYOUTS if first <= version)]


def partitions_max(version: int, frame_bytes: int) -> int:
    """Return how many partitions a request of so many bytes may name."""
    return frame_bytes // _partition_layout(version).size


class _Reader:
    """A position in a request body."""

    __slots__ = ("data", "end", "flexible", "left", "position", "version")

    def __init__(self, data: bytes, version: int) -> None:
        self.data = data
        self.end = len(data)
        self.position = 0
        self.version = version
        self.flexible = version >= FIRST_FLEXIBLE_VERSION
        self.left = WHOLE_ROWS_MAX

    def request(self) -> FetchRequest:
        version, request = self.version, FetchRequest()
        if version < 15:
            (request.replica_id,) = _COUNT.unpack_from(self.data, 0)
            self.position = 4
        (
            request.max_wait_ms,
            request.min_bytes,
            request.max_bytes,
            request.isolation_level,
        ) = _WAIT.unpack_from(self.data, self.position)
        self.position += 13
        if version >= 7:
            session = _SESSION.unpack_from(self.data, self.position)
            request.session_id, request.session_epoch = session
            self.position += 8
        request.topics = self._topics()
        if version >= 7:
            request.forgotten = self._forgotten()
        if version >= 11:
            request.rack_id = self._string("rack")
        if self.flexible:
            self._request_tags(request)
        return request

    def _topics(self) -> list[tuple[TopicRef, list[FetchPartition]]]:
        topics: list[tuple[TopicRef, list[FetchPartition]]] = []
        layout = _partition_layout(self.version)
        for _ in range(self._count("topics", self._topic_bytes_min())):
            topic = self._topic()
            count = self._count("partitions", layout.size + self.flexible)
            topics.append((topic, [self._partition(layout) for _ in range(count)]))
            self._skip_tags()
        return topics

    def _partition(self, layout: struct.Struct) -> FetchPartition:
        values = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        self._skip_tags()
        if self.version >= 12:
            return FetchPartition._make(values)
        if self.version >= 9:
            partition, epoch, offset, log_start, max_bytes = values
            return FetchPartition(partition, epoch, offset, -1, log_start, max_bytes)
        if self.version >= 5:
            partition, offset, log_start, max_bytes = values
            return FetchPartition(partition, -1, offset, -1, log_start, max_bytes)
        partition, offset, max_bytes = values
        return FetchPartition(partition, -1, offset, -1, -1, max_bytes)

    def _forgotten(self) -> list[tuple[TopicRef, list[int]]]:
        forgotten: list[tuple[TopicRef, list[int]]] = []
        for _ in range(self._count("forgotten topics", self._topic_bytes_min())):
            topic = self._topic()
            count = self._count("forgotten partitions", 4)
            indexes = list(struct.unpack_from(f">{count}i", self.data, self.position))
            self.position += 4 * count
            forgotten.append((topic, indexes))
            self._skip_tags()
        return forgotten

    def _request_tags(self, request: FetchRequest) -> None:
        count, self.position = read_varint(self.data, self.position)
        if count > TAGS_PER_SECTION_MAX or count * 2 > self.end - self.position:
            _refuse("tagged fields", count, self.position)
        for _ in range(count):
            tag, self.position = read_varint(self.data, self.position)
            size, self.position = read_varint(self.data, self.position)
            stop = self.position + size
            if stop > self.end:
                _refuse("tagged fields", size, self.position)
            if tag == 0:
                request.cluster_id = self._nullable_string("cluster id")
            elif tag == 1 and self.version >= 15:
                request.replica_id, _ = _REPLICA_STATE.unpack_from(self.data, self.position)
                self.position += _REPLICA_STATE.size
                self._skip_tags()
            if self.position > stop:  # otherwise one byte could be decoded many times
                _refuse("tagged fields", size, stop)
            self.position = stop

    def _topic_bytes_min(self) -> int:
        if self.version >= FIRST_TOPIC_ID_VERSION:
            return 18  # id, number of partitions, tags
        return 3 if self.flexible else 6

    def _topic(self) -> TopicRef:
        if self.version < FIRST_TOPIC_ID_VERSION:
            return self._string("topic")
        self.position += 16
        return self.data[self.position - 16 : self.position]

    def _count(self, subject: str, bytes_min: int) -> int:
        if self.flexible:
            count, self.position = read_varint(self.data, self.position)
            count -= 1
        else:
            (count,) = _COUNT.unpack_from(self.data, self.position)
            self.position += 4
        if count < 0 or count * bytes_min > self.end - self.position:
            _refuse(subject, count, self.position)
        self.left -= count
        if self.left < 0:
            raise SlicesNeededError
        return count

    def _string(self, subject: str) -> str:
        text = self._nullable_string(subject)
        if text is None:
            _refuse(subject, -1, self.position)
        return text

    def _nullable_string(self, subject: str) -> str | None:
        if self.flexible:
            length, self.position = read_varint(self.data, self.position)
            length -= 1
        else:
            (length,) = _LENGTH.unpack_from(self.data, self.position)
            self.position += 2
        if length == -1:
            return None
        stop = self.position + length
        if length < 0 or stop > self.end:
            _refuse(subject, length, self.position)
        text = self.data[self.position : stop].decode()
        self.position = stop
        return text

    def _skip_tags(self) -> None:
        if self.flexible:
            count = self.data[self.position]
            self.position += 1
            if count:
                self.left -= count
                if self.left < 0:
                    raise SlicesNeededError
                self.position = skip_tags(self.data, self.position, count)


# Of a response, by version. Top: correlation id, (tags of the header,) throttle time, error code,
# session id. Partition: index, error code, high watermark, last stable offset, log start offset.
_TOP: Final = struct.Struct(">ii")
_TOP_SESSION: Final = struct.Struct(">iihi")
_TOP_FLEXIBLE: Final = struct.Struct(">ixihi")
_PARTITION: Final = struct.Struct(">ihqq")
_PARTITION_START: Final = struct.Struct(">ihqqq")
# The same without aborted transactions: followed by null and the preferred replica.
_QUIET: Final = struct.Struct(">ihqqqii")
_QUIET_FLEXIBLE: Final = struct.Struct(">ihqqqxi")
_NO_REPLICA: Final = b"\xff\xff\xff\xff"


def encode_fetch_response(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[TopicRef, Sequence[FetchedPartition[Records]]]],
    *,
    error_code: int = 0,
    session_id: int = 0,
    throttle_time_ms: int = 0,
) -> list[bytes | Records]:
    """Encode a response as parts in wire order. The first part begins with the size.

    Records that are bytes are joined with the bytes around them. Ranges stay separate parts; empty
    ranges are omitted. Before version 7 there is no error code and no session id.
    """
    flexible = version >= FIRST_FLEXIBLE_VERSION
    small = _begin(version, correlation_id, throttle_time_ms, error_code, session_id)
    small.append(varint(len(topics) + 1) if flexible else _COUNT.pack(len(topics)))
    parts: list[bytes | Records] = []
    for topic, partitions in topics:
        small.append(topic_bytes(topic, version, FIRST_FLEXIBLE_VERSION))
        count = len(partitions)
        small.append(varint(count + 1) if flexible else _COUNT.pack(count))
        for fetched in partitions:
            _encode_partition(parts, small, version, fetched)
        if flexible:
            small.append(b"\0")
    return _finish(parts, small, version)


def encode_fetch_response_sliced(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[TopicRef, Sequence[FetchedPartition[Records]]]],
    session_id: int,
) -> Generator[None, None, list[bytes | Records]]:
    """Like `encode_fetch_response`, with pauses."""
    flexible = version >= FIRST_FLEXIBLE_VERSION
    small = _begin(version, correlation_id, 0, 0, session_id)
    small.append(varint(len(topics) + 1) if flexible else _COUNT.pack(len(topics)))
    parts: list[bytes | Records] = []
    rows = 0
    for topic, partitions in topics:
        small.append(topic_bytes(topic, version, FIRST_FLEXIBLE_VERSION))
        count = len(partitions)
        small.append(varint(count + 1) if flexible else _COUNT.pack(count))
        for fetched in partitions:
            yield from _encode_partition_sliced(parts, small, version, fetched)
            rows += 1 + len(fetched.aborted_transactions or ())
            if rows >= ELEMENTS_PER_SLICE:
                rows = 0
                _join(parts, small)
                yield
        if flexible:
            small.append(b"\0")
        rows += 1
        if rows >= ELEMENTS_PER_SLICE:
            rows = 0
            _join(parts, small)
            yield
    return _finish(parts, small, version)


def _join(parts: list[bytes | Records], small: list[bytes]) -> None:
    """Move `small` to `parts`: to join the pieces of 49,000 partitions at once takes 27 ms."""
    parts.append(b"".join(small))
    small.clear()


def _begin(
    version: int, correlation_id: int, throttle_time_ms: int, error_code: int, session_id: int
) -> list[bytes]:
    if version >= FIRST_FLEXIBLE_VERSION:
        return [_TOP_FLEXIBLE.pack(correlation_id, throttle_time_ms, error_code, session_id)]
    if version >= 7:
        return [_TOP_SESSION.pack(correlation_id, throttle_time_ms, error_code, session_id)]
    return [_TOP.pack(correlation_id, throttle_time_ms)]


def _finish(
    parts: list[bytes | Records], small: list[bytes], version: int
) -> list[bytes | Records]:
    """Finish the message and put its size in front."""
    if version >= FIRST_FLEXIBLE_VERSION:
        small.append(b"\0")
    parts.append(b"".join(small))
    size = sum([len(part) if isinstance(part, bytes) else part.length for part in parts])
    first = parts[0]
    assert isinstance(first, bytes)
    parts[0] = _COUNT.pack(size) + first
    return parts if parts[-1] else parts[:-1]


def _encode_partition(
    parts: list[bytes | Records],
    small: list[bytes],
    version: int,
    fetched: FetchedPartition[Records],
) -> None:
    """Add a partition to `small`. If it has a range, move `small` and the range to `parts`."""
    for _ in _encode_partition_sliced(parts, small, version, fetched):
        pass


def _encode_partition_sliced(
    parts: list[bytes | Records],
    small: list[bytes],
    version: int,
    fetched: FetchedPartition[Records],
) -> Generator[None, None, None]:
    """Like `_encode_partition`, with pauses between aborted transactions."""
    partition, error_code, high_watermark, last_stable, log_start, aborted, records = fetched
    values = (partition, error_code, high_watermark, last_stable)
    flexible = version >= FIRST_FLEXIBLE_VERSION
    if aborted is None and version >= 11:
        if flexible:
            small.append(_QUIET_FLEXIBLE.pack(*values, log_start, -1))
        else:
            small.append(_QUIET.pack(*values, log_start, -1, -1))
    else:
        if version >= 5:
            small.append(_PARTITION_START.pack(*values, log_start))
        else:
            small.append(_PARTITION.pack(*values))
        count = -1 if aborted is None else len(aborted)
        small.append(varint(count + 1) if flexible else _COUNT.pack(count))
        aborted_entry = _ABORTED_FLEXIBLE if flexible else _ABORTED
        for start in range(0, count, ELEMENTS_PER_SLICE):
            if start:
                yield
            rows = (aborted or ())[start : start + ELEMENTS_PER_SLICE]
            small.append(b"".join([aborted_entry.pack(row[0], row[1]) for row in rows]))
        if version >= 11:
            small.append(_NO_REPLICA)
    length = len(records) if isinstance(records, bytes) else records.length
    small.append(varint(length + 1) if flexible else _COUNT.pack(length))
    if isinstance(records, bytes):
        small.append(records)
    elif length:
        _join(parts, small)
        parts.append(records)
    if flexible:
        small.append(b"\0")
