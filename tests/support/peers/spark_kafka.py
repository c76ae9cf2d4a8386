"""Spark's own Kafka connector: jars from Maven, fetched once."""

from pathlib import Path

from tests.support.peers import maven

POM = Path(__file__).with_name("spark-kafka-pom.xml")
LIB = maven.FOLDER / "spark"


def jars() -> list[str]:
    """What `spark.jars` is to name."""
    return [str(path) for path in sorted(LIB.glob("*.jar"))]


def unavailable() -> str | None:
    """Why the connector cannot be run here, or None after its jars are in place."""
    return maven.unavailable(POM, LIB.name)
