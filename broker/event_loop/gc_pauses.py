"""How long Python's collections of cyclic garbage pause the process.

A collection runs in the thread that triggers it and stops Python in all threads, so it blocks the
event loop whichever thread triggered it.
"""

import gc
from collections.abc import Callable, Mapping
from time import perf_counter_ns, thread_time
from typing import Final

GENERATIONS = 3
LONG_SECONDS: Final = 0.005  # the time for which a task may block the loop
# Until everything is traversed again: an hour and a day, with one full collection a minute.
FREEZES_MAX: Final = 60
COLLECTIONS_MAX: Final = 24 * 60


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


class FullCollections:
    """Collects all cyclic garbage, but traverses what lasts only once or twice.

    Topics, groups and sessions are thousands of objects that live for days: 3,000 topics hold up
    each collection for 77 ms. So what survives a long collection is frozen: the next ones pass over
    it. Cyclic garbage that arises from it later stays until all freezes are undone: after
    FREEZES_MAX of them, or COLLECTIONS_MAX collections.
    """

    def __init__(self, clock: Callable[[], float] = thread_time) -> None:
        self._clock = clock
        self._freezes = 0
        self._collections = 0  # since the first freeze

    def collect(self, *, may_freeze: bool) -> None:
        """Free cyclic garbage; `may_freeze`: nothing large exists that will soon be gone."""
        began = self._clock()
        gc.collect()
        freezes = may_freeze and self._clock() - began >= LONG_SECONDS
        self._collections += self._freezes > 0
        if self._collections > COLLECTIONS_MAX or (freezes and self._freezes == FREEZES_MAX):
            self._freezes = self._collections = 0
            gc.unfreeze()  # the next collection traverses everything
        elif freezes:
            self._freezes += 1
            gc.freeze()
