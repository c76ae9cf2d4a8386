"""The cleaner on the event loop: looks for work, hands it to workers, and answers for it.

What may be cleaned is decided in plan.py, what may happen to a partition in states.py (carried out
in control.py), a job's course is in runs.py, how fast it goes in throttle.py. This module does not
know what is inside a log.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import structlog

from cleaner import states
from cleaner.control import Control
from cleaner.crew import Crew, Worker
from cleaner.explain import Explanation
from cleaner.history import History, JobRecord
from cleaner.host import CleanerHost
from cleaner.lookout import Lookout
from cleaner.plan import Verdict
from cleaner.process import Spawn, spawn_process
from cleaner.registry import CleanerRegistry
from cleaner.run import PoolLimits, PoolStatus, worker_status
from cleaner.runs import Runs
from cleaner.stats import PoolStats
from config.settings import CleanerSettings
from storage.env import Env
from storage.model import TopicPartition

LOOK_PAUSE_SECONDS: Final = 0.02  # between two looks, however often the pool is woken
LOOK_SHARE: Final = 10  # a look that took t seconds is followed by this times t without one

log = structlog.get_logger("cleaner")


class CleanerPool:
    """Starts with `start`, ends with `stop`; in between it keeps logs clean by itself."""

    def __init__(
        self,
        host: CleanerHost,
        settings: CleanerSettings,
        env: Env,
        *,
        spawn: Spawn = spawn_process,
        limits: PoolLimits | None = None,
    ) -> None:
        self.registry = CleanerRegistry()
        self.stats = PoolStats()
        self._lookout = Lookout(host, self.registry, env, self.stats)
        self._host = host
        self._settings = settings
        self._env = env
        self._history = History()
        bounds = limits or PoolLimits()
        self._control = Control(
            host,
            env,
            self._lookout,
            registry=self.registry,
            stats=self.stats,
            abort_seconds=bounds.abort,
            wake=self.wake,
            kill=self._kill,
        )
        self._runs = Runs(
            host,
            env,
            self._control,
            settings=settings,
            stats=self.stats,
            limits=bounds,
            history=self._history,
        )
        self._crew = Crew(spawn, self._runs, self.stats, bounds.crew)
        self._wake = asyncio.Event()
        self._scheduler: asyncio.Task[None] | None = None

    # Starting and ending -----------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers and look for work. Does nothing where the cleaner is switched off."""
        assert self._scheduler is None
        if not self._settings.enabled:
            return
        self._crew.resize(self._settings.workers, self._settings.nice)
        self._scheduler = asyncio.create_task(self._schedule(), name="cleaner-scheduler")

    async def stop(self) -> None:
        """Give every partition back and end the workers; bounded by the limits."""
        if self._scheduler is not None:
            self._scheduler.cancel()
            await asyncio.gather(self._scheduler, return_exceptions=True)
        for partition in list(self.registry.holding()):
            self._control.abort(partition)
        self._runs.stop()
        await self._crew.stop()
        for partition, run in list(self._control.runs.items()):
            # Its journal hangs on a dead disk: the next start will see to what is left.
            log.error("cleaner_run_given_up", partition=str(partition), run_id=run.job.run_id)
            run.disarm()
        self._lookout.stop()

    def configure(self, settings: CleanerSettings) -> None:
        """Take other settings; running jobs go on. `enabled` is read at the start only."""
        self._settings = settings
        self._runs.configure(settings)
        if self._scheduler is not None:
            self._crew.resize(settings.workers, settings.nice)
        self.wake()

    # What others ask ------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do: new data, a closed segment, another policy or setting."""
        self._wake.set()

    @asynccontextmanager
    async def paused(self, partition: TopicPartition) -> AsyncIterator[None]:
        """Hold off cleaning of a partition while the block runs; a running job is given up first.

        May be nested, by the same or by different callers. Waits for the worker (a buffer or an
        fsync; a worker that does not react is killed) and for a journal under way.
        """
        async with self._control.paused(partition):
            yield

    def hold(self, partition: TopicPartition) -> bool:
        """An operator's pause: until `release`, also across restarts. False if there is one.

        A running job is given up; nobody waits for it. Raises KeyError for an unknown partition.
        """
        self._known(partition)
        return self._control.hold(partition)

    def release(self, partition: TopicPartition) -> bool:
        """End an operator's pause; False if there was none. Raises KeyError."""
        self._known(partition)
        return self._control.release(partition)

    def abort(self, partition: TopicPartition) -> bool:
        """Give up a running job, if there is one; the partition may be chosen again at once."""
        return self._control.abort(partition)

    def forgive(self, partition: TopicPartition) -> None:
        """Forget earlier failures: the partition was replaced, or its trouble was removed."""
        self._control.handle(partition, states.Forgiven())

    def run_now(self, partition: TopicPartition) -> None:
        """Clean it next, once: earlier failures and the ratio do not matter. Raises KeyError.

        Lags, the active segment and open transactions bound it as ever.
        """
        self._known(partition)
        self.forgive(partition)
        self.wake()

    async def await_cleaned(self, partition: TopicPartition, offset: int) -> None:
        """Wait until everything below `offset` is clean. As long as that takes: use a timeout."""
        self.wake()
        await self._lookout.wait_cleaned(partition, offset)

    @property
    def verdicts(self) -> dict[TopicPartition, Verdict]:
        """What the last look found, by partition."""
        return self._lookout.verdicts

    def status(self) -> PoolStatus:
        """What is going on."""
        workers = sorted(self._crew.workers.values(), key=lambda worker: worker.index)
        now = asyncio.get_running_loop().time()
        budgets = self._runs.throttle.budgets
        return PoolStatus(
            tuple(worker_status(worker, self._runs.of_worker(worker), now) for worker in workers),
            self.registry.in_progress(),
            self.registry.quarantines(),
            dict(self.verdicts),
            frozenset(self._control.holds),
            (budgets[0].rate, budgets[1].rate),
        )

    def explain(self, partition: TopicPartition) -> Explanation:
        """Why it is not being cleaned, or what is being done. Raises KeyError if it is unknown."""
        self._known(partition)
        quarantine = states.past_of(self.registry.state(partition))
        return Explanation(
            partition=partition,
            at_ms=self._env.wall_ms(),
            state=self.registry.state(partition),
            verdict=self.verdicts.get(partition),
            story=self.registry.story(partition),
            queue_position=None,
            next_attempt_ms=None,
            quarantine=quarantine,
            last_job=self._history.last_of(partition),
            held=partition in self._control.holds,
        )

    def history(self, partition: TopicPartition | None = None, limit: int = 100) -> list[JobRecord]:
        """The last jobs, newest first: of one partition, or of all."""
        return self._history.newest(partition, limit)

    def _known(self, partition: TopicPartition) -> None:
        if self._host.facts_of(partition) is None:
            raise KeyError(partition)

    def _kill(self, worker: Worker) -> None:
        self._crew.kill(worker)

    # Looking for work -----------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            began = asyncio.get_running_loop().time()
            try:
                await self._look()
            except Exception:
                # Supervised: a mistake in here must not silently end all cleaning.
                self.stats.scan_failures += 1
                log.exception("cleaner_look_failed")
            self.stats.scan_seconds = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(LOOK_PAUSE_SECONDS, LOOK_SHARE * self.stats.scan_seconds))
            try:
                async with asyncio.timeout(self._settings.backoff_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        """Judge every partition and give the most urgent ones to free workers."""
        candidates = await self._lookout.look()
        for partition in self.registry.quarantines().keys() - self._lookout.seen:
            self.forgive(partition)  # it exists no more
        for (verdict, facts), worker in zip(candidates, self._crew.idle(), strict=False):
            self._runs.begin(worker, facts, verdict)
