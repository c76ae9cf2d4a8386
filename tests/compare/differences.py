"""What the two sides left, compared line by line; the exceptions have names.

What may differ, and is checked to be nothing else (docs/reference/compare-with-kafka.md):
- End of round. Kafka keeps the last batch of each round, empty; we keep the last one of the log.
  So everything is compared with our cleaner told to do as Kafka does (`Rule.LAST_OF_ROUND`). By our
  own rule the records are the same, and nothing is kept for longer.
- Below the log start, where no reader sees anything, Kafka's files keep records and are cleaned on;
  ours lose them, and segments that lie there wholly are left to retention. So after DeleteRecords
  markers and empty batches may go earlier with us, since what they stood for is out of sight, and
  markers later, since it was not cleaned away.
- Small offset map. The two sides clean in different steps. Kafka, in a step that begins after an
  abort marker of the same segment, takes later transactions of that producer for aborted, and
  leaves what they supersede for good: superseded records may be missing with us.
- Base timestamps. Of a batch rebuilt without a delete horizon Kafka takes the first record left, we
  leave it as it was. With LogAppendTime the deltas, which nobody reads, may differ, too. Every
  record's own time is the same.
- Empty segments. Kafka leaves a file of 0 bytes where every record went, we leave none.
- After an unclean stop we may know more of producers, from snapshots and emptied markers; so
  emptied batches that keep a producer known may differ, and entries of the transaction index that
  hide nothing. Kafka passes over an emptied marker and may know an older epoch; an index made anew
  has a transaction begin with what is left of it, with Kafka perhaps the empty end of a round.
  After any stop Kafka forgets the producers of a log without records; and so, until they are heard
  of again, their coordinators' epochs and the beginnings of their open transactions.
- After an unclean stop Kafka counts a transaction that is open, and began below the log start
  (DeleteRecords), from its first batch after it; we count it from its beginning, as both do before
  the stop, if such a batch is left. No case has all three.
- A first dirty or last stable offset may lie anywhere in a hole of the log, on both sides.
- Selective cleans leave superseded records and tombstones for a later clean of the whole log. The
  last value of each key is the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from tests.compare.script import Case
from tests.compare.truth import ClockReading, moments_of


class Batch(NamedTuple):
    """A printed batch: its line, split, and the lines of its records."""

    words: tuple[str, ...]
    records: tuple[str, ...]

    @property
    def line(self) -> str:
        return " ".join(self.words)

    @property
    def is_control(self) -> bool:
        return "control=true" in self.words

    @property
    def first(self) -> int:
        return int(self.words[1])

    @property
    def last(self) -> int:
        return int(self.words[2])

    @property
    def producer(self) -> tuple[int, int]:
        """Its id and epoch."""
        word = next(word for word in self.words if word.startswith("producer="))
        producer_id, _, epoch = word.removeprefix("producer=").partition("/")
        return int(producer_id), int(epoch)

    @property
    def producer_id(self) -> int:
        return self.producer[0]

    @property
    def has_horizon(self) -> bool:
        return "horizon=-1" not in self.words

    def without(self, *fields: str) -> str:
        """The line without some of its fields."""
        return " ".join(word for word in self.words if word.partition("=")[0] not in fields)


NULL: Final = "null"  # a key or value
NO_BATCH = Batch(("batch", "-1", "-1", "(none)"), ())


@dataclass(frozen=True)
class Difference:
    """The first one of a case."""

    seed: int
    dump: str
    what: str
    kafka: str
    ours: str

    def __str__(self) -> str:
        head = f"seed {self.seed}, look {self.dump}: {self.what}"
        return f"{head}\n  Kafka: {self.kafka}\n  ours:  {self.ours}"


@dataclass(frozen=True)
class Observation:
    """One side at one moment."""

    batches: list[Batch]
    state: list[str]

    def lines(self, word: str) -> list[str]:
        """The lines of the state that begin with `word`."""
        return [line for line in self.state if line.startswith(f"{word} ")]

    def number(self, word: str) -> int:
        """What the state says of `word`."""
        return int(self.lines(word)[0].split()[1])

    @property
    def start(self) -> int:
        """The log start offset."""
        return self.number("start")

    def aborted(self, *, with_stable: bool) -> list[str]:
        """The transaction index; each entry with the last stable offset of its time, or without."""
        return [line if with_stable else line.rpartition(" ")[0] for line in self.lines("aborted")]

    def producer_ids(self) -> frozenset[int]:
        """The producers it knows."""
        return frozenset(int(line.split()[1]) for line in self.lines("producer"))

    def visible(self) -> list[Batch]:
        """Batches from the log start on; of one that reaches over it the records are compared."""
        return [batch for batch in self.batches if batch.first >= self.start]

    def data(self) -> list[str]:
        """What a reader of everything gets."""
        lines = [line for batch in self.batches if not batch.is_control for line in batch.records]
        return [line for line in lines if int(line.split()[1]) >= self.start]

    def committed(self, stable: int) -> list[str]:
        """What a reader of committed records gets, which it finds as Kafka's consumer does."""
        entries = [[int(word) for word in line.split()[1:4]] for line in self.lines("aborted")]
        result = []
        for batch in self.batches:
            if batch.is_control or batch.last >= stable:
                continue
            is_aborted = "txn=true" in batch.words and any(
                producer == batch.producer_id and first <= batch.last and last >= batch.first
                for producer, first, last in entries
            )
            result += [] if is_aborted else batch.records
        return [line for line in result if int(line.split()[1]) >= self.start]


def look(folder: Path, name: str) -> Observation:
    """What the Java side printed of one side, and its state."""
    results: list[tuple[tuple[str, ...], list[str]]] = []
    for line in (folder / f"{name}.batches").read_text().splitlines():
        if line.startswith("batch "):
            results.append((tuple(line.split()), []))
        else:
            results[-1][1].append(line)
    batches = [Batch(words, tuple(records)) for words, records in results]
    return Observation(batches, (folder / f"{name}.state").read_text().splitlines())


Found: TypeAlias = Iterator[tuple[str, str, str]]


def compare(case: Case, home: Path) -> Difference | None:
    """The first difference between kafka/ of `home` and our folders beside it."""
    failed = home / "kafka" / "failed"
    if failed.exists():
        return Difference(case.seed, "-", "Kafka failed", failed.read_text(), "")
    forgotten: frozenset[int] = frozenset()
    for number, moment in enumerate(moments_of(case)):
        name = f"{number:02}"
        remote, strict = look(home / "kafka", name), look(home / "varve", name)
        moment.forgotten = forgotten
        if moment.was_reopened and remote.start == remote.number("end"):
            forgotten |= strict.producer_ids() - remote.producer_ids()
        for subject, kafka, local in _strictly(case, remote, strict, moment):
            return Difference(case.seed, name, subject, kafka, local)
        own = look(home / "varve-own", name)
        for subject, kafka, local in _by_own_rule(case, remote, own, moment):
            return Difference(case.seed, name, f"own rule: {subject}", kafka, local)
        selective = look(home / "varve-selective", name)
        for subject, kafka, local in _selectively(case, remote, selective, moment):
            return Difference(case.seed, name, f"selective: {subject}", kafka, local)
    return None


def _strictly(case: Case, remote: Observation, local: Observation, moment: ClockReading) -> Found:
    """By Kafka's rule: everything is the same, but for what has a name."""
    if "small map" in case.traits:
        yield from _records(remote, local, moment, may_lack=True)
        return
    if moment.was_unclean or _starts_inside(case, remote):
        yield from _batches(_with_data(remote), _with_data(local))
        yield from _nothing_more(case, remote, local, moment)
    else:
        yield from _batches(remote.visible(), local.visible())
        yield from _lines("marker", _markers(remote), _markers(local))
        if moment.forgotten:
            yield from _no_more_aborted(remote, local, moment)
        else:
            entries = [side.aborted(with_stable=True) for side in (remote, local)]
            yield from _lines("aborted", *entries)
    yield from _records(remote, local, moment, may_lack=False)
    yield from _offsets(remote, local, moment)
    yield from _producers(remote, local, moment)


def _by_own_rule(
    case: Case, remote: Observation, local: Observation, moment: ClockReading
) -> Found:
    """The same records; of markers and empty batches none that Kafka has not."""
    is_small = "small map" in case.traits
    yield from _records(remote, local, moment, may_lack=is_small)
    if not is_small:
        yield from _nothing_more(case, remote, local, moment)
        yield from _offsets(remote, local, moment)


def _selectively(
    case: Case, remote: Observation, local: Observation, moment: ClockReading
) -> Found:
    """The last value of each key, and nothing that was not committed."""
    if "retention" in case.traits:
        return  # what is deleted depends on sizes
    yield from _committed_only(local, moment)
    is_held_back = _is_held_back(remote, local, moment)
    stable = local.number("stable") if is_held_back else remote.number("stable")
    yield from _lines("last value", _last_values(remote, stable), _last_values(local, stable))
    for word in ("start", "end"):
        yield from _lines(word, [str(remote.number(word))], [str(local.number(word))])


def _last_values(side: Observation, stable: int) -> list[str]:
    """The last committed records of all keys, without deleted keys, by offset."""
    by_key = {line.split()[3]: line for line in side.committed(stable)}
    alive = [line for key, line in by_key.items() if key != NULL and line.split()[4] != NULL]
    return sorted(alive, key=lambda line: int(line.split()[1]))


def _batches(remote: list[Batch], batches: list[Batch]) -> Found:
    for batch, other in zip_longest(remote, batches, fillvalue=NO_BATCH):
        masked = ("crc",) if batch.has_horizon else ("base", "crc")
        if batch.without(*masked) != other.without(*masked):
            yield "batch", batch.line, other.line
        same_deltas = "LogAppendTime" not in batch.words
        if same_deltas and batch.without("crc") == other.without("crc") and batch != other:
            yield "bytes of a batch", batch.line, other.line


def _with_data(side: Observation) -> list[Batch]:
    return [batch for batch in side.visible() if batch.records and not batch.is_control]


def _starts_inside(case: Case, remote: Observation) -> bool:
    """Whether there may be batches of segments that lie below the log start."""
    return "delete records" in case.traits and remote.start > 0


def _nothing_more(
    case: Case, remote: Observation, local: Observation, moment: ClockReading
) -> Found:
    """Of what readers can meet, batches and aborted transactions, all of ours are in Kafka too."""
    existing = {(batch.first, batch.last) for batch in remote.batches}
    for batch in local.visible():
        keeps_producer = moment.was_unclean and batch.is_control and not batch.records
        is_late = batch.is_control and _starts_inside(case, remote)
        if (batch.first, batch.last) not in existing and not (keeps_producer or is_late):
            yield "kept by us alone", NO_BATCH.line, batch.line
    yield from _no_more_aborted(remote, local, moment)


def _no_more_aborted(remote: Observation, local: Observation, moment: ClockReading) -> Found:
    entries = remote.aborted(with_stable=False)
    for entry in local.aborted(with_stable=False):
        producer_id, _, last = map(int, entry.split()[1:])
        # An entry whose batches are gone hides nothing, as after a recovery.
        hides = any(batch.producer_id == producer_id and batch.last <= last
                    for batch in _with_data(local))  # fmt: skip
        is_known = (
            entry in entries
            or (moment.was_unclean and _begins_later(remote, entry))
            or (producer_id in moment.forgotten and _begins_hidden(remote, entry))
        )
        if not is_known and last >= local.start and hides:
            yield "aborted transaction kept by us alone", "(none)", entry


def _begins_later(remote: Observation, entry: str) -> bool:
    """Whether Kafka has the entry of the same marker, which begins with batches it emptied.

    A recovery makes the index anew, and there a transaction begins with what is left of it.
    """
    producer_id, first, last = map(int, entry.split()[1:])
    for other in remote.aborted(with_stable=False):
        other_id, other_first, other_last = map(int, other.split()[1:])
        if (other_id, other_last) == (producer_id, last) and other_first < first:
            between = [
                batch
                for batch in remote.batches
                if batch.producer_id == producer_id and other_first <= batch.first < first
            ]
            return all(not batch.records and not batch.is_control for batch in between)
    return False


def _begins_hidden(remote: Observation, entry: str) -> bool:
    """Whether Kafka has the entry of the same marker, which begins with the first visible batch.

    Ours begins below the log start: Kafka had forgotten the producer and its transaction.
    """
    producer_id, first, last = map(int, entry.split()[1:])
    if first >= remote.start:
        return False
    for other in remote.aborted(with_stable=False):
        other_id, other_first, other_last = map(int, other.split()[1:])
        if (other_id, other_last) == (producer_id, last):
            between = range(remote.start, other_first)
            return other_first >= remote.start and not any(
                batch.producer_id == producer_id and batch.last in between
                for batch in remote.batches
            )
    return False


def _records(
    remote: Observation, local: Observation, moment: ClockReading, *, may_lack: bool
) -> Found:
    """Data records, whatever batches they lie in, for both kinds of readers.

    `may_lack`: what is superseded by a later committed record need not be there.
    """
    stable = local.number("stable")
    their_stable = stable if _is_held_back(remote, local, moment) else remote.number("stable")
    for which in ("data record", "committed record"):
        item, other = (
            (remote.data(), local.data())
            if which == "data record"
            else (remote.committed(their_stable), local.committed(stable))
        )
        if may_lack:
            present = set(other)
            item = [
                line
                for line in item
                if line in present or not moment.is_superseded(int(line.split()[1]))
            ]
        yield from _lines(which, item, other)
    yield from _committed_only(local, moment)


def _committed_only(local: Observation, moment: ClockReading) -> Found:
    for line in local.committed(local.number("stable")):
        if not moment.written[int(line.split()[1])].is_committed:
            yield "shown to readers of committed records", "(not committed)", line


def _is_held_back(remote: Observation, local: Observation, moment: ClockReading) -> bool:
    """Whether we still wait for an open transaction that Kafka has forgotten (an empty log)."""
    return moment.hidden_since(remote.start) is not None and local.number("stable") <= local.start


def _offsets(remote: Observation, local: Observation, moment: ClockReading) -> Found:
    for word in ("start", "end"):
        yield from _lines(word, [str(remote.number(word))], [str(local.number(word))])
    # Between the two there must be something to read, or they mean the same.
    for word in ("dirty",) if _is_held_back(remote, local, moment) else ("dirty", "stable"):
        offsets = [max(side.number(word), side.start) for side in (remote, local)]
        between = range(min(offsets), max(offsets))
        if any(batch.last in between for batch in remote.batches):
            yield word, str(offsets[0]), str(offsets[1])


def _producers(remote: Observation, local: Observation, moment: ClockReading) -> Found:
    lines = local.lines("producer")
    if not moment.was_reopened:
        yield from _lines("producer", remote.lines("producer"), lines)
        return
    existing = {line.split()[1]: line for line in lines}
    for line in remote.lines("producer"):
        entry = existing.pop(line.split()[1], "(none)")
        is_named = moment.was_unclean and (
            _tells_more(entry, line) or _tells_the_epoch(local, entry, line, moment)
        )
        if entry != line and not is_named and not _was_forgotten(remote, entry, line, moment):
            yield "producer", line, entry
    for entry in existing.values():
        offset = int(entry.split()[4].removeprefix("offset="))
        if not moment.was_unclean and offset >= remote.start:
            yield "producer", "(none)", entry


def _tells_more(local: str, remote: str) -> bool:
    """Whether of one producer all that Kafka knows is known, and perhaps more."""
    if local == "(none)":
        return False
    _, _, our_epoch, *our_place, our_open, _ = local.split()
    _, _, epoch, *place, is_open, _ = remote.split()
    same_place = our_place == place or place[0] == "sequence=-1"
    return (our_epoch, our_open) == (epoch, is_open) and same_place


def _tells_the_epoch(local: Observation, value: str, remote: str, moment: ClockReading) -> bool:
    """Whether an emptied marker was the producer's last word, which Kafka passes over.

    Then we know the epoch of that marker, which was the last one written, and Kafka an older one,
    that of the last batch it can read.
    """
    if value == "(none)":
        return False
    _, producer, our_epoch, *our_place, our_open, our_coordinator = value.split()
    _, _, epoch, _, _, is_open, coordinator = remote.split()
    owner, newest = int(producer), _number(our_epoch)
    is_last = moment.epochs[owner] == newest > _number(epoch)
    is_emptied = any(
        batch.is_control and not batch.records and batch.producer == (owner, newest)
        for batch in local.batches
    )
    says_no_more = our_place == ["sequence=-1", "offset=-1"] and our_coordinator == coordinator
    return is_last and is_emptied and says_no_more and (our_open, is_open) == ("open=-1",) * 2


def _was_forgotten(remote: Observation, value: str, line: str, moment: ClockReading) -> bool:
    """Whether Kafka knows less only because it forgot the producer when its log was empty.

    It has no coordinator's epoch then, and begins an open transaction that began below the log
    start with its next batch.
    """
    producer_id = int(line.split()[1])
    if producer_id not in moment.forgotten or value == "(none)":
        return False
    *local, our_open, our_coordinator = value.split()
    *existing, is_open, coordinator = line.split()
    first = moment.open_since(producer_id)
    is_hidden = 0 <= first < remote.start and _number(our_open) == first < _number(is_open)
    return (
        local == existing
        and (our_open == is_open or is_hidden)
        and coordinator in (our_coordinator, "coordinator=-1")
    )


def _number(word: str) -> int:
    return int(word.partition("=")[2])


def _markers(side: Observation) -> list[str]:
    return [line for batch in side.visible() if batch.is_control for line in batch.records]


def _lines(subject: str, remote: list[str], local: list[str]) -> Found:
    for item, other in zip_longest(remote, local, fillvalue="(none)"):
        if item != other:
            yield subject, item, other
