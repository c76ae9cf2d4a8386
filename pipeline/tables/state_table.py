"""The current state of a topic as a DataFrame or as a published table.

Rules
- The state is each key's last committed record in each partition, except where that record is a
  delete. Records without a key have no state.
- Keys are looked up in an index of the leased segments. Only live records are decoded and pass
  through Spark.
"""

import atexit
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from admin.client import ApiClient
from admin.command import DEFAULT_URL
from config.security.clients import PLAINTEXT, Cluster, read_command_config
from config.units import about_size, counted
from pipeline.client.topics import DEFAULT_BOOTSTRAP, partitions_of
from pipeline.progress import ProgressReporter, SilentReporter
from pipeline.tables.columns import Forms
from pipeline.tables.delete_guard import safe_time_id
from pipeline.tables.delta import (
    STATE_ID,
    UNKNOWN_EPOCH,
    epoch_id,
    removed_versions,
    state_number,
    topic_id_number,
    topic_id_transaction,
    version_id,
)
from pipeline.tables.open_topic import Clients, open_topic
from pipeline.tables.publish import PublishedTable, publish
from pipeline.tables.state import COLUMNS, StateRange, TopicState, check_open_part, open_state
from pipeline.tables.target import Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The leases of `latest`, by id of the frame. Keeping the frame prevents reuse of its id.
_PINNED: Final[dict[int, "tuple[DataFrame, ExitStack]"]] = {}


@dataclass(slots=True)
class TableResult:
    """A published table. `seconds` are keyed by step."""

    topic: str
    out: str
    format: str
    rows: int
    size_bytes: int
    files: int
    transport: str
    partitions: list[StateRange] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def open_latest(
    spark: "SparkSession",
    broker: Clients,
    topic: str,
    *,
    columns: Sequence[str] = COLUMNS,
    forms: Forms | None = None,
    reporter: ProgressReporter | None = None,
    **options: Any,
) -> Iterator[tuple[TopicState, str]]:
    """Yield the state of a topic, readable until the block ends, and the transport in use.

    `options` are those of `open_topic`.
    Raises JobError, LeaseRequestError, StageFailedError, WireError.
    """
    if forms is not None:
        forms.check()
    with open_topic(spark, broker, topic, reporter=reporter or SilentReporter(), **options) as (
        reading,
        bounds,
    ):
        state = open_state(reading, bounds, columns)
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
    command_config: str | None = None,
    columns: Sequence[str] = COLUMNS,
    forms: Forms | None = None,
    **options: Any,
) -> "DataFrame":
    """Return the state of a topic, with the columns of Spark's Kafka source or those in `columns`.

    `command_config` is a file in Kafka's properties format with TLS and SASL. The broker keeps the
    segments until `release(frame)` or the end of this process. Raises what `open_latest` raises,
    and ClientSecurityError.
    """
    security = PLAINTEXT if command_config is None else read_command_config(command_config)
    with ExitStack() as stack:
        broker = Clients(ApiClient(http, token, security), Cluster(bootstrap, security))
        manager = open_latest(spark, broker, topic, columns=columns, forms=forms, **options)
        state, _ = stack.enter_context(manager)
        frame = state.frame
        exit_stack = stack.pop_all()
    _PINNED[id(frame)] = frame, exit_stack
    atexit.register(exit_stack.close)
    return frame


def release(frame: "DataFrame") -> None:
    """Release the lease of a frame that `latest` returned; nothing derived from it can be read
    afterwards."""
    _, stack = _PINNED.pop(id(frame), (None, None))
    if stack is not None:
        atexit.unregister(stack.close)
        stack.close()


def make_table(
    spark: "SparkSession",
    broker: Clients,
    topic: str,
    place: Target,
    *,
    forms: Forms | None = None,
    reporter: ProgressReporter,
    **options: Any,
) -> TableResult:
    """Publish the state of a topic. Raises what `open_latest` and `publish` raise."""
    started = time.monotonic()
    manager = open_latest(spark, broker, topic, forms=forms, reporter=reporter, **options)
    with manager as (state, transport):
        indexed = time.monotonic()
        reporter.note("writing the table")
        made = publish(
            state.frame,
            place,
            table_notes("latest", topic, state),
            versions=table_versions(broker, topic, state, place),
            before=lambda: check_open_part(broker.client, broker.cluster, topic, state),
        )
    seconds = {"index": indexed - started, "table": time.monotonic() - indexed}
    return table_result(topic, made, transport, state.partitions, seconds)


def table_result(
    topic: str,
    made: PublishedTable,
    transport: str,
    partitions: list[StateRange],
    seconds: dict[str, float],
) -> TableResult:
    """Return the result for a published table."""
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


def table_notes(job: str, topic: str, state: TopicState, **more: object) -> Mapping[str, Any]:
    """Return the metadata stored with a table: its job, topic and end offsets."""
    ends = {str(number): end for number, end in state.end_offsets.items()}
    return {"job": job, "topic": topic, "end_offsets": ends, **more}


def table_versions(broker: Clients, topic: str, state: TopicState, place: Target) -> dict[str, int]:
    """Return the application transactions that a later stream into the table starts from.

    Raises JobError, UnknownTopicError, WireError.
    """
    reach = {version_id(topic, number): end for number, end in state.end_offsets.items()}
    # Epochs survive an overwrite, so those of the former table must be replaced.
    epochs = {epoch_id(topic, number): UNKNOWN_EPOCH for number in state.end_offsets}
    partitions = partitions_of(broker.cluster, topic)
    return {
        **removed_versions(place, topic, state.end_offsets, partitions),
        **reach,
        **epochs,
        safe_time_id(topic): state.safe_ms,
        topic_id_transaction(topic): topic_id_number(state.topic_id),
        STATE_ID: state_number(topic),
    }


def lines(result: TableResult) -> list[str]:
    """Return the result as lines of text."""
    states = [state for state in result.partitions if state.records >= 0]
    results = [
        f"{result.topic}: {counted(result.rows, 'row')}, {about_size(result.size_bytes)} in"
        f" {counted(result.files, 'file')}, as {result.format} in {result.out}"
    ]
    if states:
        records = sum(state.records for state in states)
        keyless = sum(state.keyless for state in states)
        subject = f"of {counted(records, 'record')}; {keyless:,} without a key"
        if all(state.tombstones >= 0 for state in states):
            subject += f", {sum(state.tombstones for state in states):,} keys deleted"
        results.append(subject)
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in result.seconds.items())
    return [*results, f"engine spark, transport {result.transport}: {spent}"]
