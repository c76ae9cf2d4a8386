"""Worker processes: start one, exchange messages, reap it.

Every process is reaped, if necessary later: a process that hangs in the kernel (a failed disk)
survives SIGKILL until its system call returns.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from cleaner.workers.channel import (
    LENGTH_BYTES,
    Message,
    SplitOrder,
    body_bytes,
    decode,
    encode_in_parts,
)
from cleaner.workers.throttle import SharedMemory, Slots, beats_of, new_memory
from config.security.secrets import environment_without_secrets

REAP_SECONDS: Final = 2.0  # a killed process that takes longer hangs in the kernel
REAP_STEP_SECONDS: Final = 0.01
NICE_MAX: Final = 19
IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)  # of the process group; see worker.py

_PACKAGES: Final = str(Path(__file__).resolve().parents[2])


class WorkerLink(Protocol):
    """The link to one worker."""

    @property
    def pid(self) -> int:
        """Return the process id; 0 if it is no process of its own."""

    @property
    def slots(self) -> Slots:
        """Return the shared memory."""

    def send(self, message: Message) -> None:
        """Queue a message. Raises ChannelError if it is too large."""

    async def receive(self) -> Message | None:
        """Return the next message; None after the end. Raises ChannelError for malformed data."""

    def shutdown(self) -> None:
        """Let it end after its present job."""

    def kill(self) -> None:
        """Kill it."""

    def abandon(self) -> None:
        """Make `receive` return None although the process may still exist."""

    async def reap(self) -> str:
        """Wait for its end, kill it if it takes too long; return a description of the end."""

    def close(self) -> None:
        """Free the socket and the shared memory; `slots` is then unusable."""

    def is_gone(self) -> bool:
        """Return whether the process has ended. False after `reap` if it hangs in the kernel."""

    def set_nice(self, nice: int) -> None:
        """Set its nice value relative to ours; no effect if it has ended.

        Raises PermissionError if the priority may not be raised.
        """

    def short_of_core_seconds(self) -> float | None:
        """Return for how long it waited for a core since its start; None if unknown."""

    def beats(self) -> int:
        """Return the count of its heartbeats."""


Spawn: TypeAlias = Callable[[int], Awaitable[WorkerLink]]  # of its nice value


class ProcessLink:
    """A worker process at the other end of a socket pair."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        memory: SharedMemory,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._memory = memory
        self._reader = reader
        self._writer = writer
        self._sending: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    @property
    def slots(self) -> Slots:
        """Return the shared memory."""
        return self._memory.slots

    def send(self, message: Message) -> None:
        """Queue a message. Raises ChannelError if it is too large.

        One of several frames is encoded in turns of the loop.
        """
        assert self._sending is None or self._sending.done()  # one order at a time
        frames = encode_in_parts(message)
        self._writer.write(next(frames))
        if isinstance(message, SplitOrder):
            self._sending = asyncio.ensure_future(self._send_rest(frames))

    async def _send_rest(self, frames: Iterator[bytes]) -> None:
        for frame in frames:
            if self._writer.is_closing():
                return
            self._writer.write(frame)
            await asyncio.sleep(0)

    async def receive(self) -> Message | None:
        """Return the next message; None after the end. Raises ChannelError for malformed data."""
        try:
            prefix = await self._reader.readexactly(LENGTH_BYTES)
            return decode(await self._reader.readexactly(body_bytes(prefix)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def shutdown(self) -> None:
        """Close our direction: the worker ends when it reads the next job."""
        if not self._writer.is_closing() and self._writer.can_write_eof():
            self._writer.write_eof()

    def kill(self) -> None:
        """Send SIGKILL: its output is useless without a report."""
        if self._process.poll() is None:
            self._process.kill()

    def abandon(self) -> None:
        """Close the socket."""
        self._writer.transport.abort()

    async def reap(self) -> str:
        """See WorkerLink."""
        if not await self._wait_end():
            self.kill()
            await self._wait_end()
        code = self._process.poll()
        if code is None:
            return "does not end"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    async def _wait_end(self) -> bool:
        for _ in range(int(REAP_SECONDS / REAP_STEP_SECONDS)):
            if self._process.poll() is not None:
                return True
            await asyncio.sleep(REAP_STEP_SECONDS)
        return False

    def close(self) -> None:
        """See WorkerLink."""
        if self._sending is not None:
            self._sending.cancel()
        self._writer.transport.abort()
        self._memory.close()

    def is_gone(self) -> bool:
        """See WorkerLink."""
        return self._process.poll() is not None

    def set_nice(self, nice: int) -> None:
        """See WorkerLink."""
        # An unreaped child keeps its pid, so no other process is affected.
        if self._process.poll() is None:
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, min(NICE_MAX, own + nice))

    def short_of_core_seconds(self) -> float | None:
        """Return the second number of Linux' /proc/PID/schedstat, in ns; None elsewhere."""
        try:
            with open(f"/proc/{self._process.pid}/schedstat", encoding="ascii") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None

    def beats(self) -> int:
        """See WorkerLink."""
        return beats_of(self._memory.slots)


async def spawn_process(nice: int) -> WorkerLink:
    """Start a worker. Raises OSError."""
    return await spawn_command(
        [sys.executable, "-P", "-m", "cleaner.workers.worker", "--nice", str(nice)]
    )


async def spawn_command(command: Sequence[str]) -> ProcessLink:
    """Start `command` as a worker; descriptors and the parent's pid are added to its arguments.

    To be called on the thread that lives as long as the broker: the kernel takes the end of the
    thread that forked for the end of the parent. Raises OSError.
    """
    memory_fd = new_memory()
    sock, remote = socket.socketpair()
    try:
        process = _start(command, remote.fileno(), memory_fd)
        memory = SharedMemory(memory_fd)
    except BaseException:
        sock.close()
        raise
    finally:
        remote.close()
        os.close(memory_fd)
    sock.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    return ProcessLink(process, memory, reader, writer)


def _start(command: Sequence[str], fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
    """Start the process. Fork and exec block for some ms, at start and after a worker died.

    It starts with the signals blocked that it will ignore: Ctrl-C reaches it before it can.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        return subprocess.Popen(
            [*command, f"--fd={fd}", f"--memory-fd={memory_fd}", f"--parent={os.getpid()}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(fd, memory_fd),
            env=_environment(),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment() -> dict[str, str]:
    """Return our environment, with the folder of these packages first: workers run this code."""
    paths = [_PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**environment_without_secrets(), "PYTHONPATH": os.pathsep.join(paths)}
