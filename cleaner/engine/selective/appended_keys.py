"""The keys of an active segment, recorded while its batches are appended.

When the segment is closed, they become its key index (key_index.py), so that no worker has to read
the segment for it.

Rules
- The broker adds every batch that it appends, after the append. A batch that was appended by any
  other way leaves a gap of offsets, and the record of the segment is useless from then on. So it is
  after a batch of a transaction.
- Uncompressed batches are copied and listed together: a call of a kernel takes longer than to list
  a small batch. A compressed batch is listed where it is unpacked (`list_keys`), by the kernel that
  lists the keys of segments.
- A segment with small records is not recorded (index_size.py): from PENDING_BYTES_MIN on, each
  batch shows whether the index would be small so far.
- Memory: 16 bytes for each record, 32 for each block of batches, and the pending batches. All
  segments together have a limit, and those of one client (KeyMemory); the segment that exceeds it
  is not recorded. The memory counts until the record is discarded or freed, because partitions
  leave in several ways: with their topic, their disk or a move of their replica.
"""

from array import array
from collections.abc import Hashable
from typing import Final, NamedTuple

import numpy as np

from cleaner.engine.batch_blocks import BatchBlocks
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import Bytes, Words
from cleaner.engine.kernels.layout import (
    HEADER_BYTES,
    LARGEST_BASE_OFFSET,
    RECORD_BYTES_MIN,
    SLOT_WORDS,
    Code,
    Workspace,
    new_state,
)
from cleaner.engine.kernels.passes.shards import list_batches, list_unpacked
from cleaner.engine.selective.index_size import worth_indexing
from cleaner.engine.selective.key_index import SegmentKeys
from cleaner.engine.selective.packed_rows import pack_rows
from cleaner.key_memory import KeyMemory
from storage.format.batch import BatchHeader, Buffer, Record, build_batch, unpack_header

# Batches that are listed together: a call takes 20 us besides 50 ns for each record. A segment with
# many records may have more pending bytes, so that the memory of quiet partitions stays small.
PENDING_BYTES_MIN: Final = 1 << 14
PENDING_BYTES_MAX: Final = 1 << 18  # with records of 100 bytes they take 0.1 ms
PENDING_SHARE: Final = 4  # of the memory for rows
_OFFSET_WORD: Final = 2  # of a row: offset + 1
_WORD_BYTES: Final = 8


class BatchKeys(NamedTuple):
    """The rows of one batch, with offsets that count from its first record."""

    rows: Words
    has_tombstones: bool


class AppendedKeys:
    """The keys of one active segment that was empty at first."""

    def __init__(
        self,
        hash_key: bytes,
        base_offset: int,
        memory: KeyMemory,
        content_id: int = 0,
        client: Hashable | None = None,
    ) -> None:
        """`content_id`: of the segment; a truncation changes it, and the keys are useless then.

        `client` has a share of the memory; None is one without.
        """
        self.hash_key = hash_key
        self.content_id = content_id
        self._base_offset = base_offset
        self.next_offset = base_offset  # of the batch that has to be added next
        self.listed_bytes = 0  # of the segment
        self._appended_bytes = 0  # likewise, with those that are not listed yet
        self.is_usable = True
        self._space = _new_workspace(hash_key, base_offset)
        self._rows = array("Q")
        self._blocks = BatchBlocks()
        self._pending = bytearray()
        self._memory = memory
        self._client = client
        self._charged_bytes = 0

    def __del__(self) -> None:
        self._memory.charge(self._client, -self._charged_bytes)

    def add(
        self, batch: Buffer, header: BatchHeader, first_offset: int, keys: BatchKeys | None
    ) -> None:
        """Add a batch that was appended at `first_offset`; `keys` if it is compressed."""
        if not self.is_usable:
            return
        if first_offset != self.next_offset or header.is_transactional or header.is_control:
            self.discard()
            return
        self.next_offset = first_offset + header.last_offset_delta + 1
        self._appended_bytes += header.size_bytes
        if self._appended_bytes >= PENDING_BYTES_MIN and not self._is_worth_indexing():
            self.discard()
            return
        if keys is None:
            self._pending += batch
        if keys is not None or len(self._pending) >= self._pending_bytes_max():
            self._list_pending()
        if keys is not None:
            self._add_listed(batch, header.size_bytes, first_offset, keys)
        self._charge()

    def _is_worth_indexing(self) -> bool:
        return worth_indexing(self._appended_bytes, self.next_offset - self._base_offset)

    def _pending_bytes_max(self) -> int:
        wanted = PENDING_SHARE * _WORD_BYTES * len(self._rows)
        return min(max(wanted, PENDING_BYTES_MIN), PENDING_BYTES_MAX)

    def _charge(self) -> None:
        used_bytes = len(self._rows) * _WORD_BYTES + self._blocks.memory_bytes + len(self._pending)
        more_bytes, self._charged_bytes = used_bytes - self._charged_bytes, used_bytes
        if not self._memory.charge(self._client, more_bytes):
            self.discard()

    def discard(self) -> None:
        """Record nothing more of this segment, and free the memory."""
        self.is_usable = False
        self._rows, self._blocks, self._pending = array("Q"), BatchBlocks(), bytearray()
        self._memory.charge(self._client, -self._charged_bytes)
        self._charged_bytes = 0

    def finish(self) -> SegmentKeys | None:
        """Return the keys of the closed segment; None if incomplete, or too large for an index.

        Call `discard` when they are no longer used.
        """
        if not self._is_worth_indexing():
            return None
        self._list_pending()
        if not self.is_usable or self._space.state[fields.KEYLESS_SEEN]:
            return None
        rows: Words = np.frombuffer(self._rows, dtype=np.uint64)
        has_tombstones = bool(self._space.state[fields.TOMBSTONES_SEEN])
        return SegmentKeys(rows, self._blocks.blocks, has_tombstones)

    def _list_pending(self) -> None:
        pending_bytes = len(self._pending)
        if pending_bytes == 0:
            return
        self._pending += bytes(SLACK_BYTES)
        buffer = np.frombuffer(self._pending, dtype=np.uint8)
        rows = self._memory.row_buffer(pending_bytes // RECORD_BYTES_MIN * SLOT_WORDS)
        code, end, count = list_batches(buffer, 0, pending_bytes, rows, 0, self._space)
        if code != Code.MORE or end != pending_bytes:
            self.discard()  # such a batch is not accepted, so this is a fault of the disk or ours
            return
        self._blocks.add(buffer, 0, pending_bytes, self.listed_bytes)
        self._add_rows(rows[: count * SLOT_WORDS])
        self._pending = bytearray()
        self.listed_bytes += pending_bytes

    def _add_rows(self, rows: Words) -> None:
        packed = pack_rows(rows, self._base_offset)
        self._rows.frombytes(packed.view(np.uint8).data)

    def _add_listed(
        self, batch: Buffer, size_bytes: int, first_offset: int, keys: BatchKeys
    ) -> None:
        """Add the keys of a batch that were listed before it was appended."""
        self._blocks.add(_padded(memoryview(batch)[:HEADER_BYTES]), 0, 1, self.listed_bytes)
        keys.rows[_OFFSET_WORD::SLOT_WORDS] += np.uint64(first_offset)
        self._add_rows(keys.rows)
        self.listed_bytes += size_bytes
        if keys.has_tombstones:
            self._space.state[fields.TOMBSTONES_SEEN] = 1


def list_keys(batch: Buffer, unpacked: Buffer, hash_key: bytes) -> BatchKeys | None:
    """Return the keys of an accepted batch with these unpacked records. May run in a thread."""
    space = _new_workspace(hash_key, 0)
    header = _padded(memoryview(batch)[:HEADER_BYTES])
    header[:8] = 0  # the base offset: parts of a large batch were written at one that is void now
    size_bytes = len(memoryview(unpacked))
    rows: Words = np.empty(size_bytes // RECORD_BYTES_MIN * SLOT_WORDS, dtype=np.uint64)
    code, count = list_unpacked(_padded(unpacked), size_bytes, header, 0, rows, 0, space)
    if code != Code.DONE:
        return None
    has_tombstones = bool(space.state[fields.TOMBSTONES_SEEN])
    return BatchKeys(rows[: count * SLOT_WORDS].copy(), has_tombstones)


def warm_up() -> None:
    """Load the kernels, or compile them. Takes some 100 ms; call it in a thread."""
    batch = bytes(build_batch([Record(0, 1, b"k", None)]))
    list_keys(batch, batch[HEADER_BYTES:], bytes(16))
    keys = AppendedKeys(bytes(16), 0, KeyMemory())
    keys.add(batch, unpack_header(batch), 0, None)
    keys.finish()


def _padded(data: Buffer) -> Bytes:
    """Return a copy with the slack that kernels may read."""
    view = np.frombuffer(data, dtype=np.uint8)
    copy: Bytes = np.empty(len(view) + SLACK_BYTES, dtype=np.uint8)
    copy[: len(view)] = view
    copy[len(view) :] = 0
    return copy


def _new_workspace(hash_key: bytes, base_offset: int) -> Workspace:
    """Return what the kernels that list records need: the other arrays are empty."""
    state = new_state()
    state[fields.KEY_0], state[fields.KEY_1] = np.frombuffer(hash_key, dtype=np.int64)
    state[fields.FIRST_DIRTY] = state[fields.SOURCE_END] = LARGEST_BASE_OFFSET
    state[fields.NEXT_OFFSET] = base_offset
    words, numbers = np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    flags = np.empty(0, dtype=np.uint8)
    return Workspace(
        table=words,
        state=state,
        lows=words,
        highs=words,
        offsets=numbers,
        last_offsets=numbers,
        keep=flags,
        bits=flags,
        producers=numbers,
        aborted=numbers,
        aborted_kept=flags,
        open_producers=numbers,
    )
