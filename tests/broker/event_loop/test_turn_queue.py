"""Turns of connections: in order, and in the time of a round."""

import asyncio
from functools import partial

from broker.event_loop.loop_turns import TurnQueue, yield_to_loop


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
