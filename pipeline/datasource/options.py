"""The options of the source and the sink, by the names of Spark's own Kafka source. Pure.

Rules: options that Spark's source refuses are refused here. An option that this source cannot
honour (deserializers, some of TLS and SASL) is an error, never ignored. Unknown options are
ignored, because Spark passes its own among them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from config.security.clients import (
    ClientSecurity,
    ClientSecurityError,
    Cluster,
    is_security_setting,
    parse_client_security,
)
from pipeline.client.kafka_client import EARLIEST, FETCH_BYTES, LATEST, Isolation
from pipeline.client.range_reader import STALL_SECONDS
from pipeline.client.source_options import BOOTSTRAP, CONNECTION_SECRET
from pipeline.records.columns import ALL_COLUMNS, COLUMNS, NAMES
from storage.model import TopicPartition

_BOOTSTRAP: Final = (BOOTSTRAP, "bootstrap.servers")
_CONSUMER: Final = "kafka."
_REFUSED: Final = {
    "kafka.auto.offset.reset": "use startingOffsets",
    "kafka.enable.auto.commit": "Spark stores offsets in its checkpoint",
    "kafka.interceptor.classes": "this source runs no Java",
    "kafka.key.deserializer": "keys are binary; cast the column",
    "kafka.value.deserializer": "values are binary; cast the column",
    "kafka.key.serializer": "keys must be binary or strings",
    "kafka.value.serializer": "values must be binary or strings",
}
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"\s*(\d{1,18})\s*(ms|s|m|h|d)?\s*")
_NUMBER_MAX: Final = (1 << 63) - 1
_INT_MAX: Final = (1 << 31) - 1  # also the largest number of a partition
_PARTITION: Final = re.compile(r"[0-9]{1,9}")


class OptionError(ValueError):
    """A missing option, an unsupported option, or an invalid value."""


class Edge(Enum):
    """One of the two ends of a log."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class ExplicitOffsets:
    """An offset for each partition; -2 means earliest, -1 latest."""

    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first record at or after a time (ms): one time for all partitions, or one for each."""

    every_ms: int | None
    each_ms: Mapping[TopicPartition, int]


Bound: TypeAlias = Edge | ExplicitOffsets | AtTime


@dataclass(frozen=True, slots=True)
class TopicSelection:
    """The partitions to read: assigned ones, or those of named topics or of topics by pattern."""

    assigned: tuple[TopicPartition, ...] = ()
    topics: tuple[str, ...] = ()
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The parsed options of a source. A limit of None means no limit."""

    cluster: Cluster
    subscription: TopicSelection
    starting: Bound
    ending: Bound
    latest_if_no_time: bool  # a starting time after the last record means the end
    isolation: Isolation
    columns: tuple[str, ...]
    push_down_filters: bool  # see batch.FilteringReader for the risk
    fail_on_data_loss: bool
    min_partitions: int | None
    max_records_per_partition: int | None
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_ms: int
    stall_seconds: float
    fetch_bytes: int
    client_id: str


class _Reader:
    """Options with case-insensitive names."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        for name, why in _REFUSED.items():
            if name in self._options:
                raise OptionError(f"{name} is not supported: {why}")

    def text(self, name: str) -> str | None:
        return self._options.get(name.lower())

    def flag(self, name: str, default: bool) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            raise OptionError(f"{name} must be true or false, not {value!r}")
        return value.lower() == "true"

    def number(self, name: str, *, least: int = 1, most: int = _NUMBER_MAX) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            number = int(value)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise OptionError(f"{name} must be an integer from {least} to {most}, not {value!r}")
        return number

    def duration_ms(self, name: str, default_ms: int) -> int:
        value = self.text(name)
        if value is None:
            return default_ms
        match = _DURATION.fullmatch(value)
        if match is None:
            raise OptionError(f"{name} must be a duration such as 500ms, 30s or 15m, not {value!r}")
        return int(match[1]) * _UNITS_MS[match[2] or "ms"]

    def with_prefix(self, prefix: str) -> dict[str, str]:
        return {
            name.removeprefix(prefix): value
            for name, value in self._options.items()
            if name.startswith(prefix)
        }


def read_cluster(options: Mapping[str, str]) -> Cluster:
    """Return the cluster and how to connect to it. Raises OptionError."""
    return _cluster(_Reader(options))


def _cluster(reader: _Reader) -> Cluster:
    bootstrap = reader.text(_BOOTSTRAP[0]) or reader.text(_BOOTSTRAP[1])
    if not bootstrap:
        raise OptionError(f"{BOOTSTRAP} is required, as HOST:PORT")
    secret = reader.text(CONNECTION_SECRET)
    if secret is not None:
        return Cluster(bootstrap, ClientSecurity.from_text(secret))
    try:
        security = parse_client_security(reader.with_prefix(_CONSUMER))
    except ClientSecurityError as error:
        raise OptionError(f"{_CONSUMER}{error}") from None
    try:
        return Cluster(bootstrap, security)
    except ValueError as error:
        raise OptionError(f"{BOOTSTRAP}: {error}") from None


def producer_settings(options: Mapping[str, str]) -> dict[str, str]:
    """Return the producer settings among the options, those with the prefix `kafka.`.

    The settings of the connection are not among them (`read_cluster`).
    """
    settings = _Reader(options).with_prefix(_CONSUMER)
    return {
        name: value
        for name, value in settings.items()
        if name != "bootstrap.servers" and not is_security_setting(name)
    }


def read_columns(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns: `columns`, or those of Spark's source, with includeHeaders."""
    reader = _Reader(options)
    named = reader.text("columns")
    if named is None:
        return ALL_COLUMNS if reader.flag("includeHeaders", False) else COLUMNS
    columns = tuple(name.strip() for name in named.split(",") if name.strip())
    unknown = [name for name in columns if name not in NAMES]
    if unknown or not columns or len(set(columns)) < len(columns):
        raise OptionError(f"columns must name some of {', '.join(NAMES)}, not {named!r}")
    return columns


def read_source_options(
    options: Mapping[str, str], *, columns: tuple[str, ...], is_stream: bool
) -> SourceOptions:
    """Parse the options of a source. Raises OptionError."""
    reader = _Reader(options)
    poll_ms = reader.number("kafkaConsumer.pollTimeoutMs")
    isolation = reader.text("kafka.isolation.level") or "read_uncommitted"
    if isolation not in ("read_uncommitted", "read_committed"):
        raise OptionError(f"kafka.isolation.level is {isolation!r}")
    return SourceOptions(
        cluster=_cluster(reader),
        subscription=_subscription(reader),
        starting=_bound(reader, "starting", Edge.LATEST if is_stream else Edge.EARLIEST, is_stream),
        ending=Edge.LATEST if is_stream else _bound(reader, "ending", Edge.LATEST, is_stream),
        latest_if_no_time=_latest_if_no_time(reader),
        isolation=Isolation[isolation.upper()],
        columns=columns,
        push_down_filters=reader.flag("pushDownPredicate", False),
        fail_on_data_loss=reader.flag("failOnDataLoss", True),
        min_partitions=reader.number("minPartitions"),
        max_records_per_partition=reader.number("maxRecordsPerPartition"),
        max_offsets_per_trigger=reader.number("maxOffsetsPerTrigger"),
        min_offsets_per_trigger=reader.number("minOffsetsPerTrigger"),
        max_trigger_delay_ms=reader.duration_ms("maxTriggerDelay", 15 * 60_000),
        stall_seconds=STALL_SECONDS if poll_ms is None else poll_ms / 1000,
        fetch_bytes=reader.number("kafka.max.partition.fetch.bytes", most=_INT_MAX) or FETCH_BYTES,
        client_id=reader.text("kafka.client.id") or "varve-pipeline",
    )


def _latest_if_no_time(reader: _Reader) -> bool:
    strategy = (reader.text("startingOffsetsByTimestampStrategy") or "error").lower()
    if strategy not in ("error", "latest"):
        raise OptionError(
            f"startingOffsetsByTimestampStrategy is {strategy!r}, not error or latest"
        )
    return strategy == "latest"


def _subscription(reader: _Reader) -> TopicSelection:
    ways = ("assign", "subscribe", "subscribePattern")
    given = [name for name in ways if reader.text(name) is not None]
    if len(given) != 1:
        raise OptionError(f"exactly one of {', '.join(ways)} is required, not {len(given)}")
    value = (reader.text(given[0]) or "").strip()
    if not value:
        raise OptionError(f"{given[0]} is empty")
    if given[0] == "subscribe":
        topics = tuple(sorted({name.strip() for name in value.split(",")} - {""}))
        if not topics:
            raise OptionError(f"subscribe names no topic: {value!r}")
        return TopicSelection(topics=topics)
    if given[0] == "subscribePattern":
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise OptionError(f"subscribePattern is not a regular expression: {error}") from error
        return TopicSelection(pattern=value)
    return TopicSelection(assigned=_assigned(value))


def _assigned(text: str) -> tuple[TopicPartition, ...]:
    results = _json("assign", text)
    partitions: set[TopicPartition] = set()
    for topic, numbers in results.items():
        if not isinstance(numbers, list) or not all(
            _is_number(n) and 0 <= n <= _INT_MAX for n in numbers
        ):
            raise OptionError(f'assign is {text!r}, not like {{"topic": [0, 1]}}')
        partitions.update(TopicPartition(topic, number) for number in numbers)
    if not partitions:
        raise OptionError("assign names no partition")
    return tuple(sorted(partitions))


def _bound(reader: _Reader, which: str, default: Edge, is_stream: bool) -> Bound:
    """Parse a bound. As in Spark, one time wins over times by partition, these over offsets."""
    if (text := reader.text(f"{which}Timestamp")) is not None:
        when = reader.number(f"{which}Timestamp", least=0)
        assert when is not None, text
        return AtTime(when, {})
    name = f"{which}OffsetsByTimestamp"
    if (text := reader.text(name)) is not None:
        return AtTime(None, _by_partition(name, text, least=0))
    name = f"{which}Offsets"
    text = reader.text(name)
    if text is None:
        return default
    if text.strip().lower() in ("earliest", "latest"):
        return _edge(name, Edge(text.strip().lower()), is_stream)
    offsets = _by_partition(name, text, least=EARLIEST)
    refused = EARLIEST if which == "ending" else LATEST
    if not is_stream and refused in offsets.values():
        raise OptionError(f"{name}: {refused} is not allowed in a batch")
    return ExplicitOffsets(offsets)


def _edge(name: str, edge: Edge, is_stream: bool) -> Edge:
    wrong = {"startingOffsets": Edge.LATEST, "endingOffsets": Edge.EARLIEST}
    if not is_stream and edge is wrong[name]:
        raise OptionError(f"{name} cannot be {edge.value} in a batch")
    return edge


def _by_partition(name: str, text: str, *, least: int) -> dict[TopicPartition, int]:
    results: dict[TopicPartition, int] = {}
    for topic, numbers in _json(name, text).items():
        if not isinstance(numbers, dict):
            raise OptionError(f'{name} is {text!r}, not like {{"topic": {{"0": 23}}}}')
        for partition, number in numbers.items():
            is_partition = _PARTITION.fullmatch(partition) is not None
            if not is_partition or not _is_number(number) or not least <= number <= _NUMBER_MAX:
                raise OptionError(f"{name}: {topic} {partition!r}: {number!r} is not an offset")
            results[TopicPartition(topic, int(partition))] = number
    return results


def _json(name: str, text: str) -> dict[str, object]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{name} is neither a keyword nor JSON: {text!r}") from error
    if not isinstance(document, dict):
        raise OptionError(f"{name} is not a JSON object: {text!r}")
    return document


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
