"""Random logs of several producers, written and cleaned in turns, beside a model in plain Python.

After every clean: the batches are those of the model, and what a client may rely on holds. The
numbered invariants:
1 the last record of each key stays; 2 offsets stay; 3 what is not cleanable is as it was; 4 aborted
data is never seen; 5 markers outlive their batches; 7 producers are known after a restart from the
log alone; 9 a clean is idempotent. That markers are not matched by key (6) and how long tombstones
stay (8) are rules of the model.
"""

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleaner.engine.key_map.map_size import slots_for
from cleaner.job import CleanJob, CleanReport, SourceSegment
from storage.format.batch import ControlType, read_header, walk_headers
from storage.format.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD
from storage.format.txn_index import TxnIndexEntry
from tests.support.cleaner.clean_model import ModelResult, model_clean, model_expired
from tests.support.cleaner.cleaning import assert_same_batch
from tests.support.cleaner.compacted_log import DELETE_RETENTION_MS, CompactedLog, Producer
from tests.support.draws import cases

PROPERTY = settings(
    max_examples=cases(few=20, many=60), deadline=None, suppress_health_check=list(HealthCheck)
)
KEYS = ["a", "b", "c", "d", "e", ""]
CODECS = [NONE, NONE, NONE, GZIP, SNAPPY, LZ4, ZSTD]
EXPIRATION_MS = 3 * DELETE_RETENTION_MS


class Rounds:
    """A log, the clients that write to it, and the checks around each clean."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.log = CompactedLog()
        self.idempotent = [Producer(n, is_transactional=False) for n in (1, 2)]
        self.transactional = [Producer(n) for n in (11, 12, 13)]
        self.open: set[int] = set()

    # What clients do

    def write(self) -> None:
        rng = self.rng
        pairs: list[tuple[str | None, str | None]] = []
        for _ in range(rng.choice([1, 1, 2, 4])):
            key = rng.choice(KEYS) if rng.random() > 0.05 else None
            value = None if rng.random() < 0.2 else f"{rng.random()}" * rng.choice([0, 1, 5])
            pairs.append((key, value))
        by = rng.choice([None, *self.idempotent, *self.transactional, *self.transactional])
        existing = self.log.log.producers.last_records()
        if by is not None and existing.get(by.producer_id, (0, 0))[1] < 0:
            by.sequence = 0  # its epoch is new to the log
        if by is not None and by.is_transactional:
            self.open.add(by.producer_id)
        self.log.put(*pairs, by=by, codec=rng.choice(CODECS))

    def end_transaction(self) -> None:
        producer = self.rng.choice(self.transactional)
        if producer.producer_id not in self.open and self.rng.random() < 0.7:
            return
        self.open.discard(producer.producer_id)
        if self.rng.random() < 0.3:  # as the newer protocol does with each of its transactions
            producer.epoch += 1
            producer.sequence = 0
        self.log.end(producer, self.rng.choice([ControlType.COMMIT, ControlType.ABORT]))

    def roll(self) -> None:
        self.log.roll()
        if self.rng.random() < 0.2:
            self.log.log._state.log_end_offset += self.rng.choice([1, 5, 1 << 20])
            self.log.write("a")  # a log does not end with a gap

    def wait(self) -> None:
        self.log.now_ms += self.rng.choice([1, DELETE_RETENTION_MS // 2, DELETE_RETENTION_MS])
        if self.rng.random() < 0.2:
            self.log.log.producers.expire(self.log.now_ms, EXPIRATION_MS)

    # What the cleaner does

    def cleanable_end(self) -> int:
        """The base of the segment that holds the first undecided offset."""
        stable = self.log.log.last_stable_offset
        return max(
            facts.base_offset
            for facts in self.log.log.segment_facts()
            if facts.base_offset <= stable
        )

    def sources(self, end: int) -> list[SourceSegment]:
        return [source for source in self.log.sources() if source.base_offset < end]

    def clean(self) -> None:
        rng, log = self.rng, self.log
        end = self.cleanable_end()
        if not self.sources(end):
            return
        keys = rng.choice([None, 1, 2, 4])
        job = log.job(
            keys=keys,
            end_offset=end,
            first_dirty_offset=rng.choice([log.dirty, log.dirty, log.dirty, 0]),
            read_buffer_bytes=rng.choice([1, 1100, 1 << 16]),
            drop_expired_tombstones=rng.random() < 0.9,
        )
        sources = [source for group in job.groups for source in group]
        cuts = [at for at in range(1, len(sources)) if rng.random() < 0.5]
        bounds = [0, *cuts, len(sources)]
        groups = [tuple(sources[a:b]) for a, b in pairwise(bounds)]
        job = replace(job, groups=tuple(groups))
        slots = slots_for(job.dedupe_buffer_bytes, end - job.first_dirty_offset)
        before = self.look(end)
        expected = model_clean(job, before.batches, slots * 9 // 10)
        report = log.publish(job)
        log.dirty = report.next_dirty_offset
        assert report.next_dirty_offset == expected.map_end
        assert report.next_dirty_offset > job.first_dirty_offset or job.first_dirty_offset == end
        assert report.keys_indexed == expected.keys
        self.check(before, expected, report, job)

    def clean_expired(self) -> None:
        sources = self.sources(self.cleanable_end())
        chosen = [source for source in sources if self.rng.random() < 0.7]
        if not chosen:
            return
        end = chosen[-1].next_base_offset
        job = self.log.job(
            groups=tuple((source,) for source in chosen),
            expired_only=True,
            first_dirty_offset=end,
            end_offset=end,
        )
        before = self.look(end)
        expected = model_expired(job, before.batches)
        report = self.log.publish(job)
        self.check(before, expected, report, job)

    def settle(self) -> None:
        """Clean until nothing changes: data goes, then its marker is stamped, then all is still."""
        if not self.sources(self.cleanable_end()):
            return
        for _ in range(4):
            job = self.log.job(singly=True, end_offset=self.cleanable_end(), first_dirty_offset=0)
            before = self.look(job.end_offset)
            expected = model_clean(job, before.batches, 1 << 30)
            self.check(before, expected, self.log.publish(job), job)
        assert self.log.groups_replaced == 0, "9: a clean is idempotent"

    # What must hold

    def look(self, end: int) -> "Seen":
        log = self.log
        raw = log.log.reader.read(
            log.log.log_start_offset, 1 << 26, end_offset=log.log.log_end_offset
        ).read()
        parts = [raw[at : at + header.size_bytes] for at, header in walk_headers(raw)]
        while parts and read_header(parts[-1]).next_offset < log.log.log_end_offset:
            raw = log.log.reader.read(
                read_header(parts[-1]).next_offset, 1 << 26, end_offset=log.log.log_end_offset
            ).read()
            if not raw:
                break
            parts += [raw[at : at + header.size_bytes] for at, header in walk_headers(raw)]
        return Seen(parts, end, self.log)

    def check(
        self, before: "Seen", expected: ModelResult, report: CleanReport, job: CleanJob
    ) -> None:
        after = self.look(before.end)
        assert len(after.batches) == len(expected.batches)
        for actual, (requested, source) in zip(after.batches, expected.batches, strict=True):
            assert_same_batch(actual, requested, read_header(source).codec)
        assert after.rest == before.rest, "3: what is not cleanable is as it was"
        assert after.latest == before.latest, "1, 4: readers see the same last value of each key"
        txn_index_entries = {entry.last_offset: entry for entry in before.aborted}
        entries = [entry for entry in after.aborted if entry.last_offset < before.end]
        replaced = {
            header.base_offset
            for received, source in expected.batches
            if received != source and (header := read_header(source))
        }
        assert all(txn_index_entries[entry.last_offset] == entry for entry in entries)
        wanted_entries = {e.last_offset for e in expected.entries if e.last_offset < before.end}
        assert wanted_entries <= {entry.last_offset for entry in entries}
        # An entry that is not needed any more goes when its marker is stamped, at the latest.
        assert not ({e.last_offset for e in entries} - wanted_entries) & replaced
        self.check_horizons(report, job)
        self.check_reopened(before)

    def check_horizons(self, report: CleanReport, job: CleanJob) -> None:
        """Each segment that was read says when the next tombstone or marker in it can go."""
        facts = {facts.base_offset: facts for facts in self.log.log.segment_facts()}
        for horizon in report.horizons:
            segment = facts[horizon.base_offset]
            assert segment.size_bytes == horizon.size_bytes
            owned = [
                header.base_timestamp
                for header, records in self.log.batches()
                if segment.base_offset <= header.base_offset < segment.next_base_offset
                and header.has_delete_horizon
                and (header.is_control or any(record.value is None for record in records))
            ]
            if owned and job.end_offset >= segment.next_base_offset == min(
                segment.next_base_offset, report.next_dirty_offset
            ):
                assert horizon.horizon_ms == min(owned)

    def check_reopened(self, before: "Seen") -> None:
        again = self.log.reopened()
        assert again.log.log_end_offset == before.log_end_offset, "2: offsets are not reused"
        assert visible(again) == before.latest, "4: also without any index"
        assert again.log.last_stable_offset == self.log.log.last_stable_offset, (
            "5: a marker survives while a batch of its transaction does"
        )
        live = self.log.log.producers.last_records()
        results = again.log.producers.last_records()
        assert {producer: results.get(producer) for producer in live} == live, (
            "7: each producer's epoch and last sequence come from the log alone"
        )


class Seen:
    """What a log looks like from outside at one moment."""

    def __init__(self, parts: list[bytes], end: int, log: CompactedLog) -> None:
        self.end = end
        self.batches = [part for part in parts if read_header(part).base_offset < end]
        self.rest = parts[len(self.batches) :]
        self.latest = visible(log)
        self.aborted: list[TxnIndexEntry] = log.aborted()
        self.log_end_offset = log.log.log_end_offset


def visible(log: CompactedLog) -> dict[str, tuple[int, str]]:
    """What a read_committed consumer has at the last stable offset: key -> (offset, value)."""
    aborted = log.aborted()
    state: dict[str, tuple[int, str]] = {}
    for header, records in log.batches():
        gone = header.is_transactional and any(
            entry.producer_id == header.producer_id
            and entry.first_offset <= header.last_offset
            and header.base_offset <= entry.last_offset
            for entry in aborted
        )
        if gone or header.is_control or header.base_offset >= log.log.last_stable_offset:
            continue
        for record in records:
            if record.key is None:
                continue
            state.pop(record.key.decode(), None)
            if record.value is not None:
                state[record.key.decode()] = (record.offset, record.value.decode())
    return state


@PROPERTY
@given(st.integers(0, 1 << 32), st.integers(5, 80))
def test_rounds_of_writing_and_cleaning_leave_what_the_rules_say(seed: int, steps: int) -> None:
    rounds = Rounds(seed)
    actions = [
        *[rounds.write] * 12,
        *[rounds.end_transaction] * 6,
        *[rounds.roll] * 4,
        rounds.wait,
        rounds.clean,
        rounds.clean,
        rounds.clean_expired,
    ]
    for _ in range(steps):
        rounds.rng.choice(actions)()
    for producer in rounds.transactional:
        if producer.producer_id in rounds.open:
            rounds.log.abort(producer)
    rounds.log.roll()
    rounds.clean()
    rounds.settle()
    rounds.log.now_ms += DELETE_RETENTION_MS
    rounds.clean()
    rounds.clean_expired()
    rounds.settle()
