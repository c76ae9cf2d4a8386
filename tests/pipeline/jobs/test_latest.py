"""`latest`: the table is what reading the topic to its end gives, in every format."""

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from click.testing import CliRunner, Result
from confluent_kafka.admin import AdminClient

from admin.client import ApiClient
from admin.command import TOPICS_HINT
from config import exit_codes
from config.security.clients import Cluster
from pipeline.cli import pipeline
from pipeline.client.topics import as_job_errors, fetch_topic_id
from pipeline.errors import JobError
from pipeline.progress import SilentReporter
from pipeline.tables.columns import Form, Forms
from pipeline.tables.open_topic import Clients
from pipeline.tables.state import TopicState, check_open_part
from pipeline.tables.state_table import latest, make_table, release
from pipeline.tables.target import Format, target
from storage.format.batch import ControlType
from tests.pipeline.conftest import BROKER_SETTINGS
from tests.pipeline.delta_reading import read_delta
from tests.pipeline.planted import append_raw
from tests.pipeline.table_topics import (
    Model,
    fill,
    make_topic,
    read_model,
    transaction,
    write,
)
from tests.support.draws import cases
from tests.support.varve import VarveBroker, running_varve

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def addresses(broker: VarveBroker) -> Clients:
    return Clients(ApiClient(f"127.0.0.1:{broker.http_port}"), Cluster(broker.bootstrap))


@pytest.fixture(params=range(cases(few=1, many=2)))
def rng(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    print("seed", request.param)
    return random.Random(request.param)


def read_table(path: Path, table_format: str) -> pa.Table:
    if table_format == "delta":
        return read_delta(path)
    if table_format == "iceberg":
        from pipeline.tables.iceberg import NAMESPACE, TABLE, open_catalog

        return open_catalog(path).load_table((NAMESPACE, TABLE)).scan().to_arrow()
    return ds.dataset(str(path), format="parquet").to_table()


def assert_state(table: pa.Table, model: Model, ends: dict[int, int] | None = None) -> None:
    results = {
        (row["partition"], row["key"]): (
            row["offset"], row["value"], int(row["timestamp"].timestamp() * 1000 + 0.5)
        )
        for row in table.to_pylist()
    }  # fmt: skip
    expected = {
        which: (row.offset, row.value, row.timestamp) for which, row in model.state(ends).items()
    }
    assert results == expected
    assert table.num_rows == len(expected)


WAYS = [("parquet", "disk"), ("delta", "http"), ("iceberg", "disk")]
MORE_WAYS = [("parquet", "http"), ("delta", "disk"), ("iceberg", "http")]


@pytest.mark.parametrize(("table_format", "transport"), cases(few=WAYS, many=WAYS + MORE_WAYS))
def test_a_table_is_what_reading_to_the_end_gives(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    rng: random.Random, table_format: Format, transport: str,
) -> None:  # fmt: skip
    make_topic(broker, topic, cleanup_policy="delete")
    fill(broker, topic, rng, records=3000, keyless=0.03)
    place = target(str(tmp_path / "t"), table_format, overwrite=False)
    limits: dict[str, Any] = rng.choice([{}, {"task_memory": 1 << 15, "task_bytes": 1 << 15}])
    result = make_table(
        spark, addresses, topic, place, reporter=SilentReporter(), transport=transport, **limits
    )
    model = read_model(broker, topic)
    table = read_table(tmp_path / "t", table_format)
    assert_state(table, model)
    assert result.rows == table.num_rows
    assert result.transport == transport
    assert sum(state.live for state in result.partitions) == result.rows
    assert list(tmp_path.iterdir()) == [tmp_path / "t"]


def test_transactions_count_by_how_they_ended(
    spark: "SparkSession", topic: str, tmp_path: Path
) -> None:
    """Aborted data is not there. An open transaction holds nothing up that was decided before it,
    though it stands in no segment that is wholly decided."""
    home = tmp_path / "broker"
    with running_varve(home, BROKER_SETTINGS) as broker:
        make_topic(broker, topic)
        fill(broker, topic, random.Random(5), records=1000)
        model = read_model(broker, topic)
    at = max(row.offset for row in model.rows if row.partition == 0) + 1
    batches = []
    for producer, records, end in (
        (1, [(b"key-1", b"committed"), (b"key-2", None)], ControlType.COMMIT),
        (2, [(b"key-1", b"aborted"), (b"key-3", None)], ControlType.ABORT),
        (3, [(b"key-4", b"undecided")], None),
    ):
        made, at = transaction(producer, at, records, end)
        batches += made
    append_raw(home / "data", topic, 0, batches)
    with running_varve(home, BROKER_SETTINGS) as broker:
        model = read_model(broker, topic)
        addresses = Clients(ApiClient(f"127.0.0.1:{broker.http_port}"), Cluster(broker.bootstrap))
        place = target(str(tmp_path / "t"), "delta", overwrite=False)
        result = make_table(spark, addresses, topic, place, reporter=SilentReporter())
        assert result.partitions[0].end_offset == at - 1
        records = sum(row.partition == 0 for row in model.rows)
        assert result.partitions[0].records == records
    table = read_table(tmp_path / "t", "delta")
    assert_state(table, model)
    assert b"committed" in table.column("value").to_pylist()


def test_an_open_part_is_not_taken_from_a_topic_that_was_created_again(
    broker: VarveBroker, addresses: Clients, topic: str
) -> None:
    """The records before an open transaction are read last, and not from leased segments."""
    make_topic(broker, topic)
    topic_id = fetch_topic_id(addresses.cluster, topic)
    state = TopicState(cast(Any, None), [], tails={0: 1}, topic_id=topic_id)
    check_open_part(addresses.client, addresses.cluster, topic, state)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.delete_topics([topic])[topic].result(30)
    make_topic(broker, topic)
    with pytest.raises(JobError, match="created again while the job read it") as raised:
        check_open_part(addresses.client, addresses.cluster, topic, state)
    assert raised.value.code == exit_codes.STALE


EMPTY = ([], [(None, b"keyless")], [(b"k", None), (b"l", None)])
# Every format and every kind of topic, in CI every pair of them.
FORMATS = ("parquet", "delta", "iceberg")
PAIRS = cases(few=list(zip(FORMATS, EMPTY, strict=True)), many=list(product(FORMATS, EMPTY)))


@pytest.mark.parametrize(("table_format", "records"), PAIRS)
def test_a_topic_without_state_gives_an_empty_table(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    table_format: Format, records: list[tuple[bytes | None, bytes | None]],
) -> None:  # fmt: skip
    make_topic(broker, topic, cleanup_policy="delete")
    write(broker, topic, records)
    place = target(str(tmp_path / "t"), table_format, overwrite=False)
    result = make_table(spark, addresses, topic, place, reporter=SilentReporter())
    assert result.rows == 0
    table = read_table(tmp_path / "t", table_format)
    assert table.num_rows == 0
    assert table.schema.names[:2] == ["key", "value"]


@pytest.mark.parametrize("table_format", cases(few=["delta"], many=["parquet", "delta", "iceberg"]))
def test_a_table_is_replaced_where_that_was_asked_for(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    table_format: Format,
) -> None:  # fmt: skip
    make_topic(broker, topic)
    write(broker, topic, [(b"a", b"1"), (b"b", b"2")])
    path = tmp_path / "t"
    make_table(
        spark,
        addresses,
        topic,
        target(str(path), table_format, overwrite=False),
        reporter=SilentReporter(),
    )
    write(broker, topic, [(b"a", None), (b"c", b"3")])
    with pytest.raises(JobError, match="already exists"):
        target(str(path), table_format, overwrite=False)
    make_table(
        spark,
        addresses,
        topic,
        target(str(path), table_format, overwrite=True),
        reporter=SilentReporter(),
    )
    table = read_table(path, table_format)
    assert sorted(table.column("value").to_pylist()) == [b"2", b"3"]
    with pytest.raises(JobError, match="does not replace it with"):
        target(str(path), "delta" if table_format == "parquet" else "parquet", overwrite=True)


def test_what_is_no_table_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("x")
    with pytest.raises(JobError, match="not a table"):
        target(str(tmp_path / "home"), "parquet", overwrite=True)
    with pytest.raises(JobError, match="is not a directory"):
        target(str(tmp_path / "missing" / "t"), "parquet", overwrite=True)


def test_values_become_text_or_columns(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path
) -> None:
    make_topic(broker, topic)
    write(broker, topic, [(b"a", b'{"n": 1, "s": "x"}'), (b"\xff", b'{"n": 2}')])
    forms = Forms(Form("string"), Form.parse("json:n long, s string"))
    place = target(str(tmp_path / "t"), "parquet", overwrite=False)
    make_table(spark, addresses, topic, place, forms=forms, reporter=SilentReporter())
    rows = read_table(tmp_path / "t", "parquet").select(["key", "value"]).to_pylist()
    assert sorted(rows, key=str) == [
        {"key": "a", "value": {"n": 1, "s": "x"}},
        {"key": "\ufffd", "value": {"n": 2, "s": None}},
    ]


BAD_VALUES = (b"", b'{"n": "x"}', b"no json", b"  ", b"[1]")


@pytest.mark.parametrize("bad", BAD_VALUES[: cases(few=2, many=5)])
def test_a_value_of_another_schema_ends_the_job_or_is_null(
    *, spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str, tmp_path: Path,
    bad: bytes,
) -> None:  # fmt: skip
    make_topic(broker, topic)
    write(broker, topic, [(b"a", b'{"n": 1}'), (b"b", bad)])
    form = Form.parse("json:n long")
    place = target(str(tmp_path / "t"), "parquet", overwrite=False)
    with (
        pytest.raises(JobError, match="the value at partition 0, offset 1 is not JSON"),
        as_job_errors(),
    ):
        make_table(
            spark, addresses, topic, place, forms=Forms(value=form), reporter=SilentReporter()
        )
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    forms = Forms(value=form, null_malformed=True)
    make_table(spark, addresses, topic, place, forms=forms, reporter=SilentReporter())
    rows = read_table(tmp_path / "t", "parquet").select(["key", "value"]).to_pylist()
    assert sorted(rows, key=str) == [
        {"key": b"a", "value": {"n": 1}},
        {"key": b"b", "value": None},
    ]


@pytest.mark.parametrize("schema", ['{"type": "struct"}', "n lng"])
def test_a_schema_that_does_not_parse_is_refused_before_a_broker_is_asked(
    spark: "SparkSession", tmp_path: Path, schema: str
) -> None:
    nobody = Clients(ApiClient("127.0.0.1:1"), Cluster("127.0.0.1:1"))
    place = target(str(tmp_path / "t"), "parquet", overwrite=False)
    forms = Forms(value=Form.parse(f"json:{schema}"))
    with pytest.raises(JobError, match="is not a schema: ") as raised:
        make_table(spark, nobody, "t", place, forms=forms, reporter=SilentReporter())
    assert raised.value.code == exit_codes.USAGE


def test_a_dataframe_is_read_as_long_as_it_is_kept(
    spark: "SparkSession", broker: VarveBroker, topic: str
) -> None:
    make_topic(broker, topic)
    write(broker, topic, [(b"a", b"1"), (b"a", b"2")])
    frame = latest(spark, topic, http=f"127.0.0.1:{broker.http_port}", bootstrap=broker.bootstrap)
    assert frame.count() == 1
    assert [bytes(row["value"]) for row in frame.collect()] == [b"2"]
    release(frame)
    runs = json.loads(broker.get("/api/v1/remote-compactions"))["remote_compactions"]
    assert not [item for item in runs if item["topic"] == topic and item["state"] == "leased"]


def run(broker: VarveBroker, *arguments: str) -> Result:
    where = ("--http", f"127.0.0.1:{broker.http_port}", "--bootstrap", broker.bootstrap)
    return CliRunner().invoke(pipeline, [*arguments, *where], catch_exceptions=False)


@pytest.mark.usefixtures("shared_session")
def test_the_command_reports_the_table(broker: VarveBroker, topic: str, tmp_path: Path) -> None:
    make_topic(broker, topic)
    write(broker, topic, [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"c", b"4"), (b"c", None)])
    out = str(tmp_path / "t")
    form = ("--value-as", "json:n long", "--null-malformed")
    done = run(broker, "latest", topic, "--out", out, "--format", "delta", "--json", *form)
    assert (done.exit_code, done.stderr) == (exit_codes.DONE, "")
    answer = json.loads(done.stdout)
    assert (answer["rows"], answer["format"], answer["out"]) == (2, "delta", out)
    assert answer["partitions"][0]["records"] == 5
    assert answer["partitions"][0]["tombstones"] == 1
    assert read_table(Path(out), "delta").column("value").to_pylist() == [None, None]


def test_unknown_topics_and_brokers_have_their_exit_codes(
    broker: VarveBroker, tmp_path: Path
) -> None:
    done = run(broker, "latest", "there-is-none", "--out", str(tmp_path / "t"))
    assert done.exit_code == exit_codes.FAILED
    assert done.stderr == f"varve: there is no topic there-is-none; {TOPICS_HINT}\n"
    assert list(tmp_path.iterdir()) == []
