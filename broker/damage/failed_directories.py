"""Takes failed data directories and partitions offline, in the storage and in the broker.

Rules
- Each part that gets a LogDirectoryError reports it here, every time. Storage decides what an
  OSError means: LogState and LogDirectory (storage/log/log_state.py, storage/directory), and
  storage/log/flush.py for a failed sync.
- The first report takes the partitions offline. A later one takes only partitions that came after
  it, such as one that was being created.
- The log names each directory once, with the number of partitions that went offline with it.
"""

from collections.abc import Callable, Iterable, Sequence

import structlog

from broker.topics.topics import Topics
from storage.errors import LogDirectoryError, PartitionFolderError
from storage.manager.partition_table import PartitionTable
from storage.model import TopicPartition

logger = structlog.get_logger("broker.damage")

WentOffline = Callable[[Sequence[TopicPartition], str], None]  # the partitions, and the reason


class FailedDirectories:
    """The data directories whose failure was reported."""

    def __init__(self, table: PartitionTable, topics: Topics, *, went_offline: WentOffline) -> None:
        """`went_offline` is called with the partitions that `topics` no longer serves."""
        self._table = table
        self._topics = topics
        self._went_offline = went_offline
        self._logged: set[str] = set()
        self._offline: dict[str, set[TopicPartition]] = {}  # by directory

    def note_logged(self, directories: Iterable[str]) -> None:
        """Record directories whose failure is in the log already."""
        self._logged.update(directories)

    def fail(self, error: LogDirectoryError) -> None:
        """Take a data directory, or one partition of it, offline and log it once."""
        lost = self._table.fail(error)
        if isinstance(error, PartitionFolderError):
            for partition in lost:
                logger.error(
                    "partition went offline", partition=str(partition), reason=error.reason
                )
        else:
            offline = self._offline.setdefault(error.directory, set())
            lost = tuple(partition for partition in lost if partition not in offline)
            offline.update(lost)
            if error.directory not in self._logged:
                self._logged.add(error.directory)
                logger.error(
                    "data directory went offline",
                    directory=error.directory,
                    reason=error.reason,
                    partitions=len(lost),
                )
        if not lost:
            return
        self._topics.take_offline(lost, error.reason)
        self._went_offline(lost, error.reason)
