"""When a worker's CPU priority is raised: it lacks a core, and falls behind what it owes.

Workers start at the lowest priority: they then get the cores that nobody else wants, and a request
that comes in does not wait for them. On a machine whose cores are all wanted that can be next to
nothing. So every ADJUST_SECONDS each busy worker is looked at. It goes up one level if it was short
of a core and did less than its share of the floor though the budget let it, or if it cleans a
partition that is far beyond its deadline. It comes down one level when it did twice its share, and
all the way when its job is over.

A worker that is slow for another reason (a disk, a slow codec) stays where it is: priority would
take from clients and give it nothing.

`judge` is pure. To lower a nice value takes CAP_SYS_NICE or RLIMIT_NICE; where that is refused it
is told once and not tried again, and cleaning goes on at the lowest priority.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from cleaner.workers.throttle import Direction
from cleaner.workers.worker_pool import PoolWorker

ADJUST_SECONDS: Final = 2.0  # a few seconds, so that one long fsync is not a falling behind
LEVELS: Final = 3  # from the lowest priority to the broker's own
DEADLINE_LEVEL: Final = 2  # at once for a partition far beyond its deadline
DEADLINE_GRACE_MS: Final = 300_000  # a deadline is when a clean begins: it is always passed by some
SHORT_SHARE: Final = 0.25  # of the time it could have run: waiting for a core
WAITED_SHARE: Final = 0.1  # of the time: waiting for its budget; then it is not behind
EASY: Final = 2.0  # times its share: then less priority will do

logger = structlog.get_logger("cleaner")


class Pace(NamedTuple):
    """How one busy worker fared between two looks."""

    seconds: float
    moved_bytes: int  # read or written, whichever is more
    waited_seconds: float  # for its budgets
    short_seconds: float | None  # it could have run and had no core; None: not known here
    late: bool  # its partition is far beyond its deadline


def next_level(level: int, pace: Pace, share_bytes_per_second: float) -> int:
    """The level to go to, from the level it has; LEVELS is the broker's own priority."""
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
    """The nice value, relative to the broker's, of a level where `nice` is that of level 0."""
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
    """Levels of the busy workers; whoever gives them work calls `look` often."""

    nice: Callable[[], int]  # of workers at level 0
    levels: dict[int, int] = field(init=False, default_factory=dict)  # of workers; 0 is left out
    _seen: dict[int, _UsageSample] = field(init=False, default_factory=dict)
    _refused: bool = field(init=False, default=False)

    def adjust(self, now: float, busy: Iterable[tuple[PoolWorker, bool]], floor: float) -> None:
        """Judge who was busy for ADJUST_SECONDS. `busy`: workers, and whether each is far too late.

        `floor` is what all workers together should move, bytes per second each way.
        """
        workers = list(busy)
        for worker, late in workers:
            seen = self._seen.get(worker.index)
            if seen is None:
                self._seen[worker.index] = _observe(worker, now)
            elif now - seen.at >= ADJUST_SECONDS:
                current = _observe(worker, now)
                self._seen[worker.index] = current
                level = self.levels.get(worker.index, 0)
                self._set(
                    worker, next_level(level, _pace(seen, current, late), floor / len(workers))
                )

    def rest(self, worker: PoolWorker) -> None:
        """Its job is over: it goes back to the lowest priority."""
        self._seen.pop(worker.index, None)
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
                "priority of workers cannot be raised",
                reason=str(error),
                needed="CAP_SYS_NICE, or RLIMIT_NICE of 20 (LimitNICE=20, --ulimit nice=20)",
            )
            return
        self.levels[worker.index] = level
        if level == 0:
            del self.levels[worker.index]
        logger.debug("priority of a worker changed", worker=worker.index, level=level)


def _observe(worker: PoolWorker, now: float) -> _UsageSample:
    side = worker.side
    return _UsageSample(
        now,
        side.spent(Direction.READ),
        side.spent(Direction.WRITE),
        side.waited_seconds(Direction.READ) + side.waited_seconds(Direction.WRITE),
        worker.link.short_of_core_seconds(),
    )


def _pace(seen: _UsageSample, current: _UsageSample, late: bool) -> Pace:
    short: float | None = None
    if seen.short_seconds is not None and current.short_seconds is not None:
        short = current.short_seconds - seen.short_seconds
    return Pace(
        current.at - seen.at,
        max(current.read_bytes - seen.read_bytes, current.written_bytes - seen.written_bytes),
        current.waited_seconds - seen.waited_seconds,
        short,
        late,
    )
