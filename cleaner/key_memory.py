"""The memory for the keys of active segments (engine/selective/appended_keys.py)."""

from typing import Final

KEY_MEMORY_BYTES: Final = 64 << 20  # 16 bytes a record: 4 million records in active segments


class KeyMemory:
    """The memory that the keys of all active segments take."""

    def __init__(self, bytes_max: int = KEY_MEMORY_BYTES) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
