"""Random fetches, with sessions and transactions, have the same answers as in Kafka.

A history is a list of requests from a seed: plain and transactional batches, ends of transactions,
deleted records, and fetches. These are full, incremental, of a wrong session or epoch, with topics
by name or by id. It runs against Kafka 4.3.0 and against this broker. Sources: KIP-74, KIP-98,
KIP-227, KIP-516.
"""

import random
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest

from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.format.batch import Record, build_batch, walk_headers
from tests.interop.both_brokers import TRANSACTION, create_topics, find_coordinator
from tests.support.draws import seeds_of_tests
from tests.support.peers.kafka import KafkaBroker
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

SEEDS = seeds_of_tests("VARVE_FETCH_SEEDS", few=10, many=40)
STEPS: Final = 60
pytestmark = pytest.mark.xdist_group("kafka beside")
TOPICS: Final = ("a", "b")
PARTITIONS: Final = 2
PRODUCERS: Final = ("one", "two")
NOW_MS: Final = 1_700_000_000_000
TRANSACTIONAL: Final = 1 << 4  # of a batch's attributes
EVERYTHING: Final = 1 << 20
UNKNOWN_ID: Final = bytes(range(16))
FIRST_ID_VERSION: Final = 13
READ_COMMITTED: Final = 1
NO_SESSION: Final = -1  # as an epoch


class Place(NamedTuple):
    """A partition of a topic of the history; not every place exists."""

    topic: str
    partition: int


class Fetch(NamedTuple):
    """A fetch: the session that a client means, and the offsets of the partitions it names."""

    version: int
    session: str  # "none", "this" or "unknown"
    epoch: int
    offsets: dict[Place, int]
    forgotten: tuple[Place, ...]
    isolation: int
    max_bytes: int
    partition_bytes: int


class Side:
    """One broker, asked by one connection."""

    def __init__(self, client: RawClient, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._session = 0
        self._producers: dict[str, tuple[int, int]] = {}  # id and epoch, by transactional id
        self._numbers: dict[int, str] = {}  # names of producers, by id
        self._sequences: dict[tuple[str, int, Place], int] = {}
        rows = [m.MetadataRequestTopic(name=prefix + topic) for topic in TOPICS]
        answer: Any = client.request(ApiKey.METADATA, 12, m.MetadataRequest(topics=rows))
        self._ids = {row.name: row.topic_id for row in answer.topics}
        for place in (Place(topic, index) for topic in TOPICS for index in range(PARTITIONS)):
            fetch = Fetch(12, "none", NO_SESSION, {place: 0}, (), 0, 0, 0)
            wait_until(lambda: self.fetch(fetch)[2][0][2] == "NONE", f"{place} is served")  # noqa: B023 - at once

    def produce(self, place: Place, count: int, producer: str | None) -> tuple[str, int]:
        """Produce a batch, of a transaction if there is a producer."""
        producer_id, epoch, sequence, attributes = -1, -1, -1, 0
        if producer is not None:
            if producer not in self._producers:
                self._start(producer)
            producer_id, epoch = self._producers[producer]
            sequence = self._sequences.setdefault((producer, epoch, place), 0)
            self._sequences[producer, epoch, place] += count
            attributes = TRANSACTIONAL
        records = build_batch(
            [Record(number, NOW_MS, b"key", b"value", ()) for number in range(count)],
            attributes=attributes,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )
        row = m.ProduceRequestPartition(index=place.partition, records=bytes(records))
        topic = m.ProduceRequestTopic(name=self._prefix + place.topic, partition_data=[row])
        body = m.ProduceRequest(
            transactional_id=self._full(producer), acks=-1, timeout_ms=10_000, topic_data=[topic]
        )
        answers: list[Any] = []

        def is_final() -> bool:
            answer: Any = self._client.request(ApiKey.PRODUCE, 12, body)
            answers.append(answer.responses[0].partition_responses[0])
            return answers[-1].error_code not in (
                ErrorCode.CONCURRENT_TRANSACTIONS,
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
            )

        wait_until(is_final, f"{place} is served")
        return ErrorCode(answers[-1].error_code).name, answers[-1].base_offset

    def end(self, producer: str, *, commit: bool) -> str:
        """End a transaction, and wait for its markers."""
        producer_id, epoch = self._producers[producer]
        body = m.EndTxnRequest(
            transactional_id=self._full(producer) or "",
            producer_id=producer_id,
            producer_epoch=epoch,
            committed=commit,
        )
        answers: list[Any] = []

        def is_final() -> bool:
            answers.append(self._client.request(ApiKey.END_TXN, 5, body))
            return bool(answers[-1].error_code != ErrorCode.CONCURRENT_TRANSACTIONS)

        wait_until(is_final, f"the end of {producer}")
        if answers[-1].error_code == ErrorCode.NONE:
            self._set(producer, answers[-1])
        wait_until(lambda: self._state(producer) != "Prepare", f"markers of {producer}")
        return ErrorCode(answers[-1].error_code).name

    def delete_before(self, place: Place, offset: int) -> tuple[str, int]:
        row = m.DeleteRecordsRequestPartition(partition_index=place.partition, offset=offset)
        topic = m.DeleteRecordsRequestTopic(name=self._prefix + place.topic, partitions=[row])
        body = m.DeleteRecordsRequest(topics=[topic], timeout_ms=10_000)
        answer: Any = self._client.request(ApiKey.DELETE_RECORDS, 2, body)
        row = answer.topics[0].partitions[0]
        return ErrorCode(row.error_code).name, row.low_watermark

    def fetch(self, fetch: Fetch) -> tuple[str, bool, list[Any]]:
        """Return the error, whether there is a session, and the partitions of the answer."""
        body = m.FetchRequest(
            replica_id=-1,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=fetch.max_bytes,
            isolation_level=fetch.isolation,
            session_id={"none": 0, "this": self._session, "unknown": 12345}[fetch.session],
            session_epoch=fetch.epoch,
            topics=[
                m.FetchRequestTopic(
                    topic=self._prefix + place.topic,
                    topic_id=self._id_of(place),
                    partitions=[
                        m.FetchRequestPartition(
                            partition=place.partition,
                            current_leader_epoch=-1,
                            fetch_offset=offset,
                            last_fetched_epoch=-1,
                            log_start_offset=-1,
                            partition_max_bytes=fetch.partition_bytes,
                        )
                    ],
                )
                for place, offset in fetch.offsets.items()
            ],
            forgotten_topics_data=[
                m.FetchRequestForgottenTopic(
                    topic=self._prefix + place.topic,
                    topic_id=self._id_of(place),
                    partitions=[place.partition],
                )
                for place in fetch.forgotten
            ],
            rack_id="",
        )
        answer: Any = self._client.request(ApiKey.FETCH, fetch.version, body)
        if fetch.session != "unknown" and fetch.epoch == 0:
            self._session = answer.session_id
        rows = list(self._rows(answer, fetch.version))
        return ErrorCode(answer.error_code).name, answer.session_id != 0, rows

    def _rows(self, answer: Any, version: int) -> Iterator[Any]:
        for topic in answer.responses:
            name = topic.topic.removeprefix(self._prefix)
            if version >= FIRST_ID_VERSION:
                names = [full for full, known in self._ids.items() if known == topic.topic_id]
                name = names[0].removeprefix(self._prefix) if names else "?"
            for row in topic.partitions:
                headers = [header for _, header in walk_headers(row.records or b"")]
                end = headers[-1].next_offset if headers else 0
                yield (
                    name,
                    row.partition_index,
                    ErrorCode(row.error_code).name,
                    row.high_watermark,
                    # Kafka raises it later, after records of an open transaction were deleted.
                    max(row.last_stable_offset, row.log_start_offset),
                    row.log_start_offset,
                    # Either broker may name transactions behind the records.
                    sorted(
                        (self._numbers[entry.producer_id], entry.first_offset)
                        for entry in row.aborted_transactions or []
                        if entry.first_offset < end
                    ),
                    [
                        (header.base_offset, header.record_count, header.attributes)
                        for header in headers
                    ],
                )

    def _full(self, producer: str | None) -> str | None:
        return None if producer is None else self._prefix + producer

    def _id_of(self, place: Place) -> bytes:
        return self._ids.get(self._prefix + place.topic, UNKNOWN_ID)

    def _start(self, producer: str) -> None:
        name = self._full(producer) or ""
        find_coordinator(self._client, TRANSACTION, name)
        body = m.InitProducerIdRequest(
            transactional_id=name, transaction_timeout_ms=600_000, producer_id=-1, producer_epoch=-1
        )
        answers: list[Any] = []

        def is_final() -> bool:
            answers.append(self._client.request(ApiKey.INIT_PRODUCER_ID, 5, body))
            return bool(answers[-1].error_code == ErrorCode.NONE)

        wait_until(is_final, f"a producer id for {producer}")
        self._set(producer, answers[-1])

    def _set(self, producer: str, answer: Any) -> None:
        self._producers[producer] = (answer.producer_id, answer.producer_epoch)
        self._numbers[answer.producer_id] = producer

    def _state(self, producer: str) -> str:
        body = m.DescribeTransactionsRequest(transactional_ids=[self._full(producer) or ""])
        answer: Any = self._client.request(ApiKey.DESCRIBE_TRANSACTIONS, 0, body)
        state: str = answer.transaction_states[0].transaction_state
        return "Prepare" if state.startswith("Prepare") else state


class Client:
    """What a client knows of its session; it chooses the next fetch."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._version = 12
        self._epoch = NO_SESSION  # the next one; without a session, -1
        self._places: set[Place] = set()  # of the session

    def places(self, *, least: int = 0, most: int = 3) -> list[Place]:
        rng = self._rng
        return list(
            {
                Place(
                    rng.choice([*TOPICS, *TOPICS, *TOPICS, "unknown"]),
                    rng.choice([*range(PARTITIONS), *range(PARTITIONS), 7]),
                ): None
                for _ in range(rng.randint(least, most))
            }
        )

    def next(self) -> Fetch:
        rng = self._rng
        kind = rng.choices(
            ["full", "again", "incremental", "wrong epoch", "unknown", "close", "none"],
            [2, 1, 9, 1, 0.5, 0.5, 2],
        )[0]
        session, epoch, forgotten = "none", NO_SESSION, tuple[Place, ...]()
        if self._epoch == NO_SESSION and kind not in ("none", "unknown"):
            kind = "full"
        match kind:
            case "full":
                epoch = 0
                self._version = rng.choice([7, 11, 12, 13, 15, 16, 17])
            case "again":
                session, epoch = "this", 0
            case "incremental":
                session, epoch = "this", self._epoch
                forgotten = tuple(self.places(most=1))
            case "wrong epoch":
                session, epoch = "this", self._epoch + rng.choice([1, 2])
            case "unknown":
                session, epoch = "unknown", rng.choice([0, 1])
            case "close":
                session = "this"
            case _:
                self._version = (
                    rng.choice([7, 12, 13, 17]) if epoch == self._epoch else self._version
                )
        places = self.places(least=epoch == 0)
        if not (self._places | {*places}) - {*forgotten}:
            forgotten = ()  # Kafka ends a session that becomes empty
        return Fetch(
            self._version,
            session,
            epoch,
            {place: rng.choice([-1, 0, 0, 1, 2, 3, 4, 6, 9, 15, 40]) for place in places},
            forgotten,
            rng.choice([0, READ_COMMITTED]),
            *self._limits(kind),
        )

    def _limits(self, kind: str) -> tuple[int, int]:
        """Return the most bytes of a response, and of a partition."""
        if kind not in ("none", "close"):  # which partition of a session is read first may differ
            return EVERYTHING, EVERYTHING
        limits = [0, 1, 150, 300, EVERYTHING, EVERYTHING]
        return self._rng.choice(limits), self._rng.choice(limits)

    def learn(self, fetch: Fetch, answer: tuple[str, bool, list[Any]]) -> None:
        """Take over what an answer says of the session."""
        if fetch.session == "unknown":
            return
        if fetch.epoch == NO_SESSION:
            if fetch.session == "this":
                self._epoch = NO_SESSION
        elif fetch.epoch == 0:
            self._epoch = 1 if answer[1] else NO_SESSION
            self._places = {*fetch.offsets}
        elif answer[0] == "NONE":
            self._epoch = fetch.epoch + 1
            self._places = (self._places | {*fetch.offsets}) - {*fetch.forgotten}


def run_history(seed: int, kafka: Side, ours: Side) -> set[str]:
    """Run a history on both. Returns the errors that Kafka answered."""
    rng = random.Random(seed)
    client = Client(rng)
    trace: list[str] = []
    errors: set[str] = set()
    open_transactions: set[str] = set()
    for _ in range(STEPS):
        expected: Any
        result: Any
        kind = rng.choices(["produce", "transaction", "end", "delete", "fetch"], [3, 3, 2, 1, 9])[0]
        place = Place(rng.choice(TOPICS), rng.randrange(PARTITIONS))
        match kind:
            case "produce":
                count = rng.randint(1, 3)
                text = f"produce {count} to {place}"
                expected, result = (side.produce(place, count, None) for side in (kafka, ours))
            case "transaction":
                count, producer = rng.randint(1, 3), rng.choice(PRODUCERS)
                text = f"produce {count} to {place} by {producer}"
                expected, result = (side.produce(place, count, producer) for side in (kafka, ours))
                open_transactions.add(producer)
            case "end":
                if not open_transactions:
                    continue
                producer, commit = rng.choice(sorted(open_transactions)), rng.random() < 0.5
                text = f"end {producer} {commit=}"
                expected, result = (side.end(producer, commit=commit) for side in (kafka, ours))
                open_transactions.discard(producer)
            case "delete":
                offset = rng.randint(0, 6)
                text = f"delete {place} before {offset}"
                expected, result = (side.delete_before(place, offset) for side in (kafka, ours))
            case _:
                fetch = client.next()
                text = str(fetch)
                expected, result = kafka.fetch(fetch), ours.fetch(fetch)
                client.learn(fetch, expected)
                expected[2].sort()
                result[2].sort()
        trace.append(f"{text}: {expected}")
        errors.update(name for name in ErrorCode.__members__ if f"'{name}'" in str(expected))
        story = "\n".join([f"seed {seed}", *trace])
        assert result == expected, f"{story}\nbut we: {result}"
    return errors


@pytest.mark.timeout(300)  # many histories in CI
def test_fetches_with_sessions_and_transactions_have_the_answers_of_kafka(
    kafka_and_varve: tuple[KafkaBroker, VarveBroker],
) -> None:
    print(f"VARVE_FETCH_SEEDS={SEEDS.start}:{SEEDS.stop}")
    names = {f"f{seed}-{topic}": PARTITIONS for seed in SEEDS for topic in TOPICS}
    create_topics(kafka_and_varve, names)
    errors = set[str]()
    for seed in SEEDS:
        with (
            RawClient(kafka_and_varve[0].port) as kafka,
            RawClient(kafka_and_varve[1].port) as ours,
        ):
            errors.update(run_history(seed, Side(kafka, f"f{seed}-"), Side(ours, f"f{seed}-")))
    assert errors >= {
        "NONE",
        "FETCH_SESSION_ID_NOT_FOUND",
        "INVALID_FETCH_SESSION_EPOCH",
        "OFFSET_OUT_OF_RANGE",
        "UNKNOWN_TOPIC_ID",
        "UNKNOWN_TOPIC_OR_PARTITION",
    }
