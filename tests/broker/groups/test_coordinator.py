"""The coordinator under a clock that tests move and a log they acknowledge."""

import asyncio
import random
import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from structlog.testing import capture_logs

from broker import groups, transactions
from broker.groups.coordinator import PartitionState
from broker.groups.model import (
    CommitRequested,
    CompletingRebalance,
    Empty,
    GroupRules,
    HeartbeatReceived,
    LeaveRequested,
    Stable,
)
from broker.groups.offset_records import CommittedOffset
from broker.groups.offsets_store import LoadedPartition
from broker.logging import LINES_PER_BURST
from broker.topics.internal_topic import KeyedLog
from protocol.errors import ErrorCode
from storage.errors import LogDirectoryError, MessageTooLargeError
from tests.support.broker.group_machine import REBALANCE_MS, SESSION_MS, join_request
from tests.support.broker.group_world import KEY, World
from tests.support.draws import cases
from tests.support.virtual_clock import settle

UNLIMITED_LINE: Final = re.compile(r'\blogger\.(?:info|warning|error)\(\s*"([^"]+)"')

# Members ------------------------------------------------------------------------------------------


async def test_a_member_id_begins_with_the_client_id() -> None:
    world = World()
    answer = await world.coordinator.join("g", join_request(client_id="my-client"))
    assert answer.error is ErrorCode.MEMBER_ID_REQUIRED
    assert answer.member_id == "my-client-id0"
    static = await world.join(group_id="h", instance_id="inst")
    assert static.member_id.startswith("inst-")


async def test_a_name_of_any_length_gives_an_id_that_fits_the_protocol() -> None:
    world = World()
    name = "é" * 16_383
    dynamic = await world.stable(client_id=name)
    static = await world.join(group_id="h", instance_id=name)
    assert max(len(dynamic.encode()), len(static.member_id.encode())) < 1_024


async def test_texts_that_the_log_cannot_hold_are_refused() -> None:
    world = World()
    long = "x" * 32_768
    assert (await world.join(group_id=long)).error is ErrorCode.INVALID_GROUP_ID
    assert await world.commit(group_id=long) is ErrorCode.INVALID_GROUP_ID
    assert (await world.join(instance_id=long)).error is ErrorCode.INVALID_REQUEST
    assert (await world.join(protocol_type=long)).error is ErrorCode.INVALID_REQUEST
    assert (await world.join(protocols=((long, b""),))).error is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("timeout_ms", "error"),
    [
        (5_999, ErrorCode.INVALID_SESSION_TIMEOUT),
        (6_000, ErrorCode.MEMBER_ID_REQUIRED),
        (1_800_000, ErrorCode.MEMBER_ID_REQUIRED),
        (1_800_001, ErrorCode.INVALID_SESSION_TIMEOUT),
    ],
)
async def test_session_timeouts_have_bounds(timeout_ms: int, error: ErrorCode) -> None:
    world = World()
    answer = await world.coordinator.join("g", join_request(session_timeout_ms=timeout_ms))
    assert answer.error is error


async def test_members_need_a_group_id() -> None:
    world = World()
    assert (await world.join(group_id="")).error is ErrorCode.INVALID_GROUP_ID
    assert (await world.sync("m", 1, "")).error is ErrorCode.INVALID_GROUP_ID
    assert world.heartbeat("m", 1, "") is ErrorCode.INVALID_GROUP_ID
    answer = await world.coordinator.leave("", LeaveRequested(0, (("m", None),)))
    assert answer.error is ErrorCode.INVALID_GROUP_ID


async def test_an_unknown_group_has_no_members() -> None:
    world = World()
    assert (await world.join("m")).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert (await world.sync("m", 1)).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.heartbeat("m") is ErrorCode.UNKNOWN_MEMBER_ID
    answer = await world.coordinator.leave("g", LeaveRequested(0, (("m", None),)))
    assert answer.members == (("m", None, ErrorCode.UNKNOWN_MEMBER_ID),)
    assert list(world.coordinator.groups()) == []


async def test_metadata_and_protocols_are_bounded() -> None:
    world = World(max_member_metadata_bytes=10, max_protocols=2)
    fitting = await world.join(protocols=(("range", b"x" * 5), ("roundrobin", b"x" * 5)))
    assert fitting.error is ErrorCode.NONE
    large = await world.join(protocols=(("range", b"x" * 11),))
    many = await world.join(protocols=tuple((f"p{i}", b"") for i in range(3)))
    assert {large.error, many.error} == {ErrorCode.INVALID_REQUEST}


async def test_the_number_of_groups_is_bounded() -> None:
    world = World(max_groups=1)
    await world.stable("g")
    assert (await world.join(group_id="h")).error is ErrorCode.POLICY_VIOLATION
    assert await world.commit(group_id="h") is ErrorCode.POLICY_VIOLATION


async def test_one_principal_leaves_groups_for_others() -> None:
    world = World(max_groups=4)
    offsets = {KEY: CommittedOffset(1)}
    request = CommitRequested(0, "", None, -1)

    async def commit(group_id: str, creator: str) -> ErrorCode:
        return await world.coordinator.commit(group_id, request, offsets, creator)

    assert [await commit(f"a{n}", "a") for n in range(3)] == [0, 0, ErrorCode.POLICY_VIOLATION]
    assert (await world.coordinator.join("a3", join_request(), "a")).error is (
        ErrorCode.POLICY_VIOLATION
    )
    assert await commit("b", "b") is ErrorCode.NONE
    assert await world.coordinator.delete_group("a0") is ErrorCode.NONE
    assert await world.coordinator.delete_group("a1") is ErrorCode.NONE
    assert await commit("a4", "a") is ErrorCode.NONE


async def test_a_join_waits_until_the_others_have_joined() -> None:
    world = World()
    first = await world.stable()
    second = await world.begin(world.join())
    assert not second.done()
    assert world.heartbeat(first) is ErrorCode.REBALANCE_IN_PROGRESS
    answer = await world.join(first)
    assert answer.generation == (await second).generation == 2
    assert answer.leader == first


async def test_a_silent_member_is_removed_after_its_session_timeout() -> None:
    world = World()
    member = await world.stable()
    await world.clock.advance(SESSION_MS - 1)
    assert world.heartbeat(member) is ErrorCode.NONE
    await world.clock.advance(SESSION_MS - 1)
    assert isinstance(world.state(), Stable)
    await world.clock.advance(1)
    assert world.heartbeat(member) is ErrorCode.UNKNOWN_MEMBER_ID
    assert isinstance(world.state(), Empty)
    assert world.coordinator.stats.members_expired == 1
    assert world.clock.running == 0


async def test_members_that_expire_again_and_again_cause_few_log_lines() -> None:
    world = World()
    with capture_logs() as lines:
        for _ in range(2 * LINES_PER_BURST):
            await world.stable("expiring")  # the limit is by group, for all tests
            await world.clock.advance(SESSION_MS)
    written = Counter(line["event"] for line in lines if line["log_level"] == "info")
    assert set(written) == {"group changed", "member expired"}
    assert max(written.values()) < LINES_PER_BURST + 50  # and one a second
    assert world.coordinator.stats.members_expired == 2 * LINES_PER_BURST


def test_lines_that_clients_cause_are_limited() -> None:
    """Only what the broker does by itself, once in a while, is written without a limit."""
    unlimited = set()
    for package in (groups, transactions):
        for path in Path(package.__path__[0]).rglob("*.py"):
            unlimited |= set(UNLIMITED_LINE.findall(path.read_text()))
    assert unlimited == {
        "group append failed",
        "marker not written",
        "offsets expired",
        "transaction append failed",
        "transactional id not expired",
        "transactional ids expired",
    }


async def test_a_rebalance_ends_at_the_rebalance_timeout_without_the_missing() -> None:
    world = World()
    await world.stable(session_timeout_ms=1_000_000)
    second = await world.begin(world.join())
    await world.clock.advance(REBALANCE_MS - 1)
    assert not second.done()
    await world.clock.advance(1)
    answer = await second
    assert answer.leader == answer.member_id
    assert len(answer.members) == 1


async def test_the_assignment_is_in_the_log_before_a_member_gets_it() -> None:
    world = World()
    answer = await world.join()
    world.log.held = True
    sync = await world.begin(world.sync(answer.member_id, 1, **{answer.member_id: b"mine"}))
    assert not sync.done()
    assert isinstance(world.state(), CompletingRebalance)
    world.log.release()
    assert (await sync).assignment == b"mine"
    restored = world.log.load().groups["g"]
    assert restored.members[answer.member_id].assignment == b"mine"


async def test_a_client_that_disconnects_while_its_join_waits_leaves_by_its_session() -> None:
    world = World()
    first = await world.stable()
    second = await world.begin(world.join())
    second.cancel()
    await settle()
    again = await world.begin(world.join(first))
    assert not again.done()
    await world.clock.advance(SESSION_MS)
    assert [m for m, _, _ in (await again).members] == [first]
    assert second.cancelled()


async def test_a_client_that_disconnects_while_its_sync_waits_leaves_by_its_session() -> None:
    world = World()
    answer = await world.join()
    world.log.held = True
    sync = await world.begin(world.sync(answer.member_id, 1))
    sync.cancel()
    await settle()
    world.log.release()
    await settle()
    assert isinstance(world.state(), Stable)
    await world.clock.advance(SESSION_MS)
    assert isinstance(world.state(), Empty)


async def test_an_append_that_never_ends_is_given_up_and_the_group_begins_again() -> None:
    world = World()
    answer = await world.join()
    world.log.held = True
    sync = await world.begin(world.sync(answer.member_id, 1))
    await world.clock.advance(world.settings.append_timeout_ms)
    assert (await sync).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    world.log.release()
    await settle()
    assert not isinstance(world.state(), Stable)


async def test_a_group_record_that_is_too_large_fails_for_good() -> None:
    world = World()
    answer = await world.join()
    world.log.error = MessageTooLargeError(2, 1)
    assert (await world.sync(answer.member_id, 1)).error is ErrorCode.UNKNOWN_SERVER_ERROR


async def test_a_group_nobody_came_back_to_is_forgotten() -> None:
    world = World()
    await world.coordinator.join("g", join_request())
    assert world.state() is not None
    await world.clock.advance(SESSION_MS)
    assert world.state() is None
    assert world.log.appends == []


async def test_a_refused_join_leaves_no_group_behind() -> None:
    world = World()
    answer = await world.join(protocols=())
    assert answer.error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert list(world.coordinator.groups()) == []


async def test_the_initial_delay_gathers_members_into_one_generation() -> None:
    world = World(rules=GroupRules(initial_rebalance_delay_ms=3_000))
    joins = [await world.begin(world.join()) for _ in range(3)]
    await world.clock.advance(3_000)
    assert not any(j.done() for j in joins)
    await world.clock.advance(3_000)
    answers = [await j for j in joins]
    assert {a.generation for a in answers} == {1}
    assert len({a.leader for a in answers}) == 1


# Offsets ------------------------------------------------------------------------------------------


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
    assert world.log.load().offsets["g"][KEY].offset == 4


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
        assert await world.commit(5, generation=generation) is ErrorCode.ILLEGAL_GENERATION
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
    assert world.coordinator.offsets("nobody") == (ErrorCode.NONE, {})


async def test_a_large_commit_goes_out_in_several_appends() -> None:
    world = World()
    offsets = {("t" * 200, i): CommittedOffset(i, -1, "m" * 1_000, 1) for i in range(1_000)}
    request = CommitRequested(0, "", None, -1)
    assert await world.coordinator.commit("g", request, offsets) is ErrorCode.NONE
    assert len(world.log.appends) > 1
    assert sum(map(len, world.log.appends)) == 1_000
    assert max(len(b) for b in world.log.batches[0]) < 512 * 1024
    assert world.log.load().offsets["g"] == offsets


# The partitions of the log ------------------------------------------------------------------------


async def test_a_restart_restores_groups_members_and_offsets() -> None:
    world = World()
    member = await world.stable()
    await world.commit(5, member_id=member, generation=1)
    await world.commit(9, group_id="simple")
    world.restart()
    assert world.offsets() == {KEY: 5}
    assert world.offsets("simple") == {KEY: 9}
    assert world.heartbeat(member) is ErrorCode.NONE
    assert (await world.sync(member, 1)).assignment == b"a"
    await world.clock.advance(SESSION_MS)
    assert isinstance(world.state(), Empty)


async def test_restored_members_that_do_not_come_back_expire() -> None:
    world = World()
    member = await world.stable()
    world.restart()
    await world.clock.advance(SESSION_MS)
    assert world.heartbeat(member) is ErrorCode.UNKNOWN_MEMBER_ID


async def test_while_a_partition_is_loaded_its_groups_are_told_to_wait() -> None:
    world = World()
    coordinator = world._coordinator()
    loading = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    request = CommitRequested(0, "", None, -1)
    assert coordinator.is_loading
    assert (await coordinator.join("g", join_request())).error is loading
    assert await coordinator.commit("g", request, {KEY: CommittedOffset(1)}) is loading
    assert coordinator.offsets("g") == (loading, {})
    assert coordinator.describe("g") == (loading, None)
    assert await coordinator.delete_group("g") is loading
    assert coordinator.heartbeat("g", HeartbeatReceived(0, "m", None, 1)) is loading
    answer = await coordinator.leave("g", LeaveRequested(0, (("m", None),)))
    assert answer.error is loading


async def test_when_a_partition_goes_offline_those_who_wait_are_sent_away() -> None:
    world = World()
    await world.stable()
    second = await world.begin(world.join())
    world.coordinator.deactivate(0, PartitionState.OFFLINE)
    assert (await second).error is ErrorCode.NOT_COORDINATOR
    assert world.coordinator.availability("g") is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert (await world.join()).error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert world.clock.running == 0


async def test_only_the_groups_of_an_offline_partition_are_affected() -> None:
    world = World(partition_count=50)
    await world.stable("my-group")  # partition 12
    await world.stable("g")  # partition 3
    world.coordinator.deactivate(3, PartitionState.OFFLINE)
    assert world.coordinator.availability("my-group") is ErrorCode.NONE
    assert [group.group_id for group in world.coordinator.groups()] == ["my-group"]


async def test_a_close_answers_everybody_and_waits_for_what_was_begun() -> None:
    world = World()
    await world.stable()
    joining = await world.begin(world.join())
    world.log.held = True
    commit = await world.begin(world.commit(5, group_id="simple"))
    closing = await world.begin(world.coordinator.close())
    assert (await joining).error is ErrorCode.NOT_COORDINATOR
    assert not closing.done()
    world.log.release()
    await closing
    assert await commit is ErrorCode.NONE
    assert world.clock.running == 0


@pytest.mark.parametrize("seed", range(cases(few=6, many=20)))
async def test_in_random_lives_nobody_waits_for_ever(seed: int) -> None:
    """Clients with real join, sync, heartbeat loops; some vanish, some appends fail."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    world = World(rules=GroupRules(initial_rebalance_delay_ms=chance.choice([0, 3_000])))
    clients = [
        asyncio.ensure_future(_client(world, random.Random(chance.random()))) for _ in range(8)
    ]
    for _ in range(60):
        await world.clock.advance(chance.choice([100, 3_000, 9_000]))
        world.log.error = LogDirectoryError("/d", "disk") if chance.random() < 0.1 else None
        if chance.random() < 0.2:
            chance.choice(clients).cancel()
    for client in clients:
        client.cancel()
    await settle()
    world.log.error = None
    await world.clock.advance(10 * REBALANCE_MS)
    for group in list(world.coordinator.groups()):
        assert group.state == "Empty", group
    assert world.clock.running == 0
    assert {type(r) for r in await asyncio.gather(*clients, return_exceptions=True)} == {
        asyncio.CancelledError
    }


async def _client(world: World, chance: random.Random) -> None:
    member_id = ""
    while True:
        answer = await world.join(member_id)
        if answer.error is not ErrorCode.NONE:
            member_id = "" if answer.error is ErrorCode.UNKNOWN_MEMBER_ID else member_id
            await _pause(world, 100)
            continue
        member_id = answer.member_id
        assignments = {m: m.encode() for m, _, _ in answer.members}
        synced = await world.sync(member_id, answer.generation, **assignments)
        if synced.error is not ErrorCode.NONE:
            continue
        assert synced.assignment == member_id.encode()
        while world.heartbeat(member_id, answer.generation) is ErrorCode.NONE:
            await world.commit(1, member_id=member_id, generation=answer.generation)
            if chance.random() < 0.1:
                await world.coordinator.leave("g", LeaveRequested(0, ((member_id, None),)))
                member_id = ""
                break
            await _pause(world, chance.choice([1_000, 3_000, 20_000]))


async def _pause(world: World, ms: int) -> None:
    passed = asyncio.get_running_loop().create_future()
    timer = world.clock.call_later(ms / 1000, lambda: passed.done() or passed.set_result(None))
    try:
        await passed
    finally:
        timer.cancel()


async def test_members_of_all_groups_have_a_budget_for_their_metadata() -> None:
    world = World(max_metadata_bytes=6_400)
    large = (("range", bytes(100)),)
    joined = await world.join(protocols=large)
    assert joined.error is ErrorCode.NONE
    refused = await world.join(group_id="h", protocols=large)
    assert refused.error is ErrorCode.POLICY_VIOLATION
    small = await world.join(group_id="h", protocols=(("range", bytes(90)),))
    assert small.error is ErrorCode.NONE
    assert (await world.join(joined.member_id, protocols=large)).error is ErrorCode.NONE


async def test_an_assignment_has_to_fit_the_budget_for_metadata() -> None:
    world = World(max_metadata_bytes=6_400)
    joined = await world.join()
    refused = await world.sync(
        joined.member_id, joined.generation, **{joined.member_id: bytes(101)}
    )
    assert refused.error is ErrorCode.POLICY_VIOLATION


async def test_a_principal_leaves_half_of_the_budget_for_metadata_to_others() -> None:
    world = World(max_metadata_bytes=64_000)
    answers = []
    for number in range(1_000):
        request = join_request(protocols=(("range", bytes(100)),), version=3)
        answers.append(await world.coordinator.join(f"m{number}", request, "mallory"))
    errors = [answer.error for answer in answers]
    assert errors == [ErrorCode.NONE] * 320 + [ErrorCode.POLICY_VIOLATION] * 680
    request = join_request(protocols=(("range", bytes(400)),), version=3)
    joined = await world.coordinator.join("b", request, "ann")
    assert joined.error is ErrorCode.NONE
    assignment = {joined.member_id: bytes(400)}
    synced = await world.sync(joined.member_id, joined.generation, "b", **assignment)
    assert synced.error is ErrorCode.NONE
    leave = LeaveRequested(0, ((answers[0].member_id, None),))
    await world.coordinator.leave("m0", leave)
    request = join_request(protocols=(("range", bytes(50)),), version=3)
    again = await world.coordinator.join("m0", request, "mallory")
    assert again.error is ErrorCode.POLICY_VIOLATION, "ann uses more by now"
    leave = LeaveRequested(0, ((joined.member_id, None),))
    await world.coordinator.leave("b", leave)
    again = await world.coordinator.join("m0", request, "mallory")
    assert again.error is ErrorCode.NONE


async def test_metadata_of_members_that_are_gone_is_free_again() -> None:
    world = World(max_metadata_bytes=6_400)
    large = (("range", bytes(100)),)
    first = await world.join(protocols=large, session_timeout_ms=10_000)
    await world.clock.advance(100_000)
    assert world.heartbeat(first.member_id) is ErrorCode.UNKNOWN_MEMBER_ID
    second = await world.join(group_id="h", protocols=large)
    assert second.error is ErrorCode.NONE
    leave = LeaveRequested(0, ((second.member_id, None),))
    await world.coordinator.leave("h", leave)
    assert (await world.join(group_id="i", protocols=large)).error is ErrorCode.NONE
    world.coordinator.deactivate(0, PartitionState.LOADING)
    world.coordinator.activate(0, LoadedPartition())
    assert (await world.join(group_id="k", protocols=large)).error is ErrorCode.NONE


async def test_a_partition_is_deactivated_without_a_look_at_the_groups_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(partition_count=8)
    group_ids = [f"g{index}" for index in range(50)]
    for group_id in group_ids:
        assert await world.commit(group_id=group_id) is ErrorCode.NONE
    hashed: list[str] = []
    partition_of = KeyedLog.partition_of

    def counted(log: KeyedLog, key: str) -> int:
        hashed.append(key)
        return partition_of(log, key)

    monkeypatch.setattr(KeyedLog, "partition_of", counted)
    for partition in range(8):
        world.coordinator.deactivate(partition, PartitionState.OFFLINE)
    assert len(hashed) <= len(group_ids)
    assert list(world.coordinator.groups()) == []
