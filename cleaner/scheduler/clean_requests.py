"""Clean requests: partitions that an operator asked to clean regardless of their dirty ratio.

A request names an end offset and stays until everything below that offset is clean. It survives
failed attempts, pauses and any number of jobs. It ends when the operator aborts it, when the
partition is deleted or re-created, or when the topic is no longer compacted. Requests are kept in
memory only: a restart drops them.

A request that names victims comes from an erasure (broker/erasure). One job that rewrites victims
fulfils it: then the erasure searches the files, and may request more. Such requests are kept apart
from those of operators, which ask for a clean of the whole log and come first.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from cleaner.host import LogFacts
from cleaner.planning.dirty_section import DirtySection
from cleaner.planning.scheduling_order import Requester
from storage.model import TopicPartition


@dataclass(frozen=True, slots=True)
class CleanRequest:
    """Clean everything below `end_offset` of the log with this `topic_id`.

    With `victims`, only segments with these base offsets have to be rewritten. The cleans that one
    user requested have a share of the starts (scheduling_order.py).
    """

    end_offset: int
    topic_id: bytes
    requested_by: Hashable
    victims: tuple[int, ...] = ()


class CleanRequests:
    """The pending clean request of each partition."""

    def __init__(self) -> None:
        self._requests: dict[TopicPartition, CleanRequest] = {}
        self._erasures: dict[TopicPartition, CleanRequest] = {}

    def add(self, facts: LogFacts, end_offset: int, requested_by: Hashable) -> None:
        """Request a clean up to `end_offset`; keep an earlier request that reaches further."""
        before = _applying(self._requests, facts)
        if before is None or before.end_offset < end_offset:
            request = CleanRequest(end_offset, facts.topic_id, requested_by)
            self._requests[facts.partition] = request

    def add_erasure(
        self,
        facts: LogFacts,
        end_offset: int,
        victims: tuple[int, ...],
        requested_by: Hashable,
    ) -> CleanRequest:
        """Request that these segments are rewritten; replaces an earlier request to erase."""
        assert victims
        request = CleanRequest(end_offset, facts.topic_id, requested_by, victims)
        self._erasures[facts.partition] = request
        return request

    def cancel(self, partition: TopicPartition) -> bool:
        """Drop the requests and return whether there was one."""
        had_erasure = self._erasures.pop(partition, None) is not None
        return self._requests.pop(partition, None) is not None or had_erasure

    def erased(self, partition: TopicPartition) -> None:
        """Drop the request to erase: a job has rewritten victims."""
        self._erasures.pop(partition, None)

    def cancel_erasure(self, partition: TopicPartition, request: CleanRequest) -> None:
        """Drop a request to erase; one that replaced it stays."""
        if self._erasures.get(partition) is request:
            del self._erasures[partition]

    def is_erasing(self, partition: TopicPartition) -> bool:
        """Return whether a request to erase is pending."""
        return partition in self._erasures

    def pending(self, facts: LogFacts) -> CleanRequest | None:
        """Return the request that still applies to this log, if any: an operator's first."""
        return _applying(self._requests, facts) or _applying(self._erasures, facts)

    def requested_by(self, facts: LogFacts) -> Hashable:
        """Return who requested the next clean of this log: Requester.NOBODY if none is pending."""
        request = self.pending(facts)
        return Requester.NOBODY if request is None else request.requested_by

    def discard_completed(self, facts: LogFacts, section: DirtySection | None) -> None:
        """Drop the request if its range is clean or it was made for another log."""
        for requests in (self._requests, self._erasures):
            request = _applying(requests, facts)
            is_done = request is None or (
                section is not None and is_clean_below(section, request.end_offset)
            )
            if is_done:
                requests.pop(facts.partition, None)

    def cleaned_below(self, partition: TopicPartition, clean_below: int) -> None:
        """Drop the requests whose range a job has cleaned."""
        for requests in (self._requests, self._erasures):
            request = requests.get(partition)
            if request is not None and request.end_offset <= clean_below:
                del requests[partition]

    def keep_only(self, existing: frozenset[TopicPartition]) -> None:
        """Drop the requests of partitions that were deleted."""
        for requests in (self._requests, self._erasures):
            for partition in requests.keys() - existing:
                del requests[partition]


def _applying(requests: dict[TopicPartition, CleanRequest], facts: LogFacts) -> CleanRequest | None:
    request = requests.get(facts.partition)
    if request is None or request.topic_id != facts.topic_id or not facts.config.compacts:
        return None
    return request if request.end_offset <= facts.log_end_offset else None  # truncated


def is_clean_below(section: DirtySection, end_offset: int) -> bool:
    """Return whether nothing below the offset is dirty, apart from damaged segments."""
    if section.first_dirty_offset >= end_offset:
        return True
    return section.dirty_bytes == 0 and section.end_offset >= end_offset
