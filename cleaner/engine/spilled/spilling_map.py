"""A map for any number of keys: when it is full, it passes on its entries and is cleared."""

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.layout import RECORD_BYTES_MIN, SLOT_WORDS
from cleaner.engine.key_map.map_size import SLOT_BYTES, slots_for
from cleaner.engine.key_map.offset_map import OffsetMap
from cleaner.engine.key_rows import ConsumeRows
from cleaner.job import CleanJob


class SpillingMap(OffsetMap):
    """Passes on its entries as rows (passes/shards.py); a key may be in several spills."""

    def __init__(self, job: CleanJob, limit_bytes: int, keys_max: int, take: ConsumeRows) -> None:
        """Exceeds `limit_bytes` only if one buffer or batch of the job has more keys."""
        widest_bytes = max(
            job.read_buffer_bytes, job.max_message_bytes, job.decompressed_batch_bytes
        )
        widest = widest_bytes // RECORD_BYTES_MIN * 2 * SLOT_BYTES
        # Unused parts take no memory.
        super().__init__(max(limit_bytes, widest), keys_max, job.hash_key)
        self._slots_limit = slots_for(limit_bytes, keys_max)
        self._take = take
        self.spilled = 0  # keys

    def reuse(self, take: ConsumeRows) -> None:
        """Start again with the memory of an empty map, and pass on entries to `take`."""
        assert not self.entries
        key, size = (self.state[fields.KEY_0 : fields.KEY_1 + 1].copy(), self.state[fields.SLOTS])
        self.state.fill(0)
        self.state[fields.KEY_0 : fields.KEY_1 + 1] = key
        self.state[fields.SLOTS] = self.state[fields.SLOTS_MAX] = size
        self._take = take
        self.spilled = 0

    def pass_on_to(self, take: ConsumeRows) -> None:
        """Pass on all later entries to `take`; those before were spilled."""
        assert not self.entries
        self._take = take

    def reserve(self, count: int) -> None:
        """Make room for `count` more keys. Raises what the consumer raises."""
        if self.entries and self.entries + count > self._slots_limit * 9 // 10:
            self.spill()
        slots = max(self._slots_limit, count * 10 // 9 + 2, int(self.state[fields.SLOTS]))
        self.state[fields.SLOTS_MAX] = min(slots, len(self.table) // SLOT_WORDS)
        super().reserve(count)

    def spill(self) -> None:
        """Pass on all entries and clear the map. Raises what the consumer raises."""
        slots = int(self.state[fields.SLOTS])
        self._take(self.table, slots)
        self.spilled += self.entries
        self.table[: slots * SLOT_WORDS] = 0
        self.state[fields.ENTRIES] = 0
