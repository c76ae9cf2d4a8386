"""Runs work that waits for nothing but its next turn."""

from collections.abc import Coroutine


def take_all_turns(work: Coroutine[object, object, object]) -> None:
    """Run a coroutine to its end, without a turn of other tasks in between."""
    while True:
        try:
            waits_for = work.send(None)
        except StopIteration:
            return
        assert waits_for is None, waits_for
