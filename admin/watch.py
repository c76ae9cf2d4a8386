"""The option --watch: repeat a command that shows state, and print what it shows each time.

- On a terminal each answer replaces the one before it, cut to the height of the terminal.
- Otherwise the answers follow each other: as text with the time above each, or with --json as one
  line for each answer. Nothing but the replacement on a terminal uses escape sequences.
- A command ends at Ctrl-C, after the answer that it waits for, with exit code 0, and at its first
  error, as without --watch.

A command shows its answer with `admin.command.show`, which asks `current_watch` how.
"""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from threading import Event
from typing import Any, Final, ParamSpec

import click

from admin.rangeless_option import RangelessOption

SECONDS: Final = 2.0
SECONDS_MIN: Final = 0.1  # so that a typing error does not keep the broker busy
CLEAR: Final = "\033[H\033[J"  # the cursor to the top left; erase from there
P = ParamSpec("P")

_WATCH: Final = "varve.watch"  # in the context of a command


@dataclass(frozen=True, slots=True)
class Watch:
    """A command that runs again and again."""

    name: str
    seconds: float

    def frame(self, lines: Sequence[str], *, now: datetime, height: int | None) -> str:
        """Return one answer as text. `height`: of the terminal; None if it is not a terminal."""
        at = f"{now:%Y-%m-%d %H:%M:%S}"
        if height is None:
            return "\n".join([f"{at}", *lines, ""])
        title = f"{self.name}, every {self.seconds:g} s, {at}; Ctrl-C ends it"
        room = max(1, height - 3)  # without the title, the line below it, and the last line
        if len(lines) > room:
            lines = [*lines[: room - 1], f"... and {len(lines) - room + 1} more lines"]
        return CLEAR + "\n".join([title, "", *lines])


def watched(function: Callable[P, None]) -> Callable[P, None]:
    """Add the option --watch to a command that shows state."""

    @click.option(
        "--watch",
        "every",
        cls=RangelessOption,
        type=click.FloatRange(min=SECONDS_MIN),
        is_flag=False,
        flag_value=SECONDS,
        metavar="[SECONDS]",
        help=f"Repeat the command every SECONDS (by default {SECONDS:g}), until Ctrl-C.",
    )
    @wraps(function)
    def run(*args: Any, every: float | None, **options: Any) -> None:
        if every is None:
            function(*args, **options)
            return
        context = click.get_current_context()
        context.meta[_WATCH] = Watch(context.command_path, every)
        with interrupts() as interrupted:
            function(*args, **options)
            while not wait(interrupted, every):
                function(*args, **options)

    return run  # type: ignore[return-value]


def wait(interrupted: Event, seconds: float) -> bool:
    """Wait until the next answer is due. Return whether Ctrl-C ended the wait."""
    return interrupted.wait(seconds)


@contextmanager
def interrupts() -> Iterator[Event]:
    """Yield an event that the first Ctrl-C sets; a second one interrupts as usual.

    An exception in the middle of a request would pass through C code of librdkafka, which makes
    another error of it.
    """
    interrupted = Event()

    def set_event(_number: int, _frame: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, set_event)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def current_watch() -> Watch | None:
    """Return how the current command repeats, if it does."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(_WATCH)


def terminal_height() -> int | None:
    """Return the lines of the terminal at standard output; None if it is not a terminal."""
    return shutil.get_terminal_size().lines if sys.stdout.isatty() else None
