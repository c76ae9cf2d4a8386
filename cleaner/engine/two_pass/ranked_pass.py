"""Rank records below the dirty section and keys deleted earlier, for views by rank.

Rules
- After the first pass the map has the latest record of each key of the dirty section. Then the
  records below it and the earlier deletes compete for the same keys. Keys without a dirty record
  are unchanged and not in the map.
- So the survivors and deletes of a prefix are all that the rest of the section depends on: any
  number of rounds has the result of one round.
- Deletes are streamed from one file to the next, with a checksum: memory does not grow with them.
  An invalid file fails the job.
- A delete expires `delete.retention.ms` after the first compaction that read it, and only with a
  trusted clock. All rounds of a compaction use the same `now_ms`, so that no round drops a delete
  of another.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from crc32c import crc32c

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Ints
from cleaner.engine.kernels.passes.ranking import (
    LOWEST,
    keep_current_deletes,
    list_new_deletes,
    restore_deletes,
)
from cleaner.engine.key_map.ranked_map import RankedMap
from cleaner.engine.two_pass.index_pass import index_segment
from cleaner.job import Damage
from storage.env import File
from storage.errors import CorruptCheckpointError, DamagedSegmentError
from storage.format.filenames import CLEANED
from storage.swap.swap_journal import CleanedFile
from storage.view.deleted_keys import (
    CHECK_TEXT,
    DELETED_KEYS_HEADER_BYTES,
    DELETED_KEYS_MAGIC,
    DELETED_KEYS_NAME,
    ROW_BYTES,
    ROW_OFFSET,
    ROW_WORDS,
    rows_in,
)

ROWS_AT_A_TIME: Final = 4096  # 160 KiB


class RankedPass:
    """The pass between the two passes of a job with an order."""

    def __init__(self, context: CleanContext, ranked: RankedMap) -> None:
        assert context.job.order is not None
        self._context = context
        self._map = ranked
        self._before = context.job.order.deleted_keys
        self._header = DELETED_KEYS_MAGIC + ranked.fingerprint(CHECK_TEXT)
        job = context.job
        expires = job.drop_expired_tombstones
        self._expire_before = job.now_ms - job.delete_retention_ms if expires else LOWEST

    def index_below(self) -> dict[int, Damage]:
        """Rank older records and deletes; return the damaged segments by base offset.

        Raises CleanAbortedError, CorruptCheckpointError, OSError.
        """
        damaged = self._rank_clean_section()
        context = self._context
        for rows, count in self._earlier_deletes():
            restore_deletes(rows, count, self._expire_before, context.space, self._map.ranking)
        return damaged

    def _rank_clean_section(self) -> dict[int, Damage]:
        context, state = self._context, self._context.state
        damaged: dict[int, Damage] = {}
        segments = [
            source
            for group in context.job.groups
            for source in group
            if source.base_offset < context.job.first_dirty_offset
        ]
        if self._map.entries == 0:
            return damaged
        total = sum(source.size_bytes for source in segments)
        begun = 0
        state[fields.KNOWN_ONLY] = 1
        for source in segments:
            try:
                full = index_segment(context, source, "rank", begun, total)
                assert not full, "no key is added"
            except DamagedSegmentError as error:
                damaged[source.base_offset] = Damage.of(error)
            context.release()
            begun += source.size_bytes
        context.reader.close()
        state[fields.KNOWN_ONLY] = 0
        return damaged

    def write_deleted_keys(self) -> CleanedFile | None:
        """Write the deleted keys from now on; return None if there are none.

        Raises CleanAbortedError, CorruptCheckpointError, OSError, after removing the file.
        """
        env, job = self._context.env, self._context.job
        name = f"{DELETED_KEYS_NAME}.{job.job_id}{CLEANED}"
        path = f"{job.directory}/{name}"
        file = env.open(path, create=True, write=True, truncate=True)
        try:
            written = _Written(file)
            written.append(self._header)
            for rows, count in self._rows():
                data = rows[: count * ROW_WORDS].tobytes()
                self._context.charge_write(len(data))
                written.append(data)
            file.sync()
        except BaseException:
            file.close()
            env.unlink(path)
            raise
        file.close()
        if written.size_bytes == len(self._header):
            env.unlink(path)
            return None
        return CleanedFile(name, written.size_bytes, written.crc)

    def _rows(self) -> Iterator[tuple[Ints, int]]:
        """Yield the rows of the new file: remaining deletes, then new ones."""
        context, state = self._context, self._context.state
        for rows, count in self._earlier_deletes():
            expire_before = self._expire_before
            yield rows, keep_current_deletes(rows, count, expire_before, self._map.table, state)
        rows = np.empty(ROWS_AT_A_TIME * ROW_WORDS, dtype=np.int64)
        slot = 0
        while slot < int(state[fields.SLOTS]):
            now_ms = context.job.now_ms
            slot, count = list_new_deletes(slot, rows, now_ms, context.space, self._map.ranking)
            yield rows, count

    def _earlier_deletes(self) -> Iterator[tuple[Ints, int]]:
        """Yield the rows of the earlier file; raises at its end if it is invalid."""
        before = self._before
        if before is None:
            return
        context = self._context
        path = f"{context.job.directory}/{DELETED_KEYS_NAME}"
        file = context.env.open(path)
        try:
            header = file.pread(DELETED_KEYS_HEADER_BYTES, 0)
            if file.size() != before.size_bytes or rows_in(before.size_bytes) < 0:
                raise CorruptCheckpointError(
                    path, f"it has {file.size()} bytes instead of {before.size_bytes}"
                )
            crc = crc32c(header)
            step = ROWS_AT_A_TIME * ROW_BYTES
            for at in range(len(header), before.size_bytes, step):
                count = min(step, before.size_bytes - at)
                context.charge_read(count)
                context.reader.bytes_read += count
                data = file.pread(count, at)
                if len(data) < count:
                    raise CorruptCheckpointError(path, "it was truncated while it was read")
                crc = crc32c(data, crc)
                rows = np.frombuffer(data, dtype="<i8").astype(np.int64)
                if (rows[ROW_OFFSET::ROW_WORDS] < 0).any():  # the map would take it for a free slot
                    raise CorruptCheckpointError(
                        path, f"a row without an offset, from byte {at} on"
                    )
                yield rows, count // ROW_BYTES
            if crc != before.crc:
                raise CorruptCheckpointError(path, "the checksum does not match")
            if header != self._header:
                raise CorruptCheckpointError(path, "it was made under another hash key")
        finally:
            file.close()


class _Written:
    """A file that grows, its size and its checksum."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.size_bytes = 0
        self.crc = 0

    def append(self, data: bytes) -> None:
        self._file.pwrite(data, self.size_bytes)
        self.size_bytes += len(data)
        self.crc = crc32c(data, self.crc)
