"""Erasures from the request to the receipt, in a whole broker over an in-memory disk."""

import asyncio
import errno
import itertools
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.damage.log_repair import TruncationRefusedError
from broker.erasure import erasures
from broker.erasure.erasures import ErasureRefusedError
from broker.erasure.forecast import Risk
from broker.erasure.store import FILE_NAME
from broker.event_loop import loop_turns
from broker.event_loop.loop_turns import Turns
from broker.http.api.compaction.erasures import ErasuresApi
from broker.security.principal import Principal
from broker.topics.partition import Partition
from broker.topics.topics import TopicError
from cleaner.job import CleanedGroup, CleanJob
from cleaner.key_search import FileState, FoundFile, KeySearch, KeySearchResult
from cleaner.scheduler.clean_requests import CleanRequest
from cleaner.workers.dedicated_worker import DedicatedWorker, JobFailedError
from protocol.errors import ErrorCode
from storage.env import write_file
from storage.errors import LogDirectoryError, NoRoomError
from storage.format.batch import Record, build_batch, read_header
from storage.model import TopicPartition
from storage.view.view_log import ViewCursor
from tests.support.broker import http_client
from tests.support.broker.broker_in_memory import log_repair_of
from tests.support.broker.erasure import (
    ADA,
    KEYS,
    ORDERS,
    PATH,
    SECONDS,
    broker_of,
    bytes_on_disk,
    call_api,
    completed,
    erase,
    new_broker,
    one,
    partition_of,
    paused_erasure,
    reaches,
    risk_of,
    waits_for,
    write,
)
from tests.support.cleaner.scheduler.cleaner_fakes import until
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

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


async def test_a_pause_is_named_and_puts_the_deadline_at_risk() -> None:
    async with broker_of(MemoryEnv(seed=5)) as broker:
        erasure = await paused_erasure(broker)
        answer = await reaches(broker, erasure["id"], lambda a: risk_of(a) == "obstacle")
        assert answer["partitions"][0]["records_left"] == 1
        assert broker.erasures.at_risk == {Risk.OVERDUE: 0, Risk.OBSTACLE: 1, Risk.RATE: 0}
        _, overview = await call_api(broker, "GET", "/api/v1/overview")
        texts = [problem["text"] for problem in overview["attention"]]
        assert "1 partition with an erasure that will miss its deadline" in texts
        page = await http_client.scraped(broker)
        assert 'varve_erasure_partitions_at_risk{risk="obstacle"} 1.0' in page
        assert "varve_erasures 1.0" in page
        broker.pool.operator.resume(ORDERS)
        await completed(broker, erasure["id"])
        assert "varve_erasures_completed_total 1.0" in await http_client.scraped(broker)


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


async def test_min_compaction_lag_delays_an_erasure_and_is_a_risk_only_if_it_ends_too_late() -> (
    None
):
    day_ms = 86_400_000
    keys = {"min.compaction.lag.ms": str(day_ms), "max.compaction.lag.ms": str(2 * day_ms)}
    async with broker_of(MemoryEnv(seed=5), keys) as broker:
        write(broker, f"{ADA}=secret-1")
        late = await erase(broker, within_seconds=3600)
        in_time = await erase(broker, within_seconds=7 * 24 * 3600)
        answer = await reaches(broker, late["id"], lambda a: risk_of(a) is not None)
        assert (risk_of(answer), "min.compaction.lag.ms" in waits_for(answer)) == ("obstacle", True)
        assert answer["partitions"][0]["expected_ms"] >= late["requested_ms"] + day_ms
        await reaches(broker, in_time["id"], lambda a: "min.compaction.lag" in waits_for(a))
        assert risk_of(await one(broker, in_time["id"])) is None


async def test_a_killed_broker_goes_on_with_an_erasure_after_its_next_start() -> None:
    env = MemoryEnv(seed=5)
    with suppress(SimulatedCrash):  # its orderly stop meets the dead disk
        async with broker_of(env) as broker:
            erasure = await paused_erasure(broker)
            await partition_of(broker).flush()
            await broker.pool.operator.is_saved(ORDERS)
            after = env.crash()
    async with broker_of(after) as broker:
        answer = await reaches(broker, erasure["id"], lambda a: "paused" in waits_for(a))
        assert answer["partitions"][0]["tombstone_offset"] == 1, "it is written once"
        broker.pool.operator.resume(ORDERS)
        await completed(broker, erasure["id"])
        assert b"secret" not in bytes_on_disk(after)


async def test_the_bytes_of_a_key_are_private_and_go_with_the_end_of_its_erasure() -> None:
    env = MemoryEnv(seed=5)
    path = f"/disk1/{FILE_NAME}"
    async with broker_of(env) as broker:
        with capture_logs() as lines:
            erasure = await paused_erasure(broker)
            assert ADA.encode().hex() in env.read_file(path).decode()
            assert f"{path}.tmp" in env.private_files
            broker.pool.operator.resume(ORDERS)
            answer = await completed(broker, erasure["id"])
        assert ADA.encode().hex() not in env.read_file(path).decode()
        assert ADA not in str(lines)
        changes = [line for line in lines if line["event"] == "administrative change"]
        digests = {line["parameters"]["key_digest"] for line in changes}
        assert (len(changes), digests) == (2, {answer["key_digest"]})
        (receipt,) = [line for line in lines if line["event"] == "key erased"]
        assert receipt["key_digest"] == answer["key_digest"]


async def test_requests_are_refused_while_the_open_erasures_cannot_be_read() -> None:
    env = MemoryEnv(seed=5)
    path = f"/disk1/{FILE_NAME}"
    async with broker_of(env) as broker:
        await paused_erasure(broker)
    data = env.read_file(path)[:-1]
    write_file(env, path, data)
    async with broker_of(env) as broker:
        for method, body in (("POST", {"key": ADA}), ("GET", None)):
            status, answer = await call_api(broker, method, PATH, body)
            assert (status, path in answer["detail"]) == (409, True)
        _, overview = await call_api(broker, "GET", "/api/v1/overview")
        assert "erasures_unknown" in [problem["kind"] for problem in overview["attention"]]
        write(broker, "grace=served all the same")
    assert env.read_file(path) == data


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


class HeldSearcher:
    """A KeySearcher with an answer of the test; `gate` opens for one search."""

    def __init__(self, *found: FoundFile) -> None:
        self.gate, self.begun = asyncio.Event(), asyncio.Event()
        self.keys: list[bytes] = []  # of the searches
        self._found = found

    @asynccontextmanager
    async def start(self) -> AsyncIterator["HeldSearcher"]:
        yield self

    async def search_files(self, search: KeySearch, *_: object) -> KeySearchResult:
        self.keys.append(search.key)
        self.begun.set()
        await self.gate.wait()
        self.gate.clear()
        return KeySearchResult(
            files=0, bytes_read=0, seconds=0.0, found=self._found, records=len(self._found)
        )


@asynccontextmanager
async def held_search(
    env: MemoryEnv, *found: FoundFile, partitions: int = 1
) -> AsyncIterator[tuple[Broker, HeldSearcher, str]]:
    """A broker with an erasure whose first search is under way, and the id of that erasure."""
    searcher = HeldSearcher(*found)
    async with broker_of(env, partitions=partitions) as broker:
        broker.erasures.eraser._start_searcher = searcher.start
        erasure = await erase(broker)
        await searcher.begun.wait()
        searcher.begun.clear()
        yield broker, searcher, erasure["id"]


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


async def test_an_earlier_deadline_that_is_requested_during_a_search_comes_next() -> None:
    """A search may take hours, and an erasure of a topic one for each partition."""
    async with held_search(MemoryEnv(seed=5), partitions=3) as (broker, searcher, erasure_id):
        urgent = await erase(broker, "bob", partitions=[2], within_seconds=60)
        for _ in range(2):
            searcher.gate.set()
            async with asyncio.timeout(SECONDS):
                await searcher.begun.wait()
            searcher.begun.clear()
        assert searcher.keys == [ADA.encode(), b"bob", ADA.encode()]
        assert (await one(broker, urgent["id"]))["state"] == "complete"
        assert (await one(broker, erasure_id))["state"] == "open"


async def test_users_take_turns_whatever_their_deadlines_are() -> None:
    """Otherwise one user keeps the others waiting by new requests with earlier deadlines."""
    async with held_search(MemoryEnv(seed=5)) as (broker, searcher, _):
        topic = broker.topics.existing("orders")

        async def request(user: str, key: bytes, within_ms: int) -> None:
            by = Principal(user)
            await broker.erasures.request(topic, key, [0], within_ms=within_ms, requested_by=by)

        await request("ann", b"ann", 86_400_000)
        await request("bob", b"bob", 80_000_000)
        for number in range(6):
            await request("eve", b"eve", 1000)
            searcher.gate.set()
            async with asyncio.timeout(SECONDS):
                await searcher.begun.wait()
            searcher.begun.clear()
            if number == 3:
                assert searcher.keys[1:] == [b"eve", b"bob", b"ann", b"eve"]
        assert searcher.keys[5:] == [b"eve", b"eve"]


async def test_the_open_erasures_of_one_user_leave_room_for_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasures, "OPEN_MAX", 5)
    async with held_search(MemoryEnv(seed=5)) as (broker, _, _):
        topic = broker.topics.existing("orders")

        async def request(user: str, *, has_share: bool = True) -> bool:
            by = Principal(user)
            try:
                await broker.erasures.request(
                    topic, b"k", [0], within_ms=1000, requested_by=by, has_share=has_share
                )
            except ErasureRefusedError:
                return False
            return True

        assert await asyncio.gather(*(request("ada") for _ in range(3))) == [True, True, False]
        assert [await request("bob") for _ in range(2)] == [True, False]
        assert [await request("ada", has_share=False) for _ in range(2)] == [True, False]


async def test_the_keys_of_open_erasures_have_a_limit_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasures, "OPEN_KEYS_BYTES_MAX", 15 + 100)  # the first key
    async with held_search(MemoryEnv(seed=6)) as (broker, _, _):
        topic = broker.topics.existing("orders")

        async def request(key: bytes) -> None:
            await broker.erasures.request(
                topic, key, [0], within_ms=1000, requested_by=Principal("ada"), has_share=True
            )

        await request(bytes(40))
        with pytest.raises(ErasureRefusedError, match="with 55 bytes of keys, 1 of them"):
            await request(bytes(21))
        await request(bytes(20))


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


async def test_an_erasure_that_is_cancelled_during_its_search_writes_no_tombstone() -> None:
    file = FoundFile(FileState(f"/disk1/orders-0/{0:020}.log", 100, 1), 1, 0, 0)
    async with held_search(MemoryEnv(seed=5), file) as (broker, searcher, erasure_id):
        assert (await call_api(broker, "DELETE", f"{PATH}/{erasure_id}"))[0] == 200
        await erase(broker, "bob")  # its search comes after the end of the other one
        searcher.gate.set()
        async with asyncio.timeout(SECONDS):
            await searcher.begun.wait()
        assert partition_of(broker).log.log_end_offset == 0
        assert not broker.pool.operator.is_erasing(ORDERS)


async def test_a_request_during_the_start_of_the_broker_replaces_no_stored_erasure() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env) as broker:
        stored = await paused_erasure(broker)
    broker = new_broker(env)
    start_pool = broker.pool.start

    async def start() -> None:  # the HTTP API is open by now
        await erase(broker, "bob")
        await start_pool()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker.pool, "start", start)
        await broker.start()
    try:
        _, answer = await call_api(broker, "GET", PATH)
        oldest, _ = answer["erasures"]
        assert oldest["id"] == stored["id"]
    finally:
        await broker.stop()


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


async def test_a_cancelled_erasure_leaves_the_request_of_another_one_alone() -> None:
    async with broker_of(MemoryEnv(seed=5)) as broker:
        write(broker, "bob=bob-1")
        await paused_erasure(broker)
        request = pending_request(broker)
        other = await erase(broker, "bob")
        await reaches(broker, other["id"], lambda a: "values of the key" in waits_for(a))
        await call_api(broker, "DELETE", f"{PATH}/{other['id']}")
        assert request is not None
        assert pending_request(broker) is request


def pending_request(broker: Broker) -> CleanRequest | None:
    facts = broker.cleaning.facts_of(ORDERS)
    assert facts is not None
    return broker.pool.scanner.requests.pending(facts)


async def test_a_cancelled_erasure_rewrites_nothing_more() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env) as broker:
        erasure = await paused_erasure(broker)
        status, answer = await call_api(broker, "DELETE", f"{PATH}/{erasure['id']}")
        assert (status, answer["state"]) == (200, "cancelled")
        assert not broker.pool.operator.is_erasing(ORDERS)
        broker.pool.operator.resume(ORDERS)
        again = await call_api(broker, "DELETE", f"{PATH}/{erasure['id']}")
        assert again[1]["state"] == "cancelled"


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


async def test_only_the_erasures_of_a_key_are_listed() -> None:
    async with broker_of(MemoryEnv(seed=5)) as broker:
        mine, _ = await erase(broker), await erase(broker, "bob")
        _, everything = await call_api(broker, "GET", PATH)
        _, some = await call_api(broker, "GET", f"{PATH}?key={ADA}")
        assert len(everything["erasures"]) == 2
        assert [row["id"] for row in some["erasures"]] == [mine["id"]]


async def test_the_partitions_of_an_erasure_are_forecast_and_shown_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand partitions held the loop for 45 ms in an answer, and for 70 ms in a forecast."""
    async with broker_of(MemoryEnv(seed=5), partitions=20) as broker:
        await broker.erasures.stop()  # nothing is searched
        await erase(broker)
        (erasure,) = broker.erasures.all()
        api = ErasuresApi(broker.topics, broker.erasures, lambda *_: True)
        clock = itertools.count()
        monkeypatch.setattr(loop_turns, "perf_counter", lambda: next(clock))  # a turn for each row
        assert await rounds_of(broker.erasures._forecast()) >= 20
        assert await rounds_of(api._encode(erasure, Turns())) >= 20
        assert broker.erasures.forecast_of(erasure, erasure.parts[19]) is not None


async def rounds_of(work: Coroutine[Any, Any, object]) -> int:
    """Run work, and return how many rounds of the loop it takes."""
    task, rounds = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0)
        rounds += 1
    return rounds


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "key"),
        ({"key": "a", "key_base64": "YQ=="}, "both"),
        ({"key": "a", "partitions": [1]}, "partitions"),
        ({"key": "a", "partitions": []}, "partitions"),
        ({"key": "a", "within_seconds": 0}, "within_seconds"),
        ({"key": "a", "by": "24h"}, "by"),
    ],
)
async def test_a_malformed_request_is_refused(body: dict[str, Any], reason: str) -> None:
    async with broker_of(MemoryEnv(seed=5)) as broker:
        status, answer = await call_api(broker, "POST", PATH, body)
        assert (status, reason in answer["detail"]) == (400, True)


async def test_a_topic_that_is_not_compacted_is_refused() -> None:
    async with broker_of(MemoryEnv(seed=5), {"cleanup.policy": "delete"}) as broker:
        status, answer = await call_api(broker, "POST", PATH, {"key": ADA})
        assert (status, "not compacted" in answer["detail"]) == (400, True)
        await until(lambda: broker.erasures.all() == [])


# --- views and leases


def is_left_to_others(answer: dict[str, Any]) -> bool:
    """Whether old files have to be deleted, or a round of the views has just deleted them."""
    return "is deleted" in waits_for(answer) or answer["state"] == "complete"


async def test_a_compacted_view_loses_the_key_before_there_is_a_receipt() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env, {"varve.view": "compacted"}) as broker:
        write(broker, f"{ADA}=secret-1", "bob=bob-1")
        await broker.view_scheduler.compact(ORDERS)
        assert b"secret" in bytes_on_disk(env, "/disk1/orders-0/varve.view")
        erasure = await erase(broker)
        await reaches(broker, erasure["id"], is_left_to_others)
        await broker.view_scheduler.tidy()  # deletes the files of the earlier version
        answer = await completed(broker, erasure["id"])
        assert answer["state"] == "complete"
        content = bytes_on_disk(env)
        assert (b"secret" in content, b"bob-1" in content) == (False, True)


async def test_a_reader_that_stays_in_a_replaced_view_delays_no_erasure() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env, {"varve.view": "compacted"}) as broker:
        write(broker, f"{ADA}=secret-1", "bob=bob-1", "bob=bob-2")
        await broker.view_scheduler.compact(ORDERS)
        view = broker.views.partition(ORDERS)
        assert view is not None
        reader = ViewCursor(view.log)
        assert reader.read(0, 1, end_offset=3).length
        erasure = await erase(broker)
        await reaches(broker, erasure["id"], is_left_to_others)
        await broker.view_scheduler.tidy()
        assert (await completed(broker, erasure["id"]))["state"] == "complete"
        assert b"secret" not in bytes_on_disk(env)
        assert reader.read(1, 1 << 20, end_offset=3).length


@pytest.mark.parametrize("strategy", ["timestamp", "header"])
async def test_the_tombstone_ranks_above_every_value_in_a_view(strategy: str) -> None:
    env, future_ms = MemoryEnv(seed=5), 1_900_000_000_000
    keys = {"varve.view": "compacted", "varve.view.strategy": strategy}
    if strategy == "header":
        keys["varve.view.version.header"] = "version"
    async with broker_of(env, keys) as broker:
        log = partition_of(broker).log
        header = ("version", (9).to_bytes(8, "big"))
        batch = build_batch([Record(0, future_ms, ADA.encode(), b"secret-1", (header,))])
        log.append(batch, read_header(batch), now_ms=env.wall_ms())
        await broker.view_scheduler.compact(ORDERS)
        erasure = await erase(broker)
        await reaches(broker, erasure["id"], is_left_to_others)
        await broker.view_scheduler.tidy()
        await completed(broker, erasure["id"])
        assert b"secret" not in bytes_on_disk(env)


async def test_the_tombstone_ranks_above_values_from_before_the_clock_was_set_back() -> None:
    """With LogAppendTime, the log gives it the time of its append."""
    env, before_ms = MemoryEnv(seed=5), 1_900_000_000_000
    keys = {
        "varve.view": "compacted",
        "varve.view.strategy": "timestamp",
        "message.timestamp.type": "LogAppendTime",
    }
    async with broker_of(env, keys) as broker:
        log = partition_of(broker).log
        batch = build_batch([Record(0, 1, ADA.encode(), b"secret-1", ())])
        log.append(batch, read_header(batch), now_ms=before_ms)
        assert env.wall_ms() < before_ms
        await broker.view_scheduler.compact(ORDERS)
        erasure = await erase(broker)
        await reaches(broker, erasure["id"], is_left_to_others)
        await broker.view_scheduler.tidy()
        await completed(broker, erasure["id"])
        assert log.log_end_offset == 2
        assert b"secret" not in bytes_on_disk(env)


@pytest.mark.parametrize("strategy", ["timestamp", "header"])
async def test_a_second_tombstone_ranks_above_a_value_that_was_written_before_the_first(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, future_ms = MemoryEnv(seed=5), 1_900_000_000_000
    keys = {"varve.view": "compacted", "varve.view.strategy": strategy}
    if strategy == "header":
        keys["varve.view.version.header"] = "version"
    async with broker_of(env, keys) as broker:
        log, append = partition_of(broker).log, broker.erasures.eraser.append

        def write_ranked(rank: int) -> None:
            header = ("version", rank.to_bytes(8, "big"))
            batch = build_batch([Record(0, future_ms + rank, ADA.encode(), b"secret", (header,))])
            log.append(batch, read_header(batch), now_ms=env.wall_ms())

        async def append_later(served: Partition, record: Record, now_ms: int) -> int:
            if log.log_end_offset == 1:
                write_ranked(2)
            return await append(served, record, now_ms)

        monkeypatch.setattr(broker.erasures.eraser, "append", append_later)
        write_ranked(1)
        erasure = await erase(broker)
        async with asyncio.timeout(SECONDS):
            while (answer := await one(broker, erasure["id"]))["state"] == "open":
                await asyncio.sleep(0.01)
                await broker.view_scheduler.tidy()
        (part,) = answer["partitions"]
        assert (part["end_offset"], part["tombstone_offset"], log.log_end_offset) == (3, 3, 4)
        assert b"secret" not in bytes_on_disk(env)


async def test_a_tombstone_that_expired_before_the_view_has_read_it_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = MemoryEnv(seed=5)
    keys = {"cleanup.policy": "compact,delete", "file.delete.delay.ms": "0"}
    async with broker_of(env, keys | {"varve.view": "compacted"}) as broker:
        write(broker, f"{ADA}=secret-1")
        await broker.view_scheduler.compact(ORDERS)
        append = broker.erasures.eraser.append

        async def append_and_expire(served: Partition, record: Record, now_ms: int) -> int:
            offset = await append(served, record, now_ms)
            if offset == 1:
                served.log.delete_records(2)
            return offset

        monkeypatch.setattr(broker.erasures.eraser, "append", append_and_expire)
        erasure = await erase(broker)
        async with asyncio.timeout(SECONDS):
            while (answer := await one(broker, erasure["id"]))["state"] == "open":
                await asyncio.sleep(0.01)
                await broker.view_scheduler.tidy()
                await broker.log_maintenance.expire()
        (part,) = answer["partitions"]
        assert (part["end_offset"], part["tombstone_offset"]) == (2, 2)
        assert b"secret" not in bytes_on_disk(env)


async def test_a_view_that_cannot_be_offered_does_not_delay_an_erasure() -> None:
    """A topic that was taken over has the name of the view."""
    env, folder = MemoryEnv(seed=5), "/disk1/orders.compacted-0"
    async with broker_of(env):
        pass
    env.mkdir(folder)
    batch = build_batch([Record(0, env.wall_ms(), b"other", b"kept")])
    env.open(f"{folder}/{0:020d}.log", create=True).pwrite(bytes(batch), 0)
    async with broker_of(env):
        pass
    async with broker_of(env, {"varve.view": "compacted"}) as broker:
        write(broker, f"{ADA}=secret-1")
        answer = await completed(broker, (await erase(broker))["id"])
        assert (answer["state"], b"secret" in bytes_on_disk(env)) == ("complete", False)


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
