"""Jars from Maven, and whatever else is fetched or built once, in `.kafka`."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".kafka"
FETCH_SECONDS = 600
# For JVMs that live for seconds: no time is spent on code that is fast in the long run.
QUICK_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def make_once(target: Path, make: Callable[[Path], str | None]) -> str | None:
    """Make a file or folder of `.kafka` if it is missing; other test processes wait for it.

    `make` gets a path to write to, and returns None, or why it could not.
    """
    if target.exists():
        return None
    target.parent.mkdir(exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return None
        draft = target.with_name(f"{target.name}.new")
        shutil.rmtree(draft, ignore_errors=True)
        reason = make(draft)
        if reason is None:
            draft.rename(target)
        return reason


@cache
def unavailable(
    pom: Path, folder: str, properties: tuple[str, ...] = (), *, unpacked: bool = False
) -> str | None:
    """Why the dependencies of a POM cannot be had, or None after they are in `.kafka`/`folder`.

    `properties` (NAME=VALUE) are those of the POM. `unpacked`: the POM names archives to unpack.
    """
    if shutil.which("java") is None:
        return "java is not installed"

    def fetch(draft: Path) -> str | None:
        if shutil.which("mvn") is None:
            return "Maven is not installed"
        goal = "unpack" if unpacked else "copy-dependencies"
        command = ["mvn", "-q", "-B", "-f", str(pom), f"dependency:{goal}"]
        command += [f"-DoutputDirectory={draft}", *(f"-D{value}" for value in properties)]
        options = " ".join((*QUICK_JVM, os.environ.get("MAVEN_OPTS", "")))
        quick = os.environ | {"MAVEN_OPTS": options.strip()}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=FETCH_SECONDS,
                check=False,
                env=quick,
            )
        except subprocess.TimeoutExpired:
            return f"Maven did not answer in {FETCH_SECONDS} s"
        if done.returncode != 0:
            return f"Maven could not fetch the jars of {pom.name}: {done.stdout[-300:]}"
        return None

    return make_once(FOLDER / folder, fetch)
