"""Find the parts of a segment that a rewriting pass has to read.

Rules
- A block of batches (kernels/passes/blocks.py) without a live record is not read, except if a batch
  of it may stay for its header: it has no records, it has the last sequence of a producer, or it is
  the end of the log.
- The blocks come from the key index, whose writer verified every batch.
"""

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.compile import Ints
from cleaner.engine.kernels.passes.blocks import UNSKIPPABLE
from cleaner.engine.two_pass.rewrite_pass import LiveParts
from cleaner.job import CleanJob, SourceSegment


def live_parts(context: CleanContext, source: SourceSegment, blocks: Ints) -> LiveParts | None:
    """Return the parts to read, or None for the whole segment.

    `blocks` has a row for each block. Raises CleanAbortedError, OSError.
    """
    if len(blocks) == 0:
        return None
    firsts, lasts = blocks[:, 1].copy(), blocks[:, 2].copy()
    is_read = (blocks[:, 3] == UNSKIPPABLE) | context.have_survivors(firsts, lasts)
    for offset in _offsets_that_stay(context.job, source):
        place = int(np.searchsorted(lasts, offset))
        if place < len(lasts):
            is_read[place] = True
    ends = np.append(blocks[1:, 0], source.size_bytes)
    if is_read.all():
        return None
    edges = np.flatnonzero(np.diff(is_read, prepend=False, append=False))
    begins, lasts_read = edges[::2], edges[1::2] - 1
    return LiveParts(
        ranges=tuple(zip(blocks[begins, 0].tolist(), ends[lasts_read].tolist(), strict=True)),
        skipped_records=int(blocks[~is_read, 3].sum()),
        skipped_blocks=int(np.count_nonzero(~is_read)),
    )


def _offsets_that_stay(job: CleanJob, source: SourceSegment) -> list[int]:
    """Return the offsets in a segment whose batches may stay without a live record."""
    offsets = [last_offset for _, _, last_offset in job.last_records]
    if job.log_end_offset_is_end:
        offsets.append(job.end_offset - 1)
    return [offset for offset in offsets if source.base_offset <= offset < source.next_base_offset]
