"""SCRAM (RFC 5802, RFC 7677): salted passwords, and the server's side of an exchange.

Pure code. The exchange for an unknown user continues with an entry that no password matches
(credentials.py), so that a client cannot find out which users exist. As in Kafka, passwords and
names are UTF-8 without further preparation.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable
from typing import Final

from broker.security.errors import AuthenticationError, InvalidTokenError
from storage.directory.security_entries import ScramEntry

ITERATIONS: Final = 4096  # Kafka's default, and the fewest that RFC 7677 allows
ITERATIONS_MAX: Final = 16_384
SALT_BYTES: Final = 20
HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MECHANISM_CODES: Final = {1: "SCRAM-SHA-256", 2: "SCRAM-SHA-512"}  # of Kafka's ScramMechanism
# Names and nonces of clients are far shorter. Anybody may send a message, and the expression below
# takes 6 ms for a name of 64 KB.
MESSAGE_BYTES_MAX: Final = 4_096
NO_OTHER_USER: Final = (
    "Authentication failed: Client requested an authorization id that is different from username"
)
_NONCE: Final = rb"[\x21-\x2b\x2d-\x7e]+"
_BASE64: Final = rb"[A-Za-z0-9+/=]+"
_FIRST: Final = re.compile(
    rb"([ny]),(?:a=([^,]*))?,(n=((?:[^,=]|=2C|=3D)+),r=(" + _NONCE + rb")(?:,.*)?)", re.DOTALL
)
_FINAL: Final = re.compile(
    rb"(c=(" + _BASE64 + rb"),r=(" + _NONCE + rb")(?:,[^,]*)*?),p=(" + _BASE64 + rb")", re.DOTALL
)


def salt_password(
    mechanism: str, password: str, salt: bytes, iterations: int = ITERATIONS
) -> bytes:
    """Return the salted password; takes 3 ms for the default iterations."""
    return hashlib.pbkdf2_hmac(HASHES[mechanism], password.encode(), salt, iterations)


def make_entry(mechanism: str, salted: bytes, salt: bytes, iterations: int) -> ScramEntry:
    """Return what the broker stores of a salted password."""
    name = HASHES[mechanism]
    client_key = hmac.digest(salted, b"Client Key", name)
    return ScramEntry(
        salt=salt,
        stored_key=hashlib.new(name, client_key).digest(),
        server_key=hmac.digest(salted, b"Server Key", name),
        iterations=iterations,
    )


def matches(mechanism: str, password: str, entry: ScramEntry) -> bool:
    """Return whether a password is that of an entry; takes milliseconds."""
    salted = salt_password(mechanism, password, entry.salt, entry.iterations)
    derived = make_entry(mechanism, salted, entry.salt, entry.iterations)
    return hmac.compare_digest(derived.stored_key, entry.stored_key)


class ScramServer:
    """One exchange: two messages of the client, two answers."""

    def __init__(
        self, mechanism: str, find_entry: Callable[[str], tuple[ScramEntry, bool]], nonce: str
    ) -> None:
        """`find_entry` returns the entry of a user and whether the user exists."""
        self._hash = HASHES[mechanism]
        self._find_entry = find_entry
        self._nonce = nonce
        self._client_nonce = b""
        self._signed = b""  # the messages that the proof signs
        self._header = b""
        self._entry: ScramEntry | None = None
        self._exists = False
        self.user = ""
        self.is_complete = False

    @property
    def has_begun(self) -> bool:
        """Return whether the next message is the client's second one, which has a proof."""
        return self._entry is not None

    def evaluate(self, message: bytes) -> bytes:
        """Return the answer to a message of the client. Raises AuthenticationError."""
        assert not self.is_complete
        if len(message) > MESSAGE_BYTES_MAX:
            raise InvalidTokenError("the message is too long")
        return self._begin(message) if self._entry is None else self._finish(message, self._entry)

    def _begin(self, message: bytes) -> bytes:
        match = _FIRST.fullmatch(message)
        if match is None:
            raise InvalidTokenError("malformed first message")
        flag, authorization, bare, name, client_nonce = match.groups()
        self.user = _unescape(name)
        if authorization and _unescape(authorization) != self.user:
            raise AuthenticationError("the client asked to act for another user", NO_OTHER_USER)
        self._entry, self._exists = self._find_entry(self.user)
        self._client_nonce = client_nonce
        self._nonce = client_nonce.decode() + self._nonce
        self._header = flag + b"," + (b"a=" + authorization if authorization else b"") + b","
        salt = base64.b64encode(self._entry.salt).decode()
        answer = f"r={self._nonce},s={salt},i={self._entry.iterations}".encode()
        self._signed = bare + b"," + answer
        return answer

    def _finish(self, message: bytes, entry: ScramEntry) -> bytes:
        match = _FINAL.fullmatch(message)
        if match is None:
            raise InvalidTokenError("malformed final message")
        without_proof, channel, nonce, encoded_proof = match.groups()
        try:
            header = base64.b64decode(channel, validate=True)
            proof = base64.b64decode(encoded_proof, validate=True)
        except binascii.Error:
            raise InvalidTokenError("malformed final message") from None
        # librdkafka before 2.6.1 repeats its own part. The server's part still prevents a replay.
        nonces = (self._nonce.encode(), self._client_nonce + self._nonce.encode())
        if header != self._header or nonce not in nonces:
            raise InvalidTokenError("the messages do not belong together")
        signed = self._signed + b"," + without_proof
        signature = hmac.digest(entry.stored_key, signed, self._hash)
        if len(proof) != len(signature):
            raise InvalidTokenError("the proof has the wrong length")
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        stored_key = hashlib.new(self._hash, client_key).digest()
        is_right = hmac.compare_digest(stored_key, entry.stored_key)
        if not (is_right and self._exists):
            raise InvalidTokenError("wrong user or password")
        self.is_complete = True
        return b"v=" + base64.b64encode(hmac.digest(entry.server_key, signed, self._hash))


def _unescape(name: bytes) -> str:
    try:
        return name.decode().replace("=2C", ",").replace("=3D", "=")
    except UnicodeDecodeError:
        raise InvalidTokenError("the user name is not UTF-8") from None
