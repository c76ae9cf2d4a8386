"""Producer ids: each one is given out once, also across restarts and if the metadata was lost."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from broker.topics.metadata_writer import MetadataWriter

# Ids reserved by one write of the metadata: a client that takes 1,000 in a second causes a write in
# two minutes. A restart skips what is left; there are 2^62 ids.
BLOCK: Final = 100_000


@dataclass(frozen=True, slots=True)
class Producer:
    """A producer id with its epoch."""

    producer_id: int
    epoch: int


class ProducerIds:
    """Gives out producer ids from blocks that the metadata reserves."""

    def __init__(self, writer: MetadataWriter, wall_ms: Callable[[], int]) -> None:
        self._writer = writer
        self._wall_ms = wall_ms
        self._next_id = 0
        self._end_id = 0

    async def take(self) -> int:
        """Return an id that no producer has had. Raises StorageError."""
        while self._next_id == self._end_id:
            first = await self._writer.run(None, self._reserve_block)
            if self._next_id == self._end_id:  # else another request has reserved one meanwhile
                self._next_id, self._end_id = first, first + BLOCK
        producer_id = self._next_id
        self._next_id += 1
        return producer_id

    async def _reserve_block(self) -> int:
        first, metadata = self._writer.metadata.take_producer_ids(BLOCK, self._wall_ms())
        await self._writer.save(metadata)
        return first
