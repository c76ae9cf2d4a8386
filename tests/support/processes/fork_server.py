"""Daemons and commands that start quickly: forks of a process that has imported the broker.

Importing the broker and loading its kernels takes 2 s of processor time, and the suite starts about
a hundred daemons and as many commands. The fork server does both once. For each process it forks
twice: the first child waits for the second one and reports its exit code, the second one becomes
the daemon or command, in a session of its own. What the server has imported is frozen (gc.freeze):
otherwise each process spends 0.5 s at its end on visiting these objects, which copies their pages.

A daemon of the fork server forks its cleaner's workers, too: a new interpreter takes 1.4 s to load
their kernels, and most daemons of the suite are stopped before their worker has had a job.

Tests of the start itself run a new interpreter: tests/test_shipping.py, tests/broker/test_cli.py,
a refused start of tests/broker/network/test_limits.py, and for workers tests/cleaner/workers.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryFile
from typing import IO, Protocol

ROOT = Path(__file__).resolve().parents[3]
MESSAGE_BYTES_MAX = 64 * 1024
COMMAND_SECONDS = 110


class Process(Protocol):
    """The part of subprocess.Popen that the tests use."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...


class ForkedProcess:
    """A process that the fork server started. `status` delivers its pid, then its exit code."""

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
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
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


def start_forked(
    arguments: Sequence[str],
    output: IO[bytes],
    errors: IO[bytes],
    environment: dict[str, str] | None = None,
) -> ForkedProcess:
    """Run `varve ARGUMENTS`; it writes to two open files, which may be the same."""
    return _start(arguments, environment or {}, output, errors)


def run_forked(*arguments: str, url: str) -> CompletedProcess[str]:
    """Run `varve ARGUMENTS` to its end, as a client of the daemon whose API is at `url`."""
    environment = {"VARVE_HTTP": url}
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = _start(arguments, environment, output, errors)
        try:
            returncode = process.wait(COMMAND_SECONDS)
        finally:
            process.send_signal(signal.SIGKILL)  # it may hang
        output.seek(0)
        errors.seek(0)
        texts = output.read().decode(), errors.read().decode()
    return CompletedProcess(arguments, returncode, *texts)


def _start(
    arguments: Sequence[str], environment: dict[str, str], output: IO[bytes], errors: IO[bytes]
) -> ForkedProcess:
    reader, writer = os.pipe()
    message = json.dumps([arguments, environment]).encode()
    socket.send_fds(_connect(), [message], [output.fileno(), errors.fileno(), writer])
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
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:  # it still imports or compiles, on a busy machine
            server.kill()
            server.wait()

    atexit.register(stop)
    return ours


def _serve(requests: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the children that wait
    while True:
        message, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES_MAX, 3)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            arguments, environment = json.loads(message)
            os.environ.update(environment)
            _run_and_report(arguments, *fds)
            return
        for fd in fds:
            os.close(fd)


def _run_and_report(arguments: list[str], output: int, errors: int, status: int) -> None:
    """Fork the process and wait for it; both end by SystemExit or os._exit."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _run(arguments, output, errors)
    os.close(output)
    os.close(errors)
    os.write(status, b"%d\n" % pid)
    _, ended = os.waitpid(pid, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def _run(arguments: list[str], output: int, errors: int) -> None:
    from broker.cli import main
    from cleaner.workers import process
    from tests.support.processes.forked_worker import ForkedWorker

    os.setsid()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    process._start = ForkedWorker  # type: ignore[assignment,misc]
    sys.argv = ["varve", *arguments]
    try:
        main()
    except SystemExit as end:
        if arguments[:1] == ["serve"] or not isinstance(end.code, int):
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)  # a command has nothing to wind up


if __name__ == "__main__":
    import broker.cli
    import broker.daemon
    import broker.logging  # noqa: F401
    from cleaner.engine.clean import run_clean  # noqa: F401
    from cleaner.engine.kernels import warm_up as warm_up_cleaner
    from cleaner.engine.shared.part_runner import PartRunner  # noqa: F401
    from cleaner.engine.verify_job import verify_groups  # noqa: F401
    from storage.kernels import warm_up

    warm_up()
    warm_up_cleaner()
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
