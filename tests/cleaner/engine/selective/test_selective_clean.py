"""Selective cleans: what they rewrite and leave, and when the whole log is cleaned instead."""

import random
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.engine.clean import run_clean
from cleaner.engine.selective.victims import (
    MERGED_SEGMENTS_MIN,
    GroupLiveness,
    choose_victims,
    split_groups,
)
from cleaner.job import CleanJob, CleanReport, SourceSegment
from storage.format.compression import LZ4
from storage.swap.swap_journal import execute_swap, plan_swap
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.compacted_log import CompactedLog, Producer
from tests.support.draws import cases
from tests.support.storage.logs import FOLDER

VALUE = "v" * 50
SPILL_BYTES = 1 << 30


def log_of(*segments: str, codec: int = 0) -> CompactedLog:
    """A log with one segment per string; each character is the key of a record."""
    log = CompactedLog()
    for keys in segments:
        for key in keys:
            log.put((key, VALUE), codec=codec)
        log.roll()
    return log


def clean(log: CompactedLog, slack: float = 0.5, **changes: object) -> CleanReport:
    job = replace(log.job(singly=True, **changes), slack=slack, spill_bytes_max=SPILL_BYTES)  # type: ignore[arg-type]
    return publish(log, job)


def publish(log: CompactedLog, job: CleanJob) -> CleanReport:
    """Run the job and publish its groups in the opposite order: each is correct alone."""
    control = Recorder()
    report = run_clean(log.env, job, control)
    log.log.flush()
    for group in reversed(control.groups):
        facts = {facts.base_offset: facts for facts in log.log.segment_facts()}
        outputs = [group.output] if group.output is not None else []
        plan = plan_swap(FOLDER, [facts[base] for base in group.source_base_offsets], outputs)
        log.log.swap.pin(group.source_base_offsets)
        execute_swap(log.env, plan)
        log.log.swap.attach(plan, log.log.swap.open_outputs(plan))
    log.groups_replaced = len(control.groups)
    return report


def records(log: CompactedLog) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(r.offset, r.key, r.value) for _, batch in log.batches() for r in batch]


def keys(log: CompactedLog) -> str:
    return "".join((key or b"?").decode() for _, key, _ in records(log))


def latest(log: CompactedLog) -> dict[bytes | None, tuple[int, bytes | None]]:
    return {key: (offset, value) for offset, key, value in records(log)}


def test_only_the_segment_with_the_most_garbage_is_rewritten() -> None:
    log = log_of("abcd", "aefg", "ahij", "aklm", "bcd")
    report = clean(log, slack=0.2)
    assert keys(log) == "aefgahijaklmbcd"
    assert log.groups_replaced == 1
    assert report.resolved_end == log.log.segment_facts()[-1].base_offset


def test_a_log_within_its_slack_is_not_rewritten() -> None:
    log = log_of("abcd", "aefg", "hijk")
    report = clean(log, slack=0.5)
    assert report.live_bytes == pytest.approx(report.bytes_after * 11 / 12, rel=0.05)
    assert log.groups_replaced == 0
    assert report.bytes_written == 0
    assert keys(log) == "abcdaefghijk"


def test_a_selective_clean_reports_the_live_bytes_of_every_segment_that_it_leaves() -> None:
    log = log_of("abcd", "aefg", "ahij", "aklm", "bcd")
    report = clean(log, slack=0.2)
    sizes = [facts.size_bytes for facts in log.log.segment_facts()[:-1]]
    assert [segment.size_bytes for segment in report.liveness] == sizes
    shares = [s.live_bytes / s.size_bytes for s in report.liveness]
    assert shares == [0.75, 0.75, 1.0, 1.0]
    assert [s.live_records for s in report.liveness] == [3, 3, 4, 3]


@pytest.mark.parametrize("verify", [False, True])
def test_only_named_victims_are_rewritten_and_lose_all_superseded_records(verify: bool) -> None:
    log = log_of("abcd", "aefg", "ahij", "aklm", "bcd")
    second = log.log.segment_facts()[1].base_offset
    report = clean(log, slack=0.2, victims=(second,), verify=verify)
    assert keys(log) == "abcd" + "efg" + "ahij" + "aklm" + "bcd"
    assert log.groups_replaced == 1
    assert report.next_dirty_offset == 0  # garbage is left


def test_named_victims_are_rewritten_in_a_log_within_its_slack() -> None:
    log = log_of("aabcdefgh", "bij")
    report = clean(log, slack=5.0, victims=(0,))
    assert keys(log) == "acdefgh" + "bij"
    assert report.groups == 1


def test_without_slack_all_garbage_goes() -> None:
    log = log_of("abcd", "aefg", "ahij", "bcd")
    clean(log, slack=0.0)
    assert keys(log) == "efgahijbcd"


def test_a_segment_without_live_records_disappears() -> None:
    log = log_of("ab", "cd", "ab", "ef")
    clean(log, slack=0.0)
    assert [facts.base_offset for facts in log.log.segment_facts()] == [2, 4, 6, 8]


def test_the_first_dirty_offset_stays_and_the_next_whole_clean_removes_the_rest() -> None:
    log = log_of("abcd", "aefg", "ahij", "aklm", "bcd")
    assert clean(log, slack=0.2).next_dirty_offset == 0
    log.clean()
    assert keys(log) == "efghijaklmbcd"


def test_a_selective_clean_neither_stamps_nor_removes_tombstones() -> None:
    log = log_of("ab", "cd")
    log.put(("a", None), ("b", None))
    log.put(("c", VALUE))
    log.roll()
    log.write("c")
    log.roll()
    for _ in range(3):
        clean(log, slack=0.0)
        log.pass_retention()
    assert not any(header.has_delete_horizon for header, _ in log.batches())
    assert [key for _, key, value in records(log) if value is None] == [b"a", b"b"]


def test_an_expired_tombstone_stays_until_the_whole_log_is_cleaned() -> None:
    log = log_of("a")
    log.put(("a", None), ("b", VALUE))
    log.roll()
    log.clean()
    log.pass_retention()
    log.write("b")
    log.roll()
    clean(log, slack=0.0)
    assert latest(log)[b"a"][1] is None


@pytest.mark.parametrize("kind", ["transactions", "no key", "damage", "no scratch space"])
def test_what_cannot_be_resolved_is_cleaned_as_a_whole(kind: str) -> None:
    log = log_of("abcd", "aefg", "ahij")
    changes: dict[str, object] = {}
    if kind == "transactions":
        producer = Producer(9)
        log.write("z", by=producer)
        log.commit(producer)
    elif kind == "no key":
        log.put((None, "x"))
    log.roll()
    if kind == "damage":
        path = f"{FOLDER}/{4:020d}.log"
        log.env.open(path, write=True).pwrite(b"\xff", 90)
    job = replace(log.job(singly=True, **changes), slack=9.0, spill_bytes_max=SPILL_BYTES)  # type: ignore[arg-type]
    if kind == "no scratch space":
        job = replace(job, spill_bytes_max=0)
    report = run_clean(log.env, job, Recorder())
    assert report.resolved_end is None
    whole = run_clean(log.env, replace(job, slack=None, job_id="whole"), Recorder())
    assert report.next_dirty_offset == whole.next_dirty_offset
    assert report.bytes_after == whole.bytes_after
    assert report.damaged == whole.damaged


def test_records_below_the_log_start_supersede_nothing_and_are_garbage() -> None:
    log = log_of("aaaa", "bcde", "fghi")
    log.log.delete_records(3)
    clean(log, slack=0.0)
    assert keys(log) == "abcdefghi"


def test_a_failed_disk_leaves_no_files() -> None:
    log = log_of("abab", "abab")
    job = replace(log.job(singly=True), slack=0.0, spill_bytes_max=SPILL_BYTES)
    names = set(log.env.listdir(FOLDER))
    run_clean(log.env, job, Recorder())
    left = set(log.env.listdir(FOLDER)) - names
    left = {name for name in left if not name.endswith(".keys")}
    assert all(f".{job.job_id}.cleaned" in name for name in left)
    assert not any(".snapshot." in name for name in left), "the scratch file is removed"


@settings(max_examples=cases(few=20, many=60), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    slack=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    keys_max=st.sampled_from([1, 3, None]),
    codec=st.sampled_from([0, LZ4]),
)
def test_random_logs_keep_the_latest_records_and_the_bound(
    seed: int, slack: float, keys_max: int | None, codec: int
) -> None:
    rng = random.Random(seed)
    log = CompactedLog()
    for _ in range(rng.randint(1, 5)):
        for _ in range(rng.randint(1, 8)):
            for _ in range(rng.randint(1, 6)):
                pairs = [
                    (rng.choice("abcdefgh"), None if rng.random() < 0.2 else VALUE)
                    for _ in range(rng.randint(1, 4))
                ]
                log.put(*pairs, codec=codec)
            log.roll()
        before, kept = records(log), latest(log)
        report = clean(log, slack, keys=keys_max)
        after = records(log)
        assert latest(log) == kept
        assert set(after) <= set(before)
        assert report.resolved_end == log.log.log_end_offset
        garbage = len(after) - len(kept)
        if slack == 0:
            assert garbage == 0
        if rng.random() < 0.3:
            log.clean()
            assert Counter(key for _, key, _ in records(log)).most_common(1)[0][1] == 1
            assert latest(log) == kept


def test_of_two_groups_with_as_much_garbage_the_older_one_is_rewritten() -> None:
    old = GroupLiveness(segments=1, size_bytes=100, live_bytes=60, age_offsets=1000)
    young = GroupLiveness(segments=1, size_bytes=100, live_bytes=60, age_offsets=10)
    rest = GroupLiveness(segments=1, size_bytes=200, live_bytes=200, age_offsets=500)
    assert choose_victims([old, rest, young], slack=0.15) == [0]
    assert choose_victims([young, rest, old], slack=0.15) == [2]


# Victims ------------------------------------------------------------------------------------------


def parts_of(*live_shares: int) -> list[list[int]]:
    """Split a group of segments of 100 bytes with so many live bytes, and return these again."""
    sources = [
        SourceSegment(i, i + 1, 100, 0, 0, content_id=live) for i, live in enumerate(live_shares)
    ]
    parts = split_groups([sources], lambda source: source.content_id, end_offset=1 << 20)
    return [[source.content_id for source in part] for part in parts]


def test_the_segment_with_the_largest_gain_is_a_group_of_its_own() -> None:
    assert parts_of(100, 20, 10, 90) == [[100, 20], [10], [90]]
    assert parts_of(0, 100) == [[0], [100]]
    assert parts_of(50) == [[50]]


def test_a_group_of_empty_segments_can_be_split() -> None:
    sources = [SourceSegment(i, i + 1, 0, 0, 0) for i in range(3)]
    parts = split_groups([sources], lambda _: 0, end_offset=3)
    assert [source for part in parts for source in part] == sources


def test_a_group_that_is_merged_anyway_is_not_split() -> None:
    shares = [100] * (MERGED_SEGMENTS_MIN - 1)
    assert parts_of(0, *shares) == [[0, *shares]]


@given(st.lists(st.integers(1, 12), max_size=6), st.integers(0, 1 << 32))
def test_a_split_keeps_every_segment_in_its_order(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    sources = [SourceSegment(i, i + 1, 100, 0, 0, rng.randint(0, 100)) for i in range(sum(sizes))]
    remaining = iter(sources)
    groups = [list(islice(remaining, size)) for size in sizes]
    parts = split_groups(groups, lambda source: source.content_id, len(sources))
    assert [source for part in parts for source in part] == sources
    assert all(any(set(part) <= set(group) for group in groups) for part in parts)


def test_a_clean_leaves_the_full_neighbours_of_a_victim() -> None:
    log = log_of("abcd", "efgh", "efg")
    job = log.job()
    assert len(job.groups) == 1
    publish(log, replace(job, slack=0.0, spill_bytes_max=SPILL_BYTES))
    assert log.groups_replaced == 1
    assert [facts.base_offset for facts in log.log.segment_facts()] == [0, 4, 8, 11]
    assert keys(log) == "abcd" + "h" + "efg"


@given(
    st.lists(st.tuples(st.integers(1, 10), st.integers(1, 1000), st.floats(0, 1)), max_size=20),
    st.floats(0, 3),
)
def test_victims_keep_the_bound_and_none_is_needless(
    draws: list[tuple[int, int, float]], slack: float
) -> None:
    groups = [
        GroupLiveness(segments=n, size_bytes=size, live_bytes=int(size * share))
        for n, size, share in draws
    ]
    victims = choose_victims(groups, slack)
    live = sum(group.live_bytes for group in groups)
    left = sum(
        group.size_bytes - group.live_bytes for i, group in enumerate(groups) if i not in victims
    )
    assert left <= slack * live
    assert all(i in victims for i, g in enumerate(groups) if g.segments >= MERGED_SEGMENTS_MIN)
    chosen = [i for i in victims if groups[i].segments < MERGED_SEGMENTS_MIN]
    if chosen:  # without the last one, there would be too much
        fullest = max(chosen, key=lambda i: (groups[i].live_bytes / groups[i].size_bytes, i))
        group = groups[fullest]
        assert left + group.size_bytes - group.live_bytes > slack * live
