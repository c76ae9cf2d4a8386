"""A worker process of the local engine: the parent's side and the worker's side.

    python -P -m pipeline.engines.stage_process --nice N --registry MODULE --fd N --life-fd M

Rules
- One socket carries tasks and results, one at a time: eight bytes of length, then a frame of at
  most FRAME_BYTES_MAX. A request is the stage name, a newline and the task; a response is "+" and
  the result, or "-" and the reason of the failure.
- Only the parent has the other end of `--life-fd`. When it closes, however the parent ended, the
  worker exits at once.
- The worker ignores interrupts: Ctrl-C reaches the whole process group, and the parent handles it.
- Files that a task keeps on this host are in a directory that the parent deletes after the process
  ends, even if it was killed. If the parent was killed, the worker deletes it.
"""

import argparse
import importlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from pipeline.transport import SCRATCH_VARIABLE

_LENGTH: Final = struct.Struct(">Q")
_PACKAGES: Final = str(Path(__file__).resolve().parents[2])
# A task lists every segment of its partition; this suffices for a million.
FRAME_BYTES_MAX: Final = 256 << 20
REAP_SECONDS: Final = 5.0  # a killed process that takes longer is stuck in the kernel
REASON_CHARS_MAX: Final = 2000


class TaskFailedError(Exception):
    """The task raised an error; the process continues."""


class ProcessEndedError(Exception):
    """The process ended during the task."""


class StageProcess:
    """The parent's side. One thread at a time may use `call`; any thread may use `kill`."""

    def __init__(self, *, nice: int, registry: str) -> None:
        """Start the process. Raises OSError."""
        scratch_parent = os.environ.get(SCRATCH_VARIABLE) or None
        # Sockets first: they close themselves on an error, a directory would stay.
        sock, remote = socket.socketpair()
        self._scratch = tempfile.mkdtemp(prefix="varve-stages-", dir=scratch_parent)
        try:
            life_read, life_write = os.pipe()
        except OSError:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        command = [
            *(sys.executable, "-P", "-m", "pipeline.engines.stage_process"),
            *("--nice", str(nice), "--registry", registry),
        ]
        try:
            self._process = _start(
                command, remote.fileno(), life_read, {SCRATCH_VARIABLE: self._scratch}
            )
        except OSError:
            sock.close()
            os.close(life_write)
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        finally:
            remote.close()
            os.close(life_read)
        self._socket = sock
        self._life_fd = life_write

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def call(self, stage: str, task: bytes) -> bytes:
        """Run one task; return its result. Raises TaskFailedError, ProcessEndedError."""
        head = stage.encode() + b"\n"
        if len(head) + len(task) > FRAME_BYTES_MAX:
            raise TaskFailedError(f"a task of {len(task)} bytes is over {FRAME_BYTES_MAX}")
        try:
            _send(self._socket, head, task)
            answer = _receive(self._socket)
        except OSError:
            answer = None
        if not answer:
            raise ProcessEndedError(f"the worker process {self._reap()}")
        if answer[:1] == b"-":
            raise TaskFailedError(answer[1:].decode())
        return answer[1:]

    def has_ended(self) -> bool:
        """Return whether the process has exited."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process; a pending call raises ProcessEndedError."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Wait for the process to end and release its resources."""
        self.kill()
        self._reap()
        self._socket.close()
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _reap(self) -> str:
        try:
            code = self._process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its socket and did not exit"
        return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"


def _start(
    command: Sequence[str], fd: int, life_fd: int, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a worker with our environment and `variables`. Raises OSError."""
    search = [_PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [*command, f"--fd={fd}", f"--life-fd={life_fd}"],
        stdin=subprocess.DEVNULL,
        pass_fds=[fd, life_fd],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), **variables},
    )


def _send(sock: socket.socket, head: bytes, body: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(head) + len(body)) + head)
    sock.sendall(body)


def _receive(sock: socket.socket) -> bytes | None:
    """Return one frame; None if the other side closed. Raises OSError."""
    prefix = _read_exactly(sock, _LENGTH.size)
    if prefix is None:
        return None
    size_bytes = _LENGTH.unpack(prefix)[0]
    assert size_bytes <= FRAME_BYTES_MAX
    return _read_exactly(sock, size_bytes)


def _read_exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received_bytes = sock.recv_into(view)
        if received_bytes == 0:
            return None
        view = view[received_bytes:]
    return bytes(data)


def _end_with_parent(life_fd: int) -> None:
    """Delete this worker's files and exit when the parent ends; runs in its own thread."""
    os.read(life_fd, 1)
    shutil.rmtree(os.environ[SCRATCH_VARIABLE], ignore_errors=True)
    os._exit(1)


def _serve(sock: socket.socket, registry: str) -> None:
    run_stage = importlib.import_module(registry).run_stage
    while (request := _receive(sock)) is not None:
        stage, _, task = request.partition(b"\n")
        try:
            head, body = b"+", run_stage(stage.decode(), task)
            if len(body) >= FRAME_BYTES_MAX:
                raise ValueError(f"a result of {len(body)} bytes is over {FRAME_BYTES_MAX}")
        except Exception as error:  # noqa: BLE001 - any error fails only this attempt
            reason = f"{type(error).__name__}: {error}"
            head, body = b"-", reason[:REASON_CHARS_MAX].encode(errors="backslashreplace")
        _send(sock, head, body)


def main(argv: list[str]) -> int:
    """Return the worker's side: run tasks until the parent closes the socket."""
    parser = argparse.ArgumentParser(prog="pipeline.engines.stage_process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--life-fd", type=int, required=True)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--registry", required=True)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(options.life_fd,), daemon=True).start()
    os.nice(options.nice)
    try:
        _serve(socket.socket(fileno=options.fd), options.registry)
    except (BrokenPipeError, ConnectionResetError):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
