"""Truncate an open log: remove all records from an offset on, in its files and in memory.

The caller plans the cut first and refuses it if damage hides the position. Recovery never ends a
log below the recovery point that it finds, so the caller lowers that durably before the truncation.
"""

from storage.log.deletion import Delay, ScheduledDeletions
from storage.log.log_state import LogState, index_limits
from storage.log.txn_index_loads import ensure_loaded
from storage.segments.producer_snapshots import load_states, remove_snapshots, snapshots_in
from storage.segments.segment import Segment


def truncate_segments(
    state: LogState, deletions: ScheduledDeletions, offset: int, cut: int, now_ms: int
) -> None:
    """Truncate the files of a log to end at `offset`, durably, and then its offsets.

    `cut` is the position of the offset in its segment. After an OSError only recovery can find out
    what was done.
    """
    env, segments = state.env, state.segments
    going = [segment for segment in segments if segment.base_offset > offset]
    snapshots = [item for item in snapshots_in(env, state.directory) if item > offset]
    remove_snapshots(env, state.directory, snapshots)
    # The newest segment is first: wherever a crash ends this, no gap stands before later records.
    deletions.schedule(
        [segment.base_offset for segment in reversed(going)],
        Delay(now_ms, state.config.file_delete_delay_ms),
        in_durable_order=True,
    )
    if len(going) == len(segments):
        limits = index_limits(state.config)
        first = Segment.begin(env, state.directory, offset, limits, is_first=True)
        segments.replace(going, [first])
    else:
        segments.replace(going, ())
        _cut_active(state, segments.active, offset, cut)
    segments.active.file.sync()
    env.sync_dir(state.directory)
    state.producers.replace(load_states(env, state.directory, segments.since(0), offset))
    state.log_end_offset = offset
    state.high_watermark = min(state.high_watermark, offset)
    state.recovery_point = min(state.recovery_point, offset)
    state.log_start_offset = min(state.log_start_offset, offset)


def _cut_active(state: LogState, active: Segment, offset: int, cut: int) -> None:
    ensure_loaded(state, active)
    active.cut_back(cut)
    active.open_for_append()
    entries = active.txn_index.entries
    remaining = [entry for entry in entries if entry.last_offset < offset]
    if len(remaining) < len(entries):
        active.write_txn_entries(remaining)
