"""Compare the files that the engine would write with existing files.

Rules
- The engine's output is not written but compared with the claimed file of the same name. Only names
  of the engine are opened.
- A difference is reported when the engine completes the file: until then the group may turn out to
  be unchanged.
- A file without a claim is not opened. Its group is reported as missing.
- A complete and equal file is synced and gets the engine's modification time.
- Memory: one buffer.
"""

import posixpath
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from cleaner.engine.kernels.compile import Bytes
from cleaner.job import CleanedGroup, CleanJob
from cleaner.verification import InvalidOutputError
from storage.env import Env, File, ReadBuffer
from storage.format import filenames

_BUFFER_BYTES: Final = 256 << 10  # stays in the second-level cache with the data to compare


class ComparedFile:
    """One claimed file, or a stand-in for a missing or unclaimed one."""

    def __init__(
        self,
        path: str,
        file: File | None,
        fault: str,
        buffer: Bytes,
        charge: Callable[[int], None],
    ) -> None:
        """Without `file` nothing is compared; `fault` is then the reason, if that is an error.

        `charge` is called before bytes are read; it may wait or raise.
        """
        self.path = path
        self.size_bytes = 0
        self._file = file
        self._buffer = buffer
        self._charge = charge
        self._fault_at = -1
        self._fault = fault

    def pwrite(self, data: ReadBuffer, position: int) -> None:
        """Compare `data` with the file at `position`. Raises OSError."""
        assert position == self.size_bytes
        requested = np.frombuffer(data, dtype=np.uint8)
        self.size_bytes += len(requested)
        if self._file is None or self._fault:
            return
        done = 0
        while done < len(requested) and not self._fault:
            count = min(len(requested) - done, len(self._buffer))
            self._compare(requested[done : done + count], position + done)
            done += count

    def _compare(self, requested: Bytes, position: int) -> None:
        assert self._file is not None
        self._charge(len(requested))
        actual = self._file.pread_into(self._buffer.data[: len(requested)], position)
        different = np.flatnonzero(self._buffer[:actual] != requested[:actual])
        if len(different):
            self._fault_at = position + int(different[0])
            self._fault = "the file differs from the job's output from this byte on"
        elif actual < len(requested):
            self._fault_at = position + actual
            self._fault = "the file is too short"

    def sync(self) -> None:
        """Check that the complete file is equal, and sync it. Raises InvalidOutputError."""
        if not self._fault and self._file is not None and self._file.size() != self.size_bytes:
            self._fault_at = self.size_bytes
            self._fault = "the file is too long"
        if self._fault:
            raise InvalidOutputError(self.path, self._fault_at, self._fault)
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class ComparedOutputs:
    """Compares the cleaned files and groups of a job with the claims; an OutputFiles.

    `finish` ends it.
    """

    def __init__(
        self,
        env: Env,
        job: CleanJob,
        groups: Sequence[CleanedGroup],
        folders: Sequence[str],
        charge: Callable[[int], None],
    ) -> None:
        """The claim: `groups`, each with the folder of its files. Raises InvalidOutputError."""
        self._env = env
        self._directory = job.directory
        self._charge = charge
        self._claims = _in_order(job, groups, folders)
        self._folder_of = {group.source_base_offsets[0]: folder for group, folder in self._claims}
        self._confirmed = 0  # claims that the job has confirmed
        self._buffer: Bytes = np.empty(_BUFFER_BYTES, dtype=np.uint8)

    @property
    def compared(self) -> int:
        """Return the size of the files of the confirmed claims."""
        return sum(
            file.size_bytes
            for group, _ in self._claims[: self._confirmed]
            if group.output is not None
            for file in group.output.files
        )

    def open(
        self, path: str, *, create: bool = False, write: bool = False, truncate: bool = False
    ) -> ComparedFile:
        """Return the claimed file of that name. Raises OSError."""
        assert create
        assert write
        assert truncate
        claimed = self._claimed_path(path)
        if claimed is None:
            return ComparedFile(path, None, "", self._buffer, self._charge)
        try:
            file = self._env.open(claimed)
        except (FileNotFoundError, IsADirectoryError):
            fault = "the file is missing"
            return ComparedFile(claimed, None, fault, self._buffer, self._charge)
        return ComparedFile(claimed, file, "", self._buffer, self._charge)

    def set_mtime_ms(self, path: str, mtime_ms: int) -> None:
        """Set the time of the claimed file, if there is one. Raises OSError."""
        claimed = self._claimed_path(path)
        if claimed is not None and self._env.exists(claimed):
            self._env.set_mtime_ms(claimed, mtime_ms)

    def unlink(self, path: str) -> None:
        """Do nothing: the claimed file stays, and `take` reports it."""

    def sync_dir(self, path: str) -> None:
        """Do nothing: `finish` syncs all folders."""

    def take(self, group: CleanedGroup) -> None:
        """Compare a group of the job with the next claim. Raises InvalidOutputError.

        Its files have been compared already.
        """
        if self._confirmed == len(self._claims):
            raise self._wrong(f"the group of {_describe_segments(group)} is missing")
        claim, folder = self._claims[self._confirmed]
        if claim.source_base_offsets != group.source_base_offsets:
            raise self._wrong(
                f"the next group is that of {_describe_segments(claim)}, "
                f"the job's is that of {_describe_segments(group)}"
            )
        for name in ("output", "bytes_before", "bytes_after", "records_before", "records_after"):
            reported, result = getattr(claim, name), getattr(group, name)
            if reported != result:
                path = f"{folder}/{_file_name(group)}"
                raise InvalidOutputError(path, -1, f"{name} is {reported}, and {result} by the job")
        self._confirmed += 1

    def finish(self) -> None:
        """Check that no claim is left, and sync the folders. Raises InvalidOutputError, OSError."""
        if self._confirmed < len(self._claims):
            claim, _ = self._claims[self._confirmed]
            raise self._wrong(f"the job makes no group of {_describe_segments(claim)}")
        for folder in sorted({folder for group, folder in self._claims if group.output}):
            self._env.sync_dir(folder)

    def _claimed_path(self, path: str) -> str | None:
        name = posixpath.basename(path)
        parsed = filenames.parse_file_name(name)
        assert parsed is not None
        folder = self._folder_of.get(parsed.base_offset)
        return None if folder is None else f"{folder}/{name}"

    def _wrong(self, reason: str) -> InvalidOutputError:
        return InvalidOutputError(self._directory, -1, reason)


def _in_order(
    job: CleanJob, groups: Sequence[CleanedGroup], folders: Sequence[str]
) -> list[tuple[CleanedGroup, str]]:
    """Return the groups with their folders. Raises InvalidOutputError unless they are in order."""
    if len(groups) != len(folders):
        reason = f"{len(groups)} groups in {len(folders)} folders"
        raise InvalidOutputError(job.directory, -1, reason)
    before = -1
    for group in groups:
        if not group.source_base_offsets:
            raise InvalidOutputError(job.directory, -1, "a group has no sources")
        for base in group.source_base_offsets:
            if base <= before:
                reason = f"segment {base} comes after segment {before}"
                raise InvalidOutputError(job.directory, -1, reason)
            before = base
    return list(zip(groups, folders, strict=True))


def _describe_segments(group: CleanedGroup) -> str:
    first, last = group.source_base_offsets[0], group.source_base_offsets[-1]
    return f"segment {first}" if first == last else f"segments {first} to {last}"


def _file_name(group: CleanedGroup) -> str:
    return filenames.file_name(group.source_base_offsets[0], filenames.LOG)
