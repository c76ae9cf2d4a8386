"""`survey`: its counts are those of the records, its curves those of their lives."""

import json
import random
import re
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from admin.client import ApiClient
from admin.command import TOPICS_HINT
from config import exit_codes
from config.security.clients import Cluster
from pipeline.jobs.survey import SurveyResult, answer, command, survey_topic
from pipeline.progress import SilentReporter
from pipeline.records.fingerprints import fingerprints
from pipeline.report.figures import (
    TopicFigures,
    reached,
    survival_curve,
    whole_from,
)
from pipeline.report.page import page
from pipeline.stages import run_stage
from pipeline.stages.histories import age_bin, bin_edge
from pipeline.stages.planning import Limits
from pipeline.stages.tasks import SegmentCounts
from pipeline.tables.open_topic import Clients
from tests.pipeline.table_topics import Model, fill, make_topic, read_model, write
from tests.support.ports import free_port
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def addresses(broker: VarveBroker) -> Clients:
    return Clients(ApiClient(f"127.0.0.1:{broker.http_port}"), Cluster(broker.bootstrap))


class EngineInThisProcess:
    """Runs every task here, at once; test_the_command_writes_its_files has one with processes."""

    name = "here"
    parallelism = 1

    def run(
        self,
        stage: str,
        tasks: Sequence[bytes],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> list[bytes]:
        return [run_stage(stage, task) for task in tasks]

    def close(self) -> None:
        pass


def surveyed(addresses: Clients, topic: str, **limits: int) -> TopicFigures:
    return survey_topic(
        EngineInThisProcess(),
        addresses,
        topic,
        limits=Limits(**limits),
        engine_name="local",
        reporter=SilentReporter(),
    )


@pytest.mark.spark
def test_spark_finds_what_processes_find(
    spark: "SparkSession", broker: VarveBroker, addresses: Clients, topic: str
) -> None:
    from pipeline.engines.spark_engine import SparkEngine

    make_topic(broker, topic, cleanup_policy="delete")
    fill(broker, topic, random.Random(4), records=1000, keyless=0.03)
    figures = survey_topic(
        SparkEngine(spark), addresses, topic, limits=Limits(), engine_name="spark",
        transport="http", reporter=SilentReporter(),
    )  # fmt: skip
    assert figures == surveyed(addresses, topic)


def lives_of(model: Model) -> tuple[list[int], int]:
    """How many offsets each superseded record lived for, and how many records are live."""
    last: dict[tuple[int, bytes], Any] = {}
    ended = []
    for row in sorted(model.rows, key=lambda row: (row.partition, row.offset)):
        if row.key is None:
            continue
        before = last.get((row.partition, row.key))
        if before is not None and before.value is not None:
            ended.append(row.offset - before.offset)
        last[row.partition, row.key] = row
    return ended, sum(row.value is not None for row in last.values())


@pytest.mark.parametrize("limits", [{}, {"memory_bytes": 1 << 15, "task_bytes": 1 << 15}])
def test_counts_are_those_of_the_records(
    broker: VarveBroker, addresses: Clients, topic: str, limits: dict[str, int]
) -> None:
    make_topic(broker, topic, cleanup_policy="delete")
    fill(broker, topic, random.Random(7), records=3000, keyless=0.03)
    model = read_model(broker, topic)
    figures = surveyed(addresses, topic, **limits)
    keyed = [row for row in model.rows if row.key is not None]
    live = model.state()
    keys = {(row.partition, row.key) for row in keyed}
    assert figures.total("records") == len(model.rows)
    assert figures.total("live") == len(live)
    assert figures.total("keys") == len(keys)
    assert figures.total("tombstones") == len(keys) - len(live)
    assert figures.total("keyless") == len(model.rows) - len(keyed)
    assert figures.total("garbage") == len(keyed) - len(keys)
    assert figures.total("size_bytes") == sum(segment.size_bytes for segment in figures.segments)
    assert figures.skew.records == len(keyed)
    assert figures.policy == "compact"
    assert [advice.setting for advice in figures.advice] == [
        "cleanup.policy", "min.cleanable.dirty.ratio", "segment.bytes", "min.compaction.lag.ms",
        "delete.retention.ms",
    ]  # fmt: skip
    assert all(advice.why for advice in figures.advice)
    ended, lasting = lives_of(model)
    if not limits:
        assert (figures.survival.ended, figures.survival.cut) == (len(ended), lasting)
        assert figures.skew.is_exact
        assert figures.skew.keys == len(keys)
        counts: dict[tuple[int, bytes | None], int] = {}
        for row in keyed:
            counts[row.partition, row.key] = counts.get((row.partition, row.key), 0) + 1
        expected = sorted(counts.values(), reverse=True)[:20]
        assert [count for _, count, _ in figures.skew.top] == expected
        for key, count, share in figures.skew.top:
            assert count in {counts.get((n, b64decode(key))) for n in range(2)}
            assert share == count / len(keyed)
    else:
        assert figures.survival.keys_share < 1
        assert not figures.skew.is_exact


@pytest.mark.parametrize(
    ("records", "policy", "words"),
    [
        ([], "too few records", "0 records"),
        ([(None, b"v")] * 1200, "delete", "no key"),
        ([(b"%d" % n, None) for n in range(1200)], "compact", "Every key was deleted"),
        ([(b"%d" % n, b"v") for n in range(1200)], "delete", "only one of its key"),
        ([(b"%d" % (n % 3), b"v") for n in range(1200)], "compact", "superseded"),
    ],
    ids=["empty", "keyless", "deletes only", "no updates", "updates"],
)
def test_a_policy_is_advised_for_what_is_there(
    *, broker: VarveBroker, addresses: Clients, topic: str, policy: str, words: str,
    records: list[tuple[bytes | None, bytes | None]],
) -> None:  # fmt: skip
    make_topic(broker, topic, 1, cleanup_policy="delete")
    write(broker, topic, records, timestamp=1)
    figures = surveyed(addresses, topic)
    assert figures.policy == policy
    assert words in figures.policy_why
    assert figures.total("records") == len(records)
    text = page([figures], made_ms=0)
    assert policy in text
    json.dumps(answer(SurveyResult([figures])), allow_nan=False)


def test_lives_are_looked_for_where_nothing_was_cleaned(
    broker: VarveBroker, addresses: Clients, topic: str
) -> None:
    make_topic(broker, topic, 1, cleanup_policy="compact")
    write(broker, topic, [(b"%d" % (n % 10), b"v") for n in range(500)])
    addresses.client.post(f"/partitions/{topic}/0/run", {"roll": True})
    path = f"/partitions/{topic}/0"
    wait_until(lambda: addresses.client.get(path)["first_dirty_offset"] == 500, "clean", 30)
    write(broker, topic, [(b"%d" % (n % 10), b"v") for n in range(600)])
    figures = surveyed(addresses, topic)
    assert figures.is_cleaned
    assert figures.partitions[0].whole_from == 500
    assert (figures.survival.ended, figures.survival.cut) == (590, 10)
    assert figures.skew.records == 600
    assert 8 <= (figures.survival.half_life_offsets or 0) <= 12


def test_survival_of_lives_that_all_end_is_their_distribution() -> None:
    rng = np.random.default_rng(3)
    lives = rng.integers(0, 1000, 5000)
    bins, counts = np.unique(age_bin(lives), return_counts=True)
    curve = survival_curve(dict(zip(bins.tolist(), counts.tolist(), strict=True)), {})
    for at, share in curve[1:]:
        assert share == pytest.approx(float((lives >= at - 1e-9).mean()), abs=1e-9)
    assert [share for _, share in curve] == sorted((s for _, s in curve), reverse=True)


def test_lives_that_are_cut_off_are_no_deaths() -> None:
    assert survival_curve({}, {4: 10})[-1][1] == 1
    curve = survival_curve({8: 5}, {0: 5})  # half were cut off long before
    assert curve[-1][1] == 0
    assert reached(curve, 0.5) == pytest.approx((bin_edge(1) + bin_edge(9)) / 2)
    assert survival_curve({}, {}) == []
    assert reached([], 0.5) is None


def test_what_lacks_an_offset_was_cleaned() -> None:
    counts = [SegmentCounts(base, base + 10, 100, records=9, control=1) for base in (0, 10, 20, 30)]
    assert whole_from(counts, 0) == 0
    assert whole_from([replace(counts[0], records=5), *counts[1:]], 0) == 10
    assert whole_from([replace(counts[0], records=5), *counts[1:]], 4) == 4
    assert whole_from([*counts[:3], replace(counts[3], records=8)], 0) == 40
    assert whole_from([], 7) == 7


def test_fingerprints_are_of_the_keys_alone() -> None:
    keys = [b"", b"a", b"b", b"a" * 100, b"a"]
    words = fingerprints(pa.array(keys, pa.binary()), b"k" * 16)
    assert words[1] == words[4]
    assert len(set(words.tolist())) == 4
    assert fingerprints(pa.array([b"x", *keys], pa.binary())[1:], b"k" * 16).tolist() == list(words)
    assert fingerprints(pa.array(keys, pa.binary()), b"l" * 16).tolist() != words.tolist()


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attributes:
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")


def test_a_report_needs_nothing_else_and_escapes_what_it_shows(
    broker: VarveBroker, addresses: Clients, topic: str
) -> None:
    make_topic(broker, topic)
    hostile = b"<script>alert(1)</script>$x^2$\xff"
    records = [(hostile, b"v"), (b"\xe2\x80\xae&amp;", b"v"), (b"k", b"v")] * 500
    write(broker, topic, records)
    figures = surveyed(addresses, topic)
    figures.topic = '"><img src=x onerror=alert(1)>'
    text = page([figures, figures], made_ms=0)
    tags = Tags()
    tags.feed(text)
    assert not tags.tags & {"script", "img", "link", "iframe", "object", "image"}
    assert all(link.startswith("#") for link in tags.links)
    assert len(tags.ids) == len(set(tags.ids))
    assert tags.tags >= {"svg", "path", "text", "table", "figure"}
    assert "prefers-color-scheme: dark" in text
    assert "\u202e" not in text
    assert not re.findall(r"(?:https?:)?//[a-z]", re.sub(r'xmlns(:\w+)?="[^"]*"', "", text))
    assert not re.findall(
        r"#0[0-9a-f]{5}\b|#1[0-9a-f]{5}\b", text.replace("#16181c", "").replace("#1e2126", "")
    )


def addressed(broker: VarveBroker, *arguments: str) -> tuple[str, ...]:
    http = f"127.0.0.1:{broker.http_port}"
    return *arguments, "--http", http, "--bootstrap", broker.bootstrap, "--processes", "1"


@pytest.mark.usefixtures("forked_stages")
def test_the_command_writes_its_files(broker: VarveBroker, topic: str, tmp_path: Path) -> None:
    make_topic(broker, topic)
    write(broker, topic, [(b"%d" % (n % 7), b"v") for n in range(2000)])
    files = ("--html", str(tmp_path / "r.html"), "--out", str(tmp_path / "s.parquet"))
    done = CliRunner().invoke(command, addressed(broker, topic, "--json", *files))
    assert (done.exit_code, done.stderr) == (exit_codes.DONE, "")
    (document,) = json.loads(done.stdout)["topics"]
    assert document["totals"]["records"] == 2000
    assert document["totals"]["live"] == 7
    assert document["skew"]["top"][0]["key_text"].startswith("'")
    table = pq.read_table(tmp_path / "s.parquet")
    assert sum(table.column("live").to_pylist()) == 7
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert len(list(tmp_path.iterdir())) == 2
    shown = CliRunner().invoke(command, addressed(broker, topic, "--no-roll"))
    assert shown.exit_code == exit_codes.DONE
    assert f"{topic}: 100 % of the records are superseded" in shown.stdout


def test_unknown_topics_are_told(broker: VarveBroker, addresses: Clients) -> None:
    done = CliRunner().invoke(command, addressed(broker, "there-is-none"))
    assert done.exit_code == exit_codes.FAILED
    assert done.stderr == f"varve: there is no topic there-is-none; {TOPICS_HINT}\n"
    assert CliRunner().invoke(command, addressed(broker)).exit_code == exit_codes.USAGE


def test_no_broker_is_an_exit_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.client.topics.REACH_SECONDS", 0.5)
    nobody = f"127.0.0.1:{free_port()}"
    arguments = ["t", "--bootstrap", nobody, "--http", nobody, "--processes", "1"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == exit_codes.UNREACHABLE
