"""What was ever written to a log, and what of it a cleaner has had leave to remove.

The model of the invariants: it knows batches, markers and outcomes, and nothing of maps, groups,
passes or files. A record may be missing once a clean was entitled to drop it; any other must be
there, as it was written.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from cleaner.job import CleanJob
from storage.format.batch import (
    BatchHeader,
    ControlType,
    Record,
    control_type,
    decode_records,
    read_header,
    verify_crc,
)
from storage.format.txn_index import TxnIndexEntry

NONE, OPEN, COMMITTED, ABORTED = "no transaction", "open", "committed", "aborted"


class Batch(NamedTuple):
    """A batch as it was written, or as it stands in the log."""

    header: BatchHeader
    records: tuple[Record, ...]
    marker: ControlType | None = None  # of a control batch that is not empty

    @property
    def base(self) -> int:
        return self.header.base_offset

    @property
    def in_transaction(self) -> bool:
        return self.header.is_transactional and not self.header.is_control


@lru_cache(maxsize=20_000)
def decoded(data: bytes) -> Batch:
    """A batch whose checksum is right; most are looked at again and again."""
    header = read_header(data)
    assert verify_crc(data, 0, header), f"14: the checksum of the batch at {header.base_offset}"
    records = tuple(decode_records(data, header))
    marker = None
    if header.is_control and records:
        marker = ControlType(control_type(records[0]))
    return Batch(header, records, marker)


class Outcome(NamedTuple):
    """How a batch's transaction ended, and the offset of the marker that said so."""

    state: str
    marker: int = -1


@dataclass
class History:
    """All batches since the log began, by base offset, without those that a crash took."""

    batches: dict[int, Batch] = field(default_factory=dict)
    may_go: set[int] = field(default_factory=set)  # offsets of records
    indexed_ms: dict[int, int] = field(default_factory=dict)  # tombstone -> its first clean
    shortest_retention_ms: int = 1 << 62

    def __iter__(self) -> Iterator[Batch]:
        return (self.batches[base] for base in sorted(self.batches))

    def add(self, batch: Batch) -> None:
        self.batches[batch.base] = batch

    def cut(self, offset: int) -> None:
        """Forget what was at or after an offset: it can be given again."""
        self.batches = {base: batch for base, batch in self.batches.items() if base < offset}
        self.may_go = {item for item in self.may_go if item < offset}
        self.indexed_ms = {item: ms for item, ms in self.indexed_ms.items() if item < offset}

    def keep_only(self, bases: set[int], first: int) -> None:
        """Of the batches from `first` on only these are left."""
        gone = [base for base in self.batches if base >= first and base not in bases]
        for base in gone:
            del self.batches[base]

    def outcomes(self) -> dict[int, Outcome]:
        """Of each batch, by base offset; markers are in no transaction themselves."""
        outcomes: dict[int, Outcome] = {}
        under_way: dict[int, list[int]] = {}
        for batch in self:
            producer = batch.header.producer_id
            outcomes[batch.base] = Outcome(NONE)
            if batch.in_transaction:
                under_way.setdefault(producer, []).append(batch.base)
                outcomes[batch.base] = Outcome(OPEN)
            elif batch.marker is not None:
                state = COMMITTED if batch.marker is ControlType.COMMIT else ABORTED
                for base in under_way.pop(producer, ()):
                    outcomes[base] = Outcome(state, batch.base)
        return outcomes

    def first_open(self, lowest: int = 0) -> int | None:
        """Where the oldest undecided transaction begins, of what is left from `lowest` on."""
        return min(
            (
                base
                for base, outcome in self.outcomes().items()
                if outcome.state == OPEN and self.batches[base].header.last_offset >= lowest
            ),
            default=None,
        )

    # What may go, and what may not -------------------------------------------------------

    def permit(self, job: CleanJob, before: Sequence[Batch], reach: int) -> None:
        """A clean that indexed up to `reach` was begun over a log that stood as in `before`."""
        outcomes = self.outcomes()
        standing = {batch.base: batch for batch in before}
        self.shortest_retention_ms = min(self.shortest_retention_ms, job.delete_retention_ms)
        superseded = {} if job.expired_only else self._last_of_keys(job, reach, outcomes)
        read = {s.base_offset: s.next_base_offset for group in job.groups for s in group}
        for batch in self:
            if not any(first <= batch.base < end for first, end in read.items()):
                continue
            expired = _has_expired(standing.get(batch.base), job)
            if batch.marker is not None:
                owned = any(
                    outcomes[item.base].marker == batch.base
                    for item in before
                    if item.in_transaction
                )
                if expired and not owned:
                    self.may_go.add(batch.base)
                continue
            is_aborted = outcomes[batch.base].state == ABORTED
            for record in batch.records:
                if (expired and self._was_kept_long_enough(record, job)) or (
                    not job.expired_only
                    and (is_aborted or _is_garbage(record, job, reach, superseded))
                ):
                    self.may_go.add(record.offset)
        for record in (record for batch in self for record in batch.records):
            if job.log_start_offset <= record.offset < reach and record.value is None:
                self.indexed_ms.setdefault(record.offset, job.now_ms)

    def _last_of_keys(
        self, job: CleanJob, reach: int, outcomes: Mapping[int, Outcome]
    ) -> dict[bytes | None, int]:
        """Of the dirty section. Control and aborted records supersede nothing (6 and 4)."""
        return {
            record.key: record.offset
            for batch in self
            for record in batch.records
            if batch.marker is None
            and outcomes[batch.base].state != ABORTED
            and max(job.first_dirty_offset, job.log_start_offset) <= record.offset < reach
        }

    def _was_kept_long_enough(self, record: Record, job: CleanJob) -> bool:
        """8: a tombstone is there for delete.retention.ms after the first clean that knew it."""
        if record.value is not None or record.offset not in self.indexed_ms:
            return False
        return job.now_ms - self.indexed_ms[record.offset] >= self.shortest_retention_ms

    # Comparing ---------------------------------------------------------------------------

    def check(self, batches: Sequence[Batch], log_start: int, when: str) -> None:
        """What is in the log was written so; what is not had leave to go."""
        for batch in batches:
            source = self.batches.get(batch.base)
            assert source is not None, f"2: nobody wrote a batch at {batch.base} ({when})"
            _check_header(batch.header, source.header, when)
            written = {record.offset: record for record in source.records}
            for record in batch.records:
                assert written.get(record.offset) == record, (
                    f"1: the record at {record.offset} is {record}, and was written as"
                    f" {written.get(record.offset)} ({when})"
                )
        present = {record.offset for batch in batches for record in batch.records}
        for batch in self:
            for record in batch.records:
                if record.offset >= log_start and record.offset not in present:
                    subject = batch.marker.name if batch.marker is not None else "record"
                    assert record.offset in self.may_go, (
                        f"1, 3, 5, 8: the {subject} at {record.offset}, {record}, has gone ({when})"
                    )

    def check_markers(
        self, batches: Sequence[Batch], aborted_at: Iterable[int], log_start: int, when: str
    ) -> None:
        """4 and 5: whoever is left of a decided transaction is told how it ended."""
        outcomes = self.outcomes()
        markers = {batch.base for batch in batches if batch.marker is not None}
        entries = set(aborted_at)
        for batch in batches:
            outcome = outcomes[batch.base]
            if outcome.state not in (COMMITTED, ABORTED) or batch.header.last_offset < log_start:
                continue
            number = 4 if outcome.state == ABORTED else 5
            assert outcome.marker in markers, (
                f"{number}: the batch at {batch.base} was {outcome.state}, and the marker at"
                f" {outcome.marker} has gone ({when})"
            )
            assert outcome.state == COMMITTED or outcome.marker in entries, (
                f"4: the batch at {batch.base} was aborted, and no index tells so ({when})"
            )

    def check_committed(
        self, seen: Sequence[Record], batches: Sequence[Batch], start: int, stable: int, when: str
    ) -> None:
        """4: a read_committed reader sees what is in the log but for what was aborted."""
        outcomes = self.outcomes()
        expected = [
            record
            for batch in batches
            if batch.header.last_offset < stable
            and not batch.header.is_control
            and outcomes[batch.base].state in (NONE, COMMITTED)
            for record in batch.records
            if record.offset >= start
        ]
        assert list(seen) == expected, (
            f"4: read_committed shows {[r.offset for r in seen]}, not"
            f" {[r.offset for r in expected]} ({when})"
        )

    def check_latest(self, seen: Sequence[Record], log_start: int, stable: int, when: str) -> None:
        """1: the last value of every key is the one that was committed last."""
        outcomes = self.outcomes()
        expected = _latest(
            record
            for batch in self
            if batch.header.last_offset < stable
            and batch.marker is None
            and not batch.header.is_control
            and outcomes[batch.base].state in (NONE, COMMITTED)
            for record in batch.records
            if record.offset >= log_start
        )
        actual = _latest(seen)
        assert actual == expected, (
            f"1: the last values read are {actual}, not {expected}, in [{log_start}, {stable}) "
            f"({when})"
        )

    def check_compacted(self, batches: Sequence[Batch], first: int, end: int, when: str) -> None:
        """What a clean is for: below its end each key is there once, and nothing aborted."""
        outcomes = self.outcomes()
        seen: dict[bytes | None, int] = {}
        for batch in batches:
            if batch.header.is_control:
                continue
            for record in batch.records:
                if not first <= record.offset < end:
                    continue
                assert outcomes[batch.base].state != ABORTED, f"{record} was aborted ({when})"
                assert record.key is not None, f"{record} has no key ({when})"
                assert record.key not in seen, (
                    f"the key of {record} is at {seen.get(record.key)} too, below the first dirty"
                    f" offset {end} ({when})"
                )
                seen[record.key] = record.offset


def _latest(records: Iterable[Record]) -> dict[bytes | None, tuple[int, bytes]]:
    state: dict[bytes | None, tuple[int, bytes]] = {}
    for record in records:
        state.pop(record.key, None)
        if record.value is not None and record.key is not None:
            state[record.key] = (record.offset, record.value)
    return state


def _is_garbage(
    record: Record, job: CleanJob, reach: int, superseded: Mapping[bytes | None, int]
) -> bool:
    if record.offset < job.log_start_offset:
        return True
    if record.offset >= reach:
        return False
    return record.key is None or record.offset < superseded.get(record.key, -1)


def committed(
    batches: Sequence[Batch], aborted: Iterable[TxnIndexEntry], start: int, stable: int
) -> list[Record]:
    """What a read_committed consumer gets of batches below `stable`, by Kafka's algorithm."""
    waiting = sorted(aborted, key=lambda entry: entry.first_offset)
    under_way: set[int] = set()
    seen: list[Record] = []
    for batch in batches:
        header = batch.header
        if header.last_offset >= stable:
            break
        while waiting and waiting[0].first_offset <= header.last_offset:
            under_way.add(waiting.pop(0).producer_id)
        if header.is_control:
            if batch.marker is ControlType.ABORT:
                under_way.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in under_way):
            seen += batch.records
    return [record for record in seen if record.offset >= start]


def _has_expired(standing: Batch | None, job: CleanJob) -> bool:
    return (
        standing is not None
        and standing.header.has_delete_horizon
        and job.drop_expired_tombstones
        and standing.header.base_timestamp <= job.now_ms
    )


KEPT_FIELDS = (
    "base_offset",
    "last_offset_delta",
    "producer_id",
    "producer_epoch",
    "base_sequence",
    "is_transactional",
    "is_control",
    "is_log_append_time",
)


def _check_header(header: BatchHeader, written: BatchHeader, when: str) -> None:
    for name in KEPT_FIELDS:
        assert getattr(header, name) == getattr(written, name), (
            f"2, 7: {name} of the batch at {header.base_offset} is {getattr(header, name)}, and was"
            f" {getattr(written, name)} ({when})"
        )
    assert header.record_count == 0 or header.codec == written.codec, f"another codec ({when})"
