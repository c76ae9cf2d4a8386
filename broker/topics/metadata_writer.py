"""Changes of the cluster metadata (`varve.metadata`): one at a time, durable, never cut short.

Rules. A change runs to its end although the client that requested it disconnects: half a change
would block all later ones. Each change is saved in every data directory before `run` returns.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from broker.loop_turns import run_to_end
from storage.directory.cluster_metadata import ClusterMetadata
from storage.manager.log_manager import LogManager

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class MetadataWriter:
    """Serialises changes of the metadata and saves them."""

    def __init__(self, manager: LogManager, trusted_wall_ms: Callable[[], int | None]) -> None:
        """`trusted_wall_ms` returns the wall time, None while the clock is not trusted."""
        self._manager = manager
        self._trusted_wall_ms = trusted_wall_ms
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()  # changes that hold the lock or wait for it

    @property
    def metadata(self) -> ClusterMetadata:
        """Return the metadata as last saved."""
        return self._manager.metadata

    async def run(
        self,
        change: Callable[_Arguments, Coroutine[Any, Any, _Result]],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Run `change` alone; it continues if the caller is cancelled. Raises what it raises."""

        async def run_alone() -> _Result:
            async with self._lock:
                return await change(*args, **kwargs)

        task = asyncio.create_task(run_alone())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await run_to_end(task)

    async def save(self, metadata: ClusterMetadata) -> None:
        """Make the metadata durable. Call it from within a change. Raises LogDirectoryError."""
        wall_ms = self._trusted_wall_ms()
        await asyncio.to_thread(self._manager.save_metadata, metadata, wall_ms=wall_ms)

    async def note_time(self) -> None:
        """Save the current time, so that the next start notices a clock that was set.

        A time that is not trusted is not saved: the next start would take it for the right one.
        """
        async with self._lock:
            await self.save(self.metadata)

    async def wait_idle(self, seconds: float) -> None:
        """Wait until no change is running, but no longer than `seconds`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
