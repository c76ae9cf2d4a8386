"""`varve pipeline compact`: clean a topic's partitions outside of the broker, which publishes them.

Rules
- The broker leases the closed segments; an engine makes new ones of them; the broker checks these
  and swaps them in, partition by partition. Only the broker touches a log.
- Until then nothing has changed: a job that fails, or is interrupted, gives its run up, and the
  broker removes what it left.
- What was made is what the broker's own cleaner would have made, byte for byte, on any engine.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import click

from admin.client import ApiClient
from cleaner.job import Damage
from cleaner.remote_compaction import AdoptOutcome, AdoptResult, PartitionPlan, Purpose
from config import exit_codes
from config.units import about_size
from pipeline.client.lease import Lease, LeaseClient
from pipeline.client.leased_work import choose_transport, interrupts_deferred, lost_lease_reported
from pipeline.command import (
    SparkOptions,
    exit_on_error,
    json_option,
    open_engine,
    show,
    with_broker,
    with_engine_options,
    with_lease_options,
    with_partitions,
)
from pipeline.compaction.cleaning import CleanedPartition, clean_partitions
from pipeline.compaction.indexing import index_partitions
from pipeline.engines.engine import Engine
from pipeline.errors import JobError
from pipeline.jobs.adopt import worst_exit_code
from pipeline.progress import ProgressReporter, progress_bars
from pipeline.stages.planning import Limits

HANDED_BACK: Final = "handed back"
WOULD: Final = "would"


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """What became of one partition. Bytes are of log files; `outcome` is an AdoptOutcome's value,
    or HANDED_BACK where it was not to be adopted, or WOULD for a dry run, where bytes and records
    after are estimates."""

    partition: int
    outcome: str
    reason: str
    end_offset: int  # all below was looked at
    segments_before: int
    segments_after: int | None
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int
    keys: int
    damaged: tuple[Damage, ...] = ()  # left unchanged
    verify_seconds: float = 0.0


@dataclass(slots=True)
class CompactResult:
    """What a run came to. `seconds` by what they were spent on."""

    compaction_id: str
    topic: str
    engine: str
    transport: str
    dry_run: bool
    partitions: list[PartitionResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """See config/exit_codes.py: that of the worst of the partitions."""
        outcomes = {outcome.value: outcome for outcome in AdoptOutcome}
        return worst_exit_code(
            {outcomes[result.outcome] for result in self.partitions if result.outcome in outcomes}
        )


def compact(
    run: Lease,
    engine: Engine,
    limits: Limits,
    *,
    transport: str,
    adopt: bool,
    reporter: ProgressReporter,
) -> CompactResult:
    """Clean the partitions of a run, hand them back, and have them adopted.

    `transport`: "disk" or "http", as the engine's workers can. Raises StageFailedError,
    LeaseRequestError.
    """
    plan = run.plan
    result = CompactResult(plan.compaction_id, plan.topic, engine.name, transport, dry_run=False)
    started = time.monotonic()
    jobs = [planned.job for planned in plan.partitions]
    source = run.source(transport)
    with lost_lease_reported(run):
        cleaned = clean_partitions(engine, jobs, lambda _: source, limits, progress=reporter)
    result.seconds["stages"] = time.monotonic() - started
    for job, partition in zip(jobs, cleaned, strict=True):
        run.submit(job, partition.groups, partition.folders, partition.report, engine=engine.name)
    adopted: dict[int, AdoptResult] = {}
    if adopt and jobs:
        reporter.note("the broker checks and publishes")
        started = time.monotonic()
        try:
            results = run.try_adopt()
        except KeyboardInterrupt as error:  # what is handed back is the broker's matter
            raise JobError(
                "interrupted while the broker checks what was handed back, which it may publish all"
                f" the same: varve pipeline adopt {plan.compaction_id} tells",
                exit_codes.INTERRUPTED,
            ) from error
        adopted = {result.partition.partition: result for result in results}
        result.seconds["adoption"] = time.monotonic() - started
    for planned, partition in zip(plan.partitions, cleaned, strict=True):
        number = planned.job.partition.partition
        result.partitions.append(_partition_result(planned, partition, adopted.get(number)))
    return result


def _partition_result(
    planned: PartitionPlan, cleaned: CleanedPartition, adopted: AdoptResult | None
) -> PartitionResult:
    job, report = planned.job, cleaned.report
    return PartitionResult(
        partition=job.partition.partition,
        outcome=HANDED_BACK if adopted is None else adopted.outcome.value,
        reason="" if adopted is None else adopted.reason,
        end_offset=job.end_offset,
        segments_before=sum(len(group) for group in job.groups),
        segments_after=sum(1 for group in cleaned.groups if group.output is not None),
        bytes_before=report.bytes_before,
        bytes_after=report.bytes_after,
        records_before=report.records_before,
        records_after=report.records_after,
        keys=report.keys_indexed,
        damaged=report.damaged,
        verify_seconds=0.0 if adopted is None else adopted.verify_seconds,
    )


def dry_run_compact(
    run: Lease, engine: Engine, limits: Limits, *, transport: str, reporter: ProgressReporter
) -> CompactResult:
    """What a compaction of the run's partitions would come to, by an index of their survivors.

    Raises StageFailedError, LeaseRequestError.
    """
    plan = run.plan
    result = CompactResult(plan.compaction_id, plan.topic, engine.name, transport, dry_run=True)
    started = time.monotonic()
    source = run.source(transport)
    jobs = [planned.job for planned in plan.partitions]
    with lost_lease_reported(run):
        indexes = index_partitions(engine, jobs, lambda _: source, limits, progress=reporter)
    for index in indexes:
        bytes_before = sum(counts.size_bytes for counts in index.counts)
        stay = [counts.live + counts.tombstones for counts in index.counts]
        bytes_after = sum(
            counts.size_bytes * retained // counts.records if counts.records else counts.size_bytes
            for counts, retained in zip(index.counts, stay, strict=True)
        )
        result.partitions.append(
            PartitionResult(
                partition=index.job.partition.partition,
                outcome=WOULD,
                reason="",
                end_offset=index.job.end_offset,
                segments_before=len(index.counts),
                segments_after=None,
                bytes_before=bytes_before,
                bytes_after=bytes_after,
                records_before=sum(counts.records for counts in index.counts),
                records_after=sum(stay),
                keys=index.keys,
                damaged=tuple(
                    Damage(damage.path, damage.position, damage.reason) for damage in index.damaged
                ),
            )
        )
    run.check()
    result.seconds["stages"] = time.monotonic() - started
    return result


def lines(result: CompactResult) -> list[str]:
    """A result for people."""
    if not result.partitions:
        return [f"{result.topic}: nothing to compact"]
    match = []
    for partition in result.partitions:
        name = f"{result.topic}-{partition.partition}"
        sizes = f"{about_size(partition.bytes_before)} to {about_size(partition.bytes_after)}"
        records = f"{partition.records_before:,} to {partition.records_after:,} records"
        match partition.outcome:
            case "would":
                match.append(
                    f"{name} would go from {sizes} or so, {records}, {partition.keys:,} keys"
                )
            case "adopted":
                match.append(
                    f"{name} is compacted up to offset {partition.end_offset}: {sizes}, {records}"
                )
            case "handed back":
                match.append(f"{name} waits for adoption: {sizes}, {records}")
            case other:
                match.append(f"{name} stays as it was ({other}): {partition.reason}")
        match += [
            f"{name}: damaged, left as it is: {subject}"
            for subject in map(_damage, partition.damaged)
        ]
    if any(result.outcome == HANDED_BACK for result in result.partitions):
        match.append(f"for an hour: varve pipeline adopt {result.compaction_id}")
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    return [*match, f"by {result.engine} over {result.transport}: {spent}"]


def _damage(item: tuple[str, int, str]) -> str:
    return f"{item[0]} at byte {item[1]}: {item[2]}"


def answer(result: CompactResult) -> dict[str, Any]:
    """A result as JSON."""
    return asdict(result)


@click.command("compact", short_help="Compact a topic here or on Spark.")
@exit_on_error
@click.argument("topic")
@with_partitions
@click.option("--dry-run", is_flag=True, help="Only say what it would come to.")
@click.option("--no-adopt", is_flag=True, help="Make and hand back, but have nothing published.")
@click.option("--no-roll", is_flag=True, help="Leave the active segment open, and out.")
@with_lease_options
@with_engine_options
@with_broker
@json_option
def command(
    *,
    topic: str,
    partitions: Sequence[int] | None,
    dry_run: bool,
    no_adopt: bool,
    no_roll: bool,
    transport: str,
    task_memory: int,
    task_size: int,
    engine_name: str,
    processes: int | None,
    spark_options: SparkOptions,
    client: ApiClient,
    as_json: bool,
) -> None:
    """Compact a topic's partitions on this machine's processes, or on Spark.

    The broker leases its closed segments, checks what comes back, and publishes it; its own
    cleaner leaves these partitions alone meanwhile. Producers and consumers notice nothing.
    """
    purpose = Purpose.READ if dry_run else Purpose.COMPACT
    roll = not (no_roll or dry_run)
    started = time.monotonic()
    with ExitStack() as stack:
        reporter = stack.enter_context(progress_bars(quiet=as_json))
        engine = stack.enter_context(open_engine(engine_name, processes, spark_options, reporter))
        session_seconds = time.monotonic() - started
        with interrupts_deferred():
            runs = LeaseClient.of(client)
            opened = runs.open(topic, partitions, purpose=purpose, roll=roll)
            run = stack.enter_context(opened)
        way = choose_transport(transport, engine_name, spark_options.master, run)
        limits = Limits(task_memory, task_size, engine.parallelism)
        if dry_run:
            result = dry_run_compact(run, engine, limits, transport=way, reporter=reporter)
        else:
            adopt = not no_adopt
            result = compact(run, engine, limits, transport=way, adopt=adopt, reporter=reporter)
            if no_adopt and result.partitions:
                run.leave()
    result.seconds = {"session": session_seconds, **result.seconds}
    show(answer(result), as_json, lambda _: lines(result))
    if result.exit_code != exit_codes.DONE:
        raise SystemExit(result.exit_code)
