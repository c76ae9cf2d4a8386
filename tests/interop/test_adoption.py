"""A data directory of a killed Apache Kafka is opened, served, added to, and given back."""

import shutil
import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from protocol.errors import ErrorCode
from storage.format.batch import Record, build_batch, stamp, walk_headers
from tests.support.draws import cases, only_in_ci
from tests.support.peers.kafka import KafkaBroker, running_kafka
from tests.support.peers.killed_kafka import (
    ADOPTER_SETTINGS,
    CLOCKED,
    CODECS,
    EVENTS,
    LONG_AGO_MS,
    TABLE,
    TOPICS,
    TRANSFERS,
    KilledKafka,
    committed_offsets,
    files_of,
    topic_ids,
)
from tests.support.peers.killed_kafka import SETTINGS as KAFKA_SETTINGS
from tests.support.protocol.raw_client import RawClient
from tests.support.reading import View, assert_same_view, read_topics
from tests.support.varve import VarveBroker, start_varve
from tests.support.waiting import wait_until

MADE_HERE = "made-here"
ISOLATIONS = ("read_uncommitted", "read_committed")


def expected_view(killed: KilledKafka, isolation: str) -> View:
    return killed.committed_only if isolation == "read_committed" else killed.uncommitted


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_every_record_is_served_exactly_as_kafka_served_it(
    killed_kafka: KilledKafka, adopted: VarveBroker, isolation: str
) -> None:
    expected = expected_view(killed_kafka, isolation)
    assert_same_view(read_topics(adopted.bootstrap, TOPICS, isolation), expected)
    assert all(expected.values())


def test_aborted_and_undecided_records_were_there_to_be_left_out(
    killed_kafka: KilledKafka,
) -> None:
    """Otherwise the comparison of the isolation levels proves nothing."""
    seen = {record.value for record in killed_kafka.uncommitted[TRANSFERS, 0]}
    committed = {record.value for record in killed_kafka.committed_only[TRANSFERS, 0]}
    assert b"open-0" in seen - committed
    assert b"behind-0" in seen - committed
    assert any(value and value.startswith(b"lz4-1-") for value in seen - committed)
    assert any(value and value.startswith(b"lz4-2-") for value in committed)


def test_committed_offsets_of_kafkas_groups_are_found(
    killed_kafka: KilledKafka, adopted: VarveBroker
) -> None:
    assert killed_kafka.offsets["alone", EVENTS, 2] == (1302, "note 2")
    assert killed_kafka.offsets["transfer-job", EVENTS, 0][0] > 0
    assert committed_offsets(adopted.bootstrap) == killed_kafka.offsets


def test_a_group_goes_on_where_kafka_let_it_stop(killed_kafka: KilledKafka, tmp_path: Path) -> None:
    broker = start_varve(killed_kafka.copy_to(tmp_path), ADOPTER_SETTINGS)
    try:
        options = {"bootstrap.servers": broker.bootstrap, "group.id": "members", "log_level": 0}
        consumer = Consumer({**options, "auto.offset.reset": "error"})
        consumer.subscribe([CLOCKED])
        first = consumer.consume(1, timeout=30)[0]
        assert first.error() is None, first.error()
        assert first.offset() == killed_kafka.offsets["members", CLOCKED, 0][0]
        consumer.close()
    finally:
        assert broker.stop() == 0


def test_an_idempotent_producer_of_kafka_goes_on_where_its_sequence_stopped(
    killed_kafka: KilledKafka, tmp_path: Path
) -> None:
    log = sorted((killed_kafka.directory / "data" / f"{EVENTS}-2").glob("*.log"))[-1].read_bytes()
    batches = [(at, header) for at, header in walk_headers(log) if header.producer_id >= 0]
    position, last = batches[-1]
    again = bytearray(log[position : position + last.size_bytes])
    stamp(again, 0, 0, -1)  # as a producer sends it
    record = Record(0, LONG_AGO_MS, b"k", b"v", ())

    def batch(sequence: int) -> bytes:
        return bytes(
            build_batch(
                [record],
                producer_id=last.producer_id,
                producer_epoch=last.producer_epoch,
                base_sequence=sequence,
            )
        )

    broker = start_varve(killed_kafka.copy_to(tmp_path), ADOPTER_SETTINGS)
    try:
        with RawClient(broker.port) as client:
            end = client.fetch(EVENTS, offset=last.base_offset, partition=2).high_watermark
            duplicate = client.produce(EVENTS, bytes(again), 2)
            assert (duplicate.error_code, duplicate.base_offset) == (0, last.base_offset)
            gap = client.produce(EVENTS, batch(last.last_sequence + 5), 2)
            assert ErrorCode(gap.error_code) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
            following = client.produce(EVENTS, batch(last.last_sequence + 1), 2)
            assert (following.error_code, following.base_offset) == (0, end)
    finally:
        assert broker.stop() == 0


def test_topic_ids_and_the_cluster_id_are_kept(
    killed_kafka: KilledKafka, adopted: VarveBroker
) -> None:
    assert topic_ids(adopted.bootstrap, TOPICS) == killed_kafka.topic_ids
    metadata = AdminClient({"bootstrap.servers": adopted.bootstrap}).list_topics(timeout=30)
    properties = (killed_kafka.directory / "data" / "meta.properties").read_text()
    assert f"cluster.id={metadata.cluster_id}\n" in properties
    assert f"node.id={metadata.controller_id}\n" in properties


def test_kafkas_own_metadata_log_is_not_touched_nor_served(
    killed_kafka: KilledKafka, adopted: VarveBroker
) -> None:
    name = "__cluster_metadata-0"
    assert files_of(adopted.data / name) == files_of(killed_kafka.directory / "data" / name)
    topics = AdminClient({"bootstrap.servers": adopted.bootstrap}).list_topics(timeout=30).topics
    assert "__cluster_metadata" not in topics
    assert len(topics["__consumer_offsets"].partitions) == 4


def test_offsets_are_found_by_timestamp_in_what_kafka_wrote(
    killed_kafka: KilledKafka, adopted: VarveBroker
) -> None:
    records = killed_kafka.uncommitted[EVENTS, 2]
    expected = LONG_AGO_MS + 700
    first = next(record for record in records if record.timestamp[1] >= expected)
    newest = max(record.timestamp[1] for record in records)
    partition = TopicPartition(EVENTS, 2)
    admin = AdminClient({"bootstrap.servers": adopted.bootstrap})

    def offset_of(spec: OffsetSpec) -> int:
        return int(admin.list_offsets({partition: spec})[partition].result(30).offset)

    assert offset_of(OffsetSpec.for_timestamp(expected)) == first.offset
    assert offset_of(OffsetSpec.for_timestamp(newest + 1)) == -1
    last = offset_of(OffsetSpec.max_timestamp())
    assert next(record for record in records if record.offset == last).timestamp[1] == newest


def test_settings_of_topics_are_those_of_kafkas_metadata(adopted: VarveBroker) -> None:
    admin = AdminClient({"bootstrap.servers": adopted.bootstrap})
    assert setting(admin, TABLE, "cleanup.policy") == "compact"
    assert setting(admin, TABLE, "min.cleanable.dirty.ratio") == "1.0", "the altered value"
    assert setting(admin, TABLE, "segment.bytes") == "1048576"
    assert setting(admin, EVENTS, "cleanup.policy") == "delete"
    assert setting(admin, EVENTS, "retention.ms") == "-1"
    assert setting(admin, CLOCKED, "message.timestamp.type") == "LogAppendTime"
    # It has no policy of its own, and server.properties is not read.
    assert setting(admin, CLOCKED, "cleanup.policy") == ""
    for topic, is_unknown in ((TABLE, 0), (EVENTS, 0), (CLOCKED, 1)):
        assert adopted.metric("varve_topic_policy_unknown", topic=topic) == is_unknown


# What nobody gave a policy -------------------------------------------------------------------


def test_a_topic_of_unknown_policy_is_neither_cleaned_nor_expired_and_says_so(
    killed_kafka: KilledKafka, tmp_path: Path
) -> None:
    directory = killed_kafka.copy_to(tmp_path)
    shutil.rmtree(directory / "data" / "__cluster_metadata-0")  # a broker beside its controllers
    broker = start_varve(directory, ADOPTER_SETTINGS)
    try:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        for topic in (TABLE, EVENTS):
            assert setting(admin, topic, "cleanup.policy") == ""
            assert broker.metric("varve_topic_policy_unknown", topic=topic) == 1
            assert topic in broker.log_text
        before = logs_of(broker, TABLE), logs_of(broker, EVENTS)
        create_and_see_cleaned_and_expired(broker, admin)
        assert (logs_of(broker, TABLE), logs_of(broker, EVENTS)) == before
        alter(admin, TABLE, {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"})
        roll_out(broker, admin)
        wait_until(
            lambda: logs_of(broker, TABLE) != before[0], "the table is cleaned once it may be"
        )
        assert setting(admin, TABLE, "cleanup.policy") == "compact"
        assert broker.metric("varve_topic_policy_unknown", topic=TABLE) == 0
        assert logs_of(broker, EVENTS) == before[1]
        assert_last_values_kept(broker, killed_kafka)
    finally:
        assert broker.stop() == 0


def assert_last_values_kept(broker: VarveBroker, killed: KilledKafka) -> None:
    records = read_topics(broker.bootstrap, [TABLE])[TABLE, 0]
    expected = killed.uncommitted[TABLE, 0]
    survivors = set(expected)
    seen_records = [record for record in records if record.key != b"roll"]
    assert set(seen_records) <= survivors, "what survives is what Kafka served"
    assert len(seen_records) < len(expected)
    last = {record.key: record for record in expected}
    found_last = {record.key: record for record in seen_records}
    for key, record in last.items():
        assert found_last.get(key) == record, key


def create_and_see_cleaned_and_expired(broker: VarveBroker, admin: AdminClient) -> None:
    """Control: on this very broker cleaner and retention are at work."""
    new = [
        NewTopic(
            "control-table",
            config={
                "cleanup.policy": "compact",
                "segment.ms": "100",
                "min.cleanable.dirty.ratio": "0",
                "max.compaction.lag.ms": "1",
            },
        ),
        NewTopic("control-events", config={"retention.ms": "1", "segment.ms": "100"}),
    ]
    for future in admin.create_topics(new).values():
        future.result(30)
    producer = quiet_producer(broker.bootstrap)
    for number in range(100):
        producer.produce("control-table", b"%d" % number, b"one key")
        producer.produce("control-events", b"%d" % number, timestamp=LONG_AGO_MS)
    assert producer.flush(30) == 0

    def cleaned() -> bool:
        return len(read_topics(broker.bootstrap, ["control-table"])["control-table", 0]) < 100

    def expired() -> bool:
        return not read_topics(broker.bootstrap, ["control-events"])["control-events", 0]

    wait_until(cleaned, "the control table is cleaned")
    wait_until(expired, "the control events are expired")


def roll_out(broker: VarveBroker, admin: AdminClient) -> None:
    """Make the dirty part cleanable: the active segment is closed by time and a further record."""
    alter(admin, TABLE, {"segment.ms": "100", "max.compaction.lag.ms": "100"})
    producer = quiet_producer(broker.bootstrap)
    producer.produce(TABLE, b"roll", b"roll")
    assert producer.flush(30) == 0


def logs_of(broker: VarveBroker, topic: str) -> dict[str, int]:
    """Sizes of the segments of a topic."""
    return {
        f"{path.parent.name}/{path.name}": path.stat().st_size
        for path in broker.data.glob(f"{topic}-*/*.log")
    }


def setting(admin: AdminClient, topic: str, key: str) -> str:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    return str(admin.describe_configs([resource])[resource].result(30)[key].value)


def alter(admin: AdminClient, topic: str, settings: dict[str, str]) -> None:
    changes = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=changes)
    admin.incremental_alter_configs([resource])[resource].result(30)


def quiet_admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


def quiet_producer(bootstrap: str, codec: str = "none", *, idempotent: bool = False) -> Producer:
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "compression.type": codec,
            "enable.idempotence": idempotent,
            "log_level": 0,
        }
    )


# And back ------------------------------------------------------------------------------------


@only_in_ci("Kafka's tool reads what we leave in test_dump_log_segments.py")
@pytest.mark.parametrize("ending", ["killed", "stopped"][: cases(few=1, many=2)])
def test_kafka_opens_what_is_left_to_it_and_serves_what_both_wrote(
    killed_kafka: KilledKafka, tmp_path: Path, ending: str
) -> None:
    broker = start_varve(killed_kafka.copy_to(tmp_path), ADOPTER_SETTINGS)
    try:
        add_records(broker)
        commit(broker)
        admin = quiet_admin(broker.bootstrap)
        admin.create_topics([NewTopic(MADE_HERE)])[MADE_HERE].result(30)
        local = {
            isolation: read_topics(broker.bootstrap, TOPICS, isolation) for isolation in ISOLATIONS
        }
        offsets = committed_offsets(broker.bootstrap)
    finally:
        if ending == "killed":
            broker.kill()
        else:
            assert broker.stop() == 0
    assert_begins_with(local["read_uncommitted"], killed_kafka.uncommitted)
    assert offsets["alone", EVENTS, 0] == (1399, "ours")
    with running_kafka(tmp_path, KAFKA_SETTINGS) as kafka:
        assert_same_view(read_topics(kafka.bootstrap, TOPICS), local["read_uncommitted"])
        assert_committed_view(kafka, local["read_committed"])
        assert committed_offsets(kafka.bootstrap) == offsets
        assert topic_ids(kafka.bootstrap, TOPICS) == killed_kafka.topic_ids
        still_works(kafka)
        remote = read_topics(kafka.bootstrap, TOPICS)
    strays = [path.name for path in broker.data.iterdir() if path.name.endswith("-stray")]
    assert [name.split("-0.")[0] for name in strays] == [MADE_HERE], "Kafka does not know that one"
    again = start_varve(tmp_path, ADOPTER_SETTINGS)
    try:
        assert_same_view(read_topics(again.bootstrap, TOPICS), remote)
    finally:
        assert again.stop() == 0


def assert_committed_view(kafka: KafkaBroker, local: View) -> None:
    """The transaction left open is Kafka's to end: after it more may have come to light."""
    results = read_topics(kafka.bootstrap, TOPICS, "read_committed")
    undecided = (TRANSFERS, 0)
    assert results[undecided][: len(local[undecided])] == local[undecided]
    decided = [where for where in local if where != undecided]
    assert_same_view({w: results[w] for w in decided}, {w: local[w] for w in decided})


def add_records(broker: VarveBroker) -> None:
    now_ms = int(time.time() * 1000)
    for codec in CODECS:
        for idempotent in (False, True):
            producer = quiet_producer(broker.bootstrap, codec, idempotent=idempotent)
            for number in range(200):
                for topic, partition in ((TABLE, 0), (EVENTS, number % 3), (TRANSFERS, 1)):
                    producer.produce(
                        topic,
                        f"ours-{codec}-{number}".encode() * 5,
                        f"key-{number % 50}",
                        partition=partition,
                        timestamp=now_ms + number,
                        headers=[("by", b"ours"), ("none", None)],
                    )
            assert producer.flush(60) == 0


def commit(broker: VarveBroker) -> None:
    options = {"bootstrap.servers": broker.bootstrap, "group.id": "alone", "log_level": 0}
    consumer = Consumer({**options, "enable.auto.commit": False})
    consumer.commit(offsets=[TopicPartition(EVENTS, 0, 1399, "ours")], asynchronous=False)
    consumer.close()


def assert_begins_with(value: View, earlier: View) -> None:
    for where, records in earlier.items():
        assert value[where][: len(records)] == records, where


def still_works(kafka: KafkaBroker) -> None:
    """Kafka takes new records after ours."""
    producer = quiet_producer(kafka.bootstrap, idempotent=True)
    failures: list[str] = []
    for topic in TOPICS:
        producer.produce(
            topic, b"v", b"k", on_delivery=lambda e, _: failures.append(str(e)) if e else None
        )
    assert producer.flush(60) == 0
    assert not failures
