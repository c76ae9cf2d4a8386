"""Compacted views in the whole broker: what clients see of them, over an in-memory disk."""

import asyncio
import errno
import itertools
import json
import weakref
from itertools import pairwise
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import InvalidRequestError, TopicAuthorizationFailedError, for_code

from broker.app import Broker
from broker.event_loop import loop_turns
from broker.quotas.memory_budget import PARTS
from broker.topics.topics import TopicError
from broker.views import views
from broker.views.compaction import ViewError
from broker.views.views import view_id
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode, code_of
from protocol.messages import (
    AlterConfigsRequest,
    AlterConfigsRequestConfig,
    AlterConfigsRequestResource,
    CreatePartitionsRequest,
    CreatePartitionsRequestTopic,
    DeleteRecordsRequest,
    DeleteRecordsRequestPartition,
    DeleteRecordsRequestTopic,
    DeleteTopicsRequest,
    DeleteTopicsRequestTopic,
)
from storage.env import write_file_atomically
from storage.errors import InvalidViewError
from storage.format.batch import Record, build_batch, walk_headers
from storage.format.filenames import CLEAN_SHUTDOWN, LOG, RECOVERY_POINT_CHECKPOINT, file_name
from storage.view.ledger import view_path
from storage.view.view_log import ViewCursor
from tests.support.broker.broker_in_memory import client_of, kafka_request
from tests.support.broker.http_client import ask
from tests.support.broker.topics_on_disk import setting
from tests.support.broker.views.view_broker import (
    ANY_TIME,
    ON,
    READ_SECONDS,
    VIEW,
    WHERE,
    broker_with_view,
    consuming,
    produce,
    producing,
    read_all,
    read_on,
)
from tests.support.broker.views.view_worker import held_worker
from tests.support.protocol.raw_client import FETCH_VERSION, RawClient
from tests.support.storage.memory_env import MemoryEnv
from tests.support.waiting import wait_until


async def test_a_view_describes_itself_as_compacted_and_with_its_own_size() -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        await produce(broker, (b"a", b"1"), (b"a", b"2"))
        status = await broker.view_scheduler.compact(WHERE)
        policy = m.DescribeConfigsRequestResource(
            resource_type=2, resource_name=VIEW.topic, configuration_keys=["cleanup.policy"]
        )
        described = m.DescribeConfigsRequest(resources=[policy])
        (result,) = (
            await kafka_request(broker, ApiKey.DESCRIBE_CONFIGS, described, version=4)
        ).results
        dirs = m.DescribeLogDirsRequest(topics=None)
        (directory,) = (
            await kafka_request(broker, ApiKey.DESCRIBE_LOG_DIRS, dirs, version=4)
        ).results
        assert [row.value for row in result.configs] == ["compact"]
        sizes = {topic.name: topic.partitions[0].partition_size for topic in directory.topics}
        assert sizes[VIEW.topic] == status.ledger_bytes > 0
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        assert sizes[WHERE.topic] == partition.log.segments.size_bytes


async def test_the_partitions_of_a_view_that_is_switched_off_are_dropped_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each closes files; a view may have thousands of them."""
    topics = {"orders": {"partitions": 20, "keys": ON}}
    async with broker_with_view(MemoryEnv(), topics=topics) as broker:
        await broker.views.open_all(broker.topics)
        view = broker.views.get(VIEW.topic)
        assert view is not None
        opened = [weakref.ref(partition) for partition in broker.views.partitions_of(view)]
        del view
        await broker.metadata_service.alter("orders", setting("varve.view", "none"))
        assert broker.views.get(VIEW.topic) is None
        assert all(partition() is not None for partition in opened)
        clock = itertools.count()
        monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))  # a turn for each row
        forgetting, left = asyncio.ensure_future(broker.views.forget(set())), [len(opened)]
        async with asyncio.timeout(READ_SECONDS):  # maintenance may be at one of them
            while not forgetting.done() or left[-1]:
                await asyncio.sleep(0)
                left.append(sum(partition() is not None for partition in opened))
        assert max(before - after for before, after in pairwise(left)) == 1


async def test_the_records_of_a_view_are_read_over_http() -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None))
        await broker.view_scheduler.compact(WHERE)
        await produce(broker, (b"c", b"1"))
        path = f"/api/v1/topics/{VIEW.topic}/partitions/0/records"
        answer = json.loads((await ask(broker, "GET", path)).text)
        rows = [(row["offset"], row["key"], row["value"]) for row in answer["records"]]
        assert rows == [(2, "a", "2"), (4, "c", "1")]
        assert (answer["topic"], answer["done"]) == (VIEW.topic, True)
        assert (await ask(broker, "GET", f"{path}?from=latest&limit=1")).status == 200
        for unknown in (path.replace("partitions/0", "partitions/9"), path.replace("o", "n", 1)):
            assert (await ask(broker, "GET", unknown)).status == 404


async def test_a_view_gives_the_latest_values_and_then_the_log() -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None))
        assert len(await read_all(broker)) == 4, "nothing is compacted yet"
        status = await broker.view_scheduler.compact(WHERE)
        assert (status.horizon, status.ledger_records, status.state) == (4, 1, "done")
        assert await read_all(broker) == [(2, b"a", b"2")]
        await produce(broker, (b"a", b"3"), (b"c", b"1"))
        assert await read_all(broker) == [(2, b"a", b"2"), (4, b"a", b"3"), (5, b"c", b"1")]
        status = await broker.view_scheduler.compact(WHERE)
        assert await read_all(broker) == [(4, b"a", b"3"), (5, b"c", b"1")]
        assert await read_all(broker, isolation_level="read_committed") == await read_all(broker)
        assert await read_all(broker, start=5) == [(5, b"c", b"1")]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [(b"a", None)],
        [(b"a", b"1"), (b"a", None)],
        [(b"a", b"1"), (b"b", b"1"), (b"b", None)],
    ],
    ids=["no data", "a tombstone only", "all deleted", "a tombstone at the end"],
)
async def test_a_reader_comes_to_the_end_whatever_is_left(
    records: list[tuple[bytes, bytes | None]],
) -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        await produce(broker, *records)
        await broker.view_scheduler.compact(WHERE)
        remaining = {key: value for key, value in records if value is not None}
        remaining = {
            key: value for key, value in remaining.items() if dict(records)[key] is not None
        }
        assert {key: value for _, key, value in await read_all(broker)} == remaining
        assert {key: value for _, key, value in await read_all(broker, start=0)} == remaining


@pytest.mark.parametrize("setting", ["keep", "drop"])
async def test_records_without_a_key_are_kept_or_dropped(setting: str) -> None:
    async with broker_with_view(MemoryEnv(), {"varve.view.null.key": setting}) as broker:
        await produce(broker, (None, b"1"), (b"a", b"1"), (None, b"2"), (b"a", b"2"))
        await broker.view_scheduler.compact(WHERE)
        expected = [(0, None, b"1"), (2, None, b"2"), (3, b"a", b"2")]
        assert await read_all(broker) == (expected if setting == "keep" else expected[2:])


async def test_a_view_that_was_empty_begins_where_the_log_does_at_its_first_record() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await broker.view_scheduler.compact(WHERE, from_scratch=True)
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.delete_records(1)  # as retention would, before the view has read anything
        await broker.view_scheduler.compact(WHERE)
        view = broker.views.partition(WHERE)
        assert view is not None
        assert view.log.ledger is not None
        assert view.log.ledger.manifest.first_offset == 1
        assert await read_all(broker) == [(1, b"b", b"1")]


async def test_a_view_outlives_the_originals() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"))
        await broker.view_scheduler.compact(WHERE)
        await produce(broker, (b"c", b"1"), (b"d", b"1"))
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.roll(env.wall_ms())
        partition.log.delete_records(4)  # as retention would: the first key after the view is gone
        partition.log.retention.expire(env.wall_ms())
        assert await read_all(broker) == [(1, b"b", b"1"), (2, b"a", b"2"), (4, b"d", b"1")]
        status = await broker.view_scheduler.compact(WHERE)
        assert status.missed == ((3, 4),)
        assert await read_all(broker) == [(1, b"b", b"1"), (2, b"a", b"2"), (4, b"d", b"1")]
        partition.log.delete_records(5)
        partition.log.retention.expire(env.wall_ms())
        assert await read_all(broker) == [(1, b"b", b"1"), (2, b"a", b"2"), (4, b"d", b"1")]


async def produce_batch(broker: Broker, *records: tuple[bytes, bytes | None, int]) -> None:
    """One batch of keys, values and timestamps in ms."""
    rows = [Record(at, time_ms, key, value) for at, (key, value, time_ms) in enumerate(records)]
    with client_of(broker) as client:
        answer = await asyncio.to_thread(client.produce, "orders", bytes(build_batch(rows)))
    assert answer.error_code == ErrorCode.NONE


@pytest.mark.parametrize("strategy", ["offset", "timestamp"])
@pytest.mark.parametrize("first", [b"right", None], ids=["value", "tombstone"])
async def test_records_in_front_of_a_log_start_within_a_batch_are_ranked(
    strategy: str, first: bytes | None
) -> None:
    """They followed the right record of their key, or brought a deleted key back."""
    env = MemoryEnv()
    async with broker_with_view(env, {"varve.view.strategy": strategy}) as broker:
        now = env.wall_ms()
        await produce_batch(broker, (b"k", b"zero", now - 9000))
        await produce_batch(broker, (b"k", first, now), (b"z", b"z", now))
        await broker.view_scheduler.compact(WHERE)
        await produce_batch(
            broker, (b"k", b"late", now - 5000), (b"x", b"1", now), (b"y", b"1", now)
        )
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.delete_records(4)
        status = await broker.view_scheduler.compact(WHERE)
        assert status.missed == ()
        late = (3, b"k", b"late")
        present = [(1, b"k", first)] if strategy == "timestamp" and first else []
        expected = [*present, (2, b"z", b"z"), *([late] if strategy == "offset" else [])]
        found = await read_all(broker)
        assert found == [*expected, (4, b"x", b"1"), (5, b"y", b"1")]


async def test_a_reader_goes_over_a_gap_that_expired_unseen() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        await broker.view_scheduler.compact(WHERE)
        await produce(broker, (b"b", b"1"))
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.delete_records(2)
        assert await read_all(broker) == [(0, b"a", b"1")]


async def test_a_reader_without_room_for_the_next_batch_of_a_view_stays_before_it() -> None:
    """Only the first partition with records may exceed the byte limits of a fetch."""
    async with broker_with_view(MemoryEnv()) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        await broker.view_scheduler.compact(WHERE)
        rows = [
            m.FetchRequestTopic(
                topic=topic,
                partitions=[
                    m.FetchRequestPartition(partition=0, fetch_offset=0, partition_max_bytes=1)
                ],
            )
            for topic in (WHERE.topic, VIEW.topic)
        ]
        body = m.FetchRequest(max_wait_ms=0, max_bytes=1_000, topics=rows)
        response = await kafka_request(broker, ApiKey.FETCH, body, FETCH_VERSION)
        (first,), (second,) = (topic.partitions for topic in response.responses)
        assert len(first.records or b"") > 1
        assert (second.error_code, second.records or b"") == (ErrorCode.NONE, b"")


async def test_a_reader_under_way_learns_of_what_was_deleted_meanwhile() -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        await broker.view_scheduler.compact(WHERE)
        async with consuming(broker, max_partition_fetch_bytes=1) as consumer:
            consumer.seek(VIEW, 0)
            first = await consumer.getone()
            assert (first.key, first.value) == (b"a", b"1")
            await produce(broker, (b"a", None))
            await broker.view_scheduler.compact(WHERE)
            rest = await read_on(consumer)
        assert rest == [(1, b"b", b"1"), (2, b"a", None)]
        assert await read_all(broker) == [(1, b"b", b"1")]


async def test_a_replaced_ledger_is_removed_when_nobody_reads_it() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        await broker.view_scheduler.compact(WHERE)
        folder = view_path(f"/disk1/{WHERE}")
        async with consuming(broker, max_partition_fetch_bytes=1) as consumer:
            consumer.seek(VIEW, 0)
            await consumer.getone()
            await produce(broker, (b"a", b"2"))
            await broker.view_scheduler.compact(WHERE)
            await broker.view_scheduler.tidy()
            assert len(env.listdir(folder)) == 3, "manifest and both ledgers"
        async with asyncio.timeout(READ_SECONDS):
            while len(env.listdir(folder)) > 2:
                await broker.view_scheduler.tidy()
                await asyncio.sleep(0)


async def test_nobody_can_write_to_a_view_or_take_its_name() -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        async with producing(broker) as producer:
            with pytest.raises(TopicAuthorizationFailedError):
                await producer.send_and_wait("orders.compacted", b"x", key=b"a")
        with pytest.raises(TopicError):
            await broker.metadata_service.create("orders.compacted", 1, {})


async def test_times_are_found_in_the_ledger_and_in_the_log() -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        async with producing(broker) as producer:
            for at, key in enumerate([b"a", b"b", b"a"]):
                await producer.send_and_wait(
                    "orders", key=key, value=b"v", timestamp_ms=1_700_000_000_000 + at
                )
            await broker.view_scheduler.compact(WHERE)
            await producer.send_and_wait(
                "orders", key=b"c", value=b"v", timestamp_ms=1_700_000_000_003
            )
        async with consuming(broker) as consumer:
            for ms, offset in ((0, 1), (1, 1), (2, 2), (3, 3)):
                result = await consumer.offsets_for_times({VIEW: 1_700_000_000_000 + ms})
                assert result[VIEW].offset == offset
            assert (await consumer.beginning_offsets([VIEW]))[VIEW] == 1
            assert (await consumer.end_offsets([VIEW]))[VIEW] == 4


async def test_a_view_is_the_same_after_a_restart_and_a_loss_of_power() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"))
        await broker.view_scheduler.compact(WHERE)
        expected = await read_all(broker)
        topic = broker.topics.get("orders")
        assert topic is not None
        topic_id = view_id(topic.topic_id)
    async with broker_with_view(env) as broker:
        assert await read_all(broker) == expected
        assert broker.view_scheduler.status()[0].state == "done"
        assert broker.views.by_id(topic_id) is broker.views.get("orders.compacted")
    async with broker_with_view(env.crash()) as broker:
        assert await read_all(broker) == expected


async def test_the_view_of_a_deleted_topic_is_not_found_by_its_id_when_the_topic_exists_again() -> (
    None
):
    async with broker_with_view(MemoryEnv()) as broker:
        former = broker.views.get("orders.compacted")
        assert former is not None
        await broker.metadata_service.delete("orders")
        await broker.metadata_service.create("orders", 1, {"varve.view": "compacted"})
        view = broker.views.get("orders.compacted")
        assert view is not None
        assert broker.views.by_id(former.topic_id) is None
        assert broker.views.find(former.topic_id, 0) is ErrorCode.UNKNOWN_TOPIC_ID
        assert broker.views.by_id(view.topic_id) is view
        assert broker.views.find(view.topic_id, 0) is view.opened[0]


async def test_what_is_not_named_by_the_manifest_is_swept_at_the_start() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        await broker.view_scheduler.compact(WHERE)
    folder = view_path(f"/disk1/{WHERE}")
    env.mkdir(f"{folder}/cut-off")
    env.open(f"{folder}/cut-off/{0:020d}.log", create=True).close()
    async with broker_with_view(env) as broker:
        await broker.view_scheduler.tidy()
        assert len(env.listdir(folder)) == 2
        assert await read_all(broker) == [(0, b"a", b"1")]


async def test_a_view_goes_with_its_topic_and_with_its_setting() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        await broker.view_scheduler.compact(WHERE)
        folder = view_path(f"/disk1/{WHERE}")
        await broker.view_scheduler.tidy()
        view = broker.views.get("orders.compacted")
        assert view is not None
        await broker.metadata_service.alter("orders", lambda _: {"varve.view": "none"})
        assert broker.views.get("orders.compacted") is None
        assert broker.views.by_id(view.topic_id) is None
        assert "orders.compacted" not in broker.stats.topics
        with pytest.raises(ViewError, match="has no view"):
            await broker.view_scheduler.compact(WHERE)
        await broker.view_scheduler.tidy()
        assert not env.exists(folder)
        await broker.metadata_service.alter("orders", lambda _: {**ON, **ANY_TIME})
        assert await read_all(broker) == [(0, b"a", b"1")]
        await broker.view_scheduler.compact(WHERE)
        await broker.metadata_service.delete("orders")
        assert broker.views.get("orders.compacted") is None
        await broker.metadata_service.create("orders", 1, {**ON, **ANY_TIME})
        assert await read_all(broker) == []


async def test_groups_commit_offsets_for_a_view() -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        await produce(broker, (b"a", b"1"), (b"a", b"2"))
        await broker.view_scheduler.compact(WHERE)
        async with consuming(broker, group_id="readers") as consumer:
            await consumer.commit({VIEW: 2})
            assert await consumer.committed(VIEW) == 2
        admin = AIOKafkaAdminClient(bootstrap_servers=str(broker.addresses[0]))
        await admin.start()
        try:
            with pytest.raises(InvalidRequestError):
                await deleted(admin, "orders.compacted")
            await deleted(admin, "orders")
        finally:
            await admin.close()
        await broker.metadata_service.create("orders", 1, {**ON, **ANY_TIME})
        async with consuming(broker, group_id="readers") as consumer:
            assert await consumer.committed(VIEW) is None, "they went with the topic"


async def test_a_view_cannot_be_changed_and_the_refusal_names_its_topic() -> None:
    async with broker_with_view(MemoryEnv()) as broker:
        view = broker.views.get(VIEW.topic)
        assert view is not None
        setting = AlterConfigsRequestConfig(name="retention.ms", value="1")
        resource = AlterConfigsRequestResource(
            resource_type=2, resource_name=view.name, configs=[setting]
        )
        by_name = DeleteTopicsRequestTopic(name=view.name)
        by_id = DeleteTopicsRequestTopic(name=None, topic_id=view.topic_id)
        grown = CreatePartitionsRequestTopic(name=view.name, count=2)
        cut = DeleteRecordsRequestTopic(
            name=view.name, partitions=[DeleteRecordsRequestPartition(partition_index=0, offset=0)]
        )

        def requested() -> tuple[list[Any], Any]:
            with RawClient(broker.addresses[0].port) as client:
                answers: Any = [
                    client.request(
                        ApiKey.DELETE_TOPICS, 6, DeleteTopicsRequest(topics=[by_name, by_id])
                    ),
                    client.request(
                        ApiKey.ALTER_CONFIGS, 2, AlterConfigsRequest(resources=[resource])
                    ),
                    client.request(
                        ApiKey.CREATE_PARTITIONS, 3, CreatePartitionsRequest(topics=[grown])
                    ),
                    client.request(ApiKey.DELETE_RECORDS, 2, DeleteRecordsRequest(topics=[cut])),
                ]
            deleted, altered, grew, records = answers
            changed = [*deleted.responses, *altered.responses, *grew.results]
            return changed, records.topics[0].partitions[0]

        changed, cut_off = await asyncio.to_thread(requested)
        text = "orders.compacted is the compacted view of topic orders, and is read only"
        results = [(item.error_code, text in (item.error_message or "")) for item in changed]
        assert results == [(ErrorCode.INVALID_REQUEST, True)] * 4
        assert cut_off.error_code == ErrorCode.POLICY_VIOLATION
        assert broker.topics.get("orders") is not None


async def deleted(admin: AIOKafkaAdminClient, topic: str) -> None:
    answer = await admin.delete_topics([topic])
    ((_, code),) = answer.topic_error_codes
    if code:
        raise for_code(code)


async def test_a_view_is_compacted_by_itself_when_enough_has_gathered() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, {"varve.view.min.bytes": "100"}) as broker:
        await produce(broker, (b"a", b"1" * 200), (b"a", b"2" * 200))
        await broker.view_scheduler.tidy()
        assert broker.view_scheduler.status()[0].horizon == 0, "the active segment does not count"
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.roll(env.wall_ms())
        await broker.view_scheduler.tidy()
        assert broker.view_scheduler.status()[0].horizon == 2


async def test_a_map_that_is_too_small_takes_more_rounds() -> None:
    cleaner = {"enabled": False, "dedupe_buffer_bytes": "1MiB"}
    async with broker_with_view(MemoryEnv(), cleaner=cleaner) as broker:
        async with producing(broker) as producer:
            for at in range(60_000):
                await producer.send("orders", key=b"%d" % (at % 50_000), value=b"%d" % at)
            await producer.flush()
        status = await broker.view_scheduler.compact(WHERE)
        assert (status.horizon, status.ledger_records) == (60_000, 50_000)
        values = {key: value for _, key, value in await read_all(broker)}
        assert values == {
            b"%d" % key: b"%d" % (key + 50_000 if key < 10_000 else key) for key in range(50_000)
        }


async def test_a_compacted_topic_keeps_its_tombstones_until_the_view_has_seen_them() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, {"cleanup.policy": "compact"}) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"))
        partition = broker.topics.partition(WHERE)
        assert partition is not None

        def cleanable() -> int:
            facts = broker.cleaning.facts_of(WHERE)
            assert facts is not None
            return facts.undecided_offset

        assert cleanable() == 2, "without a ledger nothing is in the way"
        await broker.view_scheduler.compact(WHERE)
        await produce(broker, (b"a", None))
        assert cleanable() == 2
        await broker.view_scheduler.compact(WHERE)
        assert cleanable() == 3
        assert await read_all(broker) == [(1, b"b", b"1")]


async def test_damage_in_the_log_leaves_the_view_as_it_was_and_says_why() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        await broker.view_scheduler.compact(WHERE)
        await produce(broker, (b"a", b"2"))
        path = f"/disk1/{WHERE}/{1:020d}.log"
        data = env.read_file(path)
        env.open(path, write=True).pwrite(bytes([data[-2] ^ 1]), len(data) - 2)
        with pytest.raises(ViewError, match="damaged"):
            await broker.view_scheduler.compact(WHERE)
        status = broker.view_scheduler.status()[0]
        assert (status.state, status.horizon) == ("failed", 1)
        assert "damaged" in status.error
        assert len(env.listdir(view_path(f"/disk1/{WHERE}"))) == 2, "the run is removed"


async def test_a_view_that_cannot_be_believed_is_not_served_and_made_anew_on_demand() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"), (b"a", b"2"))
        await broker.view_scheduler.compact(WHERE)
    path = f"{view_path(f'/disk1/{WHERE}')}/manifest"
    data = env.read_file(path)
    env.open(path, write=True).pwrite(bytes([data[-1] ^ 1]), len(data) - 1)
    async with broker_with_view(env) as broker:
        status = broker.view_scheduler.status()[0]
        assert (status.is_usable, status.state) == (False, "unusable")
        assert "checksum" in status.error
        view = broker.views.partition(WHERE)
        assert view is not None
        with pytest.raises(InvalidViewError) as refused:
            ViewCursor(view.log).read(0, 1, end_offset=2)
        assert code_of(refused.value) is ErrorCode.KAFKA_STORAGE_ERROR
        with pytest.raises(ViewError, match="rebuild it"):
            await broker.view_scheduler.compact(WHERE)
        await broker.view_scheduler.compact(WHERE, from_scratch=True)
        assert await read_all(broker) == [(1, b"a", b"2")]


async def test_a_view_is_refused_if_its_log_was_cut_below_the_horizon() -> None:
    """Until it is built again, also after clients have written other records below the horizon."""
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"), (b"c", b"1"))
        await broker.view_scheduler.compact(WHERE)
    log = f"/disk1/{WHERE}/{file_name(0, LOG)}"
    data = env.read_file(log)
    first = next(header for _, header in walk_headers(data))
    env.unlink(log)  # the ledger is a link to this file
    write_file_atomically(env, log, data[: first.size_bytes])
    env.unlink(f"/disk1/{WHERE}/{file_name(3, LOG)}")
    for name in (CLEAN_SHUTDOWN, RECOVERY_POINT_CHECKPOINT):
        env.unlink(f"/disk1/{name}")
    async with broker_with_view(env) as broker:
        assert "beyond the log's end" in broker.view_scheduler.status()[0].error
        await produce(broker, (b"a", None), (b"d", b"2"), (b"e", b"2"))
    for _ in range(2):
        async with broker_with_view(env) as broker:
            status = broker.view_scheduler.status()[0]
            assert (status.is_usable, status.state) == (False, "unusable")
            assert "has other records there" in status.error
    async with broker_with_view(env) as broker:
        await broker.view_scheduler.compact(WHERE, from_scratch=True)
        expected = [(2, b"d", b"2"), (3, b"e", b"2")]
        assert await read_all(broker) == expected
    async with broker_with_view(env) as broker:
        assert await read_all(broker) == expected


async def test_a_compaction_is_given_up_on_demand_and_when_the_topic_goes() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, worker=held_worker) as broker:
        await produce(broker, (b"a", b"1"))
        runs = broker.view_scheduler
        runs.begin(WHERE)
        await asyncio.to_thread(
            wait_until, lambda: runs.status()[0].stage == "map", "a worker has it"
        )
        assert runs.abort(WHERE)
        await asyncio.to_thread(
            wait_until, lambda: runs.status()[0].state not in ("waiting", "running"), "it ends"
        )
        assert runs.status()[0].state == "aborted"
        assert await read_all(broker) == [(0, b"a", b"1")]
        broker.view_scheduler.begin(WHERE)
        await broker.metadata_service.delete("orders")
        assert runs.status() == []
        await runs.tidy()
    async with broker_with_view(env) as broker:
        assert await read_all(broker) == [], "nothing of the deleted topic came back"


async def test_a_view_that_could_not_be_read_is_refused_when_it_is_set_up() -> None:
    env = MemoryEnv()
    long = "l" * 245
    async with broker_with_view(env) as broker:
        with pytest.raises(TopicError, match="longer than 249"):
            await broker.metadata_service.create(long, 1, ON)
        await broker.metadata_service.create(long, 1, {})
        with pytest.raises(TopicError, match="longer than 249"):
            await broker.metadata_service.alter(long, lambda _: ON)


async def test_a_topic_that_has_a_views_name_already_is_served_and_the_view_is_not() -> None:
    env = MemoryEnv()
    async with broker_with_view(env, topics={}):
        pass  # the directory gets its identity
    folder = "/disk1/orders.compacted-0"
    env.mkdir(folder)
    batch = build_batch([Record(0, env.wall_ms(), b"a", b"kept")])
    env.open(f"{folder}/{0:020d}.log", create=True).pwrite(bytes(batch), 0)
    async with broker_with_view(env) as broker:
        assert broker.topics.get("orders") is None
        assert broker.topics.get("orders.compacted") is not None
    async with broker_with_view(env, {"varve.view": "none"}):
        pass
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"))
        assert await read_all(broker) == [(0, b"a", b"kept")]
        with pytest.raises(ViewError, match=r"a topic named orders\.compacted exists"):
            await broker.view_scheduler.compact(WHERE)
        assert broker.view_scheduler.status() == []


async def test_a_view_is_compacted_before_its_backlog_expires() -> None:
    env = MemoryEnv()
    keys = {"varve.view.min.bytes": str(1 << 30), "message.timestamp.type": "LogAppendTime"}
    async with broker_with_view(env, keys) as broker:
        await produce(broker, (b"a", b"1"))
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.roll(env.wall_ms())
        await broker.view_scheduler.tidy()
        assert broker.view_scheduler.status()[0].horizon == 0
        env.advance_ms(4 * 86_400_000)  # of seven days
        await broker.view_scheduler.tidy()
        assert broker.view_scheduler.status()[0].horizon == 1


async def test_sources_that_expire_while_they_are_staged_are_done_without() -> None:
    env = MemoryEnv()
    async with broker_with_view(env) as broker:
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        for at in range(3):
            await produce(broker, (b"a", b"%d" % at), (b"k%d" % at, b"1"))
            partition.log.roll(env.wall_ms())
        first = f"{0:020d}.log"

        def takes_it(operation: str, path: str) -> bool:
            if operation == "link" and path.endswith(first):
                env.unlink(f"/disk1/{WHERE}/{first}")  # as retention does, a moment too early
                partition.log.delete_records(2)
                return True
            return False

        fault = env.fail_on(takes_it, errno.ENOENT)
        await broker.view_scheduler.compact(WHERE)
        fault.remove()
        assert await read_all(broker) == [(3, b"k1", b"1"), (4, b"a", b"2"), (5, b"k2", b"1")]


async def test_the_readers_of_views_take_a_limited_amount_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand connections that read all partitions of large views took gigabytes."""
    monkeypatch.setattr(views, "CURSORS_BYTES_MAX", views.CURSOR_BYTES * (PARTS + 1))
    refused = ErrorCode.NOT_LEADER_OR_FOLLOWER  # clients try again
    async with broker_with_view(MemoryEnv()) as broker:
        await produce(broker, (b"a", b"1"))

        def fetched() -> list[int]:
            port = broker.addresses[0].port
            with RawClient(port) as first, RawClient(port) as second, RawClient(port) as third:
                clients = (first, second, third, first)
                return [client.fetch(VIEW.topic).error_code for client in clients]

        assert await asyncio.to_thread(fetched) == [0, 0, refused, 0]
        memory = broker.views.cursor_memory
        released = "the closed connections have none"
        await asyncio.to_thread(wait_until, lambda: not memory.used_bytes, released)


async def compact_what_the_log_loses(env: MemoryEnv) -> None:
    """Compact three records into a view, and delete them from the log."""
    async with broker_with_view(env) as broker:
        await produce(broker, (b"a", b"1"), (b"b", b"1"), (b"a", b"2"))
        await broker.view_scheduler.compact(WHERE)
        partition = broker.topics.partition(WHERE)
        assert partition is not None
        partition.log.delete_records(3)


async def test_a_start_without_the_topic_in_the_file_keeps_its_view() -> None:
    """The ledger may have the only copy of records that the log has lost."""
    env = MemoryEnv()
    await compact_what_the_log_loses(env)
    async with broker_with_view(env, topics={}) as broker:
        assert not broker.topics.existing("orders").config.policy_known
        await broker.view_scheduler.tidy()
        assert env.is_dir(view_path(f"/disk1/{WHERE}"))
    async with broker_with_view(env) as broker:
        assert await read_all(broker) == [(1, b"b", b"1"), (2, b"a", b"2")]
    async with broker_with_view(env, topics={}) as broker:
        await broker.metadata_service.alter("orders", setting("varve.view", "none"))
        await broker.view_scheduler.tidy()
        assert not env.is_dir(view_path(f"/disk1/{WHERE}"))


async def test_a_new_policy_does_not_remove_the_view_that_only_the_file_asked_for() -> None:
    env = MemoryEnv()
    await compact_what_the_log_loses(env)
    async with broker_with_view(env, topics={}) as broker:
        await broker.metadata_service.alter("orders", setting("cleanup.policy", "compact"))
    async with broker_with_view(env, topics={}) as broker:
        assert not broker.topics.existing("orders").config.policy_known
        await broker.view_scheduler.tidy()
        await broker.metadata_service.alter("orders", setting("varve.view", "compacted"))
        assert broker.topics.existing("orders").config.policy_known
        assert await read_all(broker) == [(1, b"b", b"1"), (2, b"a", b"2")]
