"""A clock that a test sets."""


class ManualClock:
    """Seconds; call it for the time."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
