"""A cleaner worker without a process of its own: the engine itself runs, in a fiber."""

import asyncio
import functools
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from cleaner.engine.clean import run_clean
from cleaner.engine.search.search_files import search_files
from cleaner.engine.shared.part_runner import PartRunner
from cleaner.engine.verify_job import verify_groups
from cleaner.job import JobControl
from cleaner.key_search import KeySearch, KeySearchResult, PausedSearch
from cleaner.workers.channel import (
    EndParts,
    FromWorker,
    Message,
    RunJob,
    RunPart,
    SearchFiles,
    VerifyJob,
    WorkerReady,
    decode,
    encode,
)
from cleaner.workers.throttle import SharedMemory, Slots
from cleaner.workers.worker import execute
from storage.env import Env
from tests.sim.interleaving import KilledError, Pace
from tests.sim.world import World


def _search_one_batch(
    env: Env, search: KeySearch, control: JobControl
) -> KeySearchResult | PausedSearch:
    """Pause after each batch, and at each of them anything may happen to the files."""
    return search_files(env, replace(search, slice_seconds=0.0), control)


class WorkerInProcess:
    """A cleaner worker (WorkerLink) whose process is a fiber."""

    def __init__(self, world: World, pace: Pace) -> None:
        self.pid = 1
        self._pace = pace
        self._world = world
        self._memory = SharedMemory()
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()
        self._fiber: Any = None
        self._is_gone = False
        self._beats = 0
        self._parts = PartRunner(world.env, world.fibers.nap)
        self._say(WorkerReady(self.pid, 0.0))

    @property
    def slots(self) -> Slots:
        return self._memory.slots

    def _say(self, message: FromWorker) -> None:
        self._said.put_nowait(decode(encode(message)[4:]))

    def send(self, message: Message) -> None:
        order = decode(encode(message)[4:])
        if not isinstance(order, RunPart):
            self._parts.forget()
        if isinstance(order, EndParts):
            return
        assert isinstance(order, RunJob | VerifyJob | RunPart | SearchFiles)
        world = self._world
        work = functools.partial(
            execute,
            order,
            run_clean,
            world.env,
            self.slots,
            send=self._say,
            nap=world.fibers.nap,
            verifier=verify_groups,
            searcher=_search_one_batch,
            parts=self._parts,
        )
        self._fiber = world.fibers.start(work, self._pace)
        self._fiber.future.add_done_callback(self._note_end)

    def _note_end(self, future: "Future[Any]") -> None:
        """A worker sends every error of its job; what it raises besides is a fault of its own."""
        error = future.exception()
        if error is not None and not isinstance(error, KilledError):
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": "a cleaner worker died", "exception": error})

    def beats(self) -> int:
        """It never stands still for long enough to be taken for one that hangs."""
        self._beats += 1
        return self._beats

    async def receive(self) -> Message | None:
        return await self._said.get()

    def shutdown(self) -> None:
        self._end()

    def kill(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            if self._fiber is not None:
                self._fiber.kill()
            self._said.put_nowait(None)

    def abandon(self) -> None:
        self._end()

    async def reap(self) -> str:
        self._end()
        return "killed"

    def close(self) -> None:
        self._memory.close()

    def is_gone(self) -> bool:
        return self._is_gone

    def set_nice(self, nice: int) -> None:
        pass

    def short_of_core_seconds(self) -> float | None:
        return None
