"""Stages for tests of engines: they fail, end their process, or wait."""

import json
import os
import signal
from pathlib import Path

from pipeline.transport import SCRATCH_VARIABLE


def run_stage(name: str, task: bytes) -> bytes:
    """A registry: see pipeline.stages."""
    match name:
        case "echo":
            return task[::-1]
        case "pid":
            return str(os.getpid()).encode()
        case "fail":
            raise ValueError(f"no good: {os.fsdecode(task)}")
        case "fail once":
            if _first_time(task):
                raise ValueError("the first time")
            return b"done"
        case "die once":
            if _first_time(task):
                os.kill(os.getpid(), signal.SIGKILL)
            return b"done"
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave and die":
            Path(os.environ[SCRATCH_VARIABLE], "left").write_bytes(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":  # until the file is there; its path and one to make are in the task
            paths = json.loads(task)
            Path(paths["started"]).write_text(str(os.getpid()))
            signal.pause()
    raise KeyError(name)


def _first_time(task: bytes) -> bool:
    try:
        os.close(os.open(task.decode(), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
