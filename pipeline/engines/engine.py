"""Engines run the tasks of a stage. LocalEngine runs them in a pool of processes on this host.

Rules
- A task is bytes in, bytes out, and a stage is a name (pipeline/stages). Nothing else crosses to a
  worker, so any engine can run any stage.
- A task may run more than once, even concurrently, and any of its results may be used. Each attempt
  writes to names of its own.
- A task that fails, or whose process ends, runs ATTEMPTS times in all. Then the stage fails, and
  its other running tasks are killed.
- Worker processes start on first use and live until `close`.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import LifoQueue
from typing import Final, Protocol

from pipeline.engines.stage_process import ProcessEndedError, StageProcess, TaskFailedError

ATTEMPTS: Final = 2
KILL_AGAIN_SECONDS: Final = 0.1  # another process may have started meanwhile
NICE: Final = 10  # below the broker and its clients, above the broker's own cleaner


class StageFailedError(Exception):
    """A task failed in all attempts; `reason` is the error of the last one."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"stage {stage}: {reason}")
        self.stage = stage
        self.reason = reason


class Engine(Protocol):
    """Runs the tasks of a stage."""

    @property
    def name(self) -> str:
        """Return the name in results: "local" or "spark"."""

    @property
    def parallelism(self) -> int:
        """Return the number of tasks that run at the same time."""

    def run(
        self,
        stage: str,
        tasks: Sequence[bytes],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[bytes]:
        """Run every task; return the results in the order of the tasks.

        `progress` is called with the number of finished tasks whenever it grows. Raises
        StageFailedError.
        """

    def close(self) -> None:
        """Release the engine's resources; it cannot be used afterwards."""


class LocalEngine:
    """An engine of processes on this host, without a JVM."""

    name = "local"

    def __init__(
        self,
        processes: int | None = None,
        *,
        nice: int = NICE,
        attempts: int = ATTEMPTS,
        registry: str = "pipeline.stages",
    ) -> None:
        """`processes` None: one per core. `registry` is the module with `run_stage`."""
        self.parallelism = max(1, processes or os.cpu_count() or 1)
        self._nice = nice
        self._attempts = attempts
        self._registry = registry
        self._threads = ThreadPoolExecutor(self.parallelism, thread_name_prefix="stage")
        self._idle: LifoQueue[StageProcess | None] = LifoQueue()
        self._started: set[StageProcess] = set()
        self._closed = False
        for _ in range(self.parallelism):
            self._idle.put(None)

    def run(
        self,
        stage: str,
        tasks: Sequence[bytes],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[bytes]:
        """See Engine."""
        results: list[bytes | None] = [None] * len(tasks)
        attempts = [1] * len(tasks)
        running: dict[Future[bytes], int] = {
            self._threads.submit(self._attempt, stage, task): index
            for index, task in enumerate(tasks)
        }
        done = 0
        try:
            while running:
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    index = running.pop(future)
                    try:
                        results[index] = future.result()
                    except (TaskFailedError, ProcessEndedError) as error:
                        if attempts[index] >= self._attempts:
                            raise StageFailedError(stage, str(error)) from error
                        attempts[index] += 1
                        again = self._threads.submit(self._attempt, stage, tasks[index])
                        running[again] = index
                        continue
                    done += 1
                    if progress is not None:
                        progress(done)
        except BaseException:
            self._stop(running)
            raise
        matches = [result for result in results if result is not None]
        assert len(matches) == len(tasks)
        return matches

    def close(self) -> None:
        """See Engine."""
        self._closed = True
        for process in list(self._started):
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in list(self._started):
            self._forget(process)

    def __enter__(self) -> "LocalEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self, stage: str, task: bytes) -> bytes:
        """Run a task on an idle process. Raises TaskFailedError, ProcessEndedError."""
        process = self._idle.get()
        try:
            if process is not None and process.has_ended():
                self._forget(process)
                process = None
            if process is None:
                process = self._start()
            return process.call(stage, task)
        except ProcessEndedError:
            if process is not None:
                self._forget(process)
            process = None
            raise
        finally:
            self._idle.put(process)

    def _start(self) -> StageProcess:
        if self._closed:
            raise ProcessEndedError("the engine was closed")
        try:
            process = StageProcess(nice=self._nice, registry=self._registry)
        except OSError as error:
            raise ProcessEndedError(f"cannot start a worker process: {error}") from error
        self._started.add(process)
        return process

    def _forget(self, process: StageProcess) -> None:
        self._started.discard(process)
        process.close()

    def _stop(self, running: dict[Future[bytes], int]) -> None:
        """Kill the running tasks of a failed stage; the next stage gets new processes."""
        waiting = {future for future in running if not future.cancel()}
        while waiting:
            for process in list(self._started):
                process.kill()
            waiting = wait(waiting, KILL_AGAIN_SECONDS).not_done
        for process in list(self._started):
            self._forget(process)
