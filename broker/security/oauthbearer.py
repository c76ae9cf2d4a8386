"""OAUTHBEARER (RFC 7628): signed tokens (JWT) of an identity provider, and its public keys (JWKS).

Rules
- Only asymmetric signatures count. The key decides which algorithms are possible, not the token.
- A token needs an end (`exp`), the configured issuer, audience and scope, and a principal.
- Keys from a file are read at the start and at a reload. Keys from a URL are fetched when the first
  token arrives, again after `jwks_refresh_ms`, and for a token whose key is unknown, but at most
  every FETCH_SECONDS_MIN. If a fetch fails, the old keys stay valid.
- Texts and log lines never contain a token.
"""

import asyncio
import json
import math
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import structlog

from broker.fetch_document import fetch_document
from broker.logging import RateLimitedLogger
from broker.security.errors import AuthenticationError, InvalidTokenError
from broker.security.principal import Principal
from config.security.small_file import read_small_file
from config.settings import USER_NAME_LENGTH_MAX, OauthSettings

logger = RateLimitedLogger(structlog.get_logger("broker.oauthbearer"))

JWKS_BYTES_MAX: Final = 256 << 10
KEYS_MAX: Final = 100
FETCH_SECONDS_MIN: Final = 10.0  # between two fetches
FETCH_TIMEOUT_SECONDS: Final = 5.0
ALGORITHMS: Final[Mapping[str, tuple[str, ...]]] = {  # by type of key
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC": ("ES256", "ES384", "ES512"),
    "OKP": ("EdDSA",),
}
TIME_MAX: Final = 1 << 40  # seconds since 1970; later ends count as this one
# Tokens have up to 8 KB: HTTP servers accept no longer ones. Anybody may send a message, and to
# read the header of a token of 64 KB takes 18 ms.
MESSAGE_BYTES_MAX: Final = 16 << 10
_FIRST: Final = re.compile(
    rb"n,(?:a=((?:[\x01-\x7f](?<![=,\x01])|=2C|=3D)+))?,\x01"
    rb"((?:[A-Za-z]+=[\x21-\x7e \t\r\n]+\x01)*)\x01"
)
_BEARER: Final = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +([-_~+/.a-zA-Z0-9]+=*)")


class JwksError(Exception):
    """The keys of the identity provider cannot be read."""


class TokenError(Exception):
    """A token is refused. `status` is that of RFC 7628."""

    def __init__(self, reason: str, status: str = "invalid_token") -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Key:
    """A public key and the algorithms that it may be used with."""

    key: Any  # of `cryptography`
    algorithms: tuple[str, ...]


Keys = Mapping[str, Key]  # by key id; "" for a key without one


@dataclass(frozen=True, slots=True)
class Token:
    """The contents of a valid token."""

    principal: Principal
    ends_ms: int  # wall time


def parse_jwks(data: bytes) -> Keys:
    """Return the keys that can verify signatures. Raises JwksError."""
    import jwt

    try:
        entries = json.loads(data)["keys"]
        keys = {}
        for entry in entries[:KEYS_MAX]:
            possible = ALGORITHMS.get(entry.get("kty"), ())
            named = entry.get("alg")
            algorithms = tuple(name for name in possible if named in (None, name))
            if not algorithms or entry.get("use", "sig") != "sig" or "d" in entry:
                continue
            try:
                key = jwt.PyJWK(entry, algorithm=algorithms[0] if named else None).key
            except jwt.PyJWTError:
                continue  # a curve or a size that this library does not support
            keys[str(entry.get("kid", ""))] = Key(key, algorithms)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise JwksError("expected a JSON object with a list of keys") from None
    if not keys:
        raise JwksError("no key can verify signatures (RSA, EC or OKP, without a private part)")
    return keys


def read_jwks(settings: OauthSettings) -> Keys:
    """Return the keys of the file; none if there is no file. Raises JwksError."""
    if settings.jwks_url is not None:
        import jwt  # noqa: F401 - here, in a thread: it would hold the loop at the first token
    if settings.jwks_file is None:
        return {}
    try:
        return parse_jwks(_checked(read_small_file(settings.jwks_file, JWKS_BYTES_MAX)))
    except OSError as error:
        reason = error.strerror or str(error)
        raise JwksError(f"sasl.oauthbearer: {settings.jwks_file}: {reason}") from None
    except JwksError as error:
        raise JwksError(f"sasl.oauthbearer: {settings.jwks_file}: {error}") from None


def fetch_jwks(url: str) -> Keys:
    """Fetch the keys, without following redirections. Raises JwksError."""
    try:
        return parse_jwks(
            fetch_document(url, timeout_seconds=FETCH_TIMEOUT_SECONDS, bytes_max=JWKS_BYTES_MAX)
        )
    except (OSError, ValueError) as error:
        raise JwksError(str(error)) from None


def _checked(data: bytes) -> bytes:
    if len(data) > JWKS_BYTES_MAX:
        raise JwksError(f"larger than {JWKS_BYTES_MAX} bytes")
    return data


class TokenVerifier:
    """Verifies tokens with the keys of one identity provider."""

    def __init__(
        self,
        settings: OauthSettings,
        keys: Keys,
        *,
        wall_ms: Callable[[], int],
        clock: Callable[[], float],
        fetch: Callable[[str], Keys] = fetch_jwks,
    ) -> None:
        """`keys` are those of the file. `clock` returns monotonic seconds."""
        self.settings = settings
        self._keys = keys
        self._wall_ms = wall_ms
        self._clock = clock
        self._fetch = fetch
        self._fetched_at = -math.inf
        self._tried_at = -math.inf
        self._fetching: asyncio.Task[None] | None = None

    async def verify(self, text: str) -> Token:
        """Return the contents of a token. Raises TokenError."""
        import jwt

        settings = self.settings
        try:
            key = await self._find_key(str(jwt.get_unverified_header(text).get("kid", "")))
            claims = jwt.decode(
                text,
                key=key.key,
                algorithms=list(key.algorithms),
                audience=list(settings.audience) or None,
                issuer=settings.issuer,
                options={
                    "require": ["exp", settings.principal_claim],
                    "verify_aud": bool(settings.audience),
                    # The times are checked below, with the broker's clock.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise TokenError(f"the token is not valid: {_reason(error)}") from None
        return self._check_claims(claims)

    def _check_claims(self, claims: Mapping[str, Any]) -> Token:
        settings, now = self.settings, self._wall_ms() / 1000
        skew = settings.clock_skew_ms / 1000
        ends = _time(claims, "exp", TIME_MAX)
        if ends + skew <= now:
            raise TokenError("the token has expired")
        for name in ("nbf", "iat"):
            if _time(claims, name, 0) - skew > now:
                raise TokenError("the token is not valid yet")
        if settings.required_scope is not None and settings.required_scope not in _scopes(claims):
            raise TokenError("the token does not have the required scope", "insufficient_scope")
        name = claims[settings.principal_claim]
        if not _is_user_name(name):
            raise TokenError(f"the claim {settings.principal_claim} is not a name")
        return Token(Principal(name), int(ends * 1000))

    async def _find_key(self, key_id: str) -> Key:
        if self.settings.jwks_url is not None:
            is_old = self._clock() - self._fetched_at > self.settings.jwks_refresh_ms / 1000
            if key_id not in self._keys:
                await self._refresh(self.settings.jwks_url, wait=True)
            elif is_old:
                await self._refresh(self.settings.jwks_url, wait=False)
        key = self._keys.get(key_id)
        if key is None and not key_id and len(self._keys) == 1:
            (key,) = self._keys.values()
        if key is None:
            raise TokenError("the key of the token is unknown")
        return key

    async def _refresh(self, url: str, *, wait: bool) -> None:
        """Fetch the keys, unless they were just fetched. All callers share one fetch."""
        if self._fetching is None:
            if self._clock() - self._tried_at < FETCH_SECONDS_MIN:
                return
            self._tried_at = self._clock()
            self._fetching = asyncio.create_task(self._replace_keys(url), name="fetch JWKS")
        if wait:
            await asyncio.shield(self._fetching)

    async def _replace_keys(self, url: str) -> None:
        try:
            self._keys = await asyncio.to_thread(self._fetch, url)
            self._fetched_at = self._clock()
        except JwksError as error:
            logger.error("jwks not fetched", url=url, reason=str(error))
        finally:
            self._fetching = None

    async def stop(self) -> None:
        """Wait for a fetch in progress."""
        if self._fetching is not None:
            await asyncio.wait([self._fetching])


class OauthExchange:
    """One token, and after a refusal one more message of the client, which has no content."""

    mechanism = "OAUTHBEARER"

    def __init__(self, verifier: TokenVerifier) -> None:
        self._verifier = verifier
        self.refusal: AuthenticationError | None = None
        self.user = ""
        self.principal: Principal | None = None
        self.ends_ms: int | None = None

    @property
    def is_guess(self) -> bool:
        """See Exchange."""
        return self.refusal is None

    def login(self, token: bytes) -> Hashable:
        """See Exchange."""
        return hash(token)

    async def evaluate(self, token: bytes) -> bytes:
        """See Exchange."""
        if self.refusal is not None:
            raise self.refusal
        if len(token) > MESSAGE_BYTES_MAX:
            raise InvalidTokenError("the message is too long")
        match = _FIRST.fullmatch(token)
        if match is None:
            raise InvalidTokenError("malformed first message")
        authorization, pairs = match.groups()
        values = dict(pair.split("=", 1) for pair in pairs.decode().split("\x01") if pair)
        bearer = _BEARER.fullmatch(values.get("auth", ""))
        if bearer is None:
            raise InvalidTokenError("the message has no bearer token")
        try:
            result = await self._verifier.verify(bearer.group(1))
        except TokenError as error:
            answer = self._describe(error)
            self.refusal = AuthenticationError(str(error), answer)
            return answer.encode()
        self.user = result.principal.name
        name = (authorization or b"").decode().replace("=2C", ",").replace("=3D", "=")
        if name not in ("", self.user):
            raise AuthenticationError(
                "the client asked to act for another user",
                f"Authentication failed: Client requested an authorization id ({name}) that is "
                f"different from the token's principal name ({self.user})",
            )
        self.principal, self.ends_ms = result.principal, result.ends_ms
        return b""

    def _describe(self, error: TokenError) -> str:
        """Return the error as RFC 7628 defines it (section 3.2.2)."""
        fields = {"status": error.status}
        scope = self._verifier.settings.required_scope
        if scope is not None:
            fields["scope"] = scope
        return json.dumps(fields, separators=(",", ":"))


def _is_user_name(name: object) -> TypeGuard[str]:
    """Return whether a claim can be a name: JSON may have halves of characters (surrogates)."""
    if not isinstance(name, str) or not 1 <= len(name) <= USER_NAME_LENGTH_MAX:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _reason(error: Exception) -> str:
    """Return what is wrong with a token, without a part of it."""
    import jwt

    match error:
        case jwt.MissingRequiredClaimError():
            return f"it has no claim {error.claim}"
        case jwt.InvalidAudienceError():
            return "its audience (`aud`) is none of sasl.oauthbearer.audience"
        case jwt.InvalidIssuerError():
            return "its issuer (`iss`) is not sasl.oauthbearer.issuer"
        case jwt.InvalidSignatureError():
            return "its signature is wrong"
        case jwt.DecodeError():
            return "it is not a JWT"
    return type(error).__name__


def _time(claims: Mapping[str, Any], name: str, default: float) -> float:
    value = claims.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise TokenError(f"the claim {name} is not a time")
    return float(max(-TIME_MAX, min(value, TIME_MAX)))


def _scopes(claims: Mapping[str, Any]) -> frozenset[str]:
    scopes = claims.get("scope", claims.get("scp", ""))
    if isinstance(scopes, str):
        return frozenset(scopes.split())
    return frozenset(map(str, scopes)) if isinstance(scopes, list) else frozenset()
