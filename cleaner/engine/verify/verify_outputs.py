"""Files that an engine would write, held against files that are there already.

Rules
- What the engine writes is never written: it is compared with the claimed file of that name. Names
  are the engine's; none that somebody else chose is opened.
- A group is looked at as a whole: a difference is told when the engine has completed the file, not
  before. Until then the group may still turn out to be left as it is, and nothing was wrong.
- A file that nobody claimed is not looked for. That it should be there is told with its group.
- Whoever is complete and equal is synced, and gets the time the engine gives it.
- Memory: one buffer, whatever the files.
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

_BUFFER_BYTES: Final = 256 << 10  # stays in the second-level cache beside what it is compared with


class ComparedFile:
    """One file of an output, or what stands for one that nobody claimed or that is missing."""

    def __init__(
        self,
        path: str,
        file: File | None,
        fault: str,
        buffer: Bytes,
        charge: Callable[[int], None],
    ) -> None:
        """`file` None: nothing is compared; `fault` is then what is wrong with that, if anything.

        `charge` is told of bytes before they are read; it may wait, or raise.
        """
        self.path = path
        self.size_bytes = 0
        self._file = file
        self._buffer = buffer
        self._charge = charge
        self._fault_at = -1
        self._fault = fault

    def pwrite(self, data: ReadBuffer, position: int) -> None:
        """Compare `data` with what stands at `position`. Raises OSError."""
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
            self._fault = "the job leaves other bytes here"
        elif actual < len(requested):
            self._fault_at = position + actual
            self._fault = "the file ends here, and the job leaves more"

    def sync(self) -> None:
        """It is complete: all of it was equal and there is no more. Raises InvalidOutputError."""
        if not self._fault and self._file is not None and self._file.size() != self.size_bytes:
            self._fault_at = self.size_bytes
            self._fault = "the job leaves nothing behind this byte"
        if self._fault:
            raise InvalidOutputError(self.path, self._fault_at, self._fault)
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Give it back."""
        if self._file is not None:
            self._file.close()


class ComparedOutputs:
    """Takes the cleaned files of a job in the place of an Env, and its groups: see OutputFiles.

    Used up by `finish`.
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
        self._met = 0  # of the claims
        self._buffer: Bytes = np.empty(_BUFFER_BYTES, dtype=np.uint8)

    @property
    def compared(self) -> int:
        """Bytes of files of the claimed groups that the job has made so far."""
        return sum(
            file.size_bytes
            for group, _ in self._claims[: self._met]
            if group.output is not None
            for file in group.output.files
        )

    def open(
        self, path: str, *, create: bool = False, write: bool = False, truncate: bool = False
    ) -> ComparedFile:
        """The claimed file of that name. Raises OSError."""
        assert create
        assert write
        assert truncate
        claimed = self._claimed_path(path)
        if claimed is None:
            return ComparedFile(path, None, "", self._buffer, self._charge)
        try:
            file = self._env.open(claimed)
        except (FileNotFoundError, IsADirectoryError):
            fault = "there is no such file, and the job leaves one"
            return ComparedFile(claimed, None, fault, self._buffer, self._charge)
        return ComparedFile(claimed, file, "", self._buffer, self._charge)

    def set_mtime_ms(self, path: str, mtime_ms: int) -> None:
        """Set it on the claimed file, if there is one. Raises OSError."""
        claimed = self._claimed_path(path)
        if claimed is not None and self._env.exists(claimed):
            self._env.set_mtime_ms(claimed, mtime_ms)

    def unlink(self, path: str) -> None:
        """The engine does not want it after all. What was claimed stays, for others to judge."""

    def sync_dir(self, path: str) -> None:
        """Done for all folders by `finish`."""

    def take(self, group: CleanedGroup) -> None:
        """Hold a group that the job makes against the next claimed one.

        Its files were compared and are equal as far as they are there. Raises InvalidOutputError.
        """
        if self._met == len(self._claims):
            raise self._wrong(f"the group of {_named(group)} is missing")
        claim, folder = self._claims[self._met]
        if claim.source_base_offsets != group.source_base_offsets:
            raise self._wrong(
                f"the next group is that of {_named(claim)}, the job's is that of {_named(group)}"
            )
        for name in ("output", "bytes_before", "bytes_after", "records_before", "records_after"):
            reported, result = getattr(claim, name), getattr(group, name)
            if reported != result:
                path = f"{folder}/{_file_name(group)}"
                raise InvalidOutputError(path, -1, f"{name} is {reported}, and {result} by the job")
        self._met += 1

    def finish(self) -> None:
        """The job is done: make the names durable. Raises InvalidOutputError, OSError."""
        if self._met < len(self._claims):
            claim, _ = self._claims[self._met]
            raise self._wrong(f"the job makes no group of {_named(claim)}")
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
    """The groups with their folders. Raises InvalidOutputError unless they are in order."""
    if len(groups) != len(folders):
        reason = f"{len(groups)} groups in {len(folders)} folders"
        raise InvalidOutputError(job.directory, -1, reason)
    before = -1
    for group in groups:
        if not group.source_base_offsets:
            raise InvalidOutputError(job.directory, -1, "a group of nothing")
        for base in group.source_base_offsets:
            if base <= before:
                reason = f"segment {base} comes behind segment {before}"
                raise InvalidOutputError(job.directory, -1, reason)
            before = base
    return list(zip(groups, folders, strict=True))


def _named(group: CleanedGroup) -> str:
    first, last = group.source_base_offsets[0], group.source_base_offsets[-1]
    return f"segment {first}" if first == last else f"segments {first} to {last}"


def _file_name(group: CleanedGroup) -> str:
    return filenames.file_name(group.source_base_offsets[0], filenames.LOG)
