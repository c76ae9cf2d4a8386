"""The engine as a compacted view uses it: only the latest record of each key, no tombstone."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleaner.engine import context
from cleaner.engine.key_map import offset_map
from cleaner.job import ViewRules
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    decode_records,
    marker_record,
    read_header,
)
from storage.format.txn_index import TxnIndexEntry
from tests.support.cleaner.cleaning import (
    NOW_MS,
    Segment,
    batches_of,
    clean,
    clean_job,
    cleaned_log,
    records_of,
    segment,
    write_segments,
)
from tests.support.cleaner.random_logs import PROPERTY, WINDOWS, logs
from tests.support.storage.memory_env import MemoryEnv


def records_in(segments: list[Segment]) -> list[Record]:
    return [
        record
        for part in segments
        for batch in part.batches
        for record in decode_records(batch, read_header(batch))
    ]


@PROPERTY
@given(st.data(), WINDOWS, st.sampled_from([1, 3, 4096]), st.booleans())
def test_a_view_holds_the_latest_record_of_each_key_and_nothing_else(
    data: st.DataObject, window: tuple[int, int], chunk_keys: int, keep_keyless: bool
) -> None:
    segments = data.draw(logs())
    env = MemoryEnv(1)
    sources = write_segments(env, segments)
    job = clean_job(
        [sources],
        first_dirty_offset=segments[0].base_offset,
        log_start_offset=segments[0].base_offset,
        dedupe_buffer_bytes=data.draw(st.sampled_from([24, 72, 1 << 20])),
        read_buffer_bytes=data.draw(st.sampled_from([1, 1100, 1 << 16])),
        view=ViewRules(keep_keyless=keep_keyless),
    )
    with (
        patch.object(context, "WINDOW_OFFSETS", window[0]),
        patch.object(context, "WINDOWS_MAX", window[1]),
        patch.object(offset_map, "CHUNK_KEYS", chunk_keys),
    ):
        report, groups = clean(env, job)

    everything = records_in(segments)
    end = report.next_dirty_offset
    last = {r.key: r.offset for r in everything if r.key is not None and r.offset < end}
    expected = [
        record
        for record in everything
        if record.offset >= end
        or (
            (keep_keyless if record.key is None else record.offset == last[record.key])
            and (record.key is None or record.value is not None)
        )
    ]
    log = cleaned_log(env, segments, groups)
    assert records_of(log) == expected
    headers = [read_header(batch) for batch in batches_of(log)]
    assert all(header.record_count for header in headers if header.base_offset < end)


@pytest.mark.parametrize("seen_with_its_data", [True, False], ids=["near", "beyond the end"])
def test_a_view_holds_no_marker_and_nothing_that_was_aborted(seen_with_its_data: bool) -> None:
    def of_producer(offset: int, key: bytes, producer: int) -> bytes:
        return bytes(
            build_batch(
                [Record(offset, NOW_MS, key, b"v%d" % offset)],
                producer_id=producer,
                producer_epoch=0,
                base_sequence=0,
                attributes=TRANSACTIONAL,
            )
        )

    def marker(offset: int, kind: ControlType, producer: int) -> bytes:
        record = marker_record(kind, 0, NOW_MS)._replace(offset=offset)
        return bytes(
            build_batch(
                [record], producer_id=producer, producer_epoch=0, attributes=TRANSACTIONAL | CONTROL
            )
        )

    parts = [
        of_producer(0, b"a", 7),
        marker(1, ControlType.COMMIT, 7),
        of_producer(2, b"a", 8),
    ]
    if seen_with_its_data:
        parts.append(marker(3, ControlType.ABORT, 8))
    parts.append(of_producer(4, b"b", 7))
    env = MemoryEnv(1)
    segments = [segment(0, parts, 5)]
    aborted = (TxnIndexEntry(8, 2, 3 if seen_with_its_data else 9, 2),)
    job = clean_job([write_segments(env, segments)], view=ViewRules(), aborted=aborted)

    _, groups = clean(env, job)

    remaining = cleaned_log(env, segments, groups)
    assert [(r.offset, r.key) for r in records_of(remaining)] == [(0, b"a"), (4, b"b")]
    assert not any(read_header(batch).is_control for batch in batches_of(remaining))
