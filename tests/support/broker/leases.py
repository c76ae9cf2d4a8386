"""Runs outside of the broker: a broker in memory, and somebody who plays the executor."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from broker.app import Broker
from broker.leases.lease_folder import LEASES_FOLDER
from broker.leases.lease_issuer import LeaseRequest
from broker.topics.partition import Partition
from cleaner.engine.clean import run_clean
from cleaner.job import CleanedGroup
from cleaner.remote_compaction import (
    MANIFEST_NAME,
    AdoptResult,
    LeasePlan,
    OutputManifest,
    PartitionPlan,
    Purpose,
    encode_manifest,
)
from storage.env import Env
from storage.format.batch import read_header
from storage.model import TopicPartition
from tests.support.broker.broker_in_memory import broker_settings
from tests.support.broker.views.view_worker import thread_worker
from tests.support.cleaner.cleaning import Recorder
from tests.support.storage.logs import batch_of, read_records
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import put

ORDERS = TopicPartition("orders", 0)
FOLDER = "/disk1/orders-0"
KEYS = 5
RECORDS = 10  # of each segment
COMPACTED = {"cleanup.policy": "compact,delete", "retention.ms": "-1"}
ATTEMPT = "attempt-1"


@asynccontextmanager
async def leasing_broker(
    env: MemoryEnv, *, keys: dict[str, str] | None = None, partitions: int = 1, **settings: Any
) -> AsyncIterator[Broker]:
    """A broker whose worker is a thread, with a compacted topic."""
    topics = {"orders": {"partitions": partitions, "keys": {**COMPACTED, **(keys or {})}}}
    token = settings.pop("token", None)
    broker = Broker(
        broker_settings(**{"topics": topics, **settings}),
        env,
        token=token,
        view_worker=thread_worker(env),
    )
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


def served(broker: Broker, partition: int = 0) -> Partition:
    target_partition = broker.topics.partition(TopicPartition("orders", partition))
    assert target_partition is not None
    return target_partition


def fill(env: MemoryEnv, broker: Broker, segments: int, partition: int = 0) -> Partition:
    """Closed segments of one record a batch, over a few keys, and an empty active one."""
    target_partition = served(broker, partition)
    for _ in range(segments):
        for _ in range(RECORDS):
            append(env, target_partition)
        target_partition.log.roll(env.wall_ms())
    return target_partition


def append(env: MemoryEnv, partition: Partition) -> None:
    end = partition.log.log_end_offset
    batch = batch_of(b"v%d" % end, key=b"k%d" % (end % KEYS), timestamps=[env.wall_ms()])
    partition.append(memoryview(batch), read_header(batch), env.wall_ms())


def latest(partition: Partition) -> dict[bytes | None, bytes | None]:
    """What a reader of the whole log knows at its end."""
    return {record.key: record.value for record in read_records(partition.log)}


async def opened(
    broker: Broker,
    *partitions: int,
    purpose: Purpose = Purpose.COMPACT,
    roll: bool = False,
    ttl_seconds: int = 60,
) -> LeasePlan:
    return await broker.leases.open(
        LeaseRequest("orders", partitions or None, purpose, roll, ttl_seconds)
    )


@dataclass
class Made:
    """What an executor made of one partition."""

    plan: LeasePlan
    part: PartitionPlan
    manifest: OutputManifest

    @property
    def run_folder(self) -> str:
        return self.part.job.directory.rpartition("/")[0]

    def path(self, group: int = 0, kind: int = 0) -> str:
        """A file of the outputs: 0 the log, 1 its index, 2 its time index."""
        output = self.manifest.groups[group].output
        assert output is not None
        return f"{self.run_folder}/out/{self.manifest.folders[group]}/{output.files[kind].name}"

    def leave_manifest(self, env: Env, **changes: object) -> None:
        """As a driver on the same disk does."""
        manifest = replace(self.manifest, **changes)  # type: ignore[arg-type]
        put(env, f"{self.run_folder}/{MANIFEST_NAME}", encode_manifest(manifest))
        env.sync_dir(self.run_folder)


def carried_out(env: MemoryEnv, plan: LeasePlan, index: int = 0, *, attempt: str = ATTEMPT) -> Made:
    """Play the executor on the broker's disk; the manifest is still to be left."""
    part = plan.partitions[index]
    out = f"{part.job.directory.rpartition('/')[0]}/out/{attempt}"
    env.mkdir(out)
    recorder = Recorder()
    report = run_clean(env, replace(part.job, output_directory=out), recorder)
    groups: Sequence[CleanedGroup] = recorder.groups
    manifest = OutputManifest(
        compaction_id=plan.compaction_id,
        partition=part.job.partition,
        topic_id=part.topic_id,
        generation=part.job.generation,
        end_offset=part.job.end_offset,
        folders=(attempt,) * len(groups),
        groups=tuple(groups),
        report=report,
        engine="test",
    )
    return Made(plan, part, manifest)


async def adopted(broker: Broker, plan: LeasePlan, partition: int | None = None) -> AdoptResult:
    """The one result of an adoption."""
    done = False
    while not done:  # it answers before the adoption has ended where that takes long
        done, results, _ = await broker.leases.adoptions.adopt(plan.compaction_id, partition)
    (result,) = results
    return result


async def settled(broker: Broker) -> None:
    """Until what ends in the background has ended."""
    while broker.leases.table.tasks:
        await asyncio.gather(*broker.leases.table.tasks)


def staged(env: MemoryEnv, folder: str = FOLDER) -> list[str]:
    """Names of the runs whose files are there."""
    path = f"{folder}/{LEASES_FOLDER}"
    return env.listdir(path) if env.is_dir(path) else []


def log_files(env: MemoryEnv, folder: str = FOLDER) -> dict[str, bytes]:
    """The partition's folder without what belongs to runs."""
    return {
        name: env.read_file(f"{folder}/{name}")
        for name in env.listdir(folder)
        if not env.is_dir(f"{folder}/{name}")
    }
