"""Write and sync complete outputs in threads while the next group is cleaned.

Rules
- Writes run in the order of their submission. An output is synced after all of its writes, while
  the next output is written.
- The data of a write must not change until its future is done.
- At most SYNCS_MAX outputs wait for their sync: each has up to four open files.
- `sync` and `wait` raise the first error of any write or sync.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from cleaner.engine.output import CleanedOutput
from cleaner.engine.output_files import OutputFile

SYNCS_MAX: Final = 32  # for small outputs; buffer memory limits large ones


class BackgroundWrites:
    """One thread that writes, and one that syncs."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "write")
        self._syncer = ThreadPoolExecutor(1, "sync")
        self._writes: list[Future[None]] = []  # of the present output
        self._syncs: deque[Future[None]] = deque()

    def write(self, file: OutputFile, data: memoryview, position: int) -> None:
        """Submit a write; `data` must not change before it is done."""
        self._writes.append(self._writer.submit(file.pwrite, data, position))

    @property
    def latest_write(self) -> Future[None]:
        """Return the last write since the last sync."""
        return self._writes[-1]

    def sync(self, output: CleanedOutput, last_modified_ms: int) -> None:
        """Submit the sync and close of the output of all writes since the last call.

        Waits if too many syncs are pending. Raises OSError.
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
        """Wait for all syncs, calling `check` between them. Raises OSError, what `check` raises."""
        for sync in self._syncs:
            check()
            sync.result()
        self._syncs.clear()

    def close(self) -> None:
        """Cancel pending work and wait for running work."""
        self._writer.shutdown(cancel_futures=True)
        self._syncer.shutdown(cancel_futures=True)
