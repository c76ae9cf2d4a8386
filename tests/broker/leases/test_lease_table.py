"""Which remote compactions exist, and which partitions they lease; without a broker."""

import pytest

from broker.counters import BrokerStats
from broker.event_loop.directory_threads import DirectoryThreads
from broker.leases.lease_table import ENDED_MAX, LeaseTable
from broker.leases.model import LeaseError, RemoteCompaction
from broker.topics.topics import Topics
from cleaner.remote_compaction import Purpose
from storage.model import TopicPartition
from tests.support.storage.memory_env import MemoryEnv

FIRST, SECOND = TopicPartition("orders", 0), TopicPartition("orders", 1)


def compaction(compaction_id: str) -> RemoteCompaction:
    return RemoteCompaction(
        compaction_id=compaction_id,
        topic="orders",
        purpose=Purpose.COMPACT,
        created_ms=0,
        ttl_seconds=60,
        token_digest=b"",
        deadline=60.0,
        expires_ms=60_000,
    )


@pytest.fixture
def table() -> LeaseTable:
    env = MemoryEnv(seed=1)
    return LeaseTable(env, Topics(), DirectoryThreads(env.monotonic), BrokerStats())


def test_a_partition_has_one_compacting_lease_at_most(table: LeaseTable) -> None:
    table.add(compaction("first"))
    table.reserve([FIRST], "first")
    with pytest.raises(LeaseError) as refused:
        table.reserve([SECOND, FIRST], "second")
    assert (refused.value.status, "end the lease with" in refused.value.reason) == (409, True)
    assert (table.holder(FIRST), table.holder(SECOND)) == ("first", None)


def test_only_its_holder_releases_a_partition(table: LeaseTable) -> None:
    table.reserve([FIRST], "first")
    table.release(FIRST, "second")
    assert table.holder(FIRST) == "first"
    table.release(FIRST, "first")
    assert table.holder(FIRST) is None


def test_a_number_of_ended_compactions_stays_listed(table: LeaseTable) -> None:
    for number in range(ENDED_MAX + 1):
        table.add_ended(compaction(str(number)))
    assert len(table.all()) == ENDED_MAX
    assert table.alive() == []
    with pytest.raises(LeaseError):
        table.find("0")
    assert table.find(str(ENDED_MAX)).compaction_id == str(ENDED_MAX)
