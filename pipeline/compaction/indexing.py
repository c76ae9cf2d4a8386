"""Index partitions on an engine: their survivors and counts, for tables.

A partition is indexed in one task if its keys are likely to fit. Otherwise its keys are combined
and merged as for a clean, but with every record from the log start offset on and with tombstones
kept apart. The log does not change; all files written are scratch files of the lease.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cleaner.job import CleanJob
from pipeline.compaction.cleaning import (
    combine_tasks,
    input_rows,
    shard_rows,
    task_bytes,
)
from pipeline.compaction.stage_runs import Progress, Source, StageRunner
from pipeline.engines.engine import Engine
from pipeline.stages.planning import (
    Cut,
    Limits,
    cut_up,
    is_one_task,
    over_groups,
    source_bytes,
    source_segments,
)
from pipeline.stages.tasks import (
    CombineResult,
    DamageFound,
    IndexResult,
    IndexTask,
    MergeResult,
    MergeTask,
    SegmentCounts,
    SurvivorFiles,
)


@dataclass(frozen=True, slots=True)
class PartitionIndex:
    """The index of one partition. `survivors` are files for `survivors.read_survivors`.

    A damaged segment is indexed up to its damage.
    """

    job: CleanJob
    survivors: tuple[SurvivorFiles, ...]
    counts: tuple[SegmentCounts, ...]  # of every segment, in order
    damaged: tuple[DamageFound, ...]
    keys: int  # with a last record, tombstones included


def index_partitions(
    engine: Engine,
    jobs: Sequence[CleanJob],
    source_for: Callable[[CleanJob], Source],
    limits: Limits,
    *,
    progress: Progress | None = None,
) -> list[PartitionIndex]:
    """Index each of `jobs`; return the results in the order of the jobs.

    `source_for` returns the transport of a job's inputs.

    Raises StageFailedError.
    """
    stages = StageRunner(engine, progress)
    sources = [dict(source_for(job)) for job in jobs]
    done: dict[int, PartitionIndex] = {}
    whole = [
        place
        for place, job in enumerate(jobs)
        if is_one_task(job, limits, first_offset=job.log_start_offset)
    ]
    results = stages.run(
        "index",
        [IndexTask(sources[place], jobs[place], limits.memory_bytes) for place in whole],
        [source_bytes(jobs[place]) for place in whole],
        IndexResult,
    )
    for place, result in zip(whole, results, strict=True):
        if result.fits:
            done[place] = PartitionIndex(
                jobs[place], (result.survivors,), result.counts, result.damaged, result.keys
            )
    remaining = [place for place in range(len(jobs)) if place not in done]
    pairs = [(jobs[place], sources[place]) for place in remaining]
    done.update(zip(remaining, _index_in_shards(stages, pairs, limits), strict=True))
    return [done[place] for place in range(len(jobs))]


def _index_in_shards(
    stages: StageRunner, pairs: Sequence[tuple[CleanJob, dict[str, str]]], limits: Limits
) -> list[PartitionIndex]:
    cuts = [cut_up(job, limits, first_offset=job.log_start_offset) for job, _ in pairs]
    tasks = [
        combine_tasks(job, source, cut, limits, with_counts=True)
        for (job, source), cut in zip(pairs, cuts, strict=True)
    ]
    combined = stages.run_grouped("combine", tasks, task_bytes, CombineResult)
    merges = [
        _merges(job, source, cut, results, limits)
        for (job, source), cut, results in zip(pairs, cuts, combined, strict=True)
    ]
    merged = stages.run_grouped("merge", merges, input_rows, MergeResult)
    return [
        _indexed(job, combine_results, merge_results)
        for (job, _), combine_results, merge_results in zip(pairs, combined, merged, strict=True)
    ]


def _merges(
    job: CleanJob,
    source: dict[str, str],
    cut: Cut,
    combined: Sequence[CombineResult],
    limits: Limits,
) -> list[MergeTask]:
    ranges = (
        tuple((source.base_offset, source.next_base_offset) for source in source_segments(job)),
    )
    by_shard = ((shard, shard_rows(combined, shard)) for shard in range(cut.shards))
    return [
        MergeTask(source, over_groups(job, ()), shard, rows, ranges, limits.memory_bytes)
        for shard, rows in by_shard
        if rows
    ]


def _indexed(
    job: CleanJob, combined: Sequence[CombineResult], merged: Sequence[MergeResult]
) -> PartitionIndex:
    counts = [counts for result in combined for counts in result.counts]
    return PartitionIndex(
        job=job,
        survivors=tuple(
            SurvivorFiles(result.folder, tuple(name for names in result.files for name in names))
            for result in merged
        ),
        counts=tuple(
            replace(
                counts,
                live=sum(result.live.get(str(counts.base_offset), 0) for result in merged),
                tombstones=sum(
                    result.tombstones.get(str(counts.base_offset), 0) for result in merged
                ),
            )
            for counts in counts
        ),
        damaged=tuple(damage for result in combined for damage in result.damaged),
        keys=sum(result.keys for result in merged),
    )
