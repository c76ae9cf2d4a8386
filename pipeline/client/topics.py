"""Topic metadata for jobs: settings, bounds, creation, and the records as a DataFrame.

Rules
- Records are read with format("varve") between bounds that the caller fixes, so two reads with the
  same bounds cover the same offsets.
- Every error of the cluster, a producer, Spark or a disk becomes a one-line JobError with its exit
  code.
"""

import errno
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, ParamSpec

import click

from admin.command import TOPICS_HINT, command_security, with_command_config
from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.kafka_client import EARLIEST, LATEST, REACH_SECONDS, Isolation, WireClient
from pipeline.client.producer import ProduceError
from pipeline.client.source_options import connection_options
from pipeline.client.wire_errors import (
    DATA_LOSS_HINT,
    UnknownTopicError,
    UnreachableBrokerError,
)
from pipeline.engines.spark_session import first_line, spark_reason
from pipeline.errors import JobError, as_disk_error
from protocol.client.connection import NotKafkaError, WireError
from protocol.client.librdkafka import connection_settings
from storage.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEFAULT_BOOTSTRAP: Final = "127.0.0.1:9092"
ADMIN_SECONDS: Final = 30.0

Bounds = Mapping[int, int]  # partition -> offset
P = ParamSpec("P")

# The last line of a Spark error that names the exception of a Python task.
_RAISED: Final = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)): (.+)$")
_DATA_LOSS: Final = "DataLossError"


def with_cluster(function: Callable[P, None]) -> Callable[P, None]:
    """Add the options of the Kafka address; the command gets `cluster`."""

    def parsed(_context: click.Context, _parameter: click.Parameter, value: str) -> Cluster:
        try:
            return Cluster(value, command_security())
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    function = click.option(
        "--bootstrap",
        "cluster",
        envvar="VARVE_BOOTSTRAP",
        default=DEFAULT_BOOTSTRAP,
        show_default=True,
        callback=parsed,
        metavar="HOST:PORT",
        help="The broker's address for Kafka clients (VARVE_BOOTSTRAP).",
    )(function)
    return with_command_config(function)


def cluster_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Apply `as_job_errors` to a command; goes under `exit_on_error`."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> None:
        with as_job_errors():
            function(*args, **options)

    return run


@contextmanager
def as_job_errors() -> Iterator[None]:
    """Translate errors of the cluster, a producer, Spark or a disk in the block to JobError."""
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        yield
    except (UnreachableBrokerError, NotKafkaError) as error:
        raise JobError(str(error), exit_codes.UNREACHABLE) from error
    except UnknownTopicError as error:
        names = ", ".join(error.names)
        raise JobError(f"there is no topic {names}; {TOPICS_HINT}") from error
    except (WireError, ProduceError) as error:
        raise JobError(str(error)) from error
    except (Py4JNetworkError, ConnectionRefusedError, ConnectionResetError) as error:
        # Clients of the broker have errors of their own, so this is Py4J.
        raise JobError(
            f"the Java process of Spark has ended ({first_line(error)}). Run the job again; if the"
            " memory of this machine was full, with less --memory"
        ) from error
    except (PySparkException, Py4JError) as error:
        kind, message = _error_text(error)
        if kind == _DATA_LOSS:  # a job has no option to continue
            message = message.removesuffix(DATA_LOSS_HINT)
            raise JobError(message, exit_codes.STALE) from error
        raise JobError(message) from error
    except OSError as error:
        if (
            error.errno == errno.EPIPE
        ):  # the reader of standard output is gone: click exits silently
            raise
        raise as_disk_error(error) from error


def _error_text(error: BaseException) -> tuple[str, str]:
    """Return type and message of a task's exception, or "" and Spark's reason."""
    text = getattr(error, "java_exception", None)
    lines = str(error if text is None else text.toString()).splitlines()
    for line in reversed(lines):
        match = _RAISED.match(line.strip())
        if match is not None and not match[1].endswith(("PythonException", "SparkException")):
            return match[1], match[2][:500]
    return "", spark_reason(error)


def partitions_of(cluster: Cluster, topic: str) -> list[int]:
    """Return the partitions of a topic. Raises UnknownTopicError, WireError."""
    with WireClient(cluster) as client:
        return client.partitions([topic])[topic]


def fetch_topic_id(cluster: Cluster, topic: str) -> bytes:
    """Return the id of a topic; see `WireClient.topic_id`. Raises UnknownTopicError, WireError."""
    with WireClient(cluster) as client:
        return client.topic_id(topic)


def reach_topic(cluster: Cluster, topic: str) -> list[int]:
    """Return the partitions of a topic; fail fast, before a job starts anything slow.

    Raises UnknownTopicError; UnreachableBrokerError after REACH_SECONDS.
    """
    with WireClient(cluster, timeout_seconds=REACH_SECONDS) as client:
        return client.partitions([topic])[topic]


def reach_cluster(cluster: Cluster) -> None:
    """Check that a broker answers, for a topic to be created. Raises UnreachableBrokerError."""
    with WireClient(cluster, timeout_seconds=REACH_SECONDS) as client:
        client.topics()


@dataclass(frozen=True, slots=True)
class TopicBounds:
    """The start and end offsets of partitions; `at_ms` is a local time just before the request."""

    first: dict[int, int]
    end: dict[int, int]
    at_ms: int = 0

    @property
    def is_empty(self) -> bool:
        """Return whether no partition has any offset."""
        return all(self.first[n] >= end for n, end in self.end.items())


def fetch_bounds(
    cluster: Cluster,
    topic: str,
    *,
    partitions: Sequence[int] | None = None,
    isolation: Isolation = Isolation.READ_COMMITTED,
) -> TopicBounds:
    """Return the start offset of each partition and its end offset under this isolation level.

    Raises UnknownTopicError, WireError, and JobError for an unknown partition.
    """
    at_ms = now_ms()
    with WireClient(cluster) as client:
        there = client.partitions([topic])[topic]
        requested = there if partitions is None else sorted(partitions)
        if missing := set(requested) - set(there):
            raise JobError(
                f"topic {topic} has partitions 0 to {len(there) - 1}, but not {min(missing)}",
                exit_codes.USAGE,
            )
        places = [TopicPartition(topic, n) for n in requested]
        first = client.offsets(dict.fromkeys(places, EARLIEST))
        end = client.offsets(dict.fromkeys(places, LATEST), isolation)
    return TopicBounds(
        {partition.partition: first[partition] for partition in places},
        {partition.partition: end[partition] for partition in places},
        at_ms,
    )


def now_ms() -> int:
    """Return the wall clock of this machine."""
    return time.time_ns() // 1_000_000


def fetch_settings(cluster: Cluster, topic: str) -> dict[str, str]:
    """Return a topic's settings, by Kafka's names. Raises JobError."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = _admin(cluster)  # the future is cancelled if its client is closed
    try:
        (result,) = admin.describe_configs([resource]).values()
        rows = result.result(ADMIN_SECONDS)
    except KafkaException as error:
        raise JobError(f"settings of {topic}: {error.args[0].str()}") from error
    return {name: row.value for name, row in rows.items() if row.value is not None}


def create_topic(
    cluster: Cluster, topic: str, partitions: int, settings: Mapping[str, str]
) -> None:
    """Create a topic. Raises JobError."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]

    new = NewTopic(topic, partitions, 1, config=dict(settings))
    admin = _admin(cluster)
    try:
        admin.create_topics([new])[topic].result(ADMIN_SECONDS)
    except KafkaException as error:
        raise JobError(f"cannot create topic {topic}: {error.args[0].str()}") from error


def _admin(cluster: Cluster) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient({**connection_settings(cluster), "log_level": 3})


def read_topic(
    spark: "SparkSession",
    cluster: Cluster,
    topic: str,
    first: Bounds,
    end: Bounds,
    *,
    columns: Sequence[str],
    isolation: Isolation = Isolation.READ_COMMITTED,
) -> "DataFrame":
    """Return the records of [first, end) of each partition in `end`, through format("varve")."""
    requested = {n: (first[n], last) for n, last in end.items() if first[n] < last}
    reader = spark.read.format("varve").options(**connection_options(cluster))
    reader = reader.option("columns", ",".join(columns))
    reader = reader.option("kafka.isolation.level", isolation.name.lower())
    if not requested:
        # An empty frame with the columns of the source; no request to the cluster.
        return spark.createDataFrame([], reader.option("subscribe", topic).load().schema)
    starts = {str(n): begin for n, (begin, _) in requested.items()}
    ends = {str(n): last for n, (_, last) in requested.items()}
    return (
        reader.option("assign", json.dumps({topic: sorted(requested)}))
        .option("startingOffsets", json.dumps({topic: starts}))
        .option("endingOffsets", json.dumps({topic: ends}))
        .load()
    )


def read_offsets(value: str, partitions: Sequence[int]) -> dict[int, int]:
    """Parse offsets by partition: JSON such as {"0": 12}, or @FILE. Raises JobError."""
    try:
        text = value
        if value.startswith("@"):
            with open(value[1:], encoding="utf-8") as file:
                text = file.read()
        document = json.loads(text)
        offsets = {int(number): offset for number, offset in document.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise JobError(
            f'expected offsets as JSON such as {{"0": 12}}, or @FILE: {error}', exit_codes.USAGE
        ) from error
    if unknown := set(offsets) - set(partitions):
        raise JobError(f"partition {min(unknown)} does not exist", exit_codes.USAGE)
    if not all(isinstance(offset, int) and offset >= 0 for offset in offsets.values()):
        raise JobError("offsets must be integers of at least 0", exit_codes.USAGE)
    return offsets
