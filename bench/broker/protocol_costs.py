"""What one request costs in the protocol layer alone: framing, decoding, encoding.

    python -m bench.broker.protocol_costs

Prints the median and the best of 15 rounds in microseconds. No sockets, no log.
"""

import statistics
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from broker.network.framing import FrameReader
from protocol import codec
from protocol import messages as m
from protocol.fetch_codec import FetchedPartition, decode_fetch, encode_fetch_response
from protocol.produce_codec import ProducedPartition, decode_produce, encode_produced

ROUNDS = 15
TOPIC_ID = bytes(range(16))


class Range(NamedTuple):
    length: int


def measure(name: str, work: Callable[[], object], calls: int = 10_000) -> None:
    costs = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        costs.append((time.perf_counter() - started) / calls * 1e6)
    print(f"{name:44s} {statistics.median(costs):8.2f} {min(costs):8.2f}")


def produce(version: int) -> None:
    partition = m.ProduceRequestPartition(index=0, records=bytes(16_500))
    topic = m.ProduceRequestTopic(name="orders", topic_id=TOPIC_ID, partition_data=[partition])
    body = m.ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=[topic])
    frame = memoryview(bytearray(codec.encode_request(0, version, 1, "rdkafka", body)[4:]))
    name = "orders" if version < 13 else TOPIC_ID
    measure(
        f"Produce {version}: header and body, 16.5 KB",
        lambda: decode_produce(codec.read_header(frame), frame),
    )
    measure(
        f"Produce {version}: response",
        lambda: encode_produced(version, 7, name, ProducedPartition(0, 0, 12_345, -1, 0)),
    )


def fetch(version: int) -> None:
    partition = m.FetchRequestPartition(partition=0, fetch_offset=5, partition_max_bytes=1 << 20)
    topic = m.FetchRequestTopic(topic="orders", topic_id=TOPIC_ID, partitions=[partition])
    body = m.FetchRequest(max_wait_ms=500, min_bytes=1, topics=[topic])
    frame = memoryview(codec.encode_request(1, version, 1, "rdkafka", body)[4:])
    name = "orders" if version < 13 else TOPIC_ID
    records = Range(1 << 20)
    measure(
        f"Fetch {version}: header and body",
        lambda: decode_fetch(codec.read_header(frame), frame),
    )
    measure(
        f"Fetch {version}: response around 1 MB",
        lambda: encode_fetch_response(
            version, 7, [(name, [FetchedPartition(0, 0, 100, 100, 0, None, records)])]
        ),
    )


def heartbeat() -> None:
    body = m.HeartbeatRequest(group_id="group-1", generation_id=4, member_id="m" * 43)
    frame = memoryview(codec.encode_request(12, 4, 1, "rdkafka", body)[4:])
    measure(
        "Heartbeat 4: header and body",
        lambda: codec.decode_body(codec.read_header(frame), frame),
    )
    measure(
        "Heartbeat 4: response",
        lambda: codec.encode_response(12, 4, 1, m.HeartbeatResponse(error_code=0)),
    )


def metadata(partitions: int) -> None:
    def response() -> m.MetadataResponse:
        return m.MetadataResponse(
            brokers=[m.MetadataResponseBroker(node_id=1, host="localhost", port=9092)],
            topics=[
                m.MetadataResponseTopic(
                    name=f"topic-{number}",
                    topic_id=TOPIC_ID,
                    partitions=[
                        m.MetadataResponsePartition(
                            partition_index=index, leader_id=1, replica_nodes=[1], isr_nodes=[1]
                        )
                        for index in range(partitions)
                    ],
                )
                for number in range(100)
            ],
        )

    body = response()
    frame = codec.encode_response(3, 12, 7, body)[4:]
    name = f"Metadata 12, 100 topics x {partitions}"
    measure(f"{name}: objects", response, 100)
    measure(f"{name}: response", lambda: codec.encode_response(3, 12, 7, body), 100)
    measure(f"{name}: read by a client", lambda: codec.decode_response(3, 12, frame), 100)


def framing() -> None:
    reader = FrameReader()

    def receive(data: memoryview, read_bytes: int) -> None:
        while data:
            room = reader.get_buffer(0)
            used = min(len(room), len(data), read_bytes)
            room[:used] = data[:used]
            reader.buffer_updated(used)
            data = data[used:]
            while reader.next_frame() is not None:
                pass

    small = memoryview((struct.pack(">i", 200) + bytes(200)) * 64)
    big = memoryview(struct.pack(">i", 1 << 20) + bytes(1 << 20))
    measure("framing: 64 frames of 200 bytes, one read", lambda: receive(small, 1 << 16), 1_000)
    measure("framing: 1 MB in reads of 256 KB", lambda: receive(big, 1 << 18), 100)


if __name__ == "__main__":
    print(f"{'us':>44s} {'median':>8s} {'best':>8s}")
    for produce_version in (7, 9, 13):
        produce(produce_version)
    for fetch_version in (11, 12, 17):
        fetch(fetch_version)
    heartbeat()
    metadata(1)
    metadata(6)
    framing()
