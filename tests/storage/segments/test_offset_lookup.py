"""Positions of offsets: gaps, damage, indexes that are wrong or not loaded, positions kept."""

import pytest

from storage.errors import DamagedSegmentError
from storage.format.index import IndexLimits
from storage.segments.index_load import IndexLoad
from storage.segments.offset_lookup import (
    HINTS_MAX,
    add_hint,
    locate,
    locate_end,
    locate_intact,
    locate_readable,
)
from storage.segments.segment import IndexNotReadyError, Segment
from tests.support.storage.log_files import BASE, SIZE, batch_at
from tests.support.storage.memory_env import MemoryEnv

BATCHES = 10
END = BATCHES * SIZE


def position_of(offset: int) -> int:
    """Return the position of the batch at or after an offset: even offsets have one."""
    return -(-(offset - BASE) // 2) * SIZE


@pytest.fixture
def segment() -> Segment:
    """A closed segment with a batch at each second offset and an entry for each other batch."""
    env = MemoryEnv()
    env.mkdir("/d")
    segment = Segment.begin(env, "/d", BASE, IndexLimits(SIZE, 1 << 20))
    for offset in range(BASE, BASE + 2 * BATCHES, 2):
        segment.append(batch_at(offset), SIZE, offset, 1)
    segment.seal()
    return segment


def spoil(segment: Segment, number: int, at: int = SIZE - 1) -> None:
    """Flip bits of a batch: in its last record by default."""
    position = number * SIZE + at
    segment.file.pwrite(bytes([segment.file.pread(1, position)[0] ^ 0xFF]), position)
    segment.position_hints.clear()


def test_an_offset_has_the_position_of_its_batch_or_of_the_next_one(segment: Segment) -> None:
    for _ in range(2):  # the second time from the positions kept
        for offset in range(BASE - 1, BASE + 2 * BATCHES + 1):
            expected = min(max(0, position_of(offset)), END)
            assert locate(segment, offset) == locate_end(segment, offset) == expected


def test_the_positions_kept_are_few(segment: Segment) -> None:
    for offset in range(2 * HINTS_MAX):
        add_hint(segment, BASE + offset, 0)
        assert len(segment.position_hints) <= HINTS_MAX


def test_the_positions_kept_are_those_of_the_present_file(segment: Segment) -> None:
    assert locate(segment, BASE + 8) == 4 * SIZE
    segment.open_for_append()
    segment.cut_back(2 * SIZE)
    assert locate(segment, BASE + 8) == 2 * SIZE
    clone = segment.clone()
    assert locate(clone, BASE + 2) == SIZE
    assert BASE + 2 not in segment.position_hints


def test_an_index_that_is_not_loaded_is_left_to_a_thread(segment: Segment) -> None:
    segment.note_synced(END, was_sealed=True)
    for _ in range(2):
        segment.drop_idle_indexes()
    assert not segment.has_indexes
    with pytest.raises(IndexNotReadyError) as raised:
        locate(segment, BASE + 8, in_place=False)
    load = IndexLoad(segment, raised.value.repair)
    load.run()
    assert load.finish()
    assert locate(segment, BASE + 8, in_place=False) == 4 * SIZE


def test_an_index_that_contradicts_the_log_is_rebuilt(segment: Segment) -> None:
    positions = segment.indexes.offsets.positions
    for number in range(len(positions)):
        positions[number] += 3
    with pytest.raises(IndexNotReadyError):
        locate(segment, BASE + 10, in_place=False)
    assert locate(segment, BASE + 10) == 5 * SIZE
    assert locate(segment, BASE + 12, in_place=False) == 6 * SIZE


def test_an_offset_in_damage_has_a_position_only_for_readers_that_skip_it(
    segment: Segment,
) -> None:
    spoil(segment, 4, at=16)  # the format of the batch
    segment.note_damage(4 * SIZE, "bad format")
    with pytest.raises(DamagedSegmentError):
        locate(segment, BASE + 8)
    assert locate_readable(segment, BASE + 8) == 5 * SIZE
    assert locate_end(segment, BASE + 8) == 4 * SIZE


def test_a_truncation_trusts_no_header_of_a_batch_that_is_damaged(segment: Segment) -> None:
    spoil(segment, 4)
    assert locate(segment, BASE + 8) == 4 * SIZE
    assert locate_intact(segment, BASE) == 0
    with pytest.raises(DamagedSegmentError):
        locate_intact(segment, BASE + 8)
    assert [damage.position for damage in segment.damages] == [4 * SIZE]
    assert locate_intact(segment, BASE + 10) == 5 * SIZE
