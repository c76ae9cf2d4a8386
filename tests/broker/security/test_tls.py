"""Listeners with TLS: certificates, handshakes, requests of any size, reload, hostile bytes."""

import asyncio
import gc
import random
import ssl
import struct
import time
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography.hazmat.primitives.serialization import Encoding
from structlog.testing import capture_logs

from broker.app import Broker
from broker.lifecycle.reload import Reloader, Secrets
from broker.network import connection
from broker.network.tls_channel import (
    BYTES_WITHOUT_DATA_MAX,
    RECORDS_AT_ONCE,
    BytesWithoutDataError,
    TlsChannel,
)
from broker.security.tls import ServerTls, TlsError, load_server_tls
from config.security.secrets import SecretReference
from config.security.token import TokenFileError
from config.settings import Settings, TlsSettings
from protocol import codec
from protocol import messages as m
from protocol.api import ApiKey
from storage.directory.cluster_metadata import new_metadata
from storage.format.batch import Record, build_batch
from tests.support import key_updates
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.certificates import Authority
from tests.support.storage.memory_env import MemoryEnv

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def tls_settings(authority: Authority, **more: Any) -> dict[str, Any]:
    path = authority.write("server.pem", authority.leaf("broker").pem())
    return {"certificate_file": path, **more}


async def connect(broker: Broker, authority: Authority, index: int = 0, **more: Any) -> Streams:
    context = ssl.create_default_context(cafile=authority.path)
    if "version" in more:
        context.maximum_version = more.pop("version")
    if "certificate" in more:
        context.load_cert_chain(more.pop("certificate"))
    address = broker.addresses[index]
    return await asyncio.open_connection(address.host, address.port, ssl=context)


async def ask(streams: Streams, key: ApiKey, version: int, body: m.Message) -> Any:
    reader, writer = streams
    writer.write(codec.encode_request(key, version, 1, "c", body))
    (size,) = struct.unpack(">i", await asyncio.wait_for(reader.readexactly(4), 20))
    return codec.decode_response(key, version, await reader.readexactly(size))[1]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_each_listener_advertises_its_own_address(
    authority: Authority, version: ssl.TLSVersion
) -> None:
    listeners = [
        "127.0.0.1:0",
        {"name": "OUT", "protocol": "SSL", "address": "127.0.0.1:0", "advertise": "kafka.lan:93"},
    ]
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=listeners, tls=tls_settings(authority)
    ) as broker:
        secure = await connect(broker, authority, index=1, version=version)
        plain = await asyncio.open_connection(broker.addresses[0].host, broker.addresses[0].port)
        request = m.MetadataRequest(topics=[])
        (node,) = (await ask(secure, ApiKey.METADATA, 9, request)).brokers
        assert (node.host, node.port) == ("kafka.lan", 93)
        (node,) = (await ask(plain, ApiKey.METADATA, 9, request)).brokers
        assert (node.host, node.port) == ("127.0.0.1", broker.addresses[0].port)
        for _, writer in (secure, plain):
            writer.close()


@pytest.mark.parametrize("protocol", ["SSL", "PLAINTEXT"])
async def test_a_closed_connection_is_freed_without_a_garbage_collection(
    authority: Authority, protocol: str
) -> None:
    """Its receive buffer may have 100 MB, and collections pass over frozen objects."""
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=[f"{protocol}://127.0.0.1:0"], tls=tls_settings(authority)
    ) as broker:
        if protocol == "SSL":
            streams = await connect(broker, authority)
        else:
            address = broker.addresses[0]
            streams = await asyncio.open_connection(address.host, address.port)
        await ask(streams, ApiKey.METADATA, 9, m.MetadataRequest(topics=[]))
        (reader,) = [weakref.ref(each._reader) for each in broker.listener.connections]
        gc.disable()
        try:
            streams[1].close()
            async with asyncio.timeout(20):
                while reader() is not None:  # noqa: ASYNC110 - a finalizer has no event
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """Connect the two in memory; return the client's end."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        (client.wrap_bio(to_client, to_server), to_client),
        (server.wrap_bio(to_server, to_client, server_side=True), to_server),
    ]
    unfinished = list(ends)
    while unfinished:
        for end in tuple(unfinished):
            with suppress(ssl.SSLWantReadError):
                end[0].do_handshake()
                unfinished.remove(end)
    return ends[0][0]


def contexts(authority: Authority) -> list[ssl.SSLContext]:
    """The broker's contexts: with and without certificates of clients."""
    settings = {"ca_file": authority.path, "client_auth": "requested"}
    tls = load_server_tls(TlsSettings.model_validate(tls_settings(authority, **settings)))
    assert tls is not None
    return [tls.context, tls.password_context]


def client_context(authority: Authority, group: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.path)
    context.check_hostname = False
    if group is not None:
        context.set_ecdh_curve(group)
    return context


@pytest.mark.parametrize("group", ["ffdhe2048", "ffdhe8192"])
def test_finite_field_groups_are_refused_before_a_key_is_made(
    authority: Authority, group: str
) -> None:
    for server in contexts(authority):
        with pytest.raises(ssl.SSLError, match="NO_SUITABLE_KEY_SHARE"):
            shake_hands(server, client_context(authority, group))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("group", [None, "prime256v1"])
def test_clients_with_default_groups_and_with_the_required_one_connect(
    authority: Authority, version: ssl.TLSVersion, group: str | None
) -> None:
    for server in contexts(authority):
        client = client_context(authority, group)
        client.maximum_version = version
        assert shake_hands(server, client).version() == version.name.replace("_", ".")


async def test_large_requests_and_responses_pass_unchanged(authority: Authority) -> None:
    noise = random.Random(7).randbytes(700_000)
    topic = {"keys": {"max.message.bytes": 4 << 20}}
    async with broker_in_memory(
        MemoryEnv(seed=1),
        listeners=["SSL://127.0.0.1:0"],
        tls=tls_settings(authority),
        topics={"t": topic},
    ) as broker:
        streams = await connect(broker, authority)
        batch = build_batch([Record(0, 0, b"k", noise)])
        for _ in range(3):
            answer = await ask(streams, ApiKey.PRODUCE, 9, produce_request(batch))
            assert answer.responses[0].partition_responses[0].error_code == 0
        fetch = m.FetchRequest(
            max_wait_ms=0,
            min_bytes=1,
            topics=[
                m.FetchRequestTopic(
                    topic="t",
                    partitions=[
                        m.FetchRequestPartition(
                            partition=0, fetch_offset=0, partition_max_bytes=8 << 20
                        )
                    ],
                )
            ],
        )
        answer = await ask(streams, ApiKey.FETCH, 11, fetch)
        records = bytes(answer.responses[0].partitions[0].records)
        assert records.count(noise) == 3
        streams[1].close()


def produce_request(batch: bytes) -> m.ProduceRequest:
    return m.ProduceRequest(
        acks=-1,
        timeout_ms=1000,
        topic_data=[
            m.ProduceRequestTopic(
                name="t",
                partition_data=[m.ProduceRequestPartition(index=0, records=bytes(batch))],
            )
        ],
    )


async def test_a_client_without_a_certificate_is_refused_if_one_is_required(
    authority: Authority,
) -> None:
    tls = tls_settings(authority, ca_file=authority.path, client_auth="required")
    client = authority.write("client.pem", authority.leaf("alice").pem())
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls=tls
    ) as broker:
        streams = await connect(broker, authority, certificate=client)
        assert (await ask(streams, ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())).api_keys
        streams[1].close()
        other = await connect(broker, authority)
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await ask(other, ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())
        assert broker.listener.stats.tls_failures == 1
        other[1].close()


async def test_the_broker_closes_a_channel_that_the_client_closes(authority: Authority) -> None:
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls=tls_settings(authority)
    ) as broker:
        streams = await connect(broker, authority)
        assert (await ask(streams, ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())).api_keys
        with capture_logs() as lines:
            streams[1].close()
            async with asyncio.timeout(5):  # asyncio's client waits 30 s for the broker's answer
                await streams[1].wait_closed()
        assert lines == []  # as on a listener without TLS


async def test_hostile_bytes_close_one_connection_and_no_other(authority: Authority) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls=tls_settings(authority)
    ) as broker:
        good = await connect(broker, authority)
        address = broker.addresses[0]
        for size in (1, 5, 300, 70_000, 1_000_000):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"\x80" + draw.randbytes(size))
            writer.write_eof()
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)
            writer.close()
        silent = await asyncio.open_connection(address.host, address.port)
        assert (await ask(good, ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())).api_keys
        while len(broker.listener.connections) > 2:  # noqa: ASYNC110 - closing has no event
            await asyncio.sleep(0.001)
        # The handshake has a limit.
        await broker.listener.sweep(asyncio.get_running_loop().time() + 31)
        while len(broker.listener.connections) > 1:  # noqa: ASYNC110 - closing has no event
            await asyncio.sleep(0.001)
        assert broker.listener.stats.closed_silent == 1
        silent[1].close()
        good[1].close()


async def test_a_reload_uses_the_new_certificate_for_new_connections(
    authority: Authority,
) -> None:
    settings = TlsSettings.model_validate(tls_settings(authority))
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls=settings
    ) as broker:
        before = await connect(broker, authority)
        authority.write("server.pem", authority.leaf("renewed").pem())
        await broker._reload(broker.settings, Secrets(None, load_server_tls(settings)))
        after = await connect(broker, authority)
        names = [
            dict(field[0] for field in end.get_extra_info("peercert")["subject"])["commonName"]
            for end in (before[1], after[1])
        ]
        assert names == ["broker", "renewed"]
        assert (await ask(before, ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())).api_keys
        for _, writer in (before, after):
            writer.close()


@pytest.mark.parametrize(("days", "is_kept"), [(-1, True), (3, False)])
async def test_a_reload_keeps_a_valid_certificate_in_place_of_an_expired_one(
    authority: Authority, days: int, is_kept: bool
) -> None:
    settings = TlsSettings.model_validate(tls_settings(authority))
    env = MemoryEnv(seed=1)
    env.jump_wall_ms(int(time.time() * 1000) - env.wall_ms())
    async with broker_in_memory(env, listeners=["SSL://127.0.0.1:0"], tls=settings) as broker:
        present = broker.listener.tls
        authority.write("server.pem", authority.leaf("renewed", days=days).pem())
        renewed = load_server_tls(settings)
        with pytest.raises(TlsError, match="is valid from") if is_kept else nullcontext():
            await broker._reload(broker.settings, Secrets(None, renewed))
        assert broker.listener.tls is (present if is_kept else renewed)


def test_a_chain_that_no_client_accepts_is_refused(authority: Authority) -> None:
    settings = TlsSettings.model_validate(tls_settings(authority))
    leaf = authority.leaf("broker")
    other = authority.leaf("other").certificate.public_bytes(Encoding.PEM)
    authority.write("server.pem", leaf.pem() + other * 400)
    with pytest.raises(TlsError, match=r"(?i)excessive.message.size"):
        load_server_tls(settings)


async def test_a_broken_certificate_at_a_reload_keeps_the_old_one(authority: Authority) -> None:
    file = Settings.model_validate({"tls": tls_settings(authority)})
    applied: list[ServerTls | None] = []

    async def apply(_settings: Settings, secrets: Secrets) -> None:
        applied.append(secrets.tls)

    unreadable: list[TokenFileError] = []

    def load() -> Settings:
        for error in unreadable:
            raise error
        return file

    reloader = Reloader(
        load,
        apply,
        lambda: file,
        lambda: new_metadata(MemoryEnv(seed=1), "c", 1),
        wall_ms=lambda: 0,
    )
    assert await reloader.reload()
    authority.write("server.pem", b"-----BEGIN CERTIFICATE-----\nAAAA\n")
    with capture_logs() as lines:
        assert not await reloader.reload()
    assert (len(applied), reloader.certificate_refused) == (1, True)
    assert [line["event"] for line in lines] == ["settings not reloaded"]
    assert "server.pem" in lines[0]["reason"]
    unreadable.append(TokenFileError("no such file"))
    assert not await reloader.reload()
    assert reloader.certificate_refused, "the certificate was not read again"
    unreadable.clear()
    tls_settings(authority)  # the files are repaired
    assert await reloader.reload()
    assert (len(applied), reloader.certificate_refused) == (2, False)


def test_pkcs12_and_encrypted_keys_need_their_password(authority: Authority) -> None:
    leaf = authority.leaf("broker", days=90)
    password = SecretReference("file", authority.write("password", b"open sesame\n"))
    wrong = SecretReference("file", authority.write("wrong", b"guess\n"))
    for name, data in (("a.p12", leaf.pkcs12("open sesame")), ("a.pem", leaf.pem("open sesame"))):
        path = authority.write(name, data)
        loaded = load_server_tls(TlsSettings(certificate_file=path, key_password=password))
        assert loaded is not None
        assert loaded.expires_at == leaf.certificate.not_valid_after_utc.timestamp()
        for bad in (wrong, None):
            with pytest.raises(TlsError, match="cannot load the certificates") as error:
                load_server_tls(TlsSettings(certificate_file=path, key_password=bad))
            assert "sesame" not in str(error.value)
            assert "guess" not in str(error.value)


@pytest.mark.parametrize("data", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_broken_certificate_is_an_error_with_its_path(authority: Authority, data: bytes) -> None:
    path = authority.write("broken.pem", data)
    with pytest.raises(TlsError, match=r"broken\.pem") as error:
        load_server_tls(TlsSettings(certificate_file=path))
    assert ("expected PEM or PKCS#12" in str(error.value)) == (not data.startswith(b"-----"))


@pytest.mark.parametrize("setting", ["certificate_file", "key_file", "ca_file"])
def test_a_missing_file_is_an_error_that_names_its_setting(
    authority: Authority, setting: str
) -> None:
    path = authority.write("whole.pem", authority.leaf("broker", days=90).pem())
    files = {"certificate_file": path, "key_file": path, "ca_file": path, setting: "/absent.pem"}
    with pytest.raises(TlsError) as error:
        load_server_tls(TlsSettings.model_validate({**files, "client_auth": "required"}))
    assert str(error.value) == f"tls.{setting}: /absent.pem: No such file or directory"


@pytest.mark.parametrize("size", [1 << 10, 100_000, 1 << 20, 16 << 20])
async def test_ten_megabytes_are_the_same_with_any_fetch_size(
    authority: Authority, size: int
) -> None:
    noise = random.Random(3)
    batches = [build_batch([Record(0, 0, b"k", noise.randbytes(500_000))]) for _ in range(20)]
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls=tls_settings(authority),
        topics={"t": {}},
    ) as broker:  # fmt: skip
        streams = await connect(broker, authority)
        for batch in batches:
            answer = await ask(streams, ApiKey.PRODUCE, 9, produce_request(batch))
            assert answer.responses[0].partition_responses[0].error_code == 0
        received, offset = bytearray(), 0
        while offset < len(batches):
            answer = await ask(streams, ApiKey.FETCH, 11, fetch_request(offset, size))
            records = bytes(answer.responses[0].partitions[0].records)
            whole = split_batches(records)
            assert whole, "the first batch is always whole"
            received += b"".join(whole)
            offset += len(whole)
        # The broker writes the offset and the leader epoch into the first 16 bytes of a batch.
        expected = b"".join(bytes(batch) for batch in batches)
        assert [part[21:] for part in split_batches(bytes(received))] == [
            part[21:] for part in split_batches(expected)
        ]
        streams[1].close()


def fetch_request(offset: int, size: int) -> m.FetchRequest:
    part = m.FetchRequestPartition(partition=0, fetch_offset=offset, partition_max_bytes=size)
    topic = m.FetchRequestTopic(topic="t", partitions=[part])
    return m.FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=size, topics=[topic])


def split_batches(data: bytes) -> list[bytes]:
    """The whole batches at the start of `data`."""
    batches, position = [], 0
    while len(data) - position >= 12:
        (length,) = struct.unpack_from(">i", data, position + 8)
        if position + 12 + length > len(data):
            break
        batches.append(data[position : position + 12 + length])
        position += 12 + length
    return batches


async def test_the_log_says_when_only_one_side_speaks_tls(authority: Authority) -> None:
    async with broker_in_memory(
        MemoryEnv(seed=1),
        listeners=["127.0.0.1:0", {"name": "S", "protocol": "SSL", "address": "127.0.0.1:0"}],
        tls=tls_settings(authority),
    ) as broker:
        plain, secure = broker.addresses
        with capture_logs() as lines:
            streams = await asyncio.open_connection(secure.host, secure.port)
            request = codec.encode_request(ApiKey.API_VERSIONS, 0, 1, "c", m.ApiVersionsRequest())
            streams[1].write(request)
            assert not (await asyncio.wait_for(streams[0].read(), 10)).endswith(request)
            streams[1].close()
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection(
                    plain.host, plain.port, ssl=ssl.create_default_context()
                )
        reasons = [line["reason"] for line in lines if line["event"] == "connection closed"]
        assert "TLS failed: WRONG_VERSION_NUMBER; does the client use TLS?" in reasons
        assert any(reason.endswith("; the client seems to use TLS") for reason in reasons)
        assert broker.listener.stats.tls_failures == 1


async def test_an_error_of_tls_while_writing_is_counted(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_channel: TlsChannel, data: bytes) -> bytes:
        if data:
            raise ssl.SSLError(1, "out of order")
        return b""

    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls=tls_settings(authority)
    ) as broker:
        streams = await connect(broker, authority)
        monkeypatch.setattr(TlsChannel, "encrypt", fail)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await ask(streams, ApiKey.API_VERSIONS, 0, m.ApiVersionsRequest())
        assert broker.listener.stats.tls_failures == 1
        streams[1].close()


async def test_key_updates_without_requests_close_the_connection(authority: Authority) -> None:
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls=tls_settings(authority)
    ) as broker:
        client = await key_updates.connect(broker.addresses[0].port, authority)
        with capture_logs() as lines:
            client.writer.write(client.records.key_updates(3_000))  # 81 KB
            assert await client.read() == b""
        (reason,) = (line["reason"] for line in lines if line["event"] == "connection closed")
        assert reason == f"TLS failed: {BytesWithoutDataError(BYTES_WITHOUT_DATA_MAX).reason}"
        assert broker.listener.stats.tls_failures == 1
        client.writer.close()


def test_a_handshake_with_many_bytes_is_refused_before_they_are_complete(
    authority: Authority,
) -> None:
    first = struct.pack(">BHHI", 22, 0x0301, 4_096, 1 << 24 | 100_000) + bytes(4_092)
    more = struct.pack(">BHH", 22, 0x0301, 4_096) + bytes(4_096)

    def begin(channel: TlsChannel) -> None:
        for record in (first, *[more] * 4):  # a fifth of a ClientHello of 100 KB
            channel.get_buffer()[: len(record)] = record
            channel.receive(len(record))
            assert not channel.shake_hands()

    for server in contexts(authority):
        with pytest.raises(BytesWithoutDataError):
            begin(TlsChannel(server))


async def test_key_updates_between_requests_are_allowed(authority: Authority) -> None:
    request = codec.encode_request(ApiKey.API_VERSIONS, 0, 1, "c", m.ApiVersionsRequest())
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls=tls_settings(authority)
    ) as broker:
        client = await key_updates.connect(broker.addresses[0].port, authority)
        for _ in range(5):
            client.writer.write(client.records.key_updates(400) + client.records.data(request))
            assert await client.read()
        client.writer.close()


def test_a_connection_whose_bytes_take_a_turn_to_decrypt_reads_on_in_the_next_one(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    iteration, reads = 0, []

    def count() -> None:
        nonlocal iteration
        iteration += 1
        asyncio.get_running_loop().call_soon(count)

    def receive(channel: TlsChannel, nbytes: int, receive: Any = TlsChannel.receive) -> None:
        reads.append(iteration)
        receive(channel, nbytes)

    async def produce() -> None:
        count()
        async with broker_in_memory(
            MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls=tls_settings(authority),
            topics={"t": {"keys": {"max.message.bytes": 4 << 20}}},
        ) as broker:  # fmt: skip
            streams = await connect(broker, authority)
            batch = build_batch([Record(0, 0, b"k", random.Random(7).randbytes(1 << 20))])
            answer = await ask(streams, ApiKey.PRODUCE, 9, produce_request(batch))
            assert answer.responses[0].partition_responses[0].error_code == 0
            streams[1].close()

    monkeypatch.setattr(connection, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(TlsChannel, "receive", receive)
    uvloop.run(produce())  # the loop of the broker; it reads several buffers in an iteration
    assert len(reads) > 16
    assert len(set(reads)) == len(reads)


async def test_records_take_several_turns_to_decrypt_even_if_each_is_a_message_of_tls(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, iteration = [], 0
    request = codec.encode_request(ApiKey.API_VERSIONS, 0, 1, "c", m.ApiVersionsRequest())

    def count() -> None:
        nonlocal iteration
        iteration += 1
        asyncio.get_running_loop().call_soon(count)

    def note_turn(channel: TlsChannel, buffer: memoryview) -> int:
        turns.append(iteration)
        return decrypt_into(channel, buffer)

    decrypt_into = TlsChannel.decrypt_into
    count()
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls=tls_settings(authority)
    ) as broker:
        client = await key_updates.connect(broker.addresses[0].port, authority)
        client.writer.write(client.records.data(request))
        assert await client.read()  # the client is authenticated now
        monkeypatch.setattr(connection, "TURN_SECONDS", 0.0)
        monkeypatch.setattr(TlsChannel, "decrypt_into", note_turn)
        records = client.records
        client.writer.write(
            b"".join(records.key_updates(99) + records.data(bytes((x,))) for x in request)
        )
        assert await client.read()
        client.writer.close()
    assert len(turns) >= 100 * len(request) / RECORDS_AT_ONCE
    assert len(set(turns)) == len(turns)


@pytest.mark.parametrize("expired", [True, False])
async def test_clients_refuse_an_expired_certificate_and_one_of_another_authority(
    authority: Authority, tmp_path: Path, expired: bool
) -> None:
    (tmp_path / "other").mkdir()
    signer = authority if expired else Authority(tmp_path / "other")
    path = authority.write("server.pem", signer.leaf("broker", days=-1 if expired else 9).pem())
    async with broker_in_memory(
        MemoryEnv(seed=1), listeners=["SSL://127.0.0.1:0"], tls={"certificate_file": path}
    ) as broker:
        reason = "expired" if expired else "signature failure"
        with pytest.raises(ssl.SSLCertVerificationError, match=reason):
            await connect(broker, authority)
