"""Writes and syncs of complete outputs, done by threads while the next group is worked on.

Rules
- Writes are done in the order in which they are ordered. An output is synced when all of its writes
  are done; writes of the next output go on meanwhile.
- What was ordered to be written belongs to the thread until its future is done.
- There are never more than SYNCS_MAX outputs to be synced: each has up to four files open.
- Nothing that failed goes unnoticed: `sync` and `wait` raise the first error there was.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from cleaner.engine.output import CleanedOutput
from cleaner.engine.output_files import OutputFile

SYNCS_MAX: Final = 32  # of small outputs; of large ones the held memory is the bound


class BackgroundWrites:
    """One thread that writes, and one that syncs."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "write")
        self._syncer = ThreadPoolExecutor(1, "sync")
        self._writes: list[Future[None]] = []  # of the output that is not ordered to be synced yet
        self._syncs: deque[Future[None]] = deque()

    def write(self, file: OutputFile, data: memoryview, position: int) -> None:
        """Order a write; `data` is not to be changed before it is done."""
        self._writes.append(self._writer.submit(file.pwrite, data, position))

    @property
    def latest_write(self) -> Future[None]:
        """What was ordered last, since the last sync."""
        return self._writes[-1]

    def sync(self, output: CleanedOutput, last_modified_ms: int) -> None:
        """Order that the output all these writes were for be synced and closed.

        Waits where too many are to be synced; raises OSError then.
        """
        while len(self._syncs) >= SYNCS_MAX:
            self._syncs[0].result()
            self._syncs.popleft()
        writes, self._writes = self._writes, []

        def sync() -> None:
            for write in writes:
                write.result()
            output.sync(last_modified_ms)

        self._syncs.append(self._syncer.submit(sync))

    def wait(self, check: Callable[[], None]) -> None:
        """Wait for all syncs; what `check` raises ends that. Raises OSError."""
        for sync in self._syncs:
            check()
            sync.result()
        self._syncs.clear()

    def close(self) -> None:
        """Begin nothing more, and let end what is under way."""
        self._writer.shutdown(cancel_futures=True)
        self._syncer.shutdown(cancel_futures=True)
