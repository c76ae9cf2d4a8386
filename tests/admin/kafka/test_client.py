"""The connections of the commands that speak Kafka's protocol."""

from concurrent.futures import Future
from contextlib import nullcontext
from unittest.mock import MagicMock

import click
import pytest
from confluent_kafka import KafkaError, KafkaException

from admin.kafka import client
from protocol.client.administration import RefusedError
from protocol.errors import ErrorCode

CONNECTED = client.connected


@pytest.fixture(autouse=True)
def first_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that comes before that of librdkafka succeeds."""
    monkeypatch.setattr(client, "connected", lambda *_, **__: nullcontext(MagicMock()))


@pytest.mark.parametrize("is_bare", [True, False])
def test_an_error_of_librdkafka_ends_a_command_with_a_message(
    is_bare: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A consumer whose token expires while it is made raises the error without an exception."""
    error = KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED, "OAuth token not set")
    with (
        click.Context(click.Command("consume")),
        pytest.raises(SystemExit) as ended,
        client.librdkafka("127.0.0.1:9092"),
    ):
        raise error if is_bare else KafkaException(error)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "varve: OAuth token not set\n"


def test_a_request_that_the_broker_does_not_complete_ends_a_command_with_a_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """librdkafka repeats requests to a group whose partition is damaged until the time is over."""
    with (
        click.Context(click.Command("groups")),
        pytest.raises(SystemExit) as ended,
        client.librdkafka("127.0.0.1:9092"),
    ):
        Future[None]().result(0)
    assert ended.value.code == 1
    assert "127.0.0.1:9092 did not complete the request within 30 s" in capsys.readouterr().err


def test_a_refusal_with_the_permission_that_is_missing_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kafka's own texts end with a full stop."""
    refusal = RefusedError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED, "Cluster authorization failed.")
    with (
        click.Context(click.Command("users")),
        pytest.raises(SystemExit),
        CONNECTED("127.0.0.1:9092", lambda _: nullcontext(), needs="DESCRIBE on the cluster"),
    ):
        raise refusal
    advice = "the user needs DESCRIBE on the cluster (`varve acls`)"
    assert capsys.readouterr().err == f"varve: Cluster authorization failed: {advice}\n"
