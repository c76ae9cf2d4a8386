"""Quotas over real sockets: a client above its quota is throttled, the others are not."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker.app import Broker
from broker.quotas.client_quotas import ClientMeters, ClientQuotas, ThrottleKey
from broker.quotas.connection_rates import ADMITTED, ConnectionRates
from broker.quotas.entities import make_entity
from protocol import messages as m
from protocol.api import ApiKey
from protocol.codec import decode_response, encode_request
from protocol.errors import ErrorCode
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.protocol.raw_client import (
    PRODUCE_VERSION,
    RawClient,
    fetch_request,
    produce_request,
)
from tests.support.protocol.requests import advertised_range
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv

TOPIC = "orders"


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with broker_in_memory(MemoryEnv(seed=3)) as broker:
        await broker.metadata_service.create(TOPIC, 1, {})
        yield broker


class Client(RawClient):
    """A client with a client id."""

    def __init__(self, broker: Broker, client_id: str) -> None:
        super().__init__(broker.addresses[0].port)
        self.client_id = client_id

    def call(self, key: ApiKey, body: Any, version: int | None = None) -> Any:
        version = advertised_range(key).max_version if version is None else version
        self.send(encode_request(key, version, 7, self.client_id, body))
        return decode_response(key, version, self.receive_frame())[1]


def alter(
    *entries: tuple[dict[str, str | None], dict[str, float | None]], check: bool = False
) -> Any:
    return m.AlterClientQuotasRequest(
        entries=[
            m.AlterClientQuotasRequestEntry(
                entity=[
                    m.AlterClientQuotasRequestEntity(entity_type=kind, entity_name=name)
                    for kind, name in parts.items()
                ],
                ops=[
                    m.AlterClientQuotasRequestOp(key=key, value=value or 0.0, remove=value is None)
                    for key, value in values.items()
                ],
            )
            for parts, values in entries
        ],
        validate_only=check,
    )


async def set_quota(broker: Broker, parts: dict[str, str | None], **values: float | None) -> None:
    def exchange() -> None:
        with Client(broker, "admin") as client:
            answer = client.call(ApiKey.ALTER_CLIENT_QUOTAS, alter((parts, values)))
            assert [(row.error_code, row.error_message) for row in answer.entries] == [(0, None)]

    await asyncio.to_thread(exchange)


async def test_altered_quotas_are_described_and_survive_a_restart() -> None:
    env = MemoryEnv(seed=4)
    async with broker_in_memory(env) as broker:
        await set_quota(broker, {"client-id": "app", "user": "bob"}, producer_byte_rate=1000.0)
        await set_quota(broker, {"user": None}, request_percentage=50.0, consumer_byte_rate=10.0)
        await set_quota(broker, {"user": None}, consumer_byte_rate=None)
        refused = alter(
            ({"user": "bad"}, {"bogus": 1.0}),
            ({"user": "good"}, {"bogus": None}),
            ({"user": "bad", **{str(n): "" for n in range(1_000)}}, {}),
        )
        checked = alter(({"user": "checked"}, {"producer_byte_rate": 1.0}), check=True)

        def exchange() -> list[list[int]]:
            with Client(broker, "admin") as client:
                answers = [
                    client.call(ApiKey.ALTER_CLIENT_QUOTAS, body) for body in (refused, checked)
                ]
            return [[row.error_code for row in answer.entries] for answer in answers]

        assert await asyncio.to_thread(exchange) == [[42, 0, 42], [0]]
    async with broker_in_memory(env) as broker:
        assert broker.quotas.enforced

        def describe() -> Any:
            with Client(broker, "admin") as client:
                return client.call(
                    ApiKey.DESCRIBE_CLIENT_QUOTAS, m.DescribeClientQuotasRequest(components=[])
                )

        answer = await asyncio.to_thread(describe)
        assert answer.error_code == 0
        assert {
            tuple((part.entity_type, part.entity_name) for part in entry.entity): {
                value.key: value.value for value in entry.values
            }
            for entry in answer.entries
        } == {
            (("client-id", "app"), ("user", "bob")): {"producer_byte_rate": 1000.0},
            (("user", None),): {"request_percentage": 50.0},
        }


async def test_a_producer_above_its_quota_is_muted_for_the_throttle_time(broker: Broker) -> None:
    await set_quota(broker, {"client-id": "fast"}, producer_byte_rate=10_000.0)
    records = bytes(batch_of(b"x" * 115_000))

    def exchange() -> tuple[int, float, int, float]:
        with Client(broker, "fast") as fast, Client(broker, "other") as other:
            began = time.monotonic()
            throttled = fast.call(ApiKey.PRODUCE, produce_request(TOPIC, records), PRODUCE_VERSION)
            answered = time.monotonic() - began
            fast.send(encode_request(ApiKey.API_VERSIONS, 0, 8, "fast", m.ApiVersionsRequest()))
            free = other.call(ApiKey.PRODUCE, produce_request(TOPIC, records), PRODUCE_VERSION)
            assert throttled.responses[0].partition_responses[0].error_code == 0
            assert answered < 1
            assert time.monotonic() - began < 1.4, "another client had to wait"
            fast.receive_frame()
            return (
                throttled.throttle_time_ms, answered, free.throttle_time_ms,
                time.monotonic() - began,
            )  # fmt: skip

    throttle_ms, _, free_ms, muted_seconds = await asyncio.to_thread(exchange)
    assert 1_500 <= throttle_ms <= 1_600
    assert free_ms == 0
    assert muted_seconds >= throttle_ms / 1000
    assert broker.quotas.throttles[ThrottleKey("Produce", "", "fast")].responses == 1


async def test_a_throttled_client_keeps_no_memory_that_others_need(broker: Broker) -> None:
    await set_quota(broker, {"client-id": "fast"}, producer_byte_rate=50_000.0)
    produce = produce_request(TOPIC, bytes(batch_of(b"x" * 600_000)))
    frame = encode_request(ApiKey.PRODUCE, PRODUCE_VERSION, 7, "fast", produce)
    hello = encode_request(ApiKey.API_VERSIONS, 0, 8, "fast", m.ApiVersionsRequest())

    def exchange() -> int:
        with Client(broker, "fast") as client:
            client.send(hello + frame)
            client.receive_frame()
            client.send(frame[:500_000])  # after the request that is throttled
            client.receive_frame()
            time.sleep(0.1)
            return broker.listener.budget.used_bytes

    assert await asyncio.to_thread(exchange) == 0


async def test_a_consumer_above_its_quota_gets_no_records_until_the_pause_is_over(
    broker: Broker,
) -> None:
    await set_quota(broker, {"user": None}, consumer_byte_rate=1_000.0)
    records = bytes(batch_of(b"x" * 8_000))

    def exchange() -> list[tuple[int, int]]:
        answers = []
        with Client(broker, "c") as client:
            client.call(ApiKey.PRODUCE, produce_request(TOPIC, records), PRODUCE_VERSION)
            for _ in range(3):
                answer = client.call(ApiKey.FETCH, fetch_request(TOPIC, 0), 12)
                rows = answer.responses
                fetched = len(rows[0].partitions[0].records or b"") if rows else 0
                answers.append((fetched, answer.throttle_time_ms))
                if answer.throttle_time_ms:
                    break
        return answers

    answers = await asyncio.to_thread(exchange)
    assert answers[0] == (len(records), 0)
    assert answers[1][0] == 0
    assert answers[1][1] > 5_000


async def test_request_time_above_the_quota_throttles_every_api(broker: Broker) -> None:
    await set_quota(broker, {"client-id": "busy"}, request_percentage=0.0001)

    def exchange() -> list[int]:
        with Client(broker, "busy") as client:
            return [
                client.call(ApiKey.METADATA, m.MetadataRequest(topics=None)).throttle_time_ms
                for _ in range(2)
            ]

    assert (await asyncio.to_thread(exchange))[1] == 1_000


@pytest.mark.parametrize("is_broker", [True, False])
async def test_only_brokers_may_write_markers_without_a_quota_of_time(is_broker: bool) -> None:
    super_user = "User:ANONYMOUS" if is_broker else "User:admin"
    authorization = {"enabled": True, "super_users": [super_user]}
    async with broker_in_memory(MemoryEnv(seed=3), authorization=authorization) as broker:
        broker.quotas.update({(("user", None),): {"request_percentage": 0.0001}})

        def exchange() -> None:
            with Client(broker, "busy") as client:
                for _ in range(2):
                    client.call(ApiKey.WRITE_TXN_MARKERS, m.WriteTxnMarkersRequest(markers=[]))

        await asyncio.to_thread(exchange)
        throttled = sum(count.responses for count in broker.quotas.throttles.values())
        assert bool(throttled) is not is_broker


async def test_decompression_in_a_thread_counts_as_request_time(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.metadata_service.create("table", 1, {"cleanup.policy": "compact"})
    await set_quota(broker, {"client-id": "busy"}, request_percentage=50.0)
    charged: list[tuple[str, int]] = []

    def note(meters: ClientMeters, nanoseconds: int) -> None:
        assert meters.request is not None
        charged.append((meters.request.key.client_id, nanoseconds))

    monkeypatch.setattr(broker.quotas, "charge_thread", note)
    zipped = bytes(batch_of(bytes(4 << 20), codec=1))

    def exchange() -> None:
        with Client(broker, "busy") as client:
            answer = client.call(ApiKey.PRODUCE, produce_request("table", zipped), PRODUCE_VERSION)
            assert answer.responses[0].partition_responses[0].error_code == 0

    await asyncio.to_thread(exchange)
    ((client_id, nanoseconds),) = charged
    assert client_id == "busy"
    assert nanoseconds > 1_000_000


async def test_topics_above_the_mutation_rate_are_refused_or_throttled(broker: Broker) -> None:
    await set_quota(broker, {"user": None, "client-id": "maker"}, controller_mutation_rate=1.0)

    def create(client: Client, name: str, version: int) -> tuple[int, int]:
        topic = m.CreateTopicsRequestTopic(name=name, num_partitions=9, replication_factor=1)
        answer = client.call(
            ApiKey.CREATE_TOPICS, m.CreateTopicsRequest(topics=[topic], timeout_ms=1000), version
        )
        return answer.topics[0].error_code, answer.throttle_time_ms

    def exchange() -> list[tuple[int, int]]:
        with Client(broker, "maker") as maker, Client(broker, "other") as other:
            return [
                create(maker, "a", 7),
                create(maker, "b", 7),
                create(maker, "c", 7),
                create(other, "d", 7),
            ]

    first, second, third, other = await asyncio.to_thread(exchange)
    assert (first, second, other) == ((0, 0), (0, 0), (0, 0))  # a burst of eleven, overdrawn once
    assert third[0] == ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert 3_000 < third[1] <= 7_000
    assert "b" in broker.topics
    assert "c" not in broker.topics


async def test_topics_that_are_created_at_first_use_count_for_the_mutation_rate(
    broker: Broker,
) -> None:
    await set_quota(broker, {"client-id": "maker"}, controller_mutation_rate=1.0)
    names = [f"t{number}" for number in range(20)]

    def exchange() -> list[int]:
        with Client(broker, "maker") as maker:
            topics = [m.MetadataRequestTopic(name=name) for name in names]
            body = m.MetadataRequest(topics=topics, allow_auto_topic_creation=True)
            return [row.error_code for row in maker.call(ApiKey.METADATA, body).topics]

    codes = await asyncio.to_thread(exchange)
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION  # clients ask again
    assert codes == [0] * 12 + [unknown] * 8
    assert [name in broker.topics for name in names] == [code == 0 for code in codes]


async def test_an_old_client_is_throttled_for_topics_above_the_rate(broker: Broker) -> None:
    await set_quota(broker, {"client-id": "old"}, controller_mutation_rate=1.0)

    def exchange() -> Any:
        topic = m.CreateTopicsRequestTopic(name="a", num_partitions=15, replication_factor=1)
        with Client(broker, "old") as client:
            body = m.CreateTopicsRequest(topics=[topic], timeout_ms=1000)
            return client.call(ApiKey.CREATE_TOPICS, body, 5)

    answer = await asyncio.to_thread(exchange)
    assert answer.topics[0].error_code == 0
    assert 1_000 < answer.throttle_time_ms <= 4_000


# Connections --------------------------------------------------------------------------------------


async def test_an_address_above_its_rate_is_disconnected(broker: Broker) -> None:
    await set_quota(broker, {"ip": "127.0.0.1"}, connection_creation_rate=1.0)

    def exchange() -> list[bool]:
        answered: list[bool] = []
        while all(answered) and len(answered) < 20:
            with Client(broker, "c") as client:
                try:
                    client.call(ApiKey.API_VERSIONS, m.ApiVersionsRequest(), 0)
                    answered.append(True)
                except ConnectionError:
                    answered.append(False)
        return answered

    answered = await asyncio.to_thread(exchange)
    assert answered[:9] == [True] * 9
    assert False in answered[9:]
    assert broker.quotas.connections.refused >= 1
    stats = broker.listener.stats
    assert stats.refused == broker.quotas.connections.refused
    assert stats.accepted == answered.count(True) + 1  # and that of the quota


def test_rates_of_connections() -> None:
    now = 0.0
    rates = ConnectionRates(lambda: now)
    assert rates.admit("10.0.0.1") == ADMITTED
    rates.update(
        {
            (("ip", "10.0.0.1"),): {"connection_creation_rate": 2.0},
            (("ip", None),): {"connection_creation_rate": 1.0},
        }
    )
    assert [rates.admit("10.0.0.1").is_refused for _ in range(21)] == [False] * 20 + [True]
    assert [rates.admit("10.0.0.2").is_refused for _ in range(11)] == [False] * 10 + [True]
    assert [rates.admit("::ffff:10.0.0.3").is_refused for _ in range(10)] == [False] * 10
    assert rates.admit("10.0.0.3").is_refused
    rates.update({})
    rates.limit = 5.0
    admissions = [rates.admit("10.0.0.1") for _ in range(51)]
    assert admissions[:50] == [ADMITTED] * 50
    assert admissions[50] == (False, pytest.approx(0.2))
    assert (rates.refused, rates.delayed) == (3, 1)


# Which quota applies -----------------------------------------------------------------------------

LEVELS: list[tuple[dict[str, str | None], tuple[str, str]]] = [
    ({"user": "u", "client-id": "c"}, ("u", "c")),
    ({"user": "u", "client-id": None}, ("u", "c")),
    ({"user": "u"}, ("u", "")),
    ({"user": None, "client-id": "c"}, ("u", "c")),
    ({"user": None, "client-id": None}, ("u", "c")),
    ({"user": None}, ("u", "")),
    ({"client-id": "c"}, ("", "c")),
    ({"client-id": None}, ("", "c")),
]


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_the_most_specific_quota_applies(level: int) -> None:
    quotas = ClientQuotas(lambda: 0.0)
    quotas.update(
        {
            make_entity(parts): {"producer_byte_rate": float(n + 1)}
            for n, (parts, _) in enumerate(LEVELS)
            if n >= level
        }
    )
    meter = quotas.meters("u", "c").produce
    assert meter is not None
    assert meter.limit == level + 1
    assert (meter.key.user, meter.key.client_id) == LEVELS[level][1]
    assert quotas.meters("u", "c").fetch is None


def test_clients_of_a_user_share_its_rate_and_keep_it_when_the_limit_changes() -> None:
    quotas = ClientQuotas(lambda: 0.0)
    quotas.update({(("user", "u"),): {"producer_byte_rate": 100.0}})
    assert quotas.charge_produce(quotas.meters("u", "a"), 1_000) == 0
    assert quotas.charge_produce(quotas.meters("u", "b"), 100) == 1_000
    quotas.update({(("user", "u"),): {"producer_byte_rate": 1_000.0}})
    assert quotas.charge_produce(quotas.meters("u", "c"), 9_000) == 100
    assert quotas.charge_produce(quotas.meters("v", "c"), 99_000) == 0


def test_the_number_of_time_series_is_bounded() -> None:
    quotas = ClientQuotas(lambda: 0.0)
    quotas.update({(("client-id", None),): {"producer_byte_rate": 1.0}})
    for number in range(25_000):
        quotas.charge_produce(quotas.meters("", str(number)), 20)
    assert len(quotas.throttles) <= 101
    assert sum(count.responses for count in quotas.throttles.values()) == 25_000


def test_long_client_ids_take_little_memory() -> None:
    quotas = ClientQuotas(lambda: 0.0)
    quotas.update({(("client-id", None), ("user", None)): {"producer_byte_rate": 100.0}})
    first = quotas.meters("u", "x" * 32_000)
    assert quotas.meters("u", "x" * 31_000 + "y" * 1_000) is first
    assert quotas.charge_produce(first, 1_100) == 1_000
    assert {len(key.client_id) for key in quotas.throttles} == {1_000}
