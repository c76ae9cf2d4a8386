"""A crash at each operation on the disk while a transaction ends, and during the recovery."""

import asyncio
from dataclasses import dataclass

import pytest

from broker.app import Broker
from protocol.errors import ErrorCode
from tests.support.broker.transaction_world import (
    ABORT,
    COMMIT,
    OFFSETS,
    TIMEOUT_MS,
    A,
    B,
    Client,
    begin_life,
    is_open,
    markers,
    offset_of_group,
)
from tests.support.clocks.virtual_loop import run_virtually
from tests.support.draws import cases
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

# Operations from the request to the last record: appends, and with flush on ack their syncs.
STEPS = 24
SECOND_STEPS = cases(few=2, many=12)  # of the recovery that is cut off as well


async def open_transaction(env: MemoryEnv, *, flush_on_ack: bool) -> tuple[Broker, Client]:
    broker = await begin_life(env, flush_on_ack=flush_on_ack)
    client = await Client.start(broker)
    assert await client.add(A, B, OFFSETS) is ErrorCode.NONE
    await client.produce(A)
    await client.produce(B)
    assert await client.commit_offset(7) is ErrorCode.NONE
    return broker, client


async def end_until_crash(
    env: MemoryEnv, step: int, *, commit: bool, flush: bool
) -> tuple[int, bool]:
    """End a transaction with a crash at a step; return the producer and whether it was answered."""
    broker, client = await open_transaction(env, flush_on_ack=flush)
    env.crash_at = env.operations + step
    answered = False
    try:
        ending = broker.coordinators.transactions.end("tx", client.producer, commit=commit)
        answer = await asyncio.wait_for(ending, 5)
        answered = answer.error is ErrorCode.NONE
        await asyncio.sleep(1)
    except (SimulatedCrash, TimeoutError):
        pass
    return client.producer.producer_id, answered


async def recover_until_crash(env: MemoryEnv, step: int, *, flush: bool) -> None:
    env.crash_at = env.operations + step
    try:
        await asyncio.wait_for(begin_life(env, flush_on_ack=flush), 60)
        await asyncio.sleep(1)
    except (SimulatedCrash, TimeoutError):
        pass


@dataclass(frozen=True)
class Outcome:
    """What a restarted broker has of the transaction after its timeout."""

    kinds: list[list[int]]  # the markers on each partition
    offset: int | None
    opened: list[bool]
    statuses: list[str]


async def observe(env: MemoryEnv, producer_id: int, *, flush: bool) -> Outcome:
    broker = await begin_life(env, flush_on_ack=flush)
    await asyncio.sleep(1)
    env.advance_ms(TIMEOUT_MS + 1)
    await (
        broker.coordinators.transactions.abort_timed_out()
    )  # if the crash came before the decision
    await asyncio.sleep(1)
    partitions = (A, B, OFFSETS)
    return Outcome(
        [markers(broker, partition, producer_id) for partition in partitions],
        offset_of_group(broker),
        [is_open(broker, partition) for partition in partitions],
        [
            transaction.status.name
            for transaction in broker.coordinators.transactions.transactions()
        ],
    )


def check(env: MemoryEnv, producer_id: int, *, commit: bool, answered: bool, flush: bool) -> None:
    outcome = run_virtually(observe(env, producer_id, flush=flush))
    kind = outcome.kinds[0]
    assert kind in ([COMMIT], [ABORT])
    assert outcome.kinds == [kind] * 3, "the outcomes differ"
    if answered or not commit:
        assert kind == [COMMIT if commit else ABORT]
    assert outcome.offset == (7 if kind == [COMMIT] else None)
    assert not any(outcome.opened)
    assert outcome.statuses == ["COMPLETE_COMMIT" if kind == [COMMIT] else "COMPLETE_ABORT"]


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_killed_broker_ends_the_transaction_everywhere_alike_and_once(
    step: int, commit: bool
) -> None:
    env = MemoryEnv(seed=step)
    producer_id, answered = run_virtually(end_until_crash(env, step, commit=commit, flush=False))
    for again in range(1, SECOND_STEPS):
        env = env.kill()
        run_virtually(recover_until_crash(env, again * 3, flush=False))
    env = env.kill()
    check(env, producer_id, commit=commit, answered=answered, flush=False)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_with_flush_on_ack_a_loss_of_power_ends_the_transaction_everywhere_alike_and_once(
    step: int,
) -> None:
    env = MemoryEnv(seed=step)
    producer_id, answered = run_virtually(end_until_crash(env, step, commit=True, flush=True))
    env = env.crash()
    check(env, producer_id, commit=True, answered=answered, flush=True)
