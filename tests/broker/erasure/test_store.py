"""The file of the erasures: what it has after changes, failures and a start."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.erasure.model import Erasure, ErasureState, PartitionErasure, PartitionReceipt
from broker.erasure.store import ENDED_MAX, ENDED_PARTS_MAX, FILE_NAME, MAGIC, VERSION, ErasureStore
from broker.event_loop.directory_threads import DirectoryThreads
from storage.env import write_file
from storage.format.sealed_json import seal, unseal
from tests.support.broker.erasure import (
    ADA,
    ORDERS,
    PATH,
    broker_of,
    bytes_on_disk,
    call_api,
    completed,
    erase,
    new_broker,
    partition_of,
    paused_erasure,
    reaches,
    waits_for,
    write,
)
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

OPEN = Erasure(
    erasure_id="open",
    topic="orders",
    topic_id=bytes(16),
    digest="0" * 32,
    key=b"ada",
    requested_by="User:ada",
    requested_ms=1,
    deadline_ms=2,
    parts=(PartitionErasure(0, end_offset=7),),
)


def ended(number: int, parts: int = 1) -> Erasure:
    erasure = replace(
        OPEN, erasure_id=str(number), parts=tuple(map(PartitionErasure, range(parts)))
    )
    return erasure.ended(ErasureState.CANCELLED, now_ms=number)


@pytest.fixture
def env() -> MemoryEnv:
    env = MemoryEnv(seed=1)
    env.mkdir("/disk1")
    return env


def store_on(env: MemoryEnv, *directories: str) -> ErasureStore:
    return ErasureStore(env, lambda: directories, DirectoryThreads(env.monotonic))


async def test_the_next_start_reads_what_was_stored(env: MemoryEnv) -> None:
    store = store_on(env, "/disk1")
    await store.add(OPEN)
    await store.add(ended(1))
    again = store_on(env, "/disk1")
    await again.load()
    assert again.all() == [OPEN, ended(1)]


@pytest.mark.parametrize(("parts", "kept"), [(1, ENDED_MAX), (10_000, ENDED_PARTS_MAX // 10_000)])
async def test_the_erasures_that_ended_first_are_forgotten(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch, parts: int, kept: int
) -> None:
    store = store_on(env, "/disk1")
    monkeypatch.setattr(store, "_erasures", {str(n): ended(n, parts) for n in range(kept)})
    await store.add(OPEN)
    assert len(store.all()) == kept + 1
    await store.add(ended(kept, parts))
    names = [erasure.erasure_id for erasure in store.all()]
    assert names == [*map(str, range(1, kept)), "open", str(kept)]


@pytest.mark.parametrize("parts", [1, 500])
async def test_many_erasures_of_one_user_do_not_displace_the_receipts_of_others(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    store = store_on(env, "/disk1")
    of_eve = {str(n): replace(ended(n, parts), requested_by="User:eve") for n in range(1, 1000)}
    first = ended(0, parts=5_000)
    monkeypatch.setattr(store, "_erasures", {"0": first, **of_eve})
    for number in (1000, 1001):
        await store.add(replace(ended(number, parts), requested_by="User:eve"))
    assert first in store.all()
    assert store.all()[-1].erasure_id == "1001"


FILE_PATH = f"/disk1/{FILE_NAME}"


def newer(data: bytes) -> bytes:
    """The file as the next version of the broker could write it."""
    return seal(MAGIC, VERSION + 1, unseal(MAGIC, VERSION, data, FILE_PATH))


@pytest.mark.parametrize("change", [newer, lambda data: data[:-1]], ids=["newer", "damaged"])
async def test_a_file_that_cannot_be_read_stays_and_makes_the_erasures_unknown(
    env: MemoryEnv, change: Callable[[bytes], bytes]
) -> None:
    await store_on(env, "/disk1").add(OPEN)
    data = change(env.read_file(FILE_PATH))
    write_file(env, FILE_PATH, data)
    again = store_on(env, "/disk1")
    await again.load()
    assert again.unknown_because is not None
    assert FILE_PATH in again.unknown_because
    with pytest.raises(AssertionError):
        await again.add(ended(1))
    assert env.read_file(FILE_PATH) == data


@pytest.mark.parametrize("change", [newer, lambda data: data[:-1]], ids=["newer", "damaged"])
async def test_another_copy_replaces_a_damaged_one_but_not_a_newer_one(
    env: MemoryEnv, change: Callable[[bytes], bytes]
) -> None:
    env.mkdir("/disk2")
    await store_on(env, "/disk1", "/disk2").add(OPEN)
    data = change(env.read_file(FILE_PATH))
    write_file(env, FILE_PATH, data)
    again = store_on(env, "/disk1", "/disk2")
    await again.load()
    is_newer = change is newer
    assert (again.unknown_because is not None) == is_newer
    assert again.all() == ([] if is_newer else [OPEN])
    assert (env.read_file(FILE_PATH) == data) == is_newer


async def test_requests_that_come_during_a_write_are_stored_by_the_next_one(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrote all erasures, so the work grew with the square of their number."""
    encoded = Counter[str]()
    to_json = Erasure.to_json

    def count(erasure: Erasure) -> dict[str, Any]:
        encoded[erasure.erasure_id] += 1
        return to_json(erasure)

    monkeypatch.setattr(Erasure, "to_json", count)
    store = store_on(env, "/disk1")
    requests = [replace(OPEN, erasure_id=str(number)) for number in range(100)]
    await asyncio.gather(*map(store.add, requests))
    await store.change("50", lambda erasure: erasure.ended(ErasureState.CANCELLED, 9))
    assert unseal(MAGIC, VERSION, env.read_file(FILE_PATH), FILE_PATH)["revision"] <= 3
    assert encoded.total() == 101
    again = store_on(env, "/disk1")
    await again.load()
    assert again.all() == store.all()
    assert [erasure.erasure_id for erasure in again.all()] == [str(n) for n in range(100)]
    assert again.all()[50].key is None


async def test_a_receipt_encodes_its_own_part_only(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    erasure = replace(OPEN, parts=tuple(map(PartitionErasure, range(1000))))
    store = store_on(env, "/disk1")
    await store.add(erasure)
    encoded = list[int]()
    part_json = PartitionErasure.to_json

    def count(part: PartitionErasure) -> dict[str, Any]:
        encoded.append(part.partition)
        return part_json(part)

    monkeypatch.setattr(PartitionErasure, "to_json", count)
    receipt = PartitionReceipt(at_ms=1, files=2, bytes_read=3, tombstones=4)
    for partition in (7, 999, 0):
        part = PartitionErasure(partition, end_offset=9, receipt=receipt)
        erasure = erasure.with_part(part, now_ms=1)
        await store.change("open", lambda stored, part=part: stored.with_part(part, now_ms=1))
    assert encoded == [7, 999, 0]
    again = store_on(env, "/disk1")
    await again.load()
    assert again.all() == [erasure]


async def test_a_change_that_fails_leaves_those_of_the_same_write_alone(env: MemoryEnv) -> None:
    store = store_on(env, "/disk1")

    def refuse(erasures: Collection[Erasure]) -> None:
        raise ValueError(len(erasures))

    results = await asyncio.gather(
        store.add(OPEN),
        store.add(ended(1), refuse),
        store.change("open", lambda erasure: erasure.ended(ErasureState.CANCELLED, 9)),
        store.change("unknown", lambda erasure: erasure),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [type(None), ValueError, Erasure, KeyError]
    assert [erasure.state for erasure in store.all()] == [ErasureState.CANCELLED]


async def test_after_a_write_that_fails_none_of_its_changes_is_known(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_on(env, "/disk1")
    await store.add(ended(1))
    with monkeypatch.context() as patch:
        patch.setattr(store, "_directories", lambda: ("/nowhere",))
        results = await asyncio.gather(store.add(OPEN), store.add(ended(2)), return_exceptions=True)
    assert all(isinstance(result, OSError) for result in results)
    assert store.all() == [ended(1)]
    await store.add(ended(3))
    assert store.all() == [ended(1), ended(3)]


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


async def test_requests_are_refused_while_the_open_erasures_cannot_be_read() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env) as broker:
        await paused_erasure(broker)
    data = env.read_file(FILE_PATH)[:-1]
    write_file(env, FILE_PATH, data)
    async with broker_of(env) as broker:
        for method, body in (("POST", {"key": ADA}), ("GET", None)):
            status, answer = await call_api(broker, method, PATH, body)
            assert (status, FILE_PATH in answer["detail"]) == (409, True)
        _, overview = await call_api(broker, "GET", "/api/v1/overview")
        assert "erasures_unknown" in [problem["kind"] for problem in overview["attention"]]
        write(broker, "grace=served all the same")
    assert env.read_file(FILE_PATH) == data


async def test_the_bytes_of_a_key_are_private_and_go_with_the_end_of_its_erasure() -> None:
    env = MemoryEnv(seed=5)
    async with broker_of(env) as broker:
        with capture_logs() as lines:
            erasure = await paused_erasure(broker)
            assert ADA.encode().hex() in env.read_file(FILE_PATH).decode()
            assert f"{FILE_PATH}.tmp" in env.private_files
            broker.pool.operator.resume(ORDERS)
            answer = await completed(broker, erasure["id"])
        assert ADA.encode().hex() not in env.read_file(FILE_PATH).decode()
        assert ADA not in str(lines)
        changes = [line for line in lines if line["event"] == "administrative change"]
        digests = {line["parameters"]["key_digest"] for line in changes}
        assert (len(changes), digests) == (2, {answer["key_digest"]})
        (receipt,) = [line for line in lines if line["event"] == "key erased"]
        assert receipt["key_digest"] == answer["key_digest"]
