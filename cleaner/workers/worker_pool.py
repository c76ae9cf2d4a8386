"""Keeps worker processes alive: starts them, listens to them, replaces the dead, ends them.

Rule 1. A worker is heard by one task; what it says is handled in order, one message at a time.
Rule 2. Whoever listens learns of every end exactly once, after the process is dead or given up.
Rule 3. Every wait has an end: for the first word, for a death, between two starts.

It does not know what jobs are.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from cleaner.stats import PoolStats
from cleaner.workers.channel import ChannelError, Message, WorkerReady
from cleaner.workers.heartbeat import CHECK_SECONDS, MISSED_MAX, Heartbeat
from cleaner.workers.process import REAP_SECONDS, Spawn, WorkerLink
from cleaner.workers.throttle import BrokerSide

START_SECONDS: Final = 600.0  # for the first word: kernels may have to be compiled, if slowly
STALL_SECONDS: Final = 600.0  # without a byte or a word from a busy worker; then it is aborted
ABORT_SECONDS: Final = 30.0  # for a worker to heed an abort: a buffer, or an fsync; then: killed
LONG_LIFE_SECONDS: Final = 60.0  # a worker that lived so long is replaced at once
LOST_MAX: Final = 8  # processes that hang in the kernel before no more are started

logger = structlog.get_logger("cleaner")


@dataclass(frozen=True, slots=True)
class WorkerPoolLimits:
    """Waits, in seconds."""

    start: float = START_SECONDS
    kill: float = 3.0  # for the end of a killed worker, before it is given up
    stop: float = 10.0  # for all to end in order when the broker stops
    respawn: float = 0.1  # before a dead worker is replaced; doubled with each early death
    respawn_max: float = 30.0
    check: float = CHECK_SECONDS  # between two looks at the heartbeat of a worker
    missed: int = MISSED_MAX  # such looks without a beat, before the worker is killed


@dataclass(slots=True, eq=False)
class PoolWorker:
    """A live worker. `busy` is its employer's to set."""

    index: int
    link: WorkerLink
    side: BrokerSide
    ready: bool = False
    busy: bool = False
    leaving: bool = False  # it was sent home: nothing reaches it any more
    reaper: asyncio.TimerHandle | None = field(default=None)
    fault: str = ""  # why it was killed, for people


class WorkerListener(Protocol):
    """Whoever gives the workers work."""

    def worker_free(self, worker: PoolWorker) -> None:
        """It can be given something to do."""

    async def worker_sent(self, worker: PoolWorker, message: Message) -> None:
        """Handle a message. Raises ChannelError if it makes no sense: the worker is then killed."""

    async def worker_exited(self, worker: PoolWorker, how: str) -> None:
        """It ended; its page can still be read until this returns."""


class WorkerPool:
    """A number of workers, each kept by a task of its own."""

    def __init__(
        self, spawn: Spawn, listener: WorkerListener, stats: PoolStats, limits: WorkerPoolLimits
    ) -> None:
        self._spawn = spawn
        self._listener = listener
        self._stats = stats
        self._limits = limits
        self._wanted = 0
        self._extra: frozenset[int] = frozenset()
        self._nice = 0
        self._stopping = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._lost_workers: list[WorkerLink] = []
        self.workers: dict[int, PoolWorker] = {}

    def resize(self, count: int, nice: int, extra: frozenset[int] = frozenset()) -> None:
        """Keep `count` workers, numbered from 0, and those with the numbers in `extra`.

        A busy worker that is not wanted any more ends after its job. `nice` is for new ones.
        """
        self._wanted, self._extra, self._nice = count, extra, nice
        for index in (*range(count), *sorted(extra)):
            if index not in self._tasks:
                task = asyncio.create_task(self._supervise(index), name=f"cleaner-worker-{index}")
                self._tasks[index] = task
        for worker in self.workers.values():
            self._check_heartbeat(worker)

    def idle(self) -> list[PoolWorker]:
        """Workers that can be given something to do, lowest number first."""
        free = (w for w in self.workers.values() if w.ready and not (w.busy or w.leaving))
        workers = (worker for worker in free if self._is_wanted(worker.index))
        return sorted(workers, key=lambda worker: worker.index)

    def kill(self, worker: PoolWorker) -> None:
        """End a worker now; if even that takes too long it is given up."""
        self._stats.worker_kills += 1
        worker.link.kill()
        if worker.reaper is None:
            loop = asyncio.get_running_loop()
            worker.reaper = loop.call_later(self._limits.kill, worker.link.abandon)

    async def stop(self) -> None:
        """End all: in order, then by force, then without them. Bounded by the limits."""
        self._stopping.set()
        for worker in list(self.workers.values()):
            if worker.ready:
                self._check_heartbeat(worker)
            else:
                worker.link.kill()  # it may be compiling; it has nothing to lose
        if await self._all_end(self._limits.stop):
            return
        for worker in list(self.workers.values()):
            logger.warning(
                "worker does not stop and is killed", worker=worker.index, pid=worker.link.pid
            )
            self.kill(worker)
        if await self._all_end(self._limits.kill + 2 * REAP_SECONDS + 1):
            return
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _all_end(self, seconds: float) -> bool:
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=seconds)
        return all(task.done() for task in self._tasks.values())

    def _is_wanted(self, index: int) -> bool:
        requested = index < self._wanted or index in self._extra
        return requested and not self._stopping.is_set()

    async def _supervise(self, index: int) -> None:
        """One worker after the other in this place, until it is not wanted any more."""
        loop = asyncio.get_running_loop()
        pause = self._limits.respawn
        while self._is_wanted(index):
            began = loop.time()
            self._lost_workers = [link for link in self._lost_workers if not link.is_gone()]
            if len(self._lost_workers) < LOST_MAX:
                try:
                    await self._run_once(index)
                except Exception:
                    # Supervised: a mistake of ours costs one worker, not its place.
                    logger.exception("end of a worker not handled", worker=index)
            if not self._is_wanted(index):
                break
            if loop.time() - began >= LONG_LIFE_SECONDS:
                pause = self._limits.respawn
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                pause = min(2 * pause, self._limits.respawn_max)
        if self._tasks.get(index) is asyncio.current_task() and not self._stopping.is_set():
            del self._tasks[index]  # its place can be filled again
            self._stats.last.pop(index, None)  # the gauges are over the workers that there are

    async def _run_once(self, index: int) -> None:
        try:
            link = await self._spawn(self._nice)
        except OSError as error:
            self._stats.worker_deaths += 1
            logger.error("worker not started", worker=index, reason=str(error))
            return
        self._stats.worker_starts += 1
        worker = PoolWorker(index, link, BrokerSide(link.slots))
        self.workers[index] = worker
        try:
            watch = asyncio.create_task(self._watch(worker), name=f"cleaner-heartbeat-{index}")
            try:
                fault = await self._receive_messages(worker) or worker.fault
            finally:
                watch.cancel()
            if fault:
                link.kill()
            ended = await link.reap()
            how = fault or ended
            if self._is_wanted(index) and (fault or not worker.leaving):
                self._stats.worker_deaths += 1
                logger.warning("worker died", worker=index, pid=link.pid, reason=how)
            await self._listener.worker_exited(worker, how)
        finally:
            self._discard(worker)

    async def _watch(self, worker: PoolWorker) -> None:
        """Kill a worker whose heartbeat stops."""
        heartbeat = Heartbeat(self._limits.missed)
        while not heartbeat.is_lost(worker.link.beats()):  # noqa: ASYNC110 - a process sets it
            await asyncio.sleep(self._limits.check)
        worker.fault = heartbeat.reason
        self.kill(worker)

    async def _receive_messages(self, worker: PoolWorker) -> str:
        """Listen until it ends; what was wrong with it, if it did not end by itself."""
        try:
            async with asyncio.timeout(self._limits.start):
                first = await worker.link.receive()
        except TimeoutError:
            return f"was not ready within {self._limits.start:g} s"
        except ChannelError as error:
            return f"sent junk: {error}"
        if first is None:
            return ""
        if not isinstance(first, WorkerReady):
            return f"began with {type(first).__name__}"
        logger.debug("worker ready", worker=worker.index, pid=first.pid, s=first.seconds)
        worker.ready = True
        try:
            self._check_heartbeat(worker)
            while (message := await worker.link.receive()) is not None:
                await self._listener.worker_sent(worker, message)
                self._check_heartbeat(worker)
        except ChannelError as error:
            return f"sent junk: {error}"
        except Exception as error:
            # A mistake of ours must not leave the place empty for good: this worker is replaced.
            logger.exception("message of a worker not handled", worker=worker.index)
            return f"its message could not be handled: {error!r}"
        return ""

    def _check_heartbeat(self, worker: PoolWorker) -> None:
        """A free worker is offered, or sent home."""
        if worker.busy or worker.leaving or not worker.ready:
            return
        if self._is_wanted(worker.index):
            self._listener.worker_free(worker)
        else:
            worker.leaving = True
            worker.link.shutdown()

    def _discard(self, worker: PoolWorker) -> None:
        if worker.reaper is not None:
            worker.reaper.cancel()
        del self.workers[worker.index]
        worker.link.close()
        if not worker.link.is_gone():
            worker.link.kill()
            self._lost_workers.append(worker.link)
