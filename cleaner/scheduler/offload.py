"""Partitions that are not for the workers: which ones Spark cleans, and how that goes.

Rules
- A partition goes to Spark where its topic says so, or where its log, up to the offset to which it
  can be cleaned, is larger than cleaner.spark.min_bytes. What has merely expired never does.
- Whether it is to be cleaned, and how urgently, is judged as for the workers. The verdict then has
  one finding more, which keeps the workers off. A job on Spark leases the partition: it is paused.
- A failure is followed by a wait; so many in a row, and the workers have the partition for a while.
  Where no job can be started at all they have every partition for a while.
- Other settings, and an operator's retry, forget what went wrong.

It starts nothing: who does (broker/cleaning/spark_offload.py) asks what is due, and tells here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cleaner.host import LogFacts
from cleaner.planning.findings import Finding, Reason, Value
from cleaner.planning.plan import Verdict
from cleaner.scheduler.clean_attempt import retry_delay_ms
from config.settings import CleanerSettings
from storage.model import TopicPartition

WAITING: Final = "waiting"
RUNNING: Final = "running"
GIVEN_UP: Final = "given up"
UNAVAILABLE: Final = "unavailable"


@dataclass(frozen=True, slots=True)
class OffloadedJob:
    """A job on Spark: partitions of one topic."""

    partitions: tuple[TopicPartition, ...]
    master: str
    started_ms: int  # monotonic


@dataclass(slots=True)
class _FailureRecord:
    """What went wrong with a partition, lately. Times are monotonic ms."""

    failures: int  # in a row
    discards: int  # the log went on without the job; in a row, and no failure
    until_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """For people. `wanted`: Spark is to be used at all."""

    enabled: bool
    master: str
    min_bytes: int
    job: OffloadedJob | None
    seconds: float  # of that job
    waiting: tuple[TopicPartition, ...]  # most urgent first
    given_up: tuple[TopicPartition, ...]  # that the workers have instead, for a while
    unavailable: str  # why no job can be started, while that lasts
    wait_ms: int  # until it is tried again


def _ignore_interrupt(reason: str) -> None:
    """Nothing runs."""


@dataclass(slots=True)
class SparkOffload:
    """Owned by the pool; all on the loop."""

    settings: CleanerSettings
    now_ms: Callable[[], int]  # monotonic
    job: OffloadedJob | None = None
    interrupt: Callable[[str], None] = (
        _ignore_interrupt  # ends the job, with a reason; set by who runs it
    )
    due: list[TopicPartition] = field(default_factory=list)  # of the last look, most urgent first
    wake: Callable[[], None] = lambda: None  # something is due
    _failures: dict[TopicPartition, _FailureRecord] = field(default_factory=dict)
    _unavailable: str = ""
    _unavailable_until_ms: int = 0

    def configure(self, settings: CleanerSettings) -> None:
        """Take other settings; a job under way goes on."""
        before = self.settings
        self.settings = settings
        if (before.engine, before.spark) != (settings.engine, settings.spark):
            self._failures.clear()
            self._unavailable_until_ms = 0
            self._unavailable = ""

    # What the pool asks -----------------------------------------------------------------------

    def spark_finding(self, facts: LogFacts, verdict: Verdict) -> Finding | None:
        """What there is to say of Spark beside a verdict; None: it is the workers' matter."""
        partition, section = facts.partition, verdict.section
        runs = self.job is not None and partition in self.job.partitions
        if section is None or verdict.expired is not None or section.dirty_bytes == 0:
            return None
        size = section.clean_bytes + section.dirty_bytes
        if not runs and not self._is_large(facts.config.varve_cleaner_engine, size):
            return None
        now_ms = self.now_ms()
        instead = "" if runs else self._fallback_reason(partition, now_ms)
        if not (verdict.to_clean or runs or instead):
            return None
        mark = self._failures.get(partition)
        values: list[tuple[str, Value]] = [
            ("state", RUNNING if runs else WAITING),
            ("bytes", size),
            ("cleaner.spark.min_bytes", self.settings.spark.min_bytes),
            ("master", self.settings.spark.master),
        ]
        if mark is not None:
            values += [
                ("failures", mark.failures),
                ("reason", mark.reason),
                ("wait_ms", max(0, mark.until_ms - now_ms)),
            ]
        if instead == UNAVAILABLE:
            values += [
                ("reason", self._unavailable),
                ("wait_ms", self._unavailable_until_ms - now_ms),
            ]
        if instead:
            values[0] = ("state", instead)
        return Finding(Reason.SPARK, not instead, tuple(values))

    def _is_large(self, of_topic: str, size_bytes: int) -> bool:
        if of_topic != "default":
            return of_topic == "spark"
        return self.settings.engine == "spark" and size_bytes > self.settings.spark.min_bytes

    def _fallback_reason(self, partition: TopicPartition, now_ms: int) -> str:
        """Why the workers have it at this moment, though it is Spark's; empty if they do not."""
        if now_ms < self._unavailable_until_ms:
            return UNAVAILABLE
        mark = self._failures.get(partition)
        if mark is None or mark.failures < self.settings.spark.attempts:
            return ""
        if now_ms < mark.until_ms:
            return GIVEN_UP
        del self._failures[partition]  # it is tried again, as if for the first time
        return ""

    def update_due(self, due: Iterable[TopicPartition], seen: frozenset[TopicPartition]) -> None:
        """A look is over: who is due, most urgent first; `seen` are all that exist."""
        for partition in self._failures.keys() - seen:
            del self._failures[partition]
        now_ms = self.now_ms()
        busy = () if self.job is None else self.job.partitions
        self.due = [
            partition
            for partition in due
            if partition not in busy
            and (partition not in self._failures or self._failures[partition].until_ms <= now_ms)
        ]
        if self.due:
            self.wake()

    def abort(self, partition: TopicPartition, reason: str) -> bool:
        """An operator wants the partition left alone: end the job that has it, if there is one."""
        runs = self.job is not None and partition in self.job.partitions
        if runs:
            self.interrupt(reason)
        return runs

    def retry(self, partition: TopicPartition) -> None:
        """Forget failures of this partition, and that no job could be started."""
        self._failures.pop(partition, None)
        self._unavailable, self._unavailable_until_ms = "", 0

    # What is told by who runs jobs --------------------------------------------------------------

    def job_started(self, job: OffloadedJob) -> None:
        """A job is about to be started."""
        assert self.job is None
        self.job = job
        self.due = []

    def job_ended(self) -> None:
        """It is over; how, is told partition by partition."""
        self.job = None
        self.interrupt = _ignore_interrupt

    def succeeded(self, partition: TopicPartition) -> None:
        """Clean, or nothing was dirty."""
        self._failures.pop(partition, None)

    def failed(self, partition: TopicPartition, reason: str) -> bool:
        """It went wrong; whether the workers have the partition now."""
        mark = self._failures.setdefault(partition, _FailureRecord(0, 0, 0, ""))
        mark.failures += 1
        mark.reason = reason
        given_up = mark.failures >= self.settings.spark.attempts
        wait_ms = retry_delay_ms(mark.failures, self.settings)
        if given_up:
            wait_ms = self.settings.retry_backoff_max_ms
        mark.until_ms = self.now_ms() + wait_ms
        return given_up

    def job_discarded(self, partition: TopicPartition, reason: str) -> None:
        """The log went on without the job, or somebody else had leased it: no failure."""
        mark = self._failures.setdefault(partition, _FailureRecord(0, 0, 0, ""))
        mark.discards += 1
        mark.reason = reason
        mark.until_ms = self.now_ms() + retry_delay_ms(mark.discards, self.settings)

    def cannot_start(self, reason: str) -> bool:
        """No job can be started: the workers have all for a while. Whether that is news."""
        is_news = reason != self._unavailable
        self._unavailable = reason
        self._unavailable_until_ms = self.now_ms() + self.settings.retry_backoff_max_ms
        self.due = []
        return is_news

    def status(self) -> OffloadStatus:
        """What is going on."""
        now_ms, spark = self.now_ms(), self.settings.spark
        wait_ms = max(0, self._unavailable_until_ms - now_ms)
        given_up = [p for p in list(self._failures) if self._fallback_reason(p, now_ms) == GIVEN_UP]
        return OffloadStatus(
            enabled=self.settings.engine == "spark",
            master=spark.master,
            min_bytes=spark.min_bytes,
            job=self.job,
            seconds=0.0 if self.job is None else (now_ms - self.job.started_ms) / 1000,
            waiting=tuple(self.due),
            given_up=tuple(sorted(given_up)),
            unavailable=self._unavailable if wait_ms else "",
            wait_ms=wait_ms,
        )
