"""Appends the records of groups and their offsets to __consumer_offsets.

Rules
- Records of one group are appended in the order of the calls. Those of a transaction are appended
  at once, because its end may follow.
- Many records are appended in chunks, one in a round of the loop: the 6,000 tombstones of a group
  with 2,000 members take 30 ms.
- Every caller gets an outcome: that of the append, or an error after `append_timeout_ms`.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import structlog

from broker.event_loop.loop_turns import Turns, run_in_turns, yield_to_loop
from broker.groups.classic.model import Group
from broker.groups.clock import Clock
from broker.groups.live_classic_group import GroupStats
from broker.groups.offsets.offset_records import CommittedOffset
from broker.groups.offsets.offsets_store import TopicIndex, group_record_sliced
from broker.logging import RateLimitedLogger
from broker.quotas.memory_budget import memory_of_text
from broker.topics.internal_topic import KeyedLog, LogRecord
from broker.topics.producer_ids import Producer
from protocol.errors import ErrorCode
from storage.errors import (
    InvalidProducerEpochError,
    MessageTooLargeError,
    RecordListTooLargeError,
    StorageError,
)
from storage.format.batch import HEADER_BYTES

# Clients cause these lines: groups whose records are too large.
limited_logger: Final = RateLimitedLogger(structlog.get_logger("broker.groups"))

# Records are split into appends of about this size: far below any max.message.bytes, above any
# single record of an offset.
APPEND_BYTES = 256 * 1024
# Records that are appended without a pause for others: two or three milliseconds.
RECORDS_AT_ONCE: Final = 500
# Ids of groups, members and clients. Kafka's limit is 32,767: a client with 50,000 groups of such
# names, in which one character takes four bytes of memory, would fill 6 GB.
GROUP_NAME_BYTES_MAX = 1_000


class GroupLog:
    """The appends of all groups, and those that are under way."""

    def __init__(
        self, store: KeyedLog, clock: Clock, stats: GroupStats, append_timeout_ms: int
    ) -> None:
        self._store = store
        self._clock = clock
        self._stats = stats
        self._append_timeout_ms = append_timeout_ms
        self._appends: set[asyncio.Future[Any]] = set()
        # Chunks to append, with their group and the future of their outcome, and their number.
        self._queue: deque[tuple[str, Sequence[LogRecord], asyncio.Future[object]]] = deque()
        self._queued = Counter[str]()

    async def close(self) -> None:
        """Wait for appends until they time out."""
        if self._appends:
            await asyncio.wait(self._appends, timeout=self._append_timeout_ms / 1000)

    def append_group(
        self, group: Group, order: asyncio.Lock, is_served: Callable[[], bool]
    ) -> "asyncio.Future[ErrorCode]":
        """Start to encode the metadata of a classic group in turns, and to append it.

        `order` is a lock of the group that keeps its records in the order of the calls. If
        `is_served` returns False after the encoding, nothing is appended: no record may follow the
        tombstone of a group. As in Kafka, the result is UNKNOWN_SERVER_ERROR if the record exceeds
        max.message.bytes.
        """
        append = asyncio.ensure_future(self._append_group(group, order, is_served))
        self._appends.add(append)
        append.add_done_callback(self._appends.discard)
        return append

    async def _append_group(
        self, group: Group, order: asyncio.Lock, is_served: Callable[[], bool]
    ) -> ErrorCode:
        async with order:
            try:
                record = await self._encoded(group)
                await yield_to_loop()  # a large record was copied, and will be again
            except MessageTooLargeError as error:
                return self._worst(group.group_id, [error], ErrorCode.UNKNOWN_SERVER_ERROR)
            if not is_served():
                return ErrorCode.COORDINATOR_NOT_AVAILABLE
            append = self.append(group.group_id, [record])
        return await append

    async def _encoded(self, group: Group) -> LogRecord:
        """Return the record of a group. Raises MessageTooLargeError."""
        limit_bytes = self._store.max_batch_bytes(group.group_id)
        size_bytes, turns = HEADER_BYTES, Turns()
        async for member in turns.over(group.members.values()):
            size_bytes += len(member.metadata(group.protocol_name))
            size_bytes += len(group.assignment(member.member_id))
        if size_bytes > limit_bytes:  # its encoding would take memory in vain
            raise MessageTooLargeError(size_bytes, limit_bytes)
        key, value = await run_in_turns(group_record_sliced(group))
        size_bytes = HEADER_BYTES + len(key) + len(value or b"")
        if size_bytes > limit_bytes:
            raise MessageTooLargeError(size_bytes, limit_bytes)
        return key, value

    def append(
        self,
        group_id: str,
        records: Sequence[LogRecord],
        appended: Callable[[ErrorCode], None] = lambda error: None,
        *,
        too_large: ErrorCode = ErrorCode.UNKNOWN_SERVER_ERROR,
        producer: Producer | None = None,
    ) -> "asyncio.Future[ErrorCode]":
        """Start to append; call `appended` with the outcome, however late it comes.

        The future ends with the outcome, or with COORDINATOR_NOT_AVAILABLE after
        `append_timeout_ms`. Cancelling it does not stop the append.
        """
        outcome: asyncio.Future[ErrorCode] = asyncio.get_running_loop().create_future()
        appends = self._begin(group_id, tuple(_chunks(records)), producer)
        ended = asyncio.gather(*appends, return_exceptions=True)
        self._appends.add(ended)

        def settle(error: ErrorCode) -> None:
            if not outcome.done():
                outcome.set_result(error)

        timeout_s = self._append_timeout_ms / 1000
        timer = self._clock.call_later(
            timeout_s, lambda: settle(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        )

        def finish(ended: "asyncio.Future[list[object]]") -> None:
            timer.cancel()
            self._appends.discard(ended)
            error = self._worst(group_id, ended.result(), too_large)
            try:
                appended(error)
            finally:
                settle(error)

        ended.add_done_callback(finish)
        return outcome

    def _begin(
        self, group_id: str, chunks: Sequence[Sequence[LogRecord]], producer: Producer | None
    ) -> "list[asyncio.Future[object]]":
        if producer is not None or (len(chunks) == 1 and group_id not in self._queued):
            return [self._store.append(group_id, chunk, producer) for chunk in chunks]
        loop = asyncio.get_running_loop()
        if not self._queue:
            loop.call_soon(self._append_next)
        outcomes = [loop.create_future() for _ in chunks]
        self._queue.extend((group_id, *each) for each in zip(chunks, outcomes, strict=True))
        self._queued[group_id] += len(chunks)
        return outcomes

    def _append_next(self) -> None:
        group_id, chunk, outcome = self._queue.popleft()
        self._queued[group_id] -= 1
        if not self._queued[group_id]:
            del self._queued[group_id]
        if self._queue:
            asyncio.get_running_loop().call_soon(self._append_next)
        append = self._store.append(group_id, chunk)
        append.add_done_callback(partial(_copy_outcome, outcome))

    def _worst(self, group_id: str, results: Iterable[object], too_large: ErrorCode) -> ErrorCode:
        for result in results:
            if not isinstance(result, BaseException):
                continue
            self._stats.append_errors += 1
            limited_logger.error(
                "group append failed", subject=group_id, group=group_id, reason=repr(result)
            )
            match result:
                case MessageTooLargeError() | RecordListTooLargeError():
                    return too_large
                case InvalidProducerEpochError():
                    return ErrorCode.INVALID_PRODUCER_EPOCH
                case StorageError() | asyncio.CancelledError():
                    return ErrorCode.COORDINATOR_NOT_AVAILABLE
                case _:
                    return ErrorCode.UNKNOWN_SERVER_ERROR
        return ErrorCode.NONE


def are_names(*texts: str) -> bool:
    """Return whether each of these strings is short enough for a name."""
    return all(len(text.encode()) <= GROUP_NAME_BYTES_MAX for text in texts)


def chunks_of(keys: Sequence[TopicIndex]) -> list[Sequence[TopicIndex]]:
    """Split keys into chunks for one append each; return at least one chunk, perhaps empty."""
    firsts = range(0, max(1, len(keys)), RECORDS_AT_ONCE)
    return [keys[first : first + RECORDS_AT_ONCE] for first in firsts]


def offset_chunks(
    offsets: Mapping[TopicIndex, CommittedOffset],
) -> Iterator[dict[TopicIndex, CommittedOffset]]:
    """Split offsets into chunks of RECORDS_AT_ONCE, or of about APPEND_BYTES of metadata.

    Yield at least one chunk, perhaps empty.
    """
    chunk: dict[TopicIndex, CommittedOffset] = {}
    size_bytes = 0
    for key, value in offsets.items():
        if len(chunk) == RECORDS_AT_ONCE or size_bytes >= APPEND_BYTES:
            yield chunk
            chunk, size_bytes = {}, 0
        chunk[key] = value
        _, _, metadata, _, _ = value
        size_bytes += memory_of_text(metadata)
    yield chunk


def _copy_outcome(outcome: "asyncio.Future[object]", append: "asyncio.Future[object]") -> None:
    if outcome.done():
        return
    if append.cancelled():
        outcome.cancel()
    elif (error := append.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(append.result())


def _chunks(records: Sequence[LogRecord]) -> Iterator[Sequence[LogRecord]]:
    """Split records into appends of RECORDS_AT_ONCE, or of about APPEND_BYTES.

    A single record may be larger.
    """
    first, size_bytes = 0, 0
    for index, (key, value) in enumerate(records):
        record_bytes = len(key) + len(value or b"")
        is_full = size_bytes + record_bytes > APPEND_BYTES or index - first == RECORDS_AT_ONCE
        if size_bytes and is_full:
            yield records[first:index]
            first, size_bytes = index, 0
        size_bytes += record_bytes
    yield records[first:]
