"""What ranks need beyond the dirty section: what is clean below it, and the keys deleted before.

Rules
- After the first pass the map holds the latest record of each key of the dirty section. Then the
  records below, and the deletes that are remembered, compete for the same keys. Keys without a
  dirty record are as they were, and need no place in the map.
- So what a prefix of the section leaves - survivors, and deletes remembered - is all that the rest
  has to know of it: any number of rounds ends as one round does.
- The deletes are streamed from one file to the next, with a checksum: memory does not grow with
  them. What cannot be believed fails the job; nothing is left out in silence.
- A delete is forgotten `delete.retention.ms` after a run has first seen it, and not while the clock
  is suspected of having jumped. All rounds of a run have the same `now_ms`, so that none of them
  forgets what another one has just learned.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from crc32c import crc32c

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Ints
from cleaner.engine.kernels.passes.ranking import LOWEST, newly_deleted, recall, still_deleted
from cleaner.engine.ranked_map import RankedMap
from cleaner.engine.two_pass.index_pass import index_segment
from cleaner.job import Damage
from storage.env import File
from storage.errors import CorruptCheckpointError, DamagedSegmentError
from storage.format.filenames import CLEANED
from storage.segments.swap import CleanedFile
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
    """Between the two passes of a job with an order."""

    def __init__(self, context: CleanContext, ranked: RankedMap) -> None:
        assert context.job.order is not None
        self._context = context
        self._map = ranked
        self._before = context.job.order.deleted_keys
        self._header = DELETED_KEYS_MAGIC + ranked.fingerprint(CHECK_TEXT)
        job = context.job
        forgets = job.drop_expired_tombstones
        self._forget_before = job.now_ms - job.delete_retention_ms if forgets else LOWEST

    def look_below(self) -> dict[int, Damage]:
        """Have what is older compete; the damaged segments found, by base offset.

        Raises CleanAbortedError, CorruptCheckpointError, OSError.
        """
        damaged = self._rank_clean_section()
        context = self._context
        for rows, count in self._remembered():
            recall(rows, count, self._forget_before, context.space, self._map.ranking)
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

    def remember(self) -> CleanedFile | None:
        """Write the deletes that hold from now on; None if there are none.

        Raises CleanAbortedError, CorruptCheckpointError, OSError; what was written is removed then.
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
        """The rows of the new file: those that still hold, then those that are new."""
        context, state = self._context, self._context.state
        for rows, count in self._remembered():
            forget_before = self._forget_before
            yield rows, still_deleted(rows, count, forget_before, self._map.table, state)
        rows = np.empty(ROWS_AT_A_TIME * ROW_WORDS, dtype=np.int64)
        slot = 0
        while slot < int(state[fields.SLOTS]):
            now_ms = context.job.now_ms
            slot, count = newly_deleted(slot, rows, now_ms, context.space, self._map.ranking)
            yield rows, count

    def _remembered(self) -> Iterator[tuple[Ints, int]]:
        """The rows of the file before, some at a time; its end tells whether it was sound."""
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
                    raise CorruptCheckpointError(path, "it was cut while it was read")
                crc = crc32c(data, crc)
                rows = np.frombuffer(data, dtype="<i8").astype(np.int64)
                if (rows[ROW_OFFSET::ROW_WORDS] < 0).any():  # to the map a slot that is free
                    raise CorruptCheckpointError(path, f"a delete at no offset, from byte {at} on")
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
