"""Counts how much work one turn of the event loop does, in lines of Python, not in seconds.

A turn is one callback of the loop: nobody else has the loop before it ends. Lines are counted by
`sys.settrace`, which also sees each round of a comprehension; so the same code gives the same
count on any machine. What takes turns by the clock (broker/loop_turns.py) is given one that goes on
with the lines.
"""

import gc
import sys
from asyncio.events import Handle
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final

import pytest

from broker import loop_turns

# Measured: 30-60 ns a line, CPython 3.11.
SECONDS_PER_LINE: Final = 50e-9
_TURN: Final[CodeType] = Handle._run.__code__


class LoopMeter:
    """Lines of the longest turn, and of all turns."""

    def __init__(self, clock_rate: int = 1) -> None:
        """`clock_rate`: how much faster the clock goes than the lines take."""
        self._clock_rate = clock_rate
        self.lines = 0
        self.longest_turn = 0
        self.turns = 0
        self._began = 0

    def seconds(self) -> float:
        """A clock that goes on with the lines."""
        return self.lines * SECONDS_PER_LINE * self._clock_rate

    @contextmanager
    def measuring(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Count the lines of the loop in this thread during the block.

        Garbage is not collected meanwhile: finalizers of what other tests left would count.
        """
        self.lines = self.longest_turn = self.turns = self._began = 0
        collects = gc.isenabled()
        with monkeypatch.context() as patched:
            patched.setattr(loop_turns, "perf_counter", self.seconds)
            before = sys.gettrace()
            gc.disable()
            sys.settrace(self._trace)
            try:
                yield
            finally:
                sys.settrace(before)
                if collects:
                    gc.enable()
                self._end_turn()

    def _end_turn(self) -> None:
        self.longest_turn = max(self.longest_turn, self.lines - self._began)
        self._began = self.lines
        self.turns += 1

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "call" and frame.f_code is _TURN:
            self._end_turn()
        elif event == "line":
            self.lines += 1
        return self._trace
