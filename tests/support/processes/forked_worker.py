"""Workers without a new interpreter, which takes 1.4 s to load the kernels of the cleaner."""

import asyncio
import gc
import importlib
import os
import select
import signal
import subprocess
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

WORKER = "cleaner.workers.worker"
STAGE_PROCESS = "pipeline.engines.stage_process"


class _Forked:
    """A process that is forked instead of started by a command. Any thread may use it.

    It has the part of subprocess.Popen that the parents of workers use.
    """

    def __init__(
        self,
        module: str,
        command: Sequence[str],
        files: Mapping[str, int],  # open ones, by option
        *options: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        words = [*command[command.index(module) + 1 :], *options]
        words += [f"--{option}={fd}" for option, fd in files.items()]
        self.returncode: int | None = None
        self._reaping = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.update(variables or {})
            _become_worker(module, words, set(files.values()))

    def poll(self) -> int | None:
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float) -> int:
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            select.select([pidfd], [], [], timeout)
            os.close(pidfd)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedWorker(_Forked):
    """A worker of the cleaner: see cleaner/workers/process.py."""

    def __init__(self, command: Sequence[str], fd: int, memory_fd: int) -> None:
        files = {"fd": fd, "memory-fd": memory_fd}
        super().__init__(WORKER, command, files, f"--parent={os.getpid()}")


class ForkedStages(_Forked):
    """A worker of the pipeline: see pipeline/engines/stage_process.py."""

    def __init__(
        self, command: Sequence[str], fd: int, life_fd: int, variables: Mapping[str, str]
    ) -> None:
        files = {"fd": fd, "life-fd": life_fd}
        super().__init__(STAGE_PROCESS, command, files, variables=variables)


def _become_worker(module: str, arguments: list[str], keep: set[int]) -> NoReturn:
    """Leave the parent's files, signal handlers and event loop, and work."""
    code = 1
    try:
        main = importlib.import_module(module).main  # may fail: no file descriptor is left

        # Garbage of the parent would close files by numbers that the worker's files have then.
        gc.freeze()
        asyncio._set_running_loop(None)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        open_files = sorted(int(name) for name in os.listdir("/proc/self/fd"))
        for file in set(open_files) - keep - {0, 1, 2}:
            with suppress(OSError):
                os.close(file)
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
