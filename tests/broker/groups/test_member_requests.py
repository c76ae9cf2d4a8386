"""Requests of members, under a clock that tests move and a log they acknowledge."""

import asyncio
from collections import Counter

import pytest
from structlog.testing import capture_logs

from broker.groups import group_log, large_group_turns, live_classic_group
from broker.groups.classic.model import (
    CompletingRebalance,
    Empty,
    Event,
    GroupRules,
    JoinRequested,
    LeaveRequested,
    PreparingRebalance,
    SessionsExpired,
    Stable,
    State,
    Step,
    SyncAnswer,
)
from broker.groups.classic.state import transition
from broker.groups.offsets import offset_records, offsets_store
from broker.groups.offsets.offsets_store import LoadedPartition, group_record_sliced
from broker.logging import LINES_PER_BURST
from broker.topics.internal_topic import LogRecord, PartitionState
from protocol.errors import ErrorCode
from storage.errors import MessageTooLargeError
from storage.format.batch import HEADER_BYTES
from storage.slices import run_at_once
from tests.support.broker.groups.group_machine import REBALANCE_MS, SESSION_MS, join_request
from tests.support.broker.groups.group_world import SUBSCRIBED, World
from tests.support.clocks.virtual_clock import settle


async def test_a_member_id_begins_with_the_client_id() -> None:
    world = World()
    answer = await world.coordinator.members.join("g", join_request(client_id="my-client"))
    assert answer.error is ErrorCode.MEMBER_ID_REQUIRED
    assert answer.member_id == "my-client-id0"
    static = await world.join(group_id="h", instance_id="inst")
    assert static.member_id.startswith("inst-")


async def test_a_name_of_any_length_gives_an_id_that_fits_the_protocol() -> None:
    world = World()
    name = "é" * 500
    dynamic = await world.stable(client_id=name)
    static = await world.join(group_id="h", instance_id=name)
    assert max(len(dynamic.encode()), len(static.member_id.encode())) < 1_024


async def test_names_of_more_than_a_thousand_bytes_are_refused() -> None:
    world = World()
    long = "é" * 501
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
    answer = await world.coordinator.members.join("g", join_request(session_timeout_ms=timeout_ms))
    assert answer.error is error


async def test_members_need_a_group_id() -> None:
    world = World()
    assert (await world.join(group_id="")).error is ErrorCode.INVALID_GROUP_ID
    assert (await world.sync("m", 1, "")).error is ErrorCode.INVALID_GROUP_ID
    assert world.heartbeat("m", 1, "") is ErrorCode.INVALID_GROUP_ID
    answer = await world.coordinator.members.leave("", LeaveRequested(0, (("m", None),)))
    assert answer.error is ErrorCode.INVALID_GROUP_ID


async def test_an_unknown_group_has_no_members() -> None:
    world = World()
    assert (await world.join("m")).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert (await world.sync("m", 1)).error is ErrorCode.UNKNOWN_MEMBER_ID
    assert world.heartbeat("m") is ErrorCode.UNKNOWN_MEMBER_ID
    answer = await world.coordinator.members.leave("g", LeaveRequested(0, (("m", None),)))
    assert answer.members == (("m", None, ErrorCode.UNKNOWN_MEMBER_ID),)
    assert list(world.coordinator.groups()) == []


async def test_metadata_and_protocols_are_bounded() -> None:
    world = World(max_member_metadata_bytes=10, max_protocols=2)
    fitting = await world.join(protocols=(("range", b"x" * 5), ("roundrobin", b"x" * 5)))
    assert fitting.error is ErrorCode.NONE
    large = await world.join(protocols=(("range", b"x" * 11),))
    many = await world.join(protocols=tuple((f"p{i}", b"") for i in range(3)))
    assert {large.error, many.error} == {ErrorCode.INVALID_REQUEST}


async def test_a_join_waits_until_the_others_have_joined() -> None:
    world = World()
    first = await world.stable()
    second = await world.begin(world.join())
    assert not second.done()
    assert world.heartbeat(first) is ErrorCode.REBALANCE_IN_PROGRESS
    answer = await world.join(first)
    assert answer.generation == (await second).generation == 2
    assert answer.leader == first


async def test_members_whose_sessions_end_at_the_same_time_are_removed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, events = World(), list[Event]()

    def noted(state: State, event: Event, rules: GroupRules, now_ms: int) -> Step:
        events.append(event)
        return transition(state, event, rules, now_ms)

    first = await world.stable(instance_id="first")
    second = await world.begin(world.join(instance_id="second"))
    await world.join(first, instance_id="first")
    monkeypatch.setattr(live_classic_group, "transition", noted)
    await world.clock.advance(SESSION_MS)
    expired = [event.member_ids for event in events if isinstance(event, SessionsExpired)]
    assert expired == [(first, (await second).member_id)]


async def test_joins_of_large_groups_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_group_turns, "LARGE_GROUP", 1)
    world, rounds = World(), [0]
    for group_id in ("g", "h"):
        first = await world.stable(group_id=group_id, instance_id="first")
        await world.begin(world.join(group_id=group_id, instance_id="second"))
        await world.join(first, group_id, instance_id="first")
    of_joins: list[int] = []

    def noted(state: State, event: Event, rules: GroupRules, now_ms: int) -> Step:
        of_joins.extend(rounds[-1:] if isinstance(event, JoinRequested) else ())
        return transition(state, event, rules, now_ms)

    monkeypatch.setattr(live_classic_group, "transition", noted)
    joins = [
        asyncio.ensure_future(world.join(group_id=group_id, instance_id=f"new {number}"))
        for number in range(10)
        for group_id in ("g", "h")
    ]
    while len(of_joins) < len(joins):
        rounds.append(rounds[-1] + 1)
        await asyncio.sleep(0)
    assert len(set(of_joins)) == len(joins)
    for join in joins:
        join.cancel()
    await asyncio.gather(*joins, return_exceptions=True)


async def test_the_members_of_a_generation_are_answered_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, per_round = World(), list[int]()
    first = await world.stable(instance_id="first")
    joins = [await world.begin(world.join(instance_id=f"i{number}")) for number in range(9)]
    monkeypatch.setattr(live_classic_group, "REPLIES_PER_ROUND", 2)
    joins.append(asyncio.ensure_future(world.join(first, instance_id="first")))
    while not all(join.done() for join in joins):
        before = sum(join.done() for join in joins)
        await asyncio.sleep(0)
        per_round.append(sum(join.done() for join in joins) - before)
        generation = 2 if per_round[-1] else 1
        assert world.heartbeat(first, generation) is not ErrorCode.UNKNOWN_MEMBER_ID
    assert max(per_round) == 2
    answers = [join.result() for join in joins]
    assert {(answer.error, answer.generation) for answer in answers} == {(ErrorCode.NONE, 2)}
    assert [len(answer.members) for answer in answers] == [0] * 9 + [10]


async def test_the_memory_of_a_group_is_that_of_its_members_after_each_change() -> None:
    world = World()
    first = await world.stable(instance_id="first")
    await world.begin(world.join(instance_id="second", protocols=(*SUBSCRIBED, ("own", b"x" * 99))))
    await world.join(first, instance_id="first")
    await world.sync(first, 2, **{first: b"assignment"})
    for leaver in ("second", "first"):
        live = world.coordinator._served.get("g")
        assert isinstance(live, live_classic_group.LiveClassicGroup)
        size_bytes = sum(member.memory_bytes for member in live.group.members.values())
        size_bytes += sum(map(len, live.group.assignments.values()))
        assert world.coordinator.members._metadata.used_bytes == size_bytes > 0
        await world.coordinator.members.leave("g", LeaveRequested(0, (("", leaver),)))
    assert world.coordinator.members._metadata.used_bytes == 0


async def test_a_member_may_name_twice_as_many_protocols_as_clients_do() -> None:
    world = World()
    names = [(f"p{number}", b"") for number in range(9)]
    assert (await world.join(protocols=tuple(names[:8]))).error is ErrorCode.NONE
    assert (await world.join(protocols=tuple(names))).error is ErrorCode.INVALID_REQUEST


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
            await world.stable()
            await world.clock.advance(SESSION_MS)
    written = Counter(line["event"] for line in lines if line["log_level"] == "info")
    assert set(written) == {"group changed", "members expired"}
    assert max(written.values()) < LINES_PER_BURST + 50  # and one a second
    assert world.coordinator.stats.members_expired == 2 * LINES_PER_BURST


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
    assert restored.assignment(answer.member_id) == b"mine"


async def store_in_slices(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> "asyncio.Task[SyncAnswer]":
    """Begin to store a generation of ten members, which is encoded when this returns."""
    for module in (offsets_store, offset_records):
        monkeypatch.setattr(module, "MEMBERS_PER_SLICE", 1)
    first = await world.stable(instance_id="i0")
    joins = [await world.begin(world.join(instance_id=f"i{number}")) for number in range(1, 10)]
    await world.join(first, instance_id="i0")
    assert {(await join).generation for join in joins} == {2}
    world.log.appends.clear()
    live = world.coordinator._served.get("g")
    assert isinstance(live, live_classic_group.LiveClassicGroup)
    sync = asyncio.ensure_future(world.sync(first, 2))
    while not live._storing.locked():
        assert not sync.done()
        await asyncio.sleep(0)
    return sync


async def test_records_of_a_group_are_appended_in_the_order_of_its_generations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    sync = await store_in_slices(world, monkeypatch)
    leavers = tuple(("", f"i{number}") for number in range(1, 10))
    await world.coordinator.members.leave("g", LeaveRequested(0, leavers))
    assert (await sync).error is ErrorCode.REBALANCE_IN_PROGRESS
    assert world.log.appends == []
    state = world.state()
    assert isinstance(state, PreparingRebalance)
    (leader,) = state.group.members
    answer = await world.join(leader, instance_id="i0")
    await world.sync(leader, answer.generation, **{leader: b"a"})
    assert len(world.log.appends) == 2
    restored = world.log.load().groups["g"]
    assert (restored.generation, restored.assignments) == (3, {leader: b"a"})


async def test_no_record_follows_when_a_group_ends_while_its_record_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    sync = await store_in_slices(world, monkeypatch)
    world.coordinator.loading.deactivate(0, PartitionState.OFFLINE)
    assert (await sync).error is ErrorCode.NOT_COORDINATOR
    await settle()
    assert world.log.appends == []


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


def sized(metadata_bytes: int, name: str = "range") -> tuple[tuple[str, bytes], ...]:
    return ((name, bytes(metadata_bytes)),)


async def test_an_assignment_above_the_limit_of_the_log_fails_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.log.max_batch_bytes = 10_000
    answer = await world.join(protocols=sized(4_000))
    with monkeypatch.context() as patch:
        patch.delattr(group_log, "group_record_sliced")
        refused = await world.sync(answer.member_id, 1, **{answer.member_id: bytes(6_000)})
    assert refused.error is ErrorCode.UNKNOWN_SERVER_ERROR
    assert isinstance(world.state(), PreparingRebalance), "as in Kafka, members join again"
    assert world.log.appends == []
    again = await world.join(answer.member_id, protocols=sized(4_000))
    synced = await world.sync(again.member_id, again.generation, **{again.member_id: bytes(5_000)})
    assert synced.error is ErrorCode.NONE
    before = world.state()
    world.restart()
    assert isinstance(before, Stable)
    assert record_of(world.state()) == record_of(before)


def record_of(state: object) -> LogRecord:
    assert isinstance(state, Stable)
    return run_at_once(group_record_sliced(state.group))


async def test_a_batch_with_the_record_of_a_group_fits_the_limit_of_the_log() -> None:
    world = World()
    answer = await world.join(protocols=sized(4_000))
    world.log.max_batch_bytes = HEADER_BYTES + 4_000 + 1
    refused = await world.sync(answer.member_id, 1, **{answer.member_id: b"a"})
    assert refused.error is ErrorCode.UNKNOWN_SERVER_ERROR
    assert world.log.appends == []


async def test_members_that_no_record_could_hold_are_refused_before_a_rebalance() -> None:
    world = World()
    world.log.max_batch_bytes = 10_000
    member = await world.stable(protocols=sized(4_000), instance_id="a")
    large = sized(6_000)
    for options in ({"instance_id": "b"}, {"version": 3}):
        refused = await world.join(protocols=large, **options)
        assert refused.error is ErrorCode.UNKNOWN_SERVER_ERROR
    refused = await world.join(protocols=sized(10_000), instance_id="a")
    assert refused.error is ErrorCode.UNKNOWN_SERVER_ERROR
    state = world.state()
    assert isinstance(state, Stable)
    assert [*state.group.members] == [member]
    other = await world.join(group_id="h", protocols=(*sized(5_000), *sized(5_000, "other")))
    assert other.error is ErrorCode.NONE, "a record has the metadata for one protocol"


async def test_a_stored_group_above_the_limit_is_served_and_does_not_grow() -> None:
    world = World()
    member = await world.stable(protocols=sized(20_000))
    world.log.max_batch_bytes = 10_000
    world.restart()
    assert isinstance(world.state(), Stable)
    assert world.heartbeat(member) is ErrorCode.NONE
    refused = await world.join(protocols=sized(1), version=3)
    assert refused.error is ErrorCode.UNKNOWN_SERVER_ERROR
    again = await world.join(member, protocols=sized(5_000))
    synced = await world.sync(member, again.generation, **{member: b"a"})
    assert synced.error is ErrorCode.NONE


async def test_a_group_nobody_came_back_to_is_forgotten() -> None:
    world = World()
    await world.coordinator.members.join("g", join_request())
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


def memory_of_member(metadata_bytes: int) -> int:
    return join_request(protocols=(("range", bytes(metadata_bytes)),)).memory_bytes


async def test_a_member_without_metadata_takes_memory_and_so_do_its_names() -> None:
    world = World(max_metadata_bytes=64 * (memory_of_member(0) + 100))
    name = "\N{GRINNING FACE}" + "x" * 200
    refused = await world.join(protocols=((name, b""),))
    assert refused.error is ErrorCode.POLICY_VIOLATION
    joined = [(await world.join(group_id=f"g{number}")).error for number in range(100)]
    assert set(joined) == {ErrorCode.NONE, ErrorCode.POLICY_VIOLATION}


async def test_members_of_all_groups_have_a_budget() -> None:
    world = World(max_metadata_bytes=64 * memory_of_member(100))
    large = (("range", bytes(100)),)
    joined = await world.join(protocols=large)
    assert joined.error is ErrorCode.NONE
    refused = await world.join(group_id="h", protocols=large)
    assert refused.error is ErrorCode.POLICY_VIOLATION
    small = await world.join(group_id="h", protocols=(("range", bytes(50)),))
    assert small.error is ErrorCode.NONE
    assert (await world.join(joined.member_id, protocols=large)).error is ErrorCode.NONE


async def test_an_assignment_has_to_fit_the_budget_for_metadata() -> None:
    member_bytes = join_request().memory_bytes
    world = World(max_metadata_bytes=64 * member_bytes)
    joined = await world.join()
    assignment = {joined.member_id: bytes(member_bytes)}
    refused = await world.sync(joined.member_id, joined.generation, **assignment)
    assert refused.error is ErrorCode.POLICY_VIOLATION


async def test_a_principal_leaves_half_of_the_budget_for_metadata_to_others() -> None:
    world = World(max_metadata_bytes=640 * memory_of_member(100))
    answers = []
    for number in range(1_000):
        request = join_request(protocols=(("range", bytes(100)),), version=3)
        answers.append(await world.coordinator.members.join(f"m{number}", request, "mallory"))
    errors = [answer.error for answer in answers]
    assert errors == [ErrorCode.NONE] * 320 + [ErrorCode.POLICY_VIOLATION] * 680
    request = join_request(protocols=(("range", bytes(400)),), version=3)
    joined = await world.coordinator.members.join("b", request, "ann")
    assert joined.error is ErrorCode.NONE
    assignment = {joined.member_id: bytes(400)}
    synced = await world.sync(joined.member_id, joined.generation, "b", **assignment)
    assert synced.error is ErrorCode.NONE
    leave = LeaveRequested(0, ((answers[0].member_id, None),))
    await world.coordinator.members.leave("m0", leave)
    request = join_request(protocols=(("range", bytes(50)),), version=3)
    again = await world.coordinator.members.join("m0", request, "mallory")
    assert again.error is ErrorCode.POLICY_VIOLATION, "ann uses more by now"
    leave = LeaveRequested(0, ((joined.member_id, None),))
    await world.coordinator.members.leave("b", leave)
    again = await world.coordinator.members.join("m0", request, "mallory")
    assert again.error is ErrorCode.NONE


async def test_metadata_of_members_that_are_gone_is_free_again() -> None:
    world = World(max_metadata_bytes=64 * memory_of_member(100))
    large = (("range", bytes(100)),)
    first = await world.join(protocols=large, session_timeout_ms=10_000)
    await world.clock.advance(100_000)
    assert world.heartbeat(first.member_id) is ErrorCode.UNKNOWN_MEMBER_ID
    second = await world.join(group_id="h", protocols=large)
    assert second.error is ErrorCode.NONE
    leave = LeaveRequested(0, ((second.member_id, None),))
    await world.coordinator.members.leave("h", leave)
    assert (await world.join(group_id="i", protocols=large)).error is ErrorCode.NONE
    world.coordinator.loading.deactivate(0, PartitionState.LOADING)
    await world.coordinator.loading.activate(0, LoadedPartition())
    assert (await world.join(group_id="k", protocols=large)).error is ErrorCode.NONE
