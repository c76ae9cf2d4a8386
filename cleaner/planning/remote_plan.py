"""Build the jobs of remote compactions and of remote readers. Pure.

Rules
- A compaction job is the job that the pool would run, regardless of the dirty ratio.
- A reading job covers all decided records: below the high watermark, the last stable offset and
  the active segment. All of them count as dirty.
- Damaged segments stay unchanged, as in every job.
- Remote work may take long. Delete horizons count from the deadline of the publication, and later
  outputs are refused: their tombstones would be removed before delete.retention.ms has passed.
"""

from typing import Final

from cleaner.host import JobInputs, LogFacts
from cleaner.job import CleanJob
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.planning.dirty_section import dirty_section, live_segments
from cleaner.planning.findings import ClockReading
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
    now: ClockReading,
    cleaner_state: PartitionCleanerState,
    job_id: str,
) -> tuple[CleanJob | None, int]:
    """Return the job that cleans all that can be cleaned, and its dirty bytes.

    The job is None if nothing cleanable is dirty.
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
    """Return the job over all closed segments below `decided_offset`; None if there are none."""
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
