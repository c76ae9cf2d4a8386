"""`varve pipeline latest`: the current state of a topic as a table, once or kept up to date.

Rules
- The state is each key's last committed record in each partition, without those whose last record
  is a delete. Records without a key have no state.
- Keys are looked up in an index that is made of the leased segments; only live records are decoded
  and pass through Spark.
- With `--stream` the table is made once, and what comes is merged into it: pipeline/jobs/stream.py.
"""

import atexit
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click

from broker.api_client import ApiClient
from broker.api_command import DEFAULT_URL
from config import exit_codes
from config.units import about_size
from pipeline.command import SparkOptions, show, telling
from pipeline.errors import JobError
from pipeline.progress import Silent, Told, shown
from pipeline.tables.columns import Form, Forms
from pipeline.tables.delete_guard import safe_time_id
from pipeline.tables.delta import version_id
from pipeline.tables.opening import Broker, opened
from pipeline.tables.options import reading_options, table_options
from pipeline.tables.publish import Format, Published, Target, publish, target
from pipeline.tables.state import COLUMNS, PartitionState, TopicState, check_open_part, state_of
from pipeline.topics import DEFAULT_BOOTSTRAP, cluster_errors, reach_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# What `latest` pins, by the id of its frame; which is kept, so that no other gets its id.
_HELD: Final[dict[int, "tuple[DataFrame, ExitStack]"]] = {}


@dataclass(slots=True)
class TableResult:
    """A table that was made. `seconds` by what they were spent on."""

    topic: str
    out: str
    format: str
    rows: int
    size_bytes: int
    files: int
    transport: str
    partitions: list[PartitionState] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def open_latest(
    spark: "SparkSession",
    broker: Broker,
    topic: str,
    *,
    columns: Sequence[str] = COLUMNS,
    forms: Forms | None = None,
    told: Told | None = None,
    **options: Any,
) -> Iterator[tuple[TopicState, str]]:
    """The state of a topic, which can be read until the block ends, and the transport in use.

    `options` as in `opened`. Raises JobError, RunError, StageFailedError, WireError.
    """
    with opened(spark, broker, topic, told=told or Silent(), **options) as (reading, bounds):
        state = state_of(reading, bounds, columns)
        if forms is not None:
            state.frame = forms.applied(state.frame)
        yield state, reading.transport


def latest(
    spark: "SparkSession",
    topic: str,
    *,
    http: str = DEFAULT_URL,
    bootstrap: str = DEFAULT_BOOTSTRAP,
    token: str | None = None,
    columns: Sequence[str] = COLUMNS,
    forms: Forms | None = None,
    **options: Any,
) -> "DataFrame":
    """The state of a topic, with columns as of Spark's Kafka source (or those that are named).

    The broker keeps the segments it is read from until `release(frame)`, or this process ends.
    Raises as `open_latest`.
    """
    with ExitStack() as held:
        broker = Broker(ApiClient(http, token), bootstrap)
        wanted = open_latest(spark, broker, topic, columns=columns, forms=forms, **options)
        state, _ = held.enter_context(wanted)
        frame = state.frame
        kept = held.pop_all()
    _HELD[id(frame)] = frame, kept
    atexit.register(kept.close)
    return frame


def release(frame: "DataFrame") -> None:
    """Let go of what `latest` keeps for a frame; it, and what was made of it, cannot be read any
    more."""
    _, kept = _HELD.pop(id(frame), (None, None))
    if kept is not None:
        atexit.unregister(kept.close)
        kept.close()


def make_table(
    spark: "SparkSession",
    broker: Broker,
    topic: str,
    place: Target,
    *,
    forms: Forms | None = None,
    told: Told,
    **options: Any,
) -> TableResult:
    """Publish the state of a topic. Raises as `open_latest` and `publish`."""
    started = time.monotonic()
    held = open_latest(spark, broker, topic, forms=forms, told=told, **options)
    with held as (state, transport):
        indexed = time.monotonic()
        told.note("writing the table")
        made = publish(
            state.frame,
            place,
            notes_of("latest", topic, state),
            versions=versions_of(topic, state),
            before=lambda: check_open_part(broker.client, topic, state),
        )
    seconds = {"index": indexed - started, "table": time.monotonic() - indexed}
    return result_of(topic, made, transport, state.partitions, seconds)


def result_of(
    topic: str,
    made: Published,
    transport: str,
    partitions: list[PartitionState],
    seconds: dict[str, float],
) -> TableResult:
    """What a published table is told as."""
    return TableResult(
        topic=topic,
        out=made.path,
        format=made.format,
        rows=made.rows,
        size_bytes=made.size_bytes,
        files=made.files,
        transport=transport,
        partitions=partitions,
        seconds=seconds,
    )


def notes_of(job: str, topic: str, state: TopicState, **more: object) -> Mapping[str, Any]:
    """What is kept with a table: of what it is the state."""
    ends = {str(number): end for number, end in state.end_offsets.items()}
    return {"job": job, "topic": topic, "end_offsets": ends, **more}


def versions_of(topic: str, state: TopicState) -> dict[str, int]:
    """How far the topic is in the table, and its safe time, as a stream into it wants to know."""
    reach = {version_id(topic, number): end for number, end in state.end_offsets.items()}
    return {**reach, safe_time_id(topic): state.safe_ms}


def lines(result: TableResult) -> list[str]:
    """A result for people."""
    known = [one for one in result.partitions if one.records >= 0]
    found = [
        f"{result.topic}: {result.rows:,} rows, {about_size(result.size_bytes)} in"
        f" {result.files} files, as {result.format} in {result.out}"
    ]
    if known:
        records = sum(one.records for one in known)
        what = f"of {records:,} records; {sum(one.keyless for one in known):,} without a key"
        if all(one.tombstones >= 0 for one in known):
            what += f", {sum(one.tombstones for one in known):,} keys deleted"
        found.append(what)
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    return [*found, f"by spark over {result.transport}: {spent}"]


@click.command("latest", short_help="The current state of a topic as a table.")
@telling
@cluster_errors
@click.argument("topic")
@table_options
@click.option("--stream", is_flag=True, help="Go on merging what comes into the table.")
@click.option("--checkpoint", metavar="DIR", help="Of the stream; beside the table if not said.")
@click.option("--available-now", is_flag=True, help="With --stream: end when all is taken in.")
@click.option(
    "--every",
    "every_seconds",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="With --stream: how often.",
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
    stream: bool,
    checkpoint: str | None,
    available_now: bool,
    every_seconds: float,
    partitions: Sequence[int] | None,
    transport: str,
    task_memory: int,
    task_size: int,
    spark_options: SparkOptions,
    bootstrap: str,
    client: ApiClient,
    as_json: bool,
) -> None:
    """Make a table of the current state of a topic: each key's last record.

    The broker leases the closed segments; an index of their keys says which records are live, and
    these become rows, with the columns of Spark's Kafka source.
    """
    forms = Forms(key_as, value_as, null_malformed)
    broker = Broker(client, bootstrap)
    options: dict[str, Any] = {
        "partitions": partitions,
        "transport": transport,
        "master": spark_options.master,
        "task_memory": task_memory,
        "task_bytes": task_size,
    }
    if stream:
        from pipeline.jobs.stream import follow_command

        if partitions is not None:
            raise JobError("--stream takes a topic with all its partitions", exit_codes.USAGE)
        follow_command(
            broker, topic, out, table_format, overwrite=overwrite, forms=forms,
            checkpoint=checkpoint, every_seconds=None if available_now else every_seconds,
            options=options, spark_options=spark_options, as_json=as_json,
        )  # fmt: skip
        return
    if available_now or checkpoint is not None:
        raise JobError("--available-now and --checkpoint go with --stream", exit_codes.USAGE)
    place = target(out, table_format, overwrite=overwrite)
    reach_topic(bootstrap, topic)
    with shown(quiet=as_json) as told:
        started = time.monotonic()
        told.note("starting Spark")
        spark = spark_options.session("varve latest")
        session = time.monotonic() - started
        try:
            result = make_table(spark, broker, topic, place, forms=forms, told=told, **options)
        finally:
            spark.stop()
    result.seconds = {"session": session, **result.seconds}
    show(asdict(result), as_json, lambda: lines(result))
