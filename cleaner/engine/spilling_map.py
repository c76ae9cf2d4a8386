"""A map for any number of keys: before it is full its entries are handed on, and it begins anew."""

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.layout import RECORD_BYTES_MIN, SLOT_WORDS
from cleaner.engine.key_rows import ConsumeRows
from cleaner.engine.offset_map import SLOT_BYTES, OffsetMap, slots_for
from cleaner.job import CleanJob


class SpillingMap(OffsetMap):
    """Its entries are rows (passes/shards.py); a key may be in several spills."""

    def __init__(self, job: CleanJob, limit_bytes: int, keys_max: int, take: ConsumeRows) -> None:
        """`limit_bytes` is kept to, unless one buffer or batch of the job has more keys."""
        widest_bytes = max(
            job.read_buffer_bytes, job.max_message_bytes, job.decompressed_batch_bytes
        )
        widest = widest_bytes // RECORD_BYTES_MIN * 2 * SLOT_BYTES
        # What is not used of it takes no memory.
        super().__init__(max(limit_bytes, widest), keys_max, job.hash_key)
        self._slots_wanted = slots_for(limit_bytes, keys_max)
        self._take = take
        self.spilled = 0  # keys

    def reserve(self, count: int) -> None:
        """Have room for `count` more keys. Raises what the taker of rows raises."""
        if self.entries and self.entries + count > self._slots_wanted * 9 // 10:
            self.spill()
        slots = max(self._slots_wanted, count * 10 // 9 + 2, int(self.state[fields.SLOTS]))
        self.state[fields.SLOTS_MAX] = min(slots, len(self.table) // SLOT_WORDS)
        super().reserve(count)

    def spill(self) -> None:
        """Hand on all entries, and forget them. Raises what the taker of rows raises."""
        slots = int(self.state[fields.SLOTS])
        self._take(self.table, slots)
        self.spilled += self.entries
        self.table[: slots * SLOT_WORDS] = 0
        self.state[fields.ENTRIES] = 0
