"""Producer state on disk: snapshots, and the batches after the newest snapshot.

A snapshot has the state before its offset. If it is missing or torn, an older snapshot and more of
the log are read. Snapshots are written without sync: their CRC reveals a torn file, and the log can
replace every snapshot.
"""

from collections.abc import Sequence

from storage.env import Env
from storage.errors import (
    CorruptBatchError,
    CorruptSnapshotError,
    DecompressionLimitError,
    UnsupportedCompressionError,
)
from storage.format import filenames
from storage.format.batch import control_type, decode_records, marker_coordinator_epoch
from storage.format.producer_state import ProducerStates
from storage.format.txn_index import TxnIndexEntry
from storage.segments.batch_scan import ScannedBatch, read_batch
from storage.segments.segment import Segment


def snapshot_path(directory: str, offset: int) -> str:
    """Return the snapshot of the state before `offset`."""
    return f"{directory}/{filenames.file_name(offset, filenames.SNAPSHOT)}"


def write_snapshot(
    env: Env, directory: str, offset: int, states: ProducerStates, *, durable: bool = False
) -> None:
    """Write the state before `offset`. Raises OSError.

    `durable`: sync it, because it replaces a valid snapshot of truncated batches.
    """
    file = env.open(snapshot_path(directory, offset), create=True, truncate=True)
    try:
        file.pwrite(states.to_snapshot(), 0)
        if durable:
            file.sync()
    finally:
        file.close()


def snapshots_in(env: Env, directory: str) -> tuple[int, ...]:
    """Return the offsets of all snapshots, ascending."""
    return filenames.classify(env.listdir(directory)).snapshots


def remove_snapshots(env: Env, directory: str, offsets: Sequence[int]) -> None:
    """Delete snapshots."""
    for offset in offsets:
        env.unlink(snapshot_path(directory, offset))


def load_states(
    env: Env, directory: str, segments: Sequence[Segment], end_offset: int
) -> ProducerStates:
    """Return the state before `end_offset`: from the newest usable snapshot and the log after it.

    `segments` are the segments of the log. Invalid snapshots are deleted.
    """
    states = ProducerStates()
    start_offset = segments[0].base_offset
    for offset in reversed(snapshots_in(env, directory)):
        if offset > end_offset:
            continue
        path = snapshot_path(directory, offset)
        try:
            states = ProducerStates.from_snapshot(env.read_file(path), path)
        except CorruptSnapshotError:
            env.unlink(path)
            continue
        start_offset = max(start_offset, offset)
        break
    ends = [*(segment.base_offset for segment in segments[1:]), end_offset]
    for segment, end in zip(segments, ends, strict=True):
        if end > start_offset and segment.base_offset < end_offset:
            replay(states, segment, start_offset, end_offset)
    return states


def replay(
    states: ProducerStates, segment: Segment, start_offset: int, end_offset: int
) -> list[TxnIndexEntry]:
    """Apply the batches of a segment in `[start_offset, end_offset)` to the state.

    Return the entries for the transaction index of the segment. Damaged ranges are skipped.
    """
    entries: list[TxnIndexEntry] = []
    for batch in segment.readable_batches(0):
        header = batch.header
        if header.base_offset >= end_offset:
            break
        if header.base_offset < start_offset or header.producer_id < 0:
            continue
        whole = read_batch(segment.file, batch.position) if header.is_control else batch
        entry = note_batch(states, whole)
        if entry is not None:
            entries.append(entry)
    return entries


def note_batch(states: ProducerStates, batch: ScannedBatch) -> TxnIndexEntry | None:
    """Apply a batch of the log to the state; a control batch must be complete."""
    header = batch.header
    if not header.is_control:
        return states.update_from_log(header)
    kind, coordinator_epoch = parse_marker(batch)
    return states.update_from_log(header, kind, coordinator_epoch=coordinator_epoch)


def parse_marker(batch: ScannedBatch) -> tuple[int | None, int]:
    """Return type and coordinator epoch of a control batch; (None, -1) if unreadable."""
    try:
        records = decode_records(batch.buffer, batch.header, batch.at)
        if not records:
            return None, -1
        kind = control_type(records[0])
        return kind, marker_coordinator_epoch(records[0])
    except (CorruptBatchError, DecompressionLimitError, UnsupportedCompressionError):
        return None, -1
