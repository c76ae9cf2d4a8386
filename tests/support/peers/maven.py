"""Jars from Maven, fetched into `.kafka` once."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".kafka"
FETCH_SECONDS = 600


@cache
def unavailable(
    pom: Path, folder: str, properties: tuple[str, ...] = (), *, unpacked: bool = False
) -> str | None:
    """Why the dependencies of a POM cannot be had, or None after they are in `.kafka`/`folder`.

    `properties` (NAME=VALUE) are those of the POM. `unpacked`: the POM names archives to unpack.
    """
    target = FOLDER / folder
    if shutil.which("java") is None:
        return "java is not installed"
    if any(target.glob("*.jar")):
        return None
    if shutil.which("mvn") is None:
        return "Maven is not installed"
    staging = target.with_name(f"{folder}.{os.getpid()}")
    goal = "unpack" if unpacked else "copy-dependencies"
    command = ["mvn", "-q", "-B", "-f", str(pom), f"dependency:{goal}"]
    command += [f"-DoutputDirectory={staging}", *(f"-D{value}" for value in properties)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"Maven did not answer in {FETCH_SECONDS} s"
    if done.returncode != 0:
        shutil.rmtree(staging, ignore_errors=True)
        return f"Maven could not fetch the jars of {pom.name}: {done.stdout[-300:]}"
    try:
        staging.rename(target)
    except OSError:  # another test process was first
        shutil.rmtree(staging)
    return None
