"""Write one cleaned segment: log, offset index, time index, transaction index.

Rules
- The names of the files contain the job id; no other code uses them until they are published
  (storage/swap/swap_journal.py). No file is created before the first byte is written.
- The buffer holds whole batches, up to WRITTEN in `state`. A flush also makes their index entries
  and updates the checksums: no byte is read back.
- `finish` returns when contents and names are on the device.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from cleaner.engine.batch_blocks import BatchBlocks
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs.crc import crc32c_extended
from cleaner.engine.kernels.codecs.index_entries import (
    OFFSET_ENTRY_BYTES,
    TIME_ENTRY_BYTES,
    add_time_entry,
    index_output,
)
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import Bytes, Ints
from cleaner.engine.kernels.layout import HEADER_BYTES
from cleaner.engine.output_files import OutputFile, OutputFiles
from storage.format import filenames
from storage.format.txn_index import TxnIndexEntry, encode_entries
from storage.swap.swap_journal import CleanedFile, CleanedSegment

_NO_TIMESTAMP: Final = -1


# Writes batches: (file, data, position).
Write: TypeAlias = Callable[[OutputFile, memoryview, int], None]


def write_now(file: OutputFile, data: memoryview, position: int) -> None:
    """Write to the page cache. Raises OSError."""
    file.pwrite(data, position)


class _Stream:
    """A file that only grows, and its checksum."""

    def __init__(self, env: OutputFiles, directory: str, name: str) -> None:
        self.name = name
        self.path = f"{directory}/{name}"
        self.size_bytes = 0
        self.crc = 0
        self._file: OutputFile = env.open(self.path, create=True, write=True, truncate=True)

    def append(self, data: Bytes, count: int, crc: int, write: Write) -> None:
        write(self._file, data.data[:count], self.size_bytes)
        self.size_bytes += count
        self.crc = crc

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class OutputBuffers:
    """The buffers of an output, used by one output after the other."""

    def __init__(self, size_bytes: int) -> None:
        self.batches: Bytes
        self.entries: Bytes
        self.time_entries: Bytes
        self.resize(size_bytes)

    def resize(self, size_bytes: int) -> None:
        """Make room for `size_bytes` of batches and for their index entries."""
        self.batches = np.empty(size_bytes + SLACK_BYTES, dtype=np.uint8)
        entries_max = size_bytes // HEADER_BYTES + 2
        self.entries = np.empty(entries_max * OFFSET_ENTRY_BYTES, dtype=np.uint8)
        self.time_entries = np.empty(entries_max * TIME_ENTRY_BYTES, dtype=np.uint8)

    @property
    def size_bytes(self) -> int:
        """Return the capacity for batches."""
        return len(self.batches) - SLACK_BYTES


class CleanedOutput:
    """Writes one `.cleaned` segment. `finish` or `abandon` ends it."""

    def __init__(
        self,
        env: OutputFiles,
        directory: str,
        *,
        base_offset: int,
        job_id: str,
        index_interval_bytes: int,
        buffers: OutputBuffers,
        state: Ints,
        charge: Callable[[int], None],
        write: Write = write_now,
        blocks: BatchBlocks | None = None,
    ) -> None:
        """`charge` is called before bytes are written; it may wait or raise.

        `blocks` are cleared, and get those of the output.

        `write` may return before batches are written: then their buffer must not change.
        """
        self._env = env
        self._directory = directory
        self._base_offset = base_offset
        self._job_id = job_id
        self._buffers = buffers
        self.state = state
        self._charge = charge
        self._write = write
        self._blocks = blocks
        if blocks is not None:
            blocks.clear()
        self._streams: tuple[_Stream, ...] = ()
        state[fields.WRITTEN] = 0
        state[fields.FILE_BASE] = base_offset
        state[fields.FILE_POSITION] = 0
        state[fields.INDEXED_POSITION] = 0
        state[fields.INDEX_INTERVAL] = index_interval_bytes
        state[fields.TIME_MAX_MS] = _NO_TIMESTAMP
        state[fields.TIME_MAX_OFFSET] = base_offset
        state[fields.TIME_INDEXED_MS] = _NO_TIMESTAMP
        state[fields.FILE_CRC] = 0

    @property
    def size_bytes(self) -> int:
        """Return the size of the log, including the buffer."""
        return int(self.state[fields.FILE_POSITION] + self.state[fields.WRITTEN])

    def flush(self) -> None:
        """Write and empty the buffer. Raises OSError."""
        state = self.state
        count = int(state[fields.WRITTEN])
        if count == 0:
            return
        self._open()
        state[fields.INDEX_BYTES] = 0
        state[fields.TIME_INDEX_BYTES] = 0
        buffers = self._buffers
        if self._blocks is not None:
            self._blocks.add(buffers.batches, 0, count, int(state[fields.FILE_POSITION]))
        fits = index_output(buffers.batches, count, buffers.entries, buffers.time_entries, state)
        assert fits  # see source.offsets_end; groups are planned within 31 bits of offsets
        self._charge(count)
        self._streams[0].append(buffers.batches, count, int(state[fields.FILE_CRC]), self._write)
        self._append_entries()
        state[fields.WRITTEN] = 0

    def finish(
        self, last_modified_ms: int, aborted: Sequence[TxnIndexEntry]
    ) -> CleanedSegment | None:
        """Complete and sync the files; return None if nothing was written. Raises OSError.

        `aborted` are the entries of the transaction index; without any, there is no such file.
        """
        cleaned = self.complete(aborted)
        if cleaned is not None:
            self.sync(last_modified_ms)
            self._env.sync_dir(self._directory)
        return cleaned

    def complete(self, aborted: Sequence[TxnIndexEntry]) -> CleanedSegment | None:
        """Write the rest, without a sync; return None if nothing was written. Raises OSError."""
        self.flush()
        if not self._streams:
            return None
        self.state[fields.INDEX_BYTES] = 0
        self.state[fields.TIME_INDEX_BYTES] = 0
        add_time_entry(self._buffers.time_entries, self.state)
        self._append_entries()
        if aborted:
            # A bytearray: the kernel would have to be compiled again for a read-only array.
            raw = np.frombuffer(bytearray(encode_entries(aborted)), dtype=np.uint8)
            self._charge(len(raw))
            self._add_stream(filenames.TXN_INDEX)
            crc = int(crc32c_extended(0, raw, 0, len(raw)))
            self._streams[-1].append(raw, len(raw), crc, write_now)
        files = tuple(CleanedFile(s.name, s.size_bytes, s.crc) for s in self._streams)
        return CleanedSegment(self._base_offset, self._job_id, files)

    def sync(self, last_modified_ms: int) -> None:
        """Sync the contents of the complete files, but not their folder."""
        for stream in self._streams:
            self._env.set_mtime_ms(stream.path, last_modified_ms)
            stream.sync()
            stream.close()

    def abandon(self) -> None:
        """Remove the files."""
        streams, self._streams = self._streams, ()
        self.state[fields.WRITTEN] = 0
        for stream in streams:
            stream.close()
            self._env.unlink(stream.path)

    def _open(self) -> None:
        if self._streams:
            return
        for kind in (filenames.LOG, filenames.INDEX, filenames.TIME_INDEX):
            self._add_stream(kind)

    def _add_stream(self, kind: str) -> None:
        """Create one file and register it for `abandon` at once."""
        name = filenames.cleaned_name(self._base_offset, kind, self._job_id)
        self._streams = (*self._streams, _Stream(self._env, self._directory, name))

    def _append_entries(self) -> None:
        sizes = (int(self.state[fields.INDEX_BYTES]), int(self.state[fields.TIME_INDEX_BYTES]))
        entries = (self._buffers.entries, self._buffers.time_entries)
        for stream, data, count in zip(self._streams[1:], entries, sizes, strict=True):
            if count > 0:
                crc = int(crc32c_extended(stream.crc, data, 0, count))
                stream.append(data, count, crc, write_now)
