"""What both passes of one clean share: the job, its memory, its link to whoever ordered it."""

from typing import Final, Protocol

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import Bytes, Ints
from cleaner.engine.kernels.layout import RECORD_BYTES_MIN, Workspace
from cleaner.engine.offset_map import OffsetMap
from cleaner.engine.output_files import OutputFiles
from cleaner.engine.ranked_map import RankedMap
from cleaner.engine.source import SourceReader
from cleaner.engine.transactions import Transactions
from cleaner.job import CleanAbortedError, CleanJob, JobControl
from storage.env import Env
from storage.format.compression import decompress

# Offsets that the bitmap of survivors covers at a time: 16 MiB. Larger sections take several turns,
# each of which goes through the table once.
WINDOW_OFFSETS = 1 << 27
# An array for one batch that is larger is made as large as that batch, and not kept.
GIANT_BYTES = 4 << 20
# A section this much wider than one window has few records per offset: the map is asked instead.
WINDOWS_MAX = 64
# Wider than any batch: where there is no map to ask, the bitmap is made to hold the widest.
_ANY_BATCH: Final = 1 << 32


class SurvivorSource(Protocol):
    """Who survives, found out elsewhere: takes the place of the map in the second pass."""

    @property
    def keyless_met(self) -> bool:
        """Whether any record without a key was seen."""

    def window(self, first: int, last: int) -> tuple[int, int]:
        """The offsets [begin, end) that a bitmap should cover: at least [first, last]."""

    def mark(self, bits: Bytes, first: int, end: int) -> None:
        """Set the bit of each survivor in [first, end), counted from `first`; all are clear."""


class CleanContext:
    """One clean's arrays and counters. `space` is handed to the kernels."""

    def __init__(
        self,
        env: Env,
        job: CleanJob,
        control: JobControl,
        outputs: OutputFiles | None = None,
        *,
        key_map: OffsetMap | None = None,
        survivors: SurvivorSource | None = None,
    ) -> None:
        """`outputs`: where what is written goes, if not to `env`. `key_map`: instead of the job's.

        `survivors` tells of every record from the log's start on: the map stays empty then, and
        only the second pass can be made, not that of a job over what has expired.
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
        self.reader = SourceReader(env, job.directory, job.read_buffer_bytes)
        self.transactions = Transactions(job)
        self.space = Workspace(
            table=self.map.table,
            state=self.state,
            ones=self.map.ones,
            twos=self.map.twos,
            offsets=self.map.offsets,
            found=np.empty(len(self.map.ones), dtype=np.int64),
            keep=np.empty(len(self.map.ones), dtype=np.uint8),
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
        state[fields.LATEST_ONLY] = job.latest_only
        state[fields.KEEP_KEYLESS] = job.keep_keyless
        state[fields.NOW_MS] = job.now_ms
        state[fields.LAST_OF_LOG] = job.end_offset - 1 if job.log_end_offset_is_end else -1
        windows = -(-section // WINDOW_OFFSETS)
        state[fields.BITS_MAX] = min(section, WINDOW_OFFSETS) if windows <= WINDOWS_MAX else 0
        if self._survivors is not None:
            state[fields.BITS_MAX] = _ANY_BATCH
            state[fields.BITS_FROM] = 0
            state[fields.KEYLESS_MET] = self._survivors.keyless_met

    @property
    def map_end(self) -> int:
        """The first offset that the map says nothing about."""
        return int(self.state[fields.MAP_END])

    def check_aborted(self) -> None:
        """Stop if the broker wants the partition back. Raises CleanAbortedError."""
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

        Returns the bytes it unpacked to. Raises CorruptBatchError, DecompressionLimitError.
        """
        packed = self.reader.buffer.data[at : at + size]
        data = decompress(codec, packed, self.job.decompressed_batch_bytes)
        if len(self.unpacked) < len(data) + room_bytes + SLACK_BYTES:
            self.unpacked = self.unpacked[:0]  # the one goes before the other is made
        self.unpacked = grown(self.unpacked, len(data) + room_bytes)
        self.unpacked[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return len(data)

    def release(self) -> None:
        """Let go of what a giant batch took: the next segment may have none."""
        self.unpacked = released(self.unpacked)
        if len(self.space.keep) > GIANT_BYTES:
            keep = np.empty(len(self.space.ones), dtype=np.uint8)
            self.space = self.space._replace(keep=keep)
        if self._survivors is not None and len(self.space.bits) > (WINDOW_OFFSETS >> 3) + 1:
            self.space = self.space._replace(bits=np.zeros(0, dtype=np.uint8))
            self.state[fields.BITS_END] = self.state[fields.BITS_FIRST]

    def make_flags(self, record_bytes: int) -> None:
        """Have a flag for each record that `record_bytes` can hold."""
        requested = record_bytes // RECORD_BYTES_MIN
        if len(self.space.keep) < requested:
            self.space = self.space._replace(keep=np.empty(requested, dtype=np.uint8))

    def make_room_for_producers(self) -> None:
        """Have more slots for producers with batches behind their last markers."""
        self.transactions.widen(self.state)
        self.space = self.space._replace(open_producers=self.transactions.open_producers)

    def restore_producers(self, open_producers: Ints, count: int) -> None:
        """Go back to what was met of them before; `count` is how many are in the set."""
        self.transactions.open_producers = open_producers
        self.space = self.space._replace(open_producers=open_producers)
        self.state[fields.OPEN_COUNT] = count

    def open_window(self, first: int, last: int) -> None:
        """Have the bitmap of survivors cover a batch of the offsets [first, last]."""
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


def _map_for(job: CleanJob, section: int) -> OffsetMap:
    if job.order is None:
        return OffsetMap(job.dedupe_buffer_bytes, section, job.hash_key)
    header = job.order.version_header or b""
    return RankedMap(job.dedupe_buffer_bytes, section, job.hash_key, header)


def grown(array: Bytes, size_bytes: int) -> Bytes:
    """`array`, or a larger one without its content if it is too small, slack included."""
    if len(array) >= size_bytes + SLACK_BYTES:
        return array
    reserve = size_bytes >> 2 if size_bytes < GIANT_BYTES else 0
    return np.empty(size_bytes + reserve + SLACK_BYTES, dtype=np.uint8)


def released(array: Bytes) -> Bytes:
    """`array`, or an empty one in its place where it is larger than most batches need."""
    return array if len(array) <= GIANT_BYTES else np.empty(SLACK_BYTES, dtype=np.uint8)
