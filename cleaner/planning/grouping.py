"""From a verdict to a job: which segments are read, and which of them become one. Pure.

Groups are Kafka's (Cleaner.groupSegmentsBySize), with one more bound: of a topic that retention by
time applies to, a group spans no more than a share of `retention.ms`. Retention removes a segment
when its newest record has expired, so what is merged waits for the newest of all.
"""

from collections.abc import Sequence
from typing import Final, TypedDict

from cleaner.host import JobInputs, LogFacts
from cleaner.job import CleanJob, SourceSegment
from cleaner.planning.dirty_section import live_segments
from cleaner.planning.plan import Verdict
from config.settings import CleanerSettings
from config.topic_keys import TopicConfig
from storage.format.compression import GZIP, LZ4, ZSTD
from storage.segments.retention import SegmentFacts

# Offsets inside a segment are stored as 32-bit differences to its base (offset index format).
RELATIVE_OFFSET_MAX: Final = (1 << 31) - 1
# Of retention.ms: how long merging may keep a record beyond its time. A tenth is what a segment's
# own life (segment.ms) usually adds as well.
SPAN_SHARE: Final = 10
# What a worker reads at least where nothing else limits it: one of small compressed records.
WORKER_BYTES_PER_SECOND: Final = 20_000_000


def plan_job(
    facts: LogFacts,
    verdict: Verdict,
    inputs: JobInputs,
    settings: CleanerSettings,
    *,
    job_id: str,
    now_ms: int,
    work_ms_min: int = 0,
) -> CleanJob | None:
    """The job that a verdict asks for; None if there is nothing to clean.

    It is expected to take `work_ms_min` at least: an earlier attempt took longer than expected.
    """
    section, expired = verdict.section, verdict.expired
    if not verdict.to_clean or section is None:
        return None
    if expired is None:
        first_dirty, end = section.first_dirty_offset, section.end_offset
        groups = group_all(facts, end)
    else:
        groups = group_selected(facts, expired.base_offsets)
        first_dirty = end = groups[-1][-1].next_base_offset if groups else 0
    assert groups, verdict
    return build_job(
        facts,
        inputs,
        settings,
        groups=groups,
        first_dirty_offset=first_dirty,
        clean_below=section.clean_below,
        expired_only=expired is not None,
        job_id=job_id,
        now_ms=now_ms,
        work_ms=max(work_ms_min, expected_work_ms(groups, settings.read_bytes_per_second)),
    )


def expected_work_ms(groups: Sequence[Sequence[SegmentFacts]], rate: int | None) -> int:
    """Return how long a worker takes to read these segments twice, in whole minutes.

    `rate` is the budget in bytes per second, None if there is none. Most jobs take less than a
    minute: what they stamp, they stamp as Kafka does, by the time at which they were planned.
    """
    size_bytes = sum(segment.size_bytes for group in groups for segment in group)
    bytes_per_second = min(rate or WORKER_BYTES_PER_SECOND, WORKER_BYTES_PER_SECOND)
    return 2 * size_bytes // bytes_per_second // 60 * 60_000


def build_job(
    facts: LogFacts,
    inputs: JobInputs,
    settings: CleanerSettings,
    *,
    groups: Sequence[Sequence[SegmentFacts]],
    first_dirty_offset: int,
    clean_below: int | None,
    expired_only: bool,
    job_id: str,
    now_ms: int,
    work_ms: int = 0,
) -> CleanJob:
    """The job over these groups of the log, which are not none.

    `work_ms` is the time that may pass until all of it is published.
    """
    end = groups[-1][-1].next_base_offset
    promises = facts.clock_trusted and facts.config.delete_retention_ms > 0 and work_ms > 0
    return CleanJob(
        partition=facts.partition,
        directory=facts.directory,
        generation=facts.generation,
        job_id=job_id,
        groups=tuple(tuple(source_of(segment) for segment in group) for group in groups),
        first_dirty_offset=first_dirty_offset,
        end_offset=end,
        log_start_offset=facts.log_start_offset,
        log_end_offset_is_end=end == facts.log_end_offset,
        now_ms=now_ms,
        drop_expired_tombstones=facts.clock_trusted,
        hash_key=inputs.hash_key,
        **job_settings(facts.config, settings),
        last_records=inputs.last_records,
        aborted=inputs.aborted,
        expired_only=expired_only,
        clean_below=clean_below,
        published_by_ms=now_ms + work_ms if promises else None,
    )


def group_all(facts: LogFacts, end_offset: int) -> list[list[SegmentFacts]]:
    """Groups of all segments below an offset, a segment's base."""
    config = facts.config
    sources = [s for s in live_segments(facts) if s.base_offset < end_offset]
    groups = group_segments(
        sources, config.segment_bytes, config.segment_index_bytes, span_ms_max(config)
    )
    assert not groups or groups[-1][-1].next_base_offset == end_offset, (facts, end_offset)
    return groups


class JobSettings(TypedDict):
    """What a job takes from the settings of its topic and of the cleaner."""

    delete_retention_ms: int
    dedupe_buffer_bytes: int
    read_buffer_bytes: int
    decompressed_batch_bytes: int
    max_message_bytes: int
    index_interval_bytes: int
    segment_bytes: int
    compression_levels: tuple[tuple[int, int], ...]


def job_settings(config: TopicConfig, settings: CleanerSettings) -> JobSettings:
    """The same for a clean and for a view."""
    return JobSettings(
        delete_retention_ms=config.delete_retention_ms,
        dedupe_buffer_bytes=settings.dedupe_buffer_bytes,
        read_buffer_bytes=settings.read_buffer_bytes,
        decompressed_batch_bytes=config.varve_decompressed_batch_bytes,
        max_message_bytes=config.max_message_bytes,
        index_interval_bytes=config.index_interval_bytes,
        segment_bytes=config.segment_bytes,
        compression_levels=(
            (GZIP, config.compression_gzip_level),
            (LZ4, config.compression_lz4_level),
            (ZSTD, config.compression_zstd_level),
        ),
    )


def group_selected(facts: LogFacts, base_offsets: Sequence[int]) -> list[list[SegmentFacts]]:
    """Groups of some of the log's closed segments; those of one group are neighbours."""
    requested = set(base_offsets)
    groups: list[list[SegmentFacts]] = []
    run: list[SegmentFacts] = []
    for segment in live_segments(facts):
        if segment.base_offset in requested:
            run.append(segment)
        elif run:
            groups += group_segments(
                run,
                facts.config.segment_bytes,
                facts.config.segment_index_bytes,
                span_ms_max(facts.config),
            )
            run = []
    assert not run, "the active segment is never cleaned"
    return groups


def span_ms_max(config: TopicConfig) -> int | None:
    """How much time the records of a merged segment may span; None: any."""
    if not config.deletes or config.retention_ms < 0:
        return None
    return config.retention_ms // SPAN_SHARE


def group_segments(
    sources: Sequence[SegmentFacts],
    segment_bytes: int,
    index_bytes: int,
    span_ms: int | None = None,
) -> list[list[SegmentFacts]]:
    """Neighbours that become one segment each, by their sizes before cleaning.

    A group never outgrows a segment's file, its indexes, the 32 bits of a relative offset or the
    time `span_ms`; the first of a group is taken whatever its size and its own span.
    """
    groups: list[list[SegmentFacts]] = []
    log = index = time_index = 0
    for segment in sources:
        log += segment.size_bytes
        index += segment.index_bytes
        time_index += segment.time_index_bytes
        fits = log <= segment_bytes and index <= index_bytes and time_index <= index_bytes
        fits = fits and (span_ms is None or not groups or _span_ms(groups[-1], segment) <= span_ms)
        if groups and fits and _in_reach(groups[-1][0], segment):
            groups[-1].append(segment)
        else:
            groups.append([segment])
            log, index = segment.size_bytes, segment.index_bytes
            time_index = segment.time_index_bytes
    return groups


def _span_ms(group: Sequence[SegmentFacts], segment: SegmentFacts) -> int:
    """From the first record to the newest one, if the segment were added. Nothing spans no time.

    It counts from the first batch, not from the newest record of the first segment: a merged
    segment keeps its first batch's time, so that it does not grow a little with every clean.
    """
    filled = [facts for facts in (*group, segment) if facts.size_bytes > 0]
    if not filled:
        return 0
    newest = [
        facts.largest_timestamp_ms if facts.largest_timestamp_ms >= 0 else facts.last_modified_ms
        for facts in filled
    ]
    begun = [
        facts.first_batch_timestamp_ms for facts in filled if facts.first_batch_timestamp_ms >= 0
    ]
    return max(newest) - min(begun, default=min(newest))


def _in_reach(first: SegmentFacts, segment: SegmentFacts) -> bool:
    """Whether the last offset can be stored relative to the first base. Nothing needs no storing.

    The last offset is taken from the base of the segment after it: an index may be stale or empty.
    """
    last_offset = segment.next_base_offset - 1
    return segment.size_bytes == 0 or last_offset - first.base_offset <= RELATIVE_OFFSET_MAX


def source_of(segment: SegmentFacts) -> SourceSegment:
    """A segment as a job names it."""
    return SourceSegment(
        base_offset=segment.base_offset,
        next_base_offset=segment.next_base_offset,
        size_bytes=segment.size_bytes,
        last_modified_ms=segment.last_modified_ms,
        largest_timestamp_ms=segment.largest_timestamp_ms,
    )
