"""Partition folders with segments to be swapped, for tests of publication and recovery."""

from typing import NamedTuple

from crc32c import crc32c

from storage.env import Env
from storage.format.batch import Record, build_batch
from storage.format.filenames import (
    INDEX,
    LOG,
    SNAPSHOT,
    TIME_INDEX,
    TXN_INDEX,
    cleaned_name,
    file_name,
)
from storage.swap.swap_journal import CleanedFile, CleanedSegment

FOLDER = "/data/orders-0"
RUN = "r1"


class Source(NamedTuple):
    """A segment as plan_swap wants it."""

    base_offset: int
    files: tuple[str, ...]


def put(env: Env, path: str, data: bytes) -> None:
    file = env.open(path, create=True, write=True, truncate=True)
    file.pwrite(data, 0)
    file.sync()
    file.close()


def content(tag: str, base: int, kind: str) -> bytes:
    """Recognisable bytes, longer than a sector so that they can be torn."""
    return f"{tag} {base} {kind} ".encode() * 60


def write_source(env: Env, base: int, *, txn: bool = False, directory: str = FOLDER) -> Source:
    kinds = [LOG, INDEX, TIME_INDEX, *([TXN_INDEX] if txn else [])]
    for kind in [*kinds, SNAPSHOT]:
        put(env, f"{directory}/{file_name(base, kind)}", content("old", base, kind))
    return Source(base, tuple(file_name(base, kind) for kind in kinds))


def write_output(
    env: Env,
    base: int,
    *,
    txn: bool = False,
    run: str = RUN,
    sync_names: bool = True,
    directory: str = FOLDER,
) -> CleanedSegment:
    """What a cleaner's worker leaves: files under cleaned names, synced with their folder."""
    files = []
    for kind in [LOG, INDEX, TIME_INDEX, *([TXN_INDEX] if txn else [])]:
        name, data = cleaned_name(base, kind, run), content("new", base, kind)
        put(env, f"{directory}/{name}", data)
        files.append(CleanedFile(name, len(data), crc32c(data)))
    if sync_names:
        env.sync_dir(directory)
    return CleanedSegment(base, run, tuple(files))


def folder(env: Env, directory: str = FOLDER) -> dict[str, bytes]:
    return {name: env.read_file(f"{directory}/{name}") for name in env.listdir(directory)}


def log_of(first: int, end: int, tag: str) -> bytes:
    """Batches of ten records with the offsets [first, end)."""
    data = bytearray()
    for base in range(first, end, 10):
        records = [
            Record(offset, 1_000, b"k%d" % offset, tag.encode(), ())
            for offset in range(base, min(base + 10, end))
        ]
        data += build_batch(records)
    return bytes(data)


# Four segments as Kafka might hold them, and what a clean of the first three leaves.
OLD_LOGS = {base: log_of(base, base + 100, "old") for base in (0, 100, 200, 300)}
NEW_LOG = log_of(0, 100, "new") + log_of(150, 290, "new")
