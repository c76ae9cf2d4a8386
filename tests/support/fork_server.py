"""Daemons that start quickly: a fork of a process that has already imported the broker.

Importing the broker and loading its kernels takes 2 s of processor time, and the suite starts about
a hundred daemons. The fork server does both once. For each daemon it forks twice: the first child
waits for the daemon and reports its exit code, the second one becomes the daemon, in a session of
its own. Tests of the start itself run a new interpreter (tests/test_shipping.py, `serve` in
tests/broker/network/test_limits.py).
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]
MESSAGE_BYTES_MAX = 64 * 1024


class Process(Protocol):
    """The part of subprocess.Popen that the tests use."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...


class ForkedProcess:
    """A daemon that the fork server started. `status` delivers its pid, then its exit code."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._returncode: int | None = None
        self.pid = self._read_number()

    def poll(self) -> int | None:
        if self._returncode is None and select.select([self._status], [], [], 0)[0]:
            self._returncode = self._read_number()
            os.close(self._status)
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"daemon {self.pid}", timeout or 0)
        returncode = self.poll()
        assert returncode is not None
        return returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _read_number(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._status, 1)
            assert byte, "the fork server ended"
            line += byte
        return int(line)


def start_forked(arguments: list[str], output: int) -> ForkedProcess:
    """Run `varve ARGUMENTS` with standard output and errors in the open file `output`."""
    reader, writer = os.pipe()
    socket.send_fds(_connect(), [json.dumps(arguments).encode()], [output, writer])
    os.close(writer)
    return ForkedProcess(reader)


@cache
def _connect() -> socket.socket:
    """Start the fork server of this test process; it ends when its socket is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    server = subprocess.Popen(
        command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
    )
    theirs.close()

    def stop() -> None:
        ours.close()
        server.wait(10)

    atexit.register(stop)
    return ours


def _serve(requests: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the children that wait
    while True:
        message, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES_MAX, 2)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _run_and_report(json.loads(message), *fds)
            return
        for fd in fds:
            os.close(fd)


def _run_and_report(arguments: list[str], output: int, status: int) -> None:
    """Fork the daemon and wait for it. Returns in neither process but by SystemExit."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _become_daemon(arguments, output)
    os.close(output)
    os.write(status, b"%d\n" % pid)
    _, ended = os.waitpid(pid, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _become_daemon(arguments: list[str], output: int) -> None:
    from broker.cli import main

    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv = ["varve", *arguments]
    main()


if __name__ == "__main__":
    import broker.app
    import broker.logging  # noqa: F401
    from storage.kernels import warm_up

    warm_up()
    _serve(socket.socket(fileno=int(sys.argv[1])))
