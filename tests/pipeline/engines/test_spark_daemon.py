"""The daemon has Spark clean what its settings say, by itself, and shows it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pipeline.conftest import BROKER_SETTINGS
from tests.pipeline.jobs.test_compact import made_topic, read_all
from tests.support.draws import only_in_ci
from tests.support.varve import ROOT, VarveBroker, running_varve
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
SECONDS = 240
API = "/api/v1/cleaner"


def with_spark(**spark: Any) -> dict[str, Any]:
    cleaner = {
        **BROKER_SETTINGS["cleaner"],  # type: ignore[dict-item]
        "engine": "spark",
        "spark": {"master": "local[2]", "min_bytes": 0, "memory_bytes": "512MiB", **spark},
    }
    return {**BROKER_SETTINGS, "cleaner": cleaner}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[VarveBroker]:
    with running_varve(tmp_path, with_spark()) as running:
        yield running


def run_now(broker: VarveBroker, topic: str, partitions: int = 2) -> None:
    """The log is no more dirty than it may be (see made_topic): an operator wants it cleaned."""
    for number in range(partitions):
        varve(broker, "run", topic, str(number), "--roll")


def varve(broker: VarveBroker, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "broker.cli", "cleaner", *arguments],
        cwd=ROOT,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "VARVE_HTTP": f"http://127.0.0.1:{broker.http_port}",
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def jobs(broker: VarveBroker, topic: str) -> list[dict[str, Any]]:
    document: list[dict[str, Any]] = json.loads(broker.get(f"{API}/history?topic={topic}"))["jobs"]
    return document


def spark(broker: VarveBroker) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(broker.get(API))["spark"]
    return document


@only_in_ci("tests/broker/cleaning/test_spark_offload.py has the rule")
def test_what_is_large_is_cleaned_on_spark_without_being_asked(
    broker: VarveBroker, topic: str
) -> None:
    last = made_topic(broker, topic)
    run_now(broker, topic)
    wait_until(lambda: spark(broker)["job"], "a job begins", SECONDS)
    assert f"spark (local[2]): {topic}-" in varve(broker, "status")
    assert "Spark (local[2])" in varve(broker, "explain", topic, "0")
    wait_until(lambda: len(jobs(broker, topic)) >= 2, "both are cleaned", SECONDS)
    wait_until(lambda: sorted(read_all(broker, topic)) == sorted(last.items()), "compact", SECONDS)
    assert {job["engine"] for job in jobs(broker, topic)} == {"spark"}
    assert {job["outcome"] for job in jobs(broker, topic)} == {"finished"}
    wait_until(lambda: spark(broker)["job"] is None, "the job ends", SECONDS)
    assert "spark (local[2]): idle" in varve(broker, "status")


def test_a_pause_ends_the_job_and_gives_its_lease_back(broker: VarveBroker, topic: str) -> None:
    made_topic(broker, topic)
    before = sorted(read_all(broker, topic))
    run_now(broker, topic)
    wait_until(lambda: spark(broker)["job"], "a job begins", SECONDS)
    varve(broker, "pause", topic)  # all partitions at once: no second job begins in between
    wait_until(lambda: spark(broker)["job"] is None, "it ends", SECONDS)
    assert {job["outcome"] for job in jobs(broker, topic)} == {"aborted"}
    assert sorted(read_all(broker, topic)) == before
    runs = json.loads(broker.get("/api/v1/remote-compactions"))["remote_compactions"]
    assert {run["state"] for run in runs} <= {"abandoned"}


def test_without_a_master_the_workers_clean_and_other_settings_bring_spark_back(
    tmp_path: Path, topic: str
) -> None:
    settings = with_spark(master="spark://127.0.0.1:1")
    with running_varve(tmp_path, settings) as broker:
        last = made_topic(broker, topic)
        run_now(broker, topic)
        wait_until(lambda: spark(broker)["unavailable"], "it is given up", SECONDS)
        assert "no Spark master answers" in varve(broker, "status")
        wait_until(
            lambda: sorted(read_all(broker, topic)) == sorted(last.items()), "compact", SECONDS
        )
        assert [job["engine"] for job in jobs(broker, topic) if job["outcome"] == "finished"] == [
            "",
            "",
        ]
        config = yaml.safe_load((tmp_path / "varve.yaml").read_text())
        config["cleaner"]["spark"]["master"] = "local[2]"
        (tmp_path / "varve.yaml").write_text(yaml.safe_dump(config))
        broker.process.send_signal(signal.SIGHUP)
        wait_until(lambda: spark(broker)["master"] == "local[2]", "it is read", SECONDS)
        assert spark(broker)["unavailable"] is None
