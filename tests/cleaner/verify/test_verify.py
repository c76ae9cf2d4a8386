"""Outputs that were made elsewhere: each way in which they can be wrong, planted and found.

Whoever forges does it well: indexes, sizes, checksums and counts fit what was forged.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from cleaner.job import CleanedGroup
from storage.format import filenames
from storage.format.batch import (
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
    Record,
    build_batch,
    decode_records,
    read_header,
)
from storage.format.compression import ZSTD
from tests.support.cleaner.clean_cases import batch, record
from tests.support.cleaner.cleaning import DIRECTORY, NOW_MS, clean_job, segment, write_segments
from tests.support.cleaner.compacted_log import CompactedLog
from tests.support.cleaner.verifying import (
    MAPS,
    StagedOutputs,
    forge,
    hand_back,
    handed,
    refusal,
    verify,
    written,
)
from tests.support.storage.empty_batch import empty_batch
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put

Change = Callable[[list[bytes]], list[bytes]]
ELSEWHERE = f"{DIRECTORY}/varve.leases/run1/out/0"


def rebuilt(source: bytes, change: Callable[[list[Record]], list[Record]]) -> bytes:
    """A batch with other records, its header as the cleaner would make it."""
    header = read_header(source)
    records = change(decode_records(source, header))
    if not records:
        return bytes(empty_batch(header))
    return bytes(
        build_batch(
            records,
            base_offset=header.base_offset,
            codec=header.codec,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            attributes=header.attributes & (TRANSACTIONAL | CONTROL | LOG_APPEND_TIME),
            partition_leader_epoch=header.partition_leader_epoch,
            last_offset_delta=header.last_offset_delta,
            delete_horizon_ms=header.base_timestamp if header.has_delete_horizon else None,
            max_timestamp=header.max_timestamp,
        )
    )


def in_batch(number: int, change: Callable[[list[Record]], list[Record]]) -> Change:
    def changed(log: list[bytes]) -> list[bytes]:
        return [rebuilt(item, change) if at == number else item for at, item in enumerate(log)]

    return changed


def with_header(number: int, change: Callable[[BatchHeader], dict[str, object]]) -> Change:
    """Other values in a header, and a checksum that fits them."""

    def changed(log: list[bytes]) -> list[bytes]:
        header = read_header(log[number])
        fields: dict[str, object] = {
            "base_offset": header.base_offset,
            "codec": header.codec,
            "producer_id": header.producer_id,
            "producer_epoch": header.producer_epoch,
            "base_sequence": header.base_sequence,
            "attributes": header.attributes & (TRANSACTIONAL | CONTROL | LOG_APPEND_TIME),
            "partition_leader_epoch": header.partition_leader_epoch,
            "last_offset_delta": header.last_offset_delta,
            "delete_horizon_ms": header.base_timestamp if header.has_delete_horizon else None,
            "max_timestamp": header.max_timestamp,
        } | change(header)
        records = decode_records(log[number], header)
        made = bytes(build_batch(records, **fields))  # type: ignore[arg-type]
        return [made if at == number else item for at, item in enumerate(log)]

    return changed


def batch_of(log: CompactedLog, value: StagedOutputs, offset: int) -> int:
    """Which batch of the output holds an offset."""
    results: list[int] = []

    def look(batches: list[bytes]) -> list[bytes]:
        headers = [read_header(item) for item in batches]
        results.extend(
            at
            for at, header in enumerate(headers)
            if header.base_offset <= offset <= header.last_offset
        )
        return batches

    forge(log.env, value, look)
    assert len(results) == 1, offset
    return results[0]


def without(offset: int) -> Callable[[list[Record]], list[Record]]:
    return lambda records: [item for item in records if item.offset != offset]


def and_also(extra: Record) -> Callable[[list[Record]], list[Record]]:
    return lambda records: sorted([*records, extra], key=lambda item: item.offset)


def moved(records: list[Record]) -> list[Record]:
    return [item._replace(offset=item.offset + 1) for item in records]


def revalued(records: list[Record]) -> list[Record]:
    return [item._replace(value=b"other") for item in records]


def retimed(records: list[Record]) -> list[Record]:
    return [item._replace(timestamp=item.timestamp + 1) for item in records]


@MAPS
def test_what_the_engine_leaves_is_taken(map_bytes: int) -> None:
    log, value = handed(map_bytes)
    assert verify(log.env, value).rounds > 1 or map_bytes > 72
    forge(log.env, value, lambda batches: batches)
    report = verify(log.env, value)
    output = value.groups[0].output
    assert output is not None
    assert report.bytes_compared == sum(file.size_bytes for file in output.files)
    assert report.report.next_dirty_offset == value.job.end_offset


# (offset in the batch that is changed, what is done to it)
FORGERIES: dict[str, Callable[[int], Change]] = {
    "record missing": lambda at: in_batch(at, without(1)),
    "superseded record kept": lambda at: in_batch(at, and_also(Record(0, NOW_MS, b"a", b"old"))),
    "record that never was": lambda at: in_batch(at, and_also(Record(2, NOW_MS, b"y", b"new"))),
    "record of another offset": lambda at: in_batch(at, moved),
    "another value, and a checksum that fits": lambda at: in_batch(at, revalued),
    "another timestamp": lambda at: in_batch(at, retimed),
    "batch twice": lambda at: lambda log: [*log[: at + 1], *log[at:]],
    "batch missing": lambda at: lambda log: [*log[:at], *log[at + 1 :]],
    "batch moved to the end": lambda at: lambda log: [*log[:at], *log[at + 1 :], log[at]],
    "another leader epoch": lambda at: with_header(at, lambda _: {"partition_leader_epoch": 9}),
    "another producer": lambda at: with_header(at, lambda _: {"producer_id": 77}),
    "another sequence": lambda at: with_header(at, lambda _: {"base_sequence": 5}),
    "another epoch": lambda at: with_header(at, lambda _: {"producer_epoch": 5}),
    "a shorter batch": lambda at: with_header(at, lambda _: {"last_offset_delta": 1}),
    "log append time": lambda at: with_header(at, lambda _: {"attributes": LOG_APPEND_TIME}),
    "a horizon": lambda at: with_header(at, lambda _: {"delete_horizon_ms": NOW_MS + 1}),
    "packed": lambda at: with_header(at, lambda _: {"codec": ZSTD}),
    "a later maximum": lambda at: with_header(at, lambda h: {"max_timestamp": h.max_timestamp + 1}),
}


@MAPS
@pytest.mark.parametrize("name", FORGERIES)
def test_a_batch_that_was_changed_is_found(name: str, map_bytes: int) -> None:
    log, value = handed(map_bytes)
    at = batch_of(log, value, 1)
    forge(log.env, value, FORGERIES[name](at))
    assert refusal(log.env, value).position >= 0


@MAPS
@pytest.mark.parametrize(
    ("offset", "change"),
    [
        (14, in_batch),  # a tombstone gone before its time
        (12, in_batch),  # a record out of a packed batch
    ],
)
def test_a_record_dropped_too_early_is_found(
    offset: int,
    change: Callable[[int, Callable[[list[Record]], list[Record]]], Change],
    map_bytes: int,
) -> None:
    log, value = handed(map_bytes)
    at = batch_of(log, value, offset)
    forge(log.env, value, change(at, without(offset)))
    assert refusal(log.env, value).position >= 0


def test_a_tombstone_kept_beyond_its_horizon_is_found() -> None:
    log = written()
    log.pass_retention()
    job = log.job()
    retained = hand_back(
        log.env, job, now_ms=job.now_ms - 10**9, delete_retention_ms=10**9 + 10_000
    )
    assert refusal(log.env, retained).position >= 0
    assert verify(log.env, hand_back(log.env, job)).report.tombstones_removed == 1


@pytest.mark.parametrize("marker", [11, 17])
def test_a_marker_that_was_dropped_is_found(marker: int) -> None:
    log, value = handed()
    at = batch_of(log, value, marker)
    forge(log.env, value, lambda batches: [*batches[:at], *batches[at + 1 :]])
    assert refusal(log.env, value).position >= 0


def test_a_producers_last_batch_that_was_dropped_is_found() -> None:
    log, value = handed()
    at = batch_of(log, value, 18)
    forge(log.env, value, lambda batches: [*batches[:at], *batches[at + 1 :]])
    assert refusal(log.env, value).position >= 0


def test_the_last_batch_of_a_log_that_ends_here_stays_if_need_be_empty() -> None:
    env = MemoryEnv()
    parts = [segment(0, [batch(record(0, "a"))], 1), segment(1, [batch(record(1, None))], 2)]
    job = clean_job([write_segments(env, parts)], log_end_offset_is_end=True)
    value = hand_back(env, job)
    assert verify(env, value).report.records_after == 1
    forge(env, value, lambda batches: batches[:1])
    assert refusal(env, value).position > 0


@MAPS
def test_an_aborted_record_that_was_kept_is_found(map_bytes: int) -> None:
    log, value = handed(map_bytes)
    aborted = build_batch(
        [Record(9, NOW_MS, b"b", b"aborted"), Record(10, NOW_MS, b"z", b"aborted")],
        producer_id=2,
        producer_epoch=0,
        base_sequence=0,
        attributes=TRANSACTIONAL,
    )
    at = batch_of(log, value, 9)  # stands there empty
    forge(log.env, value, lambda log: [*log[:at], bytes(aborted), *log[at + 1 :]])
    assert refusal(log.env, value).position >= 0


def test_an_offset_beyond_the_horizon_is_found() -> None:
    log, value = handed()
    beyond = batch(record(value.job.end_offset, "q"))
    forge(log.env, value, lambda batches: [*batches, beyond])
    error = refusal(log.env, value)
    assert error.reason == "the file is too long"


# What surrounds the batches


@pytest.mark.parametrize(
    "kind", [filenames.LOG, filenames.INDEX, filenames.TIME_INDEX, filenames.TXN_INDEX]
)
@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data + b"\0",
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data + data,
        lambda data: bytes(len(data)),
    ],
    ids=["longer", "shorter", "empty", "twice", "zeros"],
)
def test_a_file_of_another_length_or_content_is_found(
    change: Callable[[bytes], bytes], reported: bool, kind: str
) -> None:
    log, value = handed()
    path = value.path(kind)
    put(log.env, path, change(log.env.read_file(path)))
    if reported:
        value.describe(log.env)
    assert refusal(log.env, value).path == path


@pytest.mark.parametrize("kind", [filenames.LOG, filenames.INDEX, filenames.TXN_INDEX])
def test_a_missing_file_is_found(kind: str) -> None:
    log, value = handed()
    log.env.unlink(value.path(kind))
    assert "file is missing" in refusal(log.env, value).reason


def test_nothing_but_the_names_of_the_engine_is_opened() -> None:
    log, value = handed()
    output = value.groups[0].output
    assert output is not None
    file = replace(output.files[0], name="../../../secret")
    value.claim(0, output=replace(output, files=(file, *output.files[1:])))
    opened = []
    log.env.fail_on(lambda _, path: opened.append(path) or False, 5)  # type: ignore[func-returns-value]
    assert "output is" in refusal(log.env, value).reason
    assert not [path for path in opened if "secret" in path]


@pytest.mark.parametrize("name", ["bytes_before", "bytes_after", "records_before", "records_after"])
def test_a_number_that_is_told_wrong_is_found(name: str) -> None:
    log, value = handed()
    value.claim(0, **{name: getattr(value.groups[0], name) + 1})
    assert refusal(log.env, value).reason.startswith(f"{name} is ")


# Groups


def three_groups() -> tuple[MemoryEnv, StagedOutputs]:
    """Of four, one of which is left as it is."""
    env = MemoryEnv()
    parts = [
        segment(0, [batch(record(0, "a"), record(1, "b"))], 2),
        segment(2, [batch(record(2, "c"))], 3),
        segment(3, [batch(record(3, "b"), record(4, "b"))], 5),
        segment(5, [batch(record(5, "a"), record(6, "a"))], 7),
    ]
    job = clean_job([[source] for source in write_segments(env, parts)])
    value = hand_back(env, job)
    assert [group.source_base_offsets for group in value.groups] == [(0,), (3,), (5,)]
    assert value.groups[0].output is None
    verify(env, value)
    return env, value


def arranged(value: StagedOutputs, *order: int) -> None:
    value.groups[:] = [value.groups[at] for at in order]
    value.folders[:] = [value.folders[at] for at in order]


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ((0, 1), "the group of segment 5 is missing"),
        ((1, 2), "the next group is that of segment 3, the job's is that of segment 0"),
        ((0, 2), "the next group is that of segment 5, the job's is that of segment 3"),
        ((), "the group of segment 0 is missing"),
        ((0, 1, 1, 2), "segment 3 comes after segment 3"),
        ((0, 2, 1), "segment 3 comes after segment 5"),
    ],
)
def test_a_group_that_is_missing_there_twice_or_out_of_order_is_found(
    order: tuple[int, ...], reason: str
) -> None:
    env, value = three_groups()
    arranged(value, *order)
    assert refusal(env, value).reason == reason


def test_a_group_that_the_job_leaves_as_it_is_is_not_taken() -> None:
    env, value = three_groups()
    extra = CleanedGroup((2,), None, value.job.groups[1][0].size_bytes, 0, 1, 0)
    value.groups.insert(1, extra)
    value.folders.insert(1, ELSEWHERE)
    assert "that of segment 2" in refusal(env, value).reason
    arranged(value, 0, 2, 3, 1)
    value.claim(3, source_base_offsets=(7,))
    assert refusal(env, value).reason == "the job makes no group of segment 7"


def test_groups_joined_or_cut_otherwise_are_not_taken() -> None:
    env, value = three_groups()
    sources = [source for group in value.job.groups for source in group]
    joined = hand_back(env, value.job, groups=(tuple(sources),))
    assert "segments 0 to 5" in refusal(env, joined).reason
    value.claim(0, source_base_offsets=())
    assert refusal(env, value).reason == "a group has no sources"


def test_every_group_needs_its_folder() -> None:
    env, entry = three_groups()
    entry.folders.pop()
    assert refusal(env, entry).reason == "3 groups in 2 folders"


def test_an_emptied_group_that_is_said_to_leave_something_is_found_and_the_other_way_round() -> (
    None
):
    env, value = three_groups()
    emptied, last = value.groups[0], value.groups[2]
    value.claim(0, output=last.output)
    assert refusal(env, value).reason.startswith("output is ")
    value.groups[0] = emptied
    value.claim(2, output=None)
    assert refusal(env, value).reason.startswith(("output is ", "the file is missing"))
