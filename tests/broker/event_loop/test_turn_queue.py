"""Turns of connections: in order, and in the time of a round."""

import asyncio
from collections import Counter
from functools import partial

import pytest

from broker.event_loop import loop_turns
from broker.event_loop.loop_turns import MeasuredTurns, TurnQueue, WakeUp, yield_to_loop


async def test_turns_run_in_order_until_the_time_of_a_round_is_used_up() -> None:
    queue, turns = TurnQueue(5.0), list[int]()

    def take(number: int) -> None:
        turns.append(number)
        queue.charge(2.0)

    for number in range(8):
        queue.add(partial(take, number))
    assert not turns
    for count_after in (3, 6, 8):
        await yield_to_loop()
        assert turns == list(range(count_after))
    assert not queue.is_over


async def test_a_turn_that_queues_again_waits_for_the_next_round() -> None:
    queue, turns = TurnQueue(5.0), list[str]()

    def take(name: str) -> None:
        turns.append(name)
        queue.charge(1.0)
        queue.add(partial(take, name))

    queue.add(partial(take, "a"))
    queue.add(partial(take, "b"))
    for _ in range(3):
        turns.clear()
        await yield_to_loop()
        assert turns == ["a", "b"]


async def test_a_round_has_no_more_time_after_turns_outside_the_queue() -> None:
    queue = TurnQueue(5.0)
    queue.charge(3.0)
    assert not queue.is_over
    queue.charge(2.0)
    assert queue.is_over
    await yield_to_loop()
    assert not queue.is_over


async def test_a_turn_that_fails_does_not_hold_up_the_turns_behind_it() -> None:
    errors, queue = list[object](), TurnQueue(5.0)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    turn = asyncio.Event()

    def fail() -> None:
        raise ValueError

    queue.add(fail)
    queue.add(turn.set)
    async with asyncio.timeout(20):
        await turn.wait()
    assert len(errors) == 1


async def take_turn(queue: TurnQueue, turns: list[object], name: object) -> None:
    await queue.wait()
    turns.append(name)
    queue.charge(2.0)


async def test_tasks_that_wait_for_turns_have_the_time_of_a_round_together() -> None:
    queue, turns = TurnQueue(5.0), list[object]()
    tasks = [asyncio.create_task(take_turn(queue, turns, number)) for number in range(8)]
    counts = []
    for _ in range(8):
        before = len(turns)
        await yield_to_loop()
        counts.append(len(turns) - before)
    assert turns == list(range(8))
    assert max(counts) == 3
    await asyncio.gather(*tasks)


async def test_a_task_that_is_cancelled_while_it_waits_for_a_turn_delays_no_other() -> None:
    queue, turns = TurnQueue(5.0), list[object]()
    tasks = [asyncio.create_task(take_turn(queue, turns, number)) for number in range(8)]
    await yield_to_loop()
    for task in tasks[:7]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert turns == [7]


async def test_the_first_turns_of_tasks_wait_while_the_time_of_a_round_is_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, now_ns, turn = TurnQueue(5e-3), 0, 0
    begun_by_turn, ended = Counter[int](), list[int]()
    monkeypatch.setattr(loop_turns, "perf_counter_ns", lambda: now_ns)

    async def work(number: int) -> None:
        nonlocal now_ns
        now_ns += 2_000_000
        begun_by_turn[turn] += 1
        await yield_to_loop()
        now_ns += 2_000_000
        begun_by_turn[turn] += 1
        ended.append(number)

    async def answer(number: int) -> None:
        await MeasuredTurns(work(number), lambda _: None, lambda: queue)

    tasks = [asyncio.create_task(answer(number)) for number in range(20)]
    while not all(task.done() for task in tasks):
        turn += 1
        await yield_to_loop()
    assert begun_by_turn.total() == 40
    assert max(begun_by_turn.values()) <= 3
    assert len(ended) == 20


async def test_work_that_is_cancelled_before_its_turn_does_not_begin() -> None:
    queue = TurnQueue(5.0)

    async def work() -> None:
        pytest.fail("it began")

    async def answer() -> None:
        await MeasuredTurns(work(), lambda _: None, lambda: queue)

    task = asyncio.create_task(answer())
    queue.charge(5.0)
    await yield_to_loop()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_work_that_an_event_wakes_together_has_the_time_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, now_ns, turn = TurnQueue(5e-3), 0, 0
    woken_by_turn = Counter[int]()
    monkeypatch.setattr(loop_turns, "perf_counter_ns", lambda: now_ns)
    wake_ups = [WakeUp() for _ in range(20)]

    async def work(wake_up: WakeUp) -> None:
        nonlocal now_ns
        await wake_up
        now_ns += 2_000_000
        woken_by_turn[turn] += 1

    async def answer(wake_up: WakeUp) -> None:
        await MeasuredTurns(work(wake_up), lambda _: None, lambda: queue)

    tasks = [asyncio.create_task(answer(wake_up)) for wake_up in wake_ups]
    await yield_to_loop()
    for wake_up in wake_ups:
        wake_up.set_result(None)
    while not all(task.done() for task in tasks):
        turn += 1
        await yield_to_loop()
    assert woken_by_turn.total() == 20
    assert max(woken_by_turn.values()) <= 3


async def test_work_that_an_event_wakes_alone_goes_on_in_the_next_round() -> None:
    queue, wake_up, has_gone_on = TurnQueue(5.0), WakeUp(), False

    async def work() -> None:
        nonlocal has_gone_on
        await wake_up
        has_gone_on = True

    async def answer() -> None:
        await MeasuredTurns(work(), lambda _: None, lambda: queue)

    task = asyncio.create_task(answer())
    await yield_to_loop()
    wake_up.set_result(None)
    await yield_to_loop()
    assert has_gone_on
    await task
