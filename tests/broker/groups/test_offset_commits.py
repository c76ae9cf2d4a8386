"""Commits of offsets outside of transactions: when they count."""

import asyncio
import gc
import random

import pytest

from broker.groups.classic.model import (
    CommitRequested,
)
from broker.groups.offsets.committed_offsets import CommittedOffsets, size_of
from broker.groups.offsets.offset_records import CommittedOffset, committed_offset
from broker.quotas.memory_budget import PARTS
from protocol.errors import ErrorCode
from storage.errors import LogDirectoryError, MessageTooLargeError
from tests.support.broker.groups.group_world import KEY, World
from tests.support.clocks.virtual_clock import settle

MIB = 1 << 20


async def test_a_commit_is_answered_and_seen_only_after_its_append() -> None:
    world = World()
    world.log.held = True
    commit = await world.begin(world.commit(5))
    assert not commit.done()
    assert world.offsets() == {}
    world.log.release()
    assert await commit is ErrorCode.NONE
    assert world.offsets() == {KEY: 5}


async def test_a_commit_whose_client_went_away_counts_all_the_same() -> None:
    world = World()
    world.log.held = True
    commit = await world.begin(world.commit(5))
    commit.cancel()
    await settle()
    world.log.release()
    await settle()
    assert world.offsets() == {KEY: 5}


async def test_commits_of_one_partition_count_in_the_order_of_the_log() -> None:
    world = World()
    world.log.held = True
    commits = [await world.begin(world.commit(offset)) for offset in range(5)]
    world.log.release()
    await asyncio.gather(*commits)
    assert world.offsets() == {KEY: 4}
    assert world.log.load().offsets["g"][KEY][0] == 4


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (LogDirectoryError("/d", "disk"), ErrorCode.COORDINATOR_NOT_AVAILABLE),
        (MessageTooLargeError(2, 1), ErrorCode.INVALID_COMMIT_OFFSET_SIZE),
        (RuntimeError("bug"), ErrorCode.UNKNOWN_SERVER_ERROR),
    ],
)
async def test_a_commit_that_is_not_in_the_log_does_not_count(
    error: Exception, answer: ErrorCode
) -> None:
    world = World()
    world.log.error = error
    assert await world.commit(5) is answer
    assert world.offsets() == {}
    assert world.state() is None


async def test_a_commit_that_takes_too_long_is_given_up_and_counts_if_it_arrives() -> None:
    world = World()
    world.log.held = True
    commit = await world.begin(world.commit(5))
    await world.clock.advance(world.settings.append_timeout_ms)
    assert await commit is ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.log.release()
    await settle()
    assert world.offsets() == {KEY: 5}


async def test_a_member_commits_with_its_generation() -> None:
    world = World()
    member = await world.stable()
    assert await world.commit(5, member_id=member, generation=1) is ErrorCode.NONE
    assert await world.commit(6, member_id=member, generation=0) is ErrorCode.ILLEGAL_GENERATION
    assert await world.commit(6) is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.offsets() == {KEY: 5}


async def test_a_commit_with_a_generation_needs_a_group() -> None:
    world = World()
    for generation in (0, 3):
        assert await world.commit(5, generation=generation) is ErrorCode.GROUP_ID_NOT_FOUND
        refused = await world.commit(5, group_id="", generation=generation)
        assert refused is ErrorCode.INVALID_GROUP_ID


async def test_a_consumer_that_assigns_for_itself_may_commit_without_a_group_id() -> None:
    world = World()
    assert await world.commit(5, group_id="") is ErrorCode.NONE
    assert world.offsets("") == {KEY: 5}


async def test_any_offset_comes_back_as_it_was_committed() -> None:
    world = World()
    await world.commit(-2)
    assert world.offsets() == {KEY: -2}


async def test_an_unknown_group_has_committed_nothing() -> None:
    world = World()
    assert world.coordinator.offsets.fetch("nobody") == (ErrorCode.NONE, {})


async def test_a_large_commit_goes_out_in_several_appends() -> None:
    world = World()
    offsets = {("t" * 200, i): committed_offset(i, -1, "m" * 1_000, 1) for i in range(1_000)}
    request = CommitRequested(0, "", None, -1)
    assert await world.coordinator.offsets.commit("g", request, offsets) is ErrorCode.NONE
    assert len(world.log.appends) > 1
    assert sum(map(len, world.log.appends)) == 1_000
    assert max(len(b) for b in world.log.batches[0]) < 512 * 1024
    assert world.log.load().offsets["g"] == offsets


async def test_a_collection_of_garbage_soon_visits_no_committed_offset() -> None:
    world = World()
    offsets = {("t", index): committed_offset(index, 1, "m", 1) for index in range(1_000)}
    request = CommitRequested(0, "", None, -1)
    assert await world.coordinator.offsets.commit("g", request, offsets) is ErrorCode.NONE
    _, acknowledged = world.coordinator.offsets.fetch("g")
    undecided = CommittedOffsets()
    undecided.add_transactional(1, acknowledged)
    for held in (acknowledged, world.log.load().offsets["g"], undecided.transactional[1]):
        gc.collect()
        assert len(held) == 1_000
        assert not gc.is_tracked(held)
        assert not any(map(gc.is_tracked, held.values()))


async def test_offsets_that_would_take_too_much_memory_are_refused() -> None:
    world = World(max_offsets_bytes=4 * PARTS * MIB)
    commit = world.coordinator.offsets.commit
    request = CommitRequested(0, "", None, -1)
    texts = {("t", index): committed_offset(1, metadata="x" * 4000) for index in range(250)}
    by_user: dict[str, int] = {}
    for user in ("mallory", "alice"):
        for number in range(1000):
            error = await commit(f"{user}-{number}", request, texts, user)
            if error is not ErrorCode.NONE:
                assert error is ErrorCode.POLICY_VIOLATION
                by_user[user] = number
                break
    assert by_user["mallory"] > by_user["alice"] > 40
    # What takes no more memory than before is accepted, and small offsets still fit.
    assert await commit("mallory-0", request, texts, "mallory") is ErrorCode.NONE
    assert await commit("bob", request, {KEY: committed_offset(5)}, "bob") is ErrorCode.NONE
    for number in range(by_user["mallory"]):
        assert await world.coordinator.deletion.delete_group(f"mallory-{number}") is ErrorCode.NONE
    assert await commit("mallory", request, texts, "mallory") is ErrorCode.NONE


def test_metadata_counts_with_the_memory_that_it_takes() -> None:
    texts = ("x", "\N{GRINNING FACE}")
    plain, wide = (committed_offset(1, metadata=text * 1_000) for text in texts)
    empty = size_of([committed_offset(1)])
    assert (size_of([plain]), size_of([wide])) == (empty + 1_000, empty + 4_000)


@pytest.mark.parametrize("seed", range(20))
def test_the_size_of_offsets_is_that_of_all_in_memory(seed: int) -> None:
    draw, offsets = random.Random(seed), CommittedOffsets()
    running: list[tuple[int, dict[tuple[str, int], CommittedOffset]]] = []
    for _ in range(300):
        some = {
            ("t", draw.randrange(5)): committed_offset(1, metadata="x" * draw.randrange(9))
            for _ in range(draw.randrange(4))
        }
        producer_id = draw.randrange(3)
        match draw.randrange(6):
            case 0 | 1:
                running.append((offsets.begin(some), some))
            case 2 if running:
                append, begun = running.pop(0)
                offsets.end(append, begun, is_appended=draw.random() < 0.7)
            case 3:
                append = offsets.add_transactional(producer_id, some)
                if draw.random() < 0.2:
                    offsets.remove_transactional(producer_id, append, some)
            case 4:
                for _ in offsets.end_transaction(
                    producer_id, commit=draw.random() < 0.5, at_once=2
                ):
                    pass
            case 5:
                offsets.forget(offsets.begin({}), [*some, *some])
        present = list(offsets.acknowledged.values())
        present += [value for _, begun in running for value in begun.values()]
        for pending in offsets.transactional.values():
            present += [value for _, value in pending.values()]
        assert offsets.size_bytes == size_of(present), f"seed {seed}"
