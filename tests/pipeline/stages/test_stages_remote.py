"""Stages where a task sees only what a transport has brought to its host."""

import random
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from cleaner.job import CleanJob
from pipeline.compaction.cleaning import clean_partitions
from pipeline.compaction.indexing import index_partitions
from pipeline.stages import task_files
from pipeline.stages.planning import Limits
from storage.env import Env, write_file
from storage.format.filenames import LOG, file_name
from tests.pipeline.stages.test_stages_damage import damage, outcome, some_log
from tests.pipeline.stages.test_stages_index import check
from tests.support.draws import cases
from tests.support.stages import DirectEngine, any_limits, assert_same, out_of, source_of
from tests.support.storage.memory_env import MemoryEnv


class CopyingTransport:
    """A host of its own for each attempt: it has only the files that the attempt requested."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._host = f"/hosts/{env.random_bytes(8).hex()}"

    def inputs(self, job: CleanJob, bases: Sequence[int]) -> CleanJob:
        local = f"{self._host}/in"
        names = [file_name(base, LOG) for base in bases]
        self._copy(job.directory, local, names)
        return replace(job, directory=local)

    def outputs(self, job: CleanJob, folder: str) -> str:
        self._env.mkdir(f"{self._host}/{folder}")
        return f"{self._host}/{folder}"

    def deliver(self, job: CleanJob, folder: str, names: Sequence[str]) -> None:
        self._copy(f"{self._host}/{folder}", f"{out_of(job)}/{folder}", names)

    def fetch(self, job: CleanJob, folder: str, names: Sequence[str]) -> str:
        local = f"{self._host}/fetched/{folder}"
        self._copy(f"{out_of(job)}/{folder}", local, names)
        return local

    def close(self) -> None:
        if self._env.is_dir(self._host):
            self._env.remove_tree(self._host)

    def _copy(self, source: str, target: str, names: Sequence[str]) -> None:
        self._env.mkdir(target)
        for name in names:
            write_file(self._env, f"{target}/{name}", self._env.read_file(f"{source}/{name}"))


def limits_for(rng: random.Random) -> list[Limits]:
    return [Limits(memory_bytes=1 << 20), any_limits(rng, shards=rng.randint(1, 5))]


@pytest.mark.parametrize("transactions", [False, True])
@pytest.mark.parametrize("seed", range(cases(few=6, many=15)))
def test_stages_need_nothing_but_what_they_ask_their_transport_for(
    seed: int, transactions: bool
) -> None:
    print(f"seed {seed}")
    rng = random.Random(f"remote {seed} {transactions}")
    env, job = some_log(rng, transactions=transactions)
    if seed % 3 == 0:
        damage(env, job, rng)
    failed = outcome(env, job)
    assert failed is None
    with patch.object(task_files, "open_transport", lambda env, _: CopyingTransport(env)):
        for limits in limits_for(rng):
            (cleaned,) = clean_partitions(DirectEngine(env), [job], source_of, limits)
            assert_same(env, cleaned, job)
            if seed % 3:
                (index,) = index_partitions(DirectEngine(env), [job], source_of, limits)
                check(env, job, index)
    assert_no_host_is_left(env)


def assert_no_host_is_left(env: MemoryEnv) -> None:
    assert not env.is_dir("/hosts") or env.listdir("/hosts") == []
