"""The broker as a whole, over an in-memory disk: starting, failing in parts, what HTTP says."""

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.lifecycle import systemd
from broker.topics.topics import TopicError
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import (
    CreatePartitionsRequest,
    CreatePartitionsRequestTopic,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsRequestTopic,
    CreateTopicsResponse,
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
)
from storage.format import filenames
from storage.format.batch import Record, build_batch, read_header
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_in_memory, broker_settings, client_of
from tests.support.broker.http_client import get
from tests.support.ports import free_port
from tests.support.storage.logs import batch_of, fill
from tests.support.storage.memory_env import MemoryEnv

OFFSETS = "__consumer_offsets"


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=5)


# --- starting -------------------------------------------------------------------------------------


async def test_a_start_that_fails_lets_no_client_in(env: MemoryEnv) -> None:
    """A client could write to the logs while they are being closed."""
    free, host = free_port(), "127.0.0.1"
    with socket.create_server((host, 0)) as sock:
        settings = broker_settings(listeners=[f"{host}:{free}", f"{host}:{sock.getsockname()[1]}"])
        with pytest.raises(OSError, match="in use"):
            await Broker(settings, env).start()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, free)


async def test_a_start_without_a_free_port_leaves_the_data_as_an_orderly_stop(
    env: MemoryEnv,
) -> None:
    async with broker_in_memory(env) as broker:
        await broker.metadata_service.create("orders", 1, {})
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        second = Broker(broker_settings(listeners=[address]), env)
        with pytest.raises(OSError, match="in use"):
            await second.start()
        await second.http.stop()
        await second.listener.stop(0)
    assert env.exists(f"/disk1/{filenames.CLEAN_SHUTDOWN}")
    async with broker_in_memory(env) as broker:  # the lock was given back, too
        assert broker.topics.get("orders") is not None


@pytest.mark.parametrize("jump_ms", [-3_600_000, 660_000, 2 * 86_400_000])
async def test_a_clock_that_was_set_is_distrusted_until_it_has_held(
    env: MemoryEnv, jump_ms: int
) -> None:
    env.advance_ms(10 * 86_400_000)  # a machine that has been up for days
    async with broker_in_memory(env):
        pass
    env.jump_wall_ms(jump_ms)
    async with broker_in_memory(env) as broker:
        assert not broker.log_maintenance.clock_trusted()
        await broker.log_maintenance.watch_clock()
        assert broker.log_maintenance.stats.clock_jumps == 0
        env.advance_ms(600_000)
        assert broker.log_maintenance.clock_trusted()


async def test_a_second_start_distrusts_a_clock_that_was_set_as_well(env: MemoryEnv) -> None:
    """Otherwise two restarts within minutes would expire what a wrong clock says is old."""
    env.advance_ms(10 * 86_400_000)
    async with broker_in_memory(env):
        pass
    env.jump_wall_ms(10 * 365 * 86_400_000)
    for _ in range(3):
        async with broker_in_memory(env, topics={"t": {}}) as broker:
            assert not broker.log_maintenance.clock_trusted()
            env.advance_ms(60_000)
            await broker.metadata_writer.note_time()
    async with broker_in_memory(env) as broker:
        env.advance_ms(600_000)
        await broker.metadata_writer.note_time()
    async with broker_in_memory(env) as broker:
        assert broker.log_maintenance.clock_trusted()


async def test_nothing_expires_by_a_clock_that_was_set_just_before(env: MemoryEnv) -> None:
    """The timer that compares the clocks has not run since."""
    keys = {"cleanup.policy": "delete", "retention.ms": "3600000"}
    async with broker_in_memory(env, topics={"t": {"keys": keys}}) as broker:
        with client_of(broker) as client:
            now_ms = env.wall_ms()
            batch = bytes(build_batch([Record(0, now_ms, b"k", b"v", ())]))
            await asyncio.to_thread(client.produce, "t", batch)
        partition = broker._services.topics.partition(TopicPartition("t", 0))
        assert partition is not None
        env.jump_wall_ms(10 * 365 * 86_400_000)
        await broker.log_maintenance.expire()
        assert partition.log.log_start_offset == 0
        assert broker.log_maintenance.stats.clock_jumps == 1
        env.advance_ms(600_000)
        await broker.log_maintenance.expire()
        assert partition.log.log_start_offset == 1


# --- parts that fail ------------------------------------------------------------------------------


async def test_a_directory_that_fails_in_a_thread_is_noticed_and_told_of_once(
    env: MemoryEnv,
) -> None:
    async with broker_in_memory(env, "/disk1", "/disk2") as broker:
        topic = await broker.metadata_service.create("orders", 2, {})
        env.fail_on(lambda op, path: op == "rename" and path.startswith("/disk2/"), errno.EIO)
        with capture_logs() as lines:
            await broker.metadata_writer.note_time()  # writes the metadata everywhere
            await broker.log_maintenance.watch_directories()
            await broker.log_maintenance.watch_directories()
        reported = [line for line in lines if line["event"] == "data directory went offline"]
        assert [(line["directory"], line["partitions"]) for line in reported] == [("/disk2", 1)]
        assert len(topic.partitions) == len(topic.offline) == 1
        assert await get(broker, "/healthz") == (200, "ok\n")
        _, text = await get(broker, "/metrics")
        assert "kafka_log_logmanager_offlinelogdirectorycount 1.0" in text
        broker.manager.table.fail_directory("/disk1", "gone, too")
        status, reason = await get(broker, "/healthz")
        assert (status, reason) == (503, "no data directory is online\n")


async def test_a_folder_removed_by_hand_is_the_fault_of_its_partition_alone(env: MemoryEnv) -> None:
    async with broker_in_memory(env, topics={"orders": {"partitions": 2}}) as broker:
        topic = broker.topics.get("orders")
        assert topic is not None
        for partition in topic.partitions.values():
            batch = batch_of(b"value")
            partition.append(memoryview(batch), read_header(batch), env.wall_ms())
        env.remove_tree("/disk1/orders-0")
        env.advance_ms(topic.config.segment_ms + 1)
        with capture_logs() as lines:
            await broker.log_maintenance.roll()
            await broker.log_maintenance.watch_directories()
        reported = [
            (line["event"], line["partition"]) for line in lines if line["log_level"] == "error"
        ]
        assert reported == [("partition went offline", "orders-0")]
        assert list(topic.offline) == [0]
        assert list(topic.partitions) == [1]
        assert len(topic.partitions[1].log.segments) == 2
        assert broker.readiness.unhealthy_because() is None
        await broker.metadata_service.delete("orders")
        again = await broker.metadata_service.create("orders", 2, {})
        assert list(again.partitions) == [0, 1]


async def test_a_topic_deleted_during_a_flush_does_not_end_the_flushing(env: MemoryEnv) -> None:
    async with broker_in_memory(env) as broker:
        topic = await broker.metadata_service.create("orders", 1, {"flush.messages": "1"})
        client = client_of(broker)
        with client:
            await asyncio.to_thread(client.produce, "orders", bytes(batch_of(b"value")))
        flushing = asyncio.create_task(broker.log_maintenance.flush())
        await asyncio.sleep(0)
        topic.partitions[0].fail_waiters(
            TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "deleted")
        )
        await flushing
        assert broker.log_maintenance.stats.errors == 0


# --- internal topics ------------------------------------------------------------------------------


async def test_the_offsets_topic_is_made_whole_however_it_is_first_asked_for(
    env: MemoryEnv,
) -> None:
    async with broker_in_memory(env, groups={"offsets_partitions": 3}) as broker:
        client = client_of(broker)
        with client:
            request = MetadataRequest(topics=[MetadataRequestTopic(name=OFFSETS)])
            answer = await asyncio.to_thread(client.request, ApiKey.METADATA, 9, request)
        assert isinstance(answer, MetadataResponse)
        assert len(answer.topics[0].partitions) == 3
        assert broker.coordinators.groups.availability("any") is ErrorCode.NONE


async def test_groups_are_served_though_the_client_that_was_first_leaves(env: MemoryEnv) -> None:
    async with broker_in_memory(env, groups={"offsets_partitions": 3}) as broker:
        task = asyncio.create_task(broker.coordinators.offsets_topic.ensure())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await broker.coordinators.offsets_topic.ensure() is ErrorCode.NONE
        assert broker.coordinators.groups.availability("any") is ErrorCode.NONE


async def test_clients_neither_make_nor_grow_internal_topics(env: MemoryEnv) -> None:
    async with broker_in_memory(env, groups={"offsets_partitions": 3}) as broker:
        client = client_of(broker)
        with client:
            made = await asyncio.to_thread(
                client.request,
                ApiKey.CREATE_TOPICS,
                7,
                CreateTopicsRequest(
                    topics=[
                        CreateTopicsRequestTopic(
                            name=OFFSETS, num_partitions=1, replication_factor=1
                        )
                    ]
                ),
            )
            await broker.coordinators.offsets_topic.ensure()
            grown = await asyncio.to_thread(
                client.request,
                ApiKey.CREATE_PARTITIONS,
                3,
                CreatePartitionsRequest(
                    topics=[CreatePartitionsRequestTopic(name=OFFSETS, count=9)]
                ),
            )
        assert isinstance(made, CreateTopicsResponse)
        assert made.topics[0].error_code == ErrorCode.INVALID_REQUEST
        assert isinstance(grown, CreatePartitionsResponse)
        assert grown.results[0].error_code == ErrorCode.INVALID_REQUEST
        assert broker.coordinators.offsets_topic.partition_count == 3


# --- HTTP and systemd -----------------------------------------------------------------------------


async def test_http_answers_names_of_this_machine_only(env: MemoryEnv) -> None:
    async with broker_in_memory(env, http="127.0.0.2:0") as broker:
        port = broker.http.address.port
        for host in (f"127.0.0.2:{port}", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}"):
            assert (await get(broker, "/readyz", Host=host))[0] == 200
        for host in (f"rebound.example:{port}", "127.0.0.1.example"):
            assert (await get(broker, "/metrics", Host=host))[0] == 403


async def test_a_stopping_broker_is_not_ready(env: MemoryEnv) -> None:
    async with broker_in_memory(env) as broker:
        broker.request_stop()
        assert await get(broker, "/readyz") == (503, "stopping\n")


@pytest.fixture
def listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield channel


def test_systemd_gets_the_datagram(listening: socket.socket) -> None:
    assert systemd.notify("READY=1")
    assert listening.recv(100) == b"READY=1"


def test_systemd_may_listen_in_the_abstract_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"varve-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(f"\0{name}")
        channel.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        assert systemd.notify("STOPPING=1")
        assert channel.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "41"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "42"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_of_another_process_is_not_ours(
    environment: dict[str, str], seconds: float | None
) -> None:
    assert systemd.watchdog_seconds(environment, 41) == seconds


def test_systemd_extends_a_timeout_only_while_the_work_goes_on() -> None:
    sent: list[str] = []
    reports = systemd.ProgressReports(sent.append)
    for done in (1, 2, 2, 3):
        reports.report(f"closing {done} of 3 partitions", done)
    extension = f"\nEXTEND_TIMEOUT_USEC={systemd.EXTENSION_SECONDS}000000"
    assert sent == [
        f"STATUS=closing 1 of 3 partitions{extension}",
        f"STATUS=closing 2 of 3 partitions{extension}",
        "STATUS=closing 2 of 3 partitions",
        f"STATUS=closing 3 of 3 partitions{extension}",
    ]


async def test_a_long_stop_says_how_many_logs_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, reported = threading.Event(), threading.Event()
    statuses: list[str] = []

    def report(_: object, status: str, __: object) -> None:
        statuses.append(status)
        reported.set()

    def hold_up(operation: str, path: str) -> bool:
        if operation == "sync_dir" and "/orders-1" in path and not reached.is_set():
            reached.set()
            assert reported.wait(20)
        return False

    monkeypatch.setattr(systemd, "PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(systemd.ProgressReports, "report", report)
    env = MemoryEnv(seed=1)
    async with broker_in_memory(env, topics={"orders": {"partitions": 3}}) as broker:
        fill(broker.topics.existing("orders").partitions[1].log, 1)  # there is something to sync
        env.fail_on(hold_up, 5)
        await broker.stop()
    assert reached.is_set()
    assert statuses[0] == "closing 2 of 3 partitions"


async def test_the_watchdog_is_notified_while_the_broker_is_healthy_and_the_loop_runs(
    listening: socket.socket,
) -> None:
    loop, reasons = asyncio.get_running_loop(), ["no data directory is online"]
    listening.setblocking(False)
    work = systemd.notify_watchdog(0.02, lambda: reasons[0] if reasons else None)
    with capture_logs() as logs:
        task = asyncio.create_task(work)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.sock_recv(listening, 100), 0.2)
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("watchdog not notified", "no data directory is online")
    ]
    reasons.clear()
    for _ in range(3):
        assert await asyncio.wait_for(loop.sock_recv(listening, 100), 5) == b"WATCHDOG=1"
    listening.settimeout(0.2)
    # Waiting here makes the loop hang. Nothing is queued: the loop has just received a message.
    with pytest.raises(TimeoutError):
        listening.recv(100)
    task.cancel()


def test_where_nobody_listens_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not systemd.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    assert not systemd.notify("READY=1")
