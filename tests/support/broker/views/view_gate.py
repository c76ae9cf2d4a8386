"""A worker of view compactions that waits in the midst of its work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cleaner.job import CleanJob
from cleaner.workers.dedicated_worker import CleanedJob, OnProgress, ignore_progress
from tests.support.broker.views.view_worker import ThreadRunner
from tests.support.storage.memory_env import MemoryEnv


class Gate:
    """Workers that wait in the midst of their rewriting until they are let go on."""

    def __init__(self, env: MemoryEnv) -> None:
        self._env = env
        self._open = asyncio.Event()
        self.reached = asyncio.Event()

    def let_go(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()
        self.reached.clear()

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[ThreadRunner]:
        gate = self

        class Waiting(ThreadRunner):
            async def run(
                self, job: CleanJob, on_progress: OnProgress = ignore_progress
            ) -> CleanedJob:
                on_progress("map", 10, 10)
                on_progress("rewrite", 5, 10)
                gate.reached.set()
                await gate._open.wait()
                return await super().run(job, on_progress)

        yield Waiting(self._env)
