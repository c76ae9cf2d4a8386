"""Jobs on Spark that the daemon starts: what becomes of each way in which they can end.

The process is a script that does as the test says; the real one is in tests/pipeline.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.cleaning import spark_offload
from broker.cleaning.spark_offload import OwnApi, SparkRunner
from cleaner.scheduler.offload import Offload
from config.settings import CleanerSettings, SparkSettings
from storage.env import RealEnv
from storage.model import TopicPartition

P0, P1, OTHER = (TopicPartition(*item) for item in (("t", 0), ("t", 1), ("-other", 0)))
SPARK = SparkSettings(master="local[2]", min_bytes=0, attempts=2)
SECONDS = 30


class World:
    """A pool that only listens, and the daemon's side of Spark."""

    def __init__(self, folder: Path, code: str, **spark: Any) -> None:
        self.script = folder / "job.py"
        self.script.write_text(f"import json, os, signal, sys, time\n{code}\n")
        self.settings = CleanerSettings(engine="spark", spark=SPARK.model_copy(update=spark))
        self.records: list[Any] = []
        self.compacts = True  # the topics are still compacted when the job ends
        loop = asyncio.get_running_loop()
        self.offload = Offload(self.settings, lambda: int(loop.time() * 1000))
        self.spark = SparkRunner(
            RealEnv(),
            SimpleNamespace(  # type: ignore[arg-type]
                offload=self.offload,
                wake=lambda: None,
                remote=SimpleNamespace(failed=lambda _, record: self.records.append(record)),
            ),
            SimpleNamespace(  # type: ignore[arg-type]
                facts_of=lambda _: SimpleNamespace(config=SimpleNamespace(compacts=self.compacts))
            ),
            settings=lambda: self.settings,
            api=lambda: OwnApi("http://127.0.0.1:1"),
            command=(sys.executable, str(self.script)),
        )

    def due(self, *partitions: TopicPartition) -> None:
        self.offload.update_due(partitions, frozenset((P0, P1, OTHER)))

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(SECONDS):
            while not holds():  # noqa: ASYNC110  some of it happens in other processes
                await asyncio.sleep(0.01)

    async def run(self, *partitions: TopicPartition) -> None:
        """To the end of one job."""
        self.due(*partitions)
        await self.until(lambda: self.offload.job is not None or not self.offload.due)
        await self.until(lambda: self.offload.job is None)
        await asyncio.sleep(0)

    @property
    def outcomes(self) -> list[tuple[TopicPartition, str, str]]:
        return [(record.partition, record.outcome, record.reason) for record in self.records]


@asynccontextmanager
async def world(folder: Path, code: str, **spark: Any) -> AsyncIterator[World]:
    made = World(folder, code, **spark)
    made.spark.start()
    try:
        yield made
    finally:
        await made.spark.stop()


async def test_a_job_takes_what_is_due_of_one_topic_and_is_told_all_it_has_to_know(
    tmp_path: Path,
) -> None:
    code = f"open({str(tmp_path / 'arguments')!r}, 'a').write(repr(sys.argv[1:]) + chr(10))"
    async with world(tmp_path, code, transport="http", broker_url="http://b:1") as w:
        await w.run(P1, OTHER, P0)
        await w.run(OTHER)
        assert w.offload.status().given_up == ()
    first, second = map(eval, (tmp_path / "arguments").read_text().splitlines())
    assert first[:3] == ["compact", "--partitions", "0,1"]
    assert first[-2:] == ["--", "t"]
    assert second[-2:] == ["--", "-other"]
    pairs = dict(pairwise(first))
    assert (pairs["--engine"], pairs["--master"]) == ("spark", "local[2]")
    assert (pairs["--transport"], pairs["--http"]) == ("http", "http://b:1")
    assert (pairs["--memory"], pairs["--task-memory"]) == ("2048m", str(1 << 30))


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        ("print('varve: no room', file=sys.stderr); sys.exit(1)", "failed", "no room"),
        ("sys.exit(9)", "failed", "its process exited with status 9"),
        ("os.kill(os.getpid(), 9)", "failed", "its process was killed by SIGKILL"),
        ("print('varve: it was cut', file=sys.stderr); sys.exit(3)", "stale", "it was cut"),
        ("print('[[['); sys.exit(4)", "failed", "its process exited with status 4"),
    ],
)
async def test_what_goes_wrong_is_in_the_history_with_its_reason(
    tmp_path: Path, code: str, outcome: str, reason: str
) -> None:
    async with world(tmp_path, code) as w:
        await w.run(P0, P1)
        assert w.outcomes == [(partition, outcome, reason) for partition in (P0, P1)]
        assert {record.engine for record in w.records} == {"spark"}
        w.due(P0, P1)
        assert w.offload.due == []  # they wait


async def test_partitions_of_one_job_can_end_differently(tmp_path: Path) -> None:
    rows = [
        {"partition": 0, "outcome": "adopted", "reason": ""},
        {"partition": 1, "outcome": "invalid", "reason": "a record is missing"},
    ]
    code = f"print(json.dumps({{'partitions': {rows!r}}})); sys.exit(4)"
    async with world(tmp_path, code) as w:
        for _ in range(2):
            await w.run(P0, P1)
            w.offload._failures[P1].until_ms -= 3_600_000
        assert w.outcomes == [(P1, "failed", "a record is missing")] * 2


async def test_after_several_failures_the_workers_clean_the_partition(tmp_path: Path) -> None:
    async with world(tmp_path, "sys.exit(1)", attempts=1) as w:
        with capture_logs() as logs:
            await w.run(P0)
        assert w.offload.status().given_up == (P0,)
    (line,) = [log for log in logs if log["log_level"] == "error"]
    assert (line["event"], line["cleaned_by"]) == ("spark job failed", "workers")


@pytest.mark.parametrize("code", [2, 6])
async def test_a_lack_of_spark_is_logged_once(tmp_path: Path, code: int) -> None:
    script = f"print('varve: no Java', file=sys.stderr); sys.exit({code})"
    async with world(tmp_path, script) as w:
        with capture_logs() as logs:
            for _ in range(2):
                await w.run(P0)
        assert w.offload.status().unavailable == "no Java"
    assert [log["reason"] for log in logs if log["log_level"] == "error"] == ["no Java"]


async def test_a_topic_that_is_no_longer_compacted_does_not_make_spark_unavailable(
    tmp_path: Path,
) -> None:
    reason = "t-0 is not compacted: its cleanup.policy is delete"
    async with world(tmp_path, f"print('varve: {reason}', file=sys.stderr); sys.exit(2)") as w:
        w.compacts = False
        await w.run(P0)
        assert w.outcomes == [(P0, "failed", reason)]
        assert w.offload.status().unavailable == ""


async def test_no_job_starts_without_the_pipeline_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_offload, "NEEDS", ("pipeline", "no_such_package"))
    async with world(tmp_path, "sys.exit(0)") as w:
        w.due(P0)
        await w.until(lambda: w.offload.status().unavailable)
        assert "pip install -e '.[pipeline]'" in w.offload.status().unavailable


async def test_a_missing_command_makes_spark_unavailable(tmp_path: Path) -> None:
    async with world(tmp_path, "") as w:
        w.spark._command = ("/no/such/program",)
        w.due(P0)
        await w.until(lambda: w.offload.status().unavailable)


HANGS = """
if os.fork() == 0:
    open({mark!r}, 'w').write(str(os.getpid()))
    while True: time.sleep(1)
{handler}
while True: time.sleep(1)
"""
EXITS_ON_SIGTERM = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))"
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("handler", [EXITS_ON_SIGTERM, IGNORES_SIGTERM], ids=["exits", "ignores"])
@pytest.mark.parametrize("how", ["operator", "stop", "time"])
async def test_a_job_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: str, how: str
) -> None:
    for name in ("GRACE_SECONDS", "LEFT_SECONDS"):
        monkeypatch.setattr(spark_offload, name, 0.5)
    mark = tmp_path / "mark"
    code = HANGS.format(mark=str(mark), handler=handler)
    timeout_ms = 2_000 if how == "time" else 3_600_000
    async with world(tmp_path, code, timeout_ms=timeout_ms) as w:
        w.due(P0)
        await w.until(lambda: mark.exists() and mark.read_text())
        if how == "operator":
            assert w.offload.abort(P0, "an operator paused it")
        elif how == "stop":
            await w.spark.stop()
        await w.until(lambda: w.records)
        assert not is_alive(int(mark.read_text()))
        kind = "failed" if how == "time" else "aborted"
        assert [record.outcome for record in w.records] == [kind]
        assert w.offload.status().job is None


async def test_an_abort_before_the_process_exists_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_offload, "GRACE_SECONDS", 0.5)
    async with world(tmp_path, "time.sleep(3600)") as w:
        w.due(P0)
        while w.offload.job is None:  # noqa: ASYNC110  a few turns of the loop
            await asyncio.sleep(0)
        assert w.offload.abort(P0, "an operator paused it")
        await w.until(lambda: w.records)
        assert w.outcomes == [(P0, "aborted", "an operator paused it")]


async def test_a_partition_that_was_aborted_is_not_due_until_the_next_scan(tmp_path: Path) -> None:
    async with world(tmp_path, "sys.exit(0)") as w:
        w.offload.update_due((P0, P1), frozenset((P0, P1)))
        assert not w.offload.abort(P1, "an operator paused it")
        assert w.offload.due == [P0]
        await w.until(lambda: not w.offload.due and w.offload.job is None)


async def test_the_logged_output_is_bounded_and_the_last_line_is_the_reason(tmp_path: Path) -> None:
    code = (
        "for n in range(500): print('line', n, 'x' * 1000, file=sys.stderr)\n"
        "sys.stderr.write('y' * 3_000_000 + '\\n')\n"
        "print('varve: at last', file=sys.stderr)\n"
        "sys.stdout.write('z' * 40_000_000); sys.exit(1)"
    )
    async with world(tmp_path, code) as w:
        with capture_logs() as logs:
            await w.run(P0)
        assert w.outcomes == [(P0, "failed", "at last")]
    messages = [log["reason"] for log in logs if log["event"] == "spark job output"]
    assert len(messages) == spark_offload.LINES_MAX
    assert max(map(len, messages)) <= spark_offload.LINE_CHARS_MAX
