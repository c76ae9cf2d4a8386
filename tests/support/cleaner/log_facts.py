"""What the planner knows of logs: of real ones, and of invented ones."""

import os.path
from collections.abc import Sequence
from dataclasses import replace

from cleaner.host import LogFacts
from config.topics.keys import TopicConfig
from storage.log.log import Log
from storage.model import SegmentFacts, TopicPartition

COMPACTED = TopicConfig(cleanup_policy=("compact",))
T0 = TopicPartition("t", 0)


def facts_of(log: Log, checkpoint: int | None, **changes: object) -> LogFacts:
    made = LogFacts(
        partition=log.partition,
        directory=log.directory,
        config=log.config,
        segments=log.segment_facts(),
        log_start_offset=log.log_start_offset,
        log_end_offset=log.log_end_offset,
        undecided_offset=min(log.high_watermark, log.last_stable_offset),
        checkpoint_offset=checkpoint,
        generation=log.generation,
        topic_id=log.topic_id,
        data_directory=os.path.dirname(log.directory),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def segment(
    base: int,
    next_base: int,
    size_bytes: int = 100,
    *,
    first_ms: int = 1000,
    largest_ms: int | None = None,
    modified_ms: int = 1000,
    index_bytes: int = 10,
    time_index_bytes: int = 10,
    has_transactions: bool = False,
) -> SegmentFacts:
    return SegmentFacts(
        base_offset=base,
        next_base_offset=next_base,
        size_bytes=size_bytes,
        index_bytes=index_bytes,
        time_index_bytes=time_index_bytes,
        largest_timestamp_ms=first_ms if largest_ms is None else largest_ms,
        first_batch_timestamp_ms=first_ms,
        last_modified_ms=modified_ms,
        has_transactions=has_transactions,
        files=(f"{base:020}.log",),
    )


def facts(
    segments: Sequence[SegmentFacts],
    *,
    partition: TopicPartition = T0,
    checkpoint: int | None = None,
    log_start: int | None = None,
    undecided: int | None = None,
    config: TopicConfig = COMPACTED,
    **changes: object,
) -> LogFacts:
    end = segments[-1].next_base_offset if segments else 0
    made = LogFacts(
        partition=partition,
        directory=f"/data/{partition}",
        config=config,
        segments=tuple(segments),
        log_start_offset=log_start if log_start is not None else _first(segments),
        log_end_offset=end,
        undecided_offset=end if undecided is None else undecided,
        checkpoint_offset=checkpoint,
        generation="boot-1",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def _first(segments: Sequence[SegmentFacts]) -> int:
    return segments[0].base_offset if segments else 0


def even(count: int, *, size_bytes: int = 100, active_bytes: int = 50) -> list[SegmentFacts]:
    """`count` closed segments of ten offsets each, and an active one."""
    closed = [segment(10 * i, 10 * i + 10, size_bytes) for i in range(count)]
    return [*closed, segment(10 * count, 10 * count + 5, active_bytes)]
