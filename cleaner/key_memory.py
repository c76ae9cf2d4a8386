"""The memory for the keys of active segments (engine/selective/appended_keys.py)."""

from typing import Final

import numpy as np
import numpy.typing as npt

KEY_MEMORY_BYTES: Final = 64 << 20  # 16 bytes a record: 4 million records in active segments


class KeyMemory:
    """The memory that the keys of all active segments take, and a buffer that they share."""

    def __init__(self, bytes_max: int = KEY_MEMORY_BYTES) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0  # without the buffer
        self._rows: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)

    def row_buffer(self, words: int) -> npt.NDArray[np.uint64]:
        """Return an array of at least this size; the next call returns the same one."""
        if len(self._rows) < words:
            self._rows = np.empty(words, dtype=np.uint64)
        return self._rows
