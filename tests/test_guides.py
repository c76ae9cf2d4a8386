"""The guides: their commands run against a broker, and their formulae agree with measurements."""

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from bench import fleet
from bench.cleaner import worked_example
from broker.cli import main
from config import exit_codes
from storage.env import RealEnv
from storage.segments.batch_scan import scan
from tests.support.varve import VarveBroker, running_varve

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = (
    "how-to/move-from-and-to-kafka.md",
    "how-to/operate-the-cleaner.md",
    "how-to/repair-damaged-data.md",
    "how-to/runbooks.md",
    "how-to/secure-a-broker.md",
    "how-to/size-a-broker.md",
    "how-to/use-compacted-views.md",
    "how-to/work-with-topics.md",
    "reference/upgrades.md",
    "tutorials/getting-started.md",
)
SETTINGS = {
    "cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB"},
    "authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]},
    # An erasure waits for the files of replaced segments and of topics of the same name.
    "topic_defaults": {"file.delete.delay.ms": 1000},
}
COMPACT = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "min.cleanable.dirty.ratio": "1.0",  # nothing is cleaned before a command asks for it
}
VIEW = {"varve.view": "compacted"}
# The topics of the guides: partitions and settings.
TOPICS = {
    "clicks": (1, {}),
    "customers": (2, COMPACT),
    "orders": (1, {}),
    "prices": (1, VIEW),
    "readings": (1, COMPACT),
}
# These guides have a view of the orders.
WITH_VIEW = ("how-to/use-compacted-views.md", "tutorials/getting-started.md")
REPAIR = "how-to/repair-damaged-data.md"
DAMAGED_OFFSET = 4200  # of the orders, in the guide that repairs them
# They do not end, or take minutes; the second needs a transaction that Kafka has left open.
NOT_RUN = ("serve", "cleaner end-transaction", "demo")
COMMAND = re.compile(
    r"(?:\$ )?(?:printf '(?P<lines>[^']*)' \| )?(?:\.venv/bin/)?varve (?P<words>[^&|]+)"
)
DIRTY_RATIO = 1 / 3  # of the benchmark


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """A command of a guide. `is_refused`: the output that the guide shows is an error."""

    words: list[str]
    lines: str  # of standard input
    is_refused: bool


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    with running_varve(tmp_path_factory.mktemp("guides"), SETTINGS) as running:
        yield running


@pytest.fixture
def guide(broker: VarveBroker, request: pytest.FixtureRequest) -> Iterator[str]:
    """A guide whose topics and groups exist."""
    name: str = request.param
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    settings = {topic: config for topic, (_, config) in TOPICS.items()}
    if name in WITH_VIEW:
        settings["orders"] = VIEW
    new = [NewTopic(topic, TOPICS[topic][0], 1, config=settings[topic]) for topic in TOPICS]
    for future in admin.create_topics(new).values():
        future.result(30)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "batch.num.messages": 100})
    for topic in ("customers", "orders"):
        for number in range(6000):
            key = b"customer-%d" % (number % 50)
            producer.produce(topic, b"x" * 500, key, partition=number % TOPICS[topic][0])
    assert producer.flush(30) == 0
    for group in ("billing", "readers"):
        offsets = ConsumerGroupTopicPartitions(group, [TopicPartition("customers", 0, 10)])
        for future in admin.alter_consumer_group_offsets([offsets]).values():
            future.result(30)
    if name == REPAIR:
        damage(broker.data / "orders-0/00000000000000000000.log", DAMAGED_OFFSET)
    yield name
    named = [topic for topic in admin.list_topics(timeout=30).topics if not topic.startswith("__")]
    topics = [topic for topic in named if not topic.endswith(".compacted")]
    for future in admin.delete_topics(topics).values():
        future.result(30)


def damage(path: Path, offset: int) -> None:
    """Change the last byte of the batch that has an offset."""
    file = RealEnv().open(str(path))
    (position,) = (
        batch.end_position - 1
        for batch in scan(file, 0, file.size(), whole=True)
        if batch.header.base_offset <= offset <= batch.header.last_offset
    )
    file.close()
    with path.open("r+b") as opened:
        opened.seek(position)
        (byte,) = opened.read(1)
        opened.seek(position)
        opened.write(bytes([byte ^ 1]))


def commands_of(page: str) -> Iterator[ShownCommand]:
    """Yield the commands in blocks of code, without what a shell would run beside them."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page, re.DOTALL | re.MULTILINE)
    for kind, text in blocks:
        lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            shown = COMMAND.match(line) if kind in ("", "sh") else None
            if shown is not None:
                words = shlex.split(shown["words"], comments=True)
                printed = (shown["lines"] or "").replace("\\t", "\t").replace("\\n", "\n")
                yield ShownCommand(words, printed, following.startswith("varve: "))


@pytest.mark.parametrize("guide", GUIDES, indirect=True)
def test_the_commands_of_a_guide_run(broker: VarveBroker, guide: str, tmp_path: Path) -> None:
    (tmp_path / "varve.yaml").write_text("cleaner: {workers: 1}\n")
    (tmp_path / "my.yaml").write_text("cleaner: {workers: 1}\n")
    (tmp_path / "alice").write_text("a password of alice\n")
    places = {
        "/etc/varve": str(tmp_path),
        "/run/secrets": str(tmp_path),
        "/var/lib/varve/data": str(broker.data),
    }
    environment = {"VARVE_HTTP": broker.url, "VARVE_BOOTSTRAP": broker.bootstrap}
    commands = list(commands_of((DOCS / guide).read_text()))
    assert commands
    for command in commands:
        words = list(command.words)
        if " ".join(words).startswith(NOT_RUN) or {"--follow", "--watch"} & set(words):
            continue
        if words[:3] == ["topics", "create", "customers"]:
            words[2] = "copied"  # the topic of the other commands exists
        for place, here in places.items():
            words = [word.replace(place, here) for word in words]
        with chdir(tmp_path):
            lines = command.lines or "y\n"  # the answer to a question
            ended = CliRunner().invoke(main, words, input=lines, env=environment)
        code = exit_codes.FAILED if command.is_refused else exit_codes.DONE
        if guide == REPAIR and words[1] in ("dump", "verify"):
            code = exit_codes.UNVERIFIED
        assert ended.exit_code == code, (words, ended.output)


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
