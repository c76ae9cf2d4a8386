"""The cases that the tests of Kafka's cleaner pin down, and none of the other files here does."""

from unittest.mock import patch

import pytest

from cleaner.engine import context
from cleaner.engine.clean import run_clean
from cleaner.job import CleanAbortedError, CleanedGroup
from storage.format.batch import Buffer, build_batch, decode_records, read_header
from storage.format.compression import NONE, ZSTD
from storage.format.filenames import LOG, file_name
from tests.support.cleaner.clean_cases import CODECS, batch, damaged, offsets, record
from tests.support.cleaner.cleaning import (
    DIRECTORY,
    NOW_MS,
    Recorder,
    batches_of,
    clean,
    clean_job,
    cleaned_log,
    output_bytes,
    segment,
    write_segments,
)
from tests.support.cleaner.compacted_log import CompactedLog, Producer
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.timestamps import first_since

# What goes, and what is counted


def test_only_the_keys_that_were_written_again_vanish_and_each_source_is_read_once_more() -> None:
    env = MemoryEnv()
    parts = [segment(i * 4, [batch(*(record(i * 4 + j, f"k{i * 4 + j}") for j in range(4)))],
                     i * 4 + 4) for i in range(3)]  # fmt: skip
    again = [record(12 + i, f"k{n}") for i, n in enumerate((1, 3, 5, 7, 9))]
    parts.append(segment(12, [batch(*again)], 17))
    sources = write_segments(env, parts)
    report, groups = clean(env, clean_job([sources], first_dirty_offset=12))
    assert offsets(output_bytes(env, groups[0])) == [0, 2, 4, 6, 8, 10, 11, 12, 13, 14, 15, 16]
    assert report.bytes_read == sum(s.size_bytes for s in sources) + sources[3].size_bytes


@pytest.mark.parametrize("codec", CODECS)
def test_a_key_that_was_deleted_has_no_value_afterwards(codec: int) -> None:
    log = CompactedLog()
    for key in range(8):
        log.put((f"k{key}", "v"), codec=codec)
    for key in range(0, 8, 2):
        log.put((f"k{key}", None), codec=codec)
    log.roll()
    log.clean()
    assert set(log.latest()) == {"k1", "k3", "k5", "k7"}
    log.pass_retention()
    log.clean()
    assert log.offsets() == [1, 3, 5, 7]


def test_the_report_counts_what_was_read_written_and_invalid() -> None:
    env = MemoryEnv()
    parts = [
        segment(0, [batch(record(0, "a"), record(1, "b"))], 2),
        segment(2, [batch(record(2, "a"), record(3, "b"), record(4, None), record(5, "a"))], 6),
    ]
    sources = write_segments(env, parts)
    job = clean_job([sources], first_dirty_offset=2, dedupe_buffer_bytes=4 * 24)
    report, groups = clean(env, job)
    assert (report.records_before, report.records_after) == (6, 2)
    assert (report.keys_indexed, report.map_full, report.next_dirty_offset) == (2, False, 6)
    assert report.records_without_key == 1
    assert report.bytes_before == sum(source.size_bytes for source in sources)
    assert report.bytes_written == report.bytes_after == len(output_bytes(env, groups[0]))
    assert report.map_utilization == pytest.approx(2 / 3)
    assert report.map_seconds >= 0 <= report.rewrite_seconds
    assert report.passes == 2


def test_dropping_keyless_records_takes_away_exactly_their_batches() -> None:
    env = MemoryEnv()
    keyless = [batch(record(i, None)) for i in (1, 3)]
    keyed = [batch(record(i, f"k{i}")) for i in (0, 2)]
    part = segment(0, [keyed[0], keyless[0], keyed[1], keyless[1]], 4)
    report, groups = clean(env, clean_job([write_segments(env, [part])]))
    assert batches_of(output_bytes(env, groups[0])) == keyed
    assert report.records_without_key == 2


def test_batches_that_go_as_a_whole_are_passed_without_being_unpacked() -> None:
    log = CompactedLog()
    for _ in range(50):
        log.put(("a", "v" * 100), ("b", "w"), codec=ZSTD)
    log.roll()
    job = log.job(read_buffer_bytes=1024)
    unpacked: list[int] = []
    control = Recorder()
    original = context.decompress

    def counted(codec: int, packed: Buffer, limit_bytes: int) -> bytes:
        unpacked.append(codec)
        return original(codec, packed, limit_bytes)

    with patch.object(context, "decompress", counted):
        report = run_clean(log.env, job, control, one_pass=False)
    assert report.records_after == 2
    assert len(unpacked) == 51, "each once for the map, and the one that has survivors"


# How far a clean gets


def test_a_map_of_one_key_gets_on_by_a_record_at_least() -> None:
    log = CompactedLog()
    for round_ in range(2):
        for key in range(4):
            log.put((f"k{key}", f"{round_}"))
    log.roll()
    reached = []
    while log.dirty < 8:
        log.clean(keys=1)
        reached.append(log.dirty)
    assert reached == [1, 2, 3, 4, 5, 6, 7, 8]
    assert log.offsets() == [4, 5, 6, 7]


def test_segments_behind_the_first_uncleanable_one_are_as_they_were() -> None:
    log = CompactedLog()
    for _ in range(4):
        log.write("a", "b")
        log.write("a", "b")
        log.roll()
    sizes = {source.base_offset: source.size_bytes for source in log.sources()}
    log.clean(end_offset=8)
    remaining = {source.base_offset: source.size_bytes for source in log.sources()}
    assert log.offsets() == [6, 7, *range(8, 16)]
    assert {base: remaining[base] for base in (8, 12)} == {base: sizes[base] for base in (8, 12)}


def test_the_map_covers_exactly_the_segments_asked_for() -> None:
    log = CompactedLog()
    for first in range(0, 9, 3):
        log.write(*(f"k{n}" for n in range(first, first + 3)))
        log.roll()
    for first, end, keys in ((0, 9, 9), (0, 3, 3), (3, 6, 3), (3, 9, 6), (9, 9, 0)):
        report = run_clean(log.env, log.job(first_dirty_offset=first, end_offset=end), Recorder())
        assert (report.keys_indexed, report.next_dirty_offset) == (keys, end)


def test_offsets_with_a_gap_between_them_are_indexed_up_to_the_last() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(record(0, "a")), batch(record(7206178, "b"))], 7206179)
    report, groups = clean(env, clean_job([write_segments(env, [part])]))
    assert (report.keys_indexed, report.next_dirty_offset, groups) == (2, 7206179, [])


def test_a_map_that_fills_up_knows_what_came_before_and_nothing_behind() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(*(record(i, f"k{i}") for i in range(5)))], 5)
    sources = write_segments(env, [part])
    job = clean_job([sources], first_dirty_offset=2, dedupe_buffer_bytes=3 * 24)
    report, _ = clean(env, job)
    assert (report.keys_indexed, report.map_full, report.next_dirty_offset) == (2, True, 4)
    assert report.map_utilization == 1.0


def test_gaps_at_the_ends_of_segments_are_passed() -> None:
    env = MemoryEnv()
    parts = [
        segment(0, [batch(record(0, "a"))], 20),
        segment(20, [], 40),
        segment(40, [batch(record(45, "a"))], 100),
    ]
    sources = write_segments(env, parts)
    for end, first in ((20, 0), (40, 0), (100, 0), (100, 46), (40, 20)):
        used = [source for source in sources if source.next_base_offset <= end]
        job = clean_job([used], first_dirty_offset=first, job_id=f"run-{end}-{first}")
        report, _ = clean(env, job)
        assert report.next_dirty_offset == end


def test_offsets_that_no_index_can_hold_leave_their_segment_alone() -> None:
    env = MemoryEnv()
    far = 1 << 31
    parts = [
        segment(0, [batch(record(0, "a"))], 1),
        segment(1, [batch(record(1, "a")), batch(record(far + 1, "b"))], far + 2),
        segment(far + 2, [batch(record(far + 2, "b"))], far + 3),
    ]
    sources = write_segments(env, parts)
    report, groups = clean(env, clean_job([(source,) for source in sources]))
    assert [position for _, position, _ in report.damaged] == [len(parts[1].batches[0])]
    assert (report.next_dirty_offset, report.cleaned) == (1, ((far + 2, far + 3),))
    assert [group.source_base_offsets for group in groups] == [(0,)]
    assert offsets(cleaned_log(env, parts, groups)) == [1, far + 1, far + 2]


# Tombstones


def test_how_long_a_tombstone_stays_does_not_hang_on_the_times_of_records() -> None:
    log = CompactedLog()
    log.put(("young", "v"))
    log.now_ms -= 10**9
    log.put(("old", None))
    log.now_ms += 10**9
    log.roll()
    for _ in range(3):
        log.clean()
        assert log.offsets() == [0, 1]
    log.pass_retention()
    log.clean()
    assert log.offsets() == [0]


def test_without_a_retention_a_tombstone_still_goes_in_the_second_clean_only() -> None:
    log = CompactedLog()
    log.put(("a", "v"), ("a", None), ("b", "v"))
    log.roll()
    log.clean(delete_retention_ms=0)
    assert log.offsets() == [1, 2]
    log.clean(delete_retention_ms=0)
    assert log.offsets() == [2]


def test_a_tombstone_stays_for_ever_if_its_horizon_is_no_timestamp() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(record(0, "a", None)), batch(record(1, "b"), record(2, "b"))], 3)
    sources = write_segments(env, [part])
    _, groups = clean(env, clean_job([sources], delete_retention_ms=(1 << 63) - 1))
    tombstone, _ = batches_of(output_bytes(env, groups[0]))
    assert tombstone == part.batches[0]


def test_times_that_are_farther_than_64_bits_from_the_horizon_survive_it() -> None:
    """Produce accepts them; the delta to the horizon wraps, as in Kafka."""
    env = MemoryEnv()
    early_ms = NOW_MS - (1 << 63) + 1500
    records = [record(0, "a", None), record(1, "b")]
    records = [each._replace(timestamp=early_ms) for each in records]
    sources = write_segments(env, [segment(0, [batch(*records)], 2)])
    _, groups = clean(env, clean_job([sources]))
    (cleaned,) = batches_of(output_bytes(env, groups[0]))
    header = read_header(cleaned)
    assert header.has_delete_horizon
    assert decode_records(cleaned, header) == records


def test_a_horizon_once_given_is_not_changed_with_the_setting() -> None:
    log = CompactedLog()
    log.put(("a", None), ("b", "v"))
    log.roll()
    log.clean(delete_retention_ms=5000)
    for retention_ms in (0, 10**9):
        report = log.clean(delete_retention_ms=retention_ms)
        assert [horizon.horizon_ms for horizon in report.horizons] == [log.now_ms + 5000]


def test_a_horizon_that_has_lost_its_tombstones_is_not_told_of() -> None:
    log = CompactedLog()
    log.put(("a", None), ("b", "v"))
    log.roll()
    log.clean()
    log.pass_retention()
    log.clean()
    report = log.clean()
    assert log.batches()[0][0].has_delete_horizon
    assert [horizon.horizon_ms for horizon in report.horizons] == [-1]


# Interruptions


def test_an_abort_ends_the_clean_with_its_error() -> None:
    log = CompactedLog()
    log.write("a", "a")
    log.roll()
    with pytest.raises(CleanAbortedError):
        run_clean(log.env, log.job(), Recorder(abort_after=0))


@pytest.mark.parametrize("one_pass", [False, True])
def test_of_a_source_that_retention_took_away_nothing_is_left_and_the_rest_is_cleaned(
    one_pass: bool,
) -> None:
    env = MemoryEnv()
    parts = [segment(i, [batch(record(i, "abc"[i]))], i + 1) for i in range(3)]
    sources = write_segments(env, parts)
    control = Recorder()
    job = clean_job([(sources[0],), tuple(sources[1:])])
    for base in (0, 1):
        env.unlink(f"{DIRECTORY}/{file_name(base, LOG)}")
    report = run_clean(env, job, control, one_pass=one_pass)
    gone, rest = control.groups
    assert (gone.source_base_offsets, gone.output) == ((0,), None)
    assert rest.source_base_offsets == (1, 2)
    assert (rest.records_before, rest.records_after) == (1, 1)
    assert report.next_dirty_offset == 3


def test_sources_that_go_between_two_groups_leave_the_finished_ones_as_they_are() -> None:
    env = MemoryEnv()
    parts = [segment(i, [batch(record(i, "a"))], i + 1) for i in range(3)]
    sources = write_segments(env, parts)

    class Retention(Recorder):
        def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
            super().groups_cleaned(groups)
            if len(self.groups) == 1:
                env.unlink(f"{DIRECTORY}/{file_name(1, LOG)}")

    control = Retention()
    job = clean_job([(source,) for source in sources])
    run_clean(env, job, control, one_pass=False)
    assert [group.source_base_offsets for group in control.groups[:2]] == [(0,), (1,)]
    assert control.groups[1].output is None


def test_progress_behind_damage_is_told_of_in_stretches() -> None:
    env = MemoryEnv()
    parts = [
        segment(i, [batch(record(i, "a"), record(i + 1, f"k{i}"))], i + 2) for i in range(0, 12, 2)
    ]
    for at in (2, 8):
        parts[at // 2].batches[0] = damaged(parts[at // 2].batches[0])
    sources = write_segments(env, parts)
    report, _ = clean(env, clean_job([sources[:3], sources[3:]]))
    assert report.next_dirty_offset == 2
    assert report.cleaned == ((4, 8), (10, 12))
    assert [horizon.base_offset for horizon in report.horizons] == [0, 2, 4, 6, 8, 10]
    assert [horizon.horizon_ms for horizon in report.horizons] == [-1, -2, -2, -2, -2, -2]
    report, _ = clean(env, clean_job([sources], first_dirty_offset=5, job_id="run2"))
    assert (report.next_dirty_offset, report.cleaned) == (2, ((4, 8), (10, 12)))


# The end of the log


def test_the_last_batch_stays_empty_when_everything_is_superseded_and_nothing_follows() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", by=producer)
    log.abort(producer)
    log.roll()
    log.clean(last_records=())
    log.clean(last_records=())
    log.pass_retention()
    log.clean(last_records=())
    assert (log.last_offsets(), log.offsets()) == ([1], [])
    assert log.reopened().log.log_end_offset == 2


@pytest.mark.parametrize("codec", [NONE, ZSTD])
def test_times_are_found_right_after_a_clean(codec: int) -> None:
    log = CompactedLog()
    for at in range(40):
        log.now_ms += 1000
        log.put((f"k{at % 7}", f"{at}"), codec=codec)
        if at % 10 == 9:
            log.roll()
    log.clean(singly=True)
    remaining = {records[0].timestamp: records[0].offset for _, records in log.batches() if records}
    for time in range(NOW_MS, log.now_ms + 2000, 500):
        later = [offset for stamp, offset in remaining.items() if stamp >= time]
        offset_found = first_since(log.log, time)
        assert (offset_found.offset if offset_found else None) == (min(later) if later else None)


def test_a_message_above_the_topics_present_limit_is_cleaned() -> None:
    log = CompactedLog()
    log.put(("a", "x" * 50_000), ("b", "y"))
    log.write("a")
    log.roll()
    log.clean(max_message_bytes=1000, read_buffer_bytes=1024)
    assert log.offsets() == [1, 2]


def test_an_emptied_batch_of_2_to_the_31_offsets_is_passed() -> None:
    env = MemoryEnv()
    wide = bytes(build_batch([record(0, "a")], last_offset_delta=(1 << 31) - 1))
    end = 1 << 31
    parts = [segment(0, [wide], end), segment(end, [batch(record(end, "a"))], end + 1)]
    sources = write_segments(env, parts)
    report, groups = clean(env, clean_job([(source,) for source in sources]))
    assert (report.next_dirty_offset, groups[0].output) == (end + 1, None)
