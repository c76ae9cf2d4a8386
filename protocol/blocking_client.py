"""A small blocking client for DescribeLogDirs, which librdkafka does not have.

The demo and the command line use it for sizes on disk. It sends version 4, which every broker since
Kafka 3.3 supports.
"""

import itertools
import socket
import struct
from typing import Self

from config.address import parse_kafka_address
from protocol.api import ApiKey
from protocol.codec import decode_response, encode_request
from protocol.errors import ProtocolError
from protocol.messages import DescribeLogDirsRequest, DescribeLogDirsResponse

VERSION = 4
TIMEOUT_SECONDS = 10.0
ANSWER_BYTES_MAX = 64 << 20  # a million partitions in one answer


class LogDirClient:
    """A connection that asks a broker for sizes on disk; a context manager. Raises OSError."""

    def __init__(self, bootstrap: str) -> None:
        address = parse_kafka_address(bootstrap)
        self._socket = socket.create_connection((address.host, address.port), TIMEOUT_SECONDS)
        self._correlation_ids = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def size_of(self, topic: str) -> int:
        """Return the bytes of all partitions of a topic on disk. Raises ProtocolError, OSError."""
        request = DescribeLogDirsRequest(topics=None)
        correlation_id = next(self._correlation_ids)
        key = ApiKey.DESCRIBE_LOG_DIRS
        self._socket.sendall(encode_request(key, VERSION, correlation_id, "varve", request))
        (size,) = struct.unpack(">i", self._receive(4))
        if not 0 <= size <= ANSWER_BYTES_MAX:
            raise ProtocolError(f"answer of {size} bytes", key, VERSION)
        answered, body = decode_response(key, VERSION, self._receive(size))
        if answered != correlation_id:
            raise ProtocolError("answer to another request", key, VERSION)
        assert isinstance(body, DescribeLogDirsResponse)
        return sum(
            partition.partition_size
            for directory in body.results
            for response_topic in directory.topics
            if response_topic.name == topic
            for partition in response_topic.partitions
        )

    def _receive(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            data = self._socket.recv(count - len(received))
            if not data:
                raise ConnectionError("the broker closed the connection")
            received += data
        return bytes(received)
