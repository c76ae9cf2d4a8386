"""What a table of records cannot show: the order of batches, and tombstones that outstayed.

Rules
- Batches are read as they stand in the log, one task for each partition; only their headers are
  looked at, and the records of batches whose delete horizon has passed.
- A tombstone is expired where its batch's horizon (KIP-534) was over before the last clean began
  that went over it. That one should have taken it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from pipeline.client.kafka_client import Isolation, WireClient
from storage.format.batch import BatchHeader, decode_records, walk_headers
from storage.model import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

DISORDER: Final = "offsets_not_ascending"
EXPIRED: Final = "expired_tombstone"
FAULTS_MAX: Final = 10_000  # told of one partition
_SCHEMA: Final = "partition int, key binary, found string, wanted_offset long, served_offset long"


@dataclass(frozen=True, slots=True)
class BatchWalk:
    """What is looked at of one partition: batches of [first_offset, end_offset)."""

    topic: str
    partition: int
    first_offset: int
    end_offset: int
    expired_before_ms: int = -1  # horizons before it are over; -1: not looked at


@dataclass(frozen=True, slots=True)
class BatchFault:
    """One thing that is wrong; the columns of the other faults."""

    partition: int
    key: bytes | None
    found: str
    wanted_offset: int | None
    served_offset: int


def walk(client: WireClient, batch_walk: BatchWalk) -> Iterator[BatchFault]:
    """The faults of one partition. Raises WireError, CorruptBatchError."""
    partition = TopicPartition(batch_walk.topic, batch_walk.partition)
    position = batch_walk.first_offset
    reached = -1  # the last offset of the batches so far
    while position < batch_walk.end_offset:
        fetched = client.fetch(partition, position, isolation=Isolation.READ_UNCOMMITTED)
        before = position
        for at, header in walk_headers(fetched.records):
            if header.last_offset < before:
                yield BatchFault(batch_walk.partition, None, DISORDER, before, header.last_offset)
                continue
            if header.base_offset >= batch_walk.end_offset:
                return
            if header.base_offset <= reached:
                yield BatchFault(
                    batch_walk.partition, None, DISORDER, reached + 1, header.base_offset
                )
            yield from _expired(batch_walk, fetched.records, at, header)
            reached = max(reached, header.last_offset)
            position = max(position, header.next_offset)
        if position == before:
            return  # what is left is no batch: the log ends here


def _expired(
    batch_walk: BatchWalk, data: bytes, at: int, header: BatchHeader
) -> Iterator[BatchFault]:
    if not header.has_delete_horizon or header.is_control:
        return
    if header.base_timestamp >= batch_walk.expired_before_ms:
        return
    for record in decode_records(data, header, at):
        if (
            record.value is None
            and batch_walk.first_offset <= record.offset < batch_walk.end_offset
        ):
            yield BatchFault(batch_walk.partition, record.key, EXPIRED, None, record.offset)


def walk_all(spark: "SparkSession", bootstrap: str, walks: Sequence[BatchWalk]) -> list[BatchFault]:
    """The faults of all of them, each partition in a task of its own, FAULTS_MAX of each."""
    if not walks:
        return []
    rows = [tuple(asdict(batch_walk).values()) for batch_walk in walks]
    names = "topic string, partition int, first long, end long, expired long"
    frame = spark.createDataFrame(rows, names).repartition(len(rows), "partition")
    result = frame.mapInArrow(_Walker(bootstrap), _SCHEMA).collect()
    return [BatchFault(*row) for row in result]


class _Walker:
    """Goes with the tasks."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    def __call__(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa

        schema = pa.schema(
            [
                ("partition", pa.int32()),
                ("key", pa.binary()),
                ("found", pa.string()),
                ("wanted_offset", pa.int64()),
                ("served_offset", pa.int64()),
            ]
        )
        for batch in batches:
            for row in batch.to_pylist():
                rows: list[dict[str, Any]] = []
                with WireClient(self._bootstrap) as client:
                    for fault in walk(client, BatchWalk(*row.values())):
                        rows.append(asdict(fault))
                        if len(rows) == FAULTS_MAX:
                            break
                yield pa.RecordBatch.from_pylist(rows, schema=schema)
