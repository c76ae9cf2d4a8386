"""Responses in memory: who waits to encode one, and who is closed because he does not read his."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.handlers.dispatch import LISTS_AT_ONCE
from broker.network.connection import GATHERED_BYTES_MAX
from broker.network.listener import SEND_SECONDS_MAX, SEND_STALL_SECONDS
from broker.network.socket_writer import Part, SocketWriter
from protocol import codec
from protocol import messages as m
from protocol.api import ApiKey
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.storage.memory_env import MemoryEnv

MIB = 1 << 20
PARTITIONS = 400
RESPONSE_BYTES = PARTITIONS * 16_000  # about
EVERY = m.OffsetFetchRequestGroupTopic(name="t", partition_indexes=list(range(PARTITIONS)))
FETCH = m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(group_id="g", topics=[EVERY])])
FETCH_ALL = m.OffsetFetchRequest(groups=[m.OffsetFetchRequestGroup(group_id="g", topics=None)])
OPENED: list[socket.socket] = []  # by the running test


class Client:
    """A connection whose socket receives little until the client reads."""

    def __init__(self, broker: Broker, host: str = "127.0.0.1") -> None:
        address = broker.addresses[0]
        self._socket = socket.socket()
        OPENED.append(self._socket)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)
        self._address = address.host, address.port
        self._host = host  # its address
        self._is_connected = False

    async def send(self, key: ApiKey, version: int, body: m.Message) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_connected:
            self._is_connected = True
            self._socket.bind((self._host, 0))
            await loop.sock_connect(self._socket, self._address)
        await loop.sock_sendall(self._socket, codec.encode_request(key, version, 1, "c", body))

    async def receive(self, count: int) -> bytes:
        """Return so many bytes, fewer if the broker closes the connection."""
        received = bytearray()
        async with asyncio.timeout(30):
            while len(received) < count:
                try:
                    some = await asyncio.get_running_loop().sock_recv(
                        self._socket, count - len(received)
                    )
                except ConnectionResetError:
                    break
                if not some:
                    break
                received += some
        return bytes(received)

    async def ask(self, key: ApiKey, version: int, body: m.Message) -> Any:
        await self.send(key, version, body)
        return await self.answer(key, version)

    async def answer(self, key: ApiKey, version: int, received: bytes = b"") -> Any:
        received += await self.receive(4 - len(received))
        (size,) = struct.unpack_from(">i", received)
        return codec.decode_response(
            key, version, received[4:] + await self.receive(size + 4 - len(received))
        )[1]

    async def ask_for_offsets(self) -> None:
        await self.send(ApiKey.OFFSET_FETCH, 9, FETCH)

    async def offsets(self, received: bytes = b"") -> int:
        """Receive the answer; return the number of partitions in it."""
        answer = await self.answer(ApiKey.OFFSET_FETCH, 9, received)
        return sum(len(topic.partitions) for topic in answer.groups[0].topics)

    async def is_closed(self) -> bool:
        return len(await self.receive(2 * RESPONSE_BYTES)) < RESPONSE_BYTES


@asynccontextmanager
async def running() -> AsyncIterator[Broker]:
    """A broker with a budget of 1 MiB, and a group whose offsets take six times that."""
    async with broker_in_memory(
        MemoryEnv(seed=4),
        limits={"queued_request_bytes": MIB},
        topics={"t": {"partitions": PARTITIONS, "keys": {"cleanup.policy": "delete"}}},
    ) as broker:
        await commit_offsets(Client(broker))
        assert not broker.listener.response_budget.used_bytes
        try:
            yield broker
        finally:
            while OPENED:
                OPENED.pop().close()


async def commit_offsets(client: Client) -> None:
    partitions = [
        m.OffsetCommitRequestPartition(
            partition_index=index, committed_offset=1, committed_metadata="\U0001f600" * 4_000
        )
        for index in range(PARTITIONS)
    ]
    body = m.OffsetCommitRequest(
        group_id="g",
        generation_id_or_member_epoch=-1,
        topics=[m.OffsetCommitRequestTopic(name="t", partitions=partitions)],
    )
    await client.ask(
        ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest()
    )  # unauthenticated, so it gets no memory
    find = m.FindCoordinatorRequest(key="g")
    async with asyncio.timeout(20):
        # The creation of the topic of offsets has no event.
        while (await client.ask(ApiKey.FIND_COORDINATOR, 3, find)).error_code:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    answer = await client.ask(ApiKey.OFFSET_COMMIT, 8, body)
    assert not any(row.error_code for row in answer.topics[0].partitions)


async def wait_true(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what the broker does for others has no event
            await asyncio.sleep(0.01)


async def clients_that_do_not_read(broker: Broker, count: int) -> list[Client]:
    """Return clients that have asked for offsets. The first has the memory, the others wait."""
    clients = [Client(broker) for _ in range(count)]
    for client in clients:
        await client.ask_for_offsets()
        await wait_true(lambda: any(c.stalled for c in broker.listener.connections))
    await wait_true(lambda: broker.listener.response_budget.waiting == count - 1)
    return clients


async def test_responses_that_nobody_reads_have_one_budget() -> None:
    async with running() as broker:
        await clients_that_do_not_read(broker, 10)
        budget = broker.listener.response_budget
        assert RESPONSE_BYTES // 2 < budget.used_bytes < MIB + RESPONSE_BYTES + MIB


async def test_those_who_wait_are_answered_when_others_have_read() -> None:
    async with running() as broker:
        clients = await clients_that_do_not_read(broker, 3)
        answers = await asyncio.gather(*(client.offsets() for client in clients))
        assert answers == [PARTITIONS] * 3
        budget = broker.listener.response_budget
        assert (budget.used_bytes, budget.waiting) == (0, 0)


async def test_small_responses_do_not_wait_for_memory() -> None:
    async with running() as broker:
        await clients_that_do_not_read(broker, 2)
        answer = await Client(broker).ask(ApiKey.LIST_GROUPS, 4, m.ListGroupsRequest())
        assert [group.group_id for group in answer.groups] == ["g"]


async def test_lists_that_nobody_reads_leave_half_of_the_slots_to_other_clients() -> None:
    """They keep their slots while they wait for memory: that bounds the rows in memory."""
    async with running() as broker:
        idle = [Client(broker) for _ in range(2 * LISTS_AT_ONCE)]
        for client in idle:
            await client.send(ApiKey.OFFSET_FETCH, 9, FETCH_ALL)
        budget, stats = broker.listener.response_budget, broker._services.stats
        half = LISTS_AT_ONCE // 2
        await wait_true(lambda: budget.waiting == stats.large_requests == half)
        other = Client(broker, "127.0.0.2")
        answer = await other.ask(ApiKey.LIST_GROUPS, 4, m.ListGroupsRequest())
        assert [group.group_id for group in answer.groups] == ["g"]
        assert await asyncio.gather(*(client.offsets() for client in idle)) == (
            [PARTITIONS] * len(idle)
        )
        assert stats.large_requests == 0


async def test_a_client_that_does_not_read_is_closed_while_others_wait() -> None:
    async with running() as broker:
        listener, now = broker.listener, asyncio.get_running_loop().time()
        (stalled,) = await clients_that_do_not_read(broker, 1)
        await listener.sweep(now)
        await listener.sweep(now + SEND_STALL_SECONDS + 1)  # nobody waits
        waiting = Client(broker)
        await waiting.ask_for_offsets()
        await wait_true(lambda: listener.response_budget.waiting == 1)
        await listener.sweep(now + SEND_STALL_SECONDS - 1)
        assert listener.stats.closed_stalled == 0
        with capture_logs() as lines:
            await listener.sweep(now + SEND_STALL_SECONDS + 1)
        assert [line["event"] for line in lines] == ["connection closed"]
        assert listener.stats.closed_stalled == 1
        assert await waiting.offsets() == PARTITIONS
        assert await stalled.is_closed()


async def test_a_client_that_reads_slowly_gets_all_while_others_wait() -> None:
    async with running() as broker:
        listener, now = broker.listener, asyncio.get_running_loop().time()
        slow, waiting = await clients_that_do_not_read(broker, 2)
        (connection,) = (c for c in listener.connections if c.stalled)
        received = b""
        for rounds in range(4):
            await listener.sweep(now + rounds * (SEND_STALL_SECONDS + 1))
            sent = connection.bytes_sent
            while connection.bytes_sent == sent:
                received += await slow.receive(10_000)
        assert await slow.offsets(received) == PARTITIONS
        assert await waiting.offsets() == PARTITIONS
        assert listener.stats.closed_stalled == 0


async def test_a_client_that_reads_byte_by_byte_is_closed_while_others_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("broker.network.listener.SEND_STALL_SECONDS", 1000.0)  # it never stops
    monkeypatch.setattr("broker.network.listener.STALL_SECONDS", 1000.0)
    async with running() as broker:
        _, waiting = await clients_that_do_not_read(broker, 2)
        (connection,) = (c for c in broker.listener.connections if c.stalled)
        await broker.listener.sweep(connection.last_active + SEND_SECONDS_MAX - 1)
        assert connection.stalled
        await broker.listener.sweep(connection.last_active + SEND_SECONDS_MAX + 1)
        assert not connection.stalled
        assert await waiting.offsets() == PARTITIONS


async def test_clients_that_leave_release_their_memory() -> None:
    async with running() as broker:
        await clients_that_do_not_read(broker, 5)
        while OPENED:
            OPENED.pop().close()
        budget = broker.listener.response_budget
        await wait_true(lambda: not budget.used_bytes and not budget.waiting)


async def test_a_response_above_the_largest_size_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("broker.handlers.dispatch.RESPONSE_BYTES_MAX", MIB)
    async with running() as broker:
        client = Client(broker)
        with capture_logs() as lines:
            await client.ask_for_offsets()
            assert await client.receive(1) == b""
        (reason,) = (line["reason"] for line in lines if line["event"] == "connection closed")
        assert reason == f"the response to OffsetFetch has more than {MIB} bytes"
        assert not broker.listener.response_budget.used_bytes


async def test_a_response_for_which_memory_is_missing_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    def fail(_writer: SocketWriter, _response: object) -> None:
        raise MemoryError

    async with running() as broker:
        client = Client(broker)
        monkeypatch.setattr(SocketWriter, "write", fail)
        await client.ask_for_offsets()
        assert await client.receive(1) == b""
        assert not broker.listener.response_budget.used_bytes
    assert not errors


async def test_a_large_response_is_not_copied_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    write, write_bytes = SocketWriter.write, SocketWriter.write_bytes

    def note(parts: list[Part]) -> None:
        nonlocal longest
        longest = max(longest, *(len(part) for part in parts if isinstance(part, bytes)))

    def noted_write(writer: SocketWriter, parts: list[Part]) -> None:
        note(parts)
        write(writer, parts)

    def noted_write_bytes(writer: SocketWriter, data: bytes) -> None:
        note([data])
        write_bytes(writer, data)

    async with running() as broker:
        client = Client(broker)
        monkeypatch.setattr(SocketWriter, "write", noted_write)
        monkeypatch.setattr(SocketWriter, "write_bytes", noted_write_bytes)
        await client.ask_for_offsets()
        assert await client.offsets() == PARTITIONS
    assert 16_000 < longest <= 2 * GATHERED_BYTES_MAX
