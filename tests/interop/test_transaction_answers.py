"""Random requests of transactional producers have the same answers and effects as in Kafka.

A history is a list of requests from a seed: of current and former epochs, of clients of both
versions of the protocol (KIP-98, KIP-890), in any order. It runs against Kafka 4.3.0 and against
this broker; after each request the transaction is the same, and at the end so are the committed
records and offsets.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pytest
from confluent_kafka import Consumer, TopicPartition

from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.format.batch import Record, build_batch
from tests.interop.both_brokers import GROUP, TRANSACTION, create_topics, find_coordinator
from tests.support.draws import seeds_of_tests
from tests.support.peers.kafka import KafkaBroker
from tests.support.protocol.raw_client import RawClient
from tests.support.reading import read_topics
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

SEEDS = seeds_of_tests("VARVE_TRANSACTION_SEEDS", few=10, many=40)
STEPS: Final = 30
pytestmark = pytest.mark.xdist_group("kafka beside")
PARTITIONS: Final = 2
TRANSACTIONAL: Final = 1 << 4  # of a batch's attributes
NOW_MS: Final = 1_700_000_000_000
# The request is sent again, as clients do, until the answer is another one.
REPEATED: Final = (
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
)


# The versions that clients of one version of the protocol send.
V1_VERSIONS: Final = {
    "INIT_PRODUCER_ID": (3, 4), "ADD_PARTITIONS_TO_TXN": (1, 3), "ADD_OFFSETS_TO_TXN": (1, 3),
    "TXN_OFFSET_COMMIT": (3, 4), "END_TXN": (1, 4), "PRODUCE": (10, 11),
}  # fmt: skip
V2_VERSIONS: Final = {
    "INIT_PRODUCER_ID": (5,), "ADD_PARTITIONS_TO_TXN": (3,), "ADD_OFFSETS_TO_TXN": (4,),
    "TXN_OFFSET_COMMIT": (5,), "END_TXN": (5,), "PRODUCE": (12,),
}  # fmt: skip


class Identity(NamedTuple):
    """A producer: the number of the answer that had its id first, and its epoch."""

    number: int
    epoch: int


NOBODY: Final = Identity(-1, -1)


class Result(NamedTuple):
    """An answer, and the transaction once no marker is missing."""

    error: str
    producer: Identity
    state: str
    partitions: tuple[tuple[str, int], ...]
    owner: Identity


@dataclass
class Side:
    """One broker, asked by one connection."""

    client: RawClient
    name: str
    producer_ids: list[int] = field(default_factory=list)
    sequences: defaultdict[tuple[Identity, int], int] = field(
        default_factory=lambda: defaultdict(int)
    )

    @property
    def topic(self) -> str:
        return f"topic-{self.name}"

    @property
    def group(self) -> str:
        return f"group-{self.name}"

    def identity(self, producer_id: int, epoch: int) -> Identity:
        if producer_id < 0:
            return NOBODY
        if producer_id not in self.producer_ids:
            self.producer_ids.append(producer_id)
        return Identity(self.producer_ids.index(producer_id), epoch)

    def id_of(self, producer: Identity) -> int:
        return self.producer_ids[producer.number] if producer.number >= 0 else -1

    def ask(self, step: "Step", version: int, body: Any, code: Any) -> Result:
        """Send a request until it is answered for good; `code` is the error of a response."""
        responses: list[Any] = []

        def is_final() -> bool:
            responses.append(self.client.request(step.api, version, body))
            return code(responses[-1]) not in REPEATED

        try:
            wait_until(is_final, step.text, 3)
        except AssertionError:  # the last answer is compared
            assert responses
        response = responses[-1]
        producer = self.identity(
            getattr(response, "producer_id", -1), getattr(response, "producer_epoch", -1)
        )
        return Result(ErrorCode(code(response)).name, producer, *self.transaction())

    def transaction(self) -> tuple[str, tuple[tuple[str, int], ...], Identity]:
        """Return the state, the partitions and the producer, without unwritten markers."""
        rows: list[Any] = []

        def is_settled() -> bool:
            request = m.DescribeTransactionsRequest(transactional_ids=[self.name])
            answer: Any = self.client.request(ApiKey.DESCRIBE_TRANSACTIONS, 0, request)
            rows.append(answer.transaction_states[0])
            return "Prepare" not in rows[-1].transaction_state

        wait_until(is_settled, f"the markers of {self.name}")
        row = rows[-1]
        # The partition of a group depends on the number of partitions alone, which is the same.
        partitions = sorted((topic.topic, n) for topic in row.topics for n in topic.partitions)
        owner = self.identity(row.producer_id, row.producer_epoch)
        return row.transaction_state, tuple(partitions), owner


@dataclass(frozen=True)
class Step:
    """One request of a history."""

    kind: str
    version: int
    producer: Identity
    partition: int = 0
    commit: bool = False
    value: bytes = b""

    @property
    def api(self) -> ApiKey:
        return ApiKey[self.kind]

    @property
    def text(self) -> str:
        return f"{self.kind} {self.version} of {tuple(self.producer)}, {self.commit=}"

    def send(self, side: Side) -> Result:
        identity = {
            "transactional_id": side.name,
            "producer_id": side.id_of(self.producer),
            "producer_epoch": self.producer.epoch,
        }
        body: Any
        match self.api:
            case ApiKey.INIT_PRODUCER_ID:
                body = m.InitProducerIdRequest(transaction_timeout_ms=60_000, **identity)
                return side.ask(self, self.version, body, lambda answer: answer.error_code)
            case ApiKey.ADD_PARTITIONS_TO_TXN:
                topic = m.AddPartitionsToTxnRequestTopicV3(
                    name=side.topic, partitions=[self.partition]
                )
                body = m.AddPartitionsToTxnRequest(
                    v3_and_below_topics=[topic],
                    **{f"v3_and_below_{name}": value for name, value in identity.items()},
                )
                return side.ask(self, self.version, body, _code_of_added)
            case ApiKey.ADD_OFFSETS_TO_TXN:
                body = m.AddOffsetsToTxnRequest(group_id=side.group, **identity)
                return side.ask(self, self.version, body, lambda answer: answer.error_code)
            case ApiKey.TXN_OFFSET_COMMIT:
                row = m.TxnOffsetCommitRequestPartition(
                    partition_index=0, committed_offset=int(self.value)
                )
                offsets = m.TxnOffsetCommitRequestTopic(name=side.topic, partitions=[row])
                body = m.TxnOffsetCommitRequest(
                    group_id=side.group, generation_id=-1, topics=[offsets], **identity
                )
                return side.ask(
                    self,
                    self.version,
                    body,
                    lambda answer: answer.topics[0].partitions[0].error_code,
                )
            case ApiKey.END_TXN:
                body = m.EndTxnRequest(committed=self.commit, **identity)
                return side.ask(self, self.version, body, lambda answer: answer.error_code)
            case _:
                return self._produce(side)

    def _produce(self, side: Side) -> Result:
        where = (self.producer, self.partition)
        batch = build_batch(
            [Record(0, NOW_MS, b"key", self.value, ())],
            producer_id=side.id_of(self.producer),
            producer_epoch=self.producer.epoch,
            base_sequence=side.sequences[where],
            attributes=TRANSACTIONAL,
        )
        data = m.ProduceRequestPartition(index=self.partition, records=bytes(batch))
        body = m.ProduceRequest(
            transactional_id=side.name,
            acks=-1,
            timeout_ms=10_000,
            topic_data=[m.ProduceRequestTopic(name=side.topic, partition_data=[data])],
        )
        result = side.ask(self, self.version, body, _code_of_produced)
        side.sequences[where] += result.error == "NONE"
        return result


def _code_of_added(answer: Any) -> int:
    return int(answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code)


def _code_of_produced(answer: Any) -> int:
    return int(answer.responses[0].partition_responses[0].error_code)


def next_step(rng: random.Random, number: int, known: list[Identity], is_v2: bool) -> Step:
    """Return a request that fits what was answered so far, or one of a former producer."""
    producer = rng.choice(known) if rng.random() < 0.3 else known[-1]
    value = b"%d" % number
    kind = rng.choices(
        ["INIT_PRODUCER_ID", "ADD_PARTITIONS_TO_TXN", "ADD_OFFSETS_TO_TXN", "TXN_OFFSET_COMMIT",
         "END_TXN", "PRODUCE"],
        [1.5, 2, 1, 2, 3.5, 5],
    )[0]  # fmt: skip
    if rng.random() < 0.1:
        is_v2 = not is_v2  # another client, of another version
    versions = (V2_VERSIONS if is_v2 else V1_VERSIONS)[kind]
    if kind == "INIT_PRODUCER_ID" and rng.random() < 0.5:
        producer = NOBODY
    return Step(
        kind, rng.choice(versions), producer, rng.randrange(PARTITIONS), rng.random() < 0.6, value
    )


def run_history(seed: int, sides: tuple[Side, Side]) -> None:
    rng = random.Random(seed)
    is_v2 = rng.random() < 0.6
    known: list[Identity] = []
    trace: list[str] = []
    for side in sides:
        find_coordinator(side.client, TRANSACTION, side.name)
        find_coordinator(side.client, GROUP, side.group)
    for number in range(STEPS):
        step = (
            next_step(rng, number, known, is_v2)
            if known
            else Step("INIT_PRODUCER_ID", 5 if is_v2 else 4, NOBODY)
        )
        kafka, ours = (step.send(side) for side in sides)
        trace.append(f"{step.text}: {kafka}")
        assert ours == kafka, "\n".join([f"seed {seed}", *trace, f"but we: {ours}"])
        if ours.producer != NOBODY and ours.producer not in known:
            known.append(ours.producer)
    for side in sides:  # ends what is open
        Step("INIT_PRODUCER_ID", 4, NOBODY).send(side)


@pytest.mark.timeout(300)  # many histories in CI
def test_transactional_requests_of_any_order_have_the_answers_and_effects_of_kafka(
    kafka_and_varve: tuple[KafkaBroker, VarveBroker],
) -> None:
    print(f"VARVE_TRANSACTION_SEEDS={SEEDS.start}:{SEEDS.stop}")
    names = [f"h{seed}" for seed in SEEDS]
    create_topics(kafka_and_varve, {f"topic-{name}": PARTITIONS for name in names})
    for seed, name in zip(SEEDS, names, strict=True):
        with (
            RawClient(kafka_and_varve[0].port) as kafka,
            RawClient(kafka_and_varve[1].port) as ours,
        ):
            run_history(seed, (Side(kafka, name), Side(ours, name)))
    (kafka_records, kafka_offsets), (records, offsets) = (
        committed(broker.bootstrap, names) for broker in kafka_and_varve
    )
    assert records == kafka_records
    assert offsets == kafka_offsets
    assert sum(map(len, records.values())) > len(SEEDS)
    assert any(offset >= 0 for offset in offsets)


def committed(bootstrap: str, names: list[str]) -> tuple[dict[tuple[str, int], Any], list[int]]:
    """Return what a consumer of committed records gets of each history, and its group's offset."""
    view = read_topics(bootstrap, [f"topic-{name}" for name in names], "read_committed")
    records = {
        where: [(record.offset, record.value) for record in found] for where, found in view.items()
    }
    offsets = []
    for name in names:
        consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": f"group-{name}"})
        (offset,) = consumer.committed([TopicPartition(f"topic-{name}", 0)], timeout=30)
        offsets.append(offset.offset)
        consumer.close()
    return records, offsets
