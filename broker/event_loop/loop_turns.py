"""Splits long work on the event loop into turns; finishes work whose client disconnected."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from time import perf_counter, perf_counter_ns
from typing import Any, Final, TypeAlias, TypeVar

import structlog

_T = TypeVar("_T")
_Progress = TypeVar("_Progress")
_Turn: TypeAlias = Callable[[], None] | asyncio.Future[None]

# A fifth of the time that a task may block the loop, because the last step of a turn may be long.
TURN_SECONDS: Final = 0.002
# The time that turns of connections have in a round of the loop: as much as a task may block it.
# Unauthenticated connections have the time of one turn in addition.
ROUND_SECONDS: Final = 5 * TURN_SECONDS
UNAUTHENTICATED_ROUND_SECONDS: Final = TURN_SECONDS
SHORT_TURN_SECONDS: Final = TURN_SECONDS / 20  # of a task that waits for its turn, as a guess
FREED_AT_ONCE: Final = 500  # items of a container: 0.1 ms

logger = structlog.get_logger("broker.loop")


async def run_to_end(work: asyncio.Future[_T]) -> _T:
    """Wait for work that continues if the caller is cancelled, because its client disconnects.

    Raises what the work raises. If nobody waits any more, that is logged.

    An error refers to the variables of all functions that it leaves. If one of them is `work`, it
    refers to itself, and all of them stay until the collector of cyclic garbage finds them. So a
    caller with much in memory does not keep `work` in a variable.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(_log_failure)
        raise
    finally:
        del work


def _log_failure(work: asyncio.Future[Any]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.info("request failed after disconnect", reason=repr(error)[:300])


async def yield_to_loop() -> None:
    """Let every task that is ready run once."""
    await asyncio.sleep(0)


class Turns:
    """Yields to the event loop whenever the present turn has lasted TURN_SECONDS."""

    def __init__(self, seconds: float = TURN_SECONDS) -> None:
        self._seconds = seconds
        self._began = perf_counter()

    async def take(self) -> None:
        """End the turn if its time is over. Call this between two small steps of the work."""
        if perf_counter() - self._began >= self._seconds:
            await yield_to_loop()
            self._began = perf_counter()

    async def over(self, rows: Iterable[_T]) -> AsyncIterator[_T]:
        """Yield the rows, with a possible end of turn before each."""
        for row in rows:
            await self.take()
            yield row


async def run_in_turns(
    slices: Generator[_Progress, None, _T],
    wait_for_room: Callable[[_Progress], Awaitable[None]] | None = None,
) -> _T:
    """Like `run_at_once` (storage/slices.py), but yield to the loop after each slice.

    `wait_for_room` gets what a slice yields, and delays the next one.
    """
    while True:
        try:
            progress = next(slices)
        except StopIteration as stop:
            result: _T = stop.value
            return result
        if wait_for_room is not None:
            await wait_for_room(progress)
        await yield_to_loop()


class WakeUp(asyncio.Future[None]):
    """A future for a task that, while it waits, holds nothing that others wait for.

    So the task may queue for its next turn: one event can wake a thousand tasks in a round of the
    loop.
    """


class MeasuredTurns(Awaitable[_T]):
    """Awaits `work` and reports how long each of its turns blocked the loop."""

    def __init__(
        self,
        work: Awaitable[_T],
        note_ns: Callable[[int], None],
        find_queue: "Callable[[], TurnQueue] | None" = None,
    ) -> None:
        """With `find_queue`, the time of each turn counts in the queue that it returns.

        While that queue is busy, these turns wait there: the first one, each one after a turn that
        the work ended itself (Turns), and each one after a WakeUp. A turn after any other wait
        begins at once, because the work may hold something that others wait for.
        """
        self._work = work
        self._note_ns = note_ns
        self._find_queue = find_queue

    def __await__(self) -> Generator[object, None, _T]:
        """Run the work from wait to wait."""
        steps = self._work.__await__()
        find_queue, queue = self._find_queue, None
        error: BaseException | None = None
        waits_for: object = None
        while True:
            if find_queue is not None:
                queue = find_queue()
                may_queue = waits_for is None or isinstance(waits_for, WakeUp)
                if may_queue and error is None and queue.is_busy:
                    error = yield from _wait(steps, queue.wait().__await__())
            began = perf_counter_ns()
            try:
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as stop:
                result: _T = stop.value
                return result
            finally:
                elapsed_ns = perf_counter_ns() - began
                self._note_ns(elapsed_ns)
                if queue is not None:
                    queue.charge(elapsed_ns / 1e9)
            error = yield from _wait(steps, (waits_for,))


class SharedTurns(Awaitable[_T]):
    """Awaits `work`, of whose turns and those of other work one runs in each round of the loop.

    So a client with many requests in progress delays each turn of another by one of its own.
    """

    def __init__(
        self, work: Awaitable[_T], lock: asyncio.Lock, *, if_yielded: bool = False
    ) -> None:
        """All work of one client has the same lock.

        `if_yielded`: only turns that the work ends itself (Turns) are followed by a wait for the
        lock, so that work without a second turn is not delayed.
        """
        self._work = work
        self._lock = lock
        self._if_yielded = if_yielded

    def __await__(self) -> Generator[object, None, _T]:
        """Run the work from wait to wait."""
        steps = self._work.__await__()
        error: BaseException | None = None
        takes = not self._if_yielded
        while True:
            if error is None and takes:
                error = yield from _wait(steps, self._take().__await__())
            try:
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as stop:
                result: _T = stop.value
                return result
            error = yield from _wait(steps, (waits_for,))
            takes = not self._if_yielded or waits_for is None

    async def _take(self) -> None:
        await self._lock.acquire()
        asyncio.get_running_loop().call_soon(self._lock.release)  # the next round


async def free_in_turns(steps: Iterator[None]) -> None:
    """Free memory in small steps: all at once would block the loop.

    Freeing the rows of a message with 2,000 topics and their settings takes 5 ms. The second step
    begins a turn, because the work before the first may have used up the present one.
    """
    for _ in steps:
        await yield_to_loop()
        break
    turns = Turns()
    for _ in steps:
        await turns.take()


class FreedLater:
    """Frees the items of large containers in turns, for callers that do not wait."""

    def __init__(self) -> None:
        self._containers = deque[list[Any] | set[Any] | dict[Any, Any]]()
        self._freeing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._containers)

    def add(self, *containers: list[Any] | set[Any] | dict[Any, Any]) -> None:
        """Empty large containers that nobody uses any more. Small ones stay as they are."""
        self._containers.extend(each for each in containers if len(each) > FREED_AT_ONCE)
        if self._containers and (self._freeing is None or self._freeing.done()):
            freeing = free_in_turns(self._steps())
            self._freeing = asyncio.create_task(freeing, name="free containers")

    def _steps(self) -> Iterator[None]:
        while self._containers:
            container = self._containers[0]
            free = container.popitem if isinstance(container, dict) else container.pop
            for _ in range(min(FREED_AT_ONCE, len(container))):
                free()
            if not container:
                self._containers.popleft()
            yield


class TurnQueue:
    """Runs turns in order, and each at most once in a round of the loop.

    No turn begins once those of the round have taken `seconds`. The queue has functions to call,
    and tasks that wait for a turn. A task runs in the round after the one that wakes it, and nobody
    knows how long it will take. So several tasks are woken at once. A task that finds the time used
    up keeps its place in the queue; the first task always runs.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds_max = seconds
        self._seconds = 0.0
        self._turns = deque[_Turn]()
        self._postponed = deque[_Turn]()  # they come before all others
        self._tasks_max = max(1, round(seconds / SHORT_TURN_SECONDS))
        self._first_task_may_run = False
        self._is_scheduled = False

    @property
    def is_over(self) -> bool:
        """Return whether the time of this round is used up."""
        return self._seconds >= self._seconds_max

    @property
    def is_busy(self) -> bool:
        """Return whether a task has to wait: the time is used up, or others wait."""
        return self._seconds >= self._seconds_max or bool(self._turns or self._postponed)

    def add(self, turn: Callable[[], None]) -> None:
        """Queue a turn. It charges its time, and may add itself for the next round."""
        self._turns.append(turn)
        self._schedule()

    async def wait(self) -> None:
        """Wait for a turn of the present task, which charges its time."""
        places = self._turns
        while True:
            turn = asyncio.get_running_loop().create_future()
            places.append(turn)
            self._schedule()
            await turn
            if self._first_task_may_run or not self.is_over:
                self._first_task_may_run = False
                return
            places = self._postponed

    def charge(self, seconds: float) -> None:
        """Count the time of a turn, from the queue or not.

        The time is counted over several rounds until half of it is used up: a callback in each
        round, to set it to zero, would slow down rounds with one small request.
        """
        self._seconds += seconds
        if self._seconds >= self._seconds_max / 2:
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        self._seconds = 0.0
        self._turns.extendleft(reversed(self._postponed))
        self._postponed.clear()
        tasks = 0
        try:
            for _ in range(len(self._turns)):
                if self.is_over or tasks == self._tasks_max:
                    break
                turn = self._turns.popleft()
                if not isinstance(turn, asyncio.Future):
                    turn()
                elif not turn.done():  # cancelled
                    turn.set_result(None)
                    tasks += 1
        finally:
            self._first_task_may_run = tasks > 0
            if self._turns:
                self._schedule()


class ConnectionTurns:
    """The turns of all connections, of Kafka clients and of HTTP, in which they handle bytes.

    Requests that have to wait continue in tasks, whose turns have as much time again. So a client
    with one request does not queue behind connections with many.
    """

    def __init__(self) -> None:
        self.clients = TurnQueue(ROUND_SECONDS)
        # One request of each connection that receives some when the time of `clients` is used up.
        self.single_requests = TurnQueue(ROUND_SECONDS)
        self.client_tasks = TurnQueue(ROUND_SECONDS)
        # Connections without a complete request, or without credentials if those are needed.
        self.unauthenticated = TurnQueue(UNAUTHENTICATED_ROUND_SECONDS)
        self.unauthenticated_tasks = TurnQueue(UNAUTHENTICATED_ROUND_SECONDS)


def _wait(
    steps: Generator[object, None, object], waits: Iterable[object]
) -> Generator[object, None, BaseException | None]:
    """Wait on behalf of the work; return what was thrown meanwhile, to be thrown into the work."""
    try:
        yield from waits
    except GeneratorExit:
        steps.close()
        raise
    except BaseException as thrown:  # noqa: BLE001 - thrown into the work
        return thrown
    return None
