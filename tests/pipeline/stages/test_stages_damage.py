"""Damage of any kind and anywhere: stages handle it as the cleaner does."""

import random
from dataclasses import replace

import pytest

from cleaner.engine.clean import run_clean
from cleaner.job import CleanJob
from pipeline.compaction.cleaning import clean_partitions
from storage.errors import StorageError, TransactionIndexError
from storage.format.batch import ControlType, Record
from storage.format.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD
from storage.format.filenames import LOG, file_name
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.compacted_log import Producer
from tests.support.cleaner.living_log import LivingLog
from tests.support.draws import cases
from tests.support.stages import DirectEngine, assert_same, out_of, some_limits, source_of
from tests.support.storage.memory_env import MemoryEnv

CODECS = [NONE, NONE, GZIP, SNAPPY, LZ4, ZSTD]
ROUNDS = 40


def some_log(rng: random.Random, *, transactions: bool) -> tuple[MemoryEnv, CleanJob]:
    """A log that was cleaned before, perhaps, and the job that is due."""
    world = LivingLog(rng.randint(0, 1 << 16))
    producers = [Producer(n, is_transactional=True) for n in (1, 2, 3)]
    open_ones: set[int] = set()
    cleans_at = rng.choice([-1, 20, 30])
    for turn in range(ROUNDS):
        keys = [rng.choice([b"a", b"b", b"c", b"d"]) for _ in range(rng.randint(1, 4))]
        values = [None, b"v", b"value " * 9]
        records = [Record(0, 0, key, rng.choice(values)) for key in keys]
        by = rng.choice([None, *producers]) if transactions else None
        world.put(records, by=by, codec=rng.choice(CODECS))
        if by is not None:
            open_ones.add(by.producer_id)
        if open_ones and rng.random() < 0.4:
            ended = rng.choice(sorted(open_ones))
            open_ones.discard(ended)
            kind = rng.choice([ControlType.COMMIT, ControlType.ABORT])
            world.end_transaction(producers[ended - 1], kind)
        if rng.random() < 0.25:
            world.roll()
            world.env.advance_ms(rng.choice([1, 20_000]))
        if turn == cleans_at:
            world.abort_open()
            open_ones.clear()
            for producer in producers:
                producer.epoch += 2  # after those of the markers
                producer.sequence = 0
            world.clean()
    world.abort_open()
    world.roll()
    world.log.flush()
    job, _ = world.plan()
    assert job is not None
    return world.env, job


def damage(env: MemoryEnv, job: CleanJob, rng: random.Random) -> str:
    """Spoil a segment; what was done."""
    sources = [source for group in job.groups for source in group if source.size_bytes]
    source = rng.choice(sources)
    path = f"{job.directory}/{file_name(source.base_offset, LOG)}"
    file = env.open(path, write=True)
    at = rng.randrange(source.size_bytes)
    subject = rng.choice(["flip", "flip", "cut", "zeros"])
    if subject == "cut":
        file.truncate(at)
    elif subject == "zeros":
        file.pwrite(bytes(min(70, source.size_bytes - at)), at)
    else:
        file.pwrite(bytes([(file.pread(1, at) or b"\0")[0] ^ (1 << rng.randrange(8))]), at)
    file.close()
    return f"{subject} at {at} of {path}"


def outcome(env: MemoryEnv, job: CleanJob) -> type[StorageError] | None:
    """How the cleaner ends."""
    path = f"{out_of(job)}/first"
    env.mkdir(path)
    try:
        run_clean(env, replace(job, output_directory=path), Recorder(), one_pass=False)
    except StorageError as error:
        return type(error)
    return None


@pytest.mark.parametrize("transactions", [False, True])
@pytest.mark.parametrize("seed", range(cases(few=6, many=30)))
def test_damage_is_left_and_told_as_the_cleaner_does(seed: int, transactions: bool) -> None:
    rng = random.Random(f"{seed} {transactions}")
    env, job = some_log(rng, transactions=transactions)
    done = [damage(env, job, rng) for _ in range(rng.choice([1, 1, 2, 3]))]
    print(f"seed {seed}: {done}")
    failed = outcome(env, job)
    for limits in some_limits(rng):
        if failed is not None:
            assert failed is TransactionIndexError
            with pytest.raises(TransactionIndexError):
                clean_partitions(DirectEngine(env), [job], source_of, limits)
            continue
        (cleaned,) = clean_partitions(DirectEngine(env), [job], source_of, limits)
        assert_same(env, cleaned, job)


@pytest.mark.parametrize("seed", range(cases(few=5, many=12)))
def test_indexes_that_contradict_the_markers_fail_the_stages_as_they_fail_the_cleaner(
    seed: int,
) -> None:
    rng = random.Random(seed)
    env, job = some_log(rng, transactions=True)
    entries = list(job.aborted)
    if not entries:
        return
    print(f"seed {seed}")
    entry = entries.pop(rng.randrange(len(entries)))
    if rng.random() < 0.5:
        entries.append(entry._replace(last_offset=entry.last_offset - 1))
    job = replace(job, aborted=tuple(sorted(entries, key=lambda entry: entry.last_offset)))
    failed = outcome(env, job)
    for limits in some_limits(rng):
        if failed is None:
            (cleaned,) = clean_partitions(DirectEngine(env), [job], source_of, limits)
            assert_same(env, cleaned, job)
        else:
            with pytest.raises(TransactionIndexError):
                clean_partitions(DirectEngine(env), [job], source_of, limits)
