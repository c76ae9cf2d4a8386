"""What connections may hold that do nothing, or nothing good: memory, places, time."""

import asyncio
import errno
import os
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.event_loop.loop_turns import ROUND_SECONDS, UNAUTHENTICATED_ROUND_SECONDS
from broker.network.connection import Connection, RequestHandler, Response
from broker.network.listener import (
    HANDSHAKE_SECONDS,
    IDLE_EVICT_SECONDS,
    RECEIVE_SECONDS_MAX,
    RECEIVE_STALL_SECONDS,
    address_of,
)
from broker.network.socket_writer import SocketWriter
from protocol import codec
from protocol import messages as m
from protocol.api import ApiKey
from storage.format.batch import Record, build_batch
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.storage.memory_env import MemoryEnv

MIB = 1 << 20
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
OPENED: list[asyncio.StreamWriter] = []  # by the running test


@asynccontextmanager
async def running(**limits: Any) -> AsyncIterator[Broker]:
    async with broker_in_memory(
        MemoryEnv(seed=4), limits=limits, topics={"t": {"keys": {"max.message.bytes": 8 * MIB}}}
    ) as broker:
        try:
            yield broker
        finally:
            while OPENED:
                OPENED.pop().close()


async def connect(broker: Broker, host: str = "127.0.0.1") -> Streams:
    address = broker.addresses[0]
    streams = await asyncio.open_connection(address.host, address.port, local_addr=(host, 0))
    OPENED.append(streams[1])
    return streams


async def test_a_connection_for_which_no_descriptor_is_left_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with running() as broker:
        duplicate = os.dup

        def refuse(fd: int) -> int:
            monkeypatch.setattr(os, "dup", duplicate)
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(os, "dup", refuse)
        assert await is_closed(await connect(broker))
        assert not broker.listener.connections
        assert await is_served(await connect(broker))
    assert not errors


async def test_a_client_that_leaves_before_its_answer_is_no_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(writer: SocketWriter, _response: object) -> None:
        writer._fail(BrokenPipeError(errno.EPIPE, "Broken pipe"))

    async with running() as broker:
        streams = await connect(broker)
        monkeypatch.setattr(SocketWriter, "write", fail)
        monkeypatch.setattr(SocketWriter, "write_bytes", fail)
        with capture_logs() as lines:
            assert not await is_served(streams)
        assert not broker.listener.connections
    assert not lines


async def ask(streams: Streams, key: ApiKey, version: int, body: m.Message) -> m.Message | None:
    """The answer; None where the connection is closed instead."""
    reader, writer = streams
    try:
        writer.write(codec.encode_request(key, version, 1, "c", body))
        (size,) = struct.unpack(">i", await asyncio.wait_for(reader.readexactly(4), 20))
        return codec.decode_response(key, version, await reader.readexactly(size))[1]
    except (ConnectionError, asyncio.IncompleteReadError):
        return None


async def wait_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what the broker does for others has no event
            await asyncio.sleep(0.01)


async def is_served(streams: Streams) -> bool:
    return await ask(streams, ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest()) is not None


async def is_closed(streams: Streams) -> bool:
    try:
        return await asyncio.wait_for(streams[0].read(), 20) == b""
    except ConnectionError:
        return True


def large_produce(value_bytes: int) -> m.ProduceRequest:
    batch = bytes(build_batch([Record(0, 1, b"k", bytes(value_bytes), ())]))
    partition = m.ProduceRequestPartition(index=0, records=batch)
    topic = m.ProduceRequestTopic(name="t", partition_data=[partition])
    return m.ProduceRequest(acks=1, timeout_ms=1000, topic_data=[topic])


async def test_frames_that_never_become_complete_hold_no_more_than_the_budget() -> None:
    async with running(queued_request_bytes=4 * MIB) as broker:
        others = []
        for _ in range(15):
            streams = await connect(broker)
            streams[1].write(struct.pack(">ihh", 90 * MIB, ApiKey.PRODUCE, 9) + bytes(MIB))
            others.append(streams)
        budget = broker.listener.budget
        await wait_true(lambda: budget.used_bytes >= 3 * MIB)
        assert budget.used_bytes <= 4 * MIB
        worker = await connect(broker)
        assert await is_served(worker)
        for _ in range(3):
            answer = await ask(worker, ApiKey.PRODUCE, 9, large_produce(3 * MIB))
            assert isinstance(answer, m.ProduceResponse)
            assert answer.responses[0].partition_responses[0].error_code == 0
        assert budget.used_bytes <= 4 * MIB
        assert budget.closed > 0


async def test_a_working_client_waits_for_memory_of_others_and_loses_nothing() -> None:
    """Many large requests at once, in a budget for two of them."""
    async with running(queued_request_bytes=4 * MIB) as broker:
        clients = [await connect(broker) for _ in range(8)]
        for streams in clients:
            assert await is_served(streams)
        requests = [ask(client, ApiKey.PRODUCE, 9, large_produce(3 * MIB)) for client in clients]
        for answer in await asyncio.gather(*requests):
            assert isinstance(answer, m.ProduceResponse)
            assert answer.responses[0].partition_responses[0].error_code == 0
        assert broker.listener.budget.waiting == 0
        assert broker.listener.budget.used_bytes <= 4 * MIB


async def test_buffers_of_working_clients_go_to_those_who_wait_after_each_request() -> None:
    """Three producers of batches of 1 MB, whose buffers are kept between requests otherwise."""
    produce = codec.encode_request(ApiKey.PRODUCE, 9, 1, "c", large_produce(1_000_000))
    async with running(queued_request_bytes=MIB) as broker:
        budget = broker.listener.budget
        clients = [await connect(broker) for _ in range(3)]
        for streams in clients:
            assert await is_served(streams)
            streams[1].write(produce[:-1])
        await wait_true(lambda: budget.waiting == 1)
        for streams in clients:
            streams[1].write(produce[-1:])
        for reader, _ in clients:
            (size,) = struct.unpack(">i", await asyncio.wait_for(reader.readexactly(4), 20))
            await reader.readexactly(size)
        assert budget.waiting == 0


async def test_a_client_that_stops_amid_a_request_loses_its_memory_to_those_who_wait() -> None:
    produce = codec.encode_request(ApiKey.PRODUCE, 9, 1, "c", large_produce(3 * MIB))
    async with running(queued_request_bytes=MIB) as broker:
        budget, loop = broker.listener.budget, asyncio.get_running_loop()
        stopped = await connect(broker)
        assert await is_served(stopped)
        stopped[1].write(produce[:-1])
        await wait_true(lambda: budget.used_bytes > 2 * MIB)
        await broker.listener.sweep(loop.time() + RECEIVE_STALL_SECONDS + 1)
        assert budget.used_bytes > 2 * MIB  # nobody waits
        worker = await connect(broker)
        assert await is_served(worker)
        answer = asyncio.create_task(ask(worker, ApiKey.PRODUCE, 9, large_produce(3 * MIB)))
        await wait_true(lambda: budget.waiting == 1)
        await broker.listener.sweep(loop.time() + RECEIVE_STALL_SECONDS - 1)
        assert budget.waiting == 1
        await broker.listener.sweep(loop.time() + RECEIVE_STALL_SECONDS + 1)
        assert isinstance(await answer, m.ProduceResponse)
        assert await is_closed(stopped)


async def test_a_client_that_sends_a_request_byte_by_byte_loses_its_memory_to_those_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "broker.network.listener.RECEIVE_STALL_SECONDS", 1000.0
    )  # it never falls silent
    produce = codec.encode_request(ApiKey.PRODUCE, 9, 1, "c", large_produce(3 * MIB))
    async with running(queued_request_bytes=MIB) as broker:
        budget, loop = broker.listener.budget, asyncio.get_running_loop()
        slow = await connect(broker)
        assert await is_served(slow)
        began = loop.time()
        slow[1].write(produce[: 2 * MIB])
        await wait_true(lambda: budget.used_bytes > 2 * MIB)
        worker = await connect(broker)
        assert await is_served(worker)
        answer = asyncio.create_task(ask(worker, ApiKey.PRODUCE, 9, large_produce(3 * MIB)))
        await wait_true(lambda: budget.waiting == 1)
        (receiving,) = (c for c in broker.listener.connections if c.receives_with_reserved_memory)
        for sent in range(2 * MIB, 2 * MIB + 5):
            before = receiving.last_active
            slow[1].write(produce[sent : sent + 1])
            await wait_true(lambda before=before: receiving.last_active > before)  # type: ignore[misc]
        await broker.listener.sweep(began + RECEIVE_SECONDS_MAX - 1)
        assert budget.waiting == 1
        await broker.listener.sweep(loop.time() + RECEIVE_SECONDS_MAX + 1)
        assert isinstance(await answer, m.ProduceResponse)
        assert await is_closed(slow)


async def test_memory_of_a_large_request_is_given_back_when_it_is_answered() -> None:
    async with running() as broker:
        streams = await connect(broker)
        assert await ask(streams, ApiKey.PRODUCE, 9, large_produce(5 * MIB)) is not None
        assert broker.listener.budget.used_bytes == 0


async def test_a_large_frame_of_an_api_with_small_ones_is_refused_by_its_header() -> None:
    async with running() as broker:
        streams = await connect(broker)
        streams[1].write(struct.pack(">ihh", 90 * MIB, ApiKey.HEARTBEAT, 4))
        assert await is_closed(streams)


async def test_who_completes_no_request_in_time_is_closed_and_a_client_is_not() -> None:
    async with running(first_request_ms=5_000) as broker:
        silent, slow, client = [await connect(broker) for _ in range(3)]
        slow[1].write(struct.pack(">i", 100) + b"half")
        assert await is_served(client)
        loop = asyncio.get_running_loop()
        await broker.listener.sweep(loop.time() + 4.0)
        assert len(broker.listener.connections) == 3
        await broker.listener.sweep(loop.time() + 6.0)
        assert await is_closed(silent)
        assert await is_closed(slow)
        assert await is_served(client)
        assert broker.listener.stats.closed_silent == 2


async def test_idle_unauthenticated_connections_give_way_before_a_client_is_refused() -> None:
    async with running(connections=4) as broker:
        client = await connect(broker)
        assert await is_served(client)
        for _ in range(20):
            await connect(broker)
        newcomer = await connect(broker)
        assert await is_served(newcomer)
        assert await is_served(client)
        assert len(broker.listener.connections) <= 4
        assert broker.listener.stats.refused == 0


async def test_unauthenticated_connections_give_way_while_file_descriptors_are_short() -> None:
    """A connection uses two: below the limit of connections, logs could not open files."""
    async with running(connections=100) as broker:
        client = await connect(broker)
        assert await is_served(client)
        for _ in range(5):
            await connect(broker)
        broker.listener.env.spare_descriptors = False
        assert await is_served(await connect(broker)), "nobody gives way who connects just now"
        assert broker.listener.stats.evicted == 0
        for connection in broker.listener.connections:
            connection.opened_at -= HANDSHAKE_SECONDS + 1
        for _ in range(5):
            broker.listener._next_search_at = 0.0
            assert await is_served(await connect(broker))
            assert len(broker.listener.connections) == 7
        assert await is_served(client)
        assert await is_served(await connect(broker)), "nobody at work gives way, or is refused"
        assert broker.listener.stats.evicted == 5


async def test_a_client_at_work_keeps_its_place_until_it_is_silent() -> None:
    async with running(connections=2) as broker:
        clients = [await connect(broker), await connect(broker)]
        for streams in clients:
            assert await is_served(streams)
        refused = await connect(broker)
        assert await is_closed(refused)
        assert broker.listener.stats.refused == 1
        for connection in broker.listener.connections:
            connection.last_active -= IDLE_EVICT_SECONDS + 1
        broker.listener._next_search_at = 0.0
        newcomer = await connect(broker)
        assert await is_served(newcomer)
        assert broker.listener.stats.evicted == 1


async def test_one_address_locks_no_other_out_however_busy_it_is() -> None:
    async with running(connections=6) as broker:
        crowd = [await connect(broker) for _ in range(6)]
        for streams in crowd:
            assert await is_served(streams)
        others = [await connect(broker, "127.0.0.2") for _ in range(2)]
        for streams in others:
            assert await is_served(streams)
        assert broker.listener.stats.evicted == 2


async def test_an_address_has_a_largest_number_of_connections() -> None:
    async with running(connections_per_ip=2) as broker:
        for _ in range(2):
            await connect(broker)
        assert await is_closed(await connect(broker))
        other = await connect(broker, "127.0.0.2")
        assert await is_served(other)


def test_an_ipv6_network_is_one_address() -> None:
    assert address_of("2001:db8::1") == address_of("2001:db8::ffff:2")
    assert address_of("2001:db8:0:1::1") != address_of("2001:db8::1")
    assert address_of("::ffff:10.0.0.1") == address_of("10.0.0.1") == "10.0.0.1"
    assert address_of("fe80::1%eth0") == address_of("fe80::1")


@pytest.mark.parametrize("connections", [1, 3])
async def test_a_flood_of_connections_beyond_the_limit_leaves_the_books_right(
    connections: int,
) -> None:
    async with running(connections=connections) as broker:
        for _ in range(50):
            (await connect(broker))[1].close()
        await wait_true(lambda: not broker.listener.connections)
        assert not broker.listener._by_address


class SlowHandler:
    """Takes a millisecond for each request, and notes in which turn of the loop it came."""

    def __init__(self, handler: RequestHandler) -> None:
        self.now = 0.0
        self.turn = 0
        self.requests_by_turn: Counter[int] = Counter()
        self._handler = handler

    def handle(self, connection: Connection, frame: memoryview) -> Response | Awaitable[Response]:
        self.now += 0.001
        self.requests_by_turn[self.turn] += 1
        return self._handler.handle(connection, frame)

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def running_slowly(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Broker, Any]]:
    """A broker that takes a millisecond of its own clock for each request."""
    async with running() as broker:
        slow = SlowHandler(broker.listener.handler)
        broker.listener.handler = slow
        monkeypatch.setattr("broker.network.connection.perf_counter", lambda: slow.now)
        ticker = asyncio.create_task(slow.count_turns())
        yield broker, slow
        ticker.cancel()


REQUEST = codec.encode_request(
    ApiKey.LIST_PARTITION_REASSIGNMENTS,
    0,
    1,
    "c",
    m.ListPartitionReassignmentsRequest(timeout_ms=1000, topics=None),
)


async def read_answers(streams: Streams, count: int) -> None:
    for _ in range(count):
        (size,) = struct.unpack(">i", await asyncio.wait_for(streams[0].readexactly(4), 20))
        await streams[0].readexactly(size)


async def test_requests_that_take_long_do_not_hold_the_loop_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_slowly(monkeypatch) as (broker, slow):
        streams = await connect(broker)
        streams[1].write(REQUEST * 100)
        await read_answers(streams, 100)
        assert slow.requests_by_turn.total() == 100
        assert max(slow.requests_by_turn.values()) <= 2


async def test_unauthenticated_connections_share_the_time_of_one_turn_in_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_slowly(monkeypatch) as (broker, slow):
        others = [await connect(broker) for _ in range(30)]
        for _, writer in others:
            writer.write(REQUEST)
        for streams in others:
            await read_answers(streams, 1)
        assert slow.requests_by_turn.total() == 30
        assert max(slow.requests_by_turn.values()) <= UNAUTHENTICATED_ROUND_SECONDS * 1000


async def test_clients_with_many_requests_delay_one_with_few_by_the_time_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_slowly(monkeypatch) as (broker, slow):
        busy = [await connect(broker) for _ in range(60)]
        client = await connect(broker)
        for streams in (*busy, client):
            streams[1].write(REQUEST)
            await read_answers(streams, 1)
        for _, writer in busy:
            writer.write(REQUEST * 50)
        await wait_true(lambda: slow.requests_by_turn.total() > 4 * len(busy))
        slow.requests_by_turn.clear()
        for _ in range(20):
            began = slow.turn
            client[1].write(REQUEST)
            await read_answers(client, 1)
            assert slow.turn - began < 10  # rounds that the transports need, and no queue of 60
        slow_rounds = slow.requests_by_turn.values()
        assert sum(slow_rounds) > 500
        # The other half is for single requests: of the client, and of who receives the next ones.
        assert max(slow_rounds) <= 2 * ROUND_SECONDS * 1000
        for streams in busy:
            await read_answers(streams, 50)


async def test_clients_with_one_request_each_have_the_time_of_two_rounds_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand connections that sent one small request each held the loop for 65 ms."""
    async with running_slowly(monkeypatch) as (broker, slow):
        clients = [await connect(broker) for _ in range(100)]
        for streams in clients:
            streams[1].write(REQUEST)
            await read_answers(streams, 1)
        for _ in range(3):
            slow.requests_by_turn.clear()
            for _, writer in clients:
                writer.write(REQUEST)
            for streams in clients:
                await read_answers(streams, 1)
            assert slow.requests_by_turn.total() == len(clients)
            assert max(slow.requests_by_turn.values()) <= 2 * ROUND_SECONDS * 1000


async def test_requests_that_wait_have_the_time_of_a_round_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand connections that sent one such request each held the loop for a second."""
    async with running() as broker:
        dispatcher, now_ns, turn, by_turn = broker._dispatcher, 0, 0, Counter[int]()

        async def handle_slowly(*_: object) -> m.ListPartitionReassignmentsResponse:
            nonlocal now_ns
            now_ns += 1_000_000
            by_turn[turn] += 1
            return m.ListPartitionReassignmentsResponse(topics=[])

        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        connections = [await connect(broker) for _ in range(30)]
        key = ApiKey.LIST_PARTITION_REASSIGNMENTS
        monkeypatch.setitem(dispatcher._handlers, key, handle_slowly)
        monkeypatch.setattr("broker.event_loop.loop_turns.perf_counter_ns", lambda: now_ns)
        ticker = asyncio.create_task(count_turns())
        for _, writer in connections:
            writer.write(REQUEST)
        for streams in connections:
            await read_answers(streams, 1)
        ticker.cancel()
        assert by_turn.total() == 30
        assert max(by_turn.values()) <= ROUND_SECONDS * 1000
