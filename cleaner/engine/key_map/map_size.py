"""The size of a key map, and the shards of keys that exceed it. Pure: loads no kernels."""

from typing import Final

from cleaner.job import CleanJob

SLOT_BYTES: Final = 24
SLOTS_MAX: Final = (1 << 32) - 1  # the first slot of a key is computed from 32 bits
SLOTS_MIN: Final = 2  # one key, and a free slot that ends probes
SHARDS_MAX: Final = 1 << 12
_RECORD_BYTES_MIN: Final = 7  # seven fields of one byte each


def slots_for(limit_bytes: int, keys_max: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Return how many slots fit into `limit_bytes`, at most those that `keys_max` keys need."""
    needed = keys_max * 10 // 9 + 2
    return max(SLOTS_MIN, min(limit_bytes // slot_bytes, needed, SLOTS_MAX))


def may_not_fit(job: CleanJob) -> bool:
    """Return whether the job indexes keys by offset and may have more than its map holds."""
    if job.expired_only or job.order is not None:
        return False
    section = job.end_offset - job.first_dirty_offset
    return section > map_keys(job, section)


def map_keys(job: CleanJob, section: int) -> int:
    """Return how many of `section` keys the job's map holds."""
    return slots_for(job.dedupe_buffer_bytes, section) * 9 // 10


def shards_for(job: CleanJob) -> int:
    """Return `shards_of` for the records that the dirty section may have."""
    section = job.end_offset - job.first_dirty_offset
    size_bytes = sum(
        source.size_bytes
        for group in job.groups
        for source in group
        if source.next_base_offset > job.first_dirty_offset
    )
    return shards_of(min(section, size_bytes // _RECORD_BYTES_MIN), job)


def shards_of(records: int, job: CleanJob) -> int:
    """Return a number of shards with which one fits into the map if keys are spread evenly."""
    keys = map_keys(job, records)
    return 1 if records <= keys else min(SHARDS_MAX, -(-records * 5 // (4 * keys)))
