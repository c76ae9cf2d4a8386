"""Scan the partition folders of a log directory, without opening their logs.

A fault of one folder (a file that is a folder, no permission) concerns that folder only: it exists,
so nothing may be created in its place, and its content is not used. Any other error of the system
concerns the directory and is raised as OSError.
"""

from dataclasses import dataclass, field
from typing import Final

from storage.directory.log_directory import LogDirectory
from storage.directory.partition_placement import FoundFolder
from storage.env import Env
from storage.errors import CorruptCheckpointError, is_folder_error
from storage.format import filenames
from storage.format.checkpoints import decode_partition_metadata
from storage.format.filenames import DirectoryKind

_SCANNED: Final = (DirectoryKind.PARTITION, DirectoryKind.DELETED, DirectoryKind.FUTURE)


@dataclass(slots=True)
class FoundFolders:
    """The result of a scan."""

    partitions: list[FoundFolder] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)  # paths of folders in deletion
    copies: list[str] = field(default_factory=list)  # paths of incomplete copies of replicas


def scan_partition_folders(env: Env, directory: LogDirectory) -> FoundFolders:
    """Return the folders of a directory."""
    folders = FoundFolders()
    for name in env.listdir(directory.path):
        path = directory.file(name)
        kind = filenames.kind_of_dir(name)
        if kind not in _SCANNED:
            continue
        if kind is not DirectoryKind.PARTITION:
            if env.is_dir(path):
                kept = folders.deleted if kind is DirectoryKind.DELETED else folders.copies
                kept.append(path)
            continue
        partition = filenames.parse_partition_dir(name)
        assert partition is not None
        where = directory.directory_id
        try:
            if env.is_dir(path):
                topic_id, has_records = topic_id_in(env, path), has_records_in(env, path)
                folders.partitions.append(FoundFolder(partition, where, topic_id, has_records))
        except OSError as error:
            if not is_folder_error(error):
                raise
            odd = FoundFolder(partition, where, None, has_records=True, problem=str(error))
            folders.partitions.append(odd)
    return folders


def topic_id_in(env: Env, folder: str) -> bytes | None:
    """Return the topic id in a partition folder. Raises OSError."""
    path = f"{folder}/{filenames.PARTITION_METADATA}"
    try:
        return decode_partition_metadata(env.read_file(path), path)
    except (FileNotFoundError, CorruptCheckpointError):
        return None  # rebuildable: the metadata knows, or the folder is taken over


def has_records_in(env: Env, folder: str) -> bool:
    """Return whether any segment of a folder has bytes, or records before it expired.

    Raises OSError.
    """
    segments = [name for name in env.listdir(folder) if name.endswith(filenames.LOG)]
    first = filenames.file_name(0, filenames.LOG)
    return any(name != first or env.size(f"{folder}/{name}") for name in segments)
