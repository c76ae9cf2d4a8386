"""Estimate how many records without a key a clean removes from a topic that becomes compacted.

As in Kafka, a compacted topic accepts no record without a key, and its cleaner removes those that
are there already.

Rules
- A few pages of each partition are read, evenly spread over its offsets. If they cover all of it,
  the numbers are exact. `varve verify` counts all records of closed segments.
- A partition that cannot be read is left out.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from broker.topics.partition import Partition
from broker.topics.record_reader import RecordReader
from broker.topics.record_scan import RecordPage, ScanRequest
from broker.topics.topics import Topic
from storage.errors import StorageError

PAGES: Final = 8  # of a partition
PAGE_RECORDS: Final = 64
PARTITIONS_MAX: Final = 16  # of a topic that are read; the others count as these


@dataclass(frozen=True, slots=True)
class KeylessEstimate:
    """How many of some records have no key."""

    records: int  # at most: the number of offsets, unless all records were read
    read: int
    keyless: int  # of those that were read
    is_exact: bool

    @property
    def total(self) -> int:
        """Return the number of records without a key."""
        return self.records * self.keyless // self.read if self.read else 0

    def warning(self, name: str) -> str:
        """Return a sentence on what happens to them; empty if there are none."""
        if not self.keyless:
            return ""
        count = f"{self.total:,} of {self.records:,}"
        if not self.is_exact:
            count = f"About {count} (from a sample of {self.read:,})"
        return (
            f"{count} records of {name} have no key. A clean of a compacted topic removes them, "
            "and producers can write no others. Copy them to another topic first if you need them"
        )


NO_RECORDS: Final = KeylessEstimate(0, 0, 0, is_exact=True)


class KeylessSampler:
    """Reads samples of topics."""

    def __init__(self, reader: RecordReader) -> None:
        self._reader = reader

    async def of_topic(self, topic: Topic, client: Hashable) -> KeylessEstimate:
        """Return an estimate for the served partitions of a topic."""
        partitions = [topic.partitions[number] for number in sorted(topic.partitions)]
        estimates = [
            await self.of_partition(partition, client) for partition in partitions[:PARTITIONS_MAX]
        ]
        rest = sum(map(_offsets, partitions[PARTITIONS_MAX:]))
        return KeylessEstimate(
            records=sum(estimate.records for estimate in estimates) + rest,
            read=sum(estimate.read for estimate in estimates),
            keyless=sum(estimate.keyless for estimate in estimates),
            is_exact=all(estimate.is_exact for estimate in estimates) and not rest,
        )

    async def of_partition(self, partition: Partition, client: Hashable) -> KeylessEstimate:
        """Return an estimate for one partition."""
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
                if offset >= start + count:
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
