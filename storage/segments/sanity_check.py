"""The comparison of a segment's indexes with its log at a start, in Kafka's words a sanity check.

Rules
- It reads the ends of the files: the last entry of each index, the headers after the last offset
  entry, the header that the last time entry names, and some headers after it. The whole log is
  never read.
- It changes nothing. The segment notes the headers and rebuilds an index that contradicts the log.
- Other entries may still be wrong: a lookup checks the entry that it uses.
"""

from collections.abc import Iterator
from typing import Final

from storage.env import File
from storage.errors import CorruptBatchError
from storage.format.batch import BatchHeader
from storage.format.index import CorruptIndexError
from storage.segments.batch_scan import scan
from storage.segments.segment_indexes import SegmentIndexes

# The batch that a time entry names is searched for within this distance after its index entry.
NAMED_BATCH_BYTES_MAX: Final = 1 << 20
# So much of the log after that batch is compared, too. If an entry after it is lost, its batch is
# most likely within the next index interval (4 KiB by default); each start reads these headers.
AFTER_NAMED_BYTES: Final = 64 << 10


class SanityCheck:
    """One comparison of the indexes of a closed segment with its log file.

    Iterate over `tail` to its end, then call `check_entries`.
    """

    def __init__(self, log: File, log_bytes: int, indexes: SegmentIndexes) -> None:
        """Read the last entry of each index. Raises CorruptIndexError, OSError."""
        self._log = log
        self._log_bytes = log_bytes
        self._indexes = indexes
        offset_entry, time_entry = indexes.last_entries(log_bytes)
        self._last_relative, self._last_position = offset_entry
        self.timestamp_ms, timestamp_relative = time_entry  # -1 without an entry
        self.timestamp_offset = indexes.base_offset + timestamp_relative
        self.tail_bytes = log_bytes - self._last_position  # after the last offset entry
        self.next_offset = indexes.base_offset  # of the log, after `tail`
        self._largest_timestamp_ms = self.timestamp_ms
        self._named: BatchHeader | None = None  # the header with `timestamp_offset`

    def tail(self) -> Iterator[BatchHeader]:
        """Yield the headers after the last offset entry.

        Raises CorruptIndexError if the entry is not that of a batch, CorruptBatchError if the log
        file does not end with a whole batch.
        """
        position = self._last_position
        for batch in scan(self._log, position, self._log_bytes, whole=False):
            header = batch.header
            if batch.position == position and position:
                self._indexes.check_entry(header, self._last_relative)
            if header.base_offset < self.next_offset:
                raise CorruptBatchError("offsets go back", batch.position, self._log.path)
            self.next_offset = header.next_offset
            self._largest_timestamp_ms = max(self._largest_timestamp_ms, header.max_timestamp)
            if header.base_offset <= self.timestamp_offset < self.next_offset:
                self._named = header
            yield header

    def check_entries(self) -> None:
        """Compare the last entries with the batches. Raises CorruptIndexError, OSError."""
        last_indexed = self._indexes.base_offset + self._last_relative
        if self.timestamp_ms >= 0:
            last_indexed = max(last_indexed, self.timestamp_offset)
        if last_indexed >= self.next_offset:
            reason = f"an entry is after the last offset, {self.next_offset - 1}"
            raise CorruptIndexError(self._indexes.index_path, reason)
        if self._largest_timestamp_ms != self.timestamp_ms:
            raise CorruptIndexError(self._indexes.time_path, "the last entry is missing")
        self._check_time_entry()

    def _check_time_entry(self) -> None:
        """Compare the timestamp with its batch and those after it, as far as they were not read.

        Lookups by time skip the segment, and retention deletes it, by this timestamp.
        """
        headers = iter((self._named,)) if self._named else self._headers_from(self.timestamp_offset)
        for number, header in enumerate(headers):
            if number == 0 and self.timestamp_ms >= 0 and header.max_timestamp != self.timestamp_ms:
                batch = f"the batch of offset {self.timestamp_offset}"
                reason = f"{batch} does not have timestamp {self.timestamp_ms}"
                raise CorruptIndexError(self._indexes.time_path, reason)
            if header.max_timestamp > self.timestamp_ms:
                raise CorruptIndexError(self._indexes.time_path, "the last entry is missing")

    def _headers_from(self, offset: int) -> Iterator[BatchHeader]:
        """Yield the headers of the batch at or after an offset and of some that follow it.

        The search ends at some distance from the index entry of the offset. Raises
        CorruptIndexError.
        """
        position = self._indexes.find_position(offset - self._indexes.base_offset)
        end = found_end = min(self._log_bytes, position + NAMED_BATCH_BYTES_MAX)
        try:
            for batch in scan(self._log, position, end, whole=False):
                if batch.position >= found_end:
                    return
                if batch.header.next_offset > offset:
                    found_end = min(found_end, batch.position + AFTER_NAMED_BYTES)
                    yield batch.header
        except CorruptBatchError:
            pass  # damage; a read finds it
