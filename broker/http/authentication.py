"""Who sends an HTTP request, and what the sender may do.

Rules
- The token of the settings (bearer) may do everything. So may everyone if neither a token nor users
  are configured.
- With `http_users`, the users of SASL authenticate with their password (basic) or, if OAUTHBEARER
  is enabled, with a signed token (bearer). Their permissions are those of Kafka: DESCRIBE on the
  cluster is the role of a viewer, who reads everything here; ALTER on the cluster is that of an
  operator, who changes everything. A request about one topic needs the operation on this topic
  only.
- The answer to wrong credentials waits, the longer the more of them one address sends. The waits
  are shared with SASL. Only the first request of a user on a connection may queue behind them.
- Health checks and transfers of leased files do not come here: the former are open, the latter
  have the token of their lease (access.py).
"""

import base64
import binascii
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from broker.http.access import SAFE_METHODS, Refusal
from broker.logging import RateLimitedLogger
from broker.network.listener import address_of
from broker.security.authorizer import CLUSTER_NAME, Operation, ResourceType
from broker.security.failed_attempts import Attempt
from broker.security.oauthbearer import OauthExchange, TokenError
from broker.security.principal import ANONYMOUS, Principal
from broker.security.sasl import Authentication

LOGGED_NAME_LENGTH: Final = 200

Allows = Callable[[Principal, str, Operation, ResourceType, str], bool]

logger = RateLimitedLogger(structlog.get_logger("broker.http"))


@dataclass(frozen=True, slots=True)
class Sender:
    """The authenticated sender of a request, which may do everything if `is_unlimited`."""

    principal: Principal
    is_unlimited: bool = False


# The sender that has the token of the settings. No user has a principal of this kind.
TOKEN_SENDER: Final = Sender(Principal("http", "Token"), is_unlimited=True)


def lease_sender(compaction_id: str) -> Sender:
    """Return the sender of a transfer, which has the token of a lease."""
    return Sender(Principal(compaction_id, "Lease"))


class HttpAuthentication:
    """Authenticates and authorizes requests."""

    def __init__(
        self,
        authentication: Authentication,
        allows: Allows,
        tokens: tuple[bytes, ...] = (),
        *,
        has_users: bool = False,
        has_permissions: bool = False,
    ) -> None:
        """`has_permissions`: `authorization` is enabled, also for requests without credentials."""
        self._authentication = authentication
        self._allows = allows
        self.tokens = tokens  # this and the next: a reload replaces them
        self.has_users = has_users
        self._has_permissions = has_permissions

    @property
    def needs_credentials(self) -> bool:
        """Return whether requests need a token or a user."""
        return bool(self.tokens) or self.has_users

    @property
    def challenges(self) -> list[str]:
        """Return the values of WWW-Authenticate."""
        users = ['Basic realm="varve", charset="UTF-8"'] if self.has_users else []
        return [*users, 'Bearer realm="varve"'] if self._takes_bearer else users

    @property
    def _has_signed_tokens(self) -> bool:
        mechanisms = self._authentication.settings.mechanisms
        return self.has_users and OauthExchange.mechanism in mechanisms

    @property
    def _takes_bearer(self) -> bool:
        return bool(self.tokens) or self._has_signed_tokens

    def is_of_user(self, authorization: str) -> bool:
        """Return whether a header may have credentials of a user: password or signed token."""
        scheme, credentials = _parts(authorization)
        if scheme == "basic":
            return self.has_users
        return scheme == "bearer" and self._has_signed_tokens and not self._is_token(credentials)

    async def authenticate(
        self,
        authorization: str,
        host: str,
        last: Sender | None = None,
        has_left: Callable[[], bool] = lambda: False,
    ) -> Sender | Refusal:
        """Return the sender of a request from an address.

        `last` sent the last authorized request of the connection. `has_left` returns whether the
        client has closed it: ClientLeftError is raised if it does so while it waits for its turn.
        """
        if not self.needs_credentials:
            return Sender(ANONYMOUS, is_unlimited=not self._has_permissions)
        scheme, credentials = _parts(authorization)
        match scheme:
            case "bearer" if self._takes_bearer:
                return await self._check_token(credentials, host, last, has_left)
            case "basic" if self.has_users:
                return await self._check_password(credentials, host, last, has_left)
        expected = ["a user and a password"] if self.has_users else []
        expected += ["a token (Authorization: Bearer ...)"] if self._takes_bearer else []
        return Refusal(401, f"expected {' or '.join(expected)}")

    def authorize(
        self, sender: Sender, host: str, method: str, topic: str | None
    ) -> Refusal | None:
        """Return the refusal of a request, which may concern one topic; None if it is allowed."""
        principal = sender.principal
        if sender.is_unlimited:
            return None
        operation = Operation.DESCRIBE if method in SAFE_METHODS else Operation.ALTER
        resources = [(ResourceType.CLUSTER, CLUSTER_NAME)]
        if topic is not None:
            resources.insert(0, (ResourceType.TOPIC, topic))
        if any(self._allows(principal, host, operation, *resource) for resource in resources):
            return None
        names = " or ".join(
            "the cluster" if kind is ResourceType.CLUSTER else f"topic {name[:250]}"
            for kind, name in resources
        )
        hint = "" if self.needs_credentials else "; set http_users or http_token_file to sign in"
        return Refusal(403, f"{principal} needs {operation.name} on {names}{hint}")

    def _is_token(self, text: str) -> bool:
        """Return whether a text is a token of the settings."""
        secret = text.encode(errors="surrogateescape")
        return any(hmac.compare_digest(secret, token) for token in self.tokens)

    async def _check_token(
        self, text: str, host: str, last: Sender | None, has_left: Callable[[], bool]
    ) -> Sender | Refusal:
        if self._is_token(text):
            return TOKEN_SENDER
        attempts = self._authentication.failed_attempts  # nobody can guess a signature
        is_guess = last is None
        async with attempts.attempt(
            address_of(host), hash(text), is_guess=is_guess, has_left=has_left
        ) as attempt:
            reason = "wrong token"
            if self._has_signed_tokens:
                try:
                    signed = await self._authentication.verifier.verify(text)
                    attempt.succeeded()
                    return Sender(signed.principal)
                except TokenError as error:
                    reason = str(error)
            return await self._wait(attempt, host, reason, user=None)

    async def _check_password(
        self, text: str, host: str, last: Sender | None, has_left: Callable[[], bool]
    ) -> Sender | Refusal:
        try:
            user, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            return Refusal(401, "the credentials are not the base64 of USER:PASSWORD")
        if not (user and colon and password):
            return Refusal(401, "expected a user and a password")
        attempts, address = self._authentication.failed_attempts, address_of(host)
        is_guess = last is None or last.principal != Principal(user)
        async with attempts.attempt(address, user, is_guess=is_guess, has_left=has_left) as attempt:
            credentials = self._authentication.credentials
            principal = await credentials.check_password(user, password, address)
            if principal is None:
                return await self._wait(attempt, host, "wrong user or password", user)
            attempt.succeeded()
        return Sender(principal)

    async def _wait(self, attempt: Attempt, host: str, reason: str, user: str | None) -> Refusal:
        named = {} if user is None else {"user": user[:LOGGED_NAME_LENGTH]}
        logger.info("authentication failed", subject=host, peer=host, reason=reason, **named)
        await attempt.failed(self._authentication.settings.failure_delay_ms / 1000)
        return Refusal(401, reason)


def _parts(authorization: str) -> tuple[str, str]:
    """Return the scheme of a header in lower case, and the credentials."""
    scheme, _, credentials = authorization.partition(" ")
    return scheme.lower(), credentials.strip()
