"""Jobs, groups and reports for tests of what carries them."""

from collections.abc import Iterable
from dataclasses import replace

from cleaner.job import CleanedGroup, CleanJob, CleanReport, Damage, SourceSegment
from storage.model import TopicPartition

T0 = TopicPartition("t", 0)


def job(partition: TopicPartition = T0, **changes: object) -> CleanJob:
    made = CleanJob(
        partition=partition,
        directory=f"/data/{partition}",
        generation="boot-1",
        job_id="run-1",
        groups=((SourceSegment(0, 10, 100, 1000, 1000),),),
        first_dirty_offset=0,
        end_offset=10,
        log_start_offset=0,
        log_end_offset_is_end=False,
        now_ms=1000,
        delete_retention_ms=1000,
        drop_expired_tombstones=True,
        hash_key=bytes(16),
        dedupe_buffer_bytes=1 << 20,
        read_buffer_bytes=1 << 16,
        decompressed_batch_bytes=1 << 20,
        max_message_bytes=1 << 20,
        index_interval_bytes=4096,
        segment_bytes=1 << 20,
        compression_levels=((1, -1),),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def group_of(job: CleanJob, index: int = 0) -> CleanedGroup:
    """The job's group, half of it left, with nothing on disk."""
    sources = job.groups[index]
    size_bytes = sum(source.size_bytes for source in sources)
    return CleanedGroup(
        source_base_offsets=tuple(source.base_offset for source in sources),
        output=None,
        bytes_before=size_bytes,
        bytes_after=size_bytes // 2,
        records_before=10,
        records_after=5,
    )


def report_of(
    job: CleanJob, *, damaged: Iterable[tuple[str, int, str]] = (), **changes: object
) -> CleanReport:
    """Return the report of a successful job, with these changes."""
    size_bytes = sum(source.size_bytes for group in job.groups for source in group)
    made = CleanReport(
        partition=job.partition,
        generation=job.generation,
        job_id=job.job_id,
        next_dirty_offset=job.end_offset,
        groups=len(job.groups),
        bytes_read=size_bytes,
        bytes_written=size_bytes // 2,
        bytes_before=size_bytes,
        bytes_after=size_bytes // 2,
        records_before=10,
        records_after=5,
        tombstones_kept=0,
        tombstones_removed=0,
        keys_indexed=5,
        map_full=False,
        map_seconds=0.5,
        rewrite_seconds=0.5,
        passes=2,
        damaged=tuple(Damage(*damage) for damage in damaged),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


GROUP = group_of(job())
REPORT = report_of(job())
