"""Random logs and cleans of them, for property tests."""

from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cleaner.job import CleanJob
from storage.format.batch import LOG_APPEND_TIME, Record, build_batch, read_header
from storage.format.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD
from tests.support.cleaner.cleaning import NOW_MS, Segment, clean_job
from tests.support.draws import cases

KEYED = [b"", b"a", b"b", b"12345678", b"a key that takes more than one word of the hash"]
KEYS = [None, *KEYED]
VALUES = [None, b"", b"v", b"value " * 20]
HEADERS: list[tuple[tuple[str | bytes, bytes | None], ...]] = [(), (("h", None), ("i", b"x"))]
PRODUCERS = [-1, -1, 7, 8]

PROPERTY = settings(
    max_examples=cases(few=25, many=120), deadline=None, suppress_health_check=list(HealthCheck)
)


@st.composite
def batches(draw: st.DrawFn, base_offset: int, keys: Sequence[bytes | None]) -> bytes:
    deltas = draw(st.lists(st.integers(0, 3), min_size=1, max_size=7))
    offset = base_offset - 1
    records = []
    for skip in deltas:
        offset += 1 + skip
        timestamp = NOW_MS + draw(st.sampled_from([-(10**9), -1, 0, 5, 10**12]))
        key = draw(st.sampled_from(keys))
        value = draw(st.sampled_from(VALUES))
        records.append(Record(offset, timestamp, key, value, draw(st.sampled_from(HEADERS))))
    horizons = [None, None, NOW_MS - 1, NOW_MS, NOW_MS + 1]
    producer = draw(st.sampled_from(PRODUCERS))
    append_time = draw(st.booleans())
    latest = max(record.timestamp for record in records)
    return bytes(
        build_batch(
            records if draw(st.integers(0, 9)) else [],
            base_offset=base_offset,
            codec=draw(st.sampled_from([NONE, NONE, NONE, GZIP, SNAPPY, LZ4, ZSTD])),
            producer_id=producer,
            producer_epoch=3 if producer >= 0 else -1,
            base_sequence=11 if producer >= 0 else -1,
            attributes=LOG_APPEND_TIME if append_time else 0,
            partition_leader_epoch=draw(st.integers(-1, 5)),
            last_offset_delta=offset - base_offset + draw(st.integers(0, 2)),
            delete_horizon_ms=draw(st.sampled_from(horizons)),
            max_timestamp=latest,
        )
    )


@st.composite
def logs(draw: st.DrawFn) -> list[Segment]:
    keys = draw(st.sampled_from([KEYS, KEYED]))
    offset = draw(st.sampled_from([0, 5, 1 << 40]))
    segments = []
    for _ in range(draw(st.integers(1, 4))):
        base = offset
        parts = []
        for _ in range(draw(st.integers(0, 4))):
            offset += draw(st.sampled_from([0, 0, 1, 9]))
            batch = draw(batches(offset, keys))
            offset = read_header(batch).next_offset
            parts.append(batch)
        offset = max(offset, base + 1) + draw(st.sampled_from([0, 0, 3]))
        segments.append(Segment(base, parts, offset))
    return segments


@st.composite
def jobs(draw: st.DrawFn, segments: list[Segment], sources: tuple[object, ...]) -> CleanJob:
    base, end = segments[0].base_offset, segments[-1].next_base_offset
    first_dirty = draw(st.integers(base, end) | st.just(base))
    cut = draw(st.integers(1, len(sources)))
    groups = [sources[:cut], sources[cut:]] if cut < len(sources) else [sources]
    lasts = [
        (header.producer_id, 3, header.last_offset)
        for part in segments
        for header in map(read_header, part.batches)
        if header.producer_id >= 0
    ]
    return clean_job(
        groups,  # type: ignore[arg-type]
        first_dirty_offset=first_dirty,
        log_start_offset=draw(st.integers(base, first_dirty) | st.just(base)),
        log_end_offset_is_end=draw(st.booleans()),
        last_records=tuple({producer: (producer, 3, last) for producer, _, last in lasts}.values()),
        dedupe_buffer_bytes=draw(st.sampled_from([24, 72, 100, 1 << 12, 1 << 20])),
        read_buffer_bytes=draw(st.sampled_from([1, 1100, 1 << 16])),
        index_interval_bytes=draw(st.sampled_from([0, 100, 4096])),
        drop_expired_tombstones=draw(st.booleans()),
    )


WINDOWS = st.sampled_from([(8, 1 << 40), (64, 1 << 40), (1 << 27, 64), (1 << 27, 0)])
