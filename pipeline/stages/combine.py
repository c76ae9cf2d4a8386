"""Stage `combine`: the keys of some neighbouring segments of a partition, by shard.

Rules
- The dirty section is walked as by the cleaner's first pass, with a map that is emptied into the
  files of the shards when it has taken up its memory: the last record of each key, or a few.
- Of the clean section every record is listed: it goes if its key was written again in the dirty
  section, and stays beside an older one of its own section. So it does in the cleaner's map.
- Damage is where the cleaner's two passes would find it. Whatever else they find is found by the
  rewriting, which then goes through the partition in one piece.
- What the transaction indexes say is held against the markers as far as these segments tell.
"""

from dataclasses import replace

import numpy as np

from cleaner.engine.context import CleanContext
from cleaner.engine.index_pass import index_segment
from cleaner.engine.kernels import fields, survey
from cleaner.engine.kernels.compile import Ints, Words
from cleaner.engine.kernels.layout import SLOT_WORDS, Code
from cleaner.engine.kernels.shards import list_batches, list_unpacked
from cleaner.engine.outcome import Damage
from cleaner.job import CleanJob, SourceSegment
from pipeline.stages.rows import CHUNK_ROWS, RowWriter, SpillingMap
from pipeline.stages.scan import scan_segment
from pipeline.stages.tasks import CombineResult, CombineTask, SegmentCounts, decode, encode
from pipeline.stages.workplace import Collected, workplace
from storage.env import Env, RealEnv
from storage.errors import DamagedSegmentError


def run_task(task: bytes) -> bytes:
    """See pipeline.stages. Raises what `combine` raises."""
    return encode(combine(RealEnv(), decode(CombineTask, task)))


def combine(env: Env, task: CombineTask) -> CombineResult:
    """Write the rows of the task's segments. Raises StorageError, InputsGoneError, OSError."""
    started = env.monotonic()
    with workplace(env, task.source, task.job) as place:
        local = place.job_over(task.bases)
        name, path = place.folder("combine", scratch=True)
        work = _Combination(env, replace(task, job=local), path)
        try:
            counts = work.run()
        finally:
            files = work.close()
        place.check_inputs(local, task.bases)
        place.deliver(name, [file.name for one in files for file in one.values()])
        state = work.context.state
        return CombineResult(
            folder=name,
            dirty=files[0],
            clean=files[1],
            damaged=place.told(work.damaged, work.indexing),
            keyless_met=bool(state[fields.KEYLESS_MET]),
            transactions_met=bool(state[fields.TRANSACTIONS_MET]),
            bytes_read=work.context.reader.bytes_read,
            seconds=env.monotonic() - started,
            counts=counts,
        )


class _Combination:
    def __init__(self, env: Env, task: CombineTask, path: str) -> None:
        job = survey_job(task.job) if task.survey else task.job
        self._task = task
        self._job = job
        self._dirty = RowWriter(env, path, "dirty", task.shards)
        self._clean = RowWriter(env, path, "clean", task.shards)
        section = max(job.end_offset - job.first_dirty_offset, 0)
        self._map = SpillingMap(
            task.memory_bytes, section, job.decompressed_batch_bytes, job.hash_key, self._dirty.add
        )
        self.context = CleanContext(env, job, Collected(), key_map=self._map)
        self.damaged: dict[int, Damage] = {}
        self.indexing: set[int] = set()  # of them, those found in the dirty section

    def run(self) -> tuple[SegmentCounts, ...]:
        """Take the keys of all segments -> what they hold, if that is wanted."""
        counted: list[SegmentCounts] = []
        for source in segments_of(self._job, self._task.bases):
            try:
                if self._task.survey:
                    counted.append(survey_segment(self.context, source, self.damaged))
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
        listing = Listing(self.context, self._clean)
        try:
            scan_segment(self.context, source, listing)
        except DamagedSegmentError as error:
            self.damaged.setdefault(source.base_offset, Damage.of(error))
        listing.flush()

    def close(self) -> tuple[dict, dict]:  # type: ignore[type-arg]
        """Let go of all files -> the dirty and the clean section's rows."""
        self.context.reader.close()
        return self._dirty.close(), self._clean.close()


class Listing:
    """Takes every key of the clean section, and its offset."""

    def __init__(self, context: CleanContext, writer: RowWriter) -> None:
        self._context = context
        self._writer = writer
        self._rows: Words = np.empty(CHUNK_ROWS * SLOT_WORDS, dtype=np.uint64)
        self._listed = 0

    def make_room(self, records: int) -> None:
        """See Taker."""
        if self._listed + records <= len(self._rows) // SLOT_WORDS:
            return
        self.flush()
        if records > len(self._rows) // SLOT_WORDS:
            self._rows = np.empty(records * SLOT_WORDS, dtype=np.uint64)

    def batches(self) -> tuple[int, int]:
        """See Taker."""
        reader = self._context.reader
        code, at, self._listed = list_batches(
            reader.buffer, reader.at, reader.end, self._rows, self._listed, self._context.space
        )
        return code, at

    def unpacked(self, count: int) -> int:
        """See Taker."""
        context, reader = self._context, self._context.reader
        code, self._listed = list_unpacked(
            context.unpacked, count, reader.buffer, reader.at, self._rows, self._listed,
            context.space,
        )  # fmt: skip
        return int(code)

    def flush(self) -> None:
        """Write what was listed."""
        self._writer.add(self._rows, self._listed)
        self._listed = 0


class Surveying:
    """Counts what it is given, and takes its keys."""

    def __init__(self, context: CleanContext) -> None:
        self._context = context
        self.counts: Ints = np.zeros(survey.COUNTS, dtype=np.int64)
        self.counts[survey.FIRST_MS] = survey.NO_FIRST_MS
        self.counts[survey.LAST_MS] = survey.NO_LAST_MS

    def make_room(self, records: int) -> None:
        """See Taker."""
        self._context.map.reserve(records)

    def batches(self) -> tuple[int, int]:
        """See Taker. Raises KeysDoNotFitError."""
        reader = self._context.reader
        code, at = survey.survey_batches(
            reader.buffer, reader.at, reader.end, self.counts, self._context.space
        )
        _check_room(code)
        return code, at

    def unpacked(self, count: int) -> int:
        """See Taker. Raises KeysDoNotFitError."""
        context, reader = self._context, self._context.reader
        code = survey.survey_unpacked(
            context.unpacked, count, reader.buffer, reader.at, self.counts, context.space
        )
        _check_room(code)
        return int(code)


class KeysDoNotFitError(Exception):
    """The map is full; of a combination's, one batch alone has more keys than there is room for."""

    def __init__(self) -> None:
        super().__init__("the keys do not fit into the memory of a task")


def _check_room(code: int) -> None:
    if code == Code.MAP_FULL:
        raise KeysDoNotFitError


def survey_job(job: CleanJob) -> CleanJob:
    """The job as a table is made: everything from the log's start on is new."""
    return replace(job, first_dirty_offset=job.log_start_offset, clean_below=None)


def segments_of(job: CleanJob, bases: tuple[int, ...]) -> list[SourceSegment]:
    """The job's segments with these base offsets, in order."""
    wanted = set(bases)
    return [one for group in job.groups for one in group if one.base_offset in wanted]


def survey_segment(
    context: CleanContext, source: SourceSegment, damaged: dict[int, Damage]
) -> SegmentCounts:
    """Index a segment and count what it holds; damage ends it, and is noted in `damaged`.

    Raises KeysDoNotFitError, TransactionIndexError, OSError.
    """
    taker = Surveying(context)
    try:
        scan_segment(context, source, taker)
    except DamagedSegmentError as error:
        damaged[source.base_offset] = Damage.of(error)
        context.transactions.forget_open(context.state)
    counts = [int(one) for one in taker.counts]
    has_times = counts[survey.LAST_MS] >= counts[survey.FIRST_MS]
    return SegmentCounts(
        base_offset=source.base_offset,
        next_base_offset=source.next_base_offset,
        size_bytes=source.size_bytes,
        batches=counts[survey.BATCHES],
        records=counts[survey.RECORDS],
        control=counts[survey.CONTROL],
        aborted=counts[survey.ABORTED],
        keyless=counts[survey.KEYLESS],
        null_values=counts[survey.NULL_VALUES],
        key_bytes=counts[survey.KEY_BYTES],
        value_bytes=counts[survey.VALUE_BYTES],
        first_ms=counts[survey.FIRST_MS] if has_times else -1,
        last_ms=counts[survey.LAST_MS] if has_times else -1,
    )
