"""Ending a transaction that nobody else will end: an abort marker, written as a coordinator would.

Kafka's folders may hold a transaction whose producer or coordinator stayed behind. This broker has
no transaction coordinator: it accepts no further batch of that transaction, and nobody decides it.
Readers of committed records and the cleaner then stop before its first offset for good. The marker
is what Kafka's own tool writes for such a one (KIP-664), with the producer's present epoch, and
goes the way of every append.

It is an operator's decision, since it may lose data: where Kafka's coordinator had decided to
commit and its marker did not come here any more, the records were committed to whoever produced
them.
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

OWN_COORDINATOR_EPOCH = 0  # of a log in which no coordinator has written yet


class NoTransactionError(Exception):
    """The producer has no transaction open on the partition."""


async def end_transaction(partition: Partition, producer_id: int, now_ms: int) -> int:
    """Abort the open transaction of a producer; the offset of the marker. Durable on return.

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
    producers = [e for e in partition.log.producers if e.transaction_first_offset is not None]
    for entry in producers:
        if entry.producer_id == producer_id:
            return entry
    others = ", ".join(str(entry.producer_id) for entry in producers[:10]) or "nobody"
    raise NoTransactionError(
        f"producer {producer_id} has no transaction open on {partition.partition}; "
        f"whoever has: {others}"
    )
