"""Create the folders of new partitions, many at a time.

Rules
- Records and folders of others are never overwritten.
- The metadata does not name the partitions yet, so all folders are synced together at the end; the
  next start removes folders that a crash left incomplete. Syncing each folder separately took eight
  seconds for 1,000 partitions on a slow disk.
- If one folder cannot be created, the others are removed: the next start would take them over.
"""

from collections.abc import Iterable, Sequence

from config.topics.keys import TopicConfig
from storage.directory.log_directory import LogDirectory
from storage.directory.partition_folders import has_records_in, topic_id_in
from storage.env import Env, write_file
from storage.errors import (
    InconsistentDirectoryError,
    NoRoomError,
    StorageError,
    is_folder_error,
    is_scarcity,
)
from storage.format import filenames
from storage.format.checkpoints import encode_partition_metadata, encode_topic_id
from storage.log.log import Log
from storage.log.log_state import LogContext, index_limits
from storage.model import TopicPartition
from storage.recovery.load_log import begin_log, load_log


def choose_directories(
    partitions: Sequence[TopicPartition],
    directories: Sequence[LogDirectory],
    present: dict[str, int],
) -> list[tuple[LogDirectory, list[TopicPartition]]]:
    """Return a directory for each partition: always the one with the fewest.

    `present`: path -> number of partitions.
    """
    counts = {
        log_directory.path: present.get(log_directory.path, 0) for log_directory in directories
    }
    shares: dict[str, list[TopicPartition]] = {
        log_directory.path: [] for log_directory in directories
    }
    for partition in partitions:
        path = min(counts, key=counts.__getitem__)
        counts[path] += 1
        shares[path].append(partition)
    return [
        (log_directory, shares[log_directory.path])
        for log_directory in directories
        if shares[log_directory.path]
    ]


def make_partitions(
    context: LogContext,
    partitions: Sequence[TopicPartition],
    topic_id: bytes,
    config: TopicConfig,
) -> list[Log]:
    """Create folders in one directory and open their logs; durable on return.

    Raises OSError, LogDirectoryError (new folders may then exist), NoRoomError, and
    InconsistentDirectoryError if a name is in use.
    """
    env, log_directory = context.env, context.log_directory
    paths = [
        log_directory.file(filenames.partition_dir_name(partition)) for partition in partitions
    ]
    are_new = [
        _is_free(env, log_directory, path, partition, topic_id)
        for partition, path in zip(partitions, paths, strict=True)
    ]
    logs, new_paths = [], []
    try:
        for partition, path, is_new in zip(partitions, paths, are_new, strict=True):
            _make_folder(env, log_directory, partition, path)
            if is_new:
                new_paths.append(path)
            metadata = f"{path}/{filenames.PARTITION_METADATA}"
            write_file(env, metadata, encode_partition_metadata(topic_id))
            log = _open_log(context, partition, topic_id, path, config, is_new=is_new)
            log.epochs.enter(write_file)
            logs.append(log)
        written = (filenames.PARTITION_METADATA, filenames.LEADER_EPOCH_CHECKPOINT)
        env.sync_all(
            [f"{path}/{name}" for path in paths for name in written], [*paths, log_directory.path]
        )
        for log, is_new in zip(logs, are_new, strict=True):
            if is_new:  # its other files are empty
                log.note_durable()
    except (OSError, StorageError):
        remove_partitions(env, log_directory.path, new_paths)
        raise
    return logs


def remove_partitions(env: Env, directory: str, paths: Iterable[str]) -> None:
    """Remove folders that were made in a log directory, durably. Raises OSError."""
    for path in paths:
        env.remove_tree(path)
    env.sync_dir(directory)


def _open_log(
    context: LogContext,
    partition: TopicPartition,
    topic_id: bytes,
    path: str,
    config: TopicConfig,
    *,
    is_new: bool,
) -> Log:
    """Open a log; the folder of an interrupted creation is not new, and may have one."""
    limits = index_limits(config)
    if is_new:
        loaded = begin_log(context.env, path, limits)
    else:
        loaded = load_log(
            context.env, path, limits, was_clean=True, recovery_point=0, log_start_offset=None
        )
    return Log(context, partition, topic_id, path, config, loaded=loaded)


def _make_folder(
    env: Env, log_directory: LogDirectory, partition: TopicPartition, path: str
) -> None:
    try:
        env.mkdir(path)
    except FileExistsError as error:  # a broken link
        raise _in_the_way(log_directory, partition, error) from error
    except OSError as error:
        if is_scarcity(error):
            raise NoRoomError(error, path) from error
        raise


def _is_free(
    env: Env, log_directory: LogDirectory, path: str, partition: TopicPartition, topic_id: bytes
) -> bool:
    """Return whether the name is free. Raises InconsistentDirectoryError for a used name."""
    try:
        if not env.exists(path):
            return True
        present = topic_id_in(env, path)
        in_the_way = present != topic_id and has_records_in(env, path)
    except OSError as error:
        if not is_folder_error(error):
            raise
        raise _in_the_way(log_directory, partition, error) from error
    if in_the_way:
        result = "none" if present is None else encode_topic_id(present)
        raise InconsistentDirectoryError(
            log_directory.path, f"topic id of {partition}", result, encode_topic_id(topic_id)
        )
    return False


def _in_the_way(
    log_directory: LogDirectory, partition: TopicPartition, error: OSError
) -> InconsistentDirectoryError:
    return InconsistentDirectoryError(
        log_directory.path, f"the folder of {partition}", str(error), "absent"
    )
