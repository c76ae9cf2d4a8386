"""The transaction coordinator's own tables."""

import asyncio
import errno
from collections.abc import Callable, Sequence
from itertools import count, islice

import pytest

from broker.event_loop import loop_turns
from broker.event_loop.loop_turns import Turns
from broker.topics.internal_topic import KeyedLog, LogRecord, PartitionState
from broker.topics.producer_ids import Producer
from broker.transactions import coordinator as coordinator_module
from broker.transactions.coordinator import TransactionCoordinator
from broker.transactions.model import (
    PRODUCER_EPOCH_MAX,
    Status,
    Transaction,
    TransactionVersion,
)
from broker.transactions.state_records import LoadedTransactions, TransactionLoader
from protocol.errors import ErrorCode
from storage.errors import (
    DirectoryStalledError,
    LogDirectoryError,
    NoRoomError,
    OfflinePartitionError,
    StorageError,
)
from storage.model import TopicPartition
from tests.support.clocks.all_turns import take_all_turns
from tests.support.clocks.virtual_loop import run_virtually

PARTITIONS = 8


class Markers:
    """Partitions that take every marker once they are open."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def write(
        self, partition: TopicPartition, producer: Producer, *, commit: bool, only_if_open: bool
    ) -> None:
        await self.open.wait()


class NoMarkers:
    """Partitions that take no marker."""

    async def write(
        self, partition: TopicPartition, producer: Producer, *, commit: bool, only_if_open: bool
    ) -> None:
        await asyncio.get_running_loop().create_future()


def append(
    _partition: int, _records: Sequence[LogRecord], _producer: Producer | None = None
) -> "asyncio.Future[object]":
    done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


def nothing() -> LoadedTransactions:
    return TransactionLoader().finish()


async def new_producer_id() -> int:
    return 1


def make_coordinator(
    wall_ms: Callable[[], int] = lambda: 0, markers: Markers | NoMarkers | None = None
) -> TransactionCoordinator:
    coordinator = TransactionCoordinator(
        KeyedLog(PARTITIONS, append),
        markers or NoMarkers(),
        new_producer_id=new_producer_id,
        wall_ms=wall_ms,
    )
    for partition in range(PARTITIONS):
        take_all_turns(coordinator.activate(partition, nothing()))
    return coordinator


async def test_a_partition_is_deactivated_without_a_look_at_the_ids_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = make_coordinator()
    ids = [f"id{index}" for index in range(50)]
    for transactional_id in ids:
        answer = await coordinator.init_producer(transactional_id, 1_000, None)
        assert answer.error is ErrorCode.NONE
    hashed: list[str] = []
    partition_of = KeyedLog.partition_of

    def counted(log: KeyedLog, key: str) -> int:
        hashed.append(key)
        return partition_of(log, key)

    monkeypatch.setattr(KeyedLog, "partition_of", counted)
    for partition in range(PARTITIONS):
        coordinator.deactivate(partition, PartitionState.OFFLINE)
    assert len(hashed) <= len(ids)
    assert list(coordinator.transactions()) == []


@pytest.mark.parametrize(
    "error",
    [
        NoRoomError(OSError(errno.ENOSPC, "full"), "/data"),
        LogDirectoryError("/data", "broken"),
        DirectoryStalledError("/data"),
        OfflinePartitionError(TopicPartition("__transaction_state", 0), "its directory failed"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_producer_tries_again_if_the_disk_did_not_store_its_transaction(
    monkeypatch: pytest.MonkeyPatch, error: StorageError
) -> None:
    coordinator = make_coordinator()
    answer = await coordinator.init_producer("tx", 60_000, None)
    assert answer.producer is not None
    added = TopicPartition("a", 0)

    def fail(*_: object) -> "asyncio.Future[object]":
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(coordinator._store, "_append", fail)
        failed = await coordinator.add_partitions("tx", answer.producer, frozenset({added}))
    assert failed is ErrorCode.NOT_COORDINATOR
    again = await coordinator.add_partitions("tx", answer.producer, frozenset({added}))
    assert again is ErrorCode.NONE
    await coordinator.close()


async def test_a_transactional_id_has_at_most_a_thousand_bytes() -> None:
    coordinator = make_coordinator()
    for transactional_id, error in (
        ("é" * 500, ErrorCode.NONE),
        ("é" * 500 + "x", ErrorCode.INVALID_REQUEST),
    ):
        assert (await coordinator.init_producer(transactional_id, 1_000, None)).error is error
    await coordinator.close()


async def test_one_creator_leaves_half_of_the_open_partitions_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 1000 * coordinator_module.PARTITION_BYTES
    monkeypatch.setattr(coordinator_module, "OPEN_PARTITIONS_BYTES_MAX", limit)
    markers = Markers()
    markers.open.set()
    coordinator = make_coordinator(markers=markers)
    partitions = frozenset(TopicPartition("a", index) for index in range(5))
    producers: dict[str, Producer] = {}

    async def begin(transactional_id: str, creator: str) -> ErrorCode:
        answer = await coordinator.init_producer(transactional_id, 1_000, None, creator)
        assert answer.producer is not None
        producers[transactional_id] = answer.producer
        return await coordinator.add_partitions(transactional_id, answer.producer, partitions)

    errors = [await begin(f"alice{index}", "alice") for index in range(150)]
    assert errors == [ErrorCode.NONE] * 100 + [ErrorCode.POLICY_VIOLATION] * 50
    assert await begin("bob", "bob") is ErrorCode.NONE
    again = await coordinator.add_partitions("alice0", producers["alice0"], partitions)
    assert again is ErrorCode.NONE  # it has them already
    ended = await coordinator.end("alice0", producers["alice0"], commit=True)
    assert ended.error is ErrorCode.NONE
    await coordinator.init_producer("alice0", 1_000, None, "alice")  # waits for the markers
    some = frozenset(list(partitions)[:2])
    more = await coordinator.add_partitions("alice149", producers["alice149"], some)
    assert more is ErrorCode.NONE
    await coordinator.close()


def test_a_transaction_ends_although_the_wall_clock_was_set_back() -> None:
    run_virtually(_a_transaction_ends_although_the_wall_clock_was_set_back())


async def _a_transaction_ends_although_the_wall_clock_was_set_back() -> None:
    wall_ms = 10**13
    coordinator = make_coordinator(lambda: wall_ms)
    answer = await coordinator.init_producer("tx", 60_000, None)
    assert answer.producer is not None
    partition = TopicPartition("a", 0)
    await asyncio.sleep(100)  # virtual: before the transaction
    await coordinator.add_partitions("tx", answer.producer, frozenset({partition}))
    wall_ms -= 10**12
    await asyncio.sleep(59)
    await coordinator.add_partitions("tx", answer.producer, frozenset({TopicPartition("a", 1)}))
    await coordinator.abort_timed_out()
    assert coordinator.produce_error("tx", answer.producer, partition) is ErrorCode.NONE
    await asyncio.sleep(1)
    await coordinator.abort_timed_out()
    await asyncio.sleep(0)
    assert coordinator.produce_error("tx", answer.producer, partition) is not ErrorCode.NONE
    await coordinator.close()


DATA = TopicPartition("a", 0)


async def with_open_transaction(markers: Markers, epoch: int) -> TransactionCoordinator:
    """A coordinator that has loaded an open transaction of version 2."""
    coordinator = make_coordinator(markers=markers)
    partition = KeyedLog(PARTITIONS, append).partition_of("tx")
    coordinator.deactivate(partition, PartitionState.LOADING)
    loaded = nothing()
    loaded.transactions["tx"] = Transaction(
        "tx",
        7,
        epoch,
        60_000,
        Status.ONGOING,
        frozenset({DATA}),
        last_update_ms=0,
        start_ms=0,
        client_version=TransactionVersion.V2,
    )
    await coordinator.activate(partition, loaded)
    return coordinator


def test_a_restart_that_uses_up_the_epochs_gets_another_producer_id() -> None:
    async def scenario() -> None:
        markers = Markers()
        markers.open.set()
        coordinator = await with_open_transaction(markers, PRODUCER_EPOCH_MAX - 1)
        answer = await coordinator.init_producer("tx", 60_000, None)
        if answer.error is ErrorCode.CONCURRENT_TRANSACTIONS:  # clients repeat the request
            answer = await coordinator.init_producer("tx", 60_000, None)
        assert answer.error is ErrorCode.NONE
        assert answer.producer == Producer(await new_producer_id(), 0)

    run_virtually(scenario())


def test_a_producer_whose_id_was_used_up_continues_with_the_next_one_at_once() -> None:
    async def scenario() -> None:
        markers = Markers()
        coordinator = await with_open_transaction(markers, PRODUCER_EPOCH_MAX)
        last = Producer(7, PRODUCER_EPOCH_MAX)
        v2 = TransactionVersion.V2
        answer = await coordinator.end("tx", last, commit=True, client_version=v2)
        assert answer.producer == Producer(await new_producer_id(), 0)
        begun = asyncio.create_task(
            coordinator.add_partitions("tx", answer.producer, frozenset({DATA}), v2)
        )
        await asyncio.sleep(0.1)  # virtual: the markers are not written yet
        error = coordinator.produce_error("tx", answer.producer, DATA)
        assert error is ErrorCode.CONCURRENT_TRANSACTIONS
        markers.open.set()
        assert await begun is ErrorCode.NONE
        assert coordinator.produce_error("tx", answer.producer, DATA) is ErrorCode.NONE

    run_virtually(scenario())


async def test_a_transaction_that_begins_during_the_search_is_not_hanging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, partition = make_coordinator(), TopicPartition("a", 0)
    for transactional_id in ("tx", "other"):
        answer = await coordinator.init_producer(transactional_id, 60_000, None)
        assert answer.producer is not None
    producer = answer.producer

    class BusyTurns(Turns):
        """Between its turns, clients begin transactions."""

        count = 0

        async def take(self) -> None:
            self.count += 1
            if self.count == 2:
                added = await coordinator.add_partitions("tx", producer, frozenset([partition]))
                assert added is ErrorCode.NONE

    monkeypatch.setattr(coordinator_module, "Turns", BusyTurns)
    assert await coordinator.find_open(partition, producer.producer_id) == "tx"


def twenty_loaded() -> LoadedTransactions:
    """Of partition 0."""
    loaded, log = nothing(), KeyedLog(PARTITIONS, append)
    ids = (transactional_id for n in count() if not log.partition_of(transactional_id := f"id{n}"))
    for transactional_id in islice(ids, 20):
        transaction = Transaction(transactional_id, 7, 0, 60_000, Status.EMPTY)
        loaded.transactions[transactional_id] = transaction
    return loaded


async def test_the_ids_of_a_loaded_partition_are_taken_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = make_coordinator()
    coordinator.deactivate(0, PartitionState.LOADING)
    clock = count()
    monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))  # a turn for each id
    loading = asyncio.create_task(coordinator.activate(0, twenty_loaded()))
    rounds = 0
    while not loading.done():
        assert coordinator.is_loading
        await asyncio.sleep(0)
        rounds += 1
    assert rounds >= 20
    assert not coordinator.is_loading
    assert len(list(coordinator.transactions())) == 20


async def test_a_partition_that_fails_while_it_is_loaded_is_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = make_coordinator()
    coordinator.deactivate(0, PartitionState.LOADING)
    clock = count()
    monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))
    loading = asyncio.create_task(coordinator.activate(0, twenty_loaded()))
    for _ in range(5):
        await asyncio.sleep(0)
    coordinator.deactivate(0, PartitionState.OFFLINE)
    await loading
    assert coordinator.is_offline(0)
    assert list(coordinator.transactions()) == []
