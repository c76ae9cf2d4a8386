"""Replace segments with cleaned segments atomically, with a journal.

Rules
- Before the swap, the cleaned files are complete and synced under their own names,
  `<base>.<kind>.<job id>.cleaned`. Nothing reads them.
- The rename of the journal commits the swap. The journal lists all renames and deletes, with the
  size and checksum of each renamed file. Without a journal all segments are old. With a journal all
  become new when it is executed, if necessary at the next start (`recover_swap`).
- Execution is idempotent: it skips steps that are already done.
- The folder is synced between steps whose order matters, because a crash may lose any unsynced
  change and keep a later one. The order is: sync cleaned names | journal in place | sync | rename
  all | sync | delete all | sync | delete journal | sync
- Nothing is deleted before its replacement is published and synced. Even a damaged or lost journal
  loses no record: recovery finds the overlapping segments and compares their records
  (storage/recovery/segment_overlap.py).
- A folder has at most one journal: the caller runs one swap at a time per partition.
- A reader that has a source open continues to read it: a delete removes a name, not an open file.

This module does not know the content of the files (except for a Kafka `.swap` that it completes),
their readers, or whether the swap is still valid. The caller checks that first.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

from crc32c import crc32c

from storage.env import Env, put_in_place, remove_temporary, rename_if_room, write_temporary
from storage.errors import (
    CorruptCheckpointError,
    NoRoomError,
    SwapInterruptedError,
    SwapRefusedError,
    UnfinishedSwapError,
    is_no_room,
    is_out_of_descriptors,
)
from storage.format import filenames, sealed_json
from storage.swap.unfinished_kafka_swap import finish_kafka_swap

JOURNAL_PREFIX: Final = "varve-swap."
JOURNAL_SUFFIX: Final = ".journal"
JOURNAL_MAGIC: Final = "varve-swap"
JOURNAL_VERSION: Final = 1

CRC_BLOCK_BYTES: Final = 1 << 20  # larger blocks were not faster from the page cache


@dataclass(frozen=True, slots=True)
class CleanedFile:
    """One file of a cleaned segment, complete and synced; `crc` is CRC-32C of its content."""

    name: str  # "<base, 20 digits>.<kind>.<job id>.cleaned"
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class CleanedSegment:
    """A cleaned segment before its publication: its log and its indexes."""

    base_offset: int
    job_id: str
    files: tuple[CleanedFile, ...]


def cleaned_content_id(job_id: str, base_offset: int) -> int:
    """Return the content id (SegmentFacts) of a segment that a job wrote.

    Its top bit is set, so it never equals an id that a process counts.
    """
    digest = blake2b(f"{job_id}/{base_offset}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") | 1 << 63


class SwapSource(Protocol):
    """A segment to be replaced: its base offset and the names of its files."""

    @property
    def base_offset(self) -> int:
        """Return the base offset in the file names."""

    @property
    def files(self) -> tuple[str, ...]:
        """Return the file names in the partition folder."""


class Rename(NamedTuple):
    """A cleaned file, its final name, and the size and checksum that identify it."""

    source: str
    target: str
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """The renames and deletes of a swap. Names are relative to `directory`.

    `deletes` may name files that do not exist: indexes are optional.
    """

    directory: str
    job_id: str
    source_base_offsets: tuple[int, ...]
    outputs: tuple[CleanedSegment, ...]
    renames: tuple[Rename, ...]
    deletes: tuple[str, ...]


def plan_swap(
    directory: str,
    sources: Sequence[SwapSource],
    outputs: Sequence[CleanedSegment],
    *,
    front_is_gone: bool = False,
) -> SwapPlan:
    """Decide what a swap renames and deletes; pure.

    `sources` are adjacent, in offset order; `outputs` is empty if no batch survived. A producer
    snapshot at a base offset that disappears is deleted, others stay, as in Kafka: they have the
    state before that offset, which cleaning does not change. `front_is_gone`: retention deleted
    segments in front of the sources from which the first output was made as well.
    """
    bases = tuple(source.base_offset for source in sources)
    assert bases
    assert list(bases) == sorted(set(bases))
    output_bases = [output.base_offset for output in outputs]
    assert output_bases == sorted(set(output_bases))
    assert not output_bases or front_is_gone or output_bases[0] >= bases[0]
    job_ids = {output.job_id for output in outputs}
    assert len(job_ids) <= 1
    renames = tuple(_rename(output, file) for output in outputs for file in output.files)
    targets = {rename.target for rename in renames}
    scheduled = {name for source in sources for name in source.files}
    scheduled |= {filenames.file_name(base, filenames.LOG) for base in bases}
    scheduled |= {
        filenames.file_name(base, filenames.SNAPSHOT) for base in bases if base not in output_bases
    }
    assert all(os.path.basename(name) == name for name in scheduled)
    retained = {filenames.file_name(base, filenames.SNAPSHOT) for base in output_bases}
    return SwapPlan(
        directory=directory,
        job_id=job_ids.pop() if job_ids else f"drop-{bases[0]}",
        source_base_offsets=bases,
        outputs=tuple(outputs),
        renames=renames,
        deletes=tuple(sorted(scheduled - targets - retained)),
    )


def _rename(output: CleanedSegment, file: CleanedFile) -> Rename:
    parsed = filenames.parse_file_name(file.name)
    assert parsed is not None
    assert parsed.temporary == filenames.CLEANED
    assert (parsed.base_offset, parsed.job_id) == (output.base_offset, output.job_id)
    target = filenames.file_name(parsed.base_offset, parsed.kind)
    return Rename(file.name, target, file.size_bytes, file.crc)


class Delete(NamedTuple):
    """A file to delete, with its size at planning time."""

    name: str
    size_bytes: int


class Journal(NamedTuple):
    """The content of the journal: all renames and deletes of the swap."""

    job_id: str
    renames: tuple[Rename, ...]
    deletes: tuple[Delete, ...]

    @property
    def file_name(self) -> str:
        """Return its name in the partition folder."""
        return f"{JOURNAL_PREFIX}{self.job_id}{JOURNAL_SUFFIX}"


def execute_swap(env: Env, plan: SwapPlan) -> None:
    """Execute a plan. This reads every output once; it may run in a thread.

    Raises SwapRefusedError before any change: a source is gone, an output is missing or differs
    from the plan, or there is no room for the journal. Raises SwapInterruptedError if
    `finish_swap` must complete the swap. Raises OSError; the caller then takes the directory
    offline, because only `recover_swap` finds out whether the swap was committed.
    """
    try:
        journal = _checked(env, plan)
        _prepare(env, plan.directory, journal)
    except OSError as error:
        if not is_no_room(error):
            raise  # after a failed sync nothing is certain
        raise SwapRefusedError(
            plan.directory, f"no room for its journal: {error}", lacks_room=True
        ) from error
    try:
        _commit(env, plan.directory, journal)
        _carry_out(env, plan.directory, journal)
    except OSError as error:
        if not is_no_room(error):
            raise
        raise SwapInterruptedError(plan.directory, error) from error


def finish_swap(env: Env, plan: SwapPlan) -> None:
    """Continue a swap that raised SwapInterruptedError; may run in a thread.

    Raises NoRoomError if there is still no room, and can then be called again. Raises OSError.
    """
    deletes = tuple(Delete(name, 0) for name in plan.deletes)
    try:
        env.sync_dir(plan.directory)  # the name of the journal
        _carry_out(env, plan.directory, Journal(plan.job_id, plan.renames, deletes))
    except OSError as error:
        if not is_no_room(error):
            raise
        raise NoRoomError(error, plan.directory) from error


def _checked(env: Env, plan: SwapPlan) -> Journal:
    """Check the folder before any change."""
    directory = plan.directory
    names = set(env.listdir(directory))
    for name in sorted(names):
        if name.startswith(JOURNAL_PREFIX) and name.endswith(JOURNAL_SUFFIX):
            raise SwapRefusedError(directory, f"{name} is unfinished")
    sources = {filenames.file_name(base, filenames.LOG) for base in plan.source_base_offsets}
    if not sources <= names:
        raise SwapRefusedError(directory, f"{min(sources - names)} is gone")
    for rename in plan.renames:
        parsed = filenames.parse_file_name(rename.target)
        assert parsed is not None
        if rename.target in names and parsed.base_offset not in plan.source_base_offsets:
            raise SwapRefusedError(directory, f"{rename.target} is not among the sources")
        if rename.source not in names:
            raise SwapRefusedError(directory, f"{rename.source} is missing")
        fault = _mismatch(env, os.path.join(directory, rename.source), rename)
        if fault:
            raise SwapRefusedError(directory, f"{rename.source} {fault}")
    deletes = tuple(
        Delete(name, env.size(os.path.join(directory, name)))
        for name in plan.deletes
        if name in names
    )
    return Journal(plan.job_id, plan.renames, deletes)


def _prepare(env: Env, directory: str, journal: Journal) -> None:
    """Write the journal under a temporary name, and sync the names of the cleaned files."""
    path = os.path.join(directory, journal.file_name)
    write_temporary(env, path, encode_journal(journal))
    try:
        env.sync_dir(directory)
    except OSError as error:
        if is_out_of_descriptors(error):
            remove_temporary(env, f"{path}.tmp")
        raise


def _commit(env: Env, directory: str, journal: Journal) -> None:
    """Rename the journal durably; this commits the swap. Raises SwapRefusedError, OSError."""
    try:
        put_in_place(env, os.path.join(directory, journal.file_name))
    except NoRoomError as error:  # it was not renamed
        raise SwapRefusedError(
            directory, f"no room for its journal: {error}", lacks_room=True
        ) from error


def _carry_out(env: Env, directory: str, journal: Journal) -> None:
    """Execute the remaining steps of the journal, then delete it."""
    names = set(env.listdir(directory))
    for rename in journal.renames:
        if rename.source in names:
            rename_if_room(
                env, os.path.join(directory, rename.source), os.path.join(directory, rename.target)
            )
    env.sync_dir(directory)
    for delete in journal.deletes:
        if delete.name in names:
            env.unlink(os.path.join(directory, delete.name))
    env.sync_dir(directory)
    if journal.file_name in names:
        env.unlink(os.path.join(directory, journal.file_name))
    _sync_removal(env, directory)


def _remove_journal(env: Env, directory: str, name: str) -> None:
    env.unlink(os.path.join(directory, name))
    _sync_removal(env, directory)


def _sync_removal(env: Env, directory: str) -> None:
    # Without this sync a crash could restore the journal. It would then be executed again, on a
    # log that has changed.
    env.sync_dir(directory)


def encode_journal(journal: Journal) -> bytes:
    """Return the bytes of a journal file."""
    return sealed_json.seal(
        JOURNAL_MAGIC,
        JOURNAL_VERSION,
        {"job_id": journal.job_id, "renames": journal.renames, "deletes": journal.deletes},
    )


def decode_journal(data: bytes, path: str) -> Journal:
    """Read a journal. Raises CorruptCheckpointError for a torn one, NewerFormatError."""
    payload = sealed_json.unseal(JOURNAL_MAGIC, JOURNAL_VERSION, data, path)
    try:
        journal = Journal(
            str(payload["job_id"]),
            tuple(Rename(str(s), str(t), int(n), int(c)) for s, t, n, c in payload["renames"]),
            tuple(Delete(str(name), int(size_bytes)) for name, size_bytes in payload["deletes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(path, f"its payload is malformed: {error!r}") from error
    names = [name for rename in journal.renames for name in (rename.source, rename.target)]
    names += [delete.name for delete in journal.deletes]
    for name in names:
        if filenames.parse_file_name(name) is None:
            raise CorruptCheckpointError(path, f"{name!r:.100} is no segment file")
    if journal.file_name != os.path.basename(path):
        raise CorruptCheckpointError(path, f"it belongs to {journal.file_name!r:.100}")
    return journal


def crc_of_file(env: Env, path: str) -> int:
    """Return the CRC-32C of a whole file, as in CleanedFile."""
    file = env.open(path)
    try:
        crc = 0
        position = 0
        while block := file.pread(CRC_BLOCK_BYTES, position):
            crc = crc32c(block, crc)
            position += len(block)
        return crc
    finally:
        file.close()


def _mismatch(env: Env, path: str, rename: Rename) -> str:
    """Return why the file at `path` is not the file to rename; empty if it is."""
    size_bytes = env.size(path)
    if size_bytes != rename.size_bytes:
        return f"has {size_bytes} bytes instead of {rename.size_bytes}"
    crc = crc_of_file(env, path)
    return "" if crc == rename.crc else f"has checksum {crc:08x} instead of {rename.crc:08x}"


# --- after a crash ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SwapRecovery:
    """The result of `recover_swap`. Names are relative to the folder."""

    redone: tuple[str, ...] = ()  # ids of jobs whose journal was executed
    rolled_back: tuple[tuple[str, str], ...] = ()  # (job id, why): undone before its first rename
    distrusted: tuple[tuple[str, str], ...] = ()  # (index, why): damaged or missing; not used
    refused: tuple[tuple[str, str], ...] = ()  # (journal, why): torn, treated as absent
    completed: tuple[str, ...] = ()  # Kafka's .swap files that were renamed
    removed: tuple[str, ...] = ()  # leftovers deleted
    deleted: tuple[str, ...] = ()  # files whose deletion was interrupted

    @property
    def changed(self) -> bool:
        """Return whether a swap was completed or undone. Files in deletion do not count."""
        return self != SwapRecovery(deleted=self.deleted)

    def __str__(self) -> str:
        """Return a text for the log line."""
        done = [f"swap of job {job_id} completed" for job_id in self.redone]
        done += [f"swap of job {job_id} undone, {why}" for job_id, why in self.rolled_back]
        done += [f"{name} {why}: it is rebuilt" for name, why in self.distrusted]
        done += [f"{journal} ignored, {why}" for journal, why in self.refused]
        done += [f"{name} renamed to its final name" for name in self.completed]
        if self.removed:
            done.append(f"{len(self.removed)} left-over files removed")
        return "; ".join(done) or "nothing"


def recover_swap(env: Env, directory: str, *, was_clean: bool = False) -> SwapRecovery:
    """Complete or undo an interrupted swap, before the files of the folder are opened.

    Idempotent and crash-safe. It handles our journal first, then our leftover files, then those of
    a killed Kafka by its rules, which consider only Kafka's `.cleaned` files
    (unfinished_kafka_swap.py). After a clean stop, a folder without any such file needs no sync.

    Raises UnfinishedSwapError if neither the old nor the new segments are complete (nothing was
    changed), NewerFormatError for a journal of a newer version, and OSError.
    """
    if was_clean and not any(map(_is_of_swap, env.listdir(directory))):
        return SwapRecovery()
    redone: list[str] = []
    rolled_back: list[tuple[str, str]] = []
    distrusted: list[tuple[str, str]] = []
    refused: list[tuple[str, str]] = []
    # A killed process leaves renames and deletes that are visible but not durable. A later power
    # failure must not undo what the steps below rely on.
    env.sync_dir(directory)
    for name in env.listdir(directory):
        if not name.startswith(JOURNAL_PREFIX) or not name.endswith(JOURNAL_SUFFIX):
            continue
        path = os.path.join(directory, name)
        try:
            journal = decode_journal(env.read_file(path), path)
        except CorruptCheckpointError as error:
            refused.append((name, error.reason))
            continue
        check = _check_redo(env, directory, journal)
        if check.rollback_reason:
            _remove_journal(env, directory, name)
            rolled_back.append((journal.job_id, check.rollback_reason))
        else:
            _remove_indexes(env, directory, [rename for rename, _ in check.damaged_indexes])
            _carry_out(env, directory, journal)
            redone.append(journal.job_id)
            distrusted += [(rename.target, fault) for rename, fault in check.damaged_indexes]
    removed = _remove_leftovers(env, directory, refused)
    kafka = finish_kafka_swap(env, directory)
    return SwapRecovery(
        redone=tuple(redone),
        rolled_back=tuple(rolled_back),
        distrusted=tuple(distrusted),
        refused=tuple(refused),
        completed=kafka.completed,
        removed=removed + kafka.removed,
        deleted=kafka.deleted,
    )


def _is_of_swap(name: str) -> bool:
    """Return whether an interrupted swap or deletion may have left this file."""
    parsed = filenames.parse_file_name(name)
    return name.startswith(JOURNAL_PREFIX) or (parsed is not None and bool(parsed.temporary))


class _RedoCheck(NamedTuple):
    """Whether a journal can be executed."""

    rollback_reason: str = ""  # not empty: no file was renamed yet, undo the swap
    damaged_indexes: tuple[tuple[Rename, str], ...] = ()  # with the reason; they are rebuilt


def _check_redo(env: Env, directory: str, journal: Journal) -> _RedoCheck:
    """Compare the files with the journal.

    A damaged cleaned file loses nothing while all of them have their cleaned names: no file was
    renamed or deleted yet, and all sources exist. Later, a damaged index loses nothing either: it
    is rebuilt from the log file. Raises UnfinishedSwapError for a damaged log file.
    """
    names = set(env.listdir(directory))
    begun_or_left = {rename.source for rename in journal.renames}
    begun_or_left |= {delete.name for delete in journal.deletes}
    if not begun_or_left & names:
        return _RedoCheck()  # only the journal is left; its targets may have been deleted since
    is_begun = any(rename.source not in names for rename in journal.renames)
    indexes: list[tuple[Rename, str]] = []
    for rename in journal.renames:
        result = rename.source if rename.source in names else rename.target
        if result in names:
            fault = _mismatch(env, os.path.join(directory, result), rename)
        else:
            fault = "is missing"
        if not fault:
            continue
        if not is_begun:
            return _RedoCheck(f"{result} {fault}")
        if rename.target.endswith(filenames.LOG):
            raise UnfinishedSwapError(directory, result, fault)
        indexes.append((rename, fault))
    for name, size_bytes in journal.deletes:
        if name in names and name.endswith(filenames.LOG):
            present_bytes = env.size(os.path.join(directory, name))
            if present_bytes != size_bytes:
                fault = f"has {present_bytes} bytes, {size_bytes} when it was to be deleted"
                raise UnfinishedSwapError(directory, name, fault)
    return _RedoCheck(damaged_indexes=tuple(indexes))


def _remove_indexes(env: Env, directory: str, renames: Sequence[Rename]) -> None:
    """Delete damaged indexes, and indexes of old segments with the same names."""
    names = set(env.listdir(directory)) if renames else set()
    scheduled = {name for rename in renames for name in (rename.source, rename.target)}
    _remove(env, directory, sorted(scheduled & names))


def _remove_leftovers(
    env: Env, directory: str, refused: Sequence[tuple[str, str]]
) -> tuple[str, ...]:
    """Delete cleaned files and journals that were never committed.

    A torn journal under its final name shows a faulty device. Its renames may be half done, so that
    an old index could be beside a new log: delete the indexes as well, recovery rebuilds them. No
    record is lost (see the rules above).
    """
    leftovers = []
    for name in env.listdir(directory):
        parsed = filenames.parse_file_name(name)
        if name.startswith(JOURNAL_PREFIX):
            leftovers.append(name)
        elif parsed is None:
            continue
        elif (parsed.temporary == filenames.CLEANED and parsed.job_id) or (
            refused
            and not parsed.temporary
            and parsed.kind in (filenames.INDEX, filenames.TIME_INDEX)
        ):
            leftovers.append(name)
    # Journals last: after a crash in between, recovery must find them and the indexes again.
    leftovers.sort(key=lambda name: name.startswith(JOURNAL_PREFIX))
    _remove(env, directory, [name for name in leftovers if not name.startswith(JOURNAL_PREFIX)])
    _remove(env, directory, [name for name in leftovers if name.startswith(JOURNAL_PREFIX)])
    return tuple(leftovers)


def _remove(env: Env, directory: str, names: Sequence[str]) -> None:
    for name in names:
        env.unlink(os.path.join(directory, name))
    if names:
        env.sync_dir(directory)


def discard_outputs(env: Env, directory: str, job_id: str) -> tuple[str, ...]:
    """Delete the cleaned files of a clean that will not be published; return their names.

    Without sync: if a crash restores them, the next start deletes them.
    """
    scheduled = []
    for name in env.listdir(directory):
        parsed = filenames.parse_file_name(name)
        if parsed is not None and parsed.temporary == filenames.CLEANED and parsed.job_id == job_id:
            scheduled.append(name)
            env.unlink(os.path.join(directory, name))
    return tuple(scheduled)
