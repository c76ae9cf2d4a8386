"""List the records with a key below the first dirty offset, one row each.

A row is the key's fingerprint and the record's offset (passes/shards.py). Memory: one piece of
rows, or a batch and a read buffer where these have more.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.compile import Words
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.kernels.passes.shards import list_batches, list_unpacked

LISTED_ROWS: Final = 1 << 18  # per call of the consumer: 6 MiB

ConsumeRows: TypeAlias = Callable[[Words, int], None]
"""Consumes the first `count` rows, except free slots, before it returns."""


class Listing:
    """A BatchConsumer (segment_scan.py) of all records below the first dirty offset."""

    def __init__(self, context: CleanContext, take: ConsumeRows) -> None:
        self._context = context
        self._take = take
        self._rows: Words = np.empty(LISTED_ROWS * SLOT_WORDS, dtype=np.uint64)
        self._listed = 0

    def make_room(self, records: int) -> None:
        """See BatchConsumer."""
        if self._listed + records <= len(self._rows) // SLOT_WORDS:
            return
        self.flush()
        if records > len(self._rows) // SLOT_WORDS:
            self._rows = np.empty(records * SLOT_WORDS, dtype=np.uint64)

    def batches(self) -> tuple[int, int]:
        """See BatchConsumer."""
        reader = self._context.reader
        code, at, self._listed = list_batches(
            reader.buffer, reader.at, reader.end, self._rows, self._listed, self._context.space
        )
        return code, at

    def unpacked(self, count: int) -> int:
        """See BatchConsumer."""
        context, reader = self._context, self._context.reader
        code, self._listed = list_unpacked(
            context.unpacked, count, reader.buffer, reader.at, self._rows, self._listed,
            context.space,
        )  # fmt: skip
        return int(code)

    def flush(self) -> None:
        """Pass on the listed rows."""
        self._take(self._rows, self._listed)
        self._listed = 0
