"""Keys recorded while a segment is appended: the same index as from reading the segment."""

import random
from dataclasses import replace
from string import printable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.selective import appended_keys, index_size
from cleaner.engine.selective.appended_keys import AppendedKeys, list_keys
from cleaner.engine.selective.index_size import INDEXED_BYTES
from cleaner.engine.selective.key_index import (
    IndexRows,
    KeyIndex,
    read_blocks,
    read_index,
    write_appended_index,
    write_index,
)
from cleaner.engine.selective.packed_rows import pack_rows, unpack_rows
from cleaner.job import CleanJob
from cleaner.key_memory import KeyMemory
from storage.format.batch import Record, build_batch, read_header, unpack_records
from storage.format.compression import GZIP, LZ4, SNAPPY, ZSTD
from tests.support.cleaner.cleaning import HASH_KEY, Recorder
from tests.support.cleaner.compacted_log import CompactedLog, Producer
from tests.support.draws import cases
from tests.support.storage.logs import FOLDER

BATCH_BYTES_MAX = 1 << 20


class RecordedLog(CompactedLog):
    """A log whose appends are recorded as the broker does it."""

    def __init__(self, memory: KeyMemory | None = None) -> None:
        super().__init__()
        self.memory = memory or KeyMemory()
        self.hash_key = HASH_KEY
        self.keys = AppendedKeys(self.hash_key, 0, self.memory)

    def append(self, batch: bytearray, *, in_transaction: bool = False) -> int:
        header = read_header(batch)
        keys = None
        if header.codec:
            unpacked = unpack_records(batch, header, 0, BATCH_BYTES_MAX)
            keys = list_keys(batch, unpacked, self.hash_key)
        offset = super().append(batch, in_transaction=in_transaction)
        self.keys.add(batch, header, offset, keys)
        return offset


def job_of(log: CompactedLog) -> CleanJob:
    return replace(log.job(singly=True), slack=0.0, spill_bytes_max=1 << 30)


def rows_of(log: CompactedLog, job: CleanJob, index: KeyIndex) -> list[tuple[int, ...]]:
    rows = IndexRows(log.env, job, Recorder(), index, shards=1)
    words = np.concatenate([words[: count * SLOT_WORDS].copy() for words, count in rows.of(0)])
    return sorted(tuple(int(word) for word in row) for row in words.reshape(-1, SLOT_WORDS))


@settings(max_examples=cases(few=20, many=40), deadline=None)
@given(seed=st.integers(0, 1 << 32), pending=st.sampled_from([1, 300, 1 << 14]))
def test_the_index_of_recorded_appends_is_that_of_the_bytes(seed: int, pending: int) -> None:
    rng = random.Random(seed)
    log = RecordedLog()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(appended_keys, "PENDING_BYTES_MIN", pending)
        for _ in range(rng.randint(1, 30)):
            pairs = [
                (rng.choice("abcdefgh") * rng.randint(0, 20), rng.choice([None, "v" * 40]))
                for _ in range(rng.randint(1, 6))
            ]
            log.put(*pairs, codec=rng.choice([0, 0, GZIP, SNAPPY, LZ4, ZSTD]))
        log.roll()
        recorded = log.keys.finish()
    assert recorded is not None
    job, source = job_of(log), log.sources()[0]
    assert (log.keys.next_offset, log.keys.listed_bytes) == (
        source.next_base_offset,
        source.size_bytes,
    )
    write_appended_index(log.env, job, Recorder(), recorded, source)
    appended = read_index(log.env, job, Recorder(), source)
    appended_rows = rows_of(log, job, appended)
    appended_blocks = read_blocks(log.env, job, Recorder(), source)
    log.env.unlink(f"{FOLDER}/{source.base_offset:020d}.keys")
    context = CleanContext(log.env, replace(job, first_dirty_offset=job.end_offset), Recorder())
    anew = write_index(context, source)
    assert appended_rows == rows_of(log, job, anew)
    assert appended.records == anew.records
    assert appended.has_tombstones == anew.has_tombstones
    blocks = read_blocks(log.env, job, Recorder(), source)
    assert np.array_equal(appended_blocks, blocks)


def test_an_append_that_was_not_recorded_makes_the_record_useless() -> None:
    log = RecordedLog()
    log.put(("a", "1"))
    CompactedLog.append(log, build_batch([Record(0, 0, b"b", b"2")]))
    log.put(("c", "3"))
    assert log.keys.finish() is None
    assert log.memory.used_bytes == 0


def test_a_transaction_makes_the_record_useless() -> None:
    log = RecordedLog()
    log.write("a", by=Producer(9))
    assert log.keys.finish() is None


def test_the_segment_that_exceeds_the_memory_is_not_recorded() -> None:
    log = RecordedLog(KeyMemory(bytes_max=4_000))
    other = AppendedKeys(log.hash_key, 0, log.memory)
    batch = build_batch([Record(0, 0, b"k", b"v")])
    other.add(batch, read_header(batch), 0, None)
    before = log.memory.used_bytes
    for _ in range(200):
        log.put(("a", "1"))
    assert not log.keys.is_usable
    assert other.is_usable
    assert log.memory.used_bytes == before


def test_a_client_with_many_segments_leaves_memory_for_another() -> None:
    memory = KeyMemory(bytes_max=8_000)
    batch = build_batch([Record(0, 0, b"k", b"v")])

    def fill(client: str | None) -> AppendedKeys:
        keys = AppendedKeys(HASH_KEY, 0, memory, client=client)
        for offset in range(10):
            keys.add(batch, read_header(batch), offset, None)
        return keys

    of_eve = [fill("eve") for _ in range(50)]
    assert not of_eve[-1].is_usable
    assert memory.used_bytes <= memory.bytes_max // 2
    assert fill("ann").is_usable
    for keys in of_eve:
        keys.discard()
    assert fill("eve").is_usable
    assert [fill(None).is_usable for _ in range(50)].count(True) > 2, "without a share"


@pytest.mark.parametrize("codec", [0, LZ4])
@pytest.mark.parametrize(("value_bytes", "is_recorded"), [(280, False), (360, True)])
def test_a_segment_of_small_records_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, value_bytes: int, is_recorded: bool, codec: int
) -> None:
    monkeypatch.setattr(index_size, "INDEXED_BYTES", INDEXED_BYTES)
    rng, log = random.Random(5), RecordedLog()
    for _ in range(40):
        values = ("".join(rng.choices(printable, k=value_bytes)) for _ in range(8))
        log.put(*(("k", value) for value in values), codec=codec)
    assert log.keys.is_usable == is_recorded
    assert (log.memory.used_bytes > 0) == is_recorded
    assert (log.keys.finish() is not None) == is_recorded


def test_a_short_segment_of_small_records_gets_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_size, "INDEXED_BYTES", INDEXED_BYTES)
    log = RecordedLog()
    log.put(("a", "1"))
    assert log.keys.is_usable  # the next batch may have large records
    assert log.keys.finish() is None


def test_an_index_that_a_worker_wrote_meanwhile_stays() -> None:
    log = RecordedLog()
    log.put(("a", "1"), ("b", "2"))
    log.roll()
    job, source = job_of(log), log.sources()[0]
    context = CleanContext(log.env, replace(job, first_dirty_offset=job.end_offset), Recorder())
    write_index(context, source)
    path = f"{FOLDER}/{source.base_offset:020d}.keys"
    written = log.env.read_file(path)
    recorded = log.keys.finish()
    assert recorded is not None
    write_appended_index(log.env, job, Recorder(), recorded, source)
    assert log.env.read_file(path) == written
    assert [name for name in log.env.listdir(FOLDER) if "cleaned" in name] == []


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 9))),
    st.integers(0, 1 << 50),
)
def test_packed_rows_keep_the_offset_and_96_bits_of_the_fingerprint(
    draws: list[tuple[int, int, int]], base: int
) -> None:
    words = [word for low, high, delta in draws for word in (low, high, base + delta + 1)]
    rows = np.array(words, dtype=np.uint64)
    unpacked = unpack_rows(pack_rows(rows, base), base)
    assert np.array_equal(unpacked[0::3], rows[0::3])
    assert np.array_equal(unpacked[2::3], rows[2::3])
    low_half = np.uint64((1 << 32) - 1)
    assert np.array_equal(unpacked[1::3] & low_half, rows[1::3] & low_half)
