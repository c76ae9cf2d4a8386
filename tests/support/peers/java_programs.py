"""Programs of tests/support/java, run with jars from Maven."""

import subprocess
from pathlib import Path

from tests.support.peers.kafka import QUICK_JVM

FOLDER = Path(__file__).parents[1] / "java"
COMPILE_SECONDS = 120


def java_command(jars: Path, classes: Path, main: str, *arguments: str) -> list[str]:
    """Compile a program once per folder of jars, into `classes`; return its command line."""
    target = classes / f"{main}-{jars.name}"
    if not target.exists():
        staging = classes / f"{main}-{jars.name}.new"
        command = ["javac", "-cp", f"{jars}/*", "-d", str(staging), str(FOLDER / f"{main}.java")]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
        staging.rename(target)
    return ["java", *QUICK_JVM, "-Xmx256m", "-cp", f"{target}:{jars}/*", main, *arguments]
