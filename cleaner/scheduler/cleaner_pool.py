"""The cleaner on the event loop: looks for work, hands it to workers, and answers for it.

What may be cleaned is decided in plan.py, what may happen to a partition in states.py (carried out
in control.py), a job's course is in scheduler/dispatch.py, how fast it goes in throttle.py. This
module does not know what is inside a log.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Final

import structlog

from cleaner import states
from cleaner.host import CleanerHost, LogFacts
from cleaner.job import CleanJob, CleanReport
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.planning.findings import Moment
from cleaner.planning.order import Lane, candidate_of, choose
from cleaner.planning.plan import Verdict
from cleaner.planning.remote_plan import compaction_job
from cleaner.scheduler.clean_attempt import (
    LANE_INDEX,
    PoolLimits,
    PoolStatus,
    WorkerStatus,
    lane_of,
    worker_status,
)
from cleaner.scheduler.cleaner_state_store import CleanerStateStore
from cleaner.scheduler.control import AT_STOP, BY_OPERATOR, PAUSED_BY_OPERATOR, PartitionControl
from cleaner.scheduler.dispatch import JobDispatcher
from cleaner.scheduler.explain import Explanation, next_attempt
from cleaner.scheduler.history import History, JobRecord
from cleaner.scheduler.in_progress import CleanerRegistry
from cleaner.scheduler.offload import Offload
from cleaner.scheduler.partition_scanner import PartitionScanner
from cleaner.stats import PoolStats
from cleaner.workers.process import Spawn, spawn_process
from cleaner.workers.throttle import Throttle
from cleaner.workers.worker_pool import PoolWorker, WorkerPool
from config.settings import CleanerSettings
from storage.env import Env
from storage.model import TopicPartition

SCAN_PAUSE_SECONDS: Final = 0.02  # between two looks, however often the pool is woken
SCAN_PAUSE_FACTOR: Final = (
    10  # a look that took t seconds of the loop is followed by this times t without
)
LANE_IDLE_SECONDS: Final = 60.0  # then the worker of a lane ends, and its memory is free
IDLE_SHARE: Final = 50  # the same, where nobody says that there may be something to do

logger = structlog.get_logger("cleaner")


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
        measured: Callable[[Awaitable[None]], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`measured` runs the scheduler, and notes how long its turns hold the event loop."""
        self._measured = measured
        self.registry = CleanerRegistry()
        self.stats = PoolStats()
        self._state_store = CleanerStateStore(env)
        self.offload = Offload(settings, lambda: int(asyncio.get_running_loop().time() * 1000))
        self._scanner = PartitionScanner(
            host, self.registry, env, self.stats, self._state_store, offload=self.offload
        )
        self._scanner.strategy = settings.strategy
        self._host = host
        self._settings = settings
        self._env = env
        self._history = History()
        bounds = limits or PoolLimits()
        self._control = PartitionControl(
            host,
            env,
            self._scanner,
            registry=self.registry,
            stats=self.stats,
            abort_seconds=bounds.abort,
            wake=self.wake,
            kill=self._kill,
        )
        self._dispatcher = JobDispatcher(
            host,
            env,
            self._control,
            settings=settings,
            stats=self.stats,
            limits=bounds,
            history=self._history,
            memory=self._state_store,
        )
        self._workers = WorkerPool(spawn, self._dispatcher, self.stats, bounds.workers)
        self._requests_in_a_row = 0
        self._lanes_until: dict[Lane, float] = {}  # the loop's clock; lanes that have a worker
        self._wake = asyncio.Event()
        self._scheduler: asyncio.Task[None] | None = None

    # Starting and ending -----------------------------------------------------------------

    async def start(self) -> None:
        """Remember, start the workers and look for work; where it is switched off only the first.

        Operators' holds are in force when this returns.
        """
        assert self._scheduler is None
        try:
            await self._load_state()
        except Exception:
            # Supervised: no mistake in here keeps a broker from starting.
            logger.exception("what the cleaner remembers is not read")
        if not self._settings.enabled:
            return
        self._resize()
        work = self._schedule()
        if self._measured is not None:
            work = self._measured(work)
        self._scheduler = asyncio.create_task(work, name="cleaner-scheduler")

    async def _load_state(self) -> None:
        facts = list(self._host.facts())
        records = await self._state_store.load(sorted(self._host.data_directories()))
        for log_facts in facts:
            self._state_store.state_of(log_facts, self._env.wall_ms())
        self._state_store.keep_only(
            frozenset(facts.partition for facts in facts), self._host.exists
        )
        self._apply_saved_pauses()
        self._history.load(records)

    async def stop(self) -> None:
        """Give every partition back and end the workers; bounded by the limits."""
        if self._scheduler is not None:
            self._scheduler.cancel()
            await asyncio.gather(self._scheduler, return_exceptions=True)
        for partition in list(self.registry.busy_partitions()):
            self._control.abort(partition, AT_STOP)
        self._dispatcher.stop()
        await self._workers.stop()
        for partition, run in list(self._control.attempts.items()):
            # Its journal hangs on a dead disk: the next start will see to what is left.
            logger.error(
                "clean given up: its journal hangs", partition=str(partition), job_id=run.job.job_id
            )
            run.disarm()
        self._scanner.stop()
        await self._state_store.close()

    def configure(self, settings: CleanerSettings) -> None:
        """Take other settings; running jobs go on. `enabled` is read at the start only."""
        self._settings = settings
        self._scanner.strategy = settings.strategy
        self.offload.configure(settings)
        self._dispatcher.configure(settings)
        if self._scheduler is not None:
            self._resize()
        self.wake()

    # What others ask ------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do: new data, a closed segment, another policy or setting."""
        self._wake.set()

    @asynccontextmanager
    async def paused(
        self, partition: TopicPartition, reason: str = "its log was changed"
    ) -> AsyncIterator[None]:
        """Hold off cleaning of a partition while the block runs; a running job is given up first.

        `reason` is what the job's history says then.

        May be nested, by the same or by different callers. Waits for the worker (a buffer or an
        fsync; a worker that does not react is killed) and for a journal under way.
        """
        async with self._control.paused(partition, reason):
            yield

    def job_for_lease(self, facts: LogFacts, job_id: str) -> tuple[CleanJob | None, int]:
        """The job of cleaning all that may be cleaned now, and its dirty bytes; None: nothing is
        dirty. For whoever carries it out elsewhere, inside of `paused`.
        """
        wall_ms = self._env.wall_ms()
        first, end = facts.log_start_offset, facts.log_end_offset
        return compaction_job(
            facts,
            self._host.job_inputs(facts.partition, first, end),
            self._settings,
            now=Moment(wall_ms, int(asyncio.get_running_loop().time() * 1000)),
            cleaner_state=self._state_store.state_of(facts, wall_ms),
            job_id=job_id,
        )

    @contextmanager
    def adopting(self, partition: TopicPartition) -> Iterator[None]:
        """For the only one who is inside of `paused`: while the block runs others wait for it.

        In it files are published that were made outside. Raises PartitionBusyError where somebody
        else has paused it, too.
        """
        with self._control.adopting(partition):
            yield

    def remote_clean_adopted(
        self, facts: LogFacts, job: CleanJob, report: CleanReport, done: JobRecord
    ) -> None:
        """What was made outside is published: learn from it as from a job of a worker.

        `facts` are those of the log now; `job` and `report` name its generation and its folder.
        """
        offset = self._dispatcher.update_state(facts, job, report, done.dirty_bytes)
        self._scanner.save_checkpoint(job.partition, job.generation, offset)
        self._history.add(done)
        self._state_store.record(facts.data_directory, done)
        self._scanner.waiting.started(facts.partition)
        self.stats.adoptions += 1
        self.wake()

    def remote_clean_failed(self, facts: LogFacts, record: JobRecord) -> None:
        """A job that was done outside did not come to its end: keep it like one of a worker."""
        self._history.add(record)
        self._state_store.record(facts.data_directory, record)
        self._scanner.waiting.started(facts.partition)
        self.stats.failures += record.outcome == "failed"
        self.wake()

    def pause(self, partition: TopicPartition) -> bool:
        """An operator's pause: until `release`, also across restarts. False if there is one.

        A running job is given up; nobody waits for it. Raises KeyError for an unknown partition.
        """
        facts = self._facts_of(partition)
        now_ms = self._env.wall_ms()
        cleaner_state = self._state_store.state_of(facts, now_ms)
        if cleaner_state.held_since_ms is None:
            self._state_store.put(facts, replace(cleaner_state, held_since_ms=now_ms), at_once=True)
        self.offload.abort(partition, PAUSED_BY_OPERATOR)
        return self._control.pause(partition)

    def resume(self, partition: TopicPartition) -> bool:
        """End an operator's pause; False if there was none. Raises KeyError."""
        facts = self._facts_of(partition)
        cleaner_state = self._state_store.state_of(facts, self._env.wall_ms())
        if cleaner_state.held_since_ms is not None:
            self._state_store.put(facts, replace(cleaner_state, held_since_ms=None), at_once=True)
        return self._control.resume(partition)

    async def is_saved(self, partition: TopicPartition) -> bool:
        """Whether what an operator said last stands on the disk; waits for it, but not for long.

        Where it does not it is in force all the same, and is written as soon as the disk bears it.
        """
        return await self._state_store.saved(partition)

    def abort(self, partition: TopicPartition, reason: str = BY_OPERATOR) -> bool:
        """Give up a running job and a clean that was asked for; False if there is neither.

        The partition may be chosen again at once.
        """
        requested = self._scanner.requests.cancel(partition)
        elsewhere = self.offload.abort(partition, reason)
        return self._control.abort(partition, reason) or requested or elsewhere

    def retry(self, partition: TopicPartition) -> None:
        """Forget earlier failures: the partition was replaced, or its trouble was removed."""
        self._control.handle(partition, states.RetryRequested())
        self.offload.retry(partition)

    def request_clean(self, partition: TopicPartition) -> int | None:
        """Clean it next: earlier failures and the ratio do not matter. Raises KeyError.

        Returns the offset up to which it will be; that is wanted until it is reached
        (clean_requests.py). Lags, the active segment and open transactions bound it as ever: None
        where nothing can be cleaned now. Where it is held or paused this waits for the end of that.
        """
        facts = self._facts_of(partition)
        self.retry(partition)
        self.wake()
        verdict = self._scanner.assess(facts)
        section = None if verdict is None else verdict.section
        if section is None or section.dirty_bytes == 0:
            return None
        self._scanner.requests.add(facts, section.end_offset)
        return section.end_offset

    async def wait_cleaned(self, partition: TopicPartition, offset: int) -> None:
        """Wait until everything below `offset` is clean. As long as that takes: use a timeout."""
        self.wake()
        await self._scanner.wait_cleaned(partition, offset)

    def is_paused(self, partition: TopicPartition) -> bool:
        """Whether an operator's pause is in force."""
        return partition in self._control.operator_pauses

    @property
    def verdicts(self) -> dict[TopicPartition, Verdict]:
        """What the last look found, by partition."""
        return self._scanner.verdicts

    def cleaner_state(self, partition: TopicPartition) -> PartitionCleanerState | None:
        """What earlier jobs taught about a partition."""
        return self._state_store.entry(partition)

    @property
    def throttle(self) -> Throttle:
        """The budgets; a worker beside the pool's joins them, too."""
        return self._dispatcher.throttle

    def top_up(self, now: float) -> None:
        """For a worker beside the pool's: have bytes granted, unless a run has that done."""
        self._dispatcher.top_up(now)

    def status(self) -> PoolStatus:
        """What is going on."""
        workers = sorted(self._workers.workers.values(), key=lambda worker: worker.index)
        now = asyncio.get_running_loop().time()
        budgets = self._dispatcher.throttle.budgets
        return PoolStatus(
            tuple(
                worker_status(worker, self._dispatcher.attempt_of(worker), now)
                for worker in workers
            ),
            self.registry.in_progress(),
            self.registry.quarantines(),
            dict(self.verdicts),
            frozenset(self._control.operator_pauses),
            (budgets[0].rate, budgets[1].rate),
        )

    def explain(self, partition: TopicPartition) -> Explanation:
        """Why it is not being cleaned, or what is being done. Raises KeyError if it is unknown."""
        state = self.registry.state(partition)
        facts = self._facts_of(partition)
        verdict, request = self._scanner.assess(facts), self._scanner.requests.pending(facts)
        now_ms = self._env.wall_ms()
        waiting = [
            partition
            for partition in self._scanner.queue
            if partition not in self._control.attempts
        ]
        waits = partition in waiting and verdict is not None and verdict.to_clean
        return Explanation(
            partition=partition,
            at_ms=now_ms,
            state=state,
            verdict=verdict,
            transitions=self.registry.transitions(partition),
            queue_position=waiting.index(partition) + 1 if waits else None,
            next_attempt=None if verdict is None else next_attempt(verdict, now_ms),
            quarantine=states.past_of(state),
            last_job=self._history.last_of(partition),
            is_paused=partition in self._control.operator_pauses,
            requested_offset=None if request is None else request.end_offset,
            worker=self._worker_of(partition),
        )

    def _worker_of(self, partition: TopicPartition) -> WorkerStatus | None:
        run = self._control.attempts.get(partition)
        now = asyncio.get_running_loop().time()
        return None if run is None else worker_status(run.worker, run, now)

    def history(self, partition: TopicPartition | None = None, limit: int = 100) -> list[JobRecord]:
        """The last jobs, newest first: of one partition, or of all."""
        return self._history.newest(partition, limit)

    def _facts_of(self, partition: TopicPartition) -> LogFacts:
        facts = self._host.facts_of(partition)
        if facts is None:
            raise KeyError(partition)
        return facts

    def _kill(self, worker: PoolWorker) -> None:
        self._workers.kill(worker)

    # Looking for work -----------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            began = asyncio.get_running_loop().time()
            try:
                await self._scan()
            except Exception:
                # Supervised: a mistake in here must not silently end all cleaning.
                self.stats.scan_failures += 1
                logger.exception("looking for work failed")
            self.stats.scan_seconds = asyncio.get_running_loop().time() - began
            took = self._scanner.busy_seconds
            await asyncio.sleep(max(SCAN_PAUSE_SECONDS, SCAN_PAUSE_FACTOR * took))
            try:
                async with asyncio.timeout(
                    max(self._settings.backoff_ms / 1000, IDLE_SHARE * took)
                ):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _scan(self) -> None:
        """Judge every partition and give the most urgent ones to free workers."""
        candidates = await self._scanner.scan()
        seen = self._scanner.seen
        for partition in self.registry.quarantines().keys() - seen:
            self._control.handle(partition, states.RetryRequested())  # it exists no more
        self._state_store.keep_only(seen, self._host.exists)
        self._history.keep_only(seen)
        self._apply_saved_pauses()
        self._dispatcher.update_topic_limits()
        self._start(candidates)

    def _start(self, candidates: list[tuple[Verdict, LogFacts]]) -> None:
        """Give candidates to idle workers, and have a worker in each lane that needs one."""
        now = asyncio.get_running_loop().time()
        idle: dict[Lane, list[PoolWorker]] = {}
        for worker in self._workers.idle():
            idle.setdefault(lane_of(worker.index), []).append(worker)
        queue = {verdict.partition: (verdict, facts) for verdict, facts in candidates}
        choice = choose(
            [candidate_of(verdict) for verdict, _ in queue.values()],
            {lane: len(workers) for lane, workers in idle.items()},
            self._dispatcher.running_jobs(),
            self._requests_in_a_row,
        )
        self._requests_in_a_row = choice.requests_in_a_row
        for candidate, lane in choice.starts:
            verdict, facts = queue[candidate.partition]
            self._scanner.waiting.started(candidate.partition)
            self._dispatcher.begin(idle[lane].pop(0), facts, verdict)
        self._keep_lanes(choice.needed, now)

    def _keep_lanes(self, needed: frozenset[Lane], now: float) -> None:
        """A worker beside the regular ones stays for a while, as starting one takes a second."""
        before = set(self._lanes_until)
        self._lanes_until.update(dict.fromkeys(needed, now + LANE_IDLE_SECONDS))
        for lane in [lane for lane, until in self._lanes_until.items() if until <= now]:
            del self._lanes_until[lane]
        if set(self._lanes_until) != before:
            self._resize()

    def _resize(self) -> None:
        self._workers.resize(
            self._settings.workers,
            self._settings.nice,
            extra=frozenset(LANE_INDEX[lane] for lane in self._lanes_until),
        )

    def _apply_saved_pauses(self) -> None:
        """A hold belongs to the partition that it was put on: it goes with it, and comes back."""
        partitions = self._state_store.paused_partitions()
        for partition in self._control.operator_pauses - partitions:
            self._control.resume(partition)
        for partition in partitions - self._control.operator_pauses:
            self._control.pause(partition)
