"""Segments with messages of formats 0 and 1, in a folder that is taken over from Kafka."""

import errno
from typing import Any

import pytest

from storage.env import write_file
from storage.errors import NoRoomError
from storage.format.batch import Record, build_batch
from storage.format.compression import GZIP, LZ4, NONE, SNAPPY
from storage.format.filenames import INDEX, LOG, TIME_INDEX, file_name
from storage.format.index import IndexLimits
from storage.recovery import old_segments
from storage.recovery.load_log import LoadedLog, load_log
from storage.recovery.old_segments import OldSegments, convert_old_segments
from tests.support.storage.logs import FOLDER, NOW_MS, headers_of, open_log, read_records
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash
from tests.support.storage.old_messages import old_messages
from tests.support.storage.timestamps import first_since

PATH = f"{FOLDER}/{file_name(0, LOG)}"


def records_from(first: int, count: int, *, step: int = 1) -> list[Record]:
    return [
        Record(offset, NOW_MS + offset, b"k%d" % (offset % 3), b"v%d" % offset)
        for offset in range(first, first + count * step, step)
    ]


def kafka_folder(env: MemoryEnv, *parts: bytes | bytearray) -> None:
    env.mkdir("/data")
    env.mkdir(FOLDER)
    write_file(env, PATH, b"".join(parts))
    for kind in (INDEX, TIME_INDEX):
        write_file(env, f"{FOLDER}/{file_name(0, kind)}", b"")
    env.settle()


def load(
    env: MemoryEnv, *, was_clean: bool = True, expected: OldSegments = OldSegments.ANY
) -> LoadedLog:
    return load_log(
        env,
        FOLDER,
        IndexLimits(4096, 1 << 20),
        was_clean=was_clean,
        recovery_point=0 if not was_clean else None,
        log_start_offset=None,
        old_segments=expected,
    )


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=4)


@pytest.mark.parametrize("was_clean", [True, False])
@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4])
def test_old_messages_of_kafka_are_served_with_their_offsets(
    env: MemoryEnv, codec: int, magic: int, was_clean: bool
) -> None:
    old, gaps, new = records_from(0, 5), records_from(7, 4, step=3), records_from(20, 2)
    kafka_folder(
        env, old_messages(old, magic, codec), old_messages(gaps, magic, codec), build_batch(new)
    )
    env.set_mtime_ms(PATH, NOW_MS)
    loaded = load(env, was_clean=was_clean)
    assert [note for note in loaded.notes if "converted" in note] == [
        f"{PATH}: 9 records converted from an old message format"
    ]
    log = open_log(env, was_clean=True, recovery_point=22)
    written = [r._replace(timestamp=r.timestamp if magic else -1) for r in (*old, *gaps)]
    assert read_records(log) == [*written, *new]
    assert not log.damage.ranges
    assert log.segment_facts()[0].last_modified_ms == NOW_MS
    if magic:
        found = first_since(log, NOW_MS + 8)
        assert found is not None
        assert found.offset == 10
    codecs = {header.codec for header in headers_of(env.read_file(PATH))[:-1]}
    assert codecs == {codec}


def test_append_times_stay(env: MemoryEnv) -> None:
    old = [
        old_messages(records_from(at, 1), 1, append_time=NOW_MS + late)
        for at, late in ((0, 50), (1, 50), (2, 60))
    ]
    kafka_folder(env, *old, old_messages(records_from(3, 1), 1))
    load(env)
    headers = headers_of(env.read_file(PATH))
    assert [(h.base_offset, h.max_timestamp, h.is_log_append_time) for h in headers] == [
        (0, NOW_MS + 50, True),
        (2, NOW_MS + 60, True),
        (3, NOW_MS + 3, False),
    ]


def test_many_messages_become_batches_of_some_size(env: MemoryEnv) -> None:
    records = [r._replace(value=b"x" * 500) for r in records_from(0, 1000)]
    kafka_folder(env, old_messages(records, 1))
    load(env)
    headers = headers_of(env.read_file(PATH))
    assert sum(header.record_count for header in headers) == 1000
    assert 5 < len(headers) < 20
    assert max(header.size_bytes for header in headers) <= 64 << 10


def test_a_torn_message_at_the_end_is_cut(env: MemoryEnv) -> None:
    old = old_messages(records_from(0, 3), 1)
    kafka_folder(env, old, old_messages(records_from(3, 1), 1)[:-2])
    loaded = load(env, was_clean=False)
    assert loaded.log_end_offset == 3
    log = open_log(env, recovery_point=3)
    assert read_records(log) == records_from(0, 3)


def test_messages_after_one_that_is_damaged_stay_as_they_are(env: MemoryEnv) -> None:
    first, third = old_messages(records_from(0, 3), 1), old_messages(records_from(4, 1), 1)
    second = bytearray(old_messages(records_from(3, 1), 1))
    second[-1] ^= 1
    kafka_folder(env, first, second, third, build_batch(records_from(5, 2)))
    loaded = load(env)
    assert "from byte" in loaded.notes[0]
    assert bytes(second) + third in env.read_file(PATH)
    log = open_log(env, was_clean=True, recovery_point=7)
    assert [record.offset for record in read_records(log, start=5)] == [5, 6]
    assert [damage.first_offset for damage in log.damage.ranges][:1] == [3]


def test_only_a_folder_that_was_taken_over_is_converted(env: MemoryEnv) -> None:
    kafka_folder(env, old_messages(records_from(0, 3), 1))
    before = env.read_file(PATH)
    load(env, expected=OldSegments.NONE)
    assert env.read_file(PATH) == before


def test_a_later_start_converts_what_was_not(env: MemoryEnv) -> None:
    """For example, for lack of room. It looks no further than the first segment of format v2."""
    kafka_folder(env, old_messages(records_from(0, 3), 1))
    paths = [f"{FOLDER}/{file_name(base_offset, LOG)}" for base_offset in (3, 5, 7)]
    write_file(env, paths[0], old_messages(records_from(3, 2), 1))
    write_file(env, paths[1], build_batch(records_from(5, 2)))
    write_file(env, paths[2], build_batch(records_from(7, 1)))
    env.settle()
    loaded = load(env, expected=OldSegments.FIRST)
    assert len([note for note in loaded.notes if "converted" in note]) == 2
    log = open_log(env, was_clean=True, recovery_point=8)
    assert read_records(log) == records_from(0, 8)
    assert not log.damage.ranges


def test_a_segment_whose_first_message_is_damaged_is_not_replaced(env: MemoryEnv) -> None:
    first = bytearray(old_messages(records_from(0, 1), 1))
    first[-1] ^= 1
    kafka_folder(env, first, old_messages(records_from(1, 3), 1))
    before = env.read_file(PATH)
    assert not [note for note in load(env).notes if "converted" in note]
    assert env.read_file(PATH) == before
    assert not [name for name in env.listdir(FOLDER) if "convert" in name]


def test_a_message_whose_size_is_damaged_is_not_read(env: MemoryEnv) -> None:
    """A flipped bit could make it two gigabytes long."""
    second = bytearray(old_messages(records_from(1, 1), 1))
    second[8] ^= 0x40
    kafka_folder(env, old_messages(records_from(0, 1), 1), second, bytes(3 << 20))
    reads: list[int] = []
    source = env.open(PATH)
    pread: Any = type(source).pread

    def counted(file: Any, size_bytes: int, position: int) -> bytes:
        reads.append(size_bytes)
        data: bytes = pread(file, size_bytes, position)
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(source), "pread", counted)
        convert_old_segments(env, FOLDER, [0], lambda: None, expected=OldSegments.ANY)
    assert max(reads) <= 1 << 20


def test_a_message_that_unpacks_to_more_than_any_batch_stays_as_it_is(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_segments, "UNPACKED_BYTES_MAX", 100)
    small, large = records_from(0, 1), records_from(1, 10)
    kafka_folder(env, old_messages(small, 1, GZIP), old_messages(large, 1, GZIP))
    loaded = load(env)
    assert "1 records converted from an old message format; from byte" in loaded.notes[0]
    assert old_messages(large, 1, GZIP) in env.read_file(PATH)


def test_without_room_the_segment_stays_as_it_is(env: MemoryEnv) -> None:
    kafka_folder(env, old_messages(records_from(0, 3), 1))
    before = env.read_file(PATH)
    env.fail_on(lambda op, path: op == "pwrite", errno.ENOSPC)
    with pytest.raises(NoRoomError):
        load(env)
    assert env.read_file(PATH) == before
    assert len(env.listdir(FOLDER)) == 3


@pytest.mark.parametrize("loses_power", [True, False])
def test_a_conversion_may_end_at_any_step(loses_power: bool) -> None:
    for step in range(1, 60):
        env = MemoryEnv(step)
        kafka_folder(env, old_messages(records_from(0, 5), 1), build_batch(records_from(5, 2)))
        env.crash_at = env.operations + step
        try:
            load(env)
        except SimulatedCrash:
            env = env.crash() if loses_power else env.kill()
            load(env, was_clean=False)
        else:
            assert step > 8
            return
        log = open_log(env, was_clean=True, recovery_point=7)
        assert read_records(log) == records_from(0, 7), env
        assert not log.damage.ranges, env
    raise AssertionError("the conversion takes more steps")
