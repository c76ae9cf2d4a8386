"""What clients, operators and the clock do to a broker; one method for each kind of operation."""

import asyncio
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from broker.handlers.produce import _produce_one
from broker.leases.lease_issuer import LeaseRequest
from broker.security.principal import ANONYMOUS
from broker.topics.end_transaction import abort_hanging, has_open_transaction
from cleaner.engine.clean import run_clean
from cleaner.remote_compaction import MANIFEST_NAME, OutputManifest, Purpose, encode_manifest
from protocol.codec import RequestHeader
from protocol.errors import ErrorCode, code_of
from protocol.produce_codec import ProducedPartition
from storage.errors import (
    InvalidProducerEpochError,
    LogDirectoryError,
    NoRoomError,
    OutOfOrderSequenceError,
)
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
    read_header,
)
from storage.model import TopicPartition
from tests.sim.interleaving import CrashPoint, Fault
from tests.sim.model import PartitionModel
from tests.sim.producers import Producers, check_answer, expected
from tests.sim.repairs import Repairs
from tests.sim.script import Operation
from tests.sim.world import World
from tests.support.broker.principals import make_context
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.history import Batch
from tests.support.storage.swaps import put

OPEN_MAX = 3  # transactions of a topic


@dataclass
class OpenTransaction:
    """A transaction, and how it is to end."""

    producer_id: int
    commits: bool
    sequence: int = 0


class Operations:
    """Carries out the operations of a script, and tells the models what was acknowledged."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._repairs = Repairs(world)
        self._producers = Producers(world, self._placed, self._send)
        self._next_producer = 100
        self._open: dict[str, list[OpenTransaction]] = {}  # to be ended, by topic

    # One branch for each operation.
    async def carry_out(self, operation: Operation) -> None:  # noqa: C901, PLR0912, PLR0915
        name, values = operation.topic, operation.values
        match operation.kind:
            case "create":
                await self._create(name, values["config"])
            case "produce" | "delete key" | "big":
                await self._produce(name, values["records"], values["codec"])
            case "burst":
                for record in values["records"]:
                    await self._produce(name, [record], values["codec"])
                self._roll(name)
            case "transaction":
                self._transact(name, **values)
            case "idempotent":
                await self._producers.carry_out(name, **values)
            case "roll":
                self._roll(name)
            case "clean":
                if values["rolls"]:
                    self._roll(name)
                self._world.broker.pool.operator.request_clean(TopicPartition(name, 0))
            case "view":
                await self._compact_view(name, **values)
            case "alter":
                await self._alter(name, values["changes"])
            case "delete records":
                self._delete_records(name, values["share"])
            case "lease":
                self._world.begin(functools.partial(self._lease, name, **values))
            case "erase":
                await self._erase(name, **values)
            case "replace topic":
                await self._replace(name, **values)
            case "move":
                await self._move(name, **values)
            case "rot":
                self._repairs.rot(name, **values)
            case "skip":
                await self._repairs.skip(name)
            case "truncate":
                await self._repairs.truncate(name, **values)
                if self._world.models.get(name) is not None and not self._world.script.leaves_open:
                    await self.end_transactions(name)
            case "wait":
                await asyncio.sleep(values["seconds"])
            case "end at" | "end in swap":
                self._world.env.crash_point = CrashPoint(*values["point"])
                self._world.how, self._world.losses = values["how"], values["loses"]
            case "full disk":
                self._world.env.fill_disk(**values)
            case "clock":
                if values["while_down"]:
                    self._world.clock_set_ms = values["by_ms"]
                else:
                    self._world.env.set_clock(values["by_ms"])
            case "fault":
                self._world.env.fault = Fault(
                    values["errno"], values["operations"], values["countdown"]
                )
            case other:
                raise AssertionError(other)

    # Topics -------------------------------------------------------------------------------

    async def _create(self, name: str, config: dict[str, str]) -> None:
        partition_model = self._world.models.get(name)
        if self._world.broker.topics.get(name) is not None or (
            partition_model and not partition_model.topic_id
        ):
            return  # it is there, or is being made
        model = self._world.models[name] = PartitionModel(TopicPartition(name, 0), b"")
        topic = await self._world.broker.metadata_service.create(name, 1, config)
        model.topic_id = topic.topic_id
        model.log = self._world.broker.manager.table.logs.get(model.where)
        self._world.note_config(name)

    async def _alter(self, name: str, changes: dict[str, str]) -> None:
        topic = self._world.broker.topics.get(name)
        if topic is None:
            return
        model, now_ms = self._world.models[name], self._world.env.clock.passed_ms
        retention = changes.get("delete.retention.ms")
        if retention is not None:  # in force some time from now on
            model.retention.append((now_ms, int(retention)))
        model.expiry_ms.add(int(changes.get("retention.ms", "-1")))
        if "min.compaction.lag.ms" in changes:
            model.note_lag(0, now_ms)  # until it is in force
        try:
            await self._world.broker.metadata_service.alter(
                name, lambda dynamic: {**dynamic, **changes}
            )
        except NoRoomError:  # nothing was changed
            if retention is not None:
                model.retention.pop()
            raise
        if "min.compaction.lag.ms" in changes and self._world.models.get(name) is model:
            model.note_lag(int(changes["min.compaction.lag.ms"]), self._world.env.clock.passed_ms)

    async def _replace(self, name: str, *, waits: bool, config: dict[str, str]) -> None:
        model = self._world.models.get(name)
        if model is None or model.deleting or not model.topic_id:
            return  # another one is under way
        model.deleting = True
        work = functools.partial(self._delete_and_create, name, config)
        if waits:
            await work()
        else:
            self._world.begin(work)

    async def _delete_and_create(self, name: str, config: dict[str, str]) -> None:
        await self._world.broker.metadata_service.delete(name)
        self._world.models.pop(name, None)
        self._open.pop(name, None)
        await self._create(name, config)

    async def _move(self, name: str, *, waits: bool) -> None:
        """To the directory where the replica is not; again to and fro when it moves already."""
        broker, partition = self._world.broker, self._world.served(name)
        if partition is None:
            return
        here = broker.manager.table.find_directory(partition.partition)
        targets = [d for d in broker.manager.table.directories if d is not here and d.is_online]
        if targets:
            broker.moves.request(partition, targets[0])
        task = broker.moves._tasks.get(partition)
        if waits and task is not None:
            await asyncio.wait([task])

    def _delete_records(self, name: str, share: float) -> None:
        partition = self._world.served(name)
        if partition is None or not partition.log.config.deletes:
            return
        log, model = partition.log, self._world.models[name]
        before_offset = log.log_start_offset + int(
            (log.high_watermark - log.log_start_offset) * share
        )
        model.deleted_to = max(model.deleted_to, before_offset)
        log.delete_records(before_offset)

    def _roll(self, name: str) -> None:
        partition = self._world.served(name)
        if partition is None:
            return
        try:
            partition.log.roll(self._world.env.wall_ms())
        except LogDirectoryError as error:
            self._world.broker.failed_directories.fail(error)

    # Clients ------------------------------------------------------------------------------

    async def _produce(
        self, name: str, pairs: list[tuple[bytes, bytes | None]], codec: int
    ) -> None:
        model = self._world.models.get(name)
        if model is None or model.deleting or not model.topic_id:
            return
        records = self._placed(pairs)
        sent = Batch(read_header(build_batch(records, codec=codec)), tuple(records))
        data = build_batch(records, codec=codec, max_timestamp=_claimed_timestamp(records))
        model.pending.append(sent)
        produced = await self._send(name, data)
        if produced.error_code == 0:
            model.acknowledged(sent, produced.base_offset)

    async def _send(self, name: str, data: bytearray) -> ProducedPartition:
        """Send a batch as a client does; return the answer."""
        context = make_context(self._world.broker)
        header = RequestHeader(0, 9, 1, "simulation", 0)
        produced = _produce_one(context, header, -1, name, (0, memoryview(data)))
        if not isinstance(produced, ProducedPartition):
            produced = await produced
        if produced.error_code != 0:
            self._world.note(f"    not produced: {produced.error_code} {produced.error_message}")
        return produced

    def _placed(self, pairs: list[tuple[bytes, bytes | None]]) -> list[Record]:
        """Records of now; in runs with versions some are late by up to some seconds."""
        now_ms, results = self._world.env.wall_ms(), []
        for at, (key, value) in enumerate(pairs):
            headers: tuple[tuple[str, bytes | None], ...] = ()
            late_ms = 0
            if self._world.script.has_versions:
                late_ms = sum(key + (value or b"-")) % 5 * 2_000
                headers = (("version", struct.pack(">q", now_ms - late_ms)),)
            results.append(Record(at, now_ms - late_ms, key, value, headers))
        return results

    def _transact(
        self,
        name: str,
        *,
        records: list[tuple[bytes, bytes | None]],
        codec: int,
        commits: bool,
        batches: int,
        keeps: bool = False,
        joins: bool = False,
    ) -> None:
        """End what is open, then begin another transaction.

        `keeps`: only the oldest of too many ends; `joins`: the newest goes on.
        """
        opened = self._open.setdefault(name, [])
        while len(opened) > (OPEN_MAX if keeps else 0):
            self._write_marker(name, opened[0])
            opened.pop(0)
        if not (joins and opened):
            self._next_producer += 1
            opened.append(OpenTransaction(self._next_producer, commits))
        transaction = opened[-1]
        for _ in range(batches):
            placed = self._placed(records)
            data = build_batch(
                placed,
                codec=codec,
                producer_id=transaction.producer_id,
                producer_epoch=0,
                base_sequence=transaction.sequence,
                attributes=TRANSACTIONAL,
            )
            self._append(name, data, Batch(read_header(data), tuple(placed)))
            transaction.sequence += len(placed)

    def _write_marker(self, name: str, transaction: OpenTransaction) -> None:
        partition = self._world.served(name)
        if partition is None or not has_open_transaction(partition, transaction.producer_id):
            return  # it was lost with the power, or cut off
        kind = ControlType.COMMIT if transaction.commits else ControlType.ABORT
        data, sent = _marker(transaction.producer_id, 0, kind, self._world.env.wall_ms())
        self._append(name, data, sent)

    def _append(self, name: str, data: bytearray, sent: Batch) -> None:
        """As the coordinator of a cluster that this log came from."""
        model, partition = self._world.models.get(name), self._world.served(name)
        if model is None or partition is None or model.deleting:
            return
        expects = expected(model, sent.header)
        model.pending.append(sent)
        try:
            info = partition.log.append(
                data,
                sent.header,
                now_ms=self._world.env.wall_ms(),
                in_transaction=sent.marker is None,
            )
        except LogDirectoryError as error:
            self._world.broker.failed_directories.fail(error)
            raise
        except (OutOfOrderSequenceError, InvalidProducerEpochError) as error:
            check_answer(model, sent, expects, code_of(error), -1)
            raise
        if sent.marker is None:
            check_answer(model, sent, expects, ErrorCode.NONE, info.first_offset)
        else:
            model.acknowledged(sent, info.first_offset)

    async def end_transactions(self, name: str) -> None:
        """Abort what nobody else will end, as an operator does."""
        model, partition = self._world.models[name], self._world.served(name)
        if partition is None or model.is_damaged or model.deleting:
            return
        self._world.env.full = None  # there has to be room for the markers
        opened = self._open.pop(name, [])
        if self._world.script.leaves_open:
            for transaction in opened:
                self._write_marker(name, transaction)
        while (pending := partition.log.producers.open_transaction()) is not None:
            now_ms, producer_id = self._world.env.wall_ms(), pending[0]
            producer = partition.log.producers.states.producer(producer_id)
            sent = _marker(producer_id, producer.epoch, ControlType.ABORT, now_ms)[1]
            model.pending.append(sent)
            model.acknowledged(sent, await abort_hanging(partition, producer_id, now_ms))

    async def _erase(self, name: str, *, key: bytes, cancels: bool) -> None:
        """Request an erasure; the checks look at the files when it is complete."""
        broker, topic = self._world.broker, self._world.broker.topics.get(name)
        if topic is None or not topic.config.compacts:
            return
        erasure = await broker.erasures.request(
            topic, key, [0], within_ms=60_000, requested_by=ANONYMOUS
        )
        self._world.erased_keys[erasure.erasure_id] = key
        if cancels:
            await broker.erasures.cancel(erasure.erasure_id, "an operator cancelled it")

    # Views and leases ---------------------------------------------------------------------

    async def _compact_view(self, name: str, *, waits: bool, from_scratch: bool) -> None:
        partition = self._world.served(name)
        if partition is None or not partition.log.config.has_view:
            return
        if from_scratch and (not partition.log.config.compacts or self._world.script.has_versions):
            from_scratch = False  # what expired would be lost, as the operator is told
        topic_partition = TopicPartition(name, 0)
        work = functools.partial(
            self._world.broker.view_scheduler.compact, topic_partition, from_scratch=from_scratch
        )
        if waits:
            await work()
        else:
            self._world.begin(work)

    async def _lease(self, name: str, *, seconds: float, rolls: bool, ttl: int) -> None:
        """Somebody compacts outside of the broker, and hands the files back."""
        request = LeaseRequest(name, None, Purpose.COMPACT, rolls, ttl)
        plan = await self._world.broker.leases.open(request)
        for part in plan.partitions:
            folder = part.job.directory.rpartition("/")[0]
            out, recorder = f"{folder}/out/attempt", Recorder()
            self._world.env.mkdir(out)
            job = replace(part.job, output_directory=out)
            call = functools.partial(run_clean, self._world.env, job, recorder)
            fiber = self._world.fibers.start(call, self._world.script.other_worker)
            report = await asyncio.wrap_future(fiber.future)
            manifest = OutputManifest(
                compaction_id=plan.compaction_id,
                partition=job.partition,
                topic_id=part.topic_id,
                generation=job.generation,
                end_offset=job.end_offset,
                folders=("attempt",) * len(recorder.groups),
                groups=tuple(recorder.groups),
                report=report,
                engine="simulation",
            )
            await asyncio.sleep(seconds)
            put(self._world.env, f"{folder}/{MANIFEST_NAME}", encode_manifest(manifest))
            self._world.env.sync_dir(folder)
        _, results, _ = await self._world.broker.leases.adoptions.adopt(plan.compaction_id, None)
        self._world.note(
            f"    adopted: {[(result.outcome.value, result.reason) for result in results]}"
        )
        self._world.seen.update(f"adoption: {result.outcome.value}" for result in results)


def _marker(
    producer_id: int, epoch: int, kind: ControlType, now_ms: int
) -> tuple[bytearray, Batch]:
    """The marker of a transaction: as bytes, and as a model knows it."""
    record = marker_record(kind, 0, now_ms)
    data = build_batch(
        [record],
        producer_id=producer_id,
        producer_epoch=epoch,
        attributes=TRANSACTIONAL | CONTROL,
    )
    return data, Batch(read_header(data), (record,), kind)


# What some clients write into the header of a batch as the largest timestamp; None: the right one.
CLAIMED_TIMESTAMPS: Final = (-1, 1_000, 1 << 62, None, None, None, None, None)


def _claimed_timestamp(records: Sequence[Record]) -> int | None:
    first = records[0]
    return CLAIMED_TIMESTAMPS[sum(first.key or b"") + sum(first.value or b"-") & 7]
