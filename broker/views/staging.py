"""The sources of a view compaction: sections of the log and tails of segments."""

import os.path
from collections.abc import Sequence

from broker.views.view_partition import ViewPartition
from cleaner.planning.view_plan import ViewSection, view_section
from config.topics.keys import TopicConfig
from storage.format import filenames
from storage.format.batch import HEADER_BYTES, read_header
from storage.log.log import Log
from storage.model import SegmentFacts
from storage.segments.expiry import NO_LIMIT
from storage.swap.swap_journal import CleanedSegment
from storage.view.ledger import CopiedTail


def section_of(view: ViewPartition, horizon: int, *, end_offset: int = 1 << 62) -> ViewSection:
    """Return the closed part of the log after a horizon and below `end_offset`."""
    log = view.base.log
    return view_section(
        log.segment_facts(),
        log_start_offset=log.log_start_offset,
        undecided_offset=min(log.high_watermark, log.last_stable_offset, end_offset),
        horizon=horizon,
    )


def expires_soon(
    segment: SegmentFacts, segments: Sequence[SegmentFacts], config: TopicConfig, now_ms: int
) -> bool:
    """Return whether a segment has reached half of its retention, by time or by size.

    `segments` are Log.segment_facts.
    """
    if not config.deletes:
        return False
    stamp_ms = segment.largest_timestamp_ms
    if stamp_ms < 0:
        stamp_ms = segment.last_modified_ms
    following = sum(
        facts.size_bytes for facts in segments if facts.base_offset > segment.base_offset
    )
    by_time = config.retention_ms != NO_LIMIT and now_ms - stamp_ms >= config.retention_ms // 2
    by_size = config.retention_bytes != NO_LIMIT and following >= config.retention_bytes // 2
    return by_time or by_size


def tail_of(log: Log, segment: SegmentFacts, first_offset: int) -> CopiedTail | None:
    """Return the part of a segment from the batch with an offset on; None if it is empty.

    Raises StorageError if it is unreadable.
    """
    fetch_slice = log.reader.read(first_offset, 1, end_offset=log.high_watermark)
    if fetch_slice.file is None or fetch_slice.length == 0:
        return None
    name = filenames.parse_file_name(os.path.basename(fetch_slice.file.path))
    if name is None or name.base_offset != segment.base_offset:
        return None  # it begins in a later segment, which is used as a whole
    header = read_header(fetch_slice.file.pread(HEADER_BYTES, fetch_slice.position))
    return CopiedTail(
        fetch_slice.file, fetch_slice.position, segment.size_bytes, header.base_offset
    )


def facts_of_tail(segment: SegmentFacts, tail: CopiedTail) -> SegmentFacts:
    """Return the facts of a tail as a separate source."""
    return segment._replace(
        base_offset=tail.base_offset, size_bytes=tail.end_position - tail.position
    )


def facts_of_output(gone: Sequence[SegmentFacts], output: CleanedSegment) -> SegmentFacts:
    """Return an output as a source of the next round, instead of its own sources."""
    sizes = [file.size_bytes for file in output.files]
    return gone[-1]._replace(
        base_offset=output.base_offset,
        size_bytes=sizes[0],
        index_bytes=sizes[1],
        time_index_bytes=sizes[2],
        largest_timestamp_ms=max(facts.largest_timestamp_ms for facts in gone),
    )


def joined(sources: Sequence[SegmentFacts], section: ViewSection) -> tuple[SegmentFacts, ...]:
    """Return adjacent sources: each ends at the next one, the last one at the horizon."""
    if not sources:
        return ()
    ends = [*(source.base_offset for source in sources[1:]), section.horizon]
    return tuple(
        source._replace(next_base_offset=end) for source, end in zip(sources, ends, strict=True)
    )
