"""Cleaning partitions on an engine: which tasks, in which order, and what comes of them.

Rules
- Tried whole first, where the keys are likely to fit; cut up otherwise (planning.py).
- Of a partition that is cut up: `combine` its segments, `merge` its shards, `rewrite` its groups.
  Partitions go through the stages together, so that no worker waits while another has work.
- Where transactions or damage that nobody had found before make groups depend on each other, one
  task rewrites the whole partition, in order.
- The result is what the cleaner itself would leave, byte for byte, with a map that holds every key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cleaner.engine.clean import Indexed, make_report
from cleaner.engine.offset_map import SLOT_BYTES, SLOTS_MIN
from cleaner.engine.outcome import CleanOutcome, RewriteTotals
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
    RowSource,
    SurvivorFiles,
    WholeResult,
    WholeTask,
)

COMBINE_SHARE: Final = 0.5  # of a task's memory, for the map; the rest is for sorting and buffers
_EVERY: Final = -1  # the reader of what all readers of a partition read


@dataclass(frozen=True, slots=True)
class CleanedPartition:
    """A cleaned partition. `folders`: for each group, the folder of the run with its files."""

    groups: tuple[CleanedGroup, ...]
    folders: tuple[str, ...]
    report: CleanReport


@dataclass(slots=True)
class _Partition:
    """A partition that is cut up, and what its stages have found."""

    job: CleanJob
    source: dict[str, str]
    cut: Cut
    combined: list[CombineResult]
    merged: list[MergeResult]

    @property
    def damaged(self) -> tuple[DamageFound, ...]:
        return tuple(damage for result in self.combined for damage in result.damaged)

    @property
    def keyless_met(self) -> bool:
        return any(result.keyless_met for result in self.combined)

    @property
    def in_order(self) -> bool:
        return any(result.transactions_met for result in self.combined)

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The groups of each task that will rewrite."""
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
    """Clean each of `jobs`, whose inputs lie at `source_for` -> in the order of the jobs.

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
        CombineTask(
            partition_work.source,
            over_segments(partition_work.job, bases),
            partition_work.cut.shards,
            int(limits.memory_bytes * COMBINE_SHARE),
        )
        for partition_work in partitions
        for bases in partition_work.cut.combines
    ]
    results = iter(
        stages.run("combine", tasks, [source_bytes(task.job) for task in tasks], CombineResult)
    )
    for partition in partitions:
        partition.combined = [next(results) for _ in partition.cut.combines]


def input_rows(task: MergeTask) -> int:
    """How many rows a task has to go through."""
    return sum(file.rows for rows in task.rows for file in (rows.dirty, rows.clean) if file)


def rows_of(combined: Sequence[CombineResult], shard: int) -> tuple[RowSource, ...]:
    """The files that hold rows of a shard, in order."""
    sources = (
        RowSource(result.folder, result.dirty.get(str(shard)), result.clean.get(str(shard)))
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
            rows = rows_of(partition.combined, shard)
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
    """One task; with all groups it reads what all readers would."""
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
        partition.keyless_met,
        partition.in_order,
    )


def _rewrite(stages: StageRunner, partitions: Sequence[_Partition]) -> list[CleanedPartition]:
    tasks = [
        _rewrite_task(partition, reader, places)
        for partition in partitions
        for reader, places in enumerate(partition.readers)
    ]
    results = iter(_run_rewrites(stages, tasks))
    resultses = [[next(results) for _ in partition.readers] for partition in partitions]
    # Damage that nobody had met before: what comes behind it must know.
    surprised = [
        place
        for place, results in enumerate(resultses)
        if len(results) > 1 and any(result.damaged for result in results)
    ]
    again = [
        _rewrite_task(partition, _EVERY, tuple(range(len(partition.job.groups))))
        for partition in (partitions[place] for place in surprised)
    ]
    for place, result in zip(surprised, _run_rewrites(stages, again), strict=True):
        resultses[place] = [result]
    return [
        _cleaned(partition, results)
        for partition, results in zip(partitions, resultses, strict=True)
    ]


def _run_rewrites(stages: StageRunner, tasks: Sequence[RewriteTask]) -> list[RewriteResult]:
    return stages.run("rewrite", tasks, [source_bytes(task.job) for task in tasks], RewriteResult)


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
