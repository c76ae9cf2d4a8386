"""The time since which each candidate waits for a worker.

A wait begins with the scan that first finds the partition worth cleaning. It continues while the
broker pauses the partition, so that a partition that is often paused keeps its place. It ends when
a job starts, whatever its result, or when there is nothing to clean any more. Waits are kept in
memory only: after a restart every candidate waits since the first scan.
"""

from collections.abc import Iterable

from cleaner.planning.findings import Reason
from cleaner.planning.plan import Verdict
from storage.model import TopicPartition


class WaitingTimes:
    """The start of each wait, in monotonic milliseconds by partition."""

    def __init__(self) -> None:
        self._since_ms: dict[TopicPartition, int] = {}

    def observe(self, verdict: Verdict, now_ms: int) -> int | None:
        """Record a scan's result; return since when the partition waits, None if it does not."""
        blocking = {finding.reason for finding in verdict.findings if finding.blocks}
        if not blocking or blocking == {Reason.OFFLOADED}:
            return self._since_ms.setdefault(verdict.partition, now_ms)
        if blocking != {Reason.PAUSED_BY_BROKER}:
            self._since_ms.pop(verdict.partition, None)
        return self._since_ms.get(verdict.partition)

    def since_ms(self, partition: TopicPartition) -> int | None:
        """Return since when the partition waits."""
        return self._since_ms.get(partition)

    def started(self, partition: TopicPartition) -> None:
        """End the wait of a partition whose job started."""
        self._since_ms.pop(partition, None)

    def keep_only(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the waits of partitions that were deleted."""
        for partition in self._since_ms.keys() - set(partitions):
            del self._since_ms[partition]
