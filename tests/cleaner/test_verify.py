"""Outputs that were made elsewhere: each way in which they can be wrong, planted and found.

Whoever forges does it well: indexes, sizes, checksums and counts fit what was forged.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cleaner.engine.kernels import fields, shards, warm_up
from cleaner.engine.kernels import verify as verify_kernels
from cleaner.engine.verify_scratch import Rows, Scratch, SpillingMap
from cleaner.job import CleanAbortedError, CleanedGroup
from cleaner.verification import InvalidOutputError
from cleaner.workers.process import spawn_process
from cleaner.workers.solo import JobFailedError, solo_worker
from cleaner.workers.throttle import UNLIMITED, BrokerSide, Direction
from storage import filenames
from storage.batch import (
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
    Record,
    build_batch,
    decode_records,
    empty_batch,
    read_header,
)
from storage.compression import ZSTD
from storage.env import RealEnv
from storage.model import TopicPartition
from tests.support.clean_cases import batch, damaged, record, three_segments
from tests.support.cleaning import (
    DIRECTORY,
    NOW_MS,
    Recorder,
    clean_job,
    segment,
    write_segments,
)
from tests.support.compacted_log import CompactedLog, Producer
from tests.support.memory_env import MemoryEnv
from tests.support.swaps import put
from tests.support.verifying import Handed, forge, hand_back, refusal, verify

Change = Callable[[list[bytes]], list[bytes]]
ELSEWHERE = f"{DIRECTORY}/varve.offline/run1/out/0"
# As many keys as fit, and all of them: whoever is checked in rounds is checked as well.
MAPS = pytest.mark.parametrize("map_bytes", [72, 1 << 20])


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
        return [rebuilt(one, change) if at == number else one for at, one in enumerate(log)]

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
        return [made if at == number else one for at, one in enumerate(log)]

    return changed


def written() -> CompactedLog:
    """Three segments: keys with two lives, packed batches, an aborted transaction, tombstones."""
    log = CompactedLog()
    plain, rolled_back, done = Producer(1, is_transactional=False), Producer(2), Producer(3)
    log.put(("a", "old"), ("b", "only"), ("c", "old"), by=plain)  # 0
    log.put(("d", "old"), ("e", "only"), codec=ZSTD)  # 3
    log.put(("f", "deleted soon"))  # 5
    log.put(("g", None))  # 6
    log.roll()
    log.clean()  # the tombstone has a horizon from here on
    log.dirty = 0
    log.now_ms += 1
    log.put(("a", "new"), ("c", "new"))  # 7
    log.put(("b", "aborted"), ("z", "aborted"), by=rolled_back)  # 9
    log.abort(rolled_back)  # 11
    log.roll()
    log.put(("d", "new"), ("h", "only"), codec=ZSTD)  # 12
    log.put(("f", None), ("i", "only"))  # 14
    log.put(("a", "newest"), by=done)  # 16
    log.commit(done)  # 17
    log.put(("c", "passing"), by=plain)  # 18: its last batch, and empty in the end
    log.put(("c", "newest"))  # 19
    log.roll()
    return log


def handed(map_bytes: int = 1 << 20, **changes: object) -> tuple[CompactedLog, Handed]:
    log = written()
    job = log.job(dedupe_buffer_bytes=map_bytes, index_interval_bytes=0, **changes)  # type: ignore[arg-type]
    return log, hand_back(log.env, job)


def batch_of(log: CompactedLog, given: Handed, offset: int) -> int:
    """Which batch of the output holds an offset."""
    found: list[int] = []

    def look(batches: list[bytes]) -> list[bytes]:
        headers = [read_header(one) for one in batches]
        found.extend(
            at for at, one in enumerate(headers) if one.base_offset <= offset <= one.last_offset
        )
        return batches

    forge(log.env, given, look)
    assert len(found) == 1, offset
    return found[0]


def without(offset: int) -> Callable[[list[Record]], list[Record]]:
    return lambda records: [one for one in records if one.offset != offset]


def and_also(extra: Record) -> Callable[[list[Record]], list[Record]]:
    return lambda records: sorted([*records, extra], key=lambda one: one.offset)


def moved(records: list[Record]) -> list[Record]:
    return [one._replace(offset=one.offset + 1) for one in records]


def revalued(records: list[Record]) -> list[Record]:
    return [one._replace(value=b"other") for one in records]


def retimed(records: list[Record]) -> list[Record]:
    return [one._replace(timestamp=one.timestamp + 1) for one in records]


@MAPS
def test_what_the_engine_leaves_is_taken(map_bytes: int) -> None:
    log, given = handed(map_bytes)
    assert verify(log.env, given).rounds > 1 or map_bytes > 72
    forge(log.env, given, lambda batches: batches)
    report = verify(log.env, given)
    output = given.groups[0].output
    assert output is not None
    assert report.bytes_compared == sum(file.size_bytes for file in output.files)
    assert report.report.next_dirty_offset == given.job.end_offset


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
    log, given = handed(map_bytes)
    at = batch_of(log, given, 1)
    forge(log.env, given, FORGERIES[name](at))
    assert refusal(log.env, given).position >= 0


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
    log, given = handed(map_bytes)
    at = batch_of(log, given, offset)
    forge(log.env, given, change(at, without(offset)))
    assert refusal(log.env, given).position >= 0


def test_a_tombstone_kept_beyond_its_horizon_is_found() -> None:
    log = written()
    log.pass_retention()
    job = log.job()
    kept = hand_back(log.env, job, now_ms=job.now_ms - 10**9, delete_retention_ms=10**9 + 10_000)
    assert refusal(log.env, kept).position >= 0
    assert verify(log.env, hand_back(log.env, job)).report.tombstones_removed == 1


@pytest.mark.parametrize("marker", [11, 17])
def test_a_marker_that_was_dropped_is_found(marker: int) -> None:
    log, given = handed()
    at = batch_of(log, given, marker)
    forge(log.env, given, lambda batches: [*batches[:at], *batches[at + 1 :]])
    assert refusal(log.env, given).position >= 0


def test_a_producers_last_batch_that_was_dropped_is_found() -> None:
    log, given = handed()
    at = batch_of(log, given, 18)
    forge(log.env, given, lambda batches: [*batches[:at], *batches[at + 1 :]])
    assert refusal(log.env, given).position >= 0


def test_the_last_batch_of_a_log_that_ends_here_stays_if_need_be_empty() -> None:
    env = MemoryEnv()
    parts = [segment(0, [batch(record(0, "a"))], 1), segment(1, [batch(record(1, None))], 2)]
    job = clean_job([write_segments(env, parts)], log_end_offset_is_end=True)
    given = hand_back(env, job)
    assert verify(env, given).report.records_after == 1
    forge(env, given, lambda batches: batches[:1])
    assert refusal(env, given).position > 0


@MAPS
def test_an_aborted_record_that_was_kept_is_found(map_bytes: int) -> None:
    log, given = handed(map_bytes)
    aborted = build_batch(
        [Record(9, NOW_MS, b"b", b"aborted"), Record(10, NOW_MS, b"z", b"aborted")],
        producer_id=2,
        producer_epoch=0,
        base_sequence=0,
        attributes=TRANSACTIONAL,
    )
    at = batch_of(log, given, 9)  # stands there empty
    forge(log.env, given, lambda log: [*log[:at], bytes(aborted), *log[at + 1 :]])
    assert refusal(log.env, given).position >= 0


def test_an_offset_beyond_the_horizon_is_found() -> None:
    log, given = handed()
    beyond = batch(record(given.job.end_offset, "q"))
    forge(log.env, given, lambda batches: [*batches, beyond])
    found = refusal(log.env, given)
    assert found.reason == "the job leaves nothing behind this byte"


# What surrounds the batches


@pytest.mark.parametrize(
    "kind", [filenames.LOG, filenames.INDEX, filenames.TIME_INDEX, filenames.TXN_INDEX]
)
@pytest.mark.parametrize("told", [False, True])
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
    change: Callable[[bytes], bytes], told: bool, kind: str
) -> None:
    log, given = handed()
    path = given.path(kind)
    put(log.env, path, change(log.env.read_file(path)))
    if told:
        given.describe(log.env)
    assert refusal(log.env, given).path == path


@pytest.mark.parametrize("kind", [filenames.LOG, filenames.INDEX, filenames.TXN_INDEX])
def test_a_missing_file_is_found(kind: str) -> None:
    log, given = handed()
    log.env.unlink(given.path(kind))
    assert "no such file" in refusal(log.env, given).reason


def test_nothing_but_the_names_of_the_engine_is_opened() -> None:
    log, given = handed()
    output = given.groups[0].output
    assert output is not None
    file = replace(output.files[0], name="../../../secret")
    given.claim(0, output=replace(output, files=(file, *output.files[1:])))
    opened = []
    log.env.fail_on(lambda _, path: opened.append(path) or False, 5)  # type: ignore[func-returns-value]
    assert "output is" in refusal(log.env, given).reason
    assert not [path for path in opened if "secret" in path]


@pytest.mark.parametrize("name", ["bytes_before", "bytes_after", "records_before", "records_after"])
def test_a_number_that_is_told_wrong_is_found(name: str) -> None:
    log, given = handed()
    given.claim(0, **{name: getattr(given.groups[0], name) + 1})
    assert refusal(log.env, given).reason.startswith(f"{name} is ")


# Groups


def three_groups() -> tuple[MemoryEnv, Handed]:
    """Of four, one of which is left as it is."""
    env = MemoryEnv()
    parts = [
        segment(0, [batch(record(0, "a"), record(1, "b"))], 2),
        segment(2, [batch(record(2, "c"))], 3),
        segment(3, [batch(record(3, "b"), record(4, "b"))], 5),
        segment(5, [batch(record(5, "a"), record(6, "a"))], 7),
    ]
    job = clean_job([[source] for source in write_segments(env, parts)])
    given = hand_back(env, job)
    assert [group.source_base_offsets for group in given.groups] == [(0,), (3,), (5,)]
    assert given.groups[0].output is None
    verify(env, given)
    return env, given


def arranged(given: Handed, *order: int) -> None:
    given.groups[:] = [given.groups[at] for at in order]
    given.folders[:] = [given.folders[at] for at in order]


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ((0, 1), "the group of segment 5 is missing"),
        ((1, 2), "the next group is that of segment 3, the job's is that of segment 0"),
        ((0, 2), "the next group is that of segment 5, the job's is that of segment 3"),
        ((), "the group of segment 0 is missing"),
        ((0, 1, 1, 2), "segment 3 comes behind segment 3"),
        ((0, 2, 1), "segment 3 comes behind segment 5"),
    ],
)
def test_a_group_that_is_missing_there_twice_or_out_of_order_is_found(
    order: tuple[int, ...], reason: str
) -> None:
    env, given = three_groups()
    arranged(given, *order)
    assert refusal(env, given).reason == reason


def test_a_group_that_the_job_leaves_as_it_is_is_not_taken() -> None:
    env, given = three_groups()
    extra = CleanedGroup((2,), None, given.job.groups[1][0].size_bytes, 0, 1, 0)
    given.groups.insert(1, extra)
    given.folders.insert(1, ELSEWHERE)
    assert "that of segment 2" in refusal(env, given).reason
    arranged(given, 0, 2, 3, 1)
    given.claim(3, source_base_offsets=(7,))
    assert refusal(env, given).reason == "the job makes no group of segment 7"


def test_groups_joined_or_cut_otherwise_are_not_taken() -> None:
    env, given = three_groups()
    sources = [source for group in given.job.groups for source in group]
    joined = hand_back(env, given.job, groups=(tuple(sources),))
    assert "segments 0 to 5" in refusal(env, joined).reason
    given.claim(0, source_base_offsets=())
    assert refusal(env, given).reason == "a group of nothing"


def test_every_group_needs_its_folder() -> None:
    env, given = three_groups()
    given.folders.pop()
    assert refusal(env, given).reason == "3 groups in 2 folders"


def test_an_emptied_group_that_is_said_to_leave_something_is_found_and_the_other_way_round() -> (
    None
):
    env, given = three_groups()
    emptied, last = given.groups[0], given.groups[2]
    given.claim(0, output=last.output)
    assert refusal(env, given).reason.startswith("output is ")
    given.groups[0] = emptied
    given.claim(2, output=None)
    assert refusal(env, given).reason.startswith(("output is ", "there is no such file"))


# Damage, what has expired, limits


@MAPS
@pytest.mark.parametrize("first_dirty", [0, 4])
def test_sources_that_are_damaged_leave_the_same_there_and_here(
    first_dirty: int, map_bytes: int
) -> None:
    env = MemoryEnv()
    parts = three_segments(damaged(batch(record(3, "b"))))
    job = clean_job(
        [write_segments(env, parts)], first_dirty_offset=first_dirty, dedupe_buffer_bytes=map_bytes
    )
    given = hand_back(env, job)
    assert given.report.damaged
    assert verify(env, given).report.damaged == given.report.damaged


def test_a_job_over_what_has_expired_is_checked_too() -> None:
    log = written()
    log.clean()
    log.pass_retention()
    sources = log.sources()
    end = sources[-1].next_base_offset
    job = log.job(
        groups=[(source,) for source in sources], expired_only=True,
        first_dirty_offset=end, end_offset=end,
    )  # fmt: skip
    given = hand_back(log.env, job)
    assert given.groups
    assert verify(log.env, given).rounds == 1
    early = hand_back(log.env, replace(job, now_ms=job.now_ms - 10**9), now_ms=job.now_ms)
    assert refusal(log.env, early)


@MAPS
def test_an_input_that_is_gone_is_not_taken_for_an_empty_one(map_bytes: int) -> None:
    log = written()
    job = log.job(dedupe_buffer_bytes=map_bytes, singly=True)
    gone = f"{job.directory}/{filenames.file_name(0, filenames.LOG)}"
    data = log.env.read_file(gone)
    log.env.unlink(gone)
    given = hand_back(log.env, job)
    assert given.groups[0].output is None, "as if retention had taken it"
    assert refusal(log.env, given).path == gone
    put(log.env, gone, data)
    assert refusal(log.env, given).path != gone

    class Unlinks(Recorder):
        def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
            if log.env.exists(gone) and stage == "rewrite" and done_bytes == total_bytes:
                log.env.unlink(gone)

    given = hand_back(log.env, job)
    with pytest.raises(InvalidOutputError) as refused:
        verify(log.env, given, Unlinks())
    assert refused.value.path == gone


def test_a_map_for_one_key_is_enough() -> None:
    env = MemoryEnv()
    job = clean_job([write_segments(env, three_segments(batch(record(3, "b"))))])
    given = hand_back(env, job)
    given.job = replace(job, dedupe_buffer_bytes=0)
    assert verify(env, given).rounds >= 2


@MAPS
def test_what_is_read_is_charged_and_nothing_is_written(map_bytes: int) -> None:
    log, given = handed(map_bytes)
    control = Recorder()
    report = verify(log.env, given, control)
    sources = sum(source.size_bytes for group in given.job.groups for source in group)
    assert report.bytes_compared + 2 * sources <= control.charged_read
    noted = (24 + 8) * given.job.end_offset
    assert control.charged_write <= (0 if map_bytes > 72 else noted)
    assert control.stages


@MAPS
@pytest.mark.parametrize("after", range(0, 8, 2))
def test_it_stops_when_asked_to_and_leaves_nothing_behind(after: int, map_bytes: int) -> None:
    log, given = handed(map_bytes)
    before = log.env.listdir(given.job.directory)
    with pytest.raises(CleanAbortedError):
        verify(log.env, given, Recorder(abort_after=after))
    assert log.env.listdir(given.job.directory) == before


def test_verified_files_are_durable_with_their_names_and_have_the_engines_times() -> None:
    log, given = handed()
    path = given.path()
    log.env.set_mtime_ms(path, 5)
    names = [given.path(kind) for kind in (filenames.LOG, filenames.INDEX, filenames.TXN_INDEX)]
    contents = {name: log.env.read_file(name) for name in names}
    for name, data in contents.items():  # written anew, and not synced
        put(log.env, name, data)
    verify(log.env, given)
    assert log.env.mtime_ms(path) == given.job.groups[-1][-1].last_modified_ms
    operations = log.env.history
    for name in names:
        assert ("sync", name) in operations
    assert operations[-1] == ("sync_dir", given.folders[0])


def test_a_disk_that_fails_is_no_fault_of_the_outputs() -> None:
    log, given = handed()
    log.env.fail_on(lambda operation, path: operation == "pread" and path == given.path(), 5)
    with pytest.raises(OSError, match="Input/output"):
        verify(log.env, given)


def test_the_map_takes_no_more_than_the_job_allows_but_for_a_batch_with_more_keys() -> None:
    env = MemoryEnv()
    job = clean_job(
        [write_segments(env, [segment(0, [batch(record(0, "a"))], 10**6)])],
        dedupe_buffer_bytes=24 * 1_000_000,
    )
    scratch = Scratch(env, job, Recorder())
    rows = Rows(scratch, 4)
    keys = SpillingMap(job, 10**6 * 5, rows)
    rng = np.random.default_rng(1)
    for first in range(0, 2_400_000, 60_000):
        ones, twos = rng.integers(0, (1 << 64) - 1, (2, 60_000), dtype=np.uint64)
        put = keys.put(ones, twos, np.arange(first, first + 60_000, dtype=np.int64))
        assert put == 60_000
        assert keys.state[fields.SLOTS] <= 1_000_000
    assert keys.spilled + keys.entries == 2_400_000
    assert sum(rows.count(shard) for shard in range(4)) == keys.spilled > 0
    scratch.close()


def test_warming_up_compiles_all_that_a_check_calls() -> None:
    warm_up()
    kernels = [
        shards.count_by_shard,
        shards.sort_by_shard,
        shards.merge_rows,
        shards.list_batches,
        shards.list_unpacked,
        shards.list_unknown,
        verify_kernels.set_bits,
    ]
    compiled = [len(kernel.signatures) for kernel in kernels]  # type: ignore[attr-defined]
    for dirty in (0, 12):
        log, given = handed(72, first_dirty_offset=dirty)
        verify(log.env, given)
    assert [len(kernel.signatures) for kernel in kernels] == compiled  # type: ignore[attr-defined]
    assert all(compiled)


# In a worker


class Unlimited:
    """Grants everything."""

    def join(self, index: int, side: BrokerSide, now: float) -> None:
        side.grant(Direction.READ, UNLIMITED)
        side.grant(Direction.WRITE, UNLIMITED)

    def leave(self, index: int, now: float) -> None:
        pass


def on_disk(folder: str) -> Handed:
    """What `handed` makes, as files of the system."""
    log, given = handed()
    env = RealEnv()
    moved_to = {}
    for place in (given.job.directory, *given.folders):
        moved_to[place] = f"{folder}/{place}"
        env.mkdir(moved_to[place])
        for name in log.env.listdir(place):
            if not log.env.is_dir(f"{place}/{name}"):
                put(env, f"{moved_to[place]}/{name}", log.env.read_file(f"{place}/{name}"))
    job = replace(
        given.job,
        directory=moved_to[given.job.directory],
        partition=TopicPartition("topic", 0),
    )
    return Handed(job, given.groups, [moved_to[one] for one in given.folders], given.report)


async def test_a_worker_process_verifies_refuses_and_goes_on(tmp_path: object) -> None:
    given = on_disk(str(tmp_path))
    async with solo_worker(
        spawn_process, 0, index=0, budgets=Unlimited(), top_up=lambda now: None
    ) as worker:
        async with asyncio.timeout(300):
            report = await worker.verify(given.job, given.groups, given.folders)
        assert report.report.records_after == given.report.records_after
        path = given.path()
        env = RealEnv()
        put(env, path, env.read_file(path)[:70] + b"!" + env.read_file(path)[71:])
        async with asyncio.timeout(60):
            with pytest.raises(InvalidOutputError) as refused:
                await worker.verify(given.job, given.groups, given.folders)
        assert (refused.value.path, refused.value.position) == (path, 70)
        gone = replace(given.job, directory=f"{tmp_path}/nowhere")
        async with asyncio.timeout(60):
            with pytest.raises((JobFailedError, InvalidOutputError)):
                await worker.verify(gone, given.groups, given.folders)
        worker.abort()
        with pytest.raises(CleanAbortedError):
            await worker.verify(given.job, given.groups, given.folders)
