"""Ends a transaction on one partition: appends the marker that commits or aborts its records.

The transaction coordinator does so for transactions that it decided (broker/transactions). An
operator may abort a hanging transaction, which no coordinator ends: its producer and coordinator
were those of another cluster. Consumers of committed records and the cleaner would stop before its
first offset for ever. The marker equals the one of Kafka's own tool (KIP-664), has the producer's
present epoch, and is appended like any batch.

Only an operator may abort a hanging transaction, because it can lose data: if Kafka's coordinator
decided to commit but its marker never reached this log, the producer considers the records
committed.
"""

from functools import partial

from broker.topics.partition import Partition
from broker.topics.producer_ids import Producer
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    build_batch,
    marker_record,
    read_header,
)
from storage.format.producer_state import ProducerEntry
from storage.model import AppendInfo

OWN_COORDINATOR_EPOCH = 0  # for a log without a coordinator's markers


class NoTransactionError(Exception):
    """The producer has no transaction open on the partition."""


async def append_marker(
    partition: Partition, producer: Producer, kind: ControlType, now_ms: int
) -> AppendInfo:
    """Append the marker of a transaction. Raises the errors of Partition.append.

    It waits only for a disk that hangs.
    """
    entry = partition.log.producers.states.producer(producer.producer_id)
    coordinator_epoch = OWN_COORDINATOR_EPOCH
    if entry is not None:
        coordinator_epoch = max(coordinator_epoch, entry.coordinator_epoch)
    batch = build_batch(
        [marker_record(kind, coordinator_epoch, now_ms)],
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        attributes=TRANSACTIONAL | CONTROL,
    )
    append = partial(partition.append, memoryview(batch), read_header(batch), now_ms)
    return await partition.wait_change(append)


async def abort_hanging(partition: Partition, producer_id: int, now_ms: int) -> int:
    """Abort the open transaction of a producer durably; return the offset of the marker.

    Raises NoTransactionError, and the errors of Partition.append and Partition.flush.
    """
    entry = _open_transaction(partition, producer_id)
    producer = Producer(producer_id, entry.epoch)
    info = await append_marker(partition, producer, ControlType.ABORT, now_ms)
    await partition.flush()
    return info.first_offset


def has_open_transaction(partition: Partition, producer_id: int) -> bool:
    """Return whether a producer has a transaction open on the partition."""
    entry = partition.log.producers.states.producer(producer_id)
    return entry is not None and entry.transaction_first_offset is not None


def _open_transaction(partition: Partition, producer_id: int) -> ProducerEntry:
    producers = [
        entry
        for entry in partition.log.producers.states.producers
        if entry.transaction_first_offset is not None
    ]
    for entry in producers:
        if entry.producer_id == producer_id:
            return entry
    others = ", ".join(str(entry.producer_id) for entry in producers[:10]) or "none"
    raise NoTransactionError(
        f"producer {producer_id} has no open transaction on {partition.partition}; "
        f"producers with an open transaction: {others}"
    )
