"""Small produce requests, 64 in flight on each of 16 connections; each has one record of 100 bytes.

    python -m bench.broker.small_requests [--rounds 7] [--seconds 3] [--warm-up 20] [--compressed]

The client is a raw socket loop that sends requests encoded beforehand and counts responses, so
that the broker, not the client, is what is measured. Every response is checked for its error code.
With --compressed, requests are those of SHAPES: one record of 100 bytes and 16 records of 1 KB,
with each codec. Values are hexadecimal digits, so they compress to about half.
"""

import argparse
import random
import selectors
import socket
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from confluent_kafka import Producer

from bench.brokers import Broker, both
from bench.report import markdown_table, median_ratio
from storage.format.batch import Record, build_batch
from storage.format.compression import CODEC_NAMES

CONNECTIONS = 16
DEPTH = 64
PRODUCE_VERSION = 9  # flexible, by topic name: both brokers serve it
CORRELATION_ID = 1
SMALL_LOG = {"retention.bytes": str(1 << 30), "segment.bytes": str(256 << 20)}


class Shape(NamedTuple):
    """The batch of one request."""

    records: int = 1
    value_bytes: int = 100
    codec: str = "none"

    def __str__(self) -> str:
        records = "1 record" if self.records == 1 else f"{self.records} records"
        return f"{records} of {self.value_bytes} B, {self.codec}"


SMALL = Shape()
SHAPES = tuple(
    Shape(records, value_bytes, codec)
    for records, value_bytes in ((1, 100), (16, 1000))
    for codec in CODEC_NAMES
)


def encode_request(
    topic: str,
    correlation_id: int,
    *,
    partition: int = 0,
    shape: Shape = SMALL,
    acks: int = 1,
) -> bytes:
    """A Produce v9 request with one batch."""
    rng = random.Random(1)
    now_ms = int(time.time() * 1000)
    records = [
        Record(offset, now_ms, None, rng.randbytes(shape.value_bytes // 2).hex().encode(), ())
        for offset in range(shape.records)
    ]
    batch = bytes(build_batch(records, codec=CODEC_NAMES.index(shape.codec)))
    name = topic.encode()
    body = b"".join(
        [
            b"\x00",  # transactional id: null
            struct.pack(">hi", acks, 30_000),  # acks, timeout
            b"\x02",  # one topic
            bytes([len(name) + 1]) + name,
            b"\x02",  # one partition
            struct.pack(">i", partition),
            _varint(len(batch) + 1) + batch,
            b"\x00\x00\x00",  # tags: partition, topic, request
        ]
    )
    header = struct.pack(">hhih", 0, PRODUCE_VERSION, correlation_id, 5) + b"bench" + b"\x00"
    return struct.pack(">i", len(header) + len(body)) + header + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class Client:
    """One connection that keeps DEPTH requests in flight.

    All good responses have the same length and the same bytes, so a read of many is checked at
    once: a client that walked them one by one would take more of the machine than a broker does.
    """

    def __init__(self, broker: Broker, request: bytes, topic: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", broker.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.requests = memoryview(request * DEPTH)
        self.request_bytes = len(request)
        error_at = 4 + 4 + 1 + 1 + 1 + len(topic) + 1 + 4  # where the error code stands
        rest = 2 + 8 + 8 + 8 + 1 + 1 + 1 + 1 + 4 + 1  # from the error code to the end, see KIP-467
        self.response_bytes = error_at + rest
        size = struct.pack(">i", self.response_bytes - 4)
        self.expected = [(0, size[0]), (1, size[1]), (2, size[2]), (3, size[3])]
        self.expected += [(7, CORRELATION_ID), (error_at, 0), (error_at + 1, 0)]
        self.received = b""
        self.answered = 0
        self.outgoing = self.requests
        self.unsent = 0  # requests that follow `outgoing`

    def send(self) -> None:
        """Send what waits, as far as the socket takes it."""
        while self.outgoing or self.unsent:
            if not self.outgoing:
                self.outgoing = self.requests[: self.unsent * self.request_bytes]
                self.unsent = 0
            try:
                self.outgoing = self.outgoing[self.socket.send(self.outgoing) :]
            except BlockingIOError:
                return

    def receive(self) -> None:
        """Check and count whole responses and send as many new requests."""
        data = self.socket.recv(1 << 16)
        assert data, "the broker closed the connection"
        data = self.received + data
        count = len(data) // self.response_bytes
        whole = count * self.response_bytes
        for at, byte in self.expected:
            assert data[at : whole : self.response_bytes].count(byte) == count, data[:64].hex()
        self.received = data[whole:]
        self.answered += count
        self.unsent += count
        self.send()


def measure(broker: Broker, topic: str, seconds: float, shape: Shape = SMALL) -> float:
    """Requests answered a second."""
    request = encode_request(topic, CORRELATION_ID, shape=shape)
    clients = [Client(broker, request, topic) for _ in range(CONNECTIONS)]
    selector = selectors.EpollSelector()
    for client in clients:
        selector.register(client.socket, selectors.EVENT_READ, client)
        client.send()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for key, _ in selector.select(1):
            key.data.receive()
    elapsed = time.perf_counter() - started
    answered = sum(client.answered for client in clients)
    for client in clients:
        client.socket.close()
    selector.close()
    return answered / elapsed


def wait_for_leader(broker: Broker, topic: str) -> None:
    """One record with retries: Kafka answers NOT_LEADER_OR_FOLLOWER for a while after creation."""
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce(topic, b"x" * 100, partition=0)
    assert producer.flush(30) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds for each broker")
    parser.add_argument("--compressed", action="store_true", help="measure all shapes")
    arguments = parser.parse_args()
    shapes = SHAPES if arguments.compressed else (SMALL,)
    rows = []
    with both() as brokers:
        for broker in brokers:
            broker.create_topic("small", **SMALL_LOG)
            wait_for_leader(broker, "small")
        for shape in shapes:
            rates: dict[str, list[float]] = defaultdict(list)
            for broker in brokers:  # Kafka compiles itself meanwhile
                rate = measure(broker, "small", arguments.warm_up, shape)
                print(f"warm-up {broker.name:6} {rate:9.0f} requests/s of {shape}", flush=True)
            for number in range(arguments.rounds):
                for broker in brokers if number % 2 == 0 else brokers[::-1]:
                    rate = measure(broker, "small", arguments.seconds, shape)
                    rates[broker.name].append(rate)
                    print(f"round {number} {broker.name:6} {rate:9.0f} requests/s", flush=True)
            rows.append(medians(shape, rates))
    print(markdown_table(["requests/s", "Varve", "Kafka 4.3.0", "ratio"], rows))


def medians(shape: Shape, rates: Mapping[str, Sequence[float]]) -> list[str]:
    """A row of the report; dashes where Kafka was not measured."""
    ours, kafka = rates["varve"], rates.get("kafka")
    if kafka is None:
        return [str(shape), f"{statistics.median(ours):.0f}", "-", "-"]
    return [
        str(shape),
        f"{statistics.median(ours):.0f}",
        f"{statistics.median(kafka):.0f}",
        f"{median_ratio(ours, kafka):.2f}",
    ]


if __name__ == "__main__":
    main()
