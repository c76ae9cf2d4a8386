"""A driver in a process of its own: one session, a stage for each line of its input.

A process has one SparkContext, and that of the tests is a local one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 30


def environment() -> dict[str, str]:
    """Of a process that finds the tests as well, and hands that on to its workers."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


class Driver:
    """The tests' side."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path) -> None:
        self._process = process
        self._errors = errors

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def ask(self, **question: Any) -> Any:
        """One question, one answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self.errors[-3000:]
        return json.loads(line)

    def run(self, stage: str, *tasks: str) -> Any:
        """The results of a stage as texts, or the reason for which it failed."""
        return self.ask(stage=stage, tasks=tasks)["found"]


@contextmanager
def driving(master: str, folder: Path, settings: Mapping[str, str]) -> Iterator[Driver]:
    """A session with that master for the length of a block."""
    folder.mkdir(parents=True, exist_ok=True)
    errors = folder / "driver.log"
    with errors.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.spark_driver", master, json.dumps({**settings})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=environment(),
        )
    with process:
        try:
            yield Driver(process, errors)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def main(master: str, settings: str) -> None:
    from pipeline.engines.engine import StageFailedError
    from pipeline.engines.spark_engine import SparkEngine
    from pipeline.engines.spark_session import build_session, stop_session

    spark = build_session(master, memory="512m", settings=json.loads(settings))
    engine = SparkEngine(spark, registry="tests.pipeline.spark_stages")
    for line in sys.stdin:
        question = json.loads(line)
        reported: list[int] = []
        result: Any
        try:
            tasks = [task.encode() for task in question["tasks"]]
            result = [
                result.decode()
                for result in engine.run(question["stage"], tasks, progress=reported.append)
            ]
        except StageFailedError as error:
            result = error.reason
        answer = {"parallelism": engine.parallelism, "found": result, "reported": reported}
        print(json.dumps(answer), flush=True)
    stop_session(spark)


if __name__ == "__main__":
    main(*sys.argv[1:])
