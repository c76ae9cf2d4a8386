"""A scan of a segment gives its consumer room for every record before the record comes."""

import numpy as np
import pytest

from cleaner.engine.clean import run_clean
from cleaner.engine.context import CleanContext
from cleaner.engine.key_map import offset_map
from cleaner.engine.key_rows import Listing
from cleaner.engine.segment_scan import scan_segment
from cleaner.job import SourceSegment
from storage.format.compression import LZ4
from tests.support.cleaner.clean_cases import batch, record
from tests.support.cleaner.cleaning import Recorder, clean_job, segment, write_segments
from tests.support.storage.memory_env import MemoryEnv

RECORDS = 9  # of each batch


def mixed_segment(env: MemoryEnv) -> SourceSegment:
    """A compressed batch, and an uncompressed one after it in the same read buffer."""
    records = [record(offset, f"k{offset}") for offset in range(2 * RECORDS)]
    batches = [batch(*records[:RECORDS], codec=LZ4), batch(*records[RECORDS:])]
    return write_segments(env, [segment(0, batches, 2 * RECORDS)])[0]


def test_rows_of_batches_behind_a_compressed_one_stay_within_their_array() -> None:
    env = MemoryEnv()
    source = mixed_segment(env)
    job = clean_job([[source]], first_dirty_offset=2 * RECORDS)
    context = CleanContext(env, job, Recorder())
    offsets: list[int] = []
    listing = Listing(context, lambda rows, count: offsets.extend(rows[2 : 3 * count : 3] - 1))
    guarded = np.zeros(6 * RECORDS * 3, dtype=np.uint64)
    room = (RECORDS + 1) * 3
    listing._rows = guarded[:room]
    scan_segment(context, source, listing)
    listing.flush()
    assert not guarded[room:].any()
    assert offsets == list(range(2 * RECORDS))


def test_a_map_grows_for_keys_behind_a_compressed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_map, "SLOTS_AT_FIRST", 16)
    env = MemoryEnv()
    report = run_clean(env, clean_job([[mixed_segment(env)]]), Recorder(), one_pass=False)
    assert (report.keys_indexed, report.map_full) == (2 * RECORDS, False)
