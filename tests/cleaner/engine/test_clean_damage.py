"""Damaged sources stay unchanged, are reported, and cause no removal of records."""

import pytest

from cleaner.engine.clean import run_clean
from cleaner.engine.key_map import offset_map
from cleaner.job import UNKNOWN_HORIZON
from storage.format import filenames
from storage.format.batch import build_batch, crc_of, decode_records, read_header
from storage.format.compression import LZ4, NONE, compress
from tests.support.cleaner.clean_cases import (
    batch,
    damaged,
    leftovers,
    offsets,
    record,
    three_segments,
)
from tests.support.cleaner.cleaning import (
    DIRECTORY,
    NOW_MS,
    Recorder,
    batches_of,
    clean,
    clean_job,
    cleaned_log,
    output_bytes,
    segment,
    write_segments,
)
from tests.support.cleaner.compacted_log import CompactedLog
from tests.support.storage.logs import FOLDER
from tests.support.storage.memory_env import MemoryEnv

BATCH_BYTES = len(batch(record(3, "b")))


@pytest.mark.parametrize("first_dirty", [0, 4])
@pytest.mark.parametrize(
    ("middle", "sound_bytes"),
    [
        (damaged(batch(record(3, "b"))), 0),
        (damaged(batch(record(3, "b")), 16), 0),
        (batch(record(3, "b"))[:-1], 0),
        (batch(record(3, "b")) + bytes(30), BATCH_BYTES),
        (batch(record(1, "b")), 0),
        (batch(record(9, "b")), 0),
    ],
    ids=["checksum", "magic", "cut short", "zeros", "offset met before", "offset of the next"],
)
def test_a_damaged_segment_is_left_alone_and_the_rest_is_cleaned(
    middle: bytes, sound_bytes: int, first_dirty: int
) -> None:
    env = MemoryEnv()
    parts = three_segments(middle)
    job = clean_job([write_segments(env, parts)], first_dirty_offset=first_dirty)
    report, groups = clean(env, job)
    (where,) = report.damaged
    assert where[:2] == (f"{DIRECTORY}/{2:020d}.log", BATCH_BYTES + sound_bytes)
    assert report.next_dirty_offset == 2, "it is dirty as soon as it can be read"
    assert [group.source_base_offsets for group in groups] == [(0,), (4,)]
    assert groups[0].output is None
    last = output_bytes(env, groups[1])
    assert offsets(last) == [5, 6]
    assert not any(read_header(part).has_delete_horizon for part in batches_of(last)), (
        "what the tombstone deletes may still stand in the damaged segment"
    )
    assert leftovers(env) == sorted(
        filenames.cleaned_name(4, kind, "run1") for kind in (".log", ".index", ".timeindex")
    )


def test_a_batch_that_is_only_copied_is_verified_too() -> None:
    env = MemoryEnv()
    good, bad = batch(record(0, "a"), record(1, "b")), damaged(batch(record(2, "c")))
    job = clean_job([write_segments(env, [segment(0, [good, bad], 3)])], dedupe_buffer_bytes=24)
    report, groups = clean(env, job)
    assert report.damaged == (
        (f"{DIRECTORY}/{0:020d}.log", len(good), "the checksum does not match"),
    )
    assert groups == []
    assert report.next_dirty_offset == 0


@pytest.mark.parametrize("is_superseded", [False, True])
def test_a_wrong_bit_anywhere_in_a_clean_batch_is_damage_and_removes_nothing(
    *, is_superseded: bool
) -> None:
    """Above all in the number of records: a batch of one record must not pass for an empty one."""
    covered_from = 17  # the checksum itself, and all that it covers
    log = CompactedLog()
    log.write("a")
    size = log.log.segments.size_bytes
    for position in range(covered_from, size):
        log = CompactedLog()
        log.write("a")
        log.write("b")
        log.roll()
        log.clean()
        log.write(*("b", "a")[: 1 + is_superseded])
        log.roll()
        path = f"{FOLDER}/{0:020d}.log"
        data = bytearray(log.env.read_file(path))
        data[position] ^= 1
        log.env.open(path, write=True).pwrite(bytes(data), 0)
        report = run_clean(log.env, log.job(), Recorder())
        assert [damage.path for damage in report.damaged] == [path], position
        assert log.env.read_file(path) == data, position


def test_damage_behind_small_batches_does_not_change_what_is_kept_of_them() -> None:
    env = MemoryEnv()
    parts = [
        segment(0, [batch(record(i, f"k{i % 5}")) for i in range(10)], 10),
        segment(10, [batch(record(10, "k0")), damaged(batch(record(11, "k1")))], 12),
        segment(12, [batch(record(12, "k2"))], 13),
    ]
    sources = write_segments(env, parts)
    report, groups = clean(env, clean_job([sources], first_dirty_offset=12))
    assert [group.source_base_offsets for group in groups] == [(0,)]
    assert offsets(output_bytes(env, groups[0])) == [0, 1, 3, 4, 5, 6, 8, 9]
    assert report.records_before == 11


def test_no_tombstone_goes_behind_a_damaged_segment() -> None:
    env = MemoryEnv()
    expired = batch(record(9, "z", None), delete_horizon_ms=NOW_MS - 1)
    early = batch(record(0, "y", None), delete_horizon_ms=NOW_MS - 1)
    parts = [
        segment(0, [early, batch(record(1, "k"))], 2),
        segment(2, [damaged(batch(record(2, "z")))], 3),
        segment(3, [expired, batch(record(10, "k"))], 11),
    ]
    sources = write_segments(env, parts)
    report, groups = clean(env, clean_job([sources], first_dirty_offset=3))
    assert report.next_dirty_offset == 2, "the next clean has to look for the older values again"
    assert report.cleaned == ((3, 11),)
    assert {horizon.base_offset: horizon.horizon_ms for horizon in report.horizons}[
        3
    ] == UNKNOWN_HORIZON
    assert (report.tombstones_kept, report.tombstones_removed) == (1, 1)
    assert [group.source_base_offsets for group in groups] == [(0,)]


@pytest.mark.parametrize("grouped", [True, False])
def test_no_tombstone_goes_whose_segment_became_readable_after_the_job_was_planned(
    grouped: bool,
) -> None:
    """Its key is not in the map, so an older value may be left."""
    env = MemoryEnv()
    expired = batch(record(1, "a", None), delete_horizon_ms=NOW_MS - 1)
    parts = [
        segment(0, [batch(record(0, "a"))], 1),
        segment(1, [expired, batch(record(2, "b", None))], 3),
        segment(3, [batch(record(3, "c"), record(4, "c"))], 5),
    ]
    before, unreadable, dirty = write_segments(env, parts)
    groups = [[before, unreadable], [dirty]] if grouped else [[before], [unreadable], [dirty]]
    job = clean_job(groups, first_dirty_offset=3, clean_below=1)
    report, cleaned = clean(env, job)
    assert report.tombstones_removed == 0
    log = cleaned_log(env, parts, cleaned)
    assert offsets(log) == [0, 1, 2, 4]
    assert [read_header(b).has_delete_horizon for b in batches_of(log)] == [
        False,
        True,
        False,
        False,
    ]


def test_an_old_message_format_is_left_alone_and_named() -> None:
    env = MemoryEnv()
    old = bytearray(batch(record(0, "a")))
    old[16] = 1
    report, groups = clean(env, clean_job([write_segments(env, [segment(0, [bytes(old)], 1)])]))
    assert "format 0 or 1" in report.damaged[0][2]
    assert groups == []


def test_a_file_shorter_than_promised_is_damage() -> None:
    env = MemoryEnv()
    part = segment(0, [batch(record(0, "a"), record(1, "a"))], 2)
    sources = write_segments(env, [part])
    env.open(f"{DIRECTORY}/{0:020d}.log", write=True).truncate(50)
    report, groups = clean(env, clean_job([sources]))
    assert "shorter" in report.damaged[0][2]
    assert groups == []


def test_a_record_that_lies_under_a_right_checksum_is_damage() -> None:
    env = MemoryEnv()
    for change in range(61, 70):
        lying = bytearray(batch(record(0, "a"), record(1, "a")))
        lying[change] = 0x7F
        lying[17:21] = crc_of(lying, 0, len(lying)).to_bytes(4, "big")
        sources = write_segments(env, [segment(0, [bytes(lying)], 2)])
        report, groups = clean(env, clean_job([sources], job_id=f"run{change}"))
        if report.damaged:
            assert groups == []
            assert report.keys_indexed == 0, "keys of a damaged batch are not believed"


@pytest.mark.parametrize("codec", [NONE, LZ4])
@pytest.mark.parametrize("chunk_keys", [2, 4096])
@pytest.mark.parametrize("fault", ["a length", "a byte too many"])
def test_no_key_of_a_damaged_batch_is_believed_however_long_it_is(
    monkeypatch: pytest.MonkeyPatch, codec: int, chunk_keys: int, fault: str
) -> None:
    monkeypatch.setattr(offset_map, "CHUNK_KEYS", chunk_keys)
    env = MemoryEnv()
    whole = bytes(build_batch([record(i, f"k{i}") for i in range(6)]))
    records = bytearray(whole[61:])
    if fault == "a length":
        records[records.rindex(b"k5") - 5] = 0x7F  # of the last record: -64
    else:
        records += b"\0"
    lying = bytearray(whole[:61]) + (compress(codec, bytes(records)) if codec else records)
    lying[22] = codec
    lying[8:12] = (len(lying) - 12).to_bytes(4, "big")
    lying[17:21] = crc_of(lying, 0, len(lying)).to_bytes(4, "big")
    part = segment(0, [bytes(lying)], 6)
    report, groups = clean(env, clean_job([write_segments(env, [part])]))
    assert len(report.damaged) == 1
    assert groups == []
    assert report.keys_indexed == 0


@pytest.mark.parametrize("flipped", [0, 1, 2])
def test_no_flipped_bit_outside_of_the_checksum_costs_or_changes_a_record(flipped: int) -> None:
    parts = [batch(record(at, f"k{at}", f"v{at}")) for at in (3, 10, 40)]
    newer = segment(50, [batch(record(50, "k3", "v50"))], 51)
    silent = 0
    for bit in range(21 * 8):
        env = MemoryEnv()
        changed = bytearray(parts[flipped])
        changed[bit >> 3] ^= 1 << (bit & 7)
        batches = [bytes(changed) if n == flipped else part for n, part in enumerate(parts)]
        sources = write_segments(env, [segment(0, batches, 50), newer])
        report, groups = clean(env, clean_job([sources]))
        if report.damaged:
            assert not groups or groups[0].source_base_offsets != (0,)
            continue
        silent += 1
        (group,) = groups
        retained = batches_of(output_bytes(env, group))
        records = [
            decode_record
            for part in retained
            for decode_record in decode_records(part, read_header(part))
        ]
        assert [item.value for item in records] == [b"v10", b"v40", b"v50"]
        assert [item.offset for item in records] == sorted({item.offset for item in records})
    assert silent >= 32, "those of the leader epoch, at least"
