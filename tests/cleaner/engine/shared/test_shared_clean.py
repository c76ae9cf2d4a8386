"""A clean divided into parts leaves what one worker with a map for every key leaves."""

import random
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cleaner.engine.clean import run_clean
from cleaner.engine.shared.part_runner import PartRunner
from cleaner.engine.shared.parts import IndexPart, ListPart, MergePart, Part
from cleaner.engine.spilled.scratch import DamagedScratchError
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from cleaner.planning.shared_clean import PartSizes, SharedClean, can_share
from storage.env import Env
from storage.format import filenames
from storage.swap.swap_journal import discard_outputs
from tests.support.cleaner.clean_cases import batch, damaged, record, three_segments
from tests.support.cleaner.cleaning import Recorder, Segment, clean_job, write_segments
from tests.support.cleaner.random_logs import jobs, logs
from tests.support.cleaner.verifying import random_log
from tests.support.draws import cases
from tests.support.storage.memory_env import MemoryEnv

LARGE_MAP_BYTES = 1 << 20
MAPS = [24, 72, 100, 240, LARGE_MAP_BYTES]
SIZES = [PartSizes(shared_min=0, part_min=size, part_max=size, one_pass=0) for size in (1, 300)]
# Figures that depend on the way, not on the result.
NEUTRAL = {
    "map_seconds", "rewrite_seconds", "bytes_read", "passes", "map_utilization",
    "records_without_key", "spilled_bytes", "keys_indexed",
}  # fmt: skip

Result = tuple[CleanReport, list[CleanedGroup], dict[str, bytes]]


def contents(env: Env, job: CleanJob, groups: list[CleanedGroup]) -> dict[str, bytes]:
    """The files of the groups, which are removed together with all others of the job."""
    files = {
        file.name: env.read_file(f"{job.outputs}/{file.name}")
        for group in groups
        for file in (group.output.files if group.output else ())
    }
    discard_outputs(env, job.outputs, job.job_id)
    return files


def by_one(env: Env, job: CleanJob) -> Result:
    job = replace(job, dedupe_buffer_bytes=LARGE_MAP_BYTES, spill_bytes_max=0)
    control = Recorder()
    report = run_clean(env, job, control, one_pass=False)
    return report, control.groups, contents(env, job, control.groups)


def by_many(
    env: Env, job: CleanJob, rng: random.Random, workers: int, sizes: PartSizes
) -> Result | str:
    """Run the parts on `workers` runners, in any order that the phases allow."""
    shared = SharedClean(job, workers, sizes)
    runners = [PartRunner(env, lambda seconds: None) for _ in range(workers)]
    running: list[tuple[Part, PartRunner]] = []
    groups: list[CleanedGroup] = []
    while not shared.is_done:
        part = shared.next_part(0.0) if len(running) < workers else None
        if part is not None:
            running.append((part, rng.choice(runners)))
        if running and (part is None or rng.random() < 0.5):
            part, runner = running.pop(rng.randrange(len(running)))
            shared.finished(part.number, runner.run(job, part, Recorder()), 0.0)
            if shared.refusal:
                assert not shared.take_groups()
                discard_outputs(env, job.outputs, job.job_id)
                return shared.refusal
            if rng.random() < 0.5:
                groups += shared.take_groups()
    groups += shared.take_groups()
    return shared.report(), groups, contents(env, job, groups)


def figures(report: CleanReport) -> dict[str, object]:
    return {name: value for name, value in asdict(report).items() if name not in NEUTRAL}


def assert_same(shared: Result | str, alone: Result) -> None:
    assert not isinstance(shared, str), shared
    assert figures(shared[0]) == figures(alone[0])
    assert shared[1:] == alone[1:]


@settings(
    max_examples=cases(few=20, many=150), deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    st.data(),
    st.sampled_from(MAPS),
    st.sampled_from(SIZES),
    st.integers(2, 4),
    st.integers(0, 1 << 30),
)
def test_many_workers_leave_what_one_leaves(
    data: st.DataObject, map_bytes: int, sizes: PartSizes, workers: int, seed: int
) -> None:
    segments: list[Segment] = data.draw(logs())
    env = MemoryEnv(1)
    job: CleanJob = data.draw(jobs(segments, write_segments(env, segments)))
    job = replace(job, dedupe_buffer_bytes=map_bytes, spill_bytes_max=1 << 40)
    assume(can_share(job, workers, sizes))
    names = env.listdir(job.directory)
    shared = by_many(env, job, random.Random(seed), workers, sizes)
    assert_same(shared, by_one(env, job))
    assert env.listdir(job.directory) == names


@pytest.mark.parametrize("kind", [IndexPart, ListPart, MergePart])
def test_a_bit_that_changes_in_a_scratch_file_fails_the_part_that_reads_it(kind: type) -> None:
    env = MemoryEnv()
    sources = write_segments(env, three_segments(batch(record(3, "b"))))
    job = clean_job(
        [[source] for source in sources], first_dirty_offset=4, dedupe_buffer_bytes=24,
        spill_bytes_max=1 << 40,
    )  # fmt: skip
    shared = SharedClean(job, 2, SIZES[0])
    runner = PartRunner(env, lambda seconds: None)

    def run_parts() -> None:
        while (part := shared.next_part(0.0)) is not None:
            shared.finished(part.number, runner.run(job, part, Recorder()), 0.0)
            path = f"{job.outputs}/{filenames.scratch_name(part.number, job.job_id)}"
            if isinstance(part, kind) and env.exists(path):
                file = env.open(path, write=True)
                file.pwrite(bytes([file.pread(1, 1)[0] ^ 1]), 1)

    with pytest.raises(DamagedScratchError, match="is damaged at byte 0"):
        run_parts()
    assert not shared.take_groups()


@pytest.mark.parametrize("seed", range(24))
def test_a_log_with_transactions_is_refused_before_any_group_that_has_some(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    log = random_log(seed)
    job = log.job(singly=rng.random() < 0.5, dedupe_buffer_bytes=rng.choice(MAPS))
    job = replace(job, spill_bytes_max=1 << 40)
    shared = by_many(log.env, job, rng, 2, rng.choice(SIZES))
    if isinstance(shared, str):
        assert shared == "its transactions need one worker"
    else:
        assert_same(shared, by_one(log.env, job))


@pytest.mark.parametrize("map_bytes", MAPS)
@pytest.mark.parametrize("first_dirty", [0, 4, 5])
@pytest.mark.parametrize("seed", range(6))
def test_damage_that_one_part_finds_holds_for_all_later_groups(
    seed: int, first_dirty: int, map_bytes: int
) -> None:
    print("seed", seed)
    env = MemoryEnv()
    parts = three_segments(damaged(batch(record(3, "b"))))
    sources = write_segments(env, parts)
    job = clean_job(
        [[source] for source in sources], first_dirty_offset=first_dirty,
        dedupe_buffer_bytes=map_bytes, spill_bytes_max=1 << 40,
    )  # fmt: skip
    alone = by_one(env, job)
    assert alone[0].damaged
    assert_same(by_many(env, job, random.Random(seed), 3, SIZES[0]), alone)


def no_room(env: MemoryEnv) -> None:
    env.free_space_bytes = 0


def small_files(env: MemoryEnv) -> None:
    """Nothing: the limit of the files decides."""


@pytest.mark.parametrize(("prepare", "limit"), [(no_room, 1 << 40), (small_files, 10)])
def test_without_room_for_the_scratch_files_the_clean_is_refused(
    prepare: Callable[[MemoryEnv], None], limit: int
) -> None:
    env = MemoryEnv()
    sources = write_segments(env, three_segments(batch(record(3, "b"))))
    job = clean_job([[source] for source in sources], spill_bytes_max=limit)
    before = env.listdir(job.directory)
    prepare(env)
    refusal = by_many(env, job, random.Random(1), 2, SIZES[0])
    assert isinstance(refusal, str)
    assert refusal.startswith("no room for its scratch files")
    assert env.listdir(job.directory) == before
