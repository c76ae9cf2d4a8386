"""How a partition is cut into tasks; pure.

Rules
- A partition whose keys fit one worker is one task: nothing is exchanged, and the task is the
  broker's own clean. There are no more keys than offsets in the section whose keys are indexed; how
  many fewer is not known before they were read. Where the keys are likely to fit it is tried, and
  the partition is cut up after all if they do not.
- Else its segments are read in stretches of about TASK_BYTES, its keys are merged in shards, and
  its groups are rewritten in stretches of about TASK_BYTES.
- A task's job names only the segments that it reads: descriptors of all tasks together are then as
  long as the partition's job, and not as its square.
- The result does not depend on any of this.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from cleaner.engine.offset_map import SLOT_BYTES
from cleaner.job import CleanJob, SourceSegment

TASK_BYTES: Final = 512 << 20  # a second or two of work: it hides what starting a task costs
TASK_MEMORY_BYTES: Final = 1 << 30
SHARDS_MAX: Final = 256
# One try is worth it where a key has so many records on average, at least: a failed one has cost
# the reading of less than this part of the section.
RECORDS_PER_KEY_HOPED: Final = 8
_SLOTS_PER_KEY: Final = 10 / 9  # what the map leaves free

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one task may take, and how many run at the same time."""

    memory_bytes: int = TASK_MEMORY_BYTES
    task_bytes: int = TASK_BYTES
    parallelism: int = 1
    shards: int | None = None  # of every partition, which is then never one task


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition that is cut up. Places are those of groups in the job."""

    combines: tuple[tuple[int, ...], ...]  # base offsets of segments, by task
    rewrites: tuple[tuple[int, ...], ...]  # places of groups, by task
    shards: int


def keys_bound(job: CleanJob, first_offset: int) -> int:
    """No more keys can be met from `first_offset` on than this."""
    return sum(
        source.next_base_offset - max(source.base_offset, first_offset)
        for source in source_segments(job)
        if source.next_base_offset > first_offset
    )


def source_segments(job: CleanJob) -> list[SourceSegment]:
    """All segments of a job, in order."""
    return [source for group in job.groups for source in group]


def source_bytes(job: CleanJob) -> int:
    """Of all its segments."""
    return sum(source.size_bytes for source in source_segments(job))


def over_segments(job: CleanJob, bases: Collection[int]) -> CleanJob:
    """The job of a task that reads only the segments with these base offsets."""
    requested = set(bases)
    groups = (
        tuple(source for source in group if source.base_offset in requested) for group in job.groups
    )
    return replace(job, groups=tuple(group for group in groups if group))


def over_groups(job: CleanJob, places: Iterable[int]) -> CleanJob:
    """The job of a task that reads only the groups at these places."""
    return replace(job, groups=tuple(job.groups[place] for place in places))


def is_one_task(job: CleanJob, limits: Limits, *, first_offset: int | None = None) -> bool:
    """Whether the partition is to be tried as a whole.

    `first_offset`: where the keys are indexed from; None: from where the job says.
    """
    if job.expired_only or job.latest_only:
        return True
    if limits.shards is not None:
        return False
    first = job.first_dirty_offset if first_offset is None else first_offset
    likely = keys_bound(job, first) / RECORDS_PER_KEY_HOPED
    return likely * SLOT_BYTES * _SLOTS_PER_KEY <= limits.memory_bytes


def cut_up(job: CleanJob, limits: Limits, *, first_offset: int | None = None) -> Cut:
    """Cut a partition into tasks."""
    sources = source_segments(job)
    sized_segments = [(source.base_offset, source.size_bytes) for source in sources]
    sized_groups = [
        (place, sum(source.size_bytes for source in group))
        for place, group in enumerate(job.groups)
    ]
    first = job.first_dirty_offset if first_offset is None else first_offset
    return Cut(
        combines=stretches(sized_segments, limits.task_bytes),
        rewrites=stretches(sized_groups, limits.task_bytes),
        shards=shards_for(keys_bound(job, first), len(sources), limits),
    )


def shards_for(keys: int, segments: int, limits: Limits) -> int:
    """Into how many shards at most `keys` are cut: as memory wants, and as all workers can help.

    Half of a task's memory is for its table. A shard that is still too large takes several rounds.
    """
    if limits.shards is not None:
        return limits.shards
    bytes_likely = keys / RECORDS_PER_KEY_HOPED * SLOT_BYTES * _SLOTS_PER_KEY * 2
    by_memory = int(-(-bytes_likely // limits.memory_bytes))
    by_workers = min(limits.parallelism, segments)
    return max(1, min(SHARDS_MAX, max(by_memory, by_workers)))


def stretches(sized: Iterable[tuple[T, int]], wanted_bytes: int) -> tuple[tuple[T, ...], ...]:
    """Neighbours together until they have `wanted_bytes`: at least one each."""
    tses: list[tuple[T, ...]] = []
    together: list[T] = []
    size = 0
    for t, size_bytes in sized:
        if together and size + size_bytes > wanted_bytes:
            tses.append(tuple(together))
            together, size = [], 0
        together.append(t)
        size += size_bytes
    if together:
        tses.append(tuple(together))
    return tuple(tses)


def largest_first(sizes: Sequence[int]) -> list[int]:
    """The places of tasks in the order in which to start them, so that the last one is short."""
    return sorted(range(len(sizes)), key=lambda place: (-sizes[place], place))
