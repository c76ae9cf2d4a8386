"""Offsets that are committed in a transaction: when they count, also after a restart."""

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import pytest

from broker.groups import offset_commits
from broker.groups.classic.model import CommitRequested
from broker.groups.offset_commits import GROUPS_PER_TRANSACTION_MAX
from broker.groups.offsets.committed_offsets import OFFSET_BYTES, CommittedOffsets
from broker.groups.offsets.offset_records import committed_offset
from broker.topics.producer_ids import Producer
from protocol.errors import ErrorCode
from storage.errors import LogDirectoryError
from storage.slices import run_at_once
from tests.support.broker.groups.group_world import DAY_MS, KEY, World
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.clocks.virtual_clock import settle

FIRST, SECOND = Producer(1, 0), Producer(2, 0)
NOT_A_MEMBER = CommitRequested(0, "", None, -1)


@dataclass
class Transactions:
    """Commits and ends of transactions on the only partition of a world."""

    world: World

    async def commit(
        self, offset: int, producer: Producer = FIRST, request: CommitRequested = NOT_A_MEMBER
    ) -> ErrorCode:
        value = committed_offset(offset, -1, "", self.world.clock.wall_ms())
        return await self.world.coordinator.offsets.commit_in_transaction(
            "g", request, {KEY: value}, producer
        )

    def end(self, producer: Producer = FIRST, *, commit: bool = True) -> None:
        self.world.log.end_transaction(producer, commit=commit)
        self.world.coordinator.offsets.end_transaction(0, producer.producer_id, commit=commit)

    @property
    def is_unstable(self) -> bool:
        return self.world.coordinator.offsets.is_unstable("g", KEY)


def ended(offsets: CommittedOffsets, producer_id: int, at_once: int = 1_000) -> int:
    """Commit a transaction; return how many of its offsets took effect."""
    return run_at_once(offsets.end_transaction(producer_id, commit=True, at_once=at_once))


async def all_ended() -> None:
    """Wait for transactions that end in turns."""
    tasks = [task for task in asyncio.all_tasks() if task.get_name() == "end transaction"]
    await asyncio.gather(*tasks)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("commit", [True, False])
async def test_an_offset_of_a_transaction_counts_from_its_commit_and_never_after_an_abort(
    world: World, restarts: bool, commit: bool
) -> None:
    transactions = Transactions(world)
    assert await transactions.commit(5) is ErrorCode.NONE
    assert world.offsets() == {}
    if restarts:
        world.restart()
    assert transactions.is_unstable
    transactions.end(commit=commit)
    assert not transactions.is_unstable
    assert world.offsets() == ({KEY: 5} if commit else {})
    world.restart()
    assert world.offsets() == ({KEY: 5} if commit else {})


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_later_commit_outside_the_transaction_wins(world: World, restarts: bool) -> None:
    transactions = Transactions(world)
    await transactions.commit(5)
    await world.commit(9)
    if restarts:
        world.restart()
    transactions.end()
    assert world.offsets() == {KEY: 9}


async def test_an_earlier_commit_outside_the_transaction_loses_even_if_acknowledged_later(
    world: World,
) -> None:
    transactions = Transactions(world)
    world.log.held = True
    plain = await world.begin(world.commit(3))
    transactional = await world.begin(transactions.commit(5))
    transactions.end()
    world.log.release()
    await settle()
    assert (plain.result(), transactional.result()) == (ErrorCode.NONE, ErrorCode.NONE)
    assert world.offsets() == {KEY: 5}
    world.restart()
    assert world.offsets() == {KEY: 5}


async def test_the_transaction_that_committed_its_offset_last_wins(world: World) -> None:
    transactions = Transactions(world)
    await transactions.commit(5, FIRST)
    await transactions.commit(6, SECOND)
    transactions.end(SECOND)
    transactions.end(FIRST)
    assert world.offsets() == {KEY: 6}
    world.restart()
    assert world.offsets() == {KEY: 6}


async def test_a_failed_append_leaves_no_offset_to_wait_for(world: World) -> None:
    transactions = Transactions(world)
    world.log.error = LogDirectoryError("/d", "gone")
    assert await transactions.commit(5) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert not transactions.is_unstable
    transactions.end()
    assert world.offsets() == {}


async def test_a_commit_in_a_transaction_is_checked_if_it_names_a_member(world: World) -> None:
    transactions = Transactions(world)
    member_id = await world.stable()
    assert await transactions.commit(5, request=CommitRequested(0, member_id, None, 1)) == 0
    stale = CommitRequested(0, member_id, None, 0)
    assert await transactions.commit(6, request=stale) is ErrorCode.ILLEGAL_GENERATION
    assert await transactions.commit(7) is ErrorCode.NONE  # old clients name no member


async def test_a_member_commits_in_a_transaction_before_it_has_its_assignment(world: World) -> None:
    """Producers do not know REBALANCE_IN_PROGRESS: Kafka does not answer it here."""
    transactions = Transactions(world)
    joined = await world.join()
    assert type(world.state()).__name__ == "CompletingRebalance"
    request = CommitRequested(0, joined.member_id, None, joined.generation)
    assert await transactions.commit(5, request=request) is ErrorCode.NONE
    plain = await world.commit(5, member_id=joined.member_id, generation=joined.generation)
    assert plain is ErrorCode.REBALANCE_IN_PROGRESS


async def test_offsets_of_open_transactions_keep_the_group_and_do_not_expire(world: World) -> None:
    transactions = Transactions(world)
    await world.commit(3)
    await transactions.commit(5)
    later_ms = world.clock.wall_ms() + 30 * DAY_MS
    assert await world.coordinator.deletion.expire_offsets(later_ms) == 0
    assert world.offsets() == {KEY: 3}
    transactions.end()
    assert world.offsets() == {KEY: 5}


async def test_a_group_that_is_being_deleted_takes_no_offset_of_a_transaction(world: World) -> None:
    transactions = Transactions(world)
    await world.commit(3)
    world.log.held = True
    deleting = await world.begin(world.coordinator.deletion.delete_group("g"))
    assert await transactions.commit(5) is ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.log.release()
    assert await deleting is ErrorCode.NONE


def test_a_tombstone_drops_the_offsets_before_it_and_no_later_one() -> None:
    offsets = CommittedOffsets()
    offsets.add_transactional(1, {KEY: committed_offset(5)})
    tombstone = offsets.begin({})
    offsets.add_transactional(2, {KEY: committed_offset(6)})
    offsets.forget(tombstone, [KEY])
    assert offsets.is_unstable(KEY)
    assert ended(offsets, 1) == 0
    assert ended(offsets, 2) == 1
    assert offsets.acknowledged[KEY] == committed_offset(6)


async def test_a_transaction_has_offsets_of_a_limited_number_of_groups(world: World) -> None:
    async def commit(group_id: str, producer: Producer) -> ErrorCode:
        value = committed_offset(5, -1, "", world.clock.wall_ms())
        return await world.coordinator.offsets.commit_in_transaction(
            group_id, NOT_A_MEMBER, {KEY: value}, producer
        )

    group_ids = [f"g{number}" for number in range(GROUPS_PER_TRANSACTION_MAX)]
    assert {await commit(group_id, FIRST) for group_id in group_ids} == {ErrorCode.NONE}
    assert await commit("one too many", FIRST) is ErrorCode.POLICY_VIOLATION
    assert await commit("g0", FIRST) is ErrorCode.NONE
    assert await commit("one too many", SECOND) is ErrorCode.NONE
    world.coordinator.offsets.end_transaction(0, FIRST.producer_id, commit=True)
    await all_ended()
    assert {world.offsets(group_id)[KEY] for group_id in group_ids} == {5}
    assert await commit("other", FIRST) is ErrorCode.NONE
    assert world.offsets("one too many") == {}


async def test_a_group_has_offsets_of_a_limited_number_of_transactions(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_commits, "TRANSACTIONS_PER_GROUP_MAX", 2)
    transactions = Transactions(world)
    producers = [Producer(number, 0) for number in (1, 2, 3, 2)]
    answers = [await transactions.commit(5, producer) for producer in producers]
    assert answers == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.POLICY_VIOLATION, ErrorCode.NONE]
    transactions.end(FIRST)
    assert await transactions.commit(6, producers[2]) is ErrorCode.NONE


def test_an_operation_takes_no_longer_if_a_group_has_many_open_transactions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offsets = CommittedOffsets()
    value = committed_offset(5, -1, "", 0)
    for producer_id in range(10_000):
        offsets.add_transactional(producer_id, {KEY: value})
    others = {("other", index): value for index in range(100)}
    meter = LoopMeter()
    with meter.measuring(monkeypatch):
        assert not any(offsets.is_unstable(key) for key in others)
        append = offsets.begin(others)
        offsets.end(append, others, is_appended=True)
        offsets.add_transactional(0, others)
        assert ended(offsets, 0) == 101
        assert offsets.is_unstable(KEY)
        append = offsets.begin({KEY: value})
        offsets.end(append, {KEY: value}, is_appended=True)
        assert not offsets.is_unstable(KEY)
        assert ended(offsets, 1) == 0
    assert 0 < meter.lines < 10_000


def test_the_offsets_of_a_transaction_are_in_memory_until_its_end() -> None:
    offsets = CommittedOffsets()
    offsets.add_transactional(1, {KEY: committed_offset(5)})
    append = offsets.begin({KEY: committed_offset(6)})
    offsets.end(append, {KEY: committed_offset(6)}, is_appended=True)
    offsets.forget(offsets.begin({}), [KEY])
    assert not offsets
    assert offsets.size_bytes == OFFSET_BYTES
    assert ended(offsets, 1) == 0
    assert offsets == CommittedOffsets(_appends=3)


async def test_many_offsets_of_a_transaction_end_in_turns_and_are_unstable_until_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_commits, "ENDED_AT_ONCE", 10)
    commits, keys = world.coordinator.offsets, [("orders", index) for index in range(95)]
    request = CommitRequested(0, "", None, -1)

    async def commit(producer: Producer, offset: int) -> None:
        offsets = dict.fromkeys(keys, committed_offset(offset))
        for group_id in ("g", "h"):
            answer = await commits.commit_in_transaction(group_id, request, offsets, producer)
            assert answer is ErrorCode.NONE

    def settled() -> int:
        rows = [commits.fetch_stable(group_id, key) for group_id in ("g", "h") for key in keys]
        assert {row for row in rows if row[1] is None} <= {(ErrorCode.UNSTABLE_OFFSET_COMMIT, None)}
        return sum(value is not None for _, value in rows)

    await commit(FIRST, 5)
    commits.end_transaction(0, FIRST.producer_id, commit=True)
    counts = [settled()]
    while counts[-1] < 2 * len(keys):
        await asyncio.sleep(0)
        counts.append(settled())
    assert max(after - before for before, after in pairwise([0, *counts])) == 10

    # The producer has begun another transaction, and a plain commit follows both.
    await commit(FIRST, 6)
    commits.end_transaction(0, FIRST.producer_id, commit=True)
    await commit(FIRST, 7)
    plain = {key: committed_offset(8) for key in keys[:5]}
    assert await commits.commit("g", request, plain) is ErrorCode.NONE
    await all_ended()
    assert settled() == 5
    commits.end_transaction(0, FIRST.producer_id, commit=False)
    await all_ended()
    assert settled() == 2 * len(keys)
    assert set(world.offsets("g").values()) == {6, 8}
    assert set(world.offsets("h").values()) == {6}


async def test_of_two_open_transactions_the_later_offset_in_the_log_wins_after_a_restart(
    world: World,
) -> None:
    transactions = Transactions(world)
    other = {("orders", 7): committed_offset(1)}
    commit = world.coordinator.offsets.commit_in_transaction
    await commit("g", NOT_A_MEMBER, other, SECOND)  # its first offset is older
    await transactions.commit(5, FIRST)
    await transactions.commit(6, SECOND)
    world.restart()
    transactions.end(SECOND)
    transactions.end(FIRST)
    assert world.offsets()[KEY] == 6


async def test_a_commit_after_a_restart_wins_over_the_open_transactions_before_it(
    world: World,
) -> None:
    transactions = Transactions(world)
    for offset in range(5):
        await transactions.commit(offset, Producer(offset, 0))
    world.restart()
    await world.commit(9)
    for offset in range(5):
        transactions.end(Producer(offset, 0))
    assert world.offsets() == {KEY: 9}
