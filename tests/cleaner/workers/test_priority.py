"""A worker's CPU priority: lowest, unless it lacks a core and falls behind, or is far too late."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from cleaner.workers.priority import ADJUST_SECONDS, LEVELS, Pace, Priorities, next_level, nice_of
from cleaner.workers.process import ProcessLink, spawn_command
from cleaner.workers.throttle import BrokerSide, Direction
from cleaner.workers.worker_pool import PoolWorker
from tests.support.cleaner.scheduler.cleaner_fakes import FakeLink

FLOOR = 64e6
NICE = 19


def pace(moved: float = 0.0, **changes: object) -> Pace:
    made = Pace(2.0, int(moved * 2), 0.0, 1.5, False)
    return made._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("level", "seen", "then"),
    [
        (0, pace(FLOOR / 2), 1),  # behind, and short of a core
        (1, pace(0), 2),
        (3, pace(0), 3),  # no higher than the broker
        (0, pace(FLOOR / 2, short_seconds=0.1), 0),  # slow, but not for want of a core
        (0, pace(FLOOR / 2, short_seconds=None), 1),  # not known here: then it is believed
        (0, pace(FLOOR / 2, waited_seconds=1.0), 0),  # held back by its budget
        (2, pace(FLOOR * 1.5), 2),  # it does what it should: it stays
        (2, pace(FLOOR * 2), 1),  # it does that easily
        (0, pace(FLOOR * 9), 0),
        (0, pace(FLOOR * 1.5, late=True), 2),  # far beyond its deadline
        (2, pace(FLOOR * 9, late=True), 2),
        (2, pace(0, late=True), 3),
    ],
)
def test_levels_rise_where_a_core_is_lacking_and_fall_where_it_is_easy(
    level: int, seen: Pace, then: int
) -> None:
    assert next_level(level, seen, FLOOR) == then


def test_the_lowest_level_is_the_setting_and_the_highest_the_brokers_own() -> None:
    assert [nice_of(level, NICE) for level in range(LEVELS + 1)] == [19, 12, 6, 0]


class Watched:
    """Two workers under one `Priorities`, and time."""

    def __init__(self) -> None:
        self.links = [FakeLink(0), FakeLink(1)]
        self.workers = [PoolWorker(link.index, link, BrokerSide(link.slots)) for link in self.links]
        self.priorities = Priorities(lambda: NICE)
        self.now = 0.0
        for link in self.links:
            BrokerSide(link.slots).grant(Direction.READ, 1 << 60)
            link.short_seconds = 0.0

    def look(self, moved: tuple[float, float], *, late: bool = False) -> list[int]:
        """Two seconds in which the workers read so many bytes a second, both short of a core."""
        for link, speed in zip(self.links, moved, strict=True):
            from_worker = link.slots
            from_worker[8] += int(speed * ADJUST_SECONDS)  # bytes read, as the worker counts them
            assert link.short_seconds is not None
            link.short_seconds += ADJUST_SECONDS
        self.now += ADJUST_SECONDS
        busy = [(worker, late) for worker in self.workers]
        self.priorities.adjust(self.now, busy, FLOOR)
        return [link.nice for link in self.links]


def test_each_worker_owes_its_share_of_the_floor_and_is_put_back_when_its_job_is_over() -> None:
    watched = Watched()
    watched.look((0, 0))  # the first look only takes note
    assert watched.look((FLOOR / 4, FLOOR / 2)) == [12, 19]
    assert watched.look((FLOOR / 4, FLOOR / 2)) == [6, 19]
    watched.priorities.rest(watched.workers[0])
    assert [link.nice for link in watched.links] == [19, 19]
    assert watched.priorities.levels == {}
    assert watched.look((0, FLOOR / 2)) == [19, 19]  # of a new job the first look takes note


def test_between_two_looks_nothing_is_judged() -> None:
    watched = Watched()
    watched.look((0, 0))
    watched.priorities.adjust(watched.now + 1.9, [(w, False) for w in watched.workers], FLOOR)
    assert [link.nices for link in watched.links] == [[], []]


def test_a_refusal_is_told_once_and_is_no_error() -> None:
    watched = Watched()
    for link in watched.links:
        link.refuses_nice = True
    with capture_logs() as lines:
        for _ in range(4):
            watched.look((0, 0))
    assert [line["event"] for line in lines] == ["worker priority not raised"]
    assert [link.nices for link in watched.links] == [[], []]
    assert watched.priorities.levels == {}
    watched.priorities.rest(watched.workers[0])


SLEEPER = [sys.executable, "-c", "import sys; sys.stdin.read(); import time; time.sleep(600)"]


async def test_the_priority_of_a_real_process_is_set_and_its_want_of_a_core_is_known() -> None:
    link: ProcessLink = await spawn_command(SLEEPER)
    try:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        for nice in (5, 19):
            link.set_nice(nice)
            assert os.getpriority(os.PRIO_PROCESS, link.pid) == min(19, own + nice)
        if sys.platform == "linux":
            assert link.short_of_core_seconds() is not None
        link.kill()
        await link.reap()
        link.set_nice(0)  # one that is gone is no error
        assert link.short_of_core_seconds() is None
    finally:
        link.kill()
        link.close()


def _may_raise_limits() -> bool:
    """CAP_SYS_RESOURCE, bit 24 of the capabilities in force."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next(line for line in lines if line.startswith("CapEff"))
    return bool(int(effective.split()[1], 16) >> 24 & 1)


RAISE_AS_NOBODY = """
import os, subprocess, sys
os.setgid(65534); os.setuid(65534)
child = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: os.nice(19))
try:
    os.setpriority(os.PRIO_PROCESS, child.pid, 0)
    print("allowed")
except PermissionError:
    print("refused")
finally:
    child.kill(); child.wait()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs root to become nobody"
)
@pytest.mark.parametrize(("limit", "answer"), [(0, "refused"), (20, "allowed")])
def test_a_limit_of_twenty_is_what_a_user_needs_to_raise_it(limit: int, answer: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_NICE)[1]
    if limit > before and not _may_raise_limits():
        pytest.skip("this root may not raise its limits")
    script = f"import resource; resource.setrlimit(resource.RLIMIT_NICE, ({limit}, {limit}))"
    done = subprocess.run(
        [sys.executable, "-c", script + RAISE_AS_NOBODY],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == answer
