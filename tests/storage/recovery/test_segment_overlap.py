"""Segments whose offsets overlap, and offsets that go back: decided by what the records are."""

from dataclasses import replace

import pytest

from storage.errors import OverlappingSegmentsError
from storage.format.batch import Record, build_batch, read_header
from storage.format.filenames import INDEX, LOG, TIME_INDEX, file_name
from storage.log.log import Log
from storage.swap.swap_journal import JOURNAL_PREFIX, execute_swap
from tests.support.storage.logs import (
    FOLDER,
    NOW_MS,
    SMALL,
    append,
    batch_of,
    cleaned,
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
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash
from tests.support.storage.swaps import put
from tests.support.storage.timestamps import first_since

BATCH_BYTES = len(batch_of(value_at(0)))
# Of the forty records in a log of eight segments the clean of the first four leaves these.
KEPT = {1, 3, 6, 7, 11, 12, 16, 18}
REST = set(range(5, 40))  # what no clean has touched when the first source was replaced


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=11)


def log_with_a_swap_half_done(env: MemoryEnv, *, journal: str) -> None:
    """The merged segment is in place of its first source, the other sources are still there."""
    log = open_log(env)
    fill(log, 40)
    log.flush()
    assert [base for base, _ in segments_of(log)][:5] == [0, 5, 10, 15, 20]
    plan = cleaned(env, log, [0, 5, 10, 15], KEPT)
    log.swap.pin([0, 5, 10, 15])
    fault = env.fail_on(lambda operation, path: operation == "unlink", OSError(5, "died here"))
    with pytest.raises(OSError, match="died here"):
        execute_swap(env, plan)
    fault.remove()
    name = next(name for name in env.listdir(FOLDER) if name.startswith(JOURNAL_PREFIX))
    if journal == "lost":
        env.unlink(f"{FOLDER}/{name}")
    elif journal == "empty":
        resize(env, name, 0)
    else:
        overwrite(env, name, b"#", env.size(f"{FOLDER}/{name}") // 2)


@pytest.mark.parametrize("journal", ["lost", "empty", "rotted"])
@pytest.mark.parametrize("recovery_point", [0, 5, 12, 40])
@pytest.mark.parametrize("was_clean", [True, False])
def test_a_lost_swap_journal_costs_no_record(
    env: MemoryEnv, journal: str, recovery_point: int, was_clean: bool
) -> None:
    log_with_a_swap_half_done(env, journal=journal)
    if was_clean:
        recovery_point = 40
    log, loaded = open_with_notes(env.kill(), was_clean=was_clean, recovery_point=recovery_point)
    assert log.log_end_offset == 40
    assert offsets_in(log) == sorted({1, 3} | REST)
    assert [base for base, _ in segments_of(log)] == [0, 5, 10, 15, 20, 25, 30, 35]
    assert not log.damage.ranges
    assert any("the segments after it also have" in note for note in loaded.notes)
    assert append(log, b"x").first_offset == 40


@pytest.mark.parametrize("step", range(1, 25))
def test_losing_power_while_an_overlap_is_undone_costs_no_record(step: int) -> None:
    env = MemoryEnv(seed=step)
    log_with_a_swap_half_done(env, journal="lost")
    env.settle()
    env = env.kill()
    env.crash_at = env.operations + step
    try:
        open_log(env)
    except SimulatedCrash:
        env = env.crash()
    env.crash_at = None
    assert offsets_in(open_log(env.kill())) == sorted({1, 3} | REST)


def overlapping_log(env: MemoryEnv, batch: bytes) -> None:
    """A log of 20 records whose second segment goes on with `batch`."""
    log = open_log(env)
    fill(log, 20)
    log.flush()
    log.close()
    overwrite(env, file_name(5, LOG), batch)
    env.unlink(f"{FOLDER}/{file_name(5, INDEX)}")


def placed(offset: int, *values: bytes) -> bytes:
    """A batch as it stands in a log, of records from `offset` on."""
    records = [Record(offset + at, NOW_MS, b"key", value) for at, value in enumerate(values)]
    return bytes(build_batch(records))


UNPROVED = {
    "another value": placed(10, b"another value"),
    "one copy and one more value": placed(10, value_at(10)) + placed(12, b"another value"),
    "an offset after the log": placed(21, b"x"),
}


@pytest.mark.parametrize("subject", UNPROVED)
@pytest.mark.parametrize("was_clean", [True, False])
def test_an_overlap_of_two_histories_is_refused_and_nothing_changed(
    env: MemoryEnv, subject: str, was_clean: bool
) -> None:
    overlapping_log(env, UNPROVED[subject])
    before = {base: content(env, base, LOG) for base in (0, 5, 10, 15)}
    with pytest.raises(OverlappingSegmentsError) as caught:
        open_log(env, was_clean=was_clean, recovery_point=20 if was_clean else 0)
    assert file_name(5, LOG) in str(caught.value)
    assert {base: content(env, base, LOG) for base in before} == before


def test_a_batch_that_holds_offsets_of_two_segments_is_refused(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 9)
    append(log, value_at(9), value_at(10))
    log.roll(NOW_MS)
    log.close()
    put(env, f"{FOLDER}/{file_name(10, LOG)}", placed(10, value_at(10)))
    with pytest.raises(OverlappingSegmentsError, match="9 to 10"):
        open_log(env)


def test_one_offset_that_lies_is_damage_of_its_batch_alone(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 20)
    log.flush()
    overwrite(env, file_name(5, LOG), (17).to_bytes(8, "big"), BATCH_BYTES)
    log = open_log(env)
    assert offsets_in(log, start=7) == list(range(7, 20))
    assert [(damage.base_offset, damage.position) for damage in log.damage.ranges] == [
        (5, BATCH_BYTES)
    ]


# --- offsets that go back -----------------------------------------------------------------------


def log_with_offsets_that_go_back(env: MemoryEnv) -> Log:
    log = open_log(env)
    fill(log, 20)
    log.close()
    assert [base for base, _ in segments_of(log)][:3] == [0, 5, 10]
    overwrite(env, file_name(5, LOG), (5).to_bytes(8, "big"), 2 * BATCH_BYTES)
    return log


@pytest.mark.parametrize("indexes", ["there", "missing", "zeroed"])
@pytest.mark.parametrize("was_clean", [True, False])
def test_a_closed_segment_whose_offsets_go_back_is_damaged_and_the_rest_is_served(
    env: MemoryEnv, indexes: str, was_clean: bool
) -> None:
    log_with_offsets_that_go_back(env)
    for kind in (INDEX, TIME_INDEX) if indexes != "there" else ():
        path, size_bytes = f"{FOLDER}/{file_name(5, kind)}", len(content(env, 5, kind))
        env.unlink(path)
        if indexes == "zeroed":
            put(env, path, bytes(size_bytes))
    log = open_log(env, was_clean=was_clean, recovery_point=20)
    assert log.log_end_offset == 20
    for offset in {*range(20)} - {7}:
        data = log.reader.read(offset, BATCH_BYTES, end_offset=20).read()
        assert read_header(data).base_offset == offset
    assert append(log, b"x").first_offset == 20
    if indexes != "there":
        assert [(damage.base_offset, damage.position) for damage in log.damage.ranges] == [
            (5, 2 * BATCH_BYTES)
        ]


@pytest.mark.parametrize("lie", [1, 2, 16, 1024, 1 << 20])
@pytest.mark.parametrize("field", ["base offset", "last offset delta"])
@pytest.mark.parametrize("state", ["closed, without index", "closed, not clean", "active"])
def test_an_offset_that_lies_ahead_costs_no_other_batch(
    env: MemoryEnv, lie: int, field: str, state: str
) -> None:
    config = replace(SMALL, segment_bytes=1 << 20)
    log = open_log(env, config)
    fill(log, 20)
    if state != "active":
        log.roll(NOW_MS)
        fill(log, 2)
    end = log.log_end_offset
    log.close()
    if field == "base offset":
        overwrite(env, file_name(0, LOG), (3 + lie).to_bytes(8, "big"), 3 * BATCH_BYTES)
    else:
        overwrite(env, file_name(0, LOG), lie.to_bytes(4, "big"), 3 * BATCH_BYTES + 23)
    was_clean = state == "closed, without index"
    if was_clean:
        env.unlink(f"{FOLDER}/{file_name(0, INDEX)}")
    recovery_point = 5 if state == "closed, not clean" else end
    log = open_log(env, config, was_clean=was_clean, recovery_point=recovery_point)
    assert [(damage.position, damage.end_position) for damage in log.damage.ranges] == [
        (3 * BATCH_BYTES, 4 * BATCH_BYTES)
    ]
    assert offsets_in(log, start=4) == list(range(4, end))
    assert log.log_end_offset == end


def test_an_offset_that_lies_behind_the_recovery_point_cuts_nothing(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 4)
    overwrite(env, file_name(0, LOG), (9).to_bytes(8, "big"), BATCH_BYTES)
    log = open_log(env)
    assert offsets_in(log, start=2) == [2, 3]
    assert [damage.position for damage in log.damage.ranges] == [BATCH_BYTES]


@pytest.mark.parametrize(
    ("offsets", "damaged"), [((0, 35, 20, 30, 40), 1), ((0, 15, 13, 30, 40), 2)]
)
def test_of_two_batches_that_contradict_each_other_one_is_damage(
    env: MemoryEnv, offsets: tuple[int, ...], damaged: int
) -> None:
    """It is the second one if that would fit between the first one and the one after both."""
    open_log(env).close()
    for name in env.listdir(FOLDER):
        env.unlink(f"{FOLDER}/{name}")
    batches = [batch_of(value_at(offset)) for offset in offsets]
    for offset, batch in zip(offsets, batches, strict=True):
        batch[:8] = offset.to_bytes(8, "big")
    put(env, f"{FOLDER}/{file_name(0, LOG)}", b"".join(batches))
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20), recovery_point=41)
    assert [damage.position for damage in log.damage.ranges] == [damaged * BATCH_BYTES]
    assert log.log_end_offset == 41


@pytest.mark.parametrize("offset", [(1 << 62), (1 << 31) + 5, (1 << 32) + 6])
def test_an_offset_too_far_from_its_segment_is_damage(env: MemoryEnv, offset: int) -> None:
    log_with_offsets_that_go_back(env)
    overwrite(env, file_name(5, LOG), offset.to_bytes(8, "big"), 2 * BATCH_BYTES)
    for kind in (INDEX, TIME_INDEX):
        env.unlink(f"{FOLDER}/{file_name(5, kind)}")
    log = open_log(env, was_clean=True, recovery_point=20)
    assert [(damage.base_offset, damage.position) for damage in log.damage.ranges] == [
        (5, 2 * BATCH_BYTES)
    ]
    assert offsets_in(log, start=8) == list(range(8, 20))


@pytest.mark.parametrize("kind", [INDEX, TIME_INDEX])
@pytest.mark.parametrize("was_clean", [True, False])
def test_an_index_that_claims_more_than_the_log_holds_does_not_stop_appends(
    env: MemoryEnv, kind: str, was_clean: bool
) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    for at in range(5):
        append(log, value_at(at), timestamp=NOW_MS + at)
    log.close()
    at = len(content(env, 0, kind)) - (8 if kind == INDEX else 4)
    overwrite(env, file_name(0, kind), (1 << 30).to_bytes(4, "big"), at)
    log = open_log(env, was_clean=was_clean, recovery_point=5)
    for at in range(5, 9):
        append(log, value_at(at), timestamp=NOW_MS + at)
    log.roll(NOW_MS)
    assert offsets_in(log) == list(range(9))
    offset_found = first_since(log, NOW_MS + 6)
    assert offset_found is not None
    assert offset_found.offset == 6
