"""The pipeline and format("varve") against a broker that demands TLS, users and https."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from config import exit_codes
from pipeline.cli import pipeline
from pipeline.tables.state_table import latest, release
from tests.pipeline.secured_broker import MODULE, PASSWORD, Secured
from tests.support.draws import only_in_ci

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def shown(spark: "SparkSession") -> str:
    """What the UI shows of the queries so far."""
    store = spark._jsparkSession.sharedState().statusStore()
    listed = store.executionsList()
    executions = [listed.apply(index) for index in range(listed.size())]
    assert executions
    return "\n".join(
        f"{query.description()} {query.physicalPlanDescription()} {query.modifiedConfigs()}"
        for query in executions
    )


def test_rows_are_read_and_written_and_no_plan_shows_a_secret(
    spark: "SparkSession", secured: Secured, topic: str
) -> None:
    secured.fill(topic)
    reader = spark.read.format("varve").options(**secured.options(subscribe=topic))
    frame = reader.load()
    assert frame.count() == 100
    writer = frame.selectExpr("key", "value").write.format("varve").mode("append")
    writer.options(**secured.options(topic=topic)).save()
    assert reader.load().count() == 200
    plans = frame._jdf.queryExecution().toString()
    for text in (plans, frame._jdf.queryExecution().simpleString(), shown(spark)):
        assert PASSWORD not in text
        assert "PRIVATE KEY" not in text


def test_wrong_credentials_fail_at_once_and_are_not_repeated(
    spark: "SparkSession", secured: Secured, topic: str
) -> None:
    module = f'{MODULE} required username="alice" password="guess-of-eve";'
    options = secured.options(subscribe=topic) | {"kafka.sasl.jaas.config": module}
    with pytest.raises(Exception, match="uthentication") as error:
        spark.read.format("varve").options(**options).load().count()
    assert "guess-of-eve" not in str(error.value)


@only_in_ci("the first test of this file has the rule for rows")
def test_leased_segments_are_fetched_over_https(
    spark: "SparkSession", secured: Secured, topic: str
) -> None:
    secured.fill(topic)
    frame = latest(
        spark, topic, http=f"https://localhost:{secured.broker.http_port}",
        bootstrap=secured.bootstrap, command_config=secured.config, transport="http",
    )  # fmt: skip
    assert sorted(bytes(row["key"]) for row in frame.collect()) == [b"%d" % n for n in range(10)]
    plans = frame._jdf.queryExecution().toString()
    release(frame)
    assert PASSWORD not in plans
    assert PASSWORD not in shown(spark)


@only_in_ci("the first test of this file has the rule for rows")
@pytest.mark.usefixtures("shared_session")
def test_commands_take_all_their_credentials_from_one_file(
    secured: Secured, topic: str, tmp_path: Path
) -> None:
    secured.fill(topic)
    url = f"https://localhost:{secured.broker.http_port}"
    where = ("--http", url, "--bootstrap", secured.bootstrap)
    compact = ["compact", topic, "--transport", "http"]
    for arguments in (["survey", topic], ["verify", topic], compact):
        cut = where[:2] if arguments[0] == "compact" else where
        done = CliRunner().invoke(
            pipeline, [*arguments, *cut, "--command-config", secured.config, "--json"],
            catch_exceptions=False,
        )  # fmt: skip
        assert done.exit_code == exit_codes.DONE, done.output
        assert json.loads(done.stdout)
    done = CliRunner().invoke(pipeline, ["survey", topic, *where])
    assert done.exit_code == exit_codes.UNREACHABLE
