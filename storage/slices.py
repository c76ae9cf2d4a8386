"""Work that comes in slices: a generator that pauses between them and returns the result.

The event loop runs such work in turns (`run_in_turns` in broker/event_loop/loop_turns.py). A caller
with little work, or in a thread, runs it at once.
"""

from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")


def run_at_once(slices: Generator[object, None, _T]) -> _T:
    """Run work that comes in slices, without pauses. Return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as stop:
            result: _T = stop.value
            return result
