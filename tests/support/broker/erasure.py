"""Erasures of a whole broker over an in-memory disk, through its HTTP API."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from broker.app import Broker
from broker.http.api.compaction.erasures import ROOT
from broker.topics.partition import Partition
from cleaner.job import CleanAbortedError
from cleaner.key_search import FoundFile, KeySearch, KeySearchResult, PausedSearch
from storage.format.batch import Record, build_batch, read_header
from storage.model import TopicPartition
from tests.support.broker import http_client
from tests.support.broker.broker_in_memory import broker_settings
from tests.support.broker.worker_in_memory import spawn_in_memory
from tests.support.storage.memory_env import MemoryEnv

ORDERS = TopicPartition("orders", 0)
PATH = ROOT.format(topic="orders")
KEYS = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1", "segment.ms": "604800000"}
ADA = "ada@example.org"
SECONDS = 30


async def call_api(broker: Broker, method: str, path: str, body: object = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    return await http_client.call_api(broker, method, path, data)


def new_broker(
    env: MemoryEnv,
    keys: dict[str, str] | None = None,
    *,
    partitions: int = 1,
    disks: Sequence[str] = ("/disk1",),
) -> Broker:
    """A broker whose cleaner works, and cleans only on request."""
    topics = {"orders": {"partitions": partitions, "keys": {**KEYS, **(keys or {})}}}
    cleaner = {"enabled": True, "workers": 1, "backoff_ms": 100, "dedupe_buffer_bytes": "1MiB"}
    settings = broker_settings(*disks, topics=topics, cleaner=cleaner)
    return Broker(settings, env, spawn=spawn_in_memory(env))


@asynccontextmanager
async def broker_of(
    env: MemoryEnv,
    keys: dict[str, str] | None = None,
    *,
    partitions: int = 1,
    disks: Sequence[str] = ("/disk1",),
) -> AsyncIterator[Broker]:
    """See `new_broker`; it runs during the block."""
    broker = new_broker(env, keys, partitions=partitions, disks=disks)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


def partition_of(broker: Broker, where: TopicPartition = ORDERS) -> Partition:
    served = broker.topics.partition(where)
    assert served is not None
    return served


def write(broker: Broker, *records: str, where: TopicPartition = ORDERS, roll: bool = True) -> None:
    """Append records `key=value`, or `key` for a tombstone, and close the segment."""
    log, now_ms = partition_of(broker, where).log, 1_700_000_000_000
    for record in records:
        key, _, value = record.partition("=")
        batch = build_batch([Record(0, now_ms, key.encode(), value.encode() or None)])
        log.append(batch, read_header(batch), now_ms=now_ms)
    if roll:
        log.roll(now_ms)


async def erase(broker: Broker, key: str = ADA, **body: Any) -> dict[str, Any]:
    status, answer = await call_api(broker, "POST", PATH, {"key": key, **body})
    assert status == 201, answer
    return dict(answer)


async def one(broker: Broker, erasure_id: str) -> dict[str, Any]:
    status, answer = await call_api(broker, "GET", f"{PATH}/{erasure_id}")
    assert status == 200, answer
    return dict(answer)


async def reaches(
    broker: Broker, erasure_id: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The first answer about an erasure for which this holds."""
    async with asyncio.timeout(SECONDS):
        while not holds(answer := await one(broker, erasure_id)):  # noqa: ASYNC110 - threads work
            await asyncio.sleep(0.01)
    return answer


async def completed(broker: Broker, erasure_id: str) -> dict[str, Any]:
    return await reaches(broker, erasure_id, lambda answer: answer["state"] != "open")


def bytes_on_disk(env: MemoryEnv, folder: str = "/disk1/orders-0") -> bytes:
    """The content of every file below a folder, one after the other."""
    content = b""
    for name in env.listdir(folder):
        path = f"{folder}/{name}"
        content += bytes_on_disk(env, path) if env.is_dir(path) else env.read_file(path)
    return content


def waits_for(answer: dict[str, Any]) -> str:
    return str(answer["partitions"][0]["waits_for"])


def risk_of(answer: dict[str, Any]) -> str | None:
    risk: str | None = answer["partitions"][0]["risk"]
    return risk


async def paused_erasure(broker: Broker) -> dict[str, Any]:
    """Erase a key that has a value while the cleaner is paused; return when that delays it."""
    write(broker, f"{ADA}=secret-1")
    broker.pool.operator.pause(ORDERS)
    erasure = await erase(broker)
    await reaches(broker, erasure["id"], lambda answer: "paused" in waits_for(answer))
    return erasure


class HeldSearcher:
    """A KeySearcher with an answer of the test; `gate` opens for one search."""

    def __init__(self, *found: FoundFile) -> None:
        self.gate, self.begun = asyncio.Event(), asyncio.Event()
        self.keys: list[bytes] = []  # of the searches
        self.is_late = False  # a search ends before it sees an abort
        self.is_paused = False  # each search pauses at its end
        self._is_aborted = False
        self._found = found

    @asynccontextmanager
    async def start(self) -> AsyncIterator["HeldSearcher"]:
        self._is_aborted = False
        yield self

    async def search_files(self, search: KeySearch, *_: object) -> KeySearchResult | PausedSearch:
        if self._is_aborted:
            raise CleanAbortedError
        self.keys.append(search.key)
        self.begun.set()
        await self.gate.wait()
        self.gate.clear()
        if self._is_aborted and not self.is_late:
            raise CleanAbortedError
        if self.is_paused:
            return PausedSearch(b"%d" % len(self.keys))
        return KeySearchResult(
            files=0, bytes_read=0, seconds=0.0, found=self._found, records=len(self._found)
        )

    def abort(self) -> None:
        self._is_aborted = True
        if not self.is_late:
            self.gate.set()


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
