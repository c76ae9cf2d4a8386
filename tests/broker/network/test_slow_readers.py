"""Clients that read their responses slowly, and what the files of these responses occupy."""

import asyncio
import errno
import os
import random
import socket
import ssl
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.network.listener import SEND_SECONDS_MAX
from broker.network.socket_writer import SocketWriter
from protocol.api import ApiKey
from protocol.codec import encode_request
from storage.env import Env, RealEnv, RealFile
from storage.log.log import Log
from storage.segments.fetch_slice import FetchSlice
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.sockets import receive_exactly
from tests.support.certificates import Authority
from tests.support.protocol.raw_client import FETCH_VERSION, fetch_request
from tests.support.storage.logs import append
from tests.support.storage.memory_env import MemoryEnv, MemoryFile

BATCHES = 8
BATCH_BYTES = 1 << 20


@asynccontextmanager
async def tls_broker(env: MemoryEnv, authority: Authority) -> AsyncIterator[Broker]:
    certificate = authority.write("server.pem", authority.leaf("broker").pem())
    async with broker_in_memory(
        env,
        listeners=["SSL://127.0.0.1:0"],
        tls={"certificate_file": certificate},
        topics={"orders": {"keys": {"max.message.bytes": 2 * BATCH_BYTES}}},
    ) as broker:
        yield broker


def fill(broker: Broker) -> None:
    topic = broker.topics.get("orders")
    assert topic is not None
    log = topic.partitions[0].log
    assert isinstance(log, Log)
    for _ in range(BATCHES):
        append(log, bytes(BATCH_BYTES))


async def fetch_without_reading(
    broker: Broker, authority: Authority
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """With TLS, because its writer does not copy what a file in memory has."""
    address, client = broker.addresses[0], socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((address.host, address.port))
    context = ssl.create_default_context(cafile=authority.path)
    reader, writer = await asyncio.open_connection(
        sock=client, ssl=context, server_hostname="localhost", limit=1
    )
    request = fetch_request("orders")
    request.topics[0].partitions[0].partition_max_bytes = 2 * BATCHES * BATCH_BYTES
    request.max_bytes = 2 * BATCHES * BATCH_BYTES
    writer.write(encode_request(ApiKey.FETCH, FETCH_VERSION, 1, "slow", request))
    await reader.readexactly(1)
    return reader, writer


async def test_a_slow_client_does_not_keep_deleted_files_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.network.listener.STALL_SECONDS", 1000.0)  # it never stops
    env, authority = MemoryEnv(seed=1), Authority(tmp_path)
    async with tls_broker(env, authority) as broker:
        fill(broker)
        _, writer = await fetch_without_reading(broker, authority)
        listener = broker.listener
        (connection,) = listener.connections
        assert connection.stalled
        began = connection.last_active
        await listener.sweep(began + SEND_SECONDS_MAX + 1)
        assert connection.stalled, "a client may read slowly what nobody has deleted"
        (path,) = {file.path for file in connection.unsent_files}
        env.unlink(path)
        await listener.sweep(began + SEND_SECONDS_MAX - 1)
        assert connection.stalled
        with capture_logs() as lines:
            await listener.sweep(began + SEND_SECONDS_MAX + 1)
        assert not connection.stalled
        assert listener.stats.closed_stalled == 1
        (reason,) = [line["reason"] for line in lines]
        assert reason.startswith("the log files of its response are deleted")
        writer.close()


def test_a_file_is_deleted_when_its_last_name_is_gone(tmp_path: Path) -> None:
    envs: list[Env] = [RealEnv(), MemoryEnv(seed=1)]
    for number, env in enumerate(envs):
        folder = str(tmp_path / str(number))
        env.mkdir(folder)
        file = env.open(f"{folder}/a", create=True)
        env.rename(f"{folder}/a", f"{folder}/b")
        assert not file.is_deleted()
        env.unlink(f"{folder}/b")
        assert file.is_deleted()


class ColdFile(RealFile):
    """A file of which nothing is in the page cache, except what has just been read."""

    def is_cached(self, _position: int, _length: int) -> bool:
        return False


class Ends:
    """A writer of a cold file on one end of a socket pair, a reader on the other."""

    def __init__(self, path: Path) -> None:
        self.content = random.Random(3).randbytes(2_000_000)
        path.write_bytes(self.content)
        self.file = ColdFile(str(path), os.open(path, os.O_RDONLY))
        self.ours, self.theirs = socket.socketpair()
        for end in (self.ours, self.theirs):
            end.setblocking(False)
        self.reads = list[FetchSlice]()
        self.may_end, self.drained = asyncio.Event(), asyncio.Event()
        self.failure: OSError | None = None
        self.errors = list[OSError]()
        loop = asyncio.get_running_loop()
        self.writer = SocketWriter(
            loop, self.ours.fileno(), self.drained.set, self.errors.append, self.warm
        )

    async def warm(self, part: FetchSlice) -> None:
        self.reads.append(part)
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self.writer.close()
        self.ours.close()
        self.theirs.close()


async def wait_for_read(ends: Ends) -> None:
    async with asyncio.timeout(20):
        while not ends.reads:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_the_loop_does_not_read_from_the_disk_for_a_client_that_reads_late(
    tmp_path: Path,
) -> None:
    ends = Ends(tmp_path / "log")
    ends.writer.write([FetchSlice(ends.file, 0, len(ends.content))])
    sent = ends.writer.bytes_sent
    assert 0 < sent < len(ends.content)
    assert not ends.reads, "a fetch has just read what it sends at once"
    received = await receive_exactly(ends.theirs, sent)
    await wait_for_read(ends)
    assert ends.writer.bytes_sent == sent
    assert ends.reads == [FetchSlice(ends.file, sent, len(ends.content) - sent)]
    ends.writer.write([b"the end"])
    assert ends.writer.bytes_sent == sent
    ends.may_end.set()
    received += await receive_exactly(ends.theirs, len(ends.content) + len(b"the end") - sent)
    assert received == ends.content + b"the end"
    await asyncio.wait_for(ends.drained.wait(), 20)
    assert len(ends.reads) == 1, "what has been read counts as cached for a while"
    file = weakref.ref(ends.file)
    del ends.file
    ends.reads.clear()
    assert file() is None, "an idle connection keeps no deleted file on the disk"
    ends.close()


@pytest.mark.parametrize("closes", [False, True])
async def test_a_late_read_that_fails_ends_the_response(tmp_path: Path, *, closes: bool) -> None:
    ends = Ends(tmp_path / "log")
    ends.failure = OSError(errno.EIO, "Input/output error")
    ends.writer.write([FetchSlice(ends.file, 0, len(ends.content))])
    await receive_exactly(ends.theirs, ends.writer.bytes_sent)
    await wait_for_read(ends)
    if closes:
        ends.writer.close()
    ends.may_end.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert ends.errors == ([] if closes else [ends.failure])
    ends.close()


async def test_records_are_read_in_threads_for_a_client_with_tls_that_reads_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_by = set[str]()

    def warm(_file: MemoryFile, _position: int, _length: int) -> None:
        read_by.add(threading.current_thread().name)

    env, authority = MemoryEnv(seed=1), Authority(tmp_path)
    async with tls_broker(env, authority) as broker:
        fill(broker)
        reader, writer = await fetch_without_reading(broker, authority)
        monkeypatch.setattr(MemoryFile, "is_cached", lambda *_: False)
        monkeypatch.setattr(MemoryFile, "warm", warm)
        async with asyncio.timeout(30):
            response = await reader.readexactly(BATCHES * BATCH_BYTES)
        assert response.count(bytes(BATCH_BYTES // 2)) >= BATCHES
        assert read_by
        assert threading.main_thread().name not in read_by
        writer.close()
