"""How long Python's collections of cyclic garbage pause the process.

A collection runs in the thread that triggers it and stops Python in all threads, so it blocks the
event loop whichever thread triggered it.
"""

import gc
from collections.abc import Mapping
from time import perf_counter_ns

GENERATIONS = 3


class GcPauses:
    """The longest pause and the sum of all pauses, by generation."""

    def __init__(self) -> None:
        self.longest_ns = [0] * GENERATIONS
        self.total_ns = [0] * GENERATIONS
        self._began_ns = 0

    def start(self) -> None:
        """Start measuring."""
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        """Stop measuring."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began_ns = perf_counter_ns()
            return
        pause_ns, generation = perf_counter_ns() - self._began_ns, info["generation"]
        self.total_ns[generation] += pause_ns
        self.longest_ns[generation] = max(self.longest_ns[generation], pause_ns)
