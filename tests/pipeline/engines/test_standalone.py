"""The engine on a real cluster: a master and two workers, processes of their own on loopback."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.cluster import (
    EXECUTOR_SETTINGS,
    OTHER_USER,
    Cluster,
    can_blind,
)
from tests.pipeline.spark_driver import Driver, driving
from tests.support.draws import only_in_ci

pytestmark = [
    pytest.mark.spark,
    only_in_ci("test_spark_engine.py runs the same stages in one session"),
]


@pytest.fixture(scope="module")
def driver(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("driver")
    with driving(cluster.master, folder, EXECUTOR_SETTINGS) as running:
        yield running


def test_tasks_of_a_stage_run_on_both_workers_at_once(driver: Driver, tmp_path: Path) -> None:
    answer = driver.ask(stage="meet", tasks=[f"{tmp_path} 2"] * 2)
    assert answer["found"] == ["met", "met"]
    assert answer["parallelism"] == 2
    assert answer["reported"][-1] == 2


def test_a_reason_comes_back_from_an_executor(driver: Driver) -> None:
    assert (
        driver.run("fail", "no such thing") == 'ValueError: no: "no such thing"\nand a second line'
    )
    assert driver.errors == ""


def test_a_killed_executor_costs_an_attempt_and_not_the_stage(
    driver: Driver, cluster: Cluster, tmp_path: Path
) -> None:
    """Killed when both tasks run; the third lets them end when they are tried again."""
    began = tmp_path / "began"
    began.mkdir()

    def kill_when_they_run() -> None:
        for _ in range(600):
            if len(os.listdir(began)) >= 2:
                assert cluster.kill_executors() == 2
                return
            threading.Event().wait(0.05)

    killer = threading.Thread(target=kill_when_they_run)
    killer.start()
    try:
        assert driver.run("meet", f"{began} 4", f"{began} 4") == ["met", "met"]
    finally:
        killer.join()


@pytest.mark.skipif(not can_blind(), reason="needs root and setpriv")
def test_the_executors_cannot_read_what_others_own(driver: Driver, tmp_path: Path) -> None:
    """What the test without a shared disk rests on."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    assert driver.run("unreadable", str(folder)) == ["readable"]
    os.chown(folder, OTHER_USER, OTHER_USER)
    assert driver.run("unreadable", str(folder)) == [""]
    assert os.access(folder, os.R_OK | os.X_OK)  # by us it can be
