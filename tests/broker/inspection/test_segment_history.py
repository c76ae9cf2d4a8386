"""The past of segment lists: undoing the changes gives the earlier lists, within bounds."""

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from broker.event_loop import loop_turns
from broker.inspection import segment_history
from broker.inspection.segment_history import PastSegments, SegmentHistory
from cleaner.planning.dirty_section import DirtySection
from cleaner.planning.findings import Reason
from storage.log.log import Log
from storage.model import TopicPartition
from tests.support.storage.logs import NOW_MS, fill, open_log, publish
from tests.support.storage.memory_env import MemoryEnv

HOUR_MS = 3_600_000
ORDERS, OTHERS = TopicPartition("orders", 0), TopicPartition("others", 0)


@dataclass
class Served:
    """A partition, as far as the history looks at it."""

    log: Log
    partition: TopicPartition = ORDERS


@dataclass
class World:
    """Partitions, a clock, and their history."""

    seed: int
    served: list[Served] = field(default_factory=list)
    now_ms: int = NOW_MS
    dirty: tuple[int, int] | None = None
    job_id: str | None = None

    def __post_init__(self) -> None:
        self.env = MemoryEnv(seed=self.seed)
        self.served.append(Served(open_log(self.env)))
        self.history = SegmentHistory(
            lambda: self.served,  # type: ignore[arg-type, return-value]
            lambda _: self.section(),
            lambda _: self.job_id,
            lambda: self.now_ms,
        )

    @property
    def log(self) -> Log:
        return self.served[0].log

    def section(self) -> DirtySection | None:
        if self.dirty is None:
            return None
        return DirtySection(*self.dirty, Reason.ACTIVE_SEGMENT, 0, 0, None, 0)

    def past(self) -> PastSegments:
        return self.history.of(self.served[0])  # type: ignore[arg-type]

    def list(self) -> list[tuple[int, int]]:
        return [(s.base_offset, s.size_bytes) for s in self.log.segments]


def list_before(world: World, past: PastSegments, index: int) -> list[tuple[int, int]]:
    """Undo the changes from the newest down to number `index`, as the console does."""
    rows = {s.base_offset: s.size_bytes for s in world.log.segments.all}
    for change in reversed(past.changes[index:]):
        for base in change.added:
            rows.pop(base, None)
        rows |= {row.base_offset: row.size_bytes for row in change.removed}
    active = past.changes[index].before.active
    rows[active.base_offset] = active.size_bytes
    return sorted(rows.items())


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_undoing_the_changes_gives_every_list_that_was_observed(seed: int) -> None:
    print(f"seed {seed}")
    world, rng, lists = World(seed), random.Random(seed), []
    for _ in range(40):
        act = rng.choice(["fill", "fill", "roll", "clean"])
        if act == "fill":
            fill(world.log, rng.randrange(1, 12))
        elif act == "roll" and world.log.segments.active.size_bytes:
            world.log.roll(NOW_MS)
        elif act == "clean" and len(world.log.segments) > 2:
            sources = [s.base_offset for s in world.log.segments.closed[:2]]
            end = world.log.segments[2].base_offset
            publish(world.env, world.log, sources, range(sources[0], end, 2))
        world.now_ms += 5_000
        before = len(world.past().changes)
        lists[before:] = [world.list()]
    await world.history.observe()
    past = world.past()
    assert len(past.changes) > 5
    for index in range(len(past.changes)):
        assert list_before(world, past, index) == lists[index]


async def test_a_list_that_does_not_change_takes_nothing() -> None:
    world = World(4)
    for _ in range(3):
        fill(world.log, 1)  # the active segment grows
        await world.history.observe()
    assert (world.past().changes, world.history.units) == ((), 0)


async def test_where_the_dirty_section_began_and_ended_is_kept() -> None:
    world = World(5, dirty=(0, 50))
    await world.history.observe()
    for dirty in ((0, 100), (100, 100)):
        world.now_ms += 5_000
        world.dirty = dirty
        await world.history.observe()
    assert [
        (
            change.before.at_ms,
            change.before.first_dirty_offset,
            change.before.end_offset,
            change.removed,
            change.added,
        )
        for change in world.past().changes
    ] == [(NOW_MS, 0, 50, (), ()), (NOW_MS + 5_000, 0, 100, (), ())]


async def test_a_change_is_of_the_time_at_which_the_list_before_it_was_observed_last() -> None:
    world = World(12)
    for _ in range(3):
        world.now_ms += 5_000
        fill(world.log, 1)
        await world.history.observe()
    size_bytes = world.log.segments.size_bytes
    world.log.roll(NOW_MS)
    (change,) = world.past().changes
    assert (change.before.at_ms, change.before.active.size_bytes) == (world.now_ms, size_bytes)


async def test_a_change_names_the_clean_that_ran_when_the_list_before_it_was_observed() -> None:
    world = World(13)
    for job_id in (None, "job", "job", None):
        world.job_id = job_id
        await world.history.observe()
        fill(world.log, 1)
        world.log.roll(NOW_MS)
    assert [change.before.job_id for change in world.past().changes] == [None, "job", "job", None]


async def test_old_changes_go_and_the_past_begins_later() -> None:
    world = World(6)
    await world.history.observe()
    for _ in range(3):
        world.now_ms += HOUR_MS
        fill(world.log, 1)
        world.log.roll(NOW_MS)
        await world.history.observe()
    assert (len(world.past().changes), world.past().since_ms) == (3, NOW_MS)
    world.now_ms += 5 * HOUR_MS
    await world.history.observe()
    past = world.past()
    assert (len(past.changes), past.since_ms) == (1, NOW_MS + HOUR_MS)


async def test_the_oldest_changes_of_all_partitions_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment_history, "UNITS_MAX", 6)  # a roll takes three
    world = World(7)
    other = Served(open_log(world.env, folder=f"/data/{OTHERS}"), OTHERS)
    world.served.append(other)
    await world.history.observe()
    for log in (world.log, other.log, other.log):
        fill(log, 1)
        log.roll(NOW_MS)
        await world.history.observe()
    assert world.past().changes == ()
    assert len(world.history.of(other).changes) == 2  # type: ignore[arg-type]
    assert world.history.units == 6


async def test_a_deleted_or_reopened_partition_has_no_past() -> None:
    world = World(8)
    await world.history.observe()
    fill(world.log, 1)
    world.log.roll(NOW_MS)
    await world.history.observe()
    assert world.past().changes
    world.served[0] = Served(open_log(MemoryEnv(seed=9)))
    assert world.past().changes == ()
    world.served.clear()
    await world.history.observe()
    assert world.history.units == 0


async def test_the_partitions_of_a_deleted_topic_are_forgotten_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, passes = World(10), 0

    class Order(deque[TopicPartition]):
        """A deque that counts how often it is read."""

        def __iter__(self) -> Iterator[TopicPartition]:
            nonlocal passes
            passes += 1
            return super().__iter__()

    for number in range(5):
        name = TopicPartition("others", number)
        world.served.append(Served(open_log(world.env, folder=f"/data/{name}"), name))
    await world.history.observe()
    for served in world.served:
        fill(served.log, 1)
        served.log.roll(NOW_MS)
    await world.history.observe()
    monkeypatch.setattr(segment_history, "deque", Order)
    world.history._order = Order(world.history._order)
    del world.served[1:]
    await world.history.observe()
    assert passes == 1
    assert (list(world.history._order), world.history.units) == ([ORDERS], 3)


async def test_the_logs_of_deleted_topics_are_closed_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log closes its files with its last reference: a thousand of them took a second."""
    world, closed_in, turn = World(11), list[int](), 0

    class ClosingLog:
        segments = world.log.segments
        log_end_offset = 0

        def __del__(self) -> None:
            closed_in.append(turn)

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        asyncio.get_running_loop().call_soon(next_turn)

    world.served += [
        Served(ClosingLog(), TopicPartition("others", number))  # type: ignore[arg-type]
        for number in range(100)
    ]
    await world.history.observe()
    ticks = itertools.count()
    monkeypatch.setattr(
        loop_turns, "perf_counter", lambda: next(ticks) * loop_turns.TURN_SECONDS / 8
    )
    del world.served[1:]
    next_turn()
    await world.history.observe()
    assert len(closed_in) == 100
    assert max(Counter(closed_in).values()) <= 16
