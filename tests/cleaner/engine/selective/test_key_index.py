"""Key indexes: what a selective clean does not read again, and what it never believes."""

import errno
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.engine.clean import run_clean
from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.key_map.map_size import SLOT_BYTES
from cleaner.engine.selective import resolve
from cleaner.engine.selective.key_index import (
    IndexRows,
    KeyIndex,
    UnusableIndexError,
    read_blocks,
    read_index,
    write_index,
)
from cleaner.engine.selective.packed_blocks import PACKED_BLOCK_WORDS
from cleaner.engine.selective.packed_rows import PACKED_BYTES
from cleaner.engine.selective.resolve import UNINDEXED_SHARE_MAX
from cleaner.job import CleanJob, CleanReport, SourceSegment
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.compacted_log import CompactedLog, Producer
from tests.support.draws import cases
from tests.support.storage.logs import FOLDER

VALUE = "v" * 50
SPILL_BYTES = 1 << 30


def log_of(*segments: str) -> CompactedLog:
    """A log with one segment per string; each character is the key of a record."""
    log = CompactedLog()
    for keys in segments:
        add(log, keys)
    return log


def add(log: CompactedLog, keys: str, by: Producer | None = None) -> None:
    for key in keys:
        log.put((key, VALUE), by=by)
    log.roll()


def job_of(log: CompactedLog, slack: float = 0.0, keys: int | None = None) -> CleanJob:
    job = log.job(singly=True, keys=keys)
    return replace(job, slack=slack, spill_bytes_max=SPILL_BYTES)


def clean(log: CompactedLog, slack: float = 0.0, keys: int | None = None) -> CleanReport:
    return log.publish(job_of(log, slack, keys))


def text_of(log: CompactedLog) -> str:
    return "".join((record.key or b"?").decode() for _, batch in log.batches() for record in batch)


def indexes(log: CompactedLog) -> dict[int, bytes]:
    """The key indexes in the folder, by base offset."""
    return {
        int(name[:20]): log.env.read_file(f"{FOLDER}/{name}")
        for name in log.env.listdir(FOLDER)
        if name.endswith(".keys")
    }


def path_of(base_offset: int) -> str:
    return f"{FOLDER}/{base_offset:020d}.keys"


def overwrite(log: CompactedLog, base_offset: int, data: bytes) -> None:
    log.env.open(path_of(base_offset), create=True, write=True, truncate=True).pwrite(data, 0)


# What is read ---------------------------------------------------------------------------------


def test_a_segment_is_read_once_to_resolve_it() -> None:
    log = log_of("abcd", "efgh")
    assert clean(log, slack=9.0).bytes_read == sum(s.size_bytes for s in log.sources())
    assert clean(log, slack=9.0).bytes_read == 0
    add(log, "abxy")
    assert clean(log, slack=9.0).bytes_read == log.sources()[-1].size_bytes


def test_a_segment_that_a_selective_clean_rewrote_is_not_read_again() -> None:
    log = log_of("abcd", "aefg")
    clean(log)
    assert text_of(log) == "bcdaefg"
    assert clean(log, slack=9.0).bytes_read == 0


def blocks_bytes(log: CompactedLog, job: CleanJob) -> int:
    """The bytes of all key indexes that only a rewriting pass needs."""
    blocks = [read_blocks(log.env, job, Recorder(), source) for source in log.sources()]
    return 8 * PACKED_BLOCK_WORDS * sum(map(len, blocks))


def test_a_clean_whose_keys_fit_into_memory_reads_each_index_once_without_its_blocks() -> None:
    log = log_of("abcd", "aefg", "eh")
    log.publish(replace(job_of(log), groups=(log.sources(),)))  # one index of three
    assert text_of(log) == "bcdafgeh"
    add(log, "ijkl")
    clean(log, slack=9.0)
    control, job = Recorder(), job_of(log, slack=9.0)
    run_clean(log.env, job, control)
    assert blocks_bytes(log, job) > 0
    assert control.charged_read == sum(map(len, indexes(log).values())) - blocks_bytes(log, job)


def test_the_rows_of_a_victim_are_read_again_only_if_they_do_not_fit_beside_the_map() -> None:
    def read_by_a_clean(bytes_per_row: int) -> int:
        log = log_of("abcd", "efgh", "a")
        clean(log, slack=9.0)
        control, slots = Recorder(), 9 * 10 // 9 + 2
        job = job_of(log)
        buffer_bytes = slots * SLOT_BYTES + 9 * bytes_per_row
        run_clean(log.env, replace(job, dedupe_buffer_bytes=buffer_bytes), control)
        assert [group.source_base_offsets for group in control.groups] == [(0,)]
        return control.charged_read

    rows_bytes = 4 * PACKED_BYTES
    assert read_by_a_clean(PACKED_BYTES) == read_by_a_clean(PACKED_BYTES - 1) - rows_bytes


def test_a_key_index_has_no_row_of_a_record_that_its_own_segment_supersedes() -> None:
    log = log_of("abaab", "cb")
    job = job_of(log, slack=9.0)
    report = run_clean(log.env, job, Recorder())
    first, second = (read_index(log.env, job, Recorder(), source) for source in log.sources())
    assert (first.records, second.records) == (5, 2)
    assert [row[2] - 1 for row in sorted(rows_of(log, job, first), key=lambda row: row[2])] == [
        3,
        4,
    ]
    assert [segment.live_records for segment in report.liveness] == [1, 2]
    assert clean(log).bytes_read > 0
    assert text_of(log) == "acb"


def rows_of(log: CompactedLog, job: CleanJob, index: KeyIndex) -> list[tuple[int, ...]]:
    rows = IndexRows(log.env, job, Recorder(), index, shards=1)
    words = np.concatenate([words[: count * SLOT_WORDS].copy() for words, count in rows.of(0)])
    rows_read = [tuple(int(word) for word in row) for row in words.reshape(-1, SLOT_WORDS)]
    return sorted(row for row in rows_read if row[2] > log.log.log_start_offset)


@settings(max_examples=cases(few=20, many=60), deadline=None)
@given(seed=st.integers(0, 1 << 32), keys_max=st.sampled_from([1, 3, None]))
def test_the_index_of_a_rewritten_segment_is_that_of_its_bytes(
    seed: int, keys_max: int | None
) -> None:
    rng = random.Random(seed)
    log = CompactedLog()
    for _ in range(3):
        for _ in range(rng.randint(1, 6)):
            add(log, "".join(rng.choices("abcdefgh", k=rng.randint(1, 12))))
        if rng.random() < 0.3:
            log.log.delete_records(rng.randrange(log.log.log_start_offset, log.log.log_end_offset))
        groups = rng.randint(1, 3)
        sources = log.sources()
        job = job_of(log, rng.choice([0.0, 0.3]), keys_max)
        bounds = sorted(rng.sample(range(1, len(sources)), min(groups, len(sources) - 1)))
        parts = [
            tuple(sources[first:end])
            for first, end in pairwise([0, *bounds, len(sources)])
            if first < end
        ]
        log.publish(replace(job, groups=tuple(parts)))
        for source in log.sources():
            other = replace(job_of(log), job_id="other")
            derived = read_index(log.env, other, Recorder(), source)
            found = rows_of(log, other, derived) if derived.records else []
            context = CleanContext(
                log.env, replace(other, first_dirty_offset=other.end_offset), Recorder()
            )
            anew = write_index(context, source)
            assert found == (rows_of(log, other, anew) if anew.records else [])


def test_a_group_without_live_records_is_removed_unread() -> None:
    log = log_of("ab", "cd", "xyz", "abcd")
    clean(log, slack=9.0)
    report = clean(log)
    assert text_of(log) == "xyzabcd"
    assert report.bytes_read == 0
    assert (report.records_before, report.records_after) == (11, 7)
    assert report.bytes_before - report.bytes_after == report.bytes_replaced > 0


def test_the_last_sequence_of_a_producer_stays_of_a_group_without_live_records() -> None:
    log = log_of()
    producer = Producer(7, is_transactional=False)
    add(log, "ab", by=producer)
    add(log, "abc")
    before = log.log.producers.last_records()
    clean(log)
    assert text_of(log) == "abc"
    assert before[7][1] == 1
    assert log.last_offsets()[0] == 1


def test_the_end_of_the_log_stays_of_a_group_without_live_records() -> None:
    log = log_of("ab", "cd")
    job = job_of(log)
    assert job.log_end_offset_is_end
    clean(log)
    assert log.log.log_end_offset == 4


@pytest.mark.parametrize("kind", ["transactions", "no key"])
def test_a_log_that_cannot_be_resolved_is_read_for_that_once(kind: str) -> None:
    log = log_of("abcd")
    if kind == "transactions":
        producer = Producer(9)
        log.write("z", by=producer)
        log.commit(producer)
    else:
        log.put((None, VALUE))
    log.roll()
    add(log, "abcd")
    job = job_of(log)
    first, second = (run_clean(log.env, job, Recorder()) for _ in range(2))
    resolved = sum(s.size_bytes for s in log.sources()[:2])
    assert first.bytes_read - second.bytes_read == resolved
    assert first.resolved_end is second.resolved_end is None


# What is never believed -----------------------------------------------------------------------


def spoil(kind: str, log: CompactedLog, rng: random.Random) -> None:
    """Put something else in place of the first segment's index."""
    data = bytearray(indexes(log)[0])
    if kind == "empty":
        data.clear()
    elif kind == "torn":
        del data[rng.randrange(len(data)) :]
    elif kind == "longer":
        data += bytes(rng.randrange(1, 100))
    elif kind == "a byte":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "of another segment":
        data[:] = indexes(log)[8]
    elif kind == "noise":
        data[:] = rng.randbytes(len(data))
    overwrite(log, 0, bytes(data))


@settings(max_examples=cases(few=30, many=80), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    kind=st.sampled_from(["empty", "torn", "longer", "a byte", "of another segment", "noise"]),
)
def test_a_spoiled_index_changes_nothing_and_is_replaced(seed: int, kind: str) -> None:
    log = log_of("abcdefgh", "aaxbbxcc", "abcdefgi")
    clean(log, slack=9.0)
    spoil(kind, log, random.Random(seed))
    report = clean(log)
    if report.resolved_end is None:  # the rows differ: nothing was written, all was cleaned
        assert 0 not in indexes(log)
    assert text_of(log) == "hxabcdefgi"


def test_an_index_of_bytes_that_were_truncated_is_not_used() -> None:
    log = log_of("ab", "cd", "ef")
    clean(log, slack=9.0)
    before = log.sources()
    log.log.truncate_to(4, now_ms=log.now_ms)
    for key in "ab":
        log.put((key, VALUE))
    log.roll()
    after = log.sources()
    assert [replace(source, content_id=0) for source in after[:2]] == [
        replace(source, content_id=0) for source in before[:2]
    ]
    clean(log)
    assert text_of(log) == "cdab"


@pytest.mark.parametrize(
    "change",
    [
        lambda job, source: (replace(job, hash_key=b"k" * 16), source),
        lambda job, source: (job, replace(source, content_id=source.content_id + 1)),
        lambda job, source: (job, replace(source, content_id=0)),
        lambda job, source: (job, replace(source, size_bytes=source.size_bytes - 1)),
    ],
    ids=["hash key", "content", "content not known", "size"],
)
def test_an_index_is_bound_to_what_it_indexes(
    change: Callable[[CleanJob, SourceSegment], tuple[CleanJob, SourceSegment]],
) -> None:
    log = log_of("abcd", "efgh")
    clean(log, slack=9.0)
    job, source = job_of(log), log.sources()[0]
    assert read_index(log.env, job, Recorder(), source).records == 4
    other_job, other_source = change(job, source)
    with pytest.raises(UnusableIndexError):
        read_index(log.env, other_job, Recorder(), other_source)


def test_damage_that_is_younger_than_the_index_leaves_the_segment_as_it_is() -> None:
    first_covered = 17  # a checksum does not cover the bytes before it, except its own
    size = log_of("a").sources()[0].size_bytes
    for position in range(first_covered, size):
        log = log_of("abc", "ax")
        clean(log, slack=9.0)
        path = f"{FOLDER}/{0:020d}.log"
        data = bytearray(log.env.read_file(path))
        data[size + position] ^= 1  # in the batch of b, which is alive
        log.env.open(path, write=True).pwrite(bytes(data), 0)
        report = run_clean(log.env, job_of(log), Recorder())
        assert [damage.path for damage in report.damaged] == [path], position
        assert log.env.read_file(path) == data, position


def test_a_full_disk_while_indexing_leaves_no_index_and_cleans_the_whole_log() -> None:
    log = log_of("abcd")
    clean(log, slack=9.0)
    add(log, "abcd")
    fault = log.env.fail_on(
        lambda operation, path: operation == "pwrite" and ".keys" in path, errno.ENOSPC
    )
    report = clean(log)
    fault.remove()
    assert report.resolved_end is None
    assert "full" in report.spill_refusal
    assert not indexes(log)
    assert text_of(log) == "abcd"
    assert not any(".cleaned" in name for name in log.env.listdir(FOLDER))


# Lifetime -------------------------------------------------------------------------------------


def test_a_clean_of_the_whole_log_removes_the_indexes() -> None:
    log = log_of("abcd", "aefg")
    clean(log, slack=9.0)
    assert indexes(log).keys() == {0, 4}
    log.clean()
    assert not indexes(log)


def test_retention_removes_the_index_with_its_segment() -> None:
    log = log_of("abcd", "efgh")
    clean(log, slack=9.0)
    log.log.delete_records(4)
    assert log.log.retention.expire(log.now_ms)
    log.log.retention.purge_deleted(1 << 60)
    assert indexes(log).keys() == {4}


class Retaining(Recorder):
    """A control during whose job retention removes the segments below an offset."""

    def __init__(self, log: CompactedLog, below: int, after: int) -> None:
        """`after`: the number of reads before it does so."""
        super().__init__()
        self.log = log
        self.below = below
        self.reads_left = after

    def read_bytes(self, count: int) -> None:
        super().read_bytes(count)
        self.reads_left -= 1
        if self.reads_left == -1:
            self.log.log.delete_records(self.below)
            assert self.log.log.retention.expire(self.log.now_ms)


@pytest.mark.parametrize(("slack", "together"), [(0.0, 1), (None, 3)])
def test_retention_during_a_clean_costs_its_segments_only(
    slack: float | None, together: int
) -> None:
    """Whenever the oldest segments go, the groups of the others are as without them."""
    for after in range(1000):
        log = log_of("abcd", "aefg", "bbhi", "ajkc", "ae")
        clean(log, slack=9.0)
        retaining = Retaining(log, 8, after)
        sources = log.sources()
        groups = (tuple(sources[:together]), *((source,) for source in sources[together:]))
        job = replace(job_of(log), groups=groups, slack=slack, by_index=True)
        report = run_clean(log.env, job, retaining)
        if retaining.reads_left >= 0:
            break
        assert not report.damaged
        kept = {group.source_base_offsets[-1]: group.records_after for group in retaining.groups}
        assert kept[12] == 3
        assert kept[8] >= 3, "with records of removed segments, if it read them before"
    assert after > 10


def test_an_index_without_its_segment_is_removed_by_the_next_clean() -> None:
    log = log_of("ab", "cd", "ab")
    clean(log)
    assert text_of(log) == "cdab"
    clean(log, slack=9.0)
    assert indexes(log).keys() == {2, 4}


# Shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [1, 300, 3000])
@pytest.mark.parametrize("shards", [1, 2, 64, 1024])
def test_the_shards_of_an_index_have_each_row_once(records: int, shards: int) -> None:
    log = CompactedLog()
    log.put(*((f"key-{number}", "v") for number in range(records)))
    log.roll()
    job, source = job_of(log), log.sources()[0]
    context = CleanContext(log.env, replace(job, first_dirty_offset=job.end_offset), Recorder())
    index = write_index(context, source)
    assert read_index(log.env, job, Recorder(), source).records == records
    rows = IndexRows(log.env, job, Recorder(), index, shards)
    offsets: list[int] = []
    for shard in range(shards):
        for words, count in rows.of(shard):
            assert count <= rows.count(shard)
            by_row = words.reshape(-1, SLOT_WORDS)[:count]
            assert all(int(low) * shards >> 64 == shard for low in by_row[:, 0])
            offsets += [int(value) - 1 for value in by_row[:, 2]]
    assert sorted(offsets) == list(range(records))


# Cleans of the whole log by index ----------------------------------------------------------------


def bytes_of(log: CompactedLog) -> dict[int, bytes]:
    """The bytes of the closed segments, by base offset."""
    return {
        source.base_offset: log.env.read_file(f"{FOLDER}/{source.base_offset:020d}.log")
        for source in log.sources()
    }


@settings(max_examples=cases(few=25, many=200), deadline=None)
@given(seed=st.integers(0, 1 << 32), keys_max=st.sampled_from([2, None]))
def test_a_clean_of_the_whole_log_by_index_leaves_what_any_other_leaves(
    seed: int, keys_max: int | None
) -> None:
    logs = []
    for by_index in (True, False):
        rng = random.Random(seed)
        log = CompactedLog()
        producer = Producer(7, is_transactional=False)
        for _ in range(3):
            for _ in range(rng.randint(1, 5)):
                for _ in range(rng.randint(1, 8)):
                    value = rng.choice([None, VALUE, VALUE])
                    log.put((rng.choice("abcdefgh"), value), by=rng.choice([None, producer]))
                log.roll()
            if rng.random() < 0.3:
                log.log.delete_records(
                    rng.randrange(log.log.log_start_offset, log.log.log_end_offset)
                )
            if rng.random() < 0.5:
                log.pass_retention()
            job = log.job(singly=rng.random() < 0.7, keys=keys_max)
            report = log.publish(replace(job, by_index=by_index, spill_bytes_max=SPILL_BYTES))
            assert report.next_dirty_offset == job.end_offset
            log.dirty = report.next_dirty_offset
            logs.append((bytes_of(log), sorted(report.horizons, key=lambda h: h.base_offset)))
    half = len(logs) // 2
    assert logs[:half] == logs[half:]


def test_a_clean_of_the_whole_log_by_index_reads_only_what_it_rewrites() -> None:
    log = log_of("abcd", "aefg", "hijk")
    clean(log, slack=9.0)
    first = log.sources()[0].size_bytes
    job = replace(log.job(singly=True), by_index=True, spill_bytes_max=SPILL_BYTES)
    report = log.publish(job)
    assert text_of(log) == "bcdaefghijk"
    assert 0 < report.bytes_read <= first  # the other two have nothing to remove
    assert report.next_dirty_offset == job.end_offset
    assert set(indexes(log)) == {0, 4, 8}
    assert clean(log, slack=9.0).bytes_read == 0


def test_a_whole_log_of_which_most_has_no_key_index_is_cleaned_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolve, "UNINDEXED_SHARE_MAX", UNINDEXED_SHARE_MAX)
    reads = []
    for unindexed in ((), (0,), (0, 4), None):
        log = log_of("abcd", "aefg", "hijk")
        if unindexed is not None:
            clean(log, slack=9.0)
        for base in unindexed or ():
            log.env.unlink(f"{FOLDER}/{base:020d}.keys")
        job = replace(log.job(singly=True), by_index=True, spill_bytes_max=SPILL_BYTES)
        reads.append(log.publish(job).bytes_read)
        assert text_of(log) == "bcdaefghijk"
        assert len(indexes(log)) == (3 if unindexed in {(), (0,)} else 0)
    none, one, most, all_of_it = reads
    assert none < one < most == all_of_it
