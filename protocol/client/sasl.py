"""The client's side of SASL: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 and OAUTHBEARER.

A mechanism is a generator: it yields the bytes to send and receives the answer of the broker. It
raises SaslError if the broker does not prove that it knows the password (SCRAM) or refuses a token.

Sources: RFC 4616 (PLAIN), RFC 5802 and 7677 (SCRAM), RFC 7628 (OAUTHBEARER). As Kafka's clients do,
SCRAM sends names and passwords as UTF-8 without SASLprep, and refuses fewer than 4096 iterations.
"""

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Generator
from typing import Final

from config.security.clients import OAUTHBEARER, PLAIN, SCRAM, ClientSasl

ITERATIONS_MIN: Final = 4096
ITERATIONS_MAX: Final = 1 << 20  # a second of work; Kafka's brokers store at most 16384
ANSWER_BYTES_MAX: Final = 64 << 10
NO_BINDING: Final = "n,,"  # of the channel, and no other authorization id

Exchange = Generator[bytes, bytes, None]


class SaslError(Exception):
    """The exchange failed on the client's side.

    `last_message`: what the client sends before it closes the connection, or nothing.
    """

    def __init__(self, reason: str, last_message: bytes = b"") -> None:
        super().__init__(reason)
        self.last_message = last_message


def begin_exchange(sasl: ClientSasl, nonce: str | None = None) -> Exchange:
    """Return the exchange of a mechanism. Raises ClientSecurityError for an unreadable token."""
    if sasl.mechanism == PLAIN:
        return _plain(sasl.username, sasl.password)
    if sasl.mechanism == OAUTHBEARER:
        return _oauthbearer(sasl.read_token())
    return _scram(
        SCRAM[sasl.mechanism], sasl.username, sasl.password, nonce or secrets.token_urlsafe(24)
    )


def _plain(username: str, password: str) -> Exchange:
    yield f"\0{username}\0{password}".encode()


def _oauthbearer(token: str) -> Exchange:
    answer = yield f"{NO_BINDING}\x01auth=Bearer {token}\x01\x01".encode()
    if not answer:
        return
    # The broker waits for an acknowledgement before its error, which says no more than `status`:
    # only then it logs and counts the failure.
    try:
        status = json.loads(answer)["status"]
    except (ValueError, KeyError, TypeError):
        status = "no reason"
    raise SaslError(f"the broker refused the token: {str(status)[:200]}", b"\x01")


def _scram(algorithm: str, username: str, password: str, nonce: str) -> Exchange:
    name = username.replace("=", "=3D").replace(",", "=2C")
    first = f"n={name},r={nonce}"
    server_first = (yield f"{NO_BINDING}{first}".encode()).decode("utf-8", "replace")
    fields = _parse_fields(server_first)
    combined, salt = fields.get("r", ""), _decode(fields.get("s", ""))
    text = fields.get("i", "")
    iterations = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not combined.startswith(nonce) or len(combined) <= len(nonce) or not salt:
        raise SaslError("the broker's first SCRAM message is invalid")
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise SaslError(
            f"the broker asks for {iterations} SCRAM iterations, not {ITERATIONS_MIN} to "
            f"{ITERATIONS_MAX}"
        )
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", algorithm)
    stored_key = hashlib.new(algorithm, client_key).digest()
    binding = base64.b64encode(NO_BINDING.encode()).decode()
    without_proof = f"c={binding},r={combined}"
    signed = f"{first},{server_first},{without_proof}".encode()
    signature = hmac.digest(stored_key, signed, algorithm)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    answer = yield f"{without_proof},p={base64.b64encode(proof).decode()}".encode()
    server_key = hmac.digest(salted, b"Server Key", algorithm)
    verifier = _decode(_parse_fields(answer.decode("utf-8", "replace")).get("v", ""))
    if not hmac.compare_digest(verifier, hmac.digest(server_key, signed, algorithm)):
        raise SaslError("the broker does not know the password: its SCRAM signature is wrong")


def _parse_fields(message: str) -> dict[str, str]:
    """Return the fields `name=value` of a SCRAM message; its unknown ones too."""
    pairs = (part.partition("=") for part in message.split(","))
    return {name: value for name, _, value in pairs}


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
