"""How far a job is, on standard error: a bar for each stage on a terminal, else nothing.

Results are standard output's; a log file or a pipe gets no bars.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

WORDS: Final = {  # stages, as people are told of them
    "whole": "compacting",
    "combine": "reading keys",
    "merge": "finding survivors",
    "rewrite": "rewriting",
    "survey": "surveying",
    "histories": "following keys",
    "adopt": "broker checks",
}


class ProgressReporter(Protocol):
    """What a job tells its progress to."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """So many of so many tasks of a stage are done."""

    def note(self, text: str) -> None:
        """What is going on before there are tasks; the next call ends it."""


class SilentReporter:
    """Tells nobody."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """See Told."""

    def note(self, text: str) -> None:
        """See Told."""


@contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[ProgressReporter]:
    """Bars for the length of a block, where standard error is a terminal."""
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
            self._bars[stage] = self._progress.add_task(WORDS.get(stage, stage), total=total)
        self._progress.update(self._bars[stage], completed=done, total=total)

    def note(self, text: str) -> None:
        self._end_note()
        self._note = self._progress.add_task(text, total=None)

    def _end_note(self) -> None:
        if self._note is not None:
            self._progress.remove_task(self._note)
            self._note = None
