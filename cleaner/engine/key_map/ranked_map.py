"""Map each key to the offset with the largest rank, in fixed memory.

It extends the map of last offsets by 9 bytes per slot. It has its final size from the start, so a
few keys in a large section use more pages than necessary.
"""

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import Bytes
from cleaner.engine.kernels.layout import CHUNK_KEYS, Workspace
from cleaner.engine.kernels.passes.ranking import (
    RANK_BYTES,
    Ranking,
    fingerprint,
    rank_batches,
    rank_unpacked,
)
from cleaner.engine.key_map.map_size import SLOT_BYTES
from cleaner.engine.key_map.offset_map import OffsetMap

RANKED_SLOT_BYTES = SLOT_BYTES + RANK_BYTES


class RankedMap(OffsetMap):
    """An OffsetMap with ranks."""

    def __init__(self, limit_bytes: int, keys_max: int, hash_key: bytes, header: bytes) -> None:
        """`header`: the name of the header with the version; empty: the timestamp is the rank."""
        super().__init__(limit_bytes, keys_max, hash_key, slot_bytes=RANKED_SLOT_BYTES)
        slots = int(self.state[fields.SLOTS_MAX])
        self.state[fields.SLOTS] = slots
        self.state[fields.RANKED] = 1
        self.ranking = Ranking(
            ranks=np.zeros(slots, dtype=np.int64),
            deleted=np.zeros(slots, dtype=np.uint8),
            pending_ranks=np.empty(CHUNK_KEYS, dtype=np.int64),
            pending_marks=np.empty(CHUNK_KEYS, dtype=np.uint8),
            header=np.frombuffer(header, dtype=np.uint8),
        )

    def index_batches(self, buffer: Bytes, at: int, end: int, space: Workspace) -> tuple[int, int]:
        """See OffsetMap."""
        return rank_batches(buffer, at, end, space, self.ranking)

    def index_unpacked(
        self, unpacked: Bytes, count: int, buffer: Bytes, at: int, space: Workspace
    ) -> int:
        """See OffsetMap."""
        return rank_unpacked(unpacked, count, buffer, at, space, self.ranking)

    def fingerprint(self, text: bytes) -> bytes:
        """Return the 16-byte fingerprint of a key."""
        buffer = np.zeros(len(text) + SLACK_BYTES, dtype=np.uint8)
        buffer[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        return np.array(fingerprint(buffer, len(text), self.state), dtype="<i8").tobytes()
