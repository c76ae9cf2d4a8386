"""The producer state of a log: epochs, sequences and open transactions; pure.

Rules
- Producer id, epoch, first and last sequence identify a batch. The log remembers the last five
  batches of each producer, so that it answers a retry with the original offsets. A snapshot has the
  last batch only.
- A batch with an older epoch is refused: its producer is fenced (`check`). The epoch of a
  transactional id rises in broker/transactions/state.py; a marker brings it to the log.
- Sequences increase by one per record and wrap from 2147483647 to 0. A newer epoch starts at 0. A
  producer without state, for example after it expired, may start with any sequence.
- Batches read from the log are not checked again. Sequences come from the batch header, so that
  records removed by compaction still count.
- Above PRODUCERS_MAX without an open transaction, the log drops the one that was idle longest:
  clients can invent any number of ids. The broker calls `forget_idle` if all logs together have
  too many.
- Each entry is packed for a snapshot when it changes: any append may need a snapshot, and any
  number of producers may have open transactions.
- A transaction is open from its first batch to its marker. `first_undecided_offset` is the first
  offset of the oldest open transaction.

Sources: KIP-98 (idempotence and transactions), KIP-360 (epochs), Kafka's `.snapshot` format.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, overload

from crc32c import crc32c

from storage.errors import (
    CorruptSnapshotError,
    InvalidProducerEpochError,
    InvalidTransactionStateError,
    OutOfOrderSequenceError,
)
from storage.format.batch import (
    LARGEST_INT32,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    BatchHeader,
    ControlType,
)
from storage.format.txn_index import TxnIndexEntry

# An idempotent producer has at most this many batches in flight (max.in.flight 5).
KNOWN_BATCHES: Final = 5
NO_EPOCH: Final = -1
# Of one log: about 6 MB. An active producer is far from being dropped.
PRODUCERS_MAX: Final = 10_000
# Of all logs: about 300 MB, and a full collection of cyclic garbage takes 0.2 s longer.
ALL_PRODUCERS_MAX: Final = 500_000

SNAPSHOT_VERSION: Final = 1
_SNAPSHOT_HEAD: Final = struct.Struct(">hI")  # version, CRC-32C of all that follows
_SNAPSHOT_COUNT: Final = struct.Struct(">i")
_SNAPSHOT_ENTRY: Final = struct.Struct(">qhiqiqiq")
_SNAPSHOT_FIELDS: Final = {
    "producer_id": ">i8",
    "epoch": ">i2",
    "last_sequence": ">i4",
    "last_offset": ">i8",
    "offset_delta": ">i4",
    "timestamp_ms": ">i8",
    "coordinator_epoch": ">i4",
    "transaction_first_offset": ">i8",
}
_LAST_RECORD: Final = struct.Struct("<qqq")
_ENTRIES_FROM: Final = _SNAPSHOT_HEAD.size + _SNAPSHOT_COUNT.size


class Duplicate(NamedTuple):
    """The place of a batch that the log already has."""

    first_offset: int
    last_offset: int
    timestamp_ms: int


class KnownBatch(NamedTuple):
    """One of the last batches of a producer."""

    last_sequence: int
    last_offset: int
    offset_delta: int  # last offset - first offset; the sequences differ by the same
    timestamp_ms: int

    @property
    def first_sequence(self) -> int:
        """Return the sequence of the first record; sequences wrap at 2^31."""
        return (self.last_sequence - self.offset_delta) & LARGEST_INT32

    @property
    def first_offset(self) -> int:
        """Return the offset of the first record."""
        return self.last_offset - self.offset_delta


_NO_BATCH: Final = KnownBatch(NO_SEQUENCE, last_offset=-1, offset_delta=0, timestamp_ms=-1)


@dataclass(slots=True)
class ProducerEntry:
    """The state of one producer."""

    producer_id: int
    epoch: int = NO_EPOCH
    coordinator_epoch: int = -1
    timestamp_ms: int = -1  # of the last batch or marker, set by its writer
    seen_ms: int = -1  # broker time of the last append, -1 if read from the log
    transaction_first_offset: int | None = None
    batches: tuple[KnownBatch, ...] = ()  # the last KNOWN_BATCHES; a deque takes 600 bytes more
    packed: bytes = b""  # of this state, for a snapshot

    @property
    def last_sequence(self) -> int:
        """Return the last sequence of this epoch, -1 before the first."""
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def last_offset(self) -> int:
        """Return the last data offset of this epoch, -1 if not known."""
        return self.batches[-1].last_offset if self.batches else -1

    def move_to_epoch(self, epoch: int) -> None:
        """Set the epoch. Sequences start again with each epoch."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches = ()

    def pack(self) -> None:
        """Set `packed`; call this after each change."""
        batch = self.batches[-1] if self.batches else _NO_BATCH
        first_offset = self.transaction_first_offset
        self.packed = _SNAPSHOT_ENTRY.pack(
            self.producer_id,
            self.epoch,
            batch.last_sequence,
            batch.last_offset,
            batch.offset_delta,
            self.timestamp_ms,
            self.coordinator_epoch,
            -1 if first_offset is None else first_offset,
        )


class LastRecords(Sequence[tuple[int, int, int]]):
    """Producer id, epoch and last data offset (or -1) of each producer, as bytes.

    A log may have 20,000 producers, and the event loop gathers them for each clean and sends them
    to a worker. As tuples, that takes 11 ms.
    """

    __slots__ = ("_rows",)

    def __init__(self, records: Iterable[tuple[int, int, int]] = ()) -> None:
        self._rows = b"".join([_LAST_RECORD.pack(*record) for record in records])

    def __len__(self) -> int:
        return len(self._rows) // _LAST_RECORD.size

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return _LAST_RECORD.iter_unpack(self._rows)

    @overload
    def __getitem__(self, index: int) -> tuple[int, int, int]: ...

    @overload
    def __getitem__(self, index: slice) -> "LastRecords": ...

    def __getitem__(self, index: int | slice) -> "tuple[int, int, int] | LastRecords":
        if isinstance(index, slice):
            return LastRecords(tuple(self)[index])
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"LastRecords({list(self)})"

    @classmethod
    def of_snapshot(cls, entries: bytes) -> "LastRecords":
        """Return those of packed producers."""
        import numpy as np  # not loaded by commands that only import this module

        rows = np.frombuffer(entries, np.dtype(list(_SNAPSHOT_FIELDS.items())))
        columns = [rows[name] for name in ("producer_id", "epoch", "last_offset")]
        records = cls()
        records._rows = np.stack(columns, axis=1).astype("<i8").tobytes()
        return records


class ProducerStates:
    """The producers of one log. It has one owner, and it never waits or does I/O."""

    __slots__ = ("_open_transactions", "_producers")

    def __init__(self) -> None:
        self._producers: dict[int, ProducerEntry] = {}  # the longest idle first
        # First offset -> producer id, in log order: the first one is the oldest.
        self._open_transactions: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._producers)

    @property
    def producers(self) -> tuple[ProducerEntry, ...]:
        """Return the state of all producers, read-only, for DescribeProducers."""
        return tuple(self._producers.values())

    def producer(self, producer_id: int) -> ProducerEntry | None:
        """Return the state of one producer, read-only."""
        return self._producers.get(producer_id)

    @property
    def first_undecided_offset(self) -> int | None:
        """Return the first offset of the oldest open transaction; None if none is open."""
        return next(iter(self._open_transactions), None)

    def check(
        self, header: BatchHeader, *, in_transaction: bool = False, by_coordinator: bool = False
    ) -> Duplicate | None:
        """Check that a batch may be appended; return its place if the log already has it.

        `in_transaction`: its transaction is open on this partition. `by_coordinator`: likewise, and
        the batch has no running sequence.

        Raises InvalidProducerEpochError, OutOfOrderSequenceError, InvalidTransactionStateError.
        """
        if header.producer_id < 0:
            return None
        entry = self._producers.get(header.producer_id)
        if entry is not None:
            duplicate = None if by_coordinator else _known(entry, header)
            if duplicate is not None:
                return duplicate
            if header.producer_epoch < entry.epoch:
                raise InvalidProducerEpochError(
                    entry.producer_id, entry.epoch, header.producer_epoch
                )
            if not by_coordinator:
                _check_sequence(entry, header)
        if header.is_transactional and not (in_transaction or by_coordinator):
            raise InvalidTransactionStateError(
                header.producer_id, "no transaction is open on this partition"
            )
        is_open = entry is not None and entry.transaction_first_offset is not None
        if is_open and not header.is_transactional:
            raise InvalidTransactionStateError(
                header.producer_id, "a batch without transaction while a transaction is open"
            )
        return None

    def update(
        self,
        header: BatchHeader,
        first_offset: int,
        last_offset: int,
        *,
        timestamp_ms: int | None = None,
        seen_ms: int = -1,
    ) -> None:
        """Add a data batch that was appended at `[first_offset, last_offset]`.

        `timestamp_ms` replaces the timestamp of the header if the log set its own. `seen_ms` is the
        broker's time, from which idle time counts: timestamps of records may be old.
        """
        if header.producer_id < 0:
            return
        assert not header.is_control
        assert first_offset <= last_offset
        entry = self._producers.pop(header.producer_id, None)
        if entry is None:
            entry = self._add(header.producer_id)
        else:
            self._producers[header.producer_id] = entry
        entry.move_to_epoch(header.producer_epoch)
        timestamp = header.max_timestamp if timestamp_ms is None else timestamp_ms
        batch = KnownBatch(header.last_sequence, last_offset, last_offset - first_offset, timestamp)
        entry.batches = (*entry.batches[1 - KNOWN_BATCHES :], batch)
        entry.timestamp_ms = timestamp
        entry.seen_ms = seen_ms
        if header.is_transactional and entry.transaction_first_offset is None:
            entry.transaction_first_offset = first_offset
            self._open_transactions[first_offset] = header.producer_id
        entry.pack()

    def update_from_log(
        self,
        header: BatchHeader,
        control_type: int | None = None,
        *,
        coordinator_epoch: int = -1,
    ) -> TxnIndexEntry | None:
        """Add a batch read from the log; return its entry for the transaction index, if any.

        `control_type` and `coordinator_epoch` come from the first record of a control batch. They
        are None for an unreadable record, which is ignored, and for a batch that compaction
        emptied: its header still has the last epoch of the producer.
        """
        if header.producer_id < 0:
            return None
        if not header.is_control:
            self.update(header, header.base_offset, header.last_offset)
            return None
        if header.record_count == 0:
            self._note_epoch(header)
        if control_type not in (ControlType.ABORT, ControlType.COMMIT):
            return None
        return self.end_transaction(
            header.producer_id,
            header.producer_epoch,
            header.base_offset,
            aborted=control_type == ControlType.ABORT,
            coordinator_epoch=coordinator_epoch,
            timestamp_ms=header.max_timestamp,
        )

    def _note_epoch(self, header: BatchHeader) -> None:
        entry = self._producers.get(header.producer_id) or self._add(header.producer_id)
        if header.producer_epoch >= entry.epoch:
            entry.move_to_epoch(header.producer_epoch)
            entry.timestamp_ms = header.max_timestamp
        entry.pack()

    def end_transaction(
        self,
        producer_id: int,
        epoch: int,
        marker_offset: int,
        *,
        aborted: bool,
        coordinator_epoch: int,
        timestamp_ms: int,
    ) -> TxnIndexEntry | None:
        """Add a marker; return the index entry if it aborts a transaction with data.

        The last stable offset of the entry is the start of the oldest *other* open transaction,
        or the offset after the marker, as in Kafka.
        """
        entry = self._producers.get(producer_id) or self._add(producer_id)
        first_offset = entry.transaction_first_offset
        entry.move_to_epoch(epoch)
        entry.coordinator_epoch = coordinator_epoch
        entry.timestamp_ms = timestamp_ms
        entry.transaction_first_offset = None
        entry.pack()
        if first_offset is None:
            return None
        del self._open_transactions[first_offset]
        if not aborted:
            return None
        stable = self.first_undecided_offset
        return TxnIndexEntry(
            producer_id=producer_id,
            first_offset=first_offset,
            last_offset=marker_offset,
            last_stable_offset=marker_offset + 1 if stable is None else stable,
        )

    def forget_transaction(self, producer_id: int) -> None:
        """Close a transaction whose marker is lost, so that its outcome is unknown."""
        entry = self._producers[producer_id]
        assert entry.transaction_first_offset is not None
        del self._open_transactions[entry.transaction_first_offset]
        entry.transaction_first_offset = None
        entry.pack()

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Drop producers idle for `expiration_ms` without open transaction; return how many."""
        expired = [
            entry.producer_id
            for entry in self._producers.values()
            if entry.transaction_first_offset is None
            and now_ms - max(entry.timestamp_ms, entry.seen_ms) >= expiration_ms
        ]
        for producer_id in expired:
            del self._producers[producer_id]
        return len(expired)

    def _add(self, producer_id: int) -> ProducerEntry:
        """Add a producer; drop another one if there are too many."""
        self.forget_idle(PRODUCERS_MAX - 1)
        entry = self._producers[producer_id] = ProducerEntry(producer_id)
        return entry

    @property
    def idle_count(self) -> int:
        """Return the number of producers without an open transaction."""
        return len(self._producers) - len(self._open_transactions)

    def forget_idle(self, keep: int) -> None:
        """Drop those that were idle longest until `keep` without an open transaction are left."""
        excess = self.idle_count - keep
        if excess <= 0:
            return
        forgotten, passed = [], []
        for producer_id, entry in self._producers.items():
            if entry.transaction_first_offset is None:
                forgotten.append(producer_id)
                if len(forgotten) == excess:
                    break
            else:
                passed.append(producer_id)
        for producer_id in forgotten:
            del self._producers[producer_id]
        for producer_id in passed:  # so that not each search passes thousands of them
            self._producers[producer_id] = self._producers.pop(producer_id)

    def clear(self) -> None:
        """Drop all state, before it is rebuilt from a snapshot and the log."""
        self._producers.clear()
        self._open_transactions.clear()

    def last_records(self) -> dict[int, tuple[int, int]]:
        """Return producer id -> (epoch, last data offset or -1), which the cleaner must keep."""
        return {
            producer_id: (entry.epoch, entry.batches[-1].last_offset if entry.batches else -1)
            for producer_id, entry in self._producers.items()
        }

    def packed_last_records(self) -> LastRecords:
        """Return the same as `last_records`, as bytes. Fast for thousands of producers."""
        return LastRecords.of_snapshot(self._packed())

    def to_snapshot(self) -> bytes:
        """Return the content of a `.snapshot` file."""
        covered = _SNAPSHOT_COUNT.pack(len(self._producers)) + self._packed()
        return _SNAPSHOT_HEAD.pack(SNAPSHOT_VERSION, crc32c(covered)) + covered

    def _packed(self) -> bytes:
        return b"".join([entry.packed for entry in self._producers.values()])

    @classmethod
    def from_snapshot(cls, data: bytes, path: str = "") -> "ProducerStates":
        """Read a `.snapshot` file. Raises CorruptSnapshotError."""
        if len(data) < _ENTRIES_FROM:
            raise CorruptSnapshotError(path, f"{len(data)} bytes")
        version, crc = _SNAPSHOT_HEAD.unpack_from(data)
        if version != SNAPSHOT_VERSION:
            raise CorruptSnapshotError(path, f"version {version}")
        if crc != crc32c(data[_SNAPSHOT_HEAD.size :]):
            raise CorruptSnapshotError(path, "its CRC does not match")
        count: int = _SNAPSHOT_COUNT.unpack_from(data, _SNAPSHOT_HEAD.size)[0]
        if count * _SNAPSHOT_ENTRY.size != len(data) - _ENTRIES_FROM:
            raise CorruptSnapshotError(path, f"{count} entries in {len(data)} bytes")
        states = cls()
        for fields in _SNAPSHOT_ENTRY.iter_unpack(memoryview(data)[_ENTRIES_FROM:]):
            entry = _entry_of(fields, path)
            states._producers[entry.producer_id] = entry
        undecided = [
            (entry.transaction_first_offset, entry.producer_id)
            for entry in states._producers.values()
            if entry.transaction_first_offset is not None
        ]
        states._open_transactions = dict(sorted(undecided))
        if len(states._open_transactions) != len(undecided):
            raise CorruptSnapshotError(path, "two transactions begin at one offset")
        return states


def _entry_of(fields: tuple[int, ...], path: str) -> ProducerEntry:
    producer_id, epoch, sequence, offset, delta, timestamp, coordinator, transaction = fields
    if producer_id <= NO_PRODUCER_ID or delta < 0 or (offset >= 0 and delta > offset):
        raise CorruptSnapshotError(path, f"impossible entry of producer {producer_id}")
    entry = ProducerEntry(producer_id, epoch, coordinator, timestamp)
    entry.transaction_first_offset = transaction if transaction >= 0 else None
    if offset >= 0:
        entry.batches = (KnownBatch(sequence, offset, delta, timestamp),)
    entry.pack()
    return entry


def _known(entry: ProducerEntry, header: BatchHeader) -> Duplicate | None:
    """Return the place of a batch among the last five, by epoch and sequences."""
    if header.producer_epoch != entry.epoch or header.base_sequence < 0:
        return None
    last_sequence = header.last_sequence
    for batch in entry.batches:
        if batch.last_sequence == last_sequence and batch.first_sequence == header.base_sequence:
            return Duplicate(batch.first_offset, batch.last_offset, batch.timestamp_ms)
    return None


def _check_sequence(entry: ProducerEntry, header: BatchHeader) -> None:
    if entry.epoch == NO_EPOCH:
        return
    expected = 0
    if header.producer_epoch == entry.epoch:
        expected = (entry.last_sequence + 1) & LARGEST_INT32
    if header.base_sequence != expected:
        raise OutOfOrderSequenceError(entry.producer_id, expected, header.base_sequence)
