"""Topics for the benchmark of the pipeline: batches made beforehand, over a plain socket.

Every key of a partition is written OVERWRITES times in random order (or as often as the requested
number of keys makes it), and no two partitions share a key.
"""

import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.cleaner.clean_job import CODECS, OVERWRITES, Template, one_batch
from protocol.api import ApiKey
from protocol.codec import decode_response, encode_request
from protocol.messages import (
    ProduceRequest,
    ProduceRequestPartition,
    ProduceRequestTopic,
    ProduceResponse,
)
from tests.support.protocol.raw_client import PRODUCE_VERSION

IN_FLIGHT = 64  # requests of one batch for each partition
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class TopicShape:
    """The records of a topic; counts are over all partitions."""

    name: str
    records: int
    keys: int
    partitions: int = 4
    payload_bytes: int = 90  # of a record: key and value; with the fields around them it is 100
    batch_bytes: int = 16_384
    codec: str = "none"

    @classmethod
    def of(cls, name: str, records: int, keys: int | None = None) -> "TopicShape":
        """With OVERWRITES records a key, unless the number of keys is said."""
        return cls(name, records, keys or max(1, records // OVERWRITES))


def make_batches(shape: TopicShape, seed: int) -> Iterator[list[bytes]]:
    """One batch for each partition, again and again. Offsets are stamped by the broker."""
    rng = np.random.default_rng(seed)
    count = max(1, shape.batch_bytes // (shape.payload_bytes + 10))
    template = Template(count, shape.payload_bytes, rng)
    each, keys = shape.records // shape.partitions, shape.keys // shape.partitions
    orders = [rng.permutation(each) % keys + keys * n for n in range(shape.partitions)]
    for first in range(0, each, count):
        if first + count > each:
            template = Template(each - first, shape.payload_bytes, rng)
        yield [
            one_batch(template, order[first : first + template.count], 0, CODECS[shape.codec])
            for order in orders
        ]


class _Answers(threading.Thread):
    """Counts the responses of a connection and keeps the first error."""

    def __init__(self, connection: socket.socket, free: threading.Semaphore) -> None:
        super().__init__(name="answers", daemon=True)
        self._stream = connection.makefile("rb")
        self._free = free
        self.failure = ""

    def run(self) -> None:
        while size := self._stream.read(4):
            frame = self._stream.read(struct.unpack(">i", size)[0])
            _, answer = decode_response(ApiKey.PRODUCE, PRODUCE_VERSION, frame)
            assert isinstance(answer, ProduceResponse)
            for part in answer.responses[0].partition_responses:
                if part.error_code and not self.failure:
                    self.failure = f"partition {part.index}: error {part.error_code}"
            self._free.release()


def fill(port: int, shape: TopicShape, seed: int) -> None:
    """Produce the records of an existing, empty topic. Raises RuntimeError."""
    free = threading.Semaphore(IN_FLIGHT)
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS) as connection:
        answers = _Answers(connection, free)
        answers.start()

        def wait() -> None:
            if not free.acquire(timeout=TIMEOUT_SECONDS) or answers.failure:
                raise RuntimeError(f"{shape.name}: {answers.failure or 'no answer'}")

        for number, batches in enumerate(make_batches(shape, seed)):
            wait()
            parts = [
                ProduceRequestPartition(index=index, records=batch)
                for index, batch in enumerate(batches)
            ]
            body = ProduceRequest(
                acks=1,
                timeout_ms=10_000,
                topic_data=[ProduceRequestTopic(name=shape.name, partition_data=parts)],
            )
            connection.sendall(
                encode_request(ApiKey.PRODUCE, PRODUCE_VERSION, number & 0xFFFF, "bench", body)
            )
        for _ in range(IN_FLIGHT):
            wait()
        connection.shutdown(socket.SHUT_WR)
        answers.join(TIMEOUT_SECONDS)
