"""`varve pipeline compact`: clean a topic's partitions outside the broker.

Rules
- The broker leases the closed segments, an engine writes the cleaned segments, and the broker
  checks them and swaps them in, partition by partition. Only the broker changes a log.
- Before adoption nothing changes: a job that fails or is interrupted abandons its lease, and the
  broker deletes its files.
- The output equals the output of the broker's own cleaner, byte for byte, on every engine.
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
from config.units import about_size, counted
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
UNKNOWN: Final = "unknown"
_LOST_RESULT: Final = (
    "the broker restarted during the adoption and no longer knows the output, which it may have"
    " published. Run the job again: it compacts what is left"
)


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """The result of one partition. Bytes are those of log files.

    `outcome` is the value of an AdoptOutcome, HANDED_BACK without adoption, UNKNOWN if the broker
    lost the result of an adoption, or WOULD for a dry run, which estimates `bytes_after` and
    `records_after`.
    """

    partition: int
    outcome: str
    reason: str
    end_offset: int  # exclusive end of the cleaned range
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
    """The result of a compaction. `seconds` are keyed by step."""

    compaction_id: str
    topic: str
    engine: str
    transport: str
    dry_run: bool
    partitions: list[PartitionResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """Return the exit code of the worst partition; see config/exit_codes.py."""
        outcomes = {outcome.value: outcome for outcome in AdoptOutcome}
        if any(result.outcome == UNKNOWN for result in self.partitions):
            return exit_codes.FAILED
        return worst_exit_code(
            {outcomes[result.outcome] for result in self.partitions if result.outcome in outcomes}
        )


def compact(
    lease: Lease,
    engine: Engine,
    limits: Limits,
    *,
    transport: str,
    adopt: bool,
    reporter: ProgressReporter,
) -> CompactResult:
    """Clean the leased partitions, submit the output, and have the broker adopt it.

    `transport` is "disk" or "http". Raises StageFailedError, LeaseRequestError.
    """
    plan = lease.plan
    result = CompactResult(plan.compaction_id, plan.topic, engine.name, transport, dry_run=False)
    started = time.monotonic()
    jobs = [planned.job for planned in plan.partitions]
    source = lease.source(transport)
    with lost_lease_reported(lease):
        cleaned = clean_partitions(engine, jobs, lambda _: source, limits, progress=reporter)
    result.seconds["stages"] = time.monotonic() - started
    for job, partition in zip(jobs, cleaned, strict=True):
        lease.submit(job, partition.groups, partition.folders, partition.report, engine=engine.name)
    adopted: dict[int, AdoptResult] = {}
    if adopt and jobs:
        reporter.note("waiting for the broker to check and publish")
        started = time.monotonic()
        try:
            results = lease.adopt()
        except KeyboardInterrupt as error:  # the broker goes on with submitted output
            raise JobError(
                "interrupted while the broker checks the output; it may still publish it. Run"
                f" `varve pipeline adopt {plan.compaction_id}` to see the result",
                exit_codes.INTERRUPTED,
            ) from error
        adopted = {result.partition.partition: result for result in results}
        result.seconds["adoption"] = time.monotonic() - started
    missing = (UNKNOWN, _LOST_RESULT) if adopt else (HANDED_BACK, "")
    for planned, partition in zip(plan.partitions, cleaned, strict=True):
        number = planned.job.partition.partition
        result.partitions.append(
            _partition_result(planned, partition, adopted.get(number), missing)
        )
    return result


def _partition_result(
    planned: PartitionPlan,
    cleaned: CleanedPartition,
    adopted: AdoptResult | None,
    missing: tuple[str, str],
) -> PartitionResult:
    """Return the result of a partition; `missing` are outcome and reason without an adoption."""
    job, report = planned.job, cleaned.report
    outcome, reason = missing if adopted is None else (adopted.outcome.value, adopted.reason)
    return PartitionResult(
        partition=job.partition.partition,
        outcome=outcome,
        reason=reason,
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
    lease: Lease, engine: Engine, limits: Limits, *, transport: str, reporter: ProgressReporter
) -> CompactResult:
    """Estimate the result of a compaction from an index of the surviving records.

    Raises StageFailedError, LeaseRequestError.
    """
    plan = lease.plan
    result = CompactResult(plan.compaction_id, plan.topic, engine.name, transport, dry_run=True)
    started = time.monotonic()
    source = lease.source(transport)
    jobs = [planned.job for planned in plan.partitions]
    with lost_lease_reported(lease):
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
    lease.check()
    result.seconds["stages"] = time.monotonic() - started
    return result


def lines(result: CompactResult) -> list[str]:
    """Return the result as lines of text."""
    if not result.partitions:
        return [f"{result.topic}: nothing to compact"]
    texts = []
    for partition in result.partitions:
        name = f"{result.topic}-{partition.partition}"
        sizes = f"{about_size(partition.bytes_before)} to {about_size(partition.bytes_after)}"
        records = f"{partition.records_before:,} to {counted(partition.records_after, 'record')}"
        match partition.outcome:
            case "would":
                texts.append(
                    f"{name}: would shrink from {sizes} (estimate), {records},"
                    f" {counted(partition.keys, 'key')}"
                )
            case "adopted":
                texts.append(
                    f"{name}: compacted below offset {partition.end_offset}: {sizes}, {records}"
                )
            case "handed back":
                texts.append(f"{name}: ready for adoption: {sizes}, {records}")
            case "unknown":
                texts.append(f"{name}: {partition.reason}")
            case other:
                texts.append(f"{name}: not changed ({other}): {partition.reason}")
        texts += [
            f"{name}: damaged segment copied unchanged: {damage}"
            for damage in map(_damage, partition.damaged)
        ]
    if any(result.outcome == HANDED_BACK for result in result.partitions):
        texts.append(f"Within an hour, run: varve pipeline adopt {result.compaction_id}")
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    return [*texts, f"engine {result.engine}, transport {result.transport}: {spent}"]


def _damage(item: tuple[str, int, str]) -> str:
    return f"{item[0]} at byte {item[1]}: {item[2]}"


def answer(result: CompactResult) -> dict[str, Any]:
    """Return the result as JSON."""
    return asdict(result)


@click.command("compact", short_help="Compact a topic outside the broker.")
@exit_on_error
@click.argument("topic")
@with_partitions
@click.option("--dry-run", is_flag=True, help="Change nothing; report the expected result.")
@click.option(
    "--no-adopt", is_flag=True, help="Submit the output, but do not publish it; see `adopt`."
)
@click.option("--no-roll", is_flag=True, help="Leave the active segment open, and out of the job.")
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
    """Compact TOPIC outside the broker, in local processes or on Spark.

    The broker leases the closed segments to the job, checks the output and publishes it. The
    broker's cleaner skips these partitions meanwhile. Producers and consumers are not affected.
    """
    purpose = Purpose.READ if dry_run else Purpose.COMPACT
    roll = not (no_roll or dry_run)
    started = time.monotonic()
    with ExitStack() as stack:
        reporter = stack.enter_context(progress_bars(quiet=as_json))
        engine = stack.enter_context(open_engine(engine_name, processes, spark_options, reporter))
        session_seconds = time.monotonic() - started
        with interrupts_deferred():
            opened = LeaseClient(client).open(topic, partitions, purpose=purpose, roll=roll)
            lease = stack.enter_context(opened)
        way = choose_transport(transport, engine_name, spark_options.master, lease)
        limits = Limits(task_memory, task_size, engine.parallelism)
        if dry_run:
            result = dry_run_compact(lease, engine, limits, transport=way, reporter=reporter)
        else:
            adopt = not no_adopt
            result = compact(lease, engine, limits, transport=way, adopt=adopt, reporter=reporter)
            if no_adopt and result.partitions:
                lease.leave()
    result.seconds = {"session": session_seconds, **result.seconds}
    show(answer(result), as_json, lambda _: lines(result))
    if result.exit_code != exit_codes.DONE:
        raise SystemExit(result.exit_code)
