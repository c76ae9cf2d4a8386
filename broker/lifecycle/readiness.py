"""Whether the broker starts, serves clients or stops, and the answers of /readyz and /healthz.

The cost of a probe does not depend on the number of offline partitions: the answer names some of
them and counts the others.
"""

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Final, TypeAlias

from broker.event_loop.directory_threads import DirectoryThreads
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition

UNSERVED: Final = (
    "partitions or data directories are not served; the log and /api/v1/overview name the reasons"
)
UNSERVED_LISTED_MAX: Final = 20  # partitions named in the answer of /readyz

# Yields partitions whose log is open, but what is read from it is not served, with the reasons.
Failures: TypeAlias = Callable[[], Iterable[tuple[TopicPartition, object]]]


class Readiness:
    """The state of the broker, from its start to its stop."""

    def __init__(
        self, manager: LogManager, threads: DirectoryThreads, *, failures: Iterable[Failures]
    ) -> None:
        """`failures`: those of the coordinators and of the views."""
        self._manager = manager
        self._failures = tuple(failures)
        self._threads = threads
        self._is_serving = False
        self._stopping = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Return whether clients are served."""
        return self._is_serving

    @property
    def is_stopping(self) -> bool:
        """Return whether the broker was asked to stop."""
        return self._stopping.is_set()

    def begin_serving(self) -> None:
        """Record that clients are served from now on."""
        self._is_serving = not self.is_stopping

    def begin_stopping(self) -> None:
        """Record that the broker stops."""
        self._is_serving = False
        self._stopping.set()

    async def wait_stopping(self) -> None:
        """Wait until the broker is asked to stop."""
        await self._stopping.wait()

    def not_ready_because(self, *, with_names: bool = True) -> str | None:
        """Return why /readyz fails; None if the broker serves every partition.

        Without names, the text tells no topic and no path.
        """
        if self.is_stopping:
            return "stopping"
        if self._is_serving:
            unserved = self._unserved()
            return UNSERVED if unserved is not None and not with_names else unserved
        opening = self._manager.opening
        if opening.done < opening.total:
            return f"recovering {opening.done} of {opening.total} partitions"
        return "starting"

    def unhealthy_because(self) -> str | None:
        """Return why /healthz fails; None as long as one data directory is online."""
        if any(directory.is_online for directory in self._manager.table.directories):
            return None
        return "no data directory is online"

    def _unserved(self) -> str | None:
        """Return lines about the directories and partitions that are not served; None if all are.

        The partitions that went offline first are named.
        """
        lines = [
            f"data directory {directory.path} is offline: {directory.offline_reason}"
            for directory in self._manager.table.directories
            if not directory.is_online
        ]
        lines += [
            f"data directory {directory.path} hangs: its disk has not finished a sync for"
            f" {self._threads.longest_seconds(directory.path):.0f} s"
            for directory in self._manager.table.directories
            if directory.is_online and self._threads.hangs(directory.path)
        ]
        offline = self._manager.table.offline
        named = dict(islice(offline.items(), UNSERVED_LISTED_MAX))
        others = len(offline) - len(named)
        for partition, failure in chain.from_iterable(failures() for failures in self._failures):
            if len(named) < UNSERVED_LISTED_MAX:
                named[partition] = str(failure)
            else:
                others += 1
        lines += [
            f"partition {partition} is not served: {named[partition]}"
            for partition in sorted(named, key=str)
        ]
        if others:
            lines.append(f"{others} more partitions are not served")
        return "\n".join(lines) or None
