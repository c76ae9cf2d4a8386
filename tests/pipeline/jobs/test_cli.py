"""The command line of the pipeline: hand-over, options, exit codes. No broker, no Spark."""

import errno
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner
from py4j.protocol import Py4JNetworkError

from broker.cli import main
from cleaner.remote_compaction import AdoptOutcome
from config import exit_codes
from pipeline.cli import JOBS, pipeline
from pipeline.client.topics import as_job_errors
from pipeline.command import SparkOptions, exit_on_error, open_engine
from pipeline.errors import JobError
from pipeline.jobs import compact
from pipeline.jobs.adopt import worst_exit_code
from pipeline.jobs.compact import CompactResult, PartitionResult, lines
from pipeline.progress import SilentReporter
from pipeline.stages.planning import Limits
from protocol.client.connection import NotKafkaError

ROOT = Path(__file__).parents[3]


def invoke(*arguments: str, **options: Any) -> tuple[int, str]:
    done = CliRunner().invoke(pipeline, arguments, catch_exceptions=False, **options)
    return done.exit_code, done.output


@pytest.fixture
def nobody() -> str:
    """An address where nobody answers."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{closed.getsockname()[1]}"


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pyspark" else find_spec(name)
    )
    done = CliRunner().invoke(main, ["pipeline", "compact", "t"])
    assert done.exit_code == exit_codes.USAGE
    assert done.output == (
        "varve: this needs more packages: run `.venv/bin/pip install -e '.[pipeline]'` in a "
        "checkout of Varve\n"
    )


def test_help_of_the_group_needs_no_extra(tmp_path: Path) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ModuleNotFoundError(name='pyarrow')")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
sys.modules["pyspark"] = sys.modules["pandas"] = None
from pipeline.cli import pipeline
pipeline(sys.argv[1:], prog_name="varve pipeline")
"""

    def help_of(*names: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-c", program, *names, "--help"]
        return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert "Write the current state of a topic as a table" in help_of().stdout
    assert "Compact TOPIC outside the broker" in help_of("compact").stdout
    latest = help_of("latest")
    assert latest.returncode == exit_codes.USAGE
    assert "varve: this needs more packages: run `.venv/bin/pip install" in latest.stderr


def test_varve_hands_a_request_for_help_over_without_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(os, "execv", lambda _, arguments: called.append(" ".join(arguments[3:])))
    for arguments in (["--help"], ["compact", "-h"]):
        assert CliRunner().invoke(main, ["pipeline", *arguments]).exit_code == 0
    assert called == ["pipeline --help", "pipeline compact -h"]


def test_varve_pipeline_becomes_the_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that was said to it, and without importing it."""
    called: list[list[str]] = []

    def execv(path: str, arguments: list[str]) -> None:
        called.append([path, *arguments])

    monkeypatch.setattr(os, "execv", execv)
    values = ["compact", "--help", "t", "--", "-x", ""]
    done = CliRunner().invoke(main, ["pipeline", *values], catch_exceptions=False)
    assert done.exit_code == 0
    assert called == [[sys.executable, sys.executable, "-P", "-m", "pipeline", *values]]


def test_every_job_can_be_loaded_and_is_told_of() -> None:
    shown = invoke("--help")[1]
    for name in JOBS:
        assert name in shown
        code, text = invoke(name, "--help")
        assert code == 0
        assert f" {name} [OPTIONS]" in text


def test_a_session_for_stages_has_a_small_jvm_unless_its_options_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def open_session(options: SparkOptions, *_: object) -> NoReturn:
        raise JobError(options.settings["spark.driver.extraJavaOptions"])

    monkeypatch.setattr(SparkOptions, "open_session", open_session)
    for settings, expected in (
        ({}, "TieredStopAtLevel=1"),
        ({"spark.driver.extraJavaOptions": "-XX:+A"}, r"^-XX:\+A$"),
    ):
        options = SparkOptions("local[1]", "1g", "error", settings)
        with (
            pytest.raises(JobError, match=expected),
            open_engine("spark", None, options, SilentReporter()),
        ):
            pass


def test_a_server_of_another_protocol_is_no_broker() -> None:
    with pytest.raises(JobError) as caught, as_job_errors():
        raise NotKafkaError("127.0.0.1:9644 answers with HTTP")
    assert caught.value.code == exit_codes.UNREACHABLE


@pytest.mark.parametrize("command", [["compact", "t"], ["adopt", "run1"]])
def test_no_broker_is_an_exit_code_of_its_own(command: list[str], nobody: str) -> None:
    code, text = invoke(*command, "--http", nobody)
    assert code == exit_codes.UNREACHABLE
    assert text.startswith(f"varve: cannot reach http://{nobody}: Connection refused. Is")
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--partitions", "x"],
        ["--partitions", "1,,2"],
        ["--partitions", "99999999999"],
        ["--engine", "flink"],
        ["--task-memory", "much"],
        ["--task-memory", "0"],
        ["--conf", "no-setting"],
        ["--conf", "user.home=/"],
        ["--http", "ftp://host"],
        ["--processes", "0"],
        ["--master", "nonsense"],
        ["--master", "local[x]"],
        ["--master", "local[0]"],
        ["--master", "spark://"],
        ["--master", "spark://a b:1"],
        ["--master", "http://host:1"],
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(options: list[str]) -> None:
    code, text = invoke("compact", "t", *options)
    assert code == exit_codes.USAGE
    assert "Error: " in text


def test_a_token_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    code, text = invoke("compact", "t", "--token-file", str(tmp_path / "none"))
    assert code == exit_codes.FAILED
    assert text == f"varve: {tmp_path / 'none'}: No such file or directory\n"


def test_a_master_that_is_not_there_is_told_before_anything_is_leased(nobody: str) -> None:
    code, text = invoke("compact", "t", "--engine", "spark", "--master", f"spark://{nobody}")
    assert code == exit_codes.NO_SPARK
    assert text.startswith(f"varve: no Spark master answers: {nobody}")
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize("module", ["pipeline.cli", "pipeline.jobs.compact"])
def test_ctrl_c_while_modules_are_loaded_ends_without_a_stack(module: str) -> None:
    program = f"""
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in background
sys.meta_path.insert(0, Interrupting())
sys.argv = ["pipeline", "compact", "t", "--http", "127.0.0.1:1"]
runpy.run_module("pipeline", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_worst_outcome_is_the_exit_code() -> None:
    every = list(AdoptOutcome)
    assert worst_exit_code(every) == exit_codes.UNVERIFIED
    assert worst_exit_code([AdoptOutcome.ADOPTED, AdoptOutcome.STALE]) == exit_codes.STALE
    assert worst_exit_code([AdoptOutcome.EXPIRED]) == exit_codes.STALE
    assert worst_exit_code([AdoptOutcome.NOTHING, AdoptOutcome.STALE]) == exit_codes.FAILED
    assert worst_exit_code([AdoptOutcome.ADOPTED]) == worst_exit_code([]) == exit_codes.DONE


def result(**changes: Any) -> CompactResult:
    item: dict[str, Any] = {
        "partition": 0,
        "outcome": "adopted",
        "reason": "",
        "end_offset": 1000,
        "segments_before": 3,
        "segments_after": 1,
        "bytes_before": 3 << 20,
        "bytes_after": 1 << 20,
        "records_before": 3000,
        "records_after": 1000,
        "keys": 1000,
        **changes,
    }
    return CompactResult("run1", "t", "local", "disk", False, [PartitionResult(**item)])


def test_people_are_told_what_became_of_each_partition() -> None:
    assert lines(result())[0] == (
        "t-0: compacted below offset 1000: 3.0 MiB to 1.0 MiB, 3,000 to 1,000 records"
    )
    stale = result(outcome="stale", reason="the log was truncated")
    assert lines(stale)[0] == "t-0: not changed (stale): the log was truncated"
    assert stale.exit_code == exit_codes.STALE
    damaged = result(damaged=(("/d/00.log", 7, "bad CRC"),))
    assert "t-0: damaged segment copied unchanged: /d/00.log at byte 7: bad CRC" in lines(damaged)
    assert any("varve pipeline adopt run1" in line for line in lines(result(outcome="handed back")))
    empty = CompactResult("run1", "t", "local", "disk", False)
    assert (lines(empty), empty.exit_code) == (["t: nothing to compact"], exit_codes.DONE)


def test_a_disk_that_refuses_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught, as_job_errors():
        tmp_path.write_text("")
    assert (str(caught.value), caught.value.code) == (f"{tmp_path}: Is a directory", 1)
    (tmp_path / "here").touch()
    (tmp_path / "there").mkdir()
    with pytest.raises(JobError, match=rf"^{tmp_path / 'there'}: "), as_job_errors():
        (tmp_path / "here").replace(tmp_path / "there")
    with pytest.raises(BrokenPipeError), as_job_errors():  # nobody reads any more: no error of ours
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_output_that_a_full_disk_refuses_is_told_in_a_line() -> None:
    @click.command()
    @exit_on_error
    def print_result() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    done = CliRunner().invoke(print_result)
    assert (done.exit_code, done.stderr) == (1, "varve: No space left on device\n")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        Py4JNetworkError("Answer from Java side is empty"),
    ],
)
def test_a_java_process_that_was_killed_is_not_taken_for_the_broker(error: Exception) -> None:
    ended = pytest.raises(JobError, match="the Java process of Spark has ended")
    with ended as caught, as_job_errors():
        raise error
    assert caught.value.code == exit_codes.FAILED
    assert "--memory" in str(caught.value)


def test_who_interrupts_the_check_is_not_told_that_nothing_was_handed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker goes on with it."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    done = SimpleNamespace(groups=(), folders=(), report=None)
    monkeypatch.setattr(compact, "clean_partitions", lambda *_, **__: [done])
    plan = SimpleNamespace(compaction_id="r-1", topic="t", partitions=[SimpleNamespace(job=None)])
    run: Any = SimpleNamespace(
        plan=plan,
        source=lambda _: {},
        submit=lambda *_, **__: None,
        adopt=interrupted,
    )
    engine: Any = SimpleNamespace(name="local")
    with pytest.raises(JobError, match="varve pipeline adopt r-1") as caught:
        compact.compact(
            run, engine, Limits(), transport="disk", adopt=True, reporter=SilentReporter()
        )
    assert caught.value.code == exit_codes.INTERRUPTED
