"""The cleaner on the event loop: looks for work, hands it to workers, publishes what they bring.

Rule 1. Every change of a partition's state is an event sent to the registry. All of them happen on
        the loop, so there are no locks; what an event brings about is carried out in `_perform`.
Rule 2. Files of a partition change only while it is held (a job, a journal) or paused. Everything
        else that truncates, deletes or re-configures a log goes through `paused`.
Rule 3. A partition is let go of when its worker has let go: it said so, or it is dead; and when no
        unpublished file of the run is left in its folder.
Rule 4. Groups are published in the order in which they come, one at a time per worker.
Rule 5. Nothing is given up for good: a failure names its reason and the time of the next attempt.

What may be cleaned is decided in plan.py, what may happen to a partition in states.py, how fast in
throttle.py. This module does not know what is inside a log.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, assert_never

import structlog

from cleaner import states
from cleaner.channel import (
    ChannelError,
    GroupCleaned,
    JobDone,
    JobFailed,
    JobStopped,
    Message,
    Progressed,
    RunJob,
    WorkerReady,
)
from cleaner.crew import Crew, Worker
from cleaner.host import CleanerHost, LogFacts, PublishOutcome
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from cleaner.lookout import Lookout
from cleaner.plan import Verdict, plan_job
from cleaner.process import Spawn, spawn_process
from cleaner.registry import CleanerRegistry
from cleaner.run import PoolLimits, PoolStatus, Run, retry_delay_ms, worker_status
from cleaner.stats import PoolStats
from cleaner.throttle import TOP_UP_SECONDS, Direction, Throttle
from config.settings import CleanerSettings
from storage.env import Env
from storage.errors import StorageError, SwapRefusedError
from storage.model import TopicPartition
from storage.swap import discard_outputs

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
        self._limits = limits or PoolLimits()
        self._crew = Crew(spawn, self, self.stats, self._limits.crew)
        rates = settings.read_bytes_per_second, settings.write_bytes_per_second
        self._throttle = Throttle(*rates, now=0.0)  # its buckets are full: the past adds nothing
        self._runs: dict[TopicPartition, Run] = {}
        self._run_number = 0
        self._waiting: defaultdict[TopicPartition, deque[asyncio.Future[None]]]
        self._waiting = defaultdict(deque)
        self._wake = asyncio.Event()
        self._scheduler: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None

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
            self._handle(partition, states.AbortRequested())
        if self._ticker is not None:
            self._ticker.cancel()
        await self._crew.stop()
        for partition, run in list(self._runs.items()):
            # Its journal hangs on a dead disk: the next start will see to what is left.
            log.error("cleaner_run_given_up", partition=str(partition), run_id=run.job.run_id)
            run.disarm()
        self._lookout.stop()

    def configure(self, settings: CleanerSettings) -> None:
        """Take other settings; running jobs go on. `enabled` is read at the start only."""
        self._settings = settings
        rates = settings.read_bytes_per_second, settings.write_bytes_per_second
        self._throttle.set_rates(*rates, self._now())
        if self._scheduler is not None:
            self._crew.resize(settings.workers, settings.nice)
        self.wake()

    # What others ask ------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do: new data, another policy, other settings."""
        self._wake.set()

    @asynccontextmanager
    async def paused(self, partition: TopicPartition) -> AsyncIterator[None]:
        """Hold off cleaning of a partition while the block runs; a running job is given up first.

        May be nested, by the same or by different callers. Waits for the worker (a buffer or an
        fsync; a worker that does not react is killed) and for a journal under way.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[partition].append(granted)
        self._handle(partition, states.PauseRequested())
        try:
            await granted
            yield
        finally:
            # Also when cancelled while waiting: then it is a resume during an abort.
            waiting = self._waiting.get(partition)
            if waiting is not None and granted in waiting:
                waiting.remove(granted)
                if not waiting:
                    del self._waiting[partition]
            self._handle(partition, states.Resumed())

    def abort(self, partition: TopicPartition) -> bool:
        """Give up a running job, if there is one; the partition may be chosen again at once."""
        running = states.held(self.registry.state(partition))
        self._handle(partition, states.AbortRequested())
        return running

    def forgive(self, partition: TopicPartition) -> None:
        """Forget earlier failures: the partition was replaced, or its trouble was removed."""
        self._handle(partition, states.Forgiven())

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
        now = self._now()
        return PoolStatus(
            tuple(worker_status(worker, self._run_of(worker), now) for worker in workers),
            self.registry.in_progress(),
            self.registry.quarantines(),
            dict(self.verdicts),
        )

    # States ------------------------------------------------------------------------------------

    def _handle(self, partition: TopicPartition, event: states.Event) -> tuple[states.Effect, ...]:
        effects = self.registry.apply(partition, event, self._env.wall_ms())
        self._lookout.touched(partition)
        for effect in effects:
            self._perform(partition, effect)
        return effects

    def _perform(self, partition: TopicPartition, effect: states.Effect) -> None:
        match effect:
            case states.StartJob() | states.PublishGroup() | states.DropGroup():
                pass  # carried out by whoever sent the event: it holds the job or the group
            case states.SignalAbort():
                run = self._runs[partition]
                run.worker.side.abort(run.number)
                self._watch(run)
            case states.GrantPause():
                for waiter in self._waiting.pop(partition, ()):
                    if not waiter.done():
                        waiter.set_result(None)
            case states.SaveCheckpoint(offset):
                generation = self._runs[partition].job.generation
                self._lookout.save_checkpoint(partition, generation, offset)
            case states.ReportFailure(mark):
                self.stats.failures += 1
                wait_ms = mark.until_ms - self._now_ms()
                self._host.failed(partition, mark.reason, self._env.wall_ms() + wait_ms)
            case states.WakeScheduler():
                self.wake()
            case _:
                assert_never(effect)

    def _watch(self, run: Run) -> None:
        loop = asyncio.get_running_loop()
        run.watch = loop.call_later(self._limits.abort, self._not_heeded, run)

    def _not_heeded(self, run: Run) -> None:
        """The abort was a while ago. A worker that waits for a journal is not to blame."""
        partition = run.job.partition
        state = self.registry.state(partition)
        if self._runs.get(partition) is not run or not isinstance(state, states.Aborting):
            return
        if state.publishing:
            self._watch(run)
            return
        log.warning("cleaner_abort_not_heeded", partition=str(partition), pid=run.worker.link.pid)
        self._crew.kill(run.worker)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _now_ms(self) -> int:
        return int(self._now() * 1000)

    # Looking for work -----------------------------------------------------------------------

    async def _schedule(self) -> None:
        while True:
            self._wake.clear()
            began = self._now()
            try:
                await self._look()
            except Exception:
                # Supervised: a mistake in here must not silently end all cleaning.
                self.stats.scan_failures += 1
                log.exception("cleaner_look_failed")
            self.stats.scan_seconds = self._now() - began
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
            self._handle(partition, states.Forgiven())  # it exists no more
        for (verdict, facts), worker in zip(candidates, self._crew.idle(), strict=False):
            self._begin(worker, facts, verdict)

    # A run ------------------------------------------------------------------------------------

    def _begin(self, worker: Worker, facts: LogFacts, verdict: Verdict) -> None:
        """Take the partition and hand its job over."""
        partition = facts.partition
        self._handle(partition, states.Grabbed(self._now_ms()))
        try:
            run = self._start(worker, facts, verdict)
        except Exception as error:
            log.exception("cleaner_job_not_started", partition=str(partition))
            self._handle(partition, self._failure(partition, f"not started: {error!r}"))
            return
        worker.busy = True
        self._runs[partition] = run
        if self._ticker is None:
            self._tick()
        log.debug("cleaner_job_started", partition=str(partition), run_id=run.job.run_id)

    def _start(self, worker: Worker, facts: LogFacts, verdict: Verdict) -> Run:
        now_ms = self._env.wall_ms()
        job = plan_job(
            facts,
            verdict,
            self._host.job_inputs(facts.partition, facts.log_start_offset, facts.log_end_offset),
            self._settings,
            run_id=f"{now_ms:x}-{self._env.random_bytes(4).hex()}",
            now_ms=now_ms,
        )
        assert job is not None
        self._run_number += 1
        run = Run.begin(self._run_number, job, worker, self._now())
        worker.link.send(RunJob(run.number, job))
        self._throttle.join(worker.index, worker.side, self._now())
        return run

    def _tick(self) -> None:
        """Top the grants up and look for stalled workers, as long as jobs run."""
        self._ticker = None
        if not self._runs:
            return
        now = self._now()
        self._throttle.top_up(now)
        for run in list(self._runs.values()):
            self._check_stall(run, now)
        self._ticker = asyncio.get_running_loop().call_later(TOP_UP_SECONDS, self._tick)

    def _check_stall(self, run: Run, now: float) -> None:
        state = self.registry.state(run.job.partition)
        if isinstance(state, states.Publishing | states.Aborting):
            run.heard_at = now  # the worker may be waiting for us
        elif run.silent_seconds(now) >= self._limits.stall:
            run.failure = f"no progress for {self._limits.stall:g} s"
            self._handle(run.job.partition, states.AbortRequested())

    def worker_free(self, worker: Worker) -> None:
        """A worker can be given something to do."""
        del worker
        self.wake()

    async def worker_said(self, worker: Worker, message: Message) -> None:
        """Handle what a worker says about its run."""
        run = self._run_of(worker)
        if isinstance(message, RunJob | WorkerReady) or run is None or message.run != run.number:
            raise ChannelError(f"an unexpected {type(message).__name__}")
        run.heard_at = self._now()
        match message:
            case Progressed(_, stage, done_bytes, total_bytes):
                run.stage, run.done_bytes, run.total_bytes = stage, done_bytes, total_bytes
            case GroupCleaned(_, group):
                await self._publish(run, group)
            case JobDone(_, report):
                await self._done(run, report)
            case JobStopped():
                unasked = "" if self._aborting(run) else "stopped without being asked"
                await self._let_go(run, unasked)
            case JobFailed(_, reason, traceback, file_missing):
                log.info("cleaner_job_raised", run_id=run.job.run_id, traceback=traceback)
                if file_missing and self._is_outdated(run.job):
                    self.abort(run.job.partition)
                    reason = ""
                await self._let_go(run, reason)
            case _:
                assert_never(message)

    async def worker_gone(self, worker: Worker, how: str) -> None:
        """The worker is dead; so is its run."""
        run = self._run_of(worker)
        if run is not None:
            await self._let_go(run, "" if self._aborting(run) else f"its worker ended: {how}")

    def _run_of(self, worker: Worker) -> Run | None:
        return next((run for run in self._runs.values() if run.worker is worker), None)

    def _aborting(self, run: Run) -> bool:
        return isinstance(self.registry.state(run.job.partition), states.Aborting)

    def _is_outdated(self, job: CleanJob) -> bool:
        """Whether the log moved on under the job: retention took segments, or it was replaced."""
        now = self._facts_of(job.partition)
        return (
            now is None
            or now.generation != job.generation
            or now.log_start_offset > job.log_start_offset
        )

    def _facts_of(self, partition: TopicPartition) -> LogFacts | None:
        return next((facts for facts in self._host.facts() if facts.partition == partition), None)

    async def _publish(self, run: Run, group: CleanedGroup) -> None:
        """Have the host carry out one group's journal, unless the partition is being given back."""
        partition = run.job.partition
        effects = self._handle(partition, states.GroupReady())
        if states.PublishGroup() not in effects:
            self.stats.groups_dropped += 1
            run.unpublished += 1
            return
        outcome: PublishOutcome | None = None
        refusal = ""
        try:
            # Shielded: a journal is finished also where the wait for it is not.
            outcome = await asyncio.shield(self._host.publish(run.job, group))
        except SwapRefusedError as error:
            refusal = run.failure = f"publication refused: {error}"
        except Exception as error:
            if not isinstance(error, OSError | StorageError):  # a mistake of ours: say where
                log.exception("cleaner_publication_failed", partition=str(partition))
            refusal = run.failure = f"publication failed: {error}"
            run.keep_files = True
        if outcome is PublishOutcome.PUBLISHED:
            self.stats.groups_published += 1
        else:
            self.stats.groups_dropped += 1
            run.unpublished += 1
        if outcome is PublishOutcome.STALE:
            self.stats.stale += 1
            refusal = "stale generation"
        elif outcome is PublishOutcome.SOURCES_GONE and self._keeps_a_source(partition, group):
            # A later group may lack a tombstone whose old value stands in what remains of this
            # one: nothing after it may be published. The partition is judged anew at once.
            refusal = "some of its sources have gone"
        event = states.Refused(refusal) if refusal else states.Published()
        self._handle(partition, event)

    def _keeps_a_source(self, partition: TopicPartition, group: CleanedGroup) -> bool:
        facts = self._facts_of(partition)
        present = () if facts is None else (segment.base_offset for segment in facts.segments)
        return not set(group.source_base_offsets).isdisjoint(present)

    async def _done(self, run: Run, report: CleanReport) -> None:
        """The job came to its end. What it could not do is told like a failure."""
        job = run.job
        if (report.partition, report.run_id) != (job.partition, job.run_id):
            raise ChannelError(f"a report of {report.partition}, run {report.run_id}")
        reason, reached = "", None
        if report.damaged:
            path, position, why = report.damaged[0]
            reason = f"{path} is damaged at byte {position}: {why}"
            reached = report.next_dirty_offset
        elif report.next_dirty_offset <= job.first_dirty_offset:
            reason = "made no progress"
        seconds = self._now() - run.started_at
        finished = states.Finished(report.next_dirty_offset)
        if await self._let_go(run, reason, finished=finished, reached=reached):
            self.stats.count_report(run.worker.index, seconds, report)
            self._host.finished(job, report)

    async def _let_go(
        self,
        run: Run,
        reason: str,
        *,
        finished: states.Finished | None = None,
        reached: int | None = None,
    ) -> bool:
        """Give the partition back: a failure if there is a reason, else finished, else stopped.

        False if somebody had asked for it, and nothing but what was published counts.
        """
        try:
            if finished is None or run.unpublished:
                await self._remove_leftovers(run)
            self._settle(run)
        finally:
            # Whatever went wrong here: a partition that nobody works on is not kept from anybody.
            aborted = self._release(run, reason, finished, reached)
        return not aborted

    def _release(
        self, run: Run, reason: str, finished: states.Finished | None, reached: int | None
    ) -> bool:
        partition = run.job.partition
        reason = run.failure or reason
        event: states.Event = finished or states.Stopped()
        if reason:
            event = self._failure(partition, reason, reached)
        aborted = self._aborting(run)
        self.stats.aborted += aborted
        self._handle(partition, event)
        del self._runs[partition]
        run.disarm()
        run.worker.busy = False
        return aborted

    async def _remove_leftovers(self, run: Run) -> None:
        """While the partition is still held: whoever is granted a pause finds a clean folder."""
        job = run.job
        if run.keep_files:
            return
        try:
            gone = await asyncio.to_thread(discard_outputs, self._env, job.directory, job.run_id)
        except OSError as error:
            # The next start removes them; until then they only take room.
            log.warning("cleaner_files_not_removed", run_id=job.run_id, why=str(error))
            return
        if gone:
            log.debug("cleaner_files_removed", run_id=job.run_id, files=len(gone))

    def _failure(
        self, partition: TopicPartition, reason: str, reached: int | None = None
    ) -> states.Failed:
        past = states.past_of(self.registry.state(partition))
        failures = 1 if past is None else past.failures + 1
        until_ms = self._now_ms() + retry_delay_ms(failures, self._settings)
        return states.Failed(reason, until_ms, reached)

    def _settle(self, run: Run) -> None:
        """Give unspent bytes back and count what was spent and waited."""
        side, stats = run.worker.side, self.stats
        self._throttle.leave(run.worker.index, self._now())
        stats.read_bytes += side.spent(Direction.READ) - run.spent_before[0]
        stats.written_bytes += side.spent(Direction.WRITE) - run.spent_before[1]
        stats.read_wait_seconds += side.waited_seconds(Direction.READ) - run.waited_before[0]
        stats.write_wait_seconds += side.waited_seconds(Direction.WRITE) - run.waited_before[1]
