"""Fetch over the wire: waiting for records, and sessions that tell only what is new."""

import asyncio
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from broker.app import Broker
from broker.event_loop import loop_turns
from broker.event_loop.loop_turns import FREED_AT_ONCE, ROUND_SECONDS
from broker.handlers import fetch as fetch_module
from broker.handlers.fetch import BYTES_AT_ONCE, PARTITIONS_AT_ONCE, fetch
from broker.network import fetch_sessions
from config.topics.names import NAME_LENGTH_MAX
from protocol import codec
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.fetch_codec import FetchedPartition, FetchPartition
from protocol.limits import WHOLE_ROWS_MAX
from protocol.messages import (
    FetchRequest,
    FetchRequestForgottenTopic,
    FetchRequestPartition,
    FetchRequestTopic,
    FetchResponse,
)
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import make_context
from tests.support.protocol.raw_client import FETCH_VERSION, RawClient
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv

BATCH = bytes(batch_of(b"value"))
LONG_MS = 15_000  # longer than any of these tests may take


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=9)


def request(
    *offsets: int, max_wait_ms: int = 0, min_bytes: int = 1, session: tuple[int, int] = (0, -1)
) -> FetchRequest:
    """Partitions 0, 1, ... of orders from these offsets on."""
    partitions = [
        FetchRequestPartition(partition=index, fetch_offset=offset, partition_max_bytes=1 << 20)
        for index, offset in enumerate(offsets)
    ]
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=1 << 20,
        session_id=session[0],
        session_epoch=session[1],
        topics=[FetchRequestTopic(topic="orders", partitions=partitions)] if partitions else [],
    )


class Client:
    """One connection, without holding up the loop that the broker runs on."""

    def __init__(self, broker: Broker) -> None:
        self.raw = RawClient(broker.addresses[0].port)

    async def fetch(self, body: FetchRequest) -> FetchResponse:
        answer = await asyncio.to_thread(self.raw.request, ApiKey.FETCH, FETCH_VERSION, body)
        assert isinstance(answer, FetchResponse)
        return answer

    async def produce(self, partition: int = 0) -> None:
        done = await asyncio.to_thread(self.raw.produce, "orders", BATCH, partition)
        assert done.error_code == ErrorCode.NONE


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    made: list[Client] = []
    yield made
    for client in made:
        client.raw.socket.close()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each pass over the partitions of a fetch."""
    made: list[None] = []
    begin_pass = fetch_module._nothing_collected

    def note(*args: Any) -> Any:
        made.append(None)
        return begin_pass(*args)

    monkeypatch.setattr(fetch_module, "_nothing_collected", note)
    return made


def two_clients(broker: Broker, clients: list[Client]) -> tuple[Client, Client]:
    clients += [Client(broker), Client(broker)]
    return clients[0], clients[1]


async def until_waiting(broker: Broker, fetches: int = 1) -> None:
    async with asyncio.timeout(10):
        while broker.stats.delayed_fetches < fetches:  # noqa: ASYNC110 - the broker tells nobody
            await asyncio.sleep(0.001)


def partitions_told(answer: FetchResponse) -> list[int]:
    return [
        partition.partition_index for topic in answer.responses for partition in topic.partitions
    ]


# --- waiting --------------------------------------------------------------------------------------


async def test_a_fetch_that_waits_is_woken_by_an_append(
    env: MemoryEnv, clients: list[Client]
) -> None:
    async with broker_in_memory(env, topics={"orders": {}}) as broker:
        reader, writer = two_clients(broker, clients)
        waiting = asyncio.create_task(reader.fetch(request(0, max_wait_ms=LONG_MS)))
        await until_waiting(broker)
        await writer.produce()
        async with asyncio.timeout(LONG_MS / 2000):
            answer = await waiting
        assert answer.responses[0].partitions[0].records is not None
        assert broker.stats.delayed_fetches == 0


async def test_fetches_that_an_append_wakes_have_the_time_of_a_round_together(
    env: MemoryEnv, clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns, turn, by_turn = 0, 0, Counter[int]()
    begin_pass = fetch_module._nothing_collected

    def take_long(*args: Any) -> Any:
        nonlocal now_ns
        now_ns += 1_000_000
        by_turn[turn] += 1
        return begin_pass(*args)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async with broker_in_memory(env, topics={"orders": {}}) as broker:
        clients += [Client(broker) for _ in range(31)]
        writer, *readers = clients
        body = request(0, max_wait_ms=LONG_MS)
        for reader in readers:
            reader.raw.send(codec.encode_request(ApiKey.FETCH, FETCH_VERSION, 7, "c", body))
        await until_waiting(broker, len(readers))
        monkeypatch.setattr(fetch_module, "_nothing_collected", take_long)
        monkeypatch.setattr(loop_turns, "perf_counter_ns", lambda: now_ns)
        ticker = asyncio.create_task(count_turns())
        await writer.produce()
        for reader in readers:
            frame = await asyncio.to_thread(reader.raw.receive_frame)
            answer = codec.decode_response(ApiKey.FETCH, FETCH_VERSION, frame)[1]
            assert isinstance(answer, FetchResponse)
            assert answer.responses[0].partitions[0].records
        ticker.cancel()
    assert by_turn.total() == len(readers)
    assert max(by_turn.values()) <= ROUND_SECONDS * 1000


async def test_a_fetch_waits_on_until_it_has_min_bytes(
    env: MemoryEnv, clients: list[Client]
) -> None:
    async with broker_in_memory(env, topics={"orders": {}}) as broker:
        reader, writer = two_clients(broker, clients)
        fetch_request = request(0, max_wait_ms=LONG_MS, min_bytes=len(BATCH) + 1)
        waiting = asyncio.create_task(reader.fetch(fetch_request))
        await until_waiting(broker)
        await writer.produce()
        assert not waiting.done()
        await writer.produce()
        async with asyncio.timeout(LONG_MS / 2000):
            answer = await waiting
        assert len(answer.responses[0].partitions[0].records or b"") == 2 * len(BATCH)


async def test_a_fetch_that_waits_for_many_bytes_does_not_read_again_for_each_batch(
    env: MemoryEnv, clients: list[Client], passes: list[None]
) -> None:
    """Each pass reads every partition: a hundred consumers took 2.5 ms for each small batch."""
    async with broker_in_memory(env, topics={"orders": {}}) as broker:
        reader, writer = two_clients(broker, clients)
        fetch_request = request(0, max_wait_ms=LONG_MS, min_bytes=20 * len(BATCH))
        waiting = asyncio.create_task(reader.fetch(fetch_request))
        await until_waiting(broker)
        for _ in range(20):
            await writer.produce()
        async with asyncio.timeout(LONG_MS / 2000):
            answer = await waiting
        assert len(answer.responses[0].partitions[0].records or b"") == 20 * len(BATCH)
        assert len(passes) <= 4  # on arrival, before the wait, perhaps beside an append, at the end


async def test_a_fetch_that_is_not_woken_ends_at_its_deadline(
    env: MemoryEnv, clients: list[Client]
) -> None:
    async with broker_in_memory(env, topics={"orders": {}}) as broker:
        reader, _ = two_clients(broker, clients)
        started = time.monotonic()
        answer = await reader.fetch(request(0, max_wait_ms=50))
        assert 0.045 <= time.monotonic() - started < LONG_MS / 2000
        partition = answer.responses[0].partitions[0]
        assert (partition.error_code, partition.high_watermark, partition.records) == (
            ErrorCode.NONE,
            0,
            b"",
        )


async def test_a_fetch_of_many_partitions_reads_them_once_if_nothing_changes(
    env: MemoryEnv, clients: list[Client], passes: list[None]
) -> None:
    partitions = PARTITIONS_AT_ONCE + 1
    async with broker_in_memory(env, topics={"orders": {"partitions": partitions}}) as broker:
        reader, _ = two_clients(broker, clients)
        answer = await reader.fetch(request(*[0] * partitions, max_wait_ms=50))
        assert len(partitions_told(answer)) == partitions
        assert len(passes) == 1


async def test_one_fetch_of_many_partitions_of_a_client_reads_them_in_a_round_of_the_loop(
    env: MemoryEnv, passes: list[None]
) -> None:
    """A thousand consumers that connect again held the loop for as long as all of them take."""
    partitions = PARTITIONS_AT_ONCE + 1
    async with broker_in_memory(env, topics={"orders": {"partitions": partitions}}) as broker:
        context = make_context(broker)
        body = request(*[0] * partitions, max_wait_ms=1)
        frame = memoryview(codec.encode_request(ApiKey.FETCH, 12, 1, "c", body)[4:])
        fetches = [
            asyncio.ensure_future(as_coroutine(fetch(context, 12, frame))) for _ in range(100)
        ]
        most, before = 0, 0
        while not all(fetching.done() for fetching in fetches):
            await asyncio.sleep(0)
            most, before = max(most, len(passes) - before), len(passes)
        assert len(passes) == 100
        assert most == 1


async def test_a_fetch_that_is_decoded_in_turns_has_one_slot_until_it_has_read(
    env: MemoryEnv, passes: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a thousand of them are all decoded before the first one reads."""
    partitions, passes_at_acquire = 100, list[int]()
    async with broker_in_memory(env, topics={"orders": {"partitions": partitions}}) as broker:
        context = make_context(broker)
        slots = context.services.wide_fetches
        acquire = slots.acquire

        async def note(client: Hashable) -> None:
            passes_at_acquire.append(len(passes))
            await acquire(client)

        monkeypatch.setattr(slots, "acquire", note)
        body = request(*[0] * partitions, max_wait_ms=1)
        frame = memoryview(codec.encode_request(ApiKey.FETCH, 12, 1, "c", body)[4:])
        assert len(frame) > BYTES_AT_ONCE
        await as_coroutine(fetch(context, 12, frame))
        assert passes_at_acquire == [0, 1]  # the second one is for the answer
        assert not slots._used


@pytest.mark.parametrize("session_epoch", [-1, 0])
async def test_the_rows_of_a_large_fetch_are_freed_in_turns(
    env: MemoryEnv, session_epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its request, and those of each pass, also if the client goes away."""
    partitions = 2_001
    monkeypatch.setattr(fetch_sessions, "MAX_SESSION_PARTITIONS", 2_000)  # no session keeps them
    freed: list[int] = []
    for row in (FetchPartition, FetchedPartition):
        monkeypatch.setattr(row, "__del__", lambda _: freed.append(1), raising=False)
    async with broker_in_memory(env, topics={"orders": {}}) as broker:
        context = make_context(broker)
        clock = itertools.count()
        monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))  # turns of one step
        body = request(*[0] * partitions, max_wait_ms=1, session=(0, session_epoch))
        frame = memoryview(codec.encode_request(ApiKey.FETCH, 12, 1, "c", body)[4:])
        for cancel_after in (None, 5_000):
            freed.clear()
            fetching = asyncio.ensure_future(as_coroutine(fetch(context, 12, frame)))
            most, before = 0, 0
            for number in itertools.count():
                if number == cancel_after:
                    fetching.cancel()
                await asyncio.sleep(0)
                most, before = max(most, len(freed) - before), len(freed)
                if fetching.done() and not context.services.freed_later:
                    break
            assert len(freed) >= partitions
            assert most <= 2 * FREED_AT_ONCE


async def test_fetches_of_many_partitions_wait_for_memory_of_responses(
    env: MemoryEnv, clients: list[Client]
) -> None:
    """A thousand of one user took gigabytes while they waited for records."""
    limits = {"queued_request_bytes": 1 << 20}
    async with broker_in_memory(env, topics={"orders": {}}, limits=limits) as broker:
        clients += [Client(broker) for _ in range(4)]
        body = request(0, max_wait_ms=LONG_MS)
        body.topics[0].partitions *= 2000  # they count as different ones
        fetches = [asyncio.create_task(client.fetch(body)) for client in clients[1:]]
        budget = broker.listener.response_budget
        async with asyncio.timeout(LONG_MS / 2000):
            while budget.waiting < 2:  # noqa: ASYNC110 - the broker tells nobody
                await asyncio.sleep(0.001)
            await until_waiting(broker)
            assert broker.stats.delayed_fetches == 1
            await clients[0].produce()
            answers = await asyncio.gather(*fetches)
        assert all(answer.responses[0].partitions[0].records for answer in answers)
        assert not budget.used_bytes


async def test_a_fetch_of_a_topic_that_is_deleted_is_told_at_once(
    env: MemoryEnv, clients: list[Client]
) -> None:
    async with broker_in_memory(env, topics={"orders": {}}) as broker:
        reader, _ = two_clients(broker, clients)
        waiting = asyncio.create_task(reader.fetch(request(0, max_wait_ms=LONG_MS)))
        await until_waiting(broker)
        await broker.metadata_service.delete("orders")
        async with asyncio.timeout(LONG_MS / 2000):
            answer = await waiting
        code = answer.responses[0].partitions[0].error_code
        assert code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_an_offset_out_of_range_is_told_when_other_partitions_fill_the_response(
    env: MemoryEnv, clients: list[Client]
) -> None:
    async with broker_in_memory(env, topics={"orders": {"partitions": 2}}) as broker:
        reader, writer = two_clients(broker, clients)
        await writer.produce(0)
        body = request(0, 7)
        body.max_bytes = 1
        answer = await reader.fetch(body)
        rows = answer.responses[0].partitions
        assert [row.error_code for row in rows] == [0, ErrorCode.OFFSET_OUT_OF_RANGE]
        assert rows[0].records == BATCH


# --- sessions -------------------------------------------------------------------------------------


async def test_a_session_tells_only_what_is_new(env: MemoryEnv, clients: list[Client]) -> None:
    async with broker_in_memory(env, topics={"orders": {"partitions": 3}}) as broker:
        reader, writer = two_clients(broker, clients)
        first = await reader.fetch(request(0, 0, 0, session=(0, 0)))
        assert first.session_id > 0
        assert partitions_told(first) == [0, 1, 2]
        nothing = await reader.fetch(request(session=(first.session_id, 1)))
        assert (nothing.session_id, partitions_told(nothing)) == (first.session_id, [])
        await writer.produce(1)
        news = await reader.fetch(request(session=(first.session_id, 2)))
        assert partitions_told(news) == [1]
        forget = request(session=(first.session_id, 3))
        forget.forgotten_topics_data = [FetchRequestForgottenTopic(topic="orders", partitions=[1])]
        assert partitions_told(await reader.fetch(forget)) == []
        closed = await reader.fetch(request(0, session=(first.session_id, -1)))
        assert (closed.session_id, partitions_told(closed)) == (0, [0])


async def test_a_session_that_is_not_known_or_out_of_step_is_refused(
    env: MemoryEnv, clients: list[Client]
) -> None:
    async with broker_in_memory(env, topics={"orders": {}}) as broker:
        reader, _ = two_clients(broker, clients)
        unknown = await reader.fetch(request(session=(77, 1)))
        assert unknown.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        first = await reader.fetch(request(0, session=(0, 0)))
        skipped = await reader.fetch(request(session=(first.session_id, 5)))
        assert skipped.error_code == ErrorCode.INVALID_FETCH_SESSION_EPOCH


@pytest.mark.parametrize("name", ["x" * (NAME_LENGTH_MAX + 1), "x" * BYTES_AT_ONCE, "é"])
async def test_a_session_keeps_no_name_that_no_topic_can_have(
    env: MemoryEnv, clients: list[Client], name: str
) -> None:
    """One session could otherwise keep gigabytes: its number of partitions has a limit only."""
    async with broker_in_memory(env, topics={"orders": {}}) as broker:
        reader, _ = two_clients(broker, clients)
        sessions = make_context(broker).services.sessions
        first = await reader.fetch(request(0, session=(0, 0)))
        for session in ((0, 0), (first.session_id, 1)):
            body = request(0, session=session)
            body.topics[0].topic = name
            refused = await reader.fetch(body)
            assert refused.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
        assert (len(sessions), sessions.partitions) == (1, 1)


async def test_a_fetch_whose_client_goes_away_in_any_turn_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))  # a turn for each row
    async with broker_in_memory(MemoryEnv(seed=3)) as broker:
        topic = await broker.metadata_service.create("t", 1, {})
        partition = topic.partitions[0]
        rows = [
            FetchRequestPartition(partition=index, partition_max_bytes=1) for index in range(20)
        ]
        body = FetchRequest(
            max_wait_ms=30_000,
            min_bytes=1,
            max_bytes=1,
            session_epoch=-1,
            topics=[FetchRequestTopic(topic="t", partitions=rows * WHOLE_ROWS_MAX)],
        )
        frame = memoryview(codec.encode_request(ApiKey.FETCH, 12, 1, "c", body)[4:])
        fetching = asyncio.ensure_future(as_coroutine(fetch(make_context(broker), 12, frame)))
        while not partition._waiters:  # noqa: ASYNC110 - its turns have no event
            await asyncio.sleep(0)
        fetching.cancel()
        await asyncio.wait([fetching])
        assert fetching.cancelled()
        assert not partition._waiters
        assert broker._services.stats.delayed_fetches == 0


async def as_coroutine(answer: object) -> object:
    assert inspect.isawaitable(answer)
    return await answer
