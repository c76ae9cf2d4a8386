"""The state that both passes of one clean share: the job, its arrays, its control."""

from typing import Final, Protocol

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import Bools, Bytes, Ints
from cleaner.engine.kernels.layout import RECORD_BYTES_MIN, Workspace
from cleaner.engine.kernels.passes.bitmap import find_intervals
from cleaner.engine.key_map.offset_map import OffsetMap
from cleaner.engine.key_map.ranked_map import RankedMap
from cleaner.engine.output_files import OutputFiles
from cleaner.engine.report import Indexed
from cleaner.engine.source import SourceReader
from cleaner.engine.transactions import Transactions
from cleaner.job import CleanAbortedError, CleanJob, JobControl
from storage.env import Env
from storage.format.compression import decompress

# Offsets that the bitmap of survivors covers at a time: 16 MiB. A larger section needs several
# windows, each of which reads the map once.
WINDOW_OFFSETS = 1 << 27
# A larger array for one batch has exactly the size of that batch, and is freed afterwards.
GIANT_BYTES = 4 << 20
# A section of more windows has few records per offset: use the map instead of the bitmap.
WINDOWS_MAX = 64
# Wider than any batch: without a map, the bitmap has to cover the widest batch.
_ANY_BATCH: Final = 1 << 32


class SurvivorSource(Protocol):
    """Surviving offsets that were computed elsewhere; replaces the map in the second pass."""

    @property
    def keyless_seen(self) -> bool:
        """Return whether there is a record without a key."""

    def window(self, first: int, last: int) -> tuple[int, int]:
        """Return the offsets [begin, end) that a bitmap covers: at least [first, last]."""

    def mark(self, bits: Bytes, first: int, end: int) -> None:
        """Set the bits of the survivors in [first, end), counted from `first`; all are 0."""


class CleanContext:
    """The arrays and counters of one clean. Kernels get `space`."""

    def __init__(
        self,
        env: Env,
        job: CleanJob,
        control: JobControl,
        outputs: OutputFiles | None = None,
        *,
        key_map: OffsetMap | None = None,
        survivors: SurvivorSource | None = None,
        reader: SourceReader | None = None,
    ) -> None:
        """`outputs` replaces `env` for outputs, `key_map` the job's map, `reader` that of sources.

        `survivors` covers every record from the log start on. The map then stays empty, and only
        the second pass can run, not that of an expiry job.
        """
        assert survivors is None or not job.expired_only
        self.env = env
        self.outputs: OutputFiles = outputs or env
        self.job = job
        self.control = control
        section = max(job.end_offset - job.first_dirty_offset, 0)
        self._survivors = survivors
        self.map = _map_for(job, section) if key_map is None else key_map
        self.state = self.map.state
        self.reader = reader or SourceReader(env, job.directory, job.read_buffer_bytes)
        self.transactions = Transactions(job)
        self.space = Workspace(
            table=self.map.table,
            state=self.state,
            lows=self.map.lows,
            highs=self.map.highs,
            offsets=self.map.offsets,
            last_offsets=np.empty(len(self.map.lows), dtype=np.int64),
            keep=np.empty(len(self.map.lows), dtype=np.uint8),
            bits=np.zeros(0, dtype=np.uint8),
            producers=np.array(sorted(job.last_records), dtype=np.int64).reshape(-1),
            aborted=self.transactions.aborted,
            aborted_kept=self.transactions.kept,
            open_producers=self.transactions.open_producers,
        )
        self.unpacked: Bytes = np.empty(SLACK_BYTES, dtype=np.uint8)
        self._set_rules(section)

    def _set_rules(self, section: int) -> None:
        job, state = self.job, self.state
        state[fields.FIRST_DIRTY] = state[fields.BITS_FROM] = job.first_dirty_offset
        state[fields.MAP_END] = job.end_offset
        state[fields.LOG_START] = 0 if job.expired_only else job.log_start_offset
        state[fields.EXPIRED_ONLY] = job.expired_only
        state[fields.LATEST_ONLY] = job.view is not None
        state[fields.KEEP_KEYLESS] = job.view is not None and job.view.keep_keyless
        state[fields.NOW_MS] = job.now_ms
        state[fields.LAST_OF_LOG] = job.end_offset - 1 if job.log_end_offset_is_end else -1
        windows = -(-section // WINDOW_OFFSETS)
        state[fields.BITS_MAX] = min(section, WINDOW_OFFSETS) if windows <= WINDOWS_MAX else 0
        if self._survivors is not None:
            state[fields.BITS_MAX] = _ANY_BATCH
            state[fields.BITS_FROM] = 0
            state[fields.KEYLESS_SEEN] = self._survivors.keyless_seen

    @property
    def map_end(self) -> int:
        """Return the first offset that the map does not cover."""
        return int(self.state[fields.MAP_END])

    @property
    def indexed(self) -> Indexed:
        """Return the result of the first pass."""
        versionless = int(self.state[fields.VERSIONLESS])
        return Indexed(self.map_end, self.map.entries, self.map.utilization, versionless)

    def check_aborted(self) -> None:
        """Raise CleanAbortedError if the broker aborted the job."""
        if self.control.aborted():
            raise CleanAbortedError

    def charge_read(self, count: int) -> None:
        """Wait for the budget to read `count` bytes. Raises CleanAbortedError."""
        self.check_aborted()
        self.control.read_bytes(count)

    def charge_write(self, count: int) -> None:
        """Wait for the budget to write `count` bytes. Raises CleanAbortedError."""
        self.check_aborted()
        self.control.write_bytes(count)

    def unpack(self, codec: int, at: int, size: int, room_bytes: int) -> int:
        """Decompress `buffer[at:at + size]` into `unpacked`, with `room_bytes` to spare.

        Return the unpacked size. Raises CorruptBatchError, DecompressionLimitError.
        """
        packed = self.reader.buffer.data[at : at + size]
        data = decompress(codec, packed, self.job.decompressed_batch_bytes)
        if len(self.unpacked) < len(data) + room_bytes + SLACK_BYTES:
            self.unpacked = self.unpacked[:0]  # free the old array before the new one is made
        self.unpacked = grown(self.unpacked, len(data) + room_bytes)
        self.unpacked[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return len(data)

    def release(self) -> None:
        """Free the arrays of a giant batch."""
        self.unpacked = released(self.unpacked)
        if len(self.space.keep) > GIANT_BYTES:
            keep = np.empty(len(self.space.lows), dtype=np.uint8)
            self.space = self.space._replace(keep=keep)
        if self._survivors is not None and len(self.space.bits) > (WINDOW_OFFSETS >> 3) + 1:
            self.space = self.space._replace(bits=np.zeros(0, dtype=np.uint8))
            self.state[fields.BITS_END] = self.state[fields.BITS_FIRST]

    def make_flags(self, record_bytes: int) -> None:
        """Make room for a flag for each record in `record_bytes`."""
        records_max = record_bytes // RECORD_BYTES_MIN
        if len(self.space.keep) < records_max:
            self.space = self.space._replace(keep=np.empty(records_max, dtype=np.uint8))

    def make_room_for_producers(self) -> None:
        """Enlarge the set of producers with open transactions."""
        self.transactions.widen(self.state)
        self.space = self.space._replace(open_producers=self.transactions.open_producers)

    def restore_producers(self, open_producers: Ints, count: int) -> None:
        """Restore an earlier set of `count` producers."""
        self.transactions.open_producers = open_producers
        self.space = self.space._replace(open_producers=open_producers)
        self.state[fields.OPEN_COUNT] = count

    def open_window(self, first: int, last: int) -> None:
        """Move the bitmap of survivors to cover a batch [first, last]."""
        state, survivors = self.state, self._survivors
        if survivors is None:
            end = min(first + int(state[fields.BITS_MAX]), self.map_end)
            size_bytes = (int(state[fields.BITS_MAX]) >> 3) + 1
        else:
            first, end = survivors.window(first, last)
            size_bytes = ((end - first) >> 3) + 1
        if len(self.space.bits) < size_bytes:
            self.space = self.space._replace(bits=np.zeros(size_bytes, dtype=np.uint8))
        else:
            self.space.bits.fill(0)
        state[fields.BITS_FIRST] = first
        state[fields.BITS_END] = end
        if survivors is None:
            self.map.mark(self.space.bits)
        else:
            survivors.mark(self.space.bits, first, end)

    def survive(self, offsets: Ints) -> Bools:
        """Return which of these offsets survive.

        Moves the bitmap of survivors if it does not cover them. Raises CleanAbortedError, OSError.
        """
        state = self.state
        result = np.zeros(len(offsets), dtype=np.bool_)
        first, last = (int(offsets.min()), int(offsets.max())) if len(offsets) else (0, -1)
        while first <= last:
            if not state[fields.BITS_FIRST] <= first < state[fields.BITS_END]:
                self.open_window(first, first)
            begin, end = int(state[fields.BITS_FIRST]), int(state[fields.BITS_END])
            inside = (first <= offsets) & (offsets < end)
            at = offsets[inside] - begin
            result[inside] = self.space.bits[at >> 3] >> (at & 7).astype(np.uint8) & 1
            first = end
        return result

    def have_survivors(self, firsts: Ints, lasts: Ints) -> Bools:
        """Return which of the ascending intervals [first, last] of offsets have a survivor.

        Moves the bitmap of survivors. Raises CleanAbortedError, OSError.
        """
        state = self.state
        result = np.zeros(len(firsts), dtype=np.bool_)
        done = 0
        while done < len(firsts):
            if not state[fields.BITS_FIRST] <= firsts[done] <= lasts[done] < state[fields.BITS_END]:
                self.open_window(int(firsts[done]), int(lasts[done]))
            done = int(find_intervals(self.space.bits, state, firsts, lasts, done, result))
        return result


def _map_for(job: CleanJob, section: int) -> OffsetMap:
    if job.order is None:
        return OffsetMap(job.dedupe_buffer_bytes, section, job.hash_key)
    header = job.order.version_header or b""
    return RankedMap(job.dedupe_buffer_bytes, section, job.hash_key, header)


def grown(array: Bytes, size_bytes: int) -> Bytes:
    """Return the array if it has this size and slack, else a larger, uninitialised one."""
    if len(array) >= size_bytes + SLACK_BYTES:
        return array
    reserve = size_bytes >> 2 if size_bytes < GIANT_BYTES else 0
    return np.empty(size_bytes + reserve + SLACK_BYTES, dtype=np.uint8)


def released(array: Bytes) -> Bytes:
    """Return the array, or an empty one if it is larger than GIANT_BYTES."""
    return array if len(array) <= GIANT_BYTES else np.empty(SLACK_BYTES, dtype=np.uint8)
