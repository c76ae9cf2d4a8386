"""Rebuild transaction indexes that contradict the log, or whose files were changed.

Transaction index entries have no checksum: with a missing file or a flipped bit, readers and the
cleaner would mistake one transaction for another. Markers and batches of the log have checksums.

The repair reads all closed segments from the first one on, because a transaction may begin in any
of them. It keeps entries whose marker or first batch may be in a damaged range.
"""

from collections.abc import Sequence

from storage.env import Env
from storage.format.index import CorruptIndexError
from storage.format.producer_state import ProducerStates
from storage.format.txn_index import TxnIndexEntry
from storage.segments.producer_snapshots import load_states, replay
from storage.segments.segment import Segment

_NO_END = 1 << 62


def load_dropped(clone: Segment, *, env: Env, segments: Sequence[Segment]) -> None:
    """Read the dropped transaction index of a clone; rebuild it if the file was changed.

    `segments` are those of the log: a transaction may begin in any of them up to this one. Raises
    OSError.
    """
    try:
        clone.txn_index.load_dropped()
    except CorruptIndexError:
        before = [segment for segment in segments if segment.base_offset <= clone.base_offset]
        states = load_states(env, clone.directory, before, clone.base_offset)
        clone.txn_index.set_rebuilt(replay(states, clone, 0, _NO_END))


def repair_txn_indexes(segments: Sequence[Segment]) -> list[str]:
    """Rewrite the transaction indexes of `segments` that differ; return the paths of the files.

    Raises OSError.
    """
    states = ProducerStates()
    rewritten: list[str] = []
    is_damaged = False
    for segment in segments:
        entries = replay(states, segment, 0, _NO_END)
        is_damaged = is_damaged or bool(segment.damages)
        stored = segment.txn_index.loaded_or_read()
        if is_damaged:
            entries = _with_hidden(entries, stored)
        if [entry[:3] for entry in entries] != [entry[:3] for entry in stored]:
            segment.write_txn_entries(entries)
            rewritten.append(segment.txn_index.path)
    return rewritten


def _with_hidden(
    entries: Sequence[TxnIndexEntry], stored: Sequence[TxnIndexEntry]
) -> list[TxnIndexEntry]:
    by_marker = {entry.last_offset: entry for entry in entries}
    for entry in stored:
        txn_index_entry = by_marker.get(entry.last_offset)
        if txn_index_entry is None or (txn_index_entry.producer_id, True) == (
            entry.producer_id,
            entry.first_offset < txn_index_entry.first_offset,
        ):
            by_marker[entry.last_offset] = entry
    return [by_marker[offset] for offset in sorted(by_marker)]
