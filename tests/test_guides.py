"""The guides: their commands run against a broker, and their formulae agree with measurements."""

import re
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from bench import fleet
from bench.cleaner import worked_example
from broker.cli import main
from tests.support.varve import VarveBroker, running_varve

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = ("how-to/size-a-broker.md", "how-to/move-from-and-to-kafka.md", "reference/upgrades.md")
SETTINGS = {"cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB"}}
DIRTY_RATIO = 1 / 3  # of the benchmark


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    with running_varve(tmp_path_factory.mktemp("guides"), SETTINGS) as running:
        admin = AdminClient({"bootstrap.servers": running.bootstrap})
        config = {"cleanup.policy": "compact", "segment.bytes": str(1 << 20)}
        config["min.cleanable.dirty.ratio"] = "1.0"  # nothing is cleaned before an estimate
        for future in admin.create_topics([NewTopic("customers", 1, 1, config=config)]).values():
            future.result(30)
        producer = Producer({"bootstrap.servers": running.bootstrap})
        for number in range(3000):
            producer.produce("customers", b"x" * 1000, b"%d" % (number % 50))
        assert producer.flush(30) == 0
        yield running


def commands_of(page: str) -> list[list[str]]:
    """The commands in blocks of code, as arguments of the program."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page, re.DOTALL | re.MULTILINE)
    lines = [line.strip() for kind, text in blocks if not kind for line in text.splitlines()]
    return [line.split()[1:] for line in lines if line.startswith("varve ")]


@pytest.mark.parametrize("guide", GUIDES)
def test_the_commands_of_a_guide_run(broker: VarveBroker, guide: str, tmp_path: Path) -> None:
    page = (DOCS / guide).read_text()
    (tmp_path / "varve.yaml").write_text("cleaner: {workers: 1}\n")
    commands = commands_of(page)
    assert commands
    environment = {"VARVE_HTTP": broker.url, "VARVE_BOOTSTRAP": broker.bootstrap}
    for command in commands:
        if command[0] == "serve":
            continue  # it would not end; the fixture has started one
        if command[:2] == ["topics", "create"]:
            command[2] = "copied"  # the topic of the other commands exists
        with chdir(tmp_path):
            ended = CliRunner().invoke(main, command, env=environment)
        assert ended.exit_code == 0, (command, ended.output)


def test_the_formulae_for_sizes_agree_with_the_benchmarks() -> None:
    formulae = {
        "peak": 1 / (1 - DIRTY_RATIO),
        "read": 1 / DIRTY_RATIO,
        "written": (1 - DIRTY_RATIO) / DIRTY_RATIO,
    }
    benchmarks = (DOCS / "reference/benchmarks.md").read_text()
    row = re.search(r"^\| uniform, dirty-ratio +\|(.+)\|$", benchmarks, re.MULTILINE)
    assert row is not None
    read, written, _, peak, *_ = map(float, row[1].split("|"))
    measured = {"peak": peak, "read": read, "written": written}
    page = (DOCS / "how-to/size-a-broker.md").read_text()
    rows = re.findall(r"^\| (\w+), of .+? \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert {name: float(value) for name, value, _ in rows} == pytest.approx(formulae, abs=0.005)
    assert {name: float(value) for name, _, value in rows} == measured
    for name, value in formulae.items():
        assert value == pytest.approx(measured[name], rel=0.1), name


@pytest.mark.parametrize("table", [fleet.placement_table, fleet.broker_table, fleet.waits_table])
def test_the_tables_of_the_fleet_are_those_that_its_simulation_gives(
    table: Callable[[], str],
) -> None:
    assert table() in (DOCS / "explanation/ten-thousand-topics.md").read_text()


def test_the_example_of_generational_cleaning_is_what_the_planner_decides() -> None:
    page = " ".join((DOCS / "explanation/generational-cleaning.md").read_text().split())
    planned = worked_example.example()
    gib = worked_example.SEGMENT_BYTES
    live = sum(group.live_bytes for group in planned.groups) / gib
    garbage = len(planned.groups) - live
    allowed = planned.slack * live
    removed, rewritten = (group for group in planned.groups if group.is_rewritten)
    written = rewritten.live_bytes / gib
    left = garbage - planned.cost.freed_bytes / gib
    assert removed.live_bytes == 0
    for sentence in (
        f"each is alive: {live:.1f} GiB together. The other {garbage:.1f} GiB are garbage",
        f"slack of {planned.slack}, {allowed:.1f} GiB of garbage may stay",
        f"removes it unread and frees 1 GiB. {garbage - 1:.1f} GiB of garbage are left",
        f"writes {written:.2f} GiB and frees {1 - written:.2f} GiB",
        f"{left:.2f} GiB of garbage are left, which is less than {allowed:.1f} GiB",
        f"The log now has {live + left:.2f} GiB, {1 + left / live:.2f} times its live bytes",
        f"would write {planned.by_slack[0][1].written_bytes / gib:.1f} GiB to free all",
        " ".join(" ".join(worked_example.text(planned)).split()),
    ):
        assert sentence in page
    picture = (DOCS / "images/generational-cleaning.svg").read_text()
    labels = re.findall(r"<text[^>]*>([^<]+ %|removed|rewritten)</text>", picture)
    bars = worked_example.bars(planned)
    fates = [bar.fate for bar in bars if bar.fate != "stays"]
    assert labels == [*(f"{bar.live_percent} %" for bar in bars), *fates]


def test_the_table_of_log_sizes_follows_the_formula() -> None:
    page = (DOCS / "explanation/generational-cleaning.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for slack, ratio, size in rows:
        assert float(size) == pytest.approx((1 + float(slack)) / (1 - float(ratio)), abs=0.005)
