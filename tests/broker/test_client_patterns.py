"""Regular expressions of clients: no expression may stop the event loop."""

import asyncio
import time
from contextlib import suppress

import pytest
import re2

from broker import client_patterns
from broker.client_patterns import ClientPattern, PatternError
from config.topics.names import NAME_LENGTH_MAX
from protocol.api import ApiKey
from protocol.codec import encode_request
from protocol.messages import ConsumerGroupHeartbeatRequest, ListTransactionsRequest, Message
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.storage.memory_env import MemoryEnv

# At most 3 and 5 ms on a quiet machine. Without the limits, the slowest takes 5 s to match.
COMPILE_SECONDS_MAX = 0.01
MATCH_SECONDS_MAX = 0.02
HOSTILE = (
    "(.*)" * 500,
    "(((a*)*)*)*" * 180,
    "(a?)" * 500,
    "a?" * 500,
    "a?" * 1000,
    "x{0,9}" * 55,
    "x{0,9}" * 275,
    "x{0,1000}" * 200,
    r"\pL?" * 500,
    r"[^\PL]?" * 280,
    r"(?i)\PL\PL\PL\PL\PL",
    r"(?i)[\x{100}-\x{10ffff}]" * 80,
    "(?:a?b?){498}",
    "(?:a?b?){900}",
    "(?:a{0,30}){0,30}",
    "(?i)" + "é" * 1250,
    "(?i)" + "é" * 1900,
    "[ab]*a[ab]{498}",
    "[" + "".join(chr(0x100 + 2 * number) for number in range(1900)) + "]",
)


@pytest.mark.parametrize("expression", HOSTILE, ids=[text[:12] for text in HOSTILE])
def test_no_expression_takes_long_to_compile(expression: str) -> None:
    def seconds() -> float:
        re2.purge()  # its cache
        began = time.thread_time()
        with suppress(PatternError):
            ClientPattern(expression)
        return time.thread_time() - began

    assert min(seconds() for _ in range(5)) < COMPILE_SECONDS_MAX


@pytest.mark.parametrize("expression", HOSTILE, ids=[text[:12] for text in HOSTILE])
@pytest.mark.parametrize("length", [NAME_LENGTH_MAX, 32_767])
def test_no_expression_takes_long_to_match(expression: str, length: int) -> None:
    with suppress(PatternError):
        pattern = ClientPattern(expression)
        for unit in ("a", "ab", "x"):
            text = (unit * length)[:length]
            assert min(seconds_to_match(pattern, text) for _ in range(3)) < MATCH_SECONDS_MAX


def seconds_to_match(pattern: ClientPattern, text: str) -> float:
    began = time.thread_time()
    pattern.matches(text)
    return time.thread_time() - began


@pytest.mark.parametrize("is_heartbeat", [True, False])
async def test_a_client_compiles_one_expression_in_a_round_of_the_loop(
    is_heartbeat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(number: int) -> tuple[ApiKey, int, Message]:
        if is_heartbeat:
            body = ConsumerGroupHeartbeatRequest(
                group_id=f"g{number}",
                member_id="m",
                member_epoch=0,
                rebalance_timeout_ms=10_000,
                subscribed_topic_regex=f"orders|{number}",
                topic_partitions=[],
            )
            return ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, body
        pattern = f"tx|{number}"
        return (
            ApiKey.LIST_TRANSACTIONS,
            2,
            ListTransactionsRequest(transactional_id_pattern=pattern),
        )

    rounds, of_compilations, compile_anew = [0], list[int](), re2.compile

    def noted(text: str, options: re2.Options) -> object:
        of_compilations.append(rounds[-1])
        return compile_anew(text, options)

    monkeypatch.setattr(re2, "compile", noted)
    async with broker_in_memory(MemoryEnv(seed=1), topics={"orders": {}}) as broker:
        port = broker.addresses[0].port
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for number, (_, writer) in enumerate(connections):
            key, version, body = request(number)
            writer.write(encode_request(key, version, 1, "client", body))
        async with asyncio.timeout(30):
            while len(of_compilations) < len(connections):
                rounds.append(rounds[-1] + 1)
                await asyncio.sleep(0)
        for _, writer in connections:
            writer.close()
    assert len(set(of_compilations)) == len(connections)


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
    ("expression", "name"),
    [
        (r"[a-zA-Z0-9._-]{1,249}\.v[0-9]{1,3}", "orders.v12"),
        (r"(?i)(?:dev|test|prod)-[a-z]{1,50}(?:-[0-9]+)?(?:\.dlq)?", "Prod-orders-7.dlq"),
        (r"[\p{L}\p{N}_-]+\.[\p{L}\p{N}_-]+", "bestellungen.größe"),
        (r"\d{4}-\d{2}-\d{2}T\d{2}", "2024-02-29T12"),
    ],
)
def test_expressions_in_use_are_accepted(expression: str, name: str) -> None:
    assert ClientPattern(expression).matches(name)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(", "missing ): ("),
        ("a" * 2001, "it has 2001 characters, more than 2000"),
        ("x{0,9}" * 55 + "a?b*c+d{3}", "its repetitions add up to 501, more than 500"),
        ("x{2,}{498}?", "its repetitions add up to 501, more than 500"),
        (r"\pL" * 6, r"it has more than 5 Unicode classes (\p, \P)"),
        ("(?:" + "abcdefghij" * 150 + "){9}", "pattern too large - compile failed"),
    ],
)
def test_a_refusal_names_the_reason(expression: str, reason: str) -> None:
    with pytest.raises(PatternError) as refusal:
        ClientPattern(expression)
    assert str(refusal.value) == reason


def test_a_long_id_does_not_match_an_expression_of_many_steps() -> None:
    text = "a" * 32_767
    assert ClientPattern("a.*").matches(text)
    assert not ClientPattern("(?:a?){400}a*").matches(text)


def test_a_search_that_takes_too_long_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_patterns, "SEARCH_SECONDS_MAX", 0.0)
    slow, quick = ClientPattern("(?:(?:a?){40}){0,10}"), ClientPattern("a.*")
    name = "a" * NAME_LENGTH_MAX
    slow.matches(name)
    with pytest.raises(PatternError, match="the search took more than"):
        slow.matches(name)
    assert all(quick.matches(name) for _ in range(100))
