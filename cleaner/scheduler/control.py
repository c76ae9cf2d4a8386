"""Carry out the state machine: send events to the in-progress map and perform their effects.

Rule 1. Every change of a partition's state is an event sent to the in-progress map. Only
        the event loop sends events, so there are no locks; `_perform` carries out their effects.
Rule 2. The files of a partition change only while it is busy (a job, a journal) or paused.
        Whatever else truncates, deletes or re-configures a log uses `paused`.
Rule 3. An operator's pause is one pause that no caller waits for; a partition has at most one.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, assert_never

import structlog

from cleaner import states
from cleaner.host import CleanerHost
from cleaner.scheduler.clean_attempt import CleanAttempt
from cleaner.scheduler.in_progress_map import InProgressMap
from cleaner.scheduler.partition_scanner import PartitionScanner
from cleaner.stats import PoolStats
from cleaner.workers.worker_pool import PoolWorker
from storage.env import Env
from storage.model import TopicPartition

logger = structlog.get_logger("cleaner")


BY_OPERATOR: Final = "an operator aborted it"
PAUSED_BY_OPERATOR: Final = "an operator paused it"
RESUMED_BY_OPERATOR: Final = "an operator resumed it"
AT_STOP: Final = "the broker stops"


class PartitionBusyError(Exception):
    """The partition has another pause: by an operator, or by a change of its log."""

    def __init__(self, partition: TopicPartition) -> None:
        super().__init__(
            f"cleaning of {partition} is also paused by an operator or by a change of its log"
        )
        self.partition = partition


class PartitionControl:
    """The running attempts, the operators' pauses and the callers that wait for a pause."""

    def __init__(
        self,
        host: CleanerHost,
        env: Env,
        scanner: PartitionScanner,
        *,
        in_progress: InProgressMap,
        stats: PoolStats,
        abort_seconds: float,
        wake: Callable[[], None],
        kill: Callable[[PoolWorker], None],
    ) -> None:
        self.attempts: dict[TopicPartition, CleanAttempt] = {}  # running
        self.operator_pauses: set[TopicPartition] = set()
        self._host = host
        self._env = env
        self._scanner = scanner
        self._in_progress = in_progress
        self._stats = stats
        self._abort_seconds = abort_seconds
        self.wake = wake
        self._kill = kill
        self._waiting: defaultdict[TopicPartition, deque[asyncio.Future[None]]]
        self._waiting = defaultdict(deque)

    def state(self, partition: TopicPartition) -> states.State:
        """Return the partition's state."""
        return self._in_progress.state(partition)

    def handle(
        self, partition: TopicPartition, event: states.Event, reason: str = ""
    ) -> tuple[states.Effect, ...]:
        """Send an event, carry out its effects and return them."""
        effects = self._in_progress.apply(partition, event, self._env.wall_ms(), reason)
        self._scanner.mark_changed(partition)
        for effect in effects:
            self._perform(partition, effect)
        return effects

    def _perform(self, partition: TopicPartition, effect: states.Effect) -> None:
        match effect:
            case states.StartJob() | states.PublishGroups() | states.DropGroups():
                pass  # carried out by the sender, which has the job or the groups
            case states.SignalAbort():
                attempt = self.attempts[partition]
                for worker in attempt.workers:
                    worker.side.abort(attempt.number)
                self._start_abort_timer(attempt)
            case states.GrantPause():
                for waiter in self._waiting.pop(partition, ()):
                    if not waiter.done():
                        waiter.set_result(None)
            case states.SaveCheckpoint(offset):
                generation = self.attempts[partition].job.generation
                self._scanner.save_checkpoint(partition, generation, offset)
            case states.ReportFailure(quarantine):
                self._stats.failures += 1
                ended = self.attempts.get(partition)
                if ended is not None and ended.report is not None and ended.report.damaged:
                    return  # reported with the job's figures
                wait_ms = quarantine.until_ms - int(asyncio.get_running_loop().time() * 1000)
                self._host.failed(partition, quarantine.reason, self._env.wall_ms() + wait_ms)
            case states.WakeScheduler():
                self.wake()
            case _:
                assert_never(effect)

    def _start_abort_timer(self, attempt: CleanAttempt) -> None:
        loop = asyncio.get_running_loop()
        attempt.abort_timer = loop.call_later(self._abort_seconds, self._abort_timed_out, attempt)

    def _abort_timed_out(self, attempt: CleanAttempt) -> None:
        """Kill the workers that ignore an abort, unless they wait for a journal."""
        partition = attempt.job.partition
        state = self.state(partition)
        if self.attempts.get(partition) is not attempt or not isinstance(state, states.Aborting):
            return
        if state.publishing:
            self._start_abort_timer(attempt)
            return
        reason = "it ignored an abort"
        for worker in attempt.active:
            pid = worker.link.pid
            logger.warning("worker killed", partition=str(partition), pid=pid, reason=reason)
            self._kill(worker)

    @asynccontextmanager
    async def paused(
        self, partition: TopicPartition, reason: str = "its log was changed"
    ) -> AsyncIterator[None]:
        """Pause cleaning of the partition while the block runs; abort a running job first.

        `reason` is recorded with the pause and in the history of that job. Pauses nest. Waits for
        the worker (one buffer or fsync, then it is killed) and for a running journal.
        """
        self._note_abort_reason(partition, reason)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[partition].append(granted)
        self.handle(partition, states.PauseRequested(), reason)
        try:
            await granted
            yield
        finally:
            # If the caller was cancelled while it waited, this is a resume during an abort.
            waiting = self._waiting.get(partition)
            if waiting is not None and granted in waiting:
                waiting.remove(granted)
                if not waiting:
                    del self._waiting[partition]
            self.handle(partition, states.Resumed())

    @contextmanager
    def adopting(self, partition: TopicPartition) -> Iterator[None]:
        """Publish groups of a remote clean in the block, inside of the only pause.

        Later pauses wait for the end of the block. Raises PartitionBusyError if there is another
        pause.
        """
        state = self.state(partition)
        if not isinstance(state, states.Paused) or state.pauses != 1:
            raise PartitionBusyError(partition)
        self.handle(partition, states.AdoptionBegun())
        try:
            yield
        finally:
            self.handle(partition, states.AdoptionEnded())

    def abort(self, partition: TopicPartition, reason: str) -> bool:
        """Abort a running job; return whether there was one."""
        self._note_abort_reason(partition, reason)
        was_busy = states.is_busy(self.state(partition))
        self.handle(partition, states.AbortRequested(), reason)
        return was_busy

    def victims_rewritten(self, partition: TopicPartition) -> None:
        """Note that a job has rewritten the victims of a request to erase."""
        self._scanner.requests.erased(partition)

    def pause(self, partition: TopicPartition) -> bool:
        """Add an operator's pause; return False if there is one."""
        if partition in self.operator_pauses:
            return False
        self.operator_pauses.add(partition)
        self._note_abort_reason(partition, PAUSED_BY_OPERATOR)
        self.handle(partition, states.PauseRequested(), PAUSED_BY_OPERATOR)
        return True

    def resume(self, partition: TopicPartition) -> bool:
        """End an operator's pause; return False if there was none."""
        if partition not in self.operator_pauses:
            return False
        self.operator_pauses.remove(partition)
        self.handle(partition, states.Resumed(), RESUMED_BY_OPERATOR)
        return True

    def _note_abort_reason(self, partition: TopicPartition, reason: str) -> None:
        """Record why the attempt is aborted; the first reason counts."""
        attempt = self.attempts.get(partition)
        if attempt is not None and not attempt.abort_reason:
            attempt.abort_reason = reason
