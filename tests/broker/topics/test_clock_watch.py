"""When wall time may be believed."""

from broker.topics.clock_watch import CONFIRM_MS, JUMP_MS, ClockWatch


def test_a_clock_that_runs_evenly_is_trusted() -> None:
    clock = ClockWatch(1_000_000, 0.0)
    assert clock.check(1_000_000 + 5000, 5000.0) == 0
    assert clock.trusted(5000.0)


def test_a_jump_either_way_suspends_trust_until_it_has_held() -> None:
    for jump in (10 * JUMP_MS, -10 * JUMP_MS):
        clock = ClockWatch(1_000_000_000, 0.0)
        assert clock.check(1_000_000_000 + jump, 0.0) == jump
        assert not clock.trusted(CONFIRM_MS - 1)
        assert clock.check(1_000_000_000 + jump + CONFIRM_MS, float(CONFIRM_MS)) == 0
        assert clock.trusted(float(CONFIRM_MS))


def test_small_corrections_are_no_jump() -> None:
    clock = ClockWatch(1_000_000, 0.0)
    assert clock.check(1_000_000 + JUMP_MS, 0.0) == 0
    assert clock.trusted(0.0)
