"""Stage `index`: index and count a partition in one task, if its keys fit.

A record is live if it is the last committed record of its key and not a tombstone. The key map
gives these records at the end, so every record is read once.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.compile import Ints
from cleaner.engine.kernels.passes.shards import list_entries
from cleaner.engine.key_map.offset_map import OffsetMap
from cleaner.job import Damage, UnlimitedControl, job_over_all_records
from pipeline.stages.counting import KeysDoNotFitError, count_segment
from pipeline.stages.planning import source_segments
from pipeline.stages.survivors import Kind, Survivors, cut, write_survivors
from pipeline.stages.task_files import open_task_files
from pipeline.stages.tasks import (
    IndexResult,
    IndexTask,
    SegmentCounts,
    SurvivorFiles,
    decode,
    encode,
)
from storage.env import Env, RealEnv

SURVIVORS: Final = "survivors"
# Share of the memory for the map; the rest is for sorting the offsets of its entries.
TABLE_SHARE: Final = 0.6


def run_task(task: bytes) -> bytes:
    """See pipeline.stages. Raises what `index_partition` raises."""
    return encode(index_partition(RealEnv(), decode(IndexTask, task)))


def index_partition(env: Env, task: IndexTask) -> IndexResult:
    """Index a whole partition. Raises TransactionIndexError, InputsGoneError, OSError."""
    started = env.monotonic()
    sources = source_segments(task.job)
    bases = [source.base_offset for source in sources]
    with open_task_files(env, task.source, task.job) as place:
        local = job_over_all_records(place.job_over(bases))
        keys_max = max(local.end_offset - local.first_dirty_offset, 0)
        key_map = OffsetMap(int(task.memory_bytes * TABLE_SHARE), keys_max, local.hash_key)
        context = CleanContext(env, local, UnlimitedControl(), key_map=key_map)
        damaged: dict[int, Damage] = {}
        try:
            counts = [count_segment(context, source, damaged) for source in sources]
        except KeysDoNotFitError:
            return IndexResult(fits=False)
        finally:
            context.reader.close()
        place.check_inputs(local, bases)
        sound = [source for source in sources if source.base_offset not in damaged]
        checked = [source for source in sound if source.base_offset >= local.first_dirty_offset]
        context.transactions.check_markers(checked, local.end_offset)
        sets = _sets(key_map, [(source.base_offset, source.next_base_offset) for source in sources])
        name, path = place.folder("index", scratch=True)
        write_survivors(env, f"{path}/{SURVIVORS}", sets)
        place.deliver(name, [SURVIVORS])
        return IndexResult(
            fits=True,
            survivors=SurvivorFiles(name, (SURVIVORS,)),
            counts=counted(counts, sets),
            damaged=place.damage_reports(damaged),
            keys=key_map.entries,
            seconds=env.monotonic() - started,
        )


def _sets(key_map: OffsetMap, ranges: list[tuple[int, int]]) -> list[tuple[Kind, Survivors]]:
    values: Ints = np.empty(key_map.entries, dtype=np.int64)
    deletes: Ints = np.empty(key_map.entries, dtype=np.int64)
    count = int(list_entries(key_map.table, key_map.state, values, deletes))
    live, gone = values[:count], deletes[: key_map.entries - count]
    live.sort()
    gone.sort()
    return [(Kind.LIVE, survivors) for survivors in cut(live, ranges)] + [
        (Kind.DELETES, survivors) for survivors in cut(gone, ranges)
    ]


def counted(
    counts: list[SegmentCounts], sets: list[tuple[Kind, Survivors]]
) -> tuple[SegmentCounts, ...]:
    """Return the counts with the live records and tombstones of each segment filled in."""
    live = {survivors.base_offset: survivors.count for kind, survivors in sets if kind == Kind.LIVE}
    gone = {
        survivors.base_offset: survivors.count for kind, survivors in sets if kind == Kind.DELETES
    }
    return tuple(
        replace(
            counts,
            live=live.get(counts.base_offset, 0),
            tombstones=gone.get(counts.base_offset, 0),
        )
        for counts in counts
    )
