"""A wait for records: a fetch with too few of them sleeps until enough have been appended.

Rules
- `begin` comes before the partitions are read, so that nothing appended meanwhile is missed.
- An append counts its bytes; it wakes the waiting request only if all appends since `begin` have as
  many bytes as were missing. Otherwise a hundred consumers with a large fetch.min.bytes would read
  every partition again for each small batch. Appended bytes are an upper limit of what a request
  gains, so it never sleeps too long.
- Whatever else changes a partition wakes at once: a marker or a flush that makes records visible, a
  raised log start, a truncation, a move, the end of the partition.
- A request whose time is over is woken, too (`end`). If nothing changed since `begin`, what it has
  read is still true.
- A request that is woken queues for its turn if the loop is busy: an append may wake a thousand.
"""

from broker.event_loop.loop_turns import WakeUp


class DataWait:
    """The wait of one request, for any number of partitions."""

    __slots__ = ("_appended_bytes", "_is_changed", "_missing_bytes", "_wake_up", "is_over")

    def __init__(self) -> None:
        self.is_over = False  # the time of the request
        self._wake_up: WakeUp | None = None  # while it sleeps
        self._is_changed = False  # since `begin`, other than by an append
        self._appended_bytes = 0  # since `begin`
        self._missing_bytes = 0

    def begin(self) -> None:
        """Count from now on; nothing is known to be missing until `wait`."""
        self._is_changed = False
        self._appended_bytes = 0
        self._missing_bytes = 0

    def appended(self, size_bytes: int) -> None:
        """Note that a batch became visible in one of the partitions."""
        self._appended_bytes += size_bytes
        if 0 < self._missing_bytes <= self._appended_bytes:
            self._end_sleep()

    def wake(self) -> None:
        """End the wait even if bytes are missing: a partition changed."""
        self._is_changed = True
        self._end_sleep()

    def end(self) -> None:
        """End the wait for good: the time of the request is over."""
        self.is_over = True
        self._end_sleep()

    @property
    def is_unchanged(self) -> bool:
        """Return whether the partitions are as they were at `begin`."""
        return not (self._is_changed or self._appended_bytes)

    async def wait(self, missing_bytes: int) -> None:
        """Wait until so many bytes have been appended since `begin`, or until `wake`."""
        if self._appended_bytes >= missing_bytes or self._is_changed or self.is_over:
            return
        self._missing_bytes = missing_bytes
        self._wake_up = WakeUp()
        try:
            await self._wake_up
        finally:
            self._wake_up = None

    def _end_sleep(self) -> None:
        if self._wake_up is not None and not self._wake_up.done():
            self._wake_up.set_result(None)
