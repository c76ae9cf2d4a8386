"""`varve demo`: true figures, bars that end at 100 %, and errors with a reason."""

import io
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]
from rich.console import Console

from broker import demo
from broker.cli import main
from config import exit_codes
from config.security.clients import Cluster, read_command_config
from protocol.client.librdkafka import connection_settings
from tests.pipeline.secured_broker import PASSWORD, running_secured
from tests.support.draws import cases
from tests.support.ports import free_port
from tests.support.varve import running_varve


class Shrinking:
    """Sizes of a log as a broker would report them; the last one for ever."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = itertools.chain(sizes, itertools.repeat(sizes[-1]))

    def size_of(self, topic: str) -> int:
        return next(self._sizes)


class Clock:
    """time.monotonic and time.sleep without the waiting."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def watch(monkeypatch: pytest.MonkeyPatch, *sizes: int, before: int) -> tuple[int, float]:
    """-> (size at the end, percentage that the bar shows then)"""
    monkeypatch.setattr(demo, "time", Clock())
    progress = demo._progress(Console(file=io.StringIO()))
    remaining = demo._watch_shrink(
        "t",
        Shrinking(*sizes),  # type: ignore[arg-type]
        progress,
        before=before,
        live=before // 20,
    )
    return remaining, progress.tasks[0].percentage


@pytest.mark.parametrize("last", [50, 280, 940])
def test_the_bar_ends_at_100_percent_whatever_is_left(
    monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    assert watch(monkeypatch, 1000, 970, last, before=1000) == (last, 100)


def test_the_bar_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(
        demo.Progress, "update", lambda _self, _task, *, note, **_others: notes.append(note)
    )
    watch(monkeypatch, 9 << 20, 9 << 20, 1 << 20, before=9 << 20)
    assert notes[0] == "log   9.0 MiB, waits for the cleaner"
    assert notes[-2] == "log   1.0 MiB, waits for the last segment to close"
    assert notes[-1] == "log   1.0 MiB, 89% removed"


def test_a_log_of_the_size_of_the_last_updates_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert watch(monkeypatch, 1000, 280, 50, before=1000) == (50, 100)
    assert demo.time.monotonic() < 1.0


def test_a_log_that_does_not_shrink_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(demo.DemoError, match="did not shrink in 120 s: 1,000 bytes before"):
        watch(monkeypatch, 1000, before=1000)


def test_a_dead_port_fails_at_once_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    done = threading.Event()
    codes: list[int] = []

    def attempt() -> None:
        codes.append(demo.run(Cluster(f"127.0.0.1:{port}")))
        done.set()

    threading.Thread(target=attempt, daemon=True).start()
    assert done.wait(demo.ANSWER_SECONDS / 2), "it waited for a broker"
    output = " ".join(capsys.readouterr().err.split())
    assert codes == [exit_codes.UNREACHABLE]
    assert f"cannot reach 127.0.0.1:{port}: Connection refused. Is the broker running" in output
    assert "Start one with `varve serve`" in output


@pytest.fixture(params=cases(few=["SASL_SSL"], many=["PLAINTEXT", "SASL_SSL"]))
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    if request.param == "PLAINTEXT":
        with running_varve(tmp_path) as broker:
            yield Cluster(broker.bootstrap)
    else:
        with running_secured(tmp_path, {}) as secured:
            yield secured.cluster
            assert PASSWORD not in secured.broker.log_text


def test_a_listener_of_another_protocol_is_recognized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_secured(tmp_path, {}) as secured:
        assert demo.run(Cluster(secured.bootstrap)) == exit_codes.UNREACHABLE
        assert "A listener with TLS or SASL needs --command-config" in capsys.readouterr().err
        with_tls = replace(secured.cluster.security, protocol="SSL")
        assert demo.run(Cluster(secured.bootstrap, with_tls)) == exit_codes.UNREACHABLE
        output = " ".join(capsys.readouterr().err.split())
        assert "A listener with SASL needs security.protocol=SASL_SSL" in output
    with running_varve(tmp_path / "open") as broker:
        assert demo.run(Cluster(broker.url.removeprefix("http://"))) == exit_codes.UNREACHABLE
        output = capsys.readouterr().err
        assert output.startswith("varve: ")
        assert "answers with HTTP, not with the Kafka protocol. Give the broker's" in output


def test_a_demo_without_permissions_names_them_and_needs_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "password").write_text("secret")
    port, admin_port = free_port(), free_port()
    settings = {
        "listeners": [f"127.0.0.1:{admin_port}", f"SASL_PLAINTEXT://127.0.0.1:{port}"],
        "sasl": {"users": {"joe": {"file": str(tmp_path / "password")}}},
        "authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]},
    }
    properties = tmp_path / "joe.properties"
    properties.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required "
        'username="joe" password="secret";\n'
    )
    cluster = Cluster(f"127.0.0.1:{port}", read_command_config(str(properties)))
    with running_varve(tmp_path / "varve", settings, port=admin_port) as broker:
        for line in demo.PERMISSIONS_HINT.replace("NAME", "joe").splitlines()[1:]:
            assert demo.run(cluster, updates=20_000, keys=1000) == exit_codes.FAILED
            assert demo.PERMISSIONS_HINT in capsys.readouterr().err
            added = [*line.split()[1:], "--bootstrap", broker.bootstrap]
            assert CliRunner().invoke(main, added).exit_code == 0
        assert demo.run(cluster, updates=20_000, keys=1000) == 0, capsys.readouterr().err


def demo_topics(cluster: Cluster) -> list[str]:
    admin = AdminClient({**connection_settings(cluster), "log_level": 0})
    return [name for name in admin.list_topics(timeout=30).topics if name.startswith("varve-demo")]


def test_before_is_the_size_of_everything_that_was_produced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[demo.Outcome] = []
    monkeypatch.setattr(demo, "_print_outcome", lambda _console, outcome: outcomes.append(outcome))
    updates, keys = 40_000, 1000
    assert demo.run(cluster, updates=updates, keys=keys) == 0
    (outcome,) = outcomes
    assert outcome.bytes_before > updates * len(demo._value(0))
    assert outcome.bytes_after < outcome.bytes_before / 10
    assert keys <= outcome.records_read <= updates
    assert demo_topics(cluster) == []


def test_a_rate_slows_the_updates_down_and_the_topic_can_stay(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: list[demo.Outcome] = []
    monkeypatch.setattr(demo, "_print_outcome", lambda _console, outcome: outcomes.append(outcome))
    assert demo.run(cluster, updates=20_000, keys=1000, rate=20_000, keep=True) == 0
    assert outcomes[0].produce_seconds > 0.8
    (topic,) = demo_topics(cluster)
    assert f"topics delete {topic} --bootstrap {cluster}" in capsys.readouterr().out


def test_a_demo_that_is_interrupted_lets_the_topic_that_stays_be_cleaned(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_produce", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.run(cluster, keep=True)
    (topic,) = demo_topics(cluster)
    assert f"topics delete {topic} --bootstrap {cluster}" in capsys.readouterr().out
    admin = AdminClient({**connection_settings(cluster), "log_level": 0})
    resource = ConfigResource(ResourceType.TOPIC, topic)
    config = admin.describe_configs([resource])[resource].result(30)
    assert config["min.compaction.lag.ms"].value == "0"

    monkeypatch.setattr(demo.os, "getpid", lambda: 0)  # another process, which names what is left
    with pytest.raises(KeyboardInterrupt):
        demo.run(cluster)
    assert f"topics delete {topic} --bootstrap {cluster}" in capsys.readouterr().out
