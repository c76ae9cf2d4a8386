"""The transaction index of a segment: its file, failed writes, and what the log contradicts."""

import errno
from collections.abc import Sequence

import pytest

from storage.errors import DamagedSegmentError
from storage.format.batch import BatchHeader, Record, build_batch, read_header
from storage.format.index import CorruptIndexError
from storage.format.txn_index import TxnIndexEntry, encode_entries
from storage.segments import segment_txn_index
from storage.segments.batch_scan import ScannedBatch
from storage.segments.segment_txn_index import SegmentTxnIndex
from tests.support.storage.memory_env import MemoryEnv

PATH = "/d/00000000000000000010.txnindex"
ENTRIES = [TxnIndexEntry(1, 10, 19, 10), TxnIndexEntry(2, 12, 25, 20), TxnIndexEntry(1, 21, 29, 21)]
CONTROL = 0x20


@pytest.fixture
def env() -> MemoryEnv:
    env = MemoryEnv()
    env.mkdir("/d")
    return env


def begun(env: MemoryEnv, *entries: TxnIndexEntry) -> SegmentTxnIndex:
    index = SegmentTxnIndex(env, "/d", 10)
    for entry in entries:
        index.append(entry)
    return index


def test_without_entries_there_is_no_file(env: MemoryEnv) -> None:
    index = begun(env)
    index.write_missing()
    assert not index.exists
    assert index.open_file is None


def test_appended_entries_are_in_the_file_and_can_be_loaded(env: MemoryEnv) -> None:
    begun(env, *ENTRIES)
    assert env.read_file(PATH) == encode_entries(ENTRIES)
    index = begun(env)
    index.load()
    assert index.entries == ENTRIES


def test_an_empty_file_is_invalid(env: MemoryEnv) -> None:
    env.open(PATH, create=True)
    with pytest.raises(CorruptIndexError, match="empty"):
        begun(env).load()


def test_entries_that_could_not_be_written_are_written_with_the_next_one(env: MemoryEnv) -> None:
    index = begun(env, ENTRIES[0])
    fault = env.fail_on(lambda operation, _: operation == "pwrite", errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        index.append(ENTRIES[1])
    assert index.entries == ENTRIES[:2]
    fault.remove()
    index.append(ENTRIES[2])
    assert env.read_file(PATH) == encode_entries(ENTRIES)


def test_the_cost_of_an_entry_does_not_grow_with_the_index(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def count(entries: Sequence[TxnIndexEntry]) -> bytes:
        encoded.append(len(entries))
        return encode_entries(entries)

    monkeypatch.setattr(segment_txn_index, "encode_entries", count)
    entries = [TxnIndexEntry(1, offset, offset + 1, offset) for offset in range(10, 210, 2)]
    begun(env, *entries)
    assert encoded == [1] * len(entries)
    assert env.read_file(PATH) == encode_entries(entries)


def test_a_replaced_index_has_the_new_entries_only(env: MemoryEnv) -> None:
    index = begun(env, *ENTRIES)
    index.replace(ENTRIES[1:2])
    assert env.read_file(PATH) == encode_entries(ENTRIES[1:2])
    index.append(ENTRIES[2])
    assert env.read_file(PATH) == encode_entries(ENTRIES[1:])
    index.replace([])
    assert index.entries == []
    assert not index.exists


def test_the_file_follows_a_rename_of_the_folder(env: MemoryEnv) -> None:
    index = begun(env, ENTRIES[0])
    env.rename("/d", "/e")
    index.directory = "/e"
    index.append(ENTRIES[1])
    assert index.path.startswith("/e/")
    assert env.read_file(index.path) == encode_entries(ENTRIES[:2])


def marker(header: BatchHeader) -> ScannedBatch:
    return ScannedBatch(0, header, b"", 0)


MARKER = read_header(build_batch([Record(0, 1, b"", b"")], producer_id=1, attributes=CONTROL))


def test_an_entry_needs_the_marker_of_its_producer(env: MemoryEnv) -> None:
    index = begun(env, ENTRIES[0])
    index.check(lambda offset: marker(MARKER._replace(base_offset=offset)))
    for batch in (
        None,
        marker(MARKER._replace(base_offset=20)),  # the next batch
        marker(MARKER._replace(base_offset=19, producer_id=2)),
        marker(MARKER._replace(base_offset=19, attributes=0)),
    ):
        with pytest.raises(CorruptIndexError, match="no marker"):
            index.check(lambda _, batch=batch: batch)  # type: ignore[misc]


def test_an_entry_whose_marker_may_be_damaged_is_kept(env: MemoryEnv) -> None:
    def damaged(_: int) -> ScannedBatch | None:
        raise DamagedSegmentError("/d/10.log", 0, "bad CRC")

    begun(env, ENTRIES[0]).check(damaged)
