"""Stages without processes, on any Env, compared with the cleaner itself."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from cleaner.engine.clean import run_clean
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from pipeline.compaction.cleaning import CleanedPartition, clean_partitions
from pipeline.stages.combine import combine
from pipeline.stages.index import index_partition
from pipeline.stages.merge import merge
from pipeline.stages.planning import Limits
from pipeline.stages.rewrite import rewrite
from pipeline.stages.tasks import (
    CombineTask,
    IndexTask,
    MergeTask,
    RewriteTask,
    WholeTask,
    decode,
    encode,
)
from pipeline.stages.whole import clean_whole
from storage.env import Env
from tests.support.cleaner.cleaning import Recorder

DISK = {"kind": "disk"}
# What depends on how the passes were made, and not on what they left.
NEUTRAL = {"map_seconds", "rewrite_seconds", "bytes_read", "passes", "map_utilization"}

_STAGES: dict[str, tuple[type[Any], Callable[[Env, Any], object]]] = {
    "whole": (WholeTask, clean_whole),
    "combine": (CombineTask, combine),
    "merge": (MergeTask, merge),
    "rewrite": (RewriteTask, rewrite),
    "index": (IndexTask, index_partition),
}


class DirectEngine:
    """Runs every task here, at once; descriptors still go through their JSON."""

    name = "direct"
    parallelism = 1

    def __init__(self, env: Env) -> None:
        self._env = env
        self.ran: list[str] = []

    def run(
        self,
        stage: str,
        tasks: Sequence[bytes],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[bytes]:
        kind, work = _STAGES[stage]
        self.ran += [stage] * len(tasks)
        results = [encode(work(self._env, decode(kind, task))) for task in tasks]
        if progress is not None:
            progress(len(tasks))
        return results

    def close(self) -> None:
        pass


def source_of(job: CleanJob) -> dict[str, str]:
    return DISK


def out_of(job: CleanJob) -> str:
    return f"{job.directory.rpartition('/')[0]}/out"


def files_of(env: Env, groups: Sequence[CleanedGroup], folders: Sequence[str]) -> list[Any]:
    """For each group its names and contents."""
    return [
        {file.name: env.read_file(f"{folder}/{file.name}") for file in group.output.files}
        if group.output
        else None
        for group, folder in zip(groups, folders, strict=True)
    ]


def comparable(report: CleanReport) -> dict[str, object]:
    """A report without what is neutral."""
    return {name: value for name, value in asdict(report).items() if name not in NEUTRAL}


def assert_same(env: Env, cleaned: CleanedPartition, job: CleanJob) -> None:
    """What a partition came to is what the cleaner makes of it, with a map for every key."""
    path = f"{out_of(job)}/reference"
    env.mkdir(path)
    control = Recorder()
    report = run_clean(
        env,
        replace(job, dedupe_buffer_bytes=1 << 20, output_directory=path),
        control,
        one_pass=False,
    )
    assert not report.map_full
    if cleaned.report.passes == 1:  # then those are not counted of a batch that goes unseen
        report = replace(report, records_without_key=cleaned.report.records_without_key)
    assert comparable(cleaned.report) == comparable(report)
    assert list(cleaned.groups) == control.groups
    folders = [f"{out_of(job)}/{folder}" for folder in cleaned.folders]
    results = files_of(env, cleaned.groups, folders)
    assert results == files_of(env, control.groups, [path] * len(control.groups))
    env.remove_tree(path)


def any_limits(rng: random.Random, *, shards: int | None) -> Limits:
    """Tasks of any size, with much memory or hardly any."""
    return Limits(
        memory_bytes=rng.choice([1, 500, 1 << 20]),
        task_bytes=rng.choice([1, 400, 1 << 30]),
        parallelism=rng.randint(1, 4),
        shards=shards,
    )


def compare(env: Env, job: CleanJob, rng: random.Random) -> None:
    """Clean a job whole, and cut up in some way, and by the cleaner: all leave the same."""
    for limits in some_limits(rng):
        (cleaned,) = clean_partitions(DirectEngine(env), [job], source_of, limits)
        assert_same(env, cleaned, job)
    env.remove_tree(out_of(job))


def some_limits(rng: random.Random) -> list[Limits]:
    """For one task, for whatever comes out, and for many shards."""
    return [
        Limits(memory_bytes=1 << 20),
        any_limits(rng, shards=None),
        any_limits(rng, shards=rng.randint(1, 7)),
    ]
