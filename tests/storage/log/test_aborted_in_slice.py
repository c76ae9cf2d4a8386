"""The aborted transactions that a read_committed reader of one slice of a log needs."""

import random
from dataclasses import replace

import pytest

from storage.format.batch import walk_headers
from storage.log.log import Log
from tests.support.storage.logs import SMALL, open_log
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.transactions import end, write

READ_BYTES = 500


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=3)


def slices(log: Log) -> list[tuple[int, list[tuple[int, int]], set[tuple[int, int]]]]:
    """(offset, aborted transactions of the slice, those that its batches need) of each read."""
    every = log.reader.aborted_transactions(0, log.log_end_offset)
    offset, found = 0, []
    while offset < log.last_stable_offset:
        end = log.last_stable_offset
        fetch_slice = log.reader.read(offset, READ_BYTES, end_offset=end)
        entries = log.reader.aborted_in_slice(fetch_slice, offset, end)
        headers = [header for _, header in walk_headers(fetch_slice.read())]
        needed = {
            (entry.producer_id, entry.first_offset)
            for entry in every
            for header in headers
            if entry.producer_id == header.producer_id
            and entry.first_offset <= header.base_offset <= entry.last_offset
        }
        named = [(entry.producer_id, entry.first_offset) for entry in entries]
        found.append((offset, named, needed))
        offset = headers[-1].next_offset
    return found


@pytest.mark.parametrize("segment_bytes", [1_000, 1 << 20])
def test_a_slice_names_few_transactions_however_many_follow(
    env: MemoryEnv, segment_bytes: int
) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=segment_bytes))
    for producer_id in range(300):
        write(log, producer_id)
        end(log, producer_id)
    for _, named, needed in slices(log):
        assert needed <= set(named)
        assert len(named) <= 10  # of 70 to 80 bytes a batch


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("interval", [0, 300, 1 << 20])
def test_a_slice_names_every_transaction_that_its_batches_need(
    env: MemoryEnv, seed: int, interval: int
) -> None:
    rng = random.Random(seed)
    log = open_log(env, replace(SMALL, segment_bytes=4_000, index_interval_bytes=interval))
    opened: set[int] = set()
    for _ in range(300):
        producer_id = rng.randrange(8)
        if producer_id in opened and rng.random() < 0.4:
            end(log, producer_id)
            opened.discard(producer_id)
        else:
            write(log, producer_id)
            opened.add(producer_id)
    for producer_id in opened:
        end(log, producer_id)
    for offset, named, needed in slices(log):
        assert needed <= set(named), (seed, offset)


def test_a_wrong_index_entry_hides_no_transaction(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    for producer_id in range(50):
        write(log, producer_id)
        end(log, producer_id)
    offsets = log.segments.active.indexes.offsets
    for at in range(len(offsets)):
        offsets.offsets[at] = at // 3  # they say less than the batches at these positions
    for offset, named, needed in slices(log):
        assert needed <= set(named), offset
