"""Deadlines of members under a clock that tests move."""

from broker.groups.member_deadlines import MemberDeadlines
from tests.support.clocks.virtual_clock import VirtualClock


class Deadlines:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.expired: list[tuple[float, tuple[str, ...]]] = []
        self.members = MemberDeadlines(self.clock, self._note)

    def _note(self, member_ids: tuple[str, ...]) -> None:
        self.expired.append((self.clock.elapsed_ms, member_ids))


async def test_each_member_expires_at_its_time_and_equal_times_together() -> None:
    deadlines = Deadlines()
    deadlines.members.start({"late": 300, "a": 200, "b": 200})
    deadlines.members.start({"early": 100})
    assert deadlines.clock.running == 1, "one timer for all members"
    await deadlines.clock.advance(1_000)
    assert deadlines.expired == [(100, ("early",)), (200, ("a", "b")), (300, ("late",))]
    assert deadlines.clock.running == 0
    assert "a" not in deadlines.members


async def test_a_deadline_that_starts_again_counts_from_then() -> None:
    deadlines = Deadlines()
    deadlines.members.start({"a": 100, "b": 100})
    await deadlines.clock.advance(60)
    deadlines.members.start({"a": 100})
    await deadlines.clock.advance(1_000)
    assert deadlines.expired == [(100, ("b",)), (160, ("a",))]


async def test_a_shorter_deadline_moves_the_timer_forward() -> None:
    deadlines = Deadlines()
    deadlines.members.start({"a": 1_000})
    deadlines.members.start({"a": 10})
    await deadlines.clock.advance(2_000)
    assert deadlines.expired == [(10, ("a",))]


async def test_a_deadline_that_is_stopped_does_not_end() -> None:
    deadlines = Deadlines()
    deadlines.members.start({"a": 100, "b": 200})
    deadlines.members.stop(["a", "unknown"])
    await deadlines.clock.advance(1_000)
    assert deadlines.expired == [(200, ("b",))]
    deadlines.members.start({"a": 100})
    deadlines.members.stop(["a"])
    assert deadlines.clock.running == 0


class Restarted(Deadlines):
    def _note(self, member_ids: tuple[str, ...]) -> None:
        self.members.start(dict.fromkeys(member_ids, 100))


async def test_members_may_start_again_while_others_expire() -> None:
    again = Restarted()
    again.members.start({"a": 100})
    await again.clock.advance(350)
    assert "a" in again.members
    again.members.close()
    assert again.clock.running == 0
