"""Progress bars on standard error, one for each stage; nothing if it is not a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

LABELS: Final = {  # stage -> label of its progress bar
    "whole": "compacting",
    "combine": "reading keys",
    "merge": "finding survivors",
    "rewrite": "rewriting",
    "index": "indexing",
    "histories": "tracking keys",
    "adopt": "checking",
}


class ProgressReporter(Protocol):
    """Receives the progress of a job."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that `done` of `total` tasks of a stage have finished."""

    def note(self, text: str) -> None:
        """Show a step that has no tasks; the next call replaces it."""


class SilentReporter:
    """Reports nothing."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See ProgressReporter."""

    def note(self, text: str) -> None:
        """See ProgressReporter."""


@contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[ProgressReporter]:
    """Show bars during the block if standard error is a terminal and `quiet` is not set."""
    if quiet or not sys.stderr.isatty():
        yield SilentReporter()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        yield _BarReporter(progress)


class _BarReporter:
    def __init__(self, progress: "object") -> None:
        from rich.progress import Progress, TaskID

        assert isinstance(progress, Progress)
        self._progress = progress
        self._bars: dict[str, TaskID] = {}
        self._note: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._end_note()
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(LABELS.get(stage, stage), total=total)
        self._progress.update(self._bars[stage], completed=done, total=total)

    def note(self, text: str) -> None:
        self._end_note()
        self._note = self._progress.add_task(text, total=None)

    def _end_note(self) -> None:
        if self._note is not None:
            self._progress.remove_task(self._note)
            self._note = None
