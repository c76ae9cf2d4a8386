"""`erase`: what a receipt says is gone is in no segment, ledger or replaced file any more."""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import pytest
from click.testing import CliRunner

from cleaner.remote_compaction import Purpose
from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.lease import LeaseClient
from pipeline.client.producer import BulkProducer
from pipeline.client.topics import now_ms
from pipeline.erasure.files import scan_files
from pipeline.erasure.keys import read_keys_from_file, read_keys_from_table
from pipeline.erasure.receipt import COMPLETE, DRY_RUN, PENDING, PartitionErased, Receipt, lines
from pipeline.errors import JobError
from pipeline.jobs import erase
from pipeline.jobs.erase import Eraser
from pipeline.progress import SilentReporter
from storage.format.batch import TRANSACTIONAL, Record, build_batch
from tests.pipeline.planted import (
    CODECS,
    append_raw,
    client_of,
    compact_view,
    copied,
    decoded,
    make_topic,
    original_rows,
    write,
)
from tests.support.draws import cases, seed_of_test
from tests.support.protocol.raw_client import RawClient
from tests.support.varve import VarveBroker, running_varve

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

START_MS = 1_700_000_000_000
COMPACTED = {
    "cleanup_policy": "compact",
    "min_cleanable_dirty_ratio": "1",
    "file_delete_delay_ms": "100",
}
VIEW = {"varve_view": "compacted", "varve_view_min_bytes": "-1"}
Rows = list[tuple[int, bytes | None, bytes | None, int, Any]]


def eraser(spark: "SparkSession", broker: VarveBroker, topic: str, **options: Any) -> Eraser:
    options = {"timeout_seconds": 60, **options}
    return Eraser(
        spark,
        client_of(broker),
        Cluster(broker.bootstrap),
        topic,
        reporter=SilentReporter(),
        **options,
    )


def random_rows(rng: random.Random, count: int, partitions: int) -> Rows:
    return [
        (
            rng.randrange(partitions),
            b"key-%d" % rng.randrange(40),
            None if rng.random() < 0.1 else b"value-%d" % n,
            START_MS + n,
            None,
        )
        for n in range(count)
    ]


def values_of(data: Path, topic: str, key: bytes) -> Iterator[tuple[Path, Record]]:
    """Records of a key with a value, in any file that holds batches."""
    for path in data.glob(f"{topic}-*/**/*.log*"):
        for row in decoded(path):
            if row.key == key and row.value is not None:
                yield path, row


@pytest.mark.parametrize("with_view", cases(few=[True], many=[False, True]))
def test_erased_keys_are_in_no_file_any_more(
    spark: "SparkSession", broker: VarveBroker, topic: str, with_view: bool
) -> None:
    """Wherever they were: keys are in partitions that no partitioner would choose."""
    rng = random.Random(seed_of_test(40))
    make_topic(broker, topic, 3, **COMPACTED, **(VIEW if with_view else {}))
    rows: Rows = []
    for n, codec in enumerate(CODECS):
        more = random_rows(rng, 60, 3)
        write(broker, topic, more, codec)
        rows += more
        if with_view and n == 2:
            compact_view(broker, topic, 0)
    keys = [b"key-3", b"key-17", b"key-never"]
    dry = eraser(spark, broker, topic).run(keys, dry_run=True)
    owned = [row for row in rows if row[1] in keys and row[2] is not None]
    assert sum(partition.records_found for partition in dry.partitions.values()) == len(owned)
    assert (dry.state, dry.absent) == (DRY_RUN, 1)
    assert len(list(values_of(broker.data, topic, b"key-3"))) > 0

    receipt = eraser(spark, broker, topic, data=str(broker.data)).run(keys)
    assert (receipt.state, receipt.reasons) == (COMPLETE, [])
    for key in keys:
        assert list(values_of(broker.data, topic, key)) == []
    for n, erased in receipt.partitions.items():
        results = {row[1] for row in owned if row[0] == n}
        assert (erased.records_found, erased.records_left) == (sum(row[0] == n for row in owned), 0)
        assert erased.tombstones_written == len(results)
        first, end = erased.tombstone_offsets or (0, 0)
        assert end - first == len(results)
        assert erased.cleaned_offset >= end
        assert (erased.view_horizon is not None) == with_view
    others = {(row[0], row[1]): row[2] for row in rows if row[1] not in keys}
    latest = {
        (n, row.key): row.value
        for n in range(3)
        for row in original_rows(broker.data, topic, n)
        if row.key not in keys
    }
    expected = {key: value for key, value in others.items() if value is not None}
    assert {key: value for key, value in latest.items() if value is not None} == expected
    again = eraser(spark, broker, topic, data=str(broker.data)).run(keys)
    assert again.state == COMPLETE
    assert sum(partition.tombstones_written for partition in again.partitions.values()) == 0


def test_a_receipt_names_no_key(spark: "SparkSession", broker: VarveBroker, topic: str) -> None:
    make_topic(broker, topic, 1, **COMPACTED)
    write(broker, topic, [(0, b"a-very-private-key", b"v", START_MS, None)] * 3)
    receipt = eraser(spark, broker, topic).run([b"a-very-private-key"])
    document = receipt.to_json()
    text = json.dumps(document)
    assert "private" not in text
    assert "private" not in "\n".join(lines(receipt))
    assert document["keys"]["sha256"] == [hashlib.sha256(b"a-very-private-key").hexdigest()]
    kinds = {copy["kind"] for copy in document["copies"]}
    assert {"replaced_files", "tombstones", "elsewhere"} <= kinds
    until = {copy["kind"]: copy["until_ms"] for copy in document["copies"]}
    assert until["tombstones"] >= receipt.started_ms + 86_400_000
    (partition,) = document["partitions"]
    assert (partition["records_found"], partition["records_removed"]) == (3, 3)


@pytest.mark.parametrize("strategy", ["timestamp", "header"])
def test_a_tombstone_outranks_what_the_view_calls_latest(
    spark: "SparkSession", broker: VarveBroker, topic: str, strategy: str
) -> None:
    keys = {"varve_view_strategy": strategy}
    if strategy == "header":
        keys["varve_view_version_header"] = "v"
    make_topic(broker, topic, 1, **COMPACTED, **VIEW, **keys)
    future = 2_000_000_000_000 if strategy == "header" else START_MS
    version = [("v", (7).to_bytes(8, "big"))]
    write(broker, topic, [(0, b"k", b"high", min(future, START_MS), version)])
    write(broker, topic, [(0, b"k", b"low", START_MS - 1, None), (0, b"x", b"y", START_MS, None)])
    compact_view(broker, topic, 0)
    receipt = eraser(spark, broker, topic).run([b"k"])
    assert (receipt.state, receipt.reasons) == (COMPLETE, [])
    assert receipt.partitions[0].view_records_found == 1
    assert receipt.partitions[0].view_records_left == 0


def test_a_tombstone_ranks_by_times_that_spark_does_not_have(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    largest = (1 << 63) - 1
    times = {"message_timestamp_after_max_ms": str(largest), "varve_view_strategy": "timestamp"}
    make_topic(broker, topic, 1, **COMPACTED, **VIEW, **times)
    with RawClient(broker.port) as client:
        client.produce(topic, bytes(build_batch([Record(0, 1 << 62, b"k", b"v")])))
    compact_view(broker, topic, 0)
    receipt = eraser(spark, broker, topic).run([b"k"])
    assert (receipt.state, receipt.reasons) == (COMPLETE, [])
    assert receipt.partitions[0].view_records_found == 1


def test_a_record_that_is_in_the_log_and_in_its_view_is_not_counted_as_two() -> None:
    """Of three records in the log the view repeats one."""
    erased = PartitionErased(keys=2, records_found=3, view_records_found=1)
    receipt = Receipt("t", [b"a", b"b"], DRY_RUN, 0, partitions={0: erased})
    in_both = "3 records in the log and 1 in its view"
    assert lines(receipt)[0] == f"t-0: would erase {in_both} of 2 keys"
    receipt.state = COMPLETE
    assert lines(receipt)[0].startswith(f"t-0: erased {in_both} of 2 keys; ")
    erased.records_left = 1
    text = f"t-0: erased 2 records in the log and 1 in its view (of {in_both}) of 2 keys; "
    assert lines(receipt)[0].startswith(text)
    erased.view_records_found = 0
    assert lines(receipt)[0].startswith(
        "t-0: erased 2 records in the log (of 3 records in the log) of 2"
    )


def test_what_is_not_decided_leaves_it_pending(spark: "SparkSession", tmp_path: Path) -> None:
    """An open transaction holds the cleaner, and aborted records are records too."""
    home = tmp_path / "before"
    settings = {"cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB", "backoff_ms": 200}}
    with running_varve(home, settings) as broker:
        make_topic(broker, "t", 1, **COMPACTED)
        write(broker, "t", [(0, b"k", b"v", START_MS, None)] * 2)
    home = copied(home, tmp_path / "after")
    rows = [Record(2, START_MS, b"k", b"open"), Record(3, START_MS, b"only-open", b"1")]
    batch = build_batch(
        rows, producer_id=5, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL
    )
    append_raw(home / "data", "t", 0, [bytes(batch)])
    with running_varve(home, settings) as broker:
        receipt = eraser(spark, broker, "t", timeout_seconds=1).run([b"k", b"only-open"])
        assert receipt.state == PENDING
        assert "transaction" in receipt.reasons[0], receipt.reasons
        assert receipt.partitions[0].records_found == 4
        client_of(broker).post("/partitions/t/0/transactions/5/abort")
        receipt = eraser(spark, broker, "t").run([b"k", b"only-open"])
        assert (receipt.state, receipt.reasons) == (COMPLETE, [])
        assert receipt.partitions[0].records_left == 0


def test_the_cleaner_that_must_not_leaves_it_pending(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 1, **COMPACTED)
    write(broker, topic, [(0, b"k", b"v", START_MS, None)])
    client_of(broker).post(f"/partitions/{topic}/0/pause")
    receipt = eraser(spark, broker, topic, timeout_seconds=0).run([b"k"])
    assert (receipt.state, "paused by an operator" in receipt.reasons[0]) == (PENDING, True)
    client_of(broker).post(f"/partitions/{topic}/0/resume")
    assert eraser(spark, broker, topic).run([b"k"]).state == COMPLETE


def test_files_that_a_run_has_pinned_are_found_and_told(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 1, **COMPACTED)
    write(broker, topic, [(0, b"k", b"v", START_MS, None)])
    runs = LeaseClient(client_of(broker))
    with runs.open(topic, purpose=Purpose.READ, roll=True) as run:
        receipt = eraser(spark, broker, topic, data=str(broker.data), timeout_seconds=5).run([b"k"])
        assert receipt.partitions[0].records_left == 0
        assert receipt.state == PENDING
        assert f"varve.leases/{run.plan.compaction_id}/in/" in receipt.reasons[0]
        assert any(
            run.plan.compaction_id in surviving_copy.text for surviving_copy in receipt.copies
        )
        assert any(surviving_copy.kind == "replaced_files" for surviving_copy in receipt.copies)
        again = eraser(spark, broker, topic, data=str(broker.data), timeout_seconds=0).run([b"k"])
        assert again.partitions[0].records_found == 0
        assert (again.state, again.reasons) == (PENDING, receipt.reasons)
        other = eraser(spark, broker, topic).run([b"k"])
        assert {"replaced_files", "leases"} < {each.kind for each in other.copies}
    receipt = eraser(spark, broker, topic, data=str(broker.data)).run([b"k"])
    assert receipt.state == COMPLETE
    assert {surviving_copy.kind for surviving_copy in receipt.copies} == {"tombstones", "elsewhere"}


def test_a_value_that_only_a_replaced_file_has_leaves_it_pending(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    """An earlier run removed it from the log, and a clean since then the tombstone."""
    make_topic(broker, topic, 2, **COMPACTED)
    write(broker, topic, [(1, b"other", b"v", START_MS, None)])
    replaced = broker.data / f"{topic}-1" / f"{0:020d}.log.deleted"
    replaced.write_bytes(build_batch([Record(0, START_MS, b"k", b"v")]))
    data = str(broker.data)
    receipt = eraser(spark, broker, topic, data=data, timeout_seconds=0).run([b"k"])
    assert (receipt.state, receipt.reasons) == (PENDING, [f"{replaced} has 1 record of the keys"])
    assert receipt.absent == 1
    replaced.unlink()
    receipt = eraser(spark, broker, topic, data=data).run([b"k"])
    assert (receipt.state, receipt.files_scanned) == (COMPLETE, 2)


def test_files_are_looked_through_wherever_they_lie(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 1, **COMPACTED)
    write(broker, topic, [(0, b"k", b"v", START_MS, None)])
    folder = broker.data / f"{topic}-0"
    hidden = folder / "varve.leases" / "run" / "in"
    hidden.mkdir(parents=True)
    try:
        batch = build_batch([Record(0, START_MS, b"k", b"v"), Record(9, START_MS, b"k", b"new")])
        (hidden / f"{0:020d}.log").write_bytes(batch)
        (folder / f"{7:020d}.log.deleted").write_bytes(batch)
        count, findings = scan_files(str(broker.data), topic, {0: 9}, [b"k"])
        assert count == 3
        assert sorted(finding.records for finding in findings) == [1, 1, 1]
    finally:
        for path in (hidden / f"{0:020d}.log", folder / f"{7:020d}.log.deleted"):
            path.unlink()
        for file_path in (hidden, hidden.parent, hidden.parent.parent):
            file_path.rmdir()
    with pytest.raises(JobError, match="does not exist; --data"):
        scan_files(str(broker.data / "no"), topic, {0: 9}, [b"k"])


@pytest.mark.parametrize("cut", [False, True])
def test_a_file_that_cannot_be_searched_to_its_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cut: bool
) -> None:
    """The second of three batches is damaged or incomplete."""
    monkeypatch.setattr("pipeline.erasure.files.WRITE_SECONDS", 0)
    batches = [bytes(build_batch([Record(n, START_MS, b"k", b"v")])) for n in range(3)]
    first, second, third = batches
    damaged = second[:8] + (1 << 20).to_bytes(4, "big") + second[12:]
    (tmp_path / "t-0").mkdir()
    path = tmp_path / "t-0" / "00000000000000000000.log.deleted"
    path.write_bytes(first + (second[:-1] if cut else damaged + third))
    with pytest.raises(JobError, match="are not a whole batch"):
        scan_files(str(tmp_path), "t", {0: 2}, [b"k"])
    # A broker is writing the second batch, after the job has begun.
    assert [finding.records for finding in scan_files(str(tmp_path), "t", {0: 1}, [b"k"])[1]] == [1]


def test_a_data_directory_without_the_partition_is_refused_before_anything_is_written(
    spark: "SparkSession", broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, 1, **COMPACTED)
    write(broker, topic, [(0, b"k", b"v", START_MS, None)])
    with pytest.raises(JobError, match="does not exist; --data") as raised:
        eraser(spark, broker, topic, data=str(tmp_path)).run([b"k"])
    assert raised.value.code == exit_codes.USAGE
    assert len(original_rows(broker.data, topic, 0)) == 1
    with pytest.raises(JobError, match="does not exist; --data"):  # as after an earlier run
        eraser(spark, broker, topic, data=str(tmp_path)).run([b"gone"])


def test_a_file_that_cannot_be_read_leaves_a_receipt(
    spark: "SparkSession", broker: VarveBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topic(broker, topic, 1, **COMPACTED)
    write(broker, topic, [(0, b"k", b"v", START_MS, None)])

    def scan(*_: object) -> NoReturn:
        raise JobError("cannot read 0.log: torn")

    monkeypatch.setattr(erase, "scan_files", scan)
    receipt = eraser(spark, broker, topic, data=str(broker.data)).run([b"k"])
    assert (receipt.state, receipt.reasons) == (PENDING, ["cannot read 0.log: torn"])
    assert (receipt.partitions[0].removed, receipt.files_scanned) == (1, None)


def test_values_written_after_the_search_are_counted_and_leave_nothing_pending(
    spark: "SparkSession", broker: VarveBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether before the tombstones, of a key that was not found, or after them."""

    class OneProducerOfTwo(BulkProducer):
        def __enter__(self) -> Self:
            write(broker, topic, [(0, b"b", b"new", START_MS, None)])
            return super().__enter__()

        def __exit__(self, *arguments: Any) -> None:
            super().__exit__(*arguments)
            write(broker, topic, [(0, b"a", b"new", START_MS, None)])

    make_topic(broker, topic, 1, **COMPACTED)
    write(broker, topic, [(0, b"a", b"old", START_MS, None)])
    monkeypatch.setattr(erase, "BulkProducer", OneProducerOfTwo)
    receipt = eraser(spark, broker, topic, data=str(broker.data)).run([b"a", b"b"])
    assert (receipt.state, receipt.reasons) == (COMPLETE, [])
    erased = receipt.partitions[0]
    assert (erased.records_found, erased.records_left, erased.written_since) == (1, 0, 2)


def test_nothing_to_erase_is_complete(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 2, **COMPACTED)
    assert eraser(spark, broker, topic).run([b"k"]).state == COMPLETE
    write(broker, topic, [(0, b"gone", None, START_MS, None), (1, b"x", b"y", START_MS, None)])
    for keys, absent in (([], 0), ([b"never"], 1), ([b"gone"], 0)):
        receipt = eraser(spark, broker, topic).run(keys)
        assert (receipt.state, receipt.absent) == (COMPLETE, absent)
        assert sum(erased.tombstones_written for erased in receipt.partitions.values()) == 0
    assert len(original_rows(broker.data, topic, 0)) == 1


def test_a_topic_that_is_not_compacted_is_refused(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic, 1, **VIEW)
    with pytest.raises(JobError, match=r"cleanup\.policy is delete") as raised:
        eraser(spark, broker, topic)
    assert raised.value.code == exit_codes.USAGE


def test_keys_are_read_as_they_are(spark: "SparkSession", tmp_path: Path) -> None:
    path = str(tmp_path / "keys")
    table = spark.createDataFrame([("b", 1), ("a", 2), ("b", 3)], "key string, n int")
    table.write.parquet(path)
    assert read_keys_from_table(spark, path, "parquet", "key") == [b"a", b"b"]
    with pytest.raises(JobError, match="must be binary or string, not int"):
        read_keys_from_table(spark, path, "parquet", "n")
    with pytest.raises(JobError, match="has no column x; its columns are key, n"):
        read_keys_from_table(spark, path, "parquet", "x")
    nulls = spark.createDataFrame([(None,)], "key binary")
    nulls.write.mode("overwrite").parquet(path)
    with pytest.raises(JobError, match="a row without a key"):
        read_keys_from_table(spark, path, "parquet", "key")
    file_path = tmp_path / "lines"
    file_path.write_bytes("ü\r\nb\nb".encode())
    assert read_keys_from_file(str(file_path), "utf8") == [b"b", "ü".encode()]
    file_path.write_text("/wA=\n")
    assert read_keys_from_file(str(file_path), "base64") == [b"\xff\x00"]
    file_path.write_text("ff00\nzz\n")
    with pytest.raises(JobError, match="a line is not hex"):
        read_keys_from_file(str(file_path), "hex")
    with pytest.raises(JobError, match="No such file"):
        read_keys_from_file(str(tmp_path / "no"), "utf8")


@pytest.mark.parametrize("encoding", ["utf8", "base64", "hex"])
@pytest.mark.parametrize("text", ["\n", "61\n\n", "61\r\n\r\n62"])
def test_an_empty_line_is_not_taken_for_the_empty_key(
    tmp_path: Path, encoding: str, text: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text.replace("61", "YWFh").encode() if encoding == "base64" else text.encode())
    with pytest.raises(JobError, match="has an empty line: remove it") as raised:
        read_keys_from_file(str(path), encoding)
    assert raised.value.code == exit_codes.USAGE


# The command line ---------------------------------------------------------------------------


def invoke(broker: VarveBroker, *arguments: str) -> Any:
    where = ["--http", f"127.0.0.1:{broker.http_port}", "--bootstrap", broker.bootstrap]
    return CliRunner().invoke(erase.command, [*arguments, *where], catch_exceptions=False)


@pytest.mark.usefixtures("shared_session")
def test_the_command_leaves_a_receipt_and_says_when_to_come_again(
    broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic, 1, **COMPACTED, min_compaction_lag_ms="86400000")
    now = now_ms()
    write(broker, topic, [(0, b"k", b"v", now, None), (0, b"x", b"v", now, None)])
    (tmp_path / "keys").write_text("6b\n")
    receipt = tmp_path / "receipt.json"
    values = [topic, "--key-file", str(tmp_path / "keys"), "--key-encoding", "hex"]
    values += ["--receipt", str(receipt)]
    done = invoke(broker, *values, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["partitions"][0]["records_found"] == 1
    done = invoke(broker, *values, "--timeout", "0", "--json")
    assert done.exit_code == exit_codes.UNVERIFIED, done.output
    document = json.loads(receipt.read_text())
    assert document == json.loads(done.stdout)
    assert (document["state"], document["partitions"][0]["records_left"]) == ("pending", 1)
    assert "min.compaction.lag.ms" in document["reasons"][0], document["reasons"]


@pytest.mark.usefixtures("shared_session")
def test_a_command_line_without_sense_is_refused(
    broker: VarveBroker, topic: str, tmp_path: Path
) -> None:
    keys = str(tmp_path / "keys")
    Path(keys).write_text("k\n")
    done = invoke(broker, topic, "--key-file", keys)
    assert (done.exit_code, f"there is no topic {topic}; " in done.output) == (1, True), done.output
    make_topic(broker, topic, 1)
    for arguments, code, reason in (
        ([topic], 2, "give the keys as a table"),
        ([topic, "--keys", "t", "--key-file", keys], 2, "give the keys as a table"),
        ([topic, "--key-file", keys], 2, "is not compacted"),
        ([topic, "--key-file", keys, "--receipt", str(tmp_path)], 2, "cannot write a receipt"),
        ([topic, "--key-file", keys, "--receipt", f"{keys}/r"], 2, "cannot write a receipt"),
    ):
        done = invoke(broker, *arguments)
        assert (done.exit_code, reason in done.output) == (code, True), done.output
