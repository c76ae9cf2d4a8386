"""A check of a whole log: it counts what is alive, and finds what differs from what is known."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.selective.key_index import (
    IndexRows,
    SegmentKeys,
    read_blocks,
    read_index,
    write_appended_index,
)
from cleaner.engine.selective.packed_rows import pack_rows
from cleaner.engine.verify.check_log import check_log
from cleaner.job import CleanAbortedError, CleanJob
from cleaner.verification import IndexState, LogCheck, LogCheckRequest
from storage.format.index import OffsetIndex
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.compacted_log import CompactedLog, Producer
from tests.support.draws import cases
from tests.support.storage.logs import FOLDER

VALUE = "v" * 50
SPILL_BYTES = 1 << 30
LZ4 = 3


def log_of(*segments: str) -> CompactedLog:
    """A log with one segment per string; each character is the key of a record."""
    log = CompactedLog()
    for keys in segments:
        for key in keys:
            log.put((key, VALUE))
        log.roll()
    return log


def job_of(log: CompactedLog, keys: int | None = None) -> CleanJob:
    return replace(log.job(singly=True, keys=keys), spill_bytes_max=SPILL_BYTES)


def check(
    log: CompactedLog, request: LogCheckRequest | None = None, *, keys: int | None = None
) -> LogCheck:
    request = request or LogCheckRequest(first_dirty_offset=log.dirty)
    result = check_log(log.env, job_of(log, keys), request, Recorder())
    assert not [name for name in log.env.listdir(FOLDER) if name.endswith(".cleaned")]
    return result


def digested(before: LogCheck) -> LogCheckRequest:
    """A request to compare a log with what an earlier check found."""
    return LogCheckRequest(0, digest_end=before.end_offset, digests=before.digests)


def resolve(log: CompactedLog) -> None:
    """Write the key index of every closed segment."""
    log.publish(replace(job_of(log), slack=1000.0))


def path_of(base_offset: int, kind: str) -> str:
    return f"{FOLDER}/{base_offset:020d}{kind}"


def test_it_counts_the_live_records_of_each_segment() -> None:
    log = log_of("abc", "abx")
    log.put(("x", None), ("y", VALUE))
    log.roll()
    found = check(log)
    assert [(s.records, s.live, s.tombstones) for s in found.segments] == [
        (3, 1, 0), (3, 2, 0), (2, 2, 1),
    ]  # fmt: skip
    assert (found.keys, found.end_offset) == (5, 8)
    assert found.segments[0].live_bytes == found.segments[0].size_bytes // 3


def test_every_byte_that_a_check_reads_is_charged_to_the_budget() -> None:
    log = log_of("abc", "abx")
    resolve(log)
    control = Recorder()
    found = check_log(log.env, job_of(log), LogCheckRequest(0), control)
    size_bytes = sum(source.size_bytes for source in log.sources())
    assert found.bytes_read == 2 * size_bytes
    assert control.charged_read > found.bytes_read  # the scratch file and the indexes
    assert control.charged_write > 0


def test_an_aborted_check_leaves_no_file() -> None:
    log = log_of("abc", "abx")
    for calls in range(12):
        with suppress(CleanAbortedError):
            check_log(log.env, job_of(log), LogCheckRequest(0), Recorder(abort_after=calls))
        assert not [name for name in log.env.listdir(FOLDER) if name.endswith(".cleaned")]


def test_records_without_a_key_and_aborted_ones_are_counted_apart() -> None:
    log = log_of("ab")
    producer = Producer(9)
    log.put(("a", VALUE), ("b", VALUE), by=producer)
    log.abort(producer)
    log.put((None, VALUE), ("c", VALUE))
    log.roll()
    found = check(log)
    assert [s.live for s in found.segments] == [2, 1]
    assert (found.segments[1].aborted, found.segments[1].keyless) == (2, 1)


def test_records_below_the_log_start_offset_do_not_count() -> None:
    log = log_of("abcd", "efgh")
    resolve(log)
    log.log.delete_records(2)
    found = check(log)
    assert [s.records for s in found.segments] == [2, 4]
    assert [s.index for s in found.segments] == [IndexState.CURRENT] * 2


def test_a_clean_log_has_nothing_superseded_below_its_first_dirty_offset() -> None:
    log = log_of("abcd", "abx")
    log.clean()
    log.write("a")
    log.roll()
    assert check(log).uncleaned == 0


def test_a_superseded_record_below_the_first_dirty_offset_is_found() -> None:
    log = log_of("abcd", "abx")
    found = check(log, LogCheckRequest(first_dirty_offset=7))
    assert found.uncleaned == 2


# Key indexes ------------------------------------------------------------------------------------


def index_states(log: CompactedLog) -> list[str]:
    return [segment.index.value for segment in check(log).segments]


def test_a_key_index_with_the_rows_of_its_segment_is_current() -> None:
    log = log_of("abcd", "efgh")
    assert index_states(log) == ["missing", "missing"]
    resolve(log)
    assert index_states(log) == ["current", "current"]


def test_a_key_index_of_another_content_is_stale() -> None:
    log = log_of("abcd", "efgh")
    resolve(log)
    data = log.env.read_file(path_of(0, ".keys"))
    log.env.open(path_of(4, ".keys"), create=True, write=True, truncate=True).pwrite(data, 0)
    assert index_states(log) == ["current", "stale"]


@pytest.mark.parametrize("position", [5, -5])
def test_a_key_index_with_a_flipped_bit_is_damaged(position: int) -> None:
    log = log_of("abcd", "efgh")
    resolve(log)
    data = bytearray(log.env.read_file(path_of(0, ".keys")))
    data[position] ^= 1
    log.env.open(path_of(0, ".keys"), write=True).pwrite(bytes(data), 0)
    assert index_states(log) == ["damaged", "current"]
    assert index_states(log) == ["missing", "current"], "no clean shall use it"


@pytest.mark.parametrize("log_start", [0, 2])
def test_a_key_index_without_superseded_records_is_current(log_start: int) -> None:
    log = log_of("aabcb", "bd")
    log.log.delete_records(log_start)
    resolve(log)
    assert index_states(log) == ["current", "current"]


@pytest.mark.parametrize("change", ["one row less", "another offset", "another key"])
def test_a_key_index_with_other_rows_is_wrong(change: str) -> None:
    log = log_of("abcd", "efgh")
    resolve(log)
    job, source = job_of(log), log.sources()[0]
    index = read_index(log.env, job, Recorder(), source)
    rows = np.concatenate([rows for rows, _ in IndexRows(log.env, job, Recorder(), index, 1).of(0)])
    if change == "one row less":
        rows = rows[:-SLOT_WORDS]
    else:
        rows[2 if change == "another offset" else 0] ^= np.uint64(7)
    packed = pack_rows(rows, source.base_offset)
    blocks = read_blocks(log.env, job, Recorder(), source)
    log.env.unlink(path_of(0, ".keys"))
    keys = SegmentKeys(packed, blocks, has_tombstones=False)
    write_appended_index(log.env, job, Recorder(), keys, source)
    assert index_states(log) == ["wrong", "current"]
    assert index_states(log) == ["missing", "current"], "no clean shall use it"


def test_a_log_with_transactions_does_not_use_its_key_indexes() -> None:
    log = log_of("ab")
    producer = Producer(9)
    log.write("z", by=producer)
    log.commit(producer)
    log.roll()
    resolve(log)
    assert index_states(log)[1] in ("missing", "unused")


# Offset indexes ---------------------------------------------------------------------------------


def write_index(log: CompactedLog, base_offset: int, *entries: tuple[int, int]) -> None:
    index = OffsetIndex()
    for relative_offset, position in entries:
        index.append(relative_offset, position)
    file = log.env.open(path_of(base_offset, ".index"), create=True, write=True, truncate=True)
    file.pwrite(index.to_bytes(), 0)


def misplaced(log: CompactedLog) -> list[int]:
    return [segment.misplaced for segment in check(log).segments]


def test_the_offset_indexes_of_a_log_lead_to_its_batches() -> None:
    log = log_of("abcd", "abcdefgh")
    log.clean(index_interval_bytes=0)
    assert misplaced(log) == [0]
    entries = OffsetIndex.from_bytes(log.env.read_file(path_of(0, ".index")), "", 1 << 20)
    assert len(entries) > 3


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ((1, 1), 0),  # the batch of the entry
        ((2, 1), 0),  # an earlier batch: a consumer reads more than it needs
        ((0, 1), 1),  # offset 0 is in the batch before it
        ((1, 0.5), 1),  # no batch begins there
        ((2, 3), 1),  # offset 2 is in the batch before it
    ],
)
def test_an_entry_that_leads_past_a_record_is_found(entry: tuple[int, float], wrong: int) -> None:
    log = log_of("abcd")
    batch_bytes = log.sources()[0].size_bytes // 4
    write_index(log, 0, (entry[0], int(entry[1] * batch_bytes)))
    assert misplaced(log) == [wrong]


def test_an_unreadable_offset_index_is_no_difference_because_it_is_built_anew() -> None:
    log = log_of("abcd")
    log.env.open(path_of(0, ".index"), create=True, write=True, truncate=True).pwrite(b"abc", 0)
    assert misplaced(log) == [0]
    log.env.unlink(path_of(0, ".index"))
    assert misplaced(log) == [0]


# Digests ----------------------------------------------------------------------------------------


def test_a_log_that_did_not_change_has_the_digest_that_it_had() -> None:
    log = log_of("abcd", "abx")
    before = check(log)
    log.write("a", "q")
    log.roll()
    found = check(log, digested(before))
    assert (found.compared, found.changed) == (2, ())


def test_a_clean_keeps_the_digest() -> None:
    log = log_of("abcd", "abx", "cy")
    before = check(log)
    log.clean()
    after = check(log, digested(before))
    assert (after.compared, after.changed) == (3, ())
    assert sum(d.records for d in after.digests) == sum(d.records for d in before.digests)


def test_a_record_that_was_lost_changes_the_digest_of_its_range() -> None:
    log = log_of("abcd", "efgh", "ax")
    before = check(log)
    data = log.env.read_file(path_of(4, ".log"))
    batch_bytes = len(data) // 4  # a batch for each record
    shorter = data[:batch_bytes] + data[2 * batch_bytes :]
    log.env.open(path_of(4, ".log"), write=True, truncate=True).pwrite(shorter, 0)
    job = job_of(log)
    source = replace(job.groups[1][0], size_bytes=len(shorter))
    job = replace(job, groups=(job.groups[0], (source,), job.groups[2]))
    found = check_log(log.env, job, digested(before), Recorder())
    assert [(d.first_offset, d.records) for d in found.changed] == [(4, 3)]


def test_another_value_changes_the_digest() -> None:
    log, other = log_of("ab"), CompactedLog()
    other.put(("a", VALUE))
    other.put(("b", VALUE.replace("v", "w", 1)))
    other.roll()
    found = check(other, digested(check(log)))
    assert [changed.records for changed in found.changed] == [2]


def test_compression_and_batches_do_not_change_the_digest() -> None:
    log, other = log_of("abcd"), CompactedLog()
    other.put(*((key, VALUE) for key in "abcd"), codec=LZ4)
    other.roll()
    assert check(other, digested(check(log))).changed == ()


def test_a_range_that_lost_records_to_retention_is_not_compared() -> None:
    log = log_of("abcd", "efgh")
    before = check(log)
    log.log.delete_records(2)
    found = check(log, digested(before))
    assert (found.compared, found.changed) == (1, ())


# Damage, and random logs ------------------------------------------------------------------------


def test_a_damaged_segment_is_reported_and_the_others_are_checked() -> None:
    log = log_of("abcd", "efgh", "ax")
    data = bytearray(log.env.read_file(path_of(4, ".log")))
    data[-3] ^= 1
    log.env.open(path_of(4, ".log"), write=True).pwrite(bytes(data), 0)
    found = check(log)
    assert [segment.damage is not None for segment in found.segments] == [False, True, False]
    assert (found.segments[0].live, found.segments[2].live) == (3, 2)
    assert found.uncleaned is None


@settings(max_examples=cases(few=20, many=80), deadline=None)
@given(seed=st.integers(0, 1 << 32), keys_max=st.sampled_from([1, 3, None]))
def test_a_check_finds_what_a_reader_finds_with_a_map_of_any_size(
    seed: int, keys_max: int | None
) -> None:
    rng = random.Random(seed)
    log = CompactedLog()
    producers = [Producer(number) for number in (1, 2, 3)]
    for _ in range(rng.randint(1, 5)):
        for _ in range(rng.randint(1, 4)):
            pairs = [
                (rng.choice("abcdefgh"), rng.choice([None, VALUE, "w"]))
                for _ in range(rng.randint(1, 6))
            ]
            producer = rng.choice(producers) if rng.random() < 0.3 else None
            log.put(*pairs, by=producer, codec=rng.choice([0, LZ4]))
            if producer is not None:
                rng.choice([log.commit, log.abort])(producer)
        log.roll()
    found = check(log, keys=keys_max)
    latest = log.latest()
    counts = Counter[int]()
    for offset, _ in latest.values():
        source = next(s for s in log.sources() if s.base_offset <= offset < s.next_base_offset)
        counts[source.base_offset] += 1
    assert not any(segment.misplaced for segment in found.segments)
    values = {s.base_offset: s.live - s.tombstones for s in found.segments}
    assert {base: count for base, count in values.items() if count} == dict(counts)
    assert {d.first_offset: d.records for d in found.digests} == values
    log.clean()
    assert check(log, digested(found), keys=keys_max).changed == ()
