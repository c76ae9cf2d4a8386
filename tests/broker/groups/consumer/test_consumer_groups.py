"""Consumer groups (KIP-848) under a clock that tests move and a log they acknowledge."""

import asyncio
import errno
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import ModuleType
from typing import Any

import pytest

from broker import client_patterns
from broker.event_loop import loop_turns
from broker.groups import large_group_turns, live_consumer_group
from broker.groups.classic.model import CommitRequested
from broker.groups.consumer import state
from broker.groups.consumer.model import (
    CONSUMER_MEMBER_BYTES,
    NAME_BYTES,
    NO_PARTITIONS,
    Assignment,
    ConsumerGroup,
    GroupState,
    HeartbeatAnswer,
    MemberState,
    TopicMetadata,
)
from broker.groups.consumer.records import (
    ConsumerGroupLoader,
    decode_key,
    encode_changes,
    largest_record_bytes,
)
from broker.groups.consumer.state import (
    NAMES_MAX,
    AssignmentTask,
    assignment_size,
    assignment_task,
    preferred_assignor,
)
from broker.groups.live_consumer_group import NAMES_PER_CHECK, LiveConsumerGroup
from broker.groups.offsets.offset_records import committed_offset
from broker.topics.internal_topic import decode_batches
from broker.topics.producer_ids import Producer
from protocol import record_codec
from protocol.errors import ErrorCode
from protocol.messages import (
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
)
from protocol.table_compiler import ELEMENTS_PER_SLICE
from storage.errors import LogDirectoryError, NoRoomError
from storage.format.batch import HEADER_BYTES
from tests.support.broker.groups.classic_client import ClassicClient
from tests.support.broker.groups.consumer_group_world import (
    REBALANCE_MS,
    Client,
    FakeTopics,
    converge,
    group,
)
from tests.support.broker.groups.group_world import KEY, World
from tests.support.clocks.virtual_clock import settle
from tests.support.draws import cases

SESSION_MS = 45_000
GROUP_METADATA = record_codec.encode(ConsumerGroupMetadataValue(epoch=1, metadata_hash=0), 0)
NO_TOPICS: frozenset[str] = frozenset()


def make_world(**counts: int) -> tuple[World, FakeTopics]:
    topics = FakeTopics(counts or {"orders": 6})
    return World(topics=topics), topics


def check_restart(world: World) -> None:
    """Check that a restart finds the group as it is."""
    before = group(world)
    world.restart()
    assert group(world) == before


async def test_the_first_member_gets_every_partition_with_its_join() -> None:
    world, topics = make_world()
    member = Client(world, "a")
    answer = await member.heartbeat()
    assert (answer.error, answer.epoch) == (ErrorCode.NONE, 1)
    assert answer.assignment == {(topics.id_of("orders"), index) for index in range(6)}
    assert group(world).state is GroupState.STABLE


async def test_a_partition_moves_only_after_its_owner_has_revoked_it() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await first.heartbeat()
    joined = await second.heartbeat()
    assert joined.assignment == NO_PARTITIONS, "the first member owns all partitions"
    revoke = await first.heartbeat()
    assert revoke.assignment is not None
    assert len(revoke.assignment) == 3
    assert revoke.epoch == 1, "the epoch follows when the revocation is confirmed"
    assert (await second.heartbeat()).assignment is None, "nothing is released yet"
    assert (await first.heartbeat()).epoch == 2
    await second.heartbeat()
    assert len(second.owned) == 3
    assert not first.owned & second.owned
    assert group(world).state is GroupState.STABLE


async def test_members_of_a_stable_group_keep_their_partitions_when_one_joins() -> None:
    world, _ = make_world(orders=12)
    clients = [Client(world, name) for name in "abc"]
    await converge(*clients)
    before = [client.owned for client in clients]
    last = Client(world, "d")
    await converge(*clients, last)
    assert all(client.owned < owned for client, owned in zip(clients, before, strict=True))
    assert [len(client.owned) for client in (*clients, last)] == [3, 3, 3, 3]


async def test_a_member_that_leaves_frees_its_partitions() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await converge(first, second)
    answer = await second.leave()
    assert (answer.error, answer.epoch) == (ErrorCode.NONE, -1)
    await converge(first)
    assert len(first.owned) == 6


async def test_a_silent_member_leaves_after_the_session_timeout() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await converge(first, second)
    for _ in range(5):
        await world.clock.advance(SESSION_MS / 5)
        await first.heartbeat()
    await converge(first)
    assert len(first.owned) == 6
    assert (await second.heartbeat()).error is ErrorCode.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_members_whose_time_ends_together_leave_in_one_epoch(*, is_loaded: bool) -> None:
    world, _ = make_world(orders=6)
    clients = [Client(world, name) for name in "abcd"]
    await converge(*clients)
    if is_loaded:
        check_restart(world)
    await world.clock.advance(SESSION_MS - 1)
    await clients[0].heartbeat()
    before = group(world)
    await world.clock.advance(1)
    assert group(world).members.keys() == {"a"}
    assert group(world).epoch == before.epoch + 1
    assert set(group(world).owners.values()) == {"a"}
    assert world.coordinator.stats.members_expired == 3
    await converge(clients[0])
    assert len(clients[0].owned) == 6
    check_restart(world)


async def test_a_member_that_does_not_revoke_in_time_leaves() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await first.heartbeat()
    await second.heartbeat()
    stubborn = first.owned
    await first.heartbeat()
    for _ in range(3):
        await world.clock.advance(REBALANCE_MS / 3)
        first.owned = stubborn
        await first.heartbeat()
        await second.heartbeat()
    assert first.epoch == 0, "it is no member any more"
    assert len(second.owned) == 6


async def test_a_static_member_that_returns_keeps_its_partitions_without_a_rebalance() -> None:
    world, _ = make_world()
    first, second = Client(world, "a", instance_id="i"), Client(world, "b", instance_id="j")
    await converge(first, second)
    epoch, owned = group(world).epoch, first.owned
    assert (await first.leave(-2)).epoch == -2
    returned = Client(world, "a2", instance_id="i")
    await converge(returned, second)
    assert returned.owned == owned
    assert group(world).epoch == epoch


async def test_a_static_member_that_left_while_it_revoked_has_its_session_timeout_to_return() -> (
    None
):
    world, _ = make_world()
    first, second = Client(world, "a", instance_id="i"), Client(world, "b")
    await converge(first)
    await second.heartbeat()
    await first.send(first.epoch, owned=first.owned)
    assert group(world).members["a"].state is MemberState.UNREVOKED_PARTITIONS
    await first.leave(-2)
    await world.clock.advance(REBALANCE_MS + 1)
    assert "a" in group(world).members
    await second.heartbeat()
    await world.clock.advance(SESSION_MS - REBALANCE_MS)
    assert "a" not in group(world).members


async def test_an_instance_id_in_use_is_refused() -> None:
    world, _ = make_world()
    await Client(world, "a", instance_id="i").heartbeat()
    other = Client(world, "b", instance_id="i")
    assert (await other.heartbeat()).error is ErrorCode.UNRELEASED_INSTANCE_ID
    other.epoch = 1
    assert (await other.heartbeat()).error is ErrorCode.FENCED_INSTANCE_ID


async def test_a_lost_answer_is_repeated_but_a_zombie_is_fenced() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await converge(first, second)
    first.epoch -= 1
    assert (await first.heartbeat()).error is ErrorCode.NONE
    await second.leave()
    await converge(first)
    first.epoch -= 2
    assert (await first.heartbeat()).error is ErrorCode.FENCED_MEMBER_EPOCH
    assert (await first.heartbeat()).error is ErrorCode.NONE, "a fenced member joins again at once"
    assert len(first.owned) == 6


async def test_new_partitions_and_topics_reach_the_members() -> None:
    world, topics = make_world()
    member = Client(world, "a", topics=frozenset({"orders", "later"}))
    await converge(member)
    topics.counts |= {"orders": 8, "later": 2}
    await world.clock.advance(5_000)
    await converge(member)
    assert len(member.owned) == 10
    del topics.counts["orders"]
    await world.clock.advance(5_000)
    await converge(member)
    assert len(member.owned) == 2


async def test_an_expression_follows_the_topics_that_it_matches() -> None:
    world, topics = make_world(**{"orders-eu": 2, "orders-us": 2, "other": 2})
    member = Client(world, "a", topics=frozenset(), regex="orders-.*")
    await converge(member)
    assert {topic_id.rstrip(b"\0") for topic_id, _ in member.owned} == {b"orders-eu", b"orders-us"}
    topics.counts["orders-asia"] = 3
    await world.clock.advance(11_000)
    await converge(member)
    assert len(member.owned) == 7


@pytest.mark.parametrize("regex", ["(", "(?<=a)b", "x" * 20_000])
async def test_an_expression_that_is_not_valid_is_refused(regex: str) -> None:
    world, _ = make_world()
    answer = await Client(world, "a", regex=regex).heartbeat()
    assert answer.error is ErrorCode.INVALID_REGULAR_EXPRESSION
    assert list(world.coordinator.groups()) == []


async def test_the_range_assignor_assigns_equal_topics_alike() -> None:
    world, topics = make_world(left=4, right=4)
    names = frozenset({"left", "right"})
    clients = [Client(world, name, topics=names, assignor="range") for name in "ab"]
    await converge(*clients)
    for client in clients:
        indexes = {name: {i for t, i in client.owned if t == topics.id_of(name)} for name in names}
        assert indexes["left"] == indexes["right"]
        assert len(indexes["left"]) == 2


async def test_only_a_member_with_the_right_epoch_commits() -> None:
    world, topics = make_world()
    member = Client(world, "a")
    await converge(member)
    commit = world.commit
    assert await commit(member_id="a", generation=member.epoch) is ErrorCode.NONE
    assert await commit(member_id="a", generation=member.epoch + 1) is ErrorCode.STALE_MEMBER_EPOCH
    assert await commit(member_id="b", generation=1) is ErrorCode.UNKNOWN_MEMBER_ID
    assert await commit() is ErrorCode.UNKNOWN_MEMBER_ID, "the group has members"
    before_epochs = CommitRequested(0, "a", None, member.epoch, knows_epochs=False)
    error = await world.coordinator.offsets.commit("g", before_epochs, {KEY: committed_offset(5)})
    assert error is ErrorCode.UNSUPPORTED_VERSION, "of OffsetCommit"
    topics.counts["more"] = 1
    await member.subscribe(frozenset({"orders", "more"}))
    await converge(member)
    earlier = member.epoch - 1
    owned_all_along = await commit(member_id="a", generation=earlier)
    assert owned_all_along is ErrorCode.NONE
    got_later = await commit(member_id="a", generation=earlier, key=("more", 0))
    assert got_later is ErrorCode.STALE_MEMBER_EPOCH
    await member.leave()
    assert await commit(7) is ErrorCode.NONE, "an administrator resets an empty group"
    assert world.offsets() == {
        KEY: 7,
    }


async def test_a_stale_epoch_in_a_transaction_is_an_illegal_generation() -> None:
    """Producers know ILLEGAL_GENERATION and abort; STALE_MEMBER_EPOCH would end them."""
    world, _ = make_world()
    member = Client(world, "a")
    await converge(member)
    stale = CommitRequested(0, "a", None, member.epoch + 1)
    error = await world.coordinator.offsets.commit_in_transaction(
        "g", stale, {KEY: committed_offset(5)}, Producer(1, 0)
    )
    assert error is ErrorCode.ILLEGAL_GENERATION


async def test_only_a_member_with_the_right_epoch_fetches_offsets() -> None:
    world, _ = make_world()
    first, second = Client(world, "a"), Client(world, "b")
    await converge(first)
    fetch_error = world.coordinator.offsets.fetch_error
    assert fetch_error("g", "a", first.epoch) is ErrorCode.NONE
    await converge(first, second)
    assert fetch_error("g", "a", first.epoch - 1) is ErrorCode.STALE_MEMBER_EPOCH
    assert fetch_error("g", "a", first.epoch + 1) is ErrorCode.STALE_MEMBER_EPOCH
    assert fetch_error("g", "c", first.epoch) is ErrorCode.UNKNOWN_MEMBER_ID
    assert fetch_error("g", None, -1) is ErrorCode.NONE, "an administrator"


async def test_while_a_group_is_deleted_no_classic_member_takes_its_place() -> None:
    world, _ = make_world()
    member = Client(world, "a")
    await converge(member)
    await world.commit(5, member_id="a", generation=member.epoch)
    await member.leave()
    world.log.held = True
    deletion = await world.begin(world.coordinator.deletion.delete_group("g"))
    join = await world.begin(world.join())
    world.log.held = False
    world.log.release()
    assert await deletion is ErrorCode.NONE
    assert (await join).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert world.offsets() == {}, "as after a restart"


async def test_a_group_changes_its_protocol_while_it_is_empty_and_keeps_its_offsets() -> None:
    world, _ = make_world()
    classic = await world.stable()
    assert await world.commit(member_id=classic, generation=1) is ErrorCode.NONE
    member = Client(world, "a")
    assert (await member.heartbeat()).error is ErrorCode.GROUP_ID_NOT_FOUND
    world.restart()
    await world.clock.advance(60_000)
    assert (await member.heartbeat()).error is ErrorCode.NONE
    assert world.offsets() == {KEY: 5}
    assert (await world.join()).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    await member.leave()
    await world.stable()
    world.restart()
    assert [summary.type for summary in world.coordinator.groups()] == ["classic"]
    assert world.offsets() == {KEY: 5}


async def test_a_deleted_group_leaves_nothing_in_the_log() -> None:
    world, _ = make_world()
    member = Client(world, "a", regex="ord.*")
    await converge(member)
    assert await world.coordinator.deletion.delete_group("g") is ErrorCode.NON_EMPTY_GROUP
    await member.leave()
    assert await world.coordinator.deletion.delete_group("g") is ErrorCode.NONE
    world.restart()
    assert list(world.coordinator.groups()) == []


async def test_an_answer_waits_for_the_log_and_a_failed_append_loses_no_change() -> None:
    world, _ = make_world()
    member = Client(world, "a")
    await converge(member)
    world.log.error = LogDirectoryError("/d", "disk")
    other = Client(world, "b")
    assert (await other.heartbeat()).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.log.error = None
    await converge(member, other)
    check_restart(world)


async def test_the_work_of_a_heartbeat_does_not_grow_with_the_appends_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a disk is full, each heartbeat tries again: for hours, if nobody makes room."""
    world, _ = make_world()
    clients = [Client(world, name) for name in "abc"]
    await converge(*clients)
    compared: list[ConsumerGroup] = []

    async def counted(
        before: ConsumerGroup, after: ConsumerGroup, keys: Sequence[bytes]
    ) -> Mapping[bytes, bytes | None]:
        compared.append(before)
        return await encode_changes(before, after, keys)

    monkeypatch.setattr(live_consumer_group, "encode_changes", counted)
    world.log.error = NoRoomError(OSError(errno.ENOSPC, "full"), "/d")
    await clients.pop().leave()
    for _ in range(50):
        compared.clear()
        assert (await clients[0].heartbeat()).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert len(compared) == 1
    world.log.error = None
    await converge(*clients)
    check_restart(world)


async def test_an_answer_needs_the_appends_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large append may find no room where the small one after it does."""
    monkeypatch.setattr(loop_turns, "perf_counter", lambda: 0.0)  # no turn ends
    world, _ = make_world(orders=6, more=2)
    first, second = Client(world, "a"), Client(world, "b", topics=frozenset({"more"}))
    await converge(first)

    async def join_without_room() -> HeartbeatAnswer:
        world.log.error = NoRoomError(OSError(errno.ENOSPC, "full"), "/d")
        return await second.heartbeat()

    async def heartbeat_with_room() -> HeartbeatAnswer:
        world.log.error = None
        return await first.heartbeat()

    joined, answer = await asyncio.gather(join_without_room(), heartbeat_with_room())
    assert joined.error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.restart()
    assert answer.error is not ErrorCode.NONE or answer.epoch <= group(world).epoch
    await converge(first, second)
    assert (len(first.owned), len(second.owned)) == (6, 2)


@pytest.mark.parametrize("release", [None, LogDirectoryError("/d", "disk")])
async def test_a_deletion_removes_what_appends_under_way_may_have_written(
    release: Exception | None,
) -> None:
    world, _ = make_world()
    first = Client(world, "a", regex="ord.*")
    await converge(first)
    world.log.held = True
    second = await world.begin(Client(world, "b").heartbeat())
    leaving = [await world.begin(first.send(-1)), await world.begin(Client(world, "b").send(-1))]
    world.log.held = False
    deletion = await world.begin(world.coordinator.deletion.delete_group("g"))
    world.log.release(release)
    assert await deletion is ErrorCode.NONE
    for request in (second, *leaving):
        await request
    loader = ConsumerGroupLoader()
    for batch in world.log.batches[0]:
        for _, records in decode_batches(batch):
            for record in records:
                key = decode_key(record.key or b"")
                if key is not None:
                    loader.add(key, record.value)
    loader.add(ConsumerGroupMetadataKey(group_id="g"), GROUP_METADATA)
    assert loader.groups()["g"] == ConsumerGroup("g", epoch=1), "nothing of it is left"


@pytest.mark.parametrize("seed", range(cases(few=20, many=200)))
async def test_in_random_lives_no_partition_has_two_owners_and_all_are_assigned(seed: int) -> None:
    """Members join, leave, fall silent, subscribe anew; topics grow; appends fail; restarts."""
    chance = random.Random(seed)
    world, topics = make_world(orders=chance.randint(1, 12), more=chance.randint(1, 5))
    names = [frozenset({"orders"}), frozenset({"orders", "more"})]
    clients = [
        Client(
            world,
            f"m{index}",
            topics=names[0],
            instance_id=chance.choice([None, f"i{index}"]),
            assignor=chance.choice([None, "uniform", "range"]),
        )
        for index in range(chance.randint(1, 5))
    ]
    for step in range(80):
        world.log.error = LogDirectoryError("/d", "disk") if chance.random() < 0.05 else None
        client = chance.choice(clients)
        match chance.random():
            case x if x < 0.75:
                await client.heartbeat()
            case x if x < 0.80 and client.epoch > 0:
                await client.leave(-2 if client.instance_id and chance.random() < 0.5 else -1)
            case x if x < 0.87 and client.epoch > 0:
                await client.subscribe(chance.choice(names))
            case x if x < 0.90:
                topics.counts["orders"] += chance.randint(0, 2)
            case x if x < 0.95:
                await world.clock.advance(chance.randint(0, 20_000))
            case _ if world.log.error is None:
                if (await client.heartbeat()).error is ErrorCode.NONE:
                    before = group(world)
                    world.restart()
                    assert group(world) == before, (seed, step)
        _check_owners(world, clients, seed, step)
    world.log.error = None
    await world.clock.advance(2_000)
    await converge(*clients, rounds=15)
    wanted = {(topics.id_of(n), i) for n in ("orders",) for i in range(topics.counts[n])}
    owned = [partition for client in clients for partition in client.owned]
    assert len(owned) == len(set(owned)), seed
    assert wanted <= set(owned), seed
    assert group(world).state is GroupState.STABLE, seed


def _check_owners(world: World, clients: list[Client], seed: int, step: int) -> None:
    """Nobody else owns what a client owns that the coordinator still counts as a member."""
    if not list(world.coordinator.groups()):
        return
    members = group(world).members
    owners: dict[tuple[bytes, int], str] = {}
    for client in clients:
        member = members.get(client.member_id)
        if member is None or member.epoch < client.epoch:
            continue
        for partition in client.owned:
            assert owners.setdefault(partition, client.member_id) == client.member_id, (seed, step)


def names(first: int, count: int) -> frozenset[str]:
    return frozenset(f"t{index:06}" for index in range(first, first + count))


async def test_the_subscriptions_of_a_group_have_a_limit() -> None:
    world, _ = make_world()
    first = Client(world, "a", topics=names(0, NAMES_MAX - 1))
    second = Client(world, "b", topics=names(NAMES_MAX, 2))
    assert (await first.heartbeat()).error is ErrorCode.NONE
    before = group(world)
    refused = await second.heartbeat()
    assert refused.error is ErrorCode.INVALID_REQUEST
    assert str(NAMES_MAX) in (refused.message or "")
    assert group(world) is before
    assert (await first.subscribe(names(0, 1))).error is ErrorCode.NONE
    assert (await second.heartbeat()).error is ErrorCode.NONE


async def test_the_expressions_of_a_group_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "REGEXES_MAX", 2)
    world, _ = make_world()
    clients = [Client(world, name, topics=NO_TOPICS, regex=f"none-{name}") for name in "abc"]
    errors = [(await client.heartbeat()).error for client in clients]
    assert errors == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.INVALID_REQUEST]
    await clients[1].leave()
    assert (await clients[2].heartbeat()).error is ErrorCode.NONE
    again = Client(world, "d", topics=NO_TOPICS, regex="none-a")
    assert (await again.heartbeat()).error is ErrorCode.NONE


async def test_equal_subscriptions_count_once_and_are_kept_once() -> None:
    world, _ = make_world()
    clients = [Client(world, name, topics=names(0, NAMES_MAX)) for name in "ab"]
    await converge(*clients, rounds=2)
    world.restart()
    for _ in range(2):
        first, second = group(world).members.values()
        assert first.topics is second.topics
        await converge(*clients, rounds=1)


async def test_members_with_one_expression_share_its_topics() -> None:
    world, _ = make_world(**{f"t{index}": 1 for index in range(4)})
    clients = [Client(world, name, topics=NO_TOPICS, regex="t.*") for name in "ab"]
    await converge(*clients)
    task = assignment_task(group(world), {})
    first, second = (member.topics for member in task.members)
    assert first is second


async def test_names_of_topics_that_do_not_exist_cost_an_assignor_nothing() -> None:
    world, topics = make_world(orders=6)
    missing = names(0, 2_000)
    clients = [
        Client(world, "a", topics=missing | {"orders"}, assignor="range"),
        Client(world, "b", topics=missing | {"orders"}, assignor="range"),
        Client(world, "c", topics=frozenset({"orders"})),
    ]
    await converge(*clients)
    task = assignment_task(group(world), topics.existing())
    first, second, third = (member.topics for member in task.members)
    assert first is second is third
    assert first == {"orders"}


async def test_the_size_of_an_assignment_counts_the_members_of_each_topic() -> None:
    world, topics = make_world(orders=50, bills=50)
    clients = [
        Client(world, "a", topics=frozenset({"orders"})),
        Client(world, "b", topics=frozenset({"orders", "bills"})),
    ]
    await converge(*clients)
    assert assignment_size(group(world), topics.existing()) == 2 + 100 + 2 * 2


async def test_one_user_has_one_large_assignment_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, may_end = list[str](), threading.Event()
    world, topics = make_world(alice=2, bob=2)
    compute = AssignmentTask.compute

    def slow_for_alice(task: AssignmentTask) -> Mapping[str, Assignment]:
        (topic,) = task.topics
        began.append(topic)
        assert topic == "bob" or may_end.wait(60)
        return compute(task)

    monkeypatch.setattr(AssignmentTask, "compute", slow_for_alice)
    monkeypatch.setattr(live_consumer_group, "SMALL_ASSIGNMENT", 0)

    def member(user: str, group_id: str) -> Client:
        return Client(world, "m", topics=frozenset({user}), group_id=group_id, user=user)

    waiting = [await world.begin(member("alice", f"g{number}").heartbeat()) for number in range(3)]
    try:
        answer = await member("bob", "h").heartbeat()
        assert answer.assignment == {(topics.id_of("bob"), index) for index in range(2)}
        assert sorted(began) == ["alice", "bob"]
    finally:
        may_end.set()
    assert [len(answer.assignment or ()) for answer in await asyncio.gather(*waiting)] == [2, 2, 2]


@pytest.fixture
def every_assignment_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_consumer_group, "SMALL_ASSIGNMENT", 0)
    monkeypatch.setattr(large_group_turns, "LARGE_GROUP", 1)


async def test_members_that_wait_for_a_large_assignment_share_the_next_one(
    monkeypatch: pytest.MonkeyPatch, every_assignment_is_large: None
) -> None:
    threads, may_end = list[int](), threading.Event()
    world, _ = make_world(orders=12)

    def slow(group: ConsumerGroup, topics: Mapping[str, TopicMetadata]) -> AssignmentTask:
        threads.append(threading.get_ident())
        assert may_end.wait(60)
        return assignment_task(group, topics)

    monkeypatch.setattr(state, "assignment_task", slow)
    joins = [await world.begin(Client(world, name).heartbeat()) for name in "abcdefghij"]
    for _ in range(50):
        await asyncio.sleep(0)
    may_end.set()
    answers = await asyncio.gather(*joins)
    assert {answer.error for answer in answers} == {ErrorCode.NONE}
    assert len(threads) == 2, "of the first member, and of all"
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("epoch", [0, -1])
async def test_heartbeats_of_large_groups_take_turns(
    monkeypatch: pytest.MonkeyPatch, every_assignment_is_large: None, epoch: int
) -> None:
    world, rounds = make_world(orders=12)[0], [0]
    clients = [Client(world, f"m{n}", group_id=g) for n in range(6) for g in ("g", "h")]
    await converge(*clients, rounds=3)
    visits: dict[tuple[object, ...], int] = {}  # the round of each step that looks at all members

    def note(place: ModuleType, step: str, member_id: Callable[..., str]) -> None:
        function = getattr(place, step)

        def noted(group: ConsumerGroup, *arguments: Any) -> object:
            visits.setdefault((step, group.group_id, member_id(*arguments)), rounds[-1])
            return function(group, *arguments)

        monkeypatch.setattr(place, step, noted)

    note(state, "update_member", lambda request, *_: request.member_id)
    note(state, "after_leave", lambda request: request.member_id)
    note(live_consumer_group, "reconciled", lambda member, _owned: member.member_id)
    for client in clients:
        client.epoch = epoch
    beats = [asyncio.ensure_future(client.heartbeat()) for client in clients]
    while not all(beat.done() for beat in beats):
        rounds.append(rounds[-1] + 1)
        await asyncio.sleep(0)
    assert len(visits) == len(clients) * (2 if epoch == 0 else 1)
    most = Counter((step, visited) for (step, *_), visited in visits.items())
    assert max(most.values()) == 1, most


async def test_a_heartbeat_that_reports_nothing_waits_for_no_other(
    every_assignment_is_large: None,
) -> None:
    """Or the sessions of a group of thousands would end while its heartbeats wait."""
    world, _ = make_world(orders=12)
    clients = [Client(world, f"m{n}", group_id="g") for n in range(6)]
    await converge(*clients, rounds=3)
    for client in clients[:-1]:
        client.epoch = 0
    joins = [asyncio.ensure_future(client.heartbeat()) for client in clients[:-1]]
    answer = asyncio.ensure_future(clients[-1].send(clients[-1].epoch))
    for _ in range(3):
        await asyncio.sleep(0)
    assert answer.done()
    assert not all(join.done() for join in joins)
    await asyncio.gather(*joins)


def records_of(world: World) -> int:
    return sum(map(len, world.log.appends))


async def refused(client: Client, world: World) -> None:
    """The subscription of a client is refused and changes nothing."""
    before, records = group(world), records_of(world)
    answer = await client.heartbeat()
    assert answer.error is ErrorCode.UNKNOWN_SERVER_ERROR
    assert "max.message.bytes" in (answer.message or "")
    assert group(world) is before
    assert records_of(world) == records


async def test_a_subscription_whose_records_exceed_the_limit_is_refused() -> None:
    world, topics = make_world(orders=6, wide=1_000, **{f"t{n}" * 10: 1 for n in range(100)})
    world.log.max_batch_bytes = 3_000
    works = Client(world, "a")
    await converge(works)
    await refused(Client(world, "names", topics=names(0, 1_000)), world)
    await refused(Client(world, "partitions", topics=frozenset({"wide"})), world)
    await refused(Client(world, "regex", topics=NO_TOPICS, regex="t.*"), world)
    await refused(Client(world, "long", topics=NO_TOPICS, regex="é" * 1_500), world)
    topics.counts["orders"] = 7
    await world.clock.advance(1_000)
    await converge(works)
    assert len(works.owned) == 7, "the group goes on"
    world.restart()
    assert (await works.heartbeat()).error is ErrorCode.NONE
    assert group(world).members.keys() == {"a"}


async def test_a_member_keeps_its_subscription_if_its_next_one_is_too_large_for_its_record() -> (
    None
):
    world, _ = make_world(orders=6)
    world.log.max_batch_bytes = 3_000
    member = Client(world, "a")
    await converge(member)
    member.topics, member.missed_answer = names(0, 1_000), True
    await refused(member, world)
    member.topics = frozenset({"orders"})
    await converge(member)
    assert len(member.owned) == 6


@pytest.mark.parametrize("seed", range(cases(few=3, many=30)))
async def test_no_record_is_larger_than_the_subscription_was_estimated(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    counts = {"é" * rng.randrange(1, 40) + str(n): rng.randrange(1, 300) for n in range(50)}
    world, topics = make_world(**counts)
    for number in range(5):
        subscription = frozenset(rng.sample(sorted(counts), rng.randrange(1, 50)))
        instance_id = rng.choice([None, "i" * rng.randrange(1, 900) + str(number)])
        client = Client(world, f"m{number}", topics=subscription, instance_id=instance_id)
        await converge(client)
        after = group(world)
        member = after.members[client.member_id]
        bound = largest_record_bytes(ConsumerGroup("g"), after, member, topics.existing())
        records = await encode_changes(ConsumerGroup("g"), after, ())
        of_member = [
            HEADER_BYTES + len(key) + len(value or b"")
            for key, value in records.items()
            if client.member_id.encode() in key
        ]
        assert max(of_member) <= bound


class CountedTopics(FakeTopics):
    lookups = 0

    def topic(self, name: str) -> TopicMetadata | None:
        self.lookups += 1
        return super().topic(name)


@pytest.fixture
def every_turn_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = count()
    monkeypatch.setattr(
        loop_turns, "perf_counter", lambda: next(moments) * loop_turns.TURN_SECONDS * 2
    )


async def test_the_topics_of_a_subscription_are_looked_up_in_turns(
    every_turn_is_over: None,
) -> None:
    topics = CountedTopics({"orders": 1, "bills": 1})
    world = World(topics=topics)
    first = Client(world, "a", topics=names(0, 200) | {"orders"})
    second = Client(world, "b", topics=names(200, 400) | {"bills"})
    joins = [asyncio.ensure_future(client.heartbeat()) for client in (first, second)]
    most = 0
    while not all(join.done() for join in joins):
        before = topics.lookups
        await asyncio.sleep(0)
        most = max(most, topics.lookups - before)
    assert most <= 2
    await converge(first, second)
    owned = [{topic_id.rstrip(b"\0") for topic_id, _ in c.owned} for c in (first, second)]
    assert owned == [{b"orders"}, {b"bills"}], "each has looked up the topics of the other"


async def test_a_group_is_served_while_the_topics_of_its_first_member_are_looked_up(
    every_turn_is_over: None,
) -> None:
    world, _ = make_world(orders=1)
    first = Client(world, "a", topics=names(0, 200) | {"orders"})
    join = asyncio.ensure_future(first.heartbeat())
    await asyncio.sleep(0)
    stranger = Client(world, "b")
    stranger.epoch = 3
    assert (await stranger.heartbeat()).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert not join.done()
    assert (await join).error is ErrorCode.NONE
    assert group(world).members.keys() == {"a"}


async def begin_encoding(world: World, client: Client) -> "asyncio.Task[HeartbeatAnswer]":
    """Begin a heartbeat whose records are being encoded when this returns."""
    live = world.coordinator._served.get("g")
    assert isinstance(live, LiveConsumerGroup)
    heartbeat = asyncio.ensure_future(client.heartbeat())
    while not live._encoding.locked():
        assert not heartbeat.done()
        await asyncio.sleep(0)
    return heartbeat


async def test_records_are_encoded_in_turns_and_appended_in_the_order_of_the_changes(
    every_turn_is_over: None,
) -> None:
    world, _ = make_world(orders=2)
    first = Client(world, "a")
    await converge(first)
    world.log.appends.clear()
    subscription = names(0, 5 * ELEMENTS_PER_SLICE) | {"orders"}
    large = await begin_encoding(world, Client(world, "b", topics=subscription))
    small = asyncio.ensure_future(Client(world, "c").heartbeat())
    turns = 0
    while not world.log.appends:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 5
    assert [(await each).error for each in (large, small)] == [ErrorCode.NONE] * 2
    members = [
        key.member_id
        for records in world.log.appends
        for data, _ in records
        if isinstance(key := decode_key(data), ConsumerGroupMemberMetadataKey)
    ]
    assert members == ["b", "c"]
    check_restart(world)


async def test_no_record_follows_the_tombstones_of_a_group_that_is_deleted_while_one_is_encoded(
    every_turn_is_over: None,
) -> None:
    world, _ = make_world(orders=2)
    await converge(Client(world, "a"))
    join = await begin_encoding(world, Client(world, "b"))
    live = world.coordinator._served.get("g")
    assert live is not None
    live.begin_deletion()
    records = records_of(world)
    assert (await join).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert records_of(world) == records
    live.fail_deletion()
    assert (await Client(world, "c").heartbeat()).error is ErrorCode.NONE
    check_restart(world)


async def test_the_change_of_a_client_that_leaves_while_its_records_are_encoded_is_appended(
    every_turn_is_over: None,
) -> None:
    world, _ = make_world(orders=2)
    await converge(Client(world, "a"))
    join = await begin_encoding(world, Client(world, "b"))
    join.cancel()
    await asyncio.wait([join])
    await settle()
    before = group(world)
    assert "b" in before.members
    world.restart()
    assert group(world) == before


@pytest.mark.parametrize("is_classic", [False, True])
async def test_a_member_whose_client_leaves_during_its_join_has_a_session_timeout(
    every_turn_is_over: None, is_classic: bool
) -> None:
    is_over, turns = False, 0
    while not is_over:
        world, _ = make_world(orders=2)
        first = Client(world, "a")
        await converge(first)
        second = ClassicClient(world, "b", instance_id="b") if is_classic else Client(world, "b")
        join = asyncio.ensure_future(
            second.join() if isinstance(second, ClassicClient) else second.heartbeat()
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        is_over = join.done()
        join.cancel()
        await asyncio.wait([join])
        for _ in range(10):
            await world.clock.advance(SESSION_MS / 5)
            await first.heartbeat()
        assert group(world).members.keys() == {"a"}, f"left after {turns} turns"
        turns += 1
    assert turns > 5


async def test_a_member_does_not_join_a_group_that_is_deleted_while_topics_are_looked_up(
    every_turn_is_over: None,
) -> None:
    world, _ = make_world(orders=1)
    first = Client(world, "a", topics=names(0, 200) | {"orders"})
    join = asyncio.ensure_future(first.heartbeat())
    await asyncio.sleep(0)
    live = world.coordinator._served.get("g")
    assert live is not None
    live.begin_deletion()
    assert (await join).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert not live.group.members


async def test_a_group_of_many_names_looks_for_topics_less_often() -> None:
    topics = CountedTopics({"orders": 1})
    world = World(topics=topics)
    client = Client(world, "a", topics=names(0, NAMES_MAX))
    await client.heartbeat()
    topics.lookups = 0
    for _ in range(20):
        await world.clock.advance(1_000)
        await client.heartbeat()
    assert topics.lookups <= 20 * NAMES_PER_CHECK
    topics.counts["t000000"] = 1
    await world.clock.advance(10_000)
    await client.heartbeat()
    assert len(client.owned) == 1


async def test_names_of_subscriptions_have_a_budget() -> None:
    request_bytes = 10 * NAME_BYTES + CONSUMER_MEMBER_BYTES
    world = World(max_metadata_bytes=64 * request_bytes, topics=FakeTopics())
    first, second = (Client(world, name, topics=names(0, 10)) for name in "ab")
    third = Client(world, "c", topics=names(10, 10))
    answers = [await client.heartbeat() for client in (first, second, third)]
    assert [answer.error for answer in answers] == [0, 0, ErrorCode.POLICY_VIOLATION]
    await first.leave()
    await second.leave()
    assert (await third.heartbeat()).error is ErrorCode.NONE


async def test_each_new_member_takes_memory_also_without_names() -> None:
    world = World(max_metadata_bytes=66 * CONSUMER_MEMBER_BYTES, topics=FakeTopics())
    clients = [Client(world, f"c{number}", topics=NO_TOPICS) for number in range(4)]
    errors = [(await client.heartbeat()).error for client in clients]
    assert errors == [ErrorCode.NONE] * 3 + [ErrorCode.POLICY_VIOLATION]
    assert (await clients[0].heartbeat()).error is ErrorCode.NONE
    await clients[1].leave()
    assert (await clients[3].heartbeat()).error is ErrorCode.NONE


async def test_a_stored_assignor_that_only_another_broker_has_does_not_count() -> None:
    world, _ = make_world()
    stored = Client(world, "a", assignor="com.example.Assignor")
    assert (await stored.heartbeat()).error is ErrorCode.NONE, "as a Kafka broker has taken it"
    world.restart()
    client = Client(world, "b", assignor="range")
    await converge(stored, client)
    assert preferred_assignor(group(world)) == "range"
    assert len(client.owned) == 3


async def test_a_stored_expression_that_is_refused_here_keeps_its_topics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, _ = make_world()
    stored, other = Client(world, "a", topics=NO_TOPICS, regex="(orders)+"), Client(world, "b")
    await stored.heartbeat()
    world.restart()
    monkeypatch.setattr(client_patterns, "PATTERN_CHARS_MAX", 5)
    await converge(stored, other)
    assert [len(client.owned) for client in (stored, other)] == [3, 3]
    refused = Client(world, "c", regex="(orders)+.")
    assert (await refused.heartbeat()).error is ErrorCode.INVALID_REGULAR_EXPRESSION
