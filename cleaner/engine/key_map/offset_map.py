"""Map each key to its last offset, in fixed memory for any keys.

Rules
- Keys are not stored: 128 bits of SipHash under the data directory's secret key represent a key
  (docs/decisions/0005-key-hash.md).
- Memory is reserved up to `limit_bytes`, but the system provides it only as the map is filled: a
  few keys use a few pages, and nothing is cleared beforehand.
- The map has room for at least one key, so every clean makes progress.
"""

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Bytes, Ints, Words
from cleaner.engine.kernels.layout import CHUNK_KEYS, SLOT_WORDS, Workspace, new_state
from cleaner.engine.kernels.passes.fingerprint_table import (
    entries_max,
    find_keys,
    grow,
    mark_survivors,
    put_keys,
)
from cleaner.engine.kernels.passes.walk import index_batches, index_unpacked
from cleaner.engine.key_map.map_size import SLOT_BYTES, SLOTS_MIN, slots_for
from storage.format.batch import unpack_header

# The table starts within the second-level cache and doubles from there.
SLOTS_AT_FIRST = 1 << 14


class OffsetMap:
    """The map, its kernels' `state`, and the scratch space for one chunk of fingerprints."""

    def __init__(
        self, limit_bytes: int, keys_max: int, hash_key: bytes, *, slot_bytes: int = SLOT_BYTES
    ) -> None:
        """`keys_max`: an upper bound of the keys (records or offsets in the section)."""
        assert len(hash_key) == 16
        slots_max = slots_for(limit_bytes, keys_max, slot_bytes)
        self._keys_at_limit = max(limit_bytes // slot_bytes, SLOTS_MIN) * 9 // 10
        self.table: Words = np.zeros(slots_max * SLOT_WORDS, dtype=np.uint64)
        self.state: Ints = new_state()
        self.state[fields.SLOTS] = min(slots_max, SLOTS_AT_FIRST)
        self.state[fields.SLOTS_MAX] = slots_max
        self.state[fields.KEY_0 : fields.KEY_1 + 1] = np.frombuffer(hash_key, dtype="<i8")
        self.lows: Words = np.empty(CHUNK_KEYS, dtype=np.uint64)
        self.highs: Words = np.empty(CHUNK_KEYS, dtype=np.uint64)
        self.offsets: Ints = np.empty(CHUNK_KEYS, dtype=np.int64)

    @property
    def entries(self) -> int:
        """Return the number of keys in the map."""
        return int(self.state[fields.ENTRIES])

    @property
    def entries_max(self) -> int:
        """Return the largest possible number of keys."""
        return int(self.state[fields.SLOTS_MAX]) * 9 // 10

    @property
    def utilization(self) -> float:
        """Return the number of keys divided by the capacity of the whole limit, 0..1."""
        return min(self.entries / self._keys_at_limit, 1.0)

    def reserve(self, count: int) -> None:
        """Grow, within the limit, until `count` more keys fit."""
        slots, slots_max = int(self.state[fields.SLOTS]), int(self.state[fields.SLOTS_MAX])
        wider = slots
        while wider < slots_max and self.entries + count > entries_max(wider, slots_max):
            wider = min(wider * 2, slots_max)
        if wider > slots:
            grow(self.table, slots, wider)
            self.state[fields.SLOTS] = wider

    def index_batches(self, buffer: Bytes, at: int, end: int, space: Workspace) -> tuple[int, int]:
        """Put the keys of batches into the map; see the kernel."""
        return index_batches(buffer, at, end, space)

    def index_unpacked(
        self, unpacked: Bytes, count: int, buffer: Bytes, at: int, space: Workspace
    ) -> int:
        """Put the keys of the batch at `buffer[at:]` into the map; `unpacked` has its records."""
        header = unpack_header(buffer.data, at)
        return index_unpacked(
            unpacked,
            count,
            header.base_offset,
            header.record_count,
            header.last_offset_delta,
            space,
        )

    def put(self, items: Words, highs: Words, offsets: Ints) -> int:
        """Put fingerprints with ascending offsets; return how many fitted."""
        self.reserve(len(items))
        return int(put_keys(self.table, self.state, items, highs, offsets, len(items)))

    def find(self, items: Words, highs: Words) -> Ints:
        """Return the last offset of each fingerprint, -1 if it is not in the map."""
        result = np.empty(len(items), dtype=np.int64)
        find_keys(self.table, self.state, items, highs, result, len(items))
        return result

    def mark(self, bits: Bytes) -> None:
        """Set the bits of the surviving offsets in [BITS_FIRST, BITS_END) of `state`."""
        mark_survivors(self.table, self.state, bits)
