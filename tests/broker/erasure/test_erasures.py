"""Erasures from the request to the receipt, in a whole broker over an in-memory disk."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.damage.log_repair import TruncationRefusedError
from broker.erasure import erasures
from broker.topics.partition import Partition
from broker.topics.topics import TopicError
from cleaner.job import CleanedGroup, CleanJob
from cleaner.key_search import FileState, FoundFile, KeySearch, KeySearchResult, PausedSearch
from cleaner.workers.dedicated_worker import DedicatedWorker, JobFailedError
from protocol.errors import ErrorCode
from storage.errors import LogDirectoryError, NoRoomError
from storage.format.batch import Record, build_batch, read_header
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import log_repair_of
from tests.support.broker.erasure import (
    ADA,
    KEYS,
    ORDERS,
    SECONDS,
    HeldSearcher,
    broker_of,
    bytes_on_disk,
    call_api,
    completed,
    erase,
    held_search,
    one,
    partition_of,
    paused_erasure,
    reaches,
    waits_for,
    write,
)
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.storage.memory_env import MemoryEnv

SKIP_PATH = "/api/v1/log/partitions/orders/0/skip?offset=0"


@pytest.mark.parametrize("strategy", ["dirty-ratio", "generational"])
async def test_an_erasure_leaves_no_value_of_its_key_and_rewrites_only_what_has_it(
    strategy: str,
) -> None:
    env = MemoryEnv(seed=5)
    keys = {"varve.cleaner.strategy": strategy, "segment.bytes": "1048576"}
    large = "x" * 600_000  # two of these segments are too large for one
    async with broker_of(env, keys) as broker:
        write(broker, "bob=bob-1", f"bob={large}")
        write(broker, f"{ADA}=secret-1", f"eve={large}")
        write(broker, f"{ADA}=secret-2", roll=False)
        answer = await completed(broker, (await erase(broker))["id"])
        (part,) = answer["partitions"]
        assert (answer["state"], part["end_offset"], part["tombstone_offset"]) == ("complete", 6, 5)
        assert (part["receipt"]["tombstones"], part["receipt"]["files"] > 1) == (1, True)
        until_ms = part["receipt"]["at_ms"] + partition_of(broker).log.config.delete_retention_ms
        assert part["receipt"]["tombstones_until_ms"] == until_ms
        content = bytes_on_disk(env)
        assert b"secret" not in content
        assert b"bob-1" in content, "only the segments with the key are rewritten"


async def test_a_key_that_is_nowhere_gets_a_receipt_and_no_tombstone() -> None:
    async with broker_of(MemoryEnv(seed=5), partitions=2) as broker:
        write(broker, "bob=bob-1")
        answer = await completed(broker, (await erase(broker))["id"])
        assert answer["state"] == "complete"
        assert [part["tombstone_offset"] for part in answer["partitions"]] == [None, None]
        assert [part["end_offset"] for part in answer["partitions"]] == [1, 0]
        assert answer["partitions"][0]["receipt"]["tombstones_until_ms"] is None


async def test_a_tombstone_that_could_not_be_written_is_written_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasures, "FAILED_SECONDS", 0.01)
    failures = 0
    async with broker_of(MemoryEnv(seed=5)) as broker:
        append = broker.erasures.eraser.append

        async def full(served: Partition, record: Record, now_ms: int) -> int:
            nonlocal failures
            failures += 1
            if failures < 3:
                raise NoRoomError(OSError(errno.ENOSPC, "no space left"), "/disk1")
            return await append(served, record, now_ms)

        monkeypatch.setattr(broker.erasures.eraser, "append", full)
        write(broker, f"{ADA}=secret-1")
        answer = await completed(broker, (await erase(broker))["id"])
        assert (answer["state"], failures) == ("complete", 3)


async def test_a_topic_that_is_deleted_during_a_step_causes_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with broker_of(MemoryEnv(seed=5)) as broker:

        async def deleted(_: Partition) -> None:
            raise TopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "orders was deleted")

        monkeypatch.setattr(Partition, "flush", deleted)
        with capture_logs() as lines:
            erasure = await erase(broker)
            await reaches(broker, erasure["id"], lambda a: "was deleted" in waits_for(a))
        assert "erasure failed" not in [line["event"] for line in lines]


async def test_segments_below_the_log_start_are_left_to_retention() -> None:
    env = MemoryEnv(seed=5)
    keys = {"cleanup.policy": "compact,delete", "file.delete.delay.ms": "0"}
    async with broker_of(env, keys) as broker:
        write(broker, f"{ADA}=secret-1")
        write(broker, "bob=1")
        partition_of(broker).log.delete_records(1)
        erasure = await erase(broker)
        answer = await reaches(broker, erasure["id"], lambda a: "is deleted" in waits_for(a))
        assert f"{0:020d}.log" in waits_for(answer)
        assert not broker.pool.operator.is_erasing(ORDERS)
        await broker.log_maintenance.expire()
        await completed(broker, erasure["id"])
        assert b"secret" not in bytes_on_disk(env)


async def test_what_is_written_after_the_tombstone_stays() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env) as broker:
        erasure = await paused_erasure(broker)
        write(broker, f"{ADA}=later", roll=False)
        broker.pool.operator.resume(ORDERS)
        assert (await completed(broker, erasure["id"]))["state"] == "complete"
        content = bytes_on_disk(env)
        assert (b"secret" in content, b"later" in content) == (False, True)


async def test_the_tombstone_of_an_open_erasure_is_not_truncated() -> None:
    """Nothing would supersede the values, or those that get the removed offsets."""
    async with broker_of(env := MemoryEnv(seed=5)) as broker:
        erasure = await paused_erasure(broker)
        await reaches(broker, erasure["id"], lambda a: "paused" in waits_for(a))
        log, repair = partition_of(broker).log, log_repair_of(env, broker)
        with pytest.raises(TruncationRefusedError, match=f"below offset {log.log_end_offset}"):
            await repair.truncate(partition_of(broker), log.log_end_offset - 1, force=True)
        write(broker, "bob=bob-9")
        await repair.truncate(partition_of(broker), log.log_end_offset - 1, force=True)
        await broker.erasures.cancel(erasure["id"], "an operator cancelled it")
        await repair.truncate(partition_of(broker), log.log_end_offset - 1, force=True)


async def test_a_topic_that_was_deleted_and_created_again_has_no_erasure() -> None:
    async with broker_of(MemoryEnv(seed=5)) as broker:
        erasure = await paused_erasure(broker)
        assert (await call_api(broker, "DELETE", "/api/v1/topics/orders"))[0] == 200
        body = {"name": "orders", "settings": KEYS}
        assert (await call_api(broker, "POST", "/api/v1/topics", body))[0] == 201
        write(broker, f"{ADA}=of the new topic")
        answer = await completed(broker, erasure["id"])
        assert (answer["state"], answer["reason"]) == (
            "void",
            "topic orders was deleted, with all its records",
        )
        assert partition_of(broker).log.log_end_offset == 1, "the new topic got no tombstone"


async def test_a_search_of_a_topic_that_was_deleted_meanwhile_is_no_receipt() -> None:
    async with held_search(MemoryEnv(seed=5)) as (broker, searcher, erasure_id):
        assert (await call_api(broker, "DELETE", "/api/v1/topics/orders"))[0] == 200
        searcher.gate.set()
        assert (await completed(broker, erasure_id))["state"] == "void"


async def test_a_new_topic_of_the_same_name_gets_no_tombstone_of_an_erasure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A topic may be replaced between the searches of two of its partitions."""
    file = FoundFile(FileState(f"/disk1/orders-0/{0:020}.log", 100, 1), 1, 0, 0)
    async with held_search(MemoryEnv(seed=5), file, partitions=2) as (broker, searcher, erasure_id):
        assert (await call_api(broker, "DELETE", "/api/v1/topics/orders"))[0] == 200
        body = {"name": "orders", "partitions": 2, "settings": KEYS}
        assert (await call_api(broker, "POST", "/api/v1/topics", body))[0] == 201
        monkeypatch.setattr(searcher.gate, "clear", lambda: None)
        searcher.gate.set()
        assert (await completed(broker, erasure_id))["state"] == "void"
        new = (partition_of(broker, TopicPartition("orders", index)) for index in range(2))
        assert [partition.log.log_end_offset for partition in new] == [0, 0]


async def test_a_search_of_a_folder_that_the_replica_has_left_is_no_receipt() -> None:
    async with held_search(MemoryEnv(seed=5)) as (broker, searcher, erasure_id):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(partition_of(broker).log), "directory", "/disk1/elsewhere")
            searcher.gate.set()
            await searcher.begun.wait()  # it is searched again
            assert (await one(broker, erasure_id))["state"] == "open"


async def test_a_search_of_a_log_that_was_truncated_meanwhile_is_no_receipt() -> None:
    env = MemoryEnv(seed=5)
    async with held_search(env) as (broker, searcher, erasure_id):
        write(broker, "bob=1")
        await log_repair_of(env, broker).truncate(partition_of(broker), 0, force=True)
        searcher.gate.set()
        await searcher.begun.wait()  # it is searched again
        assert (await one(broker, erasure_id))["state"] == "open"


async def test_a_search_during_which_a_copy_of_the_replica_was_begun_is_no_receipt() -> None:
    env = MemoryEnv(seed=5)
    async with held_search(env) as (broker, searcher, erasure_id):
        env.mkdir(f"/disk1/orders-0.{'0' * 32}-future")
        searcher.gate.set()
        async with asyncio.timeout(SECONDS):
            await searcher.begun.wait()  # it is searched again, with the copy
        assert (await one(broker, erasure_id))["state"] == "open"
        searcher.gate.set()
        assert (await completed(broker, erasure_id))["state"] == "complete"


async def test_a_worker_whose_search_failed_ends_before_the_next_one_starts() -> None:
    open_now, most, failures = 0, 0, 0

    class FailingSearcher:
        async def search_files(self, *_: object) -> KeySearchResult:
            nonlocal failures
            failures += 1
            raise JobFailedError("no access")

    @asynccontextmanager
    async def start() -> AsyncIterator[FailingSearcher]:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        yield FailingSearcher()
        open_now -= 1

    async with broker_of(MemoryEnv(seed=5), partitions=3) as broker:
        broker.erasures.eraser._start_searcher = start
        await erase(broker)
        await until(lambda: failures == 3 and open_now == 0)
    assert most == 1


async def test_an_erasure_says_whether_its_worker_starts_or_searches() -> None:
    class StartingSearcher(HeldSearcher):
        async def search_files(
            self, search: KeySearch, on_progress: Callable[[str, int, int], None], *_: object
        ) -> KeySearchResult | PausedSearch:
            await self.gate.wait()
            self.gate.clear()
            on_progress("searching", 1, 2)
            return await super().search_files(search)

    searcher = StartingSearcher()
    async with broker_of(MemoryEnv(seed=5)) as broker:
        broker.erasures.eraser._start_searcher = searcher.start
        erasure_id = (await erase(broker))["id"]
        await reaches(broker, erasure_id, lambda answer: "is starting" in waits_for(answer))
        searcher.gate.set()
        await searcher.begun.wait()
        assert waits_for(await one(broker, erasure_id)) == "its files are being searched"
        searcher.gate.set()
        await completed(broker, erasure_id)


async def test_a_clean_of_several_groups_is_over_before_the_next_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env, large = MemoryEnv(seed=5), "x" * 600_000
    async with broker_of(env, {"segment.bytes": "1048576"}) as broker:
        for number in range(3):  # segments of three groups
            write(broker, f"{ADA}=secret-{number}", f"bob={large}")
        eraser, publish = broker.erasures.eraser, broker.cleaning.publish
        searches = calls_of(monkeypatch, DedicatedWorker, "search_files")
        looks = calls_of(monkeypatch, eraser, "look_at")
        is_published, goes_on = asyncio.Event(), asyncio.Event()

        async def publish_some(job: CleanJob, groups: Sequence[CleanedGroup]) -> Any:
            outcomes = await publish(job, groups)
            is_published.set()
            await goes_on.wait()
            return outcomes

        monkeypatch.setattr(broker.cleaning, "publish", publish_some)
        erasure = await erase(broker)
        await is_published.wait()
        before = len(looks)
        await until(lambda: len(looks) == before + 2)
        assert len(searches) == 1
        goes_on.set()
        await completed(broker, erasure["id"])
        assert b"secret" not in bytes_on_disk(env)
        assert len(searches) == 2


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[str]:
    """Return a list that gets the name of a coroutine function at each call of it."""
    calls, called = list[str](), getattr(owner, name)

    async def noted(*arguments: Any) -> Any:
        calls.append(name)
        return await called(*arguments)

    monkeypatch.setattr(owner, name, noted)
    return calls


async def test_an_erasure_waits_while_its_topic_is_not_compacted() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env) as broker:
        erasure = await paused_erasure(broker)
        await policy(broker, "delete")
        broker.pool.operator.resume(ORDERS)
        answer = await reaches(broker, erasure["id"], lambda a: "cleanup.policy" in waits_for(a))
        assert "cleanup.policy is delete" in waits_for(answer)
        await policy(broker, "compact")
        await completed(broker, erasure["id"])
        assert b"secret" not in bytes_on_disk(env)


async def policy(broker: Broker, value: str) -> None:
    body = {"set": {"cleanup.policy": value}}
    status, answer = await call_api(broker, "PATCH", "/api/v1/topics/orders", body)
    assert status == 200, answer


async def test_a_log_with_transactions_is_cleaned_as_a_whole() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env) as broker:
        log = partition_of(broker).log
        record = Record(0, 1, ADA.encode(), b"secret-1")
        batch = build_batch(
            [record], producer_id=7, producer_epoch=0, base_sequence=0, attributes=16
        )
        log.append(batch, read_header(batch), now_ms=1, in_transaction=True)
        erasure = await erase(broker)
        await reaches(broker, erasure["id"], lambda a: "transaction" in waits_for(a))
        path = "/api/v1/cleaner/partitions/orders/0/transactions/7/abort"
        assert (await call_api(broker, "POST", path))[0] == 200
        await completed(broker, erasure["id"])
        assert b"secret" not in bytes_on_disk(env)


@pytest.mark.parametrize(
    ("purpose", "reason"),
    [("compact", "has leased the partition"), ("read", "a remote compaction has leased /disk1/")],
)
async def test_an_erasure_waits_for_a_lease_that_has_the_segments(
    purpose: str, reason: str
) -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env) as broker:
        write(broker, f"{ADA}=secret-1", f"{ADA}=secret-2")
        path = "/api/v1/remote-compactions"
        status, lease = await call_api(
            broker, "POST", path, {"topic": "orders", "purpose": purpose}
        )
        assert status == 201, lease
        erasure = await erase(broker)
        await reaches(broker, erasure["id"], lambda a: reason in waits_for(a))
        assert b"secret" in bytes_on_disk(env)
        await call_api(broker, "DELETE", f"{path}/{lease['compaction_id']}")
        await completed(broker, erasure["id"])
        assert b"secret" not in bytes_on_disk(env)


async def waits_for_the_end_of_a_copy(broker: Broker, env: MemoryEnv, folder: str) -> None:
    """An erasure waits until a folder with a value of its key is gone."""
    env.mkdir(folder)
    file = env.open(f"{folder}/{0:020}.log", create=True, write=True)
    file.pwrite(build_batch([Record(0, 1, ADA.encode(), b"secret")]), 0)
    erasure = await erase(broker)
    await reaches(broker, erasure["id"], lambda a: f"until {folder}" in waits_for(a))
    env.remove_tree(folder)
    await completed(broker, erasure["id"])


async def test_a_replica_that_waits_for_its_deletion_is_searched() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env) as broker:
        await waits_for_the_end_of_a_copy(broker, env, f"/disk1/orders-0.{'0' * 32}-delete")


async def test_the_folder_that_a_move_left_in_another_directory_is_searched() -> None:
    """The last step of the move found no room."""
    env = MemoryEnv(seed=5)
    async with broker_of(env, disks=("/disk1", "/disk2")) as broker:
        assert partition_of(broker).log.directory == "/disk1/orders-0"
        write(broker, "bob=bob-1")
        await waits_for_the_end_of_a_copy(broker, env, "/disk2/orders-0")


async def test_an_offline_data_directory_delays_the_receipt() -> None:
    """It may have a folder of the replica that a move left, or a stray one."""
    env = MemoryEnv(seed=5)
    async with broker_of(env, disks=("/disk1", "/disk2")) as broker:
        write(broker, f"{ADA}=secret-1")
        broker.failed_directories.fail(LogDirectoryError("/disk2", "EIO"))
        erasure = await erase(broker)
        answer = await reaches(broker, erasure["id"], lambda a: "/disk2 is offline" in waits_for(a))
        assert answer["state"] == "open"
        assert b"secret" not in bytes_on_disk(env)


@pytest.mark.parametrize("byte", [2, 70])  # of the offset, and of the record
async def test_damage_delays_the_receipt_until_its_bytes_are_gone(
    byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasures, "FAILED_SECONDS", 0.01)
    monkeypatch.setattr(erasures, "FAILED_SECONDS_MAX", 0.01)
    env, path = MemoryEnv(seed=5), f"/disk1/orders-0/{0:020}.log"
    async with broker_of(env, {"file.delete.delay.ms": "0"}) as broker:
        write(broker, f"{ADA}=secret", "bob=bob-1")
        file = env.open(path, write=True)
        size_bytes = read_header(file.pread(61, 0)).size_bytes
        file.pwrite(bytes([file.pread(1, byte)[0] ^ 1]), byte)
        erasure = await erase(broker)
        skip = "`varve log skip orders 0 --offset 0` removes offsets 0 to 0 "
        answer = await reaches(broker, erasure["id"], lambda a: skip in waits_for(a))
        assert f"{path} cannot be searched from byte " in waits_for(answer)
        status, skipped = await call_api(broker, "POST", SKIP_PATH)
        assert status == 200
        kept_as = skipped["kept_as"]
        assert kept_as.startswith(f"{path}.0-{size_bytes}.")
        await reaches(broker, erasure["id"], lambda a: f"{kept_as} cannot be" in waits_for(a))
        assert b"secret" in env.read_file(kept_as)
        env.unlink(kept_as)
        assert (await completed(broker, erasure["id"]))["state"] == "complete"
        assert b"secret" not in bytes_on_disk(env)


async def test_a_file_that_cannot_be_read_delays_the_receipt_and_is_named() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env) as broker:
        write(broker, "bob=bob-1")
        path = f"/disk1/orders-0/{0:020}.log.deleted"
        file = env.open(path, create=True, write=True)
        file.pwrite(b"\x01" * 100, 0)
        erasure = await erase(broker)
        answer = await reaches(broker, erasure["id"], lambda a: path in waits_for(a))
        assert "cannot be searched from byte 0 on" in waits_for(answer)
