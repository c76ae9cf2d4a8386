"""One partition of a compacted view, and the version that it serves."""

from broker.counters import TopicStats
from broker.topics.data_wait import DataWait
from broker.topics.partition import Partition
from config.topics.names import view_name
from storage.errors import InvalidViewError
from storage.model import TopicPartition
from storage.view.ledger import Ledger
from storage.view.view_log import CompactedViewLog


class ViewPartition:
    """One partition of a view, read through `log`; the rest comes from the topic's partition."""

    def __init__(self, base: Partition, stats: TopicStats) -> None:
        self.base = base
        self.partition = TopicPartition(view_name(base.partition.topic), base.partition.partition)
        self.log = CompactedViewLog(base.log)
        self.stats = stats
        self.is_opening = False  # a thread reads the version on disk for the first time
        self.is_outdated = False  # the files changed while it read

    def add_waiter(self, waiter: DataWait) -> None:
        """Like Partition.add_waiter: the readable end is the same."""
        self.base.add_waiter(waiter)

    def remove_waiter(self, waiter: DataWait) -> None:
        """Like Partition.remove_waiter."""
        self.base.remove_waiter(waiter)

    def begin_opening(self) -> None:
        """Serve nothing until the version on disk is read."""
        self.is_opening, self.log.is_known = True, False
        self.log.failure = InvalidViewError(self.log.directory, "it is being opened")

    def distrust(self) -> None:
        """Have the version on disk read again, because it may have changed."""
        self.is_outdated, self.log.is_known = self.is_opening, False

    def change_over(
        self,
        ledger: Ledger | None,
        failure: InvalidViewError | None = None,
        *,
        is_known: bool = True,
    ) -> None:
        """Serve this version, which was read from the disk; readers of another one move to it."""
        if self.log.ledger is not None:
            self.log.ledger.is_revoked = True
        self.is_opening, self.is_outdated = False, False
        self.log.ledger, self.log.failure, self.log.is_known = ledger, failure, is_known
