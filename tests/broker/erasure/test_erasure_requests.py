"""Requests for erasures: which are refused, which come first, and what a cancellation stops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.app import Broker
from broker.erasure import erasures
from broker.erasure.erasures import ErasureRefusedError
from broker.erasure.partition_eraser import SLICE_SECONDS
from broker.security.principal import Principal
from cleaner.key_search import FileState, FoundFile, KeySearch, KeySearchResult, PausedSearch
from cleaner.scheduler.clean_requests import CleanRequest
from tests.support.broker.erasure import (
    ADA,
    ORDERS,
    PATH,
    SECONDS,
    broker_of,
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
from tests.support.clocks.virtual_loop import run_virtually
from tests.support.storage.memory_env import MemoryEnv


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


async def test_only_the_erasures_of_a_key_are_listed() -> None:
    async with broker_of(MemoryEnv(seed=5)) as broker:
        mine, _ = await erase(broker), await erase(broker, "bob")
        _, everything = await call_api(broker, "GET", PATH)
        _, some = await call_api(broker, "GET", f"{PATH}?key={ADA}")
        assert len(everything["erasures"]) == 2
        assert [row["id"] for row in some["erasures"]] == [mine["id"]]


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


class SlowSearcher:
    """A KeySearcher in virtual time: each search takes the seconds of its key."""

    def __init__(self, seconds: dict[bytes, float]) -> None:
        self._seconds = seconds
        self.slices: list[bytes] = []

    @asynccontextmanager
    async def start(self) -> AsyncIterator["SlowSearcher"]:
        yield self

    async def search_files(self, search: KeySearch, *_: object) -> KeySearchResult | PausedSearch:
        self.slices.append(search.key)
        left = float(search.position or self._seconds[search.key])
        await asyncio.sleep(min(left, search.slice_seconds))
        if left > search.slice_seconds:
            return PausedSearch(str(left - search.slice_seconds).encode())
        return KeySearchResult(files=1, bytes_read=1, seconds=self._seconds[search.key])

    def abort(self) -> None:
        """No erasure is cancelled."""


def test_a_user_waits_for_a_slice_of_the_searches_of_others_and_not_for_their_end() -> None:
    searcher = SlowSearcher({b"eve": 100.0, b"ann": 0.1})

    async def main() -> tuple[float, float]:
        async with broker_of(MemoryEnv(seed=5), partitions=4) as broker:
            broker.erasures.eraser._start_searcher = searcher.start
            topic, clock = broker.topics.existing("orders"), asyncio.get_running_loop().time

            async def erased(user: str, *, within_ms: int) -> float:
                began = clock()
                erasure = await broker.erasures.request(
                    topic,
                    user.encode(),
                    range(4),
                    within_ms=within_ms,
                    requested_by=Principal(user),
                )
                while erasure.is_open:
                    await asyncio.sleep(1)
                    erasure = broker.erasures.get(erasure.erasure_id) or erasure
                return clock() - began

            hostile = asyncio.create_task(erased("eve", within_ms=1000))
            await asyncio.sleep(20)
            seconds = await erased("ann", within_ms=86_400_000)
            return seconds, await hostile

    seconds, hostile = run_virtually(main())
    assert seconds < 4 * (SLICE_SECONDS + 1)
    assert hostile < 4 * 100 + 50, "its searches went on where they were"
    assert searcher.slices.count(b"ann") == 4


async def test_the_search_of_a_topic_that_was_deleted_ends_with_its_slice() -> None:
    async with held_search(MemoryEnv(seed=5)) as (broker, searcher, erasure_id):
        searcher.is_paused = True
        other = await erase(broker, "bob")
        assert (await call_api(broker, "DELETE", "/api/v1/topics/orders"))[0] == 200
        searcher.gate.set()
        for erasure in (erasure_id, other["id"]):
            assert (await completed(broker, erasure))["state"] == "void"
        assert searcher.keys == [ADA.encode()]


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


async def test_an_erasure_that_is_cancelled_during_its_search_writes_no_tombstone() -> None:
    file = FoundFile(FileState(f"/disk1/orders-0/{0:020}.log", 100, 1), 1, 0, 0)
    async with held_search(MemoryEnv(seed=5), file) as (broker, searcher, erasure_id):
        searcher.is_late = True
        assert (await call_api(broker, "DELETE", f"{PATH}/{erasure_id}"))[0] == 200
        await erase(broker, "bob")  # its search comes after the end of the other one
        searcher.gate.set()
        async with asyncio.timeout(SECONDS):
            await searcher.begun.wait()  # by another worker
        assert partition_of(broker).log.log_end_offset == 0
        assert not broker.pool.operator.is_erasing(ORDERS)


async def test_the_search_of_an_erasure_that_is_cancelled_keeps_no_other_one_waiting() -> None:
    async with held_search(MemoryEnv(seed=5)) as (broker, searcher, erasure_id):
        other = await erase(broker, "bob")
        await call_api(broker, "DELETE", f"{PATH}/{erasure_id}")
        async with asyncio.timeout(SECONDS):
            await searcher.begun.wait()
        assert searcher.keys == [ADA.encode(), b"bob"]
        searcher.gate.set()
        assert (await completed(broker, other["id"]))["state"] == "complete"


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
