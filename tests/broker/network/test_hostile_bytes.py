"""Whatever bytes a client sends to the running daemon: the protocol's error or a closed connection
and one log line. The process lives, nobody else waits, nothing acknowledged changes.
"""

import contextlib
import gzip
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import lz4.frame
import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from protocol.api import ApiKey
from protocol.codec import decode_response, encode_request
from protocol.errors import ErrorCode
from protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    DescribeConfigsRequest,
    DescribeConfigsRequestResource,
    DescribeConfigsResponse,
    ListOffsetsRequest,
    ListOffsetsRequestPartition,
    ListOffsetsRequestTopic,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from storage.format.compression import LZ4
from tests.support.protocol.raw_client import (
    FETCH_VERSION,
    PRODUCE_VERSION,
    RawClient,
    fetch_request,
    produce_request,
)
from tests.support.reading import read_topics
from tests.support.storage.hostile_batches import (
    CODECS,
    MIB,
    PACKERS,
    batch,
    bomb,
    patched,
    record_bytes,
    with_body,
)
from tests.support.varve import VarveBroker, running_varve
from tests.support.waiting import wait_until

KEPT, TABLE, SCRATCH, BIG = "kept", "table", "scratch", "big"
BOMB_LIMIT_BYTES = 4 << 20
# What the process may grow by under any one attack: buffers of a few requests, not what they say.
GROWTH_BYTES_MAX = 48 * MIB
IDLE_MS = 4000
SETTINGS = {
    "limits": {"connection_idle_ms": IDLE_MS},
    "cleaner": {"dedupe_buffer_bytes": "16MiB"},
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    """One daemon takes all of it."""
    with running_varve(tmp_path_factory.mktemp("hostile"), SETTINGS) as running:
        limits = {"varve.decompressed.batch.bytes": str(BOMB_LIMIT_BYTES)}
        new = [
            NewTopic(KEPT),
            NewTopic(TABLE, config={"cleanup.policy": "compact", **limits}),
            NewTopic(SCRATCH),
            NewTopic(BIG),
        ]
        admin = AdminClient({"bootstrap.servers": running.bootstrap, "log_level": 0})
        for future in admin.create_topics(new).values():
            future.result(30)
        producer = Producer({"bootstrap.servers": running.bootstrap, "log_level": 0})
        for number in range(1000):
            producer.produce(KEPT, b"value-%d" % number, b"key-%d" % number)
            producer.produce(TABLE, b"value-%d" % number, b"key-%d" % number)
        for number in range(40_000):
            producer.produce(BIG, b"%d" % number + b"x" * 1000)
        assert producer.flush(60) == 0
        yield running


@pytest.fixture(scope="module")
def acknowledged(daemon: VarveBroker) -> bytes:
    """The batches that were there before anybody did anything."""
    assert len(read_topics(daemon.bootstrap, [KEPT])[KEPT, 0]) == 1000
    return batches_of(daemon)


def batches_of(daemon: VarveBroker) -> bytes:
    with RawClient(daemon.port) as client:
        answer = client.fetch(KEPT)
        assert (answer.error_code, answer.high_watermark) == (0, 1000)
        assert answer.records
        return answer.records


class Attacked:
    """The daemon during one test, and what it has logged since."""

    def __init__(self, daemon: VarveBroker) -> None:
        self.daemon = daemon
        self.port = daemon.port
        self._process = psutil.Process(daemon.process.pid)
        self._log_position = len(daemon.log_text)

    def client(self) -> RawClient:
        return RawClient(self.port)

    def resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def log(self) -> list[dict[str, object]]:
        """The structured lines since the test began."""
        return [
            json.loads(line) for line in self.daemon.log_text[self._log_position :].splitlines()
        ]

    def lines_about(self, peer: str) -> list[dict[str, object]]:
        return [line for line in self.log() if line.get("peer") == peer]

    def assert_closed_with_one_line(self, client: RawClient) -> str:
        """The connection ends, and the log says once whose and why. -> the reason"""
        client.wait_closed()
        wait_until(lambda: self.lines_about(client.name), "a log line about the closed connection")
        lines = self.lines_about(client.name)
        assert len(lines) == 1, lines
        assert lines[0]["event"] == "connection closed"
        assert lines[0]["level"] == "info"
        return str(lines[0]["reason"])


@pytest.fixture
def attacked(daemon: VarveBroker, acknowledged: bytes) -> Iterator[Attacked]:
    """Run a test, then see that nothing has changed for anybody else."""
    attack = Attacked(daemon)
    yield attack
    assert daemon.process.poll() is None, daemon.log_text[-3000:]
    assert batches_of(daemon) == acknowledged
    bad = [line for line in attack.log() if line["level"] == "error" or "exception" in line]
    assert not bad, bad[:2]


# Batches ------------------------------------------------------------------------------------


CORRUPT, INVALID = ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD
BAD_BATCHES: dict[str, tuple[bytes | None, ErrorCode]] = {
    "no records": (None, INVALID),
    "empty records": (b"", INVALID),
    "a torn batch": (bytes(batch()[:-5]), INVALID),
    "a torn header": (bytes(batch()[:40]), INVALID),
    "bytes after the batch": (bytes(batch()) + b"more", INVALID),
    "two batches": (bytes(batch()) * 2, INVALID),
    "a wrong CRC": (patched(17, ">I", 0x12345678, seal=False), CORRUPT),
    "a flipped bit": (bytes(batch()[:-1] + b"\xff"), CORRUPT),
    "batch length too large": (patched(8, ">i", 0x7FFFFFFF), INVALID),
    "batch length too small": (patched(8, ">i", 12), CORRUPT),
    "batch length negative": (patched(8, ">i", -1), CORRUPT),
    "a base offset": (patched(0, ">q", 5), INVALID),
    "an old format": (patched(16, ">b", 1), INVALID),
    "a format nobody knows": (patched(16, ">b", 9), INVALID),
    "two billion records": (patched(57, ">i", 0x7FFFFFFF), INVALID),
    "minus one records": (patched(57, ">i", -1), INVALID),
    "no record": (patched(57, ">i", 0), INVALID),
    "one record too many": (patched(57, ">i", 4), INVALID),
    "a last offset that lies": (patched(23, ">i", 0x7FFFFFFF), INVALID),
    "a control batch": (patched(21, ">h", 0x20), INVALID),
    "log append time by the client": (patched(21, ">h", 0x08), ErrorCode.INVALID_TIMESTAMP),
    "a delete horizon by the client": (patched(21, ">h", 0x40), INVALID),
    "a transaction of nobody": (patched(21, ">h", 0x10), INVALID),
    "a codec nobody knows": (patched(21, ">h", 7), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
    "a producer without sequence": (patched(43, ">q", 7), INVALID),
}


@pytest.mark.parametrize("topic", [SCRATCH, TABLE])
@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_bad_batch_gets_its_error_and_the_connection_goes_on(
    attacked: Attacked, name: str, topic: str
) -> None:
    data, code = BAD_BATCHES[name]
    with attacked.client() as client:
        answer = client.produce(topic, data)
        assert ErrorCode(answer.error_code) is code, answer.error_message
        assert answer.base_offset == -1
        assert client.produce(topic, bytes(batch())).error_code == 0
    assert not attacked.lines_about(client.name)


@pytest.mark.parametrize("codec", CODECS)
def test_a_null_key_on_a_compacted_topic_is_refused_by_record(
    attacked: Attacked, codec: str
) -> None:
    end = attacked_end(attacked, TABLE)
    with attacked.client() as client:
        answer = client.produce(TABLE, bytes(batch(key=None, codec=CODECS[codec])))
        assert ErrorCode(answer.error_code) is INVALID
        assert [error.batch_index for error in answer.record_errors] == [0, 1, 2]
        assert answer.error_message
        assert client.produce(SCRATCH, bytes(batch(key=None, codec=CODECS[codec]))).error_code == 0
    assert attacked_end(attacked, TABLE) == end, "nothing of it was kept"


def attacked_end(attacked: Attacked, topic: str) -> int:
    with attacked.client() as client:
        return int(client.fetch(topic, offset=1).high_watermark)


LYING_RECORDS = {
    "a record longer than the batch": record_bytes(1_000_000, 0, 0, 0, 1, tail=b"k"),
    "a record of negative length": record_bytes(-5, 0, 0, 0, tail=b"kkkkkkkkkk"),
    "a varint without an end": b"\xff" * 30,
    "a key longer than its record": record_bytes(10, 0, 0, 0, 2_000_000_000, tail=b"kkkkk"),
    "a key of minus seven bytes": record_bytes(10, 0, 0, 0, -7, tail=b"kkkkkk"),
    "a value longer than its record": record_bytes(10, 0, 0, 0, 1, tail=b"k\xfe\xff\xff\x0fxxxx"),
    "two billion headers": record_bytes(12, 0, 0, 0, 1, tail=b"k\x01\xfe\xff\xff\xff\x0fxxx"),
    "no bytes at all": b"\0" * 7,
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", LYING_RECORDS)
def test_lengths_that_lie_inside_a_batch_of_a_compacted_topic_are_refused(
    attacked: Attacked, name: str, codec: str
) -> None:
    compress = PACKERS[codec]
    with attacked.client() as client:
        data = with_body(compress(LYING_RECORDS[name]), codec=CODECS[codec])
        answer = client.produce(TABLE, data)
        assert ErrorCode(answer.error_code) in (INVALID, CORRUPT), answer
        assert client.produce(TABLE, bytes(batch())).error_code == 0


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_a_decompression_bomb_is_refused_without_being_unpacked(
    attacked: Attacked, codec: str
) -> None:
    data = with_body(bomb(codec), codec=CODECS[codec])
    assert 10_000 < len(data) < MIB
    with attacked.client() as client:
        before = attacked.resident_bytes()
        for _ in range(5):
            answer = client.produce(TABLE, data)
            assert ErrorCode(answer.error_code) is INVALID, answer
        assert attacked.resident_bytes() - before < GROWTH_BYTES_MAX
        assert client.produce(TABLE, bytes(batch())).error_code == 0


LYING_FRAMES = {
    "snappy says 4 GB": ("snappy", b"\xff\xff\xff\xff\x0f" + b"\0" * 20),
    "snappy block of 2 GB": ("snappy", b"\x82SNAPPY\0\0\0\0\1\0\0\0\1\x7f\xff\xff\xff" + b"x" * 9),
    "zstd says 2^60 bytes": ("zstd", b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little") * 2),
    "zstd window of 2 GB": ("zstd", b"\x28\xb5\x2f\xfd\x00\xa8\x01\x00\x00"),
    "lz4 block of 2 GB": ("lz4", lz4.frame.compress(b"x")[:7] + b"\xff\xff\xff\x7f" + b"x" * 9),
    "gzip cut short": ("gzip", gzip.compress(b"x" * 1000)[:-9]),
    "gzip is not gzip": ("gzip", b"not gzip at all"),
    "lz4 is not lz4": ("lz4", b"not lz4 at all"),
    "nothing compressed": ("zstd", b""),
}


@pytest.mark.parametrize("name", LYING_FRAMES)
def test_a_compressed_block_that_lies_is_refused(attacked: Attacked, name: str) -> None:
    codec, body = LYING_FRAMES[name]
    with attacked.client() as client:
        before = attacked.resident_bytes()
        answer = client.produce(TABLE, with_body(body, codec=CODECS[codec]))
        assert ErrorCode(answer.error_code) in (INVALID, CORRUPT), answer
        assert attacked.resident_bytes() - before < GROWTH_BYTES_MAX
        assert client.produce(TABLE, bytes(batch())).error_code == 0


def test_a_batch_above_the_limit_is_too_large(attacked: Attacked) -> None:
    with attacked.client() as client:
        answer = client.produce(SCRATCH, with_body(b"x" * 2 * MIB))
        assert ErrorCode(answer.error_code) is ErrorCode.MESSAGE_TOO_LARGE


# Requests -----------------------------------------------------------------------------------


def header(api_key: int, version: int, client_id: bytes = b"\0\3raw") -> bytes:
    return struct.pack(">hhi", api_key, version, 7) + client_id


def frame(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


CLOSING = {
    "200 MB announced": struct.pack(">i", 200 * MIB),
    "a negative size": struct.pack(">i", -1),
    "an HTTP request": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a TLS ClientHello": bytes.fromhex("1603010200010001fc0303") + bytes(range(256)),
    "an SSH greeting": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "garbage": b"\xa5" + random.Random(11).randbytes(999),
    "an empty request": frame(b""),
    "a request of one byte": frame(b"\0"),
    "a request of seven bytes": frame(b"\0\3\0\1\0\0\0"),
    "framed garbage": frame(random.Random(12).randbytes(500)),
    "an API nobody knows": frame(header(999, 0)),
    "a negative API": frame(header(-1, 0)),
    "an API for brokers among themselves": frame(header(4, 5)),
    "an API of share groups": frame(header(78, 1)),
    "an API of streams groups": frame(header(88, 0)),
    "a version too high": frame(header(ApiKey.METADATA, 99)),
    "a negative version": frame(header(ApiKey.METADATA, -1)),
    "a Produce version too high": frame(header(ApiKey.PRODUCE, 99)),
    "a Produce version too low": frame(header(ApiKey.PRODUCE, 2)),
    "a Fetch version too high": frame(header(ApiKey.FETCH, 99)),
    "a client id longer than the request": frame(header(ApiKey.METADATA, 5, b"\x7f\xffraw")),
    "a client id that is no text": frame(header(ApiKey.METADATA, 5, b"\0\2\xff\xfe")),
    "two billion topics": frame(header(ApiKey.METADATA, 5) + b"\x7f\xff\xff\xff\0"),
    "a body cut short": frame(header(ApiKey.METADATA, 5) + b"\0\0\0\1\0"),
    "a Produce body cut short": frame(header(ApiKey.PRODUCE, 7) + b"\xff\xff"),
    "a Produce of two billion topics": frame(
        header(ApiKey.PRODUCE, 7) + struct.pack(">hhii", -1, -1, 1000, 0x7FFFFFFF)
    ),
    "a Fetch of two billion topics": frame(
        header(ApiKey.FETCH, 4) + struct.pack(">iiiibi", -1, 0, 0, 1000, 0, 0x7FFFFFFF)
    ),
}


@pytest.mark.parametrize("name", CLOSING)
def test_what_is_no_request_closes_the_connection_with_one_log_line(
    attacked: Attacked, name: str
) -> None:
    with attacked.client() as client:
        client.send(CLOSING[name])
        reason = attacked.assert_closed_with_one_line(client)
    assert 5 < len(reason) < 200, reason


@pytest.mark.parametrize("records_bytes", [0x7FFFFFFF, 1 << 20, -2])
def test_records_longer_than_their_request_close_the_connection(
    attacked: Attacked, records_bytes: int
) -> None:
    topic = struct.pack(">h", len(SCRATCH)) + SCRATCH.encode()
    body = struct.pack(">hhii", -1, -1, 1000, 1) + topic + struct.pack(">iii", 1, 0, records_bytes)
    with attacked.client() as client:
        client.send_frame(header(ApiKey.PRODUCE, 7) + body + bytes(batch()))
        attacked.assert_closed_with_one_line(client)


def test_a_later_apiversions_is_answered_in_version_0(attacked: Attacked) -> None:
    with attacked.client() as client:
        client.send_frame(header(ApiKey.API_VERSIONS, 9) + b"\0\1\2\3")
        correlation_id, answer = decode_response(ApiKey.API_VERSIONS, 0, client.receive_frame())
        assert isinstance(answer, ApiVersionsResponse)
        assert (correlation_id, answer.error_code) == (7, ErrorCode.UNSUPPORTED_VERSION)
        versions = {
            api_key.api_key: (api_key.min_version, api_key.max_version)
            for api_key in answer.api_keys
        }
        assert versions[ApiKey.API_VERSIONS] == (0, 4)
        named = ApiVersionsRequest(client_software_name="raw", client_software_version="1")
        again = client.request(ApiKey.API_VERSIONS, 4, named)
        assert isinstance(again, ApiVersionsResponse)
        assert again.error_code == 0


def test_a_topic_that_is_named_a_thousand_times_is_told_of_once(attacked: Attacked) -> None:
    often = MetadataRequest(topics=[MetadataRequestTopic(name=SCRATCH)] * 1000)
    topic = DescribeConfigsRequestResource(
        resource_type=2, resource_name=SCRATCH, configuration_keys=None
    )
    with attacked.client() as client:
        metadata = client.request(ApiKey.METADATA, 9, often)
        configs = client.request(
            ApiKey.DESCRIBE_CONFIGS, 4, DescribeConfigsRequest(resources=[topic] * 1000)
        )
    assert isinstance(metadata, MetadataResponse)
    assert isinstance(configs, DescribeConfigsResponse)
    assert (len(metadata.topics), len(configs.results)) == (1, 1)


def valid_frames() -> list[bytes]:
    lookup = ListOffsetsRequest(
        topics=[
            ListOffsetsRequestTopic(
                name=SCRATCH,
                partitions=[ListOffsetsRequestPartition(partition_index=0, timestamp=-1)],
            )
        ]
    )
    metadata = MetadataRequest(
        topics=[MetadataRequestTopic(name=SCRATCH)], allow_auto_topic_creation=False
    )
    return [
        encode_request(ApiKey.PRODUCE, PRODUCE_VERSION, 1, "x", produce_request(SCRATCH, batch())),
        encode_request(ApiKey.PRODUCE, 7, 1, "x", produce_request(TABLE, batch(codec=LZ4))),
        encode_request(ApiKey.FETCH, FETCH_VERSION, 1, "x", fetch_request(SCRATCH, max_bytes=999)),
        encode_request(ApiKey.FETCH, 4, 1, "x", fetch_request(SCRATCH, max_bytes=999)),
        encode_request(ApiKey.LIST_OFFSETS, 7, 1, "x", lookup),
        encode_request(ApiKey.METADATA, 12, 1, "x", metadata),
        encode_request(ApiKey.API_VERSIONS, 3, 1, "x", ApiVersionsRequest()),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_mutated_requests_are_answered_or_closed_and_never_hang_or_kill(
    attacked: Attacked, seed: int
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    frames = valid_frames()
    for _ in range(150):
        data = bytearray(rng.choice(frames)[4:])
        for _ in range(rng.choice((1, 1, 2, 8))):
            # After API key and version: another API might legally delete something.
            place = rng.randrange(4, len(data))
            data[place] = rng.choice((0, 0xFF, 0x7F, 0x80, rng.randrange(256)))
        if rng.random() < 0.2:
            del data[rng.randrange(4, len(data)) :]
        with attacked.client() as client:
            client.send_frame(bytes(data))
            client.socket.shutdown(socket.SHUT_WR)
            client.wait_closed()


# Connections --------------------------------------------------------------------------------


def test_a_hundred_megabytes_announced_and_nothing_sent_cost_no_memory(attacked: Attacked) -> None:
    before = attacked.resident_bytes()
    clients = [attacked.client() for _ in range(50)]
    for client in clients:
        client.send(struct.pack(">i", 100 * MIB) + header(ApiKey.PRODUCE, 7))
    with attacked.client() as polite:
        assert polite.produce(SCRATCH, bytes(batch())).error_code == 0
        assert attacked.resident_bytes() - before < GROWTH_BYTES_MAX
    for client in clients:
        client.socket.close()


def test_half_a_request_and_then_silence_is_closed_as_idle(attacked: Attacked) -> None:
    with attacked.client() as silent:
        whole = encode_request(ApiKey.METADATA, 5, 1, "x", MetadataRequest(topics=[]))
        silent.send(whole[: len(whole) // 2])
        with attacked.client() as polite:
            assert polite.produce(SCRATCH, bytes(batch())).error_code == 0
        assert attacked.assert_closed_with_one_line(silent) == "idle"


def test_a_request_cut_off_by_its_client_is_nothing_to_speak_of(attacked: Attacked) -> None:
    with attacked.client() as client:
        client.send(encode_request(ApiKey.PRODUCE, 9, 1, "x", produce_request(KEPT, batch()))[:-3])
    with attacked.client() as polite:
        assert polite.produce(SCRATCH, bytes(batch())).error_code == 0
    assert not [line for line in attacked.lines_about(client.name) if line["level"] != "info"]


def test_clients_that_stop_reading_stop_only_themselves(attacked: Attacked) -> None:
    before = attacked.resident_bytes()
    ask = encode_request(ApiKey.FETCH, FETCH_VERSION, 1, "x", fetch_request(BIG))
    deaf = [RawClient(attacked.port, receive_buffer_bytes=4096) for _ in range(8)]
    for client in deaf:
        client.send(ask * 20)  # 8 x 20 x 40 MB of answers
    with attacked.client() as polite:
        for _ in range(50):
            started = time.monotonic()
            assert polite.produce(SCRATCH, bytes(batch())).error_code == 0
            assert time.monotonic() - started < 5
    assert len(read_topics(attacked.daemon.bootstrap, [KEPT])[KEPT, 0]) == 1000
    assert attacked.resident_bytes() - before < GROWTH_BYTES_MAX
    for client in deaf:
        client.socket.close()
    attacked.daemon.get("/healthz")


def test_pipelined_requests_with_large_answers_are_not_gathered_in_memory(
    attacked: Attacked,
) -> None:
    topic = DescribeConfigsRequestResource(
        resource_type=2, resource_name=KEPT, configuration_keys=None
    )
    request = DescribeConfigsRequest(
        resources=[topic], include_synonyms=True, include_documentation=True
    )
    ask = encode_request(ApiKey.DESCRIBE_CONFIGS, 3, 1, "", request)
    before = attacked.resident_bytes()
    with RawClient(attacked.port, receive_buffer_bytes=4096) as client:
        # A large request first, so that there is room for many small ones after it.
        client.produce(SCRATCH, with_body(b"x" * MIB))
        client.socket.settimeout(1)
        try:
            client.send(ask * (64 * MIB // len(ask)))
        except TimeoutError:
            pass  # the broker stopped reading, as it should
        else:
            raise AssertionError("everything was taken on")
        with attacked.client() as polite:
            assert polite.produce(SCRATCH, bytes(batch())).error_code == 0
        assert attacked.resident_bytes() - before < GROWTH_BYTES_MAX


def test_a_client_that_pipelines_without_end_leaves_the_loop_to_others(
    attacked: Attacked,
) -> None:
    ask = encode_request(ApiKey.API_VERSIONS, 0, 1, "", ApiVersionsRequest())
    stop = threading.Event()
    greedy = attacked.client()
    greedy.produce(SCRATCH, with_body(b"x" * MIB))  # leaves room for many small requests

    def send() -> None:
        with contextlib.suppress(OSError):
            while not stop.is_set():  # some 15 bytes each: 2 MB at a time
                greedy.send(ask * 150_000)

    def receive() -> None:
        with contextlib.suppress(OSError):
            while greedy.socket.recv(1 << 20):
                pass

    threads = [threading.Thread(target=work, daemon=True) for work in (send, receive)]
    for thread in threads:
        thread.start()
    waits = []
    with attacked.client() as polite:
        for _ in range(100):
            started = time.monotonic()
            assert polite.produce(SCRATCH, bytes(batch())).error_code == 0
            waits.append(time.monotonic() - started)
    stop.set()
    greedy.socket.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(10)
    greedy.socket.close()
    # 1 MB of such requests is 80,000, and one after another they would take most of a second.
    assert sorted(waits)[50] < 0.2, sorted(waits)[50]


def test_two_thousand_connections_opened_and_dropped_leave_nothing_behind(
    attacked: Attacked,
) -> None:
    name = "kafka_server_socket_server_metrics_connection_count"
    files = psutil.Process(attacked.daemon.process.pid).num_fds()
    before = 0
    for wave in range(10):
        if wave == 2:  # what a few hundred at a time take at the most is taken by then
            before = attacked.resident_bytes()
        clients = [attacked.client() for _ in range(250)]
        for number, client in enumerate(clients):
            if number % 3 == 0:
                client.send(struct.pack(">i", 1000) + b"half")
            if number % 3 == 1:
                # A reset instead of an orderly end.
                linger = struct.pack("ii", 1, 0)
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            client.socket.close()
        with attacked.client() as polite:
            assert polite.produce(SCRATCH, bytes(batch())).error_code == 0, wave
    wait_until(lambda: attacked.daemon.metric(name) < 20, "the connections are forgotten")
    assert attacked.daemon.metric("varve_connections_accepted_total") >= 2000
    assert psutil.Process(attacked.daemon.process.pid).num_fds() < files + 20
    assert attacked.resident_bytes() - before < GROWTH_BYTES_MAX
    assert len(attacked.log()) < 100, "dropping a connection is no news"
