"""Aborts a hanging transaction: appends the abort marker that a coordinator would write.

A folder adopted from Kafka may hold an open transaction whose producer and coordinator are
elsewhere. This broker has no transaction coordinator: it refuses further batches of the
transaction and never ends it. Consumers of committed records and the cleaner would stop before its
first offset for ever. The marker equals the one of Kafka's own tool (KIP-664), has the producer's
present epoch, and is appended like any batch.

Only an operator may decide this, because it can lose data: if Kafka's coordinator decided to commit
but its marker never reached this log, the producer considers the records committed.
"""

from broker.topics.partition import Partition
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    build_batch,
    marker_record,
    read_header,
)
from storage.format.producer_state import ProducerEntry

OWN_COORDINATOR_EPOCH = 0  # for a log without a coordinator's markers


class NoTransactionError(Exception):
    """The producer has no transaction open on the partition."""


async def end_transaction(partition: Partition, producer_id: int, now_ms: int) -> int:
    """Abort the open transaction of a producer durably; return the offset of the marker.

    Raises NoTransactionError, and the errors of Partition.append and Partition.flush.
    """
    entry = _open(partition, producer_id)
    coordinator_epoch = max(OWN_COORDINATOR_EPOCH, entry.coordinator_epoch)
    batch = build_batch(
        [marker_record(ControlType.ABORT, coordinator_epoch, now_ms)],
        producer_id=producer_id,
        producer_epoch=entry.epoch,
        attributes=TRANSACTIONAL | CONTROL,
    )
    info = partition.append(memoryview(batch), read_header(batch), now_ms)
    await partition.flush()
    return info.first_offset


def _open(partition: Partition, producer_id: int) -> ProducerEntry:
    producers = [
        entry for entry in partition.log.producers if entry.transaction_first_offset is not None
    ]
    for entry in producers:
        if entry.producer_id == producer_id:
            return entry
    others = ", ".join(str(entry.producer_id) for entry in producers[:10]) or "none"
    raise NoTransactionError(
        f"producer {producer_id} has no open transaction on {partition.partition}; "
        f"producers with an open transaction: {others}"
    )
