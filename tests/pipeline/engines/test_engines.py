"""The local engine: tasks on processes that may fail or end at any time."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.engines import stage_process
from pipeline.engines.engine import LocalEngine, StageFailedError
from pipeline.transport import SCRATCH_VARIABLE
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
REGISTRY = "tests.pipeline.odd_stages"


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(2, registry=REGISTRY) as made:
        yield made


def test_results_come_in_the_order_of_the_tasks(engine: LocalEngine) -> None:
    reported: list[int] = []
    tasks = [f"task {n}".encode() for n in range(20)]
    assert engine.run("echo", tasks, progress=reported.append) == [task[::-1] for task in tasks]
    assert reported == list(range(1, 21))


def test_no_tasks_are_no_work(engine: LocalEngine) -> None:
    assert engine.run("echo", []) == []


def test_processes_are_kept_from_stage_to_stage(engine: LocalEngine) -> None:
    first = set(engine.run("pid", [b""] * 8))
    assert 1 <= len(first) <= 2
    assert set(engine.run("pid", [b""] * 8)) & first


def test_a_task_that_fails_is_tried_again(engine: LocalEngine, tmp_path: Path) -> None:
    assert engine.run("fail once", [str(tmp_path / "seen").encode()]) == [b"done"]


def test_a_task_whose_process_is_killed_is_tried_again(engine: LocalEngine, tmp_path: Path) -> None:
    tasks = [str(tmp_path / name).encode() for name in "abc"]
    assert engine.run("die once", tasks) == [b"done"] * 3


def test_a_task_that_fails_for_good_fails_the_stage_with_its_reason(engine: LocalEngine) -> None:
    with pytest.raises(StageFailedError) as failed:
        engine.run("fail", [b"7"])
    assert failed.value.stage == "fail"
    assert failed.value.reason == "ValueError: no good: 7"
    assert engine.run("echo", [b"ab"]) == [b"ba"], "the engine goes on"


def test_a_reason_may_name_a_file_whose_name_is_no_text(engine: LocalEngine) -> None:
    with pytest.raises(StageFailedError) as failed:
        engine.run("fail", [b"\xff.log"])
    assert failed.value.reason == "ValueError: no good: \\udcff.log"


def test_a_process_that_cannot_be_started_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path))

    def none_left() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(stage_process.socket, "socketpair", none_left)
    with (
        LocalEngine(1, registry=REGISTRY) as engine,
        pytest.raises(StageFailedError, match="Too many open files"),
    ):
        engine.run("echo", [b"x"])
    assert list(tmp_path.iterdir()) == []


def test_after_a_stage_failed_every_task_finds_a_process(engine: LocalEngine) -> None:
    for _ in range(3):
        with pytest.raises(StageFailedError):
            engine.run("fail", [b"1", b"2", b"3", b"4"])
        assert engine.run("echo", [b"ab"] * 8) == [b"ba"] * 8


def test_a_process_that_ended_while_it_was_idle_is_replaced(tmp_path: Path) -> None:
    with LocalEngine(1, registry=REGISTRY, attempts=1) as engine:
        pid = int(engine.run("pid", [b""])[0])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: has_ended(pid), "the process has ended")
        assert engine.run("echo", [b"ab"]) == [b"ba"]


def has_ended(pid: int) -> bool:
    """Whether all of its threads are gone; its status stays for whoever asks next."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_a_task_that_always_kills_its_process_fails_the_stage(engine: LocalEngine) -> None:
    with pytest.raises(StageFailedError, match="was killed by signal 9"):
        engine.run("die", [b""])
    assert engine.run("echo", [b"ab"]) == [b"ba"]


def test_a_stage_that_fails_ends_its_other_tasks(tmp_path: Path) -> None:
    started = [tmp_path / name for name in "ab"]
    waiting = [json.dumps({"started": str(path)}).encode() for path in started]
    with LocalEngine(2, registry=REGISTRY, attempts=1) as engine:
        failed: list[StageFailedError] = []

        def run() -> None:
            try:
                engine.run("wait", waiting)
            except StageFailedError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        for path in started:
            wait_until(lambda path=path: path.exists() and path.read_text(), "a task has begun")
        os.kill(int(started[0].read_text()), signal.SIGKILL)
        thread.join()
        assert [error.reason for error in failed] == ["the worker process was killed by signal 9"]
        with pytest.raises(ProcessLookupError):
            os.kill(int(started[1].read_text()), 0)


def test_what_a_killed_process_left_on_this_host_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path))
    with LocalEngine(1, registry=REGISTRY, attempts=1) as engine:
        with pytest.raises(StageFailedError):
            engine.run("leave and die", [b""])
        assert list(tmp_path.iterdir()) == []
        assert engine.run("echo", [b"ab"]) == [b"ba"]
    assert list(tmp_path.iterdir()) == []


_KILLED_PARENT = """
import os, signal, sys, threading
from pipeline.engines.engine import LocalEngine

engine = LocalEngine(1, registry="tests.pipeline.odd_stages")
threading.Thread(target=engine.run, args=("wait", [sys.argv[1].encode()]), daemon=True).start()
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_the_workers_of_a_killed_job_left_on_this_host_goes(tmp_path: Path) -> None:
    scratch, started = tmp_path / "scratch", tmp_path / "started"
    scratch.mkdir()
    job = subprocess.Popen(
        [sys.executable, "-P", "-c", _KILLED_PARENT, json.dumps({"started": str(started)})],
        env={**os.environ, SCRATCH_VARIABLE: str(scratch), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
    )
    assert job.stdin is not None
    wait_until(started.exists, "the task has begun")
    assert len(list(scratch.iterdir())) == 1
    job.stdin.close()
    assert job.wait(30) == -signal.SIGKILL
    wait_until(lambda: not list(scratch.iterdir()), "the worker has deleted its files")


def test_a_task_over_the_bound_of_a_frame_fails_its_stage(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_process, "FRAME_BYTES_MAX", 1000)
    with pytest.raises(StageFailedError, match="a task of 2000 bytes is over 1000"):
        engine.run("echo", [b"x" * 2000])
    assert engine.run("echo", [b"ab"]) == [b"ba"], "the engine goes on"


def test_a_host_that_starts_no_process_fails_the_stage(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("pipeline.engines.engine.StageProcess", refuse)
    with pytest.raises(StageFailedError, match="cannot start a worker process"):
        engine.run("echo", [b"x"])


def test_closing_an_engine_ends_its_processes() -> None:
    engine = LocalEngine(1, registry=REGISTRY)
    pid = int(engine.run("pid", [b""])[0])
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
