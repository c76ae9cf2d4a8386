"""Commands that show state: --json and --watch, as frames and against a daemon."""

import json
import os
import signal
import subprocess
import sys
from datetime import datetime
from threading import Event

import click
import pytest
from click.testing import CliRunner, Result

import admin.watch
from admin.watch import CLEAR, Watch
from broker.cli import main
from tests.support.varve import VarveBroker

NOW = datetime(2026, 11, 25, 12, 30)
TOPIC = "watched"
# Every command that shows state, and the key of its JSON answer.
COMMANDS = {
    "topics list": "topics",
    f"topics describe {TOPIC}": "partitions",
    "groups list": "groups",
    "users list": "users",
    "acls list": "acls",
    "log dirs": "directories",
    "leases list": "remote_compactions",
    "view status": "views",
    "cleaner status": "rows",
    f"cleaner explain {TOPIC}": "partitions",
    "cleaner history": "jobs",
}


def test_a_frame_on_a_terminal_replaces_the_one_before_and_fits() -> None:
    lines = [str(number) for number in range(100)]
    frame = Watch("varve topics list", 2).frame(lines, now=NOW, height=10)
    assert frame.startswith(CLEAR)
    shown = frame.removeprefix(CLEAR).splitlines()
    assert shown[0] == "varve topics list, every 2 s, 2026-11-25 12:30:00; Ctrl-C ends it"
    assert len(shown) == 9
    assert shown[-1] == "... and 94 more lines"


def test_a_frame_that_is_not_on_a_terminal_has_no_escape_sequences() -> None:
    frame = Watch("varve topics list", 2).frame(["a", "b"], now=NOW, height=None)
    assert frame == "2026-11-25 12:30:00\na\nb\n"


@pytest.fixture(scope="module")
def topic(broker: VarveBroker) -> str:
    result = run(broker, "topics", "create", TOPIC, "--set", "cleanup.policy=compact")
    assert result.exit_code == 0, result.output
    return TOPIC


def run(broker: VarveBroker, *arguments: str) -> Result:
    environment = {"VARVE_HTTP": broker.url, "VARVE_BOOTSTRAP": broker.bootstrap}
    return CliRunner().invoke(main, list(arguments), env=environment)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_shows_state_has_json_and_repeats_it_as_lines(
    broker: VarveBroker, topic: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def interrupted_at_the_second(_interrupted: Event, seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 2

    monkeypatch.setattr(admin.watch, "wait", interrupted_at_the_second)
    once = run(broker, *command.split(), "--json")
    assert once.exit_code == 0, once.output
    assert COMMANDS[command] in json.loads(once.stdout)
    again = run(broker, *command.split(), "--json", "--watch", "7")
    assert (again.exit_code, waits) == (0, [7.0, 7.0]), again.output
    for line in again.stdout.splitlines():
        assert json.loads(line).keys() == json.loads(once.stdout).keys()
    assert len(again.stdout.splitlines()) == 2
    waits.clear()
    text = run(broker, *command.split(), "--watch")
    assert (text.exit_code, waits) == (0, [2.0, 2.0]), text.output
    assert "\033" not in text.stdout


def test_no_command_that_lists_or_describes_lacks_json_and_watch() -> None:
    shows = {"list", "describe", "status", "explain", "history", "dirs"}
    for group in main.commands.values():
        for command in group.commands.values() if isinstance(group, click.Group) else ():
            if command.name in shows:
                names = {name for option in command.params for name in option.opts}
                assert {"--json", "--watch"} <= names, (group.name, command.name)


def test_ctrl_c_ends_a_watch_without_an_error(broker: VarveBroker, topic: str) -> None:
    environment = {**os.environ, "VARVE_BOOTSTRAP": broker.bootstrap}
    command = [sys.executable, "-m", "broker.cli", "topics", "list", "--json", "--watch", "0.1"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answers = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert all(TOPIC in {row["topic"] for row in answer["topics"]} for answer in answers)


def test_a_watch_ends_at_the_first_error(broker: VarveBroker) -> None:
    result = run(broker, "cleaner", "status", "--topic", "missing", "--watch")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "missing" in result.stderr
