"""Decide the keys of one shard: which of their records survive."""

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Ints, Words
from cleaner.engine.kernels.passes.shards import list_missing, merge_rows
from cleaner.engine.key_map.offset_map import OffsetMap
from cleaner.engine.spilled.scratch import LiveOffsets
from cleaner.job import CleanJob

_ROUNDS_MAX: Final = 1 << 20  # a map of one key gets through a million keys of a shard in these


class RowSource(Protocol):
    """Rows by shard, those of a key in ascending order of offsets."""

    def count(self, shard: int) -> int:
        """Return how many rows a shard has at most."""
        ...

    def of(self, shard: int) -> Iterator[tuple[Words, int]]:
        """Yield a shard's rows by piece as (rows, count), each valid until the next one."""
        ...

    def free_buffer(self) -> None:
        """Free the memory; the next use takes it again."""


def merge_shard(
    job: CleanJob,
    shard: int,
    dirty: Sequence[RowSource],
    below: Sequence[RowSource],
    live_offsets: LiveOffsets,
) -> tuple[int, int]:
    """Add the survivors of a shard to `live_offsets`; return its keys and the number of rounds.

    `dirty` and `below` are in the order of their segments. Raises what the files raise.
    """
    total = sum(rows.count(shard) for rows in dirty)
    rounds, number = 1, 0
    keys = done = 0
    result: Ints = np.empty(0, dtype=np.int64)
    while number < rounds:
        table = OffsetMap(job.dedupe_buffer_bytes, total, job.hash_key)
        if not _fill(table, dirty, shard, number, rounds):
            # Results of earlier rounds stay valid: each covers the keys of two new rounds.
            rounds, number = rounds * 2, number * 2
            assert rounds <= _ROUNDS_MAX
            continue
        keys += table.entries
        done += 1
        live_offsets.add_map(table.table, int(table.state[fields.SLOTS]))
        for rows_below in below:
            for rows, count in rows_below.of(shard):
                if len(result) < count:
                    result = np.empty(count, dtype=np.int64)
                unknown = int(
                    list_missing(rows, count, number, rounds, table.table, table.state, result)
                )
                live_offsets.add(result[:unknown])
            rows_below.free_buffer()
        number += 1
    return keys, done


def _fill(
    table: OffsetMap, dirty: Sequence[RowSource], shard: int, number: int, rounds: int
) -> bool:
    """Put one round's keys of a shard into a map; return False if they do not fit."""
    for rows_file in dirty:
        for rows, count in rows_file.of(shard):
            table.reserve(count)
            if not merge_rows(rows, count, number, rounds, table.table, table.state):
                return False
        rows_file.free_buffer()
    return True
