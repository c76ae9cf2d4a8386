"""Users who may send no request over HTTP until their quota is met again.

On the Kafka port, a broker that throttles a client reads nothing from its connection for a time
(KIP-219). HTTP requests come on any number of connections, so the user is muted instead.
"""

from collections.abc import Callable
from typing import Final

MUTED_MAX: Final = 10_000  # users at a time; 100 bytes each


class ThrottledError(Exception):
    """The user exceeded a limit, and may try again in `seconds`."""

    def __init__(self, seconds: float, reason: str = "a quota is exceeded") -> None:
        super().__init__(f"{reason}: try again in {seconds:.1f} s")
        self.seconds = seconds


class MutedHttpUsers:
    """Until when which user is muted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._until: dict[str, float] = {}

    def mute(self, user: str, seconds: float) -> None:
        """Mute a user from now on; an earlier, longer time stays."""
        if len(self._until) >= MUTED_MAX and user not in self._until:
            now = self._clock()
            self._until = {name: until for name, until in self._until.items() if until > now}
            if len(self._until) >= MUTED_MAX:
                del self._until[next(iter(self._until))]  # the one that was muted first
        self._until[user] = max(self._until.get(user, 0.0), self._clock() + seconds)

    def check(self, user: str) -> None:
        """Raise ThrottledError if the user is muted."""
        until = self._until.get(user)
        if until is None:
            return
        seconds = until - self._clock()
        if seconds > 0:
            raise ThrottledError(seconds)
        del self._until[user]
