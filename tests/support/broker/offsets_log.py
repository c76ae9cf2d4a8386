"""A __consumer_offsets in memory: what was appended, acknowledged when the test says so."""

import asyncio
from collections.abc import Sequence

from broker.groups.offsets_store import LoadedPartition, Loader, LogRecord
from storage.format.batch import Record, build_batch, read_header


class OffsetsLog:
    """Acknowledges at once unless `held`; fails appends with `error` while it is set."""

    def __init__(self, partition_count: int = 1) -> None:
        self.batches: list[list[bytes]] = [[] for _ in range(partition_count)]
        self.ends = [0] * partition_count
        self.appends: list[list[LogRecord]] = []
        self.held = False
        self.error: Exception | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def append(self, partition: int, records: Sequence[LogRecord]) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.error is not None:
            future.set_exception(self.error)
            return future
        self.appends.append(list(records))
        base = self.ends[partition]
        built = [Record(base + i, 1, key, value) for i, (key, value) in enumerate(records)]
        self.batches[partition].append(bytes(build_batch(built, base_offset=base)))
        self.ends[partition] += len(records)
        if self.held:
            self._waiting.append(future)
        else:
            future.set_result(None)
        return future

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
        loader = Loader()
        for batch in self.batches[partition]:
            assert read_header(batch).record_count > 0
            loader.add_batches(batch)
        return loader.finish()
