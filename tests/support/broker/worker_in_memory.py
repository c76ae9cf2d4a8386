"""A worker without a process: the engine runs in a thread, over the in-memory disk of a test."""

import asyncio
import time
from functools import partial

from cleaner.engine.clean import run_clean
from cleaner.engine.search.search_files import search_files
from cleaner.engine.verify.check_log import check_log
from cleaner.engine.verify_job import verify_groups
from cleaner.job import CleanAbortedError
from cleaner.workers.channel import FromWorker, Message, Order, WorkerReady, decode, encode
from cleaner.workers.process import Spawn
from cleaner.workers.throttle import SharedMemory, Slots
from cleaner.workers.worker import execute
from tests.support.storage.memory_env import MemoryEnv


class WorkerInMemory:
    """A WorkerLink; it carries out one order at a time."""

    def __init__(self, env: MemoryEnv) -> None:
        self.pid = 1
        self._env = env
        self._memory = SharedMemory()
        self._said: asyncio.Queue[Message | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._is_gone = False
        self._beats = 0
        self._say(WorkerReady(self.pid, 0.0))

    @property
    def slots(self) -> Slots:
        return self._memory.slots

    def _say(self, message: FromWorker) -> None:
        said = decode(encode(message)[4:])
        self._loop.call_soon_threadsafe(self._said.put_nowait, said)

    def send(self, message: Message) -> None:
        order = decode(encode(message)[4:])
        assert isinstance(order, Order)
        work = partial(
            execute, order, run_clean, self._env, self.slots, send=self._say, nap=self._nap,
            verifier=verify_groups, checker=check_log, searcher=search_files,
        )  # fmt: skip
        self._loop.run_in_executor(None, work)

    def _nap(self, seconds: float) -> None:
        """Wait for the throttle. A worker that was killed ends, as a process would."""
        if self._is_gone:
            raise CleanAbortedError
        time.sleep(seconds)

    def beats(self) -> int:
        self._beats += 1
        return self._beats

    async def receive(self) -> Message | None:
        return await self._said.get()

    def shutdown(self) -> None:
        self.kill()

    def abandon(self) -> None:
        self.kill()

    def kill(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._said.put_nowait(None)

    async def reap(self) -> str:
        self.kill()
        return "killed"

    def close(self) -> None:
        """The memory stays: the thread may still look at it."""

    def is_gone(self) -> bool:
        return self._is_gone

    def set_nice(self, nice: int) -> None:
        pass

    def short_of_core_seconds(self) -> float | None:
        return None


def spawn_in_memory(env: MemoryEnv) -> Spawn:
    """Workers over this disk, for `Broker`."""

    async def spawn(_nice: int) -> WorkerInMemory:
        return WorkerInMemory(env)

    return spawn
