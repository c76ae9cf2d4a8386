"""Compacts views in a thread of this process, over whatever Env the test has."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from cleaner.engine.clean import run_clean
from cleaner.engine.verify_job import verify_groups
from cleaner.job import CleanAbortedError, CleanedGroup, CleanJob
from cleaner.verification import VerifyReport
from cleaner.workers.dedicated_worker import (
    CleanedJob,
    JobFailedError,
    JobRunner,
    OnProgress,
    ignore_progress,
)
from storage.env import Env
from tests.support.storage.memory_env import MemoryEnv


class ThreadRunner:
    """A JobRunner; as a JobControl it grants everything until it is aborted."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._aborted = threading.Event()
        self._groups: list[CleanedGroup] = []
        self.jobs: list[CleanJob] = []
        self._heard: OnProgress = ignore_progress

    async def run(self, job: CleanJob, on_progress: OnProgress = ignore_progress) -> CleanedJob:
        self.jobs.append(job)
        self._heard = on_progress
        self._groups = []
        try:
            report = await asyncio.to_thread(run_clean, self._env, job, self)
        except CleanAbortedError:
            raise
        except OSError as error:
            raise JobFailedError(str(error)) from error
        return CleanedJob(report, tuple(self._groups))

    async def verify(
        self, job: CleanJob, groups: Sequence[CleanedGroup], folders: Sequence[str]
    ) -> VerifyReport:
        try:
            return await asyncio.to_thread(verify_groups, self._env, job, groups, folders, self)
        except OSError as error:
            raise JobFailedError(str(error)) from error

    def abort(self) -> None:
        self._aborted.set()

    def read_bytes(self, count: int) -> None:
        pass

    def write_bytes(self, count: int) -> None:
        pass

    def aborted(self) -> bool:
        return self._aborted.is_set()

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        self._groups.extend(groups)

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self._heard(stage, done_bytes, total_bytes)


def thread_worker(env: Env) -> Callable[[], AbstractAsyncContextManager[JobRunner]]:
    """What Broker takes as `view_worker`."""

    @asynccontextmanager
    async def worker() -> AsyncIterator[JobRunner]:
        yield ThreadRunner(env)

    return worker


class _Held(ThreadRunner):
    async def run(self, job: CleanJob, on_progress: OnProgress = ignore_progress) -> CleanedJob:
        self.jobs.append(job)
        await asyncio.to_thread(self._aborted.wait)
        raise CleanAbortedError


@asynccontextmanager
async def held_worker() -> AsyncIterator[JobRunner]:
    """A worker that does nothing until it is aborted."""
    yield _Held(MemoryEnv())
