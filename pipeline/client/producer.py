"""Writing records to a cluster in bulk, through librdkafka.

Rules
- Idempotent, acknowledged by all replicas, in order per partition. `close` or `flush` return only
  after every record was acknowledged, or raise the first error there was.
- A key goes where the Java client's default partitioner puts it (murmur2); a null key anywhere.
- Memory: what librdkafka queues, bounded by its queue.buffering.max.kbytes.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import KafkaError, KafkaException, Message, Producer

DEFAULTS: Final[Mapping[str, str | int | bool]] = {
    "acks": "all",
    "enable.idempotence": True,
    "partitioner": "murmur2_random",
    "linger.ms": 20,
    "batch.size": 1 << 20,
    "queue.buffering.max.kbytes": 128 << 10,
    # The broker's max.message.bytes decides, and its answer names the record.
    "message.max.bytes": 100_000_000,
    "topic.metadata.refresh.interval.ms": 60_000,
    "allow.auto.create.topics": False,
}
# Java's names of what librdkafka calls otherwise.
JAVA_NAMES: Final[Mapping[str, str]] = {
    "max.request.size": "message.max.bytes",
    "max.block.ms": "",  # a full queue is waited for until delivery times out
}
BUFFER_MEMORY: Final = "buffer.memory"  # Java's, in bytes; librdkafka counts kilobytes
POLL_SECONDS: Final = 0.5

Headers = Sequence[tuple[str, bytes | None]]


class ProduceError(Exception):
    """Records that were not written. `failed` of them, so far; the message is about the first."""

    def __init__(self, reason: str, failed: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.failed = failed


class _Outcome:
    """What became of the records. Apart from the producer, which refers to it."""

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

    def noted(self, error: KafkaError) -> None:
        """Connections that fail are retried until delivery times out; fatal errors are final."""
        if error.fatal() and self.first_failure is None:
            self.failed += 1
            self.first_failure = _reason(error)


class BulkProducer:
    """Sends records. A context manager: leaving it waits for all acknowledgements."""

    def __init__(
        self, bootstrap: str, settings: Mapping[str, str | int | bool] | None = None
    ) -> None:
        """`settings` are librdkafka's, or Java's names of the same; they win over DEFAULTS.

        Raises ProduceError for a setting that there is not, or that has no such value.
        """
        config: dict[str, str | int | bool] = {**DEFAULTS, **_translated(settings or {})}
        config["bootstrap.servers"] = bootstrap
        self._outcome = _Outcome()
        config["log_level"] = 3  # errors reach us; connections that come and go are no news
        config["error_cb"] = self._outcome.noted  # type: ignore[assignment]
        try:
            self._producer: Producer | None = Producer(config)
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
            # Its connections go with the last reference to it.
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
        """Queue a record; waits while the queue is full. Raises ProduceError."""
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
                # Delivery times out, so what is in the queue leaves it one way or the other.
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
        """Wait until everything was acknowledged -> records so far. Raises ProduceError."""
        while self._open.flush(POLL_SECONDS):
            self._raise_failure()
        self._raise_failure()
        return self._outcome.acknowledged

    def abandon(self) -> None:
        """Give up what is queued. What was sent already may have been written."""
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
    """Settings by librdkafka's names. Raises ProduceError."""
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
