"""The deleted keys that a compacted view remembers: a file beside the ledger's segments.

    varve-deleted 1\\n                        16 bytes
    fingerprint of CHECK_TEXT                16 bytes: rows made under another hash key are not ours
    rows of five int64, little-endian        fingerprint (2), rank, offset, when it was first seen

Rules
- A row says: the latest record of this key, by rank and then by offset, is a delete. An older
  record that comes late does not bring the key back.
- The file's size and checksum stand in the view's manifest; it is only ever replaced as a whole.
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
    """Return how many keys a file of this size tells of; -1 if no such file has this size."""
    rest = size_bytes - DELETED_KEYS_HEADER_BYTES
    return rest // ROW_BYTES if rest >= 0 and rest % ROW_BYTES == 0 else -1
