"""Locks on the files of compacted views.

Rules
- Compactions and removals take turns over all views, and exclude other users of the same files.
- Code that needs the files of one partition unchanged, such as a move, waits for that partition
  only: a compaction of another one may take hours.
- A compaction or removal waits for its turn first, and then locks the files.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from storage.model import TopicPartition


class ViewFileLocks:
    """The turn of changes, and a lock for the files of each partition in use."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._locks = WeakValueDictionary[TopicPartition, asyncio.Lock]()

    def files_of(self, partition: TopicPartition) -> asyncio.Lock:
        """Return the lock for the files of a partition's view."""
        return self._locks.setdefault(partition, asyncio.Lock())

    @asynccontextmanager
    async def changing(self, partition: TopicPartition) -> AsyncIterator[None]:
        """Take the turn to change the files of a partition's view."""
        async with self.turn, self.files_of(partition):
            yield
