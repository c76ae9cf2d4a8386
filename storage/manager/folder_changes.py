"""Changes of partition folders in several data directories; a disk that hangs is given up.

Rules
- A change that was given up continues when its disk answers. Its result is not used; `undo` removes
  it.
- Until then its directory is `late` and gets no other change, which it could overwrite.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeVar

from storage.directory.cluster_metadata import RunEach
from storage.errors import DirectoryStalledError, StorageError

_Result = TypeVar("_Result")


class FolderChanges:
    """Runs changes of folders in the threads of their directories."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: set[str] = set()

    @property
    def late(self) -> frozenset[str]:
        """Return the data directories in which a change that was given up has not ended."""
        with self._lock:
            return frozenset(self._late)

    def run(
        self,
        changes: Mapping[str, Callable[[], _Result]],
        answering: Collection[str],
        run_each: RunEach,
        undo: Callable[[str, _Result], None] | None = None,
    ) -> dict[str, _Result | StorageError]:
        """Run a change in each data directory; return its result or why it has none.

        `answering`: all directories whose disk should answer. One hangs compared to another; its
        result is a DirectoryStalledError, as that of a late directory, in which nothing runs.
        """
        late = self.late
        begun = {path: change for path, change in changes.items() if path not in late}
        results: dict[str, _Result | StorageError] = {}
        given_up: set[str] = set()

        def run_one(path: str, change: Callable[[], _Result]) -> None:
            result: _Result | StorageError
            try:
                result = change()
            except StorageError as error:
                result = error
            with self._lock:
                if path not in given_up:
                    results[path] = result
                    return
            try:
                if undo is not None and not isinstance(result, StorageError):
                    undo(path, result)
            finally:
                with self._lock:
                    self._late.discard(path)

        calls: dict[str, Callable[[], None]] = dict.fromkeys(answering, _answer)
        calls |= {path: partial(run_one, path, change) for path, change in begun.items()}
        hanging = run_each(calls)
        with self._lock:
            given_up |= hanging & begun.keys() - results.keys()
            self._late |= given_up
        return {path: results.get(path, DirectoryStalledError(path)) for path in changes}


def _answer() -> None:
    """Do nothing."""
