"""Groups and offsets as records of __consumer_offsets: where they go, and how they come back.

Rules. A group lives in one partition, chosen as Kafka chooses it, so that either broker finds what
the other wrote. The last record of a key counts; a null value deletes. Offsets that a transaction
committed count from its commit marker on, never after an abort. What is not understood is skipped
and counted, never guessed at.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broker.groups.model import Group, Member
from broker.groups.offset_records import (
    CommittedOffset,
    GroupKey,
    GroupRecord,
    InvalidGroupRecordError,
    MemberRecord,
    OffsetKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_group_key,
    encode_group_value,
)
from storage.errors import CorruptBatchError, StorageError
from storage.format.batch import (
    BatchHeader,
    ControlType,
    Record,
    control_type,
    decode_records,
    verify_crc,
    walk_headers,
)

OFFSETS_TOPIC = "__consumer_offsets"
# Kafka's offsets.load.buffer.size; one batch may be larger and is still read whole.
LOAD_BUFFER_BYTES = 5 * 1024 * 1024

LogRecord = tuple[bytes, bytes | None]
TopicIndex = tuple[str, int]


class Append(Protocol):
    """Appends to one partition of __consumer_offsets, acknowledged as acks=all is.

    When the call returns, or at the first step of a coroutine, the records have their place in the
    log, in the order of the calls; the awaitable ends, in that order too, when they are
    acknowledged. Raises (or the awaitable does) StorageError when they are not.
    """

    def __call__(self, partition: int, records: Sequence[LogRecord]) -> Awaitable[object]:
        """Append `records` to partition `partition`."""
        ...


class OffsetsStore:
    """Writes group records to the partition of their group."""

    def __init__(self, partition_count: int, append: Append) -> None:
        assert partition_count > 0
        self.partition_count = partition_count
        self._append = append

    def partition_of(self, group_id: str) -> int:
        """The partition of a group."""
        return partition_of(group_id, self.partition_count)

    def append(self, group_id: str, records: Sequence[LogRecord]) -> "asyncio.Future[object]":
        """Start to append; the future is done when acknowledged. Goes on if nobody awaits it."""
        try:
            return asyncio.ensure_future(self._append(self.partition_of(group_id), records))
        except StorageError as error:
            failed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed


def partition_of(group_id: str, partition_count: int) -> int:
    """`abs(groupId.hashCode()) % partitions` as Java computes it, over UTF-16 code units."""
    raw = group_id.encode("utf-16-be", "surrogatepass")
    code = 0
    for position in range(0, len(raw), 2):
        code = (31 * code + int.from_bytes(raw[position : position + 2], "big")) & 0xFFFFFFFF
    if code >= 1 << 31:
        code -= 1 << 32
    # Kafka's Utils.abs makes the one int without a positive counterpart 0.
    positive = 0 if code == -(1 << 31) else abs(code)
    return positive % partition_count


def group_record(group: Group) -> LogRecord:
    """A group's metadata as the record that keeps it."""
    members = tuple(
        MemberRecord(
            m.member_id,
            m.instance_id,
            m.client_id,
            m.client_host,
            m.rebalance_timeout_ms,
            m.session_timeout_ms,
            m.metadata(group.protocol_name),
            m.assignment,
        )
        for m in group.members.values()
    )
    record = GroupRecord(
        group.protocol_type or "",
        group.generation,
        group.protocol_name,
        group.leader,
        group.since_ms,
        members,
    )
    return encode_group_key(group.group_id), encode_group_value(record)


def group_of(group_id: str, record: GroupRecord) -> Group:
    """The group a record tells of; of its protocols only the chosen one is known."""
    members = {
        m.member_id: Member(
            member_id=m.member_id,
            instance_id=m.instance_id,
            client_id=m.client_id,
            client_host=m.client_host,
            session_timeout_ms=m.session_timeout_ms,
            rebalance_timeout_ms=m.rebalance_timeout_ms,
            protocols=((record.protocol_name or "", m.subscription),),
            assignment=m.assignment,
        )
        for m in record.members
    }
    return Group(
        group_id,
        generation=record.generation,
        protocol_type=record.protocol_type or None,
        protocol_name=record.protocol_name,
        leader=record.leader if record.leader in members else next(iter(members), None),
        members=members,
        since_ms=record.since_ms,
    )


@dataclass(slots=True)
class LoadedPartition:
    """What a partition of __consumer_offsets holds. Built by one caller, then only read."""

    groups: dict[str, Group] = field(default_factory=dict)
    offsets: dict[str, dict[TopicIndex, CommittedOffset]] = field(default_factory=dict)
    records: int = 0
    unknown_records: int = 0  # of key or value versions that are not ours
    invalid_records: int = 0  # bytes that follow no format
    undecided_offsets: int = 0  # of transactions that neither committed nor aborted


class Loader:
    """Reads batches in log order and keeps what counts."""

    def __init__(self) -> None:
        self.loaded = LoadedPartition()
        # Log offset of the record each committed offset came from: a transaction's offset counts
        # at its marker, but must not undo a commit that stands behind it in the log.
        self._places: dict[OffsetKey, int] = {}
        self._pending: dict[int, dict[OffsetKey, tuple[int, CommittedOffset]]] = {}

    def add_batches(self, data: bytes) -> int | None:
        """Take whole batches; returns the offset behind them, None if there was none.

        Raises CorruptBatchError (a wrong CRC too) and DecompressionLimitError.
        """
        next_offset = None
        for position, header in walk_headers(data):
            if not verify_crc(data, position, header):
                raise CorruptBatchError("the CRC does not match", position)
            self.add_records(header, decode_records(data, header, position))
            next_offset = header.next_offset
        return next_offset

    def add_records(self, header: BatchHeader, records: Sequence[Record]) -> None:
        """Take the records of one batch."""
        for record in records:
            self.loaded.records += 1
            if header.is_control:
                self._end_transaction(header.producer_id, control_type(record))
                continue
            try:
                self._add_record(header, record)
            except InvalidGroupRecordError:
                self.loaded.invalid_records += 1

    def finish(self) -> LoadedPartition:
        """All batches were given."""
        self.loaded.undecided_offsets = sum(len(pending) for pending in self._pending.values())
        return self.loaded

    def _add_record(self, header: BatchHeader, record: Record) -> None:
        if record.key is None:
            raise InvalidGroupRecordError("a record without a key")
        match decode_key(record.key):
            case None:
                self.loaded.unknown_records += 1
            case OffsetKey() as key:
                self._add_offset(header, record, key)
            case GroupKey(group_id):
                self._add_group(group_id, record.value)

    def _add_offset(self, header: BatchHeader, record: Record, key: OffsetKey) -> None:
        if record.value is None:
            self._forget_offset(key)
            return
        value = decode_offset_value(record.value)
        if value is None:
            self.loaded.unknown_records += 1
        elif header.is_transactional:
            pending = self._pending.setdefault(header.producer_id, {})
            pending[key] = (record.offset, value)
        else:
            self._set_offset(key, record.offset, value)

    def _add_group(self, group_id: str, value: bytes | None) -> None:
        if value is None:
            self.loaded.groups.pop(group_id, None)
            return
        record = decode_group_value(value)
        if record is None:
            self.loaded.unknown_records += 1
        else:
            self.loaded.groups[group_id] = group_of(group_id, record)

    def _end_transaction(self, producer_id: int, kind: int) -> None:
        pending = self._pending.pop(producer_id, {})
        if kind != ControlType.COMMIT:
            return
        for key, (place, value) in pending.items():
            if place > self._places.get(key, -1):
                self._set_offset(key, place, value)

    def _set_offset(self, key: OffsetKey, place: int, value: CommittedOffset) -> None:
        self._places[key] = place
        self.loaded.offsets.setdefault(key.group_id, {})[key.topic, key.partition] = value

    def _forget_offset(self, key: OffsetKey) -> None:
        self._places.pop(key, None)
        for pending in self._pending.values():
            pending.pop(key, None)
        offsets = self.loaded.offsets.get(key.group_id)
        if offsets is not None:
            offsets.pop((key.topic, key.partition), None)
            if not offsets:
                del self.loaded.offsets[key.group_id]


ReadBatches = Callable[[int, int, int], bytes]


def load(read_batches: ReadBatches, start_offset: int, end_offset: int) -> LoadedPartition:
    """Read `[start_offset, end_offset)` of a partition: read_batches(offset, end, max_bytes).

    Touches nothing but what it is given, so it may run in a thread. Raises StorageError.
    """
    loader = Loader()
    offset = start_offset
    while offset < end_offset:
        data = read_batches(offset, end_offset, LOAD_BUFFER_BYTES)
        if not data:
            break  # only offsets that compaction has emptied were left
        next_offset = loader.add_batches(data)
        if next_offset is None or next_offset <= offset:
            raise CorruptBatchError(f"no whole batch at offset {offset}")
        offset = next_offset
    return loader.finish()
