"""SCRAM against the vectors of RFC 7677, and against messages that break its rules."""

import base64
import hashlib
import hmac

import pytest

from broker.security.errors import AuthenticationError
from broker.security.scram import (
    MESSAGE_BYTES_MAX,
    ScramServer,
    make_entry,
    matches,
    salt_password,
)
from storage.directory.security_entries import ScramEntry

MECHANISM = "SCRAM-SHA-256"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
CHALLENGE = (
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
)
FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
VERIFIER = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def entry(password: str = "pencil") -> ScramEntry:
    return make_entry(MECHANISM, salt_password(MECHANISM, password, SALT), SALT, 4096)


def server(password: str = "pencil", exists: bool = True) -> ScramServer:
    return ScramServer(MECHANISM, lambda _: (entry(password), exists), NONCE)


def test_the_exchange_of_rfc_7677() -> None:
    scram = server()
    assert scram.evaluate(FIRST) == CHALLENGE
    assert scram.evaluate(FINAL) == VERIFIER
    assert (scram.is_complete, scram.user) == (True, "user")


def final_message(nonce: bytes, password: str = "pencil") -> bytes:
    """The last message of a client that sends this nonce."""
    without_proof = b"c=biws,r=" + nonce
    salted = salt_password(MECHANISM, password, SALT)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    signed = b",".join((FIRST.removeprefix(b"n,,"), CHALLENGE, without_proof))
    signature = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    return without_proof + b",p=" + base64.b64encode(proof)


def test_a_client_may_repeat_its_own_nonce_but_not_leave_out_that_of_the_server() -> None:
    client, whole = b"rOprNGfwEbeRWgbNEkqO", CHALLENGE.split(b",")[0].removeprefix(b"r=")
    for nonce, is_accepted in (
        (whole, True),
        (client + whole, True),  # librdkafka before 2.6.1
        (client, False),
        (b"x" + whole, False),
        (whole[:-1], False),
        (client + client + whole, False),
    ):
        scram = server()
        scram.evaluate(FIRST)
        if is_accepted:
            scram.evaluate(final_message(nonce))
            assert scram.is_complete
        else:
            with pytest.raises(AuthenticationError):
                scram.evaluate(final_message(nonce))


def test_a_wrong_password_and_an_unknown_user_fail_alike() -> None:
    errors = []
    for scram in (server(password="pen"), server(exists=False)):
        assert scram.evaluate(FIRST) == CHALLENGE
        with pytest.raises(AuthenticationError) as error:
            scram.evaluate(FINAL)
        assert not scram.is_complete
        errors.append((error.value.reason, error.value.answer))
    assert errors == [("wrong user or password", "")] * 2


def test_a_password_matches_its_own_entry_only() -> None:
    assert matches(MECHANISM, "pencil", entry())
    assert not matches(MECHANISM, "pencils", entry())


def test_escaped_names_and_extensions_are_read() -> None:
    scram = server()
    scram.evaluate(b"n,a=a=2Cb=3D,n=a=2Cb=3D,r=abc,tokenauth=false")
    assert scram.user == "a,b="


@pytest.mark.parametrize(
    "message",
    [b"", b"n", b"n,,n=,r=a", b"p=tls-unique,,n=user,r=a", b"n,,m=x,n=user,r=a", b"n,,n=u=2D,r=a",
     b"n,,n=user,r=", b"n,a=other,n=user,r=a", b"n,,n=\xff,r=a", b"n,,n=user,r=a\x00"],
)  # fmt: skip
def test_a_malformed_first_message_is_refused(message: bytes) -> None:
    with pytest.raises(AuthenticationError):
        server().evaluate(message)


def test_a_message_above_the_limit_is_refused_before_it_is_read() -> None:
    longest = b"n,,n=user,r=a,x=".ljust(MESSAGE_BYTES_MAX, b"x")
    server().evaluate(longest)
    for message in (longest + b"x", b"n,,n=%b,r=a" % (b"u" * MESSAGE_BYTES_MAX)):
        with pytest.raises(AuthenticationError):
            server().evaluate(message)


@pytest.mark.parametrize(
    "message",
    [b"", FINAL[:-1] + b"!", FINAL.replace(b"biws", b"eSws"), FINAL.replace(b"rOpr", b"rOps"),
     FINAL[: FINAL.index(b"p=")] + b"p=", FINAL[: FINAL.index(b"p=")] + b"p=AAAA", FINAL[:-4],
     FINAL[: FINAL.index(b"p=")] + b"p=A=A", FINAL + b",x=y"],
)  # fmt: skip
def test_a_wrong_final_message_is_refused(message: bytes) -> None:
    scram = server()
    scram.evaluate(FIRST)
    with pytest.raises(AuthenticationError):
        scram.evaluate(message)
