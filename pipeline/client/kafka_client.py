"""A blocking Kafka client for bulk reads: metadata, offsets and raw batches.

Client libraries return records one by one. This client returns record batches as they are in the
log, for the kernels that turn them into columns.

Rules
- Each call has one deadline, retries included. It retries unreachable brokers and retriable error
  codes, and fetches metadata again before each retry. A fetch that a quota throttles is repeated
  after the throttle time. Every other error is raised at once, with its subject.
- One fetch may be sent ahead. Any other request to that broker discards its response.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Final, NamedTuple, NoReturn, Protocol, Self, TypeVar

from config.address import Address
from config.security.clients import Cluster
from pipeline.client.wire_errors import (
    OffsetsGoneError,
    RetriableError,
    ThrottledError,
    UnknownTopicError,
    UnreachableBrokerError,
    brief,
    check,
)
from protocol.api import ApiKey
from protocol.client.connection import (
    CONNECT_SECONDS,
    BlockingConnection,
    BrokerRefusedError,
    WireError,
)
from protocol.errors import ErrorCode, ProtocolError
from protocol.messages import (
    FetchRequest,
    FetchRequestPartition,
    FetchRequestTopic,
    FetchResponse,
    FetchResponsePartition,
    ListOffsetsRequest,
    ListOffsetsRequestPartition,
    ListOffsetsRequestTopic,
    ListOffsetsResponse,
    Message,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseTopic,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochRequestPartition,
    OffsetForLeaderEpochRequestTopic,
    OffsetForLeaderEpochResponse,
)
from storage.model import TopicPartition

EARLIEST: Final = -2  # special timestamps of ListOffsets
LATEST: Final = -1
NO_OFFSET: Final = -1  # no record at or after the timestamp

FETCH_BYTES: Final = 8 << 20
TIMEOUT_SECONDS: Final = 60.0
REACH_SECONDS: Final = 5.0  # for the first answer: a mistyped host should fail soon
BACKOFF_SECONDS: Final = (0.05, 1.0)  # first and longest
UNKNOWN_TOPIC_TRIES: Final = 3  # a new topic may be unknown for a moment

# The oldest and newest version in use of each API. Fetch up to 12 has topic names, not ids.
_VERSIONS: Final = {
    ApiKey.FETCH: (4, 12),
    ApiKey.LIST_OFFSETS: (2, 9),
    ApiKey.METADATA: (4, 12),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: (3, 4),
}
_UNKNOWN: Final = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

T = TypeVar("T")


class EndOffset(NamedTuple):
    """An end offset and the leader epoch at that time, -1 if unknown.

    No record below the offset has a later epoch.
    """

    offset: int
    leader_epoch: int

    @classmethod
    def parse(cls, value: int | list[int]) -> "EndOffset":
        """Return the end offset of a checkpoint: [offset, leader epoch], or an offset alone."""
        offset, epoch = value if isinstance(value, list) else (value, -1)
        return cls(int(offset), int(epoch))


class Isolation(IntEnum):
    """The isolation level of a reader, with the protocol's numbers."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


@dataclass(frozen=True, slots=True)
class Fetched:
    """The response to a fetch. Its last batch may be truncated."""

    records: bytes
    log_start_offset: int
    high_watermark: int
    last_stable_offset: int
    aborted: tuple[tuple[int, int], ...]  # (producer id, first offset) of aborted transactions

    def readable_end(self, isolation: Isolation) -> int:
        """Return the first offset that this isolation level cannot read yet."""
        if isolation is Isolation.READ_COMMITTED:
            return self.last_stable_offset
        return self.high_watermark


class WireClient:
    """A client of one cluster. A context manager; not thread-safe."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        client_id: str = "varve-pipeline",
        timeout_seconds: float = TIMEOUT_SECONDS,
        reach_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Create a client; it connects on first use.

        `reach_seconds` limits requests until a broker has answered once: a wrong address should
        fail soon, a broker that restarts should not.
        """
        self._bootstrap = cluster.addresses
        self._security = cluster.security
        self._client_id = client_id
        self._timeout_seconds = timeout_seconds
        self._reach_seconds = min(reach_seconds, timeout_seconds)
        self._was_reached = False
        self._connections: dict[Address, BlockingConnection] = {}
        self._brokers: dict[int, Address] = {}
        self._leaders: dict[TopicPartition, int] = {}
        self._sent: _FetchTarget | None = None  # an outstanding fetch that was sent ahead
        self._sent_to: BlockingConnection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; the client may be used again."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._sent = self._sent_to = None

    # Metadata

    def topics(self) -> list[str]:
        """Return the names of all topics that are not internal, sorted."""
        answer = self._with_retries(
            "metadata", lambda seconds_left: self._metadata(None, seconds_left)
        )
        return sorted(t.name for t in answer.topics if t.name and not t.is_internal)

    def partitions(self, topics: Sequence[str]) -> dict[str, list[int]]:
        """Return the partitions of each topic, ascending. Raises UnknownTopicError."""
        return {
            topic.name: sorted(partition.partition_index for partition in topic.partitions)
            for topic in self._described(topics)
            if topic.name is not None
        }

    def topic_id(self, topic: str) -> bytes:
        """Return the id of a topic: one created later under the same name has another.

        Zeros if the broker has no topic ids. Raises UnknownTopicError.
        """
        (described,) = self._described([topic])
        return described.topic_id

    def _described(self, topics: Sequence[str]) -> list[MetadataResponseTopic]:
        attempt = 1
        while True:
            answer = self._with_retries(
                "metadata", lambda seconds_left: self._metadata(topics, seconds_left)
            )
            unknown = {t.name for t in answer.topics if t.error_code == _UNKNOWN and t.name}
            if not unknown:
                break
            if attempt == UNKNOWN_TOPIC_TRIES:
                raise UnknownTopicError(unknown)
            time.sleep(BACKOFF_SECONDS[0] * 2**attempt)
            attempt += 1
        for topic in answer.topics:
            if topic.error_code:
                raise BrokerRefusedError(f"metadata of {topic.name}", topic.error_code)
        return answer.topics

    def offsets(
        self,
        requested: Mapping[TopicPartition, int],
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
    ) -> dict[TopicPartition, int]:
        """Return the first offset at or after a timestamp (ms), EARLIEST or LATEST, per partition.

        NO_OFFSET means that there is none. LATEST is the high watermark, or with READ_COMMITTED the
        last stable offset.
        """
        return {which: end.offset for which, end in self._listed(requested, isolation).items()}

    def end_offsets(
        self, partitions: Iterable[TopicPartition], isolation: Isolation
    ) -> dict[TopicPartition, EndOffset]:
        """Return the end offset of each partition, with its leader epoch."""
        return self._listed(dict.fromkeys(partitions, LATEST), isolation)

    def _listed(
        self, requested: Mapping[TopicPartition, int], isolation: Isolation
    ) -> dict[TopicPartition, EndOffset]:
        results: dict[TopicPartition, EndOffset] = {}

        def ask(seconds_left: float) -> None:
            rest = {which: when for which, when in requested.items() if which not in results}
            for address, group in self._by_leader(rest, seconds_left).items():
                answered = self._list_offsets(address, group, isolation, seconds_left)
                results.update(answered)

        self._with_retries("offsets", ask)
        return results

    def truncated(self, reached: Mapping[TopicPartition, EndOffset]) -> dict[TopicPartition, int]:
        """Return the partitions that were truncated below the offset reached, with their new ends.

        A truncation begins a leader epoch, so the former epoch ends below that offset (KIP-320).
        The result has no partition whose leader epoch is -1, or unknown to its broker.
        """
        epochs = {p: end.leader_epoch for p, end in reached.items() if end.leader_epoch >= 0}
        ends: dict[TopicPartition, int] = {}

        def ask(seconds_left: float) -> None:
            rest = {which: epoch for which, epoch in epochs.items() if which not in ends}
            for address, group in self._by_leader(rest, seconds_left).items():
                ends.update(self._epoch_ends(address, group, seconds_left))

        self._with_retries("ends of leader epochs", ask)
        return {p: end for p, end in ends.items() if 0 <= end < reached[p].offset}

    # Fetch

    def fetch(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
        max_bytes: int = FETCH_BYTES,
        wait_ms: int = 500,
    ) -> Fetched:
        """Fetch batches from `offset` on; wait up to `wait_ms` for the first.

        The first batch may begin before `offset`. Raises OffsetsGoneError, WireError.
        """
        target = _FetchTarget(partition, offset, isolation, max_bytes, wait_ms)

        def ask(seconds_left: float) -> Fetched:
            connection = self._sent_to if self._sent == target else None
            self._sent = None
            if connection is None:
                connection = self._to_leader(partition, seconds_left)
                target.send(connection)
            answer = connection.receive(FetchResponse, seconds_left + wait_ms / 1000)
            return self._fetched(answer, target, seconds_left)

        return self._with_retries(f"fetch of {partition} from {offset}", ask)

    def send_fetch(
        self,
        partition: TopicPartition,
        offset: int,
        *,
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
        max_bytes: int = FETCH_BYTES,
        wait_ms: int = 500,
    ) -> None:
        """Send the request of a later `fetch` with the same arguments ahead of time.

        This is a hint: if it fails, `fetch` sends the request again.
        """
        target = _FetchTarget(partition, offset, isolation, max_bytes, wait_ms)
        try:
            connection = self._to_leader(partition, CONNECT_SECONDS)
            target.send(connection)
        except (RetriableError, OSError, ProtocolError, WireError):
            self.close()
            return
        self._sent, self._sent_to = target, connection

    def _fetched(
        self, answer: FetchResponse, target: "_FetchTarget", seconds_left: float
    ) -> Fetched:
        subject = f"fetch of {target.partition} from {target.offset}"
        check(subject, answer.error_code)
        if answer.throttle_time_ms and not answer.responses:
            raise ThrottledError(answer.throttle_time_ms / 1000)
        partition = _only_partition(answer, target.partition)
        if partition is None:
            raise WireError(f"{subject}: the response has another partition")
        if partition.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            self._gone(target, seconds_left)
        check(subject, partition.error_code)
        aborted = partition.aborted_transactions or []
        return Fetched(
            records=bytes(partition.records or b""),
            log_start_offset=partition.log_start_offset,
            high_watermark=partition.high_watermark,
            last_stable_offset=partition.last_stable_offset,
            aborted=tuple((entry.producer_id, entry.first_offset) for entry in aborted),
        )

    def _gone(self, target: "_FetchTarget", seconds_left: float) -> NoReturn:
        """Fetch the bounds of the log, which the response lacks, and raise OffsetsGoneError."""
        bounds = []
        for when in (EARLIEST, LATEST):
            for address, group in self._by_leader({target.partition: when}, seconds_left).items():
                answered = self._list_offsets(
                    address, group, Isolation.READ_UNCOMMITTED, seconds_left
                )
                bounds.append(answered[target.partition].offset)
        raise OffsetsGoneError(target.partition, target.offset, bounds[0], bounds[1])

    # Connections and retries

    def _with_retries(self, subject: str, ask: Callable[[float], T]) -> T:
        """Call `ask` with the seconds left, until it succeeds or the time is up."""
        started = time.monotonic()
        backoff = BACKOFF_SECONDS[0]

        def seconds_left() -> float:
            limit = self._timeout_seconds if self._was_reached else self._reach_seconds
            return started + limit - time.monotonic()

        while True:
            cause: WireError
            try:
                return ask(max(seconds_left(), 0.001))
            except ThrottledError as error:
                if seconds_left() <= error.seconds:
                    raise WireError(f"{subject}: {error}") from error
                time.sleep(error.seconds)
                continue
            except RetriableError as error:
                cause = error.cause
            except (OSError, ProtocolError) as error:
                cause = UnreachableBrokerError(f"{subject}: {brief(error)}")
            # Outstanding responses are stale, and leaders may have moved.
            self.close()
            self._leaders.clear()
            # An attempt of a few milliseconds would time out, and hide what failed before it.
            if seconds_left() <= 2 * backoff:
                raise cause
            time.sleep(backoff)
            backoff = min(2 * backoff, BACKOFF_SECONDS[1])

    def _connected(self, address: Address, seconds_left: float) -> BlockingConnection:
        connection = self._connections.get(address)
        if connection is not None and connection.is_waiting:
            connection.close()  # its response is no longer needed
            connection = None
        if connection is None:
            connection = BlockingConnection(
                address, self._client_id, self._security, min(seconds_left, CONNECT_SECONDS)
            )
            try:
                connection.handshake(seconds_left)
            except BaseException:
                connection.close()  # a later request connects again
                raise
            self._connections[address] = connection
            self._was_reached = True
        return connection

    def _connect_any(self, seconds_left: float) -> BlockingConnection:
        """Connect to any broker that answers. Raises a retriable UnreachableBrokerError."""
        failures = []
        for address in dict.fromkeys((*self._brokers.values(), *self._bootstrap)):
            try:
                return self._connected(address, min(seconds_left, CONNECT_SECONDS))
            except (OSError, ProtocolError) as error:
                self._forget(address)
                failures.append(f"{address}: {brief(error)}")
        raise RetriableError(UnreachableBrokerError(f"no broker answers: {'; '.join(failures)}"))

    def _forget(self, address: Address) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()

    def _metadata(self, topics: Sequence[str] | None, seconds_left: float) -> MetadataResponse:
        connection = self._connect_any(seconds_left)
        metadata_request_topics = (
            None if topics is None else [MetadataRequestTopic(name=name) for name in topics]
        )
        request = MetadataRequest(topics=metadata_request_topics, allow_auto_topic_creation=False)
        _send(connection, ApiKey.METADATA, request)
        answer = connection.receive(MetadataResponse, seconds_left)
        self._brokers = {b.node_id: Address(b.host, b.port) for b in answer.brokers}
        for topic in answer.topics:
            # The caller handles unknown topics.
            if topic.error_code not in (ErrorCode.NONE, _UNKNOWN):
                check(f"metadata of {topic.name}", topic.error_code)
            for partition in topic.partitions:
                which = TopicPartition(str(topic.name), partition.partition_index)
                self._leaders[which] = partition.leader_id
        return answer

    def _leader_address(self, partition: TopicPartition, seconds_left: float) -> Address:
        if partition not in self._leaders:
            answer = self._metadata([partition.topic], seconds_left)
            if any(topic.error_code == _UNKNOWN for topic in answer.topics):
                raise UnknownTopicError([partition.topic])
            if partition not in self._leaders:
                raise UnknownTopicError([str(partition)])
        address = self._brokers.get(self._leaders[partition])
        if address is None:
            raise RetriableError(UnreachableBrokerError(f"{partition} has no leader"))
        return address

    def _to_leader(self, partition: TopicPartition, seconds_left: float) -> BlockingConnection:
        return self._connected(self._leader_address(partition, seconds_left), seconds_left)

    def _by_leader(
        self, requested: Mapping[TopicPartition, int], seconds_left: float
    ) -> dict[Address, dict[TopicPartition, int]]:
        groups: dict[Address, dict[TopicPartition, int]] = defaultdict(dict)
        for partition, timestamp in requested.items():
            groups[self._leader_address(partition, seconds_left)][partition] = timestamp
        return groups

    def _list_offsets(
        self,
        address: Address,
        requested: Mapping[TopicPartition, int],
        isolation: Isolation,
        seconds_left: float,
    ) -> dict[TopicPartition, EndOffset]:
        rows = _rows_by_topic(
            requested,
            lambda index, timestamp: ListOffsetsRequestPartition(
                partition_index=index, timestamp=timestamp
            ),
        )
        request = ListOffsetsRequest(
            isolation_level=isolation,
            topics=[ListOffsetsRequestTopic(name=t, partitions=p) for t, p in rows.items()],
        )
        connection = self._connected(address, seconds_left)
        _send(connection, ApiKey.LIST_OFFSETS, request)
        answer = connection.receive(ListOffsetsResponse, seconds_left)
        results = {
            TopicPartition(topic.name, row.partition_index): row
            for topic in answer.topics
            for row in topic.partitions
        }
        _check_rows("offsets", results, requested, address)
        return {p: EndOffset(row.offset, row.leader_epoch) for p, row in results.items()}

    def _epoch_ends(
        self, address: Address, epochs: Mapping[TopicPartition, int], seconds_left: float
    ) -> dict[TopicPartition, int]:
        rows = _rows_by_topic(
            epochs,
            lambda index, epoch: OffsetForLeaderEpochRequestPartition(
                partition=index, current_leader_epoch=-1, leader_epoch=epoch
            ),
        )
        request = OffsetForLeaderEpochRequest(
            replica_id=-1,
            topics=[
                OffsetForLeaderEpochRequestTopic(topic=t, partitions=p) for t, p in rows.items()
            ],
        )
        connection = self._connected(address, seconds_left)
        _send(connection, ApiKey.OFFSET_FOR_LEADER_EPOCH, request)
        answer = connection.receive(OffsetForLeaderEpochResponse, seconds_left)
        results = {
            TopicPartition(topic.topic, row.partition): row
            for topic in answer.topics
            for row in topic.partitions
        }
        _check_rows("end of a leader epoch", results, epochs, address)
        return {p: row.end_offset for p, row in results.items()}


@dataclass(frozen=True, slots=True)
class _FetchTarget:
    """A fetch of one partition, without a fetch session."""

    partition: TopicPartition
    offset: int
    isolation: Isolation
    max_bytes: int
    wait_ms: int

    def send(self, connection: BlockingConnection) -> None:
        part = FetchRequestPartition(
            partition=self.partition.partition,
            fetch_offset=self.offset,
            partition_max_bytes=self.max_bytes,
        )
        request = FetchRequest(
            max_wait_ms=self.wait_ms,
            min_bytes=1,
            max_bytes=self.max_bytes,
            isolation_level=self.isolation,
            topics=[FetchRequestTopic(topic=self.partition.topic, partitions=[part])],
        )
        _send(connection, ApiKey.FETCH, request)


def _send(connection: BlockingConnection, key: ApiKey, body: Message) -> None:
    connection.send(key, connection.negotiated_version(key, *_VERSIONS[key]), body)


def _rows_by_topic(
    requested: Mapping[TopicPartition, int], make_row: Callable[[int, int], T]
) -> dict[str, list[T]]:
    """Return the rows of each topic: `make_row` gets a partition's index and its number."""
    rows: dict[str, list[T]] = defaultdict(list)
    for (topic, index), number in requested.items():
        rows[topic].append(make_row(index, number))
    return rows


class _RowWithError(Protocol):
    error_code: int


def _check_rows(
    subject: str,
    rows: Mapping[TopicPartition, _RowWithError],
    requested: Mapping[TopicPartition, int],
    address: Address,
) -> None:
    """Raise the error of a row, or WireError if the rows are not those of the partitions asked."""
    for partition, row in rows.items():
        check(f"{subject} of {partition}", row.error_code)
    if rows.keys() != requested.keys():
        raise WireError(f"{address} answered for other partitions than requested")


def _only_partition(
    answer: FetchResponse, partition: TopicPartition
) -> FetchResponsePartition | None:
    for topic in answer.responses:
        for fetch_response_partition in topic.partitions:
            if (topic.topic, fetch_response_partition.partition_index) == partition:
                return fetch_response_partition
    return None
