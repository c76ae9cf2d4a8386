"""Random logs, cleaned elsewhere: what is true passes with a map of any size, nothing else does."""

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleaner.engine.clean import run_clean
from cleaner.engine.key_map import offset_map
from cleaner.engine.spilled import scratch
from cleaner.job import CleanJob, CleanReport, JobControl, ViewRules
from storage.env import Env
from storage.errors import StorageError
from tests.support.cleaner import living_log
from tests.support.cleaner.cleaning import Segment, write_segments
from tests.support.cleaner.partition_machine import Partition, machine_settings
from tests.support.cleaner.random_logs import jobs, logs
from tests.support.cleaner.verifying import (
    StagedOutputs,
    flip,
    hand_back,
    random_log,
    refusal,
    verify,
)
from tests.support.draws import cases
from tests.support.storage.memory_env import MemoryEnv

PROPERTY = settings(
    max_examples=cases(few=12, many=60), deadline=None, suppress_health_check=list(HealthCheck)
)
SEEDS = range(cases(few=4, many=24))
MAPS = [24, 72, 100, 240, 1 << 20]


def assert_true(env: MemoryEnv, staged: StagedOutputs) -> int:
    """It passes; and the files are as before. The number of rounds."""
    report = verify(env, staged)
    clean_report, remote = report.report, staged.report
    for name in (
        "next_dirty_offset", "cleaned", "horizons", "damaged", "groups", "bytes_after",
        "records_before", "records_after", "tombstones_kept", "tombstones_removed",
        "markers_removed", "records_aborted", "keys_indexed", "map_full",
    ):  # fmt: skip
        assert getattr(clean_report, name) == getattr(remote, name), name
    assert report.groups == len(staged.groups)
    return report.rounds


@PROPERTY
@given(st.data(), st.sampled_from([8, 64, 1 << 27]), st.sampled_from([1, 3, 4096]))
def test_what_a_clean_left_is_true_whatever_the_size_of_the_map(
    data: st.DataObject, window: int, chunk_keys: int
) -> None:
    segments: list[Segment] = data.draw(logs())
    env = MemoryEnv(1)
    job: CleanJob = data.draw(jobs(segments, write_segments(env, segments)))
    with (
        patch.object(scratch, "WINDOW_OFFSETS", window),
        patch.object(scratch, "OFFSETS_PIECE", chunk_keys),
        patch.object(scratch, "ROWS_PIECE", chunk_keys),
        patch.object(offset_map, "CHUNK_KEYS", chunk_keys),
    ):
        assert_true(env, hand_back(env, job))


@pytest.mark.parametrize("seed", SEEDS)
def test_logs_with_transactions_and_earlier_cleans_are_true(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    log = random_log(seed)
    dirty = max(log.dirty, rng.choice([0, log.log.log_end_offset // 2]))
    job = log.job(
        singly=rng.random() < 0.5,
        first_dirty_offset=dirty,
        read_buffer_bytes=rng.choice([1, 2000, 1 << 16]),
    )
    rounds = []
    for size_bytes in MAPS:
        staged = hand_back(log.env, replace(job, dedupe_buffer_bytes=size_bytes))
        rounds.append(assert_true(log.env, staged))
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[-1] == 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size_bytes", [72, 1 << 20])
def test_a_flipped_bit_anywhere_in_any_file_is_found(seed: int, size_bytes: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    log = random_log(seed, batches=30)
    staged = hand_back(log.env, log.job(first_dirty_offset=0, dedupe_buffer_bytes=size_bytes))
    files = [
        (index, f"{staged.folders[index]}/{file.name}", file.size_bytes)
        for index, group in enumerate(staged.groups)
        for file in (group.output.files if group.output else ())
        if file.size_bytes
    ]
    assert files
    for index, path, file_bytes in files:
        for _ in range(6):
            byte, bit = rng.randrange(file_bytes), rng.randrange(8)
            flip(log.env, path, byte, bit)
            error = refusal(log.env, staged)
            assert (error.path, error.position) == (path, byte)
            groups = list(staged.groups)
            staged.describe(log.env, index)
            assert refusal(log.env, staged).path == path, "also with a checksum that fits"
            staged.groups[:] = groups
            flip(log.env, path, byte, bit)
    assert_true(log.env, staged)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_that_was_run_by_other_rules_is_found_out_where_it_left_anything_else(
    seed: int,
) -> None:
    print("seed", seed)
    log = random_log(seed)
    job = log.job(first_dirty_offset=0, dedupe_buffer_bytes=random.Random(seed).choice(MAPS))
    true = hand_back(log.env, job)
    contents = {path: log.env.read_file(path) for path in paths(true)}
    others: list[dict[str, object]] = [
        {"now_ms": job.now_ms + 10**9},  # tombstones and markers go too early
        {"now_ms": job.now_ms - 10**9},  # and too late
        {"delete_retention_ms": 1},
        {"drop_expired_tombstones": False},
        {"last_records": ()},
        {"log_end_offset_is_end": not job.log_end_offset_is_end},
        {"index_interval_bytes": 5000},
        {"dedupe_buffer_bytes": 48},  # what is superseded stays
        {"log_start_offset": job.log_start_offset + 3, "first_dirty_offset": 3},
        {"view": ViewRules()},
        {"aborted": ()},
        {"groups": job.groups and tuple((source,) for group in job.groups for source in group)},
    ]
    differing = 0
    for other in others:
        try:
            staged = hand_back(log.env, job, **other)
        except StorageError:  # without its aborted transactions the job cannot be run
            continue
        same = staged.groups == true.groups and all(
            log.env.read_file(path) == data for path, data in contents.items()
        )
        if same:
            assert_true(log.env, replace(staged, report=true.report))
        else:
            differing += 1
            refusal(log.env, staged)
    assert differing >= 3


def paths(staged: StagedOutputs) -> list[str]:
    return [
        f"{folder}/{file.name}"
        for group, folder in zip(staged.groups, staged.folders, strict=True)
        for file in (group.output.files if group.output else ())
    ]


class VerifiedPartition(Partition):
    """The machine of the cleaner's invariants; each job of it is made elsewhere first."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)
        self.patched = patch.object(living_log, "run_clean", self.verify_and_clean)
        self.patched.start()

    def verify_and_clean(self, env: Env, job: CleanJob, control: JobControl) -> CleanReport:
        assert isinstance(env, MemoryEnv)
        if env.crash_at is None:
            size_bytes = self.rng.choice(MAPS)
            staged = hand_back(env, replace(job, dedupe_buffer_bytes=size_bytes))
            assert_true(env, staged)
            if env.exists(f"{job.directory}/varve.leases"):
                env.remove_tree(f"{job.directory}/varve.leases")
        return run_clean(env, job, control)

    def teardown(self) -> None:
        self.patched.stop()
        super().teardown()


VerifiedPartition.TestCase.settings = machine_settings(cases(few=10, many=40))
TestVerifiedPartition: Any = VerifiedPartition.TestCase
