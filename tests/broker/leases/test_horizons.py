"""A tombstone that was compacted outside stays for delete.retention.ms after its publication."""

import pytest

from broker.app import Broker
from cleaner.host import LogFacts
from cleaner.job import NO_HORIZON
from cleaner.planning.remote_plan import VERIFY_MS_MIN
from cleaner.remote_compaction import AdoptOutcome
from config.settings import SparkSettings
from storage.format.batch import read_header
from tests.support.broker.leases import (
    ORDERS,
    adopted,
    carried_out,
    fill,
    leasing_broker,
    opened,
    served,
)
from tests.support.storage.logs import batch_of, read_records
from tests.support.storage.memory_env import MemoryEnv

RETENTION_MS = 60_000
WORK_MS = SparkSettings().timeout_ms + VERIFY_MS_MIN
SHORT = {"delete.retention.ms": str(RETENTION_MS)}


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=41)


def delete_key(env: MemoryEnv, broker: Broker, key: bytes) -> None:
    partition = served(broker)
    batch = batch_of(None, key=key, timestamps=[env.wall_ms()])
    partition.append(memoryview(batch), read_header(batch), env.wall_ms())
    partition.log.roll(env.wall_ms())


def facts_of(broker: Broker) -> LogFacts:
    facts = broker.cleaning.facts_of(ORDERS)
    assert facts is not None
    return facts


def horizon_of(env: MemoryEnv, broker: Broker) -> int:
    """The one delete horizon in the log."""
    facts = facts_of(broker)
    cleaner_state = broker.pool.state_store.state_of(facts, env.wall_ms())
    (horizon,) = {cleaner_state.horizon(segment) for segment in facts.segments[:-1]} - {NO_HORIZON}
    return horizon


def has_expired(broker: Broker) -> bool:
    verdict = broker.pool.scanner.assess(facts_of(broker))
    assert verdict is not None
    return verdict.expired is not None


async def test_a_tombstone_stays_for_its_retention_after_the_adoption(env: MemoryEnv) -> None:
    async with leasing_broker(env, keys=SHORT) as broker:
        fill(env, broker, 2)
        delete_key(env, broker, b"k0")
        plan = await opened(broker, ttl_seconds=3600)
        made = carried_out(env, plan)
        env.advance_ms(10 * RETENTION_MS)  # the work takes longer than the retention
        made.leave_manifest(env)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED
        published_ms = env.wall_ms()
        assert (b"k0", None) in [(r.key, r.value) for r in read_records(served(broker).log)]
        assert horizon_of(env, broker) >= published_ms + RETENTION_MS
        assert not has_expired(broker)
        env.advance_ms(WORK_MS + RETENTION_MS)
        assert has_expired(broker)


async def test_what_took_longer_than_its_horizons_allow_is_refused(env: MemoryEnv) -> None:
    async with leasing_broker(env, keys=SHORT) as broker:
        partition = fill(env, broker, 2)
        delete_key(env, broker, b"k0")
        before = [(r.key, r.value) for r in read_records(partition.log)]
        plan = await opened(broker, ttl_seconds=3600)
        made = carried_out(env, plan)
        env.advance_ms(WORK_MS)
        made.leave_manifest(env)
        result = await adopted(broker, plan)
        assert result.outcome is AdoptOutcome.STALE
        assert "took too long" in result.reason
        assert [(r.key, r.value) for r in read_records(partition.log)] == before
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED


async def test_where_nothing_is_promised_work_outside_may_take_any_time(env: MemoryEnv) -> None:
    async with leasing_broker(env, keys={"delete.retention.ms": "0"}) as broker:
        fill(env, broker, 2)
        delete_key(env, broker, b"k0")
        plan = await opened(broker, ttl_seconds=3600)
        made = carried_out(env, plan)
        env.advance_ms(100 * WORK_MS)
        made.leave_manifest(env)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED
