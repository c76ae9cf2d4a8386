"""Topics come, change and go: what is durable when, and what a crash or a full disk leaves."""

import asyncio
import errno
import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.topics.metadata_service import PARTITIONS_PER_GROUP, NewTopic, TopicResult
from broker.topics.topics import Topic, TopicError
from config.settings import Settings
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.errors import InconsistentDirectoryError, NoRoomError
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.principals import PrincipalClient
from tests.support.broker.topics_on_disk import COMPACT, GROUP, TopicsOnDisk, folders, setting
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=11)


# --- creation -----------------------------------------------------------------------------------


async def test_a_creation_that_a_crash_cut_off_is_undone_at_the_next_start() -> None:
    crash_at, outcomes = 0, set()
    while "created" not in outcomes:
        crash_at += 1
        env = MemoryEnv(seed=crash_at)
        disk = await TopicsOnDisk(env).open()
        env.settle()
        env.crash_at = env.operations + crash_at
        try:
            await disk.service.create("orders", 3, COMPACT)
            outcomes.add("created")
            env = env.kill()
        except SimulatedCrash:
            env = env.crash()
        again = await TopicsOnDisk(env).open()
        topic = again.topics.get("orders")
        if topic is not None:
            assert sorted(topic.partitions) == [0, 1, 2], f"seed and step {crash_at}"
            assert topic.config.compacts
            outcomes.add("whole")
        else:
            assert folders(env) == [], f"seed and step {crash_at}"
            await again.service.create("orders", 3, COMPACT)
            outcomes.add("undone")
    assert outcomes == {"created", "whole", "undone"}


async def test_a_crash_at_any_step_leaves_each_topic_of_a_group_whole_or_not_at_all() -> None:
    """Also if the start that undoes the creation crashes."""
    crash_at, outcomes = 0, set()
    while "created" not in outcomes:
        crash_at += 1
        rng = random.Random(crash_at)
        env = MemoryEnv(seed=crash_at)
        disk = await TopicsOnDisk(env, "/disk1", "/disk2").open()
        env.settle()
        env.crash_at = env.operations + crash_at
        try:
            await disk.service.create_all(GROUP)
            outcomes.add("created")
            env = env.kill()
        except SimulatedCrash:
            env = env.crash()
        env.crash_at = env.operations + rng.randrange(1, 60)
        with suppress(SimulatedCrash):
            await TopicsOnDisk(env, "/disk1", "/disk2").open()
        again = await TopicsOnDisk(env.crash(), "/disk1", "/disk2").open()
        left = folders(again.env, "/disk1") + folders(again.env, "/disk2")
        expected = []
        for new_topic in GROUP:
            topic = again.topics.get(new_topic.name)
            outcomes.add("undone" if topic is None else "whole")
            if topic is not None:
                assert topic.partition_count == new_topic.partitions, f"seed and step {crash_at}"
                assert topic.offline == {}, f"seed and step {crash_at}"
                assert topic.layers.dynamic == new_topic.dynamic, f"seed and step {crash_at}"
                expected += [str(log.partition) for log in topic.partitions.values()]
        assert sorted(left) == sorted(expected), f"seed and step {crash_at}"
        missing = [new_topic for new_topic in GROUP if new_topic.name not in again.topics]
        created = await again.service.create_all(missing)
        assert all(isinstance(result, Topic) for result in created), f"seed and step {crash_at}"
    assert outcomes == {"created", "whole", "undone"}


@pytest.mark.parametrize("seed", range(15))
async def test_topics_created_together_have_the_results_of_one_after_the_other(seed: int) -> None:
    print(f"seed {seed}")
    outcomes = []
    for together in (True, False):
        rng = random.Random(seed)
        env = MemoryEnv(seed)
        disk = await TopicsOnDisk(env, limits={"partitions": rng.choice((5, 12, 1_000))}).open()
        new_topics = some_topics(rng)
        await disk.service.create("topic3", 1, {})  # one of the others may have its name
        full = {new_topic.name for new_topic in new_topics if rng.random() < 0.1}
        env.fail_on(
            lambda op, path, full=full: (
                op == "mkdir" and path.rpartition("/")[2].rpartition("-")[0] in full
            ),
            errno.ENOSPC,
        )
        charge = quota_of(rng.choice((5, 30, 1_000)))
        results: list[TopicResult] = []
        if together:
            results = await disk.service.create_all(new_topics, charge)
        else:
            for new_topic in new_topics:
                results += await disk.service.create_all([new_topic], charge)
        reopened = await disk.reopen()
        outcomes.append(
            (
                [result.name if isinstance(result, Topic) else str(result) for result in results],
                {topic.name: (topic.partition_count, topic.config) for topic in disk.topics},
                {topic.name: (topic.partition_count, topic.config) for topic in reopened.topics},
                folders(env),
            )
        )
    assert outcomes[0] == outcomes[1]


def some_topics(rng: random.Random) -> list[NewTopic]:
    """Topics with different names; some have a view, some names are those of a view."""
    names = [f"topic{number}" for number in range(20)] + ["not/legal", "topic7.compacted"]
    rng.shuffle(names)
    settings: list[dict[str, str]] = [
        {},
        COMPACT,
        COMPACT | {"varve.view": "compacted"},
        {"min.compaction.lag.ms": "9", "max.compaction.lag.ms": "8"},  # contradict each other
    ]
    return [
        NewTopic(name, rng.choice((1, 1, 1, 2, 3, PARTITIONS_PER_GROUP)), rng.choice(settings))
        for name in names[: rng.randrange(5, len(names))]
    ]


def quota_of(partitions: int) -> Callable[[int], None]:
    """A quota that refuses a topic when so many partitions were charged."""
    charged = 0

    def charge(count: int) -> None:
        nonlocal charged
        if charged >= partitions:
            raise TopicError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, "quota")
        charged += count

    return charge


async def test_topics_are_created_in_groups_with_two_saves_each(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    count = 2 * PARTITIONS_PER_GROUP + 1
    before = len(env.history)
    results = await disk.service.create_all([NewTopic(f"t{n}", 1) for n in range(count)])
    assert [result.name for result in results if isinstance(result, Topic)] == [
        f"t{n}" for n in range(count)
    ]
    assert env.history[before:].count(("rename", "/disk1/varve.metadata")) == 3 * 2
    assert len(disk.topics) == count


async def test_other_changes_run_between_the_groups_of_a_request(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 1, {})
    count = 2 * PARTITIONS_PER_GROUP
    creation = asyncio.create_task(
        disk.service.create_all([NewTopic(f"t{n}", 1) for n in range(count)])
    )
    await asyncio.sleep(0)
    await disk.service.alter("orders", setting("retention.ms", "1000"))
    assert len(disk.topics) == 1 + PARTITIONS_PER_GROUP
    await creation
    assert len(disk.topics) == 1 + count


async def test_limits_partitions_counts_the_topics_of_the_same_request(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env, limits={"partitions": 3}).open()
    full = env.fail_on(lambda op, path: op == "mkdir" and "fails-0" in path, errno.ENOSPC)
    failed, first, refused, second = await disk.service.create_all(
        [NewTopic("fails", 2), NewTopic("a", 2), NewTopic("b", 2), NewTopic("c", 1)]
    )
    full.remove()
    assert isinstance(failed, NoRoomError)  # and takes no room from the others
    assert isinstance(first, Topic)
    assert isinstance(refused, TopicError)
    assert refused.reason == "this broker has 2 partitions; limits.partitions allows 3"
    assert isinstance(second, Topic)


async def test_a_topic_whose_folders_cannot_be_made_fails_alone(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    env.fail_on(lambda op, path: op == "mkdir" and "orders-1" in path, errno.ENOSPC)
    failed, *others = await disk.service.create_all(GROUP)
    assert isinstance(failed, NoRoomError)
    assert all(isinstance(other, Topic) for other in others)
    created = ["audit-0", "customers-0", "customers-1", "customers-2"]
    assert folders(env) == created
    assert disk.manager.metadata.topics.keys() == {"audit", "customers"}
    again = await disk.reopen()
    assert "orders" not in again.topics
    assert folders(env) == created


async def test_a_creation_that_fails_can_be_tried_again(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env, "/disk1", "/disk2").open()
    env.mkdir("/disk1/orders-2/of-somebody-else")
    env.open("/disk1/orders-2/00000000000000000000.log", create=True).pwrite(b"records", 0)
    env.mkdir("/disk2/orders-2")
    env.open("/disk2/orders-2/00000000000000000000.log", create=True).pwrite(b"records", 0)
    for _ in range(2):
        with pytest.raises(InconsistentDirectoryError, match="topic id"):
            await disk.service.create("orders", 3, {})
    assert disk.topics.get("orders") is None
    assert "orders" not in disk.manager.metadata.topics
    env.remove_tree("/disk1/orders-2")
    env.remove_tree("/disk2/orders-2")
    assert (await disk.service.create("orders", 3, {})).partition_count == 3


async def test_a_creation_that_fails_leaves_nothing_that_the_next_start_takes_over(
    env: MemoryEnv,
) -> None:
    disk = await TopicsOnDisk(env).open()
    full = env.fail_on(lambda op, path: op == "mkdir" and "orders-2" in path, errno.ENOSPC)
    with pytest.raises(NoRoomError):
        await disk.service.create("orders", 3, {})
    full.remove()
    assert folders(env) == []
    again = await disk.reopen()
    assert len(again.topics) == 0


async def test_a_growth_that_fails_leaves_the_topic_as_it_was(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 1, {})
    full = env.fail_on(lambda op, path: op == "mkdir" and "orders-2" in path, errno.ENOSPC)
    with pytest.raises(NoRoomError):
        await disk.service.add_partitions("orders", 3)
    full.remove()
    assert all(directory.is_online for directory in disk.manager.table.directories)
    assert sorted(disk.manager.metadata.topics["orders"].partitions) == [0]


@pytest.mark.parametrize("failing_saves", [{0}, {1}, {1, 2}])
async def test_topics_for_whose_metadata_there_is_no_room_can_be_created_later(
    env: MemoryEnv, failing_saves: set[int]
) -> None:
    disk = await TopicsOnDisk(env).open()
    saves = itertools.count()
    full = env.fail_on(
        lambda op, path: (
            op == "pwrite" and "varve.metadata" in path and next(saves) in failing_saves
        ),
        errno.ENOSPC,
    )
    for result in await disk.service.create_all(GROUP):
        assert isinstance(result, NoRoomError)
    full.remove()
    assert folders(env) == []
    assert len((await disk.reopen()).topics) == 0
    disk = await TopicsOnDisk(env.kill()).open()
    assert all(isinstance(result, Topic) for result in await disk.service.create_all(GROUP))


async def test_a_creation_without_room_to_undo_it_comes_back_at_no_start(env: MemoryEnv) -> None:
    disk, saves = await TopicsOnDisk(env).open(), itertools.count()
    full = (
        env.fail_on(
            lambda op, path: op == "pwrite" and "varve.metadata" in path and next(saves) == 1,
            errno.ENOSPC,
        ),
        env.fail_on(lambda op, path: op == "rename" and path.endswith("-delete"), errno.ENOSPC),
    )
    with pytest.raises(NoRoomError):
        await disk.service.create("orders", 2, {})
    assert all(directory.is_online for directory in disk.manager.table.directories)
    assert folders(env) == ["orders-0", "orders-1"]
    for fault in full:
        fault.remove()
    assert len((await disk.reopen()).topics) == 0
    assert folders(env) == []


async def test_a_topic_is_created_once_whoever_uses_it_first(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    first, second = await asyncio.gather(
        disk.service.ensure("orders"), disk.service.ensure("orders")
    )
    assert first is second


async def test_there_is_a_limit_of_partitions(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env, limits={"partitions": 3}).open()
    await disk.service.create("orders", 2, {})
    for refused in (disk.service.create("more", 2, {}), disk.service.add_partitions("orders", 4)):
        with pytest.raises(TopicError, match=r"limits\.partitions allows 3"):
            await refused


async def test_a_client_leaves_partitions_for_others(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env, limits={"partitions": 20}).open()
    service = disk.service
    await service.create("a", 4, {}, creator="ann")
    for refused in (
        service.create("more", 9, {}, creator="ann"),
        service.add_partitions("a", 13, creator="ann"),
    ):
        with pytest.raises(TopicError, match="ann would have more partitions than are left") as e:
            await refused
        assert e.value.code is ErrorCode.POLICY_VIOLATION
    await service.add_partitions("a", 10, creator="ann")
    await service.create("b", 5, {}, creator="bob")
    await service.create("c", 5, {})  # by a client that may create all topics
    await service.delete("a")
    await service.create("a", 5, {}, creator="ann")


async def test_topics_of_one_request_leave_as_many_partitions_for_others(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env, limits={"partitions": 20}).open()
    topics = [NewTopic(f"t{number}", 1, creator="ann") for number in range(14)]
    results = await disk.service.create_all(topics)
    assert [isinstance(result, Topic) for result in results] == [True] * 10 + [False] * 4


async def test_a_failed_creation_takes_nothing_of_a_share(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env, limits={"partitions": 20}).open()
    await disk.service.create("a", 2, {})
    env.fail_on(lambda op, path: op == "mkdir" and path.startswith("/disk1/"), errno.ENOSPC)
    for failing in (
        disk.service.create("b", 9, {}, creator="ann"),
        disk.service.add_partitions("a", 9, creator="ann"),
    ):
        with pytest.raises(NoRoomError):
            await failing
    assert not disk.service._limits._shares._counts


# --- the settings file --------------------------------------------------------------------------


async def test_the_file_creates_and_grows_and_never_takes_away(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env, topics={"orders": {"partitions": 2, "keys": COMPACT}}).open()
    assert disk.topics.existing("orders").partition_count == 2
    warnings = []
    for settings in ({"topics": {"orders": {"partitions": n}}} for n in (3, 1)):
        disk.manager.close()
        with capture_logs() as lines:
            disk = await TopicsOnDisk(env, **settings).open()
        assert disk.topics.existing("orders").partition_count == 3
        warnings += [line["event"] for line in lines if line["log_level"] == "warning"]
    assert warnings == [
        "adding partitions: new records of a key may go to another partition",
        "partitions not removed",
    ]
    assert (await disk.reopen()).topics.existing("orders").partition_count == 3


async def test_a_default_number_of_partitions_is_for_new_topics_alone(env: MemoryEnv) -> None:
    """A topic taken over from Kafka keeps its partitions, and so its keys stay in their places."""
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 2, {})
    for default in (1, 4):
        disk.manager.close()
        defaults = {"partitions": default}
        named = {"orders": {"keys": COMPACT}, f"new{default}": {}}
        with capture_logs() as lines:
            disk = await TopicsOnDisk(env, topics=named, topic_defaults=defaults).open()
        assert disk.topics.existing("orders").partition_count == 2
        assert disk.topics.existing(f"new{default}").partition_count == default
        assert [line["event"] for line in lines if line["log_level"] == "warning"] == []


# --- settings -----------------------------------------------------------------------------------


async def test_a_change_of_policy_holds_the_cleaner_and_others_do_not(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    topic = await disk.service.create("orders", 2, {})
    before = topic.partitions[0].log.generation
    await disk.service.alter("orders", setting("retention.ms", "1000"))
    assert disk.paused_partitions == []
    assert topic.partitions[0].log.config.retention_ms == 1000
    await disk.service.alter("orders", setting("cleanup.policy", "compact"))
    assert disk.paused_partitions == [TopicPartition("orders", 0), TopicPartition("orders", 1)]
    assert topic.partitions[0].log.generation != before


async def test_retention_beside_compaction_does_not_hold_the_cleaner(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    log = (await disk.service.create("orders", 1, COMPACT)).partitions[0].log
    generation = log.generation
    for policy in ("compact,delete", "compact") * 20:
        await disk.service.alter("orders", setting("cleanup.policy", policy))
        await disk.service.alter("orders", setting("min.cleanable.dirty.ratio", "0.3"))
    assert disk.paused_partitions == []
    assert log.generation == generation
    await disk.service.alter("orders", setting("cleanup.policy", "delete"))
    assert disk.paused_partitions == [TopicPartition("orders", 0)]
    assert log.generation != generation


async def test_a_change_of_the_brokers_policy_holds_the_cleaner_too(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("follows", 1, {})
    await disk.service.create("has-its-own", 1, COMPACT)
    await disk.service.alter_broker(setting("log.cleanup.policy", "compact"))
    assert disk.paused_partitions == [TopicPartition("follows", 0)]
    assert len(disk.cleaner) == 1


async def test_two_changes_at_once_are_both_made(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 1, {})
    await asyncio.gather(
        disk.service.alter("orders", setting("retention.ms", "1000")),
        disk.service.alter("orders", setting("segment.ms", "2000")),
    )
    config = disk.topics.existing("orders").config
    assert (config.retention_ms, config.segment_ms) == (1000, 2000)


async def test_a_change_that_is_only_checked_changes_nothing(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    topic = await disk.service.create("orders", 1, {})
    before = disk.manager.metadata
    await disk.service.alter("orders", setting("retention.ms", "1000"), validate_only=True)
    await disk.service.alter_broker(setting("log.cleaner.threads", "2"), validate_only=True)
    assert disk.manager.metadata is before
    assert topic.config.retention_ms != 1000
    assert disk.cleaner == []


async def test_the_offsets_topic_stays_compacted_when_something_else_is_set(
    env: MemoryEnv,
) -> None:
    disk = await TopicsOnDisk(env).open()
    topic = await disk.service.ensure("__consumer_offsets", 2)
    await disk.service.alter("__consumer_offsets", setting("min.cleanable.dirty.ratio", "0.3"))
    assert topic.config.cleanup_policy == ("compact",)
    assert topic.config.min_cleanable_dirty_ratio == 0.3
    again = await disk.reopen()
    assert again.topics.existing("__consumer_offsets").config == topic.config


async def test_settings_of_a_client_survive_a_restart_and_win_over_the_file(
    env: MemoryEnv,
) -> None:
    disk = await TopicsOnDisk(env, topics={"orders": {"keys": {"retention.ms": "5000"}}}).open()
    await disk.service.alter("orders", setting("retention.ms", "1000"))
    again = await disk.reopen(topics={"orders": {"keys": {"retention.ms": "7000"}}})
    assert again.topics.existing("orders").config.retention_ms == 1000


# --- turns of clients ---------------------------------------------------------------------------


async def test_a_client_with_many_changes_delays_another_by_one_of_them(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 1, {})
    order: list[str] = []

    async def alter(client: str) -> None:
        await disk.service.alter("orders", setting("retention.ms", "1000"), client=client)
        order.append(client)

    await asyncio.gather(*[alter("many") for _ in range(50)], alter("one"))
    assert order.index("one") <= 1


async def test_a_large_creation_and_deletion_give_way_to_other_clients(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    for large in (
        disk.service.create("large", 3 * PARTITIONS_PER_GROUP, {}, client="a"),
        disk.service.add_partitions("large", 6 * PARTITIONS_PER_GROUP, client="a"),
        disk.service.delete("large", client="a"),
    ):
        task = asyncio.create_task(large)
        await asyncio.sleep(0)
        await disk.service.create("small", 1, {}, client="b")
        await disk.service.delete("small", client="b")
        assert not task.done()
        await task
    assert folders(env) == []


async def test_the_deletion_of_many_offsets_gives_way_to_other_clients(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 1, {})

    async def forget(_names: object, give_way: Callable[[], Awaitable[None]]) -> None:
        other = asyncio.create_task(disk.service.create("small", 1, {}, client="b"))
        while not other.done():
            await asyncio.sleep(0)
            await give_way()

    disk.offsets.forget_topics = forget
    async with asyncio.timeout(10):
        await disk.service.delete("orders", client="a")
    assert "small" in disk.topics


async def test_changes_of_a_topic_wait_for_one_that_gave_way(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    partitions = 2 * PARTITIONS_PER_GROUP
    await asyncio.gather(
        disk.service.create("orders", partitions, {}, client="a"),
        disk.service.alter("orders", setting("retention.ms", "1000"), client="b"),
        disk.service.add_partitions("orders", 2 * partitions, client="c"),
        disk.service.delete("orders", client="d"),
        disk.service.create("orders", 1, COMPACT, client="e"),
    )
    assert disk.topics.existing("orders").partition_count == 1
    assert folders(env) == ["orders-0"]
    again = await disk.reopen()
    assert again.topics.existing("orders").config.compacts


async def test_new_partitions_have_the_settings_that_changed_while_they_were_made(
    env: MemoryEnv,
) -> None:
    disk = await TopicsOnDisk(env).open()
    _, topic = await asyncio.gather(
        disk.service.alter_broker(setting("log.retention.ms", "1234567"), client="b"),
        disk.service.create("orders", 3 * PARTITIONS_PER_GROUP, {}, client="a"),
    )
    creation = asyncio.create_task(disk.service.add_partitions("orders", 6 * PARTITIONS_PER_GROUP))
    while len(disk.manager.table.logs) == topic.partition_count:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await disk.service.alter_broker(setting("log.retention.ms", "7654321"), client="b")
    assert not creation.done()
    await creation
    assert {row.log.config.retention_ms for row in topic.partitions.values()} == {7654321}


async def test_partitions_that_are_not_yet_made_count_for_the_limit(env: MemoryEnv) -> None:
    limit = 3 * PARTITIONS_PER_GROUP
    disk = await TopicsOnDisk(env, limits={"partitions": limit}).open()
    creations = [disk.service.create(name, limit, {}, client=name) for name in ("a", "b")]
    created, refused = await asyncio.gather(*creations, return_exceptions=True)
    assert isinstance(created, Topic)
    assert isinstance(refused, TopicError)
    assert len(disk.manager.table.logs) == limit


# --- failure ------------------------------------------------------------------------------------


async def test_a_setting_of_the_broker_that_contradicts_a_topic_names_it(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 1, {"min.compaction.lag.ms": "9000"})
    with pytest.raises(TopicError, match=r"^topics\.orders: min\.compaction\.lag\.ms"):
        await disk.service.alter_broker(setting("log.cleaner.max.compaction.lag.ms", "5"))


async def test_partitions_of_a_failed_directory_are_known_and_not_served(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env, "/disk1", "/disk2").open()
    topic = await disk.service.create("orders", 2, {})
    disk.topics.take_offline(disk.manager.table.fail_directory("/disk1", "burnt"), "burnt")
    assert topic.partition_count == 2
    assert list(topic.offline.values()) == ["burnt"]
    assert len(topic.partitions) == 1


async def test_a_change_goes_on_to_its_end_though_its_client_leaves(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    for change in (
        lambda: disk.service.create("left", 3, {}),
        lambda: disk.service.add_partitions("left", 5),
        lambda: disk.service.alter("left", setting("retention.ms", "1")),
        lambda: disk.service.delete("left"),
        lambda: disk.service.create("left", 2, {}),
    ):
        task = asyncio.create_task(change())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await disk.writer.wait_idle(10)
    topic = disk.topics.existing("left")
    assert topic.partition_count == 2
    assert disk.manager.metadata.topics["left"].topic_id == topic.topic_id
    assert folders(env) == ["left-0", "left-1"]


# --- the file read anew -------------------------------------------------------------------------


def file_of(**settings: Any) -> Settings:
    return Settings.model_validate({"log_dirs": ["/disk1"], **settings})


def keyed(**keys: str) -> dict[str, Any]:
    return {"keys": {name.replace("_", "."): value for name, value in keys.items()}}


async def test_a_reload_replaces_the_files_layers_and_leaves_the_dynamic_one(
    env: MemoryEnv,
) -> None:
    before = {"orders": keyed(cleanup_policy="compact", retention_ms="5"), "audit": {}}
    disk = await TopicsOnDisk(env, topics=before).open()
    await disk.service.alter("orders", setting("segment.ms", "7"))
    disk.paused_partitions.clear()
    after = {"orders": {"partitions": 2} | keyed(segment_ms="9"), "fresh": {"partitions": 2}}
    await disk.service.reload(file_of(topics=after, topic_defaults=keyed(retention_bytes="11")))
    await disk.service.apply_yaml()
    orders = disk.topics.existing("orders")
    config = orders.config
    assert (config.cleanup_policy, config.segment_ms) == (("delete",), 7)
    assert (config.retention_ms, config.retention_bytes) == (7 * 86_400_000, 11)
    assert orders.partitions[0].log.config == orders.partitions[1].log.config == config
    assert disk.paused_partitions == [
        TopicPartition("orders", 0)
    ]  # its policy changed; audit's did not
    fresh = disk.topics.existing("fresh")
    assert fresh.partition_count == 2
    assert disk.cleaner
    assert disk.wakes > 0
    assert disk.topics.get("audit") is not None


def known_policies(disk: TopicsOnDisk) -> dict[str, str | None]:
    """Return the cleanup policy of each topic; None: it is neither cleaned nor expired."""
    return {
        topic.name: ",".join(topic.config.cleanup_policy) if topic.config.policy_known else None
        for topic in disk.topics
    }


KEPT_BY_FILE: dict[str, Any] = {
    "topics": {
        "state": keyed(cleanup_policy="compact"),
        "short": keyed(retention_ms="5"),
        "plain": {},
    }
}


async def test_a_start_without_the_settings_file_deletes_nothing_that_the_file_kept() -> None:
    env = MemoryEnv(seed=12)
    disk = await TopicsOnDisk(env, **KEPT_BY_FILE).open()
    await disk.service.create("own", 1, COMPACT)
    await disk.service.create("used", 1, {})
    env = env.crash()
    for _ in range(2):  # also by the second start
        disk = await TopicsOnDisk(env).open()
        assert known_policies(disk) == {
            "state": None, "short": "delete", "plain": "delete", "own": "compact", "used": "delete"
        }  # fmt: skip
        env = env.crash()
    disk = await TopicsOnDisk(env, **KEPT_BY_FILE).open()
    assert known_policies(disk)["state"] == "compact"


@pytest.mark.parametrize(
    "defaults", [keyed(retention_ms="-1"), keyed(cleanup_policy="compact")], ids=str
)
async def test_a_default_that_kept_records_is_missed_until_a_topic_gets_its_own(
    env: MemoryEnv, defaults: dict[str, Any]
) -> None:
    disk = await TopicsOnDisk(env, topic_defaults=defaults).open()
    await disk.service.create("used", 1, {})
    disk = await disk.reopen()
    assert known_policies(disk) == {"used": None}
    await disk.service.alter("used", setting("cleanup.policy", "delete"))
    assert known_policies(disk) == {"used": "delete"}
    disk = await disk.reopen()
    await disk.service.alter("used", lambda _dynamic: {})  # --unset: wishes the default
    disk = await disk.reopen()
    assert known_policies(disk) == {"used": "delete"}


async def test_a_retention_of_the_file_is_missed_although_a_client_chose_to_delete(
    env: MemoryEnv,
) -> None:
    disk = await TopicsOnDisk(env, topic_defaults=keyed(retention_ms="-1")).open()
    for name in ("first", "second"):
        await disk.service.create(name, 1, {"cleanup.policy": "delete"})
    await disk.service.create("own", 1, COMPACT)
    for _ in range(2):
        disk = await disk.reopen()
        assert known_policies(disk) == {"first": None, "second": None, "own": "compact"}
    await disk.service.alter("first", setting("segment.ms", "1000000"))
    assert known_policies(disk)["first"] is None
    await disk.service.alter("first", setting("retention.ms", "1000"))
    await disk.service.alter("second", setting("cleanup.policy", "compact,delete"))
    for _ in range(2):
        assert known_policies(disk) == {
            "first": "delete", "second": "compact,delete", "own": "compact"
        }  # fmt: skip
        disk = await disk.reopen()


@pytest.mark.parametrize("restarts", [True, False])
async def test_a_retention_of_the_broker_replaces_that_of_the_file(
    env: MemoryEnv, restarts: bool
) -> None:
    disk = await TopicsOnDisk(env, topic_defaults=keyed(retention_ms="-1")).open()
    await disk.service.create("used", 1, {})
    disk = await disk.reopen()
    assert known_policies(disk) == {"used": None}
    for change in (setting("log.retention.ms", "-1"), lambda _dynamic: {}):
        await disk.service.alter_broker(change)
        assert known_policies(disk) == {"used": "delete"}
        if restarts:
            disk = await disk.reopen()
            assert known_policies(disk) == {"used": "delete"}


async def test_a_topic_that_a_reload_leaves_is_kept_and_one_that_it_names_is_not(
    env: MemoryEnv,
) -> None:
    compacted = keyed(cleanup_policy="compact")
    disk = await TopicsOnDisk(env, topics={"left": compacted, "named": compacted}).open()
    await disk.service.reload(file_of(topics={"named": {}}))
    await disk.service.apply_yaml()
    for _ in range(2):
        assert known_policies(disk) == {"left": None, "named": "delete"}
        disk = await disk.reopen()


async def test_a_reload_that_contradicts_what_a_client_set_changes_nothing(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(
        env, topics={"a": {}, "orders": keyed(cleanup_policy="compact")}
    ).open()
    await disk.service.alter("orders", setting("max.compaction.lag.ms", "1000"))
    file = {"a": keyed(retention_ms="1"), "orders": keyed(min_compaction_lag_ms="2000")}
    with pytest.raises(TopicError, match=r"topics\.orders: .*min\.compaction\.lag\.ms"):
        await disk.service.reload(file_of(topics=file, cleaner={"workers": 3}))
    assert disk.topics.existing("a").config.retention_ms == 7 * 86_400_000
    assert disk.topics.existing("orders").config.compacts
    assert disk.cleaner == []


async def test_a_user_has_one_share_of_the_changes_from_all_its_addresses() -> None:
    done = []

    async def alter(broker: Broker, user: str, host: str) -> None:
        row = m.IncrementalAlterConfigsRequestResource(
            resource_type=2,
            resource_name="orders",
            configs=[m.IncrementalAlterConfigsRequestConfig(name="retention.ms", value="1000")],
        )
        body = m.IncrementalAlterConfigsRequest(resources=[row])
        await PrincipalClient(broker, user, host).request(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, body)
        done.append(user)

    async with broker_in_memory(MemoryEnv(seed=41), topics={"orders": {}}) as broker:
        floods = [asyncio.ensure_future(alter(broker, "eve", f"10.0.0.{n}")) for n in range(20)]
        await asyncio.sleep(0)  # all of them wait for the writer
        await asyncio.gather(alter(broker, "ann", "10.0.0.99"), *floods)
    assert done.index("ann") <= 2
