"""Stage `merge`: find the survivors of one shard of a partition's keys.

Rules
- Rows of the dirty section enter a table, oldest first, so the last row of each key survives. A row
  of the clean section survives if its key is not in the table.
- If the table is full, the stage starts again with twice as many rounds, each over a part of the
  keys. Memory is therefore bounded; the union of all rounds is the result.
- Survivors are written per segment, in one file for each reader.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from cleaner.engine.kernels.compile import Ints
from cleaner.engine.kernels.passes.shards import list_entries, list_missing, merge_rows
from cleaner.engine.key_map.offset_map import OffsetMap
from pipeline.stages.rows import CHUNK_ROWS, read_rows
from pipeline.stages.survivors import Kind, Survivors, cut, write_survivors
from pipeline.stages.task_files import TaskFiles, open_task_files
from pipeline.stages.tasks import MergeResult, MergeTask, RowFile, ShardFiles, decode, encode
from storage.env import Env, RealEnv

# Share of the memory for the table; the rest is for sorting the offsets of its entries.
_TABLE_SHARE: Final = 0.5
ROUNDS_MAX: Final = 1 << 20  # enough for a billion keys with a table of two slots


def run_task(task: bytes) -> bytes:
    """See pipeline.stages. Raises what `merge` raises."""
    return encode(merge(RealEnv(), decode(MergeTask, task)))


def merge(env: Env, task: MergeTask) -> MergeResult:
    """Find and write the survivors of a shard. Raises CorruptRowsError, OSError."""
    started = env.monotonic()
    with open_task_files(env, task.source, task.job) as place:
        paths = [place.fetch(rows.folder, _names(rows)) for rows in task.rows]
        rounds = 1
        while (done := _try(env, task, paths, rounds)) is None:
            rounds *= 2
            assert rounds <= ROUNDS_MAX
        name, path = place.folder("merge", scratch=True)
        files = _write(place, name, path, task, done)
        live, tombstones = done.counts[Kind.LIVE], done.counts[Kind.DELETES]
        return MergeResult(
            folder=name,
            files=files,
            keys=done.keys,
            seconds=env.monotonic() - started,
            live={str(base): count for base, count in sorted(live.items())},
            tombstones={str(base): count for base, count in sorted(tombstones.items())},
        )


def _names(rows: ShardFiles) -> list[str]:
    return [row_file.name for row_file in (rows.dirty, rows.clean) if row_file is not None]


class _Merged:
    """The survivors found in the rounds so far."""

    def __init__(self, readers: int) -> None:
        self.keys = 0
        self.sets: list[list[tuple[Kind, Survivors]]] = [[] for _ in range(readers)]
        self.counts: dict[Kind, Counter[int]] = {kind: Counter() for kind in Kind}

    def add(self, task: MergeTask, kind: Kind, offsets: Ints) -> None:
        offsets.sort()
        for reader, ranges in enumerate(task.ranges):
            for survivors in cut(offsets, ranges):
                self.sets[reader].append((kind, survivors))
                self.counts[kind][survivors.base_offset] += survivors.count


def _try(env: Env, task: MergeTask, paths: list[str], rounds: int) -> _Merged | None:
    """Run all rounds; return None if a table was full."""
    rows = sum(source.dirty.rows for source in task.rows if source.dirty is not None)
    merged = _Merged(len(task.ranges))
    for number in range(rounds):
        limit_bytes = int(task.memory_bytes * _TABLE_SHARE)
        table = OffsetMap(limit_bytes, rows, task.job.hash_key)
        for path, row_file in _files(task, paths, clean=False):
            for piece, count in read_rows(env, path, row_file):
                table.reserve(count)
                if not merge_rows(piece, count, number, rounds, table.table, table.state):
                    return None
        _list_survivors(env, task, paths, turn=(number, rounds), table=table, merged=merged)
    return merged


def _list_survivors(
    env: Env,
    task: MergeTask,
    paths: list[str],
    *,
    turn: tuple[int, int],
    table: OffsetMap,
    merged: _Merged,
) -> None:
    merged.keys += table.entries
    values: Ints = np.empty(table.entries, dtype=np.int64)
    deletes: Ints = np.empty(table.entries, dtype=np.int64)
    count = int(list_entries(table.table, table.state, values, deletes))
    merged.add(task, Kind.LIVE, values[:count])
    merged.add(task, Kind.DELETES, deletes[: table.entries - count])
    result: Ints = np.empty(CHUNK_ROWS, dtype=np.int64)
    for path, row_file in _files(task, paths, clean=True):
        pieces: list[Ints] = []
        for piece, rows in read_rows(env, path, row_file):
            unknown = int(list_missing(piece, rows, *turn, table.table, table.state, result))
            pieces.append(result[:unknown].copy())
        merged.add(task, Kind.LIVE, np.concatenate(pieces))


def _files(task: MergeTask, paths: list[str], *, clean: bool) -> Iterator[tuple[str, RowFile]]:
    for rows, path in zip(task.rows, paths, strict=True):
        row_file = rows.clean if clean else rows.dirty
        if row_file is not None:
            yield f"{path}/{row_file.name}", row_file


def _write(
    place: TaskFiles, folder: str, path: str, task: MergeTask, merged: _Merged
) -> tuple[tuple[str, ...], ...]:
    """Write one file for each reader with survivors; return the names by reader."""
    names: list[tuple[str, ...]] = []
    for reader, sets in enumerate(merged.sets):
        name = f"survivors-{task.shard}-{reader}"
        if sets:
            write_survivors(place.env, f"{path}/{name}", sets)
        names.append((name,) if sets else ())
    place.deliver(folder, [name for item in names for name in item])
    return tuple(names)
