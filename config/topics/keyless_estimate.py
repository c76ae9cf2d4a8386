"""How many records of a topic have no key, from all of them or from a sample.

As in Kafka, a compacted topic accepts no record without a key, and its cleaner removes those that
are there already. The broker and the commands count them before a topic becomes compacted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PAGES: Final = 8  # of a partition, evenly spread over its offsets
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


def estimate_of_topic(partitions: Iterable[KeylessEstimate], rest: int) -> KeylessEstimate:
    """Return the estimate of a topic; `rest` are the offsets of partitions that were not read."""
    estimates = tuple(partitions)
    return KeylessEstimate(
        records=sum(estimate.records for estimate in estimates) + rest,
        read=sum(estimate.read for estimate in estimates),
        keyless=sum(estimate.keyless for estimate in estimates),
        is_exact=all(estimate.is_exact for estimate in estimates) and not rest,
    )
