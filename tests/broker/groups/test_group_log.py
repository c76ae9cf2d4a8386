"""Appends of records of groups: their order, their outcome, and what a caller waits for."""

import asyncio
from collections.abc import Generator

import pytest

from broker.groups import group_log
from broker.groups.classic.model import Group
from broker.groups.group_log import (
    APPEND_BYTES,
    GROUP_NAME_BYTES_MAX,
    RECORDS_AT_ONCE,
    GroupLog,
    are_names,
    chunks_of,
    offset_chunks,
)
from broker.groups.live_classic_group import GroupStats
from broker.groups.offsets.offset_records import committed_offset
from broker.topics.internal_topic import KeyedLog, LogRecord
from protocol.errors import ErrorCode
from storage.errors import (
    InvalidProducerEpochError,
    LogDirectoryError,
    MessageTooLargeError,
    RecordListTooLargeError,
)
from tests.support.broker.groups.offsets_log import OffsetsLog
from tests.support.clocks.virtual_clock import VirtualClock, settle

TIMEOUT_MS = 5_000
RECORD: LogRecord = (b"key", b"value")


class Appends:
    """A log of groups, and the outcomes that it reported."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.partition = OffsetsLog()
        self.stats = GroupStats()
        store = KeyedLog(1, self.partition.append)
        self.log = GroupLog(store, self.clock, self.stats, TIMEOUT_MS)
        self.outcomes: list[ErrorCode] = []

    def begin(self, *records: LogRecord, group_id: str = "g") -> "asyncio.Future[ErrorCode]":
        too_large = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
        return self.log.append(group_id, records, self.outcomes.append, too_large=too_large)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, ErrorCode.NONE),
        (MessageTooLargeError(2, 1), ErrorCode.INVALID_COMMIT_OFFSET_SIZE),
        (RecordListTooLargeError(2, 1), ErrorCode.INVALID_COMMIT_OFFSET_SIZE),
        (InvalidProducerEpochError(1, 3, 2), ErrorCode.INVALID_PRODUCER_EPOCH),
        (LogDirectoryError("/d", "disk"), ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (asyncio.CancelledError(), ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (RuntimeError("bug"), ErrorCode.UNKNOWN_SERVER_ERROR),
    ],
)
async def test_the_error_of_an_append_becomes_that_of_the_request(
    error: Exception | None, outcome: ErrorCode
) -> None:
    appends = Appends()
    appends.partition.error = error
    assert await appends.begin(RECORD) is outcome
    assert appends.outcomes == [outcome]
    assert appends.stats.append_errors == (error is not None)


async def test_the_outcome_is_noted_before_the_caller_continues() -> None:
    appends = Appends()
    appends.partition.held = True
    append = appends.begin(RECORD)
    await settle()
    assert appends.outcomes == []
    appends.partition.release()
    assert await append is ErrorCode.NONE
    assert appends.outcomes == [ErrorCode.NONE]
    assert appends.clock.running == 0


async def test_a_caller_waits_until_the_timeout_and_a_late_outcome_is_noted() -> None:
    appends = Appends()
    appends.partition.held = True
    append = appends.begin(RECORD)
    await appends.clock.advance(TIMEOUT_MS - 1)
    assert not append.done()
    await appends.clock.advance(1)
    assert await append is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert appends.outcomes == []
    appends.partition.release()
    await settle()
    assert appends.outcomes == [ErrorCode.NONE]


async def test_a_cancelled_caller_does_not_stop_its_append() -> None:
    appends = Appends()
    appends.partition.held = True
    append = appends.begin(RECORD)
    append.cancel()
    appends.partition.release()
    await settle()
    assert appends.outcomes == [ErrorCode.NONE]


async def test_many_records_are_split_into_appends_of_bounded_size_in_their_order() -> None:
    appends = Appends()
    records = [(b"%04d" % number, b"v" * 1_000) for number in range(600)]
    large = (b"large", b"v" * 2 * APPEND_BYTES)
    assert await appends.begin(*records, large) is ErrorCode.NONE
    assert [record for append in appends.partition.appends for record in append] == [
        *records,
        large,
    ]
    *others, last = appends.partition.appends
    assert last == [large]
    assert len(others) == 3
    for append in others:
        assert sum(len(key) + len(value or b"") for key, value in append) <= APPEND_BYTES
    assert appends.outcomes == [ErrorCode.NONE]


async def test_thousands_of_records_are_appended_in_turns_and_in_their_order() -> None:
    """The tombstones of a group of 2,000 members took 30 ms."""
    appends = Appends()
    records = [(b"%04d" % number, None) for number in range(3_000)]
    begun = [appends.begin(*records), appends.begin(RECORD)]
    other = appends.begin(RECORD, group_id="other")
    assert [len(append) for append in appends.partition.appends] == [1], "of the other group"
    lengths = []
    while not all(append.done() for append in begun):
        before = len(appends.partition.appends)
        await asyncio.sleep(0)
        lengths.append(sum(map(len, appends.partition.appends[before:])))
    assert max(lengths) <= RECORDS_AT_ONCE
    written = [record for append in appends.partition.appends for record in append]
    assert written == [RECORD, *records, RECORD]
    assert [await append for append in (*begun, other)] == [ErrorCode.NONE] * 3


async def test_a_group_is_appended_in_another_turn_than_its_record_is_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them copies the record, which may have a megabyte."""
    appends, encoded = Appends(), []

    def encode(_: Group) -> Generator[None, None, LogRecord]:
        yield
        encoded.append(RECORD)
        return RECORD

    monkeypatch.setattr(group_log, "group_record_sliced", encode)
    append = appends.log.append_group(Group("g"), asyncio.Lock(), lambda: True)
    for _ in range(10):
        await asyncio.sleep(0)
        if encoded:
            break
    assert (encoded, appends.partition.appends) == ([RECORD], [])
    assert await append is ErrorCode.NONE
    assert appends.partition.appends == [[RECORD]]


async def test_one_failed_part_fails_the_append() -> None:
    appends = Appends()
    append = appends.begin(*[(b"%04d" % number, None) for number in range(3_000)])
    await asyncio.sleep(0)
    appends.partition.error = LogDirectoryError("/d", "disk")
    assert await append is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert appends.partition.appends


async def test_a_close_waits_for_the_appends_that_have_begun() -> None:
    appends = Appends()
    appends.partition.held = True
    appends.begin(RECORD)
    closing = asyncio.ensure_future(appends.log.close())
    await settle()
    assert not closing.done()
    appends.partition.release()
    await closing
    assert appends.outcomes == [ErrorCode.NONE]


@pytest.mark.parametrize("count", [0, 1, RECORDS_AT_ONCE, RECORDS_AT_ONCE + 1])
def test_chunks_of_keys_contain_every_key_once(count: int) -> None:
    keys = [("orders", index) for index in range(count)]
    chunks = chunks_of(keys)
    assert [key for chunk in chunks for key in chunk] == keys
    assert len(chunks) == 1 + (count > RECORDS_AT_ONCE)


@pytest.mark.parametrize(
    ("metadata", "count", "chunks"),
    [("", 0, 1), ("", 2_000, 4), ("", 2_001, 5), ("x" * 4_096, 65, 2), ("é" * 4_096, 65, 5)],
)
def test_chunks_of_offsets_have_a_largest_number_and_size(
    metadata: str, count: int, chunks: int
) -> None:
    offsets = {("orders", index): committed_offset(5, -1, metadata) for index in range(count)}
    made = list(offset_chunks(offsets))
    assert [item for chunk in made for item in chunk.items()] == list(offsets.items())
    assert len(made) == chunks


def test_the_length_of_a_string_in_the_log_counts_in_bytes() -> None:
    assert are_names("", "x" * GROUP_NAME_BYTES_MAX)
    assert not are_names("g", "x" * (GROUP_NAME_BYTES_MAX + 1))
    assert not are_names("é" * (GROUP_NAME_BYTES_MAX // 2 + 1))
