"""Budgets of read and written bytes: never more than rate x window + burst, never much less."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.host import Foreground
from cleaner.job import CleanAbortedError
from cleaner.workers.spare_capacity import KEEP_UP
from cleaner.workers.throttle import (
    BURST_SECONDS,
    GRANT_SHARE_MAX,
    NAP_SECONDS,
    TOP_UP_SECONDS,
    BrokerSide,
    Budget,
    Direction,
    IoTokenBucket,
    SharedMemory,
    Throttle,
    WorkerSide,
    new_memory,
    split_grants,
)
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.cleaner.scheduler.pool_harness import (
    SETTINGS,
    PoolHarness,
    run_scenario,
    until_job,
)
from tests.support.clocks.manual_clock import ManualClock
from tests.support.draws import cases

READ, WRITE = Direction.READ, Direction.WRITE


@dataclass
class Worker:
    """A worker in virtual time: it spends what it is granted at each of its steps."""

    clock: ManualClock
    charges: list[int]
    step_seconds: float
    memory: SharedMemory = field(default_factory=SharedMemory)
    next_step: float = 0.0
    left: int = 0
    log: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.broker = BrokerSide(self.memory.slots)
        self.worker = WorkerSide(self.memory.slots, 1, lambda seconds: self._give_up())

    def _give_up(self) -> None:
        raise CleanAbortedError

    def step(self) -> None:
        before = self.broker.spent(READ)
        try:
            self.worker.charge(READ, self.left or self.charges[0])
            self.charges.append(self.charges.pop(0))
            self.left = 0
        except CleanAbortedError:
            want = self.left or self.charges[0]
            self.left = want - (self.broker.spent(READ) - before)
        self.log.append((self.clock.now, self.broker.spent(READ) - before))
        self.next_step += self.step_seconds


def run(rate: float, workers: list[Worker], ticks: list[float], seconds: float) -> float:
    clock = workers[0].clock
    budget = Budget(READ, rate, 0.0)
    for index, worker in enumerate(workers):
        budget.join(index, worker.broker)
    next_tick, tick = 0.0, 0
    while clock.now < seconds:
        clock.now = min([next_tick, *(w.next_step for w in workers)])
        if clock.now == next_tick:
            budget.top_up(clock.now)
            next_tick += ticks[tick % len(ticks)]
            tick += 1
        for worker in workers:
            if worker.next_step == clock.now:
                worker.step()
    return clock.now


@settings(max_examples=cases(few=12, many=60), deadline=None)
@given(
    rate=st.integers(500, 50_000),
    shapes=st.lists(
        st.tuples(
            st.lists(st.integers(1, 20_000), min_size=1, max_size=6),
            st.sampled_from([0.003, 0.02, 0.11, 0.9]),
        ),
        min_size=1,
        max_size=4,
    ),
    ticks=st.lists(st.sampled_from([0.05, 0.05, 0.2, 1.7]), min_size=1, max_size=5),
)
def test_no_window_sees_more_than_its_rate_and_one_burst(
    rate: int, shapes: list[tuple[list[int], float]], ticks: list[float]
) -> None:
    clock = ManualClock()
    workers = [Worker(clock, list(charges), step) for charges, step in shapes]
    run(rate, workers, ticks, 6.0)
    # Every window keeps within rate x window + burst exactly when a bucket that leaks at the rate
    # never holds more than the burst.
    owned, before = 0.0, 0.0
    for at, count in sorted(entry for worker in workers for entry in worker.log):
        owned = max(0.0, owned - rate * (at - before)) + count
        before = at
        assert owned <= rate * BURST_SECONDS + 1


def held_at_most(
    spent: list[tuple[float, int]], rates: list[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """At each spending: what a bucket holds that leaks at the rate of the time, and its bound.

    Every window keeps within the rate's integral and one burst exactly when that holds; the burst
    is that of the highest rate so far, for what was granted at it may be spent a moment later.
    """
    owned, before, turn = 0.0, 0.0, 0
    for at, count in sorted(spent):
        while turn + 1 < len(rates) and rates[turn + 1][0] <= at:
            owned = max(0.0, owned - rates[turn][1] * (rates[turn + 1][0] - before))
            before = rates[turn + 1][0]
            turn += 1
        owned = max(0.0, owned - rates[turn][1] * (at - before)) + count
        before = at
        yield owned, max(rate for _, rate in rates[: turn + 1]) * BURST_SECONDS


@settings(max_examples=cases(few=12, many=60), deadline=None)
@given(
    rates=st.lists(st.integers(500, 50_000), min_size=1, max_size=6),
    charges=st.lists(st.integers(1, 20_000), min_size=1, max_size=6),
    steps=st.lists(st.sampled_from([0.003, 0.02, 0.11, 0.9]), min_size=1, max_size=4),
    ticks=st.lists(st.sampled_from([0.05, 0.05, 0.2, 1.7]), min_size=1, max_size=5),
    deaths=st.lists(st.floats(0.1, 1.5), max_size=8),
)
def test_no_window_sees_more_while_rates_change_and_workers_die(
    rates: list[int],
    charges: list[int],
    steps: list[float],
    ticks: list[float],
    deaths: list[float],
) -> None:
    clock = ManualClock()
    budget = Budget(READ, rates[0], 0.0)
    workers = [Worker(clock, list(charges), step) for step in steps]
    for index, worker in enumerate(workers):
        budget.join(index, worker.broker)
    spent: list[tuple[float, int]] = []
    in_force = [(0.0, float(rates[0]))]
    next_tick, next_rate, turn = 0.0, 1.0, 0
    next_death = deaths[0] if deaths else math.inf
    while clock.now < 8.0:
        clock.now = min([next_tick, next_rate, next_death, *(w.next_step for w in workers)])
        if clock.now == next_rate:
            rate = rates[len(in_force) % len(rates)]
            budget.set_rate(rate, clock.now)
            in_force.append((clock.now, float(rate)))
            next_rate += 1.0
        if clock.now == next_death:
            index = turn % len(workers)  # whatever it held unspent goes with it
            spent += workers[index].log
            budget.leave(index, clock.now)
            workers[index] = Worker(clock, list(charges), steps[index], next_step=clock.now)
            budget.join(index, workers[index].broker)
            turn += 1
            next_death += deaths[turn % len(deaths)]
        if clock.now == next_tick:
            budget.top_up(clock.now)
            next_tick += ticks[turn % len(ticks)]
        for worker in workers:
            if worker.next_step == clock.now:
                worker.step()
    for worker in workers:
        spent += worker.log
    for owned, bound in held_at_most(spent, in_force):
        assert owned <= bound + 1


def test_over_several_seconds_the_average_is_the_rate_and_what_is_within_it_never_waits() -> None:
    """Kafka's ThrottlerTest, testThrottleDesiredRate."""
    clock = ManualClock()
    greedy = Worker(clock, [4096], 0.01)
    seconds = run(100_000, [greedy], [TOP_UP_SECONDS], 30.0)
    assert greedy.broker.spent(READ) / seconds == pytest.approx(100_000, rel=0.05)
    modest = Worker(ManualClock(), [900], 0.01)  # 90,000 a second
    run(100_000, [modest], [TOP_UP_SECONDS], 30.0)
    assert modest.broker.waited_seconds(READ) == 0


def test_a_new_rate_takes_effect_at_the_next_top_up() -> None:
    """Kafka's ThrottlerTest, testUpdateThrottleDesiredRate."""
    side = BrokerSide(SharedMemory().slots)
    budget = Budget(READ, 1000, 0.0)
    budget.join(0, side)

    def granted_a_second(began: float) -> int:
        before = side.granted(READ)
        for tick in range(1, 21):
            side._slots[8] = side.granted(READ)  # all is spent at once
            budget.top_up(began + tick * TOP_UP_SECONDS)
        return side.granted(READ) - before

    granted_a_second(0.0)  # the first burst
    granted_a_second(1.0)
    assert granted_a_second(2.0) == pytest.approx(1000, abs=60)
    budget.set_rate(3000, 3.0)
    assert granted_a_second(3.0) == pytest.approx(3000, abs=160)


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_workers_together_get_the_whole_rate(count: int) -> None:
    clock = ManualClock()
    workers = [Worker(clock, [4096], 0.01) for _ in range(count)]
    now = run(100_000, workers, [TOP_UP_SECONDS], 20.0)
    moved = sum(worker.broker.spent(READ) for worker in workers)
    assert moved >= 100_000 * (now - TOP_UP_SECONDS)
    assert min(w.broker.spent(READ) for w in workers) >= moved / count * 0.9


def test_a_worker_busy_with_other_things_does_not_keep_another_waiting() -> None:
    clock = ManualClock()
    idle = Worker(clock, [4096], 100.0)
    greedy = Worker(clock, [4096], 0.01)
    idle.next_step = 100.0
    now = run(100_000, [idle, greedy], [TOP_UP_SECONDS], 10.0)
    assert greedy.broker.spent(READ) >= 100_000 * (now - 0.1)


def test_a_charge_above_the_burst_is_spread_over_time_and_ends() -> None:
    clock = ManualClock()
    worker = Worker(clock, [50_000], NAP_SECONDS)
    run(10_000, [worker], [TOP_UP_SECONDS], 5.2)
    assert worker.broker.spent(READ) >= 50_000


def test_what_a_dead_worker_did_not_spend_is_free_again() -> None:
    memory, other = SharedMemory(), SharedMemory()
    dead, alive = BrokerSide(memory.slots), BrokerSide(other.slots)
    budget = Budget(READ, 1000, 0.0)
    budget.join(0, dead)
    budget.top_up(0.0)
    assert dead.granted(READ) == 1000 * GRANT_SHARE_MAX
    budget.leave(0, 0.0)
    assert budget.bucket is not None
    assert budget.bucket.level == 1000
    for index in range(1, 5):
        budget.join(index, BrokerSide(SharedMemory().slots))
    budget.join(9, alive)
    budget.top_up(0.0)
    assert alive.granted(READ) == 200


def test_idle_time_earns_one_burst_and_no_more() -> None:
    bucket = IoTokenBucket(100, 0, 0.0)
    bucket.earn(3600.0)
    assert bucket.level == 100


def test_without_a_rate_nobody_waits_and_spending_is_still_seen() -> None:
    memory = SharedMemory()
    side = BrokerSide(memory.slots)
    budget = Budget(WRITE, None, 0.0)
    budget.join(0, side)
    budget.top_up(0.0)
    WorkerSide(memory.slots, 1, lambda _: pytest.fail("waited")).charge(WRITE, 1 << 40)
    assert side.spent(WRITE) == 1 << 40
    budget.leave(0, 0.0)


def test_a_rate_set_while_a_job_runs_holds_from_then_on() -> None:
    memory = SharedMemory()
    side = BrokerSide(memory.slots)
    throttle = Throttle(None, None, 0.0)
    throttle.join(0, side, 0.0)
    worker = WorkerSide(memory.slots, 1, lambda _: None)
    worker.charge(READ, 10_000)
    throttle.set_rates(1000, None, 5.0)
    assert side.granted(READ) - side.spent(READ) == 1000 * GRANT_SHARE_MAX
    throttle.set_rates(None, None, 6.0)
    worker.charge(READ, 10_000)
    throttle.leave(0, 7.0)
    assert side.granted(READ) == side.spent(READ) == 20_000


def test_a_lowered_rate_is_paid_off_before_anything_is_granted() -> None:
    memory = SharedMemory()
    side = BrokerSide(memory.slots)
    budget = Budget(READ, 8000, 0.0)
    budget.join(0, side)
    budget.top_up(0.0)
    WorkerSide(memory.slots, 1, lambda _: None).charge(READ, 2000)
    budget.set_rate(100, 0.0)
    budget.top_up(0.0)
    granted = side.granted(READ)
    assert granted - side.spent(READ) <= 100
    budget.top_up(0.5)
    assert side.granted(READ) - side.spent(READ) <= 100


class Ticking:
    """A throttle with one worker under load, ticked by a loop that the test holds up."""

    def __init__(self, throttle: Throttle) -> None:
        self.throttle = throttle
        self.side = BrokerSide(SharedMemory().slots)
        self.now = 0.0
        self.looks = 0
        throttle.join(0, self.side, 0.0)

    def foreground(self) -> Foreground:
        self.looks += 1
        return Foreground(*(int(self.now * count) for count in (5000, 5_000_000, 5_000_000)))

    def ticks(self, count: int, *, late: float = 0.0) -> tuple[float, float]:
        for _ in range(count):
            self.now += TOP_UP_SECONDS + late
            self.throttle.tick(self.now, self.foreground)
        return self.throttle.rates


def test_without_a_rate_a_held_up_loop_brings_the_worker_to_the_floor_and_back() -> None:
    ticking = Ticking(Throttle(None, None, 0.0, floor_bytes_per_second=1e6))
    assert ticking.ticks(40) == (math.inf, math.inf)
    floor = KEEP_UP * 5_000_000
    read, write = ticking.ticks(10, late=0.02)
    assert read == write == pytest.approx(ticking.throttle.spare_capacity.floor)
    assert read < floor
    assert ticking.side.granted(READ) - ticking.side.spent(READ) <= read * GRANT_SHARE_MAX
    assert ticking.ticks(400)[0] > 4 * read


def test_a_configured_rate_stays_the_same_with_and_without_load() -> None:
    ticking = Ticking(Throttle(1000, None, 0.0, floor_bytes_per_second=1e6))
    assert ticking.ticks(40) == (1000, math.inf)
    read, write = ticking.ticks(10, late=0.02)
    assert read == 1000
    assert write < math.inf
    ticking.throttle.set_rates(None, 2000, ticking.now)
    assert ticking.throttle.rates == (write, 2000)


def test_the_first_tick_after_an_idle_time_is_not_late() -> None:
    ticking = Ticking(Throttle(None, None, 0.0))
    ticking.ticks(40)
    ticking.throttle.leave(0, ticking.now)
    ticking.throttle.join(0, ticking.side, ticking.now + 100)
    ticking.now += 100
    assert ticking.ticks(1) == (math.inf, math.inf)


def test_the_foreground_is_looked_at_four_times_a_second() -> None:
    ticking = Ticking(Throttle(None, None, 0.0))
    ticking.ticks(200)
    assert ticking.looks == pytest.approx(40, abs=8)


def test_the_pool_takes_the_initial_rates_and_the_updated_ones_while_a_job_runs() -> None:
    """Kafka's LogCleanerTest, testReconfigureLogCleanerIoMaxBytesPerSecond."""
    limited = SETTINGS.model_copy(update={"read_bytes_per_second": 10_000_000})

    async def scenario(b: PoolHarness) -> None:
        b.dirty()
        b.pool.wake()
        await until_job(b)
        assert b.pool.status().rates == (10_000_000, None)
        changes = {"read_bytes_per_second": 20_000_000, "write_bytes_per_second": 500_000}
        b.pool.configure(limited.model_copy(update=changes))
        assert b.pool.status().rates == (20_000_000, 500_000)
        assert not b.link.aborted()
        b.link.done()
        await until(lambda: b.host.done)

    run_scenario(scenario, limited)


def test_reads_and_writes_do_not_share_a_budget() -> None:
    memory = SharedMemory()
    side = BrokerSide(memory.slots)
    throttle = Throttle(1000, 4000, 0.0)
    throttle.join(0, side, 0.0)
    assert (side.granted(READ), side.granted(WRITE)) == (250, 1000)


def test_a_waiting_worker_naps_until_granted_and_counts_its_waiting() -> None:
    memory = SharedMemory()
    side = BrokerSide(memory.slots)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        side.grant(READ, 40 * len(naps))

    WorkerSide(memory.slots, 1, nap).charge(READ, 100)
    assert naps == [NAP_SECONDS] * 3
    assert side.waited_seconds(READ) == pytest.approx(3 * NAP_SECONDS)
    assert side.waited_seconds(WRITE) == 0


def test_an_abort_ends_the_wait_and_concerns_no_other_run() -> None:
    memory = SharedMemory()
    side = BrokerSide(memory.slots)
    first = WorkerSide(memory.slots, 1, lambda _: side.abort(1))
    with pytest.raises(CleanAbortedError):
        first.charge(READ, 1)
    assert first.aborted()
    assert not WorkerSide(memory.slots, 2, lambda _: None).aborted()
    side.abort(7)
    assert not first.aborted()


def test_both_sides_see_one_page_that_cannot_be_cut_short() -> None:
    fd = new_memory()
    memory, shared_memory = SharedMemory(fd), SharedMemory(fd)
    BrokerSide(memory.slots).grant(READ, 77)
    assert BrokerSide(shared_memory.slots).granted(READ) == 77
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    memory.close()
    shared_memory.close()
    shared_memory.close()


@given(
    left=st.integers(0, 10_000),
    spare=st.lists(st.integers(-100, 3000), max_size=8),
    spare_max=st.integers(1, 2000),
)
def test_shares_give_no_more_than_there_is_and_fill_nobody_above_the_limit(
    left: int, spare: list[int], spare_max: int
) -> None:
    values = split_grants(left, spare, spare_max)
    assert sum(values) <= left
    for had, actual in zip(spare, values, strict=True):
        assert actual >= 0
        assert actual == 0 or had + actual <= spare_max
