"""Groups and offsets as records of __consumer_offsets: writes and loads them.

Rules. Each group has one partition, chosen as Kafka chooses it, so that Kafka and Varve find each
other's groups. The last record of a key counts; a null value deletes. Offsets committed in a
transaction count from the commit marker on, and never after an abort. Unknown records are skipped
and counted.
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

    The records have their offsets when the call returns, or after the first step of a coroutine, in
    the order of the calls. The awaitables end in the same order, when the records are acknowledged.
    The call or the awaitable raises StorageError if they are not.
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
        """Return the partition of a group."""
        return partition_of(group_id, self.partition_count)

    def append(self, group_id: str, records: Sequence[LogRecord]) -> "asyncio.Future[object]":
        """Start to append; the future ends when the records are acknowledged."""
        try:
            return asyncio.ensure_future(self._append(self.partition_of(group_id), records))
        except StorageError as error:
            failed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed


def partition_of(group_id: str, partition_count: int) -> int:
    """Return `abs(groupId.hashCode()) % partitions` as Java computes it, over UTF-16 code units."""
    raw = group_id.encode("utf-16-be", "surrogatepass")
    code = 0
    for position in range(0, len(raw), 2):
        code = (31 * code + int.from_bytes(raw[position : position + 2], "big")) & 0xFFFFFFFF
    if code >= 1 << 31:
        code -= 1 << 32
    # Kafka's Utils.abs maps the one int without a positive counterpart to 0.
    positive = 0 if code == -(1 << 31) else abs(code)
    return positive % partition_count


def group_record(group: Group) -> LogRecord:
    """Return the record that stores a group's metadata."""
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
    """Return the group of a record; of its protocols, the record has only the chosen one."""
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
    """The content of a partition of __consumer_offsets."""

    groups: dict[str, Group] = field(default_factory=dict)
    offsets: dict[str, dict[TopicIndex, CommittedOffset]] = field(default_factory=dict)
    records: int = 0
    unknown_records: int = 0  # with an unsupported version of the key or value
    invalid_records: int = 0  # in no known format
    undecided_offsets: int = 0  # in transactions without a marker


class Loader:
    """Reads batches in log order and keeps the last value of each key."""

    def __init__(self) -> None:
        self.loaded = LoadedPartition()
        # The log offset of each committed offset's record: a transaction's offset counts from its
        # marker on, but must not replace a commit that follows its record in the log.
        self._record_offsets: dict[OffsetKey, int] = {}
        self._pending: dict[int, dict[OffsetKey, tuple[int, CommittedOffset]]] = {}

    def add_batches(self, data: bytes) -> int | None:
        """Add whole batches; return the offset after the last, None if there was none.

        Raises CorruptBatchError (also for a wrong CRC) and DecompressionLimitError.
        """
        next_offset = None
        for position, header in walk_headers(data):
            if not verify_crc(data, position, header):
                raise CorruptBatchError("the CRC does not match", position)
            self.add_records(header, decode_records(data, header, position))
            next_offset = header.next_offset
        return next_offset

    def add_records(self, header: BatchHeader, records: Sequence[Record]) -> None:
        """Add the records of one batch."""
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
        """Return the result after the last batch."""
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
        for key, (record_offset, value) in pending.items():
            if record_offset > self._record_offsets.get(key, -1):
                self._set_offset(key, record_offset, value)

    def _set_offset(self, key: OffsetKey, record_offset: int, value: CommittedOffset) -> None:
        self._record_offsets[key] = record_offset
        self.loaded.offsets.setdefault(key.group_id, {})[key.topic, key.partition] = value

    def _forget_offset(self, key: OffsetKey) -> None:
        self._record_offsets.pop(key, None)
        for pending in self._pending.values():
            pending.pop(key, None)
        offsets = self.loaded.offsets.get(key.group_id)
        if offsets is not None:
            offsets.pop((key.topic, key.partition), None)
            if not offsets:
                del self.loaded.offsets[key.group_id]


ReadBatches = Callable[[int, int, int], bytes]


def load(read_batches: ReadBatches, start_offset: int, end_offset: int) -> LoadedPartition:
    """Load `[start_offset, end_offset)` of a partition; may run in a thread. Raises StorageError.

    `read_batches` takes the first offset, the end offset and the bytes to read at most.
    """
    loader = Loader()
    offset = start_offset
    while offset < end_offset:
        data = read_batches(offset, end_offset, LOAD_BUFFER_BYTES)
        if not data:
            break  # compaction removed all remaining offsets
        next_offset = loader.add_batches(data)
        if next_offset is None or next_offset <= offset:
            raise CorruptBatchError(f"no whole batch at offset {offset}")
        offset = next_offset
    return loader.finish()
