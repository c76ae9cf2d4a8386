"""Records without a key: how many a topic would lose if it became compacted, said beforehand."""

from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.event_loop.directory_threads import DirectoryThreads
from broker.inspection.keyless_records import KeylessSampler
from broker.inspection.record_reader import RecordReader
from config.topics.keyless_estimate import PAGE_RECORDS, PAGES
from protocol import messages as m
from protocol.api import ApiKey
from storage.format.batch import read_header
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import call_api
from tests.support.broker.principals import PrincipalClient
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv

TOPICS = {"orders": {"partitions": 2}}
ORDERS = "/api/v1/topics/orders"
EXPLAIN = "/api/v1/cleaner/partitions/orders/0"
COMPACT = b'{"set": {"cleanup.policy": "compact"}}'
JSON = {"Content-Type": "application/json"}
CLIENT = "a client"


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with broker_in_memory(MemoryEnv(seed=5), topics=TOPICS) as broker:
        yield broker


def reader() -> RecordReader:
    return RecordReader(lambda: 0.0, DirectoryThreads(lambda: 0.0))


@pytest.fixture
def sampler() -> KeylessSampler:
    return KeylessSampler(reader(), lambda: 0.0)


def fill(broker: Broker, *counts: tuple[int, bytes | None], partition: int = 0) -> None:
    """Append batches of so many records with this key."""
    target = broker.topics.partition(TopicPartition("orders", partition))
    assert target is not None
    for count, key in counts:
        data = memoryview(batch_of(*[b"v"] * count, key=key))
        target.append(data, read_header(data), 0)


async def test_all_records_of_a_small_partition_are_counted(
    broker: Broker, sampler: KeylessSampler
) -> None:
    fill(broker, (5, None), (200, b"k"), (2, None))
    found = await sampler.of_partition(broker.topics.existing("orders").partitions[0], CLIENT)
    assert (found.total, found.records, found.is_exact) == (7, 207, True)
    assert found.warning("orders-0").startswith("7 of 207 records of orders-0 have no key.")


async def test_a_large_partition_is_sampled_evenly(broker: Broker, sampler: KeylessSampler) -> None:
    half = PAGES * PAGE_RECORDS
    fill(broker, *[(64, None)] * (half // 64), *[(64, b"k")] * (half // 64))
    found = await sampler.of_partition(broker.topics.existing("orders").partitions[0], CLIENT)
    assert not found.is_exact
    assert (found.read, found.keyless) == (half, half // 2)
    assert (found.total, found.records) == (half, 2 * half)
    assert "About 512 of 1,024 (from a sample of 512) records" in found.warning("orders-0")


async def test_a_topic_whose_records_have_keys_needs_no_warning(
    broker: Broker, sampler: KeylessSampler
) -> None:
    topic = broker.topics.existing("orders")
    assert (await sampler.of_topic(topic, CLIENT)).warning("orders") == ""
    fill(broker, (3, b"k"))
    assert (await sampler.of_topic(topic, CLIENT)).warning("orders") == ""


async def test_a_topic_that_becomes_compacted_says_first_what_it_would_lose(broker: Broker) -> None:
    fill(broker, (5, None), (3, b"k"))
    fill(broker, (4, None), partition=1)
    warning = (
        "9 of 12 records of orders have no key. A clean of a compacted topic removes them, and "
        "producers can write no others. Copy them to another topic first if you need them."
    )
    only = COMPACT.replace(b"{", b'{"validate_only": true, ', 1)
    status, answer = await call_api(broker, "PATCH", ORDERS, only, **JSON)
    assert (status, answer["warnings"]) == (200, [warning])
    assert not broker.topics.existing("orders").config.compacts
    status, answer = await call_api(broker, "PATCH", ORDERS, COMPACT, **JSON)
    assert (status, answer["warnings"]) == (200, [warning])
    assert broker.topics.existing("orders").config.compacts
    _, answer = await call_api(broker, "PATCH", ORDERS, COMPACT, **JSON)
    assert answer["warnings"] == [], "it is compacted already"


async def test_the_log_warns_whoever_alters_the_topic_over_the_kafka_protocol(
    broker: Broker,
) -> None:
    fill(broker, (5, None), (3, b"k"))
    with capture_logs() as lines:
        for policy in ("compact", "compact,delete"):
            change = m.IncrementalAlterConfigsRequestConfig(
                name="cleanup.policy", config_operation=0, value=policy
            )
            resource = m.IncrementalAlterConfigsRequestResource(
                resource_type=2, resource_name="orders", configs=[change]
            )
            answer = await PrincipalClient(broker, "ada").request(
                ApiKey.INCREMENTAL_ALTER_CONFIGS,
                1,
                m.IncrementalAlterConfigsRequest(resources=[resource], validate_only=False),
            )
            assert answer.responses[0].error_code == 0
        await broker.keyless.wait_idle()
    (line,) = [line for line in lines if line["event"] == "records without key will be removed"]
    assert (line["topic"], line["records"]) == ("orders", 5)


async def test_an_estimate_ends_in_time(broker: Broker) -> None:
    fill(broker, *[(64, None)] * (2 * PAGES))
    fill(broker, (6, None), partition=1)
    times = iter([0.0, 0.0, 3.0, 3.0])
    sampler = KeylessSampler(
        RecordReader(lambda: 0.0, DirectoryThreads(lambda: 0.0)), lambda: next(times)
    )
    found = await sampler.of_topic(broker.topics.existing("orders"), CLIENT)
    assert (found.read, found.records, found.is_exact) == (64, 2 * PAGES * 64 + 6, False)


async def test_other_changes_have_no_warning(broker: Broker) -> None:
    fill(broker, (5, None))
    change = b'{"set": {"retention.ms": "5", "cleanup.policy": "delete"}}'
    _, answer = await call_api(broker, "PATCH", ORDERS, change, **JSON)
    assert answer["warnings"] == []


@pytest.mark.parametrize("policy", ["delete", "compact"])
async def test_explain_names_the_records_that_a_first_clean_would_remove(
    broker: Broker, policy: str
) -> None:
    fill(broker, (5, None), (3, b"k"))
    change = f'{{"set": {{"cleanup.policy": "{policy}"}}}}'.encode()
    assert (await call_api(broker, "PATCH", ORDERS, change, **JSON))[0] == 200
    _, answer = await call_api(broker, "GET", EXPLAIN)
    assert answer["sentences"][-1].startswith("5 of 8 records of orders-0 have no key.")
