"""Which part of a log the next compaction of a view reads, and what it has missed."""

import pytest

from cleaner.planning.view_plan import view_section
from tests.support.cleaner.log_facts import segment


@pytest.mark.parametrize("log_start_offset", [0, 10, 20])
def test_what_retention_removed_behind_the_horizon_is_missed_whatever_the_log_start_is(
    log_start_offset: int,
) -> None:
    """After a crash on a full disk, the noted log start is below the first segment."""
    segments = [segment(20, 30), segment(30, 30)]
    section = view_section(
        segments, log_start_offset=log_start_offset, undecided_offset=30, horizon=10
    )
    assert section.missed == (10, 20)
    assert (section.first_dirty_offset, section.horizon) == (20, 30)


def test_a_first_compaction_misses_nothing() -> None:
    segments = [segment(20, 30), segment(30, 30)]
    assert view_section(segments, log_start_offset=0, undecided_offset=30, horizon=0).missed is None
