"""Idempotent producers: what they send and send again, and how a log has to answer.

A log is expected to know a producer as the batches that are in it say. It may have forgotten one
whose last batch was lost, cut off or removed (`PartitionModel.unsure_producers`). Of batches before
the present process a snapshot has the last one only.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from protocol.errors import ErrorCode
from protocol.produce_codec import ProducedPartition
from storage.format.batch import LARGEST_INT32, BatchHeader, Record, build_batch, read_header
from tests.sim.model import PartitionModel
from tests.sim.world import World
from tests.support.cleaner.history import Batch

KNOWN_BATCHES = 5  # the last batches of a producer, by which a log answers those sent again
FENCED: Final = ErrorCode.INVALID_PRODUCER_EPOCH
OUT_OF_ORDER: Final = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
REFUSALS: Final = frozenset({FENCED, OUT_OF_ORDER})
FIRST_PRODUCER: Final = 1_000
# Where the second producer begins: soon its sequences begin again with 0.
LATE_SEQUENCE: Final = LARGEST_INT32 - 5


@dataclass(frozen=True)
class Expected:
    """What may become of a batch; `offset`: that of the same batch, if it was appended before."""

    appends: bool = False
    offset: int | None = None
    refusals: frozenset[ErrorCode] = frozenset()


def expected(model: PartitionModel, header: BatchHeader) -> Expected:
    """What a log has to do with a batch of a producer."""
    of_producer = [b for b in model.history if b.header.producer_id == header.producer_id]
    same = [
        batch
        for batch in reversed(of_producer)
        if not batch.header.is_control and batch.header.producer_epoch == header.producer_epoch
    ]
    known = next((at for at, batch in enumerate(same) if _is_same(batch.header, header)), None)
    if header.producer_id in model.unsure_producers:
        return Expected(True, None if known is None else same[known].base, REFUSALS)
    if not of_producer:
        return Expected(appends=True)
    epoch = of_producer[-1].header.producer_epoch
    if header.producer_epoch < epoch:
        return Expected(refusals=frozenset({FENCED}))
    out_of_order = frozenset({OUT_OF_ORDER})
    if known is not None and known < KNOWN_BATCHES:
        is_certain = known == 0 or same[known].base >= model.opened_end
        return Expected(
            offset=same[known].base, refusals=frozenset() if is_certain else out_of_order
        )
    following = (same[0].header.last_sequence + 1) & LARGEST_INT32 if same else 0
    if header.base_sequence == following:
        return Expected(appends=True)
    return Expected(refusals=out_of_order)


def _is_same(batch: BatchHeader, other: BatchHeader) -> bool:
    return (batch.base_sequence, batch.last_sequence) == (other.base_sequence, other.last_sequence)


def check_answer(
    model: PartitionModel, batch: Batch, expects: Expected, code: ErrorCode, offset: int
) -> None:
    """Compare the answer to a batch with what was expected, and note that it was appended."""
    if model.is_damaged:
        return  # nothing of it is compared
    header = batch.header
    name = f"{header.base_sequence} of producer {header.producer_id}, epoch {header.producer_epoch}"
    if code in REFUSALS:
        if code not in expects.refusals:
            raise model.fail("producer", f"{name} is refused: {code.name}; expected: {expects}")
        if batch in model.pending:
            model.pending.remove(batch)
    elif code == ErrorCode.NONE and offset != expects.offset:
        if not expects.appends or offset in model.history.batches:
            raise model.fail("producer", f"{name} is at {offset}; expected: {expects}")
        model.acknowledged(batch, offset)
        model.unsure_producers.discard(header.producer_id)


@dataclass
class Producer:
    """The client's side."""

    producer_id: int
    epoch: int = 0
    sequence: int = 0  # of the next record
    sent: list["Sent"] = field(default_factory=list)
    unanswered: "Sent | None" = None

    def begin_epoch(self) -> None:
        self.epoch, self.sequence, self.unanswered = self.epoch + 1, 0, None


@dataclass(frozen=True)
class Sent:
    """A batch, and its bytes."""

    batch: Batch
    data: bytes


class Producers:
    """Two of each topic, each of which waits for its answers."""

    def __init__(
        self,
        world: World,
        placed: Callable[[list[tuple[bytes, bytes | None]]], list[Record]],
        send: Callable[[str, bytearray], Awaitable[ProducedPartition]],
    ) -> None:
        self._world = world
        self._placed = placed
        self._send = send
        self._of_topic: dict[str, tuple[Producer, ...]] = {}

    async def carry_out(
        self,
        name: str,
        *,
        producer: int,
        how: str,
        back: int,
        records: list[tuple[bytes, bytes | None]],
        codec: int,
    ) -> None:
        """`how`: one of script.SENDS; `back`: which batch is sent again, 0 for the last."""
        model = self._world.models.get(name)
        if model is None or model.deleting or model.is_damaged or not model.topic_id:
            return
        sender = self._find(name, producer)
        if sender.unanswered is not None:
            await self._deliver(name, model, sender, sender.unanswered)
            return
        if how == "again":
            if sender.sent:
                await self._judge(name, model, sender.sent[-1 - back % len(sender.sent)])
                self._world.seen["batch sent again"] += 1
            return
        if how == "new epoch":
            sender.begin_epoch()
        epoch, sequence = sender.epoch, sender.sequence
        if how == "gap":
            sequence += 1
        elif how == "old epoch":
            epoch -= 1
        if epoch < 0:
            return
        sent = self._build(sender.producer_id, epoch, sequence, self._placed(records), codec)
        if how in ("gap", "old epoch"):
            code = await self._judge(name, model, sent)
            if code == ErrorCode.NONE:  # the log has not known the producer
                sender.begin_epoch()
            return
        await self._deliver(name, model, sender, sent, times=2 if how == "twice" else 1)

    def _find(self, name: str, producer: int) -> Producer:
        if name not in self._of_topic:
            first = FIRST_PRODUCER + 2 * len(self._of_topic)
            self._of_topic[name] = (Producer(first), Producer(first + 1, 0, LATE_SEQUENCE))
        return self._of_topic[name][producer]

    @staticmethod
    def _build(
        producer_id: int, epoch: int, sequence: int, records: list[Record], codec: int
    ) -> Sent:
        data = build_batch(
            records,
            codec=codec,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence & LARGEST_INT32,
        )
        return Sent(Batch(read_header(data), tuple(records)), bytes(data))

    async def _deliver(
        self, name: str, model: PartitionModel, sender: Producer, sent: Sent, times: int = 1
    ) -> None:
        """Send the next batch, once or on two connections at once, and note what follows."""
        sender.unanswered = sent
        codes = await asyncio.gather(*(self._judge(name, model, sent) for _ in range(times)))
        if ErrorCode.NONE in codes:
            sender.unanswered = None
            sender.sent = [*sender.sent[-7:], sent]
            sender.sequence = (sent.batch.header.last_sequence + 1) & LARGEST_INT32
        elif REFUSALS & set(codes) or ErrorCode.INVALID_TIMESTAMP in codes:
            sender.begin_epoch()

    async def _judge(self, name: str, model: PartitionModel, sent: Sent) -> ErrorCode:
        """Send a batch and compare the answer with the model."""
        batch = sent.batch
        if expected(model, batch.header).appends and batch not in model.pending:
            model.pending.append(batch)
        produced = await self._send(name, bytearray(sent.data))
        code = ErrorCode(produced.error_code)
        if self._world.models.get(name) is not model:
            return code  # of another topic of this name
        self._world.note(f"    answered: {code.name} {produced.base_offset}")
        check_answer(model, batch, expected(model, batch.header), code, produced.base_offset)
        return code
