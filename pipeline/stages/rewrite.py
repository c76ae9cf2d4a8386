"""Stage `rewrite`: rewrite groups of a partition by the survivors of earlier stages.

Rules
- This is the cleaner's second pass, with survivor files in place of the key map.
- Groups are independent if there are no transactions and all damage is known. The state of a
  transaction crosses groups, so with markers one task rewrites all groups in order, and first
  compares the transaction indexes with the markers, as the cleaner's first pass does.
"""

from collections.abc import Sequence
from dataclasses import replace

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.passes.shards import check_markers
from cleaner.engine.key_map.offset_map import OffsetMap
from cleaner.engine.segment_scan import scan_segment
from cleaner.engine.two_pass.rewrite_pass import RewritePass
from cleaner.job import SourceSegment, UnlimitedControl
from pipeline.stages.planning import source_segments
from pipeline.stages.survivors import SegmentSurvivors, Survivors, SurvivorsFile, read_survivors
from pipeline.stages.task_files import TaskFiles, delivered_names, open_task_files
from pipeline.stages.tasks import DamageFound, RewriteResult, RewriteTask, decode, encode
from storage.env import Env, RealEnv


def run_task(task: bytes) -> bytes:
    """See pipeline.stages. Raises what `rewrite` raises."""
    return encode(rewrite(RealEnv(), decode(RewriteTask, task)))


def rewrite(env: Env, task: RewriteTask) -> RewriteResult:
    """Rewrite groups into a new folder. Raises StorageError, InputsGoneError, OSError."""
    started = env.monotonic()
    segments = source_segments(task.job)
    bases = [source.base_offset for source in segments]
    with open_task_files(env, task.source, task.job) as place:
        local = place.job_over(bases)
        survivors = SegmentSurvivors(_read(place, task, segments), keyless_seen=task.keyless_seen)
        name, path = place.folder("rewrite")
        control = UnlimitedControl()
        context = CleanContext(
            env,
            replace(local, output_directory=path),
            control,
            key_map=OffsetMap(0, 0, local.hash_key),
            survivors=survivors,
        )
        damaged = {damage.base_offset: damage.damage for damage in task.damaged}
        try:
            if task.check_markers:
                _check_markers(context, segments, task.damaged)
            work = RewritePass(context, dict(damaged))
            work.run(local.groups)
        finally:
            context.reader.close()
        place.check_inputs(local, bases)
        place.deliver(name, delivered_names(control.groups))
        damages = {base: damage for base, damage in work.damaged.items() if base not in damaged}
        return RewriteResult(
            folder=name,
            groups=tuple(control.groups),
            totals=work.totals,
            damaged=place.damage_reports(damages),
            bytes_read=context.reader.bytes_read,
            seconds=env.monotonic() - started,
        )


def _read(
    place: TaskFiles, task: RewriteTask, segments: list[SourceSegment]
) -> dict[int, Survivors]:
    """Return the survivors of each segment."""
    files = []
    for survivor_files in task.survivors:
        path = place.fetch(survivor_files.folder, survivor_files.names)
        files += [SurvivorsFile(place.env, f"{path}/{name}") for name in survivor_files.names]
    return {
        source.base_offset: read_survivors(files, source.base_offset, source.next_base_offset)
        for source in segments
    }


class _Following:
    """A scan of transaction markers only."""

    def __init__(self, context: CleanContext) -> None:
        self._context = context

    def make_room(self, records: int) -> None:
        """See BatchConsumer: records need no room."""

    def batches(self) -> tuple[int, int]:
        """See BatchConsumer."""
        reader = self._context.reader
        code, at = check_markers(reader.buffer, reader.at, reader.end, self._context.space)
        return code, at

    def unpacked(self, count: int) -> int:
        """See BatchConsumer: nothing is decompressed."""
        raise AssertionError


def _check_markers(
    context: CleanContext, segments: list[SourceSegment], damaged: Sequence[DamageFound]
) -> None:
    """Compare the markers of the dirty section with the transaction indexes.

    The combine stage verified the content, so this reads only headers and markers, up to known
    damage. Raises TransactionIndexError, and DamagedSegmentError for further damage.
    """
    job, transactions = context.job, context.transactions
    broken = {damage.base_offset: damage.position for damage in damaged if damage.indexing}
    read: list[SourceSegment] = []
    for source in segments:
        if source.next_base_offset <= job.first_dirty_offset:
            continue
        sound_bytes = broken.get(source.base_offset)
        if sound_bytes is None:
            scan_segment(context, source, _Following(context))
            read.append(source)
        else:
            scan_segment(context, replace(source, size_bytes=sound_bytes), _Following(context))
            transactions.forget_open(context.state)
    context.reader.close()
    checked = [source for source in read if source.base_offset >= job.first_dirty_offset]
    transactions.check_markers(checked, context.map_end)
    transactions.forget_open(context.state)
