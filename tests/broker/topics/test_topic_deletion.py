"""A deleted topic is gone for good, whatever a crash or full disk leaves, and its name is free."""

import asyncio
import errno
import gc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import pytest

from broker.event_loop.loop_turns import yield_to_loop
from broker.quotas.shares import Shares
from broker.topics.partition import Partition
from broker.topics.topics import Topic, TopicError
from protocol.errors import ErrorCode
from storage.errors import NoRoomError
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.topics_on_disk import COMPACT, GROUP, TopicsOnDisk, folders, setting
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

PARTITIONS = 20  # of a topic that is deleted in turns


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=11)


async def test_a_deleted_topic_stays_deleted_and_its_name_is_free(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    old = await disk.service.create("orders", 2, {})
    await disk.service.delete("orders")
    assert disk.paused_partitions == [TopicPartition("orders", 0), TopicPartition("orders", 1)]
    new = await disk.service.create("orders", 1, {})
    assert new.topic_id != old.topic_id
    await disk.service.delete("orders")
    again = await disk.reopen()
    assert again.topics.get("orders") is None


async def create_group(disk: TopicsOnDisk) -> list[Topic]:
    created = await disk.service.create_all(GROUP)
    assert not any(isinstance(topic, Exception) for topic in created)
    return [disk.topics.existing(new_topic.name) for new_topic in GROUP]


async def test_topics_that_are_deleted_together_share_saves_and_syncs(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    topics = [await disk.service.create(f"t{number}", 1, {}) for number in range(30)]
    syncs: list[str] = []

    def count(op: str, path: str) -> bool:
        if op in ("sync", "sync_dir"):
            syncs.append(path)
        return False

    env.fail_on(count, errno.EIO)
    assert await disk.service.delete_all(topics) == topics
    assert len(syncs) == 2 + 2, "one save, and two steps of folders"
    assert folders(env) == []


async def test_each_of_the_topics_that_are_deleted_together_has_its_own_result(
    env: MemoryEnv,
) -> None:
    disk = await TopicsOnDisk(env).open()
    orders, audit, customers = await create_group(disk)
    await disk.service.delete("audit")
    full = TopicError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, "full")

    def charge(partitions: int) -> None:
        if partitions == 3:
            raise full

    results = await disk.service.delete_all([orders, audit, customers], charge)
    assert (results[0], results[2]) == (orders, full)
    codes = [result.code for result in results if isinstance(result, TopicError)]
    assert codes == [
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,
    ]
    assert list(disk.topics) == [customers]


async def test_topics_stay_if_the_metadata_without_them_finds_no_room(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    topics = await create_group(disk)
    full = env.fail_on(lambda op, _: op == "pwrite", errno.ENOSPC)
    results = await disk.service.delete_all(topics)
    full.remove()
    assert all(isinstance(result, NoRoomError) for result in results)
    assert list(disk.topics) == topics
    assert await disk.service.delete_all(topics) == topics


async def test_a_crash_at_any_step_of_a_deletion_leaves_all_topics_of_a_group_or_none() -> None:
    crash_at, outcomes = 0, set()
    while "deleted" not in outcomes:
        crash_at += 1
        env = MemoryEnv(seed=crash_at)
        disk = await TopicsOnDisk(env, "/disk1", "/disk2").open()
        topics = await create_group(disk)
        env.settle()
        env.crash_at = env.operations + crash_at
        try:
            await disk.service.delete_all(topics)
            outcomes.add("deleted")
        except SimulatedCrash:
            pass
        again = await TopicsOnDisk(env.crash(), "/disk1", "/disk2").open()
        left = folders(again.env, "/disk1") + folders(again.env, "/disk2")
        counts = {topic.name: len(topic.partitions) for topic in again.topics}
        all_counts = {new_topic.name: new_topic.partitions for new_topic in GROUP}
        assert counts in ({}, all_counts), f"seed and step {crash_at}"
        assert len(left) == sum(counts.values()), f"seed and step {crash_at}"
        outcomes.add("whole" if counts else "gone")
    assert outcomes == {"deleted", "whole", "gone"}


async def test_the_logs_of_a_deleted_topic_are_freed_without_a_garbage_collection() -> None:
    env = MemoryEnv(seed=11)
    async with broker_in_memory(env) as broker:
        topic = await broker.metadata_service.create("orders", 3, {})
        logs = [weakref.ref(partition.log) for partition in topic.partitions.values()]
        gc.disable()
        try:
            await broker.metadata_service.delete("orders")
            assert [log() for log in logs] == [None] * 3
        finally:
            gc.enable()


async def test_the_offsets_of_a_deleted_topic_are_gone_before_its_name_is_free(
    env: MemoryEnv,
) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 1, {})
    done: list[str] = []

    async def forget(*names: str) -> None:
        await asyncio.sleep(0.01)
        done.extend(f"forgot {name}" for name in names)

    disk.offsets.forget_topics = lambda names, _give_way: forget(*names)
    disk.offsets.forget_earlier_topic = forget
    deletion = asyncio.ensure_future(disk.service.delete("orders"))
    while "orders" in disk.topics:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await disk.service.create("orders", 1, {"varve.view": "compacted"} | COMPACT)
    assert deletion.done()
    assert done == ["forgot orders", "forgot orders.compacted"] * 2


@pytest.mark.parametrize("view", ["none", "compacted"])
async def test_the_offsets_of_a_view_go_with_its_topic_even_if_it_was_switched_off(
    env: MemoryEnv, view: str
) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 1, {"varve.view": "compacted"})
    await disk.service.alter("orders", setting("varve.view", view))
    assert await names_forgotten_with_orders(disk) == ["orders", "orders.compacted"]


async def test_a_deletion_leaves_the_offsets_of_a_topic_with_the_name_of_the_view(
    env: MemoryEnv,
) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 1, {"varve.view": "compacted"})
    env.mkdir("/disk1/orders.compacted-0")
    disk = await disk.reopen()
    assert "orders.compacted" in disk.topics
    assert await names_forgotten_with_orders(disk) == ["orders"]


async def names_forgotten_with_orders(disk: TopicsOnDisk) -> list[str]:
    forgotten: list[str] = []

    async def forget(names: Collection[str], _give_way: object) -> None:
        forgotten.extend(names)

    disk.offsets.forget_topics = forget
    await disk.service.delete("orders")
    return forgotten


async def test_a_deletion_leaves_a_topic_that_was_created_again(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env).open()
    former = await disk.service.create("orders", 1, {})
    results = await asyncio.gather(
        disk.service.delete("orders", client="a"),
        disk.service.create("orders", 1, {}, client="b"),
        disk.service.delete_all([former], client="c"),
    )
    (refused,) = results[2]
    assert isinstance(refused, TopicError)
    assert refused.code is ErrorCode.UNKNOWN_TOPIC_ID
    assert disk.topics.existing("orders").topic_id != former.topic_id


async def test_a_deletion_goes_on_where_one_directory_fails(env: MemoryEnv) -> None:
    disk = await TopicsOnDisk(env, "/disk1", "/disk2").open()
    topic = await disk.service.create("orders", 4, {})
    waiting = [partition.wait_flushed(1) for partition in topic.partitions.values()]
    env.fail_on(lambda op, path: op == "rename" and path.startswith("/disk1/orders"), errno.EIO)
    await disk.service.delete("orders")
    assert folders(env, "/disk2") == []
    assert [key for key in disk.manager.table.logs if key.topic == "orders"] == []
    for future in waiting:
        with pytest.raises(TopicError, match="was deleted") as caught:
            await future
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_deleted_topic_leaves_no_quarantine_to_the_next_of_its_name(
    env: MemoryEnv,
) -> None:
    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", 2, {})
    await disk.service.delete("orders")
    assert disk.retried == [TopicPartition("orders", 0), TopicPartition("orders", 1)]


async def test_the_partitions_of_a_large_topic_are_released_in_turns(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch, every_turn_is_over: None
) -> None:
    """Whoever may create a topic with thousands of partitions may delete it as often."""
    rounds, steps = 0, Counter[tuple[str, int]]()

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await yield_to_loop()

    @asynccontextmanager
    async def paused(partition: TopicPartition, reason: str) -> AsyncIterator[None]:
        steps["pause", rounds] += 1
        yield
        steps["resume", rounds] += 1

    disk = await TopicsOnDisk(env).open()
    await disk.service.create("orders", PARTITIONS, {}, creator="eve")
    counting = asyncio.ensure_future(count_rounds())

    def count(name: str) -> Callable[..., None]:
        def step(*_: object) -> None:
            steps[name, rounds] += 1

        return step

    monkeypatch.setattr(disk, "paused", paused)
    monkeypatch.setattr(disk, "forget_failures", count("forget failures"))
    monkeypatch.setattr(Partition, "fail_waiters", count("fail waiters"))
    monkeypatch.setattr(Shares, "remove", count("drop from share"))
    await disk.service.delete("orders")
    counting.cancel()
    for name in ("pause", "resume", "forget failures", "fail waiters", "drop from share"):
        in_rounds = [number for (step, _), number in steps.items() if step == name]
        assert (sum(in_rounds), max(in_rounds)) == (PARTITIONS, 1), name
