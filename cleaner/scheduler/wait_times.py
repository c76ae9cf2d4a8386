"""How long candidates wait: since when for a worker, and until when for the limit of their topic.

A wait begins with the scan that first finds the partition worth cleaning. It continues while the
broker pauses the partition, so that a partition that is often paused keeps its place, and while its
topic rests. It ends when a job starts, whatever its result, or when there is nothing to clean any
more. The head start of a partition begins after the start of its last job, and not before the first
scan that finds it. So a topic that is deleted and created again has no advantage, neither by its
waiting time nor in the order of the topics. All this is kept in memory only: after a restart every
candidate waits since the first scan, and no topic rests.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cleaner.planning.findings import Finding, Reason, Value
from cleaner.planning.plan import Verdict
from storage.model import TopicPartition

# A partition that only these findings keep from a worker waits for one.
_WAITING: Final = frozenset({Reason.OFFLOADED, Reason.TOPIC_LIMIT})


class WaitingTimes:
    """The start of each wait, in monotonic milliseconds by partition."""

    def __init__(self) -> None:
        self._since_ms: dict[TopicPartition, int] = {}
        self._earliest_ms: dict[TopicPartition, int] = {}
        self._topics_ms: dict[str, int] = {}

    def observe(self, verdict: Verdict, now_ms: int) -> int | None:
        """Record a scan's result; return since when the partition waits, None if it does not."""
        blocking = {finding.reason for finding in verdict.findings if finding.blocks}
        self._earliest_ms.setdefault(verdict.partition, now_ms)
        self._topics_ms.setdefault(verdict.partition.topic, now_ms)
        if Reason.IN_PROGRESS in blocking:
            self._earliest_ms[verdict.partition] = now_ms + 1  # after the waits that have begun
        if blocking <= _WAITING:
            return self._since_ms.setdefault(verdict.partition, now_ms)
        if blocking != {Reason.PAUSED_BY_BROKER}:
            self._since_ms.pop(verdict.partition, None)
        return self._since_ms.get(verdict.partition)

    def since_ms(self, partition: TopicPartition) -> int | None:
        """Return since when the partition waits."""
        return self._since_ms.get(partition)

    def earliest_ms(self, partition: TopicPartition) -> int | None:
        """Return how far back the head start of the partition may reach; None if not scanned."""
        return self._earliest_ms.get(partition)

    @property
    def topics_ms(self) -> Mapping[str, int]:
        """Return when the last job of each topic started, or the first scan that found it."""
        return self._topics_ms

    def started(self, partition: TopicPartition, now_ms: int) -> None:
        """End the wait of a partition whose job started."""
        self._since_ms.pop(partition, None)
        self._earliest_ms[partition] = self._topics_ms[partition.topic] = now_ms + 1

    def keep_only(
        self, partitions: frozenset[TopicPartition], topics: frozenset[str]
    ) -> Iterator[None]:
        """Drop the waits of deleted partitions, in steps between which other tasks may run."""
        for times in (self._since_ms, self._earliest_ms):
            for partition in times.keys() - partitions:
                del times[partition]
            yield
        for topic in self._topics_ms.keys() - topics:
            del self._topics_ms[topic]
        yield


@dataclass(slots=True)
class _LimitedClean:
    """The last clean of a topic. `moved_bytes` is None while it runs."""

    started_ms: int  # monotonic
    moved_bytes: int | None = None


class TopicRests:
    """The rests of topics with a rate limit (`varve.cleaner.io.max.bytes.per.second`).

    The cleans of such a topic run one after another, each as fast as those of other topics. After
    one, the topic rests until what it read and wrote since its start is within the limit. So over
    any time the topic moves its rate and the bytes of one clean at most, and no worker waits for
    the limit. Requested cleans do not wait and do not count.
    """

    def __init__(self) -> None:
        self._last: dict[bytes, _LimitedClean] = {}  # by topic id

    def find_rest(self, topic_id: bytes, verdict: Verdict, now_ms: int) -> Finding | None:
        """Return the finding that keeps a candidate from starting now; None if there is none."""
        rate, last = verdict.bytes_per_second_max, self._last.get(topic_id)
        if rate is None or last is None or not (verdict.is_limited and verdict.to_clean):
            return None
        values: list[tuple[str, Value]] = [("bytes_per_second", rate)]
        if last.moved_bytes is not None:
            rest_ms = -(-1000 * last.moved_bytes // rate)
            wait_ms = last.started_ms + rest_ms - now_ms
            if wait_ms <= 0:
                return None
            values.append(("wait_ms", wait_ms))
        return Finding(Reason.TOPIC_LIMIT, True, tuple(values))

    def started(self, topic_id: bytes, now_ms: int) -> None:
        """Note that a clean of the topic starts."""
        self._last[topic_id] = _LimitedClean(now_ms)

    def ended(self, topic_id: bytes, moved_bytes: int) -> None:
        """Note the end of the clean, whatever its result, and the bytes that it read and wrote."""
        if topic_id in self._last:
            self._last[topic_id].moved_bytes = moved_bytes

    def keep_only(self, limited: Collection[bytes]) -> None:
        """Forget topics that were deleted or have no limit any more."""
        for topic_id in self._last.keys() - limited:
            del self._last[topic_id]
