"""Build a job from a verdict: its segments and how they are grouped. Pure.

Groups are Kafka's (Cleaner.groupSegmentsBySize), with one more limit: with time-based retention, a
group spans at most a share of `retention.ms`. Retention removes a segment when its newest record
has expired, so all records of a merged segment wait for the newest one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, TypedDict, TypeVar

from cleaner.host import JobInputs, LogFacts
from cleaner.job import CleanJob, SourceSegment
from cleaner.planning.dirty_section import live_segments
from cleaner.planning.plan import Verdict, slack_of
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.format.compression import GZIP, LZ4, ZSTD
from storage.format.index import INTERVAL_BYTES_MAX
from storage.model import SegmentFacts, TopicPartition

T = TypeVar("T")

# Offsets inside a segment are stored as 32-bit differences to its base (offset index format).
RELATIVE_OFFSET_MAX: Final = (1 << 31) - 1
# 1 / the share of retention.ms by which merging may delay the removal of a record. segment.ms
# usually adds about a tenth as well.
SPAN_SHARE: Final = 10
# The slowest speed of an unlimited worker, for small compressed records.
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
    """Return the job for a verdict; None if there is nothing to clean.

    `work_ms_min` is the least expected duration, if an earlier attempt took too long.
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
    job = build_job(
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
    if verdict.is_selective or verdict.victims:
        job = replace(job, slack=slack_of(facts.config), victims=verdict.victims)
    by_index = verdict.strategy == "generational" and expired is None
    return replace(job, by_index=by_index, verify=settings.verify)


def expected_work_ms(groups: Sequence[Sequence[SegmentFacts]], rate: int | None) -> int:
    """Return how long a worker takes to read these segments twice, in whole minutes.

    `rate` is the budget in bytes per second, None if there is none. Most jobs take less than a
    minute: their delete horizons count from the planning time, as in Kafka.
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
    """Return the job over these groups, at least one.

    `work_ms` is the expected time until the publication.
    """
    end = groups[-1][-1].next_base_offset
    allows_for_work = facts.clock_trusted and facts.config.delete_retention_ms > 0 and work_ms > 0
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
        published_by_ms=now_ms + work_ms if allows_for_work else None,
    )


def check_job(
    facts: LogFacts, inputs: JobInputs, settings: CleanerSettings, *, job_id: str, now_ms: int
) -> CleanJob | None:
    """Return a job over all closed segments that may be cleaned, to check them; None without any.

    It is never run as a clean.
    """
    groups = [
        [segment]
        for segment in live_segments(facts)[:-1]
        if segment.next_base_offset <= facts.undecided_offset
    ]
    if not groups:
        return None
    return build_job(
        facts,
        inputs,
        settings,
        groups=groups,
        first_dirty_offset=facts.log_start_offset,
        clean_below=None,
        expired_only=False,
        job_id=job_id,
        now_ms=now_ms,
    )


def index_job(
    partition: TopicPartition,
    source: SourceSegment,
    config: TopicConfig,
    settings: CleanerSettings,
    *,
    directory: str,
    generation: str,
    hash_key: bytes,
    job_id: str,
) -> CleanJob:
    """Return a job that only writes the key index of a closed segment."""
    return CleanJob(
        partition=partition,
        directory=directory,
        generation=generation,
        job_id=job_id,
        groups=((source,),),
        first_dirty_offset=source.next_base_offset,
        end_offset=source.next_base_offset,
        log_start_offset=source.base_offset,
        log_end_offset_is_end=False,
        now_ms=0,
        drop_expired_tombstones=False,
        hash_key=hash_key,
        **job_settings(config, settings),
    )


def group_all(facts: LogFacts, end_offset: int) -> list[list[SegmentFacts]]:
    """Return groups of all segments below `end_offset`, the base of a segment."""
    config = facts.config
    sources = [s for s in live_segments(facts) if s.base_offset < end_offset]
    groups = group_segments(
        sources, config.segment_bytes, config.segment_index_bytes, span_ms_max(config)
    )
    assert not groups or groups[-1][-1].next_base_offset == end_offset, (facts, end_offset)
    return groups


class JobSettings(TypedDict):
    """The fields of a job that come from the settings of its topic and of the cleaner."""

    delete_retention_ms: int
    dedupe_buffer_bytes: int
    spill_bytes_max: int
    read_buffer_bytes: int
    decompressed_batch_bytes: int
    max_message_bytes: int
    index_interval_bytes: int
    segment_bytes: int
    compression_levels: tuple[tuple[int, int], ...]


def job_settings(config: TopicConfig, settings: CleanerSettings) -> JobSettings:
    """Return the settings of a job, for a log or a view."""
    return JobSettings(
        delete_retention_ms=config.delete_retention_ms,
        dedupe_buffer_bytes=settings.dedupe_buffer_bytes,
        spill_bytes_max=settings.spill_bytes_max,
        read_buffer_bytes=settings.read_buffer_bytes,
        decompressed_batch_bytes=config.varve_decompressed_batch_bytes,
        max_message_bytes=config.max_message_bytes,
        index_interval_bytes=min(config.index_interval_bytes, INTERVAL_BYTES_MAX),
        segment_bytes=config.segment_bytes,
        compression_levels=(
            (GZIP, config.compression_gzip_level),
            (LZ4, config.compression_lz4_level),
            (ZSTD, config.compression_zstd_level),
        ),
    )


def group_selected(facts: LogFacts, base_offsets: Sequence[int]) -> list[list[SegmentFacts]]:
    """Return groups of these closed segments; the segments of a group are neighbours."""
    selected = set(base_offsets)
    groups: list[list[SegmentFacts]] = []
    run: list[SegmentFacts] = []
    for segment in live_segments(facts):
        if segment.base_offset in selected:
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
    """Return the longest time span of a merged segment; None if there is no limit."""
    if not config.deletes or config.retention_ms < 0:
        return None
    return config.retention_ms // SPAN_SHARE


def group_segments(
    sources: Sequence[SegmentFacts],
    segment_bytes: int,
    index_bytes: int,
    span_ms: int | None = None,
) -> list[list[SegmentFacts]]:
    """Group neighbours that become one segment each, by their sizes before cleaning.

    A group never exceeds the size of a segment and its indexes, the 32 bits of a relative offset
    or the time `span_ms`. A single segment may exceed the size and the time.
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
    """Return the time span of the group with the segment added; 0 without records.

    It starts at the first batch: a merged segment keeps that time, so that groups do not grow a
    little with every clean.
    """
    filled = [facts for facts in (*group, segment) if facts.size_bytes > 0]
    if not filled:
        return 0
    newest = [
        facts.largest_timestamp_ms if facts.largest_timestamp_ms >= 0 else facts.last_modified_ms
        for facts in filled
    ]
    oldest = [
        facts.first_batch_timestamp_ms for facts in filled if facts.first_batch_timestamp_ms >= 0
    ]
    return max(newest) - min(oldest, default=min(newest))


def _in_reach(first: SegmentFacts, segment: SegmentFacts) -> bool:
    """Return whether the last offset can be stored relative to the base of the first segment.

    The last offset follows from the base of the next segment: an index may be stale or empty.
    """
    last_offset = segment.next_base_offset - 1
    return segment.size_bytes == 0 or last_offset - first.base_offset <= RELATIVE_OFFSET_MAX


def source_of(segment: SegmentFacts) -> SourceSegment:
    """Return a segment as a source of a job."""
    return SourceSegment(
        base_offset=segment.base_offset,
        next_base_offset=segment.next_base_offset,
        size_bytes=segment.size_bytes,
        last_modified_ms=segment.last_modified_ms,
        largest_timestamp_ms=segment.largest_timestamp_ms,
        content_id=segment.content_id,
    )


def group_adjacent(sized: Iterable[tuple[T, int]], target_bytes: int) -> tuple[tuple[T, ...], ...]:
    """Group adjacent items up to `target_bytes`, at least one item in each group."""
    groups: list[tuple[T, ...]] = []
    group: list[T] = []
    size = 0
    for item, size_bytes in sized:
        if group and size + size_bytes > target_bytes:
            groups.append(tuple(group))
            group, size = [], 0
        group.append(item)
        size += size_bytes
    if group:
        groups.append(tuple(group))
    return tuple(groups)
