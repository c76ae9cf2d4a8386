"""Regular expressions of clients: no expression may stop the event loop."""

import time
from contextlib import suppress

import pytest

from broker.client_patterns import ClientPattern, PatternError
from config.topics.names import NAME_LENGTH_MAX

SECONDS_MAX = 0.2  # some ms on a quiet machine; without the limits the first takes 5 s
HOSTILE = (
    "(.*)" * 500,
    "(((a*)*)*)*" * 180,
    "(a?)" * 500,
    "a?" * 1000,
    "x{0,9}" * 330,
    r"\pL?" * 500,
    r"[^\PL]?" * 280,
    "(?:a?b?){900}",
    "(?:a{0,30}){0,30}",
    "(?i)" + "é" * 1900,
    "[ab]*a[ab]{1000}",
)


def seconds_to_match(expression: str, text: str) -> float:
    began = time.thread_time()
    with suppress(PatternError):
        ClientPattern(expression).matches(text)
    return time.thread_time() - began


@pytest.mark.parametrize("expression", HOSTILE, ids=[text[:12] for text in HOSTILE])
@pytest.mark.parametrize("length", [NAME_LENGTH_MAX, 32_767])
def test_no_expression_takes_long(expression: str, length: int) -> None:
    for unit in ("a", "ab", "x"):
        text = (unit * length)[:length]
        assert min(seconds_to_match(expression, text) for _ in range(2)) < SECONDS_MAX


def test_an_expression_matches_whole_names() -> None:
    names = ("orders-1", "orders-", "payments", "refunds", "Orders-1", "my-orders-1")
    pattern = ClientPattern(r"(orders-\d+)|(?:pay|re)\w+")
    assert [name for name in names if pattern.matches(name)] == ["orders-1", "payments", "refunds"]


def test_a_list_of_names_is_a_possible_expression() -> None:
    names = [f"department.orders.of-region-{number}" for number in range(55)]
    pattern = ClientPattern("|".join(name.replace(".", r"\.") for name in names))
    assert all(map(pattern.matches, names))
    assert not pattern.matches("department-orders.of-region-1")


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(", "missing ): ("),
        ("a" * 2001, "it has 2001 characters, more than 2000"),
        (r"\pL" * 11, r"it has more than 10 Unicode classes (\p, \P)"),
        ("(?:a?){1000}" * 3, "pattern too large - compile failed"),
    ],
)
def test_a_refusal_names_the_reason(expression: str, reason: str) -> None:
    with pytest.raises(PatternError) as refusal:
        ClientPattern(expression)
    assert str(refusal.value) == reason


def test_a_long_id_does_not_match_an_expression_of_many_steps() -> None:
    text = "a" * 32_767
    assert ClientPattern("a.*").matches(text)
    assert not ClientPattern("(?:a?){900}a*").matches(text)
