"""Transfer of leased files by HTTP: downloads of inputs in ranges, uploads of outputs as streams.

Rules
- A name is one plain file name, checked before it becomes a path; links are not followed.
- No file is in memory as a whole. Disk operations run in a thread.
- When an upload is answered, the file matches its checksum and is durable; until then it has
  another name. After the manifest no upload is accepted.
- Uploads are limited by the size of the leased partition and by the free space on the disk.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from crc32c import crc32c

from broker.event_loop.directory_threads import DirectoryThreads
from broker.leases.lease_folder import IN, OUT, is_manifest, write_manifest
from broker.leases.leases import Leases
from broker.leases.model import LeasedPartition, LeaseError
from cleaner.remote_compaction import (
    MalformedPlanError,
    decode_manifest,
    is_file_of,
    is_folder,
    is_scratch_folder,
    manifest_bytes_max,
    manifest_parts_max,
)
from storage.env import Env, File
from storage.errors import NoRoomError, StorageError, is_scarcity
from storage.format import filenames

RANGE_BYTES_MAX: Final = 4 << 20  # of one response: each slow reader needs as much memory
WRITE_BYTES: Final = 1 << 20  # collected before a thread writes them
FREE_BYTES_MIN: Final = 1 << 30  # that uploads leave free, or
FREE_SHARE: Final = 20  # this part of the disk, if that is less
FILES_MAX: Final = 200_000  # uploads for one partition
PART_SUFFIX: Final = ".part"


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file."""

    data: bytes
    crc: int
    first: int
    total_bytes: int  # of the file


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload: its announced name, size and checksum, and its bytes as they arrive."""

    size_bytes: int
    crc: int  # CRC-32C
    chunks: AsyncIterator[bytes]


@dataclass(slots=True, eq=False)
class _PendingUpload:
    """An accepted upload, whose space is reserved."""

    bytes_left: int  # to be written


class Transfers:
    """Transfers files of active leases."""

    def __init__(self, env: Env, threads: DirectoryThreads, compactions: Leases) -> None:
        self._env = env
        self._threads = threads
        self._leases = compactions
        self._pending: set[_PendingUpload] = set()

    # Downloads ----------------------------------------------------------------------------------

    async def read_input(
        self, part: LeasedPartition, name: str, first: int, end: int | None
    ) -> FileRange:
        """Return a range `[first, end)` of a pinned segment's file. Raises LeaseError."""
        parsed = filenames.parse_file_name(name)
        if parsed is None or parsed.temporary or parsed.kind not in filenames.SEGMENT_KINDS:
            raise LeaseError(404, f"{name[:100]!r} is not a segment file name")
        return await self._read(f"{part.folder}/{IN}/{name}", first, end)

    async def read_output(
        self, part: LeasedPartition, folder: str, name: str, first: int, end: int | None
    ) -> FileRange:
        """Return a range of an uploaded file. Raises LeaseError."""
        self._check_names(part, folder, name)
        return await self._read(f"{part.folder}/{OUT}/{folder}/{name}", first, end)

    async def _read(self, path: str, first: int, end: int | None) -> FileRange:
        try:
            file_range = await self._threads.run(path, partial(self._read_range, path, first, end))
        except FileNotFoundError:
            raise LeaseError(404, f"there is no file {path.rpartition('/')[2]}") from None
        except OSError as error:
            raise LeaseError(409, f"the file cannot be read: {error}") from error
        self._leases.table.stats.bytes_sent += len(file_range.data)
        return file_range

    def _read_range(self, path: str, first: int, end: int | None) -> FileRange:
        env, folder = self._env, path.rpartition("/")[0]
        if env.is_link(folder) or env.is_link(path) or env.is_dir(path):
            raise FileNotFoundError(path)
        file = env.open(path)
        try:
            total = file.size()
            if first > total or (first == total and total > 0):
                raise LeaseError(416, f"the file has {total} bytes")
            end = total if end is None else min(end, total)
            data = file.pread(min(end - first, RANGE_BYTES_MAX), first) if end > first else b""
        finally:
            file.close()
        return FileRange(data, crc32c(data), first, total)

    # Uploads ------------------------------------------------------------------------------------

    async def receive(self, part: LeasedPartition, folder: str, name: str, upload: Upload) -> None:
        """Receive a file. Raises LeaseError, and the errors of its chunks."""
        self._check_names(part, folder, name)
        self._check_open(part)
        self._account(part, upload.size_bytes)
        directory = f"{part.folder}/{OUT}/{folder}"
        coming = _PendingUpload(upload.size_bytes)
        self._pending.add(coming)
        is_kept = False
        try:
            await self._check_room(part)
            self._check_open(part)
            if self._env.is_link(directory):
                raise LeaseError(409, f"{folder} is a link")
            # On the loop: see broker/leases/lease_folder.py.
            part.partition.make_folder(partial(self._env.mkdir, directory))
            await self._store(part, f"{directory}/{name}", upload, coming)
            is_kept = True
        except NoRoomError as error:
            raise LeaseError(507, f"there is no room: {error}") from error
        except StorageError as error:
            raise LeaseError(503, str(error)) from error
        except OSError as error:
            status = 507 if is_scarcity(error) else 409
            raise LeaseError(status, f"cannot store the file: {error}") from error
        finally:
            self._pending.discard(coming)
            if not is_kept:
                part.staged_bytes -= upload.size_bytes
        self._leases.table.stats.bytes_received += upload.size_bytes

    async def _store(
        self, part: LeasedPartition, path: str, upload: Upload, coming: _PendingUpload
    ) -> None:
        """Write, check and rename the file. Raises LeaseError, OSError."""
        temporary = f"{path}.{self._env.random_bytes(6).hex()}{PART_SUFFIX}"
        create = partial(self._env.open, temporary, create=True, write=True, truncate=True)
        file = await self._threads.run(path, create)
        is_complete = False
        try:
            result = await self._write(part, file, upload, coming)
            if result != upload.crc:
                reason = f"checksum {result:08x}, expected {upload.crc:08x}: damaged in transfer"
                raise LeaseError(422, reason)
            self._check_open(part)
            durable = not is_scratch_folder(path.split("/")[-2])
            commit = partial(self._commit, file, temporary, path, durable=durable)
            await self._threads.run(path, commit)
            is_complete = True
        finally:
            # The file is not closed here: its last reference may be in a thread that still writes,
            # and another file would get its descriptor.
            if not is_complete:
                await self._threads.run(path, partial(self._drop, temporary))

    async def _write(
        self, part: LeasedPartition, file: File, upload: Upload, coming: _PendingUpload
    ) -> int:
        """Write all bytes that arrive; return their checksum."""
        position, crc, owned, size_bytes = 0, 0, bytearray(), upload.size_bytes
        async for chunk in upload.chunks:
            self._check_open(part)
            owned += chunk
            if position + len(owned) > size_bytes:
                raise LeaseError(400, f"received more than {size_bytes} bytes")
            if len(owned) >= WRITE_BYTES:
                write = partial(_write_out, file, owned, position, crc)
                crc = await self._threads.run(part.folder, write)
                position += len(owned)
                coming.bytes_left -= len(owned)
                owned = bytearray()
        write = partial(_write_out, file, owned, position, crc)
        crc = await self._threads.run(part.folder, write)
        position += len(owned)
        if position < size_bytes:
            raise LeaseError(400, f"received {position} bytes instead of {size_bytes}")
        return crc

    def _commit(self, file: File, temporary: str, path: str, *, durable: bool) -> None:
        if durable:
            file.sync()
        self._env.rename(temporary, path)
        if durable:
            self._env.sync_dir(path.rpartition("/")[0])

    def _drop(self, path: str) -> None:
        try:
            self._env.unlink(path)
        except OSError:
            return  # it is removed with the lease

    def _check_names(self, part: LeasedPartition, folder: str, name: str) -> None:
        if not is_folder(folder):
            raise LeaseError(400, f"{folder[:100]!r} is not a folder name")
        if not is_file_of(folder, name, part.record.compaction_id):
            raise LeaseError(400, f"{name[:100]!r} is not an output file of this compaction")

    def _check_open(self, part: LeasedPartition) -> None:
        self._leases.table.check_alive(part)
        if not part.takes_files:
            reason = f"the manifest of {part.where} was submitted: no more uploads are accepted"
            raise LeaseError(409, reason)

    def _account(self, part: LeasedPartition, size_bytes: int) -> None:
        if part.staged_bytes + size_bytes > part.staged_bytes_max:
            reason = f"the uploads for {part.where} exceed {part.staged_bytes_max} bytes"
            raise LeaseError(413, reason)
        if part.staged_files >= FILES_MAX:
            raise LeaseError(413, f"more than {FILES_MAX} files of one partition")
        part.staged_bytes += size_bytes
        part.staged_files += 1

    async def _check_room(self, part: LeasedPartition) -> None:
        """Raise LeaseError if the disk has no room for all accepted uploads."""
        try:
            free, total = await self._threads.run(
                part.directory, partial(self._room, part.directory)
            )
        except OSError as error:
            raise LeaseError(409, f"the disk does not answer: {error}") from error
        retained = min(FREE_BYTES_MIN, total // FREE_SHARE)
        if free - sum(upload.bytes_left for upload in self._pending) < retained:
            raise LeaseError(507, f"there is no room: {free} bytes are free, {retained} stay so")

    def _room(self, path: str) -> tuple[int, int]:
        return self._env.free_bytes(path), self._env.total_bytes(path)

    async def receive_manifest(self, part: LeasedPartition, data: bytes) -> None:
        """Receive the manifest; no upload is accepted afterwards. Raises LeaseError.

        The same manifest may be sent again: a client repeats it if it missed the response.
        """
        self._leases.table.check_alive(part)
        if not part.takes_files and await self._is_stored(part, data):
            return
        self._check_open(part)
        most_bytes = manifest_bytes_max(part.job)
        if len(data) > most_bytes:
            raise LeaseError(413, f"its manifest has up to {most_bytes} bytes")
        most_parts = manifest_parts_max(part.job)
        if data.count(b"[") + data.count(b"{") > most_parts:
            raise LeaseError(413, f"its manifest has up to {most_parts} lists and objects")
        try:
            await asyncio.to_thread(decode_manifest, data)
        except MalformedPlanError as error:
            raise LeaseError(422, str(error)) from error
        self._check_open(part)
        part.takes_files = False
        try:
            write = partial(write_manifest, self._env, part.folder, data)
            await self._threads.run(part.folder, write)
        except OSError as error:
            part.takes_files = True
            raise LeaseError(507, f"the manifest cannot be kept: {error}") from error

    async def _is_stored(self, part: LeasedPartition, data: bytes) -> bool:
        """Return whether these bytes are the manifest that was received. Raises LeaseError."""
        try:
            compare = partial(is_manifest, self._env, part.folder, data)
            return await self._threads.run(part.folder, compare)
        except FileNotFoundError:
            raise LeaseError(503, f"the manifest of {part.where} is being stored") from None
        except OSError as error:
            raise LeaseError(409, f"the manifest cannot be read: {error}") from error


def _write_out(file: File, data: bytearray, position: int, crc: int) -> int:
    file.pwrite(data, position)
    return crc32c(data, crc)
