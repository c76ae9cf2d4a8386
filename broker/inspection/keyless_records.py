"""Estimate how many records without a key a clean removes from a topic that becomes compacted.

As in Kafka, a compacted topic accepts no record without a key, and its cleaner removes those that
are there already.

Rules
- A few pages of each partition are read, evenly spread over its offsets. If they cover all of it,
  the numbers are exact. `varve verify` counts all records of closed segments.
- A partition that cannot be read is left out, as is what is not read within SECONDS_MAX.
- A client of the Kafka protocol cannot be warned in its answer: the broker logs the warning.
  `varve topics alter` looks by itself (admin/kafka/keyless_records.py).
"""

import asyncio
from collections.abc import Callable, Hashable
from typing import Final

import structlog

from broker.inspection.record_reader import RecordReader
from broker.inspection.record_scan import RecordPage, ScanRequest
from broker.topics.partition import Partition
from broker.topics.topics import Topic
from config.topics.keyless_estimate import (
    NO_RECORDS,
    PAGE_RECORDS,
    PAGES,
    PARTITIONS_MAX,
    KeylessEstimate,
    estimate_of_topic,
)
from storage.errors import StorageError

SECONDS_MAX: Final = 2.0  # of all reads for one estimate: somebody waits for the answer
WARNINGS_MAX: Final = 16  # that are being prepared

logger = structlog.get_logger("broker.topics")


class KeylessSampler:
    """Reads samples of topics."""

    def __init__(self, reader: RecordReader, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._reader = reader
        self._clock = clock
        self._warnings: set[asyncio.Task[None]] = set()

    def warn_later(self, topic: Topic) -> None:
        """Log a warning soon if a topic that has become compacted has records without a key."""
        if len(self._warnings) < WARNINGS_MAX:
            task = asyncio.create_task(self._warn(topic), name="keyless-records")
            self._warnings.add(task)
            task.add_done_callback(self._warnings.discard)

    async def stop(self) -> None:
        """Prepare no more warnings."""
        for task in self._warnings:
            task.cancel()
        await self.wait_idle()

    async def wait_idle(self) -> None:
        """Wait until the warnings are logged that are being prepared."""
        await asyncio.gather(*self._warnings, return_exceptions=True)

    async def _warn(self, topic: Topic) -> None:
        estimate = await self.of_topic(topic, self)
        if reason := estimate.warning(topic.name):
            logger.warning(
                "records without key will be removed",
                topic=topic.name,
                records=estimate.total,
                reason=reason,
            )

    async def of_topic(self, topic: Topic, client: Hashable) -> KeylessEstimate:
        """Return an estimate for the served partitions of a topic."""
        partitions = [topic.partitions[number] for number in sorted(topic.partitions)]
        deadline = self._clock() + SECONDS_MAX
        estimates: list[KeylessEstimate] = []
        for partition in partitions[:PARTITIONS_MAX]:
            if self._clock() >= deadline:
                break
            estimates.append(await self._of_partition(partition, client, deadline))
        rest = sum(map(_offsets, partitions[len(estimates) :]))
        return estimate_of_topic(estimates, rest)

    async def of_partition(self, partition: Partition, client: Hashable) -> KeylessEstimate:
        """Return an estimate for one partition."""
        return await self._of_partition(partition, client, self._clock() + SECONDS_MAX)

    async def _of_partition(
        self, partition: Partition, client: Hashable, deadline: float
    ) -> KeylessEstimate:
        log = partition.log
        start, count = log.log_start_offset, _offsets(partition)
        if count == 0:
            return NO_RECORDS
        limit_bytes = log.config.varve_decompressed_batch_bytes
        request = ScanRequest(start + count, PAGE_RECORDS, limit_bytes=limit_bytes)
        is_small = count <= PAGES * PAGE_RECORDS
        pages: list[RecordPage] = []
        offset = start
        try:
            for place in range(PAGES):
                if not is_small:
                    offset = start + place * count // PAGES
                page = await self._reader.read_page(partition, offset, request, client)
                pages.append(page)
                offset = page.next_offset
                if offset >= start + count or self._clock() >= deadline:
                    break
        except (StorageError, OSError):
            pass  # the pages that could be read say enough
        read = sum(len(page.records) for page in pages)
        is_exact = is_small and offset >= start + count and not any(page.gaps for page in pages)
        return KeylessEstimate(
            records=read if is_exact else count,
            read=read,
            keyless=sum(record.record.key is None for page in pages for record in page.records),
            is_exact=is_exact,
        )


def _offsets(partition: Partition) -> int:
    log = partition.log
    return max(0, log.last_stable_offset - log.log_start_offset)
