"""format("varve") in Spark: the same rows, columns and options as Spark's own Kafka source."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from config.security.clients import Cluster
from pipeline.client.kafka_client import LATEST, WireClient
from pipeline.client.producer import BulkProducer
from pipeline.records.columns import COLUMNS
from storage.model import TopicPartition
from tests.pipeline.table_topics import truncate_log
from tests.support.draws import only_in_ci
from tests.support.varve import VarveBroker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

START_MS = 1_700_000_000_000
# What Spark's Kafka source 4.2.0 prints as its schema, with includeHeaders.
KAFKA_SCHEMA = json.loads(
    """{"fields":[{"metadata":{},"name":"key","nullable":true,"type":"binary"},
    {"metadata":{},"name":"value","nullable":true,"type":"binary"},
    {"metadata":{},"name":"topic","nullable":true,"type":"string"},
    {"metadata":{},"name":"partition","nullable":true,"type":"integer"},
    {"metadata":{},"name":"offset","nullable":true,"type":"long"},
    {"metadata":{},"name":"timestamp","nullable":true,"type":"timestamp"},
    {"metadata":{},"name":"timestampType","nullable":true,"type":"integer"},
    {"metadata":{},"name":"headers","nullable":true,"type":{"containsNull":true,
    "elementType":{"fields":[{"metadata":{},"name":"key","nullable":true,"type":"string"},
    {"metadata":{},"name":"value","nullable":true,"type":"binary"}],"type":"struct"},
    "type":"array"}}],"type":"struct"}"""
)


class Topic:
    """A topic of three partitions, made and written to beside Spark."""

    def __init__(self, broker: VarveBroker, name: str, partitions: int = 3) -> None:
        self.broker, self.name = broker, name
        self.admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        # The records are of the past, and the daemon looks twice a second for what is too old.
        new = NewTopic(name, partitions, config={"retention.ms": "-1"})
        for future in self.admin.create_topics([new]).values():
            future.result()

    def write(self, first: int, end: int) -> None:
        with BulkProducer(Cluster(self.broker.bootstrap)) as producer:
            for n in range(first, end):
                producer.send(
                    self.name,
                    None if n % 10 == 9 else b"k%d" % n,
                    None if n % 7 == 0 else b"v%d" % n,
                    partition=n % 3,
                    headers=[("n", b"%d" % n), ("none", None)] if n % 2 else None,
                    timestamp_ms=START_MS + 1000 * n,
                )

    def ends(self) -> dict[int, int]:
        with WireClient(Cluster(self.broker.bootstrap)) as client:
            places = [
                TopicPartition(self.name, n) for n in client.partitions([self.name])[self.name]
            ]
            results = client.offsets(dict.fromkeys(places, LATEST))
        return {place.partition: offset for place, offset in results.items()}

    def delete_below(self, partition: int, offset: int) -> None:
        deleted = self.admin.delete_records([Place(self.name, partition, offset)])
        for future in deleted.values():
            future.result()


@pytest.fixture
def filled(broker: VarveBroker, topic: str) -> Topic:
    made = Topic(broker, topic)
    made.write(0, 300)
    return made


def load(spark: "SparkSession", topic: Topic, **options: Any) -> "DataFrame":
    reader = spark.read.format("varve").option("kafka.bootstrap.servers", topic.broker.bootstrap)
    if not {"assign", "subscribePattern"} & set(options):
        reader = reader.option("subscribe", topic.name)
    return reader.options(**options).load()


def test_the_schema_is_that_of_sparks_kafka_source(spark: "SparkSession", filled: Topic) -> None:
    with_headers = load(spark, filled, includeHeaders=True)
    assert with_headers.schema.jsonValue() == KAFKA_SCHEMA
    assert load(spark, filled).columns == list(COLUMNS)


def test_every_row_is_there_with_all_its_columns(spark: "SparkSession", filled: Topic) -> None:
    rows = load(spark, filled, includeHeaders=True).orderBy("timestamp").collect()
    assert len(rows) == 300
    for n, row in enumerate(rows):
        assert row.key == (None if n % 10 == 9 else b"k%d" % n)
        assert row.value == (None if n % 7 == 0 else b"v%d" % n)
        assert (row.topic, row.partition, row.offset) == (filled.name, n % 3, n // 3)
        assert row.timestamp.timestamp() * 1000 == START_MS + 1000 * n
        assert row.timestampType == 0
        headers = None if row.headers is None else [(h.key, h.value) for h in row.headers]
        assert headers == ([("n", b"%d" % n), ("none", None)] if n % 2 else None)


def test_only_named_columns_are_read(spark: "SparkSession", filled: Topic) -> None:
    named = load(spark, filled, columns="offset,partition")
    assert named.columns == ["offset", "partition"]
    assert named.count() == 300
    reader = spark.read.format("varve").schema("key binary, offset bigint")
    rows = reader.options(**{"kafka.bootstrap.servers": filled.broker.bootstrap})
    assert rows.option("subscribe", filled.name).load().where("key = 'k5'").collect() == [
        (b"k5", 1)
    ]
    wrong = spark.read.format("varve").schema("offset int").option("subscribe", filled.name)
    with pytest.raises(Exception, match="the schema must have the types"):
        wrong.option("kafka.bootstrap.servers", filled.broker.bootstrap).load().count()


CONDITIONS = (
    "partition = 1",
    "partition in (0, 2) and offset >= 50",
    "offset between 10 and 20 and partition <> 1",
    "offset < 5 or partition = 2",
    "offset in (3, 7)",
    "topic = 'elsewhere'",
    "timestamp >= timestamp_millis(1700000100000) and offset < 40",
    "timestamp = timestamp_millis(1700000100000)",
    "timestamp > timestamp_millis(1800000000000)",
    "key = 'k31' and value is not null",
    "headers is null",
)


def test_a_filter_that_is_pushed_down_gives_what_a_plain_one_gives(
    spark: "SparkSession", filled: Topic
) -> None:
    every = load(spark, filled, includeHeaders=True)
    rows = every.collect()
    matches = spark.createDataFrame(rows, every.schema).selectExpr(*CONDITIONS).collect()
    for number, condition in enumerate(CONDITIONS):
        pushed = load(spark, filled, includeHeaders=True, pushDownPredicate=True)
        pairs = zip(rows, matches, strict=True)
        expected = sorted(repr(row) for row, match in pairs if match[number])
        assert sorted(map(repr, pushed.where(condition).collect())) == expected, condition


def test_pushed_down_filters_leave_whole_partitions_unread(
    spark: "SparkSession", filled: Topic
) -> None:
    def narrowed(condition: str, pushed: bool = True) -> "DataFrame":
        return load(spark, filled, pushDownPredicate=pushed).where(condition)

    few = "partition = 1 and offset >= 10 and offset < 20"
    assert narrowed(few).rdd.getNumPartitions() == 1
    assert narrowed(few).count() == 10
    assert narrowed("offset > 1000000").count() == 0
    assert narrowed(few, pushed=False).rdd.getNumPartitions() == 3
    assert narrowed(few, pushed=False).count() == 10


def test_uses_of_one_dataframe_do_not_get_each_others_filters(
    spark: "SparkSession", filled: Topic
) -> None:
    """Which is what Spark 4.3.0 does with a Python source that takes filters."""
    every = load(spark, filled)
    item, two = every.where("partition = 1"), every.where("partition = 2 and offset < 7")
    assert [item.count(), every.count(), two.count(), every.count()] == [100, 300, 7, 300]
    assert item.unionAll(two).unionAll(every).count() == 407


def test_bounds_are_taken_as_sparks_source_takes_them(spark: "SparkSession", filled: Topic) -> None:
    name = filled.name
    start = json.dumps({name: {"0": 90, "1": -2, "2": 100}})
    end = json.dumps({name: {"0": -1, "1": 3, "2": 100}})
    rows = load(spark, filled, startingOffsets=start, endingOffsets=end).collect()
    results = sorted((row.partition, row.offset) for row in rows)
    assert results == [(0, n) for n in range(90, 100)] + [(1, n) for n in range(3)]
    times = {"startingTimestamp": START_MS + 60_000, "endingTimestamp": START_MS + 90_000}
    assert load(spark, filled, **times).count() == 30
    assert load(spark, filled, assign=json.dumps({name: [2]})).count() == 100
    assert load(spark, filled, subscribePattern=f"{name[:-1]}.").count() == 300
    assert load(spark, filled, minPartitions=10).rdd.getNumPartitions() >= 10
    assert load(spark, filled, minPartitions=10).count() == 300
    for options, reason in (
        ({"startingOffsets": json.dumps({name: {"0": 1}})}, "must name exactly the partitions"),
        ({"startingTimestamp": START_MS + 10**9}, "no record at or after"),
        ({"subscribe": f"{name}-not"}, "does not exist"),
        ({"assign": json.dumps({name: [7]})}, "no such partition"),
    ):
        with pytest.raises(Exception, match=reason):
            load(spark, filled, **options).count()
    later = {"startingTimestamp": START_MS + 10**9, "startingOffsetsByTimestampStrategy": "latest"}
    assert load(spark, filled, **later).count() == 0


def test_lost_offsets_fail_a_batch_unless_it_is_told_to_go_on(
    spark: "SparkSession", filled: Topic
) -> None:
    start = json.dumps({filled.name: {"0": 5, "1": 0, "2": 0}})
    filled.delete_below(0, 30)
    with pytest.raises(Exception, match="offset 5 requested, but the log starts at 30"):
        load(spark, filled, startingOffsets=start).count()
    assert load(spark, filled, startingOffsets=start, failOnDataLoss=False).count() == 270
    assert load(spark, filled).count() == 270


# writing


def test_what_is_written_is_read_again(
    spark: "SparkSession", filled: Topic, broker: VarveBroker
) -> None:
    copy = Topic(broker, f"{filled.name}-copy")
    rows = load(spark, filled, includeHeaders=True)
    written = rows.selectExpr("key", "value", f"'{copy.name}' as topic", "partition", "headers")
    save(written, broker)
    result = load(spark, copy, includeHeaders=True)
    columns = ("key", "value", "partition", "headers")
    expected = sorted(map(repr, rows.select(*columns).collect()))
    assert sorted(map(repr, result.select(*columns).collect())) == expected


def save(rows: "DataFrame", broker: VarveBroker, **options: str) -> None:
    writer = rows.write.format("varve").mode(options.pop("mode", "append"))
    writer.option("kafka.bootstrap.servers", broker.bootstrap).options(**options).save()


def test_texts_are_written_and_other_columns_passed_over(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    made = Topic(broker, topic)
    rows = spark.createDataFrame([("k", "vü", 7)], "key string, value string, other int")
    save(rows, broker, topic=topic)
    (result,) = load(spark, made).collect()
    assert (result.key, result.value) == (b"k", "vü".encode())


@pytest.mark.parametrize(
    ("schema", "options", "reason"),
    [
        ("key string", {"topic": "t"}, "column `value` is required"),
        ("value int", {"topic": "t"}, "must be a string or binary"),
        ("value string", {}, "option `topic` or column"),
        ("value string, topic string", {}, "a row has no topic"),
        ("value string, headers string", {"topic": "t"}, "must be array"),
        ("value string", {"topic": "t", "mode": "overwrite"}, "only be appended to"),
    ],
)
def test_rows_that_cannot_be_written_are_refused(
    spark: "SparkSession",
    broker: VarveBroker,
    schema: str,
    options: dict[str, str],
    reason: str,
) -> None:
    width = schema.count(",") + 1
    with pytest.raises(Exception, match=reason):
        save(spark.createDataFrame([(None,) * width], schema), broker, **options)


def test_a_task_that_fails_is_run_again_and_its_rows_are_all_there(
    spark: "SparkSession", broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    """At least once: what the failed attempt wrote may be there twice."""
    made = Topic(broker, topic)
    marker = str(tmp_path / "failed")

    def fail_once(batches: Any) -> Any:
        yield from batches
        if not Path(marker).exists():
            Path(marker).touch()
            raise RuntimeError("the first attempt fails after its last row")

    rows = spark.range(0, 500, 1, 1).selectExpr("cast(id as string) as key", "'v' as value")
    save(rows.mapInArrow(fail_once, rows.schema), broker, topic=topic)
    results = [row.key for row in load(spark, made).collect()]
    assert set(results) == {b"%d" % n for n in range(500)}


def test_a_write_that_is_refused_fails_the_query(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    rows = spark.createDataFrame([("v",)], "value string")
    settings = {"kafka.delivery.timeout.ms": "1000", "topic": topic}
    with pytest.raises(Exception, match="ProduceError: "):
        save(rows, broker, **settings)


# streams


def run_stream(
    spark: "SparkSession", topic: Topic, sink: str, checkpoint: Path, **options: Any
) -> list[int]:
    """Read what is there now -> how many rows each batch had."""
    stream = spark.readStream.format("varve").option("subscribe", topic.name)
    rows = stream.options(**{"kafka.bootstrap.servers": topic.broker.bootstrap} | options).load()
    writer = rows.selectExpr("key", "value").writeStream.format("varve")
    query = (
        writer.options(**{"kafka.bootstrap.servers": topic.broker.bootstrap, "topic": sink})
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [progress["numInputRows"] for progress in query.recentProgress]


def test_a_stream_reads_what_is_new_since_its_checkpoint(
    spark: "SparkSession", filled: Topic, broker: VarveBroker, tmp_path: Path
) -> None:
    copy = Topic(broker, f"{filled.name}-copy")
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 120}
    batches = run_stream(spark, filled, copy.name, tmp_path / "c", **options)
    assert sum(batches) == 300
    assert max(batches) <= 120
    assert sum(run_stream(spark, filled, copy.name, tmp_path / "c", **options)) == 0
    filled.write(300, 350)
    more = NewPartitions(filled.name, 4)
    for future in filled.admin.create_partitions([more]).values():
        future.result()
    with BulkProducer(Cluster(broker.bootstrap)) as producer:
        producer.send(filled.name, b"new", b"partition", partition=3)
    assert sum(run_stream(spark, filled, copy.name, tmp_path / "c", **options)) == 51
    result = load(spark, copy).select("key", "value").collect()
    expected = load(spark, filled).select("key", "value").collect()
    assert sorted(map(repr, result)) == sorted(map(repr, expected))


def test_a_stream_begins_at_the_end_where_nothing_is_said(
    spark: "SparkSession", filled: Topic, broker: VarveBroker, tmp_path: Path
) -> None:
    copy = Topic(broker, f"{filled.name}-copy")
    assert sum(run_stream(spark, filled, copy.name, tmp_path / "c")) == 0
    filled.write(300, 310)
    assert sum(run_stream(spark, filled, copy.name, tmp_path / "c")) == 10


@only_in_ci("test_lost_offsets_fail_a_batch_unless_it_is_told_to_go_on has the rule")
def test_a_stream_that_lost_records_fails_unless_it_is_told_to_go_on(
    spark: "SparkSession", filled: Topic, broker: VarveBroker, tmp_path: Path
) -> None:
    copy = Topic(broker, f"{filled.name}-copy")
    assert sum(run_stream(spark, filled, copy.name, tmp_path / "c", startingOffsets="earliest"))
    filled.write(300, 600)
    filled.delete_below(0, 150)
    with pytest.raises(Exception, match="DataLossError"):
        run_stream(spark, filled, copy.name, tmp_path / "c")
    batches = run_stream(spark, filled, copy.name, tmp_path / "c", failOnDataLoss=False)
    assert sum(batches) == 250
    assert filled.ends() == {0: 200, 1: 200, 2: 200}


def test_a_stream_finds_a_truncation_though_other_records_have_the_offsets(
    spark: "SparkSession", filled: Topic, broker: VarveBroker, tmp_path: Path
) -> None:
    copy = Topic(broker, f"{filled.name}-copy")
    assert sum(run_stream(spark, filled, copy.name, tmp_path / "c", startingOffsets="earliest"))
    assert filled.ends() == {0: 100, 1: 100, 2: 100}
    truncate_log(broker, filled.name, to=0)
    filled.write(300, 900)
    with pytest.raises(Exception, match="read up to 100, but the log was truncated to offset 0"):
        run_stream(spark, filled, copy.name, tmp_path / "c")
    batches = run_stream(spark, filled, copy.name, tmp_path / "c", failOnDataLoss=False)
    assert sum(batches) == 500
    assert sum(run_stream(spark, filled, copy.name, tmp_path / "c")) == 0, "it is known by now"
