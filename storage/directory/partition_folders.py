"""What partition folders a data directory holds, without opening their logs.

Rule: whatever is odd about one folder (a file that is a folder, no permission) is said of that
folder alone. It is there, so nothing may be begun anew in its place, and nothing about it is
believed. Any other error of the system is the directory's, and comes as OSError.
"""

from dataclasses import dataclass, field

from storage.directory.log_directory import LogDirectory
from storage.directory.partition_placement import FoundFolder
from storage.env import Env
from storage.errors import CorruptCheckpointError, is_folder_error
from storage.format import filenames
from storage.format.checkpoints import decode_partition_metadata
from storage.format.filenames import DirectoryKind


@dataclass(slots=True)
class FoundFolders:
    """What a look into a directory found."""

    partitions: list[FoundFolder] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)  # paths: they were on their way out


def scan_partition_folders(env: Env, directory: LogDirectory) -> FoundFolders:
    """Return the folders of a directory."""
    folders = FoundFolders()
    for name in env.listdir(directory.path):
        path = directory.file(name)
        kind = filenames.kind_of_dir(name)
        if kind not in (DirectoryKind.PARTITION, DirectoryKind.DELETED) or not env.is_dir(path):
            continue
        if kind is DirectoryKind.DELETED:
            folders.deleted.append(path)
            continue
        partition = filenames.parse_partition_dir(name)
        assert partition is not None
        where = directory.directory_id
        try:
            topic_id, has_records = topic_id_in(env, path), has_records_in(env, path)
        except OSError as error:
            if not is_folder_error(error):
                raise
            odd = FoundFolder(partition, where, None, has_records=True, problem=str(error))
            folders.partitions.append(odd)
        else:
            folders.partitions.append(FoundFolder(partition, where, topic_id, has_records))
    return folders


def topic_id_in(env: Env, folder: str) -> bytes | None:
    """Return the topic id that a folder bears. OSError as it comes."""
    path = f"{folder}/{filenames.PARTITION_METADATA}"
    try:
        return decode_partition_metadata(env.read_file(path), path)
    except (FileNotFoundError, CorruptCheckpointError):
        return None  # rebuildable: the metadata knows, or the folder is adopted


def has_records_in(env: Env, folder: str) -> bool:
    """Return whether any segment of a folder has bytes. OSError as it comes."""
    names = env.listdir(folder)
    return any(name.endswith(filenames.LOG) and env.size(f"{folder}/{name}") for name in names)
