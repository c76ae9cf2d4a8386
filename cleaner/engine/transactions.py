"""What a clean knows of transactions: which were aborted, and whose batches it has met.

Memory: 33 bytes for each aborted transaction that overlaps the log, beside the job itself, and at
most 22 for each of the producers that ever had a batch behind their last markers at a time.
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
    """The arrays that kernels decide by, and what they noted in them."""

    def __init__(self, job: CleanJob) -> None:
        self._entries = sorted(job.aborted)  # by producer and first offset
        rows = [(entry.producer_id, entry.first_offset, entry.last_offset) for entry in job.aborted]
        self.aborted: Ints = np.array(sorted(rows), dtype=np.int64).reshape(-1)
        assert len(self.aborted) == len(rows) * ABORTED_WORDS
        self.kept: Bytes = np.zeros(len(rows), dtype=np.uint8)
        self.open_producers: Ints = np.zeros(_OPEN_AT_FIRST, dtype=np.int64)

    def forget_open(self, state: Ints) -> None:
        """No producer is known to have data behind its last marker."""
        self.open_producers.fill(0)
        state[fields.OPEN_COUNT] = 0

    def check_markers(self, read: Sequence[SourceSegment], end: int) -> None:
        """After the first pass: each entry that ends in what was `read` has its marker.

        `end`: nothing is said of entries that end there or later. Raises TransactionIndexError.
        """
        firsts = [source.base_offset for source in read]
        for row, entry in enumerate(self._entries):
            at = bisect_right(firsts, entry.last_offset) - 1
            seen = at >= 0 and entry.last_offset < min(read[at].next_base_offset, end)
            if seen and not self.kept[row]:
                raise TransactionIndexError(entry.producer_id, entry.last_offset)
        self.kept.fill(0)

    def kept_entries(self) -> list[TxnIndexEntry]:
        """The entries of the markers that were kept since `entries` was cleared, by marker."""
        entries = [self._entries[row] for row in np.flatnonzero(self.kept)]
        return sorted(entries, key=lambda entry: entry.last_offset)

    def widen(self, state: Ints) -> None:
        """Make room for more producers with batches behind their last markers."""
        producers = ~self.open_producers[self.open_producers != 0]
        self.open_producers = np.zeros(len(self.open_producers) * 2, dtype=np.int64)
        state[fields.OPEN_COUNT] = 0
        for producer in producers:
            added = add_producer(self.open_producers, state, int(producer))
            assert added
