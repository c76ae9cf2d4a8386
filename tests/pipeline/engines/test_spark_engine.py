"""The engine on Spark does what an engine promises: order, retries, reasons, bounds."""

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.engines import spark_engine
from pipeline.engines.engine import StageFailedError
from pipeline.engines.spark_engine import RESULT_BYTES_MAX, TOGETHER_MAX, WAVES, SparkEngine, deal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
STAGES = "tests.pipeline.spark_stages"


@pytest.fixture
def engine(spark: "SparkSession") -> SparkEngine:
    return SparkEngine(spark, registry=STAGES)


def test_results_come_in_the_order_of_the_tasks(engine: SparkEngine) -> None:
    tasks = [b"%d" % (number * 7919 % 100) for number in range(40)]
    reported: list[int] = []
    assert engine.run("echo", tasks, progress=reported.append) == tasks
    assert reported == sorted(reported)
    assert reported[-1] == 40
    assert engine.run("echo", []) == []


def test_equal_and_empty_payloads_are_tasks_of_their_own(engine: SparkEngine) -> None:
    tasks = [b"", b"a", b"", b"a", b"\x00\xff"]
    assert engine.run("echo", tasks) == tasks


def test_tasks_run_at_the_same_time(engine: SparkEngine, tmp_path: Path) -> None:
    assert engine.parallelism == 2
    tasks = [f"{tmp_path} 2".encode()] * 2
    assert engine.run("meet", tasks) == [b"met", b"met"]


@pytest.mark.parametrize("stage", ["fail-once", "die-once"])
def test_a_task_that_fails_is_tried_again(engine: SparkEngine, tmp_path: Path, stage: str) -> None:
    tasks = [str(tmp_path / "a").encode(), str(tmp_path / "b").encode()]
    assert engine.run(stage, tasks) == [b"second", b"second"]


def test_a_failure_has_the_reason_of_the_task_and_no_stack(
    engine: SparkEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StageFailedError) as caught:
        engine.run("fail", ["ö \\ 1".encode()])
    assert caught.value.reason == 'ValueError: no: "ö \\ 1"\nand a second line'
    assert caught.value.stage == "fail"
    assert capfd.readouterr().err == ""


def test_a_process_that_ends_is_told_as_such(engine: SparkEngine) -> None:
    with pytest.raises(StageFailedError, match="Python worker exited unexpectedly") as caught:
        engine.run("die", [b""])
    assert "\n" not in caught.value.reason


def test_a_result_too_large_for_the_driver_fails_where_it_was_made(engine: SparkEngine) -> None:
    with pytest.raises(StageFailedError, match=f"over {RESULT_BYTES_MAX}"):
        engine.run("large", [b"%d" % (RESULT_BYTES_MAX + 1)])
    assert len(engine.run("large", [b"100000"])[0]) == 100_000


def test_executors_with_other_code_are_told_from_tasks_that_fail(
    engine: SparkEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_engine, "code_version", lambda: "0.0.9")
    with pytest.raises(StageFailedError, match=r"the executor has varve .*, the driver 0\.0\.9"):
        engine.run("echo", [b""])
    text = "...\n  ModuleNotFoundError: No module named 'pipeline'\n"
    assert "pip install" in (spark_engine._reason(RuntimeError(text)) or "")


def test_a_worker_freezes_once_what_a_stage_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyspark's daemon collects garbage after every Spark task."""
    steps: list[str] = []
    monkeypatch.setattr(spark_engine, "_stages_run", set())
    monkeypatch.setattr(gc, "collect", lambda: steps.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: steps.append("freeze"))
    for stage in ("echo", "echo", "where"):
        steps.append(stage)
        tasks = [(0, b"a"), (1, b"b")]
        result = list(spark_engine.run_tasks(stage, STAGES, spark_engine.UNKNOWN, tasks))
        assert [task for task, _ in result] == [0, 1]
    assert steps == ["echo", "collect", "freeze", "echo", "where", "collect", "freeze"]


@pytest.mark.parametrize("parallelism", [1, 2, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 300])
def test_tasks_are_dealt_evenly_and_few_of_them_together(count: int, parallelism: int) -> None:
    dealt = deal(count, parallelism)
    assert sorted(place for places in dealt for place in places) == list(range(count))
    sizes = {len(places) for places in dealt}
    assert max(sizes) <= TOGETHER_MAX
    assert max(sizes) - min(sizes) <= 1
    assert len(dealt) >= min(count, WAVES * parallelism)
    # The larger a task is the earlier it comes; none of Spark's begins with a small one.
    assert sorted(places[0] for places in dealt) == list(range(len(dealt)))
