"""A run as its driver has it: kept alive, lost, handed back, refused; and files over HTTP."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from http.client import HTTPMessage
from pathlib import Path
from typing import Any, TypeVar

import pytest

from admin.client import ApiClient, ApiRefusedError, UnreachableError
from broker.app import Broker
from cleaner.engine.clean import run_clean
from cleaner.job import CleanedGroup, CleanJob, SourceSegment
from cleaner.remote_compaction import AdoptOutcome, LeasePlan, Purpose
from config import exit_codes
from pipeline.client.lease import (
    BrokerUnreachableError,
    Lease,
    LeaseClient,
    LeaseLostError,
    LeaseRequestError,
)
from pipeline.client.leased_work import lost_lease_reported
from pipeline.engines.engine import StageFailedError
from pipeline.transport import InputsGoneError, TransportError, open_transport
from pipeline.transport.http import HttpTransport
from storage.env import RealEnv
from storage.format import filenames
from tests.support.broker.leases import (
    KEYS,
    RECORDS,
    fill,
    latest,
    leasing_broker,
    log_files,
    served,
    settled,
    staged,
)
from tests.support.cleaner.cleaning import Recorder, clean_job
from tests.support.storage.logs import offsets_in
from tests.support.storage.memory_env import MemoryEnv

T = TypeVar("T")


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=35)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VARVE_SCRATCH", str(tmp_path))
    return tmp_path


def url_of(broker: Broker) -> str:
    return f"http://{broker.http.address}"


async def driven(broker: Broker, work: Callable[[LeaseClient], T]) -> T:
    """Do what a driver does, beside the broker's loop."""
    return await asyncio.to_thread(work, LeaseClient(ApiClient(url_of(broker))))


def clean_elsewhere(lease: Lease, index: int = 0) -> tuple[CleanJob, list[CleanedGroup]]:
    """Play the executor without the broker's disk, and hand back."""
    job = lease.plan.partitions[index].job
    env = RealEnv()
    transport = open_transport(env, lease.source("http"))
    try:
        bases = [source.base_offset for group in job.groups for source in group]
        local = transport.inputs(job, bases)
        recorder = Recorder()
        out = transport.outputs(job, "attempt-1")
        report = run_clean(env, replace(local, output_directory=out), recorder)
        groups = recorder.groups
        names = [file.name for group in groups if group.output for file in group.output.files]
        transport.deliver(job, "attempt-1", names)
        lease.submit(job, groups, ["attempt-1"] * len(groups), report, engine="elsewhere")
    finally:
        transport.close()
    return job, groups


async def test_whoever_has_no_access_to_the_disk_fetches_and_puts(
    env: MemoryEnv, scratch: Path
) -> None:
    def work(leases: LeaseClient) -> list[Any]:
        with leases.open("orders", roll=True) as lease:
            clean_elsewhere(lease)
            assert list(scratch.iterdir()) == []
            return list(lease.adopt())

    async with leasing_broker(env) as broker:
        fill(env, broker, 4)
        existing = latest(served(broker))
        (result,) = await driven(broker, work)
        assert (result.outcome, result.groups_published) == (AdoptOutcome.ADOPTED, 1)
        assert latest(served(broker)) == existing
        assert offsets_in(served(broker).log) == list(range(4 * RECORDS - KEYS, 4 * RECORDS))
        assert staged(env) == []


async def test_a_topic_that_is_not_compacted_is_an_error_of_usage(env: MemoryEnv) -> None:
    def work(leases: LeaseClient) -> None:
        with pytest.raises(LeaseRequestError, match="audit-0 is not compacted") as refused:
            leases.open("audit")
        assert refused.value.code == exit_codes.USAGE

    async with leasing_broker(env) as broker:
        await broker.metadata_service.create("audit", 1, {"cleanup.policy": "delete"})
        await driven(broker, work)


async def test_files_larger_than_a_range_come_in_pieces_and_a_damaged_one_again(
    env: MemoryEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.transport.http.RANGE_BYTES", 100)
    download = ApiClient.download
    faults = iter(["flip", "cut", "no answer", *["ok"] * 1000])
    naps: list[float] = []

    def odd(self: ApiClient, path: str, first: int, count: int) -> tuple[bytes, HTTPMessage]:
        data, headers = download(self, path, first, count)
        match next(faults):
            case "flip":
                return bytes([data[0] ^ 1]) + data[1:], headers
            case "cut":
                return data[:-1], headers
            case "no answer":
                raise UnreachableError("nobody answered")
        return data, headers

    monkeypatch.setattr(ApiClient, "download", odd)

    def work(leases: LeaseClient) -> None:
        with leases.open("orders") as lease:
            job = lease.plan.partitions[0].job
            source = lease.source("http")
            transport = HttpTransport(
                RealEnv(), source["url"], source["compaction_id"], source["token"], nap=naps.append
            )
            local = transport.inputs(job, [0, 10])
            for base in (0, 10):
                name = filenames.file_name(base, filenames.LOG)
                data = Path(local.directory, name).read_bytes()
                assert data == env.read_file(f"/disk1/orders-0/{name}")
            assert len(naps) == 3
            Path(transport.outputs(job, "scratch-1"), "rows").write_bytes(b"x" * 250)
            transport.deliver(job, "scratch-1", ["rows"])
            transport.close()
            other = open_transport(RealEnv(), source)
            fetched = Path(other.fetch(job, "scratch-1", ["rows"]), "rows")
            assert fetched.read_bytes() == b"x" * 250
            other.close()

    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        await driven(broker, work)


async def test_a_task_of_a_run_that_is_over_is_told_so_at_once(env: MemoryEnv) -> None:
    def work(leases: LeaseClient) -> None:
        with leases.open("orders") as lease:
            job = lease.plan.partitions[0].job
            transport = open_transport(RealEnv(), lease.source("http"))
            Path(transport.outputs(job, "scratch-1"), "rows").write_bytes(b"x")
            lease.abandon()
            with pytest.raises(InputsGoneError):
                transport.inputs(job, [0])
            with pytest.raises(TransportError, match="has ended"):
                transport.deliver(job, "scratch-1", ["rows"])
            with pytest.raises(TransportError, match="has ended"):
                transport.fetch(job, "scratch-1", ["other"])
            transport.close()

    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        await driven(broker, work)


def test_files_kept_by_a_task_lie_where_what_a_killed_one_leaves_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/spark,{tmp_path}/second")
    monkeypatch.delenv("VARVE_SCRATCH", raising=False)
    for folder in ("spark", "ours"):  # what is said to us wins over what Spark says
        parent = tmp_path / folder
        parent.mkdir()
        if folder == "ours":
            monkeypatch.setenv("VARVE_SCRATCH", str(parent))
        transport = HttpTransport(RealEnv(), "http://127.0.0.1:1", "run", "token")
        job = clean_job([[SourceSegment(0, 1, 100, 0, 0)]])
        assert parent in Path(transport.outputs(job, "out")).parents
        transport.close()
        assert list(parent.iterdir()) == []


def test_a_descriptor_of_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown transport kind 'pigeon'"):
        open_transport(RealEnv(), {"kind": "pigeon"})


# --- the lease ------------------------------------------------------------------------------------


async def test_a_run_is_kept_alive_as_long_as_it_is_open(env: MemoryEnv) -> None:
    renewed = threading.Event()

    def work(leases: LeaseClient) -> None:
        with leases.open("orders", ttl_seconds=1):
            assert renewed.wait(20)

    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        renew, count = broker.leases.renew, []

        def noted(*args: Any) -> Any:
            count.append(1)
            if len(count) == 3:
                renewed.set()
            return renew(*args)

        broker.leases.renew = noted  # type: ignore[method-assign]
        await driven(broker, work)
        await settled(broker)
        assert staged(env) == []  # it was given up at the end of its block
        assert broker.pool.in_progress.states() == {}


async def test_a_run_that_became_stale_says_so_and_has_changed_nothing(env: MemoryEnv) -> None:
    def work(leases: LeaseClient) -> None:
        with leases.open("orders") as lease:
            clean_elsewhere(lease)
            broker_cut.set()
            assert was_cut.wait(20)
            (result,) = lease.adopt()
            assert result.outcome is AdoptOutcome.STALE
            assert "was truncated" in result.reason

    broker_cut, was_cut = threading.Event(), threading.Event()
    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        driver = asyncio.create_task(driven(broker, work))
        await asyncio.to_thread(broker_cut.wait, 20)
        served(broker).log.truncate_to(15, now_ms=env.wall_ms())
        files = log_files(env)
        was_cut.set()
        await driver
        assert log_files(env) == files


async def test_the_end_of_its_lease_is_why_a_task_failed(env: MemoryEnv) -> None:
    """Also before the lease is to be renewed. Code 3 says: try again."""

    def fail_in(lease: Lease) -> None:
        with lost_lease_reported(lease):
            raise StageFailedError("index", "a file is gone")

    def work(leases: LeaseClient) -> None:
        with leases.open("orders") as lease:
            with pytest.raises(StageFailedError):
                fail_in(lease)
            leases.reopen(lease.plan.compaction_id).abandon()
            with pytest.raises(LeaseLostError, match="has ended: a request ended its lease"):
                fail_in(lease)

    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        await driven(broker, work)


async def test_a_lease_that_one_partition_lost_is_lost(env: MemoryEnv) -> None:
    class PartlyStaleClient(SlowClient):
        def post(self, path: str, body: Any = None) -> Any:
            rows = [("open", ""), ("stale", "its log was truncated")]
            return {
                "partitions": [
                    {"partition": n, "state": state, "reason": reason}
                    for n, (state, reason) in enumerate(rows)
                ]
            }

    def work(leases: LeaseClient) -> None:
        with leases.open("orders") as lease:
            plan = lease.plan
        lease = Lease(PartlyStaleClient(), plan, ttl_seconds=600)
        with pytest.raises(LeaseLostError, match="orders-1 has ended: its log was truncated"):
            lease.confirm()
        lease.end()

    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        await driven(broker, work)


async def test_tampered_output_is_refused_as_invalid(env: MemoryEnv) -> None:
    def work(leases: LeaseClient) -> None:
        with leases.open("orders") as lease:
            job, (group,) = clean_elsewhere(lease)
            assert group.output is not None
            name = group.output.files[0].name
            path = f"{job.directory.rpartition('/')[0]}/out/attempt-1/{name}"
            file = env.open(path, write=True)
            file.pwrite(b"\xff", 70)
            (result,) = lease.adopt()
            assert result.outcome is AdoptOutcome.INVALID
            assert "at byte" in result.reason
            assert lease.status()["state"] == "invalid"

    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        files = log_files(env)
        await driven(broker, work)
        assert log_files(env) == files


async def test_a_partition_that_somebody_has_cannot_be_leased(env: MemoryEnv) -> None:
    def work(leases: LeaseClient) -> None:
        with leases.open("orders") as first:
            with pytest.raises(LeaseLostError, match=first.plan.compaction_id):
                leases.open("orders")
            with leases.open("orders", purpose=Purpose.READ) as reading:
                assert first.status()["state"] == reading.status()["state"] == "open"

    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        await driven(broker, work)


async def test_without_anything_to_do_a_run_is_over_at_once_and_adopts_nothing(
    env: MemoryEnv,
) -> None:
    def work(leases: LeaseClient) -> None:
        with leases.open("orders", ttl_seconds=1) as lease:
            assert lease.plan.partitions == ()
            assert lease.is_over
            lease.check()
            assert lease.adopt() == []

    async with leasing_broker(env) as broker:
        await driven(broker, work)


async def test_what_was_not_handed_back_is_not_adopted(env: MemoryEnv) -> None:
    def work(leases: LeaseClient) -> None:
        with leases.open("orders") as lease:
            (result,) = lease.adopt()
            assert result.outcome is AdoptOutcome.NOTHING
            assert "no manifest" in result.reason

    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        await driven(broker, work)


async def test_a_run_that_is_left_waits_for_its_adoption_also_behind_a_restart(
    env: MemoryEnv,
) -> None:
    def leave(leases: LeaseClient) -> str:
        with leases.open("orders", ttl_seconds=10) as lease:
            clean_elsewhere(lease)
            lease.leave(600)
            return lease.plan.compaction_id

    async with leasing_broker(env) as broker:
        fill(env, broker, 2)
        compaction_id = await driven(broker, leave)
        await settled(broker)
    async with leasing_broker(env) as broker:
        env.advance_ms(599_000)
        broker.leases.expire_due()
        results = await driven(broker, lambda leases: leases.reopen(compaction_id).adopt())
        assert [result.outcome for result in results] == [AdoptOutcome.ADOPTED]


class SlowClient(ApiClient):
    """Its first renewal arrives late; in which order they come is what counts."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.is_asked = threading.Event()
        self.may_arrive = threading.Event()
        self.arrived: list[int] = []

    def below(self, path: str) -> "SlowClient":
        return self

    def post(self, path: str, body: Any = None) -> Any:
        if not self.is_asked.is_set():
            self.is_asked.set()
            assert self.may_arrive.wait(20)
        self.arrived.append(body["ttl_seconds"])
        return {}


def test_no_renewal_that_is_under_way_shortens_the_time_of_a_run_that_is_left() -> None:
    client = SlowClient()
    lease = Lease(client, LeasePlan("r", "", Purpose.COMPACT, 0, 0, "", ()), ttl_seconds=1)
    assert client.is_asked.wait(20)
    threading.Timer(0.2, client.may_arrive.set).start()
    lease.leave(600)
    assert client.may_arrive.wait(20)
    lease.close()
    assert client.arrived == [1, 600]


async def test_what_is_not_there_is_no_log_that_went_on(env: MemoryEnv) -> None:
    """Code 3 says: try again. That would be in vain."""
    async with leasing_broker(env) as broker:
        for topic, partitions in (("nothing", None), ("orders", [99])):
            with pytest.raises(LeaseRequestError) as error:
                await driven(
                    broker,
                    lambda leases, t=topic, p=partitions: leases.open(t, p),  # type: ignore[misc]
                )
            assert error.value.code == exit_codes.FAILED


def test_without_a_broker_there_is_a_code_of_its_own() -> None:
    with pytest.raises(BrokerUnreachableError) as error:
        LeaseClient(ApiClient("http://127.0.0.1:1")).open("orders")
    assert error.value.code == exit_codes.UNREACHABLE


class RefusingClient(SlowClient):
    """A broker that refuses every renewal, as one does whose users have changed."""

    def post(self, path: str, body: Any = None) -> Any:
        raise ApiRefusedError(403, "you may not")


def test_a_lease_that_could_not_be_renewed_for_its_lifetime_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.client.lease.UNREACHABLE_SECONDS", 0.0)
    plan = LeasePlan("r", "", Purpose.COMPACT, 0, 0, "", ())
    lease = Lease(RefusingClient(), plan, ttl_seconds=0)
    lease._renewal_thread.join(20)
    with pytest.raises(LeaseRequestError, match="you may not"):
        lease.check()
    lease.close()
