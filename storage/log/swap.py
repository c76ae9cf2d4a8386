"""The log's side of a swap: pin the sources, then attach the published outputs in their place.

storage/swap/swap_journal.py replaces the files; meanwhile the file names of the pinned segments
may belong to other files. Only one swap of a log runs at a time.
"""

from collections.abc import Iterable, Sequence

from storage.errors import NoRoomError, is_scarcity
from storage.log.flush import LogFlusher
from storage.log.log_state import LogState, index_limits
from storage.log.txn_index_loads import ensure_loaded, txn_index_loads
from storage.segments.index_load import IndexLoad
from storage.segments.segment import Segment
from storage.swap.swap_journal import SwapPlan, cleaned_content_id


class LogSwap:
    """Replaces segments of one log with the outputs of a clean."""

    __slots__ = ("_flusher", "_state", "is_running")

    def __init__(self, state: LogState, flusher: LogFlusher) -> None:
        self._state = state
        self._flusher = flusher
        self.is_running = False  # from `pin` on

    def _segments_at(self, base_offsets: Iterable[int]) -> list[Segment]:
        """Return the segments that still exist."""
        segments = (self._state.segments.find(base_offset) for base_offset in base_offsets)
        return [segment for segment in segments if segment is not None]

    def are_flushed(self, base_offsets: Iterable[int]) -> bool:
        """Return whether these segments are durable; a removed segment does not count."""
        return all(
            segment.synced_bytes == segment.size_bytes
            for segment in self._segments_at(base_offsets)
        )

    def index_loads(self, base_offsets: Iterable[int]) -> list[IndexLoad]:
        """Return what to load before `pin`, so that it reads no files."""
        segments = self._segments_at(base_offsets)
        return [
            *(IndexLoad(segment) for segment in segments if not segment.has_indexes),
            *txn_index_loads(self._state, segments),
        ]

    def pin(self, base_offsets: Iterable[int]) -> None:
        """Pin segments whose file names a swap gives to other files; retention skips them.

        They must be flushed, because after a crash the swap compares their sizes. Call `attach` or
        `unpin` afterwards. Raises OSError, and then pins nothing.
        """
        base_offsets = tuple(base_offsets)
        assert not self.is_running
        assert self.are_flushed(base_offsets)
        segments = self._state.segments
        self.is_running = True
        try:
            for base_offset in base_offsets:
                segment = segments.find(base_offset)
                assert segment is not None
                assert segment is not segments.active
                ensure_loaded(self._state, segment)
                segment.pin()  # loads its other indexes
        except OSError:
            self.unpin(base_offsets)
            raise

    def unpin(self, base_offsets: Iterable[int]) -> None:
        """Undo `pin` after a swap that did not happen."""
        self.is_running = False
        for segment in self._segments_at(base_offsets):
            segment.unpin()

    def open_outputs(self, plan: SwapPlan) -> list[Segment]:
        """Open the published outputs of a swap; may run in a thread.

        Raises NoRoomError without descriptors or space, and can then be called again.
        """
        state = self._state
        new: list[Segment] = []
        try:
            for output in plan.outputs:
                segment = Segment(
                    state.env,
                    state.directory,
                    output.base_offset,
                    index_limits(state.config),
                    create=False,
                    content_id=cleaned_content_id(plan.job_id, output.base_offset),
                )
                segment.load_or_rebuild()
                new.append(segment)
        except OSError as error:
            if is_scarcity(error):
                raise NoRoomError(error, state.directory) from error
            raise state.fail_log("swap in", error) from error
        return new

    def attach(self, plan: SwapPlan, new: Sequence[Segment]) -> list[Segment]:
        """Replace segments with the outputs of `open_outputs`; return the old segments.

        Slices of the old segments stay readable, because their files are open. Drop the last
        reference in a thread: freeing their pages takes 20 ms for 64 MB.
        """
        replaced = self._segments_at(plan.source_base_offsets)
        self._state.segments.replace(replaced, new)
        self.is_running = False
        self._flusher.replace(replaced, new)
        return replaced
