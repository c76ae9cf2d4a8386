"""`varve pipeline snapshot`: write an earlier state of a topic, or all its records, as a table.

Rules
- The state at offsets is the last committed record of each key below them, per partition. A
  transaction counts by its final outcome, even if it ended at a later offset.
- If compaction has merged the requested state into a later one, the job fails, or with `--nearest`
  takes the earliest state that is left. A table never claims to be a state that it is not.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from admin.client import ApiClient
from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.topics import cluster_errors, fetch_bounds, reach_topic
from pipeline.command import SparkOptions, exit_on_error, show
from pipeline.errors import JobError
from pipeline.jobs.table_options import reading_options, table_options
from pipeline.progress import ProgressReporter, progress_bars
from pipeline.tables.as_of import (
    Moved,
    check_offsets,
    offsets_as_of_time,
    offsets_text,
    parse_offsets,
    parse_time,
)
from pipeline.tables.columns import Form, Forms
from pipeline.tables.delta import NO_STATE, STATE_ID
from pipeline.tables.open_topic import Clients, open_topic
from pipeline.tables.publish import publish
from pipeline.tables.state import COLUMNS, all_records, check_open_part, open_state
from pipeline.tables.state_table import (
    TableResult,
    lines,
    table_notes,
    table_result,
    table_versions,
)
from pipeline.tables.target import Format, Target, target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class AsOf:
    """The requested state. Without offsets and time: the current state."""

    offsets: Mapping[int, int] | None = None
    time_ms: int | None = None
    nearest: bool = False
    all_records: bool = False


@dataclass(slots=True)
class SnapshotResult:
    """A published table, its end offsets, and the partitions with another state than requested."""

    table: TableResult
    end_offsets: dict[int, int]
    moved: list[Moved] = field(default_factory=list)


def snapshot(
    spark: "SparkSession",
    broker: Clients,
    topic: str,
    place: Target,
    as_of: AsOf,
    *,
    forms: Forms | None = None,
    reporter: ProgressReporter,
    **options: Any,
) -> SnapshotResult:
    """Publish the state of a topic at offsets or at a time. `options` are those of `open_topic`.

    Raises JobError and what `make_table` raises.
    """
    started = time.monotonic()
    if forms is not None:
        forms.check()
    requested, missing = as_of.offsets, frozenset[int]()
    if as_of.time_ms is not None:
        # Look up before the lease rolls segments: a closed segment may be cleaned and start later.
        topic_bounds = fetch_bounds(broker.cluster, topic, partitions=options.get("partitions"))
        time_offsets = offsets_as_of_time(broker.cluster, topic, topic_bounds, as_of.time_ms)
        requested, missing = time_offsets.offsets, time_offsets.missing
    with open_topic(spark, broker, topic, reporter=reporter, **options) as (reading, bounds):
        moved: list[Moved] = []
        if requested is not None:
            requested = {
                number: requested.get(number, bounds.first[number]) for number in bounds.end
            }
            requested, moved = check_offsets(
                reading, broker.client, bounds, requested, missing=missing, nearest=as_of.nearest
            )
        read = all_records if as_of.all_records else open_state
        state = read(reading, bounds, COLUMNS, as_of=requested)
        frame = state.frame if forms is None else forms.applied(state.frame)
        indexed = time.monotonic()
        reporter.note("writing the table")
        made = publish(
            frame,
            place,
            table_notes(
                "snapshot", topic, state, all_records=as_of.all_records, time_ms=as_of.time_ms
            ),
            versions={STATE_ID: NO_STATE}
            if as_of.all_records
            else table_versions(broker, topic, state, place),
            before=lambda: check_open_part(broker.client, broker.cluster, topic, state),
        )
        seconds = {"index": indexed - started, "table": time.monotonic() - indexed}
        table = table_result(topic, made, reading.transport, state.partitions, seconds)
        return SnapshotResult(table, state.end_offsets, moved)


def _parse_as_of(
    broker: Clients, topic: str, partitions: Sequence[int] | None, offsets: str | None,
    moment: str | None, *, nearest: bool, every_record: bool,
) -> AsOf:  # fmt: skip
    if offsets is not None and moment is not None:
        raise JobError("give --as-of-offsets or --as-of, not both", exit_codes.USAGE)
    if nearest and offsets is None and moment is None:
        raise JobError("--nearest needs --as-of-offsets or --as-of", exit_codes.USAGE)
    time_ms = None if moment is None else parse_time(moment)
    reach_topic(broker.cluster, topic)
    result = None
    if offsets is not None:
        bounds = fetch_bounds(broker.cluster, topic, partitions=partitions)
        result = parse_offsets(offsets, sorted(bounds.end))
    return AsOf(result, time_ms, nearest, every_record)


@click.command("snapshot", short_help="Write an earlier state of a topic as a table.")
@exit_on_error
@cluster_errors
@click.argument("topic")
@table_options
@click.option(
    "--as-of-offsets",
    "offsets",
    metavar="JSON|@FILE",
    help='Exclusive end offsets by partition, such as {"0": 12}.',
)
@click.option(
    "--as-of",
    "moment",
    metavar="TIME",
    help="Time such as 2026-05-01T12:00:00Z, or ms since 1970.",
)
@click.option(
    "--nearest", is_flag=True, help="If that state is incomplete, use the next complete one."
)
@click.option(
    "--all-records",
    "every_record",
    is_flag=True,
    help="Write every record, not only the last of each key.",
)
@reading_options
def command(
    *,
    topic: str,
    out: str,
    table_format: Format,
    overwrite: bool,
    key_as: Form,
    value_as: Form,
    null_malformed: bool,
    offsets: str | None,
    moment: str | None,
    nearest: bool,
    every_record: bool,
    partitions: Sequence[int] | None,
    transport: str,
    task_memory: int,
    task_size: int,
    spark_options: SparkOptions,
    cluster: Cluster,
    client: ApiClient,
    as_json: bool,
) -> None:
    """Write an earlier state of TOPIC as a table: each key's last record, or all records."""
    broker = Clients(client, cluster)
    as_of = _parse_as_of(
        broker, topic, partitions, offsets, moment, nearest=nearest, every_record=every_record
    )
    place = target(out, table_format, overwrite=overwrite)
    with progress_bars(quiet=as_json) as reporter:
        started = time.monotonic()
        with spark_options.open_session("varve snapshot", reporter) as spark:
            session_seconds = time.monotonic() - started
            result = snapshot(
                spark, broker, topic, place, as_of, forms=Forms(key_as, value_as, null_malformed),
                reporter=reporter, partitions=partitions, transport=transport,
                master=spark_options.master, task_memory=task_memory, task_bytes=task_size,
            )  # fmt: skip
    result.table.seconds = {"session": session_seconds, **result.table.seconds}
    show(answer(result), as_json, lambda _: summary_lines(result))


def answer(result: SnapshotResult) -> dict[str, Any]:
    """Return the result as JSON."""
    entry = asdict(result)
    return {**entry.pop("table"), **entry}


def summary_lines(result: SnapshotResult) -> list[str]:
    """Return the result as lines of text."""
    return [
        *(
            f"partition {moved.partition}: the state as of {moved.requested} is gone;"
            f" took {moved.taken}"
            for moved in result.moved
        ),
        *lines(result.table),
        f"as of the offsets {offsets_text(result.end_offsets)}",
    ]
