"""Starts Spark's Python workers on this machine: pyspark's daemon without its final tracebacks.

The JVM closes the socket when a session stops or a worker was idle for a minute. A worker that
writes at that moment fails, and pyspark's daemon would print the traceback below the output of a
successful command. Errors while the JVM listens are reported to the JVM as usual.
"""

import sys
import traceback
from types import SimpleNamespace
from typing import TextIO

from pyspark import daemon

PEER_IS_GONE = (BrokenPipeError, ConnectionResetError, EOFError)


def _print_unless_gone(text: str, file: TextIO) -> None:
    """Print, unless the current exception is that the JVM closed the socket."""
    if not isinstance(sys.exception(), PEER_IS_GONE):
        file.write(f"{text}\n")


def _print_exc_unless_gone() -> None:
    _print_unless_gone(traceback.format_exc(), file=sys.stderr)


def silence_final_tracebacks() -> None:
    """Replace what pyspark's daemon prints with."""
    vars(daemon)["print"] = _print_unless_gone
    vars(daemon)["traceback"] = SimpleNamespace(
        print_exc=_print_exc_unless_gone, format_exc=traceback.format_exc
    )


def main() -> None:
    """Run the daemon until Spark closes its input."""
    silence_final_tracebacks()
    daemon.manager()


if __name__ == "__main__":
    main()
