"""Remote compactions: plans their jobs, and updates the cleaner's state with their results."""

import asyncio
from collections.abc import Callable

from cleaner.host import CleanerHost, LogFacts
from cleaner.job import CleanJob, CleanReport
from cleaner.planning.findings import ClockReading
from cleaner.planning.remote_plan import compaction_job
from cleaner.scheduler.cleaner_state_store import CleanerStateStore
from cleaner.scheduler.dispatch import JobDispatcher
from cleaner.scheduler.history import History, JobRecord
from cleaner.scheduler.partition_scanner import PartitionScanner
from cleaner.stats import PoolStats
from storage.env import Env


class RemoteCleans:
    """Plans remote compactions and takes in their results. The caller has paused the partition."""

    def __init__(
        self,
        host: CleanerHost,
        env: Env,
        dispatcher: JobDispatcher,
        *,
        scanner: PartitionScanner,
        state_store: CleanerStateStore,
        history: History,
        stats: PoolStats,
        wake: Callable[[], None],
    ) -> None:
        self._host = host
        self._env = env
        self._dispatcher = dispatcher
        self._scanner = scanner
        self._state_store = state_store
        self._history = history
        self._stats = stats
        self._wake = wake

    def plan(self, facts: LogFacts, job_id: str) -> tuple[CleanJob | None, int]:
        """Return the job that cleans all that can be cleaned now, and its dirty bytes.

        The job is None if nothing is dirty.
        """
        wall_ms = self._env.wall_ms()
        first, end = facts.log_start_offset, facts.log_end_offset
        return compaction_job(
            facts,
            self._host.job_inputs(facts.partition, first, end),
            self._dispatcher.settings,
            now=ClockReading(wall_ms, int(asyncio.get_running_loop().time() * 1000)),
            cleaner_state=self._state_store.state_of(facts, wall_ms),
            job_id=job_id,
        )

    def adopted(
        self, facts: LogFacts, job: CleanJob, report: CleanReport, record: JobRecord
    ) -> None:
        """Learn from a remote clean whose groups were published, as from a worker's job.

        `facts` are the log's present ones; `job` and `report` name its generation and folder.
        """
        offset = self._dispatcher.update_state(facts, job, report, record.dirty_bytes)
        self._scanner.save_checkpoint(job.partition, job.generation, offset)
        self._stats.adoptions += 1
        self._record(facts, record)

    def failed(self, facts: LogFacts, record: JobRecord) -> None:
        """Record a remote clean that did not run to its end."""
        self._stats.failures += record.outcome == "failed"
        self._record(facts, record)

    def _record(self, facts: LogFacts, record: JobRecord) -> None:
        self._history.add(record)
        self._state_store.record(facts.data_directory, record)
        now_ms = int(asyncio.get_running_loop().time() * 1000)
        self._scanner.waiting.started(facts.partition, now_ms)
        self._wake()
