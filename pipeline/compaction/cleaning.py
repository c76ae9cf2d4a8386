"""Clean partitions on an engine: the tasks, their order, and their results.

Rules
- A partition is tried as one task if its keys are likely to fit, and cut up otherwise
  (planning.py).
- A partition that is cut up runs `combine` on its segments, `merge` on its shards and `rewrite` on
  its groups. All partitions run each stage together, so that no worker idles.
- Transactions and newly found damage make groups depend on each other; then one task rewrites the
  whole partition in order.
- The result equals that of the cleaner with a map large enough for every key, byte for byte.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cleaner.engine.key_map.map_size import SLOT_BYTES, SLOTS_MIN
from cleaner.engine.outcome import CleanOutcome, RewriteTotals
from cleaner.engine.report import Indexed, make_report
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from pipeline.compaction.stage_runs import Progress, Source, StageRunner
from pipeline.engines.engine import Engine
from pipeline.stages.planning import (
    Cut,
    Limits,
    cut_up,
    is_one_task,
    over_groups,
    over_segments,
    source_bytes,
)
from pipeline.stages.tasks import (
    CombineResult,
    CombineTask,
    DamageFound,
    MergeResult,
    MergeTask,
    RewriteResult,
    RewriteTask,
    ShardFiles,
    SurvivorFiles,
    WholeResult,
    WholeTask,
)

# Share of a task's memory for the map; the rest is for sorting and buffers.
COMBINE_SHARE: Final = 0.5
_EVERY: Final = -1  # reads the survivors of all readers of a partition


@dataclass(frozen=True, slots=True)
class CleanedPartition:
    """A cleaned partition. `folders` has the folder of the files of each group."""

    groups: tuple[CleanedGroup, ...]
    folders: tuple[str, ...]
    report: CleanReport


@dataclass(slots=True)
class _Partition:
    """A partition that is cut up, with the results of its stages."""

    job: CleanJob
    source: dict[str, str]
    cut: Cut
    combined: list[CombineResult]
    merged: list[MergeResult]

    @property
    def damaged(self) -> tuple[DamageFound, ...]:
        return tuple(damage for result in self.combined for damage in result.damaged)

    @property
    def keyless_seen(self) -> bool:
        return any(result.keyless_seen for result in self.combined)

    @property
    def in_order(self) -> bool:
        return any(result.transactions_seen for result in self.combined)

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Return the groups of each rewrite task."""
        if self.in_order:
            return (tuple(range(len(self.job.groups))),)
        return self.cut.rewrites


def clean_partitions(
    engine: Engine,
    jobs: Sequence[CleanJob],
    source_for: Callable[[CleanJob], Source],
    limits: Limits,
    *,
    progress: Progress | None = None,
) -> list[CleanedPartition]:
    """Clean each of `jobs`; return the results in the order of the jobs.

    `source_for` returns the transport of a job's inputs.

    Raises StageFailedError.
    """
    jobs = [replace(job, dedupe_buffer_bytes=limits.memory_bytes) for job in jobs]
    sources = [dict(source_for(job)) for job in jobs]
    stages = StageRunner(engine, progress)
    done: dict[int, CleanedPartition] = {}
    whole = [place for place, job in enumerate(jobs) if is_one_task(job, limits)]
    results = stages.run(
        "whole",
        [WholeTask(sources[place], jobs[place]) for place in whole],
        [source_bytes(jobs[place]) for place in whole],
        WholeResult,
    )
    for place, result in zip(whole, results, strict=True):
        if result.report is not None:
            folders = (result.folder,) * len(result.groups)
            done[place] = CleanedPartition(result.groups, folders, result.report)
    remaining = [place for place in range(len(jobs)) if place not in done]
    partitions = [
        _Partition(jobs[place], sources[place], cut_up(jobs[place], limits), [], [])
        for place in remaining
    ]
    _combine(stages, partitions, limits)
    _merge(stages, partitions, limits)
    done.update(zip(remaining, _rewrite(stages, partitions), strict=True))
    return [done[place] for place in range(len(jobs))]


def _combine(stages: StageRunner, partitions: Sequence[_Partition], limits: Limits) -> None:
    tasks = [
        combine_tasks(partition.job, partition.source, partition.cut, limits)
        for partition in partitions
    ]
    results = stages.run_grouped("combine", tasks, task_bytes, CombineResult)
    for partition, combined in zip(partitions, results, strict=True):
        partition.combined = combined


def combine_tasks(
    job: CleanJob, source: dict[str, str], cut: Cut, limits: Limits, *, with_counts: bool = False
) -> list[CombineTask]:
    """Return the combine tasks of a partition that is cut up."""
    memory_bytes = int(limits.memory_bytes * COMBINE_SHARE)
    return [
        CombineTask(source, over_segments(job, bases), cut.shards, memory_bytes, with_counts)
        for bases in cut.combines
    ]


def task_bytes(task: CombineTask | RewriteTask) -> int:
    """Return the size of the segments that a task reads."""
    return source_bytes(task.job)


def input_rows(task: MergeTask) -> int:
    """Return the number of rows that a task reads."""
    return sum(file.rows for rows in task.rows for file in (rows.dirty, rows.clean) if file)


def shard_rows(combined: Sequence[CombineResult], shard: int) -> tuple[ShardFiles, ...]:
    """Return the files with rows of a shard, in order."""
    sources = (
        ShardFiles(result.folder, result.dirty.get(str(shard)), result.clean.get(str(shard)))
        for result in combined
    )
    return tuple(
        source for source in sources if source.dirty is not None or source.clean is not None
    )


def _merge(stages: StageRunner, partitions: Sequence[_Partition], limits: Limits) -> None:
    tasks: list[MergeTask] = []
    owners: list[_Partition] = []
    for partition in partitions:
        ranges = tuple(
            tuple(
                (source.base_offset, source.next_base_offset)
                for place in places
                for source in partition.job.groups[place]
            )
            for places in partition.readers
        )
        for shard in range(partition.cut.shards):
            rows = shard_rows(partition.combined, shard)
            if rows:
                tasks.append(
                    MergeTask(
                        partition.source,
                        over_groups(partition.job, ()),
                        shard,
                        rows,
                        ranges,
                        limits.memory_bytes,
                    )
                )
                owners.append(partition)
    results = stages.run("merge", tasks, [input_rows(task) for task in tasks], MergeResult)
    for owner, result in zip(owners, results, strict=True):
        owner.merged.append(result)


def _rewrite_task(partition: _Partition, reader: int, places: tuple[int, ...]) -> RewriteTask:
    """Return a rewrite task; reader _EVERY reads the survivors of all readers."""
    survivors = tuple(
        SurvivorFiles(result.folder, names)
        for result in partition.merged
        if (
            names := tuple(
                name
                for number, files in enumerate(result.files)
                for name in files
                if reader in {number, _EVERY}
            )
        )
    )
    return RewriteTask(
        partition.source,
        over_groups(partition.job, places),
        survivors,
        partition.damaged,
        partition.keyless_seen,
        partition.in_order,
    )


def _rewrite(stages: StageRunner, partitions: Sequence[_Partition]) -> list[CleanedPartition]:
    tasks = [
        [
            _rewrite_task(partition, reader, places)
            for reader, places in enumerate(partition.readers)
        ]
        for partition in partitions
    ]
    rewritten = stages.run_grouped("rewrite", tasks, task_bytes, RewriteResult)
    # Newly found damage affects later groups of the partition: rewrite them in one task.
    repeated = [
        place
        for place, results in enumerate(rewritten)
        if len(results) > 1 and any(result.damaged for result in results)
    ]
    again = [
        [_rewrite_task(partition, _EVERY, tuple(range(len(partition.job.groups))))]
        for partition in (partitions[place] for place in repeated)
    ]
    results_again = stages.run_grouped("rewrite", again, task_bytes, RewriteResult)
    for place, results in zip(repeated, results_again, strict=True):
        rewritten[place] = results
    return [
        _cleaned(partition, results)
        for partition, results in zip(partitions, rewritten, strict=True)
    ]


def _cleaned(partition: _Partition, results: Sequence[RewriteResult]) -> CleanedPartition:
    totals = RewriteTotals()
    for result in results:
        totals.add(result.totals)
    damages = (*partition.damaged, *(damage for result in results for damage in result.damaged))
    damaged = {broken.base_offset: broken.damage for broken in damages}
    outcome = CleanOutcome(
        totals=totals,
        damaged=damaged,
        map_seconds=sum(result.seconds for result in partition.combined)
        + sum(result.seconds for result in partition.merged),
        rewrite_seconds=sum(result.seconds for result in results),
    )
    keys = sum(result.keys for result in partition.merged)
    keys_at_limit = max(partition.job.dedupe_buffer_bytes // SLOT_BYTES, SLOTS_MIN) * 9 // 10
    indexed = Indexed(partition.job.end_offset, keys, min(keys / keys_at_limit, 1.0))
    bytes_read = sum(result.bytes_read for result in partition.combined)
    bytes_read += sum(result.bytes_read for result in results)
    return CleanedPartition(
        groups=tuple(group for result in results for group in result.groups),
        folders=tuple(result.folder for result in results for _ in result.groups),
        report=make_report(partition.job, outcome, indexed, bytes_read=bytes_read),
    )
