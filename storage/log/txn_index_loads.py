"""Loads of transaction indexes that were dropped from memory.

An index whose file is not the same any more is rebuilt from the log, because readers and the
cleaner would otherwise take aborted records for committed ones.
"""

from collections.abc import Iterable
from functools import partial

from storage.log.log_state import LogState
from storage.segments.index_load import IndexLoad
from storage.segments.segment import IndexNotReadyError, Segment
from storage.segments.txn_index_repair import load_dropped


def not_loaded(state: LogState, segment: Segment) -> IndexNotReadyError:
    """Return the error that lets a thread load the transaction index of a segment."""
    segments = state.segments.all  # the same tuple for all loads
    return IndexNotReadyError(segment, partial(load_dropped, env=state.env, segments=segments))


def txn_index_loads(state: LogState, segments: Iterable[Segment]) -> list[IndexLoad]:
    """Return the loads of those transaction indexes that were dropped."""
    dropped = [segment for segment in segments if not segment.txn_index.is_loaded]
    return [IndexLoad(segment, not_loaded(state, segment).repair) for segment in dropped]


def ensure_loaded(state: LogState, segment: Segment) -> None:
    """Load the transaction index of a segment now if it was dropped. Raises OSError."""
    for load in txn_index_loads(state, (segment,)):
        load.run()
        load.finish()
