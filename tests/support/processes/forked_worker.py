"""Workers of the cleaner without a new interpreter, which takes 1.4 s to load their kernels."""

import asyncio
import gc
import os
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

WORKER = "cleaner.workers.worker"


class ForkedWorker:
    """A worker process of the cleaner, forked instead of started by a command.

    It has the part of subprocess.Popen that cleaner/workers/process.py uses.
    """

    def __init__(self, command: Sequence[str], fd: int, memory_fd: int) -> None:
        parent = os.getpid()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            arguments = [f"--fd={fd}", f"--memory-fd={memory_fd}", f"--parent={parent}"]
            _become_worker([*command[command.index(WORKER) + 1 :], *arguments], {fd, memory_fd})

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _become_worker(arguments: list[str], keep: set[int]) -> NoReturn:
    """Leave the parent's files, signal handlers and event loop, and work."""
    code = 1
    try:
        from cleaner.workers.worker import main  # may fail: no file descriptor is left

        # Garbage of the parent would close files by numbers that the worker's files have then.
        gc.freeze()
        asyncio._set_running_loop(None)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
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
