"""Jobs under way: handed to workers, published group by group, ended.

Rule 1. A partition is let go of when its worker has let go: it said so, or it is dead; and when no
        unpublished file of the run is left in its folder.
Rule 2. Groups are published in the order in which they come, one journal at a time per worker.
Rule 3. Nothing is given up for good: a failure names its reason and the time of the next attempt.

It does not know what is inside a log.
"""

import asyncio
from typing import assert_never

import structlog

from cleaner import states
from cleaner.host import CleanerHost, LogFacts, PublishOutcome
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from cleaner.planning.cleaner_state import damaged_base, state_after_job
from cleaner.planning.grouping import plan_job
from cleaner.planning.order import RunningJob
from cleaner.planning.plan import Verdict
from cleaner.scheduler.clean_attempt import (
    CleanAttempt,
    PoolLimits,
    record_of,
    retry_delay_ms,
)
from cleaner.scheduler.cleaner_state_store import CleanerStateStore
from cleaner.scheduler.control import PartitionControl
from cleaner.scheduler.history import History, describe_damage
from cleaner.stats import PoolStats
from cleaner.workers.channel import (
    ChannelError,
    GroupsCleaned,
    JobDone,
    JobFailed,
    JobStopped,
    Message,
    OutputRefused,
    OutputsVerified,
    Progressed,
    RunJob,
    VerifyJob,
    WorkerReady,
)
from cleaner.workers.priority import DEADLINE_GRACE_MS, Priorities
from cleaner.workers.throttle import TOP_UP_SECONDS, Direction, Throttle, TopicLimit
from cleaner.workers.worker_pool import PoolWorker
from config.settings import CleanerSettings
from storage.env import Env
from storage.errors import StorageError, SwapRefusedError
from storage.model import TopicPartition
from storage.segments.swap import discard_outputs

logger = structlog.get_logger("cleaner")


class JobDispatcher:
    """Listens to the workers (crew.WorkerListener)."""

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
        memory: CleanerStateStore,
    ) -> None:
        self.settings = settings
        self._host = host
        self._env = env
        self._control = control
        self._stats = stats
        self._limits = limits
        self._history = history
        self._state_store = memory
        rates = settings.read_bytes_per_second, settings.write_bytes_per_second
        floor = settings.floor_bytes_per_second
        # Its buckets are full: the past adds nothing.
        self.throttle = Throttle(*rates, now=0.0, floor_bytes_per_second=floor)
        self._priorities = Priorities(lambda: self.settings.nice)
        self._attempts = control.attempts
        self._topic_limits: dict[str, TopicLimit] = {}
        # Partitions of which a job was published too late, and what to expect of the next one.
        self._work_ms: dict[TopicPartition, int] = {}
        self._attempt_number = 0
        self._ticker: asyncio.TimerHandle | None = None

    def configure(self, settings: CleanerSettings) -> None:
        """Take other settings; running jobs go on."""
        self.settings = settings
        rates = settings.read_bytes_per_second, settings.write_bytes_per_second
        floor = settings.floor_bytes_per_second
        self.throttle.set_rates(*rates, self._now(), floor_bytes_per_second=floor)

    def update_topic_limits(self) -> None:
        """Take the rate limits that topics of jobs under way have now."""
        for run in self._attempts.values():
            facts = self._host.facts_of(run.job.partition)
            if facts is not None:
                self.throttle.set_limit(run.worker.index, self._topic_limit(facts))
        now = self._now()
        for topic in [topic for topic, limit in self._topic_limits.items() if limit.is_idle(now)]:
            del self._topic_limits[topic]

    def _topic_limit(self, facts: LogFacts) -> TopicLimit | None:
        rate = facts.config.cleaner_bytes_per_second_max
        if rate is None:
            return None
        limit = self._topic_limits.get(facts.partition.topic)
        if limit is None:
            limit = self._topic_limits[facts.partition.topic] = TopicLimit(rate, self._now())
        limit.set_rate(rate, self._now())
        return limit

    def stop(self) -> None:
        """No more ticks."""
        if self._ticker is not None:
            self._ticker.cancel()

    def attempt_of(self, worker: PoolWorker) -> CleanAttempt | None:
        """What a worker is doing."""
        return next((run for run in self._attempts.values() if run.worker is worker), None)

    def running_jobs(self) -> list[RunningJob]:
        """The jobs under way, as the choice of the next starts sees them."""
        now = self._now()
        return [run.as_running(now) for run in self._attempts.values()]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _now_ms(self) -> int:
        return int(self._now() * 1000)

    # Beginning ----------------------------------------------------------------------------

    def begin(self, worker: PoolWorker, facts: LogFacts, verdict: Verdict) -> None:
        """Take the partition and hand its job over."""
        partition = facts.partition
        self._control.handle(partition, states.JobStarted(self._now_ms()))
        try:
            run = self._start(worker, facts, verdict)
        except Exception as error:
            logger.exception("clean not started", partition=str(partition))
            self._control.handle(partition, self._failure(partition, f"not started: {error!r}"))
            return
        worker.busy = True
        self._attempts[partition] = run
        if self._ticker is None:
            self._tick()
        logger.debug("clean started", partition=str(partition), job_id=run.job.job_id)

    def _start(self, worker: PoolWorker, facts: LogFacts, verdict: Verdict) -> CleanAttempt:
        now_ms = self._env.wall_ms()
        job = plan_job(
            facts,
            verdict,
            self._host.job_inputs(facts.partition, facts.log_start_offset, facts.log_end_offset),
            self.settings,
            job_id=f"{now_ms:x}-{self._env.random_bytes(4).hex()}",
            now_ms=now_ms,
            work_ms_min=self._work_ms.get(facts.partition, 0),
        )
        assert job is not None
        self._attempt_number += 1
        section = verdict.section
        run = CleanAttempt.begin(
            self._attempt_number,
            job,
            worker,
            self._now(),
            dirty_bytes=0 if section is None or job.expired_only else section.dirty_bytes,
            data_directory=facts.data_directory,
        )
        run.input_bytes = verdict.input_bytes
        run.is_far_too_late = verdict.over_lag_ms > DEADLINE_GRACE_MS
        worker.link.send(RunJob(run.number, job))
        limit = self._topic_limit(facts)
        self.throttle.join(worker.index, worker.side, self._now(), limit)
        return run

    def top_up(self, now: float) -> None:
        """Grant what was earned; nothing to do while the ticker runs."""
        if self._ticker is None:
            self.throttle.tick(now, self._host.foreground)

    def _tick(self) -> None:
        """Top the grants up and look for stalled workers, as long as jobs run."""
        self._ticker = None
        if not self._attempts:
            return
        now = self._now()
        self.throttle.tick(now, self._host.foreground)
        busy = ((run.worker, run.is_far_too_late) for run in self._attempts.values())
        self._priorities.adjust(now, busy, self.throttle.borrowing.floor)
        for run in list(self._attempts.values()):
            self._check_stall(run, now)
        self._ticker = asyncio.get_running_loop().call_later(TOP_UP_SECONDS, self._tick)

    def _check_stall(self, run: CleanAttempt, now: float) -> None:
        state = self._control.state(run.job.partition)
        if isinstance(state, states.Publishing | states.Aborting):
            run.last_message_at = now  # the worker may be waiting for us
        elif run.silent_seconds(now) >= self._limits.stall:
            run.failure = f"no progress for {self._limits.stall:g} s"
            self._control.handle(run.job.partition, states.AbortRequested())

    # What workers say ---------------------------------------------------------------------

    def worker_free(self, worker: PoolWorker) -> None:
        """A worker can be given something to do."""
        del worker
        self._control.wake()

    async def worker_sent(self, worker: PoolWorker, message: Message) -> None:
        """Handle what a worker says about its run."""
        run = self.attempt_of(worker)
        if isinstance(message, RunJob | VerifyJob | WorkerReady | OutputsVerified | OutputRefused):
            raise ChannelError(f"an unexpected {type(message).__name__}")
        if run is None or message.run != run.number:
            raise ChannelError(f"an unexpected {type(message).__name__}")
        run.last_message_at = self._now()
        match message:
            case Progressed(_, stage, done_bytes, total_bytes):
                run.stage, run.done_bytes, run.total_bytes = stage, done_bytes, total_bytes
            case GroupsCleaned(_, groups):
                await self._publish(run, groups)
            case JobDone(_, report):
                await self._done(run, report)
            case JobStopped():
                unasked = "" if self._aborting(run) else "stopped without being asked"
                await self._end_attempt(run, unasked)
            case JobFailed(_, reason, traceback, file_missing):
                if traceback:
                    where = {"partition": str(run.job.partition), "job_id": run.job.job_id}
                    logger.error("clean raised", **where, reason=reason, traceback=traceback)
                if file_missing and self._is_outdated(run.job):
                    run.stale_reason = "its sources have gone"
                    self._control.abort(run.job.partition, run.stale_reason)
                    reason = ""
                await self._end_attempt(run, reason)
            case _:
                assert_never(message)

    async def worker_exited(self, worker: PoolWorker, how: str) -> None:
        """The worker is dead; so is its run."""
        run = self.attempt_of(worker)
        if run is not None:
            await self._end_attempt(run, "" if self._aborting(run) else f"its worker ended: {how}")

    def _aborting(self, run: CleanAttempt) -> bool:
        return isinstance(self._control.state(run.job.partition), states.Aborting)

    def _is_outdated(self, job: CleanJob) -> bool:
        """Whether the log moved on under the job: retention took segments, or it was replaced."""
        now = self._host.facts_of(job.partition)
        return (
            now is None
            or now.generation != job.generation
            or now.log_start_offset > job.log_start_offset
        )

    # Publishing ---------------------------------------------------------------------------

    async def _publish(self, run: CleanAttempt, groups: tuple[CleanedGroup, ...]) -> None:
        """Have the host publish groups by one journal, unless the partition is being given back."""
        partition = run.job.partition
        effects = self._control.handle(partition, states.GroupsReady())
        if states.PublishGroups() not in effects:
            self._dropped(run, len(groups))
            return
        outcomes: tuple[PublishOutcome, ...] = ()
        refusal = ""
        try:
            # Shielded: a journal is finished also where the wait for it is not.
            outcomes = await asyncio.shield(self._host.publish(run.job, groups))
        except SwapRefusedError as error:
            refusal = run.failure = f"publication refused: {error}"
        except Exception as error:
            if not isinstance(error, OSError | StorageError):  # a mistake of ours: say where
                logger.exception("publication failed", partition=str(partition))
            refusal = run.failure = f"publication failed: {error}"
            run.keep_files = True
        published = outcomes.count(PublishOutcome.PUBLISHED)
        self._stats.groups_published += published
        run.published += published
        self._dropped(run, len(groups) - published)
        if PublishOutcome.STALE in outcomes:
            self._stats.stale += 1
            refusal = run.stale_reason = "stale generation"
        elif PublishOutcome.LATE in outcomes:
            # Doubled: so the next attempt is not too late though the machine becomes slower still.
            self._work_ms[partition] = 2 * int(1000 * (self._now() - run.started_at))
            refusal = run.stale_reason = (
                "it took so long that its tombstones would be removed before delete.retention.ms"
                " is over; it is planned again with more time"
            )
        elif PublishOutcome.NEEDED in outcomes:
            refusal = run.stale_reason = (
                "a compacted view still needs records that the clean would remove"
            )
        elif any(
            outcome is PublishOutcome.SOURCES_GONE and self._keeps_a_source(partition, group)
            for group, outcome in zip(groups, outcomes, strict=False)  # none after a failure
        ):
            # A later group may lack a tombstone whose old value stands in what remains of this
            # one: nothing after it may be published. The partition is judged anew at once.
            refusal = run.stale_reason = "some of its sources have gone"
        event = states.Refused(refusal) if refusal else states.Published()
        self._control.handle(partition, event)

    def _dropped(self, run: CleanAttempt, count: int) -> None:
        self._stats.groups_dropped += count
        run.unpublished += count

    def _keeps_a_source(self, partition: TopicPartition, group: CleanedGroup) -> bool:
        facts = self._host.facts_of(partition)
        present = () if facts is None else (segment.base_offset for segment in facts.segments)
        return not set(group.source_base_offsets).isdisjoint(present)

    # Ending -------------------------------------------------------------------------------

    async def _done(self, run: CleanAttempt, report: CleanReport) -> None:
        """The job came to its end. What it could not do is told like a failure."""
        job = run.job
        if (report.partition, report.job_id) != (job.partition, job.job_id):
            raise ChannelError(f"a report of {report.partition}, run {report.job_id}")
        run.report = report
        reason = ""
        if report.damaged and not self._is_known_damage(job, report):
            reason = describe_damage(report.damaged)
        elif self._is_without_progress(job, report):
            reason = "made no progress"
        if not self._aborting(run):
            run.clean_below = self._update_state(run, report)
        seconds = self._now() - run.started_at
        if 4000 * seconds < job.delete_retention_ms:
            self._work_ms.pop(job.partition, None)  # it is as fast as others again
        reached = run.clean_below
        if await self._end_attempt(run, reason, finished=states.Finished(reached), reached=reached):
            self._stats.count_report(run.worker.index, seconds, report)
            self._stats.expiries += job.expired_only
            self._host.finished(job, report, damage=reason if report.damaged else "")

    def _is_without_progress(self, job: CleanJob, report: CleanReport) -> bool:
        if job.expired_only or report.damaged or report.cleaned:
            return False
        return report.next_dirty_offset <= job.first_dirty_offset

    def _is_known_damage(self, job: CleanJob, report: CleanReport) -> bool:
        """Whether all of it was told before: then it is no news, and no reason to wait."""
        facts = self._host.facts_of(job.partition)
        if facts is None:
            return False
        existing = {damage.path for damage in facts.damaged}
        saved_state = self._state_store.state_of(facts, self._env.wall_ms()).damaged
        sizes = {s.base_offset: s.size_bytes for s in facts.segments}
        return all(
            path in existing or (base, sizes.get(base)) in saved_state
            for path, base in ((path, damaged_base(path)) for path, _, _ in report.damaged)
        )

    def _update_state(self, run: CleanAttempt, report: CleanReport) -> int | None:
        """Remember what the job taught; how far the log is clean now, if that was its matter."""
        job = run.job
        facts = self._host.facts_of(job.partition)
        if facts is None or facts.generation != job.generation:
            return None
        clean_below = self.update_state(facts, job, report, run.dirty_bytes)
        return None if job.expired_only and not report.damaged else clean_below

    def update_state(
        self, facts: LogFacts, job: CleanJob, report: CleanReport, dirty_bytes: int
    ) -> int:
        """Remember what a job taught, whoever did it; how far the log is clean now."""
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
        run: CleanAttempt,
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
        self, run: CleanAttempt, reason: str, finished: states.Finished | None, reached: int | None
    ) -> bool:
        partition = run.job.partition
        reason = run.failure or reason
        event: states.Event = finished or states.Stopped()
        if reason:
            event = self._failure(partition, reason, reached)
        aborted = self._aborting(run)
        self._stats.aborted += aborted
        self._control.handle(partition, event)
        del self._attempts[partition]
        run.disarm()
        run.worker.busy = False
        record = record_of(run, self._env.wall_ms(), reason, aborted=aborted)
        self._history.add(record)
        self._state_store.record(run.data_directory, record)
        return aborted

    async def _remove_leftovers(self, run: CleanAttempt) -> None:
        """While the partition is still held: whoever is granted a pause finds a clean folder."""
        job = run.job
        if run.keep_files:
            return
        try:
            gone = await asyncio.to_thread(discard_outputs, self._env, job.directory, job.job_id)
        except OSError as error:
            # The next start removes them; until then they only take room.
            logger.warning("files of a clean not removed", job_id=job.job_id, reason=str(error))
            return
        if gone:
            logger.debug("files of a clean removed", job_id=job.job_id, files=len(gone))

    def _failure(
        self, partition: TopicPartition, reason: str, reached: int | None = None
    ) -> states.Failed:
        past = states.past_of(self._control.state(partition))
        failures = 1 if past is None else past.failures + 1
        until_ms = self._now_ms() + retry_delay_ms(failures, self.settings)
        return states.Failed(reason, until_ms, reached)

    def _settle(self, run: CleanAttempt) -> None:
        """Give unspent bytes back and count what was spent and waited."""
        self.throttle.leave(run.worker.index, self._now())
        self._priorities.rest(run.worker)
        run.settle()
        stats = self._stats
        stats.read_bytes += run.spent[Direction.READ]
        stats.written_bytes += run.spent[Direction.WRITE]
        stats.read_wait_seconds += run.waited[Direction.READ]
        stats.write_wait_seconds += run.waited[Direction.WRITE]
