"""The deleted keys of a compacted view: a file beside the segments of the ledger.

    varve-deleted 1\\n                        16 bytes
    fingerprint of CHECK_TEXT                16 bytes: identifies the hash key of the rows
    rows of five int64, little-endian        fingerprint (2), rank, offset, time first seen

Rules
- A row means that the latest record of this key, by rank and then by offset, is a delete. An older
  record that arrives late does not bring the key back.
- The manifest of the view has the size and checksum of the file, which is replaced as a whole.
"""

from typing import Final

DELETED_KEYS_NAME: Final = "deleted-keys"
DELETED_KEYS_MAGIC: Final = b"varve-deleted 1\n"
CHECK_TEXT: Final = b"varve deleted keys"
CHECK_BYTES: Final = 16
DELETED_KEYS_HEADER_BYTES: Final = len(DELETED_KEYS_MAGIC) + CHECK_BYTES
ROW_WORDS: Final = 5
ROW_OFFSET: Final = 3  # the word
ROW_BYTES: Final = ROW_WORDS * 8


def rows_in(size_bytes: int) -> int:
    """Return the number of keys in a file of this size; -1 for an impossible size."""
    rest = size_bytes - DELETED_KEYS_HEADER_BYTES
    return rest // ROW_BYTES if rest >= 0 and rest % ROW_BYTES == 0 else -1
