"""Remove a damaged range from a closed segment, so that readers continue at the next whole batch.

Rules
- The segment is copied without the range under another name and synced; a swap replaces the segment
  with the copy (storage/swap/swap_journal.py). The change is atomic and durable, and it applies
  to readers, the cleaner and Apache Kafka alike.
- The removed bytes are kept in a file in the same folder, which nothing reads. The job id makes its
  name unique: after an earlier skip, the same range of positions may be damaged again.
- Offsets do not change: the offsets of the range become a gap, as after compaction.
"""

from typing import Final, NamedTuple

from crc32c import crc32c

from storage.env import Env, File
from storage.format import filenames
from storage.segments.damage import DamagedSegment
from storage.swap.swap_journal import CleanedFile, CleanedSegment

COPY_BYTES: Final = 1 << 20  # of one read and write


class SkipPlan(NamedTuple):
    """The bytes to remove from a segment. Paths are relative to the partition's folder."""

    directory: str
    base_offset: int
    size_bytes: int
    damage: DamagedSegment
    job_id: str
    other_files: tuple[str, ...]  # copied unchanged: the transaction index

    @property
    def kept_as(self) -> str:
        """Return the name of the file that keeps the damaged bytes."""
        damage = self.damage
        log = filenames.file_name(self.base_offset, filenames.LOG)
        cut = f"{damage.position}-{damage.end_position}"
        return f"{log}.{cut}.{self.job_id}{filenames.DAMAGED_BYTES}"


def write_without_damage(env: Env, plan: SkipPlan) -> CleanedSegment | None:
    """Write the copy and the file with the damaged bytes; sync both, but not their names.

    Return None if nothing is left of the segment. Call it in a thread. Raises OSError.
    """
    log = filenames.file_name(plan.base_offset, filenames.LOG)
    source = env.open(f"{plan.directory}/{log}")
    try:
        damage = (plan.damage.position, plan.damage.end_position)
        _copy(env, source, [damage], f"{plan.directory}/{plan.kept_as}")
        pieces = [(0, damage[0]), (damage[1], plan.size_bytes)]
        if all(begin == end for begin, end in pieces):
            return None
        files = [_cleaned(env, plan, filenames.LOG, source, pieces)]
    finally:
        source.close()
    for name in plan.other_files:
        other = env.open(f"{plan.directory}/{name}")
        try:
            whole = [(0, other.size())]
            parsed = filenames.parse_file_name(name)
            assert parsed is not None
            files.append(_cleaned(env, plan, parsed.kind, other, whole))
        finally:
            other.close()
    return CleanedSegment(plan.base_offset, plan.job_id, tuple(files))


def _cleaned(
    env: Env, plan: SkipPlan, kind: str, source: File, pieces: list[tuple[int, int]]
) -> CleanedFile:
    name = filenames.cleaned_name(plan.base_offset, kind, plan.job_id)
    size_bytes, crc = _copy(env, source, pieces, f"{plan.directory}/{name}")
    return CleanedFile(name, size_bytes, crc)


def _copy(env: Env, source: File, pieces: list[tuple[int, int]], path: str) -> tuple[int, int]:
    """Copy ranges of a file to a new file and sync it; return its size and CRC-32C."""
    target = env.open(path, create=True, write=True, truncate=True)
    try:
        size_bytes = crc = 0
        for begin, end in pieces:
            for position in range(begin, end, COPY_BYTES):
                data = source.pread(min(COPY_BYTES, end - position), position)
                target.pwrite(data, size_bytes)
                crc = crc32c(data, crc)
                size_bytes += len(data)
        target.sync()
    finally:
        target.close()
    return size_bytes, crc
