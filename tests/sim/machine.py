"""The whole broker in memory, and everything that touches a partition at once; see script.py.

What runs is `broker.app.Broker` with its pool, views, leases, timers and logs. Simulated are files
and clocks (`SimulatedEnv`), the processes of workers (`WorkerInProcess`: the engine itself runs),
and sockets: clients call what handlers call. A life of the broker ends in order, by a kill between
any two file operations or by a loss of power; the next one finds what is left on the disk.

This module begins and ends lives. What happens in them is in operations.py, what must hold in
checks.py and model.py, what is missing at the next start in damage.py.
"""

import asyncio
import errno
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import structlog

import broker.app
import broker.event_loop.loop_turns
from broker.app import Broker
from broker.event_loop import unpack_threads
from broker.topics import clock_watch
from broker.topics.partition import Partition
from cleaner.engine import background_writes, batch_blocks
from cleaner.host import PublishOutcome
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from cleaner.planning.shared_clean import PartSizes
from cleaner.scheduler import dispatch
from cleaner.workers import dedicated_worker
from config.settings import Settings
from storage.format.batch import Record, build_batch, read_header
from storage.log.log import Log
from tests.sim.checks import Checks
from tests.sim.damage import lose_files, lose_state
from tests.sim.interleaving import (
    EndlessError,
    FiberExecutor,
    FiberLock,
    Fibers,
    KilledError,
    SimulatedLoop,
)
from tests.sim.model import ENDS, Cleaned, Death, LifeEndedError, RuleError
from tests.sim.operations import Operations
from tests.sim.script import Operation, Script
from tests.sim.wall_clock import STEADY_MS
from tests.sim.worker import WorkerInProcess
from tests.sim.world import HOMES, OPERATION_ERRORS, World
from tests.support.broker.broker_in_memory import broker_settings
from tests.support.broker.large_batches import large_batches
from tests.support.cleaner.history import Batch
from tests.support.cleaner.key_indexes import small_records_are_indexed
from tests.support.clocks.virtual_loop import DeadlockError, InlineExecutor
from tests.support.storage.memory_env import SimulatedCrash

PATIENCE_SECONDS = 120.0  # virtual, for what a script waits for
TURNS_MAX = 2_000  # of the loop while what is left of a life ends
SETTLE_SECONDS = 25.0  # virtual, at the end: timers, views and the cleaner go on by themselves
WORKERS = 3  # of runs with shared cleans
SMALL_PARTS = PartSizes(shared_min=0, part_min=1, part_max=1, one_pass=0)  # a segment, or a group
CLEANER = {
    "dedupe_buffer_bytes": 1 << 20,
    "read_buffer_bytes": 64 << 10,
    "backoff_ms": 1_000,
    "retry_backoff_ms": 1_000,
    "retry_backoff_max_ms": 4_000,
}


class _NoServer:
    """In the place of the listener and of the HTTP server: nobody connects."""

    def __init__(self, *_: object, **__: object) -> None:
        self.guard: object = None
        self.turns: object = None

    async def start(self, *_: object) -> tuple[str, int]:
        return "127.0.0.1", 1

    def open(self, *_: object) -> None:
        pass

    def set_connection_limits(self, **_: object) -> None:
        pass

    def own_api(self) -> None:
        pass

    async def stop(self, *_: object) -> None:
        pass


class Machine:
    """One run of a script. Raises RuleError, and has a readable trace of what came before."""

    def __init__(self, script: Script) -> None:
        self.world = World(script)
        self._operations = Operations(self.world)
        self._checks = Checks(self.world, self._operations)
        homes = HOMES if script.moves else HOMES[:1]
        workers = WORKERS if script.shares else 1
        self._settings = settings(*homes, workers=workers, verify=script.verifies)
        self._at = 0  # the next operation
        self._lives = 0
        self._workers = 0  # of this life
        self._is_dead: asyncio.Event
        self._wrong: RuleError | None = None
        self._is_over = False

    @property
    def trace(self) -> list[str]:
        """What happened, a line each."""
        return self.world.trace

    @property
    def seen(self) -> Counter[str]:
        """How often each kind of event happened."""
        return self.world.seen

    # Lives --------------------------------------------------------------------------------

    def run(self) -> None:
        """Carry the script out. Raises RuleError."""
        with self._patched():
            try:
                while not self._is_over:
                    self._live()
            except (EndlessError, DeadlockError) as error:
                self._wrong = RuleError(ENDS, str(error))
        if self._wrong is not None:
            raise self._wrong

    @contextmanager
    def _patched(self) -> Iterator[None]:
        processors = structlog.get_config()["processors"]
        saved = processors.copy()
        with ExitStack() as stack:
            stack.callback(lambda: processors.__setitem__(slice(None), saved))
            processors[:] = [self._heard]
            structlog.configure(processors=processors)
            for name in ("Listener", "HttpEndpoint", "make_metrics", "make_dispatcher"):
                stack.enter_context(mock.patch.object(broker.app, name, _NoServer))
            stack.enter_context(
                mock.patch.object(background_writes, "ThreadPoolExecutor", InlineExecutor)
            )
            stack.enter_context(
                mock.patch.object(
                    unpack_threads,
                    "ThreadPoolExecutor",
                    side_effect=lambda *_, **__: self._threads(),
                )
            )
            stack.enter_context(mock.patch.object(broker.app, "gc", mock.Mock()))
            # The small segments of a run have several blocks of batches, too.
            stack.enter_context(mock.patch.object(batch_blocks, "BLOCK_BYTES_MIN", 64))
            # Of the records of a run, some have 60 bytes.
            limits = ((0, 1.0), (0, 0.5), (60, 1.0))[self.world.script.seed % 3]
            stack.enter_context(small_records_are_indexed(*limits))
            if self.world.script.seed % 4 == 3:  # some batches of a run have 100 bytes, some 300
                stack.enter_context(large_batches(100, 64))
            stack.enter_context(mock.patch.object(clock_watch, "CONFIRM_MS", STEADY_MS))
            stack.enter_context(mock.patch.object(dispatch, "TOP_UP_SECONDS", 0.5))
            stack.enter_context(mock.patch.object(dedicated_worker, "TOP_UP_SECONDS", 0.5))
            stack.enter_context(
                mock.patch.object(broker.event_loop.loop_turns, "perf_counter", float)
            )
            yield

    def _threads(self) -> FiberExecutor:
        script = self.world.script
        return FiberExecutor(self.world.fibers, script.thread_share, script.threads)

    def _heard(self, _logger: Any, _name: str, event: dict[str, Any]) -> Any:
        """A line of the broker's log."""
        text = str(event.pop("event"))
        self.world.seen[text] += 1
        if text in (
            "clean finished",
            "view compacted",
            "segments expired",
            "lease ended",
            "replica moved",
            "erasure ended",
        ):
            self.world.has_news = True
        # A fault is no excuse for an assertion that fails.
        is_ours = isinstance(sys.exc_info()[1], AssertionError) and not self.world.env.is_dead
        if event.pop("exc_info", None) and (is_ours or not self._is_excused()):
            self.world.note(traceback.format_exc())
            self._go_wrong(RuleError("no mistakes", f"{text} {event}"))
        self.world.note(f"    {text} " + " ".join(f"{key}={value}" for key, value in event.items()))
        raise structlog.DropEvent

    def _go_wrong(self, error: RuleError) -> None:
        if self._wrong is None:
            self._wrong = error
            self.world.env._dead = True

    def _is_excused(self) -> bool:
        env = self.world.env
        return env.is_dead or bool(env.happened) or bool(env.endless)

    def _live(self) -> None:
        """One life of the broker."""
        self._lives += 1
        if self._lives > 60:
            raise RuleError(ENDS, "the broker does not stay alive")
        self.world.loop = SimulatedLoop(self.world.rng.randrange(1 << 30), self.world.env)
        self.world.loop.set_exception_handler(self._unhandled)
        self.world.fibers = Fibers(self.world.loop, self.world.rng)
        self.world.loop.set_default_executor(self._threads())
        self.world.env.fibers = self.world.fibers
        self.world.env.calls = 0
        self._workers = 0
        self.world.env.happened = []
        how = "kill"
        asyncio.set_event_loop(self.world.loop)
        try:
            how = self.world.loop.run_until_complete(self._until_it_ends())
        finally:
            self._bury()
        if self._wrong is not None:
            self._is_over = True
            return
        if self._is_over and how == "stop":
            return
        self._start_over(how)

    async def _until_it_ends(self) -> str:
        self._is_dead = asyncio.Event()
        self.world.env.on_death = self._is_dead.set
        self.world.tasks = set()
        main = asyncio.ensure_future(self._script())
        dead = asyncio.ensure_future(self._is_dead.wait())
        await asyncio.wait([main, dead], return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if self._wrong is not None:
            return "kill"
        if not main.done() or self.world.env.is_dead:
            main.cancel()
            self.world.note(f"the process ends by itself ({self.world.how})")
            return self.world.how
        try:
            main.result()
        except LifeEndedError as ended:
            return ended.how
        except RuleError as error:
            self._wrong = error
            return "kill"
        return "stop"

    def _unhandled(self, _loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._is_excused() or isinstance(error, SimulatedCrash | KilledError | None):
            return
        lines = traceback.format_exception(error) if error is not None else []
        self.world.note(f"unhandled: {context} {''.join(lines)}")
        self._go_wrong(RuleError("no mistakes", f"{context.get('message')}: {error!r}"))

    def _bury(self) -> None:
        """Let everything end that belongs to a life that is over."""
        self.world.env.on_death = lambda: None
        self.world.loop.set_exception_handler(lambda _loop, _context: None)
        self._note_deaths()
        was_dead, self.world.env._dead = self.world.env._dead, True
        self.world.loop.turns, self.world.env.calls, self.world.env.endless = 0, 0, ""
        self.world.fibers.kill_all()
        for _ in range(TURNS_MAX):
            tasks = [task for task in asyncio.all_tasks(self.world.loop) if not task.done()]
            if not tasks and not self.world.fibers.alive:
                break
            for task in tasks:
                task.cancel()
            self.world.loop.call_soon(self.world.loop.stop)
            self.world.loop.run_forever()
            self.world.fibers.kill_all()
        self.world.env._dead = was_dead
        self.world.env.fibers = None
        asyncio.set_event_loop(None)
        self.world.loop.close()

    def _note_deaths(self) -> None:
        for model in self.world.models.values():
            log, model.log = model.log, None
            if log is not None:
                model.death = Death(log.log_end_offset, log.recovery_point)
                model.log_start_max = max(model.log_start_max, log.log_start_offset)

    def _start_over(self, how: str) -> None:
        """What the next life finds."""
        if any(
            fault.number == errno.EIO and "sync" in fault.operation
            for fault in self.world.env.happened
        ):
            how = "power"  # what the device lost shows only then
        if self.world.loses_points and how == "power":
            how = "kill"
        self.world.env.crash_at = self.world.env.crash_point = self.world.env.fault = None
        self.world.env = self.world.env.crash() if how == "power" else self.world.env.kill()
        if self.world.env.full is not None:
            self.world.env.elapse(1.0)  # a start that fails is tried again later
        self.world.seen[f"ended: {how}"] += 1
        self.world.note(f"--- {how}; life {self._lives + 1}")
        if how == "power":
            for model in self.world.models.values():
                model.lost_power = True
        if self.world.clock_set_ms:
            self.world.env.set_clock(self.world.clock_set_ms)
            self.world.clock_set_ms = 0
        losses, self.world.losses = self.world.losses, ()
        if how != "stop":
            with self.world.env.without_faults():
                lose_files(self.world, losses)
                if self.world.script.loses_state:
                    lose_state(self.world, self._lives)

    # The script ---------------------------------------------------------------------------

    async def _script(self) -> None:
        try:
            await self._follow()
        except (LifeEndedError, RuleError):
            raise
        except EndlessError as error:
            raise RuleError(ENDS, str(error)) from None
        except Exception as error:
            if self._is_excused() and isinstance(error, OPERATION_ERRORS):
                raise LifeEndedError("kill") from error
            self.world.note(traceback.format_exc())
            raise RuleError("no mistakes", repr(error)) from error

    async def _follow(self) -> None:
        broker = self.world.broker = Broker(self._settings, self.world.env, spawn=self._spawn)
        broker.manager.table.checkpoints.written.new_lock = partial(FiberLock, self.world.fibers)
        if self.world.script.shares:
            broker.pool.dispatcher.part_sizes = SMALL_PARTS
        self._watch_publications()
        self._watch_tombstones()
        await broker.start()
        await self._checks.check_start()
        operations = self.world.script.operations
        while self._at < len(operations):
            operation = operations[self._at]
            self._at += 1
            self.world.note(f"{self._at - 1}: {operation}")
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._carry_out(operation)
            except TimeoutError:
                self.world.note("gave up waiting")
            except OPERATION_ERRORS as error:
                self.world.note(f"refused: {error!r:.200}")
            if operation.pause:
                await asyncio.sleep(operation.pause)
            self._checks.check_health()
            if self.world.has_news:
                self.world.has_news = False
                self._checks.check_all()
        await self._settle()
        self._is_over = True
        await self._stop()

    async def _carry_out(self, operation: Operation) -> None:
        self.world.seen[operation.kind] += 1
        match operation.kind:
            case "check":
                self._checks.check_all()
            case "end":
                self.world.losses = operation.values["loses"]
                if operation.values["how"] == "stop":
                    await self._stop()
                raise LifeEndedError(operation.values["how"])
            case _:
                await self._operations.carry_out(operation)

    async def _settle(self) -> None:
        """Without further disturbance everything goes on by itself."""
        self.world.env.crash_point = self.world.env.fault = self.world.env.full = None
        for name in list(self.world.models):
            await self._operations.end_transactions(name)
        await asyncio.sleep(SETTLE_SECONDS)
        self._checks.check_health()
        self._checks.check_all()

    async def _stop(self) -> None:
        for task in self.world.tasks:  # connections are closed first
            task.cancel()
        async with asyncio.timeout(PATIENCE_SECONDS * 5):
            await self.world.broker.stop()

    async def _spawn(self, _nice: int) -> WorkerInProcess:
        self._workers += 1  # the first one of each life is the pool's
        script = self.world.script
        return WorkerInProcess(
            self.world, script.worker if self._workers == 1 else script.other_worker
        )

    def _watch_tombstones(self) -> None:
        """Tell the models of the tombstones that the broker writes for erasures."""
        append = self.world.broker.erasures.eraser.append

        async def watched(served: Partition, record: Record, now_ms: int) -> int:
            model = self.world.models[served.partition.topic]
            sent = Batch(read_header(build_batch([record])), (record,))
            model.pending.append(sent)
            offset = await append(served, record, now_ms)
            model.acknowledged(sent, offset)
            return offset

        self.world.broker.erasures.eraser.append = watched  # type: ignore[method-assign]

    def _watch_publications(self) -> None:
        """Note which offsets became clean, and when."""
        publish = self.world.broker.cleaning.publish

        async def watched(
            job: CleanJob, groups: tuple[CleanedGroup, ...]
        ) -> tuple[PublishOutcome, ...]:
            model = self.world.models.get(job.partition.topic)
            log = self.world.broker.manager.table.logs.get(job.partition)
            if model is not None and log is not None and log.topic_id == model.topic_id:
                leased = any(
                    job.job_id == run.compaction_id for run in self.world.broker.leases.table.all()
                )
                if not job.expired_only:
                    clock = self.world.env.clock
                    begun_ms = clock.passed_ms_of(job.now_ms)
                    cleaned = Cleaned(begun_ms, clock.passed_ms, leased)
                    model.published(job.log_start_offset, job.end_offset, cleaned)
                self.world.seen["published by a lease" if leased else "published"] += 1
            outcomes = await publish(job, groups)
            self.world.has_news = True
            return outcomes

        self.world.broker.cleaning.publish = watched  # type: ignore[method-assign]
        finished = self.world.broker.cleaning.finished

        def count(job: CleanJob, report: CleanReport, **others: Any) -> None:
            if report.resolved_end is not None:
                self.world.seen["selective clean"] += 1
                self.world.seen["selective clean published"] += report.groups > 0
            finished(job, report, **others)

        self.world.broker.cleaning.finished = count  # type: ignore[method-assign]
        opened = self.world.broker.moves._opened

        def moved(partition: Partition, log: Log) -> None:
            model = self.world.models.get(partition.partition.topic)
            if model is not None and log.topic_id == model.topic_id:
                model.log = log
            opened(partition, log)

        self.world.broker.moves._opened = moved


def settings(*directories: str, workers: int = 1, verify: bool = False) -> Settings:
    """Of every run."""
    return broker_settings(
        *directories,
        cleaner={**CLEANER, "workers": workers, "verify": verify},
        retention_check_interval_ms=2_000,
        checkpoint_interval_ms=6_000,
    )
