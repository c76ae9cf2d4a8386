"""Real workers share the clean of one partition, on a real disk, and some of them are killed."""

import os
import signal
from pathlib import Path

import pytest

from cleaner import states as s
from cleaner.planning.shared_clean import PartSizes
from config.settings import CleanerSettings
from tests.cleaner.test_real_cleaning import SETTINGS, T0, Shop, open_shop

pytestmark = pytest.mark.usefixtures("forked_workers")

THREE = SETTINGS.model_copy(update={"workers": 3})
# As slow as a budget allows: parts take seconds.
SLOW = THREE.model_copy(update={"read_bytes_per_second": 64 * 1024})
SIZES = PartSizes(shared_min=0, part_min=1, part_max=1, one_pass=0)


def share_all(shop: Shop) -> None:
    """Divide every job into parts of a segment."""
    shop.pool.dispatcher.part_sizes = SIZES


async def ready(shop: Shop) -> None:
    """Wait until all workers have loaded their kernels."""
    count = 3
    await shop.until(lambda: sum(worker.ready for worker in shop.pool.status().workers) == count)


def helpers(shop: Shop) -> list[int]:
    """The process ids of the workers at the job, the one that started it first."""
    attempt = shop.pool.control.attempts.get(T0)
    return [] if attempt is None else [worker.link.pid for worker in attempt.workers]


@pytest.mark.parametrize("codec", [0, 3])
async def test_several_workers_clean_one_partition(tmp_path: Path, codec: int) -> None:
    async with open_shop(tmp_path, SLOW) as shop:
        share_all(shop)
        await ready(shop)
        for _ in range(2):  # the second time there is a clean section
            shop.pool.configure(SLOW)
            # With every codec more segments than workers: each gets one of the first parts.
            shop.produce(400, codec, random_bytes=100)
            end = shop.roll()
            await shop.until(lambda: len(helpers(shop)) == 3)
            shop.pool.configure(THREE)
            await shop.cleaned(end)
            shop.check()
        assert shop.host.failures == []
        reports = [report for _, report in shop.host.done]
        assert all(report.spilled_bytes for report in reports)
        assert all(report.next_dirty_offset == job.end_offset for job, report in shop.host.done)


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_a_worker_killed_in_a_shared_clean_costs_one_attempt(
    tmp_path: Path, victim: int
) -> None:
    async with open_shop(tmp_path, SLOW) as shop:
        share_all(shop)
        await ready(shop)
        shop.produce(400)
        end = shop.roll()
        await shop.until(lambda: len(helpers(shop)) == 3)
        os.kill(helpers(shop)[victim], signal.SIGKILL)
        await shop.until(lambda: shop.host.failures)
        assert isinstance(shop.pool.in_progress.state(T0), s.Quarantined)
        assert "signal 9" in shop.host.failures[0][1]
        assert shop.leftovers() == []
        shop.check(compacted=False)
        shop.pool.configure(THREE)
        await shop.cleaned(end)
        shop.check()
        assert shop.pool.in_progress.quarantines() == {}


async def test_a_pause_stops_all_workers_of_a_shared_clean(tmp_path: Path) -> None:
    async with open_shop(tmp_path, SLOW) as shop:
        share_all(shop)
        await ready(shop)
        shop.produce(400)
        end = shop.roll()
        await shop.until(lambda: len(helpers(shop)) == 3)
        async with shop.pool.control.paused(T0):
            assert shop.leftovers() == []
            assert not any(worker.partition for worker in shop.pool.status().workers)
            shop.check(compacted=False)
        shop.pool.configure(THREE)
        await shop.cleaned(end)
        shop.check()
        assert shop.host.failures == []


async def test_the_broker_stops_in_the_middle_of_a_shared_clean(tmp_path: Path) -> None:
    async with open_shop(tmp_path, SLOW) as shop:
        share_all(shop)
        await ready(shop)
        shop.produce(400)
        shop.roll()
        await shop.until(lambda: len(helpers(shop)) == 3)
    # open_shop has stopped the pool, and found no file left over


async def test_an_explicit_rate_holds_for_all_workers_together(tmp_path: Path) -> None:
    rate = 256 * 1024
    slow: CleanerSettings = THREE.model_copy(update={"read_bytes_per_second": rate})
    async with open_shop(tmp_path, slow) as shop:
        share_all(shop)
        await ready(shop)
        shop.produce(400)
        began = shop.env.monotonic()
        await shop.cleaned(shop.roll())
        seconds = shop.env.monotonic() - began
        assert shop.pool.stats.read_bytes <= rate * (seconds + 1) + 1
        shop.check()
