"""Waiting for what another process does: a condition and a deadline, never a guess."""

import time
from collections.abc import Callable

POLL_SECONDS = 0.02


def wait_until(holds: Callable[[], object], subject: str, seconds: float = 30) -> None:
    """Return as soon as `holds()` is true; AssertionError with `subject` after the deadline."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {subject}"
        time.sleep(POLL_SECONDS)
