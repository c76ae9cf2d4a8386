"""Which share of the records written at an age is still alive."""

import random
from dataclasses import replace

from cleaner.planning.cleaner_state import FRESH, PartitionCleanerState
from cleaner.planning.survival_curve import AGES_MS, SurvivalRow, survival_curve
from tests.support.cleaner.log_facts import facts, segment

HOUR = 3_600_000
DAY = 24 * HOUR


def counted(records: dict[int, int], size: int = 100) -> PartitionCleanerState:
    """A state that knows the live records of the segments with these base offsets."""
    return replace(FRESH, live_records={(base, size): count for base, count in records.items()})


def log_of(*largest_ms: int, **changes: object):  # type: ignore[no-untyped-def]
    """A log of closed segments of 100 offsets with these newest records, and an active one."""
    closed = [
        segment(100 * at, 100 * at + 100, largest_ms=at_ms) for at, at_ms in enumerate(largest_ms)
    ]
    end = 100 * len(closed)
    return facts([*closed, segment(end, end + 50, 10, largest_ms=10**15)], **changes)  # type: ignore[arg-type]


def test_records_count_by_the_time_to_the_newest_counted_record() -> None:
    log = log_of(1000, 2 * DAY, 2 * DAY + 2 * HOUR, 2 * DAY + 2 * HOUR + 1)
    assert survival_curve(log, counted({0: 10, 100: 40, 200: 80, 300: 90})) == (
        SurvivalRow(0, 200, 170),
        SurvivalRow(HOUR, 100, 40),
        SurvivalRow(DAY, 100, 10),
    )


def test_a_segment_that_no_clean_has_counted_is_left_out() -> None:
    log = log_of(1000, 1000, 10**12)
    assert survival_curve(log, counted({0: 10, 100: 40})) == (SurvivalRow(0, 200, 50),)
    assert survival_curve(log, FRESH) == ()


def test_records_of_removed_segments_were_written_and_are_not_alive() -> None:
    log = facts([segment(300, 400), segment(400, 900), segment(900, 900, 0)], log_start=0)
    assert survival_curve(log, counted({300: 50, 400: 100})) == (SurvivalRow(0, 900, 150),)


def test_records_below_the_log_start_were_removed_by_retention_and_do_not_count() -> None:
    log = log_of(1000, 1000, log_start=30)
    assert survival_curve(log, counted({0: 20, 100: 40})) == (SurvivalRow(0, 170, 60),)


def test_every_counted_offset_is_in_one_row() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    times = [rng.randrange(2 * AGES_MS[-1]) for _ in range(rng.randint(1, 30))]
    records = {100 * at: rng.randint(0, 100) for at in range(len(times))}
    rows = survival_curve(log_of(*times), counted(records))
    assert sum(row.written for row in rows) == 100 * len(times)
    assert sum(row.alive for row in rows) == sum(records.values())
    assert all(row.alive <= row.written for row in rows)
    assert [row.age_ms for row in rows] == sorted({row.age_ms for row in rows})
