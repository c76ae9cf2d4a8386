"""Stage `combine`: fingerprint the keys of some adjacent segments, by shard.

Rules
- The dirty section is indexed as in the cleaner's first pass. When the map is full it spills to the
  files of the shards, so a key has one row per spill, its last record.
- In the clean section every record is listed. It is removed if its key occurs in the dirty section,
  and stays next to an older record of the clean section, as with the cleaner's map.
- Damage is found where the cleaner's two passes would find it. Damage found later, while rewriting,
  makes one task rewrite the whole partition.
- Transaction indexes are compared with the markers as far as these segments show them.
"""

from dataclasses import replace

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.key_rows import Listing
from cleaner.engine.segment_scan import scan_segment
from cleaner.engine.spilled.spilling_map import SpillingMap
from cleaner.engine.two_pass.index_pass import index_segment
from cleaner.job import Damage, SourceSegment, UnlimitedControl, job_over_all_records
from pipeline.stages.counting import KeysDoNotFitError, count_segment
from pipeline.stages.planning import source_segments
from pipeline.stages.rows import RowWriter
from pipeline.stages.task_files import open_task_files
from pipeline.stages.tasks import (
    CombineResult,
    CombineTask,
    RowFile,
    SegmentCounts,
    decode,
    encode,
)
from storage.env import Env, RealEnv
from storage.errors import DamagedSegmentError


def run_task(task: bytes) -> bytes:
    """See pipeline.stages. Raises what `combine` raises."""
    return encode(combine(RealEnv(), decode(CombineTask, task)))


def combine(env: Env, task: CombineTask) -> CombineResult:
    """Write the rows of the segments. Raises StorageError, InputsGoneError, OSError."""
    started = env.monotonic()
    with open_task_files(env, task.source, task.job) as place:
        bases = [source.base_offset for source in source_segments(task.job)]
        local = place.job_over(bases)
        name, path = place.folder("combine", scratch=True)
        work = _Combination(env, replace(task, job=local), path)
        try:
            counts = work.run()
        finally:
            files = work.close()
        place.check_inputs(local, bases)
        place.deliver(name, [file.name for row_files in files for file in row_files.values()])
        state = work.context.state
        return CombineResult(
            folder=name,
            dirty=files[0],
            clean=files[1],
            damaged=place.damage_reports(work.damaged, work.indexing),
            keyless_seen=bool(state[fields.KEYLESS_SEEN]),
            transactions_seen=bool(state[fields.TRANSACTIONS_SEEN]),
            bytes_read=work.context.reader.bytes_read,
            seconds=env.monotonic() - started,
            counts=counts,
        )


class _Combination:
    def __init__(self, env: Env, task: CombineTask, path: str) -> None:
        job = job_over_all_records(task.job) if task.with_counts else task.job
        self._task = task
        self._job = job
        self._dirty = RowWriter(env, path, "dirty", task.shards)
        self._clean = RowWriter(env, path, "clean", task.shards)
        section = max(job.end_offset - job.first_dirty_offset, 0)
        self._map = SpillingMap(job, task.memory_bytes, section, self._dirty.add)
        self.context = CleanContext(env, job, UnlimitedControl(), key_map=self._map)
        self.damaged: dict[int, Damage] = {}
        self.indexing: set[int] = set()  # base offsets of damage in the dirty section

    def run(self) -> tuple[SegmentCounts, ...]:
        """Index all segments; return their counts if the task asks for them."""
        counted: list[SegmentCounts] = []
        for source in source_segments(self._job):
            try:
                if self._task.with_counts:
                    counted.append(count_segment(self.context, source, self.damaged))
                else:
                    self._index(source)
            except DamagedSegmentError as error:
                self.damaged[source.base_offset] = Damage.of(error)
                self.indexing.add(source.base_offset)
                self.context.transactions.forget_open(self.context.state)
            self.context.release()
            if source.base_offset < self._job.first_dirty_offset:
                self._list(source)
        self._map.spill()
        return tuple(counted)

    def _index(self, source: SourceSegment) -> None:
        """Put the keys from the first dirty offset on into the map. Raises DamagedSegmentError."""
        if source.next_base_offset <= self._job.first_dirty_offset:
            return
        is_full = index_segment(self.context, source, "map", 0, 1)
        if is_full:
            raise KeysDoNotFitError

    def _list(self, source: SourceSegment) -> None:
        """List the records below the first dirty offset."""
        listing = Listing(self.context, self._clean.add)
        try:
            scan_segment(self.context, source, listing)
        except DamagedSegmentError as error:
            self.damaged.setdefault(source.base_offset, Damage.of(error))
        listing.flush()

    def close(self) -> tuple[dict[str, RowFile], dict[str, RowFile]]:
        """Close all files; return those of the dirty and of the clean section, by shard."""
        self.context.reader.close()
        return self._dirty.close(), self._clean.close()
