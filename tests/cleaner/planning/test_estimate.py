"""What the next clean of a partition is expected to cost and to free."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cleaner.planning.cleaner_state import FRESH, PartitionCleanerState
from cleaner.planning.estimate import CleanCost, Estimate, RatioCost, estimate, rates
from cleaner.planning.findings import ClockReading
from cleaner.planning.plan import assess
from cleaner.states import Idle
from config.topics.keys import TopicConfig
from tests.support.cleaner.key_indexes import small_records_are_indexed
from tests.support.cleaner.log_facts import facts, segment

NOW = ClockReading(10_000_000, 10_000)
# Groups of one segment each.
GENERATIONAL = TopicConfig(
    cleanup_policy=("compact",), varve_cleaner_strategy="generational", segment_bytes=150
)
WHOLE = TopicConfig(cleanup_policy=("compact",))


@pytest.fixture(scope="module", autouse=True)
def indexes_of_small_logs() -> Iterator[None]:
    with small_records_are_indexed():
        yield


def log_of(*sizes: int, checkpoint: int = 0, config: TopicConfig = GENERATIONAL):  # type: ignore[no-untyped-def]
    """A log of closed segments of ten offsets, and an empty active one."""
    segments = [segment(10 * at, 10 * at + 10, size) for at, size in enumerate(sizes)]
    end = 10 * len(sizes)
    return facts([*segments, segment(end, end, 0)], checkpoint=checkpoint, config=config)


def known(live: dict[int, int], size: int = 100, **fields: object) -> PartitionCleanerState:
    keys = {(base, size): live_bytes for base, live_bytes in live.items()}
    return replace(FRESH, records=1000, live=keys, **fields)  # type: ignore[arg-type]


def estimated(log, state: PartitionCleanerState, slack: float | None = None) -> Estimate:  # type: ignore[no-untyped-def]
    verdict = assess(log, Idle(), NOW, state)
    result = estimate(log, verdict, state, slack=slack)
    assert result is not None
    return result


def test_a_selective_clean_reads_and_writes_the_segments_with_the_most_garbage() -> None:
    state = known({0: 10, 10: 90, 20: 100, 30: 100})
    result = estimated(log_of(100, 100, 100, 100), state, slack=0.1)
    assert result.is_selective
    assert [group.is_rewritten for group in result.groups] == [True, False, False, False]
    assert result.cost == CleanCost(100, 10, 90)
    assert all(group.is_measured for group in result.groups)


def test_more_slack_never_costs_more_and_never_frees_more() -> None:
    state = known({0: 10, 10: 60, 20: 90, 30: 100})
    by_slack = estimated(log_of(100, 100, 100, 100), state, slack=0.3).by_slack
    assert [slack for slack, _ in by_slack] == [0.0, 0.1, 0.25, 0.3, 0.5, 1.0, 2.0]
    costs = [cost for _, cost in by_slack]
    assert costs == sorted(costs, key=lambda cost: -cost.freed_bytes)
    assert costs[0] == CleanCost(300, 160, 140)
    assert costs[-1] == CleanCost(0, 0, 0)


def test_a_group_without_live_records_is_not_read() -> None:
    state = known({0: 0, 10: 90, 20: 100})
    result = estimated(log_of(100, 100, 100), state, slack=0.1)
    assert result.groups[0].is_rewritten
    assert result.cost == CleanCost(0, 0, 100)


def test_a_segment_that_no_clean_has_read_is_read_for_its_keys_first() -> None:
    state = known({0: 100, 10: 100, 20: 100}, survivorship=0.25, observations=3)
    result = estimated(log_of(100, 100, 100, 100), state, slack=1.0)
    assert result.cost == CleanCost(100, 0, 0)
    last = result.groups[-1]
    assert (last.live_bytes, last.is_measured) == (25, False)


def test_a_clean_of_the_whole_log_reads_the_dirty_section_twice() -> None:
    config = replace(GENERATIONAL, varve_cleaner_strategy="dirty-ratio")
    state = replace(FRESH, survivorship=0.5, observations=1)
    result = estimated(log_of(100, 100, 100, checkpoint=20, config=config), state)
    assert not result.is_selective
    assert result.cost == CleanCost(200 + 2 * 100, 250, 50)
    assert result.by_slack == ()


def test_a_smaller_dirty_ratio_keeps_the_log_smaller_and_costs_more_for_each_byte() -> None:
    config = replace(
        GENERATIONAL, varve_cleaner_strategy="dirty-ratio", min_cleanable_dirty_ratio=0.25
    )
    state = replace(FRESH, survivorship=0.5, observations=1)
    result = estimated(log_of(100, 100, 100, checkpoint=20, config=config), state)
    assert [row.ratio for row in result.by_ratio] == [0.05, 0.1, 0.2, 0.25, 0.33, 0.5, 0.7]
    assert result.ratio == 0.25
    assert result.by_ratio[5] == RatioCost(0.5, 500, 250, 250 + 500, 250 + 125)
    logs = [row.log_bytes for row in result.by_ratio]
    assert logs == sorted(logs)
    reads = [(row.read_bytes or 0) / row.new_bytes for row in result.by_ratio]
    assert reads == sorted(reads, reverse=True)


def test_what_a_selective_clean_costs_at_another_ratio_is_not_known() -> None:
    state = known({0: 10, 10: 90, 20: 100, 30: 100}, observations=1)
    result = estimated(log_of(100, 100, 100, 100), state, slack=0.1)
    left = 400 - result.cost.freed_bytes
    new = left // 3  # a quarter of the log: half of it may be new or garbage, of which some stays
    assert result.by_ratio[4] == RatioCost(0.5, left + new, new, None, None)


def test_without_a_clean_or_a_live_byte_there_is_no_cost_by_ratio() -> None:
    assert estimated(log_of(100, 100), FRESH).by_ratio == ()
    nothing = known({0: 0, 10: 0}, observations=1)
    assert estimated(log_of(100, 100), nothing, slack=0.0).by_ratio == ()


def test_before_the_first_clean_nothing_is_known_to_be_garbage() -> None:
    result = estimated(log_of(100, 100), FRESH)
    assert result.cost.freed_bytes == 0
    assert not any(group.is_measured for group in result.groups)


def test_a_segment_with_the_first_dirty_offset_in_its_midst_is_not_estimated() -> None:
    """The checkpoint of a log that was truncated is anywhere, also in the active segment."""
    log = facts([segment(0, 10), segment(10, 30)], checkpoint=15, config=GENERATIONAL)
    result = estimated(log, FRESH)
    assert [(group.base_offset, group.next_offset) for group in result.groups] == [(0, 10)]


def test_a_log_without_a_dirty_segment_costs_nothing() -> None:
    for config in (WHOLE, GENERATIONAL):
        log = log_of(100, 100, checkpoint=20, config=config)
        result = estimated(log, known({0: 50, 10: 100}))
        assert result.cost == CleanCost(0, 0, 0)
        assert not any(group.is_rewritten for group in result.groups)


def test_without_a_closed_segment_there_is_no_estimate() -> None:
    log = facts([segment(0, 5, 100)], config=GENERATIONAL)
    assert estimate(log, assess(log, Idle(), NOW, FRESH), FRESH) is None


@pytest.mark.parametrize(
    ("read_limit", "write_limit", "moved", "seconds", "expected"),
    [
        (None, None, 0, 0.0, (20e6, 20e6)),
        (None, None, 500, 2.0, (250.0, 250.0)),
        (100, 1000, 500, 2.0, (100.0, 250.0)),
        (5, None, 0, 0.0, (5.0, 20e6)),
    ],
)
def test_the_rate_is_that_of_the_last_job_within_the_limits(
    read_limit: int | None,
    write_limit: int | None,
    moved: int,
    seconds: float,
    expected: tuple[float, float],
) -> None:
    assert rates(read_limit, write_limit, moved, seconds) == expected
    assert CleanCost(1000, 500, 0).seconds(100.0, 50.0) == 20.0
