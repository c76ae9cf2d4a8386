"""Damaged batches: which bytes are refused to readers, and that everything else is served."""

from dataclasses import replace

import pytest

from storage.env import File
from storage.errors import DamagedSegmentError
from storage.format.batch import BATCH_LENGTH_MIN, HEADER_BYTES, Record, build_batch, crc_of
from storage.format.compression import GZIP
from storage.format.filenames import LOG, file_name
from storage.log.log import Log
from storage.model import TimestampOffset
from storage.segments.batch_scan import find_batch
from storage.segments.segment import Segment
from tests.support.storage.logs import (
    FOLDER,
    NOW_MS,
    SMALL,
    append,
    append_batch,
    batch_of,
    fill,
    offsets_in,
    open_log,
    overwrite,
    value_at,
)
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put
from tests.support.storage.timestamps import first_since

BATCH_BYTES = len(batch_of(value_at(0)))
FIRST = file_name(0, LOG)
PATH = f"{FOLDER}/{FIRST}"
ONE_SEGMENT = replace(SMALL, segment_bytes=1 << 20)
# A base offset or a leader epoch that changed does not show: no checksum covers them.
COVERED = [*range(8, 12), *range(16, BATCH_BYTES)]


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=11)


def filled(env: MemoryEnv, batches: int = 6, **config: int) -> Log:
    """One closed segment of single-record batches, and an empty active one."""
    log = open_log(env, replace(ONE_SEGMENT, **config))
    fill(log, batches)
    log.roll(NOW_MS)
    return log


def flip(env: MemoryEnv, position: int) -> None:
    byte = env.read_file(PATH)[position]
    overwrite(env, FIRST, bytes([byte ^ 0x15]), position)


def is_refused(log: Log, offset: int) -> bool:
    try:
        log.reader.read(offset, 1 << 20, end_offset=log.high_watermark)
    except DamagedSegmentError:
        return True
    return False


@pytest.mark.parametrize("interval", [0, 1 << 20], ids=["indexed", "not indexed"])
def test_whichever_byte_of_a_batch_flips_all_others_are_served(interval: int) -> None:
    for at in COVERED:
        env = MemoryEnv()
        log = filled(env, index_interval_bytes=interval)
        flip(env, 2 * BATCH_BYTES + at)
        damaged_segment = log.damage.mark(PATH, 2 * BATCH_BYTES, "the cleaner says so")
        assert damaged_segment is not None
        assert not damaged_segment.is_served
        assert [is_refused(log, offset) for offset in range(6)] == [
            False, False, True, False, False, False,
        ], at  # fmt: skip
        (damage,) = log.damage.ranges
        assert (damage.first_offset, damage.next_offset) == (2, 3), at
        assert (damage.position, damage.end_position) == (2 * BATCH_BYTES, 3 * BATCH_BYTES), at
        assert len(log.reader.read(0, 1 << 20, end_offset=6).read()) == 2 * BATCH_BYTES
        assert offsets_in(log, start=3) == [3, 4, 5]


@pytest.mark.parametrize("max_bytes", [2 * BATCH_BYTES + 1, 1 << 20])
@pytest.mark.parametrize("at", [8, 16])
def test_a_reader_that_meets_a_damaged_header_gets_what_is_before_it(
    env: MemoryEnv, at: int, max_bytes: int
) -> None:
    log = filled(env, index_interval_bytes=1 << 20)
    flip(env, 2 * BATCH_BYTES + at)
    data = log.reader.read(0, max_bytes, end_offset=6).read()
    assert data.startswith(env.read_file(PATH)[: 2 * BATCH_BYTES])
    with pytest.raises(DamagedSegmentError) as caught:
        log.reader.read(2, max_bytes, end_offset=6)
    assert caught.value.position == 2 * BATCH_BYTES
    assert offsets_in(log, start=3) == [3, 4, 5]


@pytest.mark.parametrize("interval", [0, 1 << 20], ids=["indexed", "not indexed"])
@pytest.mark.parametrize("claimed", [-40, 3, BATCH_BYTES + 7, 2 * BATCH_BYTES + 50])
def test_a_length_that_lies_costs_only_its_own_batch(
    env: MemoryEnv, claimed: int, interval: int
) -> None:
    log = filled(env, 8, index_interval_bytes=interval)
    length = BATCH_BYTES - 12 + claimed
    overwrite(env, FIRST, length.to_bytes(4, "big"), 2 * BATCH_BYTES + 8)
    assert [is_refused(log, offset) for offset in (7, 3, 4, 5, 6)] == [False] * 5
    data = log.reader.read(0, 4 * BATCH_BYTES, end_offset=8).read()
    assert data.startswith(env.read_file(PATH)[: 2 * BATCH_BYTES])
    log.damage.mark(PATH, 2 * BATCH_BYTES, "what the cleaner says")
    assert [offset for offset in range(8) if is_refused(log, offset)] == [2]
    (damage,) = log.damage.ranges
    assert (damage.position, damage.end_position) == (2 * BATCH_BYTES, 3 * BATCH_BYTES)
    assert offsets_in(log, start=3) == [3, 4, 5, 6, 7]


def test_damage_that_a_reader_meets_begins_with_the_batch_whose_length_lies(
    env: MemoryEnv,
) -> None:
    log = filled(env, 8, index_interval_bytes=1 << 20)
    overwrite(env, FIRST, (2 * BATCH_BYTES).to_bytes(4, "big"), 2 * BATCH_BYTES + 8)
    assert offsets_in(log, start=3) == [3, 4, 5, 6, 7], "met on the way to offset 3"
    (damage,) = log.damage.ranges
    assert (damage.position, damage.end_position) == (2 * BATCH_BYTES, 3 * BATCH_BYTES)
    assert is_refused(log, 2)


def test_damage_at_the_end_of_a_segment_ends_with_the_segment(env: MemoryEnv) -> None:
    log = filled(env)
    fill(log, 2)
    flip(env, 5 * BATCH_BYTES + 16)
    marked = log.damage.mark(PATH, 5 * BATCH_BYTES, "no batch")
    (damage,) = log.damage.ranges
    assert (damage.first_offset, damage.next_offset) == (5, 6)
    assert marked == damage
    assert [is_refused(log, offset) for offset in (4, 5, 6)] == [False, True, False]
    assert offsets_in(log, start=6) == [6, 7]


def test_two_damaged_batches_are_two_ranges(env: MemoryEnv) -> None:
    log = filled(env, index_interval_bytes=1 << 20)
    for index in (1, 3):
        flip(env, index * BATCH_BYTES + 10)  # lengths
    for index in (3, 1):
        log.damage.mark(PATH, index * BATCH_BYTES, "no batch")
    assert [(damage.first_offset, damage.next_offset) for damage in log.damage.ranges] == [
        (1, 2),
        (3, 4),
    ]
    assert [offset for offset in range(6) if is_refused(log, offset)] == [1, 3]


def test_a_record_that_holds_a_batch_is_not_taken_for_one(env: MemoryEnv) -> None:
    log = open_log(env, ONE_SEGMENT)
    fill(log, 2)
    hidden = bytes(build_batch([Record(2, NOW_MS, b"key", b"never appended")]))
    append(log, hidden)
    fill(log, 2)
    log.roll(NOW_MS)
    flip(env, 2 * BATCH_BYTES + 8)  # its length: nothing tells where the next batch begins
    log.damage.mark(PATH, 2 * BATCH_BYTES, "no batch")
    (damage,) = log.damage.ranges
    assert (damage.first_offset, damage.next_offset) == (2, 3)
    assert offsets_in(log, start=3) == [3, 4]


@pytest.mark.parametrize("interval", [0, 500])
def test_a_batch_in_a_record_is_not_served_where_the_index_knows_the_next_one(
    env: MemoryEnv, interval: int
) -> None:
    """Two in a row: what follows the first one looks like a batch, too."""
    log = open_log(env, replace(ONE_SEGMENT, index_interval_bytes=interval))
    fill(log, 5)
    hidden = [build_batch([Record(at, NOW_MS, b"key", b"never")]) for at in (5, 1000, 2000)]
    append(log, b"".join(hidden))
    fill(log, 10)
    log.roll(NOW_MS)
    position = 5 * BATCH_BYTES
    flip(env, position + 8)
    log.damage.mark(PATH, position, "no batch")
    assert [offset for offset in range(16) if is_refused(log, offset)] == [5]
    assert offsets_in(log, start=6) == list(range(6, 16))


def test_a_reader_that_meets_damage_does_not_have_the_segment_read_through(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = filled(env, batches=200, index_interval_bytes=2 * BATCH_BYTES)
    rebuilt: list[int] = []
    searched: list[int] = []
    monkeypatch.setattr(Segment, "rebuild", lambda segment: rebuilt.append(segment.base_offset))

    def search(file: File, position: int, end: int, offsets: range, *, is_border: bool) -> int:
        searched.append(end - position)
        return find_batch(file, position, end, offsets, is_border=is_border)

    monkeypatch.setattr("storage.segments.damage.find_batch", search)
    for index in range(50, 54):
        flip(env, index * BATCH_BYTES + 16)
    refused = [offset for offset in range(200) if is_refused(log, offset)]
    assert refused == [50, 51, 52, 53]
    assert not rebuilt
    assert sum(searched) < 40 * BATCH_BYTES


def test_a_search_reads_a_bounded_number_of_possible_batches(env: MemoryEnv) -> None:
    """A record may hold any number of headers without their batches."""
    header = bytes(batch_of(b"")[:HEADER_BYTES])
    header = header[:8] + BATCH_LENGTH_MIN.to_bytes(4, "big") + header[12:]
    put(env, "/hostile", header * 20_000)
    reads = 0

    def count(operation: str, _: str) -> bool:
        nonlocal reads
        reads += operation == "pread"
        return False

    env.fail_on(count, OSError())
    file = env.open("/hostile")
    assert find_batch(file, 1, file.size(), range(1 << 31)) == file.size()
    assert reads < 10_000


def test_an_offset_inside_damage_is_refused_where_the_index_has_an_entry_there(
    env: MemoryEnv,
) -> None:
    log = filled(env, batches=20)
    for index in (5, 6, 7):
        flip(env, index * BATCH_BYTES + 16)
    log.damage.mark(PATH, 5 * BATCH_BYTES, "no batch")
    assert [offset for offset in range(20) if is_refused(log, offset)] == [5, 6, 7]


def test_an_end_of_the_readable_offsets_inside_damage_hides_nothing_before_it(
    env: MemoryEnv,
) -> None:
    log = filled(env)
    flip(env, 3 * BATCH_BYTES + 70)
    log.damage.mark(PATH, 3 * BATCH_BYTES, "bad CRC")
    data = log.reader.read(0, 1 << 20, end_offset=3).read()  # an open transaction begins there
    assert len(data) == 3 * BATCH_BYTES


def test_a_lookup_by_time_passes_over_damage(env: MemoryEnv) -> None:
    log = open_log(env, ONE_SEGMENT)
    for offset in range(5):
        append(log, value_at(offset), timestamp=NOW_MS + offset)
    log.roll(NOW_MS)
    flip(env, 2 * BATCH_BYTES + 70)
    log.damage.mark(PATH, 2 * BATCH_BYTES, "bad CRC")
    assert first_since(log, NOW_MS + 2) == TimestampOffset(NOW_MS + 3, 3, 0)


def test_the_log_start_moves_past_damage_and_retention_takes_it(env: MemoryEnv) -> None:
    log = filled(env)
    append(log, b"later")
    flip(env, 2 * BATCH_BYTES + 10)
    log.damage.mark(PATH, 2 * BATCH_BYTES, "bad CRC")
    assert log.delete_records(3) == 3
    assert offsets_in(log) == [3, 4, 5, 6]
    assert log.delete_records(6) == 6
    assert [segment.facts.base_offset for segment in log.retention.expire(NOW_MS)] == [0]
    assert log.damage.ranges == ()
    assert offsets_in(log) == [6]


# --- what the cleaner cannot use, and readers can -------------------------------------------------


def oversize(log: Log, limit_bytes: int) -> None:
    batch = batch_of(bytes(limit_bytes + 1), codec=GZIP, timestamp=NOW_MS + 9)
    append_batch(log, batch)


def test_a_batch_that_the_cleaner_cannot_unpack_stays_readable(env: MemoryEnv) -> None:
    config = replace(ONE_SEGMENT, varve_decompressed_batch_bytes=4096)
    log = open_log(env, config)
    fill(log, 2)
    oversize(log, 4096)
    fill(log, 1)
    log.roll(NOW_MS)
    damage = log.damage.mark(PATH, 2 * BATCH_BYTES, "batch unpacks to more than 4096 bytes")
    assert damage is not None
    assert damage.is_served
    assert (damage.first_offset, damage.next_offset) == (2, 3)
    assert log.damage.ranges == ()
    assert log.damage.uncleanable == (damage,)
    assert offsets_in(log) == [0, 1, 2, 3]
    assert first_since(log, NOW_MS + 1) == TimestampOffset(NOW_MS + 9, 2, 0)
    log.update_config(replace(config, varve_decompressed_batch_bytes=8192))
    assert log.damage.uncleanable == (), "the next clean may be able to"


def test_records_that_contradict_their_batch_stay_readable_under_a_right_checksum(
    env: MemoryEnv,
) -> None:
    log = open_log(env, ONE_SEGMENT)
    lying = batch_of(value_at(0))
    lying[61] = 0x7F  # the length of the first record
    lying[17:21] = crc_of(lying, 0, len(lying)).to_bytes(4, "big")
    append_batch(log, lying)
    log.roll(NOW_MS)
    log.damage.mark(PATH, 0, "records that do not fill their batch")
    assert log.damage.ranges == ()
    assert log.reader.read(0, 1 << 20, end_offset=1).length == len(lying)


def test_a_finding_that_is_at_no_border_of_batches_is_damage(env: MemoryEnv) -> None:
    log = filled(env)
    damage = log.damage.mark(PATH, BATCH_BYTES + 5, "half a batch")
    assert damage is not None
    assert not damage.is_served


@pytest.mark.parametrize(
    ("length", "interval", "refused"),
    [(0, 0, [2, 4]), (1 << 30, 0, [2, 4]), (0, 1 << 20, [2, 3, 4]), (1 << 30, 1 << 20, [2, 4])],
    ids=["impossible, indexed", "possible, indexed", "impossible", "possible"],
)
def test_a_batch_between_two_lengths_that_lie_is_served_unless_it_may_be_bytes_in_a_record(
    env: MemoryEnv, length: int, interval: int, refused: list[int]
) -> None:
    """Neither the index nor a possible header after it shows that it is a batch: decision 0020."""
    log = filled(env, 8, index_interval_bytes=interval)
    for index in (2, 4):
        overwrite(env, FIRST, length.to_bytes(4, "big"), index * BATCH_BYTES + 8)
    log.damage.mark(PATH, 2 * BATCH_BYTES, "no batch")
    assert [offset for offset in range(8) if is_refused(log, offset)] == refused
    assert offsets_in(log, start=5) == [5, 6, 7]


def test_a_batch_in_a_record_in_front_of_an_impossible_length_is_not_served(
    env: MemoryEnv,
) -> None:
    log = open_log(env, replace(ONE_SEGMENT, index_interval_bytes=1 << 20))
    fill(log, 2)
    hidden = build_batch([Record(3, NOW_MS, b"key", b"never appended")])
    append(log, bytes(hidden + hidden[:8] + bytes(4) + hidden[12:]))
    fill(log, 3)
    log.roll(NOW_MS)
    overwrite(env, FIRST, bytes(4), 2 * BATCH_BYTES + 8)
    log.damage.mark(PATH, 2 * BATCH_BYTES, "no batch")
    assert [offset for offset in range(6) if is_refused(log, offset)] == [2]
    assert value_at(3) in log.reader.read(3, 1 << 20, end_offset=6).read()
