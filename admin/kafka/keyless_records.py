"""Estimate how many records without a key a topic has, over the Kafka protocol.

The broker cannot warn in its answer to a change of cleanup.policy, so the command looks for them.

Rules
- A few pages of each partition are read, evenly spread over its offsets, as the broker does it for
  the HTTP API (broker/inspection/keyless_records.py).
- What is not read within SECONDS_MAX is left out.
"""

import time
from typing import TYPE_CHECKING, Any, Final

from admin.kafka.client import REQUEST_SECONDS, reader_settings
from admin.kafka.positions import TopicPosition
from config.topics.keyless_estimate import (
    PAGE_RECORDS,
    PAGES,
    PARTITIONS_MAX,
    KeylessEstimate,
    estimate_of_topic,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from confluent_kafka import Consumer, Message
    from confluent_kafka.admin import AdminClient

SECONDS_MAX: Final = 5.0
POLL_SECONDS: Final = 0.2
PAGE_BYTES: Final = 1 << 16  # of a fetch for one partition, or one batch if that is larger


def keyless_records(
    admin: "AdminClient", settings: dict[str, Any], topic: str, numbers: "Sequence[int]"
) -> KeylessEstimate:
    """Return an estimate for these partitions of a topic. Raises KafkaException."""
    from confluent_kafka import Consumer

    starts = TopicPosition(is_earliest=True).resolve(admin, topic, numbers, REQUEST_SECONDS)
    ends = TopicPosition().resolve(admin, topic, numbers, REQUEST_SECONDS)
    samples = [_Sample(number, starts[number], ends[number]) for number in numbers]
    deadline = time.monotonic() + SECONDS_MAX
    client = Consumer(reader_settings(settings) | {"max.partition.fetch.bytes": PAGE_BYTES})
    try:
        for page in range(PAGES):
            _read_pages(client, topic, samples[:PARTITIONS_MAX], page, deadline)
    finally:
        client.close()
    rest = sum(sample.offsets for sample in samples[PARTITIONS_MAX:])
    return estimate_of_topic((sample.estimate() for sample in samples[:PARTITIONS_MAX]), rest)


class _Sample:
    """What was read of one partition."""

    def __init__(self, number: int, start: int, end: int) -> None:
        self.number = number
        self.offsets = end - start
        self._start = start
        self._end = end
        self._read_max = 0  # records that are read when the page is
        self._is_small = self.offsets <= PAGES * PAGE_RECORDS  # one page has all
        self._reached_end = self.offsets == 0
        self._read = self._keyless = 0

    def begin(self, page: int) -> int | None:
        """Return the offset at which a page begins; None if there is nothing to read."""
        if self._reached_end or (self._is_small and page > 0):
            return None
        self._read_max = self._read + (self.offsets if self._is_small else PAGE_RECORDS)
        return self._start + page * self.offsets // PAGES

    def add(self, message: "Message") -> None:
        """Count a record."""
        offset = message.offset()
        assert offset is not None
        if offset < self._end and not self.is_page_read:
            self._read += 1
            self._keyless += message.key() is None
        if offset + 1 >= self._end:
            self.end()

    def end(self) -> None:
        """Note that nothing is left to read."""
        self._reached_end = True

    @property
    def is_page_read(self) -> bool:
        """Return whether the page needs no more records."""
        return self._reached_end or self._read >= self._read_max

    def estimate(self) -> KeylessEstimate:
        """Return how many records of the partition have no key."""
        is_exact = self._is_small and self._reached_end
        records = self._read if is_exact else self.offsets
        return KeylessEstimate(records, self._read, self._keyless, is_exact=is_exact)


def _read_pages(
    client: "Consumer", topic: str, samples: "Sequence[_Sample]", page: int, deadline: float
) -> None:
    """Read one page of each partition. Raises KafkaException."""
    from confluent_kafka import KafkaError, KafkaException, TopicPartition

    pending: dict[int | None, _Sample] = {}
    places = []
    for sample in samples:
        offset = sample.begin(page)
        if offset is not None:
            pending[sample.number] = sample
            places.append(TopicPartition(topic, sample.number, offset))
    if places:
        client.assign(places)
    while pending and time.monotonic() < deadline:
        message = client.poll(POLL_SECONDS)
        if message is None:
            continue
        number, error = message.partition(), message.error()
        current = pending.get(number)
        if error is None:
            if current is not None:
                current.add(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            if current is not None:
                current.end()
        elif error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
            raise KafkaException(error)
        if current is not None and current.is_page_read:
            del pending[number]
            client.incremental_unassign([TopicPartition(topic, current.number)])
