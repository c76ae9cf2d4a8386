"""Failed data directories: what goes offline, and how often the log names it."""

from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from broker.damage.failed_directories import FailedDirectories
from broker.topics.topics import Topics
from storage.errors import LogDirectoryError, PartitionFolderError
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.storage.log_managers import ONE, two_disks
from tests.support.storage.memory_env import MemoryEnv


class Reported:
    """The partitions that went offline."""

    def __init__(self, manager: LogManager) -> None:
        self.lost: list[TopicPartition] = []
        self.directories = FailedDirectories(
            manager.table, Topics(), went_offline=self._went_offline
        )

    def _went_offline(self, lost: Sequence[TopicPartition], reason: str) -> None:
        self.lost.extend(lost)


@pytest.fixture
def manager() -> LogManager:
    return two_disks(MemoryEnv(seed=1))


def partitions_in(manager: LogManager, directory: str) -> set[TopicPartition]:
    return {
        partition
        for partition, log in manager.table.logs.items()
        if log.directory.startswith(f"{directory}/")
    }


def test_a_directory_goes_offline_with_its_partitions_and_is_logged_once(
    manager: LogManager,
) -> None:
    expected = partitions_in(manager, ONE)
    reported = Reported(manager)
    with capture_logs() as lines:
        for _ in range(2):
            reported.directories.fail(LogDirectoryError(ONE, "gone"))
    assert expected
    assert set(reported.lost) == expected
    assert [(line["event"], line["partitions"]) for line in lines] == [
        ("data directory went offline", len(expected))
    ]


def test_later_reports_of_a_directory_take_nothing_offline_again(manager: LogManager) -> None:
    expected = partitions_in(manager, ONE)
    reported = Reported(manager)
    for _ in range(3):
        reported.directories.fail(LogDirectoryError(ONE, "gone"))
    assert sorted(reported.lost) == sorted(expected)


def test_a_directory_that_the_start_logged_is_not_logged_again(manager: LogManager) -> None:
    reported = Reported(manager)
    reported.directories.note_logged([ONE])
    with capture_logs() as lines:
        reported.directories.fail(LogDirectoryError(ONE, "gone"))
    assert lines == []


def test_a_failed_folder_takes_its_partition_offline_alone(manager: LogManager) -> None:
    partition, log = next(iter(manager.table.logs.items()))
    reported = Reported(manager)
    with capture_logs() as lines:
        for _ in range(2):
            reported.directories.fail(PartitionFolderError(log.directory, "missing"))
    assert reported.lost == [partition]
    assert [(line["event"], line["partition"]) for line in lines] == [
        ("partition went offline", str(partition))
    ]
