"""Whether a worker process still runs: it beats, and the broker counts the checks without a beat.

A worker beats from a thread of its own, so that a slow disk, a long fsync or a wait for its budget
does not make it look dead. What stops the whole process does: SIGSTOP, a frozen cgroup, a debugger.
Checks are counted, not seconds: after the broker itself was stopped, or its loop was held up, one
long pause between two checks is one check.

That the job makes progress is watched apart (Run.silent_seconds, SoloWorker).
"""

import threading
from dataclasses import dataclass, field
from typing import Final

from cleaner.workers.throttle import Slots, beat

BEAT_SECONDS: Final = 0.5
CHECK_SECONDS: Final = 1.0
# Checks without a beat before the worker is killed. At the lowest priority beside busy processes a
# thread gets its turn within a second or two; twenty are no accident.
MISSED_MAX: Final = 20


@dataclass(slots=True)
class Heartbeat:
    """The broker's side: the beats of one worker, as seen at each check."""

    missed_max: int = MISSED_MAX
    _seen: int = field(init=False, default=0)
    _missed: int = field(init=False, default=0)

    def is_lost(self, beats: int) -> bool:
        """Note a check that found the counter at `beats`; whether too many checks found no beat.

        Before the first beat nothing is expected: the process is being started.
        """
        if beats != self._seen:
            self._seen, self._missed = beats, 0
        elif beats:
            self._missed += 1
        return self._missed >= self.missed_max

    @property
    def reason(self) -> str:
        """What is wrong with a worker that is lost, for people."""
        return f"hangs: no heartbeat at {self.missed_max} checks in a row"


class Pulse:
    """The worker's side: a thread that beats until `stop`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """End; the page may be unmapped afterwards."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        beat(self._slots)
        while not self._stopped.wait(BEAT_SECONDS):
            beat(self._slots)
