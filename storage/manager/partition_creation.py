"""Making the folders of new partitions, many at a time.

Rules
- Nothing is made over records, nor where something stands that is no folder of ours.
- The metadata names none of them yet, so they are made durable all together at the end: what a
  crash leaves half made, the next start removes. To sync each by itself, five times, took 1,000
  partitions on a slow disk eight seconds.
"""

from collections.abc import Callable, Sequence

from storage.directory.log_directory import LogDirectory
from storage.directory.partition_folders import has_records_in, topic_id_in
from storage.env import Env, write_file
from storage.errors import InconsistentDirectoryError, NoRoomError, is_folder_error, is_scarcity
from storage.format import filenames
from storage.format.checkpoints import encode_partition_metadata, encode_topic_id
from storage.log.log import Log
from storage.model import TopicPartition


def shares_of(
    partitions: Sequence[TopicPartition],
    directories: Sequence[LogDirectory],
    present: dict[str, int],
) -> list[tuple[LogDirectory, list[TopicPartition]]]:
    """Which directory each is to be in: the one with the fewest. `present`: path -> partitions."""
    counts = {home.path: present.get(home.path, 0) for home in directories}
    shares: dict[str, list[TopicPartition]] = {home.path: [] for home in directories}
    for partition in partitions:
        path = min(counts, key=counts.__getitem__)
        counts[path] += 1
        shares[path].append(partition)
    return [(home, shares[home.path]) for home in directories if shares[home.path]]


def make_partitions(
    env: Env,
    home: LogDirectory,
    partitions: Sequence[TopicPartition],
    topic_id: bytes,
    open_log: Callable[[TopicPartition, bool], Log],
) -> list[Log]:
    """Make folders in one directory and open their logs; durable when this returns.

    `open_log` is told whether the folder is new: one that a creation left behind is opened as any.
    OSError as it comes, LogDirectoryError, NoRoomError where some folders may have been made that
    nobody speaks of, and InconsistentDirectoryError where something is in the way.
    """
    paths = [home.file(filenames.partition_dir_name(partition)) for partition in partitions]
    are_new = [
        _is_free(env, home, path, partition, topic_id)
        for partition, path in zip(partitions, paths, strict=True)
    ]
    logs = []
    for partition, path, is_new in zip(partitions, paths, are_new, strict=True):
        try:
            env.mkdir(path)
        except FileExistsError as error:  # a name that leads nowhere
            raise _in_the_way(home, partition, error) from error
        except OSError as error:
            if is_scarcity(error):
                raise NoRoomError(error, path) from error
            raise
        metadata = f"{path}/{filenames.PARTITION_METADATA}"
        write_file(env, metadata, encode_partition_metadata(topic_id))
        log = open_log(partition, is_new)
        log.enter_epoch(write_file)
        logs.append(log)
    written = (filenames.PARTITION_METADATA, filenames.LEADER_EPOCH_CHECKPOINT)
    env.sync_all([f"{path}/{name}" for path in paths for name in written], [*paths, home.path])
    return logs


def _is_free(
    env: Env, home: LogDirectory, path: str, partition: TopicPartition, topic_id: bytes
) -> bool:
    """Whether there is nothing of that name. Raises InconsistentDirectoryError for what may not be
    made over.
    """
    try:
        if not env.exists(path):
            return True
        present = topic_id_in(env, path)
        in_the_way = present != topic_id and has_records_in(env, path)
    except OSError as error:
        if not is_folder_error(error):
            raise
        raise _in_the_way(home, partition, error) from error
    if in_the_way:
        result = "none" if present is None else encode_topic_id(present)
        raise InconsistentDirectoryError(
            home.path, f"topic id of {partition}", result, encode_topic_id(topic_id)
        )
    return False


def _in_the_way(
    home: LogDirectory, partition: TopicPartition, error: OSError
) -> InconsistentDirectoryError:
    return InconsistentDirectoryError(home.path, f"the folder of {partition}", str(error), "absent")
