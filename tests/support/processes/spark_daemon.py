"""Spark's workers, forked from a daemon that has imported what they need.

A worker takes 0.5 s of processor time to import Spark's and our modules, and as much to load the
kernels. The session that the tests share starts a hundred. Jobs that tests start as commands have
the workers of production.
"""

import gc
import importlib
import sys
from pathlib import Path
from typing import Final

from tests.support.processes import spark_streams

OF_JOBS: Final = "pipeline.engines.spark_daemon"
TASKS: Final = "pyspark.worker"  # the module that runs tasks; others plan queries


def write_launcher(path: Path, streams: Path) -> Path:
    """Write the program that starts this daemon where the launcher of jobs starts its own.

    `streams` is the socket of the server of spark_streams.py.
    """
    from pipeline.engines.spark_session import _PYTHON, in_quotes

    text = _PYTHON.format(python=in_quotes(sys.executable))
    head, daemon, rest = text.partition(OF_JOBS)
    assert daemon
    client = f'"{sys.executable}" -IS "{spark_streams.__file__}" "{streams}"'
    case = f'if [ "$2" = {spark_streams.MODULE} ]; then\n  exec {client}\nfi\n'
    last = rest.index("exec ")
    path.write_text(f"{head}{__name__}{rest[:last]}{case}{rest[last:]}")
    path.chmod(0o755)
    return path


def main() -> None:
    """Import the module that the arguments name, and ours, and run the daemon."""
    module = sys.argv[1]
    importlib.import_module(module)
    import pipeline.datasource.source  # noqa: F401
    from pipeline.engines import spark_daemon

    if module == TASKS:
        from pipeline.records.decode import warm_up

        warm_up()
    # A worker collects garbage after each task, which would visit all that is imported.
    gc.collect()
    gc.freeze()
    spark_daemon.main()


if __name__ == "__main__":
    main()
