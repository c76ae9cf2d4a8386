"""How long Python's collections of cyclic garbage pause the process.

A collection runs in the thread that triggers it and stops Python in all threads, so it blocks the
event loop whichever thread triggered it.
"""

import gc
from collections.abc import Callable, Mapping
from time import monotonic, perf_counter_ns, thread_time
from typing import Final

GENERATIONS = 3
LONG_SECONDS: Final = 0.005  # the time for which a task may block the loop
COLLECT_SECONDS: Final = 60.0
PUT_OFF_SECONDS: Final = 600.0
# Python collects the middle generation for each 7,700 new objects; 20,000 take 5 to 10 ms.
MIDDLE_COLLECTIONS: Final = 2
# Until everything is traversed again.
FROZEN_SECONDS: Final = 24 * 3600.0
MANY_FROZEN_SECONDS: Final = 3600.0  # after FREEZES_MAX
FREEZES_MAX: Final = 60


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
    it. A client may create 15,000 groups in a minute, which take 120 ms, so a collection is also
    due when many objects were created. Cyclic garbage that arises from frozen objects later stays
    until everything is traversed again: after an hour with many freezes, or a day.
    """

    def __init__(
        self,
        clock: Callable[[], float] = thread_time,
        monotonic: Callable[[], float] = monotonic,
    ) -> None:
        """`clock` measures collections; `monotonic` measures the time between them."""
        self._clock = clock
        self._monotonic = monotonic
        self._last = monotonic()
        self._first_freeze = 0.0
        self._freezes = 0

    def collect_if_due(self, *, is_large_request: bool) -> None:
        """Free cyclic garbage. With `is_large_request`, rows exist that will soon be gone.

        It is due after COLLECT_SECONDS, or if Python has collected the middle generation several
        times since: then many objects have grown old. A large request puts it off for some minutes.
        """
        now = self._monotonic()
        seconds = 0.0 if gc.get_count()[2] >= MIDDLE_COLLECTIONS else COLLECT_SECONDS
        if now - self._last < (PUT_OFF_SECONDS if is_large_request else seconds):
            return
        self._last = now
        began = self._clock()
        gc.collect()
        freezes = not is_large_request and self._clock() - began >= LONG_SECONDS
        seconds_max = FROZEN_SECONDS if self._freezes < FREEZES_MAX else MANY_FROZEN_SECONDS
        if self._freezes and now - self._first_freeze >= seconds_max:
            self._freezes = 0
            gc.unfreeze()  # the next collection traverses everything
        elif freezes:
            self._first_freeze = self._first_freeze if self._freezes else now
            self._freezes += 1
            gc.freeze()
