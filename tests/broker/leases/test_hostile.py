"""Full disks, lying files and requests at the same time: nothing of it outlasts its run."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from crc32c import crc32c

from broker.app import Broker
from broker.leases import file_transfer
from broker.leases.file_transfer import Transfers, Upload
from broker.leases.lease_folder import (
    LEASE_MAGIC,
    LEASE_VERSION,
    LeaseRecord,
    read_lease,
    write_lease,
)
from broker.leases.model import LeaseError
from cleaner import typed_json
from cleaner.remote_compaction import (
    MANIFEST_MAGIC,
    MANIFEST_VERSION,
    AdoptOutcome,
    LeasePlan,
    Purpose,
    encode_manifest,
    manifest_parts_max,
)
from storage.env import File
from storage.format.sealed_json import seal_body
from tests.support.broker.leases import (
    FOLDER,
    ORDERS,
    adopted,
    carried_out,
    fill,
    leasing_broker,
    log_files,
    opened,
    served,
    settled,
    staged,
)
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=35)


# --- full disks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["check/in", "check/out"])
async def test_a_disk_that_was_full_for_a_moment_does_not_spoil_an_adoption(
    env: MemoryEnv, step: str
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        fault = env.fail_on(lambda op, path: op == "mkdir" and path.endswith(step), errno.ENOSPC)
        with pytest.raises(LeaseError) as refused:
            await adopted(broker, plan)
        assert refused.value.status == 503
        fault.remove()
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED


async def test_links_that_could_not_be_removed_do_not_spoil_the_next_adoption(
    env: MemoryEnv,
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        faults = [
            env.fail_on(lambda op, path: op == "link" and "/check/out/" in path, errno.EIO),
            env.fail_on(lambda op, path: op == "unlink" and "/check/" in path, errno.EIO),
        ]
        with pytest.raises(LeaseError):
            await adopted(broker, plan)
        for fault in faults:
            fault.remove()
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED


# --- uploads at the same time ---------------------------------------------------------------------


class SlowUpload:
    """A file that is announced, and comes when it is let."""

    def __init__(self, size_bytes: int) -> None:
        self.go_on = asyncio.Event()
        data = bytes(size_bytes)
        self.upload = Upload(size_bytes, crc32c(data), self._chunks(data))

    async def _chunks(self, data: bytes) -> AsyncIterator[bytes]:
        await self.go_on.wait()
        yield data


async def both(broker: Broker, env: MemoryEnv, plan: LeasePlan, size_bytes: int) -> list[int]:
    """The statuses of two uploads that begin at the same time."""
    transfers = Transfers(env, broker.directory_threads, broker.leases)
    part = broker.leases.table.authorize(plan.compaction_id, 0, plan.token)
    uploads = [SlowUpload(size_bytes) for _ in range(2)]
    tasks = [
        asyncio.ensure_future(
            transfers.receive(part, "scratch-1", f"rows-{at}", slow_upload.upload)
        )
        for at, slow_upload in enumerate(uploads)
    ]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=2)
    for upload in uploads:
        upload.go_on.set()
    exceptions = await asyncio.gather(*tasks, return_exceptions=True)
    return [
        exception.status if isinstance(exception, LeaseError) else 200 for exception in exceptions
    ]


async def test_uploads_at_the_same_time_keep_to_one_bound(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.leases.model.STAGED_BYTES_MIN", 1000)
    monkeypatch.setattr("broker.leases.model.STAGED_FACTOR", 0)
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        assert sorted(await both(broker, env, plan, 600)) == [200, 413]
        assert broker.leases.table.authorize(plan.compaction_id, 0, plan.token).staged_bytes == 600


async def test_room_that_was_promised_to_one_upload_is_not_promised_to_another(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        monkeypatch.setattr("broker.leases.file_transfer.FREE_BYTES_MIN", 1000)
        env.free_space_bytes = 2000
        assert sorted(await both(broker, env, plan, 600)) == [200, 507]


class Dripping:
    """A file that comes byte by byte, as long as somebody takes it."""

    def __init__(self) -> None:
        self.came = 0
        self.wanted = asyncio.Semaphore(0)

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            await self.wanted.acquire()
            self.came += 1
            yield b"x"


async def test_an_upload_that_never_ends_ends_with_its_run(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        part = broker.leases.table.authorize(plan.compaction_id, 0, plan.token)
        dripping = Dripping()
        upload = Upload(1000, 0, dripping.chunks())
        transfers = Transfers(env, broker.directory_threads, broker.leases)
        task = asyncio.ensure_future(transfers.receive(part, "scratch-1", "rows", upload))
        dripping.wanted.release()
        while not dripping.came:  # noqa: ASYNC110 - the folder is made in a thread
            await asyncio.sleep(0)
        broker.leases.abandon(plan.compaction_id)
        dripping.wanted.release()
        with pytest.raises(LeaseError) as refused:
            await asyncio.wait_for(task, 20)
        assert refused.value.status == 410
        await settled(broker)
        await broker.leases.sweep()
        assert staged(env) == []


async def test_a_file_is_not_closed_while_a_thread_writes_it(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop of the server cancels requests. Another file would get the descriptor."""
    begun, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()
    failures: list[OSError] = []

    def write_out(file: File, data: bytearray, position: int, crc: int) -> int:
        begun.set()
        may_go_on.wait(20)
        try:
            file.pwrite(data, position)
        except OSError as error:
            failures.append(error)
        ended.set()
        return crc

    monkeypatch.setattr(file_transfer, "_write_out", write_out)
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        part = broker.leases.table.authorize(plan.compaction_id, 0, plan.token)
        upload = SlowUpload(10)
        upload.go_on.set()
        transfers = Transfers(env, broker.directory_threads, broker.leases)
        task = asyncio.ensure_future(transfers.receive(part, "scratch-1", "rows", upload.upload))
        assert await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        assert await asyncio.to_thread(ended.wait, 20)
        assert failures == []


# --- leases that lie ------------------------------------------------------------------------------


def sealed(body: bytes) -> bytes:
    return seal_body(LEASE_MAGIC, LEASE_VERSION, body)


def without_times(env: MemoryEnv, path: str) -> None:
    record = read_lease(env, path.rpartition("/")[0])
    assert not isinstance(record, str)
    put(env, path, sealed(typed_json.dumps(replace(record, mtimes_ms=()))))


def without_groups(env: MemoryEnv, path: str) -> None:
    record = read_lease(env, path.rpartition("/")[0])
    assert not isinstance(record, str)
    job = replace(record.plan.job, groups=())
    plan = replace(record.plan, job=job)
    put(env, path, sealed(typed_json.dumps(replace(record, plan=plan, mtimes_ms=()))))


def nested(env: MemoryEnv, path: str) -> None:
    put(env, path, sealed(b'{"compaction_id":' + b"[" * 200_000 + b"]" * 200_000 + b"}"))


def folder(env: MemoryEnv, path: str) -> None:
    env.unlink(path)
    env.mkdir(path)


@pytest.mark.parametrize("lie", [without_times, without_groups, nested, folder])
async def test_a_lease_that_lies_is_swept_and_holds_up_no_start(
    env: MemoryEnv, lie: Callable[[MemoryEnv, str], None]
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        plan = await opened(broker)
    lie(env, f"{FOLDER}/varve.leases/{plan.compaction_id}/lease")
    async with leasing_broker(env) as broker:
        assert broker.leases.table.stats.resumed == 0
        assert staged(env) == []
        assert served(broker).log.log_end_offset == 30
        await opened(broker)


# --- manifests ------------------------------------------------------------------------------------


def bomb(size_bytes: int) -> bytes:
    """A sealed manifest of many small things."""
    return seal_body(MANIFEST_MAGIC, MANIFEST_VERSION, b'{"x":[' + b"[]," * (size_bytes // 3))


async def test_a_manifest_too_large_for_its_job_is_not_read(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        plan = await opened(broker)
        part = broker.leases.table.authorize(plan.compaction_id, 0, plan.token)
        with pytest.raises(LeaseError, match="its manifest has up to") as refused:
            await Transfers(env, broker.directory_threads, broker.leases).receive_manifest(
                part, bomb(2 << 20)
            )
        assert refused.value.status == 413
        put(env, f"{part.folder}/manifest", bomb(2 << 20))
        result = await adopted(broker, plan)
        assert result.outcome is AdoptOutcome.INVALID
        assert "is larger than" in result.reason


async def test_a_manifest_of_more_parts_than_its_job_needs_is_not_parsed(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []
    monkeypatch.setattr(file_transfer, "decode_manifest", parsed.append)
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        plan = await opened(broker)
        part = broker.leases.table.authorize(plan.compaction_id, 0, plan.token)
        transfers = Transfers(env, broker.directory_threads, broker.leases)
        with pytest.raises(LeaseError, match="lists and objects") as refused:
            await transfers.receive_manifest(part, bomb(1 << 20))
        assert (refused.value.status, parsed) == (413, [])
        made = carried_out(env, plan).manifest
        assert encode_manifest(made).count(b"[") < manifest_parts_max(part.job) // 100


async def test_who_made_it_is_told_in_plain_characters(env: MemoryEnv) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env, engine="me\n\x1b[31m\ud800" + "x" * 1000)
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED
        (job,) = broker.pool.history.newest(ORDERS)
        assert job.engine == "me??[31m?" + "x" * 31


# --- moving outputs -------------------------------------------------------------------------------


async def test_outputs_that_cannot_be_moved_are_taken_back_and_may_be_adopted_later(
    env: MemoryEnv,
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        plan = await opened(broker)
        carried_out(env, plan).leave_manifest(env)
        before = log_files(env)
        fault = env.fail_on(
            lambda op, path: op == "rename" and path.endswith("cleaned") and ".timeindex" in path,
            errno.ENOSPC,
        )
        with pytest.raises(LeaseError) as refused:
            await adopted(broker, plan)
        assert refused.value.status == 503
        assert log_files(env) == before
        fault.remove()
        assert (await adopted(broker, plan)).outcome is AdoptOutcome.ADOPTED


async def test_of_two_leases_of_one_partition_that_a_start_finds_one_goes_on(
    env: MemoryEnv,
) -> None:
    """The first one ended, and its files could not be removed before the broker was killed."""
    async with leasing_broker(env) as broker:
        fill(env, broker, 3)
        first = await opened(broker)
        fault = env.fail_on(lambda op, path: op == "unlink" and "varve.leases" in path, errno.EIO)
        broker.leases.abandon(first.compaction_id)
        await settled(broker)
        env.advance_ms(5)
        second = await opened(broker)
        assert staged(env) == sorted([first.compaction_id, second.compaction_id])
        fault.remove()
    async with leasing_broker(env) as broker:
        assert [compaction.compaction_id for compaction in broker.leases.table.alive()] == [
            second.compaction_id
        ]
        assert staged(env) == [second.compaction_id]
        carried_out(env, second).leave_manifest(env)
        assert (await adopted(broker, second)).outcome is AdoptOutcome.ADOPTED
        assert broker.pool.in_progress.states() == {}


# --- renewals -------------------------------------------------------------------------------------


class SlowWrites:
    """Writes of leases take time; the test counts concurrent ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._active = 0
        self._write = write_lease
        self._never = threading.Event()
        monkeypatch.setattr("broker.leases.leases.write_lease", self.write)

    def write(self, env: MemoryEnv, folder: str, record: LeaseRecord) -> None:
        self._active += 1
        self.most = max(self.most, self._active)
        self._never.wait(0.1)
        try:
            self._write(env, folder, record)
        finally:
            self._active -= 1


async def test_a_lease_is_written_by_one_renewal_after_the_other(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        writes = SlowWrites(monkeypatch)
        for ttl_seconds in (70, 80, 90):
            broker.leases.renew(plan.compaction_id, ttl_seconds)
        await settled(broker)
        assert writes.most == 1
        record = read_lease(env, f"{FOLDER}/varve.leases/{plan.compaction_id}")
        assert not isinstance(record, str)
        assert record.ttl_seconds == 90


async def test_a_renewal_brings_no_lease_back_that_has_ended(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        plan = await opened(broker)
        writes = SlowWrites(monkeypatch)
        broker.leases.renew(plan.compaction_id, 70)
        while not writes.most:  # noqa: ASYNC110 - it is begun in a thread
            await asyncio.sleep(0)
        broker.leases.abandon(plan.compaction_id)
        await settled(broker)
        assert staged(env) == []


async def test_there_are_only_so_many_runs_also_of_those_that_come_at_the_same_time(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.leases.leases.COMPACTIONS_MAX", 3)
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        attempts = [opened(broker, purpose=Purpose.READ) for _ in range(10)]
        results = await asyncio.gather(*attempts, return_exceptions=True)
        refused = [item.status for item in results if isinstance(item, LeaseError)]
        assert refused == [429] * 7
        assert len(broker.leases.table.alive()) == 3
        for compaction in broker.leases.table.alive():
            broker.leases.abandon(compaction.compaction_id)
        await opened(broker)
