"""One attempt to clean a partition, with one worker or several: its limits, status and files."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from cleaner import states
from cleaner.job import CleanJob, CleanReport
from cleaner.planning.plan import Verdict
from cleaner.planning.scheduling_order import Lane, RunningJob, is_long
from cleaner.planning.shared_clean import SharedClean
from cleaner.scheduler.history import JobRecord, Outcome, build_record, describe_damage
from cleaner.workers.throttle import Direction
from cleaner.workers.worker_pool import ABORT_SECONDS, STALL_SECONDS, PoolWorker, WorkerPoolLimits
from config.settings import CleanerSettings
from storage.env import Env
from storage.model import TopicPartition
from storage.swap.swap_journal import discard_outputs

logger = structlog.get_logger("cleaner")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Timeouts in seconds."""

    abort: float = ABORT_SECONDS
    stall: float = STALL_SECONDS
    workers: WorkerPoolLimits = field(default_factory=WorkerPoolLimits)


# Indexes of the workers of the other lanes. Regular workers have indexes from 0 to 63
# (CleanerSettings.workers), dedicated workers have negative ones.
LANE_INDEX: Final = {Lane.REQUESTED: 100, Lane.SMALL: 101}
_LANES: Final = {index: lane for lane, index in LANE_INDEX.items()}


def lane_of(index: int) -> Lane:
    """Return the lane of the worker with this index."""
    return _LANES.get(index, Lane.REGULAR)


def retry_delay_ms(failures: int, settings: CleanerSettings) -> int:
    """Return how long a partition is quarantined after this many failures in a row."""
    return backoff_ms(failures, settings.retry_backoff_ms, settings.retry_backoff_max_ms)


def backoff_ms(failures: int, first_ms: int, longest_ms: int) -> int:
    """Return the delay after this many failures in a row: doubled with each, up to a limit."""
    assert failures >= 1
    return min(first_ms << min(failures - 1, 40), longest_ms)


@dataclass(frozen=True, slots=True)
class _WorkerUsage:
    """The budgets that a worker had spent before it joined the job."""

    worker: PoolWorker
    spent_before: tuple[int, int]  # bytes read and written
    waited_before: tuple[float, float]  # seconds of waiting for the budgets


@dataclass(slots=True, eq=False)
class CleanAttempt:
    """A running job.

    `worker` runs it from the start to the end. If the job is shared, idle workers may help, and
    each worker has one part of the job at a time.
    """

    number: int
    job: CleanJob
    worker: PoolWorker
    started_at: float  # loop time, as `last_message_at`
    last_message_at: float
    started_ms: int  # wall clock
    dirty_bytes: int  # of the dirty section as planned
    data_directory: str  # of the partition
    shared: SharedClean | None = None
    last_progress: float = 0.0  # bytes moved plus seconds waited, at the last check
    spent: tuple[int, int] = (0, 0)  # by workers that have left: bytes read and written
    waited: tuple[float, float] = (0.0, 0.0)  # likewise: seconds of waiting
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    published: int = 0  # groups
    unpublished: int = 0  # groups whose files may still be in the folder
    keep_files: bool = False  # for the next start, after a journal that failed half-way
    failure: str = ""  # if set, the attempt has failed whatever the worker reports
    abort_reason: str = ""  # for operators
    stale_reason: str = ""  # how the log changed, if that made the job useless
    report: CleanReport | None = None
    clean_below: int | None = None  # set with the report: the new checkpoint
    input_bytes: int = 0  # to be read, as planned
    is_far_too_late: bool = False  # the deadline had passed long before the start
    limited_topic: bytes | None = None  # id of the topic, if its rate limit applies
    is_ending: bool = False  # aborted, and all of its workers have stopped
    abort_timer: asyncio.TimerHandle | None = None
    _shares: dict[int, _WorkerUsage] = field(default_factory=dict)  # by worker index
    _running: dict[int, int] = field(default_factory=dict)  # numbers of parts, by worker index

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
        """Return an attempt that starts now."""
        attempt = cls(
            number=number,
            job=job,
            worker=worker,
            started_at=now,
            last_message_at=now,
            started_ms=job.now_ms,
            dirty_bytes=dirty_bytes,
            data_directory=data_directory,
        )
        attempt.join(worker)
        return attempt

    @property
    def workers(self) -> list[PoolWorker]:
        """Return the workers of the job at present."""
        return [share.worker for share in self._shares.values()]

    @property
    def active(self) -> list[PoolWorker]:
        """Return the workers that have a part of the job, or all of it."""
        if self.shared is None:
            return self.workers
        return [worker for worker in self.workers if worker.index in self._running]

    def has(self, worker: PoolWorker) -> bool:
        """Return whether the worker works on the job."""
        share = self._shares.get(worker.index)
        return share is not None and share.worker is worker

    def join(self, worker: PoolWorker) -> None:
        """Add a worker."""
        side, read, written = worker.side, Direction.READ, Direction.WRITE
        self._shares[worker.index] = _WorkerUsage(
            worker,
            (side.spent(read), side.spent(written)),
            (side.waited_seconds(read), side.waited_seconds(written)),
        )

    def leave(self, worker: PoolWorker) -> None:
        """Remove a worker while its page is mapped; add its bytes and waits."""
        share = self._shares.pop(worker.index)
        self._running.pop(worker.index, None)
        side, read, written = worker.side, Direction.READ, Direction.WRITE
        self.spent = (
            self.spent[0] + side.spent(read) - share.spent_before[0],
            self.spent[1] + side.spent(written) - share.spent_before[1],
        )
        self.waited = (
            self.waited[0] + side.waited_seconds(read) - share.waited_before[0],
            self.waited[1] + side.waited_seconds(written) - share.waited_before[1],
        )

    def part_sent(self, worker: PoolWorker, number: int) -> None:
        """Note that the worker runs the part."""
        assert worker.index not in self._running
        self._running[worker.index] = number

    def part_ended(self, worker: PoolWorker) -> int | None:
        """Note that the worker has no part any more; return its number."""
        return self._running.pop(worker.index, None)

    def as_running(self, now: float) -> list[RunningJob]:
        """Return the job as scheduling_order.py sees it, once for each worker."""
        running_ms = int(1000 * (now - self.started_at))
        is_long_job = is_long(self.input_bytes, running_ms)
        return [RunningJob(lane_of(index), is_long_job) for index in self._shares]

    def silent_seconds(self, now: float) -> float:
        """Return for how long the workers have sent no message and charged no byte.

        Waiting for the budget counts as progress: a worker does not cause a low rate.
        """
        progress = sum(worker.side.progress() for worker in self.workers)
        if progress != self.last_progress:
            self.last_progress = progress
            self.last_message_at = now
        return now - self.last_message_at

    def cancel_timer(self) -> None:
        """Stop waiting for the end of an abort."""
        if self.abort_timer is not None:
            self.abort_timer.cancel()


def make_record(
    attempt: CleanAttempt, finished_ms: int, reason: str, *, aborted: bool
) -> JobRecord:
    """Return the history record of an ended attempt. `reason` makes it a failure."""
    job, report = attempt.job, attempt.report
    outcome: Outcome = "finished"
    if attempt.stale_reason:
        outcome, reason = "stale", attempt.stale_reason
    elif (aborted or report is None) and not (attempt.failure or reason):
        outcome, reason = "aborted", attempt.abort_reason
    elif aborted and not attempt.failure:
        outcome, reason = (
            "aborted",
            f"{attempt.abort_reason}; {reason}" if attempt.abort_reason else reason,
        )
    elif report is not None and report.damaged:
        outcome, reason = "damaged", describe_damage(report.damaged)
    elif reason:
        outcome = "failed"
    record = build_record(
        job,
        report,
        outcome=outcome,
        reason=reason,
        started_ms=attempt.started_ms,
        finished_ms=finished_ms,
        published=attempt.published,
        dropped=attempt.unpublished,
        dirty_bytes=attempt.dirty_bytes,
        next_dirty_offset=attempt.clean_below or job.first_dirty_offset,
    )
    return replace(
        record,
        bytes_read=attempt.spent[Direction.READ],
        bytes_written=attempt.spent[Direction.WRITE],
        read_wait_seconds=attempt.waited[Direction.READ],
        write_wait_seconds=attempt.waited[Direction.WRITE],
    )


async def remove_unpublished(env: Env, job: CleanJob) -> None:
    """Remove the unpublished files of a job from the partition's folder.

    Call it only if no journal names them. After an error the next start removes them; until then
    they only take space.
    """
    where = {"partition": str(job.partition), "job_id": job.job_id}
    try:
        removed = await asyncio.to_thread(discard_outputs, env, job.directory, job.job_id)
    except OSError as error:
        logger.warning("unpublished files not removed", **where, reason=str(error))
        return
    if removed:
        logger.debug("unpublished files removed", **where, files=len(removed))


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker and its job."""

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


def worker_status(worker: PoolWorker, attempt: CleanAttempt | None, now: float) -> WorkerStatus:
    """Return the status of a worker and its attempt, if any."""
    lane = lane_of(worker.index)
    if attempt is None:
        return WorkerStatus(worker.index, worker.link.pid, worker.ready, lane=lane)
    return WorkerStatus(
        worker.index,
        worker.link.pid,
        worker.ready,
        attempt.job.partition,
        attempt.job.job_id,
        attempt.stage,
        attempt.done_bytes,
        attempt.total_bytes,
        now - attempt.started_at,
        lane,
    )


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The state of the pool, for operators."""

    workers: tuple[WorkerStatus, ...]
    in_progress: dict[TopicPartition, states.State]
    quarantines: dict[TopicPartition, states.Quarantined]
    verdicts: dict[TopicPartition, Verdict]
    paused: frozenset[TopicPartition]  # paused by an operator
    rates: tuple[float | None, float | None]  # limits for reads and writes in bytes/s; None: none
    speeds: tuple[float, float]  # of reads and writes in the last seconds, in bytes/s
