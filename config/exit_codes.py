"""The exit codes of all `varve` commands, including `varve pipeline`.

docs/reference/exit-codes.md lists them for users.
"""

from typing import Final

DONE: Final = 0
FAILED: Final = 1  # refused, failed, or not finished in time; the reason is on standard error
USAGE: Final = 2  # the command line is invalid, or this topic does not allow the request
# The log changed or the lease ended before the work was published. Nothing was changed; try again.
STALE: Final = 3
UNVERIFIED: Final = 4  # the output, or the data that was checked, is wrong or incomplete
UNREACHABLE: Final = 5  # no broker answered
NO_SPARK: Final = 6  # Spark could not start: Java is missing, or the master does not answer
INTERRUPTED: Final = 130  # Ctrl-C or SIGTERM, as a shell reports it

_OF_STATUS: Final = {400: USAGE, 404: STALE, 409: STALE, 410: STALE, 422: UNVERIFIED}


def of_status(status: int) -> int:
    """Return the exit code for a lease or publish request refused with this HTTP status."""
    return _OF_STATUS.get(status, FAILED)
