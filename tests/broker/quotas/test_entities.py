"""What clients may set as quotas, row by row as Apache Kafka 4.3.0 answered the same requests."""

import math

import pytest

from broker.quotas.entities import QuotaError, check_entity, check_value, make_entity, parse_filter
from protocol.errors import ErrorCode

ALICE = {"user": "alice"}


@pytest.mark.parametrize(
    ("parts", "key", "value"),
    [
        (ALICE, "producer_byte_rate", 1000.0),
        (ALICE, "producer_byte_rate", 1000.0000001),
        ({"user": "alice", "client-id": "app"}, "consumer_byte_rate", 501.0),
        ({"user": None}, "request_percentage", 12.5),
        ({"user": None, "client-id": None}, "controller_mutation_rate", 1.5),
        ({"ip": "127.0.0.7"}, "connection_creation_rate", 10.0),
        ({"ip": None}, "connection_creation_rate", 11.0),
    ],
)
def test_a_quota_is_accepted(parts: dict[str, str | None], key: str, value: float) -> None:
    check_value(check_entity(make_entity(parts)), key, value)


@pytest.mark.parametrize(
    ("parts", "key", "value", "reason"),
    [
        ({}, "producer_byte_rate", 1.0, "Invalid empty client quota entity"),
        ({"user": ""}, "producer_byte_rate", 1.0, "Empty user not supported"),
        ({"group": "g"}, "producer_byte_rate", 1.0, "Unhandled client quota entity type: group"),
        (
            {"ip": "127.0.0.7", "user": "alice"},
            "connection_creation_rate",
            1.0,
            "Invalid quota entity combination, IP entity should"
            "not be combined with User or ClientId",
        ),
        (
            {"ip": "no.such.host.invalid"},
            "connection_creation_rate",
            1.0,
            "no.such.host.invalid is not a valid IP or resolvable host.",
        ),
        (
            {"ip": "127.0.0.7"},
            "producer_byte_rate",
            1.0,
            "Invalid configuration key producer_byte_rate",
        ),
        (ALICE, "bogus", 1.0, "Invalid configuration key bogus"),
        (ALICE, "SCRAM-SHA-256", 1.0, "Invalid configuration key SCRAM-SHA-256"),
        (ALICE, "producer_byte_rate", -1.0, "Quota producer_byte_rate must be greater than 0"),
        (ALICE, "producer_byte_rate", 0.0, "Quota producer_byte_rate must be greater than 0"),
        (ALICE, "producer_byte_rate", 10.5, "producer_byte_rate cannot be a fractional value."),
        (
            ALICE,
            "producer_byte_rate",
            1e19,
            "Proposed value for producer_byte_rate is too large for a LONG.",
        ),
        (
            ALICE,
            "producer_byte_rate",
            math.inf,
            "Proposed value for producer_byte_rate is too large for a LONG.",
        ),
        (
            {"ip": "127.0.0.7"},
            "connection_creation_rate",
            3e9,
            "Proposed value for connection_creation_rate is too large for an INT.",
        ),
        # Kafka stores these two; its throttle times are then NaN or never.
        (ALICE, "request_percentage", math.inf, "Quota request_percentage must be a finite number"),
        (ALICE, "producer_byte_rate", math.nan, "Quota producer_byte_rate must be a finite number"),
    ],
)
def test_a_quota_is_refused(
    parts: dict[str, str | None], key: str, value: float, reason: str
) -> None:
    with pytest.raises(QuotaError) as refused:
        check_value(check_entity(make_entity(parts)), key, value)
    assert refused.value.reason == reason
    assert refused.value.code is ErrorCode.INVALID_REQUEST


ENTITIES = [
    make_entity(parts)
    for parts in (
        {"user": "alice"},
        {"user": None},
        {"user": "alice", "client-id": "app"},
        {"user": None, "client-id": None},
        {"client-id": "app"},
        {"ip": "127.0.0.7"},
    )
]


@pytest.mark.parametrize(
    ("components", "strict", "selected"),
    [
        ([], False, [0, 1, 2, 3, 4, 5]),
        ([], True, []),
        ([("user", 0, "alice")], False, [0, 2]),
        ([("user", 0, "alice")], True, [0]),
        ([("user", 1, None)], False, [1, 3]),
        ([("user", 1, None)], True, [1]),
        ([("user", 2, None)], False, [0, 1, 2, 3]),
        ([("user", 2, None), ("client-id", 2, None)], True, [2, 3]),
        ([("ip", 2, None)], False, [5]),
        ([("user", 0, "")], False, []),
    ],
)
def test_a_filter_selects_entities(
    components: list[tuple[str, int, str | None]], strict: bool, selected: list[int]
) -> None:
    entity_filter = parse_filter(components, strict=strict)
    assert [n for n, entity in enumerate(ENTITIES) if entity_filter.matches(entity)] == selected


@pytest.mark.parametrize(
    ("components", "code", "reason"),
    [
        (
            [("user", 0, None)],
            42,
            "Request specified MATCH_TYPE_EXACT, but set match string to null.",
        ),
        (
            [("user", 1, "x")],
            42,
            "Request specified MATCH_TYPE_DEFAULT, but also specified a match string.",
        ),
        (
            [("user", 2, "x")],
            42,
            "Request specified MATCH_TYPE_SPECIFIED, but also specified a match string.",
        ),
        ([("user", 3, None)], 42, "Unknown match type 3"),
        ([("", 0, "x")], 42, "Invalid empty entity type."),
        ([("group", 0, "x")], 35, "Unsupported entity type group"),
        (
            [("user", 0, "a"), ("user", 0, "b")],
            42,
            "Entity type user cannot appear more than once in the filter.",
        ),
        (
            [("ip", 2, None), ("user", 2, None)],
            42,
            "Invalid entity filter component combination. IP filter component should not be used "
            "with user or clientId filter component.",
        ),
    ],
)  # fmt: skip
def test_a_filter_is_refused(
    components: list[tuple[str, int, str | None]], code: int, reason: str
) -> None:
    with pytest.raises(QuotaError) as refused:
        parse_filter(components, strict=False)
    assert (refused.value.code, refused.value.reason) == (code, reason)
