"""What a topic's partition and its view have to show, whatever happened to them.

The model knows what was produced, when each clean that covers an offset was published, and the
settings that promise something. It knows nothing of maps, passes, journals or ledgers. The rules:

- readable     everything between the log's start and its end can be read
- written      what is read was written so, under the same offset; offsets ascend
- damaged      only the batches that were damaged cannot be read
- truncated    an operator's truncation takes what is at or after its offset, and nothing else
- acknowledged nothing that was acknowledged is lost: after a kill the log ends where it did, after
               a loss of power at or after the recovery point
- latest-log   the last record of each key that a reader of committed records sees is the last that
               was committed; it may be missing if it expired, or is a tombstone
- latest-view  the same of the view, which also keeps what expired; a view by timestamp or version
               shows the record with the largest one
- directory    no data directory goes offline without a disk fault
- partition    every partition is served, unless its files were lost or damaged
- undisturbed  a clean is given up for a change of its topic, a lease or an operator only
- checkpoint   no start finds that a cleaner checkpoint is above the state of the cleaner
- no mistakes  the broker starts, ends, and logs no traceback
- ends         a run takes no more steps, and no longer, than any that ends
- tombstone    a tombstone stays readable for delete.retention.ms after the clean that covers it
- expired      a last record goes by retention.ms only when it is so old
- lag          no record that is younger than min.compaction.lag.ms is compacted
- stable       readers of committed records do not pass an open transaction, and wait for no other
- undecided    nothing at or after the last stable offset is compacted
- committed    nobody is shown a record of a transaction that was aborted, or is open
- marker       as long as a batch of a transaction is left, its marker is
- producer     a batch that is sent again is answered with its offset, and is not appended again;
               one out of order, or of an old epoch, is refused (producers.py)

The rules leave out a key whose last record is in a damaged batch, or whose later records were cut
off: the cleaner may have removed what is before them.

Times in the model are those that passed, whatever the wall clock says. When it is set, nothing goes
by its age until it was steady for STEADY_MS; after that, anything may have become as old as the
clock says.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from crc32c import crc32c

from storage.format.batch import Record, walk_headers
from storage.format.filenames import LARGEST_OFFSET
from storage.log.log import Log
from storage.model import TopicPartition
from storage.segments.fetch_slice import FetchSlice
from tests.sim.wall_clock import WallClock
from tests.support.cleaner.history import (
    ABORTED,
    COMMITTED,
    NONE,
    OPEN,
    Batch,
    History,
    Outcome,
    decoded,
)

READ_BYTES = 1 << 20
LENGTH_END = 12  # of a batch: its length counts what comes after
CRC_END = 21  # its checksum covers what comes after
ENDS = "ends"


class RuleError(Exception):
    """A rule does not hold."""

    def __init__(self, rule: str, subject: str) -> None:
        super().__init__(f"{rule}: {subject}")
        self.rule = rule


class LifeEndedError(Exception):
    """This life of the broker is over; `how`: stop, kill or power."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


@dataclass(frozen=True)
class Cleaned:
    """A clean that covers an offset."""

    begun_ms: int
    published_ms: int
    was_leased: bool


@dataclass
class Death:
    """How a log stood when its process ended."""

    log_end_offset: int
    recovery_point: int


@dataclass
class PartitionModel:
    """One partition, from the creation of its topic to its deletion."""

    where: TopicPartition
    topic_id: bytes
    history: History = field(default_factory=History)
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # when it was last read
    pending: list[Batch] = field(default_factory=list)  # sent, and neither acknowledged nor seen
    cleaned: dict[int, Cleaned] = field(default_factory=dict)  # offset -> the first
    retention: list[tuple[int, int]] = field(default_factory=list)  # (since ms, delete.retention)
    expiry_ms: set[int] = field(default_factory=set)  # each retention.ms that it had
    lag: tuple[int, int] = (0, 0)  # (since ms, min.compaction.lag.ms)
    log_start_max: int = 0
    deleted_to: int = 0  # by DeleteRecords
    opened_end: int = 0  # what comes after was appended by the present process
    unsure_producers: set[int] = field(default_factory=set)  # whom the log may have forgotten
    death: Death | None = None
    lost_power: bool = False  # since it was last seen whole
    files_lost: bool = False  # beside its `.log` files
    log: Log | None = None  # of this life
    is_damaged: bool = False
    damaged: dict[int, int] = field(default_factory=dict)  # batches: base -> next offset
    unsure: set[int] = field(default_factory=set)  # last records of keys that are not compared
    cutting: int | None = None  # the offset of a truncation that is under way
    lowest_cut: int = LARGEST_OFFSET  # offsets from here on were given again
    cut_open: set[int] = field(default_factory=set)  # without a marker since a truncation
    cut_end: int = 0  # where the log ended after the last truncation
    flushed: int = 0  # the recovery point before it
    deleting: bool = False

    def fail(self, rule: str, subject: str) -> RuleError:
        return RuleError(rule, f"{self.where}: {subject}")

    # What happens -------------------------------------------------------------------------

    def acknowledged(self, batch: Batch, base_offset: int) -> None:
        """A batch got its offsets."""
        if batch in self.pending:
            self.pending.remove(batch)
        self.history.add(_placed(batch, base_offset))

    def published(self, first: int, end: int, cleaned: Cleaned) -> None:
        """A clean of a dirty section that holds [first, end) is being published."""
        for batch in self.history:
            for record in batch.records:
                if first <= record.offset < end:
                    self.cleaned.setdefault(record.offset, cleaned)

    def note_lag(self, lag_ms: int, now_ms: int) -> None:
        """min.compaction.lag.ms is in force."""
        if lag_ms != self.lag[1]:
            self.lag = (now_ms, lag_ms)

    def kept_ms(self, cleaned: Cleaned, now_ms: int) -> int:
        """The shortest delete.retention.ms that applied since a clean began."""
        since = [ms for at, ms in self.retention if at >= cleaned.begun_ms and at <= now_ms]
        before = [ms for at, ms in self.retention if at < cleaned.begun_ms]
        return min([*before[-1:], *since])

    def cut(self, offset: int) -> None:
        """An operator truncated the log to an offset; below the log start, a batch goes whole."""
        self.lowest_cut = min(self.lowest_cut, offset)
        self.cut_end = min(self.cut_end, offset)
        gone = [batch for batch in self.history if batch.header.next_offset > offset]
        for batch in gone:
            del self.history.batches[batch.base]
        outcomes = self.history.outcomes()
        self.cut_open = {base for base, outcome in outcomes.items() if outcome.state == OPEN}
        self.unsure_producers |= {batch.header.producer_id for batch in gone}
        self._note_loaded(offset, {batch.base for batch in self.history})
        self.pending.clear()
        self.cleaned = {item: how for item, how in self.cleaned.items() if item < offset}
        self.damaged = {base: end for base, end in self.damaged.items() if end <= offset}
        keys = {record.key for batch in gone for record in batch.records}
        self.unsure |= {
            record.offset
            for batch in self.history
            for record in batch.records
            if record.key in keys
        }

    def forget_cleaned(self, batches: Sequence[Batch]) -> None:
        """What was cleaned before a truncation removed its marker belongs to no transaction."""
        for base in self.cut_open - {batch.base for batch in batches}:
            self.history.batches.pop(base, None)
        self.cut_open = set()

    # After a start ------------------------------------------------------------------------

    def reopened(self, batches: Sequence[Batch], end: int) -> None:
        """The log was opened by another process, which read `batches` in it."""
        self.take_in_pending(batches)
        death, self.death = self.death, None
        if death is not None:
            lowest = death.recovery_point if self.lost_power else death.log_end_offset
            # A truncation may leave no batch that ends where the log does.
            ends = (batch.header.next_offset for batch in self.history)
            acknowledged = max(self.cut_end, *ends, 0)
            lowest = min(lowest, acknowledged)
            # The process may have ended after the cut, before the truncation returned.
            if self.cutting is not None and end < acknowledged:
                lowest = min(lowest, self._kept_end(self.cutting))
                self.cut(max(end, self.cutting))
            if end < lowest:
                raise self.fail("acknowledged", f"the log ends at {end}, not at {lowest} or after")
            if self.lost_power:
                self.history.cut(end)
                bases = {batch.base for batch in batches}
                self.history.keep_only(bases, max(death.recovery_point, self.flushed))
        self.cut_end = min(self.cut_end, end)
        self.lost_power, self.cutting, self.flushed = False, None, 0
        self.pending.clear()
        self._note_loaded(end, {batch.base for batch in batches})

    def _note_loaded(self, end: int, bases: set[int]) -> None:
        """The log's producers were read from snapshots and from the batches that it has."""
        self.opened_end = end
        self.unsure_producers |= {
            producer_id
            for producer_id, last in self._last_of_producers().items()
            if last.base not in bases or last.base < self.log_start_max
        }

    def _last_of_producers(self) -> dict[int, Batch]:
        """The batch that says the epoch and the sequence of a producer."""
        last: dict[int, Batch] = {}
        for batch in self.history:
            header = batch.header
            before = last.get(header.producer_id)
            is_newer = before is None or header.producer_epoch > before.header.producer_epoch
            if header.producer_id >= 0 and (not header.is_control or is_newer):
                last[header.producer_id] = batch
        return last

    def _kept_end(self, offset: int) -> int:
        """Where a log that is truncated to an offset ends: after the last batch below it."""
        ends = (batch.header.next_offset for batch in self.history)
        return max((end for end in ends if end <= offset), default=0)

    def take_in_pending(self, batches: Sequence[Batch]) -> None:
        """What was not acknowledged may be there."""
        for batch in batches:
            if batch.base in self.history.batches:
                continue
            for sent in self.pending:
                if _placed(sent, batch.base).records == batch.records:
                    self.acknowledged(sent, batch.base)
                    break

    # Rules --------------------------------------------------------------------------------

    def check_written(self, batches: Sequence[Batch]) -> None:
        offsets = [record.offset for batch in batches for record in batch.records]
        if offsets != sorted(set(offsets)):
            raise self.fail("written", f"offsets do not ascend: {offsets}")
        self.outcomes = self.history.outcomes()
        for batch in batches:
            source = self.history.batches.get(batch.base)
            if source is None:
                raise self.fail("written", f"nobody wrote a batch at {batch.base}")
            written = {record.offset: record for record in source.records}
            for record in batch.records:
                if written.get(record.offset) != record:
                    raise self.fail("written", f"{record} is {written.get(record.offset)}")

    def check_stable(self, start: int, stable: int, end: int | None) -> None:
        """`end`: what readers may see if no transaction is open; None: not known."""
        opened = [batch for batch in self.history if self.outcomes[batch.base].state == OPEN]
        first = min((b.base for b in opened if b.header.last_offset >= start), default=None)
        if first is not None and stable > max(first, start):
            raise self.fail("stable", f"it is {stable}, and a transaction is open at {first}")
        if not opened and end is not None and stable != end:
            raise self.fail("stable", f"it is {stable} of {end}, and no transaction is open")

    def check_kept(
        self, batches: Sequence[Batch], start: int, stable: int, clock: WallClock
    ) -> None:
        """What no clean may take is there: batches that are undecided or young, and markers."""
        present = {batch.base: len(batch.records) for batch in batches}
        for batch in batches:
            outcome = self.outcomes[batch.base]
            is_decided = outcome.state in (COMMITTED, ABORTED)
            if is_decided and batch.header.last_offset >= start and not present.get(outcome.marker):
                raise self.fail(
                    "marker",
                    f"the batch at {batch.base} is left, not its marker at {outcome.marker}",
                )
        for producer_id, last in self._last_of_producers().items():
            is_expected = last.base >= start and producer_id not in self.unsure_producers
            if is_expected and last.base not in present and last.base not in self.damaged:
                raise self.fail(
                    "producer", f"the last batch of {producer_id}, at {last.base}, has gone"
                )
        for batch in reversed(tuple(self.history)):
            rule = "undecided" if batch.base >= stable else "lag"
            if batch.base < start or (rule == "lag" and not self._is_young(batch, clock)):
                break
            if batch.base in self.damaged or present.get(batch.base) == len(batch.records):
                continue
            raise self.fail(rule, f"of the batch at {batch.base} records have gone")

    def _is_young(self, batch: Batch, clock: WallClock) -> bool:
        since_ms, lag_ms = self.lag
        written_ms = clock.passed_ms_of(batch.records[0].timestamp)
        return (
            clock.passed_ms - written_ms < lag_ms
            and written_ms > since_ms
            and not clock.was_set_forward_since(written_ms)
        )

    def check_committed(self, seen: Sequence[Record]) -> None:
        hidden = {
            record.offset
            for batch in self.history
            if self.outcomes[batch.base].state in (OPEN, ABORTED)
            for record in batch.records
        }
        if hidden:
            for record in seen:
                if record.offset in hidden:
                    raise self.fail("committed", f"{_text(record)} is shown, and was not committed")

    def wanted(self, stable: int) -> dict[bytes, Record]:
        """The last committed record of each key below the last stable offset."""
        return last_of_keys(
            record
            for batch in self.history
            if batch.header.last_offset < stable
            and not batch.header.is_control
            and self.outcomes[batch.base].state in (NONE, COMMITTED)
            for record in batch.records
        )

    def is_unsure(self, offset: int) -> bool:
        """Whether this last record of its key may be missing, and show an earlier one."""
        return offset in self.unsure or any(
            base <= offset < end for base, end in self.damaged.items()
        )

    def check_latest(
        self, seen: Iterable[Record], start: int, stable: int, clock: WallClock
    ) -> None:
        self.log_start_max = max(self.log_start_max, start)
        shown = last_of_keys(seen)
        for key, record in self.wanted(stable).items():
            entry = shown.pop(key, None)
            if self.is_unsure(record.offset):
                continue
            if entry is not None and entry.offset != record.offset:
                raise self.fail(
                    "latest-log", f"key {key!r} shows {_text(entry)}, its last is {_text(record)}"
                )
            if entry is not None:
                continue
            if record.offset < self.log_start_max:
                self._check_expired(record, clock)
                continue
            if record.value is not None:
                raise self.fail("latest-log", f"key {key!r} is missing, its last: {_text(record)}")
            self._check_promise(record, clock)
        if shown:
            raise self.fail("latest-log", f"nobody committed {shown}")

    def _check_expired(self, record: Record, clock: WallClock) -> None:
        """The log start passed the last record of a key."""
        written_ms = clock.passed_ms_of(record.timestamp)
        if record.offset < self.deleted_to or clock.may_age_since(written_ms):
            return
        age_ms = clock.passed_ms - written_ms
        # Tombstones go by the cleaner as well, before the log start does.
        expiry_ms = min(self.expiry_ms - {-1}, default=age_ms)
        if record.value is not None and age_ms <= expiry_ms:
            raise self.fail("expired", f"{_text(record)} went {age_ms} ms after it was written")

    def _check_promise(self, tombstone: Record, clock: WallClock) -> None:
        cleaned, now_ms = self.cleaned.get(tombstone.offset), clock.passed_ms
        if cleaned is None:
            raise self.fail("tombstone", f"{_text(tombstone)} went, and no clean covers it")
        if clock.may_age_since(cleaned.begun_ms):
            return
        shown_ms = now_ms - cleaned.published_ms
        if shown_ms < self.kept_ms(cleaned, now_ms) // 2:
            raise self.fail(
                "tombstone",
                f"{_text(tombstone)} went {shown_ms} ms after the clean was published",
            )
        since_ms = cleaned.published_ms if cleaned.was_leased else cleaned.begun_ms
        kept_ms = self.kept_ms(cleaned, now_ms)
        if now_ms - since_ms < kept_ms:
            raise self.fail(
                "tombstone",
                f"{_text(tombstone)} went {now_ms - since_ms} ms after it became clean; "
                f"delete.retention.ms is {kept_ms}",
            )

    def check_view(self, seen: Iterable[Record], stable: int, gone: "Gone") -> None:
        """`gone`: what expired before a view could take it."""
        shown = last_of_keys(seen)
        for key, record in self.wanted(stable).items():
            actual = shown.get(key)
            if gone.holds(record.offset) or self.is_unsure(record.offset):
                continue
            if record.value is None:
                if actual is not None and actual.offset != record.offset:
                    raise self.fail(
                        "latest-view",
                        f"key {key!r} shows {_text(actual)}, deleted at {record.offset}",
                    )
            elif actual is None or actual.offset != record.offset:
                shows = "nothing" if actual is None else _text(actual)
                raise self.fail(
                    "latest-view", f"key {key!r} shows {shows}, its last is {_text(record)}"
                )

    def check_ranked_view(
        self, seen: Sequence[Record], stable: int, gone: "Gone", horizon: int, *, by_version: bool
    ) -> None:
        """As check_view, of a view that keeps the largest timestamp, or version."""
        by_rank = sorted(
            (
                record
                for batch in self.history
                if batch.header.last_offset < stable
                and not batch.header.is_control
                and self.outcomes[batch.base].state in (NONE, COMMITTED)
                for record in batch.records
            ),
            key=lambda record: (
                _version(record) if by_version else record.timestamp,
                record.offset,
            ),
        )
        offsets = {record.offset for record in seen}
        for key, record in last_of_keys(by_rank).items():
            if gone.holds(record.offset) or self.is_unsure(record.offset):
                continue
            if record.offset in offsets:
                continue
            if record.value is not None:
                raise self.fail("latest-view", f"key {key!r} has not {_text(record)}, its largest")
            kept = [r for r in seen if r.key == key and r.value is not None and r.offset < horizon]
            if kept:
                raise self.fail(
                    "latest-view",
                    f"key {key!r} shows {_text(kept[-1])}, deleted at {record.offset}",
                )


@dataclass(frozen=True)
class Gone:
    """Offsets that a view need not know."""

    ranges: tuple[tuple[int, int], ...]

    def holds(self, offset: int) -> bool:
        return any(first <= offset < end for first, end in self.ranges)


def last_of_keys(records: Iterable[Record]) -> dict[bytes, Record]:
    """The last record of each key; records without a key have none."""
    return {record.key: record for record in records if record.key is not None}


def whole_batches(part: FetchSlice, damaged: Mapping[int, int]) -> tuple[list[Batch], int]:
    """The batches of a slice without those that are damaged, and the offset after it; -1: none."""
    data, results, position, end = part.read(), [], 0, -1
    while position < len(data):
        base, length = struct.unpack_from(">qi", data, position)
        batch = data[position : position + LENGTH_END + length]
        if base in damaged and crc32c(batch[CRC_END:]) != struct.unpack_from(">I", batch, 17)[0]:
            end = damaged[base]
        else:
            results.append(decoded(batch))
            end = results[-1].header.next_offset
        position += len(batch)
    return results, end


def batches_in(data: bytes) -> list[Batch]:
    """The batches of a slice; a checksum that is wrong is an AssertionError."""
    return [
        decoded(data[position : position + header.size_bytes])
        for position, header in walk_headers(data)
    ]


def batches_of(part: FetchSlice) -> list[Batch]:
    return batches_in(part.read())


def _placed(batch: Batch, base_offset: int) -> Batch:
    """A batch as it was sent, with its offsets."""
    records = tuple(
        record._replace(offset=base_offset + at) for at, record in enumerate(batch.records)
    )
    return Batch(batch.header._replace(base_offset=base_offset), records, batch.marker)


def _version(record: Record) -> int:
    """The version in the headers; a tombstone of an erasure has that of the values it found."""
    version = dict(record.headers).get("version")
    return -(1 << 63) if version is None else int.from_bytes(version, "big", signed=True)


def _text(record: Record) -> str:
    return f"{record.offset}={record.value!r:.20}"
