"""SASL on the broker's side: the exchange of each mechanism, and what all connections share.

An exchange takes the tokens of one client and returns the answers. When it is complete, it has the
client's principal. Messages to clients are Kafka's.
"""

import secrets
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from broker.security.credentials import Credentials, read_passwords
from broker.security.errors import AuthenticationError, InvalidTokenError
from broker.security.failed_attempts import FailedAttempts
from broker.security.oauthbearer import Keys, OauthExchange, TokenVerifier, read_jwks
from broker.security.principal import Principal
from broker.security.scram import NO_OTHER_USER, ScramServer
from config.settings import SaslSettings


class Exchange(Protocol):
    """One authentication of one client."""

    mechanism: str

    @property
    def is_guess(self) -> bool:
        """Return whether the next token may be that of a client which guesses."""
        ...

    @property
    def user(self) -> str:
        """Return the claimed name, for the log; empty until the client has sent it."""
        ...

    @property
    def principal(self) -> Principal | None:
        """Return the principal; None until the exchange is complete."""
        ...

    @property
    def refusal(self) -> AuthenticationError | None:
        """Return why the client was refused if its next token gets the error; otherwise None."""
        ...

    @property
    def ends_ms(self) -> int | None:
        """Return the wall time at which the client's credentials expire; None for never."""
        ...

    def login(self, token: bytes) -> Hashable:
        """Return what the next token shows of the client: a claimed name, or a hash."""
        ...

    async def evaluate(self, token: bytes) -> bytes:
        """Return the answer to a token of the client. Raises AuthenticationError."""
        ...


class PlainExchange:
    """PLAIN (RFC 4616): one token with the user and the password."""

    mechanism = "PLAIN"
    is_guess = True
    refusal: AuthenticationError | None = None
    ends_ms: int | None = None

    def __init__(self, credentials: Credentials, address: str) -> None:
        self._credentials = credentials
        self._address = address
        self.user = ""
        self.principal: Principal | None = None

    def login(self, token: bytes) -> Hashable:
        """See Exchange."""
        fields = token.split(b"\0")
        return fields[1].decode(errors="replace") if len(fields) == 3 else None

    async def evaluate(self, token: bytes) -> bytes:
        """See Exchange."""
        try:
            fields = token.decode().split("\0")
        except UnicodeDecodeError:
            raise InvalidTokenError("the token is not UTF-8") from None
        if len(fields) != 3:
            raise AuthenticationError(
                "malformed token",
                f"Invalid SASL/PLAIN response: expected 3 tokens, got {len(fields)}",
            )
        authorization, self.user, password = fields
        if not self.user:
            raise AuthenticationError("no user", "Authentication failed: username not specified")
        if not password:
            raise AuthenticationError(
                "no password", "Authentication failed: password not specified"
            )
        principal = await self._credentials.check_password(self.user, password, self._address)
        if principal is None:
            raise AuthenticationError(
                "wrong user or password", "Authentication failed: Invalid username or password"
            )
        if authorization not in ("", self.user):
            raise AuthenticationError("the client asked to act for another user", NO_OTHER_USER)
        self.principal = principal
        return b""


class ScramExchange:
    """SCRAM: see scram.py."""

    refusal: AuthenticationError | None = None
    ends_ms: int | None = None

    def __init__(self, mechanism: str, credentials: Credentials) -> None:
        self.mechanism = mechanism
        self._server = ScramServer(
            mechanism,
            lambda user: credentials.find_entry(mechanism, user),
            nonce=secrets.token_urlsafe(24),
        )

    @property
    def is_guess(self) -> bool:
        """See Exchange."""
        return self._server.has_begun

    @property
    def user(self) -> str:
        """See Exchange."""
        return self._server.user

    def login(self, _token: bytes) -> Hashable:
        """See Exchange."""
        return self._server.user

    @property
    def principal(self) -> Principal | None:
        """See Exchange."""
        return Principal(self._server.user) if self._server.is_complete else None

    async def evaluate(self, token: bytes) -> bytes:
        """See Exchange."""
        return self._server.evaluate(token)


@dataclass(frozen=True, slots=True, repr=False)
class SaslSecrets:
    """The contents of the files that the section `sasl` names."""

    passwords: Mapping[str, str] = field(default_factory=dict)  # by user
    keys: Keys = field(default_factory=dict)


def read_sasl_secrets(settings: SaslSettings) -> SaslSecrets:
    """Read the files. Raises SecretError and JwksError."""
    return SaslSecrets(read_passwords(settings), read_jwks(settings.oauthbearer))


class Authentication:
    """The settings, credentials and failures that the connections of SASL listeners share."""

    def __init__(
        self,
        settings: SaslSettings,
        credentials: Credentials,
        *,
        clock: Callable[[], float],
        wall_ms: Callable[[], int],
    ) -> None:
        """`clock` returns monotonic seconds; the ends of sessions are on the same clock."""
        self.settings = settings
        self.credentials = credentials
        self.failed_attempts = FailedAttempts(clock)
        self.clock = clock
        self.wall_ms = wall_ms
        self.verifier = self._new_verifier({})

    async def load(self, settings: SaslSettings, secrets: SaslSecrets) -> None:
        """Use new settings, users and keys, for new authentications."""
        await self.credentials.load(secrets.passwords, settings.mechanisms)
        is_same_provider = settings.oauthbearer == self.settings.oauthbearer
        self.settings = settings
        if not (is_same_provider and settings.oauthbearer.jwks_url):
            await self.verifier.stop()
            self.verifier = self._new_verifier(secrets.keys)

    async def stop(self) -> None:
        """Drop the attempts that wait."""
        self.credentials.close()
        await self.verifier.stop()

    def new_exchange(self, mechanism: str, address: str) -> Exchange | None:
        """Return a new exchange with a client's address; None if the mechanism is not enabled."""
        if mechanism not in self.settings.mechanisms:
            return None
        if mechanism == PlainExchange.mechanism:
            return PlainExchange(self.credentials, address)
        if mechanism == OauthExchange.mechanism:
            return OauthExchange(self.verifier)
        return ScramExchange(mechanism, self.credentials)

    def _new_verifier(self, keys: Keys) -> TokenVerifier:
        return TokenVerifier(
            self.settings.oauthbearer, keys, wall_ms=self.wall_ms, clock=self.clock
        )
