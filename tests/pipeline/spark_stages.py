"""Stages for the tests of the Spark engine: they fail in all ways, or end their process."""

import os
import time
from pathlib import Path


def run_stage(name: str, payload: bytes) -> bytes:
    match name:
        case "echo":
            return payload
        case "where":
            return f"{os.getpid()} {os.getuid()}".encode()
        case "fail":
            raise ValueError(f'no: "{payload.decode()}"\nand a second line')
        case "large":
            return bytes(int(payload))
        case "die":
            os._exit(7)
        case "fail-once" | "die-once":
            path = Path(payload.decode())
            if not path.exists():
                path.touch()
                if name == "die-once":
                    os._exit(7)
                raise OSError("the first attempt")
            return b"second"
        case "meet":  # none ends before all have begun
            folder, count = payload.decode().rsplit(" ", 1)
            Path(folder, str(time.monotonic_ns())).touch()
            deadline = time.monotonic() + 30
            while len(os.listdir(folder)) < int(count):
                if time.monotonic() > deadline:
                    raise TimeoutError("the others never came")
                time.sleep(0.01)
            return b"met"
        case "unreadable":
            return b"" if not os.access(payload.decode(), os.R_OK | os.X_OK) else b"readable"
    raise AssertionError(name)
