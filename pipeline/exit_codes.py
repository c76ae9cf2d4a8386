"""What the exit codes of `varve pipeline` mean; one table for all of its commands."""

from typing import Final

DONE: Final = 0
FAILED: Final = 1  # the reason is on standard error
USAGE: Final = 2
STALE: Final = (
    3  # the log went on without the run, or its lease is over: nothing changed, try again
)
UNVERIFIED: Final = 4  # what was made, or looked at, is not what it should be
UNREACHABLE: Final = 5  # no broker answered
INTERRUPTED: Final = 130  # Ctrl-C, as a shell says it
