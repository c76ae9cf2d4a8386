"""The blocks of batches in a key index on disk: 16 bytes for each.

A block in memory has four words (kernels/passes/blocks.py). A packed one has two: its position and
its first offset, then its last offset and the number of its records, each in 32 bits. Offsets are
relative to the base of the segment, as in an offset index.
"""

from typing import Final

import numpy as np

from cleaner.engine.kernels.compile import Ints, Words
from cleaner.engine.kernels.passes.blocks import BLOCK_WORDS, UNSKIPPABLE

PACKED_BLOCK_WORDS: Final = 2
_UNSKIPPABLE: Final = (1 << 32) - 1


def pack_blocks(blocks: Ints, base_offset: int) -> Words:
    """Return the packed form of blocks of a segment with this base offset."""
    packed = np.empty((len(blocks), 2 * PACKED_BLOCK_WORDS), dtype="<u4")
    records = blocks[:, 3]
    packed[:, 0] = blocks[:, 0]
    packed[:, 1] = blocks[:, 1] - base_offset
    packed[:, 2] = blocks[:, 2] - base_offset
    packed[:, 3] = np.where(records == UNSKIPPABLE, _UNSKIPPABLE, records)
    return packed.reshape(-1).view(np.uint64)


def unpack_blocks(packed: Words, base_offset: int) -> Ints:
    """Return the blocks of a segment with this base offset, as (blocks, BLOCK_WORDS)."""
    blocks = packed.view("<u4").reshape(-1, BLOCK_WORDS).astype(np.int64)
    blocks[:, 1:3] += base_offset
    blocks[blocks[:, 3] == _UNSKIPPABLE, 3] = UNSKIPPABLE
    return blocks
