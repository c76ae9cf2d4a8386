"""What somebody outside of the broker may compact or read of a log, worded as a job. Pure.

Rules
- To compact is to do what the pool would do if the log were worth it: the same horizon, the same
  groups, the same checkpoint, whatever the ratio.
- To read is to see all that is decided: up to the high watermark, the last stable offset and the
  active segment. What lies below is as good as dirty: nobody says how clean it is.
- Damage is as in every job: it is left as it is.
- Work outside may take long. So its delete horizons count from the time by which its outputs have
  to be published, and outputs that come later are refused: their tombstones would be removed
  before delete.retention.ms is over.
"""

from typing import Final

from cleaner.host import JobInputs, LogFacts
from cleaner.job import CleanJob
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.planning.dirty_section import dirty_section, live_segments
from cleaner.planning.findings import Moment
from cleaner.planning.grouping import build_job, group_all
from config.settings import CleanerSettings

# A remote compaction may take as long as an offloaded job. The verification that follows reads
# everything, at this rate or faster.
VERIFY_BYTES_PER_SECOND: Final = 10_000_000
VERIFY_MS_MIN: Final = 600_000


def compaction_job(
    facts: LogFacts,
    inputs: JobInputs,
    settings: CleanerSettings,
    *,
    now: Moment,
    cleaner_state: PartitionCleanerState,
    job_id: str,
) -> tuple[CleanJob | None, int]:
    """The job of cleaning all that may be cleaned, and how many bytes of it are dirty.

    None where nothing below the horizon is dirty.
    """
    section = dirty_section(facts, now, cleaner_state)
    if section.dirty_bytes == 0:
        return None, 0
    size_bytes = section.clean_bytes + section.dirty_bytes
    verify_ms = max(VERIFY_MS_MIN, size_bytes * 1000 // VERIFY_BYTES_PER_SECOND)
    job = build_job(
        facts,
        inputs,
        settings,
        groups=group_all(facts, section.end_offset),
        first_dirty_offset=section.first_dirty_offset,
        clean_below=section.clean_below,
        expired_only=False,
        job_id=job_id,
        now_ms=now.wall_ms,
        work_ms=settings.offload.timeout_ms + verify_ms,
    )
    return job, section.dirty_bytes


def reading_job(
    facts: LogFacts,
    inputs: JobInputs,
    settings: CleanerSettings,
    *,
    decided_offset: int,
    now_ms: int,
    job_id: str,
) -> CleanJob | None:
    """The job that covers all closed segments below the offset from which on nothing is decided.

    None where there is none.
    """
    *closed, _ = live_segments(facts)
    ends = [s.next_base_offset for s in closed if s.next_base_offset <= decided_offset]
    if not ends:
        return None
    return build_job(
        facts,
        inputs,
        settings,
        groups=group_all(facts, ends[-1]),
        first_dirty_offset=facts.log_start_offset,
        clean_below=None,
        expired_only=False,
        job_id=job_id,
        now_ms=now_ms,
    )
