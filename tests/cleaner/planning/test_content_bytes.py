"""Live, dead and unresolved bytes of a log, from what cleans have learned."""

from cleaner.planning.cleaner_state import FRESH, PartitionCleanerState
from cleaner.planning.content_bytes import content_bytes
from tests.support.cleaner.log_facts import even, facts

LOG = facts(even(5))
SEGMENTS = LOG.segments


def test_before_the_first_clean_all_bytes_are_unresolved() -> None:
    assert content_bytes(LOG, FRESH) == (0, 0, sum(s.size_bytes for s in SEGMENTS))


def test_what_a_clean_has_counted_is_live_or_dead() -> None:
    first, second = SEGMENTS[0], SEGMENTS[1]
    live = {
        (first.base_offset, first.size_bytes): 30,
        (second.base_offset, second.size_bytes): second.size_bytes,
        (second.base_offset, second.size_bytes + 1): 7,  # another content of the segment
    }
    found = content_bytes(LOG, PartitionCleanerState(live=live))
    assert found.live == 30 + second.size_bytes
    assert found.dead == first.size_bytes - 30
    assert sum(found) == sum(s.size_bytes for s in SEGMENTS)


def test_segments_below_the_log_start_offset_do_not_count() -> None:
    log = facts(even(5), log_start=SEGMENTS[2].base_offset)
    assert sum(content_bytes(log, FRESH)) == sum(s.size_bytes for s in SEGMENTS[2:])
