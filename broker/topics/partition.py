"""A partition that the broker serves: its log, waiting fetches, and group commit.

Rules. Only the event loop uses a partition. A record is acknowledged when it is in the log (page
cache), or, with `varve.flush.on.ack`, when it is fsynced. Group commit runs one fsync at a time;
the next one covers all records that were appended meanwhile. Readers never see records beyond the
high watermark.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from broker.counters import TopicStats
from broker.topics.data_wait import DataWait
from storage.errors import LogClosedError, LogDirectoryError, StorageError
from storage.format.batch import BatchHeader
from storage.log.log import Log
from storage.model import AppendInfo, TopicPartition

if TYPE_CHECKING:  # it imports the compiler
    from cleaner.engine.selective.appended_keys import AppendedKeys, BatchKeys

FlushRunner = Callable[[Log], Awaitable[None]]  # flushes a log, waiting in a thread


class Partition:
    """A log with its waiting fetches and its group commit."""

    __slots__ = (
        "_fail",
        "_flush_waiters",
        "_flusher",
        "_run_flush",
        "_waiters",
        "flushing",
        "keys",
        "log",
        "partition",
        "stats",
    )

    def __init__(
        self,
        log: Log,
        stats: TopicStats,
        run_flush: FlushRunner,
        fail: Callable[[LogDirectoryError], None],
    ) -> None:
        self.partition: TopicPartition = log.partition
        self.log = log
        self.stats = stats  # of the whole topic
        self.keys: AppendedKeys | None = None  # of the active segment, if they are recorded
        self._run_flush = run_flush
        self._fail = fail
        self._waiters: set[DataWait] = set()
        self._flush_waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self.flushing = asyncio.Lock()  # held while an fsync runs, or must not run

    def append(
        self,
        records: memoryview,
        header: BatchHeader,
        now_ms: int,
        *,
        in_transaction: bool = False,
        by_coordinator: bool = False,
    ) -> AppendInfo:
        """Append one checked batch, and wake readers if it is visible already.

        The flags and errors are those of Log.append; a failed directory is reported first.
        """
        log = self.log
        try:
            info = log.append(
                records,
                header,
                now_ms=now_ms,
                in_transaction=in_transaction,
                by_coordinator=by_coordinator,
            )
        except LogDirectoryError as error:
            self._fail(error)
            raise
        if self._waiters and not info.duplicate and info.last_offset < log.high_watermark:
            self._wake_for(header)
        if log.config.varve_flush_on_ack:
            self._ensure_flusher()
        return info

    def roll(self, now_ms: int) -> None:
        """Close the active segment. The errors are those of LogRoller.roll.

        A failed directory is reported first.
        """
        try:
            self.log.roll(now_ms)
        except LogDirectoryError as error:
            self._fail(error)
            raise

    def record_keys(
        self, records: memoryview, header: BatchHeader, info: AppendInfo, keys: "BatchKeys | None"
    ) -> None:
        """Record the keys of an appended batch for the key index; `keys` if it is compressed."""
        if self.keys is not None and not info.duplicate:
            self.keys.add(records, header, info.first_offset, keys)

    def is_acked(self, info: AppendInfo) -> bool:
        """Return whether the append may be acknowledged now."""
        return not self.log.config.varve_flush_on_ack or info.last_offset < self.log.high_watermark

    def wait_flushed(self, next_offset: int) -> asyncio.Future[None]:
        """Return a future that ends when everything below `next_offset` is fsynced.

        It fails with LogDirectoryError if the fsync does, and with the error of `close`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flush_waiters.append((next_offset, future))
        self._ensure_flusher()
        return future

    async def flush(self) -> None:
        """Fsync all appended records. Raises LogDirectoryError."""
        if not self.log.flusher.is_flushed:
            await self.wait_flushed(self.log.log_end_offset)

    def add_waiter(self, waiter: DataWait) -> None:
        """Tell `waiter` of appends, and wake it when the partition changes in another way."""
        self._waiters.add(waiter)

    def remove_waiter(self, waiter: DataWait) -> None:
        """Remove a waiter if it is registered."""
        self._waiters.discard(waiter)

    def wake(self) -> None:
        """Wake every waiting fetch."""
        for waiter in tuple(self._waiters):
            waiter.wake()

    def _wake_for(self, header: BatchHeader) -> None:
        if header.is_control:
            self.wake()  # it may make a whole transaction visible
            return
        for waiter in self._waiters:
            waiter.appended(header.size_bytes)

    async def wait_idle(self) -> None:
        """Wait until no fsync of this log is running."""
        if self._flusher is not None:
            await asyncio.wait([self._flusher])

    def fail_waiters(self, error: Exception) -> None:
        """End all waits, because the partition is deleted, offline or truncated."""
        waiters, self._flush_waiters = self._flush_waiters, []
        for _, future in waiters:
            if not future.done():
                future.set_exception(error)
        self.wake()

    def _ensure_flusher(self) -> None:
        if self._flusher is None:
            name = f"flush {self.partition}"
            self._flusher = asyncio.create_task(self._group_commit(), name=name)

    async def _group_commit(self) -> None:
        """Fsync until no caller waits and, with flush.on.ack, all records are visible."""
        try:
            while self._flush_waiters or self._hidden():
                async with self.flushing:
                    await self._run_flush(self.log)
                self._release_flushed()
        except LogDirectoryError as error:
            self._fail(error)
            self.fail_waiters(error)
        except LogClosedError as error:  # the topic was deleted meanwhile
            self.fail_waiters(error)
        except BaseException as error:  # no caller may wait for ever
            self.fail_waiters(StorageError(f"fsync of {self.partition} ended: {error!r}"))
            raise
        finally:
            self._flusher = None

    def _hidden(self) -> bool:
        log = self.log
        return log.config.varve_flush_on_ack and log.high_watermark < log.log_end_offset

    def _release_flushed(self) -> None:
        flushed = self.log.recovery_point
        waiting = []
        for next_offset, future in self._flush_waiters:
            if future.done():
                continue
            if next_offset <= flushed:
                future.set_result(None)
            else:
                waiting.append((next_offset, future))
        self._flush_waiters = waiting
        self.wake()


class OfflinePartitionError(StorageError):
    """The partition exists but is not served: its directory failed, or its data is damaged."""

    def __init__(self, partition: TopicPartition, reason: str) -> None:
        super().__init__(f"{partition} is offline: {reason}")
        self.partition = partition
        self.reason = reason
