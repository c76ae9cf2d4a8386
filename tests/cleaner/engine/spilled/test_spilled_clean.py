"""Cleans whose keys do not fit into the map: the same result as with a map for every key."""

import errno
import random
from dataclasses import asdict, replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleaner.engine.clean import run_clean
from cleaner.engine.key_map import offset_map
from cleaner.engine.spilled import scratch
from cleaner.job import CleanAbortedError, CleanedGroup, CleanJob, CleanReport
from storage.env import Env
from storage.format import filenames
from storage.swap.swap_journal import discard_outputs
from tests.support.cleaner.clean_cases import batch, damaged, record, three_segments
from tests.support.cleaner.cleaning import Recorder, Segment, clean_job, segment, write_segments
from tests.support.cleaner.random_logs import jobs, logs
from tests.support.cleaner.verifying import random_log, written
from tests.support.draws import cases
from tests.support.storage.memory_env import MemoryEnv

LARGE_MAP_BYTES = 1 << 20
SMALL_MAP_BYTES = 72
MAPS = [24, 72, 100, 240, LARGE_MAP_BYTES]
# Figures that depend on the way, not on the result.
NEUTRAL = {
    "map_seconds", "rewrite_seconds", "bytes_read", "passes", "map_utilization",
    "records_without_key", "spilled_bytes",
}  # fmt: skip


def cleaned(
    env: Env, job: CleanJob, control: Recorder | None = None
) -> tuple[CleanReport, list[CleanedGroup], list[bytes]]:
    """The report, the groups and the content of their files, which are removed."""
    control = control or Recorder()
    report = run_clean(env, job, control, one_pass=False)
    contents = [
        env.read_file(f"{job.outputs}/{file.name}")
        for group in control.groups
        for file in (group.output.files if group.output else ())
    ]
    discard_outputs(env, job.outputs, job.job_id)
    return report, control.groups, contents


def figures(report: CleanReport) -> dict[str, object]:
    return {name: value for name, value in asdict(report).items() if name not in NEUTRAL}


def assert_same_result(env: Env, job: CleanJob, map_bytes: int) -> CleanReport:
    """A clean with a map of `map_bytes` leaves what one with a map for every key leaves."""
    large = cleaned(env, replace(job, dedupe_buffer_bytes=LARGE_MAP_BYTES, spill_bytes_max=0))
    names = env.listdir(job.directory)
    control = Recorder()
    small = cleaned(
        env, replace(job, dedupe_buffer_bytes=map_bytes, spill_bytes_max=1 << 40), control
    )
    assert figures(small[0]) == figures(large[0])
    assert small[1:] == large[1:]
    assert env.listdir(job.directory) == names, "the scratch file is removed"
    written_bytes = sum(map(len, small[2]))
    assert control.charged_write - written_bytes <= small[0].spilled_bytes <= control.charged_write
    return small[0]


@settings(
    max_examples=cases(few=15, many=80), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(st.data(), st.sampled_from(MAPS), st.sampled_from([8, 1 << 27]), st.sampled_from([1, 4096]))
def test_a_small_map_leaves_what_a_large_one_leaves(
    data: st.DataObject, map_bytes: int, window: int, piece: int
) -> None:
    segments: list[Segment] = data.draw(logs())
    env = MemoryEnv(1)
    job: CleanJob = data.draw(jobs(segments, write_segments(env, segments)))
    with (
        patch.object(scratch, "WINDOW_OFFSETS", window),
        patch.object(scratch, "OFFSETS_PIECE", piece),
        patch.object(scratch, "ROWS_PIECE", piece),
        patch.object(offset_map, "CHUNK_KEYS", piece),
    ):
        assert_same_result(env, job, map_bytes)


@pytest.mark.parametrize("seed", range(24))
def test_transactions_and_earlier_cleans_leave_the_same(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    log = random_log(seed)
    dirty = max(log.dirty, rng.choice([0, log.log.log_end_offset // 2]))
    job = log.job(singly=rng.random() < 0.5, first_dirty_offset=dirty)
    job = replace(job, read_buffer_bytes=rng.choice([1, 2000, 1 << 16]))
    spilled = [assert_same_result(log.env, job, map_bytes).spilled_bytes for map_bytes in MAPS]
    assert spilled == sorted(spilled, reverse=True)
    assert spilled[-1] == 0


def spilling_job(**changes: object) -> tuple[MemoryEnv, CleanJob]:
    log = written()
    job = log.job(dedupe_buffer_bytes=SMALL_MAP_BYTES, first_dirty_offset=7)
    return log.env, replace(job, **{"spill_bytes_max": 1 << 30} | changes)  # type: ignore[arg-type]


def test_what_is_spilled_is_charged_and_reported() -> None:
    env, job = spilling_job()
    report = assert_same_result(env, job, SMALL_MAP_BYTES)
    rows = 24 * report.records_before
    assert 0 < report.spilled_bytes <= rows + 8 * report.records_after
    assert not report.map_full
    assert report.map_utilization == 1.0


def as_without_spilling(env: MemoryEnv, job: CleanJob) -> str:
    """The clean leaves what it leaves without a scratch file; return why it has none."""
    report, groups, contents = cleaned(env, job)
    names = env.listdir(job.directory)
    env.free_space_bytes = 1 << 30
    without = cleaned(env, replace(job, spill_bytes_max=0))
    assert without[0].map_full
    assert figures(replace(report, spill_refusal="")) == figures(without[0])
    assert (groups, contents) == without[1:]
    assert env.listdir(job.directory) == names
    return report.spill_refusal


def test_a_limit_ends_the_clean_at_the_first_key_that_does_not_fit() -> None:
    env, job = spilling_job(spill_bytes_max=100)
    assert as_without_spilling(env, job) == "the keys take more than 100 bytes"


@pytest.mark.parametrize("free_bytes", [10, 400])
def test_the_scratch_file_leaves_half_of_the_free_space_and_room_for_an_output(
    free_bytes: int,
) -> None:
    env, job = spilling_job()
    env.free_space_bytes = free_bytes
    assert f"{free_bytes} bytes are free" in as_without_spilling(env, job)


def test_a_disk_that_fills_up_ends_the_clean_at_the_first_key_that_does_not_fit() -> None:
    env, job = spilling_job()
    name = filenames.scratch_name(0, job.job_id)
    env.fail_on(lambda operation, path: operation == "pwrite" and name in path, errno.ENOSPC)
    assert "is full" in as_without_spilling(env, job)


def test_a_disk_that_fails_fails_the_clean() -> None:
    env, job = spilling_job()
    name = filenames.scratch_name(0, job.job_id)
    env.fail_on(lambda operation, path: operation == "pwrite" and name in path, errno.EIO)
    before = env.listdir(job.directory)
    with pytest.raises(OSError, match="Input/output"):
        run_clean(env, job, Recorder())
    assert env.listdir(job.directory) == before


class FlippingDisk(Recorder):
    """A control under which one bit of the scratch file changes once it has some bytes."""

    def __init__(self, env: MemoryEnv, job: CleanJob, rng: random.Random) -> None:
        super().__init__()
        self._env, self._rng = env, rng
        self._path = f"{job.outputs}/{filenames.scratch_name(0, job.job_id)}"
        self._reads_left = rng.randrange(6)

    def read_bytes(self, count: int) -> None:
        super().read_bytes(count)
        if not self._env.exists(self._path):
            return
        self._reads_left -= 1
        if self._reads_left == 0:
            file = self._env.open(self._path, write=True)
            position = self._rng.randrange(file.size())
            byte = file.pread(1, position)[0]
            file.pwrite(bytes([byte ^ 1 << self._rng.randrange(8)]), position)


def test_a_bit_that_changes_in_the_scratch_file_never_changes_the_result() -> None:
    found = 0
    for seed in range(40):
        env, job = spilling_job()
        expected = cleaned(env, job)
        try:
            result = cleaned(env, job, FlippingDisk(env, job, random.Random(seed)))
        except scratch.DamagedScratchError:
            found += 1
        else:  # the bit had been read before
            assert figures(result[0]) == figures(expected[0])
            assert result[1:] == expected[1:]
    assert found >= 10


def test_a_scratch_file_that_lost_its_end_is_damaged() -> None:
    env, job = spilling_job()
    file = scratch.Scratch(env, job, Recorder())
    file.append(np.arange(10_000, dtype=np.int64))
    env.open(f"{job.outputs}/{filenames.scratch_name(0, job.job_id)}", write=True).truncate(70_000)
    values = np.empty(10_000, dtype=np.int64)
    file.read(values[:8_000], 0)
    assert values[7_999] == 7_999
    file.read(values[:3], 8 * 4_095)  # in two blocks
    assert list(values[:3]) == [4_095, 4_096, 4_097]
    with pytest.raises(scratch.DamagedScratchError, match="byte 65536"):
        file.read(values[:1], 8 * 9_000)
    file.close()


@pytest.mark.parametrize("after", range(0, 12, 2))
def test_an_abort_removes_the_scratch_file(after: int) -> None:
    env, job = spilling_job()
    before = env.listdir(job.directory)
    with pytest.raises(CleanAbortedError):
        run_clean(env, job, Recorder(abort_after=after))
    discard_outputs(env, job.directory, job.job_id)
    assert env.listdir(job.directory) == before


def test_the_scratch_file_of_a_killed_worker_is_removed_with_its_outputs() -> None:
    env, job = spilling_job()
    before = env.listdir(job.directory)

    class Dies(Recorder):
        def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
            if stage == "rewrite":
                self.names = env.listdir(job.directory)

    control = Dies()
    with patch.object(scratch.Scratch, "close", lambda self: None):
        run_clean(env, job, control)
    name = filenames.scratch_name(0, job.job_id)
    assert name in control.names
    assert name in discard_outputs(env, job.directory, job.job_id)
    assert env.listdir(job.directory) == before


@pytest.mark.parametrize("map_bytes", MAPS)
@pytest.mark.parametrize("first_dirty", [0, 2, 4, 5])
def test_damage_is_found_in_either_section(first_dirty: int, map_bytes: int) -> None:
    env = MemoryEnv()
    parts = three_segments(damaged(batch(record(3, "b"))))
    last = segment(7, [batch(record(7, "x"), record(8, "y"), record(9, "z"))], 10)
    sources = write_segments(env, [*parts, last])
    job = clean_job([[source] for source in sources], first_dirty_offset=first_dirty)
    assert assert_same_result(env, job, map_bytes).damaged
