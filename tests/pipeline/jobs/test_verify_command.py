"""`varve pipeline verify` as a command: exit codes, refusals, what it prints."""

import json
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient

from config import exit_codes
from pipeline.cli import pipeline
from pipeline.jobs import verify
from pipeline.jobs.verify import Verifier, VerifyResult, lines
from tests.pipeline.planted import (
    START_MS,
    VIEW,
    make_topic,
    write,
)
from tests.support.draws import only_in_ci
from tests.support.varve import ROOT, VarveBroker

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.spark


def invoke(broker: VarveBroker, *arguments: str) -> Any:
    where = ["--http", f"127.0.0.1:{broker.http_port}", "--bootstrap", broker.bootstrap]
    return CliRunner().invoke(verify.command, [*arguments, *where], catch_exceptions=False)


@pytest.mark.usefixtures("shared_session")
def test_the_command_ends_with_four_where_something_is_wrong(
    broker: VarveBroker, topic: str
) -> None:
    copy = f"{topic}-copy"
    for name in (topic, copy):
        make_topic(broker, name, 1, **VIEW)
        write(broker, name, [(0, b"k", b"v", START_MS, None)])
    done = invoke(broker, topic, "--json")
    assert (done.exit_code, json.loads(done.stdout)["mode"]) == (0, "view")
    done = invoke(broker, topic, "--against", copy, "--json")
    assert done.exit_code == 0
    write(broker, copy, [(0, b"\xff\x00", b"v", START_MS, None)])
    done = invoke(broker, topic, "--against", copy, "--examples", "1", "--json")
    assert done.exit_code == exit_codes.UNVERIFIED
    document = json.loads(done.stdout)
    assert document["same"] is False
    assert document["examples"] == [
        {
            "kind": "extra_key",
            "partition": 0,
            "key": "/wA=",
            "key_text": "0xff00",
            "expected_offset": None,
            "served_offset": 1,
        }
    ]
    done = invoke(broker, topic, "--against", copy)
    assert done.stdout.splitlines()[-1] == f"{copy} is not correct"


@pytest.mark.usefixtures("shared_session")
@pytest.mark.parametrize("other", [False, True])
def test_a_topic_that_was_created_again_during_the_check_is_not_judged(
    broker: VarveBroker, topic: str, monkeypatch: pytest.MonkeyPatch, *, other: bool
) -> None:
    copy = f"{topic}-copy"
    again = copy if other else topic

    def create_again(*_: object) -> VerifyResult:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.delete_topics([again])[again].result(30)
        make_topic(broker, again, 1, cleanup_policy="compact")
        return VerifyResult(topic, again, "alone", {})

    for name in (topic, copy):
        make_topic(broker, name, 1, cleanup_policy="compact")
    monkeypatch.setattr(Verifier, "other" if other else "alone", create_again)
    done = invoke(broker, topic, *(("--against", copy) if other else ()))
    assert done.exit_code == exit_codes.STALE
    assert f"{again} was deleted and created again during the check" in done.stderr


@pytest.mark.usefixtures("shared_session")
def test_a_command_line_without_sense_is_refused(broker: VarveBroker, topic: str) -> None:
    assert invoke(broker, topic).exit_code == exit_codes.FAILED
    make_topic(broker, topic, 1)
    for arguments, code, reason in (
        ([topic], 2, "has no view and is not compacted (cleanup.policy is delete)"),
        ([f"{topic}.compacted"], 2, f"use `verify {topic}`"),
        ([topic, "--against", topic, "--as-of-offsets", "{}"], 2, "--as-of-offsets needs --table"),
        ([topic, "--table", "t", "--against", "x"], 2, "not both"),
        ([topic, "--against", f"{topic}-not"], 1, "there is no topic"),
        ([topic, "--against", topic, "--partitions", "7"], 2, "but not 7"),
        ([topic, "--table", "t", "--as-of-offsets", "[]"], 2, "expected offsets as JSON such as"),
    ):
        done = invoke(broker, *arguments)
        assert (done.exit_code, reason in done.output) == (code, True), done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "t", "--against", "t"],
        ["bootstrap", "t", "--from", "x"],
        ["bootstrap", "t", "--from", "x", "--create", "1"],
        ["erase", "t", "--key-file", "x"],
    ],
    ids=lambda arguments: "-".join(arguments[::4]),
)
def test_no_broker_is_told_before_spark_is_started(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.client.topics.REACH_SECONDS", 0.5)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    done = CliRunner().invoke(pipeline, [*arguments, "--bootstrap", address])
    assert done.exit_code == exit_codes.UNREACHABLE, done.output
    assert len(done.output.splitlines()) == 1
    assert address in done.output


@pytest.mark.timeout(300)
@only_in_ci("test_a_topic_is_compacted_on_spark ends a program with its own session")
def test_the_program_itself_ends_with_the_code(broker: VarveBroker, topic: str) -> None:
    """A process of its own, with a session of its own."""
    make_topic(broker, topic, 1, cleanup_policy="compact")
    write(broker, topic, [(0, b"k", b"v", START_MS, None)])
    command = [sys.executable, "-m", "pipeline", "verify", topic, "--master", "local[1]", "--json"]
    where = ["--http", f"127.0.0.1:{broker.http_port}", "--bootstrap", broker.bootstrap]
    done = subprocess.run(
        [*command, *where], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["notes"] == ["nothing has been cleaned yet in partitions 0"]


def test_a_result_is_told_in_lines() -> None:
    result = VerifyResult("t", "t.compacted", "view", {})
    assert lines(result) == ["t.compacted is correct"]
