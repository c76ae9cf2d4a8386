"""/api/v1/overview, /api/v1/topics and /api/v1/groups over a broker in memory."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.app import Broker
from broker.topics.partition import Partition
from broker.topics.topics import Topic
from config.loader import ConfigFileError, SettingsProblem
from config.settings import Settings
from config.topics.keys import TOPIC_KEYS
from protocol import messages as m
from protocol.api import ApiKey
from storage.format.batch import read_header
from storage.log.log import Log
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory, broker_settings
from tests.support.broker.http_client import call_api
from tests.support.broker.principals import PrincipalClient
from tests.support.clocks.loop_meter import LoopMeter
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv

TOPICS = {
    "orders": {"partitions": 2, "keys": {"cleanup.policy": "compact"}},
    "audit": {"keys": {"cleanup.policy": "delete"}},
}
VIEW = {"varve.view": "compacted"}
SEGMENTS = "/api/v1/topics/orders/partitions/0/segments"
HISTORY = "/api/v1/topics/orders/partitions/0/history"


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with broker_in_memory(MemoryEnv(seed=8), topics=TOPICS) as broker:
        yield broker


def orders(broker: Broker) -> Partition:
    partition = broker.topics.partition(TopicPartition("orders", 0))
    assert partition is not None
    return partition


def fill(broker: Broker, segments: int) -> None:
    partition = orders(broker)
    for number in range(segments):
        data = memoryview(batch_of(b"%d" % number))
        partition.append(data, read_header(data), 0)
        if number < segments - 1:
            partition.log.roll(0)


async def get(broker: Broker, path: str) -> Any:
    status, answer = await call_api(broker, "GET", path)
    assert status == 200, answer
    return answer


async def test_the_overview_has_the_disks_and_what_is_not_served(broker: Broker) -> None:
    answer = await get(broker, "/api/v1/overview")
    assert answer["not_ready"] == []
    assert [row["path"] for row in answer["directories"]] == ["/disk1"]
    assert answer["directories"][0]["online"] is True
    partition = orders(broker)
    broker.topics.existing("orders").offline[1] = "its disk failed"
    broker.manager.table.offline[TopicPartition("orders", 1)] = "its disk failed"
    answer = await get(broker, "/api/v1/overview")
    assert answer["not_ready"] == ["partition orders-1 is not served: its disk failed"]
    assert partition.log.segments.size_bytes == 0


async def test_the_overview_lists_what_needs_attention_and_counts_topics(broker: Broker) -> None:
    answer = await get(broker, "/api/v1/overview")
    assert answer["topics"] == 2
    assert [problem["kind"] for problem in answer["attention"]] == ["cleaner_off"]
    broker.manager.table.offline[TopicPartition("orders", 1)] = "its disk failed"
    broker.pool.operator.pause(TopicPartition("orders", 0))
    answer = await get(broker, "/api/v1/overview")
    assert [(problem["kind"], problem["text"]) for problem in answer["attention"]] == [
        ("not_served", "partition orders-1 is not served: its disk failed"),
        ("paused", "1 partition paused by an operator"),
        ("cleaner_off", "the cleaner is switched off (cleaner.enabled)"),
    ]


async def test_the_overview_recommends_a_demo_on_the_own_listener_unless_it_would_be_refused(
    broker: Broker,
) -> None:
    command = f"demo --bootstrap {broker.addresses[0]} "
    assert command in (await get(broker, "/api/v1/overview"))["demo"]
    closed = {"authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]}}
    async with broker_in_memory(MemoryEnv(seed=9), **closed) as other:
        assert (await get(other, "/api/v1/overview"))["demo"] is None


async def test_a_topic_with_an_unknown_policy_needs_attention(broker: Broker) -> None:
    topic = broker.topics.existing("orders")
    topic.config = replace(topic.config, policy_known=False)
    problem = (await get(broker, "/api/v1/overview"))["attention"][0]
    assert (problem["kind"], problem["topic"]) == ("policy_unknown", "orders")


async def test_a_failed_reload_of_the_settings_needs_attention() -> None:
    def load() -> Settings:
        raise ConfigFileError(
            [SettingsProblem("varve.yaml", 3, "cleaner.workers", "expected a number")]
        )

    broker = Broker(broker_settings(), MemoryEnv(seed=8), load=load)
    await broker.start()
    assert broker.reloader is not None
    await broker.reloader.reload()
    answer = await get(broker, "/api/v1/overview")
    await broker.stop()
    assert answer["attention"][0] == {
        "kind": "not_reloaded",
        "text": "settings not reloaded, the old ones stay in effect: "
        "varve.yaml:3: cleaner.workers: expected a number",
        "topic": None,
        "partition": None,
    }


async def test_topics_are_found_by_a_part_of_their_name(broker: Broker) -> None:
    answer = await get(broker, "/api/v1/topics?contains=rde")
    assert [row["name"] for row in answer["topics"]] == ["orders"]
    await broker.coordinators.offsets_topic.ensure()
    every = {row["name"] for row in (await get(broker, "/api/v1/topics"))["topics"]}
    assert every == {"__consumer_offsets", "audit", "orders"}
    answer = await get(broker, "/api/v1/topics?internal=false")
    assert {row["name"] for row in answer["topics"]} == {"audit", "orders"}


# A fifth of 5 ms (tests/support/clocks/loop_meter.py): the clock goes as much faster.
LINES_PER_TURN_MAX = 20_000
CLOCK_RATE = 5
MANY = 10_000


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/overview",
        "/api/v1/topics?limit=5000",
        "/api/v1/cleaner/partitions?limit=5000",
        "/api/v1/cleaner/partitions?topic=orders&limit=5000",
        f"{SEGMENTS}?limit=20000",
    ],
)
async def test_no_answer_about_ten_thousand_partitions_holds_the_loop_for_five_milliseconds(
    broker: Broker, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = orders(broker).log
    if "segments" in path:
        facts = log.segment_facts()[-1]
        many = tuple(facts._replace(base_offset=base) for base in range(MANY))
        monkeypatch.setattr(type(log), "segment_facts", lambda _log: many)
    # Their rounds fail with these partitions, and the lines of the tracebacks would count.
    await broker.log_maintenance.stop()
    await broker.view_scheduler.stop()
    meter = LoopMeter(CLOCK_RATE)
    with many_partitions(broker, log), meter.measuring(monkeypatch):
        status, _ = await call_api(broker, "GET", path)
    assert status == 200
    assert meter.lines > LINES_PER_TURN_MAX
    assert meter.longest_turn < LINES_PER_TURN_MAX


@contextmanager
def many_partitions(broker: Broker, log: Log) -> Iterator[None]:
    """Half of them are in one topic, half in topics of ten; all share a log and its files."""

    def add(topic: Topic, count: int) -> None:
        for index in range(count):
            partition = SimpleNamespace(partition=TopicPartition(topic.name, index), log=log)
            topic.partitions.setdefault(index, cast(Partition, partition))

    large = broker.topics.existing("orders")
    served = dict(large.partitions)
    add(large, MANY // 2)
    small = [
        replace(large, name=f"t{number}", topic_id=b"%16d" % number, partitions={})
        for number in range(MANY // 20)
    ]
    for topic in small:
        add(topic, 10)
        broker.topics.add(topic)
    yield
    large.partitions = served
    for topic in small:
        topic.partitions.clear()
        broker.topics.remove(topic)


async def test_topics_are_listed_with_sizes_a_page_at_a_time(broker: Broker) -> None:
    fill(broker, 3)
    answer = await get(broker, "/api/v1/topics")
    rows = {row["name"]: row for row in answer["topics"]}
    assert answer["next"] is None
    assert rows["orders"]["partitions"] == 2
    assert rows["orders"]["segments"] == 4  # of both partitions
    assert rows["orders"]["size_bytes"] == orders(broker).log.segments.size_bytes
    assert rows["audit"]["cleanup_policy"] == ["delete"]
    names, after = [], ""
    while after is not None:
        page = await get(broker, f"/api/v1/topics?limit=1&after={after}")
        names += [row["name"] for row in page["topics"]]
        after = page["next"]
    assert names == sorted(rows)


async def test_segments_come_in_offset_order_a_page_at_a_time(broker: Broker) -> None:
    fill(broker, 5)
    log = orders(broker).log
    whole = await get(broker, SEGMENTS)
    rows = [dict(zip(whole["columns"], row, strict=True)) for row in whole["segments"]]
    assert [row["base_offset"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["next_offset"] for row in rows] == [1, 2, 3, 4, 5]
    assert sum(row["size_bytes"] for row in rows) == log.segments.size_bytes
    assert whole["log_end_offset"] == 5
    assert whole["view_horizon"] is None
    parts, query = [], "?limit=2"
    while query:
        page = await get(broker, SEGMENTS + query)
        parts += page["segments"]
        query = "" if page["next"] is None else f"?limit=2&after={page['next']}"
    assert parts == whole["segments"]


async def test_the_history_has_the_present_segments_and_what_undoes_each_change(
    broker: Broker,
) -> None:
    before = await get(broker, HISTORY)
    assert [step for step in before["steps"] if "added" in step] == []
    fill(broker, segments=3)
    history = await get(broker, HISTORY)
    segments = (await get(broker, SEGMENTS))["segments"]
    assert history["steps"][0] == {"present": segments}
    (change,) = history["steps"][1:]
    assert (change["removed"], change["added"]) == ([], [row[0] for row in segments[1:]])
    assert history["since_ms"] == before["since_ms"] <= change["at_ms"]


async def test_the_live_bytes_of_a_segment_are_minus_one_until_a_clean_counted_them(
    broker: Broker,
) -> None:
    fill(broker, 3)
    whole = await get(broker, SEGMENTS)
    at = whole["columns"].index("live_bytes")
    assert [row[at] for row in whole["segments"]] == [-1, -1, -1]


async def test_the_estimate_of_a_clean_has_its_groups_and_their_sum(broker: Broker) -> None:
    fill(broker, 4)
    answer = await get(broker, "/api/v1/cleaner/partitions/orders/0/estimate?slack=0.25")
    (group,) = answer["groups"]
    closed = sum(facts.size_bytes for facts in orders(broker).log.segment_facts()[:-1])
    assert group == {
        "base_offset": 0,
        "next_offset": 3,
        "segments": 3,
        "size_bytes": closed,
        "live_bytes": closed,
        "measured": False,
        "rewritten": True,
    }
    assert (answer["selective"], answer["slack"], answer["by_slack"]) == (False, 0.25, [])
    assert (answer["read_bytes"], answer["freed_bytes"]) == (2 * closed, 0)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/v1/topics/none/partitions/0/segments", 404, "there is no topic none"),
        ("/api/v1/topics/orders/partitions/7/segments", 404, "its last one is 1"),
        ("/api/v1/topics/orders/partitions/x/segments", 400, "partition: expected"),
        (f"{SEGMENTS}?limit=0", 400, "limit: expected 1 to"),
        (f"{SEGMENTS}?offset=3", 400, "unknown parameter"),
        ("/api/v1/topics?limit=99999999", 400, "limit: expected 1 to"),
    ],
)
async def test_what_does_not_exist_or_makes_no_sense_is_refused(
    broker: Broker, path: str, status: int, words: str
) -> None:
    answer = await call_api(broker, "GET", path)
    assert answer[0] == status
    assert words in answer[1]["detail"]


async def test_segments_of_an_offline_partition_say_why(broker: Broker) -> None:
    topic = broker.topics.existing("orders")
    topic.offline[0] = "its disk failed"
    del topic.partitions[0]
    status, answer = await call_api(broker, "GET", SEGMENTS)
    assert status == 409
    assert answer["detail"] == "orders-0 is offline: its disk failed"


async def test_groups_are_listed_with_their_lag_a_page_at_a_time(broker: Broker) -> None:
    fill(broker, 5)
    client = PrincipalClient(broker, "anybody")
    for group, offset in (("a", 1), ("b", 5), ("c", 9)):
        commit = m.OffsetCommitRequest(group_id=group, generation_id_or_member_epoch=-1)
        row = m.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
        commit.topics = [m.OffsetCommitRequestTopic(name="orders", partitions=[row])]
        find = m.FindCoordinatorRequest(coordinator_keys=[group])
        await client.request(ApiKey.FIND_COORDINATOR, 4, find)
        answer = await client.request(ApiKey.OFFSET_COMMIT, 8, commit)
        assert answer.topics[0].partitions[0].error_code == 0
    whole = await get(broker, "/api/v1/groups")
    assert whole["next"] is None
    assert [(row["group"], row["state"], row["lag"]) for row in whole["groups"]] == [
        ("a", "Empty", 4),
        ("b", "Empty", 0),
        ("c", "Empty", 0),
    ]
    assert whole["groups"][0]["topics"] == [{"topic": "orders", "lag": 4}]
    first = await get(broker, "/api/v1/groups?limit=2")
    assert first["next"] == "b"
    rest = await get(broker, "/api/v1/groups?after=b")
    assert first["groups"] + rest["groups"] == whole["groups"]


async def test_the_queue_has_an_order_reasons_and_what_is_blocked(broker: Broker) -> None:
    waiting = TopicPartition("orders", 1)
    broker.pool.scanner.queue = [waiting]
    broker.pool.operator.pause(TopicPartition("orders", 0))
    answer = await get(broker, "/api/v1/cleaner/queue")
    assert (answer["waiting"], answer["blocked"], answer["next"]) == (1, 1, None)
    rows = [(row["position"], row["partition"], row["state"]) for row in answer["queue"]]
    assert rows == [(1, 1, "waiting"), (None, 0, "paused")]
    assert answer["queue"][1]["reasons"] == ["An operator paused it."]
    first = await get(broker, "/api/v1/cleaner/queue?limit=1")
    rest = await get(broker, f"/api/v1/cleaner/queue?after={first['next']}")
    assert first["queue"] + rest["queue"] == answer["queue"]


async def test_what_is_paused_of_internal_topics_is_counted_apart_and_comes_last(
    broker: Broker,
) -> None:
    for name in ("__consumer_offsets", "orders"):
        broker.pool.control.operator_pauses.add(TopicPartition(name, 0))
    queue = (await get(broker, "/api/v1/cleaner/queue"))["queue"]
    assert [row["topic"] for row in queue] == ["orders", "__consumer_offsets"]
    overview = await get(broker, "/api/v1/overview")
    texts = [problem["text"] for problem in overview["attention"]]
    assert "1 partition (and 1 of internal topics) paused by an operator" in texts


async def test_every_topic_setting_is_listed_with_its_help(broker: Broker) -> None:
    answer = await get(broker, "/api/v1/topic-settings")
    assert [row["name"] for row in answer["settings"]] == list(TOPIC_KEYS)
    policy = answer["settings"][0]
    assert (policy["choices"], policy["type"]) == (["compact", "delete"], "list")
    assert all(row["text"] for row in answer["settings"])


async def test_views_come_a_page_at_a_time() -> None:
    topics = {name: {"partitions": 2, "keys": VIEW} for name in ("a", "b")}
    async with broker_in_memory(MemoryEnv(seed=8), topics=topics) as broker:
        rows, path = [], "/api/v1/view?limit=3"
        while path:
            status, page = await call_api(broker, "GET", path)
            assert status == 200
            rows += [(view["topic"], view["partition"]) for view in page["views"]]
            path = page["next"] and f"/api/v1/view?limit=3&after={page['next']}"
        assert rows == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        _, page = await call_api(broker, "GET", "/api/v1/view?contains=b")
        assert [view["topic"] for view in page["views"]] == ["b", "b"]
        assert (await call_api(broker, "GET", "/api/v1/view?after=b"))[0] == 400
