"""Counts how much work one turn of the event loop does, in lines of Python, not in seconds.

A turn is one callback of the loop: nobody else has the loop before it ends. Lines are counted by
the interpreter's trace hook, which also sees each round of a comprehension; so the same code gives
the same count on any machine. Code that takes turns by the clock (broker/event_loop/loop_turns.py)
gets a clock that advances with the lines.

The hook is a compiled function, because one in Python takes four times as long as the lines that it
counts.
"""

import ctypes
import gc
import sys
from asyncio.events import Handle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba.extending import intrinsic

from broker.event_loop import loop_turns

# Measured: 30-60 ns a line, CPython 3.11.
SECONDS_PER_LINE: Final = 50e-9
_TRACE_LINE: Final = 2  # PyTrace_LINE of CPython's pystate.h
_lines: Final = np.zeros(1, np.int64)  # of the measurement that runs; the hook knows its address


class LoopMeter:
    """Lines of the longest turn, and of all turns, in the last measurement."""

    def __init__(self, clock_rate: int = 1) -> None:
        """`clock_rate`: how much faster the clock goes than the lines take."""
        self._clock_rate = clock_rate
        self.lines = 0
        self.longest_turn = 0
        self._began = 0

    def seconds(self) -> float:
        """A clock that goes on with the lines."""
        return float(_lines[0]) * SECONDS_PER_LINE * self._clock_rate

    @contextmanager
    def measuring(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Count the lines of the loop in this thread during the block.

        Garbage is not collected meanwhile: finalizers of what other tests left would count.
        """
        self.longest_turn = self._began = _lines[0] = 0
        hook = ctypes.c_void_p(_hook().address)
        collects = gc.isenabled()
        run_handle = Handle._run

        def run_turn(handle: Handle) -> None:
            self._end_turn()
            run_handle(handle)

        with monkeypatch.context() as patched:
            patched.setattr(loop_turns, "perf_counter", self.seconds)
            patched.setattr(Handle, "_run", run_turn)
            before = sys.gettrace()
            gc.disable()
            ctypes.pythonapi.PyEval_SetTrace(hook, None)
            try:
                yield
            finally:
                sys.settrace(before)
                if collects:
                    gc.enable()
                self._end_turn()
                self.lines = int(_lines[0])

    def _end_turn(self) -> None:
        lines = int(_lines[0])
        self.longest_turn = max(self.longest_turn, lines - self._began)
        self._began = lines


@cache
def _hook() -> Any:
    """Compile the function that the interpreter calls for each line, a Py_tracefunc."""
    address = _lines.ctypes.data

    @intrinsic
    def count_line(_typing: object) -> Any:
        def generate(context: Any, builder: Any, _signature: object, _arguments: object) -> Any:
            word = ir.IntType(64)
            pointer = builder.inttoptr(ir.Constant(word, address), word.as_pointer())
            builder.store(builder.add(builder.load(pointer), ir.Constant(word, 1)), pointer)
            return context.get_dummy_value()

        return numba.types.void(), generate

    pointer = numba.types.voidptr

    @numba.cfunc(numba.types.int32(pointer, pointer, numba.types.int32, pointer))
    def hook(_object: Any, _frame: Any, event: Any, _argument: Any) -> int:
        if event == _TRACE_LINE:
            count_line()  # type: ignore[call-arg]
        return 0

    return hook
