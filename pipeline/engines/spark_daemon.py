"""What starts Spark's Python workers on this machine: pyspark's daemon, without its last words.

When a session stops, or a worker was idle for a minute, the JVM closes the socket. A worker that
writes at that moment fails, and pyspark's daemon prints the stack of it, below the output of a
command that went well. Nobody is left to be told: what fails while the JVM listens goes to the JVM.
"""

import sys
import traceback
from types import SimpleNamespace

from pyspark import daemon

PEER_IS_GONE = (BrokenPipeError, ConnectionResetError, EOFError)


def print_unless_gone() -> None:
    """Print the stack of what is being handled, unless it is that the JVM has gone."""
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
