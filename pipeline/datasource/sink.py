"""Write rows to topics, at least once, as Spark's own Kafka sink does.

Rules: a task succeeds when all of its records are acknowledged. A repeated task writes its records
again, and the records of a failed query stay. Topics must exist. Columns with other names than the
five are ignored.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructType,
)

from config.security.clients import Cluster
from pipeline.client.producer import BulkProducer
from pipeline.datasource.options import OptionError, producer_settings, read_cluster


def _are_headers(kind: DataType) -> bool:
    if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StructType):
        return False
    fields = [(field.name, type(field.dataType)) for field in kind.elementType.fields]
    return fields == [("key", StringType), ("value", BinaryType)]


_TEXT_OR_BYTES = ("a string or binary", lambda kind: isinstance(kind, StringType | BinaryType))
_KINDS: Mapping[str, tuple[str, Any]] = {
    "key": _TEXT_OR_BYTES,
    "value": _TEXT_OR_BYTES,
    "topic": ("a string", lambda kind: isinstance(kind, StringType)),
    "partition": ("an int", lambda kind: isinstance(kind, IntegerType)),
    "headers": ("array<struct<key: string, value: binary>>", _are_headers),
}


@dataclass(frozen=True)
class SinkOptions:
    """The options of a sink. `topic` overrides a column of that name."""

    cluster: Cluster
    topic: str | None
    settings: dict[str, str]

    @classmethod
    def read(cls, options: Mapping[str, str], schema: StructType) -> "SinkOptions":
        """Parse the options and check the columns. Raises OptionError."""
        topic = options.get("topic")
        fields = {field.name: field.dataType for field in schema.fields}
        for name, (requested, holds) in _KINDS.items():
            kind = fields.get(name)
            if kind is not None and not holds(kind):
                raise OptionError(f"column {name} must be {requested}, not {kind.simpleString()}")
        if "value" not in fields:
            raise OptionError("column `value` is required")
        if topic is None and "topic" not in fields:
            raise OptionError("option `topic` or column `topic` is required")
        return cls(
            cluster=read_cluster(options),
            topic=topic,
            settings=producer_settings(options),
        )


@dataclass
class Written(WriterCommitMessage):  # type: ignore[misc]  # untyped
    """The number of records that a task wrote."""

    records: int


def write_rows(options: SinkOptions, batches: Iterator[pa.RecordBatch]) -> Written:
    """Write all rows, in a task. Raises ProduceError, ValueError for a row without a topic."""
    with BulkProducer(options.cluster, options.settings) as producer:
        for batch in batches:
            _send(producer, options, batch)
        return Written(producer.flush())


def _send(producer: BulkProducer, options: SinkOptions, batch: pa.RecordBatch) -> None:
    nothing: list[Any] = [None] * batch.num_rows
    names = set(batch.schema.names)

    def column(name: str) -> list[Any]:
        return batch.column(name).to_pylist() if name in names else nothing

    topics = nothing if options.topic is not None else column("topic")
    names_and_values = (column("key"), column("value"), column("partition"), column("headers"))
    for topic, key, value, partition, pairs in zip(topics, *names_and_values, strict=True):
        name = options.topic or topic
        if name is None:
            raise ValueError("a row has no topic, and the option `topic` is not set")
        producer.send(
            name,
            _bytes(key),
            _bytes(value),
            partition=partition,
            headers=[(pair["key"], pair["value"]) for pair in pairs] if pairs else None,
        )


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


class VarveWriter(DataSourceArrowWriter):  # type: ignore[misc]  # untyped
    """The writer of a batch query."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        return write_rows(self._options, iterator)


class VarveStreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc]  # untyped
    """The writer of a streaming query."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        return write_rows(self._options, iterator)
