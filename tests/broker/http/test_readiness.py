"""/readyz answers 200 only when every partition that should be served is, and names what is not."""

import asyncio
import errno

import pytest
from structlog.testing import capture_logs

from broker.lifecycle.readiness import UNSERVED
from protocol.errors import ErrorCode
from storage.errors import LogDirectoryError, NoRoomError
from storage.format import filenames
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory, client_of
from tests.support.broker.http_client import get
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv, _Fault

LOG = filenames.file_name(0, filenames.LOG)


async def topics_in(env: MemoryEnv, *directories: str, partitions: int = 2) -> MemoryEnv:
    async with broker_in_memory(env, *directories) as broker:
        await broker.metadata_service.create("orders", partitions, {})
        await broker.metadata_service.create("views", 1, {"varve.view": "compacted"})
        with client_of(broker) as client:
            await asyncio.to_thread(client.produce, "orders", bytes(batch_of(b"value")))
    return env


async def test_an_offline_partition_makes_the_broker_unready_until_it_is_deleted() -> None:
    env = await topics_in(MemoryEnv(seed=3))
    env.unlink(f"/disk1/orders-1/{LOG}")
    env.mkdir(f"/disk1/orders-1/{LOG}")
    async with broker_in_memory(env) as broker:
        status, text = await get(broker, "/readyz")
        assert status == 503
        assert text.startswith("partition orders-1 is not served: ")
        assert LOG in text
        assert await get(broker, "/healthz") == (200, "ok\n")
        await broker.metadata_service.delete("orders")
        assert await get(broker, "/readyz") == (200, "ok\n")


async def test_readiness_names_no_topic_and_no_path_if_requests_need_credentials() -> None:
    env = await topics_in(MemoryEnv(seed=3))
    env.unlink(f"/disk1/orders-1/{LOG}")
    env.mkdir(f"/disk1/orders-1/{LOG}")
    async with broker_in_memory(env, token=b"a token for tests") as broker:
        status, text = await get(broker, "/readyz")
        assert (status, text) == (503, f"{UNSERVED}\n")
        assert "orders" not in text
        assert "orders-1" in (broker.readiness.not_ready_because() or "")


async def test_a_directory_that_is_offline_makes_the_broker_unready() -> None:
    env = await topics_in(MemoryEnv(seed=3), "/disk1", "/disk2")
    env.fail_on(lambda op, path: op == "listdir" and path.startswith("/disk2"), errno.EIO)
    async with broker_in_memory(env, "/disk1", "/disk2") as broker:
        status, text = await get(broker, "/readyz")
        assert (status, text.partition(":")[0]) == (503, "data directory /disk2 is offline")


async def test_readiness_names_some_partitions_and_counts_the_others() -> None:
    env = await topics_in(MemoryEnv(seed=3), partitions=30)
    for index in range(25):
        env.remove_tree(f"/disk1/orders-{index}")
    async with broker_in_memory(env) as broker:
        status, text = await get(broker, "/readyz")
        assert (status, len(text.splitlines())) == (503, 21)
        assert text.splitlines()[-1] == "5 more partitions are not served"


async def test_a_view_that_cannot_be_read_makes_the_broker_unready_until_it_is_deleted() -> None:
    env = await topics_in(MemoryEnv(seed=3))
    env.mkdir("/disk1/views-0/varve.view/manifest")
    async with broker_in_memory(env) as broker:
        status, text = await get(broker, "/readyz")
        assert status == 503
        assert text.startswith("partition views.compacted-0 is not served: ")
        await broker.metadata_service.delete("views")
        assert await get(broker, "/readyz") == (200, "ok\n")


async def test_a_view_that_can_be_read_again_makes_the_broker_ready() -> None:
    env = await topics_in(MemoryEnv(seed=3))
    env.mkdir("/disk1/views-0/varve.view/manifest")
    async with broker_in_memory(env) as broker:
        view = broker.views.partition(TopicPartition("views", 0))
        assert view is not None
        await broker.views.read_again(view)
        assert (await get(broker, "/readyz"))[0] == 503
        env.remove_tree("/disk1/views-0/varve.view")
        await broker.views.read_again(view)
        assert await get(broker, "/readyz") == (200, "ok\n")


def fill_disk(env: MemoryEnv) -> _Fault:
    return env.fail_on(lambda op, path: op == "pwrite", errno.ENOSPC)


async def test_an_orderly_stop_lets_a_full_disk_be_served() -> None:
    env = await topics_in(MemoryEnv(seed=3))
    full = fill_disk(env)
    async with broker_in_memory(env) as broker:
        assert await get(broker, "/readyz") == (200, "ok\n")
        with client_of(broker) as client:
            partition = await asyncio.to_thread(client.fetch, "orders", 0)
            assert b"value" in bytes(partition.records or b"")
            full.remove()
            await asyncio.to_thread(client.produce, "orders", bytes(batch_of(b"more")))
            partition = await asyncio.to_thread(client.fetch, "orders", 1)
            assert b"more" in bytes(partition.records or b"")


async def test_a_recovery_that_finds_the_disk_full_serves_reads_and_refuses_records() -> None:
    env = await topics_in(MemoryEnv(seed=3))
    env.unlink(f"/disk1/{filenames.CLEAN_SHUTDOWN}")
    full = fill_disk(env)
    async with broker_in_memory(env) as broker:
        assert await get(broker, "/readyz") == (200, "ok\n")
        with client_of(broker) as client:
            answer = await asyncio.to_thread(client.produce, "orders", bytes(batch_of(b"more")))
            assert answer.error_code == ErrorCode.KAFKA_STORAGE_ERROR
            partition = await asyncio.to_thread(client.fetch, "orders", 0)
            assert b"value" in bytes(partition.records or b"")
            full.remove()
            answer = await asyncio.to_thread(client.produce, "orders", bytes(batch_of(b"more")))
            assert answer.error_code == ErrorCode.NONE


async def test_a_full_disk_takes_offline_only_the_partition_that_needs_a_file() -> None:
    env = await topics_in(MemoryEnv(seed=3))
    env.unlink(f"/disk1/{filenames.CLEAN_SHUTDOWN}")
    env.unlink("/disk1/orders-1/partition.metadata")
    fill_disk(env)
    async with broker_in_memory(env) as broker:
        _, text = await get(broker, "/readyz")
        assert text.startswith("partition orders-1 is not served: ")
        assert "No space left on device" in text
        assert "/disk1" in text
        assert len(text.splitlines()) == 1


async def test_a_start_on_a_full_disk_does_not_need_the_new_topics_of_the_settings_file() -> None:
    env = await topics_in(MemoryEnv(seed=3))
    fill_disk(env)
    with capture_logs() as lines:
        async with broker_in_memory(env, topics={"new": {"partitions": 1}}) as broker:
            assert await get(broker, "/readyz") == (200, "ok\n")
            assert "new" not in broker.topics
    (line,) = (line for line in lines if "settings file" in line["event"])
    assert "No space left on device" in line["reason"]


async def test_a_first_start_on_a_full_disk_says_so() -> None:
    env = MemoryEnv(seed=3)
    fill_disk(env)
    with pytest.raises((LogDirectoryError, NoRoomError), match="No space left on device"):
        async with broker_in_memory(env):
            pass
