"""The time that passes in a run, and a wall clock that is set forward and back meanwhile."""

from dataclasses import dataclass

from tests.support.storage.memory_env import FIRST_WALL_MS

STEADY_MS = 10_000  # clock_watch.CONFIRM_MS in runs
EARLIEST_MS = FIRST_WALL_MS // 2  # records have no times before 1970


@dataclass(frozen=True)
class ClockSet:
    """The wall clock was set by `by_ms`, and is `ahead_ms` ahead of the time that passes since."""

    passed_ms: int
    by_ms: int
    ahead_ms: int


class WallClock:
    """Of all lives of a broker."""

    def __init__(self) -> None:
        self.passed = 0.0  # ms
        self._sets = [ClockSet(0, 0, FIRST_WALL_MS)]

    @property
    def passed_ms(self) -> int:
        """The time since the run began, whatever the wall clock says."""
        return int(self.passed)

    @property
    def wall_ms(self) -> int:
        return self.passed_ms + self._sets[-1].ahead_ms

    def set(self, by_ms: int) -> None:
        """Set the wall clock forward or back."""
        if self.wall_ms + by_ms < EARLIEST_MS:
            by_ms = -by_ms
        self._sets.append(ClockSet(self.passed_ms, by_ms, self._sets[-1].ahead_ms + by_ms))

    def passed_ms_of(self, wall_ms: int) -> int:
        """When the wall clock showed a time last; before it was first set, if it never did."""
        passed_ms, end_ms = 0, self.passed_ms
        for clock_set in reversed(self._sets):
            passed_ms = wall_ms - clock_set.ahead_ms
            if clock_set.passed_ms <= passed_ms <= end_ms:
                break
            end_ms = clock_set.passed_ms
        return min(passed_ms, end_ms)

    def was_set_forward_since(self, passed_ms: int) -> bool:
        return any(each.by_ms > 0 and each.passed_ms >= passed_ms for each in self._sets)

    def may_age_since(self, passed_ms: int) -> bool:
        """Whether the clock was set forward since, and then trusted: what is younger may expire."""
        ends = [*(each.passed_ms for each in self._sets[1:]), self.passed_ms]
        return any(
            each.by_ms > 0 and each.passed_ms >= passed_ms and end_ms - each.passed_ms >= STEADY_MS
            for each, end_ms in zip(self._sets, ends, strict=True)
        )
