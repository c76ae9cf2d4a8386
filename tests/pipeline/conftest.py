"""One Spark session and one broker for all tests of the pipeline.

A test that uses `spark` has the mark `spark`. It does not stop the session, and restores settings.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.cluster import Cluster, can_blind, running_cluster
from tests.pipeline.secured_broker import Secured, running_secured
from tests.support.draws import cases
from tests.support.peers.maven import QUICK_JVM
from tests.support.processes.forked_worker import ForkedStages
from tests.support.processes.spark_processes import process_server, write_launcher
from tests.support.varve import VarveBroker, running_varve

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Small and predictable: no adaptive plans. For a few records, compiling a plan costs more than
# interpreting it: CI alone compiles.
INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
SPARK_SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    **cases(few=INTERPRETED, many={}),
}
BROKER_SETTINGS = {
    "cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 200},
    "retention_check_interval_ms": 500,
}


SPARK_TEST_SECONDS = 300  # a first query on two busy cores takes a minute


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on Spark have more time, unless they say how much."""
    for item in items:
        if item.get_closest_marker("spark") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SPARK_TEST_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def quick_jvms() -> None:
    """Start each driver without the compiler and the garbage collector that pay only in long runs.

    A driver of a short command then takes 11 s of processor time instead of 21 s.
    """
    os.environ.setdefault("SPARK_SUBMIT_OPTS", " ".join(QUICK_JVM))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """The session that all tests share: two tasks at a time, each tried twice."""
    from pipeline.engines import spark_session
    from pipeline.engines.java import NoJavaError

    folder = tmp_path_factory.mktemp("spark")
    server = folder / "processes"
    launcher = write_launcher(folder / "python", server)
    with process_server(server):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(spark_session, "_python_launcher", lambda _: launcher)
            try:
                session = spark_session.build_session(
                    "local[2,2]", app_name="varve-tests", settings=SPARK_SETTINGS
                )
            except NoJavaError as error:
                pytest.skip(str(error))
        yield session
        spark_session.stop_session(session)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers; where this user can take that right, executors cannot read others' files."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), blind=can_blind()) as running:
        yield running


@pytest.fixture
def shared_session(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands that run in this process use the session of all tests."""
    from pipeline.command import SparkOptions

    @contextmanager
    def open_session(*_: object) -> Iterator["SparkSession"]:
        yield spark

    monkeypatch.setattr(SparkOptions, "open_session", open_session)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    """A real daemon; every test uses topics of its own."""
    directory: Path = tmp_path_factory.mktemp("varve")
    with running_varve(directory, BROKER_SETTINGS) as running:
        yield running


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A daemon that demands TLS, users and https."""
    with running_secured(tmp_path_factory.mktemp("secured"), BROKER_SETTINGS) as running:
        yield running


@pytest.fixture
def forked_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the local engine's workers from this process; test_engines.py starts them for real."""
    from cleaner.engine.kernels import warm_up

    warm_up()
    monkeypatch.setattr("pipeline.engines.stage_process._start", ForkedStages)


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}"
