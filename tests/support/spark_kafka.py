"""Spark's own Kafka connector: jars from Maven, into `.kafka/spark` once.

`unavailable()` says why they cannot be had, and names them.
"""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POM = Path(__file__).with_name("spark-kafka-pom.xml")
LIB = ROOT / ".kafka" / "spark"
JARS = (
    "spark-sql-kafka-0-10_2.13-*.jar",
    "spark-token-provider-kafka-0-10_2.13-*.jar",
    "kafka-clients-*.jar",
    "commons-pool2-*.jar",
)


def jars() -> list[str]:
    """What `spark.jars` is to name, as far as it is there."""
    return [str(path) for pattern in JARS for path in sorted(LIB.glob(pattern))[:1]]


def _missing() -> list[str]:
    return [pattern for pattern in JARS if not any(LIB.glob(pattern))]


@cache
def unavailable() -> str | None:
    """Why the connector cannot be run here, or None after its jars are in place."""
    if not _missing():
        return None
    named = ", ".join(_missing())
    if shutil.which("mvn") is None:
        return f"Maven is not installed, and there is no {named}"
    staging = LIB.with_name(f"spark.{os.getpid()}")
    command = ["mvn", "-q", "-B", "-f", str(POM), "dependency:copy-dependencies"]
    command.append(f"-DoutputDirectory={staging}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        return f"Maven did not answer in 600 s, and there is no {named}"
    if done.returncode != 0:
        shutil.rmtree(staging, ignore_errors=True)
        return f"Maven could not fetch {named}: {done.stdout[-300:]}"
    if LIB.exists():
        shutil.rmtree(LIB)
    staging.rename(LIB)
    return None
