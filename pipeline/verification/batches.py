"""Check the order of batches and expired tombstones, which decoded records do not show.

Rules
- One task per partition fetches raw batches. It decodes only their headers, and the records of
  batches whose delete horizon has passed.
- A tombstone is expired if its batch's delete horizon (KIP-534) passed before the last clean that
  covered it began. That clean should have removed it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from config.security.clients import Cluster
from pipeline.client.kafka_client import Isolation, WireClient
from storage.format.batch import BatchHeader, decode_records, walk_headers
from storage.model import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

DISORDER: Final = "offsets_not_ascending"
EXPIRED: Final = "expired_tombstone"
FAULTS_MAX: Final = 10_000  # reported per partition
_SCHEMA: Final = "partition int, key binary, kind string, expected_offset long, served_offset long"


@dataclass(frozen=True, slots=True)
class BatchWalk:
    """The batches of one partition to check: [first_offset, end_offset)."""

    topic: str
    partition: int
    first_offset: int
    end_offset: int
    expired_before_ms: int = -1  # horizons before it have passed; -1: not checked


@dataclass(frozen=True, slots=True)
class BatchFault:
    """One fault, with the columns of `rules.select_faults`."""

    partition: int
    key: bytes | None
    kind: str
    expected_offset: int | None
    served_offset: int


def walk(client: WireClient, batch_walk: BatchWalk) -> Iterator[BatchFault]:
    """Yield the faults of one partition. Raises WireError, CorruptBatchError."""
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
            return  # no further batch: the log ends here


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


def walk_all(
    spark: "SparkSession", cluster: Cluster, walks: Sequence[BatchWalk]
) -> list[BatchFault]:
    """Return up to FAULTS_MAX faults of each partition; every partition is a task."""
    if not walks:
        return []
    rows = [tuple(asdict(batch_walk).values()) for batch_walk in walks]
    names = "topic string, partition int, first long, end long, expired long"
    frame = spark.createDataFrame(rows, names).repartition(len(rows), "partition")
    result = frame.mapInArrow(_Walker(cluster), _SCHEMA).collect()
    return [BatchFault(*row) for row in result]


class _Walker:
    """Checks the partitions of one task; pickled into the tasks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __call__(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa

        schema = pa.schema(
            [
                ("partition", pa.int32()),
                ("key", pa.binary()),
                ("kind", pa.string()),
                ("expected_offset", pa.int64()),
                ("served_offset", pa.int64()),
            ]
        )
        for batch in batches:
            for row in batch.to_pylist():
                rows: list[dict[str, Any]] = []
                with WireClient(self._cluster) as client:
                    for fault in walk(client, BatchWalk(*row.values())):
                        rows.append(asdict(fault))
                        if len(rows) == FAULTS_MAX:
                            break
                yield pa.RecordBatch.from_pylist(rows, schema=schema)
