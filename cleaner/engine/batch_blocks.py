"""List where the batches of a segment are, while it is read or written."""

import numpy as np

from cleaner.engine.kernels.compile import Bytes, Ints
from cleaner.engine.kernels.passes.blocks import BLOCK_WORDS, add_blocks

BLOCK_BYTES_MIN = 4096  # of neighbouring batches that are read or skipped together: a page


class BatchBlocks:
    """The blocks of one segment (kernels/passes/blocks.py); 32 bytes of memory for each."""

    def __init__(self) -> None:
        self._words: Ints = np.empty(BLOCK_WORDS, dtype=np.int64)
        self._count = 0

    @property
    def blocks(self) -> Ints:
        """Return the blocks as (blocks, BLOCK_WORDS)."""
        blocks: Ints = self._words.reshape(-1, BLOCK_WORDS)[: self._count]
        return blocks

    @property
    def memory_bytes(self) -> int:
        """Return the memory that the blocks take."""
        return self._words.nbytes

    def add(self, buffer: Bytes, begin: int, end: int, position: int) -> None:
        """Add the batches of `buffer[begin:end]`, which follow those added before.

        `buffer[begin]` is at `position` of the file. Of the last batch, the header suffices.
        """
        blocks_max = self._count + 1 + (end - begin) // BLOCK_BYTES_MIN
        if blocks_max * BLOCK_WORDS > len(self._words):
            larger = np.empty(2 * blocks_max * BLOCK_WORDS, dtype=np.int64)
            larger[: self._count * BLOCK_WORDS] = self._words[: self._count * BLOCK_WORDS]
            self._words = larger
        self._count = add_blocks(
            buffer, begin, end, position, self._words, self._count, BLOCK_BYTES_MIN
        )

    def clear(self) -> None:
        """Begin another segment."""
        self._count = 0
