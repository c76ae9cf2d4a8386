"""Whether a key index is small enough, compared with the segment that it indexes.

A key index has 16 bytes for each record (packed_rows.py). For records that take INDEXED_BYTES of
their segment each, that is 5 %. With smaller records the indexes would take much of the disk, and a
selective clean would read more of them than it saves: such a log is cleaned without indexes.
"""

from typing import Final

INDEXED_BYTES: Final = 320


def worth_indexing(size_bytes: int, records: int) -> bool:
    """Return whether key indexes of these records, in segments of this size, are small."""
    return size_bytes >= INDEXED_BYTES * records
