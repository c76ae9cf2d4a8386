"""Changes of the cluster metadata (`varve.metadata`): one at a time, durable, never cut short.

Rules
- A change runs to its end although the client that requested it disconnects: half a change would
  block all later ones. Each change is saved in every data directory before `run` returns.
- Clients take turns: one change of each client waits for the writer, the client's others wait
  behind it. So a client with thousands of changes delays another by one of them. What they write is
  counted, and the client's next request pauses (change_pauses.py).
- A data directory whose disk hangs keeps its old copy until it answers again: a start uses the
  newest. So each save asks the disks first, if there are several, and gives up those that hang
  during the save.
- A long change gives way between its steps. A change after that finds the metadata that other
  clients have changed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from functools import partial
from typing import Any, ParamSpec, TypeVar

from broker.event_loop.directory_threads import ALL, HANG_SECONDS, DirectoryThreads
from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import run_to_end
from broker.topics.change_pauses import ChangePauses
from storage.directory.cluster_metadata import ClusterMetadata, RunEach
from storage.directory.log_directory import LogDirectory
from storage.manager.log_manager import LogManager

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Turn:
    """The slot of one change, while it has it."""

    def __init__(self, slots: FairSlots, client: Hashable) -> None:
        self._slots = slots
        self._client = client
        self._has_slot = False
        self.has_saved = False
        self.write_seconds = 0.0  # of the change
        self.lines = 0  # in the log

    async def take(self) -> None:
        """Wait for the slot."""
        await self._slots.acquire(self._client)
        self._has_slot = True

    def end(self) -> None:
        """Give the slot back, if the change has it."""
        if self._has_slot:
            self._has_slot = False
            self._slots.release(self._client)


class MetadataWriter:
    """Serialises changes of the metadata and saves them."""

    def __init__(
        self,
        manager: LogManager,
        threads: DirectoryThreads,
        trusted_wall_ms: Callable[[], int | None],
        measured: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]] = lambda change: change,
    ) -> None:
        """`trusted_wall_ms` returns the wall time, None while the clock is not trusted.

        `measured` awaits a change and records how long its turns block the loop.
        """
        self._manager = manager
        self._threads = threads
        self.hanging: frozenset[str] = frozenset()  # data directories, at the last save
        self._trusted_wall_ms = trusted_wall_ms
        self._measured = measured
        self._probes: dict[str, asyncio.Future[None]] = {}  # the last one of each directory
        self._slots = FairSlots(1)
        self.pauses = ChangePauses()
        self._turn: _Turn | None = None  # of the change that runs
        self._tasks: set[asyncio.Task[Any]] = set()  # changes that run or wait

    @property
    def metadata(self) -> ClusterMetadata:
        """Return the metadata as last saved."""
        return self._manager.metadata

    async def run(
        self,
        client: Hashable,
        change: Callable[_Arguments, Coroutine[Any, Any, _Result]],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Run `change` alone; it continues if the caller is cancelled. Raises what it raises.

        `client` requested the change; None is the broker itself.
        """

        async def run_alone() -> _Result:
            turn = _Turn(self._slots, client)
            await self._take(turn)
            try:
                result: _Result = await self._measured(change(*args, **kwargs))
                return result
            finally:
                turn.end()
                if turn.has_saved:
                    self.pauses.count(client, turn.write_seconds, turn.lines)

        task = asyncio.create_task(run_alone())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await run_to_end(task)

    async def give_way(self) -> None:
        """Let the changes run that wait, one of each client. Call it from within a change."""
        turn = self._turn
        assert turn is not None
        turn.end()
        await self._take(turn)

    async def _take(self, turn: "_Turn") -> None:
        await turn.take()
        self._turn = turn

    async def save(self, metadata: ClusterMetadata) -> None:
        """Make the metadata durable. Call it from within a change. Raises LogDirectoryError."""
        now, turn = asyncio.get_running_loop().time, self._turn
        began = now()
        self.hanging = await self._find_hanging()
        save = partial(
            self._manager.save_metadata,
            metadata,
            without=self.hanging,
            wall_ms=self._trusted_wall_ms(),
        )
        try:
            await self.run_by_directory(lambda run_each: save(run_each=run_each))
        finally:
            if turn is not None:  # else the broker starts
                turn.has_saved = True
                turn.write_seconds += now() - began

    def note_lines(self, count: int) -> None:
        """Count lines that a change writes to the log. Call it from within a change."""
        if self._turn is not None:
            self._turn.lines += count

    async def run_by_directory(self, change: Callable[[RunEach], _Result]) -> _Result:
        """Run `change` in a thread; it gets a function that runs a call for each data directory.

        Directories that hang are added to `hanging`. Raises what it raises.
        """

        def run_each(calls: Mapping[str, Callable[[], None]]) -> frozenset[str]:
            hanging = self._threads.run_each(calls)
            self.hanging |= hanging
            return hanging

        return await self._threads.run(ALL, partial(change, run_each))

    async def _find_hanging(self) -> frozenset[str]:
        """Return the data directories whose disk answers HANG_SECONDS after another, or never."""
        online = [directory for directory in self._manager.table.directories if directory.is_online]
        if len(online) < 2:
            return frozenset()
        probes = {
            directory.path: self._probe(directory)
            for directory in online
            if not self._threads.hangs(directory.path)
        }
        if probes:
            await asyncio.wait(probes.values(), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(probes.values(), timeout=HANG_SECONDS)
        answering = {path for path, probe in probes.items() if probe.done()}
        hanging = frozenset(directory.path for directory in online) - answering
        return hanging if answering else frozenset()

    async def find_silent(self, seconds: float) -> frozenset[str]:
        """Return the data directories whose disk does not answer within `seconds`."""
        directories = self._manager.table.directories
        online = [directory for directory in directories if directory.is_online]
        if len(directories) < 2 or not online:
            return frozenset()
        probes = {directory.path: self._probe(directory) for directory in online}
        await asyncio.wait(probes.values(), timeout=seconds)
        return frozenset(path for path, probe in probes.items() if not probe.done())

    def _probe(self, directory: LogDirectory) -> asyncio.Future[None]:
        """Ask a disk for an answer, unless it has been asked already."""
        probe = self._probes.get(directory.path)
        if probe is None or probe.done():
            asking = self._threads.probe(directory.path, partial(self._manager.probe, directory))
            probe = self._probes[directory.path] = asyncio.ensure_future(asking)
        return probe

    async def note_time(self) -> None:
        """Save the current time, so that the next start notices a clock that was set.

        A time that is not trusted is not saved: the next start would take it for the right one.
        """

        async def save() -> None:
            await self.save(self.metadata)

        await self.run(None, save)

    def begin_stopping(self) -> None:
        """Let the requests that wait run without pauses."""
        self.pauses.end()

    async def wait_idle(self, seconds: float) -> None:
        """Wait until no change is running, but no longer than `seconds`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
