"""The pages about the cleaner list its states, obstacles, metrics and commands."""

import re
from pathlib import Path
from typing import get_args

from admin.http.cleaner import cleaner
from cleaner.planning.findings import Reason
from cleaner.states import State
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import scraped
from tests.support.storage.memory_env import MemoryEnv

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to/operate-the-cleaner.md").read_text()
METRICS = (DOCS / "reference/cleaner-metrics.md").read_text().split("## Compacted views")[0]
# These never stand in the way.
HARMLESS = {Reason.DAMAGED, Reason.UNCLEANABLE, Reason.MAX_LAG, Reason.RUN_NOW, Reason.EXPIRED}
PARTITION_SERIES = 14


def column(head: str) -> list[str]:
    """The first cells of the table under this head."""
    rows = PAGE.split(f"| {head} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [row.strip("| ").split(" | ")[0] for row in rows]


def test_every_obstacle_has_its_row() -> None:
    assert sorted(column("blocked by")) == sorted(reason.value for reason in set(Reason) - HARMLESS)


def test_every_state_has_its_row() -> None:
    states = {get_arg.__name__.lower() for get_arg in get_args(State)}
    assert set(column("state")) == states | {"offline"}


def test_every_command_is_named() -> None:
    assert [name for name in cleaner.commands if f"varve cleaner {name}" not in PAGE] == []


def test_every_command_says_in_a_line_what_it_is_for() -> None:
    assert [name for name, command in cleaner.commands.items() if not command.short_help] == []
    assert all(len(str(command.short_help)) < 60 for command in cleaner.commands.values())


async def test_every_metric_of_the_cleaner_stands_on_the_page_and_no_other() -> None:
    topics = {"orders": {"keys": {"cleanup.policy": "compact"}}}
    async with broker_in_memory(MemoryEnv(seed=3), topics=topics) as running:
        await running.pool.scanner.scan()
        text = await scraped(running)
    reported = re.findall(r"^# HELP ((?:kafka_log_logcleaner|varve_cleaner)\w+) (.*)$", text, re.M)
    rows = re.findall(r"^\| `(\w+)` \| (.+?)( \(by partition\))? \|$", METRICS, re.M)
    assert [(name, output) for name, output, _ in rows] == reported
    by_partition = {name for name, _, mark in rows if mark}
    assert len(by_partition) == PARTITION_SERIES
    assert "up to fourteen series of 60 to 100 bytes" in PAGE
    lines = [
        line for line in text.splitlines() if re.match(r"varve_cleaner_\w+\{.*partition", line)
    ]
    assert {re.match(r"\w+", line)[0] for line in lines} <= by_partition  # type: ignore[index]
    assert all(len(line) <= 100 for line in lines)
