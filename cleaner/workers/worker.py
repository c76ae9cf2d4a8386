"""A cleaner worker: a process that runs jobs for the broker, one after the other.

    python -m cleaner.workers.worker --fd N --memory-fd M --parent PID [--nice N]

cleaner/workers/process.py starts it with a socket and a page of shared memory. It reads closed
segments, writes `.cleaned` files and sends its results; it renames and deletes no file of the log.
It ends when the broker closes the socket or dies. It ignores SIGINT and SIGTERM, which reach the
whole process group: the broker stops its workers in order.
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
from typing import Final, NamedTuple, Protocol, TypeAlias

from cleaner.engine.shared.parts import Part, PartResult
from cleaner.job import CleanAbortedError, CleanedGroup, CleanJob, CleanReport, JobControl
from cleaner.key_search import KeySearch, KeySearchResult, PausedSearch
from cleaner.verification import InvalidOutputError, LogCheck, LogCheckRequest, VerifyReport
from cleaner.workers.channel import (
    LENGTH_BYTES,
    CheckLog,
    EndParts,
    FilesSearched,
    Frame,
    FromWorker,
    GroupsCleaned,
    JobDone,
    JobFailed,
    JobStopped,
    LogChecked,
    Order,
    OutputRefused,
    OutputsVerified,
    PartDone,
    Progressed,
    RunJob,
    RunPart,
    SearchFiles,
    WorkerReady,
    body_bytes,
    decode_frame,
    encode,
    join_parts,
)
from cleaner.workers.heartbeat import HeartbeatThread
from cleaner.workers.throttle import Direction, SharedMemory, Slots, WorkerSide
from storage.env import Env, RealEnv
from storage.errors import StorageError, TransactionIndexError

PROGRESS_SECONDS: Final = 0.5  # between two progress frames
REASON_CHARS_MAX: Final = 500  # of a failure, as shown and logged
TRACEBACK_CHARS_MAX: Final = 8000
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h

Runner: TypeAlias = Callable[[Env, CleanJob, JobControl], CleanReport]
Verifier: TypeAlias = Callable[
    [Env, CleanJob, Sequence[CleanedGroup], Sequence[str], JobControl], VerifyReport
]
Checker: TypeAlias = Callable[[Env, CleanJob, LogCheckRequest, JobControl], LogCheck]
Searcher: TypeAlias = Callable[[Env, KeySearch, JobControl], KeySearchResult | PausedSearch]


class Parts(Protocol):
    """Runs the parts of shared jobs. See PartRunner."""

    def run(self, job: CleanJob, part: Part, control: JobControl) -> PartResult:
        """Run a part."""
        ...

    def forget(self) -> None:
        """Free the memory that is kept between the parts of a job."""


Send: TypeAlias = Callable[[FromWorker], None]


class JobLink:
    """The JobControl of one job: budget and abort by shared memory, results by frames."""

    def __init__(self, run: int, side: WorkerSide, send: Send, clock: Callable[[], float]) -> None:
        self._run = run
        self._side = side
        self._send = send
        self._clock = clock
        self._sent_at = -PROGRESS_SECONDS

    def read_bytes(self, count: int) -> None:
        """See JobControl."""
        self._side.charge(Direction.READ, count)

    def write_bytes(self, count: int) -> None:
        """See JobControl."""
        self._side.charge(Direction.WRITE, count)

    def aborted(self) -> bool:
        """See JobControl."""
        return self._side.aborted()

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        """See JobControl."""
        self._send(GroupsCleaned(self._run, groups))

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Send the progress, at most every PROGRESS_SECONDS."""
        now = self._clock()
        if now - self._sent_at >= PROGRESS_SECONDS:
            self._sent_at = now
            self._send(Progressed(self._run, stage, done_bytes, total_bytes))


def execute(
    order: Order,
    runner: Runner,
    env: Env,
    slots: Slots,
    *,
    send: Send,
    nap: Callable[[float], object],
    verifier: Verifier | None = None,
    checker: Checker | None = None,
    searcher: Searcher | None = None,
    parts: Parts | None = None,
) -> None:
    """Run one job and send its result. Raises only what `send` raises."""
    control = JobLink(order.run, WorkerSide(slots, order.run, nap), send, env.monotonic)
    result: FromWorker
    try:
        if isinstance(order, RunJob):
            result = JobDone(order.run, runner(env, order.job, control))
        elif isinstance(order, RunPart):
            assert parts is not None
            part_result = parts.run(order.job, order.part, control)
            result = PartDone(order.run, order.part.number, part_result)
        elif isinstance(order, CheckLog):
            assert checker is not None
            result = LogChecked(order.run, checker(env, order.job, order.request, control))
        elif isinstance(order, SearchFiles):
            assert searcher is not None
            result = FilesSearched(order.run, searcher(env, order.search, control))
        else:
            assert verifier is not None
            report = verifier(env, order.job, order.groups, order.folders, control)
            result = OutputsVerified(order.run, report)
    except CleanAbortedError:
        result = JobStopped(order.run)
    except InvalidOutputError as error:
        reason = error.reason[:REASON_CHARS_MAX]
        result = OutputRefused(order.run, error.path, error.position, reason)
    except Exception as error:  # noqa: BLE001 - an error costs one job only
        reason = _describe_error(error)[:REASON_CHARS_MAX]
        details = ""
        if not isinstance(error, OSError | StorageError):  # an error of ours: send the traceback
            details = "".join(traceback.format_tb(error.__traceback__))[-TRACEBACK_CHARS_MAX:]
        result = JobFailed(
            order.run,
            reason,
            details,
            file_missing=isinstance(error, FileNotFoundError),
            index_wrong=isinstance(error, TransactionIndexError),
        )
    send(result)


def _describe_error(error: Exception) -> str:
    """Return the error's text; without a text, the line that raised it."""
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
    checker: Checker | None = None,
    searcher: Searcher | None = None,
    parts: Parts | None = None,
) -> None:
    """Run jobs until the broker closes the socket. Raises OSError once the broker is gone."""
    memory = SharedMemory(memory_fd)
    os.close(memory_fd)

    def send(message: FromWorker) -> None:
        sock.sendall(encode(message))

    heartbeat = HeartbeatThread(memory.slots)
    heartbeat.start()
    try:
        send(WorkerReady(os.getpid(), env.monotonic() - started))
        for order in join_parts(_frames(sock)):
            assert isinstance(order, Order | EndParts)
            if parts is not None and not isinstance(order, RunPart):
                parts.forget()
            if isinstance(order, Order):
                execute(
                    order, runner, env, memory.slots,
                    send=send, nap=time.sleep, verifier=verifier, checker=checker,
                    searcher=searcher, parts=parts,
                )  # fmt: skip
    finally:
        heartbeat.stop()


def _frames(sock: socket.socket) -> Iterator[Frame]:
    """Yield the broker's frames until it closes the socket. Raises ChannelError, OSError."""
    while (frame := receive(sock)) is not None:
        yield frame


def receive(sock: socket.socket) -> Frame | None:
    """Return the next frame; None at the end. Raises ChannelError, OSError."""
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
    """Have the kernel kill this process when the broker dies (Linux); return False if it has died.

    On other systems an orphan notices at its next frame, within half a second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent_pid


class Preparation(NamedTuple):
    """The arguments of a worker."""

    sock: socket.socket
    memory_fd: int
    nice: int  # added to the nice value by `finish_start`


def prepare(argv: list[str]) -> Preparation | None:
    """Set up the process; return None if the broker has died.

    Until `finish_start` the worker has half of its nice value. Loading the kernels takes seconds of
    processor time: at nice 19 this could take minutes on a busy machine.
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
    """Take the whole nice value, before the first job."""
    os.nice(preparation.nice)


def main(argv: list[str]) -> int:
    """Load the kernels, then serve."""
    env = RealEnv()
    started = env.monotonic()
    preparation = prepare(argv)
    if preparation is None:
        return 1
    # Imported here because the pool imports the modules beside this one and must not load Numba.
    from cleaner.engine.clean import run_clean
    from cleaner.engine.kernels import warm_up
    from cleaner.engine.search.search_files import search_files
    from cleaner.engine.shared.part_runner import PartRunner
    from cleaner.engine.verify.check_log import check_log
    from cleaner.engine.verify_job import verify_groups

    warm_up()
    finish_start(preparation)
    sock, memory_fd, _ = preparation
    try:
        parts = PartRunner(env, time.sleep)
        serve(
            sock, memory_fd, run_clean, env, started,
            verifier=verify_groups, checker=check_log, searcher=search_files, parts=parts,
        )  # fmt: skip
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the broker has died; its next start removes the files
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
