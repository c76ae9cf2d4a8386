"""Small produce requests: one 100-byte record each, 64 in flight on each of 16 connections.

    python -m bench.small_requests [--rounds 7] [--seconds 3]

The client is a raw socket loop that sends requests encoded beforehand and counts responses, so
that the broker, not the client, is what is measured. Every response is checked for its error code.
"""

import argparse
import selectors
import socket
import statistics
import struct
import time
from collections import defaultdict

from bench.brokers import Broker, both
from bench.report import markdown_table
from storage.batch import Record, build_batch

CONNECTIONS = 16
DEPTH = 64
PRODUCE_VERSION = 9  # flexible, by topic name: both brokers serve it
RESPONSE = struct.Struct(">ii")


def encode_request(topic: str, correlation_id: int) -> bytes:
    """A Produce v9 request with one batch of one record, acks=1."""
    batch = bytes(build_batch([Record(0, int(time.time() * 1000), None, b"x" * 100, ())]))
    name = topic.encode()
    body = b"".join(
        [
            b"\x00",  # transactional id: null
            struct.pack(">hi", 1, 30_000),  # acks, timeout
            b"\x02",  # one topic
            bytes([len(name) + 1]) + name,
            b"\x02",  # one partition
            struct.pack(">i", 0),
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
    """One connection that keeps DEPTH requests in flight."""

    def __init__(self, broker: Broker, request: bytes, topic: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", broker.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.request = request
        self.error_at = 4 + 4 + 1 + 1 + 1 + len(topic) + 1 + 4  # where the error code stands
        self.received = bytearray()
        self.answered = 0
        self.outgoing = memoryview(request * DEPTH)

    def send(self) -> None:
        while self.outgoing:
            try:
                self.outgoing = self.outgoing[self.socket.send(self.outgoing) :]
            except BlockingIOError:
                return

    def receive(self) -> None:
        """Count whole responses and send as many new requests."""
        data = self.socket.recv(1 << 16)
        assert data, "the broker closed the connection"
        self.received += data
        position = count = 0
        while len(self.received) - position >= 4:
            end = position + 4 + int.from_bytes(self.received[position : position + 4], "big")
            if end > len(self.received):
                break
            error = self.received[position + self.error_at : position + self.error_at + 2]
            assert error == b"\x00\x00", f"error code {error.hex()}"
            position, count = end, count + 1
        del self.received[:position]
        self.answered += count
        self.outgoing = memoryview(bytes(self.outgoing) + self.request * count)
        self.send()


def measure(broker: Broker, topic: str, seconds: float) -> float:
    """Requests answered a second."""
    request = encode_request(topic, 1)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = defaultdict(list)
    with both() as brokers:
        for broker in brokers:
            broker.create_topic("small")
            measure(broker, "small", 2 * arguments.seconds)  # warm-up: Kafka compiles itself
        for number in range(arguments.rounds):
            for broker in brokers if number % 2 == 0 else brokers[::-1]:
                rate = measure(broker, "small", arguments.seconds)
                rates[broker.name].append(rate)
                print(f"round {number} {broker.name:6} {rate:9.0f} requests/s", flush=True)
    row = ["100-byte requests, 64 x 16", f"{statistics.median(rates['varve']):.0f}"]
    head = ["requests/s", "Varve"]
    if "kafka" in rates:
        pairs = zip(rates["varve"], rates["kafka"], strict=True)
        head += ["Kafka 4.3.0", "ratio"]
        row += [
            f"{statistics.median(rates['kafka']):.0f}",
            f"{statistics.median(a / b for a, b in pairs):.2f}",
        ]
    print(markdown_table(head, [row]))


if __name__ == "__main__":
    main()
