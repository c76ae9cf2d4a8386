"""Clients that read their responses slowly, and what the files of these responses occupy."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.network.listener import SEND_SECONDS_MAX
from protocol.api import ApiKey
from protocol.codec import encode_request
from storage.env import Env, RealEnv
from storage.log.log import Log
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.certificates import Authority
from tests.support.protocol.raw_client import FETCH_VERSION, fetch_request
from tests.support.storage.logs import append
from tests.support.storage.memory_env import MemoryEnv

BATCHES = 8
BATCH_BYTES = 1 << 20


async def fetch_without_reading(broker: Broker, authority: Authority) -> asyncio.StreamWriter:
    """With TLS, because its writer does not copy what a file in memory has."""
    address, client = broker.addresses[0], socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((address.host, address.port))
    context = ssl.create_default_context(cafile=authority.path)
    reader, writer = await asyncio.open_connection(
        sock=client, ssl=context, server_hostname="localhost", limit=1
    )
    request = fetch_request("orders")
    request.topics[0].partitions[0].partition_max_bytes = BATCHES * BATCH_BYTES
    request.max_bytes = BATCHES * BATCH_BYTES
    writer.write(encode_request(ApiKey.FETCH, FETCH_VERSION, 1, "slow", request))
    await reader.readexactly(1)
    return writer


async def test_a_slow_client_does_not_keep_deleted_files_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.network.listener.STALL_SECONDS", 1000.0)  # it never stops
    env, authority = MemoryEnv(seed=1), Authority(tmp_path)
    certificate = authority.write("server.pem", authority.leaf("broker").pem())
    async with broker_in_memory(
        env,
        listeners=["SSL://127.0.0.1:0"],
        tls={"certificate_file": certificate},
        topics={"orders": {"keys": {"max.message.bytes": 2 * BATCH_BYTES}}},
    ) as broker:
        topic = broker.topics.get("orders")
        assert topic is not None
        log = topic.partitions[0].log
        assert isinstance(log, Log)
        for _ in range(BATCHES):
            append(log, bytes(BATCH_BYTES))
        writer = await fetch_without_reading(broker, authority)
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
