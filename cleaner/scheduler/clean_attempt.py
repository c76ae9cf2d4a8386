"""One job with one worker, the waits that bound it, and what is shown of it."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Final

from cleaner import states
from cleaner.job import CleanJob, CleanReport
from cleaner.planning.order import Lane, RunningJob, is_long
from cleaner.planning.plan import Verdict
from cleaner.scheduler.history import JobRecord, Outcome, build_record, describe_damage
from cleaner.workers.throttle import Direction
from cleaner.workers.worker_pool import ABORT_SECONDS, STALL_SECONDS, PoolWorker, WorkerPoolLimits
from config.settings import CleanerSettings
from storage.model import TopicPartition


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Waits, in seconds."""

    abort: float = ABORT_SECONDS
    stall: float = STALL_SECONDS
    workers: WorkerPoolLimits = field(default_factory=WorkerPoolLimits)


# The numbers of the workers beside the regular ones, which are numbered from 0 to 63 at most
# (CleanerSettings.workers). Numbers below 0 are those of workers outside of the pool.
LANE_INDEX: Final = {Lane.REQUESTED: 100, Lane.SMALL: 101, Lane.LIMITED: 102}
_LANES: Final = {index: lane for lane, index in LANE_INDEX.items()}


def lane_of(index: int) -> Lane:
    """The lane of the worker with this number."""
    return _LANES.get(index, Lane.REGULAR)


def retry_delay_ms(failures: int, settings: CleanerSettings) -> int:
    """How long a partition is left alone after so many failures in a row."""
    assert failures >= 1
    doubled = settings.retry_backoff_ms << min(failures - 1, 40)
    return min(doubled, settings.retry_backoff_max_ms)


@dataclass(slots=True, eq=False)
class CleanAttempt:
    """A job under way."""

    number: int
    job: CleanJob
    worker: PoolWorker
    started_at: float  # the loop's clock, as `last_message_at`
    last_message_at: float
    started_ms: int  # wall clock
    dirty_bytes: int  # of the dirty section as planned
    data_directory: str  # that holds its partition
    spent_before: tuple[int, int]  # by its worker: bytes read and written
    waited_before: tuple[float, float]  # by its worker: seconds lost to the budgets
    progress_seen: float = 0.0  # bytes moved and seconds waited, at the last look
    spent: tuple[int, int] = (0, 0)  # at its end: bytes read and written
    waited: tuple[float, float] = (0.0, 0.0)  # at its end: seconds lost to the budgets
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    published: int = 0  # groups
    unpublished: int = 0  # groups whose files may still be in the folder
    keep_files: bool = (
        False  # a journal that failed half-way may need them: the next start's matter
    )
    failure: str = ""  # set where the end is a failure whatever the worker says
    abort_reason: str = ""  # who wanted the partition while it ran, for people
    stale_reason: str = ""  # set where it was given up because the log had changed under it: how
    report: CleanReport | None = None
    clean_below: int | None = None  # set with the report: what the checkpoint becomes
    input_bytes: int = 0  # that it was expected to read
    is_far_too_late: bool = False  # its partition was long beyond its deadline when it began
    abort_timer: asyncio.TimerHandle | None = None

    @classmethod
    def begin(
        cls,
        number: int,
        job: CleanJob,
        worker: PoolWorker,
        now: float,
        *,
        dirty_bytes: int,
        data_directory: str,
    ) -> "CleanAttempt":
        """A run that starts now."""
        side = worker.side
        return cls(
            number=number,
            job=job,
            worker=worker,
            started_at=now,
            last_message_at=now,
            started_ms=job.now_ms,
            dirty_bytes=dirty_bytes,
            data_directory=data_directory,
            spent_before=(side.spent(Direction.READ), side.spent(Direction.WRITE)),
            waited_before=(
                side.waited_seconds(Direction.READ),
                side.waited_seconds(Direction.WRITE),
            ),
        )

    def as_running(self, now: float) -> RunningJob:
        """What the choice of the next starts has to know of it."""
        running_ms = int(1000 * (now - self.started_at))
        return RunningJob(lane_of(self.worker.index), is_long(self.input_bytes, running_ms))

    def silent_seconds(self, now: float) -> float:
        """How long neither a word nor a charged byte was seen of it.

        A worker that waits for its budget is not silent: a low rate is no fault of its own.
        """
        side = self.worker.side
        seen = sum(
            side.spent(direction) + side.waited_seconds(direction) for direction in Direction
        )
        if seen != self.progress_seen:
            self.progress_seen = seen
            self.last_message_at = now
        return now - self.last_message_at

    def settle(self) -> None:
        """It is over: note what it took, as long as its worker's page can be read."""
        side = self.worker.side
        read, written = Direction.READ, Direction.WRITE
        self.spent = (
            side.spent(read) - self.spent_before[0],
            side.spent(written) - self.spent_before[1],
        )
        self.waited = (
            side.waited_seconds(read) - self.waited_before[0],
            side.waited_seconds(written) - self.waited_before[1],
        )

    def disarm(self) -> None:
        """Nobody waits for its end any more."""
        if self.abort_timer is not None:
            self.abort_timer.cancel()


def record_of(run: CleanAttempt, finished_ms: int, reason: str, *, aborted: bool) -> JobRecord:
    """What is remembered of a run that is over. `reason` makes it a failure."""
    job, report = run.job, run.report
    outcome: Outcome = "finished"
    if run.stale_reason:
        outcome, reason = "stale", run.stale_reason
    elif (aborted or report is None) and not (run.failure or reason):
        outcome, reason = "aborted", run.abort_reason
    elif aborted and not run.failure:
        outcome, reason = "aborted", f"{run.abort_reason}; {reason}" if run.abort_reason else reason
    elif report is not None and report.damaged:
        outcome, reason = "damaged", describe_damage(report.damaged)
    elif reason:
        outcome = "failed"
    record = build_record(
        job,
        report,
        outcome=outcome,
        reason=reason,
        started_ms=run.started_ms,
        finished_ms=finished_ms,
        published=run.published,
        dropped=run.unpublished,
        dirty_bytes=run.dirty_bytes,
        next_dirty_offset=run.clean_below or job.first_dirty_offset,
    )
    return replace(
        record,
        bytes_read=run.spent[Direction.READ],
        bytes_written=run.spent[Direction.WRITE],
        read_wait_seconds=run.waited[Direction.READ],
        write_wait_seconds=run.waited[Direction.WRITE],
    )


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker is doing."""

    index: int
    pid: int
    ready: bool
    partition: TopicPartition | None = None
    job_id: str = ""
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0
    lane: Lane = Lane.REGULAR


def worker_status(worker: PoolWorker, run: CleanAttempt | None, now: float) -> WorkerStatus:
    """A worker, and its run if it has one."""
    lane = lane_of(worker.index)
    if run is None:
        return WorkerStatus(worker.index, worker.link.pid, worker.ready, lane=lane)
    return WorkerStatus(
        worker.index,
        worker.link.pid,
        worker.ready,
        run.job.partition,
        run.job.job_id,
        run.stage,
        run.done_bytes,
        run.total_bytes,
        now - run.started_at,
        lane,
    )


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool at one moment, for people and for the API."""

    workers: tuple[WorkerStatus, ...]
    in_progress: dict[TopicPartition, states.State]
    quarantines: dict[TopicPartition, states.Quarantined]
    verdicts: dict[TopicPartition, Verdict]
    paused: frozenset[TopicPartition]  # paused by an operator
    rates: tuple[float | None, float | None]  # bytes read, written per second; None: unlimited
