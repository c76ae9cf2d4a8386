"""The client's side of SASL: the examples of the RFCs, and brokers that lie."""

from pathlib import Path

import pytest

from config.security.clients import ClientSasl
from protocol.client.sasl import SaslError, begin_exchange

# RFC 7677, section 3.
NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = f"{NONCE}%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SERVER_FIRST = f"r={SERVER_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
SERVER_FINAL = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
USER = ClientSasl("SCRAM-SHA-256", "user", "pencil")


def test_scram_sends_and_accepts_the_example_of_its_rfc() -> None:
    exchange = begin_exchange(USER, NONCE)
    assert next(exchange) == f"n,,n=user,r={NONCE}".encode()
    assert exchange.send(SERVER_FIRST.encode()) == (
        f"c=biws,r={SERVER_NONCE},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=".encode()
    )
    with pytest.raises(StopIteration):
        exchange.send(SERVER_FINAL.encode())


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (SERVER_FIRST.replace(NONCE, "another"), "first SCRAM message is invalid"),
        (f"r={NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096", "first SCRAM message is invalid"),
        (f"r={SERVER_NONCE},s=,i=4096", "first SCRAM message is invalid"),
        (f"r={SERVER_NONCE},s=!,i=4096", "first SCRAM message is invalid"),
        ("\xff", "first SCRAM message is invalid"),
        (SERVER_FIRST.replace("4096", "4095"), "asks for 4095 SCRAM iterations"),
        (SERVER_FIRST.replace("4096", "2000000000"), "asks for 0 SCRAM iterations"),
        (SERVER_FIRST.replace("4096", "-1"), "asks for 0 SCRAM iterations"),
    ],
)
def test_scram_refuses_a_broker_that_weakens_the_exchange(first: str, reason: str) -> None:
    exchange = begin_exchange(USER, NONCE)
    next(exchange)
    with pytest.raises(SaslError, match=reason):
        exchange.send(first.encode("latin-1"))


@pytest.mark.parametrize("final", ["", "v=", "v=AAAA", "e=other-error", f"{SERVER_FINAL}x"])
def test_scram_refuses_a_broker_that_does_not_know_the_password(final: str) -> None:
    exchange = begin_exchange(USER, NONCE)
    next(exchange)
    exchange.send(SERVER_FIRST.encode())
    with pytest.raises(SaslError, match="does not know the password"):
        exchange.send(final.encode())


def test_scram_escapes_the_name_and_uses_a_new_nonce_each_time() -> None:
    firsts = {next(begin_exchange(ClientSasl("SCRAM-SHA-512", "a=b,c", "p"))) for _ in range(2)}
    assert len(firsts) == 2
    assert all(first.startswith(b"n,,n=a=3Db=2Cc,r=") for first in firsts)


def test_plain_sends_name_and_password_as_utf_8() -> None:
    assert next(begin_exchange(ClientSasl("PLAIN", "ä", "ß"))) == "\0ä\0ß".encode()


def test_a_refused_token_is_acknowledged_so_that_the_broker_logs_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a.b.c")
    exchange = begin_exchange(ClientSasl("OAUTHBEARER", token_file=str(tmp_path / "token")))
    next(exchange)
    with pytest.raises(SaslError, match="the broker refused the token: invalid_token") as refused:
        exchange.send(b'{"status":"invalid_token"}')
    assert refused.value.last_message == b"\x01"
