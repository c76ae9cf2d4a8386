"""Groups and offsets as records of __consumer_offsets: encodes and loads them.

Rules. Offsets committed in a transaction count from the commit marker on, and never after an abort.
Unknown records are skipped and counted.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from broker.groups.classic.members import Member, Members
from broker.groups.classic.model import Group
from broker.groups.consumer import records as consumer_records
from broker.groups.consumer.model import ConsumerGroup
from broker.groups.offsets.offset_records import (
    MEMBERS_PER_SLICE,
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
    encode_group_value_sliced,
)
from broker.topics.internal_topic import LogRecord
from protocol.errors import ProtocolError
from storage.format.batch import BatchHeader, ControlType, Record, control_type

OFFSETS_TOPIC = "__consumer_offsets"

TopicIndex = tuple[str, int]


def group_record_sliced(group: Group) -> Generator[None, None, LogRecord]:
    """Return the record that stores a group's metadata, with pauses."""
    members: list[MemberRecord] = []
    for number, m in enumerate(group.members.values(), 1):
        members.append(
            MemberRecord(
                m.member_id,
                m.instance_id,
                m.client_id,
                m.client_host,
                m.rebalance_timeout_ms,
                m.session_timeout_ms,
                m.metadata(group.protocol_name),
                group.assignment(m.member_id),
            )
        )
        if number % MEMBERS_PER_SLICE == 0:
            yield
    record = GroupRecord(
        group.protocol_type or "",
        group.generation,
        group.protocol_name,
        group.leader,
        group.since_ms,
        tuple(members),
    )
    value = yield from encode_group_value_sliced(record)
    return encode_group_key(group.group_id), value


def group_of(group_id: str, record: GroupRecord) -> Group:
    """Return the group of a record; of its protocols, the record has only the chosen one."""
    members = Members.of(
        Member(
            member_id=m.member_id,
            instance_id=m.instance_id,
            client_id=m.client_id,
            client_host=m.client_host,
            session_timeout_ms=m.session_timeout_ms,
            rebalance_timeout_ms=m.rebalance_timeout_ms,
            protocols=((record.protocol_name or "", m.subscription),),
        )
        for m in record.members
    )
    return Group(
        group_id,
        generation=record.generation,
        protocol_type=record.protocol_type or None,
        protocol_name=record.protocol_name,
        leader=record.leader if record.leader in members else next(iter(members), None),
        members=members,
        assignments={m.member_id: m.assignment for m in record.members},
        since_ms=record.since_ms,
    )


@dataclass(slots=True)
class LoadedPartition:
    """The content of a partition of __consumer_offsets."""

    groups: dict[str, Group] = field(default_factory=dict)
    consumer_groups: dict[str, ConsumerGroup] = field(default_factory=dict)
    offsets: dict[str, dict[TopicIndex, CommittedOffset]] = field(default_factory=dict)  # by group
    records: int = 0
    unknown_records: int = 0  # with an unsupported version of the key or value
    invalid_records: int = 0  # in no known format
    # Offsets in transactions without a marker, by group and producer id. Each has the log offset of
    # its record.
    transactional: dict[str, dict[int, dict[TopicIndex, tuple[int, CommittedOffset]]]] = field(
        default_factory=dict
    )
    undecided_offsets: int = 0  # the number of those
    topics: set[str] = field(default_factory=set)  # with an offset, in a transaction or not

    def group_ids(self) -> set[str]:
        """Return the ids of all groups of the partition."""
        offsets = self.offsets.keys() | self.transactional.keys()
        return self.groups.keys() | self.consumer_groups.keys() | offsets


class OffsetsLoader:
    """Reads batches in log order and keeps the last value of each key."""

    def __init__(self) -> None:
        self.loaded = LoadedPartition()
        self._consumer_groups = consumer_records.ConsumerGroupLoader()
        # The log offset of each committed offset's record, or of its tombstone: a transaction's
        # offset counts from its marker on, but must not replace a commit or bring back a deleted
        # offset if that record follows its own in the log.
        self._record_offsets: dict[OffsetKey, int] = {}
        self._pending: dict[int, dict[OffsetKey, tuple[int, CommittedOffset]]] = {}

    def add_records(self, header: BatchHeader, records: Sequence[Record]) -> None:
        """Add the records of one batch."""
        for record in records:
            self.loaded.records += 1
            if header.is_control:
                self._end_transaction(header.producer_id, control_type(record))
                continue
            try:
                self._add_record(header, record)
            except (InvalidGroupRecordError, ProtocolError):
                self.loaded.invalid_records += 1

    def finish(self) -> LoadedPartition:
        """Return the result after the last batch."""
        for producer_id, pending in self._pending.items():
            for key, (record_offset, value) in pending.items():
                if record_offset > self._record_offsets.get(key, -1):
                    by_producer = self.loaded.transactional.setdefault(key.group_id, {})
                    offsets = by_producer.setdefault(producer_id, {})
                    offsets[key.topic, key.partition] = record_offset, value
                    self.loaded.undecided_offsets += 1
        self.loaded.consumer_groups = self._consumer_groups.groups()
        undecided = (
            offsets for group in self.loaded.transactional.values() for offsets in group.values()
        )
        keys: Iterator[Iterable[TopicIndex]] = chain(self.loaded.offsets.values(), undecided)
        self.loaded.topics = {topic for offsets in keys for topic, _ in offsets}
        return self.loaded

    def _add_record(self, header: BatchHeader, record: Record) -> None:
        if record.key is None:
            raise InvalidGroupRecordError("a record without a key")
        match consumer_records.decode_key(record.key) or decode_key(record.key):
            case None:
                self.loaded.unknown_records += 1
            case OffsetKey() as key:
                self._add_offset(header, record, key)
            case GroupKey(group_id):
                self._add_group(group_id, record.value)
            case consumer_key:
                if record.value is not None:  # the group has changed its protocol
                    self.loaded.groups.pop(consumer_key.group_id, None)
                self._consumer_groups.add(consumer_key, record.value)

    def _add_offset(self, header: BatchHeader, record: Record, key: OffsetKey) -> None:
        if record.value is None:
            self._forget_offset(key, record.offset)
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
            self._consumer_groups.forget(group_id)  # the group has changed its protocol
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

    def _forget_offset(self, key: OffsetKey, record_offset: int) -> None:
        if self._pending:  # an open transaction may have committed an offset before
            self._record_offsets[key] = record_offset
        else:
            self._record_offsets.pop(key, None)
        offsets = self.loaded.offsets.get(key.group_id)
        if offsets is not None:
            offsets.pop((key.topic, key.partition), None)
            if not offsets:
                del self.loaded.offsets[key.group_id]
