"""Offloaded partitions: which partitions a system outside of the broker cleans, and its failures.

Rules
- A partition is offloaded if its topic says so, or if its log below the first uncleanable offset
  is larger than the configured size. The workers do all jobs that only remove expired
  tombstones.
- Planning is the same as for the workers. The verdict gets one more finding, which keeps the
  workers away. The offloaded job leases the partition, so the partition is paused meanwhile.
- Each failure is followed by a wait. After several failures in a row the workers clean the
  partition for a while. If no job can be started, the workers clean all partitions for a while.
- A change of the settings clears all failures. An operator's retry clears those of its partition,
  and jobs are started again.

This module starts no jobs. The broker starts one for the partitions in `due` and reports its end.
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
    """A running job that cleans partitions of one topic."""

    partitions: tuple[TopicPartition, ...]
    target: str
    started_ms: int  # monotonic


@dataclass(slots=True)
class _FailureRecord:
    """The recent failures of a partition. Times are monotonic ms."""

    failures: int  # in a row
    discards: int  # results in a row that were out of date when they arrived; not failures
    until_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """The state of offloading, for operators."""

    enabled: bool  # by size
    target: str
    min_bytes: int
    job: OffloadedJob | None
    seconds: float  # of that job
    waiting: tuple[TopicPartition, ...]  # most urgent first
    given_up: tuple[TopicPartition, ...]  # cleaned by the workers for a while
    unavailable: str  # why no job can be started; empty if jobs can be started
    wait_ms: int  # until the next attempt to start a job


def _ignore_interrupt(reason: str) -> None:
    """Do nothing: no job is running."""


@dataclass(slots=True)
class Offload:
    """The partitions to offload, the running job and recent failures. Runs on the event loop."""

    settings: CleanerSettings
    now_ms: Callable[[], int]  # monotonic
    job: OffloadedJob | None = None
    interrupt: Callable[[str], None] = _ignore_interrupt  # ends the job, for the given reason
    due: list[TopicPartition] = field(default_factory=list)  # of the last scan, most urgent first
    wake: Callable[[], None] = lambda: None  # called when a partition is due
    _failures: dict[TopicPartition, _FailureRecord] = field(default_factory=dict)
    _unavailable: str = ""
    _unavailable_until_ms: int = 0

    def configure(self, settings: CleanerSettings) -> None:
        """Apply changed settings; a running job continues."""
        before = self.settings
        self.settings = settings
        if before.offload != settings.offload:
            self._failures.clear()
            self.retry_jobs()

    # For the pool -----------------------------------------------------------------------------

    def find_offload(self, facts: LogFacts, verdict: Verdict) -> Finding | None:
        """Return the finding about offloading; None if the partition is not to be offloaded."""
        partition, section = facts.partition, verdict.section
        rules = self.settings.offload
        is_running = self.job is not None and partition in self.job.partitions
        if section is None or verdict.expired is not None or section.dirty_bytes == 0:
            return None
        size = section.clean_bytes + section.dirty_bytes
        by_topic = facts.config.is_offloaded
        by_size = rules.by_size and size > rules.min_bytes
        if not is_running and not (by_size if by_topic is None else by_topic):
            return None
        now_ms = self.now_ms()
        fallback = "" if is_running else self._fallback_reason(partition, now_ms)
        if not (verdict.to_clean or is_running or fallback):
            return None
        failure = self._failures.get(partition)
        values: list[tuple[str, Value]] = [
            ("state", fallback or (RUNNING if is_running else WAITING)),
            ("bytes", size),
            ("min_bytes", rules.min_bytes),
            ("system", rules.system),
            ("target", rules.target),
        ]
        if failure is not None:
            values += [
                ("failures", failure.failures),
                ("reason", failure.reason),
                ("wait_ms", max(0, failure.until_ms - now_ms)),
            ]
        if fallback == UNAVAILABLE:
            values += [
                ("reason", self._unavailable),
                ("wait_ms", self._unavailable_until_ms - now_ms),
            ]
        return Finding(Reason.OFFLOADED, not fallback, tuple(values))

    def _fallback_reason(self, partition: TopicPartition, now_ms: int) -> str:
        """Return why the workers clean this offloaded partition now; empty if they do not."""
        if now_ms < self._unavailable_until_ms:
            return UNAVAILABLE
        failure = self._failures.get(partition)
        if failure is None or failure.failures < self.settings.offload.attempts:
            return ""
        if now_ms < failure.until_ms:
            return GIVEN_UP
        del self._failures[partition]  # start again, as with the first attempt
        return ""

    def update_due(
        self, due: Iterable[TopicPartition], existing: frozenset[TopicPartition]
    ) -> None:
        """Take the result of a scan: the due partitions, most urgent first."""
        for partition in self._failures.keys() - existing:
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
        """End the job that cleans the partition; return whether there was one.

        The partition is not due any more until the next scan finds it due.
        """
        self.due = [due for due in self.due if due != partition]
        is_running = self.job is not None and partition in self.job.partitions
        if is_running:
            self.interrupt(reason)
        return is_running

    def forget(self, partition: TopicPartition) -> None:
        """Clear the failures of this partition."""
        self._failures.pop(partition, None)

    def retry_jobs(self) -> None:
        """Try again to start jobs."""
        self._unavailable, self._unavailable_until_ms = "", 0

    # For the runner of jobs ----------------------------------------------------------------------

    def job_started(self, job: OffloadedJob) -> None:
        """Record a job that is about to start."""
        assert self.job is None
        self.job = job
        self.due = []

    def job_ended(self) -> None:
        """Record the end of the job; the result of each partition is reported separately."""
        self.job = None
        self.interrupt = _ignore_interrupt

    def succeeded(self, partition: TopicPartition) -> None:
        """Record that the partition is clean."""
        self.forget(partition)

    def failed(self, partition: TopicPartition, reason: str) -> bool:
        """Record a failure; return whether the workers clean the partition now."""
        failure = self._failures.setdefault(partition, _FailureRecord(0, 0, 0, ""))
        failure.failures += 1
        failure.reason = reason
        given_up = failure.failures >= self.settings.offload.attempts
        wait_ms = retry_delay_ms(failure.failures, self.settings)
        if given_up:
            wait_ms = self.settings.retry_backoff_max_ms
        failure.until_ms = self.now_ms() + wait_ms
        return given_up

    def job_discarded(self, partition: TopicPartition, reason: str) -> None:
        """Record an outdated result: the log changed meanwhile, or it was leased elsewhere."""
        failure = self._failures.setdefault(partition, _FailureRecord(0, 0, 0, ""))
        failure.discards += 1
        failure.reason = reason
        failure.until_ms = self.now_ms() + retry_delay_ms(failure.discards, self.settings)

    def cannot_start(self, reason: str) -> bool:
        """Let the workers clean everything for a while; return whether the reason is new."""
        is_news = reason != self._unavailable
        self._unavailable = reason
        self._unavailable_until_ms = self.now_ms() + self.settings.retry_backoff_max_ms
        self.due = []
        return is_news

    def status(self) -> OffloadStatus:
        """Return the present state of offloading."""
        now_ms, rules = self.now_ms(), self.settings.offload
        wait_ms = max(0, self._unavailable_until_ms - now_ms)
        given_up = [p for p in list(self._failures) if self._fallback_reason(p, now_ms) == GIVEN_UP]
        return OffloadStatus(
            enabled=rules.by_size,
            target=rules.target,
            min_bytes=rules.min_bytes,
            job=self.job,
            seconds=0.0 if self.job is None else (now_ms - self.job.started_ms) / 1000,
            waiting=tuple(self.due),
            given_up=tuple(sorted(given_up)),
            unavailable=self._unavailable if wait_ms else "",
            wait_ms=wait_ms,
        )
