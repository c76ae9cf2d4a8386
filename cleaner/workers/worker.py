"""A cleaner worker: a process that runs one job after the other and talks to nobody but the broker.

    python -m cleaner.workers.worker --fd N --memory-fd M --parent PID [--nice N]

Started by cleaner/workers/process.py with a socket and a page of shared memory, and nothing else.
It reads closed segments, writes `.cleaned` files, and sends what it finds; it renames and deletes
nothing of the log. It ends when the broker closes the socket or dies. Interrupts are the broker's
to handle: a Ctrl-C or a service manager's SIGTERM reaches the whole process group, and the broker
then stops its workers in order.
"""

import argparse
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from cleaner.job import CleanAbortedError, CleanedGroup, CleanJob, CleanReport, JobControl
from cleaner.verification import InvalidOutputError, VerifyReport
from cleaner.workers.channel import (
    LENGTH_BYTES,
    Frame,
    FromWorker,
    GroupsCleaned,
    JobDone,
    JobFailed,
    JobStopped,
    OutputRefused,
    OutputsVerified,
    Progressed,
    RunJob,
    VerifyJob,
    WorkerReady,
    body_bytes,
    decode_frame,
    encode,
    join_parts,
)
from cleaner.workers.heartbeat import Pulse
from cleaner.workers.throttle import Direction, SharedMemory, Slots, WorkerSide
from storage.env import Env, RealEnv
from storage.errors import StorageError

PROGRESS_SECONDS: Final = 0.5  # at most one progress frame in this time
REASON_CHARS_MAX: Final = 500  # of a failure, as shown and logged
TRACEBACK_CHARS_MAX: Final = 8000
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h

Runner: TypeAlias = Callable[[Env, CleanJob, JobControl], CleanReport]
Verifier: TypeAlias = Callable[
    [Env, CleanJob, Sequence[CleanedGroup], Sequence[str], JobControl], VerifyReport
]
Send: TypeAlias = Callable[[FromWorker], None]


class JobLink:
    """The JobControl of one run: budget and abort by shared memory, results by frames."""

    def __init__(self, run: int, side: WorkerSide, send: Send, clock: Callable[[], float]) -> None:
        self._run = run
        self._side = side
        self._send = send
        self._clock = clock
        self._sent_at = -PROGRESS_SECONDS

    def read_bytes(self, count: int) -> None:
        """Charge bytes about to be read; waits for the budget. Raises CleanAbortedError."""
        self._side.charge(Direction.READ, count)

    def write_bytes(self, count: int) -> None:
        """Charge bytes about to be written; waits for the budget. Raises CleanAbortedError."""
        self._side.charge(Direction.WRITE, count)

    def aborted(self) -> bool:
        """Whether the broker wants the partition back."""
        return self._side.aborted()

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        """Hand groups over for publication."""
        self._send(GroupsCleaned(self._run, groups))

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Say how far the job is, unless that was said a moment ago."""
        now = self._clock()
        if now - self._sent_at >= PROGRESS_SECONDS:
            self._sent_at = now
            self._send(Progressed(self._run, stage, done_bytes, total_bytes))


def execute(
    order: RunJob | VerifyJob,
    runner: Runner,
    env: Env,
    slots: Slots,
    *,
    send: Send,
    nap: Callable[[float], object],
    verifier: Verifier | None = None,
) -> None:
    """Run one job to its end and send how it ended. Raises only what `send` raises."""
    control = JobLink(order.run, WorkerSide(slots, order.run, nap), send, env.monotonic)
    ending: FromWorker
    try:
        if isinstance(order, RunJob):
            ending = JobDone(order.run, runner(env, order.job, control))
        else:
            assert verifier is not None
            report = verifier(env, order.job, order.groups, order.folders, control)
            ending = OutputsVerified(order.run, report)
    except CleanAbortedError:
        ending = JobStopped(order.run)
    except InvalidOutputError as error:
        reason = error.reason[:REASON_CHARS_MAX]
        ending = OutputRefused(order.run, error.path, error.position, reason)
    except Exception as error:  # noqa: BLE001 - whatever it was, it costs this job and no other
        reason = _named(error)[:REASON_CHARS_MAX]
        details = ""
        if not isinstance(error, OSError | StorageError):  # a mistake of ours: say where
            details = "".join(traceback.format_tb(error.__traceback__))[-TRACEBACK_CHARS_MAX:]
        missing = isinstance(error, FileNotFoundError)
        ending = JobFailed(order.run, reason, details, missing)
    send(ending)


def _named(error: Exception) -> str:
    """What went wrong and, where the error has no words of its own, in which line."""
    kind, text = type(error).__name__, str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if text or not frames:
        return f"{kind}: {text}"
    return f"{kind} in {frames[-1].name}: {frames[-1].line}"


def serve(
    sock: socket.socket,
    memory_fd: int,
    runner: Runner,
    env: Env,
    started: float,
    *,
    verifier: Verifier | None = None,
) -> None:
    """Run jobs until the broker closes the socket. Raises OSError once the broker is gone."""
    memory = SharedMemory(memory_fd)
    os.close(memory_fd)

    def send(message: FromWorker) -> None:
        sock.sendall(encode(message))

    pulse = Pulse(memory.slots)
    pulse.start()
    try:
        send(WorkerReady(os.getpid(), env.monotonic() - started))
        for order in join_parts(_frames(sock)):
            assert isinstance(order, RunJob | VerifyJob)
            execute(order, runner, env, memory.slots, send=send, nap=time.sleep, verifier=verifier)
    finally:
        pulse.stop()


def _frames(sock: socket.socket) -> Iterator[Frame]:
    """Yield what the broker sends until it closes the socket. Raises ChannelError, OSError."""
    while (frame := receive(sock)) is not None:
        yield frame


def receive(sock: socket.socket) -> Frame | None:
    """The next frame; None when the other side closed. Raises ChannelError, OSError."""
    prefix = _exactly(sock, LENGTH_BYTES)
    if prefix is None:
        return None
    body = _exactly(sock, body_bytes(prefix))
    return None if body is None else decode_frame(body)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        actual = sock.recv_into(view)
        if actual == 0:
            return None
        view = view[actual:]
    return bytes(data)


def die_with_parent(parent_pid: int) -> bool:
    """Have the kernel kill this process when the broker dies (Linux). False if it is dead already.

    Elsewhere an orphan notices at its next frame: half a second of work at most.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent_pid


class Preparation(NamedTuple):
    """What a worker was started with."""

    sock: socket.socket
    memory_fd: int
    nice: int  # added to the nice value by `finish_start`


def prepare(argv: list[str]) -> Preparation | None:
    """Settle into the process the broker started; None if there is no broker any more.

    Until `finish_start` the worker has half of the nice value that it was given. Loading the
    kernels takes seconds of processor time, and nothing is cleaned before: at nice 19 a busy
    machine would need minutes for it.
    """
    parser = argparse.ArgumentParser(prog="cleaner.workers.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not die_with_parent(options.parent):
        return None
    os.nice(options.nice // 2)
    rest = options.nice - options.nice // 2
    return Preparation(socket.socket(fileno=options.fd), options.memory_fd, rest)


def finish_start(preparation: Preparation) -> None:
    """Take the whole nice value: the worker is about to receive jobs."""
    os.nice(preparation.nice)


def main(argv: list[str]) -> int:
    """Load the kernels, then serve."""
    env = RealEnv()
    started = env.monotonic()
    preparation = prepare(argv)
    if preparation is None:
        return 1
    # Here and not above: the pool imports this module's neighbours and must not load Numba.
    from cleaner.engine.clean import run_clean
    from cleaner.engine.kernels import warm_up
    from cleaner.engine.verify.verify_job import verify_groups

    warm_up()
    finish_start(preparation)
    sock, memory_fd, _ = preparation
    try:
        serve(sock, memory_fd, run_clean, env, started, verifier=verify_groups)
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the broker is gone; its next start removes what was left
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
