"""Verify the batches of a segment, a part at a time: lengths, offsets and checksums.

Rules: this module changes nothing, so a part may be read in a thread; the owner of the log records
the damage. A part ends at its budget, at the end of the file, or at the first damage.
"""

from typing import NamedTuple

from storage.env import File
from storage.errors import CorruptBatchError
from storage.format.batch import BatchHeader
from storage.segments.batch_scan import ScannedBatch, scan, verify


class VerifiedPart(NamedTuple):
    """Bytes `[position, end_position)` of a log file that hold whole batches only."""

    position: int
    end_position: int
    next_offset: int  # after the last of these batches
    batches: int
    records: int
    damage: str  # why no batch can be read at `end_position`; empty if one may be


def verify_part(
    file: File, position: int, end: int, offsets: range, max_bytes: int
) -> VerifiedPart:
    """Verify the batches from `position` on, at least one and about `max_bytes`; see VerifiedPart.

    `offsets` are those that batches in `[position, end)` may have. Raises OSError.
    """
    begun, next_offset = position, offsets.start
    batches = records = 0
    damage = ""
    try:
        for batch in scan(file, position, end, whole=True):
            _check(batch, range(next_offset, offsets.stop), file.path)
            position, next_offset = batch.end_position, batch.header.next_offset
            batches += 1
            records += batch.header.record_count
            if position - begun >= max_bytes:
                break
    except CorruptBatchError as error:
        damage = error.reason
    return VerifiedPart(begun, position, next_offset, batches, records, damage)


def _check(batch: ScannedBatch, offsets: range, path: str) -> None:
    reason = why_misplaced(batch.header, offsets)
    if reason:
        raise CorruptBatchError(reason, batch.position, path)
    verify(batch, path)


def why_misplaced(header: BatchHeader, offsets: range) -> str:
    """Return why a batch cannot be where only `offsets` are allowed, or "".

    No checksum covers the offset of a batch.
    """
    if header.base_offset < offsets.start:
        return f"offset {header.base_offset} after {offsets.start - 1}"
    if header.last_offset >= offsets.stop:
        return f"offset {header.last_offset} in front of {offsets.stop}"
    return ""
