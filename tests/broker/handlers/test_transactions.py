"""The transaction APIs through a socket: what each version answers, and which batches pass."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker import client_patterns
from broker.app import Broker
from broker.handlers import fetch as fetch_module
from broker.handlers.list_offsets import READ_COMMITTED
from broker.handlers.transactions.administration import list_transactions
from broker.network.connection import CloseConnectionError
from broker.network.response_memory import ResponseMemory
from broker.topics.internal_topic import PartitionState
from broker.topics.producer_ids import Producer
from protocol import messages as m
from protocol.api import ApiKey
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode
from storage.format.batch import TRANSACTIONAL, Record, build_batch
from tests.support.broker.broker_in_memory import broker_in_memory, kafka_request
from tests.support.broker.principals import make_context
from tests.support.protocol.raw_client import fetch_request, produce_request
from tests.support.storage.memory_env import MemoryEnv

ID = "tx"


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with broker_in_memory(MemoryEnv(seed=11)) as broker:
        await broker.metadata_service.create("orders", 2, {})
        yield broker


async def init(broker: Broker, transactional_id: str = ID, **fields: Any) -> Any:
    body = m.InitProducerIdRequest(
        transactional_id=transactional_id, **{"transaction_timeout_ms": 60_000, **fields}
    )
    return await kafka_request(broker, ApiKey.INIT_PRODUCER_ID, body)


async def start(broker: Broker) -> Producer:
    answer = await init(broker)
    assert answer.error_code == ErrorCode.NONE
    return Producer(answer.producer_id, answer.producer_epoch)


async def add(broker: Broker, producer: Producer, *names: str, version: int = 3) -> list[int]:
    topics = [m.AddPartitionsToTxnRequestTopicV3(name=name, partitions=[0]) for name in names]
    body = m.AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=ID,
        v3_and_below_producer_id=producer.producer_id,
        v3_and_below_producer_epoch=producer.epoch,
        v3_and_below_topics=topics,
    )
    answer = await kafka_request(broker, ApiKey.ADD_PARTITIONS_TO_TXN, body, version)
    return [
        row.partition_error_code
        for topic in answer.results_by_topic_v3_and_below
        for row in topic.results_by_partition
    ]


async def produce(
    broker: Broker,
    producer: Producer,
    *,
    version: int,
    transactional_id: str | None = ID,
    sequence: int = 0,
) -> int:
    batch = build_batch(
        [Record(0, 1_700_000_000_000, b"k", b"v")],
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        base_sequence=sequence,
        attributes=TRANSACTIONAL,
    )
    body = produce_request("orders", bytes(batch))
    body.transactional_id = transactional_id
    answer = await kafka_request(broker, ApiKey.PRODUCE, body, version)
    code: int = answer.responses[0].partition_responses[0].error_code
    return code


async def end(broker: Broker, producer: Producer, *, commit: bool = True, version: int = 4) -> Any:
    body = m.EndTxnRequest(
        transactional_id=ID,
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        committed=commit,
    )
    return await kafka_request(broker, ApiKey.END_TXN, body, version)


async def test_a_producer_id_is_given_once_and_each_start_has_the_next_epoch(
    broker: Broker,
) -> None:
    first, second = await start(broker), await start(broker)
    assert second == Producer(first.producer_id, first.epoch + 1)
    other = await init(broker, "other")
    assert other.producer_id != first.producer_id


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"transactional_id": ""}, ErrorCode.INVALID_REQUEST),
        ({"transaction_timeout_ms": 0}, ErrorCode.INVALID_TRANSACTION_TIMEOUT),
        ({"transaction_timeout_ms": 900_001}, ErrorCode.INVALID_TRANSACTION_TIMEOUT),
        ({"producer_id": 5}, ErrorCode.INVALID_REQUEST),
        ({"producer_epoch": 5}, ErrorCode.INVALID_REQUEST),
    ],
)
async def test_a_wrong_start_is_refused(
    broker: Broker, fields: dict[str, Any], error: ErrorCode
) -> None:
    assert (await init(broker, **fields)).error_code == error


@pytest.mark.parametrize(
    ("version", "error"),
    [
        (10, ErrorCode.INVALID_TXN_STATE),
        (11, ErrorCode.TRANSACTION_ABORTABLE),
        (12, ErrorCode.NONE),  # transaction version 2 adds the partition
    ],
)
async def test_a_batch_needs_a_transaction_that_includes_its_partition(
    broker: Broker, version: int, error: ErrorCode
) -> None:
    producer = await start(broker)
    assert await produce(broker, producer, version=version) == error
    if error is ErrorCode.NONE:
        described = await describe(broker)
        assert (described.transaction_state, described.topics[0].topic) == ("Ongoing", "orders")


async def test_a_batch_without_its_transactional_id_is_refused(broker: Broker) -> None:
    producer = await start(broker)
    assert await add(broker, producer, "orders") == [ErrorCode.NONE]
    refused = await produce(broker, producer, version=11, transactional_id=None)
    assert refused == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert await produce(broker, producer, version=11) == ErrorCode.NONE


@pytest.mark.parametrize("version", [11, 12])
async def test_another_transactional_id_writes_nothing_into_an_open_transaction(
    broker: Broker, version: int
) -> None:
    producer = await start(broker)
    await add(broker, producer, "orders")
    assert await produce(broker, producer, version=version) == ErrorCode.NONE
    assert (await init(broker, "other")).error_code == ErrorCode.NONE
    for other in ("other", "unused", ""):
        refused = await produce(
            broker, producer, version=version, transactional_id=other, sequence=1
        )
        expected = ErrorCode.INVALID_PRODUCER_ID_MAPPING if other else ErrorCode.INVALID_REQUEST
        assert refused == expected, other
    assert await produce(broker, producer, version=version, sequence=1) == ErrorCode.NONE
    assert (await end(broker, producer)).error_code == ErrorCode.NONE


@pytest.mark.parametrize("version", [11, 12])
async def test_an_open_transaction_goes_on_while_its_coordinator_is_not_there(
    broker: Broker, version: int
) -> None:
    producer = await start(broker)
    await add(broker, producer, "orders")
    assert await produce(broker, producer, version=version) == ErrorCode.NONE
    transactions = broker._services.coordinators.transactions
    for sequence, state in enumerate((PartitionState.LOADING, PartitionState.OFFLINE), 1):
        for partition in range(transactions._store.partition_count):
            transactions.deactivate(partition, state)
        assert await produce(broker, producer, version=version, sequence=sequence) == 0


@pytest.mark.parametrize("version", [11, 12])
async def test_an_open_transaction_goes_on_after_a_restart(version: int) -> None:
    env = MemoryEnv(seed=12)
    async with broker_in_memory(env) as broker:
        await broker.metadata_service.create("orders", 2, {})
        producer = await start(broker)
        await add(broker, producer, "orders")
        assert await produce(broker, producer, version=version) == ErrorCode.NONE
    async with broker_in_memory(env) as broker:
        while (await describe(broker)).error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
            pass
        assert await produce(broker, producer, version=version, sequence=1) == ErrorCode.NONE
        assert (await end(broker, producer)).error_code == ErrorCode.NONE


@pytest.mark.parametrize("version", [11, 12])
async def test_batches_of_a_fenced_producer_are_refused(broker: Broker, version: int) -> None:
    zombie = await start(broker)
    await start(broker)
    refused = await produce(broker, zombie, version=version)
    assert refused == ErrorCode.INVALID_PRODUCER_EPOCH


async def test_no_batch_follows_the_marker_of_its_transaction(broker: Broker) -> None:
    producer = await start(broker)
    await add(broker, producer, "orders")
    assert await produce(broker, producer, version=11) == ErrorCode.NONE
    assert (await end(broker, producer)).error_code == ErrorCode.NONE
    late = await produce(broker, producer, version=10, sequence=1)
    assert late in (ErrorCode.INVALID_TXN_STATE, ErrorCode.NOT_ENOUGH_REPLICAS)


async def test_one_unknown_partition_keeps_the_others_out_of_the_transaction(
    broker: Broker,
) -> None:
    producer = await start(broker)
    assert await add(broker, producer, "orders", "nope", "__consumer_offsets") == [
        ErrorCode.OPERATION_NOT_ATTEMPTED,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ]
    assert (await describe(broker)).transaction_state == "Empty"


@pytest.mark.parametrize(
    ("version", "error"),
    [(1, ErrorCode.INVALID_PRODUCER_EPOCH), (2, ErrorCode.PRODUCER_FENCED)],
)
async def test_old_versions_name_a_fenced_producer_otherwise(
    broker: Broker, version: int, error: ErrorCode
) -> None:
    zombie = await start(broker)
    await start(broker)
    assert await add(broker, zombie, "orders", version=version) == [error]
    assert (await end(broker, zombie, version=version)).error_code == error


async def test_the_end_of_a_transaction_of_version_2_returns_the_next_epoch(
    broker: Broker,
) -> None:
    producer = await start(broker)
    await produce(broker, producer, version=12)
    answer = await end(broker, producer, version=5)
    assert (answer.error_code, answer.producer_id) == (0, producer.producer_id)
    assert answer.producer_epoch == producer.epoch + 1
    refused = await produce(broker, producer, version=12)
    assert refused == ErrorCode.INVALID_PRODUCER_EPOCH
    successor = Producer(answer.producer_id, answer.producer_epoch)
    assert await produce(broker, successor, version=12) == ErrorCode.NONE


async def test_an_unknown_transactional_id_is_refused(broker: Broker) -> None:
    await init(broker, "other")
    assert await add(broker, Producer(1, 0), "orders") == [ErrorCode.INVALID_PRODUCER_ID_MAPPING]
    described = await describe(broker)
    assert described.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND


async def describe(broker: Broker, transactional_id: str = ID) -> Any:
    body = m.DescribeTransactionsRequest(transactional_ids=[transactional_id])
    answer = await kafka_request(broker, ApiKey.DESCRIBE_TRANSACTIONS, body)
    return answer.transaction_states[0]


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({}, ["open", "tx"]),
        ({"state_filters": ["Empty"]}, ["tx"]),
        ({"state_filters": ["Ongoing", "Nonsense"]}, ["open"]),
        ({"state_filters": ["Nonsense"]}, []),
        ({"producer_id_filters": [1]}, []),
        ({"transactional_id_pattern": "o.*"}, ["open"]),
        ({"transactional_id_pattern": "pe"}, []),
    ],
)
async def test_transactions_are_listed_by_filters(
    broker: Broker, fields: dict[str, Any], ids: list[str]
) -> None:
    await start(broker)
    answer = await init(broker, "open")
    opened = Producer(answer.producer_id, answer.producer_epoch)
    assert await produce(broker, opened, version=12, transactional_id="open") == 0
    listed = await kafka_request(
        broker, ApiKey.LIST_TRANSACTIONS, m.ListTransactionsRequest(**fields)
    )
    assert sorted(row.transactional_id for row in listed.transaction_states) == ids
    unknown = [name for name in fields.get("state_filters", []) if name == "Nonsense"]
    assert listed.unknown_state_filters == unknown


async def test_one_principal_leaves_transactional_ids_for_others(broker: Broker) -> None:
    await start(broker)
    broker.coordinators.transactions._shares.limit = 4

    async def begin(transactional_id: str, creator: str) -> ErrorCode:
        answer = await broker.coordinators.transactions.init_producer(
            transactional_id, 60_000, None, creator
        )
        return answer.error

    first = [await begin(f"a{number}", "a") for number in range(3)]
    assert first == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.POLICY_VIOLATION]
    assert await begin("a0", "a") is ErrorCode.NONE
    assert await begin("b0", "b") is ErrorCode.NONE


async def test_a_pattern_that_is_no_regular_expression_is_refused(broker: Broker) -> None:
    body = m.ListTransactionsRequest(transactional_id_pattern="(")
    listed = await kafka_request(broker, ApiKey.LIST_TRANSACTIONS, body)
    assert listed.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION


async def test_a_search_with_a_pattern_that_takes_too_long_ends_with_an_error(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_patterns, "SEARCH_SECONDS_MAX", 0.0)
    await begin_transactions(broker, 3)
    body = m.ListTransactionsRequest(transactional_id_pattern="(?:(?:a?){40}){0,10}")
    listed = await kafka_request(broker, ApiKey.LIST_TRANSACTIONS, body)
    assert listed.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION
    assert not listed.transaction_states


async def test_a_search_with_a_pattern_ends_when_its_client_has_left(broker: Broker) -> None:
    await begin_transactions(broker, 3)
    context = make_context(broker)
    context.has_left = lambda: True
    header = RequestHeader(ApiKey.LIST_TRANSACTIONS, 2, 1, "client", 0)
    with pytest.raises(CloseConnectionError):
        await list_transactions(
            context, header, m.ListTransactionsRequest(transactional_id_pattern="a.*")
        )
    listed = await list_transactions(context, header, m.ListTransactionsRequest())
    assert len(listed.transaction_states) == 3


async def begin_transactions(broker: Broker, count: int) -> None:
    """Of ids that are long, so that a match may take time."""
    await start(broker)
    for number in range(count - 1):
        answer = await broker.coordinators.transactions.init_producer(
            f"{'a' * 100}{number}", 60_000, None, None
        )
        assert answer.error is ErrorCode.NONE


async def test_fetched_offsets_that_a_transaction_may_change_are_unstable(broker: Broker) -> None:
    producer = await start(broker)
    body = m.TxnOffsetCommitRequest(
        transactional_id=ID,
        group_id="g",
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        topics=[
            m.TxnOffsetCommitRequestTopic(
                name="orders",
                partitions=[
                    m.TxnOffsetCommitRequestPartition(
                        partition_index=0, committed_offset=5, committed_metadata=""
                    )
                ],
            )
        ],
    )
    refused = await kafka_request(
        broker, ApiKey.TXN_OFFSET_COMMIT, body, 4
    )  # its group was not added
    assert refused.topics[0].partitions[0].error_code == ErrorCode.TRANSACTION_ABORTABLE
    committed = await kafka_request(broker, ApiKey.TXN_OFFSET_COMMIT, body, 5)
    assert committed.topics[0].partitions[0].error_code == ErrorCode.NONE
    assert await fetch(broker, stable=True) == (ErrorCode.UNSTABLE_OFFSET_COMMIT, -1)
    assert await fetch(broker, stable=False) == (ErrorCode.NONE, -1)
    assert (await end(broker, producer, version=5)).error_code == ErrorCode.NONE
    assert await fetch(broker, stable=True) == (ErrorCode.NONE, 5)


async def fetch(broker: Broker, *, stable: bool) -> tuple[int, int]:
    topic = m.OffsetFetchRequestGroupTopic(name="orders", partition_indexes=[0])
    group = m.OffsetFetchRequestGroup(group_id="g", topics=[topic])
    body = m.OffsetFetchRequest(groups=[group], require_stable=stable)
    answer = await kafka_request(broker, ApiKey.OFFSET_FETCH, body, 9)
    row = answer.groups[0].topics[0].partitions[0]
    return row.error_code, row.committed_offset


async def test_a_marker_with_an_old_epoch_is_refused_and_a_second_one_is_not_written(
    broker: Broker,
) -> None:
    producer = await start(broker)
    await produce(broker, producer, version=12)
    assert await abort(broker, producer.producer_id, producer.epoch - 1) == (
        ErrorCode.INVALID_PRODUCER_EPOCH
    )
    assert await abort(broker, producer.producer_id, producer.epoch) == ErrorCode.NONE
    assert await abort(broker, producer.producer_id, producer.epoch) == ErrorCode.NONE
    partition = broker.topics.find("orders", 0)
    assert not isinstance(partition, ErrorCode)
    assert partition.log.log_end_offset == 2  # the record and one marker


async def abort(broker: Broker, producer_id: int, epoch: int) -> int:
    topic = m.WriteTxnMarkersRequestTopic(name="orders", partition_indexes=[0])
    marker = m.WriteTxnMarkersRequestMarker(
        producer_id=producer_id,
        producer_epoch=epoch,
        transaction_result=False,
        topics=[topic],
        coordinator_epoch=0,
    )
    answer = await kafka_request(
        broker, ApiKey.WRITE_TXN_MARKERS, m.WriteTxnMarkersRequest(markers=[marker]), 1
    )
    code: int = answer.markers[0].topics[0].partitions[0].error_code
    return code


@pytest.mark.parametrize(("version", "lowest"), [(3, 1), (4, 0)])
async def test_clients_learn_of_transaction_version_2(
    broker: Broker, version: int, lowest: int
) -> None:
    body = m.ApiVersionsRequest(client_software_name="test", client_software_version="1")
    answer = await kafka_request(broker, ApiKey.API_VERSIONS, body, version)
    supported = {f.name: (f.min_version, f.max_version) for f in answer.supported_features}
    finalized = {f.name: f.max_version_level for f in answer.finalized_features}
    assert supported["transaction.version"] == (lowest, 2)
    assert finalized["transaction.version"] == 2


@pytest.mark.parametrize("version", range(7))
async def test_a_transactional_id_finds_this_broker(broker: Broker, version: int) -> None:
    body = m.FindCoordinatorRequest(key_type=1, key=ID, coordinator_keys=[ID])
    if version == 0:
        body.key_type = 0
    answer = await kafka_request(broker, ApiKey.FIND_COORDINATOR, body, version)
    found = answer.coordinators[0] if version >= 4 else answer
    assert (found.error_code, found.node_id) == (0, 1)


async def test_many_aborted_transactions_in_a_fetch_count_as_memory_of_its_response(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses of megabytes waited in memory for clients that did not read them."""
    producer = await start(broker)
    assert await add(broker, producer, "orders") == [0]
    assert await produce(broker, producer, version=11) == 0
    await end(broker, producer, commit=False)
    monkeypatch.setattr(fetch_module, "WHOLE_ROWS_MAX", 0)  # so that one counts as many
    monkeypatch.setattr(fetch_module, "ABORTED_BYTES", 1 << 20)
    reserved, grow_to = list[int](), ResponseMemory.grow_to

    async def note(memory: ResponseMemory, response_bytes: int) -> None:
        reserved.append(response_bytes)
        await grow_to(memory, response_bytes)

    monkeypatch.setattr(ResponseMemory, "grow_to", note)
    body = fetch_request("orders", 0)
    body.isolation_level, body.max_wait_ms = READ_COMMITTED, 10_000
    (topic,) = (await kafka_request(broker, ApiKey.FETCH, body, 12)).responses
    (aborted,) = topic.partitions[0].aborted_transactions
    assert aborted.producer_id == producer.producer_id
    assert max(reserved) > 1 << 20
    assert not broker.listener.response_budget.used_bytes
