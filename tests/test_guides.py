"""The figures of the guides agree with measurements and with the code that they describe."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import fleet
from bench.cleaner import worked_example
from cleaner.planning.plan import slack_of, unread_ratio
from config.topics.keys import TopicConfig
from tests.support.draws import cases

DOCS = Path(__file__).parents[1] / "docs"
DIRTY_RATIO = 1 / 3  # of the benchmark


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


@pytest.mark.parametrize(
    "table",
    # The last one takes 3 s of processor time.
    [fleet.placement_table, fleet.broker_table, fleet.waits_table][: cases(few=2, many=3)],
)
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
    rows = re.findall(r"^\| (\d[\d.]*(?: \| [\d.]+){4}) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for ratio, slack, garbage, unread, size in (map(float, row.split(" | ")) for row in rows):
        config = TopicConfig(min_cleanable_dirty_ratio=ratio, varve_compaction_slack=slack)
        left, limit = slack_of(config), unread_ratio(config)
        assert garbage == pytest.approx(left, abs=0.005)
        assert unread == pytest.approx(limit, abs=0.0051)
        assert size == pytest.approx((1 + left) / (1 - limit), abs=0.005)
