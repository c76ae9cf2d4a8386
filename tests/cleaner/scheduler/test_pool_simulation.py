"""The whole pool under random workers, clients with short patience, failures and cancellations;
operators, other settings, deletions, failed directories and a restart come on top.

Time is virtual and the order of ready callbacks is drawn from the seed, so that each seed is one
history and can be had again: VARVE_SIMULATION_SEEDS=17:18.
"""

import asyncio
import random
from collections import Counter
from dataclasses import replace

from structlog.testing import capture_logs

from cleaner import states as s
from cleaner.host import NotServedError, PublishOutcome
from cleaner.job import CleanedGroup, CleanJob, SegmentHorizon
from cleaner.scheduler.clean_attempt import PoolLimits
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.scheduler.explain import sentences
from cleaner.workers.worker_pool import WorkerPoolLimits
from config.settings import CleanerSettings
from storage.model import TopicPartition
from tests.support.cleaner.log_facts import COMPACTED, even, facts
from tests.support.cleaner.scheduler.cleaner_fakes import FakeHost, FakeLink, FakeWorkerPool
from tests.support.clocks.virtual_loop import run_virtually
from tests.support.draws import seeds_of_tests
from tests.support.storage.memory_env import MemoryEnv

PARTITIONS = [TopicPartition("t", number) for number in range(3)]
SETTINGS = CleanerSettings(
    workers=2, backoff_ms=300, retry_backoff_ms=500, retry_backoff_max_ms=2000
)
LIMITS = PoolLimits(
    abort=1.5,
    stall=6.0,
    workers=WorkerPoolLimits(start=2, kill=0.5, stop=2, respawn=0.05, respawn_max=1),
)
# A journal (twice: one may begin just before), a worker that does not heed, its kill.
PAUSE_SECONDS_MAX = 4 * 0.4 + LIMITS.abort * 2 + LIMITS.workers.kill + 0.5
CONFIG = replace(
    COMPACTED, segment_bytes=100, min_cleanable_dirty_ratio=0, delete_retention_ms=3000
)


SEEDS = seeds_of_tests("VARVE_SIMULATION_SEEDS", few=10, many=100)


class Simulation:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.host = RandomHost(self)
        self.fake_workers = FakeWorkerPool(prepare=self.live)
        self.env = MemoryEnv(seed)
        self.working: Counter[TopicPartition] = Counter()
        self.granted_pauses: Counter[TopicPartition] = Counter()
        self.seen: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()
        self.calm = False  # nothing is damaged any more

    def live(self, link: FakeLink) -> None:
        task = asyncio.ensure_future(self.worker(link))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def worker(self, link: FakeLink) -> None:
        """Works, notices aborts now and then, and now and then fails, dies or hangs."""
        await asyncio.sleep(self.rng.random() * 0.5)
        if self.rng.random() < 0.05:
            link.die()
            return
        link.ready()
        while not link.is_gone():
            job = await link.job()
            self.working[job.partition] += 1
            try:
                if not await self.work(link, job):
                    return
            finally:
                self.working[job.partition] -= 1

    async def work(self, link: FakeLink, job: CleanJob) -> bool:
        """One job; False if the worker is no more."""
        heeds = self.rng.random() > 0.05
        for index in range(len(job.groups)):
            await asyncio.sleep(self.rng.random() * 0.8)
            if link.is_gone():
                return False
            assert not self.granted_pauses[job.partition], (
                "a worker has files that were granted to a pause"
            )
            if heeds and link.aborted():
                link.stopped()
                return True
            fate = self.rng.random()
            if fate < 0.02:
                link.die()
                return False
            if fate < 0.05:
                link.failed("OSError: disk")
                return True
            if fate < 0.06:
                await asyncio.sleep(20)  # hangs
                return not link.is_gone()
            link.group(index)
        if link.is_gone():
            return False
        link.done(**self.result(job))
        self.seen["expired only"] += job.expired_only
        return True

    def result(self, job: CleanJob) -> dict[str, object]:
        """What a job found: horizons, and now and then damage in the middle."""
        sources = [source for group in job.groups for source in group]
        stamps = [-1, -1, job.now_ms, job.now_ms + job.delete_retention_ms]
        results: dict[str, object] = {
            "horizons": tuple(
                SegmentHorizon(source.base_offset, source.size_bytes, self.rng.choice(stamps))
                for source in sources
            )
        }
        if not self.calm and not job.expired_only and self.rng.random() < 0.1:
            hurt = self.rng.choice(sources)
            if hurt.base_offset >= job.first_dirty_offset:
                path = f"{job.directory}/{hurt.base_offset}.log"
                results |= {
                    "damaged": ((path, 17, "bad CRC"),),
                    "next_dirty_offset": hurt.base_offset,
                    "cleaned": ((hurt.next_base_offset, job.end_offset),)
                    if hurt.next_base_offset < job.end_offset
                    else (),
                }
                self.seen["damaged"] += 1
        return results

    async def operator(self, pool: CleanerPool) -> None:
        """Holds, releases, asks for cleans and reasons, sets other settings; lets time pass."""
        for _ in range(12):
            await asyncio.sleep(self.rng.random() * 1.5)
            self.env.advance_ms(self.rng.randrange(3000))
            partition = self.rng.choice(PARTITIONS)
            try:
                match self.rng.randrange(7):
                    case 0:
                        self.seen["operator pauses"] += pool.operator.pause(partition)
                    case 1 | 2:
                        partition = self.rng.choice([*sorted(pool.status().paused), partition])
                        self.seen["released"] += pool.operator.resume(partition)
                    case 3:
                        pool.operator.request_clean(partition)
                    case 4:
                        assert sentences(pool.explain(partition))
                        assert len(pool.history.newest(partition, 5)) <= 5
                    case 5:
                        pool.operator.retry(partition)
                    case _:
                        workers, rate = self.rng.randrange(1, 4), self.rng.choice([None, 1 << 20])
                        strategy = self.rng.choice(["dirty-ratio", "survivorship", "generational"])
                        changes = {
                            "workers": workers, "strategy": strategy, "read_bytes_per_second": rate,
                        }  # fmt: skip
                        pool.configure(SETTINGS.model_copy(update=changes))
            except NotServedError:
                self.seen["unknown"] += 1

    async def landlord(self, pool: CleanerPool) -> None:
        """Deletes partitions and makes new ones of their name; a disk fails and comes back."""
        for _ in range(3):
            await asyncio.sleep(self.rng.random() * 5)
            partition = self.rng.choice(PARTITIONS)
            log = self.host.logs[partition]
            if self.rng.random() < 0.5:
                async with pool.control.paused(partition):
                    del self.host.logs[partition]
                self.seen["deleted"] += 1
                log = replace(log, topic_id=self.rng.randbytes(16), checkpoint_offset=None)
            else:
                del self.host.logs[partition]
                self.seen["failed disk"] += 1
            await asyncio.sleep(self.rng.random() * 3)
            self.host.add(replace(log, generation=f"{log.generation}*", damaged=()))

    async def client(self, pool: CleanerPool, number: int) -> None:
        """Pauses partitions with little patience, sometimes nested; truncates meanwhile."""
        for _ in range(6):
            await asyncio.sleep(self.rng.random() * 3)
            partition = self.rng.choice(PARTITIONS)
            if self.rng.random() < 0.2:
                pool.operator.abort(partition)
            if self.rng.random() < 0.2:
                began = asyncio.get_running_loop().time()
                async with pool.control.paused(partition):
                    waited = asyncio.get_running_loop().time() - began
                    assert waited <= PAUSE_SECONDS_MAX, "a pause is granted in bounded time"
                    await self.truncate(partition)
                continue
            try:
                async with asyncio.timeout(self.rng.random() * 2), pool.control.paused(partition):
                    await self.truncate(partition)
                    if self.rng.random() < 0.3:
                        async with pool.control.paused(partition):
                            await self.truncate(partition)
                self.seen["paused"] += 1
            except TimeoutError:
                self.seen["gave up"] += 1

    async def truncate(self, partition: TopicPartition) -> None:
        self.granted_pauses[partition] += 1
        try:
            for _ in range(3):
                assert partition not in self.host.publishing, "a journal under a granted pause"
                await asyncio.sleep(self.rng.random() * 0.2)
            log = self.host.logs.get(partition)
            if log is not None:
                self.host.add(replace(log, checkpoint_offset=None, generation=f"{log.generation}'"))
        finally:
            self.granted_pauses[partition] -= 1

    def pool(self) -> CleanerPool:
        return CleanerPool(self.host, SETTINGS, self.env, spawn=self.fake_workers, limits=LIMITS)

    async def run(self) -> None:
        for partition in PARTITIONS:
            log = facts(even(4), partition=partition, config=CONFIG, data_directory="/data")
            self.host.add(log)
            self.env.mkdir(log.directory)
        pool = self.pool()
        await pool.start()
        watcher = asyncio.ensure_future(self.watch(pool))
        await asyncio.gather(
            *(self.client(pool, number) for number in range(4)),
            self.operator(pool),
            self.landlord(pool),
        )
        await self.stop(pool, watcher)
        partitions = pool.status().paused

        again = self.pool()
        self.calm = True
        self.host.outcomes = [PublishOutcome.PUBLISHED]
        for log in list(self.host.logs.values()):
            self.host.add(replace(log, damaged=(), generation=f"{log.generation}#"))
        await again.start()
        assert again.status().paused == partitions, "holds survive a restart"
        assert len(again.history.newest(limit=10_000)) == len(pool.history.newest(limit=10_000))
        watcher = asyncio.ensure_future(self.watch(again))
        for partition in partitions:
            again.operator.resume(partition)
        for partition in PARTITIONS:
            async with asyncio.timeout(120):
                await again.wait_cleaned(partition, 40)
        await self.stop(again, watcher)
        for task in self.tasks:
            task.cancel()

    async def stop(self, pool: CleanerPool, watcher: asyncio.Task[None]) -> None:
        """And nothing is left: no pause but operators' holds, no worker, no unrecorded job."""
        assert not pool.control._waiting
        watcher.cancel()
        async with asyncio.timeout(30):
            await pool.stop()
        pool.in_progress.validate()
        partitions = pool.status().paused
        for partition, state in pool.in_progress.states().items():
            assert not s.is_busy(state)
            assert isinstance(state, s.Paused) == (partition in partitions), (partition, state)
            assert not isinstance(state, s.Paused) or state.pauses == 1
        jobs = Counter(record.outcome for record in pool.history.newest(limit=10_000))
        assert jobs.total() >= pool.stats.cleans + pool.stats.aborted
        self.seen.update(
            cleans=pool.stats.cleans,
            aborted=pool.stats.aborted,
            failures=pool.stats.failures,
            stale=jobs["stale"],
        )

    async def watch(self, pool: CleanerPool) -> None:
        while True:
            pool.in_progress.validate()
            for partition in PARTITIONS:
                state = pool.in_progress.state(partition)
                if self.granted_pauses[partition]:
                    assert isinstance(state, s.Paused)
                if partition in pool.status().paused:
                    assert isinstance(state, s.Paused | s.Aborting)
            await asyncio.sleep(0.05)


class RandomHost(FakeHost):
    """Publishes slowly, and not always."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.simulation = simulation
        self.outcomes: list[PublishOutcome | Exception] = [
            *[PublishOutcome.PUBLISHED] * 30,
            PublishOutcome.SOURCES_GONE,
            OSError(5, "Input/output error"),
        ]

    async def publish(
        self, job: CleanJob, groups: tuple[CleanedGroup, ...]
    ) -> tuple[PublishOutcome, ...]:
        rng = self.simulation.rng
        log = self.logs.get(job.partition)
        if log is None or log.generation != job.generation:
            return (PublishOutcome.STALE,) * len(groups)
        self.publishing.add(job.partition)
        try:
            await asyncio.sleep(rng.random() * 0.4)
        finally:
            self.publishing.discard(job.partition)
        self.outcome = rng.choice(self.outcomes)
        return await super().publish(job, groups)

    def checkpoint(self, partition: TopicPartition, generation: str, offset: int) -> None:
        assert not self.simulation.granted_pauses[partition], "a checkpoint under a granted pause"
        super().checkpoint(partition, generation, offset)


def test_pauses_hold_and_end_and_every_partition_gets_clean_whatever_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        simulation: list[Simulation] = []

        async def main(seed: int = seed, made: list[Simulation] = simulation) -> None:
            made.append(Simulation(seed))
            await made[0].run()

        try:
            with capture_logs() as logs:
                run_virtually(main(), seed)
            mistakes = [line for line in logs if line.get("exc_info")]
            assert not mistakes, mistakes
        except BaseException:
            print(f"seed {seed}")
            raise
        seen.update(simulation[0].seen)
    print(dict(seen))
    for kind in (
        "paused", "gave up", "cleans", "aborted", "failures", "operator pauses", "released",
        "deleted", "failed disk", "stale", "expired only",
    ):  # fmt: skip
        assert seen[kind] > len(SEEDS) / 4, (kind, seen)
