"""Cuts a partition into tasks; pure.

Rules
- A partition whose keys fit one worker is one task, the broker's own clean. The number of keys is
  at most the number of offsets in the indexed section, and unknown before reading. If the keys are
  likely to fit, the task is tried; if they do not, the partition is cut up after all.
- Otherwise adjacent segments are read up to about TASK_BYTES together, keys are merged in shards,
  and groups are rewritten up to about TASK_BYTES together.
- A task's job names only the segments that it reads, so the total size of all descriptors is linear
  in the size of the partition's job.
- The result does not depend on the cut.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cleaner.engine.key_map.map_size import SLOT_BYTES
from cleaner.job import CleanJob, SourceSegment
from cleaner.planning.grouping import group_adjacent

TASK_BYTES: Final = 512 << 20  # a second or two of work, which outweighs the start of a task
TASK_MEMORY_BYTES: Final = 1 << 30
SHARDS_MAX: Final = 256
# Assumed records per key. A failed try has read at most this fraction (1/8) of the section.
RECORDS_PER_KEY_EXPECTED: Final = 8
_SLOTS_PER_KEY: Final = 10 / 9  # the load limit of the map


@dataclass(frozen=True, slots=True)
class Limits:
    """The memory and bytes of one task, and the number of concurrent tasks."""

    memory_bytes: int = TASK_MEMORY_BYTES
    task_bytes: int = TASK_BYTES
    parallelism: int = 1
    shards: int | None = None  # forces this many shards; for tests and benchmarks


@dataclass(frozen=True, slots=True)
class Cut:
    """The tasks of a partition that is cut up."""

    combines: tuple[tuple[int, ...], ...]  # base offsets of segments, by task
    rewrites: tuple[tuple[int, ...], ...]  # indexes of groups, by task
    shards: int


def keys_bound(job: CleanJob, first_offset: int) -> int:
    """Return an upper bound of the number of keys from `first_offset` on."""
    return sum(
        source.next_base_offset - max(source.base_offset, first_offset)
        for source in source_segments(job)
        if source.next_base_offset > first_offset
    )


def source_segments(job: CleanJob) -> list[SourceSegment]:
    """Return all segments of a job, in order."""
    return [source for group in job.groups for source in group]


def source_bytes(job: CleanJob) -> int:
    """Return the size of all segments of a job."""
    return sum(source.size_bytes for source in source_segments(job))


def over_segments(job: CleanJob, bases: Collection[int]) -> CleanJob:
    """Return the job restricted to the segments with these base offsets."""
    requested = set(bases)
    groups = (
        tuple(source for source in group if source.base_offset in requested) for group in job.groups
    )
    return replace(job, groups=tuple(group for group in groups if group))


def over_groups(job: CleanJob, places: Iterable[int]) -> CleanJob:
    """Return the job restricted to the groups at these indexes."""
    return replace(job, groups=tuple(job.groups[place] for place in places))


def is_one_task(job: CleanJob, limits: Limits, *, first_offset: int | None = None) -> bool:
    """Return whether to try the partition as a single task.

    `first_offset` is where indexing starts; None: the first dirty offset.
    """
    if job.expired_only or job.view is not None:
        return True
    if limits.shards is not None:
        return False
    first = job.first_dirty_offset if first_offset is None else first_offset
    likely = keys_bound(job, first) / RECORDS_PER_KEY_EXPECTED
    return likely * SLOT_BYTES * _SLOTS_PER_KEY <= limits.memory_bytes


def cut_up(job: CleanJob, limits: Limits, *, first_offset: int | None = None) -> Cut:
    """Return the tasks of a partition."""
    sources = source_segments(job)
    sized_segments = [(source.base_offset, source.size_bytes) for source in sources]
    sized_groups = [
        (place, sum(source.size_bytes for source in group))
        for place, group in enumerate(job.groups)
    ]
    first = job.first_dirty_offset if first_offset is None else first_offset
    return Cut(
        combines=group_adjacent(sized_segments, limits.task_bytes),
        rewrites=group_adjacent(sized_groups, limits.task_bytes),
        shards=shards_for(keys_bound(job, first), len(sources), limits),
    )


def shards_for(keys: int, segments: int, limits: Limits) -> int:
    """Return the number of shards, from the memory limit and the number of workers.

    Half of a task's memory is for its table. A shard that is too large takes several rounds.
    """
    if limits.shards is not None:
        return limits.shards
    bytes_likely = keys / RECORDS_PER_KEY_EXPECTED * SLOT_BYTES * _SLOTS_PER_KEY * 2
    by_memory = int(-(-bytes_likely // limits.memory_bytes))
    by_workers = min(limits.parallelism, segments)
    return max(1, min(SHARDS_MAX, max(by_memory, by_workers)))


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Return task indexes by descending size, so that the last task to start is short."""
    return sorted(range(len(sizes)), key=lambda place: (-sizes[place], place))
