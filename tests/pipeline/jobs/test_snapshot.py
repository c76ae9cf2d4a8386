"""`snapshot`: a topic as it was, or an error: never something in between."""

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from admin.client import ApiClient
from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.topics import now_ms
from pipeline.errors import JobError
from pipeline.jobs.snapshot import AsOf, SnapshotResult, snapshot
from pipeline.progress import SilentReporter
from pipeline.tables.as_of import parse_offsets, parse_time
from pipeline.tables.open_topic import Clients
from pipeline.tables.target import Format, target
from storage.format.batch import Record, build_batch
from tests.pipeline.jobs.test_latest import assert_state, read_table, run
from tests.pipeline.planted import clean
from tests.pipeline.table_topics import START_MS, fill, make_topic, read_model, write
from tests.support.draws import cases
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def addresses(broker: VarveBroker) -> Clients:
    return Clients(ApiClient(f"127.0.0.1:{broker.http_port}"), Cluster(broker.bootstrap))


def taken(
    spark: "SparkSession",
    addresses: Clients,
    topic: str,
    path: Path,
    as_of: AsOf,
    *,
    table_format: Format = "parquet",
    partitions: list[int] | None = None,
) -> SnapshotResult:
    place = target(str(path), table_format, overwrite=False)
    return snapshot(
        spark, addresses, topic, place, as_of, reporter=SilentReporter(), partitions=partitions
    )


@pytest.mark.spark
def test_a_state_as_of_offsets_is_what_was_there_then(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    """Within batches, at the edges of segments, at both ends."""
    make_topic(broker, topic, cleanup_policy="delete", segment_bytes=str(1 << 20))
    rng = random.Random(11)
    for _ in range(3):  # what is read closes the segment
        fill(broker, topic, rng, records=900, keyless=0.03)
        addresses.client.below("/api/v1/remote-compactions").post(
            "", {"topic": topic, "purpose": "read", "roll": True, "ttl_seconds": 60}
        )
    model = read_model(broker, topic)
    ends = {n: 1 + max(row.offset for row in model.rows if row.partition == n) for n in range(2)}
    requested = [
        {n: rng.randint(0, end) for n, end in ends.items()},
        {0: 0, 1: ends[1]},
        {0: rng.randint(1, ends[0]), 1: 1},
    ]
    for number, offsets in enumerate(requested):
        path = tmp_path / f"t{number}"
        result = taken(spark, addresses, topic, path, AsOf(offsets))
        assert result.end_offsets == offsets
        assert_state(read_table(path, "parquet"), model, offsets)
        for state in result.table.partitions:
            below = [
                row
                for row in model.rows
                if row.partition == state.partition and row.offset < state.end_offset
            ]
            keyless = sum(row.key is None for row in below)
            assert (state.records, state.keyless) == (len(below), keyless)
            live = len([n for n, _ in model.state(offsets) if n == state.partition])
            assert state.live in (live, -1)  # not counted where records follow what was indexed


@pytest.mark.spark
def test_a_state_as_of_a_time_ends_before_the_first_later_record(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, cleanup_policy="delete")
    for minute in range(5):
        at = START_MS + minute * 60_000
        write(broker, topic, [(b"a", b"%d" % minute)], partition=minute % 2, timestamp=at)
    expected = {-1: [], 0: [b"0"], 60_000: [b"0", b"1"], 179_999: [b"1", b"2"], 10**9: [b"3", b"4"]}
    for place, (after, values) in enumerate(expected.items()):
        path = tmp_path / f"t{place}"
        taken(spark, addresses, topic, path, AsOf(time_ms=START_MS + after), table_format="delta")
        assert sorted(read_table(path, "delta").column("value").to_pylist()) == values


def delete_records(broker: VarveBroker, topic: str, before_offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.delete_records([TopicPartition(topic, 0, before_offset)]).values():
        future.result()


@pytest.mark.spark
def test_a_state_as_of_a_time_that_may_be_before_the_log_start_is_refused_or_moved(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    """Nobody knows whether a removed record was later than the time."""
    make_topic(broker, topic, cleanup_policy="delete")
    for minute in range(4):
        at = START_MS + minute * 60_000
        write(broker, topic, [(b"%d" % minute, b"v")] * 2, partition=0, timestamp=at)
    write(broker, topic, [(b"idle", b"v")], partition=1, timestamp=START_MS)
    delete_records(broker, topic, 3)  # the second record of minute 1 is left
    unknown = AsOf(time_ms=START_MS + 30_000)
    with pytest.raises(JobError, match=f"{topic}-0 as of 2 is gone: its log starts at offset 3"):
        taken(spark, addresses, topic, tmp_path / "t", unknown)
    nearest = AsOf(time_ms=unknown.time_ms, nearest=True)
    result = taken(spark, addresses, topic, tmp_path / "t", nearest)
    assert [(m.partition, m.requested, m.taken) for m in result.moved] == [(0, 2, 3)]
    assert read_table(tmp_path / "t", "parquet").column("key").to_pylist() == [b"idle"]
    result = taken(spark, addresses, topic, tmp_path / "u", AsOf(time_ms=START_MS + 60_000))
    assert (result.end_offsets, result.moved) == ({0: 4, 1: 1}, [])
    delete_records(broker, topic, 8)  # none is left
    with pytest.raises(JobError, match=f"{topic}-0 as of 7 is gone: its log starts at offset 8"):
        taken(spark, addresses, topic, tmp_path / "v", AsOf(time_ms=START_MS + 120_000))


@pytest.mark.spark
def test_a_marker_after_the_time_does_not_vouch_for_what_was_before_the_log_start(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, 1, cleanup_policy="delete")
    write(broker, topic, [(b"early", b"v")], timestamp=START_MS)
    settings = {"bootstrap.servers": broker.bootstrap, "transactional.id": topic}
    producer = Producer(settings)
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, key=b"in", value=b"v", timestamp=START_MS + 10)
    producer.commit_transaction(30)
    marked_ms = now_ms()  # the marker, at offset 2, is not later
    write(broker, topic, [(b"late", b"v")], timestamp=marked_ms + 10_000)
    result = taken(spark, addresses, topic, tmp_path / "t", AsOf(time_ms=START_MS + 10))
    assert result.end_offsets == {0: 3}
    delete_records(broker, topic, 2)
    for time_ms in (START_MS, START_MS + 10, START_MS + 1000):
        with pytest.raises(JobError, match=r"as of 1 is gone: its log starts at offset 2"):
            taken(spark, addresses, topic, tmp_path / "u", AsOf(time_ms=time_ms))
    result = taken(spark, addresses, topic, tmp_path / "u", AsOf(time_ms=marked_ms))
    assert result.end_offsets == {0: 3}


@pytest.mark.spark
def test_a_time_in_a_gap_that_the_cleaner_made_is_refused(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    """A removed record may have been the first later one, also where none before it is left."""
    make_topic(broker, topic, 2)
    for partition, first in ((0, b"a"), (1, b"gone")):
        minutes = [(first, b"1"), (b"gone", b"2"), (b"gone", b"3"), (b"late", b"4")]
        for minute, row in enumerate(minutes):
            at = START_MS + minute * 60_000
            write(broker, topic, [row], partition=partition, timestamp=at)
        write(broker, topic, [(b"gone", b"5")], partition=partition, timestamp=START_MS + 240_000)
        clean(broker, topic, partition)
    for number in (0, 1):
        with pytest.raises(JobError, match=rf"{topic}-{number} as of 1 is gone: .*offset 5"):
            taken(
                spark, addresses, topic, tmp_path / "t", AsOf(time_ms=START_MS + 90_000),
                partitions=[number],
            )  # fmt: skip
    result = taken(
        spark, addresses, topic, tmp_path / "t", AsOf(time_ms=START_MS + 90_000, nearest=True)
    )
    assert [(moved.requested, moved.taken) for moved in result.moved] == [(1, 5), (1, 5)]
    result = taken(spark, addresses, topic, tmp_path / "u", AsOf(time_ms=START_MS + 240_000))
    assert (result.end_offsets, result.moved) == ({0: 5, 1: 5}, [])


@pytest.mark.spark
def test_a_gap_at_the_end_of_a_cleaned_log_is_not_taken_for_its_state(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    """A key was written before the time and deleted after it, and both records are gone."""
    make_topic(broker, topic, 1, delete_retention_ms="0")
    for minute, row in ((0, (b"a", b"1")), (1, (b"x", b"2")), (3, (b"x", None))):
        write(broker, topic, [row], timestamp=START_MS + minute * 60_000)
    clean(broker, topic, 0)
    addresses.client.post(f"/partitions/{topic}/0/run", {"roll": True})
    wait_until(lambda: len(read_model(broker, topic, 1).rows) == 1, "the tombstone has gone", 30)
    write(broker, topic, [(b"late", b"4")], timestamp=START_MS + 240_000)
    with pytest.raises(JobError, match=f"{topic}-0 as of 1 is gone"):
        taken(spark, addresses, topic, tmp_path / "t", AsOf(time_ms=START_MS + 120_000))


@pytest.mark.spark
def test_a_state_that_compaction_has_merged_is_refused_or_the_nearest_is_taken(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, 1)
    write(broker, topic, [(b"%d" % (n % 5), b"%d" % n) for n in range(50)])
    before = read_model(broker, topic, 1)
    addresses.client.post(f"/partitions/{topic}/0/run", {"roll": True})
    path = f"/partitions/{topic}/0"
    wait_until(lambda: addresses.client.get(path)["first_dirty_offset"] == 50, "clean", 30)
    write(broker, topic, [(b"%d" % (n % 5), b"%d" % n) for n in range(50, 60)])
    model = read_model(broker, topic, 1)
    with pytest.raises(JobError, match=r"was compacted up to offset 50.*--nearest"):
        taken(spark, addresses, topic, tmp_path / "t", AsOf({0: 30}))
    result = taken(spark, addresses, topic, tmp_path / "t", AsOf({0: 30}, nearest=True))
    assert [(moved.requested, moved.taken) for moved in result.moved] == [(30, 50)]
    assert_state(read_table(tmp_path / "t", "parquet"), before)
    taken(spark, addresses, topic, tmp_path / "u", AsOf({0: 55}))
    assert_state(read_table(tmp_path / "u", "parquet"), model, {0: 55})
    with pytest.raises(JobError, match="last stable offset is 60"):
        taken(spark, addresses, topic, tmp_path / "v", AsOf({0: 61}))


@pytest.mark.spark
def test_where_nothing_was_removed_any_state_can_be_had(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    """The cleaner was there, and found nothing that it could remove."""
    make_topic(broker, topic, 1)
    write(broker, topic, [(b"%d" % n, b"x") for n in range(50)])
    addresses.client.post(f"/partitions/{topic}/0/run", {"roll": True})
    path = f"/partitions/{topic}/0"
    wait_until(lambda: addresses.client.get(path)["first_dirty_offset"] == 50, "clean", 30)
    taken(spark, addresses, topic, tmp_path / "t", AsOf({0: 30}))
    assert read_table(tmp_path / "t", "parquet").num_rows == 30


@pytest.mark.spark
@pytest.mark.parametrize("table_format", cases(few=["iceberg"], many=["delta", "iceberg"]))
def test_all_records_are_copied_where_that_is_asked_for(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    table_format: Format,
) -> None:  # fmt: skip
    make_topic(broker, topic, cleanup_policy="delete")
    fill(broker, topic, random.Random(2), records=1000, keyless=0.05)
    model = read_model(broker, topic)
    taken(
        spark, addresses, topic, tmp_path / "t", AsOf(all_records=True), table_format=table_format
    )
    table = read_table(tmp_path / "t", table_format)
    results = {
        (item["partition"], item["offset"]): (item["key"], item["value"])
        for item in table.to_pylist()
    }
    assert results == {(row.partition, row.offset): (row.key, row.value) for row in model.rows}
    half = {0: 100, 1: 50}
    taken(spark, addresses, topic, tmp_path / "u", AsOf(half, all_records=True))
    assert read_table(tmp_path / "u", "parquet").num_rows == 150


def test_offsets_and_times_are_read_as_people_write_them(tmp_path: Path) -> None:
    assert parse_offsets('{"0": 5, "1": 7}', [0, 1]) == {0: 5, 1: 7}
    (tmp_path / "o.json").write_text('{"0": 5}')
    assert parse_offsets(f"@{tmp_path / 'o.json'}", [0]) == {0: 5}
    for bad in ('{"0": 5}', '{"0": 5, "1": -1}', '{"0": 5, "1": 1, "2": 1}', "{", "/nowhere"):
        with pytest.raises(JobError) as caught:
            parse_offsets(bad, [0, 1])
        assert caught.value.code == exit_codes.USAGE
    assert parse_time("1000") == 1000
    assert parse_time("1970-01-01T00:00:01Z") == parse_time("1970-01-01T01:00:01+01:00") == 1000
    assert parse_time("1970-01-01 00:00:01") == 1000
    with pytest.raises(JobError, match="ms since 1970"):
        parse_time("yesterday")
    for text in ("1969-12-31T23:59:59.999Z", "9" * 5000):  # -1 and -2 are ends of the log, no times
        with pytest.raises(JobError, match="expected a time"):
            parse_time(text)
    assert parse_time("1971-01-29T12:40:34.958Z") == 34_000_834_958  # as a float it is a ms less


@pytest.mark.spark
@pytest.mark.usefixtures("shared_session")
def test_the_command_reports_the_end_offsets(
    broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, 1)
    write(broker, topic, [(b"a", b"1"), (b"a", b"2"), (b"b", b"3")])
    options = ("--out", str(tmp_path / "t"))
    done = run(broker, "snapshot", topic, *options, "--as-of-offsets", '{"0": 2}', "--json")
    assert (done.exit_code, done.stderr) == (exit_codes.DONE, "")
    answer = json.loads(done.stdout)
    assert (answer["rows"], answer["end_offsets"], answer["moved"]) == (1, {"0": 2}, [])
    assert read_table(tmp_path / "t", "parquet").column("value").to_pylist() == [b"2"]
    done = run(broker, "snapshot", topic, *options, "--all-records", "--overwrite")
    assert done.exit_code == exit_codes.DONE, done.output
    assert read_table(tmp_path / "t", "parquet").num_rows == 3
    for wrong in (("--nearest",), ("--as-of", "0", "--as-of-offsets", "{}"), ("--as-of", "x")):
        assert run(broker, "snapshot", topic, *options, *wrong).exit_code == exit_codes.USAGE


@pytest.mark.spark
def test_a_record_with_an_impossible_time_does_not_keep_the_others_from_a_table(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, 1, message_timestamp_after_max_ms=str((1 << 63) - 1))
    times = [-(1 << 62), START_MS, 1 << 62]
    with RawClient(broker.port) as client:
        for at in times:
            client.produce(topic, bytes(build_batch([Record(0, at, b"%d" % at, b"v")])))
    formats: list[Format] = ["parquet", "delta"]
    for table_format in formats:
        path = tmp_path / table_format
        taken(spark, addresses, topic, path, AsOf(), table_format=table_format)
        keys = read_table(path, table_format).column("key").to_pylist()
        assert sorted(keys) == sorted(b"%d" % at for at in times)
    with pytest.raises(JobError, match=r"partition 0 at offset (0|2) is outside the years"):
        taken(spark, addresses, topic, tmp_path / "i", AsOf(), table_format="iceberg")
    assert not (tmp_path / "i").exists()


@pytest.mark.spark
def test_a_time_in_a_gap_at_the_edge_of_a_segment_is_refused(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    """No record is missing below the gap, but the first one in it was written before the time."""
    make_topic(broker, topic, 1, segment_bytes=str(1 << 20))
    sizes = (900_000, 500_000, 500_000)  # the second one begins a segment
    for minute, (key, size) in enumerate(zip((b"a", b"x", b"x"), sizes, strict=True)):
        write(broker, topic, [(key, bytes(size))], timestamp=START_MS + minute * 60_000)
    clean(broker, topic, 0)
    with pytest.raises(JobError, match=rf"{topic}-0 as of \d is gone: .*offset 3"):
        taken(spark, addresses, topic, tmp_path / "t", AsOf(time_ms=START_MS + 90_000))
    taken(spark, addresses, topic, tmp_path / "u", AsOf({0: 1}))
    assert read_table(tmp_path / "u", "parquet").column("key").to_pylist() == [b"a"]
