"""Write records to a cluster in bulk, through librdkafka.

Rules
- Writes are idempotent, acknowledged by all replicas, and in order per partition. `flush` and the
  end of the context return after every record is acknowledged, or raise the first error.
- The Java client's default partitioner (murmur2) decides the partition of a key; records without a
  key go to any partition.
- queue.buffering.max.kbytes bounds the memory of the queue.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from config.security.clients import Cluster
from protocol.client.librdkafka import connection_settings

DEFAULTS: Final[Mapping[str, str | int | bool]] = {
    "acks": "all",
    "enable.idempotence": True,
    "partitioner": "murmur2_random",
    "linger.ms": 20,
    "batch.size": 1 << 20,
    "queue.buffering.max.kbytes": 128 << 10,
    # The broker enforces max.message.bytes, and its error names the topic.
    "message.max.bytes": 100_000_000,
    "topic.metadata.refresh.interval.ms": 60_000,
    "allow.auto.create.topics": False,
}
# Java's names of librdkafka settings; an empty name is ignored.
JAVA_NAMES: Final[Mapping[str, str]] = {
    "max.request.size": "message.max.bytes",
    "max.block.ms": "",  # send() waits for a full queue until delivery times out
}
BUFFER_MEMORY: Final = "buffer.memory"  # Java's, in bytes; librdkafka counts kilobytes
POLL_SECONDS: Final = 0.5

Headers = Sequence[tuple[str, bytes | None]]


class ProduceError(Exception):
    """`failed` records were not written; the message is about the first."""

    def __init__(self, reason: str, failed: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.failed = failed


class _Outcome:
    """The outcome of the records; separate, because the producer references it."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self.failed = 0
        self.first_failure: str | None = None

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.acknowledged += 1
            return
        self.failed += 1
        if self.first_failure is None:
            self.first_failure = f"{message.topic()}-{message.partition()}: {_reason(error)}"

    def record_error(self, error: KafkaError) -> None:
        """Record fatal errors. librdkafka retries others until delivery times out."""
        if error.fatal() and self.first_failure is None:
            self.failed += 1
            self.first_failure = _reason(error)


class BulkProducer:
    """A producer of records. A context manager whose end waits for all acknowledgements."""

    def __init__(
        self, cluster: Cluster, settings: Mapping[str, str | int | bool] | None = None
    ) -> None:
        """`settings` override DEFAULTS, under librdkafka's or Java's names.

        Raises ProduceError for an unknown setting or an invalid value.
        """
        config: dict[str, Any] = {**DEFAULTS, **_translated(settings or {})}
        config |= connection_settings(cluster)
        self._outcome = _Outcome()
        config["log_level"] = 3  # errors arrive through the callback
        try:
            self._producer: Producer | None = Producer(
                {**config, "error_cb": self._outcome.record_error}
            )
        except KafkaException as error:
            raise ProduceError(_reason(error.args[0]), 0) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.flush()
            else:
                self.abandon()
        finally:
            # Dropping the last reference closes its connections.
            self._producer = None

    def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        *,
        partition: int | None = None,
        headers: Headers | None = None,
        timestamp_ms: int | None = None,
    ) -> None:
        """Queue a record; wait while the queue is full. Raises ProduceError."""
        self._raise_failure()
        more: dict[str, Any] = {}
        if partition is not None:
            more["partition"] = partition
        if headers:
            more["headers"] = list(headers)
        if timestamp_ms is not None:
            more["timestamp"] = timestamp_ms
        while True:
            try:
                self._open.produce(
                    topic, value=value, key=key, on_delivery=self._outcome.delivered, **more
                )
            except BufferError:
                # The queue drains: each record is delivered or times out.
                self._open.poll(POLL_SECONDS)
                self._raise_failure()
                continue
            except KafkaException as error:
                raise ProduceError(
                    f"{topic}: {_reason(error.args[0])}", self._outcome.failed + 1
                ) from error
            break
        self._open.poll(0)

    def flush(self) -> int:
        """Wait for all acknowledgements; return the records written so far. Raises ProduceError."""
        while self._open.flush(POLL_SECONDS):
            self._raise_failure()
        self._raise_failure()
        return self._outcome.acknowledged

    def abandon(self) -> None:
        """Discard the queue. Records already sent may have been written."""
        self._open.purge()
        self._open.poll(0)

    @property
    def _open(self) -> Producer:
        assert self._producer is not None, "the producer was closed"
        return self._producer

    def _raise_failure(self) -> None:
        outcome = self._outcome
        if outcome.first_failure is not None:
            self.abandon()
            raise ProduceError(outcome.first_failure, outcome.failed)


def _translated(settings: Mapping[str, str | int | bool]) -> dict[str, str | int | bool]:
    """Return the settings under librdkafka's names. Raises ProduceError."""
    translated: dict[str, str | int | bool] = {}
    for name, value in settings.items():
        translated_name = JAVA_NAMES.get(name, name)
        if name == BUFFER_MEMORY:
            try:
                translated["queue.buffering.max.kbytes"] = max(1, int(value) >> 10)
            except ValueError:
                raise ProduceError(f"{name} is {value!r}, not a number of bytes", 0) from None
        elif translated_name:
            translated[translated_name] = value
    return translated


def _reason(error: KafkaError) -> str:
    return f"{error.name()}: {error.str()}"
