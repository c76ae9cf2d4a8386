"""Opening a folder after a crash: what is verified, what is cut, what is kept as damaged."""

import random
import zlib
from dataclasses import replace

import pytest

from storage.env import Env, remove_if_there
from storage.errors import DamagedSegmentError
from storage.format.batch import read_header
from storage.format.filenames import (
    INDEX,
    KEYS,
    LEADER_EPOCH_CHECKPOINT,
    LOG,
    TIME_INDEX,
    TXN_INDEX,
    file_name,
)
from storage.log.log import Log
from storage.log.log_state import index_limits
from storage.recovery.load_log import load_log
from tests.support.storage.logs import (
    FOLDER,
    NOW_MS,
    SMALL,
    append,
    batch_of,
    content,
    fill,
    offsets_in,
    open_log,
    open_with_notes,
    overwrite,
    resize,
    segments_of,
    value_at,
)
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put
from tests.support.storage.timestamps import first_of_largest, first_since

BATCH_BYTES = len(batch_of(value_at(0)))


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=4)


def names(env: Env) -> list[str]:
    return env.listdir(FOLDER)


# --- without a crash ----------------------------------------------------------------------------


def test_a_closed_log_opens_as_it_was(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 20)
    facts = log.segment_facts()
    log.close()
    again, loaded = open_with_notes(env, was_clean=True, recovery_point=20)
    assert loaded.notes == ()
    assert [facts[:7] for facts in again.segment_facts()] == [facts[:7] for facts in facts]
    assert (again.log_end_offset, again.high_watermark, again.leader_epoch) == (20, 20, 0)
    assert offsets_in(again) == list(range(20))
    assert append(again, b"x").first_offset == 20


def test_a_key_index_that_someone_removes_meanwhile_stops_no_start(env: MemoryEnv) -> None:
    fill(open_log(env), 20)
    path = f"{FOLDER}/{file_name(0, KEYS)}"
    env.open(path, create=True, write=True).close()
    loaded = load_log(
        env,
        FOLDER,
        index_limits(SMALL),
        was_clean=True,
        recovery_point=20,
        log_start_offset=0,
        go_on=lambda: remove_if_there(env, path),
    )
    assert loaded.log_end_offset == 20


def test_an_empty_folder_begins_at_the_log_start(env: MemoryEnv) -> None:
    log = open_log(env, was_clean=True, log_start_offset=500)
    assert (log.log_start_offset, log.log_end_offset) == (500, 500)
    assert append(log, b"x").first_offset == 500


def test_an_empty_active_segment_needs_no_repair(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 3)
    log.roll(NOW_MS)
    log.close()
    again, loaded = open_with_notes(env, was_clean=True, recovery_point=3)
    assert loaded.notes == ()
    assert [base for base, _ in segments_of(again)] == [0, 3]


def test_an_empty_active_segment_without_indexes_opens(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 3)
    log.roll(NOW_MS)
    log.close()
    env.unlink(f"{FOLDER}/{file_name(3, INDEX)}")
    env.unlink(f"{FOLDER}/{file_name(3, TIME_INDEX)}")
    again = open_log(env, was_clean=True, recovery_point=3)
    assert [base for base, _ in segments_of(again)] == [0, 3]
    assert file_name(3, INDEX) in names(env)
    assert append(again, b"x").first_offset == 3


def test_indexes_without_a_log_are_removed(env: MemoryEnv) -> None:
    open_log(env).close()
    for kind in (INDEX, TIME_INDEX, TXN_INDEX):
        env.open(f"{FOLDER}/{file_name(77, kind)}", create=True).close()
    open_log(env, was_clean=True)
    assert not [name for name in names(env) if "77" in name]


def test_deleted_files_do_not_come_back(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 10)
    log.delete_records(10)
    removed = len(log.retention.expire(NOW_MS))
    assert removed
    assert [name for name in names(env) if name.endswith(".deleted")]
    open_log(env, log_start_offset=10)
    assert not [name for name in names(env) if name.endswith(".deleted")]


# --- indexes that lie ---------------------------------------------------------------------------


def swap_entries(raw: bytes, size: int) -> bytes:
    return raw[size : 2 * size] + raw[:size] + raw[2 * size :]


BROKEN_INDEXES = {
    "missing": None,
    "empty": lambda raw, size: b"",
    "torn": lambda raw, size: raw[:-3],
    "half": lambda raw, size: raw[: len(raw) // size // 2 * size],
    "zeros after": lambda raw, size: raw + bytes(size * 100),
    "all zeros": lambda raw, size: bytes(len(raw)),
    "garbage": lambda raw, size: random.Random(7).randbytes(len(raw)),
    "out of order": swap_entries,
    "last out of range": lambda raw, size: raw[:-4] + b"\x7f\xff\xff\xff",
}


@pytest.mark.parametrize("how", BROKEN_INDEXES)
@pytest.mark.parametrize("kind", [INDEX, TIME_INDEX])
@pytest.mark.parametrize("was_clean", [True, False])
@pytest.mark.parametrize("base", [0, 5])
def test_an_index_that_lies_is_made_anew(
    env: MemoryEnv, how: str, kind: str, was_clean: bool, base: int
) -> None:
    log = open_log(env)
    for offset in range(10):
        append(log, value_at(offset), timestamp=NOW_MS + offset)
    assert [item for item, _ in segments_of(log)][:2] == [0, 5]
    log.close()
    right = {item: content(env, base, item) for item in (INDEX, TIME_INDEX)}
    path = f"{FOLDER}/{file_name(base, kind)}"
    change = BROKEN_INDEXES[how]
    if change is None:
        env.unlink(path)
    else:
        raw = change(right[kind], 8 if kind == INDEX else 12)
        resize(env, file_name(base, kind), 0)
        overwrite(env, file_name(base, kind), raw)
    again = open_log(env, was_clean=was_clean, recovery_point=10)
    assert offsets_in(again) == list(range(10))
    for offset in range(10):
        data = again.reader.read(offset, BATCH_BYTES, end_offset=10).read()
        assert read_header(data).base_offset == offset
        offset_found = first_since(again, NOW_MS + offset)
        assert offset_found is not None
        assert offset_found.offset == offset
    largest = first_of_largest(again)
    assert largest is not None
    assert largest.offset == 9
    assert [facts.largest_timestamp_ms for facts in again.segment_facts()][-1] == NOW_MS + 9


@pytest.mark.parametrize("times", ["ascending", "newest first", "in the middle"])
def test_no_flipped_bit_of_the_last_time_entry_changes_the_largest_timestamp(
    env: MemoryEnv, times: str
) -> None:
    """Retention would delete the segment by it, or never."""
    days = {
        "ascending": range(5),
        "newest first": range(5, 0, -1),
        "in the middle": (1, 2, 5, 3, 2),
    }
    log = open_log(env)
    for day in days[times]:
        append(log, b"v", timestamp=NOW_MS + day * 86_400_000)
    log.roll(NOW_MS)
    log.close()
    right = content(env, 0, TIME_INDEX)
    largest = open_log(env, was_clean=True, recovery_point=5).segment_facts()[0]
    for bit in range(96):
        raw = bytearray(right)
        raw[-12 + bit // 8] ^= 1 << bit % 8
        overwrite(env, file_name(0, TIME_INDEX), bytes(raw), 0)
        again, loaded = open_with_notes(env, was_clean=True, recovery_point=5)
        found = again.segment_facts()[0]
        assert found.largest_timestamp_ms == largest.largest_timestamp_ms, bit
        assert offsets_in(again) == list(range(5))
        assert loaded.notes, bit
        again.close()


def test_an_entry_that_points_into_a_batch_is_noticed_when_used(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 5)
    log.roll(NOW_MS)
    log.close()
    raw = bytearray(content(env, 0, INDEX))
    raw[8 + 4 : 8 + 8] = (2 * BATCH_BYTES + 7).to_bytes(4, "big")
    overwrite(env, file_name(0, INDEX), bytes(raw), 0)
    again = open_log(env, was_clean=True, recovery_point=5)
    for offset in reversed(range(5)):
        data = again.reader.read(offset, BATCH_BYTES, end_offset=5).read()
        assert read_header(data).base_offset == offset
    again.close()
    assert content(env, 0, INDEX) != bytes(raw)


def test_an_entry_with_the_offset_of_another_batch_is_noticed_when_used(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 5)
    log.roll(NOW_MS)
    log.close()
    raw = bytearray(content(env, 0, INDEX))
    raw[:8] = (1).to_bytes(4, "big") + (2 * BATCH_BYTES).to_bytes(4, "big")
    raw[8:16] = (2).to_bytes(4, "big") + (3 * BATCH_BYTES).to_bytes(4, "big")
    raw[16:24] = (3).to_bytes(4, "big") + (4 * BATCH_BYTES).to_bytes(4, "big")
    overwrite(env, file_name(0, INDEX), bytes(raw[:24]), 0)
    resize(env, file_name(0, INDEX), 24)
    again = open_log(env, was_clean=True, recovery_point=5)
    for offset in reversed(range(5)):
        data = again.reader.read(offset, BATCH_BYTES, end_offset=5).read()
        assert read_header(data).base_offset == offset


# --- torn tails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_at_the_end_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    env = MemoryEnv(seed)
    log = open_log(env)
    fill(log, rng.randrange(1, 30))
    end, last = log.log_end_offset, log.segment_facts()[-1].base_offset
    overwrite(env, file_name(last, LOG), rng.randbytes(rng.randrange(1, 2000)))
    overwrite(env, file_name(last, INDEX), rng.randbytes(rng.randrange(1, 200)))
    again, loaded = open_with_notes(env)
    assert again.log_end_offset == end
    assert offsets_in(again) == list(range(end))
    assert any("cut" in note for note in loaded.notes)
    assert append(again, b"x").first_offset == end
    assert offsets_in(open_log(env)) == list(range(end + 1))


@pytest.mark.parametrize("cut", [1, 20, 60, 61, 100, BATCH_BYTES - 1])
def test_a_torn_batch_is_cut(env: MemoryEnv, cut: int) -> None:
    log = open_log(env)
    fill(log, 5)
    resize(env, file_name(0, LOG), 4 * BATCH_BYTES + cut)
    again = open_log(env)
    assert again.log_end_offset == 4
    assert env.size(f"{FOLDER}/{file_name(0, LOG)}") == 4 * BATCH_BYTES


def test_preallocated_zeros_behind_the_last_batch_are_the_end(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 5)
    resize(env, file_name(0, LOG), 1 << 20)
    resize(env, file_name(0, INDEX), 1 << 16)
    resize(env, file_name(0, TIME_INDEX), 12 << 10)
    again = open_log(env)
    assert again.log_end_offset == 5
    assert not again.damage.ranges
    assert env.size(f"{FOLDER}/{file_name(0, LOG)}") == 5 * BATCH_BYTES
    assert env.size(f"{FOLDER}/{file_name(0, INDEX)}") == 4 * 8
    assert append(again, b"x").first_offset == 5


def test_a_bad_checksum_behind_the_recovery_point_ends_the_log(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 20)
    bases = [base for base, _ in segments_of(log)]
    overwrite(env, file_name(bases[1], LOG), b"!", BATCH_BYTES + 70)
    again, loaded = open_with_notes(env)
    assert again.log_end_offset == bases[1] + 1
    assert [base for base, _ in segments_of(again)] == bases[:2]
    assert not [name for name in names(env) if name.startswith(f"{bases[2]:020d}")]
    assert any("removed" in note for note in loaded.notes)


def test_offsets_that_go_back_end_the_log(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 3)
    overwrite(env, file_name(0, LOG), bytes(batch_of(b"old")))
    assert open_log(env).log_end_offset == 3


def test_only_segments_from_the_recovery_point_on_are_verified(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 20)
    bases = [base for base, _ in segments_of(log)]
    overwrite(env, file_name(0, LOG), b"!", BATCH_BYTES + 70)
    again = open_log(env, recovery_point=bases[1])
    assert again.log_end_offset == 20
    assert not again.damage.ranges


# --- damage to what was flushed -----------------------------------------------------------------


def damaged_log(env: MemoryEnv, *, recovery_point: int, position: int, data: bytes) -> Log:
    log = open_log(env)
    fill(log, 5)
    overwrite(env, file_name(0, LOG), data, position)
    return open_log(env, recovery_point=recovery_point)


def test_flushed_data_with_a_bad_checksum_is_kept_and_not_served(env: MemoryEnv) -> None:
    log = damaged_log(env, recovery_point=5, position=2 * BATCH_BYTES + 80, data=b"!")
    size_bytes = 5 * BATCH_BYTES
    assert env.size(f"{FOLDER}/{file_name(0, LOG)}") == size_bytes
    damage = log.damage.ranges[0]
    assert (damage.position, damage.end_position) == (2 * BATCH_BYTES, 3 * BATCH_BYTES)
    assert "CRC" in damage.reason
    assert len(log.reader.read(0, 1 << 20, end_offset=5).read()) == 2 * BATCH_BYTES
    with pytest.raises(DamagedSegmentError) as caught:
        log.reader.read(2, 1 << 20, end_offset=5)
    assert caught.value.position == 2 * BATCH_BYTES
    assert offsets_in(log, start=3) == [3, 4]
    assert append(log, b"x").first_offset == 5
    assert offsets_in(log, start=3) == [3, 4, 5]


def test_damage_that_hides_the_end_lets_the_log_go_on_behind_it(env: MemoryEnv) -> None:
    log = damaged_log(env, recovery_point=5, position=2 * BATCH_BYTES, data=bytes(3 * BATCH_BYTES))
    assert log.log_end_offset == 5
    assert [base for base, _ in segments_of(log)] == [0, 5]
    assert env.size(f"{FOLDER}/{file_name(0, LOG)}") == 5 * BATCH_BYTES
    assert offsets_in(log, start=5) == []
    for offset in (2, 3, 4):
        with pytest.raises(DamagedSegmentError):
            log.reader.read(offset, 1000, end_offset=5)
    assert append(log, b"x").first_offset == 5
    assert offsets_in(log, start=5) == [5]


def test_damage_before_the_recovery_point_does_not_save_what_is_behind_it(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 5)
    overwrite(env, file_name(0, LOG), b"!", BATCH_BYTES + 80)
    overwrite(env, file_name(0, LOG), b"!", 3 * BATCH_BYTES + 80)
    again = open_log(env, recovery_point=2)
    assert again.log_end_offset == 3
    assert [damage.position for damage in again.damage.ranges] == [BATCH_BYTES]
    assert env.size(f"{FOLDER}/{file_name(0, LOG)}") == 3 * BATCH_BYTES


def test_a_file_shorter_than_what_was_flushed_gives_no_offset_twice(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 5)
    resize(env, file_name(0, LOG), 2 * BATCH_BYTES)
    again, loaded = open_with_notes(env, recovery_point=5)
    assert again.log_end_offset == 5
    assert any("[2, 5)" in note for note in loaded.notes)
    assert append(again, b"x").first_offset == 5
    assert offsets_in(again) == [0, 1, 5]


def test_damage_that_a_reader_finds_is_stored(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, index_interval_bytes=1 << 20))
    fill(log, 5)
    overwrite(env, file_name(0, LOG), bytes(20), 2 * BATCH_BYTES)
    assert not log.damage.ranges
    with pytest.raises(DamagedSegmentError):
        log.reader.read(2, 1000, end_offset=5)
    assert [damage.position for damage in log.damage.ranges] == [2 * BATCH_BYTES]


def test_damage_found_by_somebody_else_is_not_served_any_more(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 5)
    overwrite(env, file_name(0, LOG), b"!", BATCH_BYTES + 80)
    damage = log.damage.mark(f"{FOLDER}/{file_name(0, LOG)}", BATCH_BYTES, "bad CRC")
    assert damage is not None
    assert damage.end_position == 2 * BATCH_BYTES
    with pytest.raises(DamagedSegmentError):
        log.reader.read(1, 1000, end_offset=5)
    assert log.damage.mark("/elsewhere", 0, "") is None


def old_message(offset: int, value: bytes, magic: int = 1) -> bytes:
    body = bytes([magic, 0]) + (NOW_MS.to_bytes(8, "big") if magic else b"")
    body += (-1).to_bytes(4, "big", signed=True) + len(value).to_bytes(4, "big") + value
    crc = zlib.crc32(body).to_bytes(4, "big")
    return offset.to_bytes(8, "big") + (len(body) + 4).to_bytes(4, "big") + crc + body


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("was_clean", [True, False])
def test_messages_of_old_formats_are_kept_and_passed_over(
    env: MemoryEnv, magic: int, was_clean: bool
) -> None:
    open_log(env).close()
    old = old_message(0, b"old", magic) + old_message(1, b"older", magic)
    overwrite(env, file_name(0, LOG), old)
    log = open_log(env, was_clean=was_clean)
    assert log.log_end_offset == 2
    assert "format" in log.damage.ranges[0].reason
    with pytest.raises(DamagedSegmentError):
        log.reader.read(0, 1000, end_offset=2)
    assert append(log, b"new").first_offset == 2
    assert offsets_in(log, start=2) == [2]
    log.close()
    assert env.read_file(f"{FOLDER}/{file_name(0, LOG)}").startswith(old)
    again = open_log(env, was_clean=True, recovery_point=3)
    assert again.log_end_offset == 3
    assert offsets_in(again, start=2) == [2]


# --- start and epochs ---------------------------------------------------------------------------


@pytest.mark.parametrize("was_clean", [True, False])
def test_a_log_start_behind_the_end_of_the_log_removes_no_record(
    env: MemoryEnv, was_clean: bool
) -> None:
    log = open_log(env)
    fill(log, 20)
    log.close()
    again, loaded = open_with_notes(
        env, was_clean=was_clean, recovery_point=20, log_start_offset=40
    )
    assert (again.log_start_offset, again.log_end_offset) == (0, 20)
    assert offsets_in(again) == list(range(20))
    assert any("log start offset 40" in note for note in loaded.notes)


def test_each_unclean_start_begins_a_new_leader_epoch(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 2)
    again = open_log(env)
    assert again.leader_epoch == 1
    assert again.reader.end_offset_for_epoch(1) == (1, 2)
    fill(again, 2)
    assert again.reader.end_offset_for_epoch(0) == (0, 2)
    again.close()
    clean = open_log(env, was_clean=True, recovery_point=4)
    assert clean.leader_epoch == 1
    assert [clean.reader.epoch_of(offset) for offset in range(5)] == [0, 0, 1, 1, 1]
    assert clean.reader.end_offset_for_epoch(7) == (-1, -1)


def test_epochs_are_learnt_from_batches_when_their_file_is_gone(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 2)
    log = open_log(env)
    fill(log, 2)
    log.close()
    env.unlink(f"{FOLDER}/{LEADER_EPOCH_CHECKPOINT}")
    assert open_log(env, was_clean=True, recovery_point=4).leader_epoch == 1
    unclean = open_log(env)
    assert unclean.leader_epoch == 2
    assert unclean.reader.end_offset_for_epoch(0) == (0, 2)


def idempotent(log: Log, sequence: int, producer_id: int = 5) -> None:
    append(log, b"v", producer_id=producer_id, producer_epoch=0, base_sequence=sequence)


DAMAGED_EPOCHS = {
    "missing": None,
    "the last one lowered": lambda lines: lines.replace(b"\n5 4\n", b"\n4 4\n"),
    "the last one raised": lambda lines: lines.replace(b"\n5 4\n", b"\n7 4\n"),
    "without the last one": lambda lines: lines.replace(b"\n3\n", b"\n2\n").replace(
        b"\n5 4\n", b"\n"
    ),
}


@pytest.mark.parametrize("was_clean", [True, False])
@pytest.mark.parametrize("how", DAMAGED_EPOCHS)
def test_epochs_that_contradict_the_batches_are_read_from_them(
    env: MemoryEnv, how: str, was_clean: bool
) -> None:
    """Java's consumers compare epochs, and would skip records or begin anew."""
    log = open_log(env)
    for epoch in (0, 3, 5):
        log._state.leader_epoch = epoch
        log.epochs.is_entered = False
        fill(log, 2)
    log.close()
    path = f"{FOLDER}/{LEADER_EPOCH_CHECKPOINT}"
    right = env.read_file(path)
    assert right.endswith(b"\n3\n0 0\n3 2\n5 4\n")
    change = DAMAGED_EPOCHS[how]
    env.unlink(path)
    if change is not None:
        put(env, path, change(right))
        assert env.read_file(path) != right
    again = open_log(env, was_clean=was_clean, recovery_point=6)
    ends = [again.reader.end_offset_for_epoch(epoch) for epoch in (0, 1, 3, 4)]
    assert ends == [(0, 2), (0, 2), (3, 4), (3, 4)]
    assert again.leader_epoch >= (5 if was_clean else 6)
    if again.leader_epoch > 5:
        assert again.reader.end_offset_for_epoch(5) == (5, 6)
    again.close()
    if was_clean and how != "the last one raised":
        assert env.read_file(path) == right


@pytest.mark.parametrize("was_clean", [True, False])
@pytest.mark.parametrize("start", [3, 5, 6])
def test_epochs_below_the_log_start_are_not_missed(
    env: MemoryEnv, start: int, was_clean: bool
) -> None:
    log = open_log(env)
    for epoch in (0, 3):
        log._state.leader_epoch = epoch
        log.epochs.is_entered = False
        append(log, b"one", b"two", b"three")
    log.delete_records(start)
    log.close()
    for _ in range(2):
        again, loaded = open_with_notes(
            env, was_clean=was_clean, recovery_point=6, log_start_offset=start
        )
        assert not [note for note in loaded.notes if "epoch" in note]
        assert not loaded.epochs_learned
        again.close()


def test_a_segment_flushed_before_it_was_closed_gets_its_indexes_anew(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    for timestamp in (10, 90, 20, 30, 40):
        append(log, b"v", timestamp=timestamp)
    log.flush()
    log.roll(NOW_MS)
    # The indexes were not synced: of the time index less came to the disk than there was, and
    # neither its own form nor the end of the log shows it.
    resize(env, file_name(0, TIME_INDEX), 0)
    overwrite(env, file_name(0, TIME_INDEX), (10).to_bytes(8, "big") + bytes(4))
    again = open_log(env.kill(), recovery_point=5)
    assert again.segment_facts()[0].largest_timestamp_ms == 90


@pytest.mark.parametrize("beyond", [1, 4])
def test_a_damaged_number_of_records_cuts_no_later_segment(env: MemoryEnv, beyond: int) -> None:
    """It leads into the next segments, whose batches are flushed and whole."""
    log = open_log(env)
    for _ in range(3):
        fill(log, 2)
        log.roll(NOW_MS)
    log.flush()
    last_offset_delta = BATCH_BYTES + 23 + 3  # of the batch at offset 1
    overwrite(env, file_name(0, LOG), bytes([beyond]), last_offset_delta)
    again = open_log(env.kill(), recovery_point=6)
    assert offsets_in(again, start=2) == [2, 3, 4, 5]
    assert [damage.first_offset for damage in again.damage.ranges] == [1]
    assert again.log_end_offset == 6
