"""Random cases: what producers, transactions, operators and time may do to a compacted log.

Everything comes from the seed. A case is a few rounds of: append segments, let time pass, clean,
look. Which kinds of things happen at all is drawn first, so that there are cases with a few kinds
and many of each, and cases with everything.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from storage.format.batch import (
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
)
from tests.compare.script import Case, Operation, Value

START_MS: Final = 1_700_000_000_000
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
WORDS: Final = (b"lorem", b"ipsum", b"dolor", b"sit", b"amet")
TRAITS: Final = {  # what a case may have, and how often
    "codecs": 0.6,
    "tombstones": 0.8,
    "idempotent": 0.6,
    "transactions": 0.6,
    "gaps": 0.3,
    "headers": 0.3,
    "append time": 0.15,
    "keyless": 0.1,
    "small map": 0.1,
    "retention": 0.2,
    "delete records": 0.15,
    "reopen": 0.2,
    "min lag": 0.1,
    "expiry": 0.3,
}


@dataclass
class Producer:
    """An idempotent or transactional producer as its client sees itself."""

    producer_id: int
    epoch: int = 0
    sequence: int = 0
    bumps: bool = False  # every transaction ends with an epoch of its own (KIP-890)
    is_open: bool = False

    def bump(self) -> None:
        self.epoch += 1
        self.sequence = 0


@dataclass
class World:
    """What the generator knows of the log it writes."""

    rng: random.Random
    traits: frozenset[str]
    segment_bytes: int
    keys: list[bytes]
    now_ms: int = START_MS
    next_offset: int = 0
    active_base: int = 0
    active_bytes: int = 0
    leader_epoch: int = 0
    next_producer_id: int = 1000
    idempotent: list[Producer] = field(default_factory=list)
    transactional: list[Producer] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def say(self, name: str, *values: Value) -> None:
        self.operations.append(Operation(name, values))

    def has(self, trait: str) -> bool:
        return trait in self.traits

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def new_producer(self) -> Producer:
        self.next_producer_id += 1
        return Producer(self.next_producer_id, bumps=self.chance(0.5))


def make_case(seed: int, *, without: frozenset[str] = frozenset()) -> Case:
    """The case of a seed; `without` some traits, whatever the seed says."""
    rng = random.Random(seed)
    drawn = frozenset(trait for trait, often in TRAITS.items() if rng.random() < often)
    if "retention" in drawn:
        # What is deleted depends on which segments were merged, and so on sizes after a clean.
        drawn -= {"codecs", "keyless", "small map"}
    traits = drawn - without
    world = World(
        rng,
        traits,
        segment_bytes=rng.choice([1500, 4000, 8000, 40_000]),
        keys=[b"key-%d" % number for number in range(rng.choice([1, 3, 10, 40]))],
    )
    if rng.random() < 0.2:
        world.keys.append(b"")
    world.idempotent = [world.new_producer() for _ in range(rng.choice([1, 3]))]
    world.transactional = [world.new_producer() for _ in range(rng.choice([1, 2, 4]))]
    delete_retention_ms = rng.choice([0, 1000, HOUR_MS, DAY_MS])
    if "small map" in traits:
        delete_retention_ms = HOUR_MS
    _configure(world, delete_retention_ms)
    for _ in range(rng.choice([2, 3, 4, 6])):
        _round(world, delete_retention_ms)
    _last_rounds(world, delete_retention_ms)
    return Case(seed, tuple(world.operations), traits)


def _configure(world: World, delete_retention_ms: int) -> None:
    rng = world.rng
    values = {
        "cleanup.policy": "compact,delete" if world.has("retention") else "compact",
        "internal.segment.bytes": str(world.segment_bytes),
        "delete.retention.ms": str(delete_retention_ms),
        "min.cleanable.dirty.ratio": "0",
        "segment.ms": str(10_000 * DAY_MS),
        "retention.ms": "-1",
        "max.message.bytes": "1048588",
        "index.interval.bytes": str(rng.choice([0, 100, 4096])),
        "file.delete.delay.ms": "0",
    }
    if world.has("retention"):
        values["retention.ms"] = str(rng.choice([HOUR_MS, 6 * HOUR_MS]))
        if rng.random() < 0.5:
            values["retention.bytes"] = str(world.segment_bytes * rng.choice([2, 5]))
    if world.has("min lag"):
        values["min.compaction.lag.ms"] = str(rng.choice([1000, HOUR_MS]))
    world.say("now", world.now_ms)
    world.say("config", *(f"{key}={value}" for key, value in values.items()))


def _round(world: World, delete_retention_ms: int) -> None:
    rng = world.rng
    for _ in range(rng.choice([0, 1, 2, 5])):
        for _ in range(rng.choice([1, 3, 8])):
            _append_something(world)
        _roll(world)
    for _ in range(rng.choice([0, 0, 3])):
        _append_something(world)
    if rng.random() < 0.2:
        _roll(world)
    if world.has("delete records") and world.chance(0.4):
        world.say("delete-records", rng.randrange(world.next_offset + 1))
    if world.has("reopen") and world.chance(0.4):
        _reopen(world)
    _pass_time(world, delete_retention_ms)
    if world.has("expiry") and world.chance(0.3):
        _expire(world)
    _clean(world)


def _last_rounds(world: World, delete_retention_ms: int) -> None:
    """Transactions end, and time passes until tombstones and markers have gone."""
    for producer in world.transactional:
        if producer.is_open and world.chance(0.7):
            _end_transaction(world, producer)
    for _ in range(2):
        _append_something(world)
        _roll(world)
        world.now_ms += delete_retention_ms + 1
        world.say("now", world.now_ms)
        _clean(world)
    if world.has("reopen"):
        _reopen(world)
        world.say("dump")


def _reopen(world: World) -> None:
    how = world.rng.choice(["clean", "unclean"])
    if world.has("delete records") and world.has("transactions"):
        how = "clean"  # see the exceptions: an open transaction that begins below the log start
    world.say("reopen", how)
    if how == "unclean":
        for producer in world.transactional:
            # Of one whose records retention took, a marker of the same epoch would leave nothing
            # but the epoch, and Kafka's leader, like ours, then wants sequence 0.
            producer.bumps = True
    world.say("expire-producers")  # Kafka does so while it loads, we do soon after


def _expire(world: World) -> None:
    """Long enough for every producer that has no transaction open; most begin a new epoch then."""
    world.now_ms += 2 * DAY_MS
    world.say("now", world.now_ms)
    world.say("expire-producers")
    for producer in world.idempotent:
        if world.chance(0.5):
            producer.bump()
    for producer in world.transactional:
        if not producer.is_open:
            producer.bump()  # a marker alone would make the log expect sequence 0


def _clean(world: World) -> None:
    rng = world.rng
    buffer_bytes = rng.choice([1 << 16, 1 << 18])
    slots = rng.choice([4, 8, 20]) if world.has("small map") else 10_000
    # A small map needs several turns, and not as many as the other side's.
    for _ in range(40 if world.has("small map") else 1):
        world.say("clean", slots, buffer_bytes)
    if world.has("retention"):
        world.say("retain")
    world.say("dump")


def _pass_time(world: World, delete_retention_ms: int) -> None:
    step = world.rng.choice([0, 1, 10_000, delete_retention_ms // 2, delete_retention_ms, DAY_MS])
    world.now_ms += step + world.rng.choice([0, 1])
    world.say("now", world.now_ms)


def _roll(world: World) -> None:
    if world.active_base == world.next_offset:
        return
    leaps = world.has("gaps") and world.chance(0.2)
    if leaps:
        # Far enough, now and then, that two segments cannot become one.
        world.next_offset += world.rng.choice([1, 100, 1 << 31])
    world.say("roll", world.next_offset)
    world.active_base, world.active_bytes = world.next_offset, 0
    if world.chance(0.2):
        world.leader_epoch += 1
    if leaps:
        _append_plain(world)  # the log ends after the gap only with something there


def _append_something(world: World) -> None:
    kinds: list[Callable[[World], None]] = [_append_plain]
    if world.has("idempotent"):
        kinds.append(_append_idempotent)
    if world.has("transactions"):
        kinds += [_append_transactional, _append_transactional, _end_some_transaction]
    world.rng.choice(kinds)(world)


def _append_plain(world: World) -> None:
    _append(world, _records(world), {})


def _append_idempotent(world: World) -> None:
    producer = world.rng.choice(world.idempotent)
    if world.chance(0.1):
        producer.bump()
    _append_of(world, producer, 0)


def _append_transactional(world: World) -> None:
    producer = world.rng.choice(world.transactional)
    producer.is_open = True
    _append_of(world, producer, TRANSACTIONAL)


def _append_of(world: World, producer: Producer, flags: int) -> None:
    records = _records(world)
    fields = {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
        "base_sequence": producer.sequence,
        "attributes": flags,
    }
    producer.sequence += len(records)
    _append(world, records, fields)


def _end_some_transaction(world: World) -> None:
    producers = [producer for producer in world.transactional if producer.is_open]
    if not producers or world.chance(0.05):
        producers = world.transactional  # a marker for a partition that was never written to
    _end_transaction(world, world.rng.choice(producers))


def _end_transaction(world: World, producer: Producer) -> None:
    kind = world.rng.choice([ControlType.COMMIT, ControlType.ABORT])
    if producer.bumps:
        producer.bump()
    producer.is_open = False
    marker = marker_record(kind, world.rng.choice([0, 0, 3]), world.now_ms)
    fields = {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
        "base_sequence": -1,
        "attributes": TRANSACTIONAL | CONTROL,
    }
    _append(world, [marker], fields)


def _records(world: World) -> list[Record]:
    """Records at the offsets from 0 on."""
    count = world.rng.choice([1, 1, 2, 4, 12])
    return [_record(world, offset) for offset in range(count)]


def _record(world: World, offset: int) -> Record:
    rng = world.rng
    key: bytes | None = rng.choice(world.keys)
    if world.has("keyless") and world.chance(0.1):
        key = None
    value: bytes | None = b"%d-" % world.next_offset + b" ".join(
        rng.choice(WORDS) for _ in range(rng.choice([0, 1, 10]))
    )
    if world.chance(0.03):
        value = b""
    if world.has("tombstones") and world.chance(0.25):
        value = None
    headers: tuple[tuple[str | bytes, bytes | None], ...] = ()
    if world.has("headers") and world.chance(0.3):
        headers = (("name", b"text"), ("none", None), ("", b""))
    return Record(offset, world.now_ms - rng.choice([0, 0, 1, 5000]), key, value, headers)


def _append(world: World, records: list[Record], fields: dict[str, int]) -> None:
    rng = world.rng
    fields = dict(fields)
    attributes = fields.pop("attributes", 0)
    is_control = attributes & CONTROL != 0
    if world.has("append time") and not is_control and world.chance(0.5):
        attributes |= LOG_APPEND_TIME
    codec = rng.randrange(5) if world.has("codecs") and not is_control else 0
    if world.has("gaps") and world.chance(0.1):
        world.next_offset += rng.choice([1, 2, 50])
    placed = [record._replace(offset=world.next_offset + record.offset) for record in records]
    batch = bytes(
        build_batch(
            placed,
            codec=codec,
            attributes=attributes,
            partition_leader_epoch=world.leader_epoch,
            **fields,  # type: ignore[arg-type]
        )
    )
    if world.active_bytes + len(batch) > world.segment_bytes:
        _roll(world)
        placed = [
            record._replace(offset=world.next_offset + at) for at, record in enumerate(records)
        ]
        batch = bytes(
            build_batch(
                placed,
                codec=codec,
                attributes=attributes,
                partition_leader_epoch=world.leader_epoch,
                **fields,  # type: ignore[arg-type]
            )
        )
    world.say("append", world.leader_epoch, batch)
    world.active_bytes += len(batch)
    world.next_offset += len(records)
