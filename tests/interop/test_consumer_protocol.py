"""Consumers of the consumer rebalance protocol (KIP-848): librdkafka's and Java's."""

import time
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.peers.kafka import dump_log_segments, run_tool
from tests.support.varve import VarveBroker, running_varve

PARTITIONS = 6
RECORDS = 60
QUICK = {"groups": {"consumer_heartbeat_interval_ms": 200, "offsets_partitions": 1}}
TOOLS = "org.apache.kafka.tools"


def produce(broker: VarveBroker, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics([NewTopic(topic, PARTITIONS)]).values():
        future.result()
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(RECORDS):
        producer.produce(topic, value=str(number), partition=number % PARTITIONS)
    assert producer.flush(30) == 0


def consumer(broker: VarveBroker, **options: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "g",
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            **{name.replace("_", "."): value for name, value in options.items()},
        }
    )


def poll_until_shared(*consumers: Consumer, deadline_seconds: float = 60) -> set[str]:
    """Poll until every member owns its share; return the values that arrived meanwhile."""
    values: set[str] = set()
    deadline = time.monotonic() + deadline_seconds
    share = PARTITIONS // len(consumers)
    while time.monotonic() < deadline:
        for member in consumers:
            for message in member.consume(100, 0.05):
                assert message.error() is None
                values.add(message.value().decode())
        if all(len(member.assignment()) == share for member in consumers):
            return values
    raise AssertionError([member.assignment() for member in consumers])


def test_librdkafka_shares_a_topic_among_members_and_continues_after_a_restart(
    tmp_path: Path,
) -> None:
    with running_varve(tmp_path, QUICK) as broker:
        produce(broker, "orders")
        first, second = consumer(broker), consumer(broker, group_instance_id="static")
        first.subscribe(["orders"])
        values = poll_until_shared(first)
        second.subscribe(["^ord.*"])
        values |= poll_until_shared(first, second)
        deadline = time.monotonic() + 60
        while len(values) < RECORDS and time.monotonic() < deadline:
            for member in (first, second):
                values |= {m.value().decode() for m in member.consume(100, 0.05)}
        assert len(values) == RECORDS
        for member in (first, second):
            member.close()  # commits
        assert broker.stop() == 0
    with running_varve(tmp_path, QUICK) as again:
        partitions = [TopicPartition("orders", number) for number in range(PARTITIONS)]
        committed = consumer(again).committed(partitions, 60)  # it retries while groups are loaded
        assert sum(partition.offset for partition in committed) == RECORDS
        admin = AdminClient({"bootstrap.servers": again.bootstrap})
        described = admin.describe_consumer_groups(["g"])["g"].result()
        assert str(described.type) == "ConsumerGroupType.CONSUMER"


def test_javas_consumer_and_tools_speak_the_consumer_protocol(
    real_kafka: None, tmp_path: Path
) -> None:
    with running_varve(tmp_path, QUICK) as broker:
        produce(broker, "orders")
        connect = ("--bootstrap-server", broker.bootstrap)
        read = run_tool(
            f"{TOOLS}.consumer.ConsoleConsumer",
            *connect,
            *("--topic", "orders", "--from-beginning", "--group", "java"),
            *("--command-property", "group.protocol=consumer"),
            *("--max-messages", str(RECORDS), "--timeout-ms", "60000"),
        )
        assert sorted(read.stdout.split(), key=int) == [str(n) for n in range(RECORDS)], read.stderr
        member = consumer(broker)
        member.subscribe(["orders"])
        poll_until_shared(member)
        groups = f"{TOOLS}.consumer.group.ConsumerGroupCommand"
        state = run_tool(groups, *connect, "--describe", "--group", "g", "--state").stdout
        assert "uniform" in state, state
        assert "Stable" in state, state
        listed = run_tool(groups, *connect, "--list", "--type", "consumer").stdout
        assert {tuple(line.split()[:2]) for line in listed.splitlines()[1:]} == {
            ("g", "Consumer"),
            ("java", "Consumer"),
        }
        offsets = run_tool(groups, *connect, "--describe", "--group", "java").stdout
        assert offsets.count("orders") == PARTITIONS, offsets
        member.close()
        assert broker.stop() == 0
    log = next((tmp_path / "data").glob("__consumer_offsets-0/*.log"))
    decoded = run_tool(f"{TOOLS}.DumpLogSegments", "--offsets-decoder", "--files", str(log)).stdout
    for kind in (3, 5, 6, 7, 8):  # the versions of the keys: metadata, member, target, assignment
        assert f'key: {{"type":"{kind}","data":{{"groupId":"g"' in decoded, decoded[-3000:]
    assert "Error" not in decoded
    assert "unknown" not in decoded.lower(), decoded[-3000:]
    assert dump_log_segments([log])
