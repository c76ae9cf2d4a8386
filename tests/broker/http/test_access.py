"""Who may ask what over HTTP, header by header; and the token's file."""

from pathlib import Path

import pytest

from broker.http.access import Guard, RequestFacts
from config.address import Address
from config.security.token import TokenFileError, read_token

TOKEN = b"0123456789abcdef"
LOCAL = Guard.of(Address("127.0.0.1", 9644))
OPEN = Guard.of(Address("0.0.0.0", 9644))


def status(guard: Guard, **requested: str) -> int:
    values = {"method": "GET", "path": "/api/v1/cleaner", "host": "127.0.0.1:9644", **requested}
    refusal = guard.refusal(RequestFacts(**values))
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:9644", 200),
        ("localhost", 200),
        ("[::1]:9644", 200),
        ("rebound.example:9644", 403),
        ("127.0.0.1.example", 403),
        ("[::1", 200),  # not a name that an attacker can point here
        ("", 403),
    ],
)
def test_on_loopback_only_names_of_this_machine_are_answered(host: str, expected: int) -> None:
    assert status(LOCAL, host=host) == expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://127.0.0.1:9644", 200),
        ("http://127.0.0.1:80", 403),  # another server of this machine
        ("https://127.0.0.1:9644", 403),
        ("http://localhost:9644", 403),  # not the name of this request
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("http://[", 403),
        ("http://127.0.0.1:9644.evil.example", 403),
    ],
)
@pytest.mark.parametrize("path", ["/api/v1/cleaner", "/metrics", "/healthz"])
def test_a_page_of_another_origin_is_refused_whatever_it_asks_for(
    path: str, origin: str, expected: int
) -> None:
    assert status(LOCAL, path=path, origin=origin) == expected


def test_a_name_that_was_pointed_at_us_is_no_origin_of_ours() -> None:
    rebound = {"host": "evil.example:9644", "origin": "http://evil.example:9644"}
    assert status(OPEN, **rebound) == 403
    by_number = {"host": "10.0.0.5:9644", "origin": "http://10.0.0.5:9644"}
    assert status(OPEN, **by_number) == 200


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_a_change_is_sent_as_json_which_no_other_page_can(method: str, content_type: str) -> None:
    assert status(LOCAL, method=method, content_type=content_type) == 415
    for json in ("application/json", "Application/JSON ; charset=utf-8", "application/json;;"):
        assert status(LOCAL, method=method, content_type=json) == 200


def test_a_token_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\n " + TOKEN + b"\r\n")
    assert read_token(str(file)) == TOKEN


@pytest.mark.parametrize(
    "content", [b"", b"short", b"two words of a length", b"\xff" * 20, b"a" * 5000]
)
def test_a_token_that_is_none_is_refused_without_being_shown(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(TokenFileError, match="expected one token") as raised:
        read_token(str(file))
    assert content == b"" or content.decode(errors="replace") not in str(raised.value)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=r"absent: No such file"):
        read_token(str(tmp_path / "absent"))


def test_a_page_under_a_name_of_ours_may_ask_where_credentials_are_needed() -> None:
    """A page of another site under that name (DNS rebinding) would have no credentials."""
    host = "varve.example.org:9644"
    request = RequestFacts("GET", "/api/v1/cleaner", host, origin=f"https://{host}")
    address = Address("0.0.0.0", 9644)
    assert Guard.of(address, "https").refusal(request) is not None
    assert Guard.of(address, "https").refusal(request, needs_credentials=True) is None
    other = RequestFacts("GET", "/api/v1/cleaner", host, origin="https://other.example.org:9644")
    assert Guard.of(address, "https").refusal(other, needs_credentials=True) is not None


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        ("evil.example:9644", False),
        ("EVIL.example.", False),
        ("10.0.0.5:9644", True),
        ("[fe80::1]:9644", True),
        ("localhost:9644", True),
        ("broker1:9644", True),
    ],
)
@pytest.mark.parametrize("path", ["/api/v1/cleaner", "/metrics", "/"])
def test_without_credentials_a_browser_reads_by_names_that_nobody_can_redirect(
    host: str, path: str, is_answered: bool
) -> None:
    """A page that reads its own host sends no Origin (DNS rebinding)."""
    request = RequestFacts("GET", path, host, is_from_browser=True)
    assert (OPEN.refusal(request) is None) == is_answered
    assert OPEN.refusal(request, needs_credentials=True) is None
    assert OPEN.refusal(RequestFacts("GET", path, host)) is None  # a program
