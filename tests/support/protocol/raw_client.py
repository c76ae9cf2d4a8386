"""A client that sends exactly the given bytes, valid or not, over a plain socket."""

import itertools
import socket
import struct
from types import TracebackType
from typing import Self

from protocol.api import ApiKey
from protocol.codec import decode_response, encode_request
from protocol.messages import (
    FetchRequest,
    FetchRequestPartition,
    FetchRequestTopic,
    FetchResponse,
    FetchResponsePartition,
    Message,
    ProduceRequest,
    ProduceRequestPartition,
    ProduceRequestTopic,
    ProduceResponse,
    ProduceResponsePartition,
)

TIMEOUT_SECONDS = 20.0
PRODUCE_VERSION = 9  # the first flexible one; topics by name
FETCH_VERSION = 12


class RawClient:
    """One connection. A context manager."""

    def __init__(self, port: int, *, receive_buffer_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(TIMEOUT_SECONDS)
        self.socket.connect(("127.0.0.1", port))
        self.name = "{}:{}".format(*self.socket.getsockname())  # as the broker's log names it
        self._correlation_ids = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """These bytes and no others."""
        self.socket.sendall(data)

    def send_frame(self, data: bytes) -> None:
        """A frame of the right size around these bytes."""
        self.send(struct.pack(">i", len(data)) + data)

    def receive_frame(self) -> bytes:
        """The next answer, without its size. ConnectionError when there is none."""
        (size,) = struct.unpack(">i", self._receive(4))
        return self._receive(size)

    def request(self, api_key: int, version: int, body: Message) -> Message:
        """Ask and wait for the answer."""
        correlation_id = next(self._correlation_ids)
        self.send(encode_request(api_key, version, correlation_id, "raw", body))
        answered, response = decode_response(api_key, version, self.receive_frame())
        assert answered == correlation_id
        return response

    def produce(
        self, topic: str, records: bytes | None, partition: int = 0
    ) -> ProduceResponsePartition:
        """Produce these bytes with acks=all; the answer for the partition."""
        answer = self.request(
            ApiKey.PRODUCE, PRODUCE_VERSION, produce_request(topic, records, partition)
        )
        assert isinstance(answer, ProduceResponse)
        return answer.responses[0].partition_responses[0]

    def fetch(self, topic: str, offset: int = 0, partition: int = 0) -> FetchResponsePartition:
        """Fetch without waiting; the answer for the partition."""
        answer = self.request(ApiKey.FETCH, FETCH_VERSION, fetch_request(topic, offset, partition))
        assert isinstance(answer, FetchResponse)
        return answer.responses[0].partitions[0]

    def wait_closed(self) -> bytes:
        """Read until the broker closes; what it said before. TimeoutError if it does not."""
        output = bytearray()
        while True:
            try:
                data = self.socket.recv(65536)
            except ConnectionError:
                return bytes(output)
            if not data:
                return bytes(output)
            output += data

    def _receive(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            data = self.socket.recv(count - len(received))
            if not data:
                raise ConnectionError("the broker closed the connection")
            received += data
        return bytes(received)


def produce_request(topic: str, records: bytes | None, partition: int = 0) -> ProduceRequest:
    """acks=all, one partition."""
    return ProduceRequest(
        acks=-1,
        timeout_ms=10_000,
        topic_data=[
            ProduceRequestTopic(
                name=topic,
                partition_data=[ProduceRequestPartition(index=partition, records=records)],
            )
        ],
    )


def fetch_request(
    topic: str, offset: int = 0, partition: int = 0, max_bytes: int = 50 << 20
) -> FetchRequest:
    """Without a session, without waiting, one partition."""
    return FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=max_bytes,
        session_epoch=-1,
        topics=[
            FetchRequestTopic(
                topic=topic,
                partitions=[
                    FetchRequestPartition(
                        partition=partition, fetch_offset=offset, partition_max_bytes=max_bytes
                    )
                ],
            )
        ],
    )
