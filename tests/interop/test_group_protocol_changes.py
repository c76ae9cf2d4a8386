"""Groups that change between the classic and the consumer protocol while clients use them."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.draws import cases
from tests.support.peers.kafka import run_tool
from tests.support.varve import VarveBroker, running_varve

PARTITIONS = 6
RECORDS = 60  # of each step
QUICK = {
    "groups": {
        "consumer_heartbeat_interval_ms": 200,
        "initial_rebalance_delay_ms": 0,
        "offsets_partitions": 1,
    }
}
TIMEOUT_SECONDS = 60
CONSOLE_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleConsumer"


class Topic:
    """A topic whose records are numbered, and the numbers that consumers have read."""

    def __init__(self, broker: VarveBroker) -> None:
        self.broker = broker
        self.produced = 0
        self.values: Counter[str] = Counter()
        self._admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        for future in self._admin.create_topics([NewTopic("orders", PARTITIONS)]).values():
            future.result()
        self._producer = Producer({"bootstrap.servers": broker.bootstrap})

    def produce(self) -> None:
        for number in range(self.produced, self.produced + RECORDS):
            self._producer.produce("orders", value=str(number), partition=number % PARTITIONS)
        assert self._producer.flush(30) == 0
        self.produced += RECORDS

    def consumer(self, protocol: str, **options: str) -> Consumer:
        classic = {"heartbeat.interval.ms": "200"} if protocol == "classic" else {}
        member = Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap,
                "group.id": "g",
                "group.protocol": protocol,
                "auto.offset.reset": "earliest",
                **classic,
                **{name.replace("_", "."): value for name, value in options.items()},
            }
        )
        member.subscribe(["orders"])
        return member

    def poll_until(self, is_done: Callable[[], bool], *members: Consumer) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not is_done():
            assert time.monotonic() < deadline, [member.assignment() for member in members]
            for member in members:
                for message in member.consume(100, 0.05):
                    assert message.error() is None
                    self.values[message.value().decode()] += 1

    def read_all(self, *members: Consumer) -> None:
        """Poll until each member owns its share, then produce, and read everything."""
        share = PARTITIONS // len(members)
        self.poll_until(lambda: all(len(m.assignment()) == share for m in members), *members)
        self.produce()
        self.poll_until(lambda: len(self.values) == self.produced, *members)

    def group_type(self) -> str:
        described = self._admin.describe_consumer_groups(["g"])["g"].result()
        return str(described.type).removeprefix("ConsumerGroupType.")


@pytest.mark.parametrize(
    "strategy", cases(few=["cooperative-sticky"], many=["range", "cooperative-sticky"])
)
def test_members_of_librdkafka_are_replaced_one_by_one(strategy: str, tmp_path: Path) -> None:
    """The rolling upgrade of an application, and the way back."""
    with running_varve(tmp_path, QUICK) as broker:
        topic = Topic(broker)
        classic = {"partition_assignment_strategy": strategy}
        members = [topic.consumer("classic", **classic) for _ in range(2)]
        topic.read_all(*members)
        types = [topic.group_type()]
        for protocol in ("consumer", "consumer", "classic", "classic"):
            members.pop(0).close()  # commits
            members.append(topic.consumer(protocol, **(classic if protocol == "classic" else {})))
            topic.read_all(*members)
            types.append(topic.group_type())
        assert types == ["CLASSIC", "CONSUMER", "CONSUMER", "CONSUMER", "CLASSIC"]
        for member in members:
            member.close()
        assert set(topic.values.values()) == {1}, "every record is read once"
        assert broker.stop() == 0


def test_a_group_of_both_protocols_continues_after_a_kill(tmp_path: Path) -> None:
    with running_varve(tmp_path, QUICK) as broker:
        topic = Topic(broker)
        members = [topic.consumer("classic"), topic.consumer("consumer")]
        topic.read_all(*members)
        for member in members:
            member.commit(asynchronous=False)
        broker.kill()
    with running_varve(tmp_path, QUICK, port=broker.port):
        topic.read_all(*members)
        assert topic.group_type() == "CONSUMER"
        for member in members:
            member.close()


def test_javas_classic_consumer_joins_a_group_of_the_consumer_protocol(
    real_kafka: None, tmp_path: Path
) -> None:
    with running_varve(tmp_path, QUICK) as broker:
        topic = Topic(broker)
        modern = topic.consumer("consumer")
        topic.read_all(modern)
        outputs: list[str] = []

        def read() -> None:
            done = run_tool(
                CONSOLE_CONSUMER,
                *("--bootstrap-server", broker.bootstrap, "--topic", "orders", "--group", "g"),
                *("--command-property", "group.protocol=classic"),
                *("--command-property", "heartbeat.interval.ms=200"),
                *("--max-messages", str(RECORDS // 2), "--timeout-ms", "60000"),
            )
            outputs.append(done.stdout)

        java = threading.Thread(target=read)
        java.start()
        topic.poll_until(lambda: len(modern.assignment()) == PARTITIONS // 2, modern)
        assert topic.group_type() == "CONSUMER"
        topic.produce()
        topic.poll_until(lambda: not java.is_alive(), modern)
        java.join()
        by_java = outputs[0].split()
        assert len(by_java) == RECORDS // 2
        # It leaves, and the other member takes its partitions over.
        topic.poll_until(lambda: len(modern.assignment()) == PARTITIONS, modern)
        assert set(topic.values) | set(by_java) == {str(n) for n in range(topic.produced)}
        assert not set(topic.values) & set(by_java)
        modern.close()
