"""Raise a worker's CPU priority if it lacks a core and cleans too slowly.

Workers start at the lowest priority: they use idle cores and do not delay requests. On a busy
machine that can be almost nothing. So every ADJUST_SECONDS each busy worker is checked. Its level
rises by one if it waited for a core and moved less than its share of the floor although its budget
allowed more, or if its partition is far beyond its deadline. The level falls by one if the worker
moved twice its share, and to the lowest one at the end of its job.

A worker that is slow for another reason (a disk, a slow codec) keeps its level: a higher priority
would slow down clients without making it faster.

`next_level` is pure. Lowering a nice value needs CAP_SYS_NICE or RLIMIT_NICE. A refusal is logged
once and not tried again; cleaning continues at the lowest priority.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from cleaner.workers.throttle import Direction
from cleaner.workers.worker_pool import PoolWorker

ADJUST_SECONDS: Final = 2.0  # long enough that one fsync does not count as slowness
LEVELS: Final = 3  # from the lowest priority to the broker's own
DEADLINE_LEVEL: Final = 2  # the least level for a partition far beyond its deadline
# A clean starts at its deadline, so it always ends a little late.
DEADLINE_GRACE_MS: Final = 300_000
SHORT_SHARE: Final = 0.25  # of the time: waiting for a core
WAITED_SHARE: Final = 0.1  # of the time: waiting for its budget; then it is not slow
EASY: Final = 2.0  # times its share: then the level falls

logger = structlog.get_logger("cleaner")


class Pace(NamedTuple):
    """The speed of one busy worker between two checks."""

    seconds: float
    moved_bytes: int  # read or written, whichever is more
    waited_seconds: float  # for its budgets
    short_seconds: float | None  # of waiting for a core; None: unknown
    late: bool  # its partition is far beyond its deadline


def next_level(level: int, pace: Pace, share_bytes_per_second: float) -> int:
    """Return the worker's next level; LEVELS is the broker's own priority."""
    assert 0 <= level <= LEVELS
    assert pace.seconds > 0
    least = DEADLINE_LEVEL if pace.late else 0
    speed = pace.moved_bytes / pace.seconds
    if speed >= EASY * share_bytes_per_second:
        level -= 1
    elif (
        speed < share_bytes_per_second
        and pace.waited_seconds < WAITED_SHARE * pace.seconds
        and (pace.short_seconds is None or pace.short_seconds >= SHORT_SHARE * pace.seconds)
    ):
        level += 1
    return max(least, min(LEVELS, max(0, level)))


def nice_of(level: int, nice: int) -> int:
    """Return the nice value of a level, relative to the broker's; `nice` is that of level 0."""
    return nice * (LEVELS - level) // LEVELS


@dataclass(slots=True)
class _UsageSample:
    at: float
    read_bytes: int
    written_bytes: int
    waited_seconds: float
    short_seconds: float | None


@dataclass(slots=True)
class Priorities:
    """The levels of the busy workers; the dispatcher calls `adjust` often."""

    nice: Callable[[], int]  # of workers at level 0
    levels: dict[int, int] = field(
        init=False, default_factory=dict
    )  # by worker index; without level 0
    _samples: dict[int, _UsageSample] = field(init=False, default_factory=dict)
    _refused: bool = field(init=False, default=False)

    def adjust(self, now: float, busy: Iterable[tuple[PoolWorker, bool]], floor: float) -> None:
        """Adjust the levels of workers that were busy for ADJUST_SECONDS.

        `busy`: workers, and whether the partition of each is far too late. `floor`: the bytes per
        second that all workers together should move in each direction.
        """
        workers = list(busy)
        for worker, late in workers:
            earlier = self._samples.get(worker.index)
            if earlier is None:
                self._samples[worker.index] = _observe(worker, now)
            elif now - earlier.at >= ADJUST_SECONDS:
                current = _observe(worker, now)
                self._samples[worker.index] = current
                level = self.levels.get(worker.index, 0)
                self._set(
                    worker, next_level(level, _pace(earlier, current, late), floor / len(workers))
                )

    def rest(self, worker: PoolWorker) -> None:
        """Return the worker to the lowest priority after its job."""
        self._samples.pop(worker.index, None)
        self._set(worker, 0)

    def _set(self, worker: PoolWorker, level: int) -> None:
        before = self.levels.get(worker.index, 0)
        if level == before or (level > before and self._refused):
            return
        try:
            worker.link.set_nice(nice_of(level, self.nice()))
        except PermissionError as error:
            self._refused = True
            logger.warning(
                "worker priority not raised",
                reason=str(error),
                needed="CAP_SYS_NICE, or RLIMIT_NICE of 20 (LimitNICE=20, --ulimit nice=20)",
            )
            return
        self.levels[worker.index] = level
        if level == 0:
            del self.levels[worker.index]
        logger.debug("worker priority changed", worker=worker.index, level=level)


def _observe(worker: PoolWorker, now: float) -> _UsageSample:
    side = worker.side
    return _UsageSample(
        now,
        side.spent(Direction.READ),
        side.spent(Direction.WRITE),
        side.waited_seconds(Direction.READ) + side.waited_seconds(Direction.WRITE),
        worker.link.short_of_core_seconds(),
    )


def _pace(earlier: _UsageSample, current: _UsageSample, late: bool) -> Pace:
    short: float | None = None
    if earlier.short_seconds is not None and current.short_seconds is not None:
        short = current.short_seconds - earlier.short_seconds
    return Pace(
        current.at - earlier.at,
        max(current.read_bytes - earlier.read_bytes, current.written_bytes - earlier.written_bytes),
        current.waited_seconds - earlier.waited_seconds,
        short,
        late,
    )
