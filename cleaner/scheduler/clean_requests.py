"""What operators asked to be cleaned, whatever its ratio: the one owner of these wishes.

A wish has an end offset, and lasts until everything below it is clean, over as many jobs and failed
attempts as that takes, and over pauses. An operator's abort withdraws it; so does what makes it
meaningless: another log in its place, another policy, the end of the partition. It is lost with the
process.
"""

from dataclasses import dataclass

from cleaner.host import LogFacts
from cleaner.planning.dirty_section import DirtySection
from storage.model import TopicPartition


@dataclass(frozen=True, slots=True)
class CleanRequest:
    """To have everything below `end_offset` clean, of this log and no other."""

    end_offset: int
    topic_id: bytes


class CleanRequests:
    """Partition -> wish."""

    def __init__(self) -> None:
        self._requests: dict[TopicPartition, CleanRequest] = {}

    def add(self, facts: LogFacts, end_offset: int) -> None:
        """Have it clean up to there; an earlier wish that goes further stays."""
        before = self.pending(facts)
        if before is None or before.end_offset < end_offset:
            self._requests[facts.partition] = CleanRequest(end_offset, facts.topic_id)

    def cancel(self, partition: TopicPartition) -> bool:
        """An operator wants it no more; whether there was one."""
        return self._requests.pop(partition, None) is not None

    def pending(self, facts: LogFacts) -> CleanRequest | None:
        """The wish for this log."""
        request = self._requests.get(facts.partition)
        if request is None or request.topic_id != facts.topic_id or not facts.config.compacts:
            return None
        return request if request.end_offset <= facts.log_end_offset else None  # it was cut back

    def discard_completed(self, facts: LogFacts, section: DirtySection | None) -> None:
        """Forget the wish if it is fulfilled, or was for another log. `section`: as found now."""
        request = self.pending(facts)
        if request is None:
            self._requests.pop(facts.partition, None)
        elif section is not None and is_clean_below(section, request.end_offset):
            del self._requests[facts.partition]

    def cleaned_below(self, partition: TopicPartition, clean_below: int) -> None:
        """A job is done: everything below the offset is clean."""
        request = self._requests.get(partition)
        if request is not None and request.end_offset <= clean_below:
            del self._requests[partition]

    def keep_only(self, seen: frozenset[TopicPartition]) -> None:
        """Forget those for partitions that exist no more."""
        for partition in self._requests.keys() - seen:
            del self._requests[partition]


def is_clean_below(section: DirtySection, end_offset: int) -> bool:
    """Whether nothing below the offset is dirty, but for what is damaged and stays as it is."""
    if section.first_dirty_offset >= end_offset:
        return True
    return section.dirty_bytes == 0 and section.end_offset >= end_offset
