"""Data directories as a broker or Kafka left them, and the ways in which one file is damaged."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from crc32c import crc32c

from storage.directory.cluster_metadata import FILE_NAME, TopicEntry
from storage.directory.kafka_metadata import FOLDER as METADATA_FOLDER
from storage.errors import CorruptBatchError, DamagedSegmentError
from storage.format import filenames, sealed_json
from storage.format.batch import (
    ControlType,
    decode_records,
    verify_crc,
    walk_headers,
)
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.manager.open_report import OpenReport
from storage.model import TopicPartition
from storage.segments.content_ids import CONTENT_IDS_MAGIC, CONTENT_IDS_VERSION
from storage.swap.swap_journal import execute_swap
from storage.view.deleted_keys import DELETED_KEYS_MAGIC
from tests.support.storage.kafka_metadata_log import batches, config, frame, snapshot, topic
from tests.support.storage.logs import (
    FOLDER,
    HOME,
    PARTITION,
    SMALL,
    TOPIC_ID,
    cleaned,
    fill,
    value_at,
)
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import RUN, put
from tests.support.storage.transactions import end, write

Files = Mapping[str, bytes]  # path -> content; a folder in a file's place is FOLDER_HERE
FOLDER_HERE: Final = b"\0a folder"
ORDERLY, KILLED = "after an orderly stop", "after a kill"

# --- damages ------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    """One bit, in the middle."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def of_another_version(name: str, data: bytes) -> bytes | None:
    """The same content in a format of version 9; None for a format that has no version."""
    if re.search(r"\.(time)?index|\.keys", name):
        return None
    if filenames.LOG in name or name.endswith(".checkpoint"):
        return data[:16] + b"\x09" + data[17:]  # the magic byte of the first batch
    if name.endswith(filenames.TXN_INDEX):
        return b"\0\x09" + data[2:]
    if name.endswith(filenames.SNAPSHOT):
        body = data[6:]  # version int16, CRC-32C of what is after it
        return b"\0\x09" + crc32c(body).to_bytes(4, "big") + body
    if data.startswith(DELETED_KEYS_MAGIC):
        return data.replace(b" 1\n", b" 9\n", 1)
    if data.startswith(b"varve-"):
        magic, _, size, _ = data.partition(b"\n")[0].split(b" ")
        start = magic + b" 9 " + size + b" "
        body = data.partition(b"\n")[2]
        return start + f"{crc32c(body, crc32c(start)):08x}\n".encode() + body
    return re.sub(rb"(^|version[=:] ?|\"version\": )[01]", rb"\g<1>9", data, count=1)


DAMAGES: Final[dict[str, Callable[[str, bytes], bytes | None]]] = {
    "missing": lambda _, data: None,
    "empty": lambda _, data: b"",
    "cut in half": lambda _, data: data[: len(data) // 2],
    "zeroed": lambda _, data: bytes(len(data)),
    "one bit flipped": lambda _, data: flipped(data),
    "a directory": lambda _, data: FOLDER_HERE,
    "version 9": of_another_version,
}


def damaged(files: Files, path: str, how: str) -> Files | None:
    """The files with one of them damaged; None where there is nothing to be done."""
    content = DAMAGES[how](path, files[path])
    if content == files[path] or (content is None and how != "missing"):
        return None
    others = {name: data for name, data in files.items() if name != path}
    return others if content is None else {**others, path: content}


# --- a data directory ---------------------------------------------------------------------------


def files_of(env: MemoryEnv, folder: str = HOME) -> dict[str, bytes]:
    results: dict[str, bytes] = {}
    for name in env.listdir(folder):
        path = f"{folder}/{name}"
        if env.is_dir(path):
            results |= files_of(env, path)
        elif name != filenames.LOCK:
            results[path] = env.read_file(path)
    return results


def disk_of(files: Files) -> MemoryEnv:
    env = MemoryEnv(seed=5)
    for path, data in files.items():
        env.mkdir(path.rpartition("/")[0])
        if data == FOLDER_HERE:
            env.mkdir(f"{path}/something")
        else:
            put(env, path, data)
    env.settle()
    return env


@dataclass(frozen=True)
class World:
    """A data directory as it was left, and what a client could read in it."""

    files: Files
    records: Mapping[int, bytes]  # offset -> value of what a reader must get
    end_offset: int
    start_offset: int
    aborted: tuple[tuple[int, int], ...]  # (producer id, first offset): hidden from read_committed
    directories: tuple[str, ...] = (HOME,)
    configs: Mapping[str, str] = field(default_factory=dict)  # of the topic, if taken over


def aborted_in(log: Log) -> tuple[tuple[int, int], ...]:
    entries = log.reader.aborted_transactions(0, log.log_end_offset)
    return tuple((entry.producer_id, entry.first_offset) for entry in entries)


def transaction(log: Log, producer_id: int, kind: ControlType) -> None:
    write(log, producer_id)
    end(log, producer_id, kind)


def opened(env: MemoryEnv, directories: Sequence[str] = (HOME,)) -> tuple[LogManager, OpenReport]:
    manager = LogManager(env, list(directories))
    return manager, manager.open(lambda _: SMALL)


@cache
def world(how: str) -> World:
    """Ten segments of one partition; of the last ones the recovery point says nothing."""
    env = MemoryEnv(seed=5)
    manager, _ = opened(env)
    log = manager.create(PARTITION, TOPIC_ID, SMALL)
    entry = TopicEntry(TOPIC_ID, {0: manager.table.directory_id_of(PARTITION)})
    manager.save_metadata(manager.metadata.with_topic(PARTITION.topic, entry))
    fill(log, 12)
    transaction(log, 1, ControlType.COMMIT)
    transaction(log, 2, ControlType.ABORT)
    fill(log, 12)
    log.flush()
    log.delete_records(2)
    manager.table.cleaner_offsets[PARTITION] = 10
    manager.table.checkpoint()
    fill(log, 13)
    files = files_of(env)
    result = World(files, readable(log), log.log_end_offset, log.log_start_offset, aborted_in(log))
    if how == KILLED:
        return result
    manager.close()
    return replace(result, files=files_of(env))


@cache
def world_in_a_swap() -> World:
    """Killed while sources were deleted: the merged segment is in place of the first of them."""
    env = disk_of(world(ORDERLY).files)
    manager, _ = opened(env)
    log = manager.table.logs[PARTITION]
    sources = [facts.base_offset for facts in log.segment_facts()][4:7]
    records = readable(log)
    inside = [record for record in records if sources[0] <= record < sources[-1] + 5]
    plan = cleaned(env, log, sources, [item for item in inside if item % 2])
    log.swap.pin(sources)
    fault = env.fail_on(lambda operation, _: operation == "unlink", OSError(5, "killed"))
    try:
        execute_swap(env, plan)
    except OSError:
        fault.remove()
    files = files_of(env)
    in_first = range(sources[0], sources[1])
    records = {item: value for item, value in records.items() if item not in in_first or item % 2}
    return World(files, records, log.log_end_offset, log.log_start_offset, aborted_in(log))


def readable(log: Log) -> dict[int, bytes]:
    """Offset -> value of all data records that a client gets, which checks the CRC of a batch."""
    results: dict[int, bytes] = {}
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        try:
            data = log.reader.read(offset, 1, end_offset=log.high_watermark).read()
        except DamagedSegmentError:
            offset += 1
            continue
        if not data:
            break
        for position, header in walk_headers(data):
            offset = max(offset + 1, header.next_offset)
            if header.is_control or not verify_crc(data, position, header):
                continue
            try:
                records = decode_records(data, header, position)
            except CorruptBatchError:
                continue
            results |= {record.offset: record.value or b"" for record in records}
    return results


# --- what Kafka left, and two directories ---------------------------------------------------------

METADATA_LOG: Final = f"{HOME}/{METADATA_FOLDER}/{filenames.file_name(3, filenames.LOG)}"
METADATA_SNAPSHOT: Final = f"{HOME}/{METADATA_FOLDER}/{3:020}-{1:010}.checkpoint"
CONFIGS: Final = {"cleanup.policy": "compact", "delete.retention.ms": "60000"}
OTHER_HOME: Final = "/data2"
OTHER: Final = TopicPartition("others", 0)


def world_of_kafka(how: str) -> World:
    """The same log, as Kafka would leave it: its metadata log has the topic's configs."""
    before = world(how)
    own = (FILE_NAME, filenames.DAMAGE)
    files = {path: data for path, data in before.files.items() if not path.endswith(own)}
    name = PARTITION.topic
    policy = config(name, "cleanup.policy", CONFIGS["cleanup.policy"])
    files[METADATA_SNAPSHOT] = snapshot(topic(name, TOPIC_ID), policy, frame(99))
    late = config(name, "delete.retention.ms", CONFIGS["delete.retention.ms"])
    files[METADATA_LOG] = batches(3, late, frame(99), frame(99), frame(99), frame(99))
    return replace(before, files=files, configs=CONFIGS)


@cache
def world_in_kafkas_swap() -> World:
    """Kafka was killed when all new files of a clean had the suffix `.swap`."""
    env = disk_of(world(ORDERLY).files)
    manager, _ = opened(env)
    log = manager.table.logs[PARTITION]
    bases = [facts.base_offset for facts in log.segment_facts()]
    first, end = bases[0], bases[2]
    records = readable(log)
    kept = [item for item in records if first <= item < end and item % 2]
    cleaned(env, log, bases[:2], kept)  # under names of our own
    files = {
        path.replace(f".{RUN}{filenames.CLEANED}", filenames.SWAP): data
        for path, data in files_of(env).items()
    }
    records = {item: value for item, value in records.items() if not first <= item < end}
    records |= {item: value_at(item) for item in kept}
    return World(files, records, log.log_end_offset, log.log_start_offset, aborted_in(log))


def world_late_in_kafkas_swap() -> World:
    """As before, and the old segments have the suffix `.deleted`."""
    swap = world_in_kafkas_swap()
    bases = sorted(path for path in swap.files if path.endswith(filenames.LOG))[:2]
    files = {
        path + (filenames.DELETED if path in bases else ""): data
        for path, data in swap.files.items()
    }
    new = {item: value for item, value in swap.records.items() if item % 2 or item >= 10}
    return replace(swap, files=files, records=new)


def world_before_kafkas_swap() -> World:
    """Kafka was killed when the new files of a clean had the suffix `.cleaned`."""
    swap = world_in_kafkas_swap()
    files = {
        path.replace(filenames.SWAP, filenames.CLEANED): data for path, data in swap.files.items()
    }
    return replace(swap, files=files, records=world(ORDERLY).records)


def world_with_key_indexes(how: str) -> World:
    """The cleaner has left a key index beside a segment, and a stop the ids of contents."""
    before = world(how)
    log = next(path for path in sorted(before.files) if path.endswith(filenames.LOG))
    path = log.removesuffix(filenames.LOG) + filenames.KEYS
    ids = sealed_json.seal(CONTENT_IDS_MAGIC, CONTENT_IDS_VERSION, {"segments": ["00" * 40]})
    names = {path: bytes(range(256)) * 8, f"{FOLDER}/{filenames.CONTENT_IDS}": ids}
    return replace(before, files={**before.files, **names})


@cache
def world_of_two(how: str) -> World:
    """Two data directories with one partition each."""
    directories = (HOME, OTHER_HOME)
    env = MemoryEnv(seed=5)
    manager, _ = opened(env, directories)
    for partition, topic_id in ((PARTITION, TOPIC_ID), (OTHER, bytes(range(16, 32)))):
        log = manager.create(partition, topic_id, SMALL)
        entry = TopicEntry(topic_id, {0: manager.table.directory_id_of(partition)})
        manager.save_metadata(manager.metadata.with_topic(partition.topic, entry))
        fill(log, 12)
        log.flush()
        log.delete_records(2)
        manager.table.cleaner_offsets[partition] = 6
    manager.table.checkpoint()
    log = manager.table.logs[PARTITION]
    assert {item.directory.rpartition("/")[0] for item in manager.table.logs.values()} == {
        *directories
    }
    assert log.directory.startswith(f"{HOME}/")
    records = readable(log)
    if how == ORDERLY:
        manager.close()
    files = files_of(env) | files_of(env, OTHER_HOME)
    return World(files, records, log.log_end_offset, log.log_start_offset, (), directories)
