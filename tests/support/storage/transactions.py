"""Batches of transactions, and their markers, at the end of a log."""

from storage.format.batch import CONTROL, TRANSACTIONAL, ControlType, build_batch, marker_record
from storage.log.log import Log
from tests.support.storage.logs import NOW_MS, append_batch, batch_of


def write(log: Log, producer_id: int) -> None:
    """Append a record of a transaction, which begins with it if none is open."""
    batch = batch_of(
        b"v",
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=0,
        attributes=TRANSACTIONAL,
    )
    append_batch(log, batch, in_transaction=True)


def end(log: Log, producer_id: int, kind: ControlType = ControlType.ABORT) -> None:
    """Append the marker that ends a transaction."""
    batch = build_batch(
        [marker_record(kind, 0, NOW_MS)],
        producer_id=producer_id,
        producer_epoch=0,
        attributes=TRANSACTIONAL | CONTROL,
    )
    append_batch(log, batch)
