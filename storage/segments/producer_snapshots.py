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
from storage.format.batch import BatchHeader, control_type, decode_records, marker_coordinator_epoch
from storage.format.producer_state import Duplicate, ProducerStates
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
    """Return the state before `end_offset`: from the newest usable snapshot and the log behind it.

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


class LogProducers:
    """The producer state of an open log, and its effect on readers.

    A finished transaction stays undecided for readers until the high watermark is behind its
    marker, because a crash could lose the marker before that.
    """

    __slots__ = ("_ended", "_states")

    def __init__(self, states: ProducerStates) -> None:
        self._states = states
        self._ended: list[tuple[int, int]] = []  # (marker offset, first offset)

    @property
    def first_undecided_offset(self) -> int | None:
        """Return the start of the oldest transaction that is undecided for readers."""
        first = self._states.first_undecided_offset
        if not self._ended:
            return first
        ended = min(first_offset for _, first_offset in self._ended)
        return ended if first is None else min(first, ended)

    def check(
        self, header: BatchHeader, *, verified: bool, by_coordinator: bool
    ) -> Duplicate | None:
        """See ProducerStates.check."""
        return self._states.check(header, verified=verified, by_coordinator=by_coordinator)

    def note_append(
        self,
        records: bytes,
        header: BatchHeader,
        first_offset: int,
        timestamp_ms: int,
        now_ms: int,
    ) -> TxnIndexEntry | None:
        """Apply an appended batch; return its entry for the transaction index, if any."""
        last_offset = first_offset + header.last_offset_delta
        if not header.is_control:
            self._states.update(
                header, first_offset, last_offset, timestamp_ms=timestamp_ms, seen_ms=now_ms
            )
            return None
        begun = self._begin_of(header.producer_id)
        placed = header._replace(base_offset=first_offset)
        entry = note_batch(self._states, ScannedBatch(0, placed, records, 0))
        if begun is not None and self._begin_of(header.producer_id) is None:
            self._ended.append((last_offset, begun))
        return entry

    def _begin_of(self, producer_id: int) -> int | None:
        entry = self._states.producer(producer_id)
        return None if entry is None else entry.transaction_first_offset

    def settle(self, high_watermark: int) -> None:
        """Decide the transactions whose markers are below the new high watermark."""
        if self._ended:
            self._ended = [item for item in self._ended if item[0] >= high_watermark]

    def replace(self, states: ProducerStates) -> None:
        """Replace the state."""
        self._states = states
        self._ended = []

    def open_transaction(self) -> tuple[int, int, int] | None:
        """Return the oldest open transaction: producer id, first offset, last write (ms)."""
        first = self._states.first_undecided_offset
        if first is None:
            return None
        holder = next(e for e in self._states.producers if e.transaction_first_offset == first)
        return holder.producer_id, first, holder.timestamp_ms

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """See ProducerStates.expire."""
        return self._states.expire(now_ms, expiration_ms)

    def forget_idle(self, keep: int) -> None:
        """See ProducerStates.forget_idle."""
        self._states.forget_idle(keep)

    def last_records(self) -> dict[int, tuple[int, int]]:
        """See ProducerStates.last_records."""
        return self._states.last_records()

    @property
    def states(self) -> ProducerStates:
        """Return the state, read-only."""
        return self._states
