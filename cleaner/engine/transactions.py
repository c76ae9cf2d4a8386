"""The transactions of a clean: which were aborted, and which producers have open ones.

Memory: 33 bytes for each aborted transaction that overlaps the log, beside the job itself, and at
most 22 for each producer with a transaction open at the same time.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Bytes, Ints
from cleaner.engine.kernels.layout import ABORTED_WORDS
from cleaner.engine.kernels.passes.producer_set import add_producer
from cleaner.job import CleanJob, SourceSegment
from storage.errors import TransactionIndexError
from storage.format.txn_index import TxnIndexEntry

_OPEN_AT_FIRST: Final = 64  # slots; a power of two


class Transactions:
    """The arrays about transactions that kernels read and update."""

    def __init__(self, job: CleanJob) -> None:
        self._entries = sorted(job.aborted)  # by producer and first offset
        rows = [(entry.producer_id, entry.first_offset, entry.last_offset) for entry in job.aborted]
        self.aborted: Ints = np.array(sorted(rows), dtype=np.int64).reshape(-1)
        assert len(self.aborted) == len(rows) * ABORTED_WORDS
        self.kept: Bytes = np.zeros(len(rows), dtype=np.uint8)
        self.open_producers: Ints = np.zeros(_OPEN_AT_FIRST, dtype=np.int64)

    def forget_open(self, state: Ints) -> None:
        """Clear the set of open transactions."""
        self.open_producers.fill(0)
        state[fields.OPEN_COUNT] = 0

    def check_markers(self, read: Sequence[SourceSegment], end: int) -> None:
        """Check after the first pass that each entry ending in the segments `read` has its marker.

        Entries that end at or after `end` are not checked. Raises TransactionIndexError.
        """
        firsts = [source.base_offset for source in read]
        for row, entry in enumerate(self._entries):
            at = bisect_right(firsts, entry.last_offset) - 1
            was_read = at >= 0 and entry.last_offset < min(read[at].next_base_offset, end)
            if was_read and not self.kept[row]:
                raise TransactionIndexError(entry.producer_id, entry.last_offset)
        self.kept.fill(0)

    def kept_entries(self) -> list[TxnIndexEntry]:
        """Return the entries of the kept markers, in marker order."""
        entries = [self._entries[row] for row in np.flatnonzero(self.kept)]
        return sorted(entries, key=lambda entry: entry.last_offset)

    def widen(self, state: Ints) -> None:
        """Double the capacity for open transactions."""
        producers = ~self.open_producers[self.open_producers != 0]
        self.open_producers = np.zeros(len(self.open_producers) * 2, dtype=np.int64)
        state[fields.OPEN_COUNT] = 0
        for producer in producers:
            added = add_producer(self.open_producers, state, int(producer))
            assert added
