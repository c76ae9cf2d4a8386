"""Brokers that say what a test has them say: leaders that move, answers that lie."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from protocol.api import APIS, ApiKey
from protocol.codec import decode_body, encode_response, read_header
from protocol.messages import (
    ApiVersionsResponse,
    ApiVersionsResponseRange,
    FetchResponse,
    FetchResponsePartition,
    FetchResponseTopic,
    ListOffsetsResponse,
    ListOffsetsResponsePartition,
    ListOffsetsResponseTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)

Answers = dict[int, Callable[[Any], Any]]


class FakeBroker:
    """Answers with what `answers` makes of a request; bytes are sent as they are."""

    def __init__(self, answers: Answers) -> None:
        self.requests: list[int] = []
        self._answers = {ApiKey.API_VERSIONS: lambda _: versions()} | answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        # Closing alone would leave the other thread waiting in accept().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            while size := lines.read(4):
                frame = lines.read(struct.unpack(">i", size)[0])
                header = read_header(frame)
                self.requests.append(header.api_key)
                answer = self._answers[header.api_key](decode_body(header, frame))
                if answer is None:
                    return
                if not isinstance(answer, bytes):
                    answer = encode_response(
                        header.api_key, header.api_version, header.correlation_id, answer
                    )
                try:
                    connection.sendall(answer)
                except OSError:
                    return


@contextmanager
def fake_brokers(*answers: Answers) -> Iterator[list[FakeBroker]]:
    brokers = [FakeBroker(each) for each in answers]
    try:
        yield brokers
    finally:
        for broker in brokers:
            broker.stop()


def versions() -> ApiVersionsResponse:
    ranges = [
        ApiVersionsResponseRange(api_key=api.key, min_version=api.versions.first,
                                 max_version=api.versions.last)
        for api in APIS.values()
    ]  # fmt: skip
    return ApiVersionsResponse(api_keys=ranges)


def metadata(ports: dict[int, int], leaders: dict[tuple[str, int], int]) -> MetadataResponse:
    """`ports` by node, `leaders` by partition."""
    topics: dict[str, list[MetadataResponsePartition]] = {}
    for (topic, number), leader in leaders.items():
        part = MetadataResponsePartition(partition_index=number, leader_id=leader)
        topics.setdefault(topic, []).append(part)
    return MetadataResponse(
        brokers=[
            MetadataResponseBroker(node_id=node, host="127.0.0.1", port=port)
            for node, port in ports.items()
        ],
        topics=[MetadataResponseTopic(name=t, partitions=parts) for t, parts in topics.items()],
    )


def offsets(request: Any, answer: Callable[[str, int], tuple[int, int]]) -> ListOffsetsResponse:
    """`answer`: topic and partition -> (error code, offset)."""
    topics = []
    for topic in request.topics:
        parts = []
        for expected in topic.partitions:
            code, offset = answer(topic.name, expected.partition_index)
            parts.append(
                ListOffsetsResponsePartition(
                    partition_index=expected.partition_index, error_code=code, offset=offset
                )
            )
        topics.append(ListOffsetsResponseTopic(name=topic.name, partitions=parts))
    return ListOffsetsResponse(topics=topics)


def fetched(request: Any, **fields: Any) -> FetchResponse:
    """An answer to a fetch of one partition."""
    topic = request.topics[0]
    part = FetchResponsePartition(
        partition_index=topic.partitions[0].partition,
        **({"log_start_offset": 0, "records": b"", "aborted_transactions": None} | fields),
    )
    return FetchResponse(responses=[FetchResponseTopic(topic=topic.topic, partitions=[part])])
