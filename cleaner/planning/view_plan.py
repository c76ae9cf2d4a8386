"""Plan the compaction of a view. Pure.

Rules
- The sources are the present ledger, which is clean, and the log's closed segments from its horizon
  on, which are dirty. The engine sees them as one log.
- The new horizon is the base of a segment, at most the high watermark, the last stable offset and
  the active segment's base.
- Records that retention removed between the old horizon and the log start are lost to the view.
  That is reported, and the compaction continues.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cleaner.job import CleanJob, ViewOrder, ViewRules
from cleaner.planning.grouping import group_segments, job_settings, source_of
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.format.txn_index import TxnIndexEntry
from storage.model import SegmentFacts, TopicPartition
from storage.swap.swap_journal import CleanedFile


@dataclass(frozen=True, slots=True)
class ViewSection:
    """The offsets [first dirty, horizon) of the log and their segments.

    The first segment may begin below `first_dirty_offset`.
    """

    segments: tuple[SegmentFacts, ...]
    first_dirty_offset: int
    horizon: int
    missed: tuple[int, int] | None  # [first, end) that retention removed

    @property
    def size_bytes(self) -> int:
        """Return the size of the segments."""
        return sum(segment.size_bytes for segment in self.segments)

    def from_batch(self, base_offset: int, horizon: int) -> "ViewSection":
        """Return the section with the whole of its first batch. `horizon` is that of the ledger.

        DeleteRecords may set the log start within a batch. Its earlier records are read with it, so
        they are ranked: otherwise they would follow the ledger's records of their keys unranked.
        """
        first = max(horizon, min(base_offset, self.first_dirty_offset))
        missed = (horizon, first) if self.missed is not None and horizon < first else None
        return replace(self, first_dirty_offset=first, missed=missed)


def view_section(
    segments: Sequence[SegmentFacts], *, log_start_offset: int, undecided_offset: int, horizon: int
) -> ViewSection:
    """Return the section after `horizon` (0 without a ledger). `segments`: Log.segment_facts.

    Its horizon is the present one if there is nothing to do.
    """
    # The cleaner removes nothing after the horizon. After a crash on a full disk, the log start
    # may be below the segments that retention has left.
    left = max(log_start_offset, segments[0].base_offset)
    first = max(horizon, left)
    missed = (horizon, left) if 0 < horizon < left else None
    closed = [
        segment
        for segment in segments[:-1]
        if segment.next_base_offset <= undecided_offset and segment.next_base_offset > first
    ]
    end = closed[-1].next_base_offset if closed else horizon
    return ViewSection(tuple(closed), first, end, missed)


@dataclass(frozen=True, slots=True)
class ViewRound:
    """One job of a view compaction; a full map makes several rounds necessary."""

    partition: TopicPartition
    directory: str  # of the compaction, with all sources
    generation: str
    job_id: str
    sources: tuple[SegmentFacts, ...]  # neighbours, oldest first
    first_dirty_offset: int
    horizon: int
    log_start_offset: int
    now_ms: int
    hash_key: bytes
    aborted: Sequence[TxnIndexEntry]
    deleted_keys: CleanedFile | None  # from earlier compactions, in this one's folder
    clock_trusted: bool  # False: no deleted key expires


def view_order(config: TopicConfig, deleted_keys: CleanedFile | None) -> ViewOrder | None:
    """Return the order of a key's records; None for their offsets."""
    if config.varve_view_strategy == "offset":
        return None
    by_header = config.varve_view_strategy == "header"
    header = config.varve_view_version_header.encode() if by_header else None
    return ViewOrder(header, deleted_keys)


def stages_of(job: CleanJob) -> dict[str, int]:
    """Return the bytes that each stage of a round reads, in order."""
    sources = [source for group in job.groups for source in group]
    first = job.first_dirty_offset
    below = sum(source.size_bytes for source in sources if source.base_offset < first)
    return {
        "map": sum(source.size_bytes for source in sources if source.next_base_offset > first),
        "rank": 0 if job.order is None else below,
        "rewrite": sum(source.size_bytes for source in sources),
    }


def view_job(part: ViewRound, config: TopicConfig, settings: CleanerSettings) -> CleanJob:
    """Return the engine's job for a round."""
    groups = group_segments(part.sources, config.segment_bytes, config.segment_index_bytes)
    return CleanJob(
        partition=part.partition,
        directory=part.directory,
        generation=part.generation,
        job_id=part.job_id,
        groups=tuple(tuple(source_of(segment) for segment in group) for group in groups),
        first_dirty_offset=part.first_dirty_offset,
        end_offset=part.horizon,
        log_start_offset=part.log_start_offset,
        log_end_offset_is_end=False,
        now_ms=part.now_ms,
        drop_expired_tombstones=part.clock_trusted,
        hash_key=part.hash_key,
        **job_settings(config, settings),
        aborted=part.aborted,
        view=ViewRules(
            keep_keyless=config.varve_view_null_key == "keep",
            order=view_order(config, part.deleted_keys),
        ),
    )
