"""One job with one worker, the waits that bound it, and what is shown of it."""

import asyncio
from dataclasses import dataclass, field

from cleaner import states
from cleaner.crew import CrewLimits, Worker
from cleaner.job import CleanJob
from cleaner.plan import Verdict
from cleaner.throttle import Direction
from config.settings import CleanerSettings
from storage.model import TopicPartition


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Waits, in seconds."""

    abort: float = 30.0  # for a worker to heed an abort: a buffer, or an fsync; then it is killed
    stall: float = 600.0  # without a byte or a word from a busy worker; then it is aborted
    crew: CrewLimits = field(default_factory=CrewLimits)


def retry_delay_ms(failures: int, settings: CleanerSettings) -> int:
    """How long a partition is left alone after so many failures in a row."""
    assert failures >= 1
    doubled = settings.retry_backoff_ms << min(failures - 1, 40)
    return min(doubled, settings.retry_backoff_max_ms)


@dataclass(slots=True, eq=False)
class Run:
    """A job under way."""

    number: int
    job: CleanJob
    worker: Worker
    started_at: float  # the loop's clock, as `heard_at`
    heard_at: float
    spent_before: tuple[int, int]  # by its worker: bytes read and written
    waited_before: tuple[float, float]  # by its worker: seconds lost to the budgets
    spent_seen: int = 0
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    unpublished: int = 0  # groups whose files may still be in the folder
    keep_files: bool = (
        False  # a journal that failed half-way may need them: the next start's matter
    )
    failure: str = ""  # set where the end is a failure whatever the worker says
    watch: asyncio.TimerHandle | None = None

    @classmethod
    def begin(cls, number: int, job: CleanJob, worker: Worker, now: float) -> "Run":
        """A run that starts now."""
        side = worker.side
        return cls(
            number=number,
            job=job,
            worker=worker,
            started_at=now,
            heard_at=now,
            spent_before=(side.spent(Direction.READ), side.spent(Direction.WRITE)),
            waited_before=(
                side.waited_seconds(Direction.READ),
                side.waited_seconds(Direction.WRITE),
            ),
        )

    def silent_seconds(self, now: float) -> float:
        """How long neither a word nor a charged byte was seen of it."""
        spent = self.worker.side.spent(Direction.READ) + self.worker.side.spent(Direction.WRITE)
        if spent != self.spent_seen:
            self.spent_seen = spent
            self.heard_at = now
        return now - self.heard_at

    def disarm(self) -> None:
        """Nobody waits for its end any more."""
        if self.watch is not None:
            self.watch.cancel()


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker is doing."""

    index: int
    pid: int
    ready: bool
    partition: TopicPartition | None = None
    run_id: str = ""
    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0


def worker_status(worker: Worker, run: Run | None, now: float) -> WorkerStatus:
    """A worker, and its run if it has one."""
    if run is None:
        return WorkerStatus(worker.index, worker.link.pid, worker.ready)
    return WorkerStatus(
        worker.index,
        worker.link.pid,
        worker.ready,
        run.job.partition,
        run.job.run_id,
        run.stage,
        run.done_bytes,
        run.total_bytes,
        now - run.started_at,
    )


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool at one moment, for people and for the API."""

    workers: tuple[WorkerStatus, ...]
    in_progress: dict[TopicPartition, states.State]
    quarantines: dict[TopicPartition, states.Quarantined]
    verdicts: dict[TopicPartition, Verdict]
