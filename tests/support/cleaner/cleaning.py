"""A cleaner in plain Python, and what a test needs to run the real one beside it.

`expected_batches` states the rules one batch at a time, with dictionaries and lists. It shares
nothing with the cleaner but the reading and building of batches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeAlias

from crc32c import crc32c

from cleaner.engine.clean import run_clean
from cleaner.engine.selective.key_index import remove_indexes
from cleaner.job import CleanAbortedError, CleanedGroup, CleanJob, CleanReport, SourceSegment
from storage.env import Env
from storage.format import filenames
from storage.format.batch import (
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
    Record,
    build_batch,
    decode_records,
    read_header,
    verify_crc,
    walk_headers,
)
from storage.format.index import OffsetIndex
from storage.model import TopicPartition
from tests.support.cleaner.key_indexes import small_records_are_indexed
from tests.support.storage.empty_batch import empty_batch

DIRECTORY = "data/topic-0"
HASH_KEY = bytes(range(16))
NOW_MS = 1_700_000_000_000
MODIFIED_MS = 1_600_000_000_000


@dataclass
class Segment:
    """A closed segment in the making: whole batches as bytes."""

    base_offset: int
    batches: list[bytes]
    next_base_offset: int

    @property
    def data(self) -> bytes:
        return b"".join(self.batches)


@dataclass
class Recorder:
    """A control that records its calls and can request an abort."""

    groups: list[CleanedGroup] = field(default_factory=list)
    charged_read: int = 0
    charged_write: int = 0
    abort_after: int = -1  # calls of `aborted` before it returns True
    stages: list[tuple[str, int, int]] = field(default_factory=list)
    budget_aborts_at: int = -1

    def read_bytes(self, count: int) -> None:
        self.charged_read += count
        if 0 <= self.budget_aborts_at < self.charged_read:
            raise CleanAbortedError

    def write_bytes(self, count: int) -> None:
        self.charged_write += count

    def aborted(self) -> bool:
        self.abort_after -= 1
        return self.abort_after == -1

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        self.groups.extend(groups)

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self.stages.append((stage, done_bytes, total_bytes))


def segment(base_offset: int, batches: Iterable[bytes | bytearray], next_base: int) -> Segment:
    return Segment(base_offset, [bytes(batch) for batch in batches], next_base)


def write_segments(env: Env, segments: Sequence[Segment]) -> tuple[SourceSegment, ...]:
    """Put the segments into the partition's folder as closed, synced files."""
    env.mkdir(DIRECTORY)
    sources = []
    for number, part in enumerate(segments):
        path = f"{DIRECTORY}/{filenames.file_name(part.base_offset, filenames.LOG)}"
        file = env.open(path, create=True, write=True, truncate=True)
        file.pwrite(part.data, 0)
        file.sync()
        file.close()
        source = SourceSegment(
            part.base_offset, part.next_base_offset, len(part.data), MODIFIED_MS + number, 0
        )
        sources.append(source)
    return tuple(sources)


def clean_job(groups: Sequence[Sequence[SourceSegment]], **changes: object) -> CleanJob:
    """A job over all of `groups` with a map and buffers that are large enough."""
    end_offset = groups[-1][-1].next_base_offset
    settings: dict[str, object] = {
        "partition": TopicPartition("topic", 0),
        "directory": DIRECTORY,
        "generation": "boot-1",
        "job_id": "run1",
        "groups": tuple(tuple(group) for group in groups),
        "first_dirty_offset": 0,
        "end_offset": end_offset,
        "log_start_offset": 0,
        "log_end_offset_is_end": False,
        "now_ms": NOW_MS,
        "delete_retention_ms": 86_400_000,
        "drop_expired_tombstones": True,
        "hash_key": HASH_KEY,
        "dedupe_buffer_bytes": 1 << 20,
        "read_buffer_bytes": 1 << 16,
        "decompressed_batch_bytes": 1 << 20,
        "max_message_bytes": 1 << 20,
        "index_interval_bytes": 4096,
        "segment_bytes": 1 << 30,
        "compression_levels": (),
    }
    settings.update(changes)
    return CleanJob(**settings)  # type: ignore[arg-type]


Cleaned: TypeAlias = tuple[CleanReport, list[CleanedGroup], list[bytes]]


def clean(env: Env, job: CleanJob) -> tuple[CleanReport, list[CleanedGroup]]:
    """Clean in two passes, in one, and by key indexes: all have to leave the same.

    By key indexes if nothing is clean yet and the map held all keys: it decides all keys anew.
    """
    expected = _clean_once(env, job, one_pass=False)
    report, groups, _ = expected
    _assert_same(_clean_once(env, job), expected, WAYS)
    all_dirty = job.first_dirty_offset == job.log_start_offset and job.view is None
    if all_dirty and not report.map_full and not job.expired_only:
        by_index = replace(job, by_index=True, spill_bytes_max=1 << 40)
        with small_records_are_indexed():
            _assert_same(_clean_once(env, by_index), expected, WAYS | INDEX_FIGURES)
        remove_indexes(env, job)
    return report, groups


# Figures that depend on the way, not on the result.
WAYS = {"map_seconds", "rewrite_seconds", "bytes_read", "passes"}
INDEX_FIGURES = {"map_utilization", "spilled_bytes"}


def _clean_once(env: Env, job: CleanJob, *, one_pass: bool = True) -> Cleaned:
    """Clean, and return what is left with the bytes of its files."""
    control = Recorder()
    report = run_clean(env, job, control, one_pass=one_pass)
    assert job.by_index or control.charged_read == report.bytes_read
    files = {
        file.name: env.read_file(f"{job.directory}/{file.name}")
        for group in control.groups
        for file in (group.output.files if group.output else ())
    }
    ending = f".{job.job_id}.cleaned"
    assert {name for name in env.listdir(job.directory) if name.endswith(ending)} == files.keys()
    horizons = sorted(report.horizons, key=lambda horizon: horizon.base_offset)
    return replace(report, horizons=tuple(horizons)), control.groups, list(files.values())


def _assert_same(cleaned: Cleaned, expected: Cleaned, neutral: set[str]) -> None:
    assert cleaned[1:] == expected[1:]
    wanted = asdict(expected[0])
    differing = [
        (name, value, wanted[name])
        for name, value in asdict(cleaned[0]).items()
        if name not in neutral and value != wanted[name]
    ]
    assert not differing, differing


def output_bytes(env: Env, group: CleanedGroup, kind: str = filenames.LOG) -> bytes:
    """The content of one of a group's files, checked against its entry; b"" without an output."""
    if group.output is None:
        return b""
    for file in group.output.files:
        parsed = filenames.parse_file_name(file.name)
        assert parsed is not None
        if parsed.kind == kind:
            data = env.read_file(f"{DIRECTORY}/{file.name}")
            assert len(data) == file.size_bytes
            assert crc32c(data) == file.crc
            return data
    raise AssertionError(f"no {kind} in {group.output}")


def batches_of(log: bytes) -> list[bytes]:
    """The batches of a log, each with a valid checksum, nothing left over."""
    batches = []
    end = 0
    for position, header in walk_headers(log):
        assert verify_crc(log, position, header), position
        end = position + header.size_bytes
        batches.append(log[position:end])
    assert end == len(log)
    return batches


def records_of(log: bytes) -> list[Record]:
    return [
        record for batch in batches_of(log) for record in decode_records(batch, read_header(batch))
    ]


def cleaned_log(env: Env, segments: Sequence[Segment], groups: Sequence[CleanedGroup]) -> bytes:
    """The whole log after the groups were published: unpublished sources are still there."""
    replaced = {base: group for group in groups for base in group.source_base_offsets}
    parts = []
    for part in segments:
        group = replaced.get(part.base_offset)
        if group is None:
            parts.append(part.data)
        elif part.base_offset == group.source_base_offsets[0]:
            parts.append(output_bytes(env, group))
    return b"".join(parts)


def survivors(
    job: CleanJob, batch: bytes, last_offsets: dict[bytes, int], map_end: int
) -> list[Record]:
    header = read_header(batch)
    expired = (
        header.has_delete_horizon
        and job.drop_expired_tombstones
        and job.now_ms >= header.base_timestamp
    )
    retained = []
    for record in decode_records(batch, header):
        if record.offset < job.log_start_offset:
            continue
        if record.offset < map_end:
            if record.key is None or record.offset < last_offsets.get(record.key, -1):
                continue
            if record.value is None and expired:
                continue
        retained.append(record)
    return retained


def stays_empty(job: CleanJob, header: BatchHeader) -> bool:
    if job.log_end_offset_is_end and header.next_offset == job.end_offset:
        return True
    for producer, epoch, last in job.last_records:
        if producer == header.producer_id and last >= 0:
            return header.last_offset == last
        if producer == header.producer_id:
            return header.is_control and header.producer_epoch == epoch
    return False


def expected_batch(
    job: CleanJob, batch: bytes, last_offsets: dict[bytes, int], map_end: int
) -> bytes | None:
    """What becomes of one batch; None: it goes. Rebuilt ones come uncompressed."""
    header = read_header(batch)
    if header.base_offset >= map_end:
        return batch
    records = survivors(job, batch, last_offsets, map_end)
    if not records:
        if not stays_empty(job, header):
            return None
        return batch if header.size_bytes == 61 else bytes(empty_batch(header))
    stamp = (
        not header.has_delete_horizon
        and job.drop_expired_tombstones
        and header.last_offset < map_end
        and any(record.value is None for record in records)
    )
    if len(records) == header.record_count and not stamp:
        return batch
    horizon = header.base_timestamp if header.has_delete_horizon else None
    latest = max(record.timestamp for record in records)
    return bytes(
        build_batch(
            records,
            base_offset=header.base_offset,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            attributes=header.attributes & (LOG_APPEND_TIME | TRANSACTIONAL),
            partition_leader_epoch=header.partition_leader_epoch,
            last_offset_delta=header.last_offset_delta,
            delete_horizon_ms=job.now_ms + job.delete_retention_ms if stamp else horizon,
            max_timestamp=header.max_timestamp if header.is_log_append_time else latest,
        )
    )


def last_offsets_of(job: CleanJob, segments: Sequence[Segment], map_end: int) -> dict[bytes, int]:
    return {
        record.key: record.offset
        for part in segments
        for batch in part.batches
        for record in decode_records(batch, read_header(batch))
        if record.key is not None
        and max(job.first_dirty_offset, job.log_start_offset) <= record.offset < map_end
    }


def assert_same_batch(actual: bytes, expected: bytes, source_codec: int) -> None:
    """Byte for byte for copies; else header and records, base time and codec by their rules."""
    if actual == expected:
        return
    header, batch_header = read_header(actual), read_header(expected)
    assert decode_records(actual, header) == decode_records(expected, batch_header)
    assert header.codec == (source_codec if header.record_count else 0)
    if header.has_delete_horizon:
        assert header.base_timestamp == batch_header.base_timestamp
    neutral = {"batch_length": 0, "crc": 0, "base_timestamp": 0}
    same_codec = (header.attributes & ~7) == (batch_header.attributes & ~7)
    assert same_codec
    assert header._replace(attributes=0, **neutral) == batch_header._replace(
        attributes=0, **neutral
    )


def assert_indexes_fit(env: Env, group: CleanedGroup, interval_bytes: int) -> None:
    """The offset and time index that Kafka's recovery would build, batch by batch."""
    if group.output is None:
        return
    log = output_bytes(env, group)
    base = group.output.base_offset
    offsets = OffsetIndex()
    times: list[tuple[int, int]] = []
    largest, largest_offset, indexed = -1, base, 0
    for position, header in walk_headers(log):
        if header.max_timestamp > largest:
            largest, largest_offset = header.max_timestamp, header.last_offset
        if position - indexed > interval_bytes:
            offsets.append(header.last_offset - base, position)
            indexed = position
            if largest > (times[-1][0] if times else -1):
                times.append((largest, largest_offset - base))
    if largest > (times[-1][0] if times else -1):
        times.append((largest, largest_offset - base))
    assert output_bytes(env, group, filenames.INDEX) == offsets.to_bytes()
    raw = output_bytes(env, group, filenames.TIME_INDEX)
    assert raw == b"".join(
        timestamp.to_bytes(8, "big", signed=True) + offset.to_bytes(4, "big")
        for timestamp, offset in times
    )
