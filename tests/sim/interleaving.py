"""Threads, files and time of a simulated machine: one seed decides how everything interleaves.

Code that a broker runs in a thread or in a worker process runs in a `Fiber`: a thread that only
runs while the loop waits for it, so that there is never more than one at a time. A fiber gives way
before operations on files, for a time that its `Pace` draws; the loop goes on meanwhile. The same
seed gives the same order of operations, and so the same run.
"""

import errno
import functools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.sim.wall_clock import WallClock
from tests.support.clocks.virtual_loop import VirtualLoop
from tests.support.storage.memory_env import MemoryEnv, MemoryFile

T = TypeVar("T")
# Of one life of a broker; more is an endless loop. The longest take 4,000 and 7,000.
CALLS_MAX = 100_000  # of the file system
TURNS_MAX = 100_000  # of the event loop

NAP_SECONDS_MIN = 0.1

NEEDS_ROOM = frozenset({"create", "pwrite", "mkdir", "link", "rename"})  # operations on files


class KilledError(BaseException):
    """The process of this fiber was killed. Not an Exception: no handler may survive it."""


class EndlessError(Exception):
    """A life of a broker takes more steps than any that ends."""


@dataclass(frozen=True)
class Pace:
    """How a fiber gives way: after 1 to `calls_max` file operations, for one of `delays`."""

    calls_max: int
    delays: tuple[float, ...]  # seconds


AT_ONCE = Pace(1 << 30, (0.0,))


class _Thread:
    """A thread that carries out one fiber after the other."""

    def __init__(self) -> None:
        self.go = threading.Lock()
        self.back = threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.work: Callable[[], None] = lambda: None
        threading.Thread(target=self._serve, daemon=True, name="fiber").start()

    def _serve(self) -> None:
        while True:
            self.go.acquire()
            self.work()
            _idle.append(self)
            self.back.release()


_idle: list[_Thread] = []


class Fiber:
    """One call in a thread of its own."""

    def __init__(self, fibers: "Fibers", call: Callable[[], Any], pace: Pace) -> None:
        self.future: Future[Any] = Future()
        self.is_killed = False
        self._fibers = fibers
        self._call = call
        self._pace = pace
        self._thread: _Thread | None = None
        self._calls_left = fibers.rng.randint(1, pace.calls_max)
        self._delay = 0.0
        self._ending: Callable[[], None] | None = None

    def resume(self) -> None:
        """On the loop: let it run until it gives way or ends."""
        if self._ending is not None:
            return
        fibers = self._fibers
        assert fibers.current is None
        fibers.current = self
        if self._thread is None:
            self._thread = _idle.pop() if _idle else _Thread()
            self._thread.work = self._run
        thread = self._thread
        thread.go.release()
        thread.back.acquire()
        fibers.current = None
        if self._ending is not None:
            fibers.alive.pop(self, None)
            self._ending()
        else:
            fibers.loop.call_later(self._delay, self.resume)

    def _run(self) -> None:
        try:
            self._check_killed()
            result = self._call()
        except BaseException as error:
            self._ending = functools.partial(_fail, self.future, error)
        else:
            self._ending = functools.partial(_finish, self.future, result)

    def kill(self) -> None:
        """As SIGKILL: it runs no further, and touches no file any more."""
        self.is_killed = True
        if self._fibers.current is not self:
            self.resume()

    def give_way(self, delay: float) -> None:
        """In the fiber: let the loop go on, and come back after a time."""
        self._check_killed()
        assert self._thread is not None
        self._delay = delay
        self._thread.back.release()
        self._thread.go.acquire()
        self._check_killed()

    def before_call(self) -> None:
        """In the fiber: a file operation is about to begin."""
        self._check_killed()
        self._calls_left -= 1
        if self._calls_left == 0:
            self._calls_left = self._fibers.rng.randint(1, self._pace.calls_max)
            self.give_way(self._fibers.rng.choice(self._pace.delays))

    def _check_killed(self) -> None:
        if self.is_killed:
            raise KilledError


def _fail(future: "Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _finish(future: "Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


class Fibers:
    """All fibers of one life of a broker."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.current: Fiber | None = None
        self.alive: dict[Fiber, None] = {}

    def start(self, call: Callable[[], Any], pace: Pace) -> Fiber:
        """Begin a call; it runs from the loop's next turn on."""
        fiber = Fiber(self, call, pace)
        self.alive[fiber] = None
        self.loop.call_soon(fiber.resume)
        return fiber

    def before_call(self) -> None:
        """A file operation is about to begin, in a fiber or on the loop."""
        if self.current is not None:
            self.current.before_call()

    def nap(self, seconds: float) -> None:
        """As time.sleep, in a fiber; short naps are made longer, or a run takes too long."""
        assert self.current is not None
        self.current.give_way(max(seconds, NAP_SECONDS_MIN))

    def kill_all(self) -> None:
        """The process is over."""
        for fiber in list(self.alive):
            fiber.kill()
        self.alive.clear()


class FiberLock:
    """A lock between fibers. The loop lets who has it go on until it is free."""

    def __init__(self, fibers: Fibers) -> None:
        self._fibers = fibers
        self._holder: Fiber | None = None
        self._is_held = False

    def __enter__(self) -> None:
        while self._is_held:
            if self._fibers.current is not None:
                self._fibers.nap(0.05)
            else:
                assert self._holder is not None
                self._holder.resume()
        self._is_held, self._holder = True, self._fibers.current

    def __exit__(self, *_: object) -> None:
        self._is_held, self._holder = False, None


class FiberExecutor(ThreadPoolExecutor):
    """The loop's threads. Some calls are carried out at once, the others as fibers."""

    def __init__(self, fibers: Fibers, share: float, pace: Pace) -> None:
        super().__init__(1)
        self._fibers = fibers
        self._share = share
        self._pace = pace

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        call = functools.partial(fn, *args, **kwargs)
        if self._fibers.rng.random() < self._share:
            return self._fibers.start(call, self._pace).future
        future: Future[T] = Future()
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        return future


class SimulatedLoop(VirtualLoop):
    """A loop whose time is that of an environment."""

    def __init__(self, seed: int, env: "SimulatedEnv") -> None:
        super().__init__(seed)
        self._env = env
        self.turns = 0

    def time_passed(self, seconds: float) -> None:
        self._env.elapse(seconds)

    def _run_once(self) -> None:
        self.turns += 1
        if self.turns > TURNS_MAX:
            self._env.endless = f"more than {TURNS_MAX} turns of the event loop"
        if self._env.endless:
            raise EndlessError(self._env.endless)
        super()._run_once()

    def _write_to_self(self) -> None:
        """Nobody waits in `select` while something is ready."""


class _NoLock:
    """There is one thread at a time."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class Fault:
    """The `countdown`-th call among `operations` fails, once."""

    number: int  # errno
    operations: frozenset[str]
    countdown: int
    path: str = ""  # the one that failed
    operation: str = ""


@dataclass(frozen=True)
class FullDisk:
    """A share of the operations that need room fails for a time."""

    until_ms: float
    share: float


@dataclass
class CrashPoint:
    """The process ends instead of the `countdown`-th `operation` on a path that holds `part`."""

    operation: str
    part: str
    countdown: int


class SimulatedFile(MemoryFile):
    """A file that gives way before each operation."""

    def pread(self, length: int, position: int) -> bytes:
        self._env.before_call()  # type: ignore[attr-defined]
        return super().pread(length, position)

    def pwrite(self, data: Any, position: int) -> None:
        self._env.before_call()  # type: ignore[attr-defined]
        super().pwrite(data, position)

    def truncate(self, length: int) -> None:
        self._env.before_call()  # type: ignore[attr-defined]
        super().truncate(length)

    def sync(self) -> None:
        self._env.before_call()  # type: ignore[attr-defined]
        super().sync()


class SimulatedEnv(MemoryEnv):
    """Files that give way, time that passes with the loop, and faults that happen once."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._mutex = _NoLock()  # type: ignore[assignment]
        self.fibers: Fibers | None = None
        self.on_death: Callable[[], None] = lambda: None
        self.fault: Fault | None = None
        self.happened: list[Fault] = []  # in this life
        self.crash_point: CrashPoint | None = None
        self.calls = 0
        self.endless = ""  # why this life is taken for one that does not end
        self.clock = WallClock()  # of all lives
        self.full: FullDisk | None = None

    def kill(self) -> "SimulatedEnv":
        return self._later(super().kill())

    def crash(self) -> "SimulatedEnv":
        return self._later(super().crash())

    def _later(self, after: MemoryEnv) -> "SimulatedEnv":
        assert isinstance(after, SimulatedEnv)
        after.clock, after.full = self.clock, self.full
        return after

    def fill_disk(self, seconds: float, share: float) -> None:
        """For a time, a share of what needs room fails; what frees room does not."""
        self.full = FullDisk(self.clock.passed + 1000 * seconds, share)

    @contextmanager
    def without_faults(self) -> Iterator[None]:
        """Let the simulation itself use the files."""
        fault, full = self.fault, self.full
        self.fault = self.full = None
        try:
            yield
        finally:
            self.fault, self.full = fault, full

    def elapse(self, seconds: float) -> None:
        """Time goes on."""
        self.clock.passed += seconds * 1000
        self._wall_ms = self.clock.wall_ms
        self._monotonic_s += seconds

    def set_clock(self, by_ms: int) -> None:
        """Set the wall clock forward or back."""
        self.clock.set(by_ms)
        self._wall_ms = self.clock.wall_ms

    @property
    def is_dead(self) -> bool:
        """The process has ended."""
        return self._dead

    def before_call(self) -> None:
        """Give way, if a fiber is at work."""
        self.calls += 1
        if self.calls > CALLS_MAX:
            self.endless = f"more than {CALLS_MAX} file operations"
        if self.endless:
            raise EndlessError(self.endless)
        if self.fibers is not None:
            self.fibers.before_call()

    def _step(self, operation: str, path: str) -> None:
        point = self.crash_point
        if point is not None and point.operation in ("", operation) and point.part in path:
            point.countdown -= 1
            if point.countdown == 0:
                self.crash_point = None
                self.crash_at = self.operations + 1
        was_dead = self._dead
        try:
            super()._step(operation, path)
            self._check_room("create" if operation == "open" else operation, path)
        finally:
            if self._dead and not was_dead:
                self.on_death()

    def _check_room(self, operation: str, path: str) -> None:
        full = self.full
        if full is None or self.clock.passed >= full.until_ms or operation not in NEEDS_ROOM:
            return
        if self._rng.random() < full.share:
            self.happened.append(Fault(errno.ENOSPC, NEEDS_ROOM, 0, path, operation))
            raise OSError(errno.ENOSPC, "full", path)

    def _read(self, operation: str, path: str) -> None:
        super()._read(operation, path)
        fault = self.fault
        if fault is None or operation not in fault.operations:
            return
        fault.countdown -= 1
        if fault.countdown == 0:
            fault.operation, fault.path, self.fault = operation, path, None
            self.happened.append(fault)
            raise OSError(fault.number, "injected", path)

    def open(
        self, path: str, *, create: bool = False, write: bool = False, truncate: bool = False
    ) -> MemoryFile:
        self.before_call()
        opened = super().open(path, create=create, write=write, truncate=truncate)
        return SimulatedFile(self, path, opened._open_inode(), writable=opened._writable)


def _gives_way(name: str) -> None:
    inherited = getattr(MemoryEnv, name)

    @functools.wraps(inherited)
    def call(self: SimulatedEnv, *args: Any, **kwargs: Any) -> Any:
        self.before_call()
        return inherited(self, *args, **kwargs)

    setattr(SimulatedEnv, name, call)


for _name in (
    "listdir", "mkdir", "rename", "link", "unlink", "rmdir", "sync_dir", "read_file",
    "set_mtime_ms",
):  # fmt: skip
    _gives_way(_name)
