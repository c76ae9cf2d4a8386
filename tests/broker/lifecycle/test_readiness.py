"""Whether the broker is ready and healthy, decided without a server; see http/test_readiness.py."""

from collections.abc import Iterator

import pytest

from broker.event_loop.directory_threads import DirectoryThreads
from broker.lifecycle.readiness import UNSERVED, UNSERVED_LISTED_MAX, Readiness
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.storage.log_managers import ONE, TWO, opened
from tests.support.storage.memory_env import MemoryEnv


class CountedItems(dict[TopicPartition, str]):
    """Counts the entries that are read."""

    read = 0

    def items(self) -> Iterator[tuple[TopicPartition, str]]:  # type: ignore[override]
        for item in super().items():
            self.read += 1
            yield item


@pytest.fixture
def manager() -> LogManager:
    manager, _ = opened(MemoryEnv(seed=1), ONE, TWO)
    return manager


@pytest.fixture
def readiness(manager: LogManager) -> Readiness:
    env = MemoryEnv(seed=1)
    threads = DirectoryThreads(env.monotonic)
    return Readiness(manager, threads, failures=())


def offline(count: int) -> CountedItems:
    return CountedItems((TopicPartition("orders", index), "damaged") for index in range(count))


def test_a_broker_is_ready_between_its_start_and_its_stop(readiness: Readiness) -> None:
    assert readiness.not_ready_because() == "starting"
    readiness.begin_serving()
    assert readiness.not_ready_because() is None
    readiness.begin_stopping()
    assert readiness.not_ready_because() == "stopping"
    assert (readiness.is_serving, readiness.is_stopping) == (False, True)


def test_a_stop_during_the_start_is_not_undone_by_its_end(readiness: Readiness) -> None:
    readiness.begin_stopping()
    readiness.begin_serving()
    assert not readiness.is_serving
    assert readiness.not_ready_because() == "stopping"


def test_a_probe_reads_no_more_partitions_than_it_names(
    readiness: Readiness, manager: LogManager
) -> None:
    manager.table.offline = partitions = offline(10_000)
    readiness.begin_serving()
    lines = (readiness.not_ready_because() or "").splitlines()
    assert len(lines) == UNSERVED_LISTED_MAX + 1
    assert lines[0] == "partition orders-0 is not served: damaged"
    assert lines[-1] == f"{10_000 - UNSERVED_LISTED_MAX} more partitions are not served"
    assert partitions.read == UNSERVED_LISTED_MAX


def test_without_names_a_reason_tells_no_topic(readiness: Readiness, manager: LogManager) -> None:
    manager.table.offline = offline(1)
    readiness.begin_serving()
    assert readiness.not_ready_because(with_names=False) == UNSERVED


def test_a_broker_is_healthy_as_long_as_one_directory_is_online(
    readiness: Readiness, manager: LogManager
) -> None:
    readiness.begin_serving()
    manager.table.fail_directory(ONE, "gone")
    assert readiness.unhealthy_because() is None
    assert readiness.not_ready_because() == f"data directory {ONE} is offline: gone"
    manager.table.fail_directory(TWO, "gone, too")
    assert readiness.unhealthy_because() == "no data directory is online"
