"""One folder in which nothing can be read takes itself out, and nothing else."""

import errno

import pytest

from storage.errors import InconsistentDirectoryError, OpeningStoppedError
from storage.format import filenames
from storage.manager.log_manager import LogManager
from storage.manager.opening import OpeningProgress
from storage.model import TopicPartition
from tests.support.storage.log_managers import (
    ONE,
    ORDERS,
    TWO,
    config_of,
    drop_topic,
    kafka_folder,
    opened,
    two_disks,
)
from tests.support.storage.logs import SMALL, TOPIC_ID, fill, offsets_in, open_log
from tests.support.storage.memory_env import MemoryEnv, _Fault

ODD = [
    ("exists", errno.EACCES),
    ("read_file", errno.EISDIR),
    ("read_file", errno.EACCES),
    ("listdir", errno.EACCES),
]


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=8)


def make_odd(env: MemoryEnv, folder: str, operation: str, number: int) -> _Fault:
    return env.fail_on(lambda op, path: op == operation and path.startswith(folder), number)


@pytest.mark.parametrize(("operation", "number"), ODD)
def test_an_odd_folder_is_offline_alone_and_comes_back_as_it_was(
    env: MemoryEnv, operation: str, number: int
) -> None:
    two_disks(env).close()
    fault = make_odd(env, f"{TWO}/orders-1", operation, number)
    manager, report = opened(env)
    assert report.offline_directories == {}
    assert list(report.offline) == [ORDERS[1]]
    assert [subject for subject, _ in report.lines()] == ["partition went offline"]
    assert sorted(manager.table.logs) == [ORDERS[0], ORDERS[2], ORDERS[3]]
    manager.close()
    fault.remove()
    again, report = opened(env)
    assert report.offline == {}
    assert offsets_in(again.table.logs[ORDERS[1]]) == [0, 1, 2, 3, 4]


def test_a_file_that_is_a_folder_is_odd(env: MemoryEnv) -> None:
    two_disks(env).close()
    path = f"{ONE}/orders-0/{filenames.PARTITION_METADATA}"
    env.unlink(path)
    env.mkdir(path)
    manager, report = opened(env)
    assert report.offline_directories == {}
    assert path in report.offline[ORDERS[0]]
    assert len(manager.table.logs) == 3


def test_an_error_of_the_device_is_the_directorys(env: MemoryEnv) -> None:
    two_disks(env).close()
    make_odd(env, f"{TWO}/orders-1", "read_file", errno.EIO)
    _, report = opened(env)
    assert list(report.offline_directories) == [TWO]


def test_no_other_folder_takes_the_place_of_an_odd_one(env: MemoryEnv) -> None:
    two_disks(env).close()
    stray = open_log(env, folder=f"{TWO}/orders-0", was_clean=True)
    fill(stray, 3)
    stray.close()
    make_odd(env, f"{ONE}/orders-0", "read_file", errno.EISDIR)
    manager, report = opened(env)
    assert [folder for folder, _ in report.refused] == [f"{TWO}/orders-0"]
    assert list(report.offline) == [ORDERS[0]]
    assert manager.metadata.topics["orders"].partitions[0] != manager.table.directory_id_of(
        ORDERS[1]
    )


@pytest.mark.parametrize(("operation", "number"), ODD)
def test_an_odd_folder_of_an_unknown_topic_is_refused_and_stays_in_the_way(
    env: MemoryEnv, operation: str, number: int
) -> None:
    opened(env, ONE)[0].close()
    kafka_folder(env, "unknown-0", TOPIC_ID)
    make_odd(env, f"{ONE}/unknown-0", operation, number)
    manager, report = opened(env, ONE)
    assert [folder for folder, _ in report.refused] == [f"{ONE}/unknown-0"]
    assert "unknown" not in manager.metadata.topics
    with pytest.raises(InconsistentDirectoryError):
        manager.create(TopicPartition("unknown", 0), bytes(16), SMALL)
    assert manager.table.directories[0].is_online


def test_a_deleted_topic_does_not_come_back_with_an_odd_folder(env: MemoryEnv) -> None:
    manager = two_disks(env)
    env.fail_on(lambda op, path: op == "rename" and "-delete" in path, errno.EIO)
    with pytest.raises(Exception, match="deletion of"):
        drop_topic(manager)
    env = env.kill()
    odd = make_odd(env, f"{ONE}/orders-0", "read_file", errno.EACCES)
    opened(env)[0].close()
    odd.remove()
    manager, report = opened(env)
    assert manager.table.logs == {}
    assert "orders" not in manager.metadata.topics
    assert f"{ONE}/orders-0" in report.removed


def test_opening_may_be_stopped_and_leaves_what_a_kill_would(env: MemoryEnv) -> None:
    two_disks(env)
    env = env.kill()
    manager = LogManager(env, [ONE, TWO])
    manager.lock()
    manager.stop_opening()
    with pytest.raises(OpeningStoppedError):
        manager.load(config_of)
    assert not env.exists(f"{ONE}/{filenames.CLEAN_SHUTDOWN}")
    manager, report = opened(env)
    assert report.offline == {}
    assert all(offsets_in(log) == [0, 1, 2, 3, 4] for log in manager.table.logs.values())
    assert (manager.opening.done, manager.opening.total) == (4, 4)


def test_a_recovery_asks_at_each_batch_whether_to_go_on(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_disks(env)
    requested = 0
    go_on = OpeningProgress.go_on

    def stop_at_the_fourth(opening: OpeningProgress) -> None:
        nonlocal requested
        requested += 1
        opening.is_stopped = requested == 4  # the folder was asked for, then each of its batches
        go_on(opening)

    monkeypatch.setattr(OpeningProgress, "go_on", stop_at_the_fourth)
    with pytest.raises(OpeningStoppedError):
        opened(env.kill())
    assert requested == 4
