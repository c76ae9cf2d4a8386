"""Stage `rewrite`: groups of a partition by the survivors that were found before.

Rules
- It is the cleaner's own second pass: only "last of its key?" is answered by files, not by a map.
- Groups are independent of each other where no transactions are and all damage is known. Where
  markers are, what is met of a transaction crosses groups: then one task does all, in order, and
  holds the transaction indexes against the markers first, as the cleaner's first pass does.
"""

from collections.abc import Sequence
from dataclasses import replace

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.passes.shards import follow_markers
from cleaner.engine.offset_map import OffsetMap
from cleaner.engine.segment_scan import scan_segment
from cleaner.engine.two_pass.rewrite_pass import RewritePass
from cleaner.job import SourceSegment
from pipeline.stages.planning import source_segments
from pipeline.stages.survivors import SegmentSurvivors, Survivors, SurvivorsFile, read_survivors
from pipeline.stages.tasks import DamageFound, RewriteResult, RewriteTask, decode, encode
from pipeline.stages.workplace import GroupCollector, TaskFiles, delivered_names, open_task_files
from storage.env import Env, RealEnv


def run_task(task: bytes) -> bytes:
    """See pipeline.stages. Raises what `rewrite` raises."""
    return encode(rewrite(RealEnv(), decode(RewriteTask, task)))


def rewrite(env: Env, task: RewriteTask) -> RewriteResult:
    """Rewrite groups into a folder of their own. Raises StorageError, InputsGoneError, OSError."""
    started = env.monotonic()
    segments = source_segments(task.job)
    bases = [source.base_offset for source in segments]
    with open_task_files(env, task.source, task.job) as place:
        local = place.job_over(bases)
        survivors = SegmentSurvivors(_read(place, task, segments), keyless_met=task.keyless_met)
        name, path = place.folder("rewrite")
        control = GroupCollector()
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
    """The survivors of each segment."""
    files = []
    for survivor_files in task.survivors:
        path = place.fetch(survivor_files.folder, survivor_files.names)
        files += [SurvivorsFile(place.env, f"{path}/{name}") for name in survivor_files.names]
    return {
        source.base_offset: read_survivors(files, source.base_offset, source.next_base_offset)
        for source in segments
    }


class _Following:
    """Looks at what belongs to transactions, and at nothing else."""

    def __init__(self, context: CleanContext) -> None:
        self._context = context

    def make_room(self, records: int) -> None:
        """See Taker: nothing is kept of records."""

    def batches(self) -> tuple[int, int]:
        """See Taker."""
        reader = self._context.reader
        code, at = follow_markers(reader.buffer, reader.at, reader.end, self._context.space)
        return code, at

    def unpacked(self, count: int) -> int:
        """See Taker: nothing is unpacked."""
        raise AssertionError


def _check_markers(
    context: CleanContext, segments: list[SourceSegment], damaged: Sequence[DamageFound]
) -> None:
    """Hold the markers of the dirty section against the indexes.

    Content was verified when the keys were combined: here headers and markers are read, up to where
    damage was found. Raises TransactionIndexError, DamagedSegmentError where there is more of it.
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
