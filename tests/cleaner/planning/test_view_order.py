"""The engine making a view that goes by timestamps or versions: which record is a key's latest."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from cleaner.engine import context
from cleaner.engine.clean import run_clean
from cleaner.engine.key_map import offset_map, ranked_map
from cleaner.job import CleanJob, CleanReport, SourceSegment, ViewOrder, ViewRules
from storage.errors import CorruptCheckpointError
from storage.format.batch import LOG_APPEND_TIME, Record, build_batch
from storage.format.compression import GZIP, LZ4, SNAPPY, ZSTD
from storage.format.filenames import LOG, file_name
from storage.swap.swap_journal import CleanedFile
from storage.view.deleted_keys import DELETED_KEYS_HEADER_BYTES, DELETED_KEYS_NAME, rows_in
from tests.support.cleaner.cleaning import (
    DIRECTORY,
    HASH_KEY,
    NOW_MS,
    Recorder,
    Segment,
    clean_job,
    records_of,
    segment,
    write_segments,
)
from tests.support.cleaner.random_logs import PROPERTY, WINDOWS
from tests.support.storage.memory_env import MemoryEnv

VERSION = "v"
LOWEST = -(1 << 63)
Header = tuple[str | bytes, bytes | None]
TIMESTAMP = ViewOrder(None, None)
HEADER = ViewOrder(VERSION.encode(), None)
CODECS = [0, GZIP, SNAPPY, LZ4, ZSTD]


def version_header(version: int) -> Header:
    return VERSION, struct.pack(">q", version)


def rank_of(record: Record, order: ViewOrder) -> int:
    """The rule, in plain words."""
    if order.version_header is None:
        return record.timestamp
    named = [value for name, value in record.headers if name == VERSION]
    if not named or named[-1] is None or len(named[-1]) != 8:
        return LOWEST
    return int(struct.unpack(">q", named[-1])[0])


def latest_of(records: Sequence[Record], order: ViewOrder) -> dict[bytes, Record]:
    latest: dict[bytes, Record] = {}
    for record in records:  # ascending offsets: the later one of equals wins
        if record.key is None:
            continue
        owned = latest.get(record.key)
        if owned is None or rank_of(record, order) >= rank_of(owned, order):
            latest[record.key] = record
    return latest


def expected_of(records: Sequence[Record], order: ViewOrder) -> list[Record]:
    latest = latest_of(records, order)
    return [
        record
        for record in records
        if record.key is not None and latest[record.key] is record and record.value is not None
    ]


HEADERS = st.one_of(
    st.just(()),
    st.tuples(st.builds(version_header, st.sampled_from([LOWEST, -5, -1, 0, 1, 2, (1 << 63) - 1]))),
    st.sampled_from(
        [
            ((VERSION, None),),
            ((VERSION, b"1234567"),),
            (("w", b"12345678"), version_header(1)),
            (version_header(3), ("vv", b"12345678")),
            (version_header(7), version_header(1)),
            (version_header(7), (VERSION, b"")),
        ]
    ),
)


@st.composite
def logs(draw: st.DrawFn) -> list[Segment]:
    offset = 0
    segments = []
    for _ in range(draw(st.integers(1, 4))):
        base, batches = offset, []
        for _ in range(draw(st.integers(1, 4))):
            records = []
            for _ in range(draw(st.integers(1, 6))):
                offset += draw(st.integers(0, 2))
                key = draw(st.sampled_from([b"a", b"b", b"c", b"d", b"e", None]))
                value = draw(st.sampled_from([None, b"x" * 20])) if key else b"x"
                stamp = NOW_MS + draw(st.integers(-4, 4))
                records.append(Record(offset, stamp, key, value, draw(HEADERS)))
                offset += 1
            codec = draw(st.sampled_from(CODECS))
            batches.append(bytes(build_batch(records, attributes=codec)))
        segments.append(segment(base, batches, offset))
    return segments


class Ledger:
    """Rounds of a run over a folder, as the broker settles them."""

    def __init__(self, env: MemoryEnv, sources: Sequence[SourceSegment]) -> None:
        self.env = env
        self.sources = list(sources)
        self.deleted: CleanedFile | None = None
        self.reports: list[CleanReport] = []

    def round(self, first: int, order: ViewOrder, end: int, **changes: object) -> CleanReport:
        job = clean_job(
            [[source] for source in self.sources if source.base_offset < end],
            first_dirty_offset=first,
            view=ViewRules(order=replace(order, deleted_keys=self.deleted)),
            job_id=f"run{len(self.reports)}",
            **changes,
        )
        control = Recorder()
        report = run_clean(self.env, job, control)
        assert control.charged_read == report.bytes_read
        assert not report.damaged
        for group in control.groups:
            self._settle(group.source_base_offsets[0], group.output)
        if self.deleted is not None:
            self.env.unlink(f"{DIRECTORY}/{DELETED_KEYS_NAME}")
        self.deleted = report.deleted_keys
        if self.deleted is not None:
            self.env.rename(f"{DIRECTORY}/{self.deleted.name}", f"{DIRECTORY}/{DELETED_KEYS_NAME}")
        self.reports.append(report)
        return report

    def _settle(self, base: int, output: object) -> None:
        at = next(i for i, source in enumerate(self.sources) if source.base_offset == base)
        target = f"{DIRECTORY}/{file_name(base, LOG)}"
        size = 0
        if output is None:
            self.env.open(target, write=True, truncate=True)
        else:
            made = output.files[0]  # type: ignore[attr-defined]
            self.env.rename(f"{DIRECTORY}/{made.name}", target)
            size = made.size_bytes
        self.sources[at] = replace(self.sources[at], size_bytes=size)

    def run(self, first: int, order: ViewOrder, end: int, **changes: object) -> int:
        """All rounds up to `end`; how many there were."""
        rounds = 0
        while first < end:
            following = self.round(first, order, end, **changes).next_dirty_offset
            assert following > first
            first, rounds = following, rounds + 1
        return rounds

    def records(self) -> list[Record]:
        records: list[Record] = []
        for source in self.sources:
            data = self.env.read_file(f"{DIRECTORY}/{file_name(source.base_offset, LOG)}")
            records += records_of(data)
        return records

    def stored(self) -> int:
        return 0 if self.deleted is None else rows_in(self.deleted.size_bytes)


@PROPERTY
@given(st.data(), WINDOWS, st.sampled_from([1, 3, 4096]), st.sampled_from([TIMESTAMP, HEADER]))
def test_any_rounds_and_runs_leave_the_record_of_the_largest_rank(
    data: st.DataObject, window: tuple[int, int], chunk_keys: int, order: ViewOrder
) -> None:
    segments = data.draw(logs())
    env = MemoryEnv(1)
    ledger = Ledger(env, write_segments(env, segments))
    everything = records_of(b"".join(part.data for part in segments))
    cuts = [part.next_base_offset for part in segments]
    runs = sorted({*data.draw(st.lists(st.sampled_from(cuts), max_size=2)), cuts[-1]})
    slots = data.draw(st.sampled_from([1, 70, 140, 1 << 20]))
    with (
        patch.object(context, "WINDOW_OFFSETS", window[0]),
        patch.object(context, "WINDOWS_MAX", window[1]),
        patch.object(offset_map, "CHUNK_KEYS", chunk_keys),
        patch.object(ranked_map, "CHUNK_KEYS", chunk_keys),
    ):
        first = 0
        for end in runs:
            ledger.run(first, order, end, dedupe_buffer_bytes=slots)
            first = end

    assert ledger.records() == expected_of(everything, order)
    deleted = [record for record in latest_of(everything, order).values() if record.value is None]
    assert ledger.stored() == len(deleted)
    without = [r for r in everything if r.key is not None and rank_of(r, order) == LOWEST]
    lowest_told = [r for r in without if ((VERSION, struct.pack(">q", LOWEST))) in r.headers]
    reported = sum(report.records_without_version for report in ledger.reports)
    assert reported <= len(without)
    assert reported >= len(without) - len(lowest_told)


def rounds_of(
    batches: Sequence[Sequence[Record]], order: ViewOrder, **changes: object
) -> tuple[Ledger, list[list[tuple[bytes | None, bytes | None]]]]:
    """One run for each batch in a segment of its own; what the ledger held after each."""
    env = MemoryEnv(1)
    segments = []
    for records in batches:
        end = records[-1].offset + 1
        segments.append(segment(records[0].offset, [build_batch(list(records))], end))
    ledger = Ledger(env, write_segments(env, segments))
    owned = []
    first = 0
    for part in segments:
        ledger.run(first, order, part.next_base_offset, **changes)
        first = part.next_base_offset
        owned.append([(r.key, r.value) for r in ledger.records() if r.offset < first])
    return ledger, owned


def at(offset: int, stamp: int, key: bytes, value: bytes | None) -> Record:
    return Record(offset, NOW_MS + stamp, key, value)


def test_a_late_older_record_does_not_bring_a_deleted_key_back() -> None:
    batches = [
        [at(0, 10, b"a", b"1"), at(1, 20, b"a", None)],
        [at(2, 15, b"a", b"late")],
        [at(3, 20, b"a", b"as old as the delete, and after it")],
    ]
    ledger, owned = rounds_of(batches, TIMESTAMP)
    assert owned[:2] == [[], []]
    assert owned[2] == [(b"a", b"as old as the delete, and after it")]
    assert ledger.stored() == 0, "it was superseded"


def test_a_delete_that_comes_late_deletes_nothing() -> None:
    ledger, owned = rounds_of([[at(0, 10, b"a", b"1")], [at(1, 5, b"a", None)]], TIMESTAMP)
    assert owned[1] == [(b"a", b"1")]
    assert ledger.stored() == 0


def test_a_delete_is_forgotten_when_its_time_has_passed() -> None:
    first = [[at(0, 10, b"a", None)], [at(1, 0, b"b", b"1")]]
    for retention_ms, trusted, retained in ((1000, True, 0), (5000, True, 1), (1000, False, 1)):
        env = MemoryEnv(1)
        segments = [
            segment(0, [build_batch(first[0])], 1),
            segment(1, [build_batch(first[1])], 2),
        ]
        ledger = Ledger(env, write_segments(env, segments))
        ledger.run(0, TIMESTAMP, 1, delete_retention_ms=retention_ms)
        assert ledger.stored() == 1
        ledger.run(
            1, TIMESTAMP, 2, delete_retention_ms=retention_ms, now_ms=NOW_MS + 2000,
            drop_expired_tombstones=trusted,
        )  # fmt: skip
        assert ledger.stored() == retained, (retention_ms, trusted)


def test_a_deleted_key_is_stored_at_least_until_the_end_of_its_compaction() -> None:
    records = [at(n, -n, b"%d" % (n % 3), None if n < 3 else b"late") for n in range(9)]
    for slots in (1, 1 << 20):
        env = MemoryEnv(1)
        ledger = Ledger(env, write_segments(env, [segment(0, [build_batch(records)], 9)]))
        ledger.run(0, TIMESTAMP, 9, delete_retention_ms=0, dedupe_buffer_bytes=slots)
        assert ledger.records() == []
        assert ledger.stored() == 3


def test_records_of_append_time_rank_by_it() -> None:
    batch = build_batch([at(0, 90, b"a", b"1"), at(1, 10, b"a", b"2")], attributes=LOG_APPEND_TIME)
    env = MemoryEnv(1)
    ledger = Ledger(env, write_segments(env, [segment(0, [batch], 2)]))
    ledger.run(0, TIMESTAMP, 2)
    assert [record.value for record in ledger.records()] == [b"2"], "they are of one time"


def test_versions_that_cannot_be_told_are_counted_and_rank_below_all_others() -> None:
    records = [
        Record(0, NOW_MS, b"a", b"1", (version_header(-7),)),
        Record(1, NOW_MS, b"a", b"2", ((VERSION, b"12"),)),
        Record(2, NOW_MS, b"a", b"3"),
        Record(3, NOW_MS, b"b", b"4"),
        Record(4, NOW_MS, b"b", b"5"),
    ]
    env = MemoryEnv(1)
    ledger = Ledger(env, write_segments(env, [segment(0, [build_batch(records)], 5)]))
    report = ledger.round(0, HEADER, 5)
    assert report.records_without_version == 4
    assert [record.value for record in ledger.records()] == [b"1", b"5"]


def damaged_job(env: MemoryEnv, ledger: Ledger, **changes: object) -> CleanJob:
    return clean_job(
        [[source] for source in ledger.sources],
        first_dirty_offset=1,
        view=ViewRules(order=ViewOrder(None, ledger.deleted)),
        job_id="again",
        **changes,
    )


@pytest.mark.parametrize("place", [0, 20, 35, -1])
def test_damaged_deleted_keys_fail_the_job(place: int) -> None:
    ledger, _ = rounds_of([[at(0, 1, b"a", None)], [at(1, 0, b"a", b"x")]], TIMESTAMP)
    env = ledger.env
    path = f"{DIRECTORY}/{DELETED_KEYS_NAME}"
    data = bytearray(env.read_file(path))
    data[place] ^= 1
    env.open(path, write=True).pwrite(bytes(data), 0)
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        run_clean(env, damaged_job(env, ledger), Recorder())
    env.open(path, write=True, truncate=True).pwrite(bytes(data[:-3]), 0)
    with pytest.raises(CorruptCheckpointError, match="bytes instead of"):
        run_clean(env, damaged_job(env, ledger), Recorder())
    assert not [n for n in env.listdir(DIRECTORY) if n.startswith(f"{DELETED_KEYS_NAME}.")]


@pytest.mark.parametrize("offset", [-1, -2, -(1 << 63)])
def test_deleted_keys_without_an_offset_fail_the_job(offset: int) -> None:
    """Their size and checksum are right; the map would take them for free slots."""
    ledger, _ = rounds_of([[at(0, 1, b"a", None)], [at(1, 0, b"a", b"x")]], TIMESTAMP)
    path = f"{DIRECTORY}/{DELETED_KEYS_NAME}"
    data = bytearray(ledger.env.read_file(path))
    struct.pack_into("<q", data, DELETED_KEYS_HEADER_BYTES + 3 * 8, offset)
    ledger.env.open(path, write=True).pwrite(bytes(data), 0)
    assert ledger.deleted is not None
    ledger.deleted = replace(ledger.deleted, crc=crc32c(data))
    with pytest.raises(CorruptCheckpointError, match="a row without an offset"):
        run_clean(ledger.env, damaged_job(ledger.env, ledger), Recorder())


def test_deleted_keys_of_another_data_directory_fail_the_job() -> None:
    ledger, _ = rounds_of([[at(0, 1, b"a", None)], [at(1, 0, b"a", b"x")]], TIMESTAMP)
    job = damaged_job(ledger.env, ledger, hash_key=HASH_KEY[::-1])
    with pytest.raises(CorruptCheckpointError, match="another hash key"):
        run_clean(ledger.env, job, Recorder())
