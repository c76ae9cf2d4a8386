"""Load or rebuild the indexes of one segment, or find its damage, in a thread.

Rules
- `run` changes nothing of the segment: it works on a copy that shares the open log file. `finish`
  gives the result to the segment in the thread that owns the log.
- A result that is not valid any more is dropped: the segment was truncated or closed, or its
  indexes were loaded meanwhile (a pin does this, before the file names belong to other files).
- A loaded index that is much sparser than its limit is rebuilt: another broker wrote it, or an
  earlier version.
"""

from collections.abc import Callable

from storage.format.index import CorruptIndexError
from storage.segments.segment import Segment


class IndexLoad:
    """One load, or the repair of an index that contradicts the log."""

    def __init__(self, segment: Segment, repair: Callable[[Segment], object] | None = None) -> None:
        self.segment = segment
        self._clone = segment.clone()
        self._repair = repair
        self._is_rebuilt = False

    def run(self) -> None:
        """Read the index files, or headers of the log file. Raises OSError."""
        repair = self._repair
        if repair is None:
            if self._clone.has_indexes or self._load():
                return
            repair = Segment.rebuild
        self._is_rebuilt = self._clone.work_in_memory(repair)

    def _load(self) -> bool:
        try:
            self._clone.load_index_files()
        except CorruptIndexError:
            return False
        return not self._clone.has_sparse_index

    def finish(self) -> bool:
        """Give the indexes to the segment; return whether it has indexes now."""
        return self.segment.take_indexes(self._clone, are_rebuilt=self._is_rebuilt)
