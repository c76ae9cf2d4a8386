"""Checksums of a scratch file: the CRC-32C of each block of it. Pure: loads no kernels.

A scratch file decides which records survive, and it may be on the disk for hours before it is read.
Readers compare every block with checksums that are kept in memory, not in the file.
"""

from array import array
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from storage.env import ReadBuffer

# Reads are extended to whole blocks. Smaller ones take more memory: 4 bytes each.
BLOCK_BYTES: Final = 32 << 10


@dataclass(frozen=True, slots=True)
class Checksums:
    """The checksums of a complete file, for the workers that read it."""

    size_bytes: int
    crcs: bytes  # of an array of uint32, one for each block


class ChecksumList:
    """The checksums of a file that grows."""

    def __init__(self, existing: Checksums | None = None) -> None:
        self._crcs = array("I") if existing is None else array("I", existing.crcs)
        self.size_bytes = 0 if existing is None else existing.size_bytes

    @property
    def checksums(self) -> Checksums:
        """Return the checksums of the bytes so far."""
        return Checksums(self.size_bytes, self._crcs.tobytes())

    def add(self, data: memoryview) -> None:
        """Add bytes at the end of the file."""
        position = 0
        while position < len(data):
            used = self.size_bytes % BLOCK_BYTES
            if not used:
                self._crcs.append(0)
            piece = data[position : position + BLOCK_BYTES - used]
            self._crcs[-1] = crc32c(piece, self._crcs[-1])
            position += len(piece)
            self.size_bytes += len(piece)

    def is_intact(self, block: int, data: ReadBuffer) -> bool:
        """Return whether these are the bytes of a block."""
        return crc32c(data) == self._crcs[block]
