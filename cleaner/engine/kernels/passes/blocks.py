"""List where the batches of a segment are, in blocks of neighbouring batches.

Rules
- A block is one batch, or neighbours that end when they have a minimum of bytes. So the blocks of
  small batches take little space, and it is worth a seek to skip one.
- A block has BLOCK_WORDS words: its position in the file, its first and last offset, and the number
  of its records, or UNSKIPPABLE if it has a batch without records: such a batch may stay for what
  its header says.
- Only batches that were checked are listed.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

from typing import Final

from cleaner.engine.kernels.codecs.memory import load_be32, load_be64
from cleaner.engine.kernels.compile import Bytes, Ints, kernel
from cleaner.engine.kernels.layout import (
    LAST_OFFSET_DELTA_POSITION,
    LENGTH_BYTES,
    LENGTH_POSITION,
    RECORD_COUNT_POSITION,
)

BLOCK_WORDS: Final = 4
UNSKIPPABLE: Final = -1


@kernel
def add_blocks(
    buf: Bytes, at: int, end: int, position: int, blocks: Ints, count: int, block_bytes_min: int
) -> int:
    """Add the batches of `buf[at:end]` to the first `count` blocks -> the number of blocks.

    `buf[at]` is at `position` of the file. Batches follow those of the last block, which may grow.
    `blocks` has room for `count + 1` blocks and one more for every `block_bytes_min` bytes.
    """
    while at < end:
        base = load_be64(buf, at)
        last = base + load_be32(buf, at + LAST_OFFSET_DELTA_POSITION)
        records = load_be32(buf, at + RECORD_COUNT_POSITION)
        to = (count - 1) * BLOCK_WORDS
        if count == 0 or position - blocks[to] >= block_bytes_min:
            count += 1
            to += BLOCK_WORDS
            blocks[to] = position
            blocks[to + 1] = base
            blocks[to + 3] = 0
        blocks[to + 2] = last
        if records == 0:
            blocks[to + 3] = UNSKIPPABLE
        elif blocks[to + 3] != UNSKIPPABLE:
            blocks[to + 3] += records
        size = load_be32(buf, at + LENGTH_POSITION) + LENGTH_BYTES
        at += size
        position += size
    return count
