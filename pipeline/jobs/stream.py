"""`varve pipeline latest --stream`: keep a Delta table up to date with the state of a topic.

Rules
- The table is written once, as by `latest`. Every micro-batch is then merged into it: the last
  record of each key replaces, deletes or inserts its row (pipeline/tables/upsert.py).
- A query may stop anywhere. It continues from the offsets in the table, with or without its
  checkpoint, and applies each record exactly once.
- The job refuses to continue if reading further cannot repair the table: if the checkpoint is ahead
  of it, if the topic was created again or truncated below an offset that was read, or if batches
  were read after the topic may have lost tombstones (pipeline/tables/delete_guard.py).
"""

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from admin.client import ApiRefusedError, UnreachableError
from config import exit_codes
from config.units import counted
from pipeline.client.kafka_client import EndOffset, WireClient
from pipeline.client.source_options import connection_options
from pipeline.client.topics import (
    as_job_errors,
    fetch_settings,
    fetch_topic_id,
    now_ms,
    partitions_of,
    reach_topic,
)
from pipeline.command import SparkOptions, show
from pipeline.errors import JobError
from pipeline.progress import ProgressReporter, progress_bars
from pipeline.records.columns import arrow_schema
from pipeline.tables.checkpoint import (
    check_checkpoint,
    last_ends,
    read_batch_ends,
    read_planned_ms,
)
from pipeline.tables.columns import Forms
from pipeline.tables.delete_guard import DeleteGuard, read_cleaner_progress, read_safe_ms
from pipeline.tables.delta import check_topic_id, delta_reason
from pipeline.tables.open_topic import Clients
from pipeline.tables.staging import DATA, staging_folder
from pipeline.tables.state import COLUMNS
from pipeline.tables.state_table import make_table
from pipeline.tables.target import Format, Target, target
from pipeline.tables.upsert import (
    Upserts,
    check_no_gap,
    read_reached,
    read_versions,
)
from protocol.client.connection import WireError
from storage.model import TopicPartition

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

POLL_SECONDS: Final = 0.5
SUFFIX: Final = ".checkpoint"
_EARLIEST: Final = -2


# Spark knows by these words that a batch failed because the query is being stopped. It searches
# with an expression that recurses with each character of the text after "calling": the text of
# Py4J's own error, with its stack trace, would overflow the stack of the query's thread.
_STOPPED: Final = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling it:"
    " java.lang.InterruptedException"
)


class BatchFailedError(Exception):
    """What Spark is told of a batch that failed in Spark."""


@dataclass(slots=True)
class StreamResult:
    """The result of a query. `rows` is the final size of the table; offsets are by partition."""

    topic: str
    out: str
    checkpoint: str
    was_made: bool  # whether this run created the table
    rows: int = 0
    batches: int = 0
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    end_offsets: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def follow_command(
    broker: Clients,
    topic: str,
    out: str,
    table_format: Format,
    *,
    overwrite: bool,
    forms: Forms,
    checkpoint: str | None,
    every_seconds: float | None,
    options: Mapping[str, Any],
    spark_options: SparkOptions,
    as_json: bool,
) -> None:
    """Run `latest --stream`; see `follow`."""
    if table_format != "delta":
        raise JobError(
            "--stream needs --format delta: other formats cannot replace rows in one commit",
            exit_codes.USAGE,
        )
    if spark_options.master.startswith("sc://"):
        raise JobError(
            "--stream does not work over Spark Connect; use another --master", exit_codes.USAGE
        )
    forms = check_forms(forms)
    reach_topic(broker.cluster, topic)
    with (
        progress_bars(quiet=as_json) as reporter,
        spark_options.open_session("varve latest", reporter) as spark,
    ):
        result = follow(
            spark,
            broker,
            topic,
            out,
            overwrite=overwrite,
            forms=forms,
            checkpoint=checkpoint,
            every_seconds=every_seconds,
            options=options,
            reporter=reporter,
        )
    show(asdict(result), as_json, lambda _: lines(result))


def check_forms(forms: Forms) -> Forms:
    """Return forms with exact keys, which identify rows. Raises JobError."""
    if forms.key.kind == "json":
        raise JobError("--stream needs --key-as binary or string", exit_codes.USAGE)
    return Forms(forms.key, forms.value, forms.null_malformed, exact_keys=True)


def follow(
    spark: "SparkSession",
    broker: Clients,
    topic: str,
    out: str,
    *,
    overwrite: bool = False,
    forms: Forms,
    checkpoint: str | None = None,
    every_seconds: float | None = None,
    options: Mapping[str, Any] | None = None,
    reporter: ProgressReporter,
) -> StreamResult:
    """Bring a table up to date, and keep it up to date until an interrupt.

    With `every_seconds` None, return once all records present at the start are merged. `options`
    are those of `open_topic`, for the first write. Raises JobError and what `make_table` raises.
    """
    forms.check()
    numbers = partitions_of(broker.cluster, topic)
    path = Path(out).expanduser().absolute()
    places = path.parent / f"{path.name}{SUFFIX}" if checkpoint is None else Path(checkpoint)
    places = places.expanduser().absolute()
    result = StreamResult(topic, str(path), str(places), was_made=False)
    started = time.monotonic()
    if overwrite or not _exists(path):
        result.was_made = True
        _make(spark, broker, topic, _target(out, overwrite=overwrite), places,
              forms=forms, reporter=reporter, options=options or {})  # fmt: skip
    result.seconds["table"] = time.monotonic() - started
    check_topic_id(_table(path), topic, fetch_topic_id(broker.cluster, topic))
    versions = check_table(topic, path, places, numbers)
    check_types(spark, path, forms)
    _check_truncation(broker, read_reached(_table(path), topic, versions))
    guard = DeleteGuard(
        topic, numbers, versions, read_safe_ms(_table(path), topic),
        read_progress=lambda number: read_cleaner_progress(broker.client, topic, number),
        delete_retention_ms=lambda: _delete_retention_ms(broker, topic),
        now_ms=now_ms,
    )  # fmt: skip
    guard.check()
    upserts = Upserts(
        path, topic, forms, COLUMNS, guard=guard,
        read_topic_id=lambda: fetch_topic_id(broker.cluster, topic),
    )  # fmt: skip
    reporter.note("following the topic")
    started = time.monotonic()
    _run(
        spark, broker, topic, upserts, guard, checkpoint=places, versions=versions,
        partitions=numbers, every_seconds=every_seconds,
    )  # fmt: skip
    result.seconds["stream"] = time.monotonic() - started
    _fill_result(result, upserts, topic, numbers)
    return result


def _exists(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _target(out: str, *, overwrite: bool) -> Target:
    return target(out, "delta", overwrite=overwrite)


def _make(
    spark: "SparkSession",
    broker: Clients,
    topic: str,
    place: Target,
    checkpoint: Path,
    *,
    forms: Forms,
    reporter: ProgressReporter,
    options: Mapping[str, Any],
) -> None:
    """Create the table. Remove an old checkpoint, which would skip records."""
    if checkpoint.exists() and not _is_checkpoint(checkpoint):
        raise JobError(f"{checkpoint} exists and is not a checkpoint", exit_codes.USAGE)
    if checkpoint.exists() and not place.exists:
        raise JobError(
            f"{checkpoint} is the checkpoint of a deleted table; remove it",
            exit_codes.USAGE,
        )
    make_table(spark, broker, topic, place, forms=forms, reporter=reporter, **options)
    if checkpoint.exists():
        remove_checkpoint(checkpoint)


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or Spark was killed before it wrote its metadata."""
    if (folder / "metadata").is_file():
        return True
    return folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint in one step: a part of it would be no checkpoint to the next job."""
    with staging_folder(folder) as staging:
        folder.rename(staging / DATA)


def check_table(topic: str, path: Path, checkpoint: Path, partitions: list[int]) -> dict[int, int]:
    """Check that a query can continue a table; return its end offsets. Raises JobError."""
    table = _table(path)
    versions = read_versions(table, topic, partitions)
    if partitions and not versions:
        raise JobError(f"{path} is not a table of {topic} written by `latest`")
    check_checkpoint(checkpoint, topic)
    read = {number: end.offset for number, end in last_ends(checkpoint, topic).items()}
    check_no_gap(f"{checkpoint} is ahead of the table", topic, read, versions)
    return versions


def check_types(spark: "SparkSession", path: Path, forms: Forms) -> None:
    """Check that keys and values get the types of the table. Raises JobError (USAGE).

    delta-rs would cast them, and could change them without an error.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    frame = forms.applied(spark.createDataFrame([], from_arrow_schema(arrow_schema(COLUMNS))))
    # Both through Arrow: a table does not have all types of Spark.
    requested = from_arrow_schema(to_arrow_schema(frame.schema, timezone="UTC"))
    existing = from_arrow_schema(pa.schema(_table(path).schema().to_arrow()))
    for name in ("key", "value"):
        kinds = [schema[name].dataType.simpleString() for schema in (existing, requested)]
        if kinds[0] != kinds[1]:
            raise JobError(
                f"column {name} of {path} is {kinds[0]}, and --{name}-as makes it {kinds[1]}. Use"
                f" the --{name}-as with which the table was made, or --overwrite",
                exit_codes.USAGE,
            )


def _check_truncation(broker: Clients, reached: Mapping[TopicPartition, EndOffset]) -> None:
    """Check that no records of a table were truncated from the log. Raises JobError (STALE)."""
    with as_job_errors(), WireClient(broker.cluster) as client:
        truncated = client.truncated(reached)
    for partition, end in sorted(truncated.items()):
        raise JobError(
            f"{partition} was truncated to offset {end} after the table was written up to offset"
            f" {reached[partition].offset}: the table has rows of removed records, and records"
            " with their offsets would be missed. Create the table again with --overwrite",
            exit_codes.STALE,
        )


def _delete_retention_ms(broker: Clients, topic: str) -> int:
    return int(fetch_settings(broker.cluster, topic).get("delete.retention.ms", 0))


def _table(path: Path) -> "DeltaTable":
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        return DeltaTable(str(path))
    except DeltaError as error:
        raise JobError(
            f"{path} is not a Delta table: {delta_reason(error)}", exit_codes.USAGE
        ) from error


def _run(
    spark: "SparkSession",
    broker: Clients,
    topic: str,
    upserts: Upserts,
    guard: DeleteGuard,
    *,
    checkpoint: Path,
    versions: Mapping[int, int],
    partitions: list[int],
    every_seconds: float | None,
) -> None:
    """Run the query until it ends or is interrupted."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    starts = {str(number): versions.get(number, _EARLIEST) for number in partitions}
    source = (
        spark.readStream.format("varve")
        .options(**connection_options(broker.cluster))
        .option("kafka.isolation.level", "read_committed")
        .option("subscribe", topic)
        .option("columns", ",".join(COLUMNS))
        .option("startingOffsets", json.dumps({topic: starts}))
        .load()
    )
    failed: list[Exception] = []
    stopping = threading.Event()
    started_ms = now_ms()

    def merge_batch(batch: "DataFrame", batch_id: int) -> None:
        try:
            planned_ms = read_planned_ms(checkpoint, batch_id)
            if every_seconds is None:  # Spark plans once, and may first repeat an earlier batch
                planned_ms = min(planned_ms, started_ms)
            begun = versions
            if batch_id:
                previous = read_batch_ends(checkpoint, topic, batch_id - 1)
                begun = {number: end.offset for number, end in previous.items()}
            ends = read_batch_ends(checkpoint, topic, batch_id)
            upserts.merge_batch(batch, begun, ends, planned_ms)
        except (JobError, ApiRefusedError, UnreachableError, WireError) as error:
            failed.append(error)
            raise
        except (PySparkException, Py4JError) as error:
            if stopping.is_set():
                raise BatchFailedError(_STOPPED) from None
            failed.append(_query_error(error))
            raise BatchFailedError(str(failed[-1])) from None

    writer = source.writeStream.foreachBatch(merge_batch)
    writer = writer.option("checkpointLocation", checkpoint.as_uri())
    if every_seconds is None:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=f"{round(every_seconds * 1000)} milliseconds")
    query = writer.start()
    try:
        with _stop_signal() as event:
            while query.isActive and not event.wait(POLL_SECONDS):
                # The next batch repeats a failed refresh, and fails if it gets no answer.
                with suppress(JobError, ApiRefusedError, UnreachableError):
                    guard.refresh()
        stopping.set()
        query.stop()
        if (error := query.exception()) is not None and not event.is_set():
            raise failed[0] if failed else _query_error(error)
    finally:
        query.stop()
    if event.is_set() and every_seconds is None:
        raise JobError(
            "interrupted; the table has what was merged so far. Run the command again for the rest",
            exit_codes.INTERRUPTED,
        )


def _query_error(error: Exception) -> JobError:
    """Return the error of a job whose query failed outside of `merge_batch`."""
    try:
        with as_job_errors():
            raise error
    except JobError as job_error:
        if job_error.code != exit_codes.STALE:
            return job_error
        # Records that the table has not read are gone, and so is the latest state of their keys.
        message = f"{job_error} Create the table again with --overwrite"
        return JobError(message, exit_codes.STALE)


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """Set an event on Ctrl-C or SIGTERM within the block.

    An exception during a call to the JVM would be reported as an error of that call.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: event.set()) for number in numbers}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fill_result(result: StreamResult, upserts: Upserts, topic: str, partitions: list[int]) -> None:
    import pyarrow as pa

    table = _table(upserts.path)
    result.batches = upserts.batches
    result.inserted, result.updated = upserts.inserted, upserts.updated
    result.deleted = upserts.deleted
    result.end_offsets = read_versions(table, topic, partitions)
    adds = pa.table(table.get_add_actions(flatten=True))
    result.rows = sum(adds.column("num_records").to_pylist())


def lines(result: StreamResult) -> list[str]:
    """Return the result as lines of text."""
    ends = ", ".join(f"{number}: {end}" for number, end in sorted(result.end_offsets.items()))
    return [
        f"{result.topic}: {counted(result.rows, 'row')} in {result.out}, up to offsets {ends}",
        f"{counted(result.batches, 'batch', 'es')}: {counted(result.inserted, 'row')} added,"
        f" {result.updated:,} replaced, {result.deleted:,} deleted",
    ]
