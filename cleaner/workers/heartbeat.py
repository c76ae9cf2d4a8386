"""Heartbeats of worker processes: a worker increments a counter, and the broker checks it.

The worker does this in a separate thread, so a slow disk, a long fsync or a wait for its I/O budget
does not make it look dead. Only what stops the whole process does: SIGSTOP, a frozen cgroup, a
debugger. The broker counts checks without a heartbeat, not seconds: if the broker itself was
stopped or its loop was blocked, one long pause between two checks counts as one check.

`WorkerPool._watch` and `DedicatedWorker` check the heartbeat and kill the worker.
`JobDispatcher._check_stall` and `DedicatedWorker` check the progress of the job.
"""

import threading
from dataclasses import dataclass, field
from typing import Final

from cleaner.workers.throttle import Slots, beat

BEAT_SECONDS: Final = 0.5
CHECK_SECONDS: Final = 1.0
# Checks without a beat before the worker is killed. At the lowest priority beside busy processes a
# thread runs within a second or two, so twenty missed beats are no coincidence.
MISSED_MAX: Final = 20


@dataclass(slots=True)
class HeartbeatMonitor:
    """The broker's side: checks the beats of one worker."""

    missed_max: int = MISSED_MAX
    _last_beats: int = field(init=False, default=0)
    _missed: int = field(init=False, default=0)

    def is_lost(self, beats: int) -> bool:
        """Check the counter; return whether too many checks in a row found no beat.

        Before the first beat the process is starting, and no beat is expected.
        """
        if beats != self._last_beats:
            self._last_beats, self._missed = beats, 0
        elif beats:
            self._missed += 1
        return self._missed >= self.missed_max

    @property
    def reason(self) -> str:
        """Return why a lost worker is killed, for messages."""
        return f"hangs: no heartbeat in {self.missed_max} checks in a row"


class HeartbeatThread:
    """The worker's side: a thread that beats until `stop`."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the heartbeat thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; the page may be unmapped afterwards."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        beat(self._slots)
        while not self._stopped.wait(BEAT_SECONDS):
            beat(self._slots)
