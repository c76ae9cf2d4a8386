"""How many partitions a broker may have, and how many of them each client may create.

Rules
- `limits.partitions` counts the partitions of all topics, with those that are being created.
- A client whose permission is on topics has a share of them (broker/quotas/shares.py). With the
  permission on the cluster, it has no such limit.
"""

from collections.abc import Callable, Hashable, Iterable

from broker.event_loop.loop_turns import Turns
from broker.quotas.shares import Shares
from broker.topics.effective_settings import EffectiveSettings
from broker.topics.topics import TopicError
from config.settings import PARTITIONS_PER_TOPIC_MAX
from protocol.errors import ErrorCode
from storage.model import TopicPartition


class PartitionLimits:
    """Checks the number of partitions that a client asks for. None is a client without a share."""

    def __init__(self, settings: EffectiveSettings, count_partitions: Callable[[], int]) -> None:
        """`count_partitions` returns how many there are, with those that are being created."""
        self._settings = settings
        self._count_partitions = count_partitions
        self._shares = Shares(settings.file.limits.partitions)

    @property
    def room(self) -> int:
        """Return how many more partitions the broker may have."""
        return self._settings.file.limits.partitions - self._count_partitions()

    def check(self, partitions: int, added: int, creator: Hashable, pending: int = 0) -> None:
        """Refuse a topic of so many partitions, of which so many are new. Raises TopicError.

        `pending`: of the topics that the same change creates before it; they do not count yet.
        """
        if not (partitions == -1 or 1 <= partitions <= PARTITIONS_PER_TOPIC_MAX):
            raise TopicError(
                ErrorCode.INVALID_PARTITIONS,
                f"a topic has 1 to {PARTITIONS_PER_TOPIC_MAX} partitions, not {partitions}",
            )
        present = self._count_partitions() + pending
        limit = self._settings.file.limits.partitions
        if present + added > limit:
            raise TopicError(
                ErrorCode.INVALID_PARTITIONS,
                f"this broker has {present} partitions; limits.partitions allows {limit}",
            )
        self._shares.limit = limit
        if not self._shares.admits(creator, present, added):
            raise TopicError(
                ErrorCode.POLICY_VIOLATION,
                f"{creator} would have more partitions than are left for others (limits.partitions "
                f"is {limit}); CREATE and ALTER on the cluster permit more",
            )

    def add(self, topic: str, indexes: Iterable[int], creator: Hashable) -> None:
        """Count partitions for the client that creates them."""
        for index in indexes:
            self._shares.add(f"{topic}-{index}", creator)

    def creator(self, partition: TopicPartition) -> Hashable | None:
        """Return the client for which a partition counts; None if it counts for nobody."""
        return self._shares.creator(str(partition))

    async def remove(self, topic: str, indexes: Iterable[int]) -> None:
        """Count partitions that are gone, or were not created, for nobody any more."""
        turns = Turns()
        for index in indexes:
            self._shares.remove(f"{topic}-{index}")
            await turns.take()
