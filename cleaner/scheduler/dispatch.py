"""Run jobs on workers: start them, publish their groups, end them.

Rule 1. A partition is released when its worker has reported the end of the job or has died, and
        when no unpublished file of the job is left in the partition's folder.
Rule 2. Groups are published in the order in which they arrive, one journal at a time per worker.
Rule 3. Every failure, a full disk included, is retried: it names its reason and the time of the
        next attempt.
Rule 4. A large job is divided into parts (planning/shared_clean.py). The worker that starts it
        always has a part, if only one that waits, and its task publishes the groups. Idle workers
        help, one part after the other, as long as no other partition waits for a worker.
Rule 5. If a worker of a shared job fails or dies, the others are aborted and the attempt fails.

This module does not know what is inside a log.
"""

import asyncio
from dataclasses import replace
from typing import assert_never

import structlog

from cleaner import states
from cleaner.engine.shared.parts import Waited
from cleaner.host import VOID_REASONS, CleanerHost, LogFacts, PublishOutcome, void_outcome
from cleaner.job import CleanedGroup, CleanJob, CleanReport, new_job_id
from cleaner.planning.cleaner_state import damaged_base, state_after_job
from cleaner.planning.grouping import plan_job
from cleaner.planning.plan import Verdict
from cleaner.planning.scheduling_order import Lane, RunningJob
from cleaner.planning.shared_clean import PartSizes, SharedClean, can_share
from cleaner.scheduler.clean_attempt import (
    CleanAttempt,
    PoolLimits,
    lane_of,
    make_record,
    remove_unpublished,
    retry_delay_ms,
)
from cleaner.scheduler.cleaner_state_store import CleanerStateStore
from cleaner.scheduler.control import PartitionControl
from cleaner.scheduler.history import History, describe_damage
from cleaner.scheduler.wait_times import TopicRests
from cleaner.stats import PoolStats
from cleaner.workers.channel import (
    ChannelError,
    EndParts,
    GroupsCleaned,
    JobDone,
    JobFailed,
    JobStopped,
    Message,
    Order,
    PartDone,
    Progressed,
    RunJob,
    RunPart,
    SoloResult,
    WorkerReady,
)
from cleaner.workers.priority import DEADLINE_GRACE_MS, Priorities
from cleaner.workers.throttle import TOP_UP_SECONDS, Direction, Throttle
from cleaner.workers.worker_pool import PoolWorker
from config.settings import CleanerSettings
from storage.env import Env
from storage.errors import StorageError, SwapRefusedError
from storage.model import TopicPartition

logger = structlog.get_logger("cleaner")


class JobDispatcher:
    """Runs jobs; implements WorkerListener."""

    def __init__(
        self,
        host: CleanerHost,
        env: Env,
        control: PartitionControl,
        *,
        settings: CleanerSettings,
        stats: PoolStats,
        limits: PoolLimits,
        history: History,
        state_store: CleanerStateStore,
        rests: TopicRests,
    ) -> None:
        self.settings = settings
        self.part_sizes = PartSizes()
        self._host = host
        self._env = env
        self._control = control
        self._stats = stats
        self._limits = limits
        self._history = history
        self._state_store = state_store
        self._rests = rests
        rates = settings.read_bytes_per_second, settings.write_bytes_per_second
        floor = settings.floor_bytes_per_second
        # Time before the start adds nothing: the buckets start full.
        self.throttle = Throttle(*rates, now=0.0, floor_bytes_per_second=floor)
        self._priorities = Priorities(lambda: self.settings.nice)
        self._attempts = control.attempts
        # Expected duration of the next job, for partitions whose last one was published too late.
        self._work_ms: dict[TopicPartition, int] = {}
        # Generations of logs whose cleans one worker has to run, because of transactions or space.
        self._unshared: dict[TopicPartition, str] = {}
        self._others_wait = False  # other partitions, for a regular worker
        self._attempt_number = 0
        self._ticker: asyncio.TimerHandle | None = None

    def configure(self, settings: CleanerSettings) -> None:
        """Apply changed settings; running jobs continue."""
        self.settings = settings
        rates = settings.read_bytes_per_second, settings.write_bytes_per_second
        floor = settings.floor_bytes_per_second
        self.throttle.set_rates(*rates, self._now(), floor_bytes_per_second=floor)

    def stop(self) -> None:
        """Stop the timer."""
        if self._ticker is not None:
            self._ticker.cancel()

    def attempt_of(self, worker: PoolWorker) -> CleanAttempt | None:
        """Return the attempt that the worker runs, if any."""
        return next((attempt for attempt in self._attempts.values() if attempt.has(worker)), None)

    def running_jobs(self) -> list[RunningJob]:
        """Return the running jobs as scheduling_order.py sees them."""
        now = self._now()
        return [job for attempt in self._attempts.values() for job in attempt.as_running(now)]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _now_ms(self) -> int:
        return int(self._now() * 1000)

    # Start --------------------------------------------------------------------------------

    def begin(self, worker: PoolWorker, facts: LogFacts, verdict: Verdict) -> None:
        """Start a job of the partition on the worker."""
        partition = facts.partition
        self._control.handle(partition, states.JobStarted(self._now_ms()))
        try:
            attempt = self._start(worker, facts, verdict)
        except Exception as error:
            logger.exception("clean not started", partition=str(partition))
            self._control.handle(partition, self._failure(partition, f"not started: {error!r}"))
            return
        worker.busy = True
        self._attempts[partition] = attempt
        if self._ticker is None:
            self._tick()
        logger.debug("clean started", partition=str(partition), job_id=attempt.job.job_id)

    def _start(self, worker: PoolWorker, facts: LogFacts, verdict: Verdict) -> CleanAttempt:
        now_ms = self._env.wall_ms()
        # Since the scan, the clock may have been set, and a client may have changed settings: what
        # was acknowledged before a clean begins applies to it.
        trusted = facts.clock_trusted and self._host.clock_trusted()
        config = self._host.config_of(facts.partition)
        job = plan_job(
            replace(facts, clock_trusted=trusted, config=config),
            verdict,
            self._host.job_inputs(facts.partition, facts.log_start_offset, facts.log_end_offset),
            self.settings,
            job_id=new_job_id(self._env),
            now_ms=now_ms,
            work_ms_min=self._work_ms.get(facts.partition, 0),
        )
        assert job is not None
        self._attempt_number += 1
        section = verdict.section
        attempt = CleanAttempt.begin(
            self._attempt_number,
            job,
            worker,
            self._now(),
            dirty_bytes=0 if section is None or job.expired_only else section.dirty_bytes,
            data_directory=facts.data_directory,
        )
        attempt.input_bytes = verdict.input_bytes
        attempt.is_far_too_late = verdict.over_lag_ms > DEADLINE_GRACE_MS
        if self._is_shared(job, worker):
            attempt.shared = SharedClean(job, self.settings.workers, self.part_sizes)
            self._send_part(attempt, worker)
        else:
            worker.link.send(RunJob(attempt.number, job))
        self.throttle.join(worker.index, worker.side, self._now())
        if verdict.is_limited:
            attempt.limited_topic = facts.topic_id
            self._rests.started(facts.topic_id, self._now_ms())
        return attempt

    def _is_shared(self, job: CleanJob, worker: PoolWorker) -> bool:
        """Return whether to divide the job: idle workers may help now or later."""
        return (
            lane_of(worker.index) is Lane.REGULAR
            and not job.verify  # the parts of a job are not verified
            and self._unshared.get(job.partition) != job.generation
            and can_share(job, self.settings.workers, self.part_sizes)
        )

    # Shared jobs --------------------------------------------------------------------------

    def help_running_jobs(self, idle: list[PoolWorker], *, others_wait: bool) -> None:
        """Let idle regular workers help with shared jobs, unless other partitions wait."""
        self._others_wait = others_wait
        if others_wait:
            return
        for attempt in self._attempts.values():
            state = self._control.state(attempt.job.partition)
            if attempt.shared is None or not isinstance(state, states.Cleaning | states.Publishing):
                continue
            while idle and self._send_part(attempt, idle[0], helps=True):
                worker = idle.pop(0)
                logger.debug(
                    "worker joined clean", worker=worker.index, partition=str(attempt.job.partition)
                )

    def _send_part(self, attempt: CleanAttempt, worker: PoolWorker, *, helps: bool = False) -> bool:
        """Send the next part; without one, a helper gets none. Return whether one was sent."""
        assert attempt.shared is not None
        part = attempt.shared.next_part(self._now())
        if part is None and worker is not attempt.worker:
            return False
        if helps:
            self.throttle.join(worker.index, worker.side, self._now())
            attempt.join(worker)
            worker.busy = True
        if part is None:
            part = attempt.shared.wait_part()
        attempt.part_sent(worker, part.number)
        worker.link.send(RunPart(attempt.number, attempt.job, part))
        return True

    async def _part_done(self, attempt: CleanAttempt, worker: PoolWorker, done: PartDone) -> None:
        """Take a result; give the worker its next part, or release it."""
        shared = attempt.shared
        if shared is None or attempt.part_ended(worker) != done.number:
            raise ChannelError(f"an unexpected {type(done).__name__}")
        if self._is_aborting(attempt):
            await self._part_stopped(attempt, worker)
            return
        phase = shared.phase
        shared.finished(done.number, done.result, self._now())
        attempt.stage, attempt.done_bytes, attempt.total_bytes = shared.progress
        if shared.refusal:
            self._unshared[attempt.job.partition] = attempt.job.generation
            attempt.stale_reason = f"it cannot be shared: {shared.refusal}"
            self._control.abort(attempt.job.partition, attempt.stale_reason)
            await self._part_stopped(attempt, worker)
            return
        if shared.phase is not phase:
            self._control.wake()  # there are parts for idle workers
        if worker is not attempt.worker:
            is_needed = worker.index < self.settings.workers and not self._others_wait
            if not (is_needed and self._send_part(attempt, worker)):
                self._release_worker(attempt, worker)
            return
        is_done = shared.is_done
        if not is_done:
            self._send_part(attempt, worker)
        for group in shared.take_groups():
            await self._publish(attempt, (group,))
        if not is_done:
            return
        if self._is_aborting(attempt):
            await self._part_stopped(attempt, worker)
        else:
            await self._done(attempt, shared.report())

    async def _part_stopped(
        self, attempt: CleanAttempt, worker: PoolWorker, *, died: bool = False
    ) -> None:
        """Note that a worker of an aborted shared job has stopped; the last ends the attempt."""
        attempt.part_ended(worker)
        if died or worker is not attempt.worker:
            self._release_worker(attempt, worker)
        # While the attempt ends, a worker that had stopped before may still die.
        if not attempt.active and not attempt.is_ending:
            attempt.is_ending = True
            assert attempt.shared is not None
            attempt.unpublished += len(attempt.shared.take_groups())
            await self._end_attempt(attempt, "")

    async def _part_failed(
        self, attempt: CleanAttempt, worker: PoolWorker, reason: str, *, died: bool = False
    ) -> None:
        """Fail a shared job because of one of its workers."""
        if not self._is_aborting(attempt):
            attempt.failure = attempt.failure or reason
            self._control.handle(attempt.job.partition, states.AbortRequested(), attempt.failure)
        await self._part_stopped(attempt, worker, died=died)

    def _release_worker(self, attempt: CleanAttempt, worker: PoolWorker) -> None:
        """Release a worker from a job, and let it free its memory."""
        self.throttle.leave(worker.index, self._now())
        self._priorities.rest(worker)
        attempt.leave(worker)
        worker.busy = False
        if attempt.shared is not None and not worker.link.is_gone():
            worker.link.send(EndParts(attempt.number))

    def top_up(self, now: float) -> None:
        """Top up the budgets; the timer does so while jobs run."""
        if self._ticker is None:
            self.throttle.tick(now, self._host.foreground)

    def _tick(self) -> None:
        """Top up the budgets and check for stalled workers, repeatedly while jobs run."""
        self._ticker = None
        if not self._attempts:
            return
        now = self._now()
        self.throttle.tick(now, self._host.foreground)
        busy = (
            (worker, attempt.is_far_too_late)
            for attempt in self._attempts.values()
            for worker in attempt.workers
        )
        self._priorities.adjust(now, busy, self.throttle.spare_capacity.floor)
        for attempt in list(self._attempts.values()):
            self._check_stall(attempt, now)
        self._ticker = asyncio.get_running_loop().call_later(TOP_UP_SECONDS, self._tick)

    def _check_stall(self, attempt: CleanAttempt, now: float) -> None:
        state = self._control.state(attempt.job.partition)
        if isinstance(state, states.Publishing | states.Aborting):
            attempt.last_message_at = now  # the worker may be waiting for us
        elif attempt.silent_seconds(now) >= self._limits.stall:
            attempt.failure = f"no progress for {self._limits.stall:g} s"
            self._control.handle(attempt.job.partition, states.AbortRequested(), attempt.failure)

    # Messages of workers ------------------------------------------------------------------

    def worker_free(self, worker: PoolWorker) -> None:
        """Wake the scheduler: a worker is idle."""
        del worker
        self._control.wake()

    async def worker_sent(self, worker: PoolWorker, message: Message) -> None:
        """Handle a worker's message about its attempt."""
        attempt = self.attempt_of(worker)
        if isinstance(message, Order | EndParts | WorkerReady | SoloResult):
            raise ChannelError(f"an unexpected {type(message).__name__}")
        if attempt is None or message.run != attempt.number:
            raise ChannelError(f"an unexpected {type(message).__name__}")
        if not (isinstance(message, PartDone) and isinstance(message.result, Waited)):
            attempt.last_message_at = self._now()
        match message:
            case PartDone():
                await self._part_done(attempt, worker, message)
            case Progressed() | GroupsCleaned() | JobDone() if attempt.shared is not None:
                if not isinstance(message, Progressed):
                    raise ChannelError(f"an unexpected {type(message).__name__}")
            case Progressed(_, stage, done_bytes, total_bytes):
                attempt.stage, attempt.done_bytes, attempt.total_bytes = (
                    stage,
                    done_bytes,
                    total_bytes,
                )
            case GroupsCleaned(_, groups):
                await self._publish(attempt, groups)
            case JobDone(_, report):
                await self._done(attempt, report)
            case JobStopped():
                reason = "" if self._is_aborting(attempt) else "the worker stopped without an abort"
                await self._stopped(attempt, worker, reason)
            case JobFailed():
                await self._failed(attempt, worker, message)
            case _:
                assert_never(message)

    async def _failed(self, attempt: CleanAttempt, worker: PoolWorker, message: JobFailed) -> None:
        """End a job that failed, which is no failure if the log lost its sources meanwhile."""
        job, reason = attempt.job, message.reason
        if message.traceback:
            where = {"partition": str(job.partition), "job_id": job.job_id}
            logger.error("clean failed", **where, reason=reason, traceback=message.traceback)
        if message.file_missing and self._is_outdated(job):
            attempt.stale_reason = "retention removed its source segments"
            self._control.abort(job.partition, attempt.stale_reason)
            reason = ""
        await self._stopped(attempt, worker, reason)
        if message.index_wrong:
            self._host.repair_transaction_indexes(job.partition)

    async def worker_exited(self, worker: PoolWorker, how: str) -> None:
        """End the attempt of a dead worker."""
        attempt = self.attempt_of(worker)
        if attempt is not None:
            reason = "" if self._is_aborting(attempt) else f"its worker died: {how}"
            await self._stopped(attempt, worker, reason, died=True)

    async def _stopped(
        self, attempt: CleanAttempt, worker: PoolWorker, reason: str, *, died: bool = False
    ) -> None:
        """End the work of a worker: it failed if there is a reason."""
        if attempt.shared is None:
            await self._end_attempt(attempt, reason)
        elif reason:
            await self._part_failed(attempt, worker, reason, died=died)
        else:
            await self._part_stopped(attempt, worker, died=died)

    def _is_aborting(self, attempt: CleanAttempt) -> bool:
        return isinstance(self._control.state(attempt.job.partition), states.Aborting)

    def _is_outdated(self, job: CleanJob) -> bool:
        """Return whether the log was replaced, truncated or lost segments to retention."""
        facts = self._host.facts_of(job.partition)
        return (
            facts is None
            or facts.generation != job.generation
            or facts.log_start_offset > job.log_start_offset
        )

    # Publishing ---------------------------------------------------------------------------

    async def _publish(self, attempt: CleanAttempt, groups: tuple[CleanedGroup, ...]) -> None:
        """Publish groups by one journal, unless the attempt is being aborted."""
        partition = attempt.job.partition
        effects = self._control.handle(partition, states.GroupsReady())
        if states.PublishGroups() not in effects:
            self._count_dropped(attempt, len(groups))
            return
        outcomes: tuple[PublishOutcome, ...] = ()
        refusal = ""
        try:
            if not attempt.job.expired_only:
                await self._state_store.prepare_publication(partition, attempt.job.end_offset)
            # Shielded: a journal runs to its end even if this task is cancelled.
            outcomes = await asyncio.shield(self._host.publish(attempt.job, groups))
        except SwapRefusedError as error:
            refusal = attempt.failure = f"publication refused: {error}"
        except Exception as error:
            if not isinstance(error, OSError | StorageError):  # an error of ours: log where
                logger.exception("publication failed", partition=str(partition))
            refusal = attempt.failure = f"publication failed: {error}"
            attempt.keep_files = True
        published = outcomes.count(PublishOutcome.PUBLISHED)
        self._stats.groups_published += published
        attempt.published += published
        self._count_dropped(attempt, len(groups) - published)
        void = void_outcome(outcomes)
        if void is not None:
            refusal = VOID_REASONS[void]
            self._stats.stale += void is PublishOutcome.STALE
            if void is PublishOutcome.LATE:
                # Doubled, so that the next attempt is in time even on a still slower machine.
                self._work_ms[partition] = 2 * int(1000 * (self._now() - attempt.started_at))
                refusal += "; the next attempt gets more time"
            attempt.stale_reason = refusal
        elif any(
            outcome is PublishOutcome.SOURCES_GONE and self._keeps_a_source(partition, group)
            for group, outcome in zip(groups, outcomes, strict=False)  # empty after a failure
        ):
            # A later group may lack a tombstone whose old value is in the remaining sources of
            # this one: publish nothing after it. The next scan plans the partition again.
            refusal = attempt.stale_reason = "retention removed some of its source segments"
        event = states.Refused(refusal) if refusal else states.Published()
        self._control.handle(partition, event)

    def _count_dropped(self, attempt: CleanAttempt, count: int) -> None:
        self._stats.groups_dropped += count
        attempt.unpublished += count

    def _keeps_a_source(self, partition: TopicPartition, group: CleanedGroup) -> bool:
        facts = self._host.facts_of(partition)
        present = () if facts is None else (segment.base_offset for segment in facts.segments)
        return not set(group.source_base_offsets).isdisjoint(present)

    # Ending -------------------------------------------------------------------------------

    async def _done(self, attempt: CleanAttempt, report: CleanReport) -> None:
        """Take the report of a job; new damage and a lack of progress count as failures."""
        job = attempt.job
        if (report.partition, report.job_id) != (job.partition, job.job_id):
            raise ChannelError(f"a report of {report.partition}, attempt {report.job_id}")
        attempt.report = report
        reason = ""
        if report.damaged and not self._is_known_damage(job, report):
            reason = describe_damage(report.damaged)
        elif self._is_without_progress(job, report):
            reason = "made no progress"
        if not self._is_aborting(attempt):
            attempt.clean_below = self._update_state(attempt, report)
        if job.victims and not reason:
            self._control.victims_rewritten(job.partition)
        seconds = self._now() - attempt.started_at
        if 4000 * seconds < job.delete_retention_ms:
            self._work_ms.pop(job.partition, None)  # fast again
        clean_below = attempt.clean_below
        finished = states.Finished(clean_below)
        if await self._end_attempt(attempt, reason, finished=finished, clean_below=clean_below):
            self._stats.count_report(attempt.worker.index, seconds, report)
            self._stats.expiries += job.expired_only
            self._host.finished(job, report, damage=reason if report.damaged else "")

    def _is_without_progress(self, job: CleanJob, report: CleanReport) -> bool:
        if job.expired_only or report.damaged or report.cleaned or report.resolved_end is not None:
            return False
        return report.next_dirty_offset <= job.first_dirty_offset

    def _is_known_damage(self, job: CleanJob, report: CleanReport) -> bool:
        """Return whether all damage was reported before: then it is no failure."""
        facts = self._host.facts_of(job.partition)
        if facts is None:
            return False
        existing = {damage.path for damage in facts.damaged}
        saved_state = self._state_store.state_of(facts, self._env.wall_ms()).damaged
        sizes = {s.base_offset: s.size_bytes for s in facts.segments}
        return all(
            path in existing or (base, sizes.get(base)) in saved_state
            for path, base in (
                (damage.path, damaged_base(damage.path)) for damage in report.damaged
            )
        )

    def _update_state(self, attempt: CleanAttempt, report: CleanReport) -> int | None:
        """Save what the job showed; return the new checkpoint if the job cleaned dirty data."""
        job = attempt.job
        facts = self._host.facts_of(job.partition)
        if facts is None or facts.generation != job.generation:
            return None
        clean_below = self.update_state(facts, job, report, attempt.dirty_bytes)
        return None if job.expired_only and not report.damaged else clean_below

    def update_state(
        self, facts: LogFacts, job: CleanJob, report: CleanReport, dirty_bytes: int
    ) -> int:
        """Store the new state of a log after a job; return the offset below which it is clean."""
        cleaner_state, clean_below = state_after_job(
            self._state_store.state_of(facts, self._env.wall_ms()),
            job,
            report,
            facts,
            dirty_bytes=dirty_bytes,
            alpha=self.settings.survivorship_alpha,
        )
        self._state_store.put(facts, cleaner_state)
        return clean_below

    async def _end_attempt(
        self,
        attempt: CleanAttempt,
        reason: str,
        *,
        finished: states.Finished | None = None,
        clean_below: int | None = None,
    ) -> bool:
        """Release the partition: failed if there is a reason, else finished, else stopped.

        Return False if the attempt was aborted: then only the published groups count.
        """
        try:
            if finished is None or attempt.unpublished or attempt.shared is not None:
                await self._remove_leftovers(attempt)
            self._settle(attempt)
        finally:
            # Whatever went wrong here, no worker owns the partition any more: release it.
            aborted = self._release(attempt, reason, finished, clean_below)
        return not aborted

    def _release(
        self,
        attempt: CleanAttempt,
        reason: str,
        finished: states.Finished | None,
        clean_below: int | None,
    ) -> bool:
        partition = attempt.job.partition
        reason = attempt.failure or reason
        event: states.Event = finished or states.Stopped()
        if reason:
            event = self._failure(partition, reason, clean_below)
        aborted = self._is_aborting(attempt)
        self._stats.aborted += aborted
        self._control.handle(partition, event)
        del self._attempts[partition]
        if attempt.limited_topic is not None:
            self._rests.ended(attempt.limited_topic, sum(attempt.spent))
        attempt.cancel_timer()
        attempt.worker.busy = False
        record = make_record(attempt, self._env.wall_ms(), reason, aborted=aborted)
        self._history.add(record)
        self._state_store.record(attempt.data_directory, record)
        return aborted

    async def _remove_leftovers(self, attempt: CleanAttempt) -> None:
        """Remove unpublished files before the release: a granted pause sees a clean folder."""
        if not attempt.keep_files:
            await remove_unpublished(self._env, attempt.job)

    def _failure(
        self, partition: TopicPartition, reason: str, clean_below: int | None = None
    ) -> states.Failed:
        quarantine = states.past_of(self._control.state(partition))
        failures = 1 if quarantine is None else quarantine.failures + 1
        until_ms = self._now_ms() + retry_delay_ms(failures, self.settings)
        return states.Failed(reason, until_ms, clean_below)

    def _settle(self, attempt: CleanAttempt) -> None:
        """Release the workers, and count what was spent and waited."""
        for worker in attempt.workers:
            self._release_worker(attempt, worker)
        stats = self._stats
        stats.read_bytes += attempt.spent[Direction.READ]
        stats.written_bytes += attempt.spent[Direction.WRITE]
        stats.read_wait_seconds += attempt.waited[Direction.READ]
        stats.write_wait_seconds += attempt.waited[Direction.WRITE]
