"""`latest --stream`: however it is interrupted, the table is the state of the topic."""

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient

from admin.client import ApiClient
from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.kafka_client import EndOffset
from pipeline.client.topics import as_job_errors, read_topic
from pipeline.errors import JobError
from pipeline.jobs import stream
from pipeline.jobs.stream import StreamResult, follow
from pipeline.progress import SilentReporter
from pipeline.tables import staging
from pipeline.tables.columns import Form, Forms
from pipeline.tables.delete_guard import DeleteGuard
from pipeline.tables.open_topic import Clients
from pipeline.tables.state_table import make_table
from pipeline.tables.target import target
from pipeline.tables.upsert import Upserts
from tests.pipeline.jobs.test_latest import assert_state, read_table
from tests.pipeline.table_topics import fill, make_topic, read_model, truncate_log, write
from tests.support.draws import cases, only_in_ci
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[3]
EXACT = Forms(exact_keys=True)


@pytest.fixture
def addresses(broker: VarveBroker) -> Clients:
    return Clients(ApiClient(f"127.0.0.1:{broker.http_port}"), Cluster(broker.bootstrap))


def caught_up(
    spark: "SparkSession", addresses: Clients, topic: str, path: Path, **options: Any
) -> StreamResult:
    options = {"forms": EXACT, **options}
    with as_job_errors():
        return follow(spark, addresses, topic, str(path), reporter=SilentReporter(), **options)


def test_a_table_follows_its_topic_over_restarts(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic)
    path = tmp_path / "t"
    rng = random.Random(3)
    for number in range(cases(few=3, many=4)):
        fill(broker, topic, rng, records=600, keys=60)
        if number == 1:  # without its checkpoint it goes on from the table
            shutil.rmtree(tmp_path / "t.checkpoint")
        result = caught_up(spark, addresses, topic, path)
        assert result.was_made == (number == 0)
        model = read_model(broker, topic)
        table = read_table(path, "delta")
        assert_state(table, model)
        assert result.rows == table.num_rows
    assert result.batches == 1
    assert result.updated > 0
    assert result.deleted > 0
    again = caught_up(spark, addresses, topic, path)
    assert (again.batches, again.rows) == (0, result.rows)


@pytest.mark.parametrize("committed", cases(few=[True], many=[False, True]))
def test_a_batch_that_was_cut_short_counts_once(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, committed: bool,
) -> None:  # fmt: skip
    """The query ends between the table's commit and Spark's, or just before both."""
    make_topic(broker, topic)
    path = tmp_path / "t"
    write(broker, topic, [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    caught_up(spark, addresses, topic, path)
    write(broker, topic, [(b"a", b"2"), (b"b", None), (b"d", b"2")])
    merge = Upserts.merge_batch

    def dying(self: Upserts, *arguments: Any) -> bool:
        if committed:
            merge(self, *arguments)
        raise JobError("the power went")

    with monkeypatch.context() as patched:
        patched.setattr(Upserts, "merge_batch", dying)
        with pytest.raises(JobError, match="the power went"):
            caught_up(spark, addresses, topic, path)
    write(broker, topic, [(b"b", b"3"), (b"d", None)])
    result = caught_up(spark, addresses, topic, path)
    assert_state(read_table(path, "delta"), read_model(broker, topic))
    assert result.batches == (1 if committed else 2)


def test_a_table_keeps_the_types_of_its_keys_and_values(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic)
    write(broker, topic, [(b"a", b"1")])
    bytes_path, json_path = tmp_path / "bytes", tmp_path / "json"
    form = Form.parse("json:n double, at timestamp, d decimal(9, 2)")
    columns = Forms(value=form, exact_keys=True, null_malformed=True)
    caught_up(spark, addresses, topic, bytes_path)
    caught_up(spark, addresses, topic, json_path, forms=columns)
    stream.check_types(spark, json_path, columns)
    write(broker, topic, [(b"a", b"\xff")])
    others = (
        (bytes_path, Forms(value=Form("string"), exact_keys=True), "column value of .* is binary"),
        (bytes_path, Forms(Form("string"), exact_keys=True), "column key of .* is binary"),
        (json_path, Forms(value=Form.parse("json:n long"), exact_keys=True), "struct<n:double,at:"),
    )
    for path, forms, reason in others:
        with pytest.raises(JobError, match=reason) as raised:
            caught_up(spark, addresses, topic, path, forms=forms)
        assert raised.value.code == exit_codes.USAGE
    caught_up(spark, addresses, topic, bytes_path)
    assert read_table(bytes_path, "delta").column("value").to_pylist() == [b"\xff"]


def test_a_table_never_goes_back(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    """A batch from before what the table has changes nothing, not even what was deleted since."""
    make_topic(broker, topic, partitions=1)
    write(broker, topic, [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None)])
    path = tmp_path / "t"
    caught_up(spark, addresses, topic, path)
    upserts = Upserts(path, topic, EXACT, stream.COLUMNS)
    cluster = Cluster(broker.bootstrap)
    old = read_topic(spark, cluster, topic, {0: 0}, {0: 2}, columns=stream.COLUMNS)
    assert not upserts.merge_batch(old, {}, {0: EndOffset(2, 0)})
    assert upserts.merge_batch(old, {}, {0: EndOffset(5, 0)})
    assert read_table(path, "delta").column("value").to_pylist() == [b"2"]


def test_a_batch_need_not_have_all_partitions_of_its_table(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    """The topic has grown since Spark planned it."""
    make_topic(broker, topic)
    write(broker, topic, [(b"a", b"1")], partition=1)
    write(broker, topic, [(b"b", b"1")], partition=0)
    path = tmp_path / "t"
    caught_up(spark, addresses, topic, path)
    cluster = Cluster(broker.bootstrap)
    batch = read_topic(spark, cluster, topic, {0: 0}, {0: 1}, columns=stream.COLUMNS)
    upserts = Upserts(path, topic, EXACT, stream.COLUMNS)
    assert not upserts.merge_batch(batch, {0: 1, 1: 1}, {0: EndOffset(1, 0)})


def test_a_topic_that_was_created_again_is_not_merged_into_the_table_of_the_deleted_one(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, partitions=1)
    write(broker, topic, [(b"a", b"1"), (b"b", b"1")])
    path = tmp_path / "t"
    caught_up(spark, addresses, topic, path)
    other = Upserts(path, topic, EXACT, stream.COLUMNS, read_topic_id=lambda: b"another id")
    cluster = Cluster(broker.bootstrap)
    batch = read_topic(spark, cluster, topic, {0: 0}, {0: 2}, columns=stream.COLUMNS)
    with pytest.raises(JobError, match="created again"):  # between the plan and the commit
        other.merge_batch(batch, {}, {0: EndOffset(9, 0)})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.delete_topics([topic])[topic].result()
    make_topic(broker, topic, partitions=1)
    write(broker, topic, [(b"c", b"2")] * 9)
    with pytest.raises(JobError, match=f"{topic} was deleted and created again") as raised:
        caught_up(spark, addresses, topic, path)
    assert raised.value.code == exit_codes.STALE
    assert sorted(read_table(path, "delta").column("key").to_pylist()) == [b"a", b"b"]
    caught_up(spark, addresses, topic, path, overwrite=True)
    write(broker, topic, [(b"d", b"2")])
    caught_up(spark, addresses, topic, path)
    assert sorted(read_table(path, "delta").column("key").to_pylist()) == [b"c", b"d"]


def test_a_table_of_an_emptied_topic_is_not_continued_with_one_that_was_created_again(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    """Nothing was leased, so no lease names the topic id."""
    make_topic(broker, topic, partitions=1, cleanup_policy="compact,delete")
    write(broker, topic, [(b"a", b"1"), (b"b", b"1")])
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.delete_records([Place(topic, 0, 2)]).values():
        future.result(30)
    path = tmp_path / "t"
    assert caught_up(spark, addresses, topic, path).end_offsets == {0: 2}
    admin.delete_topics([topic])[topic].result(30)
    make_topic(broker, topic, partitions=1, cleanup_policy="compact,delete")
    write(broker, topic, [(b"c", b"1"), (b"d", b"1"), (b"e", b"1")])
    with pytest.raises(JobError, match="deleted and created again") as raised:
        caught_up(spark, addresses, topic, path)
    assert raised.value.code == exit_codes.STALE


def test_records_that_were_removed_before_they_were_read_are_told(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, partitions=1, cleanup_policy="compact,delete")
    write(broker, topic, [(b"a", b"1")])
    path = tmp_path / "t"
    caught_up(spark, addresses, topic, path)
    write(broker, topic, [(b"b", b"1"), (b"c", b"1"), (b"d", b"1")])
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.delete_records([Place(topic, 0, 3)]).values():
        future.result(30)
    with pytest.raises(JobError, match="again with --overwrite") as raised:
        caught_up(spark, addresses, topic, path)
    assert raised.value.code == exit_codes.STALE
    assert "failOnDataLoss" not in str(raised.value)
    caught_up(spark, addresses, topic, path, overwrite=True)
    assert_state(read_table(path, "delta"), read_model(broker, topic))


def test_partitions_that_an_overwrite_left_out_are_read_from_their_start(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic)
    for number in range(2):
        write(broker, topic, [(b"a", b"1"), (b"b", b"1")], partition=number)
    path = tmp_path / "t"
    caught_up(spark, addresses, topic, path)
    place = target(str(path), "delta", overwrite=True)
    make_table(spark, addresses, topic, place, reporter=SilentReporter(), partitions=[0])
    with pytest.raises(JobError, match="is ahead of the table"):
        caught_up(spark, addresses, topic, path)
    shutil.rmtree(tmp_path / "t.checkpoint")
    result = caught_up(spark, addresses, topic, path)
    assert_state(read_table(path, "delta"), read_model(broker, topic))
    assert result.inserted == 2


def test_nothing_is_merged_into_a_table_that_another_job_replaced_with_an_earlier_state(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Neither with the first batch of a checkpoint nor with a later one."""
    make_topic(broker, topic)
    path, earlier = tmp_path / "t", tmp_path / "earlier"
    write(broker, topic, [(b"a", b"1"), (b"b", b"1")], partition=1)
    caught_up(spark, addresses, topic, path)
    shutil.copytree(path, earlier)
    write(broker, topic, [(b"a", b"2")], partition=1)
    caught_up(spark, addresses, topic, path, overwrite=True)
    merge = Upserts.merge_batch

    def merge_too_late(self: Upserts, *arguments: Any) -> bool:
        shutil.rmtree(path)
        shutil.copytree(earlier, path)
        return merge(self, *arguments)

    for _ in range(2):
        write(broker, topic, [(b"c", b"2")], partition=1)
        with monkeypatch.context() as patched:
            patched.setattr(Upserts, "merge_batch", merge_too_late)
            with pytest.raises(JobError, match="another job has replaced"):
                caught_up(spark, addresses, topic, path)
        assert_state(read_table(path, "delta"), read_model(broker, topic), {0: 0, 1: 2})
        caught_up(spark, addresses, topic, path, overwrite=True)
        write(broker, topic, [(b"d", b"2")], partition=1)
        assert caught_up(spark, addresses, topic, path).batches == 1
        assert_state(read_table(path, "delta"), read_model(broker, topic))


@pytest.mark.parametrize("has_checkpoint", cases(few=[False], many=[False, True]))
def test_a_topic_that_was_truncated_and_written_again_is_refused(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    has_checkpoint: bool,
) -> None:  # fmt: skip
    make_topic(broker, topic, partitions=1)
    path = tmp_path / "t"
    write(broker, topic, [(b"a", b"1")])
    caught_up(spark, addresses, topic, path)
    for key in (b"b", b"c", b"d"):
        write(broker, topic, [(key, b"1")])
    caught_up(spark, addresses, topic, path)
    truncate_log(broker, topic, to=2)
    write(broker, topic, [(b"e", b"2")] * 4)
    if not has_checkpoint:
        shutil.rmtree(tmp_path / "t.checkpoint")
    with pytest.raises(JobError, match="was truncated to offset 2") as raised:
        caught_up(spark, addresses, topic, path)
    assert raised.value.code == exit_codes.STALE
    caught_up(spark, addresses, topic, path, overwrite=True)
    write(broker, topic, [(b"f", b"2")])
    caught_up(spark, addresses, topic, path)
    assert_state(read_table(path, "delta"), read_model(broker, topic))


def test_a_checkpoint_ahead_of_the_table_is_refused(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic)
    path = tmp_path / "t"
    write(broker, topic, [(b"a", b"1")])
    caught_up(spark, addresses, topic, path)
    shutil.copytree(path, tmp_path / "old")
    write(broker, topic, [(b"b", b"1")])
    caught_up(spark, addresses, topic, path)
    shutil.rmtree(path)
    with pytest.raises(JobError, match="of a deleted table"):
        caught_up(spark, addresses, topic, path)
    (tmp_path / "old").rename(path)
    with pytest.raises(JobError, match="is ahead of the table"):
        caught_up(spark, addresses, topic, path)
    caught_up(spark, addresses, topic, path, overwrite=True)
    assert_state(read_table(path, "delta"), read_model(broker, topic))


def test_deletes_that_may_have_gone_unread_are_told(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, partitions=1, delete_retention_ms="0")
    path = tmp_path / "t"
    write(broker, topic, [(b"a", b"1"), (b"b", b"1")])
    caught_up(spark, addresses, topic, path)
    write(broker, topic, [(b"a", None), (b"b", b"2"), (b"b", b"3")])
    addresses.client.post(f"/partitions/{topic}/0/run", {"roll": True})
    wait_until(lambda: first_dirty_offset(addresses, topic) == 5, "the topic is clean", 30)
    with pytest.raises(JobError, match="tombstones stay for 0 s") as caught:
        caught_up(spark, addresses, topic, path)
    assert caught.value.code == exit_codes.STALE
    caught_up(spark, addresses, topic, path, overwrite=True)
    assert read_table(path, "delta").column("value").to_pylist() == [b"3"]


def test_a_batch_that_was_read_too_late_changes_nothing(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The deletes were there when the query began, and were removed while the batch was read."""
    make_topic(broker, topic, partitions=1, delete_retention_ms="0")
    path = tmp_path / "t"
    write(broker, topic, [(b"a", b"1"), (b"b", b"1")])
    caught_up(spark, addresses, topic, path)
    before = read_table(path, "delta")
    write(broker, topic, [(b"a", None), (b"b", b"2")])
    checked = DeleteGuard.checked_safe_ms

    def cleaned_meanwhile(self: DeleteGuard, *arguments: Any) -> int:
        addresses.client.post(f"/partitions/{topic}/0/run", {"roll": True})
        wait_until(lambda: first_dirty_offset(addresses, topic) == 4, "the topic is clean", 30)
        return checked(self, *arguments)

    monkeypatch.setattr(DeleteGuard, "checked_safe_ms", cleaned_meanwhile)
    with pytest.raises(JobError, match="may have missed deletes") as caught:
        caught_up(spark, addresses, topic, path)
    assert caught.value.code == exit_codes.STALE
    assert read_table(path, "delta").equals(before)


def first_dirty_offset(addresses: Clients, topic: str) -> Any:
    return addresses.client.get(f"/partitions/{topic}/0")["first_dirty_offset"]


def test_keys_that_cannot_be_told_apart_are_refused(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic)
    write(broker, topic, [(b"\xff", b"1"), (b"\xfe", b"2")])
    forms = Forms(Form("string"), exact_keys=True)
    with pytest.raises(JobError, match="offset 0 is not UTF-8"):
        caught_up(spark, addresses, topic, tmp_path / "t", forms=forms)


def test_spark_gets_a_short_text_of_a_batch_that_failed_in_spark(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A long one overflows the stack of the thread that stops the query."""
    from pyspark.sql.streaming import DataStreamWriter

    make_topic(broker, topic, partitions=1)
    write(broker, topic, [(b"a", b"1")])
    caught_up(spark, addresses, topic, tmp_path / "t")
    write(broker, topic, [(b"b", b"1")])
    texts: list[str] = []
    foreach = DataStreamWriter.foreachBatch

    def noting(self: Any, merge_batch: Any) -> Any:
        def merge(*arguments: Any) -> None:
            try:
                merge_batch(*arguments)
            except Exception:
                texts.append(traceback.format_exc())
                raise

        return foreach(self, merge)

    def fail(*_: object) -> None:
        spark.range(1).selectExpr("raise_error('the reason')").collect()

    monkeypatch.setattr(DataStreamWriter, "foreachBatch", noting)
    monkeypatch.setattr(Upserts, "merge_batch", fail)
    with pytest.raises(JobError, match="the reason"):
        caught_up(spark, addresses, topic, tmp_path / "t")
    assert len(texts) == 1
    assert "py4j" not in texts[0]


def test_a_batch_that_is_stopped_is_no_error_to_spark(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from pyspark.sql.streaming import StreamingQuery

    event = threading.Event()
    ends: list[object] = []
    read_end = StreamingQuery.exception

    @contextmanager
    def stopped_in_a_batch() -> Iterator[threading.Event]:
        yield event

    def count_for_long(*_: object) -> None:
        event.set()
        spark.range(10**15).selectExpr("sum(id)").collect()

    def noting(self: StreamingQuery) -> Any:
        ends.append(read_end(self))
        return ends[-1]

    make_topic(broker, topic, partitions=1)
    write(broker, topic, [(b"a", b"1")])
    caught_up(spark, addresses, topic, tmp_path / "t")
    write(broker, topic, [(b"b", b"1")])
    with monkeypatch.context() as patched:
        patched.setattr(stream, "_stop_signal", stopped_in_a_batch)
        patched.setattr(Upserts, "merge_batch", count_for_long)
        patched.setattr(StreamingQuery, "exception", noting)
        caught_up(spark, addresses, topic, tmp_path / "t", every_seconds=0.0)
    assert ends == [None]
    caught_up(spark, addresses, topic, tmp_path / "t")
    assert read_table(tmp_path / "t", "delta").num_rows == 2


def test_who_interrupts_is_not_told_that_nothing_was_published(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The table is there by then."""

    @contextmanager
    def stopped_at_once() -> Iterator[threading.Event]:
        event = threading.Event()
        event.set()
        yield event

    make_topic(broker, topic)
    write(broker, topic, [(b"a", b"1")])
    monkeypatch.setattr(stream, "_stop_signal", stopped_at_once)
    with pytest.raises(JobError, match="the table has what was merged so far") as raised:
        caught_up(spark, addresses, topic, tmp_path / "t")
    assert raised.value.code == exit_codes.INTERRUPTED
    assert read_table(tmp_path / "t", "delta").num_rows == 1


def test_a_checkpoint_is_removed_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may be killed while it removes the files."""
    folder = tmp_path / "t.checkpoint"
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True)
        (folder / name / "0").touch()
    monkeypatch.setattr(staging, "_remove", lambda *_: None)
    stream.remove_checkpoint(folder)
    assert not folder.exists()
    monkeypatch.undo()
    staging.remove_abandoned(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_spark_was_killed_in_making_can_be_overwritten(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic)
    write(broker, topic, [(b"a", b"1")])
    caught_up(spark, addresses, topic, tmp_path / "t")
    shutil.rmtree(tmp_path / "t.checkpoint")
    (tmp_path / "t.checkpoint").mkdir()
    (tmp_path / "t.checkpoint/.metadata.tmp").touch()
    caught_up(spark, addresses, topic, tmp_path / "t", overwrite=True)
    assert (tmp_path / "t.checkpoint/metadata").is_file()
    (tmp_path / "t.checkpoint/metadata").rename(tmp_path / "t.checkpoint/other")
    with pytest.raises(JobError, match="is not a checkpoint"):
        caught_up(spark, addresses, topic, tmp_path / "t", overwrite=True)


@only_in_ci("the tests above follow in one session; this one starts a Spark")
@pytest.mark.timeout(420)  # its first query on two busy cores takes minutes
def test_the_command_follows_until_it_is_told_to_stop(
    broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic)
    write(broker, topic, [(b"a", b"1"), (b"b", b"1")])
    path = tmp_path / "t"
    command = [
        *(sys.executable, "-P", "-m", "pipeline", "latest", topic, "--stream", "--every", "0.2"),
        *("--out", str(path), "--format", "delta", "--json", "--memory", "512m"),
        *("--master", "local[1]", "--value-as", "string", "--key-as", "string"),
        *("--http", f"127.0.0.1:{broker.http_port}", "--bootstrap", broker.bootstrap),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )

    def values() -> list[str]:
        if process.poll() is not None or not (path / "_delta_log").is_dir():
            assert process.poll() is None, process.communicate()[1]
            return []
        return sorted(read_table(path, "delta").column("value").to_pylist())

    try:
        wait_until(lambda: values() == ["1", "1"], "the table is made", 150)
        write(broker, topic, [(b"a", b"2"), (b"b", None)])
        wait_until(lambda: values() == ["2"], "the table follows", 150)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()  # else a later test is told of its open pipes
    assert (process.returncode, errors) == (exit_codes.DONE, "")
    answer = json.loads(output)
    assert (answer["rows"], answer["updated"], answer["deleted"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--format", "parquet"), "needs --format delta"),
        (("--format", "delta", "--key-as", "json:n int"), "binary or string"),
        (("--format", "delta", "--master", "sc://127.0.0.1:1"), "Spark Connect"),
        (("--format", "delta", "--partitions", "0"), "all partitions"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_once(options: tuple[str, ...], reason: str) -> None:
    from click.testing import CliRunner

    from pipeline.jobs.latest import command

    done = CliRunner().invoke(command, ["t", "--out", "/tmp/t", "--stream", *options])
    assert done.exit_code == exit_codes.USAGE
    assert reason in done.output
