"""The memory for the keys of active segments (engine/selective/appended_keys.py).

Rule. The segments of one client may take as many bytes as are free (the rule of
broker/quotas/shares.py). So a client with many full segments takes at most half of the memory, and
there is always some for another.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Final

import numpy as np
import numpy.typing as npt

KEY_MEMORY_BYTES: Final = 64 << 20  # 16 bytes a record: 4 million records in active segments


class KeyMemory:
    """The memory that the keys of all active segments take, and a buffer that they share."""

    def __init__(self, bytes_max: int = KEY_MEMORY_BYTES) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0  # without the buffer
        self._used_by = Counter[Hashable]()  # by client
        self._rows: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)

    def charge(self, client: Hashable | None, more_bytes: int) -> bool:
        """Count bytes of a client's segment; return whether it may keep them.

        None is a client without a share.
        """
        self.used_bytes += more_bytes
        free_bytes = self.bytes_max - self.used_bytes
        if client is None:
            return free_bytes >= 0
        self._used_by[client] += more_bytes
        used_bytes = self._used_by[client]
        if not used_bytes:
            del self._used_by[client]
        return used_bytes <= free_bytes

    def row_buffer(self, words: int) -> npt.NDArray[np.uint64]:
        """Return an array of at least this size; the next call returns the same one."""
        if len(self._rows) < words:
            self._rows = np.empty(words, dtype=np.uint64)
        return self._rows
