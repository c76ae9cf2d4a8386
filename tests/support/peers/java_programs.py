"""JVMs that live for seconds: Kafka's programs, and those of tests/support/java."""

import hashlib
import subprocess
from pathlib import Path

from tests.support.peers.maven import FOLDER, QUICK_JVM, make_once

SOURCES = Path(__file__).parents[1] / "java"
COMPILE_SECONDS = 120


def quick_java(jars: Path, *options: str, classes: Path | None = None) -> list[str]:
    """Return a command line up to the main class, with the jars of a folder, and then `classes`.

    The classes of the jars come from an archive, if somebody made one: see kafka.py.
    """
    archive = class_archive(jars)
    if archive.exists():
        # The JVM ignores an archive that does not fit; silence its warning.
        quiet = ("-Xlog:disable", "-Xlog:all=error:stderr")
        options = (f"-XX:SharedArchiveFile={archive}", *quiet, *options)
    path = f"{jars}/*" if classes is None else f"{jars}/*:{classes}"
    return ["java", *QUICK_JVM, "-Xmx512m", *options, "-cp", path]


def class_archive(jars: Path) -> Path:
    return jars.with_suffix(".jsa")


def java_command(jars: Path, main: str, *arguments: str) -> list[str]:
    """Return the command line of a program, compiled once for its source and these jars."""
    source = SOURCES / f"{main}.java"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    classes = FOLDER / f"{main}-{jars.name}-{digest}"

    def compile_to(folder: Path) -> None:
        quick = [f"-J{option}" for option in QUICK_JVM]
        command = ["javac", *quick, "-cp", f"{jars}/*", "-d", str(folder), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)

    make_once(classes, compile_to)
    return [*quick_java(jars, classes=classes), main, *arguments]
