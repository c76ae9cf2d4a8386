"""Users whose HTTP requests are refused for the throttle time of a quota."""

import pytest

from broker.quotas.muted_http_users import MUTED_MAX, MutedHttpUsers, ThrottledError
from tests.support.clocks.manual_clock import ManualClock


def test_a_muted_user_is_refused_until_the_time_is_over() -> None:
    clock = ManualClock(100.0)
    muted = MutedHttpUsers(clock)
    muted.mute("a", 5)
    muted.mute("a", 2)
    clock.now += 4
    with pytest.raises(ThrottledError) as refused:
        muted.check("a")
    assert refused.value.seconds == pytest.approx(1)
    muted.check("b")
    clock.now += 1
    muted.check("a")


def test_the_number_of_muted_users_is_bounded() -> None:
    clock = ManualClock(100.0)
    muted = MutedHttpUsers(clock)
    for number in range(MUTED_MAX + 1):
        muted.mute(f"u{number}", 60)
    muted.check("u0")
    with pytest.raises(ThrottledError):
        muted.check("u1")
    clock.now += 61
    muted.mute("new", 60)
    assert len(muted._until) == 1
