"""Sets of offsets, in both of their forms, and their files; rows on their way between stages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.rows import CHUNK_ROWS, CorruptRowsError, RowWriter, read_rows
from pipeline.stages.survivors import (
    CorruptSurvivorsError,
    Kind,
    SegmentSurvivors,
    Survivors,
    SurvivorsFile,
    cut,
    read_survivors,
    write_survivors,
)
from tests.support.storage.memory_env import MemoryEnv

WIDTHS = st.sampled_from([1, 7, 8, 9, 64, 1000, 1 << 20, 1 << 31])


@st.composite
def sets(draw: st.DrawFn, base: int, width: int) -> list[int]:
    return sorted(draw(st.sets(st.integers(base, base + width - 1), max_size=20)))


def survivors_of(base: int, width: int, offsets: list[int]) -> Survivors:
    return Survivors.of(base, base + width, np.array(offsets, dtype=np.int64))


@given(st.data(), st.sampled_from([0, 5, 1 << 40]), WIDTHS)
def test_a_set_holds_its_offsets_in_either_form(data: st.DataObject, base: int, width: int) -> None:
    offsets = data.draw(sets(base, width))
    survivors = survivors_of(base, width, offsets)
    assert (survivors.bits is None) != (survivors.offsets is None)
    assert len(survivors.to_bytes()) <= max(8 * len(offsets), 1)
    assert survivors.listed().tolist() == offsets
    assert survivors.count == len(offsets)
    listed = survivors.offsets is not None
    again = Survivors.from_bytes(base, base + width, survivors.to_bytes(), listed=listed)
    assert again.listed().tolist() == offsets


@given(st.data(), WIDTHS)
def test_a_union_holds_what_its_parts_hold(data: st.DataObject, width: int) -> None:
    parts = data.draw(st.lists(sets(40, width), min_size=1, max_size=4))
    many = list(range(40, 40 + min(width, 3000)))  # a bitmap among lists, where that can be
    parts += [many] if data.draw(st.booleans()) else []
    survivors = Survivors.union([survivors_of(40, width, part) for part in parts])
    assert survivors.listed().tolist() == sorted({offset for part in parts for offset in part})


@given(st.data(), st.sampled_from([9, 1000, 1 << 31]))
def test_the_second_pass_is_given_every_bit_of_its_windows(data: st.DataObject, width: int) -> None:
    base = 1 << 33
    offsets = data.draw(sets(base, width))
    source = SegmentSurvivors({base: survivors_of(base, width, offsets)}, keyless_seen=False)
    first = data.draw(st.integers(base, base + width - 1))
    last = data.draw(st.integers(first, min(first + 5000, base + width - 1)))
    begin, end = source.window(first, last)
    assert base <= begin <= first <= last < end <= base + width
    assert end - begin <= (1 << 27) + 8
    bits = np.zeros(((end - begin) >> 3) + 1, dtype=np.uint8)
    source.mark(bits, begin, end)
    marked = np.flatnonzero(np.unpackbits(bits, bitorder="little")) + begin
    assert [item for item in marked.tolist() if item < end] == [
        offset for offset in offsets if begin <= offset < end
    ]


def test_offsets_are_cut_at_the_segments() -> None:
    offsets = np.array([3, 10, 11, 35], dtype=np.int64)
    all_survivors = list(cut(offsets, [(0, 10), (10, 20), (20, 30), (30, 1 << 40)]))
    assert [
        (survivors.base_offset, survivors.listed().tolist()) for survivors in all_survivors
    ] == [
        (0, [3]),
        (10, [10, 11]),
        (30, [35]),
    ]


def test_files_tell_of_a_segment_together() -> None:
    env = MemoryEnv(1)
    env.mkdir("d")
    write_survivors(env, "d/a", [(Kind.LIVE, survivors_of(0, 100, [1, 2]))])
    write_survivors(
        env,
        "d/b",
        [
            (Kind.LIVE, survivors_of(0, 100, [7])),
            (Kind.DELETES, survivors_of(0, 100, [9])),
            (Kind.LIVE, survivors_of(100, 1 << 40, [5000])),
        ],
    )
    files = [SurvivorsFile(env, "d/a"), SurvivorsFile(env, "d/b")]
    assert read_survivors(files, 0, 100).listed().tolist() == [1, 2, 7]
    assert read_survivors(files, 0, 100, Kind.DELETES).listed().tolist() == [9]
    assert read_survivors(files, 100, (1 << 40) + 100).listed().tolist() == [5000]
    assert read_survivors(files, 7000, 8000).count == 0


def test_a_damaged_file_of_survivors_is_never_believed() -> None:
    env = MemoryEnv(1)
    env.mkdir("d")
    size = write_survivors(env, "d/a", [(Kind.LIVE, survivors_of(0, 100, [1, 2, 50]))])
    whole = env.read_file("d/a")
    assert len(whole) == size
    for at in range(size):
        for spoilt in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            file = env.open("d/a", create=True, truncate=True)
            file.pwrite(spoilt, 0)
            file.close()
            with pytest.raises(CorruptSurvivorsError):
                read_survivors([SurvivorsFile(env, "d/a")], 0, 100)


def test_rows_come_back_by_shard_and_in_their_order() -> None:
    env = MemoryEnv(1)
    env.mkdir("d")
    rng = np.random.default_rng(7)
    writer = RowWriter(env, "d", "dirty", 5)
    count = CHUNK_ROWS + 1000
    rows = rng.integers(0, 1 << 63, size=count * 3, dtype=np.uint64) * 2
    rows[2::3] = np.arange(count, dtype=np.uint64)  # the first is no row
    for part in (rows[: 3 * 100], rows[3 * 100 :]):
        writer.add(np.ascontiguousarray(part), len(part) // 3)
    files = writer.close()
    assert sorted(files) == ["0", "1", "2", "3", "4"]
    seen = []
    for shard, row_file in files.items():
        pieces = [
            piece[: 3 * result].reshape(-1, 3).copy()
            for piece, result in read_rows(env, f"d/{row_file.name}", row_file)
        ]
        together = np.concatenate(pieces)
        assert len(together) == row_file.rows
        assert ((together[:, 0] >> np.uint64(32)) * 5 >> np.uint64(32) == int(shard)).all()
        assert (np.diff(together[:, 2].astype(np.int64)) > 0).all()
        seen.append(together)
    everything = np.concatenate(seen)
    assert (everything[np.argsort(everything[:, 2])] == rows.reshape(-1, 3)[1:]).all()


@pytest.mark.parametrize("how", ["flip", "cut", "longer"])
def test_damaged_rows_are_never_believed(how: str) -> None:
    env = MemoryEnv(1)
    env.mkdir("d")
    writer = RowWriter(env, "d", "dirty", 1)
    writer.add(np.arange(1, 31, dtype=np.uint64), 10)
    row_file = writer.close()["0"]
    data = env.read_file(f"d/{row_file.name}")
    spoilt = {"flip": data[:50] + b"\xff" + data[51:], "cut": data[:-1], "longer": data + b"x"}
    file = env.open(f"d/{row_file.name}", create=True, truncate=True)
    file.pwrite(spoilt[how], 0)
    file.close()
    with pytest.raises(CorruptRowsError):
        list(read_rows(env, f"d/{row_file.name}", row_file))
