"""What the exit codes of `varve pipeline` mean; one table for all of its commands."""

from typing import Final

DONE: Final = 0
FAILED: Final = 1  # the reason is on standard error
USAGE: Final = 2
# The log went on without the run, or its lease is over: nothing has changed, try again.
STALE: Final = 3
UNVERIFIED: Final = 4  # what was made, or looked at, is not what it should be
UNREACHABLE: Final = 5  # no broker answered
NO_SPARK: Final = 6  # no session: no Java, or a master that does not answer
INTERRUPTED: Final = 130  # Ctrl-C, as a shell says it

_OF_STATUS: Final = {400: USAGE, 404: STALE, 409: STALE, 410: STALE, 422: UNVERIFIED}


def of_status(status: int) -> int:
    """The code of what the broker refused with this status of HTTP."""
    return _OF_STATUS.get(status, FAILED)
