"""When erasures are expected to be complete, and which are at risk."""

from typing import Any

from broker.erasure.forecast import Obstacle, PartitionWork, Risk, forecast, work_left

NOW_MS = 1_000_000


def part(seconds: float, deadline: float, **changes: Any) -> PartitionWork:
    """Work of some seconds, with a deadline some seconds from now."""
    return PartitionWork(
        deadline_ms=int(NOW_MS + 1000 * deadline),
        read_bytes=int(seconds * 100),
        write_bytes=0,
        read_rate=100.0,
        write_rate=100.0,
        **changes,
    )


def expected(*parts: PartitionWork) -> list[tuple[float | None, Risk | None]]:
    """The seconds from now until each is done, and its risk."""
    return [
        (None if each.expected_ms is None else (each.expected_ms - NOW_MS) / 1000, each.risk)
        for each in forecast(parts, NOW_MS)
    ]


def test_parts_take_turns_and_the_later_ones_wait_for_the_earlier_ones() -> None:
    assert expected(part(10, 60), part(20, 60)) == [(10.0, None), (30.0, None)]


def test_a_part_that_the_rate_does_not_allow_in_time_is_at_risk_before_its_deadline() -> None:
    assert expected(part(30, 60), part(40, 60)) == [(30.0, None), (70.0, Risk.RATE)]


def test_an_obstacle_with_an_end_delays_a_part_and_no_other_one() -> None:
    waiting = part(10, 60, obstacle=Obstacle(NOW_MS + 20_000))
    assert expected(waiting, part(10, 60)) == [(30.0, None), (20.0, None)]


def test_an_obstacle_that_ends_too_late_is_the_risk() -> None:
    waiting = part(10, 60, obstacle=Obstacle(NOW_MS + 55_000))
    assert expected(waiting) == [(65.0, Risk.OBSTACLE)]


def test_an_obstacle_without_a_known_end_is_a_risk_at_once() -> None:
    assert expected(part(10, 60, obstacle=Obstacle()), part(5, 60)) == [
        (None, Risk.OBSTACLE),
        (5.0, None),
    ]


def test_after_the_deadline_a_part_is_overdue() -> None:
    assert expected(part(1, -1)) == [(1.0, Risk.OVERDUE)]
    assert expected(part(1, -1, obstacle=Obstacle())) == [(None, Risk.OVERDUE)]


def test_the_work_left_shrinks_from_the_worst_case_to_the_last_search() -> None:
    before = work_left(1000, 0, is_searched=False, share_searched=0.5)
    found = work_left(1000, 100, is_searched=True, share_searched=0.0)
    last = work_left(1000, 0, is_searched=True, share_searched=0.25)
    assert (before, found, last) == ((3500, 1000), (2100, 100), (750, 0))
