"""How many of the records written at an age are still alive, from what cleans have counted. Pure.

Rules
- A segment spans as many offsets as records were written between its base and that of the next one.
  The last clean that decided its keys counted how many of them are left and alive.
- The age of a segment's records is the time from its newest record to the newest record of all
  counted segments: the last clean did not know more. Times are those of the records.
- Offsets of removed segments count in the segment before them, or in the first one. So records of
  segments that were removed or merged may count as younger or older than they are.
- Segments that no clean has counted are left out. Tombstones count as records that are alive.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from cleaner.host import LogFacts
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.planning.dirty_section import live_segments, newest_ms

_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
# The least age of each row.
AGES_MS: Final = (
    0,
    _MINUTE,
    10 * _MINUTE,
    _HOUR,
    6 * _HOUR,
    _DAY,
    7 * _DAY,
    30 * _DAY,
    90 * _DAY,
    365 * _DAY,
)


@dataclass(frozen=True, slots=True)
class SurvivalRow:
    """The records of one range of ages."""

    age_ms: int  # at least, and less than that of the next row
    written: int
    alive: int


def survival_curve(facts: LogFacts, state: PartitionCleanerState) -> tuple[SurvivalRow, ...]:
    """Return a row for each range of ages in which records were written; youngest first."""
    segments = live_segments(facts)[:-1]
    counted = [
        (segment, records)
        for segment in segments
        if (records := state.live_records_of(segment)) is not None
    ]
    if not counted:
        return ()
    now_ms = max(newest_ms(segment) for segment, _ in counted)
    written, alive = [0] * len(AGES_MS), [0] * len(AGES_MS)
    for segment, records in counted:
        place = bisect_right(AGES_MS, now_ms - newest_ms(segment)) - 1
        first = facts.log_start_offset if segment is segments[0] else segment.base_offset
        written[place] += max(records, segment.next_base_offset - first)
        alive[place] += records
    rows = zip(AGES_MS, written, alive, strict=True)
    return tuple(SurvivalRow(*row) for row in rows if row[1])
