"""Adoptions in progress: requests start them, or join one that runs.

Rules
- One adoption runs at a time: it needs the memory of a worker. Others wait for it.
- A request waits for a while only; the adoption goes on, and a later request gets its result.
- A failed adoption leaves the lease open, so the process may ask again.
"""

import asyncio
from functools import partial
from typing import Final

import structlog

from broker.leases.adoption import Adopter, AdoptionFailedError
from broker.leases.lease_table import LeaseTable
from broker.leases.model import (
    ENDS,
    LeasedPartition,
    LeaseError,
    RemoteCompaction,
    ended_error,
)
from cleaner.lease_states import LeaseState
from cleaner.remote_compaction import AdoptOutcome, AdoptResult, Purpose

ANSWER_SECONDS: Final = 15.0  # longest wait for an adoption before a response

_GIVEN_UP: Final = (LeaseState.EXPIRED, LeaseState.ABANDONED)

logger = structlog.get_logger("broker.leases")


class RunningAdoptions:
    """Runs the adoptions of leased partitions."""

    def __init__(self, table: LeaseTable, adopter: Adopter) -> None:
        self._table = table
        self._adopter = adopter
        self._running: dict[tuple[str, int], asyncio.Task[AdoptResult]] = {}
        self._lock = asyncio.Lock()

    @property
    def tasks(self) -> tuple[asyncio.Task[AdoptResult], ...]:
        """Return the adoptions that run or wait."""
        return tuple(self._running.values())

    async def adopt(
        self, compaction_id: str, partition: int | None
    ) -> tuple[bool, list[AdoptResult], RemoteCompaction]:
        """Verify and publish uploaded output, or join an adoption in progress.

        Returns whether all partitions are done, the results so far, and the remote compaction.
        Raises LeaseError.
        """
        compaction = self._table.find(compaction_id)
        if compaction.purpose is not Purpose.COMPACT:
            raise LeaseError(
                409, f"{compaction_id} leases partitions for reading: it has no output"
            )
        if partition is not None and partition not in compaction.parts:
            raise LeaseError(404, f"{compaction_id} leases no partition {partition}")
        parts = [
            part
            for number, part in compaction.parts.items()
            if partition is None or number == partition
        ]
        for part in parts:
            self._table.end_if_stale(part)
        if parts and all(part.state in _GIVEN_UP for part in parts):
            raise ended_error(compaction)
        tasks = [self._adoption(part) for part in parts if part.is_alive]
        if tasks:
            await asyncio.wait(tasks, timeout=ANSWER_SECONDS)
        results, failures = [], []
        for task in tasks:
            if task.done() and task.exception() is not None:
                failures.append(str(task.exception()))
            elif task.done() and task.result().outcome is AdoptOutcome.NOTHING:
                results.append(task.result())
        if failures:
            raise LeaseError(503, "; ".join(failures))
        results += [part.result for part in parts if part.result is not None]
        return all(task.done() for task in tasks), results, compaction

    def _adoption(self, part: LeasedPartition) -> asyncio.Task[AdoptResult]:
        key = part.record.compaction_id, part.where.partition
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(
                self._table.measured(self._adopt(part)), name=f"adopt {part.where}"
            )
            part.state = LeaseState.ADOPTING
            self._running[key] = task
            task.add_done_callback(partial(self._done, key))
        return task

    def _done(self, key: tuple[str, int], task: asyncio.Task[AdoptResult]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # it is logged, and clients that wait get it

    async def _adopt(self, part: LeasedPartition) -> AdoptResult:
        try:
            async with self._lock:
                result = await self._adopter.adopt(part, partial(self._table.why_stale, part))
        except AdoptionFailedError as error:
            part.state = LeaseState.OPEN
            logger.warning("adoption failed", partition=str(part.where), reason=str(error))
            raise
        except BaseException:
            part.state = LeaseState.OPEN
            logger.exception("adoption failed", partition=str(part.where))
            raise
        self._table.stats.outcomes[result.outcome] += 1
        if result.outcome is AdoptOutcome.NOTHING:
            part.state = LeaseState.OPEN
            return result
        if self._table.is_stopping and result.outcome is AdoptOutcome.STALE:
            part.state = LeaseState.OPEN  # the next start decides whether the lease is valid
            raise AdoptionFailedError(result.reason)
        part.result = result
        reason = result.reason or "its output was adopted"
        await self._table.end_now(part, ENDS[result.outcome], reason)
        return result
