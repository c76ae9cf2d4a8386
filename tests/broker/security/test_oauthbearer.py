"""OAUTHBEARER: which tokens are valid, how keys are found, and the messages of RFC 7628."""

import asyncio
import http.server
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest

from broker.security.errors import AuthenticationError
from broker.security.oauthbearer import (
    FETCH_SECONDS_MIN,
    JWKS_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    JwksError,
    Keys,
    OauthExchange,
    TokenError,
    TokenVerifier,
    fetch_jwks,
    parse_jwks,
    read_jwks,
)
from config.settings import OauthSettings
from tests.support.clocks.manual_clock import ManualClock
from tests.support.identity_provider import AUDIENCE, ISSUER, IdentityProvider

NOW = 1_800_000_000
LATER = NOW + 600
PROVIDER = IdentityProvider()


def verifier(
    provider: IdentityProvider = PROVIDER,
    fetch: Callable[[str], Keys] = fetch_jwks,
    clock: Callable[[], float] = lambda: 100.0,
    **settings: Any,
) -> TokenVerifier:
    defaults = {"audience": [AUDIENCE], "issuer": ISSUER, "clock_skew_ms": 30_000}
    keys = {} if "jwks_url" in settings else parse_jwks(provider.jwks())
    return TokenVerifier(
        OauthSettings.model_validate({**defaults, **settings}),
        keys,
        wall_ms=lambda: NOW * 1000,
        clock=clock,
        fetch=fetch,
    )


@pytest.mark.parametrize("algorithm", ["ES256", "RS256", "RS512", "PS256"])
async def test_a_signed_token_names_a_principal_and_its_end(algorithm: str) -> None:
    provider = IdentityProvider()
    provider.add_key("second", algorithm)
    token = await verifier(provider).verify(provider.token(LATER, "second"))
    assert (str(token.principal), token.ends_ms) == ("User:alice", LATER * 1000)


@pytest.mark.parametrize(
    ("claims", "is_valid"),
    [
        ({"exp": NOW - 29}, True),  # within the clock skew
        ({"exp": NOW - 30}, False),
        ({"exp": None}, False),
        ({"exp": "soon"}, False),
        ({"exp": 1e300}, True),
        ({"exp": 10**400}, True),
        ({"exp": -(10**400)}, False),
        ({"nbf": 10**400}, False),
        ({"exp": True}, False),
        ({"nbf": NOW + 30}, True),
        ({"nbf": NOW + 31}, False),
        ({"iat": NOW + 31}, False),
        ({"iss": "https://other.example"}, False),
        ({"iss": None}, False),
        ({"aud": "other"}, False),
        ({"aud": ["other", AUDIENCE]}, True),
        ({"aud": None}, False),
        ({"sub": None}, False),
        ({"sub": ""}, False),
        ({"sub": "x" * 2000}, False),
        ({"sub": "alice\ud800"}, False),  # no name for a log line or a metric
    ],
)
async def test_claims_decide_whether_a_token_is_valid(
    claims: dict[str, Any], is_valid: bool
) -> None:
    text = PROVIDER.token(**{"ends": LATER, **claims})
    if is_valid:
        assert (await verifier().verify(text)).principal.name == "alice"
    else:
        with pytest.raises(TokenError) as error:
            await verifier().verify(text)
        assert error.value.status == "invalid_token"
        assert text not in str(error.value)


@pytest.mark.parametrize(
    ("claims", "is_valid"),
    [({"scope": "read kafka"}, True), ({"scope": ["kafka"]}, True), ({"scp": "kafka"}, True),
     ({"scope": "kafka2"}, False), ({}, False), ({"scope": 5}, False)],
)  # fmt: skip
async def test_a_token_needs_the_required_scope(claims: dict[str, Any], is_valid: bool) -> None:
    verify = verifier(required_scope="kafka", audience=[]).verify
    if is_valid:
        await verify(PROVIDER.token(LATER, **claims))
    else:
        with pytest.raises(TokenError) as error:
            await verify(PROVIDER.token(LATER, **claims))
        assert error.value.status == "insufficient_scope"


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"aud": "other"}, "its audience (`aud`) is none of sasl.oauthbearer.audience"),
        ({"aud": None}, "it has no claim aud"),
        ({"iss": "https://other.example"}, "its issuer (`iss`) is not sasl.oauthbearer.issuer"),
    ],
)
async def test_a_refusal_names_the_claim_and_the_setting(
    claims: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TokenError) as error:
        await verifier().verify(PROVIDER.token(**{"ends": LATER, **claims}))
    assert str(error.value) == f"the token is not valid: {reason}"


async def test_forged_tokens_are_refused() -> None:
    good = PROVIDER.token(LATER)
    header, payload, signature = good.split(".")
    claims = {"sub": "alice", "iss": ISSUER, "aud": AUDIENCE, "exp": LATER}
    public_key = json.loads(PROVIDER.jwks())["keys"][0]["x"]
    forged = [
        "",
        "a.b.c",
        f"{header}.{payload}.",
        f"{header}.{payload}.{signature[:-4]}AAAA",
        f"{header}.{payload[:-4]}.{signature}",
        jwt.encode(claims, None, "none", headers={"kid": "first"}),
        jwt.encode(claims, public_key, "HS256", headers={"kid": "first"}),
        IdentityProvider().token(LATER),  # another key with the same id
    ]
    for text in forged:
        with pytest.raises(TokenError):
            await verifier().verify(text)


async def test_a_message_longer_than_any_token_is_refused_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = PROVIDER.token(LATER, groups="g" * (11 << 10)).encode()
    exchange = OauthExchange(verifier())
    assert await exchange.evaluate(b"n,,\x01auth=Bearer %b\x01\x01" % longest) == b""
    assert exchange.principal is not None
    monkeypatch.setattr(TokenVerifier, "verify", None)
    message = b"n,,\x01auth=Bearer " + b"a" * MESSAGE_BYTES_MAX + b"\x01\x01"
    with pytest.raises(AuthenticationError, match="too long"):
        await OauthExchange(verifier()).evaluate(message)


async def test_the_principal_may_be_in_another_claim() -> None:
    check = verifier(principal_claim="client_id")
    assert (await check.verify(PROVIDER.token(LATER, client_id="job"))).principal.name == "job"
    with pytest.raises(TokenError):
        await check.verify(PROVIDER.token(LATER))


async def test_keys_of_a_url_are_fetched_again_for_an_unknown_key_but_not_at_once() -> None:
    provider, clock, fetches = IdentityProvider(), ManualClock(100.0), 0

    def fetch(_url: str) -> Keys:
        nonlocal fetches
        fetches += 1
        return parse_jwks(provider.jwks())

    check = verifier(provider, fetch, clock, jwks_url="https://issuer.example/keys")
    await asyncio.gather(*(check.verify(provider.token(LATER)) for _ in range(5)))
    assert fetches == 1
    provider.add_key("second")
    with pytest.raises(TokenError, match="unknown"):
        await check.verify(provider.token(LATER, "second"))
    clock.now += FETCH_SECONDS_MIN
    await check.verify(provider.token(LATER, "second"))
    assert fetches == 2
    clock.now += 3601  # jwks_refresh_ms
    await check.verify(provider.token(LATER))
    await check.stop()
    assert fetches == 3


async def test_keys_stay_valid_if_the_provider_cannot_be_reached() -> None:
    provider, clock, is_down = IdentityProvider(), ManualClock(100.0), False

    def fetch(_url: str) -> Keys:
        if is_down:
            raise JwksError("no answer")
        return parse_jwks(provider.jwks())

    check = verifier(provider, fetch, clock, jwks_url="https://issuer.example/keys")
    await check.verify(provider.token(LATER))
    is_down = True
    clock.now += 7200
    await check.verify(provider.token(LATER))
    await check.stop()
    await check.verify(provider.token(LATER))


def test_key_sets_without_a_usable_key_are_refused(tmp_path: Path) -> None:
    secret = {"kty": "oct", "k": "AAAA", "kid": "1"}
    for text in ("", "[]", "{}", '{"keys": 5}', '{"keys": []}', '{"keys": [1]}'):
        with pytest.raises(JwksError):
            parse_jwks(text.encode())
    with pytest.raises(JwksError):
        parse_jwks(json.dumps({"keys": [secret, {"kty": "EC", "crv": "P-256"}]}).encode())
    file = tmp_path / "jwks.json"
    for data in (None, b"x", b" " * (JWKS_BYTES_MAX + 1)):
        if data is not None:
            file.write_bytes(data)
        with pytest.raises(JwksError, match=r"jwks\.json"):
            read_jwks(OauthSettings(jwks_file=str(file)))
    file.write_bytes(PROVIDER.jwks())
    assert set(read_jwks(OauthSettings(jwks_file=str(file)))) == {"first"}


def test_keys_are_fetched_over_http_without_following_redirections() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/keys" else 302)
            self.send_header("Location", "/keys")
            self.end_headers()
            self.wfile.write(PROVIDER.jwks() if self.path == "/keys" else b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert set(fetch_jwks(f"{url}/keys")) == {"first"}
        with pytest.raises(JwksError):
            fetch_jwks(f"{url}/moved")
        server.shutdown()
        thread.join()
    with pytest.raises(JwksError):
        fetch_jwks(url)


def message(token: str, authorization: str = "") -> bytes:
    return f"n,{authorization},\x01auth=Bearer {token}\x01\x01".encode()


async def test_an_exchange_with_a_valid_token() -> None:
    for authorization in ("", "a=alice"):
        exchange = OauthExchange(verifier())
        assert await exchange.evaluate(message(PROVIDER.token(LATER), authorization)) == b""
        assert (str(exchange.principal), exchange.ends_ms) == ("User:alice", LATER * 1000)
    exchange = OauthExchange(verifier())
    with pytest.raises(AuthenticationError) as error:
        await exchange.evaluate(message(PROVIDER.token(LATER), "a=bob"))
    assert "(bob)" in error.value.answer
    assert exchange.principal is None


async def test_a_refused_token_is_answered_as_rfc_7628_defines() -> None:
    exchange = OauthExchange(verifier(required_scope="kafka"))
    answer = await exchange.evaluate(message(PROVIDER.token(LATER)))
    assert answer == b'{"status":"insufficient_scope","scope":"kafka"}'
    with pytest.raises(AuthenticationError) as error:
        await exchange.evaluate(b"\x01")
    assert error.value.answer == answer.decode()
    assert error.value.reason == "the token does not have the required scope"


async def test_the_message_of_rfc_7628_is_read() -> None:
    exchange = OauthExchange(verifier())
    text = (
        b"n,a=user@example.com,\x01host=server.example.com\x01port=143\x01"
        b"auth=Bearer vF9dft4qmTc2Nvb3RlckBhbHRhdmlzdGEuY29tCg==\x01\x01"
    )
    assert await exchange.evaluate(text) == b'{"status":"invalid_token"}'


@pytest.mark.parametrize(
    "token",
    [b"", b"\x01", b"n,,", b"n,,\x01\x01", b"y,,\x01auth=Bearer a\x01\x01",
     b"n,,\x01auth=Basic a\x01\x01", b"n,,\x01auth=Bearer \x01\x01", b"n,,\x01auth=Bearer a\x01",
     b"n,a=,\x01auth=Bearer a\x01\x01", b"n,,\x01" + b"a" * 60_000, b"\xff" * 60_000,
     b"n,a=" + b"=2C" * 20_000],
)  # fmt: skip
async def test_malformed_messages_are_refused(token: bytes) -> None:
    with pytest.raises(AuthenticationError):
        await OauthExchange(verifier()).evaluate(token)
