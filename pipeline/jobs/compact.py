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

from broker.api_client import ApiClient
from cleaner.handoff import AdoptOutcome, AdoptResult, PartitionPlan, Purpose
from config import exit_codes
from config.units import about_size
from pipeline.command import (
    SparkOptions,
    engine_of,
    of_partitions,
    of_size,
    on_engine,
    show,
    telling,
    with_broker,
)
from pipeline.engines import Engine
from pipeline.errors import JobError
from pipeline.jobs.adopt import exit_code_of
from pipeline.lease import BrokerRuns, Run
from pipeline.leased_work import choose_transport, interrupts_wait, told_when_lost
from pipeline.progress import Told, shown
from pipeline.stages.cleaning import Cleaned, clean_partitions
from pipeline.stages.indexing import index_partitions
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
    damaged: tuple[tuple[str, int, str], ...] = ()  # path, position, reason; left as it is
    verify_seconds: float = 0.0


@dataclass(slots=True)
class CompactResult:
    """What a run came to. `seconds` by what they were spent on."""

    run_id: str
    topic: str
    engine: str
    transport: str
    dry_run: bool
    partitions: list[PartitionResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """See config/exit_codes.py: that of the worst of the partitions."""
        known = {one.value: one for one in AdoptOutcome}
        return exit_code_of({known[one.outcome] for one in self.partitions if one.outcome in known})


def compact(
    run: Run, engine: Engine, limits: Limits, *, transport: str, adopt: bool, told: Told
) -> CompactResult:
    """Clean the partitions of a run, hand them back, and have them adopted.

    `transport`: "disk" or "http", as the engine's workers can. Raises StageFailedError, RunError.
    """
    plan = run.plan
    result = CompactResult(plan.run_id, plan.topic, engine.name, transport, dry_run=False)
    started = time.monotonic()
    jobs = [one.job for one in plan.partitions]
    source = run.source(transport)
    with told_when_lost(run):
        cleaned = clean_partitions(engine, jobs, lambda _: source, limits, progress=told)
    result.seconds["stages"] = time.monotonic() - started
    for job, one in zip(jobs, cleaned, strict=True):
        run.hand_back(job, one.groups, one.folders, one.report, engine=engine.name)
    adopted: dict[int, AdoptResult] = {}
    if adopt and jobs:
        told.note("the broker checks and publishes")
        started = time.monotonic()
        try:
            results = run.try_adopt()
        except KeyboardInterrupt as error:  # what is handed back is the broker's matter
            raise JobError(
                "interrupted while the broker checks what was handed back, which it may publish all"
                f" the same: varve pipeline adopt {plan.run_id} tells",
                exit_codes.INTERRUPTED,
            ) from error
        adopted = {one.partition.partition: one for one in results}
        result.seconds["adoption"] = time.monotonic() - started
    for planned, one in zip(plan.partitions, cleaned, strict=True):
        number = planned.job.partition.partition
        result.partitions.append(_partition_result(planned, one, adopted.get(number)))
    return result


def _partition_result(
    planned: PartitionPlan, cleaned: Cleaned, adopted: AdoptResult | None
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


def look(run: Run, engine: Engine, limits: Limits, *, transport: str, told: Told) -> CompactResult:
    """What a compaction of the run's partitions would come to, by an index of their survivors.

    Raises StageFailedError, RunError.
    """
    plan = run.plan
    result = CompactResult(plan.run_id, plan.topic, engine.name, transport, dry_run=True)
    started = time.monotonic()
    source = run.source(transport)
    jobs = [one.job for one in plan.partitions]
    with told_when_lost(run):
        indexes = index_partitions(engine, jobs, lambda _: source, limits, progress=told)
    for index in indexes:
        bytes_before = sum(one.size_bytes for one in index.counts)
        stay = [one.live + one.tombstones for one in index.counts]
        bytes_after = sum(
            one.size_bytes * kept // one.records if one.records else one.size_bytes
            for one, kept in zip(index.counts, stay, strict=True)
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
                records_before=sum(one.records for one in index.counts),
                records_after=sum(stay),
                keys=index.keys,
                damaged=tuple((one.path, one.position, one.reason) for one in index.damaged),
            )
        )
    run.check()
    result.seconds["stages"] = time.monotonic() - started
    return result


def lines(result: CompactResult) -> list[str]:
    """A result for people."""
    if not result.partitions:
        return [f"{result.topic}: nothing to compact"]
    found = []
    for one in result.partitions:
        name = f"{result.topic}-{one.partition}"
        sizes = f"{about_size(one.bytes_before)} to {about_size(one.bytes_after)}"
        records = f"{one.records_before:,} to {one.records_after:,} records"
        match one.outcome:
            case "would":
                found.append(f"{name} would go from {sizes} or so, {records}, {one.keys:,} keys")
            case "adopted":
                found.append(
                    f"{name} is compacted up to offset {one.end_offset}: {sizes}, {records}"
                )
            case "handed back":
                found.append(f"{name} waits for adoption: {sizes}, {records}")
            case other:
                found.append(f"{name} stays as it was ({other}): {one.reason}")
        found += [f"{name}: damaged, left as it is: {what}" for what in map(_damage, one.damaged)]
    if any(one.outcome == HANDED_BACK for one in result.partitions):
        found.append(f"for an hour: varve pipeline adopt {result.run_id}")
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    return [*found, f"by {result.engine} over {result.transport}: {spent}"]


def _damage(one: tuple[str, int, str]) -> str:
    return f"{one[0]} at byte {one[1]}: {one[2]}"


def answer(result: CompactResult) -> dict[str, Any]:
    """A result as JSON."""
    return asdict(result)


@click.command("compact", short_help="Compact a topic here or on Spark.")
@telling
@click.argument("topic")
@of_partitions
@click.option("--dry-run", is_flag=True, help="Only say what it would come to.")
@click.option("--no-adopt", is_flag=True, help="Make and hand back, but have nothing published.")
@click.option("--no-roll", is_flag=True, help="Leave the active segment open, and out.")
@click.option(
    "--transport",
    type=click.Choice(["auto", "disk", "http"]),
    default="auto",
    show_default=True,
    help="How workers get at the log: the broker's disk, or its HTTP address.",
)
@of_size("--task-memory", "1GiB", "Memory for keys, of each task.")
@of_size("--task-size", "512MiB", "Log that one task reads, where a partition is cut up.")
@on_engine
@with_broker
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
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
    with ExitStack() as held:
        told = held.enter_context(shown(quiet=as_json))
        engine = held.enter_context(engine_of(engine_name, processes, spark_options, told))
        session_seconds = time.monotonic() - started
        with interrupts_wait():
            runs = BrokerRuns.of(client)
            opened = runs.open(topic, partitions, purpose=purpose, roll=roll)
            run = held.enter_context(opened)
        way = choose_transport(transport, engine_name, spark_options.master, run)
        limits = Limits(task_memory, task_size, engine.parallelism)
        if dry_run:
            result = look(run, engine, limits, transport=way, told=told)
        else:
            adopt = not no_adopt
            result = compact(run, engine, limits, transport=way, adopt=adopt, told=told)
            if no_adopt and result.partitions:
                run.leave()
    result.seconds = {"session": session_seconds, **result.seconds}
    show(answer(result), as_json, lambda: lines(result))
    if result.exit_code != exit_codes.DONE:
        raise SystemExit(result.exit_code)
