"""kill -9 in the midst of `varve pipeline compact` on a cluster: to an executor, the driver, the
broker. The log holds what it held, or the same compacted; staging is swept; the next run succeeds.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from admin.client import ApiClient
from config import exit_codes
from tests.pipeline.cluster import Cluster
from tests.pipeline.conftest import BROKER_SETTINGS
from tests.pipeline.jobs.test_compact import CLUSTER_SECONDS, ROOT, made_topic, on_cluster, read_all
from tests.support.draws import only_in_ci
from tests.support.ports import free_port
from tests.support.varve import VarveBroker, start_varve
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(CLUSTER_SECONDS),
    only_in_ci("tests/crash/test_kill_leases.py kills the broker at every moment of a local run"),
]
COMPACTIONS = "/api/v1/remote-compactions"
SECONDS = 240
# In many small tasks: a stage takes long enough to be met in its midst.
CUT = ("--task-memory", "1KiB", "--task-size", "1")
Rows = list[tuple[bytes, bytes]]


class Scene:
    """A broker that can be killed and comes back to the same addresses, with one topic."""

    def __init__(self, folder: Path, topic: str) -> None:
        self._folder = folder
        self.topic = topic
        self._port, self._http_port = free_port(), free_port()
        self.start()
        self.latest = made_topic(self.broker, topic)
        self.before = self.read()

    def start(self) -> None:
        self.broker: VarveBroker = start_varve(
            self._folder, BROKER_SETTINGS, port=self._port, http_port=self._http_port
        )

    def read(self) -> Rows:
        return sorted(read_all(self.broker, self.topic))

    def compact(self, *options: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", "-m", "pipeline", "compact", self.topic, *options]
        return subprocess.Popen(
            [*command, "--http", f"127.0.0.1:{self._http_port}", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    def staged(self, pattern: str) -> list[Path]:
        """Files of runs, by the end of their paths below the folder of a run."""
        while True:
            try:
                return list(self.broker.data.glob(f"{self.topic}-*/varve.leases/*/{pattern}"))
            except FileNotFoundError:
                continue  # the broker removed a folder while it was listed

    def wait_for(self, process: "subprocess.Popen[str]", pattern: str) -> None:
        """Until something is staged; the run is still under way."""

        def is_there() -> bool:
            assert process.poll() is None, process.communicate()
            return bool(self.staged(pattern))

        wait_until(is_there, f"{pattern} of a run", SECONDS)

    def assert_swept(self) -> None:
        """Nothing is left of any run, and nothing else lies in the topic's folders."""
        wait_until(lambda: not self.staged("**/*"), "staging is swept", SECONDS)
        remaining = [str(path) for path in self.broker.data.glob(f"{self.topic}-*/*.cleaned")]
        assert remaining == []

    def assert_compacts(self) -> None:
        """Another run succeeds, in local processes, which start faster than Spark."""
        process = self.compact("--engine", "local", "--processes", "1")
        output, errors = process.communicate(timeout=SECONDS)
        assert (process.returncode, errors) == (exit_codes.DONE, ""), output
        assert self.read() == sorted(self.latest.items())
        self.assert_swept()

    def let_expire(self) -> None:
        """Runs whose driver is gone end when their leases do: have that be soon."""
        client = ApiClient(f"http://127.0.0.1:{self._http_port}").below(COMPACTIONS)
        for run in json.loads(self.broker.get(COMPACTIONS))["remote_compactions"]:
            if run["state"] == "open":
                client.post(f"/{run['compaction_id']}/renew", {"ttl_seconds": 1})


@pytest.fixture
def scene(tmp_path: Path, topic: str) -> Iterator[Scene]:
    made = Scene(tmp_path, topic)
    try:
        yield made
        assert made.broker.stop() == 0, made.broker.log_text[-3000:]
    finally:
        if made.broker.process.poll() is None:
            made.broker.kill()


def end_of(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code, and what it said of it: one line, or nothing. Spark tells of lost executors."""
    _, output = process.communicate(timeout=SECONDS)
    errors = [line for line in output.splitlines() if not line.startswith("spark: ")]
    assert len(errors) == (process.returncode != exit_codes.DONE), output
    return process.returncode, "".join(errors)


def test_executors_that_are_killed_are_replaced(scene: Scene, cluster: Cluster) -> None:
    process = scene.compact(*on_cluster(cluster), *CUT)
    scene.wait_for(process, "out/*/*")
    killed: list[int] = []
    wait_until(lambda: killed.append(cluster.kill_executors()) or killed[-1], "one runs", SECONDS)
    assert end_of(process) == (exit_codes.DONE, "")
    assert scene.read() == sorted(scene.latest.items())
    scene.assert_swept()


def test_nothing_comes_of_a_run_whose_driver_is_killed(scene: Scene, cluster: Cluster) -> None:
    process = scene.compact(*on_cluster(cluster), *CUT)
    scene.wait_for(process, "out/*/*.cleaned")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    assert scene.read() == scene.before
    scene.let_expire()
    scene.assert_swept()
    assert scene.read() == scene.before
    scene.assert_compacts()


def test_a_broker_that_is_killed_takes_the_run_up_again_or_has_swept_it(
    scene: Scene, cluster: Cluster
) -> None:
    process = scene.compact(*on_cluster(cluster), *CUT)
    scene.wait_for(process, "manifest")
    scene.broker.kill()
    scene.start()
    code, errors = end_of(process)
    assert code in (exit_codes.DONE, exit_codes.STALE), errors
    if code == exit_codes.DONE:
        assert scene.read() == sorted(scene.latest.items())
    else:
        # One partition may have been published before the other had its turn.
        assert set(scene.latest.items()) <= set(scene.read()) <= set(scene.before)
    scene.let_expire()
    scene.assert_swept()
    scene.assert_compacts()


def test_broker_and_driver_killed_together_leave_the_log_as_it_was(
    scene: Scene, cluster: Cluster
) -> None:
    process = scene.compact(*on_cluster(cluster), *CUT)
    scene.wait_for(process, "out/*/*.cleaned")
    kills: list[Callable[[], object]] = [
        lambda: os.killpg(process.pid, signal.SIGKILL),
        scene.broker.kill,
        cluster.kill_executors,
    ]
    for kill in kills:
        kill()
    process.communicate(timeout=SECONDS)
    scene.start()
    assert scene.read() == scene.before
    scene.let_expire()
    scene.assert_swept()
    scene.assert_compacts()
