"""Retention, deleted records, truncation and swapped segments, on a log with files."""

import errno
from contextlib import suppress
from dataclasses import replace

import pytest

from storage.env import remove_if_there, write_file
from storage.errors import (
    DamagedSegmentError,
    LogDirectoryError,
    NoRoomError,
    OffsetOutOfRangeError,
    PartitionFolderError,
)
from storage.format.filenames import FILE_KINDS, INDEX, KEYS, LOG, SNAPSHOT, TIME_INDEX, file_name
from storage.log.log import Log
from storage.segments.expiry import ExpiryReason
from storage.segments.offset_lookup import locate
from storage.swap.swap_journal import execute_swap
from tests.support.os_errors import raises_errno
from tests.support.storage.logs import (
    FOLDER,
    NOW_MS,
    SMALL,
    append,
    cleaned,
    fill,
    headers_of,
    loaded_segment,
    offsets_in,
    open_log,
    overwrite,
    publish,
    segments_of,
)
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash
from tests.support.storage.timestamps import first_of_largest


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=6)


DELETE = replace(SMALL, retention_ms=1000, file_delete_delay_ms=60_000)


def names(env: MemoryEnv) -> list[str]:
    return env.listdir(FOLDER)


def bases(log: Log) -> list[int]:
    return [base for base, _ in segments_of(log)]


def five_segments(env: MemoryEnv, config: object = DELETE) -> Log:
    """Bases 0, 5, 10, 15, 20; 22 records."""
    log = open_log(env, config)  # type: ignore[arg-type]
    fill(log, 22)
    assert bases(log) == [0, 5, 10, 15, 20]
    return log


# --- retention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["listdir", "sync_dir"])
def test_retention_without_a_descriptor_changes_no_file_and_goes_on_later(
    env: MemoryEnv, operation: str
) -> None:
    log = five_segments(env)
    before = names(env)
    log.delete_records(11)
    full = env.fail_on(lambda op, path: op == operation, errno.EMFILE)
    with pytest.raises(NoRoomError):
        log.retention.expire(NOW_MS)
    full.remove()
    assert names(env) == before
    assert bases(log) == [0, 5, 10, 15, 20]
    log.retention.expire(NOW_MS)
    assert bases(log) == [10, 15, 20]


def test_expired_segments_are_renamed_at_once_and_unlinked_later(env: MemoryEnv) -> None:
    log = five_segments(env)
    log.delete_records(11)
    expired = log.retention.expire(NOW_MS)
    assert [segment.facts.base_offset for segment in expired] == [0, 5]
    assert {segment.reason for segment in expired} == {ExpiryReason.LOG_START_OFFSET}
    assert bases(log) == [10, 15, 20]
    assert log.log_start_offset == 11
    present = names(env)
    for kind in (LOG, INDEX, TIME_INDEX, SNAPSHOT):
        assert file_name(5, kind) not in present
        assert file_name(5, kind) + ".deleted" in present
    log.retention.purge_deleted(NOW_MS + 59_999)
    assert names(env) == present
    assert log.retention.purge_deleted(NOW_MS + 60_000) == 8
    assert not [name for name in names(env) if name.endswith(".deleted")]
    assert offsets_in(log) == list(range(11, 22))


def test_a_clock_that_is_set_back_delays_an_unlink_by_one_delay_at_most(env: MemoryEnv) -> None:
    log = five_segments(env)
    log.delete_records(11)
    log.retention.expire(NOW_MS)
    past_ms = NOW_MS - 10**9
    assert log.retention.purge_deleted(past_ms) == 0
    assert log.retention.purge_deleted(past_ms + 59_999) == 0
    assert log.retention.purge_deleted(past_ms + 60_000) == 8


def test_when_all_expires_an_empty_segment_remains_at_the_end(env: MemoryEnv) -> None:
    log = five_segments(env)
    assert len(log.retention.expire(NOW_MS + 1001)) == 5
    assert segments_of(log) == [(22, 0)]
    assert (log.log_start_offset, log.log_end_offset) == (22, 22)
    assert log.retention.expire(NOW_MS + 10**9) == []
    assert append(log, b"x").first_offset == 22
    assert offsets_in(log) == [22]
    with pytest.raises(OffsetOutOfRangeError):
        log.reader.read(21, 1000, end_offset=23)


def test_retention_goes_on_if_a_worker_removes_a_key_index_meanwhile(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = five_segments(env)
    path = f"{FOLDER}/{file_name(0, KEYS)}"
    write_file(env, path, b"index")
    log.delete_records(11)
    rename = env.rename

    def remove_and_rename(src: str, dst: str) -> None:
        remove_if_there(env, path)
        rename(src, dst)

    monkeypatch.setattr(env, "rename", remove_and_rename)
    log.retention.expire(NOW_MS)
    assert bases(log) == [10, 15, 20]


def test_retention_makes_room_on_a_full_disk(env: MemoryEnv) -> None:
    """It needs none itself, but for the new segment where all of them go: then the last stays."""
    log = five_segments(env)
    full = env.fail_on(lambda op, path: op == "pwrite", errno.ENOSPC)
    assert len(log.retention.expire(NOW_MS + 1001)) == 4
    assert (bases(log), log.log_start_offset) == ([20], 20)
    assert log.retention.purge_deleted(NOW_MS + 10**9) > 0
    full.remove()
    assert len(log.retention.expire(NOW_MS + 1001)) == 1
    assert segments_of(log) == [(22, 0)]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("kinds", [(LOG,), (INDEX,), (TIME_INDEX,), (SNAPSHOT,), FILE_KINDS])
def test_retention_unlinks_the_files_for_whose_longer_names_there_is_no_room(
    env: MemoryEnv, kinds: tuple[str, ...], error: int
) -> None:
    """A folder without a free place needs another block for a longer name."""
    log = five_segments(env)
    data = log.reader.read(5, 1000, end_offset=22)
    log.delete_records(11)
    suffixes = tuple(f"{kind}.deleted" for kind in kinds)
    env.fail_on(lambda op, path: op == "rename" and path.endswith(suffixes), error)
    log.retention.expire(NOW_MS)
    assert bases(log) == [10, 15, 20]
    renamed = [file_name(5, kind) for kind in (LOG, INDEX, TIME_INDEX, SNAPSHOT)]
    present = [name for name in names(env) if name.startswith(f"{5:020}")]
    assert present == sorted(f"{name}.deleted" for name in renamed if not name.endswith(kinds))
    assert headers_of(data.read())[0].base_offset == 5
    log.retention.purge_deleted(NOW_MS + 60_000)
    assert min(names(env)) == file_name(10, INDEX)


@pytest.mark.parametrize("step", range(8))  # two segments with four files
def test_a_crash_after_a_rename_without_room_leaves_no_gap(step: int) -> None:
    """Wherever it comes: no segment returns without the newer ones."""
    for seed in range(10):
        for later in range(1, 6):
            env = MemoryEnv(seed)
            log = five_segments(env)
            log.flush()
            log.delete_records(11)
            renames = iter(range(100))
            env.fail_on(
                lambda op, _, renames=renames: op == "rename" and next(renames) == step,
                errno.ENOSPC,
            )
            env.crash_at = env.operations + step + later
            with suppress(SimulatedCrash):
                log.retention.expire(NOW_MS)
            offsets = offsets_in(open_log(env.crash()))
            assert offsets == list(range(offsets[0], 22)), env
            assert offsets[0] in (0, 5, 10), env


def test_retention_moves_the_log_start_and_the_epochs(env: MemoryEnv) -> None:
    config = replace(DELETE, retention_ms=-1, retention_bytes=2000)
    log = five_segments(env, config)
    log.retention.expire(NOW_MS)
    assert bases(log)[0] == log.log_start_offset == 10
    assert log.reader.epoch_of(9) == -1
    assert log.reader.end_offset_for_epoch(0) == (0, 22)


def test_retention_does_not_change_the_generation(env: MemoryEnv) -> None:
    log = five_segments(env)
    before = log.generation
    log.retention.expire(NOW_MS + 1001)
    assert log.generation == before


def test_nothing_that_is_being_swapped_expires(env: MemoryEnv) -> None:
    log = five_segments(env)
    log.flush()
    log.swap.pin([5])
    assert [segment.facts.base_offset for segment in log.retention.expire(NOW_MS + 1001)] == [0]
    log.swap.unpin([5])
    assert len(log.retention.expire(NOW_MS + 1001)) == 4


def test_a_distrusted_clock_expires_nothing_by_time(env: MemoryEnv) -> None:
    log = five_segments(env)
    assert log.retention.expire(NOW_MS + 1001, clock_trusted=False) == []


def test_a_rename_that_fails_names_the_directory(env: MemoryEnv) -> None:
    log = five_segments(env)
    env.fail_on(lambda op, path: op == "rename", errno.EIO)
    with pytest.raises(LogDirectoryError) as caught:
        log.retention.expire(NOW_MS + 1001)
    assert caught.value.directory == "/data"


def test_producers_survive_the_retention_of_their_records(env: MemoryEnv) -> None:
    log = open_log(env, DELETE)
    append(log, b"v", producer_id=3, producer_epoch=0, base_sequence=0)
    log.roll(NOW_MS)
    append(log, b"v")
    log.retention.expire(NOW_MS + 1001)
    assert log.producers.last_records() == {3: (0, 0)}


# --- delete records -----------------------------------------------------------------------------


def test_deleted_records_are_out_of_range_at_once(env: MemoryEnv) -> None:
    log = five_segments(env)
    assert log.delete_records(7) == 7
    assert log.delete_records(3) == 7
    assert offsets_in(log) == list(range(7, 22))
    with pytest.raises(OffsetOutOfRangeError):
        log.reader.read(6, 1000, end_offset=22)
    with pytest.raises(OffsetOutOfRangeError):
        log.delete_records(23)


def test_all_records_can_be_deleted(env: MemoryEnv) -> None:
    log = five_segments(env)
    assert log.delete_records(22) == 22
    assert offsets_in(log) == []
    assert append(log, b"x").first_offset == 22
    assert offsets_in(log) == [22]


# --- truncation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0, 1, 4, 5, 6, 12, 20, 21])
def test_a_truncated_log_ends_at_the_target(env: MemoryEnv, target: int) -> None:
    log = five_segments(env)
    generation = log.generation
    assert log.truncate_to(target, now_ms=NOW_MS)
    assert (log.log_end_offset, log.high_watermark) == (target, target)
    assert log.recovery_point <= target
    assert log.generation != generation
    assert offsets_in(log) == list(range(target))
    fill(log, 6)
    assert offsets_in(log) == list(range(target + 6))
    reopened = open_log(env)
    assert reopened.log_end_offset == target + 6
    assert offsets_in(reopened) == list(range(target + 6))


@pytest.mark.parametrize("target", [22, 23, 1000])
def test_truncation_at_or_behind_the_end_changes_nothing(env: MemoryEnv, target: int) -> None:
    log = five_segments(env)
    generation = log.generation
    assert not log.truncate_to(target, now_ms=NOW_MS)
    assert (log.log_end_offset, log.generation) == (22, generation)


def test_truncation_below_the_first_segment_begins_anew(env: MemoryEnv) -> None:
    log = five_segments(env)
    log.delete_records(12)
    log.retention.expire(NOW_MS)
    log.truncate_to(3, now_ms=NOW_MS)
    assert segments_of(log) == [(3, 0)]
    assert (log.log_start_offset, log.log_end_offset) == (3, 3)


def test_truncation_takes_back_producers_epochs_and_times(env: MemoryEnv) -> None:
    log = open_log(env)
    for sequence in range(4):
        append(
            log,
            b"v",
            producer_id=3,
            producer_epoch=0,
            base_sequence=sequence,
            timestamp=NOW_MS + sequence,
        )
    log.truncate_to(2, now_ms=NOW_MS)
    assert log.producers.last_records() == {3: (0, 1)}
    assert log.segment_facts()[0].largest_timestamp_ms == NOW_MS + 1
    info = append(log, b"v", producer_id=3, producer_epoch=0, base_sequence=2)
    assert (info.first_offset, info.duplicate) == (2, False)
    log.truncate_to(0, now_ms=NOW_MS)
    assert log.producers.last_records() == {}
    assert first_of_largest(log) is None


def test_truncation_survives_a_loss_of_power() -> None:
    for seed in range(30):
        env = MemoryEnv(seed)
        log = five_segments(env)
        log.flush()
        log.truncate_to(7, now_ms=NOW_MS)
        after = open_log(env.crash())
        assert offsets_in(after) == list(range(7)), env


def test_a_truncation_without_descriptors_is_refused_and_changes_nothing(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = five_segments(env)
    log.flush()
    before, generation = names(env), log.generation
    with monkeypatch.context() as short:
        short.setattr(env, "has_spare_descriptors", lambda **_: False)
        full = env.fail_on(lambda op, path: op in ("open", "listdir", "sync_dir"), errno.EMFILE)
        with pytest.raises(NoRoomError):
            log.truncate_to(7, now_ms=NOW_MS)
        full.remove()
    assert (names(env), log.generation, log.log_end_offset) == (before, generation, 22)
    assert log.truncate_to(7, now_ms=NOW_MS)
    assert offsets_in(log) == list(range(7))


def test_a_truncation_needs_no_room_for_longer_names(env: MemoryEnv) -> None:
    log = five_segments(env)
    log.flush()
    env.fail_on(lambda op, path: op == "rename" and path.endswith(".deleted"), errno.ENOSPC)
    log.truncate_to(7, now_ms=NOW_MS)
    assert offsets_in(log) == offsets_in(open_log(env.crash())) == list(range(7))


def test_a_truncation_without_room_for_a_new_segment_fails_its_partition_only(
    env: MemoryEnv,
) -> None:
    log = five_segments(env)
    log.delete_records(12)
    log.retention.expire(NOW_MS)
    full = env.fail_on(lambda op, path: op == "open" and not env.exists(path), errno.ENOSPC)
    with pytest.raises(PartitionFolderError):
        log.truncate_to(3, now_ms=NOW_MS)
    assert log.log_directory.is_online
    full.remove()
    assert offsets_in(open_log(env.crash())) == []


@pytest.mark.parametrize("step", range(9))  # three segments with three files
def test_a_truncation_that_is_cut_short_leaves_no_gap(step: int) -> None:
    for seed in range(30):
        env = MemoryEnv(seed)
        log = five_segments(env)
        log.flush()
        renames = iter(range(100))
        env.fail_on(
            lambda operation, _, renames=renames: operation == "rename" and next(renames) >= step,
            errno.EIO,
        )
        with pytest.raises(LogDirectoryError):
            log.truncate_to(7, now_ms=NOW_MS)
        offsets = offsets_in(open_log(env.crash()))
        assert offsets == list(range(len(offsets))), env
        assert len(offsets) >= 7, env


def test_a_log_is_truncated_to_the_start_of_a_segment_whose_first_batch_is_damaged(
    env: MemoryEnv,
) -> None:
    log = five_segments(env)
    overwrite(env, file_name(5, LOG), b"!", 80)
    assert log.truncate_to(5, now_ms=NOW_MS)
    assert log.log_end_offset == 5
    assert offsets_in(log) == list(range(5))
    assert append(log, b"x").first_offset == 5


def test_where_damage_hides_the_place_nothing_is_cut(env: MemoryEnv) -> None:
    log = five_segments(env)
    size_bytes = segments_of(log)[1][1]
    overwrite(env, file_name(5, LOG), b"!", size_bytes // 5 + 80)
    log.damage.mark(f"{FOLDER}/{file_name(5, LOG)}", size_bytes // 5, "bad")
    with pytest.raises(DamagedSegmentError):
        log.truncate_to(6, now_ms=NOW_MS)
    assert log.log_end_offset == 22


def test_a_batch_that_claims_later_offsets_does_not_move_the_place_of_a_cut(
    env: MemoryEnv,
) -> None:
    """The bit that rotted is in its header, and nobody has read the batch since."""
    log = five_segments(env, replace(DELETE, index_interval_bytes=1 << 20))
    batch_bytes = segments_of(log)[1][1] // 5
    overwrite(env, file_name(5, LOG), (256).to_bytes(4, "big"), batch_bytes + 23)
    assert log.truncate_to(9, now_ms=NOW_MS)
    assert segments_of(log)[1:] == [(5, 4 * batch_bytes)]
    assert offsets_in(log, start=7) == [7, 8]
    assert [(damage.base_offset, damage.position) for damage in log.damage.ranges] == [
        (5, batch_bytes)
    ]


def with_gap(env: MemoryEnv) -> Log:
    """A clean has left offsets 0 to 6 and 15 to 21."""
    log = five_segments(env)
    publish(env, log, [0, 5, 10], set(range(7)))
    return log


@pytest.mark.parametrize("target", [7, 8, 14])
@pytest.mark.parametrize("recovery_point", [None, 0, "kept"])
def test_a_log_that_is_truncated_in_a_gap_never_ends_below_it(
    env: MemoryEnv, target: int, recovery_point: object
) -> None:
    log = with_gap(env)
    assert log.truncate_to(target, now_ms=NOW_MS)
    assert log.log_end_offset == target
    point = target if recovery_point == "kept" else recovery_point
    for crash in (MemoryEnv.kill, MemoryEnv.crash):
        env = crash(env)
        log = open_log(env, recovery_point=point)  # type: ignore[arg-type]
        assert (offsets_in(log), log.log_end_offset) == (list(range(7)), target)
    assert append(log, b"x").first_offset == target
    assert offsets_in(log) == [*range(7), target]


def test_a_log_that_is_truncated_within_a_batch_never_ends_below_the_offset(
    env: MemoryEnv,
) -> None:
    log = open_log(env, DELETE)
    fill(log, 2)
    append(log, b"a", b"b", b"c")
    assert log.truncate_to(4, now_ms=NOW_MS)
    reopened = open_log(env.kill(), recovery_point=None)
    assert (offsets_in(reopened), reopened.log_end_offset) == ([0, 1], 4)


def test_a_log_that_is_truncated_to_the_end_of_a_batch_gets_no_new_segment(env: MemoryEnv) -> None:
    log = with_gap(env)
    assert log.truncate_to(6, now_ms=NOW_MS)
    assert bases(log) == [0]


def test_without_room_a_log_that_is_truncated_in_a_gap_goes_on_in_its_segment(
    env: MemoryEnv,
) -> None:
    log = with_gap(env)
    full = env.fail_on(lambda op, path: op == "open" and not env.exists(path), errno.ENOSPC)
    assert log.truncate_to(9, now_ms=NOW_MS)
    full.remove()
    assert (bases(log), log.log_end_offset) == ([0], 9)
    assert append(log, b"x").first_offset == 9
    assert offsets_in(log) == [*range(7), 9]


@pytest.mark.parametrize("loses_power", [False, True])
def test_a_truncation_in_a_gap_may_end_at_any_step(loses_power: bool) -> None:
    """The log ends at the offset, or has records of before; a start always opens it."""
    for step in range(200):
        env = MemoryEnv(step)
        log = with_gap(env)
        log.flush()
        env.crash_at = env.operations + 1 + step
        try:
            log.truncate_to(9, now_ms=NOW_MS)
        except SimulatedCrash:
            pass
        else:
            assert step > 10
            return
        env = env.crash() if loses_power else env.kill()
        after = open_log(env, recovery_point=9)
        offsets = offsets_in(after)
        assert offsets in [[*range(7), *range(15, end)] for end in range(15, 23)], env
        assert after.log_end_offset == max(9, offsets[-1] + 1), env
        again = open_log(env.kill(), recovery_point=None)
        assert again.log_end_offset == after.log_end_offset, env
    raise AssertionError("the truncation takes more steps")


# --- swapped segments ---------------------------------------------------------------------------


def test_readers_see_what_was_swapped_in(env: MemoryEnv) -> None:
    log = five_segments(env)
    publish(env, log, [0, 5, 10], {1, 8, 12})
    assert bases(log) == [0, 15, 20]
    assert offsets_in(log) == [1, 8, 12, *range(15, 22)]
    assert offsets_in(log, start=2) == [8, 12, *range(15, 22)]
    assert offsets_in(log, start=13) == [*range(15, 22)]
    assert log.log_start_offset == 0
    log.close()
    again = open_log(env, was_clean=True, recovery_point=22)
    assert offsets_in(again) == [1, 8, 12, *range(15, 22)]


def test_a_slice_of_a_swapped_segment_stays_readable(env: MemoryEnv) -> None:
    log = five_segments(env)
    fetch_slice = log.reader.read(0, 1 << 20, end_offset=22)
    before = fetch_slice.read()
    publish(env, log, [0, 5], {3})
    assert fetch_slice.read() == before


def test_a_lookup_during_the_swap_uses_what_was_pinned(env: MemoryEnv) -> None:
    log = five_segments(env)
    log.flush()
    for _ in range(3):
        log.roller.roll_if_due(env.wall_ms() + 10**9)  # gives up idle indexes
    plan = cleaned(env, log, [0, 5], {3})
    log.flush()
    log.swap.pin([0, 5])
    execute_swap(env, plan)
    data = log.reader.read(7, 1 << 20, end_offset=22).read()
    assert data[:8] == (7).to_bytes(8, "big")
    log.swap.attach(plan, log.swap.open_outputs(plan))
    assert offsets_in(log)[0] == 3


def test_a_flush_may_come_while_segments_are_swapped(env: MemoryEnv) -> None:
    log = open_log(env, DELETE)
    for _ in range(3):
        fill(log, 4)
        log.flush()
        log.roll(NOW_MS)  # the indexes are complete only now, and not synced
    fill(log, 1)
    plan = cleaned(env, log, [0, 4], {3})
    log.swap.pin([0, 4])
    task = log.flusher.begin()
    execute_swap(env, plan)
    task.run()
    log.swap.attach(plan, log.swap.open_outputs(plan))
    log.flusher.done(task)
    assert log.recovery_point == 13
    assert not log.flusher.is_due(env.wall_ms() + 10**6)
    assert offsets_in(open_log(env.crash(), recovery_point=13)) == [3, 8, 9, 10, 11, 12]


def test_only_what_is_flushed_may_be_swapped(env: MemoryEnv) -> None:
    log = five_segments(env)
    assert not log.swap.are_flushed([0, 5])
    with pytest.raises(AssertionError):
        log.swap.pin([0, 5])
    log.flush()
    assert log.swap.are_flushed([0, 5])
    log.swap.pin([0, 5])


def test_a_pin_that_fails_pins_nothing(env: MemoryEnv) -> None:
    log = five_segments(env)
    log.flush()
    for _ in range(3):
        log.roller.roll_if_due(env.wall_ms() + 10**9)  # gives up idle indexes
    unreadable = f"{FOLDER}/{file_name(5, INDEX)}"
    fault = env.fail_on(lambda op, path: op == "read_file" and path == unreadable, errno.EMFILE)
    with raises_errno(errno.EMFILE):
        log.swap.pin([0, 5])
    fault.remove()
    log.delete_records(5)
    assert [segment.facts.base_offset for segment in log.retention.expire(NOW_MS)] == [0]
    log.swap.pin([5])


def test_nothing_may_be_left_of_a_group(env: MemoryEnv) -> None:
    log = five_segments(env)
    publish(env, log, [0, 5], set())
    assert bases(log) == [10, 15, 20]
    assert log.log_start_offset == 0
    assert offsets_in(log) == list(range(10, 22))
    assert offsets_in(log, start=3) == list(range(10, 22))


def test_a_swap_does_not_change_the_generation(env: MemoryEnv) -> None:
    log = five_segments(env)
    before = log.generation
    publish(env, log, [0, 5], {3})
    assert log.generation == before


def test_snapshots_of_bases_that_vanished_go(env: MemoryEnv) -> None:
    log = five_segments(env)
    publish(env, log, [0, 5, 10], {1})
    assert [name for name in names(env) if name.endswith(SNAPSHOT)] == [
        file_name(base, SNAPSHOT) for base in (0, 15, 20)
    ]


# --- memory of indexes --------------------------------------------------------------------------


def test_indexes_that_nobody_uses_give_their_memory_back(env: MemoryEnv) -> None:
    five_segments(env).close()
    log = open_log(env, was_clean=True, recovery_point=22)
    assert offsets_in(log, start=7) == list(range(7, 22))
    for minute in (1, 2):
        log.roller.roll_if_due(env.wall_ms() + minute * 60_000)
    # That it was given up shows when it is read again: what is wrong with the file is noticed.
    overwrite(env, file_name(5, INDEX), b"\xff" * 8, 0)
    assert offsets_in(log, start=8) == list(range(8, 22))
    assert env.read_file(f"{FOLDER}/{file_name(5, INDEX)}")[:8] != b"\xff" * 8


def test_a_segment_opens_by_itself(env: MemoryEnv) -> None:
    five_segments(env).close()
    segment = loaded_segment(env, 5)
    assert locate(segment, 7) == 2 * segment.size_bytes // 5
    assert locate(segment, 10) == segment.size_bytes
