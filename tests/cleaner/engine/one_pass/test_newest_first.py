"""One pass, newest first: the same is left as by two, and what is not for it is left to them."""

import errno
import random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleaner.engine.background_writes import BackgroundWrites
from cleaner.engine.clean import run_clean
from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.one_pass import buffered_output, newest_first, newest_window, windows
from cleaner.engine.spilled.scratch import DamagedScratchError
from cleaner.engine.two_pass.group_accounting import GroupAccounting
from cleaner.job import CleanedGroup, CleanReport
from storage.format import filenames
from storage.format.batch import read_header
from storage.format.compression import LZ4, ZSTD
from storage.format.index import OffsetIndex
from tests.support.cleaner.clean_cases import batch, damaged, offsets, record, three_segments
from tests.support.cleaner.cleaning import (
    DIRECTORY,
    Recorder,
    Segment,
    clean,
    clean_job,
    cleaned_log,
    output_bytes,
    segment,
    write_segments,
)
from tests.support.cleaner.random_logs import jobs, logs
from tests.support.draws import cases
from tests.support.storage.memory_env import MemoryEnv


def passes_of(env: MemoryEnv, segments: list[Segment], **changes: object) -> CleanReport:
    """Clean both ways, compare them, and report the way that is taken where one pass may do."""
    job = clean_job([[source] for source in write_segments(env, segments)], **changes)
    clean(env, job)
    return run_clean(env, job, Recorder())


def write_index(env: MemoryEnv, part: Segment, positions: list[int]) -> None:
    """An index that says where batches begin, right or wrong."""
    index = OffsetIndex()
    for number, position in enumerate(positions):
        index.append(number, position)
    name = filenames.file_name(part.base_offset, filenames.INDEX)
    file = env.open(f"{DIRECTORY}/{name}", create=True, write=True, truncate=True)
    file.pwrite(index.to_bytes(), 0)
    file.close()


def long_segment(base: int, count: int, codec: int = 0) -> Segment:
    """Batches of five records over a few keys."""
    batches = [
        batch(*(record(at + i, f"k{(at + i) % 37}", "v" * 40) for i in range(5)), codec=codec)
        for at in range(base, base + count * 5, 5)
    ]
    return segment(base, batches, base + count * 5)


PROPERTY = settings(
    max_examples=cases(few=25, many=150), deadline=None, suppress_health_check=list(HealthCheck)
)


@PROPERTY
@given(
    st.data(),
    st.sampled_from([70, 300, 1 << 19]),
    st.sampled_from([1, 3, 4096]),
    st.sampled_from([0, 100, 1 << 16]),
    st.booleans(),
)
def test_one_pass_leaves_what_two_leave(
    data: st.DataObject, window_bytes: int, chunk_keys: int, buffered_bytes: int, indexed: bool
) -> None:
    segments = data.draw(logs())
    env = MemoryEnv(1)
    job = data.draw(jobs(segments, write_segments(env, segments)))
    if indexed:
        for part in segments:
            sizes = [len(item) for item in part.batches]
            write_index(env, part, [sum(sizes[:i]) for i in range(len(sizes))])
    with (
        patch.object(windows, "WINDOW_BYTES", window_bytes),
        patch.object(newest_window, "WINDOW_BYTES", window_bytes),
        patch.object(newest_window, "CHUNK_KEYS", chunk_keys),
        patch.object(newest_window, "ARENA_BYTES", data.draw(st.sampled_from([1, 300, 1 << 20]))),
        patch.object(buffered_output, "BUFFERED_BYTES", buffered_bytes),
    ):
        clean(env, job)  # compares the two


def test_a_log_whose_keys_surely_fit_is_read_once() -> None:
    env = MemoryEnv()
    parts = [long_segment(0, 40), long_segment(200, 40, ZSTD), long_segment(400, 40, LZ4)]
    report = passes_of(env, parts)
    assert report.passes == 1
    size_bytes = sum(len(part.data) for part in parts)
    assert size_bytes <= report.bytes_read <= size_bytes * 1.1, "once, and headers"


def test_a_map_that_may_fill_up_needs_two_passes() -> None:
    report = passes_of(MemoryEnv(), [long_segment(0, 40)], dedupe_buffer_bytes=24 * 100)
    assert report.passes == 2


@pytest.mark.parametrize("flag", [0x10, 0x20])
def test_a_batch_of_a_transaction_needs_two_passes(flag: int) -> None:
    marked = batch(record(7, "a"), attributes=flag, producer_id=3, producer_epoch=0)
    parts = [segment(0, [batch(record(0, "a")), marked], 8), long_segment(8, 2)]
    assert passes_of(MemoryEnv(), parts).passes == 2


def test_a_batch_that_is_larger_than_the_read_buffer_needs_two_passes() -> None:
    parts = [segment(0, [batch(record(0, "a", "v" * 5000)), batch(record(1, "a"))], 2)]
    assert passes_of(MemoryEnv(), parts, read_buffer_bytes=1024).passes == 2
    assert passes_of(MemoryEnv(), parts, read_buffer_bytes=8192).passes == 1


def test_more_dirty_bytes_than_may_be_held_back_need_two_passes() -> None:
    with patch.object(newest_first, "DIRTY_BYTES_MAX", 1000):
        assert passes_of(MemoryEnv(), [long_segment(0, 40)]).passes == 2


@pytest.mark.parametrize("place", [-1, 9, 65])
def test_damage_is_reported_as_by_two_passes(place: int) -> None:
    env = MemoryEnv()
    parts = three_segments(damaged(batch(record(3, "c")), place))
    report = passes_of(env, parts)
    assert report.passes == 2
    assert [path for path, _, _ in report.damaged] == [f"{DIRECTORY}/{2:020d}.log"]


def test_damage_in_an_older_group_keeps_the_tombstones_of_newer_ones() -> None:
    env = MemoryEnv()
    old = segment(0, [batch(record(0, "a")), damaged(batch(record(1, "b")))], 2)
    new = segment(2, [batch(record(2, "a", None), delete_horizon_ms=1), batch(record(3, "a"))], 4)
    newest = segment(4, [batch(record(4, "b", None), delete_horizon_ms=1)], 5)
    report = passes_of(env, [old, new, newest], first_dirty_offset=2)
    assert len(report.damaged) == 1
    assert report.tombstones_kept == 1


def test_groups_are_handed_over_oldest_first_and_none_before_all_are_done() -> None:
    env = MemoryEnv()
    parts = [long_segment(base, 10) for base in (0, 50, 100, 150)]
    sources = write_segments(env, parts)
    control = Recorder()
    job = clean_job([[source] for source in sources], first_dirty_offset=100)
    read_at_hand_over: list[int] = []
    hand_over = control.groups_cleaned
    control.groups_cleaned = lambda groups: (  # type: ignore[method-assign]
        read_at_hand_over.append(control.charged_read),
        hand_over(groups),
    )[-1]
    report = run_clean(env, job, control)
    assert report.passes == 1
    bases = [group.source_base_offsets[0] for group in control.groups]
    assert bases == sorted(bases)
    dirty_bytes = sum(source.size_bytes for source in sources[2:])
    assert all(charged > dirty_bytes for charged in read_at_hand_over)


def test_held_groups_are_handed_over_together_within_the_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together: list[list[int]] = []

    class Noting(Recorder):
        def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
            super().groups_cleaned(groups)
            together.append([group.source_base_offsets[0] for group in groups])

    def hand_over() -> list[list[int]]:
        env = MemoryEnv()
        twice = [
            segment(base, [batch(record(base, f"k{base}"), record(base + 1, f"k{base}"))], base + 2)
            for base in (0, 2, 4, 6)
        ]
        sources = write_segments(env, twice)
        together.clear()
        run_clean(env, clean_job([[source] for source in sources]), Noting())
        return list(together)

    assert hand_over() == [[0, 2, 4, 6]]
    monkeypatch.setattr(newest_first, "TOGETHER_SEGMENTS_MAX", 3)
    assert hand_over() == [[0, 2, 4], [6]]
    monkeypatch.setattr(newest_first, "TOGETHER_BYTES_MAX", 1)
    assert hand_over() == [[0], [2], [4], [6]]


def test_an_index_that_points_into_a_value_misleads_nobody() -> None:
    env = MemoryEnv()
    # The value is a batch of its own, and ends as the record around it does.
    inner = batch(record(1, "k", "hidden"))
    outer = bytes(batch(record(1, "a", "x" * 300), record(2, "b", inner[:-1].decode("latin-1"))))
    part = segment(0, [batch(record(0, "k")), outer], 3)
    sources = write_segments(env, [part])
    for position in range(1, len(part.data)):
        write_index(env, part, [position])
        with (
            patch.object(windows, "WINDOW_BYTES", 62),
            patch.object(newest_window, "WINDOW_BYTES", 62),
        ):
            report, _ = clean(env, clean_job([sources], job_id=f"run{position}"))
        assert report.damaged == ()
        assert (report.records_before, report.records_after) == (3, 3)


@pytest.mark.parametrize("content", [b"", b"\0" * 80, b"torn", b"\xff" * 16])
def test_an_index_that_is_none_is_done_without(content: bytes) -> None:
    env = MemoryEnv()
    part = long_segment(0, 40)
    write_segments(env, [part])
    name = filenames.file_name(0, filenames.INDEX)
    file = env.open(f"{DIRECTORY}/{name}", create=True, write=True)
    file.pwrite(content, 0)
    file.close()
    with patch.object(windows, "WINDOW_BYTES", 500):
        assert passes_of(env, [part]).passes == 1


def test_what_survives_is_spilled_where_memory_is_short() -> None:
    parts = [long_segment(0, 200), long_segment(1000, 200, ZSTD)]
    for reserved_bytes in (0, 1000, 1 << 16):
        env = MemoryEnv()
        with (
            patch.object(buffered_output, "BUFFERED_BYTES", reserved_bytes),
            patch.object(windows, "WINDOW_BYTES", 2000),
        ):
            report = passes_of(env, parts)
        assert report.passes == 1
        assert not [name for name in env.listdir(DIRECTORY) if filenames.SNAPSHOT in name]


def test_a_wrong_byte_in_the_scratch_file_gets_into_no_output() -> None:
    env = MemoryEnv()
    job = clean_job([[source] for source in write_segments(env, [long_segment(0, 200)])])
    to_scratch = buffered_output.BufferedOutput._to_scratch

    def damage(buffered: buffered_output.BufferedOutput, *arguments: Any) -> None:
        to_scratch(buffered, *arguments)
        assert buffered._file is not None
        buffered._file.pwrite(b"\xff", 0)

    with (
        patch.object(buffered_output, "BUFFERED_BYTES", 300),
        patch.object(windows, "WINDOW_BYTES", 500),
        patch.object(buffered_output.BufferedOutput, "_to_scratch", damage),
        pytest.raises(DamagedScratchError),
    ):
        run_clean(env, job, Recorder())


@pytest.mark.parametrize("reserved_bytes", [0, 1000, 1 << 20])
@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("operation", ["pwrite", "sync"])
def test_a_disk_that_fails_in_the_background_fails_the_job_and_nothing_is_handed_over(
    operation: str, nth: int, reserved_bytes: int
) -> None:
    env = MemoryEnv()
    parts = [
        segment(
            base,
            [batch(record(at, f"{base} {at % 50}")) for at in range(base, base + 100)],
            base + 100,
        )
        for base in (0, 100, 200)
    ]
    job = clean_job([[source] for source in write_segments(env, parts)])
    seen: list[str] = []

    def fails(op: str, path: str) -> bool:
        if op == operation and path.endswith(".cleaned") and filenames.LOG in path:
            seen.append(path)
        return op == operation and len(seen) >= nth

    env.fail_on(fails, errno.EIO)
    control = Recorder()
    with (
        patch.object(buffered_output, "BUFFERED_BYTES", reserved_bytes),
        pytest.raises(OSError, match="Input/output"),
    ):
        run_clean(env, job, control)
    assert len(seen) >= nth
    assert control.groups == []
    assert not [name for name in env.listdir(DIRECTORY) if name.endswith(".cleaned")]


def test_each_way_ends_with_the_same_log() -> None:
    env = MemoryEnv()
    parts = [long_segment(0, 30), long_segment(150, 30, LZ4)]
    sources = write_segments(env, parts)
    report, groups = clean(env, clean_job([sources]))
    log = cleaned_log(env, parts, groups)
    assert report.records_after == 37
    assert offsets(log) == list(range(300 - 37, 300))
    assert read_header(output_bytes(env, groups[0])).codec == LZ4


def test_records_that_become_larger_when_packed_again_stay_within_the_output() -> None:
    rng = random.Random(1)
    words = [rng.randbytes(rng.randrange(2, 9)).hex() for _ in range(60)]
    texts = [" ".join(rng.choices(words, k=100)) for _ in range(50)]
    packed = batch(*(record(i, f"{i}", t) for i, t in enumerate(texts)), codec=LZ4, level=12)
    window_bytes = 1 << 16
    plain = batch(record(50, "0", "x" * (window_bytes - len(packed) - 1000)))
    env = MemoryEnv()
    source = write_segments(env, [segment(0, [packed, plain], 51)])[0]
    job = clean_job([[source]], read_buffer_bytes=window_bytes)
    guarded = np.full(4 * window_bytes, 7, dtype=np.uint8)
    context = CleanContext(env, job, Recorder())
    buffered = buffered_output.BufferedOutput(env, DIRECTORY, "run1", BackgroundWrites())
    cleaner = newest_window.WindowCleaner(context, buffered)
    room = len(cleaner._window.out)
    cleaner._window = cleaner._window._replace(out=guarded[:room])
    GroupAccounting(context, ()).begin((source,))
    cleaner.begin_group()
    context.state[fields.SOURCE_END] = 51
    name = filenames.file_name(0, filenames.LOG)
    cleaner.read(env.open(f"{DIRECTORY}/{name}"), 0, source.size_bytes, lambda _: None)
    cleaner.clean()
    written = len(buffered.memory) - cleaner.buffered_from
    assert written > room, "otherwise this shows nothing"
    assert (guarded[room:] == 7).all()
