"""The exit codes of `varve` and of `varve pipeline`: one table for all commands.

docs/exit-codes.md shows it.
"""

from typing import Final

DONE: Final = 0
FAILED: Final = 1  # refused, failed, or not in time; the reason is on standard error
USAGE: Final = 2  # the command line makes no sense, or not for this topic
# The log changed, or the lease ended, before the work was published: nothing changed, try again.
STALE: Final = 3
UNVERIFIED: Final = 4  # the output, or the data that was checked, is not what it has to be
UNREACHABLE: Final = 5  # no broker answered
NO_SPARK: Final = 6  # no Spark session: no Java, or the master does not answer
INTERRUPTED: Final = 130  # Ctrl-C or SIGTERM, as a shell reports it

_OF_STATUS: Final = {400: USAGE, 404: STALE, 409: STALE, 410: STALE, 422: UNVERIFIED}


def of_status(status: int) -> int:
    """Return the code for a request to lease or publish that was refused with this HTTP status."""
    return _OF_STATUS.get(status, FAILED)
