"""Random requests of idempotent producers have the same answers and effects as in Kafka.

A history is a list of produce requests from a seed: the next batch of a producer, one that came
before, one that leaves a gap, one of another epoch; between them, records are deleted from the
front of the log. It runs against Kafka 4.3.0 and against this broker. Source: KIP-98, KIP-360.
"""

import random
from dataclasses import dataclass
from typing import Any, Final

import pytest

from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.format.batch import Record, build_batch
from tests.interop.both_brokers import create_topics
from tests.support.draws import seeds_of_tests
from tests.support.peers.kafka import KafkaBroker
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

SEEDS = seeds_of_tests("VARVE_PRODUCER_SEEDS", few=10, many=40)
STEPS: Final = 40
pytestmark = pytest.mark.xdist_group("kafka beside")
PRODUCERS: Final = 3
NOW_MS: Final = 1_700_000_000_000
SEQUENCE_MAX: Final = 2**31 - 1


@dataclass
class Batch:
    """A batch of a history; brokers take any producer id."""

    producer: int
    epoch: int
    sequence: int
    count: int
    value: bytes
    timestamp: int

    @property
    def next_sequence(self) -> int:
        return (self.sequence + self.count) % (SEQUENCE_MAX + 1)

    def encoded(self) -> bytes:
        records = [
            Record(number, self.timestamp, b"key", self.value, ()) for number in range(self.count)
        ]
        batch = build_batch(
            records,
            producer_id=self.producer,
            producer_epoch=self.epoch,
            base_sequence=self.sequence,
        )
        return bytes(batch)


def next_batch(rng: random.Random, number: int, sent: list[Batch]) -> Batch:
    """Return a batch that a producer may send next, correct or not."""
    value, count = b"%d" % number, rng.randint(1, 3)
    producer = rng.randrange(PRODUCERS)
    of_producer = [batch for batch in sent if batch.producer == producer]
    timestamp = NOW_MS + rng.randrange(-5, 5) * 1000
    if not of_producer:
        first = rng.choice([0, 0, 0, 5, SEQUENCE_MAX - 3])
        return Batch(producer, rng.choice([0, 0, 2]), first, count, value, timestamp)
    last = of_producer[-1]
    match rng.choices(["next", "again", "gap", "epoch"], [6, 3, 1, 2])[0]:
        case "next":
            return Batch(producer, last.epoch, last.next_sequence, count, value, timestamp)
        case "again":
            return rng.choice(of_producer[-8:])
        case "gap":
            sequence = (last.next_sequence + rng.choice([-2, 1, 2])) % (SEQUENCE_MAX + 1)
            return Batch(producer, last.epoch, sequence, count, value, timestamp)
        case _:
            epoch = max(0, last.epoch + rng.choice([-1, 1, 1, 2]))
            first = rng.choice([0, 0, last.next_sequence, 7])
            return Batch(producer, epoch, first, count, value, timestamp)


class Side:
    """One broker, asked by one connection."""

    def __init__(self, client: RawClient, topic: str) -> None:
        self._client = client
        self._topic = topic

    def produce(self, batch: Batch) -> tuple[str, int, int]:
        answers = []

        def is_served() -> bool:
            answers.append(self._client.produce(self._topic, batch.encoded()))
            return answers[-1].error_code != ErrorCode.NOT_LEADER_OR_FOLLOWER

        wait_until(is_served, f"{self._topic} is served")
        answer = answers[-1]
        return ErrorCode(answer.error_code).name, answer.base_offset, answer.log_start_offset

    def delete_before(self, offset: int) -> tuple[str, int]:
        row = m.DeleteRecordsRequestPartition(partition_index=0, offset=offset)
        topic = m.DeleteRecordsRequestTopic(name=self._topic, partitions=[row])
        body = m.DeleteRecordsRequest(topics=[topic], timeout_ms=10_000)
        answer: Any = self._client.request(ApiKey.DELETE_RECORDS, 2, body)
        row = answer.topics[0].partitions[0]
        return ErrorCode(row.error_code).name, row.low_watermark

    def producers(self) -> list[tuple[int, int, int, int]]:
        """Return id, epoch, last sequence and last timestamp of each producer in the log."""
        topic = m.DescribeProducersRequestTopic(name=self._topic, partition_indexes=[0])
        body = m.DescribeProducersRequest(topics=[topic])
        answer: Any = self._client.request(ApiKey.DESCRIBE_PRODUCERS, 0, body)
        return sorted(
            (
                row.producer_id,
                row.producer_epoch,
                row.last_sequence,
                row.last_timestamp,
            )
            for row in answer.topics[0].partitions[0].active_producers
        )


def run_history(seed: int, kafka: Side, ours: Side) -> list[str]:
    rng = random.Random(seed)
    sent: list[Batch] = []
    trace: list[str] = []
    errors: list[str] = []
    end = 0
    for number in range(STEPS):
        if end and rng.random() < 0.08:
            offset = rng.randint(0, end + 1)
            expected: Any = kafka.delete_before(offset)
            result: Any = ours.delete_before(offset)
            trace.append(f"delete before {offset}: {expected}")
        else:
            batch = next_batch(rng, number, sent)
            expected, result = kafka.produce(batch), ours.produce(batch)
            trace.append(f"{batch}: {expected}")
            errors.append(expected[0])
            if expected[0] == "NONE":
                sent.append(batch)
                end = max(end, expected[1] + batch.count)
        story = "\n".join([f"seed {seed}", *trace])
        assert result == expected, f"{story}\nbut we: {result}"
        state = kafka.producers()
        assert ours.producers() == state, f"{story}\n{state=}, but we: {ours.producers()}"
    return errors


@pytest.mark.timeout(300)  # many histories in CI
def test_batches_of_producers_in_any_order_have_the_answers_and_effects_of_kafka(
    kafka_and_varve: tuple[KafkaBroker, VarveBroker],
) -> None:
    print(f"VARVE_PRODUCER_SEEDS={SEEDS.start}:{SEEDS.stop}")
    topics = [f"batches-{seed}" for seed in SEEDS]
    create_topics(kafka_and_varve, dict.fromkeys(topics, 1))
    errors = set[str]()
    for seed, topic in zip(SEEDS, topics, strict=True):
        with (
            RawClient(kafka_and_varve[0].port) as kafka,
            RawClient(kafka_and_varve[1].port) as ours,
        ):
            errors.update(run_history(seed, Side(kafka, topic), Side(ours, topic)))
    assert errors >= {"NONE", "OUT_OF_ORDER_SEQUENCE_NUMBER", "INVALID_PRODUCER_EPOCH"}
