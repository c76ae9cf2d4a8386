"""A view of a compacted topic beside its cleaner, in any order, with crashes and passing errors.

One model: the last value of each key. Whatever happens, whoever reads the view to its end, or the
log, knows exactly that: no deleted key comes back, and none is lost.
"""

import asyncio
import errno
import random
from contextlib import suppress
from typing import Any

import pytest

from broker.app import Broker
from broker.views.compaction import ViewError
from cleaner.engine.clean import run_clean
from cleaner.host import PublishOutcome
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from cleaner.planning.grouping import plan_job
from config.settings import CleanerSettings
from storage.format.batch import decode_records, read_header, walk_headers
from storage.view.ledger import view_path
from storage.view.view_log import ViewCursor
from tests.support.broker.broker_in_memory import broker_settings
from tests.support.broker.view_broker import ANY_TIME, ON, WHERE
from tests.support.broker.view_gate import Gate
from tests.support.cleaner.cleaning import Recorder
from tests.support.draws import seeds_of_tests
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

COMPACTED = {**ON, **ANY_TIME, "cleanup.policy": "compact", "delete.retention.ms": "0"}
FOLDER = view_path(f"/disk1/{WHERE}")
SETTINGS = CleanerSettings(dedupe_buffer_bytes=1 << 20)
KEYS = [b"a", b"b", b"c", b"d"]
OPERATIONS = ("open", "read_file", "sync_dir", "link", "listdir")
STEPS = 40


SEEDS = seeds_of_tests("VARVE_VIEW_SEEDS", few=5, many=16)


class World:
    """A broker, what was acknowledged, and what is under way."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.env = MemoryEnv(seed)
        self.latest: dict[bytes, bytes | None] = {}
        self.count = 0
        self.cleaning: tuple[CleanJob, tuple[CleanedGroup, ...], CleanReport] | None = None
        self.compaction: asyncio.Task[Any] | None = None
        self.fault: Any = None
        self.is_on = True
        self.steps_done: list[str] = []

    async def start(self) -> None:
        view = "compacted" if self.is_on else "none"
        topics = {"orders": {"partitions": 1, "keys": {**COMPACTED, "varve.view": view}}}
        self.gate = Gate(self.env)
        self.broker = Broker(broker_settings(topics=topics), self.env, view_worker=self.gate.worker)
        await self.broker.start()

    async def end(self, *, crashed: bool) -> None:
        if self.fault is not None:
            self.fault.remove()
            self.fault = None
        after = self.env.crash() if crashed else self.env
        self.gate.let_go()
        errors = (SimulatedCrash, Exception) if crashed else (ViewError,)
        with suppress(*errors):
            await self.broker.stop()
        if self.compaction is not None:
            await asyncio.gather(self.compaction, return_exceptions=True)
        self.cleaning = self.compaction = None
        self.env = after

    # What may happen

    async def produce(self) -> None:
        partition = self.partition
        for _ in range(self.rng.randrange(1, 4)):
            key = self.rng.choice(KEYS)
            self.count += 1
            value = None if self.rng.random() < 0.4 else b"%d" % self.count
            batch = batch_of(value, key=key, timestamps=[self.env.wall_ms()])
            partition.append(memoryview(batch), read_header(batch), self.env.wall_ms())
            self.latest[key] = value
        with suppress(OSError):
            await partition.flush()
        if self.rng.random() < 0.7:
            partition.log.roll(self.env.wall_ms())

    async def begin_clean(self) -> None:
        """Plan a job and carry it out; what it made is published some time later."""
        facts = self.broker.cleaning.facts_of(WHERE)
        if self.cleaning is not None or facts is None:
            return
        job_id = f"{self.rng.getrandbits(48):x}"
        job: CleanJob | None
        job, _ = self.broker.pool.remote.plan(facts, job_id)
        if job is None:
            verdict = self.broker.pool.scanner.assess(facts)
            if verdict is None or verdict.expired is None or not verdict.to_clean:
                return
            first, end = facts.log_start_offset, facts.log_end_offset
            inputs = self.broker.cleaning.job_inputs(WHERE, first, end)
            job = plan_job(
                facts,
                verdict,
                inputs,
                SETTINGS,
                job_id=job_id,
                now_ms=self.env.wall_ms(),
            )
            assert job is not None
        recorder = Recorder()
        report = run_clean(self.env, job, recorder)
        self.cleaning = job, tuple(recorder.groups), report

    async def finish_clean(self) -> None:
        if self.cleaning is None:
            return
        (job, groups, report), self.cleaning = self.cleaning, None
        if groups:
            outcomes = await self.broker.cleaning.publish(job, groups)
            if set(outcomes) != {PublishOutcome.PUBLISHED}:
                return
        facts = self.broker.cleaning.facts_of(WHERE)
        assert facts is not None
        offset = self.broker.pool.dispatcher.update_state(facts, job, report, 1)
        self.broker.cleaning.checkpoint(WHERE, job.generation, offset)

    async def clean(self) -> None:
        for _ in range(2):
            await self.begin_clean()
            await self.finish_clean()
            self.env.advance_ms(1000)

    async def begin_compaction(self) -> None:
        if self.compaction is not None or not self.is_on:
            return
        self.gate.close()
        self.compaction = asyncio.create_task(
            self.broker.view_compactions.compact(WHERE, from_scratch=self.rng.random() < 0.2)
        )
        reached = asyncio.create_task(self.gate.reached.wait())
        await asyncio.wait({self.compaction, reached}, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()

    async def finish_compaction(self) -> None:
        self.gate.let_go()
        if self.compaction is not None:
            await asyncio.gather(self.compaction, return_exceptions=True)
        self.compaction = None

    async def switch(self) -> None:
        self.is_on = not self.is_on
        view = "compacted" if self.is_on else "none"
        await self.broker.metadata_service.alter(
            "orders", lambda _: {**COMPACTED, "varve.view": view}
        )

    async def tidy(self) -> None:
        if self.compaction is None:  # it waits for one
            await self.broker.view_compactions.tidy()

    async def fail(self) -> None:
        if self.fault is not None:
            self.fault.remove()
            self.fault = None
            return
        operation = self.rng.choice(OPERATIONS)
        self.fault = self.env.fail_on(
            lambda done, path: done == operation and path.startswith(FOLDER), errno.EMFILE
        )

    async def restart(self) -> None:
        await self.end(crashed=self.rng.random() < 0.6)
        await self.start()

    # What must hold

    @property
    def partition(self) -> Any:
        partition = self.broker.topics.partition(WHERE)
        assert partition is not None
        return partition

    def check(self) -> None:
        expected = {key: value for key, value in self.latest.items() if value is not None}
        log = self.partition.log
        assert self._read(log, log.log_start_offset) == expected, "the log"
        view = self.broker.views.partition(WHERE)
        if view is not None and view.log.failure is None:
            assert self._read(ViewCursor(view.log), 0) == expected, "the view"

    def _read(self, log: Any, offset: int) -> dict[bytes, bytes]:
        end = self.partition.log.high_watermark
        entry: dict[bytes, bytes] = {}
        while data := log.read(offset, 1 << 20, end_offset=end).read():
            for position, header in walk_headers(data):
                for record in decode_records(data, header, position):
                    if record.offset < offset:
                        continue
                    entry.pop(record.key, None)
                    if record.value is not None:
                        entry[record.key] = record.value
                offset = header.next_offset
        return entry


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_view_beside_its_cleaner_never_brings_a_deleted_key_back(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed)
    await world.start()
    steps = {
        World.produce: 6,
        World.clean: 3,
        World.begin_clean: 2,
        World.finish_clean: 2,
        World.begin_compaction: 3,
        World.finish_compaction: 3,
        World.switch: 2,
        World.tidy: 2,
        World.fail: 2,
        World.restart: 2,
    }
    try:
        for _ in range(STEPS):
            (step,) = world.rng.choices(list(steps), list(steps.values()))
            world.steps_done.append(step.__name__)
            await step(world)
            world.check()
        if world.fault is not None:
            await world.fail()
        await world.finish_compaction()
        for _ in range(3):
            await world.tidy()
            await world.clean()
        world.check()
    except BaseException:
        print(world.steps_done)
        raise
    finally:
        await world.end(crashed=False)
