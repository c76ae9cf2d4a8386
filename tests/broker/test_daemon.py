"""The process around the broker: its signals, what it prints and its exit code."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from broker import daemon
from broker.lifecycle import systemd
from config import exit_codes
from config.settings import Settings
from tests.support.broker.broker_in_memory import broker_in_memory, broker_settings
from tests.support.storage.memory_env import MemoryEnv


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What systemd is told; the process is stopped as soon as it is ready."""
    sent: list[str] = []

    def notify(state: str) -> bool:
        sent.append(state)
        if state.startswith("READY=1"):
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    monkeypatch.setattr(systemd, "notify", notify)
    # Both outlive the test.
    monkeypatch.setattr(daemon, "raise_file_limit", lambda: None)
    monkeypatch.setattr(daemon.faulthandler, "enable", lambda: None)
    return sent


def settings(tmp_path: Path, **others: object) -> Settings:
    return broker_settings(str(tmp_path / "data"), logging={"format": "text"}, **others)


def test_a_ready_daemon_prints_its_addresses_and_sigterm_stops_it_in_order(
    messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with capture_logs() as lines:
        assert daemon.run(settings(tmp_path)) == exit_codes.DONE
    assert [message.partition("\n")[0] for message in messages] == ["READY=1", "STOPPING=1"]
    events = [str(line["event"]) for line in lines]
    assert events.index("ready") < events.index("stopping") < events.index("stopped")
    (ready,) = [line for line in lines if line["event"] == "ready"]
    output = capsys.readouterr().out
    assert ready["listeners"][0] in output
    assert f"http://{ready['http']}/" in output


@pytest.mark.usefixtures("messages")
def test_a_daemon_that_cannot_start_says_why_and_fails(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    with capture_logs() as lines:
        code = daemon.run(settings(tmp_path, http_token_file=str(token_file)))
    assert code == exit_codes.FAILED
    (line,) = [line for line in lines if line["event"] == "cannot start"]
    assert str(token_file) in line["reason"]


@pytest.mark.usefixtures("messages")
def test_a_data_directory_that_is_a_file_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with capture_logs() as lines:
        code = daemon.run(settings(tmp_path, log_dirs=[str(tmp_path / "file")]))
    assert code == exit_codes.FAILED
    (line,) = [line for line in lines if line["event"] == "cannot start"]
    assert line["reason"] == (
        f"the data directory {tmp_path}/file cannot be used: Not a directory: '{tmp_path}/file'"
    )


@pytest.mark.usefixtures("messages")
def test_a_failed_start_gives_its_reason_once_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with capture_logs() as lines:
        code = daemon.run(settings(tmp_path, http_token_file=str(tmp_path / "token")))
    assert code == exit_codes.FAILED
    assert capsys.readouterr().err.count("cannot start") == 1
    assert not [line for line in lines if line["event"] == "cannot start"]


@pytest.mark.parametrize(("option", "key"), [("--http", "http"), ("--listen", "listeners")])
@pytest.mark.usefixtures("messages")
def test_a_daemon_whose_address_is_in_use_names_the_option_that_sets_another(
    option: str, key: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, capture_logs() as lines:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        value = address if key == "http" else [address]
        code = daemon.run(settings(tmp_path, **{key: value}))
    assert code == exit_codes.FAILED
    (line,) = [line for line in lines if line["event"] == "cannot start"]
    assert line["reason"] == (
        f"cannot listen on {address}: Address already in use. Stop the program that uses it, or "
        f"set another address with {option}"
    )


async def test_the_ready_text_counts_topics_as_the_console_without_internal_ones() -> None:
    env = MemoryEnv(seed=1)
    async with broker_in_memory(env, topics={"orders": {"partitions": 2}}) as broker:
        await broker.metadata_service.ensure("__consumer_offsets", 5)
        facts = daemon.ready_facts(broker)
    assert (facts.topics, facts.partitions) == (1, 2)
