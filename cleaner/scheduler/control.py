"""Events in, effects carried out: the pool's side of the state machine.

Rule 1. Every change of a partition's state is an event sent to the registry. All of them happen on
        the loop, so there are no locks; what an event brings about is carried out in `_perform`.
Rule 2. Files of a partition change only while it is held (a job, a journal) or paused. Everything
        else that truncates, deletes or re-configures a log goes through `paused`.
Rule 3. An operator's hold is one pause that nobody waits for; a partition has one or none.
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
from cleaner.scheduler.in_progress import CleanerRegistry
from cleaner.scheduler.partition_scanner import PartitionScanner
from cleaner.stats import PoolStats
from cleaner.workers.worker_pool import PoolWorker
from storage.env import Env
from storage.model import TopicPartition

logger = structlog.get_logger("cleaner")


BY_OPERATOR: Final = "an operator gave it up"
PAUSED_BY_OPERATOR: Final = "an operator paused it"
AT_STOP: Final = "the broker stops"


class PartitionBusyError(Exception):
    """Somebody else has paused the partition, too: an operator, or a change that is under way."""

    def __init__(self, partition: TopicPartition) -> None:
        super().__init__(f"cleaning of {partition} is paused by somebody else, too")
        self.partition = partition


class PartitionControl:
    """Who has which partition, and who waits for it."""

    def __init__(
        self,
        host: CleanerHost,
        env: Env,
        scanner: PartitionScanner,
        *,
        registry: CleanerRegistry,
        stats: PoolStats,
        abort_seconds: float,
        wake: Callable[[], None],
        kill: Callable[[PoolWorker], None],
    ) -> None:
        self.attempts: dict[TopicPartition, CleanAttempt] = {}  # under way
        self.operator_pauses: set[TopicPartition] = (
            set()
        )  # for which a pause of an operator is in force
        self._host = host
        self._env = env
        self._scanner = scanner
        self._registry = registry
        self._stats = stats
        self._abort_seconds = abort_seconds
        self.wake = wake
        self._kill = kill
        self._waiting: defaultdict[TopicPartition, deque[asyncio.Future[None]]]
        self._waiting = defaultdict(deque)

    def state(self, partition: TopicPartition) -> states.State:
        """The partition's present state."""
        return self._registry.state(partition)

    def handle(self, partition: TopicPartition, event: states.Event) -> tuple[states.Effect, ...]:
        """Send an event and carry out what it brings about."""
        effects = self._registry.apply(partition, event, self._env.wall_ms())
        self._scanner.mark_changed(partition)
        for effect in effects:
            self._perform(partition, effect)
        return effects

    def _perform(self, partition: TopicPartition, effect: states.Effect) -> None:
        match effect:
            case states.StartJob() | states.PublishGroups() | states.DropGroups():
                pass  # carried out by whoever sent the event: it holds the job or the group
            case states.SignalAbort():
                run = self.attempts[partition]
                run.worker.side.abort(run.number)
                self._watch(run)
            case states.GrantPause():
                for waiter in self._waiting.pop(partition, ()):
                    if not waiter.done():
                        waiter.set_result(None)
            case states.SaveCheckpoint(offset):
                generation = self.attempts[partition].job.generation
                self._scanner.save_checkpoint(partition, generation, offset)
            case states.ReportFailure(mark):
                self._stats.failures += 1
                ended = self.attempts.get(partition)
                if ended is not None and ended.report is not None and ended.report.damaged:
                    return  # told with the job's numbers
                wait_ms = mark.until_ms - int(asyncio.get_running_loop().time() * 1000)
                self._host.failed(partition, mark.reason, self._env.wall_ms() + wait_ms)
            case states.WakeScheduler():
                self.wake()
            case _:
                assert_never(effect)

    def _watch(self, run: CleanAttempt) -> None:
        loop = asyncio.get_running_loop()
        run.abort_timer = loop.call_later(self._abort_seconds, self._abort_timed_out, run)

    def _abort_timed_out(self, run: CleanAttempt) -> None:
        """The abort was a while ago. A worker that waits for a journal is not to blame."""
        partition = run.job.partition
        state = self.state(partition)
        if self.attempts.get(partition) is not run or not isinstance(state, states.Aborting):
            return
        if state.publishing:
            self._watch(run)
            return
        logger.warning(
            "abort not heeded, worker killed", partition=str(partition), pid=run.worker.link.pid
        )
        self._kill(run.worker)

    @asynccontextmanager
    async def paused(self, partition: TopicPartition, reason: str) -> AsyncIterator[None]:
        """See CleanerPool.paused."""
        self._note_abort_reason(partition, reason)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[partition].append(granted)
        self.handle(partition, states.PauseRequested())
        try:
            await granted
            yield
        finally:
            # Also when cancelled while waiting: then it is a resume during an abort.
            waiting = self._waiting.get(partition)
            if waiting is not None and granted in waiting:
                waiting.remove(granted)
                if not waiting:
                    del self._waiting[partition]
            self.handle(partition, states.Resumed())

    @contextmanager
    def adopting(self, partition: TopicPartition) -> Iterator[None]:
        """See CleanerPool.adopting."""
        state = self.state(partition)
        if not isinstance(state, states.Paused) or state.pauses != 1:
            raise PartitionBusyError(partition)
        self.handle(partition, states.AdoptionBegun())
        try:
            yield
        finally:
            self.handle(partition, states.AdoptionEnded())

    def abort(self, partition: TopicPartition, reason: str) -> bool:
        """Give up a running job, if there is one; the partition may be chosen again at once."""
        self._note_abort_reason(partition, reason)
        running = states.is_busy(self.state(partition))
        self.handle(partition, states.AbortRequested())
        return running

    def pause(self, partition: TopicPartition) -> bool:
        """An operator's pause; False if there is one already."""
        if partition in self.operator_pauses:
            return False
        self.operator_pauses.add(partition)
        self._note_abort_reason(partition, PAUSED_BY_OPERATOR)
        self.handle(partition, states.PauseRequested())
        return True

    def resume(self, partition: TopicPartition) -> bool:
        """The end of an operator's pause; False if there was none."""
        if partition not in self.operator_pauses:
            return False
        self.operator_pauses.remove(partition)
        self.handle(partition, states.Resumed())
        return True

    def _note_abort_reason(self, partition: TopicPartition, reason: str) -> None:
        """Who asked first is the one who ended the job."""
        run = self.attempts.get(partition)
        if run is not None and not run.abort_reason:
            run.abort_reason = reason
