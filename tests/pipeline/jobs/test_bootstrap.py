"""`bootstrap`: what a table says stands in the topic, where Java's producer would have put it."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from click.testing import CliRunner
from confluent_kafka import TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
)
from pyspark.sql import Row

from admin.client import ApiClient
from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.topics import fetch_bounds, read_topic
from pipeline.command import SparkOptions
from pipeline.errors import JobError
from pipeline.jobs import bootstrap
from pipeline.jobs.bootstrap import WriteTarget, bootstrap_topic
from pipeline.jobs.bootstrap_resume import remaining, since_option
from pipeline.jobs.bootstrap_rows import RowMapping, shaped
from pipeline.records.partitioner import partition_of
from pipeline.tables.table_reading import read_table
from tests.pipeline.planted import make_topic, write
from tests.support.draws import cases, only_in_ci, seed_of_test
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

START_MS = 1_700_000_000_000
ZONE = "spark.sql.session.timeZone"
COLUMNS = ("key", "value", "partition", "offset", "timestamp", "headers")
# org.apache.kafka.common.utils.UtilsTest.testMurmur2
JAVA_MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def records(spark: "SparkSession", broker: VarveBroker, topic: str) -> list[Row]:
    cluster = Cluster(broker.bootstrap)
    bounds = fetch_bounds(cluster, topic)
    result = read_topic(spark, cluster, topic, bounds.first, bounds.end, columns=COLUMNS)
    rows: list[Row] = result.orderBy("partition", "offset").collect()
    return rows


def run(
    table: "DataFrame", broker: VarveBroker, topic: str, mapping: RowMapping, **options: Any
) -> bootstrap.BootstrapResult:
    dry_run = options.pop("dry_run", False)
    target = WriteTarget(Cluster(broker.bootstrap), topic, **options)
    return bootstrap_topic(table.sparkSession, table, mapping, target, dry_run=dry_run)


@only_in_ci("test_keys_go_where_javas_default_partitioner_puts_them has the rule")
def test_keys_go_where_javas_partitioner_puts_them(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 7)
    rng = random.Random(seed_of_test(30))
    rows = dict.fromkeys(JAVA_MURMUR2, b"v") | {
        rng.randbytes(rng.randrange(20)): rng.randbytes(9) for _ in range(300)
    }
    table = spark.createDataFrame(list(rows.items()), "k binary, v binary").repartition(3)
    result = run(table, broker, topic, RowMapping(keys=("k",), values=("v",)))
    results = records(spark, broker, topic)
    assert {row.key: row.value for row in results} == rows
    assert result.written == len(results) == len(rows)
    for row in results:
        assert row.partition == partition_of(row.key, 7)
        if row.key in JAVA_MURMUR2:
            assert row.partition == (JAVA_MURMUR2[row.key] & 0x7FFFFFFF) % 7
    counts = Counter(row.partition for row in results)
    assert {
        n: partition.records for n, partition in result.partitions.items() if partition.records
    } == counts
    for written in result.partitions.values():
        assert (written.first_offset, written.end_offset) == (0, written.records)


def test_columns_become_keys_values_headers_and_times(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 1)
    table = spark.createDataFrame(
        [("eu", 7, None, "h", START_MS), ("us", 8, 1.5, None, START_MS + 1)],
        "region string, id int, `a.b` double, note string, at long",
    )
    mapping = RowMapping(keys=("region", "id"), headers=(("n", "note"),), timestamp="at")
    run(table, broker, topic, mapping)
    document = {json.loads(row.key)["id"]: row for row in records(spark, broker, topic)}
    assert document[7].key == b'{"region":"eu","id":7}'
    assert document[7].value == b'{"a.b":null}'
    assert document[8].value == b'{"a.b":1.5}'
    assert [(h.key, h.value) for h in document[7].headers] == [("n", b"h")]
    assert [(h.key, h.value) for h in document[8].headers] == [("n", None)]
    assert document[8].timestamp.timestamp() * 1000 == START_MS + 1


def test_a_topic_can_be_written_as_it_was_read(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    copy = f"{topic}-copy"
    for name in (topic, copy):
        make_topic(broker, name, 1)
    rows = [
        (0, b"k%d" % n, None if n % 5 == 0 else b"v", START_MS + n, [("h", None)] if n % 2 else [])
        for n in range(50)
    ]
    write(broker, topic, rows)
    cluster = Cluster(broker.bootstrap)
    bounds = fetch_bounds(cluster, topic)
    table = read_topic(spark, cluster, topic, bounds.first, bounds.end, columns=COLUMNS)
    mapping = RowMapping(
        keys=("key",), values=("value",), headers_column="headers", timestamp="timestamp"
    )
    result = run(table, broker, copy, mapping)
    assert (result.counts.tombstones, result.written) == (10, 50)
    same = ("key", "value", "timestamp", "headers")
    expected, results = (
        sorted(tuple(map(repr, (row[name] for name in same))) for row in rows)
        for rows in (records(spark, broker, topic), records(spark, broker, copy))
    )
    assert results == expected


def test_duplicates_are_refused_unless_their_order_is_said(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 3)
    rows = [(f"k{n % 20}", f"v{n}", (n * 7919) % 200) for n in range(200)]
    table = spark.createDataFrame(rows, "k string, v string, turn int").repartition(4)
    mapping = RowMapping(keys=("k",), values=("v",))
    with pytest.raises(JobError, match="180 rows with the key of another row"):
        run(table, broker, topic, mapping)
    with pytest.raises(JobError, match="--order-by must define their order"):
        run(table, broker, topic, mapping, allow_duplicates=True)
    assert records(spark, broker, topic) == []
    ordered = RowMapping(keys=("k",), values=("v",), order_by=("turn",))
    result = run(table, broker, topic, ordered, allow_duplicates=True)
    assert (result.written, result.counts.duplicates, result.counts.keys) == (200, 180, 20)
    last = {row.key.decode(): row.value.decode() for row in records(spark, broker, topic)}
    assert last == {k: v for k, v, _ in sorted(rows, key=lambda row: row[2])}


def test_what_cannot_be_taken_is_refused_before_anything_is_written(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 1, max_message_bytes="1000")
    table = spark.createDataFrame([("k", "v" * 2000, 1)], "k string, v string, n int")
    nulls = spark.createDataFrame([(None, "v")], "k string, v string")
    for rows, mapping, reason in (
        (table, RowMapping(keys=("no",)), "has no column no; its columns are k, v, n"),
        (
            table,
            RowMapping(keys=("n",), key_as="raw"),
            "a raw key must be one binary or string column",
        ),
        (table, RowMapping(keys=("k",), values=("v", "n"), value_as="raw"), "not v string, n int"),
        (table, RowMapping(keys=("k",), headers=(("h", "n"),)), "must be binary or string"),
        (table, RowMapping(keys=("k",), headers_column="v"), "must be array"),
        (table, RowMapping(keys=("k",), timestamp="v"), "must be a timestamp or integer ms"),
        (table, RowMapping(keys=("k", "v", "n")), "no column is left"),
        (table, RowMapping(keys=("k",), values=("v",)), "a row has 2,001 bytes"),
        (nulls, RowMapping(keys=("k",)), "1 row without a key"),
    ):
        with pytest.raises(JobError, match=reason):
            run(rows, broker, topic, mapping)
    with pytest.raises(JobError, match="there is no topic"):
        run(nulls, broker, f"{topic}-not", RowMapping(values=("v",)))
    assert records(spark, broker, topic) == []


def test_a_topic_with_records_is_only_written_to_where_that_is_said(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 2)
    rows = [(f"k{n}", f"v{n}") for n in range(30)]
    mapping = RowMapping(keys=("k",), values=("v",))
    table = spark.createDataFrame(rows, "k string, v string")
    assert run(table.where("k <> 'k3'"), broker, topic, mapping).written == 29
    with pytest.raises(JobError, match="has up to 29 records"):
        run(table, broker, topic, mapping)
    resumed = run(table, broker, topic, mapping, resume=True)
    assert (resumed.written, resumed.skipped) == (1, 29)
    assert run(table, broker, topic, mapping, resume=True).written == 0
    assert run(table, broker, topic, mapping, append=True).written == 30
    assert len(records(spark, broker, topic)) == 60


def test_times_that_a_producer_cannot_write_are_refused(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    """librdkafka takes 0 for the time of writing."""
    make_topic(broker, topic, 1)
    mapping = RowMapping(keys=("k",), values=("v",), timestamp="t")
    rows = [("a", "v", 0), ("b", "v", -1), ("c", "v", 1), ("d", "v", None)]
    table = spark.createDataFrame(rows, "k string, v string, t long")
    with pytest.raises(JobError, match=r"^2 rows with a timestamp of 1970"):
        run(table, broker, topic, mapping)
    assert run(table.where("t is null or t > 0"), broker, topic, mapping).written == 2


def test_a_load_has_a_session_that_repeats_no_task(
    broker: VarveBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topic(broker, topic, 1)

    def open_session(options: SparkOptions, *_: object) -> NoReturn:
        raise JobError(json.dumps(dict(options.settings)))

    monkeypatch.setattr(SparkOptions, "open_session", open_session)
    done = invoke(broker, topic, "--from", "t", "--conf", "spark.speculation=true")
    settings = json.loads(done.output.removeprefix("varve: "))
    assert settings["spark.speculation"] == "false"
    assert settings["spark.stage.maxConsecutiveAttempts"] == "1"


def test_a_failure_says_what_was_written(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    """Times in the far future are refused by the broker, when others were taken already."""
    make_topic(broker, topic, 2)
    far = START_MS * 10
    rows = [("early", "v", START_MS), ("late", "v", far)]
    table = spark.createDataFrame(rows, "k string, v string, t long").repartition(1).sort("t")
    mapping = RowMapping(keys=("k",), values=("v",), timestamp="t")
    with pytest.raises(
        JobError, match=r"INVALID_TIMESTAMP.*; (these rows were written|nothing was)"
    ):
        run(table, broker, topic, mapping)
    mended = table.withColumn("t", table.t % START_MS + START_MS)
    run(mended, broker, topic, mapping, resume=True)
    assert {row.key for row in records(spark, broker, topic)} == {b"early", b"late"}


@pytest.mark.parametrize("resume", cases(few=[False], many=[False, True]))
def test_rows_that_came_after_the_check_of_the_table_are_an_error(
    spark: "SparkSession", broker: VarveBroker, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, *, resume: bool,
) -> None:  # fmt: skip
    make_topic(broker, topic, 1)
    write(broker, topic, [(0, b"a", b"1", START_MS, None)] if resume else [])
    path = tmp_path / "t.csv"
    path.write_text("k,v\na,1\nb,2\n")
    table = read_table(spark, str(path), "csv")

    def append(*_: object) -> None:  # an export that is not complete
        path.write_text(path.read_text() + "b,3\n")

    monkeypatch.setattr(bootstrap, "_check_size", append)
    with pytest.raises(JobError, match=r"it had 2 rows when .* and 3 when") as caught:
        run(table, broker, topic, RowMapping(keys=("k",)), resume=resume)
    assert caught.value.code == exit_codes.UNVERIFIED


def test_a_load_during_which_partitions_were_added_is_an_error(
    spark: "SparkSession", broker: VarveBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topic(broker, topic, 1)
    write_rows = bootstrap._write

    def add_partitions(*arguments: Any, **options: Any) -> dict[int, int]:
        written = write_rows(*arguments, **options)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_partitions([NewPartitions(topic, 3)])[topic].result()
        return written

    monkeypatch.setattr(bootstrap, "_write", add_partitions)
    table = spark.createDataFrame([("k", "v")], "k string, v string")
    with pytest.raises(JobError, match="got 2 partitions during the load") as failure:
        run(table, broker, topic, RowMapping(keys=("k",), values=("v",)))
    assert failure.value.code == exit_codes.UNVERIFIED


def test_a_resumed_load_never_writes_behind_what_others_wrote_since(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    """Of k1 somebody wrote a newer value, k2 was deleted; ours were removed by compaction."""
    make_topic(broker, topic, 1)
    others = [(0, b"k1", b"newer", START_MS, None), (0, b"k2", None, START_MS, None)]
    write(broker, topic, [(0, b"k0", b"v0", START_MS, None), *others])
    rows = [(f"k{n}", f"v{n}") for n in range(5)]
    table = spark.createDataFrame(rows, "k string, v string")
    mapping = RowMapping(keys=("k",), values=("v",))
    result = run(table, broker, topic, mapping, resume=True)
    assert (result.written, result.skipped, result.superseded) == (2, 3, 2)
    last = {row.key: row.value for row in records(spark, broker, topic)}
    assert last == {b"k0": b"v0", b"k1": b"newer", b"k2": None, b"k3": b"v3", b"k4": b"v4"}
    assert any("2 of them with other values" in line for line in bootstrap.lines(result))


def test_a_resumed_load_behind_older_records_begins_where_it_is_said(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 1)
    old = [(0, b"k%d" % n, b"old", START_MS, None) for n in range(3)]
    write(broker, topic, [*old, (0, b"k0", b"v0", START_MS, None)])
    rows = [(f"k{n}", f"v{n}") for n in range(3)]
    table = spark.createDataFrame(rows, "k string, v string")
    mapping = RowMapping(keys=("k",), values=("v",))
    assert run(table, broker, topic, mapping, resume=True, dry_run=True).superseded == 2
    with pytest.raises(JobError, match="ends at 4, before 5"):
        run(table, broker, topic, mapping, resume=True, since={0: 5})
    result = run(table, broker, topic, mapping, resume=True, since={0: 3})
    assert (result.written, result.superseded) == (2, 0)
    last = {row.key: row.value for row in records(spark, broker, topic)}
    assert last == {b"k0": b"v0", b"k1": b"v1", b"k2": b"v2"}
    assert since_option({0: 3}) == """--resume --since '{"0": 3}'"""
    assert since_option({0: 0}) == "--resume"


def alter_policy(broker: VarveBroker, topic: str, policy: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    change = ConfigEntry("cleanup.policy", policy, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[change])
    for altered in admin.incremental_alter_configs([resource]).values():
        altered.result()


@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_a_load_is_not_resumed_where_a_delete_may_have_been_removed_since(
    spark: "SparkSession", broker: VarveBroker, topic: str, policy: str
) -> None:
    """Whatever the policy is by now."""
    make_topic(broker, topic, 1, cleanup_policy="compact", delete_retention_ms="0")
    table = spark.createDataFrame([("k0", "v0"), ("k1", "v1")], "k string, v string")
    mapping = RowMapping(keys=("k",), values=("v",))
    write(broker, topic, [(0, b"k0", b"v0", START_MS, None), (0, b"k0", None, START_MS, None)])
    assert run(table, broker, topic, mapping, resume=True, dry_run=True).written == 1
    client = ApiClient(f"127.0.0.1:{broker.http_port}")
    client.post(f"/partitions/{topic}/0/run", {"roll": True})

    def is_clean() -> bool:
        return bool(client.get(f"/partitions/{topic}/0")["first_dirty_offset"] == 2)

    wait_until(is_clean, "the topic is clean", 30)
    alter_policy(broker, topic, policy)
    with pytest.raises(JobError, match=rf"{topic}-0 lacks \d of its records from offset 0"):
        run(table, broker, topic, mapping, resume=True)


def test_a_load_is_not_resumed_where_records_are_undecided_or_gone(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 1)
    table = spark.createDataFrame([("k0", "v0")], "k string, v string")
    mapping = RowMapping(keys=("k",), values=("v",))
    write(broker, topic, [(0, b"k1", b"v1", START_MS, None)])
    bounds = fetch_bounds(Cluster(broker.bootstrap), topic)
    options = {"since": None, "end": {0: 2}}  # an uncommitted reader sees a record more
    with pytest.raises(JobError, match=r"transaction is open in .* from offset 1 on") as undecided:
        remaining(spark, table, Cluster(broker.bootstrap), topic, **options)
    assert undecided.value.code == exit_codes.STALE
    assert bounds.end == {0: 1}
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for deleted in admin.delete_records([TopicPartition(topic, 0, 1)]).values():
        deleted.result()
    with pytest.raises(JobError, match=r"begins at offset 1, and the load began at 0, .* --since"):
        run(table, broker, topic, mapping, resume=True)
    assert run(table, broker, topic, mapping, resume=True, since={0: 1}).written == 1


def test_records_that_were_counted_may_be_removed_before_the_rest_is_written(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    """By a clean: a key that was deleted would look like one that was never written."""
    make_topic(broker, topic, 1)
    table = spark.createDataFrame([("k0", "v0"), ("k1", "v1")], "k string, v string")
    rows = shaped(table, RowMapping(keys=("k",), values=("v",)))
    write(broker, topic, [(0, b"k0", b"v0", START_MS, None), (0, b"k0", None, START_MS, None)])
    rest = remaining(spark, rows, Cluster(broker.bootstrap), topic, since=None, end={0: 2})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for deleted in admin.delete_records([TopicPartition(topic, 0, 2)]).values():
        deleted.result()
    assert [row.key for row in rest.rows.collect()] == [b"k1"]


def test_a_dry_run_and_an_empty_table_write_nothing(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 2)
    table = spark.createDataFrame([(f"k{n}", None) for n in range(9)], "k string, v string")
    mapping = RowMapping(keys=("k",), values=("v",))
    result = run(table, broker, topic, mapping, dry_run=True)
    assert (result.written, result.counts.tombstones) == (9, 9)
    for n in range(2):
        keys = [b"k%d" % m for m in range(9)]
        assert result.partitions[n].records == sum(partition_of(key, 2) == n for key in keys)
    assert records(spark, broker, topic) == []
    assert run(table.limit(0), broker, topic, mapping).written == 0


def test_rows_without_keys_are_spread(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 3)
    table = spark.range(30).selectExpr("cast(id as string) v")
    result = run(table, broker, topic, RowMapping(values=("v",)))
    assert result.written == 30
    assert min(written.records for written in result.partitions.values()) >= 8


def test_shaping_takes_odd_names(spark: "SparkSession") -> None:
    table = spark.createDataFrame([("k", "v")], "`a.b` string, `c``d` string")
    (row,) = shaped(table, RowMapping(keys=("a.b",), values=("c`d",))).collect()
    assert (row.key, row.value) == (b"k", b"v")


def test_json_of_columns_has_the_microseconds_of_times(spark: "SparkSession") -> None:
    table = spark.sql(
        "select timestamp'1969-12-31 23:59:59.999999Z' t,"
        " timestamp_ntz'2026-05-01 00:00:00.000001' n"
    )
    (row,) = shaped(table, RowMapping(keys=("t",), values=("n",), value_as="json")).collect()
    assert bytes(row.key) == b'{"t":"1969-12-31T23:59:59.999999Z"}'
    assert bytes(row.value) == b'{"n":"2026-05-01T00:00:00.000001"}'
    spark.conf.set(ZONE, "+01:00")
    try:
        (row,) = shaped(table, RowMapping(keys=("t",), values=("n",), value_as="json")).collect()
    finally:
        spark.conf.set(ZONE, "UTC")
    assert bytes(row.key) == b'{"t":"1970-01-01T00:59:59.999999+01:00"}'


# The command line ---------------------------------------------------------------------------


def invoke(broker: VarveBroker, *arguments: str) -> Any:
    return CliRunner().invoke(
        bootstrap.command, [*arguments, "--bootstrap", broker.bootstrap], catch_exceptions=False
    )


@pytest.mark.usefixtures("shared_session")
@pytest.mark.parametrize(
    "table_format", cases(few=["delta"], many=["parquet", "csv", "json", "delta"])
)
def test_tables_of_every_format_are_read(
    spark: "SparkSession", broker: VarveBroker, topic: str, tmp_path: Path, table_format: str
) -> None:
    path = str(tmp_path / "table")
    rows = spark.createDataFrame([("k1", "v1"), ("k2", "v2")], "k string, v string")
    if table_format == "delta":
        from deltalake import write_deltalake

        write_deltalake(path, rows.toArrow())
    else:
        header = {"header": "true"} if table_format == "csv" else {}
        rows.write.format(table_format).options(**header).save(path)
    where = ["--from", path, "--format", table_format, "--key", "k", "--value", "v"]
    make = ["--create", "3", "--config", "cleanup.policy=compact"]
    done = invoke(broker, topic, *where, *make, "--dry-run", "--json")
    assert (done.exit_code, json.loads(done.stdout)["written"]) == (0, 2), done.output
    assert invoke(broker, topic, *where).exit_code == exit_codes.FAILED  # it was not made
    done = invoke(broker, topic, *where, *make, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["written"], len(document["partitions"])) == (2, 3)
    assert {row.key: row.value for row in records(spark, broker, topic)} == {
        b"k1": b"v1",
        b"k2": b"v2",
    }
    done = invoke(broker, topic, *where, "--append", "--json")
    assert (done.exit_code, json.loads(done.stdout)["written"]) == (0, 2), done.output
    done = invoke(broker, topic, *where, *make)
    assert (done.exit_code, "cannot create topic" in done.output) == (exit_codes.FAILED, True)


@pytest.mark.usefixtures("shared_session")
def test_options_that_make_no_sense_together_are_refused(broker: VarveBroker, topic: str) -> None:
    for arguments, reason in (
        ([f"{topic}.compacted"], "read-only"),
        ([topic, "--header", "a=b", "--headers-column", "c"], "not both"),
        ([topic, "--resume", "--allow-duplicates"], "cannot be used with"),
        ([topic, "--config", "a=b"], "--config needs --create"),
        ([topic, "--since", '{"0": 1}'], "--since needs --resume"),
        ([topic, "--header", "a"], "expected NAME="),
    ):
        done = invoke(broker, *arguments, "--from", "t")
        assert (done.exit_code, reason in done.output) == (exit_codes.USAGE, True), done.output
    done = invoke(broker, topic, "--from", "nothing-there", "--create", "1")
    assert (done.exit_code, done.output) == (1, "varve: nothing-there does not exist\n")
