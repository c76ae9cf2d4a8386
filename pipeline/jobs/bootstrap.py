"""`varve pipeline bootstrap`: write the rows of a table to a topic.

Rules
- All input is checked before anything is written: columns, duplicate keys, record sizes, and that
  the topic is empty.
- The Java client's default partitioner decides the partition of a key. Records without a key are
  spread evenly.
- A failed task is not repeated, because it would write records twice. The error states how much was
  written; `--resume` writes the rest (pipeline/jobs/bootstrap_resume.py).
- At the end, the log must have grown by exactly the records written, and these must be as many as
  the rows that were checked: the files of a table may change in between.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import click

from admin.rangeless_option import RangelessOption
from config import exit_codes
from config.security.clients import Cluster
from config.topics.names import RESERVED_SUFFIX
from config.units import counted
from pipeline.client.kafka_client import Isolation
from pipeline.client.topics import (
    TopicBounds,
    as_job_errors,
    cluster_errors,
    create_topic,
    fetch_bounds,
    fetch_settings,
    reach_cluster,
    reach_topic,
    read_offsets,
    with_cluster,
)
from pipeline.command import (
    SparkOptions,
    exit_on_error,
    json_option,
    show,
    with_spark_options,
)
from pipeline.errors import JobError
from pipeline.jobs.bootstrap_resume import remaining, since_option
from pipeline.jobs.bootstrap_rows import RowCounts, RowMapping, count_rows, shaped
from pipeline.progress import progress_bars
from pipeline.tables.table_reading import FORMATS, read_table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_WRITTEN: Final = "partition int, records long, failure string"
FORMS: Final = ("auto", "raw", "json")
# If an executor with input of the write is lost, Spark runs the tasks of the stage again beside
# those that still run, and each counts as a first attempt.
RUN_ONCE: Final = {"spark.stage.maxConsecutiveAttempts": "1", "spark.speculation": "false"}
OVERHEAD_BYTES: Final = 100  # of a batch with one record, without key and value


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """The topic to write to, and the records it may already have."""

    cluster: Cluster
    topic: str
    append: bool = False
    resume: bool = False
    allow_duplicates: bool = False
    since: Mapping[int, int] | None = None  # with `resume`: start offsets of the load; None: 0

    def began(self, before: TopicBounds) -> Mapping[int, int]:
        """Return the offsets at which the load began; `before` are the bounds before this run."""
        if self.resume:
            return self.since or {}
        return before.end


@dataclass(slots=True)
class PartitionWritten:
    """Records written to one partition, and their offsets."""

    records: int = 0
    first_offset: int = -1
    end_offset: int = -1


@dataclass(slots=True)
class BootstrapResult:
    """The result of a load; a dry run has no offsets."""

    topic: str
    dry_run: bool
    counts: RowCounts
    written: int = 0
    skipped: int = 0  # with --resume: rows whose keys are in the topic
    superseded: int = 0  # of these, keys whose values come from other producers
    partitions: dict[int, PartitionWritten] = field(default_factory=dict)
    seconds: float = 0.0


def bootstrap_topic(
    spark: "SparkSession",
    table: "DataFrame",
    mapping: RowMapping,
    target: WriteTarget,
    *,
    dry_run: bool = False,
    partitions: int | None = None,
) -> BootstrapResult:
    """Write a table to an existing topic. Raises JobError.

    `partitions` is set for a dry run whose topic does not exist yet.
    """
    started = time.monotonic()
    with as_job_errors():
        rows = shaped(table, mapping)
        counts = count_rows(rows, mapping)
        _check_rows(counts, mapping, target)
        if partitions is None:
            _check_size(counts, target)
            before = _bounds(target)
            _check_empty(before, target)
            partitions = len(before.end)
        else:
            before = TopicBounds({}, {})
        result = BootstrapResult(target.topic, dry_run, counts)
        if target.resume:
            rest = remaining(
                spark, rows, target.cluster, target.topic, since=target.since, end=before.end
            )
            rows, result.skipped, result.superseded = rest.rows, rest.skipped, rest.superseded
        written = _write(rows, mapping, target, partitions, before, dry_run=dry_run)
    result.partitions = {n: PartitionWritten(records) for n, records in sorted(written.items())}
    result.written = sum(written.values())
    _check_unchanged(result)
    if not dry_run:
        _check_grown(result, before, _bounds(target))
    result.seconds = time.monotonic() - started
    return result


def _bounds(target: WriteTarget) -> TopicBounds:
    return fetch_bounds(target.cluster, target.topic, isolation=Isolation.READ_UNCOMMITTED)


# Checks -----------------------------------------------------------------


def _check_rows(counts: RowCounts, mapping: RowMapping, target: WriteTarget) -> None:
    if counts.keyless and mapping.keys:
        raise JobError(f"{counted(counts.keyless, 'row')} without a key")
    if target.resume and counts.keyless:
        raise JobError("--resume needs keys to identify records, and these rows have none")
    if counts.too_early:
        raise JobError(
            f"{counted(counts.too_early, 'row')} with a timestamp of 1970-01-01T00:00:00Z or"
            " earlier, which no producer writes; use null for the time of writing"
        )
    if not counts.duplicates:
        return
    subject = f"{counted(counts.duplicates, 'row')} with the key of another row"
    if not target.allow_duplicates:
        raise JobError(
            f"{subject}. To write all of them in order, use --allow-duplicates and --order-by"
        )
    if not mapping.order_by:
        raise JobError(f"{subject}: --order-by must define their order", exit_codes.USAGE)
    if counts.without_order:
        raise JobError(
            f"{counted(counts.without_order, 'row')} with a null in an --order-by column"
        )


def _check_size(counts: RowCounts, target: WriteTarget) -> None:
    largest = int(fetch_settings(target.cluster, target.topic).get("max.message.bytes", "0"))
    if largest and counts.largest_bytes + OVERHEAD_BYTES > largest:
        raise JobError(
            f"a row has {counts.largest_bytes:,} bytes of key and value; max.message.bytes of"
            f" {target.topic} is {largest:,}"
        )


def _check_empty(before: TopicBounds, target: WriteTarget) -> None:
    if not before.is_empty and not target.append and not target.resume:
        has = sum(before.end.values()) - sum(before.first.values())
        raise JobError(
            f"{target.topic} already has up to {has:,} records. Use --append to write after them,"
            " or --resume to write only keys that are not among them"
        )


# Writing ------------------------------------------------------------------------------------


def _write(
    rows: "DataFrame",
    mapping: RowMapping,
    target: WriteTarget,
    partitions: int,
    before: TopicBounds,
    *,
    dry_run: bool,
) -> dict[int, int]:
    """Write the rows; return the record count of each partition. Raises JobError."""
    if mapping.order_by:
        from pyspark.sql import functions as f

        # One task writes all records of a key, in order.
        orders = [f.col(f"order_{n}").asc_nulls_first() for n in range(len(mapping.order_by))]
        rows = rows.repartition("key").sortWithinPartitions(*orders)
    writer = _Writer(target.cluster, target.topic, partitions, dry_run=dry_run)
    reported = rows.select("key", "value", "headers", "timestamp_ms").mapInArrow(writer, _WRITTEN)
    try:
        with as_job_errors():
            # No shuffle after the write: a lost executor would make Spark rerun tasks.
            result = reported.collect()
            if failures := [row.failure for row in result if row.failure is not None]:
                raise JobError(failures[0])
    except KeyboardInterrupt as error:
        if dry_run:
            raise
        resume = since_option(target.began(before))
        message = (
            f"interrupted; the rows written so far stay in the topic, and {resume} writes the rest"
        )
        raise JobError(message, exit_codes.INTERRUPTED) from error
    except JobError as error:
        if dry_run:
            raise
        raise JobError(f"{error}; {_what_was_written(target, before)}", error.code) from error
    counts: Counter[int] = Counter()
    for row in result:
        counts[row.partition] += row.records
    return dict(counts)


def _what_was_written(target: WriteTarget, before: TopicBounds) -> str:
    try:
        with as_job_errors():
            after = _bounds(target)
    except JobError as error:
        return f"how much was written is unknown: {error}"
    grown = {n: end - before.end.get(n, 0) for n, end in after.end.items()}
    if not any(grown.values()):
        return "nothing was written"
    counts = ", ".join(f"{count:,} in partition {n}" for n, count in grown.items() if count)
    resume = since_option(target.began(before))
    return f"these rows were written and stay in the topic: {counts}; {resume} writes the rest"


class _Writer:
    """Writes the rows of one task; pickled into the tasks."""

    def __init__(self, cluster: Cluster, topic: str, partitions: int, *, dry_run: bool) -> None:
        self._cluster = cluster
        self._topic = topic
        self._partitions = partitions
        self._dry_run = dry_run

    def __call__(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa
        from pyspark import TaskContext

        from pipeline.client.producer import ProduceError

        context = TaskContext.get()
        again = context.attemptNumber() > 0
        written = [0] * self._partitions
        failure: str | None = None
        try:
            if again and not self._dry_run:
                raise ProduceError("a task failed and cannot be repeated without duplicates", 0)
            self._write(batches, context.partitionId(), written)
        except ProduceError as error:
            failure = str(error)  # returned, not raised: Spark would run the task again
        except (pa.ArrowException, OSError, TypeError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
        # A failure reports every partition, a success only those written to.
        reported = [n for n, count in enumerate(written) if count or failure is not None]
        rows = {
            "partition": reported,
            "records": [written[n] for n in reported],
            "failure": [failure] * len(reported),
        }
        fields = [("partition", pa.int32()), ("records", pa.int64()), ("failure", pa.string())]
        yield pa.RecordBatch.from_pydict(rows, schema=pa.schema(fields))

    def _write(self, batches: "Iterator[pa.RecordBatch]", spread: int, written: list[int]) -> None:
        from pipeline.client.producer import BulkProducer

        with ExitStack() as stack:
            producer = None
            if not self._dry_run:
                producer = stack.enter_context(BulkProducer(self._cluster))
            for batch in batches:
                places = self._places(batch, spread)
                if producer is not None:
                    self._send(producer, batch, places)
                for partition in places:
                    written[partition] += 1

    def _places(self, batch: "pa.RecordBatch", spread: int) -> list[int]:
        from pipeline.records.partitioner import partitions_of as places_of

        result = places_of(batch.column("key"), self._partitions).tolist()
        return [
            place if place >= 0 else (spread + n) % self._partitions
            for n, place in enumerate(result)
        ]

    def _send(self, producer: Any, batch: "pa.RecordBatch", places: Sequence[int]) -> None:
        columns = (batch.column(name).to_pylist() for name in
                   ("key", "value", "headers", "timestamp_ms"))  # fmt: skip
        for key, value, headers, timestamp_ms, partition in zip(*columns, places, strict=True):
            pairs = [(header["key"], header["value"]) for header in headers] if headers else None
            producer.send(
                self._topic,
                key,
                value,
                partition=partition,
                headers=pairs,
                timestamp_ms=timestamp_ms,
            )


def _check_unchanged(result: BootstrapResult) -> None:
    """Check that the rows were those that were checked before. Raises JobError (UNVERIFIED)."""
    taken = result.written + result.skipped
    if taken == result.counts.rows:
        return
    written = "" if result.dry_run else " The records that were written stay in the topic."
    raise JobError(
        f"the table changed during the job: it had {counted(result.counts.rows, 'row')} when they"
        f" were checked, and {taken:,} when they were read again, which were not checked.{written}"
        " Load a table that does not change, such as a copy, into a new topic",
        exit_codes.UNVERIFIED,
    )


def _check_grown(result: BootstrapResult, before: TopicBounds, after: TopicBounds) -> None:
    """Check that each partition grew by exactly the records written. Raises JobError."""
    if added := len(after.end.keys() - before.end.keys()):
        raise JobError(
            f"{result.topic} got {counted(added, 'partition')} during the load. All rows are"
            " written, but producers now write many of their keys to other partitions. Load the"
            " table into a new topic",
            exit_codes.UNVERIFIED,
        )
    for n, end in after.end.items():
        written = result.partitions.setdefault(n, PartitionWritten())
        written.first_offset, written.end_offset = before.end.get(n, 0), end
        grown = written.end_offset - written.first_offset
        if grown != written.records:
            raise JobError(
                f"{result.topic}-{n} ends at offset {end:,}, but {written.records:,} records were"
                f" written from offset {written.first_offset:,}. Another producer may have written"
                " to it, or it was created again",
                exit_codes.UNVERIFIED,
            )


# The command --------------------------------------------------------------------------------


def answer(result: BootstrapResult) -> dict[str, Any]:
    """Return the result as JSON."""
    results = asdict(result)
    results["counts"]["keys"] = result.counts.keys
    results["partitions"] = [
        {"partition": n, **partition} for n, partition in results["partitions"].items()
    ]
    return results


def lines(result: BootstrapResult) -> list[str]:
    """Return the result as lines of text."""
    counts = result.counts
    verb = "would be written" if result.dry_run else "written"
    results = [
        f"{result.topic}-{n}: {counted(written.records, 'record')} {verb}"
        + ("" if result.dry_run else f", offsets {written.first_offset} to {written.end_offset}")
        for n, written in result.partitions.items()
    ]
    subject = (
        f"{counted(counts.rows, 'row')}, {counted(counts.keys, 'key')},"
        f" {counted(counts.tombstones, 'delete')}"
    )
    if result.skipped:
        subject += f", {result.skipped:,} already in the topic"
    if result.superseded:
        subject += f", {result.superseded:,} of them with other values, written by other producers"
    return [*results, f"{result.topic}: {counted(result.written, 'record')} {verb} ({subject})"]


def _pairs(
    _context: click.Context, _parameter: click.Parameter, values: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    result = []
    for text in values:
        name, sign, value = text.partition("=")
        if not sign or not name or not value:
            raise click.BadParameter(f"expected NAME=..., not {text[:80]!r}")
        result.append((name, value))
    return tuple(result)


@click.command("bootstrap", short_help="Write a table to a topic.")
@exit_on_error
@cluster_errors
@click.argument("topic")
@click.option("--from", "path", required=True, metavar="PATH", help="Path of the table.")
@click.option("--format", "table_format", type=click.Choice(FORMATS), default="parquet",
              show_default=True, help="Format of the table.")  # fmt: skip
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="COL",
    help="Key column. Repeatable: several columns make JSON.",
)
@click.option(
    "--key-as", type=click.Choice(FORMS), default="auto", help="Write keys unchanged or as JSON."
)
@click.option("--value", "values", multiple=True, metavar="COL",
              help="Value column; default: JSON of all other columns. Repeatable.")  # fmt: skip
@click.option(
    "--value-as",
    type=click.Choice(FORMS),
    default="auto",
    help="Write values unchanged or as JSON.",
)
@click.option("--header", "headers", multiple=True, callback=_pairs, metavar="NAME=COL",
              help="Header and its column. Repeatable.")  # fmt: skip
@click.option(
    "--headers-column", metavar="COL", help='Column with all headers, typed as in format("varve").'
)
@click.option("--timestamp", metavar="COL", help="Timestamp column; default: the current time.")
@click.option(
    "--allow-duplicates", is_flag=True, help="Write all rows of a key, in --order-by order."
)
@click.option(
    "--order-by",
    multiple=True,
    metavar="COL",
    help="Order of the rows of a key; the last row wins.",
)
@click.option("--append", is_flag=True, help="Write to a topic that already has records.")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue a load: write only rows whose keys have no record since it began.",
)
@click.option("--since", metavar="JSON|@FILE",
              help='With --resume: offsets when the load began, {"0": 12}; default 0.')  # fmt: skip
@click.option("--create", cls=RangelessOption, type=click.IntRange(1, 100_000), metavar="N",
              help="Create the topic with this many partitions.")  # fmt: skip
@click.option("--config", "topic_settings", multiple=True, callback=_pairs, metavar="NAME=VALUE",
              help="Setting of the new topic; needs --create. Repeatable.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Write nothing; count what would be written.")
@with_spark_options
@with_cluster
@json_option
def command(
    *,
    topic: str,
    path: str,
    table_format: str,
    create: int | None,
    topic_settings: Sequence[tuple[str, str]],
    dry_run: bool,
    spark_options: SparkOptions,
    cluster: Cluster,
    as_json: bool,
    append: bool,
    resume: bool,
    since: str | None,
    allow_duplicates: bool,
    **columns: Any,
) -> None:
    """Write each row of a table as a record to TOPIC, partitioned as by the Java producer."""
    mapping = RowMapping(**columns)
    if since is not None and not resume:
        raise click.UsageError("--since needs --resume")
    target = WriteTarget(cluster, topic, append, resume, allow_duplicates)
    if since is not None:
        target = replace(target, since=read_offsets(since, reach_topic(cluster, topic)))
    _check_options(mapping, target, create, dict(topic_settings))
    spark_options = replace(spark_options, settings={**spark_options.settings, **RUN_ONCE})
    with (
        progress_bars(quiet=as_json) as reporter,
        spark_options.open_session("varve bootstrap", reporter) as spark,
    ):
        table = read_table(spark, path, table_format)
        shaped(table, mapping)  # raises for wrong columns before a topic is created
        reporter.note("writing")
        if create is not None and not dry_run:
            create_topic(cluster, topic, create, dict(topic_settings))
        partitions = create if dry_run else None
        result = bootstrap_topic(
            spark, table, mapping, target, dry_run=dry_run, partitions=partitions
        )
    show(answer(result), as_json, lambda _: lines(result))


def _check_options(
    mapping: RowMapping, target: WriteTarget, create: int | None, settings: Mapping[str, str]
) -> None:
    if target.topic.endswith(RESERVED_SUFFIX):
        raise click.UsageError("a compacted view is read-only: write to its topic")
    if mapping.headers and mapping.headers_column:
        raise click.UsageError("give --header or --headers-column, not both")
    if target.resume and target.allow_duplicates:
        raise click.UsageError("--resume cannot be used with --allow-duplicates")
    if settings and create is None:
        raise click.UsageError("--config needs --create PARTITIONS")
    if create is None:
        reach_topic(target.cluster, target.topic)  # raises if it does not exist
    else:
        reach_cluster(target.cluster)
