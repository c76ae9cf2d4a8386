"""The connections of the commands that speak Kafka's protocol."""

from contextlib import nullcontext
from unittest.mock import MagicMock

import click
import pytest
from confluent_kafka import KafkaError, KafkaException

from admin.kafka import client


@pytest.mark.parametrize("is_bare", [True, False])
def test_an_error_of_librdkafka_ends_a_command_with_a_message(
    is_bare: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A consumer whose token expires while it is made raises the error without an exception."""
    monkeypatch.setattr(client, "connected", lambda *_, **__: nullcontext(MagicMock()))
    error = KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED, "OAuth token not set")
    with (
        click.Context(click.Command("consume")),
        pytest.raises(SystemExit) as ended,
        client.librdkafka("127.0.0.1:9092"),
    ):
        raise error if is_bare else KafkaException(error)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "varve: OAuth token not set\n"
