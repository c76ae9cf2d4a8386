"""A partition that the broker serves: its log, waiting fetches, and group commit.

Rules. Only the event loop uses a partition. A record is acknowledged when it is in the log (page
cache), or, with `varve.flush.on.ack`, when it is fsynced. Group commit runs one fsync at a time;
the next one covers all records that were appended meanwhile. Readers never see records beyond the
high watermark. A large batch is written in parts, one in each turn of the loop; meanwhile other
produced batches of the partition wait in order, and any other change makes it begin again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from broker.counters import TopicStats
from broker.event_loop.directory_writer import ChangePendingError
from broker.event_loop.loop_turns import run_to_end, yield_to_loop
from broker.topics.data_wait import DataWait
from storage.errors import (
    DirectoryStalledError,
    LogClosedError,
    LogDirectoryError,
    StorageError,
)
from storage.format.batch import BatchHeader
from storage.log.log import Log
from storage.model import AppendInfo, TopicPartition
from storage.segments.segment import PART_BYTES

if TYPE_CHECKING:  # it imports the compiler
    from cleaner.engine.selective.appended_keys import AppendedKeys, BatchKeys

# Flushes a log, waiting in a thread.
FlushRunner = Callable[[Log], Awaitable[None]]
# Waits for the share of the flushes of a client, and occupies it; None: the broker itself.
FlushShare = Callable[[Log, Hashable], AbstractAsyncContextManager[None]]
_T = TypeVar("_T")

# A batch above this is checked in a thread and written in parts: its CRC, the check of its records
# and its write take up to 1 ms a megabyte. No batch is as large with the default max.message.bytes.
LARGE_BATCH_BYTES: Final = 2 << 20
# A large batch begins again after a marker or a roll. Once it has written as many parts as so many
# starts need, the rest is written at once.
STARTS_MAX: Final = 3


class ChangeRunner(Protocol):
    """Runs a change of a log in the thread of its data directory; see DirectoryThreads.change."""

    def __call__(self, directory: str, call: Callable[[], _T]) -> _T:
        """Return what `call` returns."""
        ...


class Partition:
    """A log with its waiting fetches and its group commit."""

    __slots__ = (
        "_client",
        "_fail",
        "_flush_share",
        "_flush_waiters",
        "_flushers",
        "_run_change",
        "_run_flush",
        "_stalls",
        "_wait_unstalled",
        "_waiters",
        "appending",
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
        *,
        flush_share: FlushShare = lambda _log, _client: nullcontext(),
        run_change: ChangeRunner | None = None,
        wait_unstalled: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """`run_change` makes the changes of the log; None: the event loop does.

        `wait_unstalled` is needed with it; see DirectoryThreads.wait_unstalled.
        """
        self.partition: TopicPartition = log.partition
        self.log = log
        self.stats = stats  # of the whole topic
        self.keys: AppendedKeys | None = None  # of the active segment, if they are recorded
        self._run_flush = run_flush
        self._flush_share = flush_share
        self._run_change = run_change
        self._wait_unstalled = wait_unstalled
        self._stalls = False  # the disk does not finish a part of a large batch
        self._fail = fail
        self._client: Hashable = None  # the last one that produced
        self._waiters: set[DataWait] = set()
        self._flush_waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._flushers: dict[Hashable, asyncio.Task[None]] = {}  # by client
        self.appending = asyncio.Lock()  # held while a large batch is written
        self.flushing = asyncio.Lock()  # held while an fsync runs, or must not run

    def append(
        self,
        records: memoryview,
        header: BatchHeader,
        now_ms: int,
        *,
        in_transaction: bool = False,
        by_coordinator: bool = False,
        client: Hashable = None,
    ) -> AppendInfo:
        """Append one checked batch, and wake readers if it is visible already.

        With `varve.flush.on.ack`, the flush counts for `client`; None: for the client of the last
        batch. The flags and errors are those of Log.append and `change`.
        """
        if client is not None:
            self._client = client
        log, run_change = self.log, self._run_change
        try:
            if run_change is None:  # its two calls would take a twentieth of a request
                info = log.append(
                    records,
                    header,
                    now_ms=now_ms,
                    in_transaction=in_transaction,
                    by_coordinator=by_coordinator,
                )
            else:
                append = partial(
                    log.append,
                    records,
                    header,
                    now_ms=now_ms,
                    in_transaction=in_transaction,
                    by_coordinator=by_coordinator,
                )
                info = run_change(log.log_directory.path, append)
        except LogDirectoryError as error:
            self._fail(error)
            raise
        except ChangePendingError as error:
            error.pending.add_done_callback(self._change_ended)
            error.pending.add_done_callback(partial(self._append_ended, header))
            raise
        if self._waiters and not info.duplicate and info.last_offset < log.high_watermark:
            self._wake_for(header)
        if log.config.varve_flush_on_ack:
            self._ensure_flusher(self._client)
        return info

    @asynccontextmanager
    async def turn_to_append(
        self, records: memoryview, header: BatchHeader, now_ms: int
    ) -> AsyncIterator[None]:
        """Wait for the large batch that is being written; write all but the end of a large one.

        The caller appends the batch before it waits for anything else, or not at all. Raises the
        errors of Log.append_part, and DirectoryStalledError.
        """
        if self._stalls:
            raise DirectoryStalledError(self.log.log_directory.path)
        async with self.appending:
            if len(records) <= LARGE_BATCH_BYTES:
                yield
                return
            try:
                for _ in range(STARTS_MAX * (len(records) // PART_BYTES)):
                    if await self._append_part(records, header, now_ms):
                        break
                    await yield_to_loop()
                yield
            finally:
                # While a change is pending, the parts stay: the next change removes them.
                with suppress(DirectoryStalledError):
                    while self.log.has_parts and self.change(self.log.drop_last_parts):
                        await yield_to_loop()

    async def _append_part(self, records: memoryview, header: BatchHeader, now_ms: int) -> bool:
        log = self.log
        try:
            return self.change(partial(log.append_part, records, header, now_ms=now_ms))
        except ChangePendingError as error:
            assert self._wait_unstalled is not None
            self._stalls = True
            try:
                await run_to_end(error.pending)
                await self._wait_unstalled(log.log_directory.path)
            finally:
                self._stalls = False
            return False

    def _append_ended(self, header: BatchHeader, pending: "asyncio.Future[AppendInfo]") -> None:
        if pending.exception() is not None:
            return
        if not pending.result().duplicate:
            self._wake_for(header)
        if self.log.config.varve_flush_on_ack:
            self._ensure_flusher(self._client)

    def roll(self, now_ms: int) -> None:
        """Close the active segment. The errors are those of LogRoller.roll and `change`."""
        self.change(partial(self.log.roll, now_ms))

    def change(self, call: Callable[[], _T]) -> _T:
        """Run a change of the log, in a thread if there are several data directories.

        Raises what it raises, and the errors of DirectoryWriter.run; a failed directory is reported
        first.
        """
        try:
            if self._run_change is None:
                return call()
            return self._run_change(self.log.log_directory.path, call)
        except LogDirectoryError as error:
            self._fail(error)
            raise
        except ChangePendingError as error:
            error.pending.add_done_callback(self._change_ended)
            raise

    def make_folder(self, make: Callable[[], _T]) -> _T:
        """Return what `make` returns, which creates a folder below that of the log; see `change`.

        A stalled change that begins after the topic was deleted would create the topic's folder
        again: it raises LogClosedError instead.
        """
        log = self.log

        def make_unless_deleted() -> _T:
            if log.is_deleted:
                raise LogClosedError(log.directory)
            return make()

        return self.change(make_unless_deleted)

    async def wait_change(self, change: Callable[[], _T]) -> _T:
        """Return what `change` returns, which calls `append`, `roll` or `change` of this partition.

        It waits only while the disk does not finish the change, which continues if cancelled.
        """
        try:
            return change()
        except ChangePendingError as error:
            result: _T = await run_to_end(error.pending)
            return result

    def _change_ended(self, pending: "asyncio.Future[Any]") -> None:
        error = pending.exception()
        if isinstance(error, LogDirectoryError):
            self._fail(error)

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

        The fsync takes the share of the client that produced last. The future fails
        with LogDirectoryError if the fsync does, and with the error of `close`.
        """
        return self._wait_flushed(next_offset, self._client)

    def _wait_flushed(self, next_offset: int, client: Hashable) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flush_waiters.append((next_offset, future))
        self._ensure_flusher(client)
        return future

    async def flush(self) -> None:
        """Fsync all appended records, for the broker itself. Raises LogDirectoryError."""
        if not self.log.flusher.is_flushed:
            await self._wait_flushed(self.log.log_end_offset, None)

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
        if self._flushers:
            await asyncio.wait(self._flushers.values())

    def fail_waiters(self, error: Exception) -> None:
        """End all waits, because the partition is deleted, offline or truncated."""
        waiters, self._flush_waiters = self._flush_waiters, []
        for _, future in waiters:
            if not future.done():
                future.set_exception(error)
        self.wake()

    def _ensure_flusher(self, client: Hashable) -> None:
        if client not in self._flushers:
            name = f"flush {self.partition}"
            self._flushers[client] = asyncio.create_task(self._group_commit(client), name=name)

    async def _group_commit(self, client: Hashable) -> None:
        """Fsync until no caller waits and, with flush.on.ack, all records are visible.

        Each client has its own task: one that flushes much does not delay the others here.
        """
        try:
            while self._must_flush():
                # The share comes first: no task holds the lock while it waits for a share.
                async with self._flush_share(self.log, client), self.flushing:
                    if self._must_flush():  # no other client's task has done it
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
            del self._flushers[client]

    def _must_flush(self) -> bool:
        """Return whether callers, or readers of appended records, wait for an fsync."""
        log = self.log
        is_hidden = log.config.varve_flush_on_ack and log.high_watermark < log.log_end_offset
        return bool(self._flush_waiters) or is_hidden

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
