"""Random interleavings of producers, timeouts, fences and restarts, against what must hold.

The partitions and the log of the coordinator are lists; appends and markers take a random time or
fail for a while. A restart loads the log that was there.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from broker.topics.internal_topic import KeyedLog, LogRecord
from broker.topics.producer_ids import Producer
from broker.transactions.coordinator import TransactionCoordinator
from broker.transactions.model import TransactionVersion
from broker.transactions.state_records import LoadedTransactions, TransactionLoader
from protocol.errors import ErrorCode
from storage.errors import LogDirectoryError, StorageError
from storage.format.batch import Record, build_batch, read_header
from storage.model import TopicPartition
from tests.support.clocks.all_turns import take_all_turns
from tests.support.clocks.virtual_loop import run_virtually
from tests.support.draws import seeds_of_tests

PARTITIONS = [TopicPartition("t", index) for index in range(3)]
IDS = ("x", "y")
STEPS = 60
TIMEOUT_MS = 20_000


@dataclass(eq=False)
class Sent:
    """A transaction as its client sees it; `outcome` is what the answer of EndTxn said."""

    outcome: bool | None = None  # True: committed; None: never answered


@dataclass
class World:
    """What outlives a restart: the partitions, the log, the clock."""

    rng: random.Random
    now_ms: int = 0
    next_producer_id: int = 100
    records: list[LogRecord] = field(default_factory=list)
    # A row of a partition: producer, and the transaction of a record or the outcome of a marker.
    rows: dict[TopicPartition, list[tuple[Producer, Sent | bool]]] = field(
        default_factory=lambda: {partition: [] for partition in PARTITIONS}
    )
    is_alive: object = None  # the present life: what an earlier one still does has no effect

    def open_producers(self, partition: TopicPartition) -> set[int]:
        opened: set[int] = set()
        for producer, row in self.rows[partition]:
            if isinstance(row, Sent):
                opened.add(producer.producer_id)
            else:
                opened.discard(producer.producer_id)
        return opened


class Life:
    """One life of the coordinator."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.is_alive = self
        self.coordinator = TransactionCoordinator(
            KeyedLog(1, self.append),
            self,
            new_producer_id=self.new_producer_id,
            wall_ms=lambda: world.now_ms,
        )
        take_all_turns(self.coordinator.activate(0, self.load()))

    def load(self) -> LoadedTransactions:
        loader = TransactionLoader()
        for key, value in self.world.records:
            header = read_header(build_batch([Record(0, 1, key, value)]))
            loader.add_records(header, [Record(0, 1, key, value)])
        return loader.finish()

    async def new_producer_id(self) -> int:
        self.world.next_producer_id += 1
        return self.world.next_producer_id

    def append(
        self, partition: int, records: Sequence[LogRecord], producer: Producer | None = None
    ) -> "asyncio.Future[object]":
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if self.world.is_alive is not self:
            return future
        if self.world.rng.random() < 0.05:
            future.set_exception(LogDirectoryError("/d", "no room"))
            return future
        self.world.records += records
        delay = self.world.rng.choice((0, 0, 0.01))
        asyncio.get_running_loop().call_later(delay, future.set_result, None)
        return future

    async def write(
        self, partition: TopicPartition, producer: Producer, *, commit: bool, only_if_open: bool
    ) -> None:
        await asyncio.sleep(self.world.rng.choice((0, 0.005)))
        if self.world.is_alive is not self:
            await asyncio.get_running_loop().create_future()
        if self.world.rng.random() < 0.1:
            raise StorageError("offline for a moment")
        if not only_if_open or producer.producer_id in self.world.open_producers(partition):
            self.world.rows[partition].append((producer, commit))

    def produce(self, transactional_id: str, producer: Producer, sent: Sent) -> None:
        """As a produce request: verified and appended without a pause."""
        if self.world.is_alive is not self:
            return
        partition = self.world.rng.choice(PARTITIONS)
        error = self.coordinator.produce_error(transactional_id, producer, partition)
        if error is ErrorCode.NONE:
            self.world.rows[partition].append((producer, sent))

    async def client(self, transactional_id: str, version: TransactionVersion) -> None:
        """One producer: transactions until it is fenced or the life ends."""
        rng, coordinator = self.world.rng, self.coordinator
        answer = await coordinator.init_producer(transactional_id, TIMEOUT_MS, None)
        producer = answer.producer
        while producer is not None:
            sent = Sent()
            added = frozenset(rng.sample(PARTITIONS, rng.randint(1, 3)))
            error = await coordinator.add_partitions(transactional_id, producer, added, version)
            if error is not ErrorCode.NONE:
                if error is not ErrorCode.CONCURRENT_TRANSACTIONS:
                    return
                await asyncio.sleep(0.02)
                continue
            for _ in range(rng.randint(0, 4)):
                self.produce(transactional_id, producer, sent)
                await asyncio.sleep(rng.choice((0, 0.01)))
            if version.bumps_epoch and rng.random() < 0.5:  # a request that the network delayed
                delay = rng.choice((0.005, 0.05))
                late = (transactional_id, producer, sent)
                asyncio.get_running_loop().call_later(delay, self.produce, *late)
            if rng.random() < 0.2:
                return  # the client dies in its transaction
            commit = rng.random() < 0.6
            answer = await coordinator.end(
                transactional_id, producer, commit=commit, client_version=version
            )
            if answer.error is not ErrorCode.NONE:
                return
            sent.outcome = commit
            producer = answer.producer if version.bumps_epoch else producer


async def play(world: World) -> None:
    for _ in range(world.rng.randint(1, 4)):
        life = Life(world)
        tasks = []
        for _ in range(STEPS):
            choice = world.rng.random()
            if choice < 0.2:
                version = world.rng.choice((TransactionVersion.V0, TransactionVersion.V2))
                tasks.append(asyncio.ensure_future(life.client(world.rng.choice(IDS), version)))
            elif choice < 0.3:
                world.now_ms += world.rng.choice((10, TIMEOUT_MS))
                await life.coordinator.abort_timed_out()
            await asyncio.sleep(world.rng.choice((0, 0.001, 0.02)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    last = Life(world)
    for _ in range(20):  # appends may fail
        world.now_ms += TIMEOUT_MS
        await last.coordinator.abort_timed_out()
        await asyncio.sleep(30)
    statuses = {transaction.status.name for transaction in last.coordinator.transactions()}
    assert statuses <= {"EMPTY", "COMPLETE_COMMIT", "COMPLETE_ABORT"}
    check(world)


def check(world: World) -> None:
    outcomes: dict[Sent, set[bool]] = {}
    for partition in PARTITIONS:
        opened: dict[int, list[Sent]] = {}
        for producer, row in world.rows[partition]:
            if isinstance(row, Sent):
                opened.setdefault(producer.producer_id, []).append(row)
                continue
            ended = opened.pop(producer.producer_id, [])
            assert len({id(sent) for sent in ended}) <= 1, "one marker ended two transactions"
            for sent in ended:
                outcomes.setdefault(sent, set()).add(row)
        assert not opened, "records without a marker"
    for sent, seen in outcomes.items():
        assert len(seen) == 1, "partitions with different outcomes"
        assert sent.outcome in (None, *seen), "the answer said otherwise"


@pytest.mark.parametrize("seed", seeds_of_tests("VARVE_TRANSACTION_SEEDS", few=20, many=400))
def test_every_transaction_ends_everywhere_as_its_client_was_answered(seed: int) -> None:
    run_virtually(play(World(random.Random(seed))), seed)
