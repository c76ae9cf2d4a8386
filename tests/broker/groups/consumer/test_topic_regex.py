"""What is kept of the regular expressions of clients."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from broker import client_patterns
from broker.event_loop import client_presence
from broker.event_loop.loop_turns import Turns
from broker.groups import member_requests, topic_regex
from broker.groups.consumer.model import MembershipError
from broker.groups.topic_regex import REFRESH_MS, TopicRegexes, TopicViewer
from protocol.api import ApiKey
from protocol.codec import encode_request
from protocol.errors import ErrorCode
from protocol.messages import ConsumerGroupHeartbeatRequest
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.groups.consumer_group_world import Client, FakeTopics, converge, group
from tests.support.broker.groups.group_world import World
from tests.support.storage.memory_env import MemoryEnv


class CountedTopics(FakeTopics):
    """Counts how often an expression is matched with all names."""

    matched = 0

    def names(self) -> list[str]:
        self.matched += 1
        return super().names()


@pytest.fixture
def turn_for_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_regex, "Turns", partial(Turns, 0.0))


async def test_the_names_that_expressions_have_matched_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_regex, "NAMES_MAX", 30)
    topics = CountedTopics({f"t{index}": 1 for index in range(10)})
    now_ms = 0
    regexes = TopicRegexes(topics, lambda: now_ms)
    for letter in "abc":
        await regexes.resolve(f"t.*|{letter}")
    for letter in "abc":
        await regexes.resolve(f"t.*|{letter}")
    assert topics.matched == 3, "three times ten names are kept"
    await regexes.resolve("t.*|d")
    await regexes.resolve("t.*|c")
    assert topics.matched == 4
    await regexes.resolve("t.*|a")
    assert topics.matched == 5, "the least recently used has left"
    now_ms = topic_regex.REFRESH_MS
    topics.counts = {"t0": 1}
    for letter in "bcdefg":
        assert (await regexes.resolve(f"t.*|{letter}")).topics == {"t0"}
    assert topics.matched == 11


async def test_an_expression_that_matches_more_than_may_be_kept_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_regex, "NAMES_MAX", 5)
    topics = FakeTopics({f"t{index}": 1 for index in range(10)})
    regexes = TopicRegexes(topics, lambda: 0)
    assert len((await regexes.resolve("t.*")).topics) == 10


@pytest.mark.usefixtures("turn_for_each_name")
async def test_requests_that_need_the_same_topics_share_one_search() -> None:
    topics = CountedTopics({f"t{index}": 1 for index in range(10)})
    regexes = TopicRegexes(topics, lambda: 0)
    first = asyncio.create_task(regexes.resolve("t.*"))
    others = [asyncio.create_task(regexes.resolve("t.*")) for _ in range(5)]
    await asyncio.sleep(0)
    first.cancel()  # its client disconnects
    for resolved in await asyncio.gather(*others):
        assert len(resolved.topics) == 10
    assert topics.matched == 1


@pytest.mark.usefixtures("turn_for_each_name")
async def test_a_search_ends_when_no_client_waits_for_it() -> None:
    topics = CountedTopics({f"t{index}": 1 for index in range(1_000)})
    regexes = TopicRegexes(topics, lambda: 0)
    waiting = [asyncio.create_task(regexes.resolve("t.*")) for _ in range(2)]
    seen: list[str] = []
    viewer = TopicViewer("eve", "eve", lambda name: bool(seen.append(name)) or True)
    abandoned = asyncio.create_task(regexes.resolve("t.*", viewer))
    for task in (abandoned, waiting[0]):
        await asyncio.sleep(0)
        task.cancel()
    assert len((await waiting[1]).topics) == 1_000
    assert len(seen) < 10
    assert len((await regexes.resolve("t.*", viewer)).topics) == 1_000


@pytest.mark.usefixtures("turn_for_each_name")
async def test_queued_searches_of_clients_that_have_left_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_presence, "WAIT_SECONDS", 0.0)
    topics = CountedTopics({f"t{index}": 1 for index in range(1_000)})
    regexes = TopicRegexes(topics, lambda: 0)
    left = False
    leaving = TopicViewer("eve", "eve", lambda _topic: True, lambda: left)
    tasks = [asyncio.create_task(regexes.resolve(f"t.*|{n}", leaving)) for n in range(20)]
    staying = asyncio.create_task(regexes.resolve("t.*|19", replace(leaving, has_left=bool)))
    await asyncio.sleep(0)
    left = True
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert {getattr(error, "code", None) for error in errors} == {
        ErrorCode.COORDINATOR_NOT_AVAILABLE
    }
    assert len((await staying).topics) == 1_000, "one of the clients still waits"
    assert topics.matched <= 2, "the first search had begun"


async def test_a_search_that_takes_too_long_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_patterns, "SEARCH_SECONDS_MAX", 0.0)
    regexes = TopicRegexes(FakeTopics({"a" * 200: 1, "a" * 201: 1}), lambda: 0)
    with pytest.raises(MembershipError) as refusal:
        await regexes.resolve("(?:(?:a?){40}){0,10}")
    assert refusal.value.code is ErrorCode.INVALID_REGULAR_EXPRESSION
    assert len((await regexes.resolve("a.*")).topics) == 2


async def test_a_closed_connection_ends_the_search_of_its_heartbeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_regex, "SEARCHES_AT_ONCE", 0)  # all are queued for ever
    monkeypatch.setattr(client_presence, "WAIT_SECONDS", 0.001)
    heartbeat = ConsumerGroupHeartbeatRequest(
        group_id="g",
        member_id="m",
        member_epoch=0,
        rebalance_timeout_ms=REFRESH_MS,
        subscribed_topic_regex="ord.*",
        topic_partitions=[],
    )
    frame = encode_request(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, 1, "client", heartbeat)

    def searches() -> int:
        return sum(task.get_name() == "match topics" for task in asyncio.all_tasks())

    async with broker_in_memory(MemoryEnv(seed=1), topics={"orders": {}}) as broker:
        _, writer = await asyncio.open_connection("127.0.0.1", broker.addresses[0].port)
        writer.write(frame)
        async with asyncio.timeout(30):
            while not searches():  # noqa: ASYNC110
                await asyncio.sleep(0)
            writer.close()
            while searches():  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_a_member_leaves_although_its_client_does_not_wait_for_the_answer() -> None:
    world = World(topics=FakeTopics({"orders": 3}))
    client = Client(world, "a", topics=frozenset(), regex="ord.*")
    await converge(client)
    await world.clock.advance(REFRESH_MS)
    client.viewer = replace(client.viewer, has_left=lambda: True)
    assert (await client.leave()).error is ErrorCode.NONE
    assert not group(world).members


@pytest.mark.usefixtures("turn_for_each_name")
@pytest.mark.parametrize("addresses", [1, 20])
async def test_searches_of_one_client_run_one_after_the_other(addresses: int) -> None:
    regexes = TopicRegexes(FakeTopics({f"t{index}": 1 for index in range(10)}), lambda: 0)
    seen: list[str] = []

    def viewer(user: str, address: int = 0) -> TopicViewer:
        return TopicViewer((user, address), user, lambda _: bool(seen.append(user)) or True)

    searches = [
        asyncio.create_task(regexes.resolve(f"t.*|{number}", viewer("eve", number % addresses)))
        for number in range(20)
    ]
    await asyncio.sleep(0)
    await regexes.resolve("t.*", viewer("ann"))
    assert seen.count("eve") <= seen.count("ann") + 10
    assert {len(resolved.topics) for resolved in await asyncio.gather(*searches)} == {10}


async def test_members_of_many_addresses_search_the_topics_of_their_expression_once() -> None:
    topics = CountedTopics({"orders": 3})
    world = World(topics=topics)
    clients = [Client(world, name, topics=frozenset(), regex="ord.*") for name in "abc"]
    for number, client in enumerate(clients):
        client.viewer = TopicViewer(number, None, lambda _topic: True)
    await converge(*clients)
    for rounds in range(1, 4):
        assert topics.matched == rounds
        await world.clock.advance(REFRESH_MS)
        await converge(*clients)


async def test_new_topics_reach_an_expression_although_the_wall_clock_was_set_back() -> None:
    topics = CountedTopics({"orders": 3})
    world = World(topics=topics)
    client = Client(world, "a", topics=frozenset(), regex="ord.*")
    await converge(client)
    topics.counts["orders-eu"] = 2
    world.clock.set_wall_back(24 * 3600 * 1000)
    await converge(client)
    assert len(client.owned) == 5
    assert group(world).regexes["ord.*"].topics == {"orders", "orders-eu"}


async def test_members_do_not_wait_for_the_outdated_expressions_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_requests, "SEARCH_SECONDS", 0)
    topics, may_end = FakeTopics({"orders": 3}), asyncio.Event()
    world = World(topics=topics)
    costly = Client(world, "a", topics=frozenset(), regex="ord.*")
    plain = Client(world, "b", topics=frozenset(["orders"]))
    await converge(costly, plain)
    match = TopicRegexes._match

    async def match_slowly(*args: Any) -> frozenset[str]:
        await may_end.wait()
        return await match(*args)

    monkeypatch.setattr(TopicRegexes, "_match", match_slowly)
    topics.counts["orders-eu"] = 2
    for _ in range(5):  # longer than a session: each heartbeat counts
        await world.clock.advance(REFRESH_MS)
        for client in (plain, costly):
            assert (await client.heartbeat()).error is ErrorCode.NONE
    assert len(costly.owned) + len(plain.owned) == 3
    may_end.set()
    while group(world).regexes["ord.*"].topics != {"orders", "orders-eu"}:
        assert (await costly.heartbeat()).error is ErrorCode.NONE
    await converge(costly, plain)
    assert len(costly.owned) + len(plain.owned) == 5


async def test_a_member_that_waits_for_its_own_search_keeps_what_others_found_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_requests, "SEARCH_SECONDS", 0)
    topics, may_end = FakeTopics({"orders": 3}), asyncio.Event()
    world = World(topics=topics)
    first = Client(world, "a", topics=frozenset(), regex="ord.*")
    await converge(first)
    match = TopicRegexes._match

    async def match_slowly(regexes: TopicRegexes, pattern: Any, viewer: TopicViewer) -> Any:
        if pattern.matches("slow"):
            await may_end.wait()
        return await match(regexes, pattern, viewer)

    monkeypatch.setattr(TopicRegexes, "_match", match_slowly)
    topics.counts["orders-eu"] = 2
    await world.clock.advance(REFRESH_MS)
    joining = Client(world, "b", topics=frozenset(), regex="slow|ord.*")
    heartbeat = asyncio.create_task(joining.heartbeat())
    while group(world).regexes["ord.*"].topics != {"orders", "orders-eu"}:
        assert (await first.heartbeat()).error is ErrorCode.NONE
    may_end.set()
    assert (await heartbeat).error is ErrorCode.NONE
    assert group(world).regexes["ord.*"].topics == {"orders", "orders-eu"}


async def test_a_heartbeat_that_waits_keeps_the_topics_that_another_member_brings_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although it knew topics of its own expression that were recent when it began."""
    topics, has_begun, may_end = FakeTopics({"orders": 3}), asyncio.Event(), asyncio.Event()
    world = World(topics=topics)
    slow = Client(world, "a", topics=frozenset(), regex="slow|ord.*")
    await converge(slow)
    await world.clock.advance(REFRESH_MS // 2)
    waiting = Client(world, "b", topics=frozenset(), regex="ord.*")
    await converge(slow, waiting)
    match = TopicRegexes._match

    async def match_slowly(regexes: TopicRegexes, pattern: Any, viewer: TopicViewer) -> Any:
        if pattern.matches("slow"):
            has_begun.set()
            await may_end.wait()
        return await match(regexes, pattern, viewer)

    monkeypatch.setattr(TopicRegexes, "_match", match_slowly)
    await world.clock.advance(REFRESH_MS // 2)
    monkeypatch.setattr(member_requests, "SEARCH_SECONDS", 60)
    waiting.missed_answer = True
    heartbeat = asyncio.create_task(waiting.heartbeat())
    await has_begun.wait()
    monkeypatch.setattr(member_requests, "SEARCH_SECONDS", 0)
    topics.counts["orders-eu"] = 2
    await world.clock.advance(REFRESH_MS // 2)
    joining = Client(world, "c", topics=frozenset(), regex="ord.*")
    assert (await joining.heartbeat()).error is ErrorCode.NONE
    assert group(world).regexes["ord.*"].topics == {"orders", "orders-eu"}
    may_end.set()
    assert (await heartbeat).error is ErrorCode.NONE
    assert group(world).regexes["ord.*"].topics == {"orders", "orders-eu"}


async def test_a_group_takes_the_topics_of_an_expression_that_no_member_has_any_more() -> None:
    """Although a member that has left brought them from a later search."""
    world = World(topics=FakeTopics({"orders": 3}))
    hosts = [TopicViewer(host, host, lambda _topic: True) for host in "ab"]
    for host in (*hosts, hosts[0]):
        client = Client(world, "a", topics=frozenset(), regex="ord.*", viewer=host)
        await converge(client)
        assert len(client.owned) == 3
        await client.leave()
        await world.clock.advance(REFRESH_MS // 4)
