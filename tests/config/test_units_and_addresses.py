import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from config.address import Address, parse_address, parse_kafka_address
from config.settings import Settings
from config.topics.names import (
    INTERNAL_TOPICS,
    InvalidTopicNameError,
    check_legal_name,
    check_new_name,
    collision_key,
)
from config.units import format_size, parse_duration_ms, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("100", 100), ("64MiB", 64 << 20), ("1 gib", 1 << 30), ("2TiB", 2 << 40), ("7B", 7)],
)
def test_sizes_have_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "ms"),
    [("5", 5), ("5ms", 5), ("2s", 2000), ("3min", 180_000), ("1h", 3_600_000), ("7d", 604_800_000)],
)
def test_durations_are_milliseconds(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize(
    "text", ["", "MiB", "1.5MiB", "64MB", "1m", "5 5", "1e3", "9" * 30, "1\u0660"]
)
def test_other_units_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_size(text)
    with pytest.raises(ValueError, match="expected"):
        parse_duration_ms(text)


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_formatted_size_is_exact(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9092", Address("127.0.0.1", 9092)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]:9092", Address("::1", 9092)),
        ("broker-1.example.org:65535", Address("broker-1.example.org", 65535)),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text
    assert parse_address(address) is address


@pytest.mark.parametrize(
    "text",
    ["", ":9092", "host", "host:", "host:65536", "host:-1", "host:9o", "::1:9092", "[::1]", "a b:1",
     "[host]:1", "http://host:1", "host:1/", "h\u00f6st:1", "[127.0.0.1]:1", 9092, None],
)  # fmt: skip
def test_other_addresses_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|IPv6|neither|above"):
        parse_address(text)


def test_a_url_in_place_of_an_address_is_refused_because_of_its_scheme() -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT, without http://, not 'http://h:1'"):
        parse_address("http://h:1")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("PLAINTEXT://127.0.0.1:9092", Address("127.0.0.1", 9092)),
        ("plaintext://[::1]:9092", Address("::1", 9092)),
        ("broker.example.org:9092", Address("broker.example.org", 9092)),
    ],
)
def test_a_listener_may_be_written_as_kafka_writes_it(text: str, address: Address) -> None:
    assert parse_kafka_address(text) == address
    settings = Settings.model_validate({"listeners": [text], "advertise": text,
                                        "allow_insecure": True})  # fmt: skip
    assert (settings.listeners[0].address, settings.advertise) == (address, address)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SSL://127.0.0.1:9093", r"the protocol SSL:// is not supported here; expected HOST:PORT"),
        ("SASL_PLAINTEXT://h:1", r"the protocol SASL_PLAINTEXT:// is not supported"),
        ("http://h:1", r"the protocol http:// is not supported"),
        ("PLAINTEXT://:9092", r"has no host; .* write 0\.0\.0\.0:9092"),
        ("PLAINTEXT://nonsense", r"expected HOST:PORT, not 'nonsense'"),
        ("://h:1", "expected HOST:PORT, without ://"),
        ("h:65536", "the port 65536 is above 65535"),
    ],
)
def test_a_listener_of_another_protocol_is_refused_with_a_reason(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_kafka_address(text)


@pytest.mark.parametrize(
    ("host", "loopback", "wildcard"),
    [
        ("127.0.0.1", True, False),
        ("127.9.9.9", True, False),
        ("::1", True, False),
        ("localhost", True, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("10.0.0.1", False, False),
        ("example.org", False, False),
    ],
)
def test_only_loopback_is_private(host: str, loopback: bool, wildcard: bool) -> None:
    address = Address(host, 1)
    assert (address.is_loopback, address.is_wildcard) == (loopback, wildcard)


@pytest.mark.parametrize("name", ["a", "a.b", "A_b-9", "x" * 249, "...", "compacted", "__mine"])
def test_legal_names_may_be_created(name: str) -> None:
    check_new_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "x" * 250, "a b", "a/b", "\u00e4", "a\n", "a\0"])
def test_illegal_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidTopicNameError):
        check_legal_name(name)


@pytest.mark.parametrize("name", [*sorted(INTERNAL_TOPICS), "orders.compacted", ".compacted"])
def test_reserved_names_are_legal_but_may_not_be_created(name: str) -> None:
    check_legal_name(name)
    with pytest.raises(InvalidTopicNameError):
        check_new_name(name)


def test_dot_and_underscore_collide() -> None:
    assert collision_key("a.b_c") == collision_key("a_b.c")
    assert collision_key("a.b") != collision_key("a-b")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listeners": ["SSL://127.0.0.1:1"]}, "needs tls.certificate_file"),
        (
            {"listeners": ["SSL://10.0.0.1:1"], "tls": {"certificate_file": "a"}},
            "reached from other machines without authentication",
        ),
        (
            {
                "listeners": ["SSL://127.0.0.1:1", "127.0.0.1:2"],
                "tls": {"certificate_file": "a"},
                "advertise": "h:1",
            },
            "one address cannot serve several protocols",
        ),
        (
            {"listeners": [{"name": "A", "protocol": "PLAINTEXT", "address": "127.0.0.1:1",
                            "advertise": "0.0.0.0:1"}]},
            "not an address that a client can connect to",
        ),
        (
            {
                "listeners": [
                    {"name": "A", "protocol": "PLAINTEXT", "address": "127.0.0.1:1"},
                    {"name": "A", "protocol": "SSL", "address": "127.0.0.1:2"},
                ],
                "tls": {"certificate_file": "a"},
            },
            "two listeners with different protocols are named A",
        ),
        ({"tls": {"client_auth": "required"}}, "needs ca_file"),
        ({"tls": {"key_password": "sesame"}}, "expected {file: PATH} or {env: NAME}"),
    ],
)  # fmt: skip
def test_contradictions_of_listeners_and_tls_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        Settings.model_validate(settings)


def test_a_listener_that_requires_certificates_may_be_reached_from_other_machines() -> None:
    tls = {"certificate_file": "a", "ca_file": "b", "client_auth": "required"}
    settings = Settings.model_validate({"listeners": ["SSL://10.0.0.1:1"], "tls": tls})
    assert str(settings.listeners[0]) == "SSL://10.0.0.1:1"
