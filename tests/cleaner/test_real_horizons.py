"""Real workers on a real log: what leaves by time alone, and what is cleaned around damage."""

import os
from pathlib import Path

import pytest

from cleaner.scheduler.cleaner_pool import CleanerPool
from config.topics.keys import TopicConfig
from storage.format.batch import Record, build_batch, read_header
from tests.cleaner.test_real_cleaning import SETTINGS, T0, Shop, open_shop

pytestmark = pytest.mark.usefixtures("forked_workers")

RETENTION_MS = 300
SHORT = TopicConfig(
    cleanup_policy=("compact",),
    segment_bytes=64 * 1024,
    min_cleanable_dirty_ratio=0.01,
    delete_retention_ms=RETENTION_MS,
)
PATIENT = SETTINGS.model_copy(update={"retry_backoff_ms": 10_000, "retry_backoff_max_ms": 10_000})


def delete(shop: Shop, key: bytes) -> None:
    base = shop.log.log_end_offset
    record = Record(base, shop.env.wall_ms(), key, None, ())
    batch = build_batch([record], base_offset=base)
    shop.log.append(batch, read_header(batch), now_ms=shop.env.wall_ms())
    shop.latest[key] = (base, None)


def damage(path: Path) -> bytes:
    """Overwrite a few bytes in the middle of a file; what it holds then."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4] = b"\xde\xad\xbe\xef"
    path.write_bytes(data)
    return bytes(data)


async def test_tombstones_of_an_idle_topic_leave_after_their_retention_without_new_data(
    tmp_path: Path,
) -> None:
    async with open_shop(tmp_path) as shop:
        shop.log.update_config(SHORT)
        shop.produce(60)
        key = next(iter(shop.latest))
        delete(shop, key)
        await shop.cleaned(shop.roll())
        shop.check()
        await shop.until(lambda: shop.pool.stats.expiries)
        del shop.latest[key]
        shop.check()
        record = shop.pool.history.newest(T0)[0]
        assert (record.expired_only, record.tombstones_removed) == (True, 1)
        end = shop.log.log_end_offset
        assert shop.manager.table.cleaner_offsets[T0] == end


async def test_horizons_survive_a_restart(tmp_path: Path) -> None:
    async with open_shop(tmp_path) as shop:
        shop.produce(60)
        key = next(iter(shop.latest))
        delete(shop, key)
        await shop.cleaned(shop.roll())
        now_ms = shop.env.wall_ms()
        before = shop.pool.state_store.state_of(shop.host.facts_of(T0), now_ms)  # type: ignore[arg-type]
        assert max(before.horizons.values()) > shop.env.wall_ms()
        await shop.pool.stop()
        again = CleanerPool(shop.host, SETTINGS, shop.env)
        await again.start()
        now_ms = shop.env.wall_ms()
        after = again.state_store.state_of(shop.host.facts_of(T0), now_ms)  # type: ignore[arg-type]
        assert after.horizons == before.horizons
        assert [record.outcome for record in again.history.newest()] == ["finished"]
        await again.stop()


async def test_the_rest_is_cleaned_around_damage_once_and_again_when_there_is_more(
    tmp_path: Path,
) -> None:
    async with open_shop(tmp_path, PATIENT) as shop:
        bases = []
        async with shop.pool.control.paused(T0):
            for _ in range(4):
                bases.append(shop.log.log_end_offset)
                shop.produce(30)
                shop.roll()
            hurt = os.path.join(shop.log.directory, f"{bases[1]:020}.log")
            untouched = damage(Path(hurt))
        await shop.until(lambda: shop.host.damages)
        assert hurt in shop.host.damages[0][1]
        assert shop.env.read_file(hurt) == untouched
        assert shop.log.damage.ranges[0].base_offset == bases[1]
        end = shop.log.log_end_offset
        shop.pool.operator.retry(T0)
        looks = shop.pool.stats.scans
        await shop.until(lambda: shop.pool.stats.scans > looks + 5)
        assert len(shop.host.done) == 1
        assert shop.manager.table.cleaner_offsets[T0] == bases[1]

        shop.produce(30)
        shop.roll()
        await shop.until(lambda: len(shop.host.done) == 2)
        job, _ = shop.host.done[1]
        assert (job.first_dirty_offset, job.end_offset) == (end, shop.log.log_end_offset)
        assert shop.manager.table.cleaner_offsets[T0] == bases[1], "the prefix that is clean"
        assert shop.env.read_file(hurt) == untouched
        assert len(shop.host.damages) == 1

        shop.log.delete_records(end)
        shop.log.retention.expire(shop.env.wall_ms())
        assert not shop.env.exists(hurt)
        await shop.cleaned(job.end_offset)
        assert shop.manager.table.cleaner_offsets[T0] == job.end_offset
        assert len(shop.host.done) == 2, "what was clean after the damage is not cleaned again"


async def test_a_clean_goes_on_with_the_rest_when_retention_takes_its_first_segments(
    tmp_path: Path,
) -> None:
    slow = SETTINGS.model_copy(update={"read_bytes_per_second": 64 * 1024})
    async with open_shop(tmp_path, slow) as shop:
        shop.produce(400)
        end = shop.roll()
        await shop.until(lambda: any(status.stage for status in shop.pool.status().workers))
        start = shop.log.segment_facts()[3].base_offset
        shop.log.delete_records(start)
        assert len(shop.log.retention.expire(shop.env.wall_ms())) == 3
        shop.pool.configure(SETTINGS)
        await shop.cleaned(end)
        shop.latest = {key: last for key, last in shop.latest.items() if last[0] >= start}
        shop.check()
        assert [record.outcome for record in shop.pool.history.newest()] == ["finished"]
        assert shop.pool.history.newest()[0].groups_dropped >= 1
        assert shop.host.failures == []
