"""`varve users` against a daemon."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from confluent_kafka.admin import AdminClient

from broker.cli import main
from config import exit_codes
from tests.support.ports import free_port
from tests.support.varve import VarveBroker, running_varve

PASSWORD = "tr0ub4dor & 3"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    port, sasl_port = free_port(), free_port()
    settings = {
        "listeners": [f"127.0.0.1:{port}", f"SASL_PLAINTEXT://127.0.0.1:{sasl_port}"],
        "sasl": {"failure_delay_ms": 0},
    }
    with running_varve(tmp_path_factory.mktemp("users"), settings, port=port) as running:
        running.sasl_port = sasl_port  # type: ignore[attr-defined]
        yield running
        assert PASSWORD not in running.log_text


def run(broker: VarveBroker, *arguments: str, **options: str) -> Result:
    bootstrap = ("--bootstrap", broker.bootstrap)
    return CliRunner().invoke(main, ["users", *arguments, *bootstrap], **options)  # type: ignore[arg-type]


def logs_in(broker: VarveBroker, user: str, password: str, mechanism: str) -> bool:
    admin = AdminClient(
        {
            "bootstrap.servers": f"127.0.0.1:{broker.sasl_port}",  # type: ignore[attr-defined]
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": password,
            "log_level": 0,
            "error_cb": lambda _: None,
        }
    )
    try:
        return bool(admin.list_topics(timeout=3).brokers)
    except Exception:
        return False


def test_a_user_is_set_listed_and_deleted(broker: VarveBroker, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    assert run(broker, "list").output == "The broker stores no users.\n"
    result = run(broker, "set", "carol", "--password", f"file:{file}", "--iterations", "5000")
    assert (result.exit_code, result.output) == (0, "The password of carol is stored.\n")
    assert run(broker, "list").output == (
        "carol: SCRAM-SHA-256 (5000 iterations), SCRAM-SHA-512 (5000 iterations)\n"
    )
    assert logs_in(broker, "carol", PASSWORD, "SCRAM-SHA-256")
    assert logs_in(broker, "carol", PASSWORD, "SCRAM-SHA-512")
    result = run(broker, "delete", "carol", input="n\n")
    assert (result.exit_code, "nothing was deleted" in result.output) == (exit_codes.FAILED, True)
    assert logs_in(broker, "carol", PASSWORD, "SCRAM-SHA-256")
    result = run(broker, "delete", "carol", "--mechanism", "SCRAM-SHA-256", "--yes")
    assert result.output == "carol is deleted for SCRAM-SHA-256.\n"
    assert not logs_in(broker, "carol", PASSWORD, "SCRAM-SHA-256")
    assert run(broker, "delete", "carol", input="y\n").exit_code == 0
    result = run(broker, "list", "carol")
    assert result.exit_code == exit_codes.FAILED
    assert "does not exist" in result.output


def test_a_password_comes_from_the_environment_or_the_terminal(
    broker: VarveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAVE_PASSWORD", PASSWORD)
    result = run(broker, "set", "dave", "--password", "env:DAVE_PASSWORD")
    assert result.exit_code == 0, result.output
    result = run(broker, "set", "erin", input=f"{PASSWORD}\n{PASSWORD}\n")
    assert result.exit_code == 0, result.output
    assert PASSWORD not in result.output
    for user in ("dave", "erin"):
        assert logs_in(broker, user, PASSWORD, "SCRAM-SHA-512")
    # The command connects with a password, too.
    assert run(broker, "set", "erin", "--password", PASSWORD).exit_code == exit_codes.USAGE
    assert PASSWORD not in run(broker, "set", "erin", "--password", PASSWORD).output


def test_a_password_is_asked_for_only_if_the_broker_can_be_reached() -> None:
    arguments = ["users", "set", "carol", "--bootstrap", f"127.0.0.1:{free_port()}"]
    result = CliRunner().invoke(main, arguments, input=f"{PASSWORD}\n{PASSWORD}\n")
    assert (result.exit_code, "Password" in result.output) == (exit_codes.UNREACHABLE, False)


def test_the_command_authenticates_where_the_broker_demands_it(
    broker: VarveBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRANK_PASSWORD", PASSWORD)
    assert run(broker, "set", "frank", "--password", "env:FRANK_PASSWORD").exit_code == 0
    properties = tmp_path / "client.properties"
    properties.write_text(
        "security.protocol=SASL_PLAINTEXT\n"
        "sasl.mechanism=SCRAM-SHA-256\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required "
        f'username="frank" password="{PASSWORD}";\n'
    )
    arguments = [
        *("users", "list", "frank", "--command-config", str(properties)),
        *("--bootstrap", f"127.0.0.1:{broker.sasl_port}"),  # type: ignore[attr-defined]
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.output.startswith("frank: SCRAM-SHA-256 (4096 iterations)"), result.output
