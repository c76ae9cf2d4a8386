"""Transactions of one producer, and large groups that form, against both brokers.

    python -m bench.broker.coordinators [--rounds 7] [--transactions 200] [--members 100]

A transaction has 100 records of 1 KB, sent to one partition by confluent-kafka, and by Kafka's own
producer where Java is. A group forms when
all its members, each with a connection of its own, have their partitions of a topic; the classic
protocol is measured by the requests of its members, because each of librdkafka's consumers has
threads of its own. Each round does everything on each broker in turn; the order alternates. Figures
are medians over the rounds; the ratio is that of the medians, above 1 where Varve is faster.
"""

import argparse
import asyncio
import statistics
import struct
import subprocess
import tempfile
import time
import uuid
from collections import defaultdict
from pathlib import Path

from confluent_kafka import Producer

from bench.brokers import Broker, both
from bench.report import markdown_table, median_ratio
from protocol import codec
from protocol import messages as m
from protocol.api import ApiKey
from tests.support.peers import kafka

JAVA_PROGRAM = Path(__file__).parents[1] / "java" / "Transactions.java"
RECORDS = 100
VALUE = b"x" * 1000
SUBSCRIPTION = struct.pack(">hi", 0, 1) + struct.pack(">h", 5) + b"group" + struct.pack(">i", -1)


def transactions_per_second(broker: Broker, topic: str, count: int) -> float:
    """Return the rate of one producer that waits for each commit."""
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "transactional.id": f"bench-{uuid.uuid4()}",
            "linger.ms": 0,
        }
    )
    producer.init_transactions(30)
    for number in range(-count // 10, count):
        if number == 0:
            started = time.perf_counter()
        producer.begin_transaction()
        for _ in range(RECORDS):
            producer.produce(topic, VALUE, partition=0)
        producer.commit_transaction(30)
    return count / (time.perf_counter() - started)


def compile_java(classes: str) -> None:
    """Compile Kafka's producer in a loop."""
    subprocess.run(["javac", "-cp", f"{kafka.LIB}/*", "-d", classes, str(JAVA_PROGRAM)], check=True)


def java_transactions_per_second(classes: str, broker: Broker, topic: str, count: int) -> float:
    """Return the rate of Kafka's own producer, after as many transactions to warm it up."""
    command = ["java", "-cp", f"{classes}:{kafka.LIB}/*", JAVA_PROGRAM.stem, broker.bootstrap]
    command += [topic, str(count), str(RECORDS), str(len(VALUE))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return count / float(done.stdout)


class Member:
    """A group member on a connection of its own."""

    def __init__(self, broker: Broker, group: str) -> None:
        self._broker = broker
        self._group = group
        self._member_id = ""
        self._correlation = 0

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._broker.port)
        error = -1
        while error:
            request = m.FindCoordinatorRequest(key_type=0, coordinator_keys=[self._group])
            answer = await self.ask(ApiKey.FIND_COORDINATOR, 4, request)
            assert isinstance(answer, m.FindCoordinatorResponse)
            error = answer.coordinators[0].error_code

    async def ask(self, key: ApiKey, version: int, body: m.Message) -> m.Message:
        self._correlation += 1
        self._writer.write(codec.encode_request(key, version, self._correlation, "bench", body))
        size = int.from_bytes(await self._reader.readexactly(4))
        frame = await self._reader.readexactly(size)
        return codec.decode_response(key, version, frame)[1]

    async def join_classic(self, members: int) -> None:
        """Join until the generation has all members, then get an assignment."""
        protocol = m.JoinGroupRequestProtocol(name="range", metadata=SUBSCRIPTION)
        while True:
            request = m.JoinGroupRequest(
                group_id=self._group,
                session_timeout_ms=30_000,
                rebalance_timeout_ms=30_000,
                member_id=self._member_id,
                protocol_type="consumer",
                protocols=[protocol],
            )
            joined = await self.ask(ApiKey.JOIN_GROUP, 9, request)
            assert isinstance(joined, m.JoinGroupResponse)
            self._member_id = joined.member_id or self._member_id
            if joined.error_code:
                await asyncio.sleep(0.01)
                continue
            assignments = [
                m.SyncGroupRequestAssignment(member_id=row.member_id, assignment=b"")
                for row in joined.members
            ]
            synced = await self.ask(
                ApiKey.SYNC_GROUP,
                5,
                m.SyncGroupRequest(
                    group_id=self._group,
                    generation_id=joined.generation_id,
                    member_id=self._member_id,
                    protocol_type="consumer",
                    protocol_name="range",
                    assignments=assignments,
                ),
            )
            assert isinstance(synced, m.SyncGroupResponse)
            while synced.error_code == 0 and await self._is_current(joined.generation_id):
                if await self._is_complete(members):
                    return
                await asyncio.sleep(0.05)

    async def _is_current(self, generation: int) -> bool:
        request = m.HeartbeatRequest(
            group_id=self._group, generation_id=generation, member_id=self._member_id
        )
        answer = await self.ask(ApiKey.HEARTBEAT, 4, request)
        assert isinstance(answer, m.HeartbeatResponse)
        return answer.error_code == 0

    async def _is_complete(self, members: int) -> bool:
        request = m.DescribeGroupsRequest(groups=[self._group])
        described = await self.ask(ApiKey.DESCRIBE_GROUPS, 5, request)
        assert isinstance(described, m.DescribeGroupsResponse)
        group = described.groups[0]
        return len(group.members) == members and group.group_state == "Stable"

    async def join_consumer(self, owners: set["Member"], members: int) -> None:
        """Send heartbeats until every member owns its one partition."""
        self._member_id, epoch = str(uuid.uuid4()), 0
        owned: list[m.ConsumerGroupHeartbeatRequestTopicPartition] = []
        while True:
            request = m.ConsumerGroupHeartbeatRequest(
                group_id=self._group,
                member_id=self._member_id,
                member_epoch=epoch,
                rebalance_timeout_ms=30_000,
                subscribed_topic_names=["group"],
                topic_partitions=owned,
            )
            answer = await self.ask(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, request)
            assert isinstance(answer, m.ConsumerGroupHeartbeatResponse)
            assert answer.error_code == 0, answer.error_message
            epoch = answer.member_epoch
            if answer.assignment is not None:
                owned = [
                    m.ConsumerGroupHeartbeatRequestTopicPartition(
                        topic_id=row.topic_id, partitions=row.partitions
                    )
                    for row in answer.assignment.topic_partitions
                ]
            if sum(len(row.partitions) for row in owned) == 1:
                owners.add(self)
            if len(owners) == members:
                return
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        self._writer.close()


async def group_seconds(broker: Broker, protocol: str, members: int) -> float:
    """Return the time from the first request until every member has its assignment."""
    group = f"bench-{protocol}-{uuid.uuid4()}"
    clients = [Member(broker, group) for _ in range(members)]
    await asyncio.gather(*(client.connect() for client in clients))
    started = time.perf_counter()
    if protocol == "classic":
        await asyncio.gather(*(client.join_classic(members) for client in clients))
    else:
        owners: set[Member] = set()
        await asyncio.gather(*(client.join_consumer(owners, members) for client in clients))
    elapsed = time.perf_counter() - started
    await asyncio.gather(*(client.close() for client in clients))
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transactions", type=int, default=200)
    parser.add_argument("--members", type=int, default=100)
    arguments = parser.parse_args()
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="varve-bench-") as classes, both() as brokers:
        has_kafka = len(brokers) > 1
        if has_kafka:
            compile_java(classes)
        for broker in brokers:
            broker.create_topic("transactions")
            broker.create_topic("group", partitions=arguments.members)
        for number in range(-1, arguments.rounds):  # round -1 warms both up
            for broker in brokers if number % 2 == 0 else brokers[::-1]:
                count = arguments.transactions
                rates = {
                    "transactions, librdkafka": transactions_per_second(
                        broker, "transactions", count
                    )
                }
                if has_kafka:
                    rates["transactions, Java"] = java_transactions_per_second(
                        classes, broker, "transactions", count
                    )
                seconds = {
                    f"group, {protocol} protocol": asyncio.run(
                        group_seconds(broker, protocol, arguments.members)
                    )
                    for protocol in ("classic", "consumer")
                }
                if number >= 0:
                    for subject, value in (rates | seconds).items():
                        speeds[subject, broker.name].append(value)
                    print(f"round {number} {broker.name:6} {rates} {seconds}", flush=True)
    rows = []
    for subject in dict.fromkeys(subject for subject, _ in speeds):
        local = speeds[subject, "varve"]
        unit = "s" if subject.startswith("group") else "/s"
        row = [f"{subject}, {unit}", f"{statistics.median(local):.3g}"]
        if has_kafka:
            remote = speeds[subject, "kafka"]
            faster = (local, remote) if unit == "/s" else (remote, local)
            row += [f"{statistics.median(remote):.3g}", f"{median_ratio(*faster):.2f}"]
        rows.append(row)
    print(markdown_table(["", "Varve", *(["Kafka 4.3.0", "ratio"] if has_kafka else [])], rows))


if __name__ == "__main__":
    main()
