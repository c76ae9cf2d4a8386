"""Truncate an open log: remove all records from an offset on, in its files and in memory.

The caller plans the cut first and refuses it if damage hides the position. Recovery never ends a
log below the recovery point that it finds, so the caller lowers that durably before the truncation.

A batch that the offset is in goes whole; the caller refuses that if it has records below the offset
that are to stay. Then, and where the cleaner removed the batches in front of the offset, the last
batch that is left ends below it. A new segment begins at the offset, so that its name shows the end
of the log. Otherwise a start without the recovery point would assign offsets a second time.
"""

from contextlib import suppress

from storage.errors import DamagedSegmentError, NoRoomError
from storage.log.deletion import Delay, ScheduledDeletions
from storage.log.log_state import LogState, index_limits
from storage.log.roll import create_next_segment
from storage.log.txn_index_loads import ensure_loaded
from storage.segments.offset_lookup import locate_intact
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
    limits = index_limits(state.config)
    if len(going) == len(segments):
        first = Segment.begin(env, state.directory, offset, limits, is_first=True)
        segments.replace(going, [first])
    else:
        segments.replace(going, ())
        _cut_active(state, segments.active, offset, cut)
    segments.active.file.sync()
    state.producers.replace(load_states(env, state.directory, segments.since(0), offset))
    if not _shows_end(segments.active, offset):
        # The cut is durable: the segments never overlap. Without room, the recovery point shows
        # the end until the next start, which begins the segment.
        with suppress(NoRoomError):
            states = state.producers.states
            segments.add(create_next_segment(segments.active, env, offset, limits, states))
    env.sync_dir(state.directory)
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


def _shows_end(active: Segment, offset: int) -> bool:
    """Return whether the name of the last segment, or its last batch, shows the end of the log."""
    try:
        return active.base_offset == offset or locate_intact(active, offset - 1) < active.size_bytes
    except DamagedSegmentError:
        return False
