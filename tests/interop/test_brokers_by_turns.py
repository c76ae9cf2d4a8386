"""Kafka and this broker take turns on one data directory, and lose nothing that was acknowledged.

A history is a list of turns from a seed. At each turn one of the two starts on what the other has
left, clients produce, commit and end transactions, members of groups go on, both cleaners and
retention work, and the broker is stopped or killed, at times while a producer is at work. After
each start a model says what clients have to find: records by their offsets, the last value of each
key of compacted topics, what is committed, what transactions and groups are.
"""

import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from broker.cli import main
from broker.groups.offsets.offsets_store import OFFSETS_TOPIC
from broker.transactions.state_records import TRANSACTION_TOPIC
from protocol import messages as m
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from storage.format.batch import Record, build_batch
from storage.format.checkpoints import decode_offsets
from storage.model import TopicPartition as Partition
from tests.interop.both_brokers import GROUP, find_coordinator
from tests.support.draws import cases, seeds_of_tests
from tests.support.peers.kafka import KafkaBroker, start_kafka
from tests.support.protocol.raw_client import RawClient
from tests.support.reading import View, read_partitions, read_topics
from tests.support.varve import VarveBroker, start_varve
from tests.support.waiting import wait_until

SEEDS = seeds_of_tests("VARVE_TURNS_SEEDS", few=1, many=2)
TURNS: Final = cases(few=3, many=4)
TABLE, EVENTS, LEDGER, ACCOUNTS = TOPICS = ("table", "events", "ledger", "accounts")
PARTITIONS: Final = {TABLE: 1, EVENTS: 3, LEDGER: 2, ACCOUNTS: 1}
# Of `events`: in the first, records are old or new, and DeleteRecords removes some; in the second,
# all are old and expire; the third has the batches of one idempotent producer.
MIXED, OLD, IDEMPOTENT = range(3)
KEYS: Final = 40
DAY_MS: Final = 86_400_000
LONG_AGO_MS: Final = 1_577_836_800_000
CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
TRANSACTIONAL_IDS: Final = ("t0", "t1", "t2")  # each commits offsets of the partition of its number
SIMPLE, TRANSFERS, CLASSIC, MODERN = "simple", "transfers", "classic", "modern"  # groups
KAFKA_SETTINGS: Final = {
    "log.cleaner.backoff.ms": "100",
    "log.initial.task.delay.ms": "100",
    "log.retention.check.interval.ms": "100",
    "log.flush.start.offset.checkpoint.interval.ms": "100",
    "log.index.size.max.bytes": "1048576",
    "log.cleaner.dedupe.buffer.size": "8388608",
}
NOT_YET: Final = (
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
)

Where = tuple[str, int]
Broker = KafkaBroker | VarveBroker


class Sent(NamedTuple):
    """A record as it was sent; the number of its transaction."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...] = ()
    transaction: int | None = None


class Model:
    """What was acknowledged, and what may have been written without an acknowledgement."""

    def __init__(self) -> None:
        self.records = defaultdict[Where, dict[int, Sent]](dict)  # by offset
        self.unacknowledged: dict[bytes | None, Sent] = {}  # by value
        self.outcomes: list[Literal["open", "committed", "aborted"]] = []  # of transactions
        self.deleted_to: int = 0  # of the partition with DeleteRecords
        self.offsets: dict[tuple[str, int], int] = {}  # committed, of `events`, by group
        self.last_transactions: dict[str, int] = {}  # by transactional id
        self.pending: dict[tuple[str, int], int] = {}  # of open transactions
        self.removed = 0  # records that the last comparison did not find, rightly

    def compare(self, all_records: View, committed: View) -> None:
        """Compare what a consumer reads of each topic with what it has to read."""
        for where, seen in all_records.items():
            for record in seen:
                self._adopt(where, record.offset, record.value)
            self._assert_as_sent(where, seen)
        for where, seen in committed.items():
            self._assert_as_sent(where, seen)
        # What was not found now must not come later.
        self.unacknowledged.clear()
        offsets = {where: [record.offset for record in seen] for where, seen in all_records.items()}
        self._assert_last_values(TABLE, offsets[TABLE, 0], self.records[TABLE, 0])
        for where in ((LEDGER, 0), (LEDGER, 1)):
            assert offsets[where] == sorted(self.records[where]), where
            read = [record.offset for record in committed[where]]
            assert read == sorted(self._committed(where)), where
        if (ACCOUNTS, 0) in committed:
            read = [record.offset for record in committed[ACCOUNTS, 0]]
            assert set(read) <= self._committed((ACCOUNTS, 0)).keys()
            self._assert_last_values(ACCOUNTS, read, self._committed((ACCOUNTS, 0)))
        for partition in range(PARTITIONS[EVENTS]):
            self._assert_not_expired(partition, offsets[EVENTS, partition])
        self.removed = sum(len(rows) for rows in self.records.values()) - sum(
            len(rows) for rows in offsets.values()
        )

    def _adopt(self, where: Where, offset: int, value: bytes | None) -> None:
        if offset not in self.records[where] and value in self.unacknowledged:
            self.records[where][offset] = self.unacknowledged.pop(value)

    def _assert_as_sent(self, where: Where, seen: Any) -> None:
        for record in seen:
            sent = self.records[where].get(record.offset)
            assert sent is not None, f"{where}: nobody sent {record}"
            fields = record.key, record.value, record.timestamp[1], record.headers
            assert fields == sent[:4], f"{where}: {record}, but it was sent as {sent}"

    def _committed(self, where: Where) -> dict[int, Sent]:
        """Return the committed records below the first open transaction."""
        rows = self.records[where]
        end = min((o for o, sent in rows.items() if self._outcome(sent) == "open"), default=1 << 62)
        return {o: s for o, s in rows.items() if o < end and self._outcome(s) == "committed"}

    def has_open(self, where: Where) -> bool:
        return any(self._outcome(sent) == "open" for sent in self.records[where].values())

    def _outcome(self, sent: Sent) -> str:
        return "committed" if sent.transaction is None else self.outcomes[sent.transaction]

    def _assert_last_values(self, topic: str, seen: list[int], rows: dict[int, Sent]) -> None:
        """Every key has its last value; a tombstone may be gone, but nothing older is there."""
        last = {rows[offset].key: offset for offset in sorted(rows)}
        last_seen = {rows[offset].key: offset for offset in seen}
        for key, offset in last.items():
            is_gone = key not in last_seen and rows[offset].value is None
            assert is_gone or last_seen.get(key) == offset, (
                f"{topic}: {key!r} was last written as {rows[offset]} at {offset}, "
                f"but it is read at {last_seen.get(key)}"
            )

    def _assert_not_expired(self, partition: int, seen: list[int]) -> None:
        """No record is missing but the first ones, if they may be gone; deleted ones are gone."""
        rows = self.records[EVENTS, partition]
        deleted_to = self.deleted_to if partition == MIXED else 0
        kept = (o for o in sorted(rows) if o >= deleted_to and rows[o].timestamp_ms > LONG_AGO_MS)
        first = next(kept, 1 << 62)
        name = f"{EVENTS}-{partition}"
        assert seen == sorted(rows)[len(rows) - len(seen) :], f"{name}: records are missing"
        assert {o for o in rows if o >= first} <= set(seen), f"{name}: lost from {first} on"
        assert all(offset >= deleted_to for offset in seen), f"{name}: deleted to {deleted_to}"

    def end_offset(self, partition: int) -> int:
        """Return the end offset of a partition of `events`."""
        return max(self.records[EVENTS, partition], default=-1) + 1


class Idempotent:
    """A producer of single batches that does not end with its broker."""

    def __init__(self) -> None:
        self._producer_id = -1
        self._last: tuple[bytes, int] | None = None  # the last batch, and its offset
        self._sequence = 0

    def produce(self, client: RawClient, sent: Sent) -> int:
        """Send the last batch again, then the next one; return its offset."""
        if self._producer_id < 0:
            body = m.InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=60_000)
            self._producer_id = ask(client, ApiKey.INIT_PRODUCER_ID, 4, body).producer_id
        if self._last is not None:
            batch, offset = self._last
            again = client.produce(EVENTS, batch, IDEMPOTENT)
            assert (again.error_code, again.base_offset) == (0, offset), "sent again"
        batch = bytes(
            build_batch(
                [Record(0, sent.timestamp_ms, sent.key, sent.value, ())],
                producer_id=self._producer_id,
                producer_epoch=0,
                base_sequence=self._sequence,
            )
        )
        answer = client.produce(EVENTS, batch, IDEMPOTENT)
        assert answer.error_code == 0, ErrorCode(answer.error_code).name
        self._last = batch, answer.base_offset
        self._sequence += 1
        return answer.base_offset


class Members:
    """A static member of a classic group, and one of the consumer protocol, that never leave."""

    def __init__(self) -> None:
        self._member_id = ""
        self._generation = -1
        self._epoch = 0
        self._assigned: list[tuple[bytes, list[int]]] = []

    def beat(self, client: RawClient) -> None:
        """Send heartbeats; neither has lost its place or its partitions."""
        if self._generation < 0:
            self._join(client)
        body: Any = m.HeartbeatRequest(
            group_id=CLASSIC,
            generation_id=self._generation,
            member_id=self._member_id,
            group_instance_id="static",
        )
        assert ask(client, ApiKey.HEARTBEAT, 4, body).error_code == ErrorCode.NONE
        is_new = self._epoch == 0
        body = m.ConsumerGroupHeartbeatRequest(
            group_id=MODERN,
            member_id="AAAAAAAAAAAAAAAAAAAAAQ",
            member_epoch=self._epoch,
            rebalance_timeout_ms=300_000 if is_new else -1,
            subscribed_topic_names=[EVENTS, LEDGER] if is_new else None,
            server_assignor="range" if is_new else None,
            topic_partitions=[
                m.ConsumerGroupHeartbeatRequestTopicPartition(topic_id=topic, partitions=numbers)
                for topic, numbers in self._assigned
            ],
        )
        answer = ask(client, ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, body)
        assert answer.error_code == ErrorCode.NONE, answer
        assert answer.member_epoch >= self._epoch
        self._epoch = answer.member_epoch
        if answer.assignment is not None:
            rows = answer.assignment.topic_partitions
            assigned = sorted((row.topic_id, sorted(row.partitions)) for row in rows)
            assert is_new or assigned == self._assigned
            self._assigned = assigned
        assert sum(len(numbers) for _, numbers in self._assigned) == 5

    def _join(self, client: RawClient) -> None:
        protocol = m.JoinGroupRequestProtocol(name="range", metadata=b"any")
        body: Any = m.JoinGroupRequest(
            group_id=CLASSIC,
            session_timeout_ms=300_000,
            rebalance_timeout_ms=300_000,
            group_instance_id="static",
            protocol_type="consumer",
            protocols=[protocol],
        )
        answer = ask(client, ApiKey.JOIN_GROUP, 9, body)
        self._member_id, self._generation = answer.member_id, answer.generation_id
        body = m.SyncGroupRequest(
            group_id=CLASSIC,
            generation_id=self._generation,
            member_id=self._member_id,
            group_instance_id="static",
            protocol_type="consumer",
            protocol_name="range",
            assignments=[
                m.SyncGroupRequestAssignment(member_id=self._member_id, assignment=b"assigned")
            ],
        )
        assert ask(client, ApiKey.SYNC_GROUP, 5, body).error_code == ErrorCode.NONE


def ask(client: RawClient, api: ApiKey, version: int, body: m.Message) -> Any:
    """Ask until the coordinator is there."""
    answers: list[Any] = []

    def is_answered() -> bool:
        answers.append(client.request(api, version, body))
        return answers[-1].error_code not in NOT_YET

    wait_until(is_answered, f"the coordinator of {body}")
    return answers[-1]


class History:
    """The turns of one seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        self._rng = random.Random(seed)
        self._now_ms = time.time_ns() // 1_000_000
        self._directory = directory
        self._model = Model()
        self._idempotent = Idempotent()
        self._members = Members()
        self._number = 0  # of values
        self.removed = {"KafkaBroker": 0, "VarveBroker": 0}  # records, by who was the last

    def run(self, turns: int) -> None:
        former: type[Broker] | None = None
        before = 0
        for turn in range(turns + 1):
            # Kafka creates the topics: it does not take any over.
            is_kafka = turn == 0 or (former is not KafkaBroker and self._rng.random() < 0.9)
            broker = self._start_kafka() if is_kafka else self._start_varve()
            print(f"turn {turn}: {type(broker).__name__}")
            try:
                if turn == 0:
                    self._create_topics(broker)
                else:
                    self._compare(broker)
                    self.removed[former.__name__] += max(0, self._model.removed - before)
                    before = self._model.removed
                if turn < turns:
                    self._take_turn(broker, is_last=turn == turns - 1)
            finally:
                broker.kill()
            former = type(broker)

    # Brokers -------------------------------------------------------------------------------------

    def _start_kafka(self) -> KafkaBroker:
        return start_kafka(self._directory, KAFKA_SETTINGS, heap="512m")

    def _start_varve(self) -> VarveBroker:
        strategy = self._rng.choice(["generational", "dirty-ratio", "survivorship"])
        cleaner = {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 100}
        settings = {
            "cleaner": {**cleaner, "strategy": strategy},
            "retention_check_interval_ms": 100,
            "checkpoint_interval_ms": 100,
        }
        return start_varve(self._directory, settings)

    def _create_topics(self, broker: Broker) -> None:
        compact = {
            "cleanup.policy": "compact",
            "min.cleanable.dirty.ratio": "0.01",
            "max.compaction.lag.ms": "100",
            "segment.ms": "100",
            "segment.bytes": "1048576",
            "delete.retention.ms": self._rng.choice(["0", "86400000"]),
            "compression.type": self._rng.choice(["producer", "zstd", "uncompressed"]),
        }
        kept = {"cleanup.policy": "delete", "retention.ms": "-1"}
        expiring = {"cleanup.policy": "delete", "retention.ms": str(DAY_MS), "segment.ms": "10000"}
        configs = {TABLE: compact, ACCOUNTS: compact, EVENTS: expiring, LEDGER: kept}
        admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
        new = [NewTopic(name, PARTITIONS[name], 1, config=configs[name]) for name in TOPICS]
        for future in admin.create_topics(new).values():
            future.result(30)
        with RawClient(broker.port) as client:
            find_coordinator(client, GROUP, CLASSIC)  # Kafka makes its internal topic then

    # What clients find ---------------------------------------------------------------------------

    def _compare(self, broker: Broker) -> None:
        with RawClient(broker.port) as client:
            self._compare_transactions(client)
            self._compare_offsets(client)
            self._members.beat(client)
        everything = read_topics(broker.bootstrap, TOPICS)
        # A consumer comes to no end if the cleaner has removed what is just below the first open
        # transaction: the next offset that it can read is beyond.
        places = [(LEDGER, 0), (LEDGER, 1), (ACCOUNTS, 0)]
        if self._model.has_open((ACCOUNTS, 0)):
            places.remove((ACCOUNTS, 0))
        committed = read_partitions(broker.bootstrap, places, "read_committed")
        self._model.compare(everything, committed)
        consumer = self._consumer(broker, "looks")
        for partition in range(PARTITIONS[EVENTS]):
            _, end = consumer.get_watermark_offsets(TopicPartition(EVENTS, partition), 30)
            assert end == self._model.end_offset(partition), f"{EVENTS}-{partition}"
        consumer.close()

    def _compare_transactions(self, client: RawClient) -> None:
        """The last transaction of each id is open as before, or its markers are being written."""
        for name, number in self._model.last_transactions.items():
            outcome = self._model.outcomes[number]
            expected = {"open": "Ongoing", "committed": "CompleteCommit"}.get(outcome)
            body = m.DescribeTransactionsRequest(transactional_ids=[name])
            rows: list[Any] = []

            def is_settled(body: Any = body, rows: list[Any] = rows) -> bool:
                answer: Any = client.request(ApiKey.DESCRIBE_TRANSACTIONS, 0, body)
                rows[:] = answer.transaction_states
                is_loaded = rows[0].error_code not in NOT_YET
                return is_loaded and "Prepare" not in rows[0].transaction_state

            wait_until(is_settled, f"the markers of {name}")
            assert rows[0].transaction_state == (expected or "CompleteAbort"), name

    def _compare_offsets(self, client: RawClient) -> None:
        for group in (SIMPLE, TRANSFERS):
            for is_stable in (False, True):
                numbers = list(range(PARTITIONS[EVENTS]))
                topic = m.OffsetFetchRequestGroupTopic(name=EVENTS, partition_indexes=numbers)
                row = m.OffsetFetchRequestGroup(group_id=group, topics=[topic])
                body = m.OffsetFetchRequest(groups=[row], require_stable=is_stable)
                answers: list[Any] = []

                def is_loaded(body: Any = body, answers: list[Any] = answers) -> bool:
                    answer: Any = client.request(ApiKey.OFFSET_FETCH, 8, body)
                    answers[:] = answer.groups
                    return answers[0].error_code not in NOT_YET

                wait_until(is_loaded, f"the offsets of {group}")
                for partition in answers[0].topics[0].partitions:
                    where = group, partition.partition_index
                    expected = ErrorCode.NONE, self._model.offsets.get(where, -1)
                    if is_stable and where in self._model.pending:
                        expected = ErrorCode.UNSTABLE_OFFSET_COMMIT, -1
                    result = ErrorCode(partition.error_code), partition.committed_offset
                    assert result == expected, where

    # What clients do -----------------------------------------------------------------------------

    def _take_turn(self, broker: Broker, *, is_last: bool) -> None:
        actions = [
            self._write_table, self._write_table, self._write_events, self._expire,
            self._transact, self._transact, self._commit_offset, self._delete_records,
            self._produce_idempotent, self._clean, self._beat,
        ]  # fmt: skip
        self._rng.shuffle(actions)
        self._plain = self._producer(broker)
        for action in actions:
            action(broker)
        if is_last:
            self._abort_open(broker)  # so that the committed accounts are compared
        ending = self._rng.choice(["stop", "kill", "kill while writing", "kill after a commit"])
        print(f"  {ending}")
        match ending:
            case "stop":
                assert broker.stop() in (0, None)
            case "kill while writing":
                self._kill_while_writing(broker)
            case "kill after a commit":
                self._transact(broker)
        broker.kill()

    def _beat(self, broker: Broker) -> None:
        with RawClient(broker.port) as client:
            self._members.beat(client)

    def _produce_idempotent(self, broker: Broker) -> None:
        with RawClient(broker.port) as client:
            for _ in range(self._rng.randint(1, 3)):
                sent = Sent(b"k", self._value(), self._now_ms)
                offset = self._idempotent.produce(client, sent)
                self._model.records[EVENTS, IDEMPOTENT][offset] = sent

    def _value(self) -> bytes:
        self._number += 1
        return b"%d " % self._number + self._rng.randbytes(self._rng.choice([0, 20, 2000]))

    def _record(self, *, may_be_tombstone: bool = True, transaction: int | None = None) -> Sent:
        rng = self._rng
        headers = ((str(self._number), None), ("n", b"1")) if rng.random() < 0.2 else ()
        value = None if may_be_tombstone and rng.random() < 0.1 else self._value()
        key = b"key-%d" % rng.randrange(KEYS)
        return Sent(key, value, self._now_ms + self._number, headers, transaction)

    def _producer(self, broker: Broker, **settings: Any) -> Producer:
        return Producer(
            {
                "bootstrap.servers": broker.bootstrap,
                "compression.type": self._rng.choice(CODECS),
                "enable.idempotence": True,
                "linger.ms": 0 if self._rng.random() < 0.5 else 5,
                "batch.num.messages": self._rng.choice([1, 10, 1000]),
                "log_level": 0,
                **settings,
            }
        )

    def _send(self, producer: Producer, where: Where, sent: Sent, *, is_sure: bool = True) -> None:
        def note(error: Any, message: Message) -> None:
            if error is None:
                offset = message.offset()
                assert offset is not None
                self._model.records[where][offset] = sent
            else:
                assert not is_sure, error
                self._model.unacknowledged[sent.value] = sent

        topic, partition = where
        producer.produce(
            topic,
            sent.value,
            sent.key,
            partition,
            on_delivery=note,
            timestamp=sent.timestamp_ms,
            headers=list(sent.headers),
        )

    def _write_table(self, _broker: Broker) -> None:
        producer = self._plain
        for _ in range(self._rng.choice([1, 100, 600])):
            self._send(producer, (TABLE, 0), self._record())
        assert producer.flush(30) == 0

    def _write_events(self, _broker: Broker) -> None:
        """Old records and then new ones, which begin another segment."""
        for timestamp_ms in (LONG_AGO_MS, self._now_ms):
            for _ in range(self._rng.randint(0, 50)):
                sent = Sent(None, self._value(), timestamp_ms)
                self._send(self._plain, (EVENTS, MIXED), sent)
            assert self._plain.flush(30) == 0

    def _expire(self, broker: Broker) -> None:
        """All old records expire, also those of the active segment."""
        producer = self._plain
        for _ in range(self._rng.randint(1, 50)):
            self._send(producer, (EVENTS, OLD), Sent(b"old", self._value(), LONG_AGO_MS))
        assert producer.flush(30) == 0
        if self._rng.random() < 0.5:
            return
        consumer = self._consumer(broker, "looks")

        def is_empty() -> bool:
            start, end = consumer.get_watermark_offsets(TopicPartition(EVENTS, OLD), 30)
            return bool(start == end)

        wait_until(is_empty, "old records expire")
        consumer.close()

    def _begin(self, broker: Broker, number: int) -> Producer:
        """Return the producer of a transactional id, whose open transaction is aborted."""
        name, model = TRANSACTIONAL_IDS[number], self._model
        settings = {"transactional.id": name, "transaction.timeout.ms": 900_000}
        producer = self._producer(broker, **settings)
        producer.init_transactions(30)
        last = model.last_transactions.pop(name, None)
        if last is not None and model.outcomes[last] == "open":
            model.outcomes[last] = "aborted"
            model.pending.pop((TRANSFERS, number), None)
        return producer

    def _abort_open(self, broker: Broker) -> None:
        for number, name in enumerate(TRANSACTIONAL_IDS):
            last = self._model.last_transactions.get(name)
            if last is not None and self._model.outcomes[last] == "open":
                self._begin(broker, number)

    def _transact(self, broker: Broker) -> None:
        model, number = self._model, self._rng.randrange(len(TRANSACTIONAL_IDS))
        name, producer = TRANSACTIONAL_IDS[number], self._begin(broker, number)
        for _ in range(self._rng.randint(1, 3)):
            transaction = model.last_transactions[name] = len(model.outcomes)
            model.outcomes.append("open")
            producer.begin_transaction()
            for _ in range(self._rng.randint(1, 30)):
                topic = self._rng.choice([LEDGER, ACCOUNTS])
                where = topic, self._rng.randrange(PARTITIONS[topic])
                self._send(producer, where, self._record(transaction=transaction))
            assert producer.flush(30) == 0
            if self._rng.random() < 0.5:
                self._send_offset(producer, broker, number)
            self._end(producer, transaction, (TRANSFERS, number))
            if model.outcomes[transaction] == "open":
                break

    def _send_offset(self, producer: Producer, broker: Broker, number: int) -> None:
        consumer = self._consumer(broker, TRANSFERS)
        self._number += 1
        offsets = [TopicPartition(EVENTS, number, self._number)]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 30)
        self._model.pending[TRANSFERS, number] = self._number
        consumer.close()

    def _end(self, producer: Producer, transaction: int, where: tuple[str, int]) -> None:
        ending = self._rng.choices(["commit", "abort", "open"], [5, 3, 2])[0]
        if ending == "open":
            return
        offset = self._model.pending.pop(where, None)
        if ending == "commit":
            producer.commit_transaction(30)
            self._model.outcomes[transaction] = "committed"
            if offset is not None:
                self._model.offsets[where] = offset
        else:
            producer.abort_transaction(30)
            self._model.outcomes[transaction] = "aborted"

    def _consumer(self, broker: Broker, group: str) -> Consumer:
        options = {"bootstrap.servers": broker.bootstrap, "group.id": group, "log_level": 0}
        return Consumer({**options, "enable.auto.commit": False})

    def _commit_offset(self, broker: Broker) -> None:
        self._number += 1
        partition = self._rng.randrange(PARTITIONS[EVENTS])
        consumer = self._consumer(broker, SIMPLE)
        offsets = [TopicPartition(EVENTS, partition, self._number)]
        consumer.commit(offsets=offsets, asynchronous=False)
        consumer.close()
        self._model.offsets[SIMPLE, partition] = self._number

    def _delete_records(self, broker: Broker) -> None:
        rows = self._model.records[EVENTS, MIXED]
        if not rows or self._rng.random() < 0.5:
            return
        offset = self._rng.randint(self._model.deleted_to, max(rows) + 1)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
        places = [TopicPartition(EVENTS, MIXED, offset)]
        for future in admin.delete_records(places).values():
            future.result(30)
        self._model.deleted_to = offset
        if isinstance(broker, KafkaBroker):  # it writes it down later, or removes segments
            name, where = "log-start-offset-checkpoint", Partition(EVENTS, MIXED)

            def is_durable() -> bool:
                paths = (broker.data / f"{EVENTS}-{MIXED}").glob("*.log")
                first = min(int(path.stem) for path in paths)
                return max(first, _checkpoint(broker, name, where)) >= offset

            wait_until(is_durable, name)

    def _clean(self, broker: Broker) -> None:
        if isinstance(broker, VarveBroker):
            for topic in (TABLE, ACCOUNTS, OFFSETS_TOPIC, TRANSACTION_TOPIC):
                command = ["cleaner", "run", topic, "--roll", "--wait", "--http"]
                result = CliRunner().invoke(main, [*command, f"127.0.0.1:{broker.http_port}"])
                assert "the clean" not in result.output, result.output  # that it failed
            return
        name, where = "cleaner-offset-checkpoint", Partition(TABLE, 0)
        before = _checkpoint(broker, name, where)
        for count in (300, 1):
            self._number += 1_000  # the second timestamp begins a segment
            for _ in range(count):
                self._send(self._plain, (TABLE, 0), self._record())
            assert self._plain.flush(30) == 0
        wait_until(lambda: _checkpoint(broker, name, where) > before, name)

    def _kill_while_writing(self, broker: Broker) -> None:
        producer = self._plain
        for number in range(400):
            record = self._record(may_be_tombstone=False)
            if number % 4 == 0:
                self._send(producer, (EVENTS, MIXED), record, is_sure=False)
            else:
                self._send(producer, (TABLE, 0), record, is_sure=False)
        producer.poll(self._rng.random() * 0.02)
        broker.kill()
        producer.purge()
        producer.flush(10)


def _checkpoint(broker: Broker, name: str, where: Partition) -> int:
    path = broker.data / name
    return decode_offsets(path.read_bytes(), name).get(where, 0) if path.exists() else 0


@pytest.mark.timeout(600)  # many histories in CI
@pytest.mark.parametrize("seed", SEEDS)
def test_two_brokers_that_take_turns_lose_nothing(
    real_kafka: None, seed: int, tmp_path: Path
) -> None:
    print(f"VARVE_TURNS_SEEDS={seed}:{seed + 1}")
    history = History(seed, tmp_path)
    history.run(TURNS)
    assert all(history.removed.values()), history.removed
