"""The check of outputs made elsewhere: damaged sources, what has expired, limits, a real worker."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from cleaner.engine.kernels import fields, warm_up
from cleaner.engine.kernels.passes import bitmap as verify_kernels
from cleaner.engine.kernels.passes import shards
from cleaner.engine.spilled.scratch import Scratch, SpilledRows
from cleaner.engine.spilled.spilling_map import SpillingMap
from cleaner.job import CleanAbortedError
from cleaner.verification import InvalidOutputError
from cleaner.workers.dedicated_worker import JobFailedError, open_dedicated_worker
from cleaner.workers.process import spawn_process
from cleaner.workers.throttle import UNLIMITED, BrokerSide, Direction
from storage.env import RealEnv
from storage.format import filenames
from storage.model import TopicPartition
from tests.support.cleaner.clean_cases import batch, damaged, record, three_segments
from tests.support.cleaner.cleaning import Recorder, clean_job, segment, write_segments
from tests.support.cleaner.verifying import (
    MAPS,
    StagedOutputs,
    hand_back,
    handed,
    refusal,
    verify,
    written,
)
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put

# Damage, what has expired, limits


@MAPS
@pytest.mark.parametrize("first_dirty", [0, 4])
def test_sources_that_are_damaged_leave_the_same_there_and_here(
    first_dirty: int, map_bytes: int
) -> None:
    env = MemoryEnv()
    parts = three_segments(damaged(batch(record(3, "b"))))
    job = clean_job(
        [write_segments(env, parts)], first_dirty_offset=first_dirty, dedupe_buffer_bytes=map_bytes
    )
    value = hand_back(env, job)
    assert value.report.damaged
    assert verify(env, value).report.damaged == value.report.damaged


def test_a_job_over_what_has_expired_is_checked_too() -> None:
    log = written()
    log.clean()
    log.pass_retention()
    sources = log.sources()
    end = sources[-1].next_base_offset
    job = log.job(
        groups=[(source,) for source in sources], expired_only=True,
        first_dirty_offset=end, end_offset=end,
    )  # fmt: skip
    value = hand_back(log.env, job)
    assert value.groups
    assert verify(log.env, value).rounds == 1
    early = hand_back(log.env, replace(job, now_ms=job.now_ms - 10**9), now_ms=job.now_ms)
    assert refusal(log.env, early)


@MAPS
def test_an_input_that_is_gone_is_not_taken_for_an_empty_one(map_bytes: int) -> None:
    log = written()
    job = log.job(dedupe_buffer_bytes=map_bytes, singly=True)
    gone = f"{job.directory}/{filenames.file_name(0, filenames.LOG)}"
    data = log.env.read_file(gone)
    log.env.unlink(gone)
    value = hand_back(log.env, job)
    assert value.groups[0].output is None, "as if retention had taken it"
    assert refusal(log.env, value).path == gone
    put(log.env, gone, data)
    assert refusal(log.env, value).path != gone

    class Unlinks(Recorder):
        def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
            if log.env.exists(gone) and stage == "rewrite" and done_bytes == total_bytes:
                log.env.unlink(gone)

    value = hand_back(log.env, job)
    with pytest.raises(InvalidOutputError) as refused:
        verify(log.env, value, Unlinks())
    assert refused.value.path == gone


def test_a_map_for_one_key_is_enough() -> None:
    env = MemoryEnv()
    job = clean_job([write_segments(env, three_segments(batch(record(3, "b"))))])
    value = hand_back(env, job)
    value.job = replace(job, dedupe_buffer_bytes=0)
    assert verify(env, value).rounds >= 2


@MAPS
def test_what_is_read_is_charged_and_nothing_is_written(map_bytes: int) -> None:
    log, value = handed(map_bytes)
    control = Recorder()
    report = verify(log.env, value, control)
    sources = sum(source.size_bytes for group in value.job.groups for source in group)
    assert report.bytes_compared + 2 * sources <= control.charged_read
    noted = (24 + 8) * value.job.end_offset
    assert control.charged_write <= (0 if map_bytes > 72 else noted)
    assert control.stages


@MAPS
@pytest.mark.parametrize("after", range(0, 8, 2))
def test_it_stops_when_asked_to_and_leaves_nothing_behind(after: int, map_bytes: int) -> None:
    log, value = handed(map_bytes)
    before = log.env.listdir(value.job.directory)
    with pytest.raises(CleanAbortedError):
        verify(log.env, value, Recorder(abort_after=after))
    assert log.env.listdir(value.job.directory) == before


def test_verified_files_are_durable_with_their_names_and_have_the_engines_times() -> None:
    log, value = handed()
    path = value.path()
    log.env.set_mtime_ms(path, 5)
    names = [value.path(kind) for kind in (filenames.LOG, filenames.INDEX, filenames.TXN_INDEX)]
    contents = {name: log.env.read_file(name) for name in names}
    for name, data in contents.items():  # written anew, and not synced
        put(log.env, name, data)
    verify(log.env, value)
    assert log.env.mtime_ms(path) == value.job.groups[-1][-1].last_modified_ms
    operations = log.env.history
    for name in names:
        assert ("sync", name) in operations
    assert operations[-1] == ("sync_dir", value.folders[0])


def test_a_disk_that_fails_is_no_fault_of_the_outputs() -> None:
    log, value = handed()
    log.env.fail_on(lambda operation, path: operation == "pread" and path == value.path(), 5)
    with pytest.raises(OSError, match="Input/output"):
        verify(log.env, value)


def test_the_map_takes_no_more_than_the_job_allows_but_for_a_batch_with_more_keys() -> None:
    env = MemoryEnv()
    job = clean_job(
        [write_segments(env, [segment(0, [batch(record(0, "a"))], 10**6)])],
        dedupe_buffer_bytes=24 * 1_000_000,
    )
    scratch = Scratch(env, job, Recorder())
    rows = SpilledRows(scratch, 4)
    keys = SpillingMap(job, job.dedupe_buffer_bytes, 10**6 * 5, rows.add)
    rng = np.random.default_rng(1)
    for first in range(0, 2_400_000, 60_000):
        lows, highs = rng.integers(0, (1 << 64) - 1, (2, 60_000), dtype=np.uint64)
        put = keys.put(lows, highs, np.arange(first, first + 60_000, dtype=np.int64))
        assert put == 60_000
        assert keys.state[fields.SLOTS] <= 1_000_000
    assert keys.spilled + keys.entries == 2_400_000
    assert sum(rows.count(shard) for shard in range(4)) == keys.spilled > 0
    scratch.close()


def test_warming_up_compiles_all_that_a_check_calls() -> None:
    warm_up()
    kernels = [
        shards.count_by_shard,
        shards.sort_by_shard,
        shards.merge_rows,
        shards.list_batches,
        shards.list_unpacked,
        shards.list_missing,
        verify_kernels.set_bits,
    ]
    compiled = [len(kernel.signatures) for kernel in kernels]  # type: ignore[attr-defined]
    for dirty in (0, 12):
        log, value = handed(72, first_dirty_offset=dirty)
        verify(log.env, value)
    assert [len(kernel.signatures) for kernel in kernels] == compiled  # type: ignore[attr-defined]
    assert all(compiled)


# In a worker


class Unlimited:
    """Grants everything."""

    def join(self, index: int, side: BrokerSide, now: float) -> None:
        side.grant(Direction.READ, UNLIMITED)
        side.grant(Direction.WRITE, UNLIMITED)

    def leave(self, index: int, now: float) -> None:
        pass


def on_disk(folder: str) -> StagedOutputs:
    """What `handed` makes, as files of the system."""
    log, value = handed()
    env = RealEnv()
    moved_to = {}
    for place in (value.job.directory, *value.folders):
        moved_to[place] = f"{folder}/{place}"
        env.mkdir(moved_to[place])
        for name in log.env.listdir(place):
            if not log.env.is_dir(f"{place}/{name}"):
                put(env, f"{moved_to[place]}/{name}", log.env.read_file(f"{place}/{name}"))
    job = replace(
        value.job,
        directory=moved_to[value.job.directory],
        partition=TopicPartition("topic", 0),
    )
    return StagedOutputs(
        job, value.groups, [moved_to[folder] for folder in value.folders], value.report
    )


@pytest.mark.usefixtures("forked_workers")
async def test_a_worker_process_verifies_refuses_and_goes_on(tmp_path: object) -> None:
    value = on_disk(str(tmp_path))
    async with open_dedicated_worker(
        spawn_process, 0, index=0, budgets=Unlimited(), top_up=lambda now: None
    ) as worker:
        async with asyncio.timeout(300):
            report = await worker.verify(value.job, value.groups, value.folders)
        assert report.report.records_after == value.report.records_after
        path = value.path()
        env = RealEnv()
        put(env, path, env.read_file(path)[:70] + b"!" + env.read_file(path)[71:])
        async with asyncio.timeout(60):
            with pytest.raises(InvalidOutputError) as refused:
                await worker.verify(value.job, value.groups, value.folders)
        assert (refused.value.path, refused.value.position) == (path, 70)
        gone = replace(value.job, directory=f"{tmp_path}/nowhere")
        async with asyncio.timeout(60):
            with pytest.raises((JobFailedError, InvalidOutputError)):
                await worker.verify(gone, value.groups, value.folders)
        worker.abort()
        with pytest.raises(CleanAbortedError):
            await worker.verify(value.job, value.groups, value.folders)
