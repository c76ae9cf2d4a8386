"""Clean requests: partitions that an operator asked to clean regardless of their dirty ratio.

A request names an end offset and stays until everything below that offset is clean. It survives
failed attempts, pauses and any number of jobs. It ends when the operator aborts it, when the
partition is deleted or re-created, or when the topic is no longer compacted. Requests are kept in
memory only: a restart drops them.
"""

from dataclasses import dataclass

from cleaner.host import LogFacts
from cleaner.planning.dirty_section import DirtySection
from storage.model import TopicPartition


@dataclass(frozen=True, slots=True)
class CleanRequest:
    """Clean everything below `end_offset` of the log with this `topic_id`."""

    end_offset: int
    topic_id: bytes


class CleanRequests:
    """The pending clean request of each partition."""

    def __init__(self) -> None:
        self._requests: dict[TopicPartition, CleanRequest] = {}

    def add(self, facts: LogFacts, end_offset: int) -> None:
        """Request a clean up to `end_offset`; keep an earlier request that reaches further."""
        before = self.pending(facts)
        if before is None or before.end_offset < end_offset:
            self._requests[facts.partition] = CleanRequest(end_offset, facts.topic_id)

    def cancel(self, partition: TopicPartition) -> bool:
        """Drop the request and return whether there was one."""
        return self._requests.pop(partition, None) is not None

    def pending(self, facts: LogFacts) -> CleanRequest | None:
        """Return the request that still applies to this log, if any."""
        request = self._requests.get(facts.partition)
        if request is None or request.topic_id != facts.topic_id or not facts.config.compacts:
            return None
        return request if request.end_offset <= facts.log_end_offset else None  # truncated

    def discard_completed(self, facts: LogFacts, section: DirtySection | None) -> None:
        """Drop the request if its range is clean or it was made for another log."""
        request = self.pending(facts)
        if request is None:
            self._requests.pop(facts.partition, None)
        elif section is not None and is_clean_below(section, request.end_offset):
            del self._requests[facts.partition]

    def cleaned_below(self, partition: TopicPartition, clean_below: int) -> None:
        """Drop the request if a job has cleaned its range."""
        request = self._requests.get(partition)
        if request is not None and request.end_offset <= clean_below:
            del self._requests[partition]

    def keep_only(self, existing: frozenset[TopicPartition]) -> None:
        """Drop the requests of partitions that were deleted."""
        for partition in self._requests.keys() - existing:
            del self._requests[partition]


def is_clean_below(section: DirtySection, end_offset: int) -> bool:
    """Return whether nothing below the offset is dirty, apart from damaged segments."""
    if section.first_dirty_offset >= end_offset:
        return True
    return section.dirty_bytes == 0 and section.end_offset >= end_offset
