"""The HTTP API over TLS: own client, certificates at a reload, peers that finish no handshake."""

import asyncio
import math
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from admin.client import ApiClient, UnreachableError
from broker.app import Broker
from broker.event_loop.loop_turns import UNAUTHENTICATED_ROUND_SECONDS
from broker.http import tls_listener, tls_transport
from broker.http.tls_transport import RECEIVE_BYTES, TlsTransport
from broker.lifecycle.reload import Secrets
from broker.network.tls_channel import RECORDS_AT_ONCE, TlsChannel
from broker.security.tls import load_server_tls
from config.security.clients import ClientSecurity, ClientTls
from tests.support import key_updates
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.certificates import Authority
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.key_updates import KEY_UPDATE_REQUEST
from tests.support.storage.memory_env import MemoryEnv

TOKEN = "0123456789abcdef"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def broker(authority: Authority) -> AsyncIterator[Broker]:
    tls = {
        "certificate_file": authority.write("server.pem", authority.leaf("broker").pem()),
        "ca_file": authority.path,
        "client_auth": "required",
    }
    async with broker_in_memory(
        MemoryEnv(seed=1), token=TOKEN.encode(), http_tls=True, tls=tls
    ) as broker:
        yield broker


def client_of(broker: Broker, authority: Authority, host: str = "localhost") -> ApiClient:
    security = ClientSecurity(tls=ClientTls(Path(authority.path).read_text()))
    return ApiClient(f"https://{host}:{broker.http.address.port}", TOKEN, security)


async def test_the_api_answers_over_tls_without_a_client_certificate(
    broker: Broker, authority: Authority
) -> None:
    client = client_of(broker, authority)
    assert "partitions" in await asyncio.to_thread(client.get, "")
    other = client.with_token("wrong-token-wrong")
    assert other.tls == client.tls


async def test_a_certificate_that_is_not_trusted_is_named(
    broker: Broker, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    distrustful = client_of(broker, Authority(tmp_path / "other"))
    with pytest.raises(UnreachableError, match=r"is not trusted: .*--command-config"):
        await asyncio.to_thread(distrustful.get, "")


async def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(
    broker: Broker, authority: Authority
) -> None:
    context = ssl.create_default_context(cafile=authority.path)
    context.maximum_version = ssl.TLSVersion.TLSv1_3  # the client sends the last message
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.http.address.port)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    writer.write(outgoing.read())
    while True:
        incoming.write(await asyncio.wait_for(reader.read(65536), 10))
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())  # another ClientHello, with a key that the broker takes
    tls.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    writer.write(outgoing.read())
    answer = b""
    while b"ok" not in answer:
        incoming.write(await asyncio.wait_for(reader.read(65536), 10))
        with suppress(ssl.SSLWantReadError):
            answer += tls.read(65536)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_a_reload_changes_the_certificate(broker: Broker, authority: Authority) -> None:
    authority.write("server.pem", authority.leaf("renewed").pem())
    tls = load_server_tls(broker.settings.tls)
    await broker._reload(broker.settings, Secrets(TOKEN.encode(), tls))
    context = ssl.create_default_context(cafile=authority.path)
    _, writer = await asyncio.open_connection(
        "127.0.0.1", broker.http.address.port, ssl=context, server_hostname="localhost"
    )
    names = dict(field[0] for field in writer.get_extra_info("peercert")["subject"])
    assert names == {"commonName": "renewed"}
    writer.close()


async def test_peers_that_finish_no_handshake_keep_no_connections(
    broker: Broker, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKES_MAX", 3)
    silent = [
        await asyncio.open_connection("127.0.0.1", broker.http.address.port) for _ in range(10)
    ]
    assert await asyncio.to_thread(client_of(broker, authority).get, "")
    for reader, _ in silent[:7]:
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
    for _, writer in silent:
        writer.close()


async def test_key_updates_without_requests_close_the_connection(
    broker: Broker, authority: Authority
) -> None:
    client = await key_updates.connect(broker.http.address.port, authority)
    client.writer.write(client.records.key_updates(3_000))  # 81 KB
    assert await client.read() == b""
    assert broker.http.tls_failures == 1
    client.writer.close()


async def test_a_request_in_many_records_is_answered_over_a_connection_that_stays(
    broker: Broker, authority: Authority
) -> None:
    request = f"GET /api/v1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    client = await key_updates.connect(broker.http.address.port, authority)
    for _ in range(3):
        for byte in request.encode():
            client.writer.write(client.records.key_updates(2) + client.records.data(bytes((byte,))))
        answer = b""
        while b"}" not in answer:
            answer += await client.read()
        assert answer.startswith(b"HTTP/1.1 ")
    client.writer.close()


async def test_records_take_several_turns_to_decrypt_even_if_each_is_a_message_of_tls(
    broker: Broker, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = f"GET /api/v1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    client = await key_updates.connect(broker.http.address.port, authority)
    turns = []
    pass_on = TlsTransport._pass_on

    def note_turn(transport: TlsTransport, ends_at: float) -> None:
        turns.append(ends_at)
        pass_on(transport, ends_at)

    monkeypatch.setattr(tls_transport, "perf_counter", lambda: math.inf)  # a turn is over at once
    monkeypatch.setattr(TlsTransport, "_pass_on", note_turn)
    records = client.records
    client.writer.write(
        b"".join(records.key_updates(9) + records.data(bytes((x,))) for x in request.encode())
    )
    answer = b""
    while b"}" not in answer:
        answer += await client.read()
    assert answer.startswith(b"HTTP/1.1 ")
    assert len(turns) >= 10 * len(request) / RECORDS_AT_ONCE
    client.writer.close()


async def test_a_client_that_reads_no_key_updates_gets_few_of_them(
    broker: Broker, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    transports = list[TlsTransport]()
    join = TlsTransport._join

    def join_with_small_buffer(transport: TlsTransport, to: asyncio.BaseTransport) -> None:
        join(transport, to)
        transports.append(transport)
        to.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    monkeypatch.setattr(TlsTransport, "_join", join_with_small_buffer)
    client = await key_updates.connect(broker.http.address.port, authority)
    (transport,) = transports
    _, high = transport.get_write_buffer_limits()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.writer.write(client.records.data(b"GET /api/v1 HTTP/1.1\r\nHost: localhost\r\nX: "))

    def sends_until_full() -> bool:
        if transport.is_reading():
            updates = client.records.key_updates(500, KEY_UPDATE_REQUEST)
            client.writer.write(updates + client.records.data(b"x"))
        return not transport.is_reading()

    await until(sends_until_full)
    for _ in range(1_000):
        await asyncio.sleep(0)
    assert high < transport.get_write_buffer_size() < high + RECEIVE_BYTES
    client.writer.write(client.records.data(b"\r\n\r\n"))
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += await client.read()
    assert answer.startswith(b"HTTP/1.1 401 ")
    client.writer.close()


async def test_handshakes_share_the_time_of_unauthenticated_connections_in_a_round(
    broker: Broker, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, turn = 0.0, 0
    handshakes_by_turn = Counter[int]()
    shake_hands = TlsChannel.shake_hands

    def shake_hands_slowly(channel: TlsChannel) -> bool:
        nonlocal now
        if not channel.is_established:
            now += 0.001
            handshakes_by_turn[turn] += 1
        return shake_hands(channel)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(TlsChannel, "shake_hands", shake_hands_slowly)
    monkeypatch.setattr("broker.http.transport.perf_counter", lambda: now)
    ticker = asyncio.create_task(count_turns())
    peers = [
        await asyncio.open_connection("127.0.0.1", broker.http.address.port) for _ in range(30)
    ]
    context = ssl.create_default_context(cafile=authority.path)
    for _, writer in peers:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        writer.write(outgoing.read())
    for reader, _ in peers:
        assert await asyncio.wait_for(reader.read(1), 20)
    ticker.cancel()
    assert handshakes_by_turn.total() == 30
    assert max(handshakes_by_turn.values()) <= UNAUTHENTICATED_ROUND_SECONDS * 1000
    for _, writer in peers:
        writer.close()


async def test_plaintext_is_counted_as_a_failure_of_tls(broker: Broker) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.http.address.port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.wait_for(reader.read(), 10)
    assert broker.http.tls_failures == 1
    writer.close()
