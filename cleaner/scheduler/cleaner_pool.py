"""The cleaner's scheduler on the event loop: scans partitions and starts jobs on workers.

plan.py decides what may be cleaned, states.py what may happen to a partition (control.py carries
it out), dispatch.py runs jobs, throttle.py limits their speed. This module does not know what is
inside a log. Callers use the pool's parts: `control`, `operator`, `remote`, `history`, ...
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import structlog

from cleaner import states
from cleaner.host import CleanerHost, LogFacts, NotServedError
from cleaner.job import RangeDigest
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.planning.estimate import Estimate, estimate, rates
from cleaner.planning.plan import default_strategy
from cleaner.planning.scheduling_order import (
    NO_TURNS,
    Candidate,
    Choice,
    Lane,
    build_candidate,
    choose,
    first_candidates,
)
from cleaner.scheduler.clean_attempt import (
    LANE_INDEX,
    PoolLimits,
    PoolStatus,
    WorkerStatus,
    lane_of,
    worker_status,
)
from cleaner.scheduler.cleaner_state_store import CleanerStateStore
from cleaner.scheduler.control import AT_STOP, PartitionControl
from cleaner.scheduler.dispatch import JobDispatcher
from cleaner.scheduler.explain import Explanation, next_attempt
from cleaner.scheduler.history import History, JobRecord
from cleaner.scheduler.in_progress_map import InProgressMap
from cleaner.scheduler.offload import Offload
from cleaner.scheduler.operator_commands import OperatorCommands
from cleaner.scheduler.partition_scanner import PartitionScanner, ScanTurns
from cleaner.scheduler.remote_cleans import RemoteCleans
from cleaner.stats import PoolStats
from cleaner.workers.process import Spawn, spawn_process
from cleaner.workers.worker_pool import PoolWorker, WorkerPool
from config.settings import CleanerSettings
from storage.env import Env
from storage.errors import StorageError
from storage.model import TopicPartition

SCAN_PAUSE_SECONDS: Final = 0.02  # between two scans, however often the pool is woken
SCAN_PAUSE_FACTOR: Final = 10  # a scan that took t seconds is followed by a pause of 10 t
LANE_IDLE_SECONDS: Final = 60.0  # then the worker of an unused lane ends, which frees its memory
IDLE_SCAN_FACTOR: Final = 50  # the pause after a scan if nothing wakes the pool
# Candidates of each requester, and topics with one, that may start before the next scan, on workers
# that become idle.
QUEUED_MAX: Final = 64
# Until a partition whose inputs are not read is left out: others wait meanwhile. A healthy disk
# reads the transaction indexes of hundreds of segments in this time.
INPUT_SECONDS: Final = 10.0
INPUT_RETRY_SECONDS: Final = 60.0

logger = structlog.get_logger("cleaner")


class CleanerPool:
    """Keeps logs clean from `start` to `stop`. Its public attributes are its parts."""

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
        """`measured` wraps the scheduler and measures how long it blocks the event loop."""
        self._measured = measured
        self.in_progress = InProgressMap()
        self.stats = PoolStats()
        self.state_store = CleanerStateStore(env, host.allow_checkpoints, host.fail_directory)
        self.offload = Offload(settings, lambda: int(asyncio.get_running_loop().time() * 1000))
        self.scanner = PartitionScanner(
            host, self.in_progress, env, self.stats, self.state_store, offload=self.offload
        )
        self.scanner.strategy = default_strategy(settings)
        self._host = host
        self._settings = settings
        self._env = env
        self.history = History()
        bounds = limits or PoolLimits()
        self.control = PartitionControl(
            host,
            env,
            self.scanner,
            in_progress=self.in_progress,
            stats=self.stats,
            abort_seconds=bounds.abort,
            wake=self.wake,
            kill=self._kill,
        )
        self.dispatcher = JobDispatcher(
            host,
            env,
            self.control,
            settings=settings,
            stats=self.stats,
            limits=bounds,
            history=self.history,
            state_store=self.state_store,
            rests=self.scanner.rests,
        )
        self.operator = OperatorCommands(
            host,
            env,
            self.control,
            scanner=self.scanner,
            state_store=self.state_store,
            offload=self.offload,
            wake=self.wake,
        )
        self.remote = RemoteCleans(
            host,
            env,
            self.dispatcher,
            scanner=self.scanner,
            state_store=self.state_store,
            history=self.history,
            stats=self.stats,
            wake=self.wake,
        )
        self._workers = WorkerPool(
            spawn, self.dispatcher, self.stats, bounds.workers, measured=measured
        )
        self._unread: dict[TopicPartition, float] = {}  # loop time until they are tried again
        self._queue: list[Candidate] = []  # the first ones of the last scan, in starting order
        self._turns = NO_TURNS
        self._lanes_until: dict[Lane, float] = {}  # loop time; the lanes that have a worker
        self._wake = asyncio.Event()
        self._scheduler: asyncio.Task[None] | None = None
        self._loaded: list[JobRecord] | None = None  # until `start`

    # Start and stop ----------------------------------------------------------------------

    async def load(self) -> None:
        """Read the saved state. Call it before views are opened: they use it to check ledgers."""
        directories = sorted(self._host.data_directories())
        self._loaded = await self.state_store.load(directories, self._directory_of)

    def _directory_of(self, partition: TopicPartition) -> str | None:
        facts = self._host.facts_of(partition)
        return None if facts is None else facts.data_directory

    async def start(self) -> None:
        """Apply the saved state, start the workers and the scheduler.

        Operators' pauses are in force when this returns. If the cleaner is disabled, only the
        state is loaded.
        """
        assert self._scheduler is None
        try:
            await self._apply_state()
        except Exception:
            # An error of ours in here must not keep the broker from starting.
            logger.exception("cleaner state not read")
        if not self._settings.enabled:
            return
        self._resize()
        work = self._schedule()
        if self._measured is not None:
            work = self._measured(work)
        self._scheduler = asyncio.create_task(work, name="cleaner-scheduler")

    async def _apply_state(self) -> None:
        if self._loaded is None:
            await self.load()
        records, self._loaded = self._loaded or [], None
        facts = list(self._host.facts())
        await self._compare_checkpoints(facts)
        self.state_store.report_loaded()
        self.state_store.keep_only(
            frozenset(log_facts.partition for log_facts in facts), self._host.exists
        )
        self._apply_saved_pauses()
        self.history.load(records)

    async def _compare_checkpoints(self, facts: Iterable[LogFacts]) -> None:
        """Take over the state of each log; lower the checkpoints above its first dirty offset.

        If another broker has cleaned a log, the state on the disk has the higher offset before, as
        `cleaned_elsewhere_end`: views need it also at later starts.
        """
        to_lower: list[tuple[LogFacts, int]] = []
        for log_facts in facts:
            cleaner_state = self.state_store.state_at_start(log_facts, self._env.wall_ms())
            checkpoint = log_facts.checkpoint_offset or 0
            first_dirty_offset = cleaner_state.first_dirty_offset
            if first_dirty_offset is None or checkpoint < first_dirty_offset:
                self.state_store.note_checkpoint(log_facts.partition, checkpoint, is_on_disk=True)
            elif cleaner_state.is_cleaned_elsewhere(checkpoint):
                end = max(checkpoint, cleaner_state.cleaned_elsewhere_end)
                new_state = replace(cleaner_state, cleaned_elsewhere_end=end)
                self.state_store.put(log_facts, new_state)
                to_lower.append((log_facts, first_dirty_offset))
            elif checkpoint > first_dirty_offset:  # the process ended before it wrote the lower one
                self.scanner.save_checkpoint(
                    log_facts.partition, log_facts.generation, first_dirty_offset
                )
        # One write for each data directory, if there is room: a full disk must not be tried for
        # each partition.
        one_in_each = {facts.data_directory: facts.partition for facts, _ in to_lower}
        await asyncio.gather(*map(self.state_store.saved, one_in_each.values()))
        for log_facts, first_dirty_offset in to_lower:
            self._lower_checkpoint(log_facts, first_dirty_offset)

    def _lower_checkpoint(self, facts: LogFacts, first_dirty_offset: int) -> None:
        logger.warning(
            "cleaner checkpoint lowered",
            partition=str(facts.partition),
            checkpoint_offset=facts.checkpoint_offset,
            first_dirty_offset=first_dirty_offset,
            reason=(
                "the cleaner state has a lower offset: another broker has cleaned the log, or the "
                "checkpoint file or varve.cleaner is damaged or missing"
            ),
        )
        self.scanner.save_checkpoint(facts.partition, facts.generation, first_dirty_offset)

    async def stop(self) -> None:
        """Release all partitions and end the workers, within the limits."""
        if self._scheduler is not None:
            self._scheduler.cancel()
            await asyncio.gather(self._scheduler, return_exceptions=True)
        for partition in list(self.in_progress.busy_partitions()):
            self.control.abort(partition, AT_STOP)
        self.dispatcher.stop()
        await self._workers.stop()
        for partition, attempt in list(self.control.attempts.items()):
            # Its journal hangs on a failed disk: the next start recovers it.
            logger.error(
                "clean abandoned",
                partition=str(partition),
                job_id=attempt.job.job_id,
                reason="its journal hangs",
            )
            attempt.cancel_timer()
        self.scanner.stop()
        await self.state_store.close()

    def configure(self, settings: CleanerSettings) -> None:
        """Apply changed settings; running jobs continue. `enabled` needs a restart."""
        self._settings = settings
        self.scanner.strategy = default_strategy(settings)
        self.offload.configure(settings)
        self.dispatcher.configure(settings)
        if self._scheduler is not None:
            self._resize()
        self.wake()

    def wake(self) -> None:
        """Scan soon: there may be new data, a closed segment, or a changed policy or setting."""
        self._wake.set()

    def paused(
        self, partition: TopicPartition, reason: str = "its log was changed"
    ) -> AbstractAsyncContextManager[None]:
        """See PartitionControl.paused."""
        return self.control.paused(partition, reason)

    def forget_failures(self, partition: TopicPartition) -> None:
        """See OperatorCommands.forget_failures."""
        self.operator.forget_failures(partition)

    # Status ------------------------------------------------------------------------------

    async def wait_cleaned(self, partition: TopicPartition, offset: int) -> None:
        """Wait until everything below `offset` is clean. Has no time limit: use a timeout."""
        self.wake()
        await self.scanner.wait_cleaned(partition, offset)

    def status(self) -> PoolStatus:
        """Return the state of the workers and of all partitions that are not idle."""
        now = asyncio.get_running_loop().time()
        read, write = self.dispatcher.throttle.budgets
        return PoolStatus(
            workers=self.workers(),
            in_progress=self.in_progress.states(),
            quarantines=self.in_progress.quarantines(),
            verdicts=dict(self.scanner.verdicts),
            paused=frozenset(self.control.operator_pauses),
            rates=(read.rate, write.rate),
            speeds=(read.moved_bytes_per_second(now), write.moved_bytes_per_second(now)),
        )

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return the workers in order, with their jobs."""
        workers = sorted(self._workers.workers.values(), key=lambda worker: worker.index)
        now = asyncio.get_running_loop().time()
        return tuple(
            worker_status(worker, self.dispatcher.attempt_of(worker), now) for worker in workers
        )

    def waiting(self) -> list[TopicPartition]:
        """Return the candidates of the last scan that wait for a worker, the next one first."""
        attempts = self.control.attempts
        return [partition for partition in self.scanner.queue if partition not in attempts]

    def explain(self, partition: TopicPartition) -> Explanation:
        """Explain why the partition is or is not being cleaned. Raises NotServedError."""
        state = self.in_progress.state(partition)
        facts = self._host.facts_of(partition)
        if facts is None:
            raise NotServedError(partition)
        verdict, request = self.scanner.assess(facts), self.scanner.requests.pending(facts)
        now_ms = self._env.wall_ms()
        waiting = self.waiting()
        is_waiting = partition in waiting and verdict is not None and verdict.to_clean
        return Explanation(
            partition=partition,
            at_ms=now_ms,
            state=state,
            verdict=verdict,
            transitions=self.in_progress.transitions(partition),
            queue_position=waiting.index(partition) + 1 if is_waiting else None,
            next_attempt=(
                next_attempt(verdict, now_ms)
                if verdict is not None and self._settings.enabled
                else None
            ),
            quarantine=states.past_of(state),
            last_job=self.history.last_of(partition),
            is_paused=partition in self.control.operator_pauses,
            requested_offset=None if request is None else request.end_offset,
            worker=self._worker_of(partition),
            is_enabled=self._settings.enabled,
        )

    async def estimate(
        self, partition: TopicPartition, slack: float | None
    ) -> tuple[Estimate, float] | None:
        """Return an estimate of the next clean of a partition, and its seconds at present rates.

        None if nothing of the partition can be cleaned. Raises NotServedError.
        """
        facts = self._host.facts_of(partition)
        if facts is None:
            raise NotServedError(partition)
        verdict = self.scanner.assess(facts)
        if verdict is None:
            return None
        # In a thread: a log can have tens of thousands of segments.
        work = partial(estimate, facts, verdict, self.state_of(partition), slack=slack)
        result = await asyncio.to_thread(work)
        if result is None:
            return None
        return result, result.cost.seconds(*self.rates_of(partition))

    def rates_of(self, partition: TopicPartition) -> tuple[float, float]:
        """Return the bytes per second that a worker reads and writes at present."""
        last = self.history.last_of(partition)
        moved = 0 if last is None else last.bytes_read + last.bytes_written
        took = 0.0 if last is None else last.seconds
        return rates(
            self._settings.read_bytes_per_second,
            self._settings.write_bytes_per_second,
            moved,
            took,
        )

    def state_of(self, partition: TopicPartition) -> PartitionCleanerState:
        """Return what the cleaner knows of a partition's content. Raises NotServedError."""
        facts = self._host.facts_of(partition)
        if facts is None:
            raise NotServedError(partition)
        return self.state_store.state_of(facts, self._env.wall_ms())

    def store_digests(
        self, partition: TopicPartition, end_offset: int, digests: tuple[RangeDigest, ...]
    ) -> None:
        """Store digests of the last records below an offset, which a check of the log computed.

        Raises NotServedError.
        """
        facts = self._host.facts_of(partition)
        if facts is None:
            raise NotServedError(partition)
        cleaner_state = self.state_store.state_of(facts, self._env.wall_ms())
        new_state = replace(cleaner_state, digest_end=end_offset, digests=digests)
        self.state_store.put(facts, new_state)

    def _worker_of(self, partition: TopicPartition) -> WorkerStatus | None:
        attempt = self.control.attempts.get(partition)
        now = asyncio.get_running_loop().time()
        return None if attempt is None else worker_status(attempt.worker, attempt, now)

    def _kill(self, worker: PoolWorker) -> None:
        self._workers.kill(worker)

    # Scheduling --------------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            started_at = asyncio.get_running_loop().time()
            try:
                await self._scan()
            except Exception:
                # An error of ours in here must not end all cleaning.
                self.stats.scan_failures += 1
                logger.exception("scan of partitions failed")
            self.stats.scan_seconds = asyncio.get_running_loop().time() - started_at
            busy_seconds = self.scanner.busy_seconds
            await self._start_queued(max(SCAN_PAUSE_SECONDS, SCAN_PAUSE_FACTOR * busy_seconds))
            idle_seconds = max(self._settings.backoff_ms / 1000, IDLE_SCAN_FACTOR * busy_seconds)
            try:
                async with asyncio.timeout(idle_seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _scan(self) -> None:
        """Assess every partition and give the most urgent ones to idle workers."""
        candidates = await self.scanner.scan()
        existing, turns = self.scanner.existing, ScanTurns()
        for partition in self.in_progress.quarantines().keys() - existing:
            self.control.handle(partition, states.RetryRequested())
        self.state_store.keep_only(existing, self._host.exists)
        await turns.end()
        self.history.keep_only(existing)
        self._unread = {p: until for p, until in self._unread.items() if p in existing}
        await turns.end()
        self._apply_saved_pauses()
        await turns.end()
        waiting = []
        for verdict, facts in candidates:
            requested_by = self.scanner.requests.requested_by(facts)
            waiting.append(build_candidate(verdict, requested_by))
            await turns.take()
        await self._start(waiting)
        await turns.end()
        self._queue = first_candidates(waiting, self.scanner.waiting.topics_ms, QUEUED_MAX)

    async def _start_queued(self, seconds: float) -> None:
        """Wait; meanwhile, give candidates of the last scan to workers that become idle.

        A scan of thousands of partitions, and the pause after it, take longer than a small job.
        """
        now, changed = asyncio.get_running_loop().time, self.scanner.changed
        end = now() + seconds
        try:
            while self._queue and end - now() > SCAN_PAUSE_SECONDS:
                await asyncio.sleep(SCAN_PAUSE_SECONDS)
                self._queue = [each for each in self._queue if each.partition not in changed]
                if self._workers.idle():
                    chosen = await self._start(self._queue)
                    self._queue = [each for each in self._queue if each not in chosen]
        except Exception:
            self.stats.scan_failures += 1
            logger.exception("start of queued candidates failed")
        await asyncio.sleep(max(0.0, end - now()))

    async def _start(self, waiting: Sequence[Candidate]) -> Collection[Candidate]:
        """Give candidates to idle workers, and start a worker for each lane that needs one.

        Return the chosen candidates. Those that are none any more are not started.
        """
        now = asyncio.get_running_loop().time()
        waiting = [each for each in waiting if self._unread.get(each.partition, 0.0) <= now]
        idle, choice = self._choose(waiting)
        partitions = [candidate.partition for candidate, _, _ in choice.starts]
        if any([await self._load_inputs(partition) for partition in partitions]):
            waiting = [each for each in waiting if each.partition not in self._unread]
            idle, choice = self._choose(waiting)  # other tasks have run
        now = asyncio.get_running_loop().time()
        self._turns = choice.turns
        for candidate, lane, _ in choice.starts:
            facts = self._host.facts_of(candidate.partition)
            verdict = None if facts is None else self.scanner.assess(facts)
            if facts is not None and verdict is not None and verdict.to_clean:
                self.scanner.waiting.started(candidate.partition, int(now * 1000))
                self.dispatcher.begin(idle[lane].pop(0), facts, verdict)
        self.dispatcher.help_running_jobs(
            idle.get(Lane.REGULAR, []),
            others_wait=choice.others_wait,
        )
        self._keep_lanes(choice.needed, now)
        return [start.candidate for start in choice.starts]

    async def _load_inputs(self, partition: TopicPartition) -> bool:
        """Load the inputs of a job, in bounded time; return whether other tasks have run.

        The disk of one partition may hang or fail: it is left out for a while.
        """
        try:
            async with asyncio.timeout(INPUT_SECONDS):
                has_waited = await self._host.load_job_inputs(partition)
        except (OSError, StorageError) as error:  # TimeoutError is an OSError
            reason = str(error) or f"its disk did not answer in {INPUT_SECONDS:.0f} s"
            logger.warning("clean not started", partition=str(partition), reason=reason)
            self._unread[partition] = asyncio.get_running_loop().time() + INPUT_RETRY_SECONDS
            return True
        self._unread.pop(partition, None)
        return has_waited

    def _choose(self, waiting: Sequence[Candidate]) -> tuple[dict[Lane, list[PoolWorker]], Choice]:
        """Return the idle workers of each lane, and what to start on them."""
        idle: dict[Lane, list[PoolWorker]] = {}
        for worker in self._workers.idle():
            idle.setdefault(lane_of(worker.index), []).append(worker)
        choice = choose(
            waiting,
            {lane: len(workers) for lane, workers in idle.items()},
            self.dispatcher.running_jobs(),
            self._turns,
            self.scanner.waiting.topics_ms,
        )
        return idle, choice

    def _keep_lanes(self, needed: frozenset[Lane], now: float) -> None:
        """Keep the worker of a lane for LANE_IDLE_SECONDS: starting one takes a second."""
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
        """Make the pauses in force those of the state store, as log directories come and go."""
        partitions = self.state_store.paused_partitions()
        for partition in self.control.operator_pauses - partitions:
            self.control.resume(partition)
        for partition in partitions - self.control.operator_pauses:
            self.control.pause(partition)
