"""A worker process for one task, such as a view compaction or a verification.

It starts and ends with the task, runs the task's jobs one after the other, and shares the budgets
of the pool's workers.

Rules
- It runs one job at a time. A worker that is in a job at the end of the block is killed.
- A worker is killed if it sends nothing, moves no byte and does not wait for its budget for
  STALL_SECONDS, if its heartbeat stops, or if it ignores an abort for ABORT_SECONDS.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from cleaner.job import CleanAbortedError, CleanedGroup, CleanJob, CleanReport
from cleaner.key_search import KeySearch, KeySearchResult, PausedSearch
from cleaner.verification import InvalidOutputError, LogCheck, LogCheckRequest, VerifyReport
from cleaner.workers import channel
from cleaner.workers.heartbeat import CHECK_SECONDS, HeartbeatMonitor
from cleaner.workers.process import Spawn, WorkerLink
from cleaner.workers.throttle import TOP_UP_SECONDS, BrokerSide
from cleaner.workers.worker_pool import ABORT_SECONDS, STALL_SECONDS, START_SECONDS


class JobFailedError(Exception):
    """The job raised an error, or its worker ended."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class CleanedJob:
    """The report of a job and its groups."""

    report: CleanReport
    groups: tuple[CleanedGroup, ...]


OnProgress = Callable[[str, int, int], None]  # stage, bytes done, bytes of the stage


def ignore_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    """Ignore the progress."""


class JobRunner(Protocol):
    """Runs jobs, one at a time."""

    async def run(self, job: CleanJob, on_progress: OnProgress = ignore_progress) -> CleanedJob:
        """Run a job to its end; `on_progress` receives its progress.

        Raises CleanAbortedError, JobFailedError.
        """

    async def verify(
        self, job: CleanJob, groups: Sequence[CleanedGroup], folders: Sequence[str]
    ) -> VerifyReport:
        """Verify outputs of a job that were made elsewhere; `folders` names each group's folder.

        Raises InvalidOutputError, CleanAbortedError, JobFailedError.
        """

    def abort(self) -> None:
        """End the running job and all later ones with CleanAbortedError."""


class LogChecker(Protocol):
    """Checks whole logs, one at a time."""

    async def check_log(
        self, job: CleanJob, request: LogCheckRequest, on_progress: OnProgress = ignore_progress
    ) -> LogCheck:
        """Check the segments of the job, which would clean the whole log.

        Raises CleanAbortedError, JobFailedError.
        """


class KeySearcher(Protocol):
    """Searches the files of partitions, one partition at a time."""

    async def search_files(
        self, search: KeySearch, on_progress: OnProgress = ignore_progress
    ) -> KeySearchResult | PausedSearch:
        """Search all files for a key, for one slice. Raises CleanAbortedError, JobFailedError."""

    def abort(self) -> None:
        """End the running search and all later ones with CleanAbortedError."""


class Budgets(Protocol):
    """The part of Throttle that a worker outside the pool needs."""

    def join(self, index: int, side: BrokerSide, now: float) -> None:
        """Start granting bytes to a worker."""

    def leave(self, index: int, now: float) -> None:
        """Stop granting bytes to a worker."""


@dataclass(slots=True)
class DedicatedWorker:
    """A worker process and its job. Made by `open_dedicated_worker`."""

    link: WorkerLink
    index: int  # among those that share the budgets
    budgets: Budgets
    top_up: Callable[[float], None]
    _runs: int = field(init=False, default=0)
    _aborted: bool = field(init=False, default=False)
    _ended: bool = field(init=False, default=False)
    _killer: asyncio.TimerHandle | None = field(init=False, default=None)

    @property
    def side(self) -> BrokerSide:
        """Return the worker's shared memory."""
        return BrokerSide(self.link.slots)

    def abort(self) -> None:
        """See JobRunner; a worker that ignores it is killed, one that has ended is not asked."""
        self._aborted = True
        if self._ended or self._killer is not None:
            return
        if not self._runs:
            self.link.kill()  # it may be compiling; it has no job
            return
        self.side.abort(self._runs)
        loop = asyncio.get_running_loop()
        self._killer = loop.call_later(ABORT_SECONDS, self.link.kill)

    async def run(self, job: CleanJob, on_progress: OnProgress = ignore_progress) -> CleanedJob:
        """See JobRunner."""
        result, groups = await self._carry_out(channel.RunJob(self._runs + 1, job), on_progress)
        if not isinstance(result, channel.JobDone):
            raise _unexpected(result)
        return CleanedJob(result.report, groups)

    async def verify(
        self, job: CleanJob, groups: Sequence[CleanedGroup], folders: Sequence[str]
    ) -> VerifyReport:
        """See JobRunner."""
        order = channel.VerifyJob(self._runs + 1, job, tuple(groups), tuple(folders))
        result, _ = await self._carry_out(order)
        match result:
            case channel.OutputsVerified(_, report):
                return report
            case channel.OutputRefused(_, path, position, reason):
                raise InvalidOutputError(path, position, reason)
            case other:
                raise _unexpected(other)

    async def check_log(
        self, job: CleanJob, request: LogCheckRequest, on_progress: OnProgress = ignore_progress
    ) -> LogCheck:
        """See LogChecker."""
        order = channel.CheckLog(self._runs + 1, job, request)
        result, _ = await self._carry_out(order, on_progress)
        if not isinstance(result, channel.LogChecked):
            raise _unexpected(result)
        return result.check

    async def search_files(
        self, search: KeySearch, on_progress: OnProgress = ignore_progress
    ) -> KeySearchResult | PausedSearch:
        """See KeySearcher."""
        order = channel.SearchFiles(self._runs + 1, search)
        result, _ = await self._carry_out(order, on_progress)
        if not isinstance(result, channel.FilesSearched):
            raise _unexpected(result)
        return result.result

    async def _carry_out(
        self,
        order: channel.RunJob | channel.VerifyJob | channel.CheckLog | channel.SearchFiles,
        on_progress: OnProgress = ignore_progress,
    ) -> tuple[channel.Message, tuple[CleanedGroup, ...]]:
        """Return the worker's result of an order, and the groups that it sent before."""
        if self._aborted:
            raise CleanAbortedError
        if not self._runs:
            await self._wait_ready()
        loop = asyncio.get_running_loop()
        self._runs = order.run
        side = self.side
        self.budgets.join(self.index, side, loop.time())
        ticker = asyncio.create_task(tick(self.top_up), name="worker-budget")
        try:
            self.link.send(order)
            return await self._receive(on_progress)
        except channel.ChannelError as error:
            raise JobFailedError(str(error)) from error
        finally:
            ticker.cancel()
            self.budgets.leave(self.index, loop.time())

    async def _wait_ready(self) -> None:
        """Wait for the first message. Raises CleanAbortedError, JobFailedError."""
        try:
            async with asyncio.timeout(START_SECONDS):
                first = await self.link.receive()
        except TimeoutError:
            first = None
        except channel.ChannelError as error:
            raise JobFailedError(str(error)) from error
        if self._aborted:
            raise CleanAbortedError
        if not isinstance(first, channel.WorkerReady):
            self.link.kill()
            raise JobFailedError(f"the worker did not start: {await self.link.reap()}")

    async def _receive(
        self, on_progress: OnProgress
    ) -> tuple[channel.Message, tuple[CleanedGroup, ...]]:
        groups: list[CleanedGroup] = []
        while True:
            match await self._next():
                case channel.Progressed(_, stage, done_bytes, total_bytes):
                    on_progress(stage, done_bytes, total_bytes)
                case channel.GroupsCleaned(_, cleaned):
                    groups.extend(cleaned)
                case (
                    channel.JobDone()
                    | channel.OutputsVerified()
                    | channel.OutputRefused()
                    | channel.LogChecked()
                    | channel.FilesSearched() as result
                ):
                    return result, tuple(groups)
                case channel.JobStopped():
                    raise CleanAbortedError
                case channel.JobFailed(_, reason):
                    raise JobFailedError(reason)
                case None if self._aborted:
                    raise CleanAbortedError
                case other:
                    raise _unexpected(other)

    async def _next(self) -> channel.Message | None:
        """Return the next message. Raises JobFailedError if the worker hangs or stalls."""
        receiving = asyncio.ensure_future(self.link.receive())
        clock, heartbeat = asyncio.get_running_loop().time, HeartbeatMonitor()
        progress, moved_at = self.side.progress(), clock()
        try:
            while True:
                done, _ = await asyncio.wait([receiving], timeout=CHECK_SECONDS)
                if done:
                    return receiving.result()
                if heartbeat.is_lost(self.link.beats()):
                    self.link.kill()
                    raise JobFailedError(f"the worker {heartbeat.reason}")
                if self.side.progress() != progress:
                    progress, moved_at = self.side.progress(), clock()
                elif clock() - moved_at >= STALL_SECONDS:
                    self.link.kill()
                    raise JobFailedError(f"no progress for {STALL_SECONDS:g} s")
        finally:
            receiving.cancel()  # no effect if it is done; needed if this task was cancelled

    def end(self) -> None:
        """Touch the shared memory no longer, and stop waiting for the end of an abort."""
        self._ended = True
        if self._killer is not None:
            self._killer.cancel()


def _unexpected(message: channel.Message | None) -> JobFailedError:
    event = "ended" if message is None else f"sent {type(message).__name__}"
    return JobFailedError(f"the worker {event} in the middle of its job")


async def tick(top_up: Callable[[float], None]) -> None:
    """Top up the budgets until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        top_up(loop.time())
        await asyncio.sleep(TOP_UP_SECONDS)


@asynccontextmanager
async def open_dedicated_worker(
    spawn: Spawn, nice: int, *, index: int, budgets: Budgets, top_up: Callable[[float], None]
) -> AsyncIterator[DedicatedWorker]:
    """Run a worker for the block; its first job waits until it has started. Raises OSError."""
    link = await spawn(nice)
    worker = DedicatedWorker(link, index, budgets, top_up)
    try:
        yield worker
    finally:
        worker.end()
        link.shutdown()
        await asyncio.shield(link.reap())
        link.close()
