"""Putting cleaned segments in the place of their sources, in one step that a crash cannot split.

Rules
- Before: the cleaned files are complete and synced under names of their own,
  `<base>.<kind>.<run>.cleaned`. Nobody reads them.
- The commit is one rename, of the journal. It names every rename and delete to come, with the size
  and checksum of what is renamed. Without a journal all is old; with one, all is new as soon as it
  has been carried out, which the next start does if we could not.
- Carrying out is idempotent: a step whose result is there is skipped.
- Between two steps whose order matters stands a sync of the folder, since of the changes not yet
  synced any may be lost and any later one survive. In order:
      sync cleaned names | journal in place | sync | rename all | sync | delete all | sync
      | delete journal | sync
- Nothing is deleted before everything that replaces it is in place and synced. So not even a
  journal that rotted on the disk costs a record.
- A folder holds at most one journal: one swap at a time per partition, the caller sees to that.
- Readers that have a source open go on reading it: deleting takes away a name, not a file.

What this does not know: what is in the files (apart from a Kafka `.swap` it must complete), who
reads them, and whether the swap is still wanted. That is asked before.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from storage import filenames
from storage.errors import StorageError

JOURNAL_PREFIX: Final = "varve-swap."
JOURNAL_SUFFIX: Final = ".journal"
JOURNAL_MAGIC: Final = "varve-swap"
JOURNAL_VERSION: Final = 1


class SwapRefusedError(StorageError):
    """A swap that cannot be done; nothing has been changed. The group is to be cleaned again."""

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(f"{directory}: {reason}")
        self.directory = directory
        self.reason = reason


class UnfinishedSwapError(StorageError):
    """A swap found half done that cannot be finished; everything was left as it was found."""

    def __init__(self, directory: str, file: str, reason: str) -> None:
        super().__init__(f"{directory}: {file}: {reason}")
        self.directory = directory
        self.file = file
        self.reason = reason


@dataclass(frozen=True, slots=True)
class CleanedFile:
    """One file of a cleaned segment, complete and synced; `crc` is CRC-32C of its content."""

    name: str  # "<base, 20 digits>.<kind>.<run id>.cleaned"
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class CleanedSegment:
    """A cleaned segment before its publication: the log and whichever indexes it has."""

    base_offset: int
    run_id: str
    files: tuple[CleanedFile, ...]


class SwapSource(Protocol):
    """A segment to be replaced: its base offset and the names of its files."""

    @property
    def base_offset(self) -> int:
        """Names the files."""

    @property
    def files(self) -> tuple[str, ...]:
        """File names inside the partition's folder."""


class Rename(NamedTuple):
    """A cleaned file, the name it gets, and by what it is recognised under either."""

    source: str
    target: str
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """Which files take the place of which. Names are relative to `directory`.

    `deletes` may name files that do not exist: indexes are optional.
    """

    directory: str
    run_id: str
    source_base_offsets: tuple[int, ...]
    outputs: tuple[CleanedSegment, ...]
    renames: tuple[Rename, ...]
    deletes: tuple[str, ...]


def plan_swap(
    directory: str, sources: Sequence[SwapSource], outputs: Sequence[CleanedSegment]
) -> SwapPlan:
    """Decide what a swap renames and deletes; pure.

    `sources` are neighbours in offset order; `outputs` may be none (no batch survived). A producer
    snapshot at a base that vanishes goes, one at a base that stays is kept, as Kafka does: it tells
    the state before that offset, which cleaning does not change.
    """
    bases = tuple(source.base_offset for source in sources)
    assert bases
    assert list(bases) == sorted(set(bases))
    output_bases = [output.base_offset for output in outputs]
    assert output_bases == sorted(set(output_bases))
    assert not output_bases or output_bases[0] >= bases[0]
    run_ids = {output.run_id for output in outputs}
    assert len(run_ids) <= 1
    renames = tuple(_rename(output, file) for output in outputs for file in output.files)
    targets = {rename.target for rename in renames}
    doomed = {name for source in sources for name in source.files}
    doomed |= {filenames.file_name(base, filenames.LOG) for base in bases}
    doomed |= {
        filenames.file_name(base, filenames.SNAPSHOT) for base in bases if base not in output_bases
    }
    assert all(os.path.basename(name) == name for name in doomed)
    kept = {filenames.file_name(base, filenames.SNAPSHOT) for base in output_bases}
    return SwapPlan(
        directory=directory,
        run_id=run_ids.pop() if run_ids else f"drop-{bases[0]}",
        source_base_offsets=bases,
        outputs=tuple(outputs),
        renames=renames,
        deletes=tuple(sorted(doomed - targets - kept)),
    )


def _rename(output: CleanedSegment, file: CleanedFile) -> Rename:
    parsed = filenames.parse_file_name(file.name)
    assert parsed is not None
    assert parsed.temporary == filenames.CLEANED
    assert (parsed.base_offset, parsed.run_id) == (output.base_offset, output.run_id)
    target = filenames.file_name(parsed.base_offset, parsed.kind)
    return Rename(file.name, target, file.size_bytes, file.crc)
