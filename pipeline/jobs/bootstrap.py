"""`varve pipeline bootstrap`: the rows of a table, written to a topic as records.

Rules
- Everything that can be refused is refused before anything is written: columns, duplicates of a
  key, records that are too large, a topic that has records already.
- A key goes to the partition that the Java client's default partitioner gives it. Records without
  one are spread evenly.
- A task that fails is not run again by itself: it would write twice. What was written stays, and is
  told; `--resume` writes what is missing (pipeline/jobs/bootstrap_resume.py).
- In the end the log has to have grown by exactly what was written.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import click

from config import exit_codes
from config.topic_names import RESERVED_SUFFIX
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
    with_bootstrap,
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
from pipeline.jobs.bootstrap_rows import RowCounts, RowMapping, counted, shaped
from pipeline.progress import progress_bars
from pipeline.tables.table_reading import FORMATS, read_table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_WRITTEN: Final = "partition int, records long, failure string"
FORMS: Final = ("auto", "raw", "json")
OVERHEAD_BYTES: Final = 100  # of a batch of one record, besides its key and value


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """Where to, and what may be there."""

    bootstrap: str
    topic: str
    append: bool = False
    resume: bool = False
    allow_duplicates: bool = False
    since: Mapping[int, int] | None = None  # with `resume`: where the load began; None: at 0

    def began(self, before: TopicBounds) -> Mapping[int, int]:
        """Return the offsets at which the load began; `before` are the bounds before this run."""
        if self.resume:
            return self.since or {}
        return before.end


@dataclass(slots=True)
class PartitionWritten:
    """Of one partition: records written, and the offsets that they have."""

    records: int = 0
    first_offset: int = -1
    end_offset: int = -1


@dataclass(slots=True)
class BootstrapResult:
    """What was written; for a dry run what would be, without offsets."""

    topic: str
    dry_run: bool
    counts: RowCounts
    written: int = 0
    skipped: int = 0  # with --resume: rows whose keys the topic has
    superseded: int = 0  # of these, those whose key has only values of other producers
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
    """Write a table to a topic that is there. Raises JobError.

    `partitions`: of a topic that is yet to be made, for a dry run.
    """
    started = time.monotonic()
    with as_job_errors():
        rows = shaped(table, mapping)
        counts = counted(rows, mapping)
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
                spark, rows, target.bootstrap, target.topic, since=target.since, end=before.end
            )
            rows, result.superseded = rest.rows, rest.superseded
        written = _write(rows, mapping, target, partitions, before, dry_run=dry_run)
    result.partitions = {n: PartitionWritten(records) for n, records in sorted(written.items())}
    result.written = sum(written.values())
    result.skipped = counts.rows - result.written
    if not dry_run:
        _check_grown(result, before, _bounds(target))
    result.seconds = time.monotonic() - started
    return result


def _bounds(target: WriteTarget) -> TopicBounds:
    return fetch_bounds(target.bootstrap, target.topic, isolation=Isolation.READ_UNCOMMITTED)


# Before anything is written -----------------------------------------------------------------


def _check_rows(counts: RowCounts, mapping: RowMapping, target: WriteTarget) -> None:
    if counts.keyless and mapping.keys:
        raise JobError(f"{counts.keyless:,} rows have no key")
    if target.resume and counts.keyless:
        raise JobError("--resume tells records apart by their keys, and these rows have none")
    if not counts.duplicates:
        return
    subject = f"{counts.duplicates:,} rows have a key that another row has"
    if not target.allow_duplicates:
        raise JobError(
            f"{subject}: --allow-duplicates with --order-by writes all, the last one last"
        )
    if not mapping.order_by:
        raise JobError(f"{subject}: --order-by has to say which comes last", exit_codes.USAGE)
    if counts.without_order:
        raise JobError(f"{counts.without_order:,} rows have nothing to be ordered by")


def _check_size(counts: RowCounts, target: WriteTarget) -> None:
    largest = int(fetch_settings(target.bootstrap, target.topic).get("max.message.bytes", "0"))
    if largest and counts.largest_bytes + OVERHEAD_BYTES > largest:
        raise JobError(
            f"a row has {counts.largest_bytes:,} bytes of key and value; {target.topic} takes"
            f" {largest:,} (max.message.bytes)"
        )


def _check_empty(before: TopicBounds, target: WriteTarget) -> None:
    if not before.is_empty and not target.append and not target.resume:
        has = sum(before.end.values()) - sum(before.first.values())
        raise JobError(
            f"{target.topic} has up to {has:,} records: --append writes behind them, --resume only"
            " what is not among them"
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
    """Records of each partition. Raises JobError, with what was written."""
    if mapping.order_by:
        from pyspark.sql import functions as f

        # One writer for all records of a key, which hands them over in their order.
        orders = [f.col(f"order_{n}").asc_nulls_first() for n in range(len(mapping.order_by))]
        rows = rows.repartition("key").sortWithinPartitions(*orders)
    writer = _Writer(target.bootstrap, target.topic, partitions, dry_run=dry_run)
    reported = rows.select("key", "value", "headers", "timestamp_ms").mapInArrow(writer, _WRITTEN)
    try:
        with as_job_errors():
            # Straight from the tasks: with a shuffle behind them, an executor that is lost later
            # would have them run again.
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
        return f"how much was written cannot be told: {error}"
    grown = {n: end - before.end.get(n, 0) for n, end in after.end.items()}
    if not any(grown.values()):
        return "nothing was written"
    counts = ", ".join(f"{count:,} in partition {n}" for n, count in grown.items() if count)
    resume = since_option(target.began(before))
    return f"these rows were written and stay in the topic: {counts}; {resume} writes the rest"


class _Writer:
    """Goes with the tasks."""

    def __init__(self, bootstrap: str, topic: str, partitions: int, *, dry_run: bool) -> None:
        self._bootstrap = bootstrap
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
                raise ProduceError("a task failed, and is not run again: it would write twice", 0)
            self._write(batches, context.partitionId(), written)
        except ProduceError as error:
            failure = str(error)  # told, and not raised: Spark would run the task again
        except (pa.ArrowException, OSError, TypeError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
        # All of a failure, and otherwise what there is to tell of.
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
                producer = stack.enter_context(BulkProducer(self._bootstrap))
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


def _check_grown(result: BootstrapResult, before: TopicBounds, after: TopicBounds) -> None:
    """Every offset behind the old end is one of ours. Raises JobError."""
    for n, end in after.end.items():
        written = result.partitions.setdefault(n, PartitionWritten())
        written.first_offset, written.end_offset = before.end.get(n, 0), end
        grown = written.end_offset - written.first_offset
        if grown != written.records:
            raise JobError(
                f"{result.topic}-{n} grew by {grown:,} records, and {written.records:,} were "
                f"written:"
                " did somebody else write to it?",
                exit_codes.UNVERIFIED,
            )


# The command --------------------------------------------------------------------------------


def answer(result: BootstrapResult) -> dict[str, Any]:
    """A result as JSON."""
    results = asdict(result)
    results["counts"]["keys"] = result.counts.keys
    results["partitions"] = [
        {"partition": n, **partition} for n, partition in results["partitions"].items()
    ]
    return results


def lines(result: BootstrapResult) -> list[str]:
    """A result for people."""
    counts = result.counts
    verb = "would be written" if result.dry_run else "written"
    results = [
        f"{result.topic}-{n}: {written.records:,} records {verb}"
        + ("" if result.dry_run else f", offsets {written.first_offset} to {written.end_offset}")
        for n, written in result.partitions.items()
    ]
    subject = f"{counts.rows:,} rows, {counts.keys:,} keys, {counts.tombstones:,} deletes"
    if result.skipped:
        subject += f", {result.skipped:,} were there already"
    if result.superseded:
        subject += f", {result.superseded:,} of them with other values, written by other producers"
    return [*results, f"{result.topic}: {result.written:,} records {verb} ({subject})"]


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
@click.option("--from", "path", required=True, metavar="PATH", help="The table.")
@click.option("--format", "table_format", type=click.Choice(FORMATS), default="parquet",
              show_default=True, help="Of the table.")  # fmt: skip
@click.option("--key", "keys", multiple=True, metavar="COL", help="Of the key; several make JSON.")
@click.option("--key-as", type=click.Choice(FORMS), default="auto", help="raw or json.")
@click.option("--value", "values", multiple=True, metavar="COL",
              help="Of the value; without it JSON of all other columns.")  # fmt: skip
@click.option("--value-as", type=click.Choice(FORMS), default="auto", help="raw or json.")
@click.option("--header", "headers", multiple=True, callback=_pairs, metavar="NAME=COL",
              help="A header; may be repeated.")  # fmt: skip
@click.option("--headers-column", metavar="COL", help='All headers, as format("varve") has them.')
@click.option("--timestamp", metavar="COL", help="The time; without it the present.")
@click.option("--allow-duplicates", is_flag=True, help="Write every row of a key, in an order.")
@click.option("--order-by", multiple=True, metavar="COL", help="That order: the last one stands.")
@click.option("--append", is_flag=True, help="The topic may have records.")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue a load: write only rows whose keys are not in the topic.",
)
@click.option("--since", metavar="JSON|@FILE",
              help='With --resume: offsets where it began, {"0": 12}; default 0.')  # fmt: skip
@click.option("--create", type=click.IntRange(1, 100_000), metavar="PARTITIONS",
              help="Make the topic, with so many partitions.")  # fmt: skip
@click.option("--config", "topic_settings", multiple=True, callback=_pairs, metavar="NAME=VALUE",
              help="A setting of the topic that is made.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
@with_spark_options
@with_bootstrap
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
    bootstrap: str,
    as_json: bool,
    append: bool,
    resume: bool,
    since: str | None,
    allow_duplicates: bool,
    **columns: Any,
) -> None:
    """Write the rows of a table to a topic, a record each, partitioned as Java's producer does."""
    mapping = RowMapping(**columns)
    if since is not None and not resume:
        raise click.UsageError("--since needs --resume")
    target = WriteTarget(bootstrap, topic, append, resume, allow_duplicates)
    if since is not None:
        target = replace(target, since=read_offsets(since, reach_topic(bootstrap, topic)))
    _check_options(mapping, target, create, dict(topic_settings))
    with (
        progress_bars(quiet=as_json) as reporter,
        spark_options.open_session("varve bootstrap", reporter) as spark,
    ):
        table = read_table(spark, path, table_format)
        shaped(table, mapping)  # raises for wrong columns before a topic is created
        reporter.note("writing")
        if create is not None and not dry_run:
            create_topic(bootstrap, topic, create, dict(topic_settings))
        partitions = create if dry_run else None
        result = bootstrap_topic(
            spark, table, mapping, target, dry_run=dry_run, partitions=partitions
        )
    show(answer(result), as_json, lambda _: lines(result))


def _check_options(
    mapping: RowMapping, target: WriteTarget, create: int | None, settings: Mapping[str, str]
) -> None:
    if target.topic.endswith(RESERVED_SUFFIX):
        raise click.UsageError("a compacted view is read only: write to the topic itself")
    if mapping.headers and mapping.headers_column:
        raise click.UsageError("--header and --headers-column are two different ways")
    if target.resume and target.allow_duplicates:
        raise click.UsageError("--resume cannot tell rows of the same key apart")
    if settings and create is None:
        raise click.UsageError("--config is for a topic that is made: --create PARTITIONS")
    if create is None:
        reach_topic(target.bootstrap, target.topic)  # raises where there is none
    else:
        reach_cluster(target.bootstrap)
