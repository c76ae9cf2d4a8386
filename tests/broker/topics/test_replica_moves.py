"""A replica moves to another data directory while clients use it."""

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import structlog

from broker.app import Broker
from broker.topics.partition import Partition
from broker.topics.replica_moves import RATE_KEY, SWITCH_BYTES
from cleaner.job import CleanAbortedError
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.directory.log_directory import LogDirectory
from storage.directory.partition_folders import topic_id_in
from storage.env import write_file
from storage.errors import NoRoomError
from storage.format.batch import Record, build_batch, read_header
from storage.format.checkpoints import decode_offsets
from storage.log.log import Log
from storage.manager.replica_copy import CopyStoppedError, ReplicaCopy
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import (
    broker_in_memory,
    broker_settings,
    kafka_request,
)
from tests.support.broker.principals import PrincipalClient
from tests.support.storage.logs import batch_of, read_records
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

DISKS = ("/disk1", "/disk2")
NAME = TopicPartition("orders", 0)


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=21)


@pytest.fixture
async def broker(env: MemoryEnv) -> AsyncIterator[Broker]:
    async with broker_in_memory(env, *DISKS) as broker:
        await broker.metadata_service.create(NAME.topic, 1, {})
        yield broker


def served(broker: Broker) -> Partition:
    partition = broker.topics.partition(NAME)
    assert partition is not None
    return partition


def append(broker: Broker, value: bytes) -> None:
    batch = memoryview(batch_of(value))
    served(broker).append(batch, read_header(batch), 0)


def fill(broker: Broker, segments: int = 3, records: int = 4) -> list[bytes]:
    values = []
    for number in range(segments):
        for record in range(records):
            values.append(b"%d-%d" % (number, record))
            append(broker, values[-1])
        if number < segments - 1:
            served(broker).log.roll(0)
    return values


def values_in(log: Log) -> list[bytes]:
    return [record.value or b"" for record in read_records(log)]


def directory_of(log: Log) -> str:
    return log.directory.rpartition("/")[0]


def other(broker: Broker) -> Any:
    here = directory_of(served(broker).log)
    return next(d for d in broker.manager.table.directories if d.path != here)


async def moved(broker: Broker) -> None:
    """Wait until no move runs or waits."""
    await asyncio.gather(*broker.moves._tasks.values(), return_exceptions=True)


def folders(env: MemoryEnv) -> list[str]:
    return sorted(
        f"{disk}/{name}" for disk in DISKS for name in env.listdir(disk) if NAME.topic in name
    )


def alter(path: str, *indexes: int, topic: str = NAME.topic) -> m.AlterReplicaLogDirsRequest:
    rows = [m.AlterReplicaLogDirsRequestTopic(name=topic, partitions=list(indexes))]
    return m.AlterReplicaLogDirsRequest(
        dirs=[m.AlterReplicaLogDirsRequestDir(path=path, topics=rows)]
    )


async def test_a_moved_replica_has_every_record_and_survives_a_restart(env: MemoryEnv) -> None:
    async with broker_in_memory(env, *DISKS) as broker:
        await broker.metadata_service.create(NAME.topic, 1, {})
        values = fill(broker)
        served(broker).log.delete_records(2)
        source, target = directory_of(served(broker).log), other(broker)
        answer = await kafka_request(broker, ApiKey.ALTER_REPLICA_LOG_DIRS, alter(target.path, 0))
        assert answer.results[0].partitions[0].error_code == ErrorCode.NONE
        await moved(broker)
        assert directory_of(served(broker).log) == target.path
        assert broker.manager.metadata.topics[NAME.topic].partitions == {0: target.directory_id}
        assert broker.manager.metadata.topics[NAME.topic].moves == {}
        append(broker, b"later")
        assert values_in(served(broker).log) == [*values[2:], b"later"]
        broker.manager.purge_deleted(1 << 60)
        assert folders(env) == [f"{target.path}/orders-0"]
        assert env.exists(source)
    async with broker_in_memory(env, *DISKS) as broker:
        assert directory_of(served(broker).log) == target.path
        assert values_in(served(broker).log) == [*values[2:], b"later"]
        assert served(broker).log.log_start_offset == 2


async def test_the_bytes_of_skipped_damage_move_along_and_survive_a_power_failure() -> None:
    """The old folder is deleted after a minute, and nothing else has these bytes."""
    env = MemoryEnv(seed=21)
    name, kept = "00000000000000000000.log.0-7.damaged", b"damaged"
    async with broker_in_memory(env, *DISKS) as broker:
        await broker.metadata_service.create(NAME.topic, 1, {})
        fill(broker)
        write_file(env, f"{served(broker).log.directory}/{name}", kept)
        target = other(broker)
        broker.moves.request(served(broker), target)
        await moved(broker)
        assert directory_of(served(broker).log) == target.path
    assert env.crash().read_file(f"{target.path}/{NAME}/{name}") == kept


async def test_a_power_failure_after_a_move_loses_no_topic_id() -> None:
    """Without it, a start could take the folder for that of a later topic of the same name."""
    for seed in range(10):
        env = MemoryEnv(seed)
        async with broker_in_memory(env, *DISKS) as broker:
            await broker.metadata_service.create(NAME.topic, 1, {})
            fill(broker)
            target = other(broker)
            broker.moves.request(served(broker), target)
            await moved(broker)
            assert directory_of(served(broker).log) == target.path
            topic_id = served(broker).log.topic_id
        assert topic_id_in(env.crash(), f"{target.path}/{NAME}") == topic_id, f"seed {seed}"


async def test_records_that_arrive_during_the_move_are_in_the_moved_replica(
    broker: Broker,
) -> None:
    values, target = fill(broker), other(broker)
    broker.moves.request(served(broker), target)
    number = 0
    while broker.moves._tasks:
        values.append(b"new %d" % number)
        append(broker, values[-1] + bytes(SWITCH_BYTES // 8))
        number += 1
        await asyncio.sleep(0.001)
    assert directory_of(served(broker).log) == target.path
    assert [value.rstrip(b"\0") for value in values_in(served(broker).log)] == values
    assert number


async def test_a_move_begins_again_when_records_are_deleted_before_they_are_copied(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(broker)
    target, open_copy, starts = other(broker), ReplicaCopy.open, []

    def open_and_delete(copy: ReplicaCopy) -> None:
        open_copy(copy)
        starts.append(copy.source.log_end_offset)
        if len(starts) == 1:
            append(broker, b"deleted")
            copy.source.roll(0)
            append(broker, b"kept")
            copy.source.delete_records(copy.source.log_end_offset - 1)

    monkeypatch.setattr(ReplicaCopy, "open", open_and_delete)
    broker.moves.request(served(broker), target)
    await moved(broker)
    assert len(starts) == 2
    assert directory_of(served(broker).log) == target.path
    assert values_in(served(broker).log) == [b"kept"]
    assert broker.moves.failed == 0


async def test_a_replica_whose_segments_are_being_replaced_does_not_move(broker: Broker) -> None:
    """As by a skip of damage: the copy would have the segment that it replaces."""
    fill(broker)
    source, log = directory_of(served(broker).log), served(broker).log
    log.flush()
    log.swap.pin([0])
    broker.moves.request(served(broker), other(broker))
    await moved(broker)
    assert (broker.moves.failed, directory_of(served(broker).log)) == (1, source)
    log.swap.unpin([0])
    broker.moves.request(served(broker), other(broker))
    await moved(broker)
    assert (broker.moves.failed, broker.moves.finished) == (1, 1)


async def test_a_move_of_a_log_whose_last_offsets_have_no_records_ends(
    broker: Broker, env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a truncation to an offset within a batch, if there is no room for a new segment."""
    values, target = fill(broker), other(broker)
    served(broker).log.roll(0)
    records = [Record(offset, 0, b"k", b"cut", ()) for offset in range(3)]
    batch = memoryview(build_batch(records))
    served(broker).append(batch, read_header(batch), 0)
    end_offset = served(broker).log.log_end_offset
    full = env.fail_on(lambda op, path: op == "open" and not env.exists(path), 28)
    assert served(broker).log.truncate_to(end_offset - 1, now_ms=env.wall_ms())
    full.remove()
    assert values_in(served(broker).log) == values

    def roll(_partition: Partition, _now_ms: int) -> None:
        raise NoRoomError(OSError(28, "full"), "a segment")

    with monkeypatch.context() as patched:
        patched.setattr(Partition, "roll", roll)
        broker.moves.request(served(broker), target)
        await moved(broker)
    assert broker.moves.failed == 1
    append(broker, b"later")
    broker.moves.request(served(broker), target)
    await moved(broker)
    assert directory_of(served(broker).log) == target.path
    assert values_in(served(broker).log) == [*values, b"later"]


async def test_a_move_keeps_to_the_rate_of_copies(broker: Broker) -> None:
    """The rate is a dynamic setting of the broker; each segment waits for its share of the time."""
    fill(broker)
    size_bytes = served(broker).log.segments.size_bytes
    setting = m.IncrementalAlterConfigsRequestConfig(name=RATE_KEY, value=str(size_bytes * 4))
    node = m.IncrementalAlterConfigsRequestResource(
        resource_type=4, resource_name=str(broker._services.node_id), configs=[setting]
    )
    request = m.IncrementalAlterConfigsRequest(resources=[node])
    answer = await kafka_request(broker, ApiKey.INCREMENTAL_ALTER_CONFIGS, request)
    assert answer.responses[0].error_code == ErrorCode.NONE
    target, began = other(broker), asyncio.get_running_loop().time()
    broker.moves.request(served(broker), target)
    await moved(broker)
    assert directory_of(served(broker).log) == target.path
    assert asyncio.get_running_loop().time() - began >= 0.24  # a quarter of a second


async def test_a_fetch_that_waits_gets_the_record_that_is_produced_after_the_move(
    broker: Broker,
) -> None:
    end = len(fill(broker))
    request = m.FetchRequest(
        max_wait_ms=20_000,
        min_bytes=1,
        max_bytes=1 << 20,
        session_epoch=-1,
        topics=[
            m.FetchRequestTopic(
                topic_id=broker.topics.existing(NAME.topic).topic_id,
                partitions=[
                    m.FetchRequestPartition(
                        partition=0, fetch_offset=end, partition_max_bytes=1 << 20
                    )
                ],
            )
        ],
    )
    fetching = asyncio.ensure_future(kafka_request(broker, ApiKey.FETCH, request))
    while not served(broker)._waiters:  # noqa: ASYNC110 - its turns have no event
        await asyncio.sleep(0.001)
    broker.moves.request(served(broker), other(broker))
    await moved(broker)
    append(broker, b"later")
    answer = await fetching
    assert b"later" in answer.responses[0].partitions[0].records


@pytest.mark.parametrize("flushes", [False, True])
async def test_acknowledged_records_stay_visible(env: MemoryEnv, flushes: bool) -> None:
    async with broker_in_memory(env, *DISKS) as broker:
        config = {"varve.flush.on.ack": "true"} if flushes else {}
        await broker.metadata_service.create(NAME.topic, 1, config)
        fill(broker)
        partition = served(broker)
        await partition.flush()
        before = partition.log.high_watermark
        broker.moves.request(partition, other(broker))
        while broker.moves._tasks:
            assert partition.log.high_watermark >= before
            before = partition.log.high_watermark
            append(broker, b"more")
            await asyncio.sleep(0)
        await partition.flush()
        assert partition.log.high_watermark == partition.log.log_end_offset


async def test_a_move_does_not_undo_the_change_of_metadata_that_runs_before_it(
    env: MemoryEnv, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(broker)
    deletions: list[asyncio.Future[Any]] = []
    finish_earlier = broker.moves._finish_earlier

    async def delete_meanwhile(partition: Partition) -> None:
        if not deletions:
            deletions.append(asyncio.ensure_future(broker.metadata_service.delete(NAME.topic)))
        for _ in range(10):  # the deletion waits for its turn to change the metadata
            await asyncio.sleep(0)
        await finish_earlier(partition)

    monkeypatch.setattr(broker.moves, "_finish_earlier", delete_meanwhile)
    broker.moves.request(served(broker), other(broker))
    await moved(broker)
    await asyncio.gather(*deletions)
    assert NAME.topic not in broker.manager.metadata.topics


async def test_a_topic_that_is_deleted_during_the_move_leaves_no_files(
    env: MemoryEnv, broker: Broker
) -> None:
    fill(broker)
    broker.moves.request(served(broker), other(broker))
    await asyncio.sleep(0.01)
    await broker.metadata_service.delete(NAME.topic)
    await moved(broker)
    broker.manager.purge_deleted(1 << 60)
    assert folders(env) == []
    assert NAME.topic not in broker.manager.metadata.topics


@pytest.mark.parametrize(("operation", "name"), [("pwrite", "-future"), ("rename", f"/{NAME}")])
async def test_a_full_disk_fails_the_move_only(
    env: MemoryEnv, broker: Broker, operation: str, name: str
) -> None:
    """Another name may need another block of the data directory."""
    values, target = fill(broker), other(broker)
    fault = env.fail_on(
        lambda op, path: op == operation and path.startswith(target.path) and name in path, 28
    )
    broker.moves.request(served(broker), target)
    await moved(broker)
    fault.remove()
    assert broker.moves.failed == 1
    assert target.is_online
    assert directory_of(served(broker).log) != target.path
    append(broker, b"later")
    assert values_in(served(broker).log) == [*values, b"later"]
    broker.manager.purge_deleted(1 << 60)
    assert len(folders(env)) == 1


@pytest.mark.parametrize("is_freed", [False, True])
async def test_a_replica_moves_away_from_a_disk_that_was_full_at_the_start(
    env: MemoryEnv, is_freed: bool
) -> None:
    with suppress(SimulatedCrash):
        async with broker_in_memory(env, *DISKS) as broker:
            await broker.metadata_service.create(NAME.topic, 1, {})
            values, source = fill(broker), directory_of(served(broker).log)
            killed = env.kill()
    epochs_file = f"{source}/{NAME}/leader-epoch-checkpoint"
    full = killed.fail_on(lambda op, path: op == "pwrite" and path.startswith(epochs_file), 28)
    with suppress(SimulatedCrash):
        async with broker_in_memory(killed, *DISKS) as broker:
            log, copy_all = served(broker).log, broker.moves._copy

            async def copied(partition: Partition, replica: ReplicaCopy) -> None:
                await copy_all(partition, replica)
                if is_freed:  # a producer is faster than the switch
                    full.remove()
                    append(broker, b"meanwhile")

            broker.moves._copy = copied  # type: ignore[method-assign]
            broker.moves.request(served(broker), other(broker))
            await moved(broker)
            assert directory_of(served(broker).log) != source
            assert served(broker).log.leader_epoch == log.leader_epoch == 1
            append(broker, b"later")
            epochs = served(broker).log.epochs.known.entries
            assert epochs == ((0, 0), (1, len(values)))
            killed = killed.kill()
    async with broker_in_memory(killed, *DISKS) as broker:
        expected = [*values, *[b"meanwhile"] * is_freed, b"later"]
        assert values_in(served(broker).log) == expected
        assert served(broker).log.epochs.known.entries == (*epochs, (2, len(expected)))


async def move_without_room_at_its_end(
    env: MemoryEnv, broker: Broker, target: LogDirectory, file: str = "recovery-point"
) -> None:
    """Move the replica; a file of its directory finds no room after the rename."""
    renamed: list[str] = []

    def is_at_the_end(operation: str, path: str) -> bool:
        if operation == "rename":
            renamed.append(path)
        is_file = path.startswith(f"{target.path}/{file}")
        return operation == "pwrite" and is_file and f"{target.path}/{NAME}" in renamed

    fault = env.fail_on(is_at_the_end, 28)
    broker.moves.request(served(broker), target)
    await moved(broker)
    fault.remove()


async def test_a_replica_may_move_back_after_a_move_that_found_no_room_at_its_end(
    env: MemoryEnv, broker: Broker
) -> None:
    values, target = fill(broker), other(broker)
    origin = broker.manager.table.find_directory(NAME)
    assert origin is not None
    await move_without_room_at_its_end(env, broker, target)
    assert directory_of(served(broker).log) == target.path
    assert len(folders(env)) == 2  # the old replica is left
    broker.moves.request(served(broker), origin)
    await moved(broker)
    assert origin.is_online
    assert directory_of(served(broker).log) == origin.path
    assert values_in(served(broker).log) == values
    broker.manager.purge_deleted(1 << 60)
    assert folders(env) == [f"{origin.path}/{NAME}"]


async def test_a_move_off_a_disk_without_any_room_names_the_remedy_before_it_copies(
    env: MemoryEnv, broker: Broker
) -> None:
    values, target = fill(broker), other(broker)
    source = directory_of(served(broker).log)
    full = env.fail_on(
        lambda op, path: op == "pwrite" and path == f"{source}/varve.metadata.tmp", 28
    )
    begun = len(env.history)
    with structlog.testing.capture_logs() as lines:
        broker.moves.request(served(broker), target)
        await moved(broker)
    reason = next(line["reason"] for line in lines if line["event"] == "replica move failed")
    assert f"{source}/varve.metadata" in reason
    assert "DeleteRecords" in reason
    assert not any("-future" in path for _, path in env.history[begun:])
    full.remove()
    broker.moves.request(served(broker), target)
    await moved(broker)
    assert directory_of(served(broker).log) == target.path
    assert values_in(served(broker).log) == values


async def test_no_room_for_the_longer_name_of_the_old_replica_takes_no_directory_offline(
    env: MemoryEnv, broker: Broker
) -> None:
    values, target = fill(broker), other(broker)
    source = directory_of(served(broker).log)
    fault = env.fail_on(lambda op, path: op == "rename" and path == f"{source}/{NAME}", 28)
    broker.moves.request(served(broker), target)
    await moved(broker)
    fault.remove()
    assert all(each.is_online for each in broker.manager.table.directories)
    assert directory_of(served(broker).log) == target.path
    broker.moves.request(served(broker), other(broker))  # removes what is left of the first
    await moved(broker)
    assert directory_of(served(broker).log) == source
    assert values_in(served(broker).log) == values


@pytest.mark.parametrize("file", ["recovery-point", "varve.metadata"])
async def test_a_start_serves_the_newest_replica_after_two_moves_that_did_not_end(
    env: MemoryEnv, file: str
) -> None:
    """The first finds no room after its rename, the second fails before it."""
    disks = (*DISKS, "/disk3")
    async with broker_in_memory(env, *disks) as broker:
        await broker.metadata_service.create(NAME.topic, 1, {})
        values = fill(broker)
        here = broker.manager.table.find_directory(NAME)
        second, third = [d for d in broker.manager.table.directories if d is not here]
        await move_without_room_at_its_end(env, broker, second, file)
        assert broker.manager.table.find_directory(NAME) is second
        fault = env.fail_on(lambda op, path: (op, path) == ("rename", f"{third.path}/{NAME}"), 5)
        broker.moves.request(served(broker), third)
        await moved(broker)
        fault.remove()
        append(broker, b"newer")
    async with broker_in_memory(env, *disks) as broker:
        assert values_in(served(broker).log) == [*values, b"newer"]
        broker.manager.purge_deleted(1 << 60)
        named = [
            f"{disk}/{name}" for disk in disks for name in env.listdir(disk) if NAME.topic in name
        ]
        assert named == [served(broker).log.directory]


async def test_a_crash_during_the_move_back_leaves_the_replica_where_it_was(
    env: MemoryEnv, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, target = fill(broker), other(broker)
    origin = broker.manager.table.find_directory(NAME)
    assert origin is not None
    await move_without_room_at_its_end(env, broker, target, "varve.metadata")
    left: list[MemoryEnv] = []

    async def killed(*_: object) -> None:
        left.append(env.kill())
        left[0]._root = copy.deepcopy(env._root)
        env._dead = False  # so that this broker ends in order
        raise CopyStoppedError("killed")

    monkeypatch.setattr(broker.moves, "_prepare", killed)
    broker.moves.request(served(broker), origin)
    await moved(broker)
    async with broker_in_memory(left[0], *DISKS) as restarted:
        assert values_in(served(restarted).log) == values


async def test_a_move_leaves_a_folder_that_is_in_its_way(env: MemoryEnv, broker: Broker) -> None:
    """A start refused this folder, or an operator has put it there."""
    values, target = fill(broker), other(broker)
    env.mkdir(f"{target.path}/{NAME}")
    write_file(env, f"{target.path}/{NAME}/{0:020d}.log", b"precious")
    broker.moves.request(served(broker), target)
    await moved(broker)
    broker.manager.purge_deleted(1 << 60)
    assert (broker.moves.failed, target.is_online) == (1, True)
    assert env.read_file(f"{target.path}/{NAME}/{0:020d}.log") == b"precious"
    assert values_in(served(broker).log) == values


async def test_a_topic_may_be_created_anew_after_a_move_that_found_no_room_at_its_end(
    env: MemoryEnv, broker: Broker
) -> None:
    """The folder that the move left in the old directory is the topic's, and is deleted with it."""
    fill(broker)
    await move_without_room_at_its_end(env, broker, other(broker))
    assert len(folders(env)) == 2
    await broker.metadata_service.delete(NAME.topic)
    await broker.metadata_service.create(NAME.topic, 2, {})
    assert values_in(served(broker).log) == []
    broker.manager.purge_deleted(1 << 60)
    assert len(folders(env)) == 2


async def test_a_target_that_fails_goes_offline_without_the_partition(
    env: MemoryEnv, broker: Broker
) -> None:
    values, target = fill(broker), other(broker)
    env.fail_on(
        lambda operation, path: operation == "rename" and path == f"{target.path}/{NAME}", 5
    )
    broker.moves.request(served(broker), target)
    await moved(broker)
    assert not target.is_online
    assert values_in(served(broker).log) == values
    assert broker.manager.metadata.topics[NAME.topic].moves == {}


async def test_a_move_is_refused_or_cancelled_as_in_kafka(broker: Broker) -> None:
    fill(broker)
    here, target = directory_of(served(broker).log), other(broker)
    for body, code in (
        (alter("/nowhere", 0), ErrorCode.LOG_DIR_NOT_FOUND),
        (alter(target.path, 7), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (alter(target.path, 0, topic="none"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (alter(here, 0), ErrorCode.NONE),
    ):
        answer = await kafka_request(broker, ApiKey.ALTER_REPLICA_LOG_DIRS, body)
        assert answer.results[0].partitions[0].error_code == code
    broker.moves.request(served(broker), target)
    broker.moves.request(served(broker), broker.manager.table.find_directory(NAME))
    await asyncio.sleep(0.2)
    assert directory_of(served(broker).log) == here


async def begin_slow_move(broker: Broker) -> Any:
    """Begin a move that waits for minutes because of its rate; return its target."""
    fill(broker)
    setting = m.IncrementalAlterConfigsRequestConfig(name=RATE_KEY, value="1")
    node = m.IncrementalAlterConfigsRequestResource(
        resource_type=4, resource_name=str(broker._services.node_id), configs=[setting]
    )
    request = m.IncrementalAlterConfigsRequest(resources=[node])
    await kafka_request(broker, ApiKey.INCREMENTAL_ALTER_CONFIGS, request)
    target = other(broker)
    broker.moves.request(served(broker), target)
    async with asyncio.timeout(20):
        while not any(  # noqa: ASYNC110 - a thread copies
            copy.copied_bytes for copy in broker.moves.copies_in(target.path)
        ):
            await asyncio.sleep(0.001)
    return target


async def test_a_move_that_waits_behind_a_cancelled_one_can_be_cancelled(broker: Broker) -> None:
    target = await begin_slow_move(broker)
    source = broker.manager.table.find_directory(NAME)
    assert source is not None
    broker.moves.request(served(broker), source)
    broker.moves.request(served(broker), target)
    waiting = broker.moves._tasks[served(broker)]
    await asyncio.sleep(0)
    broker.moves.request(served(broker), source)
    async with asyncio.timeout(20):
        await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert broker.manager.table.find_directory(NAME) is source


async def test_a_topic_that_was_created_again_moves_though_the_former_one_waits(
    broker: Broker,
) -> None:
    await begin_slow_move(broker)
    name = TopicPartition("again", 0)

    async def create_and_move() -> LogDirectory:
        await broker.metadata_service.create(name.topic, 1, {})
        partition, here = broker.topics.partition(name), broker.manager.table.find_directory(name)
        assert partition is not None
        target = next(d for d in broker.manager.table.directories if d is not here)
        broker.moves.request(partition, target)
        return target

    former_target = await create_and_move()
    await broker.metadata_service.delete(name.topic)
    target = await create_and_move()
    assert target is former_target
    broker.moves.request(served(broker), broker.manager.table.find_directory(NAME))  # cancels it
    await moved(broker)
    assert broker.manager.table.find_directory(name) is target


async def test_a_stop_waits_for_the_step_of_a_move_and_not_for_its_rate(broker: Broker) -> None:
    target = await begin_slow_move(broker)
    source = broker.manager.table.find_directory(NAME)
    assert source is not None
    broker.moves.request(served(broker), source)
    async with asyncio.timeout(20):
        await broker.moves.stop()
    assert broker.moves.copies_in(target.path) == []


async def test_a_stop_aborts_the_compaction_that_a_move_waits_for(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, aborted, waits = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def compact_for_hours(*_: Any, **__: Any) -> None:
        begun.set()
        await aborted.wait()
        raise CleanAbortedError

    broker = Broker(broker_settings(*DISKS), env)

    def view_files(partition: TopicPartition) -> asyncio.Lock:
        waits.set()
        return broker.view_scheduler.files_of(partition)

    await broker.start()
    await broker.metadata_service.create(
        NAME.topic, 1, {"cleanup.policy": "compact", "varve.view": "compacted"}
    )
    monkeypatch.setattr(broker.view_scheduler._compactor, "compact", compact_for_hours)
    monkeypatch.setattr(broker.view_scheduler._compactor, "abort", aborted.set)
    monkeypatch.setattr(broker.moves, "_view_files", view_files)
    async with asyncio.timeout(20):
        broker.view_scheduler.begin(NAME)
        await begun.wait()
        broker.moves.request(served(broker), other(broker))
        await waits.wait()
        await broker.stop()


async def test_the_first_dirty_offset_moves_to_the_checkpoint_of_the_target(
    env: MemoryEnv, broker: Broker
) -> None:
    fill(broker)
    source, target = directory_of(served(broker).log), other(broker).path
    broker.manager.table.cleaner_offsets[NAME] = 3
    broker.manager.table.checkpoint()
    broker.moves.request(served(broker), other(broker))
    await moved(broker)
    broker.manager.table.checkpoint()
    offsets = {
        disk: decode_offsets(env.read_file(f"{disk}/cleaner-offset-checkpoint"), disk)
        for disk in DISKS
    }
    assert offsets == {source: {}, target: {NAME: 3}}


async def test_only_those_who_may_alter_the_cluster_move_replicas(env: MemoryEnv) -> None:
    authorization = {"enabled": True, "super_users": ["User:root"]}
    async with broker_in_memory(env, *DISKS, authorization=authorization) as broker:
        await broker.metadata_service.create(NAME.topic, 1, {})
        body = alter(other(broker).path, 0)
        for name, code in (("ann", ErrorCode.CLUSTER_AUTHORIZATION_FAILED), ("root", 0)):
            client = PrincipalClient(broker, name)
            answer: Any = await client.request(ApiKey.ALTER_REPLICA_LOG_DIRS, 2, body)
            assert answer.results[0].partitions[0].error_code == code
            assert bool(broker.moves._tasks) == (name == "root")


async def test_log_dirs_describe_a_running_move(broker: Broker) -> None:
    fill(broker)
    target = other(broker)
    async with broker.view_scheduler.files_of(NAME):  # the move waits before it copies the view
        broker.moves.request(served(broker), target)
        while not any(copy.log for copy in broker.moves.copies_in(target.path)):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        append(broker, b"later")
        answer = await kafka_request(
            broker, ApiKey.DESCRIBE_LOG_DIRS, m.DescribeLogDirsRequest(topics=None)
        )
    await moved(broker)
    rows = {
        result.log_dir: [
            (partition.is_future_key, partition.offset_lag)
            for topic in result.topics
            for partition in topic.partitions
        ]
        for result in answer.results
    }
    assert rows == {target.path: [(True, 1)], home_of_other(target.path): [(False, 0)]}


def home_of_other(path: str) -> str:
    return next(disk for disk in DISKS if disk != path)
