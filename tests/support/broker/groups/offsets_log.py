"""A __consumer_offsets in memory: what was appended, acknowledged when the test says so."""

import asyncio
from collections.abc import Sequence

from broker.groups.offsets.offsets_store import LoadedPartition, OffsetsLoader
from broker.topics.internal_topic import LogRecord, decode_batches
from broker.topics.producer_ids import Producer
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
)


class OffsetsLog:
    """Acknowledge at once unless `held`; fail appends with `error` while it is set."""

    def __init__(self, partition_count: int = 1) -> None:
        self.batches: list[list[bytes]] = [[] for _ in range(partition_count)]
        self.ends = [0] * partition_count
        self.appends: list[list[LogRecord]] = []
        self.max_batch_bytes = 1_048_588
        self.held = False
        self.error: Exception | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def append(
        self, partition: int, records: Sequence[LogRecord], producer: Producer | None = None
    ) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.error is not None:
            future.set_exception(self.error)
            return future
        self.appends.append(list(records))
        base = self.ends[partition]
        built = [Record(base + i, 1, key, value) for i, (key, value) in enumerate(records)]
        batch = build_batch(built, base_offset=base)
        if producer is not None:
            batch = build_batch(
                built,
                base_offset=base,
                producer_id=producer.producer_id,
                producer_epoch=producer.epoch,
                base_sequence=0,
                attributes=TRANSACTIONAL,
            )
        self.batches[partition].append(bytes(batch))
        self.ends[partition] += len(records)
        if self.held:
            self._waiting.append(future)
        else:
            future.set_result(None)
        return future

    def end_transaction(self, producer: Producer, *, commit: bool, partition: int = 0) -> None:
        """Append the marker of a transaction."""
        kind = ControlType.COMMIT if commit else ControlType.ABORT
        batch = build_batch(
            [marker_record(kind, 0, 1)._replace(offset=self.ends[partition])],
            base_offset=self.ends[partition],
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            attributes=TRANSACTIONAL | CONTROL,
        )
        self.batches[partition].append(bytes(batch))
        self.ends[partition] += 1

    def release(self, error: Exception | None = None) -> None:
        """Acknowledge, or fail, whatever is held; in log order."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(None)

    def load(self, partition: int = 0) -> LoadedPartition:
        """What a restart would find."""
        loader = OffsetsLoader()
        for batch in self.batches[partition]:
            for header, built in decode_batches(batch):
                loader.add_records(header, built)
        return loader.finish()
