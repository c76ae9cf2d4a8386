"""Supervise worker processes: start them, receive their messages, replace dead ones, end them.

Rule 1. One task receives the messages of a worker and handles them in order, one at a time.
Rule 2. `worker_exited` is called once for each worker, after the process died or was abandoned.
Rule 3. Every wait is bounded: for the first message, for an end, between two starts.

This module does not know what a job is.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import structlog

from cleaner.stats import PoolStats
from cleaner.workers.channel import ChannelError, Message, WorkerReady
from cleaner.workers.heartbeat import CHECK_SECONDS, MISSED_MAX, HeartbeatMonitor
from cleaner.workers.process import REAP_SECONDS, Spawn, WorkerLink
from cleaner.workers.throttle import BrokerSide

START_SECONDS: Final = 600.0  # for the first message: kernels may have to be compiled
STALL_SECONDS: Final = 600.0  # without progress of a busy worker; then it is aborted
ABORT_SECONDS: Final = 30.0  # for an abort to take effect (a buffer, an fsync); then it is killed
LONG_LIFE_SECONDS: Final = 60.0  # a worker that lived this long is replaced at once
LOST_MAX: Final = 8  # processes that hang in the kernel; then no more are started

logger = structlog.get_logger("cleaner")


@dataclass(frozen=True, slots=True)
class WorkerPoolLimits:
    """Timeouts in seconds."""

    start: float = START_SECONDS
    kill: float = 3.0  # for the end of a killed worker, before it is abandoned
    stop: float = 10.0  # for all workers to end when the broker stops
    respawn: float = 0.1  # before a dead worker is replaced; doubled with each early death
    respawn_max: float = 30.0
    check: float = CHECK_SECONDS  # between two checks of a heartbeat
    missed: int = MISSED_MAX  # checks without a beat, before the worker is killed


@dataclass(slots=True, eq=False)
class PoolWorker:
    """A live worker. The listener sets `busy`."""

    index: int
    link: WorkerLink
    side: BrokerSide
    ready: bool = False
    busy: bool = False
    leaving: bool = False  # it is stopping and gets no more jobs
    reaper: asyncio.TimerHandle | None = field(default=None)
    fault: str = ""  # why it was killed, for operators


class WorkerListener(Protocol):
    """Gives jobs to workers and handles their messages."""

    def worker_free(self, worker: PoolWorker) -> None:
        """Note that the worker is idle."""

    async def worker_sent(self, worker: PoolWorker, message: Message) -> None:
        """Handle a message. Raises ChannelError for a wrong one: the worker is then killed."""

    async def worker_exited(self, worker: PoolWorker, how: str) -> None:
        """Handle the end of a worker; its shared memory is valid until this returns."""


class WorkerPool:
    """The workers, each supervised by a task of its own."""

    def __init__(
        self,
        spawn: Spawn,
        listener: WorkerListener,
        stats: PoolStats,
        limits: WorkerPoolLimits,
        *,
        measured: Callable[[Awaitable[None]], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`measured` wraps the tasks and measures how long they block the event loop."""
        self._measured = measured
        self._spawn = spawn
        self._listener = listener
        self._stats = stats
        self._limits = limits
        self._count = 0
        self._extra: frozenset[int] = frozenset()
        self._nice = 0
        self._stopping = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._lost_workers: list[WorkerLink] = []
        self.workers: dict[int, PoolWorker] = {}

    def resize(self, count: int, nice: int, extra: frozenset[int] = frozenset()) -> None:
        """Keep `count` workers with indexes from 0, and those with the indexes in `extra`.

        A superfluous busy worker ends after its job. `nice` applies to new workers.
        """
        self._count, self._extra, self._nice = count, extra, nice
        for index in (*range(count), *sorted(extra)):
            if index not in self._tasks:
                work = self._supervise(index)
                if self._measured is not None:
                    work = self._measured(work)
                self._tasks[index] = asyncio.create_task(work, name=f"cleaner-worker-{index}")
        for worker in self.workers.values():
            self._offer_or_end(worker)

    def idle(self) -> list[PoolWorker]:
        """Return the idle workers, lowest index first."""
        free = (w for w in self.workers.values() if w.ready and not (w.busy or w.leaving))
        workers = (worker for worker in free if self._is_needed(worker.index))
        return sorted(workers, key=lambda worker: worker.index)

    def kill(self, worker: PoolWorker) -> None:
        """Kill a worker; abandon it if it does not end."""
        self._stats.worker_kills += 1
        worker.link.kill()
        if worker.reaper is None:
            loop = asyncio.get_running_loop()
            worker.reaper = loop.call_later(self._limits.kill, worker.link.abandon)

    async def stop(self) -> None:
        """End all workers: in order, then by force; abandon those that hang."""
        self._stopping.set()
        for worker in list(self.workers.values()):
            if worker.ready:
                self._offer_or_end(worker)
            else:
                worker.link.kill()  # it may be compiling; it has no job
        if await self._all_end(self._limits.stop):
            return
        for worker in list(self.workers.values()):
            logger.warning(
                "worker killed",
                worker=worker.index,
                pid=worker.link.pid,
                reason="it did not stop",
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

    def _is_needed(self, index: int) -> bool:
        is_configured = index < self._count or index in self._extra
        return is_configured and not self._stopping.is_set()

    async def _supervise(self, index: int) -> None:
        """Run one worker after the other under this index, as long as it is needed."""
        loop = asyncio.get_running_loop()
        pause = self._limits.respawn
        while self._is_needed(index):
            began = loop.time()
            self._lost_workers = [link for link in self._lost_workers if not link.is_gone()]
            if len(self._lost_workers) < LOST_MAX:
                try:
                    await self._run_once(index)
                except Exception:
                    # An error of ours costs one worker, not its index.
                    logger.exception("worker supervision failed", worker=index)
            if not self._is_needed(index):
                break
            if loop.time() - began >= LONG_LIFE_SECONDS:
                pause = self._limits.respawn
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            except TimeoutError:
                pause = min(2 * pause, self._limits.respawn_max)
        if self._tasks.get(index) is asyncio.current_task() and not self._stopping.is_set():
            del self._tasks[index]  # the index can be used again
            self._stats.last.pop(index, None)  # the gauges cover existing workers only

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
            if self._is_needed(index) and (fault or not worker.leaving):
                self._stats.worker_deaths += 1
                logger.warning("worker exited", worker=index, pid=link.pid, reason=how)
            await self._listener.worker_exited(worker, how)
        finally:
            self._discard(worker)

    async def _watch(self, worker: PoolWorker) -> None:
        """Kill a worker whose heartbeat stops."""
        heartbeat = HeartbeatMonitor(self._limits.missed)
        while not heartbeat.is_lost(worker.link.beats()):  # noqa: ASYNC110 - a process sets it
            await asyncio.sleep(self._limits.check)
        worker.fault = heartbeat.reason
        self.kill(worker)

    async def _receive_messages(self, worker: PoolWorker) -> str:
        """Handle messages until the worker ends; return its fault, empty if it has none."""
        try:
            async with asyncio.timeout(self._limits.start):
                first = await worker.link.receive()
        except TimeoutError:
            return f"was not ready within {self._limits.start:g} s"
        except ChannelError as error:
            return f"sent a malformed message: {error}"
        if first is None:
            return ""
        if not isinstance(first, WorkerReady):
            return f"sent {type(first).__name__} first"
        logger.debug("worker ready", worker=worker.index, pid=first.pid, s=first.seconds)
        worker.ready = True
        try:
            self._offer_or_end(worker)
            while (message := await worker.link.receive()) is not None:
                await self._listener.worker_sent(worker, message)
                self._offer_or_end(worker)
        except ChannelError as error:
            return f"sent a malformed message: {error}"
        except Exception as error:
            # An error of ours must not leave the index unused: replace this worker.
            logger.exception("worker message not handled", worker=worker.index)
            return f"its message could not be handled: {error!r}"
        return ""

    def _offer_or_end(self, worker: PoolWorker) -> None:
        """Offer an idle worker to the listener, or end it if it is superfluous."""
        if worker.busy or worker.leaving or not worker.ready:
            return
        if self._is_needed(worker.index):
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
