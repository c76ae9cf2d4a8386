"""The deadlines of a group's members: of their sessions, or of something that they have to do.

Rules. One timer runs for all members, because thousands of members may get new deadlines in one
step of the event loop. Members whose deadlines pass in the same millisecond are reported together.
When a deadline moves to a later time, the timer stays: when it fires, it looks at all deadlines,
and most of them have moved.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Final
from weakref import WeakMethod

import structlog

from broker.groups.clock import Clock, Timer
from broker.logging import RateLimitedLogger

# Clients cause these lines: members that stop.
limited_logger: Final = RateLimitedLogger(structlog.get_logger("broker.groups"))

TIMER_MS: Final = 1.0  # the resolution of the event loop's timers
MEMBERS_PER_LINE: Final = 10  # ids in one log line; thousands of members may expire together


class MemberDeadlines:
    """Deadlines by member; `expired` is called with the members whose deadlines have passed."""

    __slots__ = ("_clock", "_ends_ms", "_expired", "_timer", "_timer_end_ms")

    def __init__(self, clock: Clock, expired: Callable[[tuple[str, ...]], None]) -> None:
        """`expired` is a method of the group, which it keeps in memory no longer than others do."""
        self._clock = clock
        self._expired = WeakMethod(expired)
        self._ends_ms: dict[str, float] = {}
        self._timer: Timer | None = None
        self._timer_end_ms = 0.0

    def __contains__(self, member_id: str) -> bool:
        """Return whether a member has a deadline."""
        return member_id in self._ends_ms

    def start(self, timeouts_ms: Mapping[str, int]) -> None:
        """Set the deadlines of members to these times from now."""
        if not timeouts_ms:
            return
        now_ms = self._clock.monotonic_ms()
        self._ends_ms.update({key: now_ms + value for key, value in timeouts_ms.items()})
        self._fire_at(now_ms + min(timeouts_ms.values()))

    def stop(self, member_ids: Iterable[str]) -> None:
        """Forget the deadlines of members."""
        for member_id in self._ends_ms.keys() & member_ids:
            del self._ends_ms[member_id]
        if not self._ends_ms:
            self.close()

    def close(self) -> None:
        """Forget all deadlines."""
        self._ends_ms.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire_at(self, end_ms: float) -> None:
        """Let the timer fire at this time, unless it already fires earlier."""
        if self._timer is not None:
            if self._timer_end_ms <= end_ms:
                return
            self._timer.cancel()
        delay_ms = max(0.0, end_ms - self._clock.monotonic_ms())
        self._timer_end_ms = end_ms
        self._timer = self._clock.call_later(delay_ms / 1000, self._fire)

    def _fire(self) -> None:
        self._timer = None
        latest_ms = self._clock.monotonic_ms() + TIMER_MS / 2
        due = tuple(key for key, end_ms in self._ends_ms.items() if end_ms <= latest_ms)
        self._ends_ms = {key: end_ms for key, end_ms in self._ends_ms.items() if end_ms > latest_ms}
        if self._ends_ms:
            self._fire_at(min(self._ends_ms.values()))
        expired = self._expired()
        if due and expired is not None:
            expired(due)


def log_expired(group_id: str, member_ids: Collection[str]) -> None:
    """Log that members were removed because a deadline had passed."""
    limited_logger.info(
        "members expired",
        subject=group_id,
        group=group_id,
        count=len(member_ids),
        members=list(islice(member_ids, MEMBERS_PER_LINE)),
    )
