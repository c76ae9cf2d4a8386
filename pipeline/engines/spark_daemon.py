"""Starts Spark's Python workers on this machine: pyspark's daemon without its final tracebacks.

The JVM closes the socket when a session stops or a worker was idle for a minute. A worker that
writes at that moment fails, and pyspark's daemon would print the traceback below the output of a
successful command. Errors while the JVM listens are reported to the JVM as usual.
"""

import sys
import traceback
from types import SimpleNamespace

from pyspark import daemon

PEER_IS_GONE = (BrokenPipeError, ConnectionResetError, EOFError)


def print_unless_gone() -> None:
    """Print the traceback of the current exception, unless the JVM closed the socket."""
    if not isinstance(sys.exception(), PEER_IS_GONE):
        traceback.print_exc()


def main() -> None:
    """Run the daemon until Spark closes its input."""
    vars(daemon)["traceback"] = SimpleNamespace(
        print_exc=print_unless_gone, format_exc=traceback.format_exc
    )
    daemon.manager()


if __name__ == "__main__":
    main()
