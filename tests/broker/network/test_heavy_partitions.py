"""Budgets of single requests at partitions with heavy state, as counts and not as seconds.

One broker has partitions with thousands of aborted transactions, small batches and producers, and
with indexes that are dropped, lost, wrong or sparse. Each request reads where that state is.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

from broker.app import Broker
from broker.handlers.dispatch import Dispatcher
from broker.handlers.routes import make_dispatcher
from protocol import codec
from protocol.api import APIS, ApiKey
from protocol.messages import (
    DescribeProducersRequest,
    DescribeProducersRequestTopic,
    FetchRequest,
    FetchRequestPartition,
    FetchRequestTopic,
    ListOffsetsRequest,
    ListOffsetsRequestPartition,
    ListOffsetsRequestTopic,
    Message,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochRequestPartition,
    OffsetForLeaderEpochRequestTopic,
)
from storage.format.batch import ControlType, Record, build_batch, marker_record
from storage.format.filenames import INDEX
from storage.log.log import Log
from storage.segments.segment import Segment
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import fake_connection
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.storage.logs import NOW_MS, append_batch
from tests.support.storage.memory_env import MemoryEnv

TRANSACTIONS: Final = 2_000  # and producers; twice as many batches
# The clock of the loop runs faster, so that this little state needs turns, too.
CLOCK_RATE: Final = 20
# 1 ms. A loop over the state takes at least one line for each of its entries, and most take ten.
LINES_PER_TURN_MAX: Final = 10_000
COPIES: Final = 8  # of the partition in a request
SEGMENT_BYTES: Final = 150_000  # two segments
TOPIC: Final = "heavy"
AT: Final = {"begin": 1, "middle": TRANSACTIONS, "end": 2 * TRANSACTIONS - 3}

pytestmark = pytest.mark.timeout(120)


def fill(log: Log) -> None:
    """Append transactions of one record each, of a producer each, and abort them."""
    for producer_id in range(TRANSACTIONS):
        for attributes in (0x10, 0x30):
            marker = marker_record(ControlType.ABORT, 0, NOW_MS + producer_id)
            record = Record(0, NOW_MS + producer_id, b"k", b"v", ())
            batch = build_batch(
                [marker if attributes == 0x30 else record],
                producer_id=producer_id,
                producer_epoch=0,
                base_sequence=-1 if attributes == 0x30 else 0,
                attributes=attributes,
            )
            append_batch(log, batch, in_transaction=attributes == 0x10)
    log.flush()


class Heavy:
    """The broker, and how to spoil the indexes of its log."""

    def __init__(self, env: MemoryEnv, broker: Broker, log: Log) -> None:
        self._env = env
        self._dispatcher: Dispatcher = make_dispatcher(broker._services)
        self.log = log

    async def ask(self, api_key: int, body: Message) -> int:
        version = APIS[api_key].versions.last if api_key != ApiKey.FETCH else 12
        frame = memoryview(bytearray(codec.encode_request(api_key, version, 1, "me", body)[4:]))
        answer: Any = self._dispatcher.handle(fake_connection(), frame)
        if inspect.isawaitable(answer):
            answer = await answer
        parts = [answer] if isinstance(answer, bytes) else answer
        return sum(len(part) for part in parts if isinstance(part, bytes))

    def spoil(self, how: str) -> None:
        for segment in self.log.segments:
            segment.position_hints.clear()
            if how == "whole" and segment.has_indexes:
                segment.rebuild()
            if how == "wrong":
                positions = segment.indexes.offsets.positions
                for at in range(len(positions)):
                    positions[at] += 1
            elif how != "whole" and segment.is_sealed:
                self._drop(segment, how)

    def _drop(self, segment: Segment, how: str) -> None:
        path = segment.path.replace(".log", INDEX)
        if not self._env.exists(path):  # no request has needed it since
            segment.rebuild()
        segment.note_synced(segment.size_bytes, was_sealed=True)  # a rebuilt index is written
        segment.drop_idle_indexes()
        segment.drop_idle_indexes()
        assert not segment.has_indexes
        if how == "lost":
            self._env.unlink(path)
        elif how == "sparse":
            file = self._env.open(path, write=True)
            file.truncate(8)
            file.close()


@pytest.fixture(scope="module")
def runner() -> Any:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def heavy(runner: asyncio.Runner) -> Any:
    env = MemoryEnv(seed=6)

    async def serve() -> AsyncIterator[Heavy]:
        async with broker_in_memory(env) as broker:
            config = {"segment.bytes": str(SEGMENT_BYTES), "cleanup.policy": "delete"}
            topic = await broker.metadata_service.create(TOPIC, 1, config)
            log = topic.partitions[0].log
            assert isinstance(log, Log)
            fill(log)
            assert len(log.segments) > 1
            yield Heavy(env, broker, log)

    serving = serve()
    yield runner.run(anext(serving))
    with pytest.raises(StopAsyncIteration):
        runner.run(anext(serving))


def fetch_of(offset: int, max_bytes: int) -> FetchRequest:
    row = FetchRequestPartition(fetch_offset=offset, partition_max_bytes=max_bytes)
    topics = [FetchRequestTopic(topic=TOPIC, partitions=[row])]
    return FetchRequest(max_bytes=1 << 30, session_epoch=-1, isolation_level=1, topics=topics)


def requests() -> dict[str, tuple[int, Message]]:
    made: dict[str, tuple[int, Message]] = {}
    for name, offset in AT.items():
        for max_bytes in (1, 1_000, 1 << 20):
            made[f"fetch {max_bytes} at {name}"] = (ApiKey.FETCH, fetch_of(offset, max_bytes))
        rows = [
            ListOffsetsRequestPartition(timestamp=NOW_MS + offset // 2, current_leader_epoch=-1)
        ]
        topics = [ListOffsetsRequestTopic(name=TOPIC, partitions=rows * COPIES)]
        made[f"offset by time at {name}"] = (ApiKey.LIST_OFFSETS, ListOffsetsRequest(topics=topics))
    producers = DescribeProducersRequestTopic(name=TOPIC, partition_indexes=[0] * COPIES)
    made["producers"] = ApiKey.DESCRIBE_PRODUCERS, DescribeProducersRequest(topics=[producers])
    epochs = [OffsetForLeaderEpochRequestPartition(current_leader_epoch=-1)] * COPIES
    of_topic = OffsetForLeaderEpochRequestTopic(topic=TOPIC, partitions=epochs)
    made["epochs"] = (
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
        OffsetForLeaderEpochRequest(replica_id=-1, topics=[of_topic]),
    )
    return made


@pytest.mark.parametrize("how", ["whole", "dropped", "lost", "sparse", "wrong"])
def test_no_turn_of_a_request_depends_on_the_state_of_a_partition(
    how: str, heavy: Heavy, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter, too_long = LoopMeter(CLOCK_RATE), []
    for label, (api_key, body) in requests().items():
        heavy.spoil(how)

        async def ask(api_key: int = api_key, body: Message = body) -> int:
            with meter.measuring(monkeypatch):
                await asyncio.sleep(0)
                return await heavy.ask(api_key, body)

        assert runner.run(ask()) > 0, label
        if meter.longest_turn > LINES_PER_TURN_MAX:
            too_long.append((label, meter.longest_turn, meter.lines))
    assert not too_long


@pytest.mark.parametrize("offset", AT.values(), ids=AT)
def test_a_response_names_few_transactions_behind_its_records(
    offset: int, heavy: Heavy, runner: asyncio.Runner
) -> None:
    """An index interval of batches is 4 KiB by default: 25 transactions."""
    heavy.spoil("whole")
    answer_bytes = runner.run(heavy.ask(ApiKey.FETCH, fetch_of(offset, 1_000)))
    assert answer_bytes < 60 * 17 + 200
