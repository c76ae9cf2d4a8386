"""The ledger of a compacted view: open, stage, publish and remove it.

Rules
- Each view compaction has its own folder. Hard links (or copies) keep its sources there whatever
  retention does, outputs replace them, and at the end the folder has the new ledger only.
- The rename of the manifest publishes the ledger, after content and names are synced. Before it the
  old ledger is the view, after it the new one.
- The folder of a finished compaction has a copy of the manifest. If the manifest is missing, the
  only copy replaces it; with several, the view is invalid. So a copy goes before anything else of
  its folder, durably, and with the publication of the next version.
- The next start removes everything that the manifest does not name.
- An open ledger stays readable: its files are open, and its folder is removed after its last
  reader.

All functions may run in a thread; they do not use the log.
"""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from storage.env import Env, File, write_file_atomically
from storage.errors import CorruptCheckpointError, InvalidViewError, NewerFormatError
from storage.format import filenames
from storage.format.index import IndexLimits
from storage.model import SegmentFacts
from storage.segments.fetch_slice import NOTHING, FetchSlice, find_slice
from storage.segments.segment import Segment
from storage.segments.segment_list import SegmentList
from storage.swap.swap_journal import CleanedFile, CleanedSegment, crc_of_file
from storage.view.deleted_keys import DELETED_KEYS_NAME
from storage.view.manifest import (
    MANIFEST_NAME,
    VIEW_FOLDER,
    DeletedKeys,
    LedgerSegment,
    ViewManifest,
    decode_manifest,
    encode_manifest,
)

COPY_BYTES: Final = 1 << 20  # bytes copied at a time
# Errors of link(2): no links on this file system, across file systems, or too many.
NO_LINK: Final = frozenset(
    {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)


class Ledger:
    """One published version of a view, open for reading. Offsets are those of the log."""

    def __init__(
        self,
        manifest: ViewManifest,
        segments: Sequence[Segment],
        *,
        has_manifest: bool = True,
        has_copy: bool = True,
    ) -> None:
        self.manifest = manifest
        self.has_manifest, self.has_copy = has_manifest, has_copy  # on disk
        self.segments = SegmentList(segments) if segments else None
        self.first_offset = (
            self._first_offset()
        )  # the first offset that may have a record, else the horizon
        self.is_revoked = False  # its folder is gone: readers change to the current ledger

    @property
    def horizon(self) -> int:
        """Return the offset at which the ledger ends and the log continues."""
        return self.manifest.horizon

    def _first_offset(self) -> int:
        for segment in self.segments or ():
            for batch in segment.readable_batches(0):
                return batch.header.base_offset
        return self.horizon

    def read(
        self, offset: int, max_bytes: int, *, at_least_one: bool, in_place: bool = True
    ) -> FetchSlice:
        """Return the range of batches from `offset` on; see storage/segments/fetch_slice.py.

        Raises DamagedSegmentError, OSError.
        """
        if self.segments is None or offset >= self.horizon:
            return NOTHING
        return find_slice(
            self.segments,
            offset,
            max_bytes,
            self.horizon,
            self.horizon,
            at_least_one=at_least_one,
            in_place=in_place,
        )

    def drop_idle_indexes(self) -> None:
        """Drop indexes from memory that were not used since the last call."""
        for segment in self.segments or ():
            segment.drop_idle_indexes()

    def facts(self) -> tuple[SegmentFacts, ...]:
        """Return its segments as sources of the next compaction."""
        return () if self.segments is None else self.segments.facts(self.horizon)


def view_path(partition_directory: str) -> str:
    """Return the folder of the view of a partition."""
    return f"{partition_directory}/{VIEW_FOLDER}"


def has_view_folder(env: Env, partition_directory: str) -> bool:
    """Return whether a partition has a folder for a view. Raises OSError if unknown."""
    try:
        env.listdir(view_path(partition_directory))
    except FileNotFoundError:
        return False
    return True


def read_manifest(env: Env, partition_directory: str) -> ViewManifest | None:
    """Return the manifest on disk, or its only copy; None if no version is published.

    Raises InvalidViewError, OSError.
    """
    folder = view_path(partition_directory)
    path = f"{folder}/{MANIFEST_NAME}"
    try:
        return _decoded(env, path)
    except FileNotFoundError:
        copies = _copies(env, folder)
    if len(copies) > 1:
        raise InvalidViewError(path, f"it is missing, and {len(copies)} folders have a copy of one")
    for name, copy_path in copies.items():
        manifest = _decoded(env, copy_path)
        if manifest.compaction_id != name:
            raise InvalidViewError(copy_path, f"it names the folder {manifest.compaction_id}")
        return manifest
    return None


def _decoded(env: Env, path: str) -> ViewManifest:
    try:
        return decode_manifest(env.read_file(path), path)
    except (CorruptCheckpointError, NewerFormatError) as error:
        raise InvalidViewError(path, str(error)) from error


def _copies(env: Env, folder: str) -> dict[str, str]:
    """Return the paths of the copies of manifests, by the names of their folders."""
    names: Sequence[str] = ()
    with suppress(FileNotFoundError):
        names = env.listdir(folder)
    paths = {}
    for name in names:
        with suppress(FileNotFoundError, NotADirectoryError):
            if MANIFEST_NAME in env.listdir(f"{folder}/{name}"):
                paths[name] = f"{folder}/{name}/{MANIFEST_NAME}"
    return paths


def _remove_copy(env: Env, directory: str) -> None:
    """Remove the copy of the manifest from the folder of a compaction, durably."""
    with suppress(FileNotFoundError, IsADirectoryError):
        env.unlink(f"{directory}/{MANIFEST_NAME}")
    env.sync_dir(directory)  # a process may have been killed after the unlink


def open_ledger(
    env: Env, partition_directory: str, topic_id: bytes, limits: IndexLimits
) -> Ledger | None:
    """Return the published version of a view; None if no version is published.

    Sync the folder first, or all folders if only the copy of the manifest is there: a killed
    process may have renamed either without a sync, and the cleaner relies on the horizon.

    Raises InvalidViewError, OSError.
    """
    folder = view_path(partition_directory)
    path = f"{folder}/{MANIFEST_NAME}"
    if has_view_folder(env, partition_directory):
        env.sync_dir(folder)
    manifest = read_manifest(env, partition_directory)
    if manifest is None:
        return None
    if manifest.topic_id != topic_id:
        raise InvalidViewError(path, f"it is of another topic, {manifest.topic_id.hex()}")
    segments = []
    directory = f"{folder}/{manifest.compaction_id}"
    has_manifest = env.exists(path)
    if not has_manifest:
        for each in (directory, folder, partition_directory):
            env.sync_dir(each)
    for named in manifest.segments:
        try:
            segment = Segment(env, directory, named.base_offset, limits, create=False)
        except FileNotFoundError as error:
            raise InvalidViewError(path, f"segment {named.base_offset} is missing") from error
        if segment.size_bytes != named.size_bytes:
            reason = f"segment {named.base_offset} has {segment.size_bytes} bytes"
            raise InvalidViewError(path, f"{reason} instead of {named.size_bytes}")
        segment.load_or_rebuild()
        segments.append(segment)
    has_copy = env.exists(f"{directory}/{MANIFEST_NAME}")
    return Ledger(manifest, segments, has_manifest=has_manifest, has_copy=has_copy)


# A run ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkedSource:
    """A source segment that is linked unchanged."""

    directory: str
    base_offset: int


@dataclass(frozen=True, slots=True)
class CopiedTail:
    """The tail of a source segment, `[position, end_position)` of an open file."""

    file: File
    position: int
    end_position: int
    base_offset: int


@dataclass(frozen=True, slots=True)
class LinkedKeys:
    """The deleted keys of the former version, linked unchanged."""

    directory: str
    deleted: DeletedKeys


@dataclass(slots=True)
class Staged:
    """The sources that were copied because they could not be linked."""

    copied_bytes: int = 0
    reason: str = ""


Source = LinkedSource | CopiedTail | LinkedKeys
Charge = Callable[[int], None]


def make_staging_folder(env: Env, partition_directory: str, compaction_id: str) -> str:
    """Create the folder of a compaction; return its path. Durable after `publish`. Raises OSError.

    The caller guarantees that the partition folder exists: it must not be recreated for a topic
    that was just deleted.
    """
    directory = f"{view_path(partition_directory)}/{compaction_id}"
    env.mkdir(directory)
    return directory


def stage(
    env: Env, directory: str, sources: Iterable[Source], charge: Charge = lambda count: None
) -> Staged:
    """Link or copy all sources into the folder of a compaction.

    `charge` gets the bytes before they are copied; it may wait or raise. Raises OSError,
    InvalidViewError if the deleted keys are damaged.
    """
    stager = _Stager(env, directory, charge)
    for source in sources:
        if isinstance(source, CopiedTail):
            name = filenames.file_name(source.base_offset, filenames.LOG)
            stager.copy(source.file, source.position, source.end_position, name)
        elif isinstance(source, LinkedKeys):
            check_deleted_keys(env, source.directory, source.deleted, charge)
            stager.link(source.directory, DELETED_KEYS_NAME)
        else:
            stager.link_segment(source)
    return stager.staged


class _Stager:
    """Fills the folder of a compaction with links, or with copies where links are impossible."""

    def __init__(self, env: Env, directory: str, charge: Charge) -> None:
        self._env = env
        self._directory = directory
        self._charge = charge
        self.staged = Staged()

    def link_segment(self, source: LinkedSource) -> None:
        for kind in (filenames.LOG, filenames.INDEX, filenames.TIME_INDEX):
            try:
                self.link(source.directory, filenames.file_name(source.base_offset, kind))
            except FileNotFoundError:
                if kind == filenames.LOG:
                    raise

    def link(self, folder: str, name: str) -> None:
        try:
            self._env.link(f"{folder}/{name}", f"{self._directory}/{name}")
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            self.staged.reason = str(error)
        else:
            return
        file = self._env.open(f"{folder}/{name}")
        try:
            size_bytes = file.size()
            self.copy(file, 0, size_bytes, name)
        finally:
            file.close()
        self.staged.copied_bytes += size_bytes

    def copy(self, source: File, begin: int, end: int, name: str) -> None:
        """Copy `[begin, end)` of a file in pieces, each charged first."""
        path = f"{self._directory}/{name}"
        file = self._env.open(path, create=True, write=True, truncate=True)
        try:
            for at in range(begin, end, COPY_BYTES):
                count = min(COPY_BYTES, end - at)
                self._charge(count)
                file.pwrite(source.pread(count, at), at - begin)
            file.sync()
        finally:
            file.close()


def check_deleted_keys(
    env: Env, directory: str, deleted: DeletedKeys, charge: Charge = lambda count: None
) -> None:
    """Check the file of deleted keys. Raises InvalidViewError, OSError."""
    path = f"{directory}/{DELETED_KEYS_NAME}"
    try:
        file = env.open(path)
    except FileNotFoundError as error:
        raise InvalidViewError(path, "the deleted keys that it remembers are missing") from error
    try:
        crc = 0
        for at in range(0, deleted.size_bytes, COPY_BYTES):
            count = min(COPY_BYTES, deleted.size_bytes - at)
            charge(count)
            crc = crc32c(file.pread(count, at), crc)
        if file.size() != deleted.size_bytes or crc != deleted.crc:
            raise InvalidViewError(path, "the deleted keys that it remembers are damaged")
    finally:
        file.close()


def settle_group(
    env: Env, directory: str, source_base_offsets: Sequence[int], output: CleanedSegment | None
) -> None:
    """Replace sources with their output in the folder of a compaction. Raises OSError."""
    for base_offset in source_base_offsets:
        for kind in (filenames.LOG, filenames.INDEX, filenames.TIME_INDEX):
            path = f"{directory}/{filenames.file_name(base_offset, kind)}"
            if env.exists(path):
                env.unlink(path)
    for file in output.files if output is not None else ():
        parsed = filenames.parse_file_name(file.name)
        assert parsed is not None
        target = filenames.file_name(parsed.base_offset, parsed.kind)
        env.rename(f"{directory}/{file.name}", f"{directory}/{target}")


def settle_deleted_keys(env: Env, directory: str, file: CleanedFile | None) -> DeletedKeys | None:
    """Replace the deleted keys in the folder of a compaction with those of a round."""
    path = f"{directory}/{DELETED_KEYS_NAME}"
    if file is not None:
        env.rename(f"{directory}/{file.name}", path)
        return DeletedKeys(file.size_bytes, file.crc)
    if env.exists(path):
        env.unlink(path)
    return None


def describe_segment(
    env: Env, directory: str, base_offset: int, next_base_offset: int, known_crc: int | None
) -> LedgerSegment:
    """Return a segment of the new ledger for the manifest; read it if its CRC is unknown."""
    path = f"{directory}/{filenames.file_name(base_offset, filenames.LOG)}"
    crc = crc_of_file(env, path) if known_crc is None else known_crc
    return LedgerSegment(base_offset, next_base_offset, env.size(path), crc)


def publish(env: Env, partition_directory: str, manifest: ViewManifest) -> None:
    """Publish a finished compaction: sync everything, then rename the manifest.

    Raises OSError. The old version then remains the view, or either of them if the last sync of
    the folder failed.
    """
    folder, data = view_path(partition_directory), encode_manifest(manifest)
    directory = f"{folder}/{manifest.compaction_id}"
    env.sync_dir(directory)
    write_file_atomically(env, f"{directory}/{MANIFEST_NAME}", data)
    env.sync_dir(folder)
    env.sync_dir(partition_directory)
    write_file_atomically(env, f"{folder}/{MANIFEST_NAME}", data)
    for name in _copies(env, folder):
        if name != manifest.compaction_id:
            _remove_copy(env, f"{folder}/{name}")


def remove_run(env: Env, directory: str) -> None:
    """Remove the folder of a compaction that is not the view. Raises OSError."""
    if env.is_dir(directory):
        _remove_copy(env, directory)
        env.remove_tree(directory)


def sweep(env: Env, partition_directory: str, keep: Iterable[str]) -> tuple[str, ...]:
    """Remove all folders except the named ones, and leftovers of a crash; return their names.

    The manifest and the folder that it names stay. Raises InvalidViewError, OSError.
    """
    folder = view_path(partition_directory)
    retained = {MANIFEST_NAME, *keep}
    manifest = read_manifest(env, partition_directory)
    if manifest is not None:
        retained.add(manifest.compaction_id)
    gone = []
    for name in env.listdir(folder) if env.is_dir(folder) else ():
        if name in retained:
            continue
        path = os.path.join(folder, name)
        if env.is_dir(path):
            remove_run(env, path)
        else:
            env.unlink(path)
        gone.append(name)
    return tuple(gone)


def remove_view(env: Env, partition_directory: str) -> bool:
    """Remove a view with all versions; return whether there was one. Raises OSError.

    The copies of the manifest are removed first and then the manifest, durably, so that a partial
    view is never served.
    """
    folder = view_path(partition_directory)
    if not has_view_folder(env, partition_directory):
        return False
    for name in env.listdir(folder):
        if env.is_dir(f"{folder}/{name}"):
            _remove_copy(env, f"{folder}/{name}")
    with suppress(FileNotFoundError):
        env.unlink(f"{folder}/{MANIFEST_NAME}")
    env.sync_dir(folder)  # a process may have been killed after the unlink
    env.remove_tree(folder)
    return True
