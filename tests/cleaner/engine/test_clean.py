"""Single rules of a clean, by name; the random logs are in test_clean_properties.py."""

import errno

import numpy as np
import pytest

from cleaner.engine import context
from cleaner.engine.clean import run_clean
from cleaner.engine.kernels import warm_up
from cleaner.job import CleanAbortedError
from storage.errors import DamagedSegmentError
from storage.format import filenames
from storage.format.batch import Record, decode_records, read_header
from storage.format.compression import GZIP, LZ4, NONE, ZSTD, compress
from storage.swap.swap_journal import execute_swap, plan_swap
from tests.support.cleaner.clean_cases import (
    CODECS,
    batch,
    leftovers,
    offsets,
    record,
    three_segments,
)
from tests.support.cleaner.cleaning import (
    DIRECTORY,
    MODIFIED_MS,
    NOW_MS,
    Recorder,
    Segment,
    batches_of,
    clean,
    clean_job,
    cleaned_log,
    output_bytes,
    records_of,
    segment,
    write_segments,
)
from tests.support.storage.memory_env import MemoryEnv

# What stays


@pytest.mark.parametrize("codec", CODECS)
def test_the_last_record_of_each_key_stays_with_its_offset(codec: int) -> None:
    env = MemoryEnv()
    first = segment(
        0, [batch(record(0, "a"), record(1, "b"), codec=codec), batch(record(2, "a"))], 3
    )
    second = segment(3, [batch(record(3, "c"), record(4, "b", "new"), codec=codec)], 5)
    report, groups = clean(env, clean_job([write_segments(env, [first, second])]))
    assert offsets(output_bytes(env, groups[0])) == [2, 3, 4]
    assert report.next_dirty_offset == 5
    assert (report.records_before, report.records_after, report.keys_indexed) == (5, 3, 3)
    assert (report.groups, report.map_full, report.damaged) == (1, False, ())
    assert report.bytes_read == 2 * report.bytes_before
    assert report.bytes_written == report.bytes_after == groups[0].bytes_after


def test_an_empty_key_is_a_key_and_a_null_key_is_dropped_and_counted() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(record(0, ""), record(1, None), record(2, "")), b""], 3)
    report, groups = clean(env, clean_job([write_segments(env, [part])]))
    assert offsets(output_bytes(env, groups[0])) == [2]
    assert report.records_without_key == 1


def test_an_empty_value_deletes_nothing() -> None:
    env = MemoryEnv()
    tombstone = batch(record(0, "a"), record(1, "a", ""), delete_horizon_ms=NOW_MS - 1)
    _, groups = clean(env, clean_job([write_segments(env, [segment(0, [tombstone], 2)])]))
    assert offsets(output_bytes(env, groups[0])) == [1]


def test_records_below_the_start_of_the_log_go() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(record(0, "a"), record(1, "b"), record(2, "c"))], 3)
    job = clean_job([write_segments(env, [part])], log_start_offset=2, first_dirty_offset=2)
    _, groups = clean(env, job)
    assert offsets(output_bytes(env, groups[0])) == [2]


def test_only_what_the_dirty_section_writes_again_leaves_the_clean_one() -> None:
    env = MemoryEnv()
    parts = [
        segment(0, [batch(record(0, "a"), record(1, "a"), record(2, "b"))], 3),
        segment(3, [batch(record(3, "b"))], 4),
    ]
    job = clean_job([write_segments(env, parts)], first_dirty_offset=3)
    _, groups = clean(env, job)
    assert offsets(output_bytes(env, groups[0])) == [0, 1, 3]


def test_two_keys_of_which_one_begins_with_the_other_are_two() -> None:
    env = MemoryEnv()
    names = ["key-0000" * n + tail for n in range(3) for tail in ("", "\0", "\0\0", "x")]
    part = segment(0, [batch(*(record(i, name) for i, name in enumerate(names)))], len(names))
    report, groups = clean(env, clean_job([write_segments(env, [part])]))
    assert report.keys_indexed == len(names)
    assert groups == []


# Tombstones


def test_a_tombstone_is_stamped_first_and_goes_when_its_horizon_has_passed() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(record(0, "a")), batch(record(1, "a", None), record(2, "b"))], 3)
    sources = write_segments(env, [part])
    report, groups = clean(env, clean_job([sources], delete_retention_ms=5000))
    stamped = batches_of(output_bytes(env, groups[0]))
    header = read_header(stamped[0])
    assert header.has_delete_horizon
    assert header.base_timestamp == NOW_MS + 5000
    assert decode_records(stamped[0], header) == [record(1, "a", None), record(2, "b")]
    assert (report.tombstones_kept, report.tombstones_removed) == (1, 0)

    for now_ms, retained, removed in ((NOW_MS + 4999, 1, 0), (NOW_MS + 5000, 0, 1)):
        later = MemoryEnv()
        sources = write_segments(later, [segment(0, stamped, 3)])
        report, _ = clean(later, clean_job([sources], first_dirty_offset=3, now_ms=now_ms))
        assert (report.tombstones_kept, report.tombstones_removed) == (retained, removed)


def test_a_clock_that_may_have_jumped_removes_no_tombstone() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(record(0, "a", None), delete_horizon_ms=NOW_MS - 1)], 1)
    job = clean_job([write_segments(env, [part])], drop_expired_tombstones=False)
    report, groups = clean(env, job)
    assert groups == []
    assert report.tombstones_kept == 1


def test_a_batch_that_was_not_indexed_to_its_end_is_not_stamped() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(record(0, "a", None), record(1, "b", None), record(2, "a"))], 3)
    job = clean_job([write_segments(env, [part])], dedupe_buffer_bytes=24)
    report, groups = clean(env, job)
    assert report.next_dirty_offset == 1
    assert groups == [], "the clock of record 1 may not start before its older values can go"


@pytest.mark.parametrize("codec", [NONE, LZ4])
def test_a_stamped_batch_keeps_the_times_of_its_records(codec: int) -> None:
    env = MemoryEnv()
    times = [0, 1, NOW_MS * 2, -1, NOW_MS]
    records = [Record(i, time, b"%d" % i, None, (("h", b"x"),)) for i, time in enumerate(times)]
    part = segment(0, [batch(*records, codec=codec)], len(times))
    _, groups = clean(env, clean_job([write_segments(env, [part])]))
    stamped = output_bytes(env, groups[0])
    assert records_of(stamped) == records
    assert read_header(stamped).max_timestamp == NOW_MS * 2
    assert read_header(stamped).codec == codec


# Batches whose records are gone


def test_a_producers_last_batch_stays_as_a_bare_header() -> None:
    env = MemoryEnv()
    producer = {"producer_id": 7, "producer_epoch": 2, "base_sequence": 40}
    parts = [
        segment(0, [batch(record(0, "a"), **producer), batch(record(1, "a"), **producer)], 2),
        segment(2, [batch(record(2, "a"))], 3),
    ]
    job = clean_job([write_segments(env, parts)], last_records=((6, 2, 1), (7, 2, 1), (8, 0, 9)))
    _, groups = clean(env, job)
    bare, last = map(read_header, batches_of(output_bytes(env, groups[0])))
    assert (bare.base_offset, bare.record_count, bare.size_bytes) == (1, 0, 61)
    assert (bare.producer_id, bare.producer_epoch, bare.base_sequence) == (7, 2, 40)
    assert last.base_offset == 2


def test_the_last_batch_stays_where_nothing_follows_it() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(record(0, "a", None), delete_horizon_ms=NOW_MS - 1)], 1)
    sources = write_segments(env, [part])
    _, groups = clean(env, clean_job([sources], log_end_offset_is_end=True))
    assert read_header(output_bytes(env, groups[0])).next_offset == 1
    _, groups = clean(env, clean_job([sources], job_id="run2"))
    assert groups[0].output is None
    assert groups[0].source_base_offsets == (0,)
    assert leftovers(env) == [
        f"{'0' * 20}{kind}.run1.cleaned" for kind in (".index", ".log", ".timeindex")
    ]


# Codecs


@pytest.mark.parametrize(("codec", "level"), [(ZSTD, 1), (ZSTD, 9), (LZ4, 9), (GZIP, 1)])
def test_the_topics_compression_level_is_kept(codec: int, level: int) -> None:
    env = MemoryEnv()
    rng = np.random.default_rng(1)
    values = ["".join(map(chr, rng.integers(97, 105, 60))) for _ in range(200)]
    records = [record(i, f"k{i % 150}", values[i]) for i in range(200)]
    part = segment(0, [batch(*records, codec=codec, level=level)], 200)
    job = clean_job([write_segments(env, [part])], compression_levels=((codec, level),))
    _, groups = clean(env, job)
    rebuilt = output_bytes(env, groups[0])
    retained = decode_records(rebuilt, read_header(rebuilt))
    assert retained == records[50:]
    # The same records, uncompressed, packed by hand at that level.
    plain = MemoryEnv()
    sources = write_segments(plain, [segment(0, [batch(*records)], 200)])
    _, groups = clean(plain, clean_job([sources]))
    assert rebuilt[61:] == compress(codec, output_bytes(plain, groups[0])[61:], level)


def test_a_batch_that_unpacks_to_more_than_the_limit_is_left_alone_and_named() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(record(0, "a", "x" * 5000), record(1, "a"), codec=ZSTD)], 2)
    job = clean_job([write_segments(env, [part])], decompressed_batch_bytes=4096)
    report, groups = clean(env, job)
    assert groups == []
    assert report.next_dirty_offset == 0
    (path, position, reason) = report.damaged[0]
    assert (path, position) == (f"{DIRECTORY}/{0:020d}.log", 0)
    assert "4096" in reason


# Sizes


@pytest.mark.parametrize("codec", [NONE, LZ4])
def test_a_batch_larger_than_the_buffer_is_cleaned(codec: int) -> None:
    env = MemoryEnv()
    rng = np.random.default_rng(2)
    large = "".join(map(chr, rng.integers(0, 128, 30_000)))
    parts = [
        segment(0, [batch(record(0, "a"))], 1),
        segment(1, [batch(record(1, "a", large), record(2, "b", large), codec=codec)], 3),
        segment(3, [batch(record(3, "b"))], 4),
    ]
    job = clean_job([write_segments(env, parts)], read_buffer_bytes=1024)
    _, groups = clean(env, job)
    assert records_of(output_bytes(env, groups[0])) == [record(1, "a", large), record(3, "b")]


def test_a_length_that_lies_takes_no_memory() -> None:
    env = MemoryEnv()
    lying = bytearray(batch(record(0, "a")))
    lying[8:12] = (1 << 20).to_bytes(4, "big")
    part = segment(0, [bytes(lying), bytes(1 << 20)], 1)
    job = clean_job([write_segments(env, [part])], read_buffer_bytes=1024)
    ctx = context.CleanContext(env, job, Recorder())
    ctx.reader.open(job.groups[0][0])
    ctx.reader.refill(ctx.charge_read)
    with pytest.raises(DamagedSegmentError, match="checksum"):
        ctx.reader.refill(ctx.charge_read)
    assert len(ctx.reader.buffer) < 2048


def test_offsets_far_apart_are_passed() -> None:
    env = MemoryEnv()
    far = (1 << 31) - 1
    further = 1 << 50
    parts = [
        segment(0, [batch(record(0, "a")), batch(record(far, "b"))], further),
        segment(further, [batch(record(further, "a"))], further + 9),
    ]
    sources = write_segments(env, parts)
    report, groups = clean(env, clean_job([sources[:1], sources[1:]]))
    assert report.next_dirty_offset == further + 9
    assert offsets(cleaned_log(env, parts, groups)) == [far, further]


def test_a_section_without_batches_is_clean_at_once() -> None:
    env = MemoryEnv()
    report, groups = clean(env, clean_job([write_segments(env, [segment(5, [], 9)])]))
    assert report.next_dirty_offset == 9
    assert groups == []


def test_segments_behind_a_full_map_are_left_alone() -> None:
    env = MemoryEnv()
    parts = [segment(i, [batch(record(i, f"k{i}"))], i + 1) for i in range(4)]
    job = clean_job([write_segments(env, parts)], dedupe_buffer_bytes=24)
    report, groups = clean(env, job)
    assert (report.next_dirty_offset, report.map_full) == (1, True)
    assert groups == []
    assert report.bytes_before == len(parts[0].data)


# Stopping, failing


def busy_log(env: MemoryEnv) -> list[Segment]:
    parts = [
        segment(i * 10, [batch(*(record(i * 10 + j, f"k{j}") for j in range(10)))], i * 10 + 10)
        for i in range(6)
    ]
    write_segments(env, parts)
    return parts


@pytest.mark.parametrize("one_pass", [True, False])
def test_an_abort_at_any_moment_leaves_only_finished_groups(one_pass: bool) -> None:
    aborts = 0
    for requested in range(100):
        env = MemoryEnv()
        parts = busy_log(env)
        sources = write_segments(env, parts)
        control = Recorder(abort_after=requested)
        job = clean_job([sources[:4], sources[4:]], read_buffer_bytes=1024)
        try:
            run_clean(env, job, control, one_pass=one_pass)
        except CleanAbortedError:
            aborts += 1
        names = {
            file.name for group in control.groups if group.output for file in group.output.files
        }
        assert set(leftovers(env)) == names
        if requested >= 40:
            break
    assert aborts >= (6 if one_pass else 12), "each segment is read, in several pieces"


@pytest.mark.parametrize("one_pass", [True, False])
def test_a_budget_that_gives_up_is_an_abort(one_pass: bool) -> None:
    env = MemoryEnv()
    sources = write_segments(env, busy_log(env))
    read_bytes = sum(source.size_bytes for source in sources)
    control = Recorder(budget_aborts_at=read_bytes // 2 if one_pass else read_bytes + 1)
    with pytest.raises(CleanAbortedError):
        run_clean(env, clean_job([sources]), control, one_pass=one_pass)
    assert leftovers(env) == []


@pytest.mark.parametrize("operation", ["open", "pwrite", "sync", "sync_dir", "set_mtime"])
def test_a_failing_disk_fails_the_job_and_leaves_nothing(operation: str) -> None:
    env = MemoryEnv()
    sources = write_segments(env, busy_log(env))
    seen: list[tuple[str, str]] = []

    def fails(op: str, path: str) -> bool:
        seen.append((op, path))
        return op == operation and (path.endswith(".cleaned") or op == "sync_dir")

    env.fail_on(fails, errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        run_clean(env, clean_job([sources]), Recorder())
    assert operation in {op for op, _ in seen}
    assert leftovers(env) == []


# The files


def test_the_output_has_the_runs_name_the_last_mtime_and_is_synced() -> None:
    env = MemoryEnv()
    parts = busy_log(env)
    sources = write_segments(env, parts)
    control = Recorder()
    report = run_clean(env, clean_job([sources], job_id="a-run"), control)
    (group,) = control.groups
    assert group.output is not None
    assert [file.name for file in group.output.files] == [
        f"{0:020d}{kind}.a-run.cleaned" for kind in (".log", ".index", ".timeindex")
    ]
    for file in group.output.files:
        assert env.mtime_ms(f"{DIRECTORY}/{file.name}") == MODIFIED_MS + len(parts) - 1
    assert control.charged_write == report.bytes_written
    log = output_bytes(env, group)
    after = env.crash()
    assert output_bytes(after, group) == log
    for kind in (filenames.INDEX, filenames.TIME_INDEX):
        output_bytes(after, group, kind)


def test_a_cleaned_group_can_be_published() -> None:
    env = MemoryEnv()
    parts = busy_log(env)
    sources = write_segments(env, parts)
    _, (group,) = clean(env, clean_job([sources]))
    log = output_bytes(env, group)

    class Source:
        def __init__(self, base_offset: int) -> None:
            self.base_offset = base_offset
            self.files = (filenames.file_name(base_offset, ".log"),)

    assert group.output is not None
    old = [Source(base) for base in group.source_base_offsets]
    execute_swap(env, plan_swap(DIRECTORY, old, [group.output]))
    assert env.read_file(f"{DIRECTORY}/{0:020d}.log") == log
    assert offsets(log) == list(range(50, 60))


def test_a_segment_that_loses_nothing_is_not_replaced() -> None:
    env = MemoryEnv()
    parts = [segment(0, [batch(record(0, "a"))], 1), segment(1, [batch(record(1, "b"))], 2)]
    sources = write_segments(env, parts)
    report, groups = clean(env, clean_job([sources[:1], sources[1:]]))
    assert groups == []
    assert leftovers(env) == []
    assert report.next_dirty_offset == 2
    assert (report.groups, report.bytes_written) == (0, 0)
    assert report.bytes_before == report.bytes_after == 2 * len(parts[0].data)


def test_what_was_rewritten_is_counted_apart_from_what_stays() -> None:
    env = MemoryEnv()
    parts = [
        segment(0, [batch(record(0, "a"))], 1),
        segment(1, [batch(record(1, "b"), record(2, "c"))], 3),
        segment(3, [batch(record(3, "b"))], 4),
    ]
    sources = write_segments(env, parts)
    report, groups = clean(env, clean_job([sources[:1], sources[1:2], sources[2:]]))
    assert [group.source_base_offsets for group in groups] == [(1,)]
    assert report.bytes_replaced == len(parts[1].data) == groups[0].bytes_before
    assert 0 < report.bytes_written == groups[0].bytes_after < report.bytes_replaced
    assert report.bytes_before == sum(len(part.data) for part in parts)


def test_progress_goes_up_to_the_whole_of_each_pass() -> None:
    env = MemoryEnv()
    sources = write_segments(env, busy_log(env))
    control = Recorder()
    run_clean(env, clean_job([sources[:2], sources[2:]]), control, one_pass=False)
    total = sum(source.size_bytes for source in sources)
    for stage in ("map", "rewrite"):
        steps = [(done, whole) for name, done, whole in control.stages if name == stage]
        assert steps == sorted(steps)
        assert steps[-1] == (total, total)


def test_warming_up_compiles_all_that_a_clean_calls() -> None:
    warm_up()
    compiled = {name: count_of(name) for name in KERNELS}
    env = MemoryEnv()
    tombstones = batch(record(7, "a", None), record(8, "b"), record(9, "b"), codec=LZ4)
    parts = [*three_segments(batch(record(3, "b"), codec=ZSTD)), segment(7, [tombstones], 10)]
    report, _ = clean(env, clean_job([write_segments(env, parts)], first_dirty_offset=2))
    assert report.next_dirty_offset == 10
    assert {name: count_of(name) for name in KERNELS} == compiled


KERNELS = (
    "passes.walk.count_records",
    "passes.walk.index_batches",
    "passes.walk.index_unpacked",
    "passes.rewrite.rewrite_batches",
    "passes.rewrite.filter_unpacked",
    "passes.rewrite.write_header",
    "passes.rewrite.copy_whole",
    "passes.rewrite.finish_empty",
    "passes.rewrite.count_batch",
    "codecs.index_entries.index_output",
    "codecs.index_entries.add_time_entry",
    "passes.fingerprint_table.mark_survivors",
    "codecs.crc.crc32c_extended",
    "codecs.memory.load_be32",
)


def count_of(name: str) -> int:
    import importlib

    module, function = name.rsplit(".", 1)
    return len(
        getattr(importlib.import_module(f"cleaner.engine.kernels.{module}"), function).signatures
    )
