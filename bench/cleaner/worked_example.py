"""Compute the worked example of docs/explanation/generational-cleaning.md, and draw its picture.

    python -m bench.cleaner.worked_example [--out docs/images/generational-cleaning.svg]

The planner decides for eight closed segments of 1 GiB, of which cleans have counted the live bytes;
nothing is measured. A test compares the page with the text and the labels. Drawing needs matplotlib
(the extra `pipeline`).
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from admin.http.cleaner_text import estimate_lines
from broker.http.api.json_shapes import estimate_json, group_json
from cleaner.planning.cleaner_state import FRESH
from cleaner.planning.estimate import Estimate, estimate, rates
from cleaner.planning.findings import ClockReading
from cleaner.planning.plan import assess
from cleaner.states import Idle
from config.topics.keys import TopicConfig
from tests.support.cleaner.log_facts import facts, segment

SEGMENT_BYTES: Final = 1 << 30
SEGMENT_RECORDS: Final = 1_000_000
LIVE_PERCENT: Final = (0, 15, 40, 85, 60, 90, 70, 100)
SLACK: Final = 0.5
RATE: Final = 100_000_000  # bytes per second of the last job
LIVE_COLOUR, GARBAGE_COLOUR, TEXT_COLOUR = "#c98a2b", "#d3d6da", "#5b6068"


def example() -> Estimate:
    """Return what the planner decides about the log of the example."""
    count = len(LIVE_PERCENT)
    bases = [at * SEGMENT_RECORDS for at in range(count + 1)]
    closed = [segment(base, base + SEGMENT_RECORDS, SEGMENT_BYTES) for base in bases[:-1]]
    config = TopicConfig(
        cleanup_policy=("compact",),
        segment_bytes=SEGMENT_BYTES,
        varve_cleaner_strategy="generational",
        varve_compaction_slack=SLACK,
    )
    log = facts([*closed, segment(bases[-1], bases[-1], 0)], checkpoint=0, config=config)
    live = {
        (base, SEGMENT_BYTES): SEGMENT_BYTES * percent // 100
        for base, percent in zip(bases, LIVE_PERCENT, strict=False)
    }
    state = replace(FRESH, records=count * SEGMENT_RECORDS, has_tombstones=False, live=live)
    verdict = assess(log, Idle(), ClockReading(0, 0), state)
    assert verdict.is_selective
    result = estimate(log, verdict, state)
    assert result is not None
    return result


def text(result: Estimate) -> list[str]:
    """Return what `varve cleaner estimate customers 0 --groups` prints."""
    seconds = result.cost.seconds(*rates(None, None, RATE, 1.0))
    answer = {
        "topic": "customers",
        "partition": 0,
        **estimate_json(result, seconds),
        "groups": [group_json(group) for group in result.groups],
    }
    return estimate_lines(answer, with_groups=True)


@dataclass(frozen=True, slots=True)
class Bar:
    """A segment in the picture."""

    name: str
    live_percent: int
    garbage_percent: int
    fate: str  # what the clean does with it


def bars(result: Estimate) -> list[Bar]:
    """Return the segments, named by letters, with what happens to each."""
    rows = []
    for at, group in enumerate(result.groups):
        fate = "stays"
        if group.is_rewritten:
            fate = "rewritten" if group.live_bytes else "removed"
        percent = round(100 * group.live_bytes / group.size_bytes)
        rows.append(Bar("ABCDEFGH"[at], percent, 100 - percent, fate))
    return rows


def draw(rows: Sequence[Bar], out: Path) -> None:
    """Draw the segments before and after the clean: live bytes, and garbage on top of them."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "varve"  # the same file from the same rows
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    figure, (before, after) = pyplot.subplots(1, 2, figsize=(8, 2.6), sharey=True)
    _draw_bars(before, "before", rows, [f"{row.live_percent} %" for row in rows])
    cleaned = [replace(row, garbage_percent=0) if row.fate != "stays" else row for row in rows]
    _draw_bars(after, "after", cleaned, ["" if row.fate == "stays" else row.fate for row in rows])
    before.set_ylabel("% of a segment")
    before.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def _draw_bars(axes: Any, title: str, rows: Sequence[Bar], labels: Sequence[str]) -> None:
    names, live = [row.name for row in rows], [row.live_percent for row in rows]
    garbage = [row.garbage_percent for row in rows]
    axes.bar(names, live, color=LIVE_COLOUR, width=0.86, label="alive")
    axes.bar(names, garbage, bottom=live, color=GARBAGE_COLOUR, width=0.86, label="garbage")
    for at, (row, label) in enumerate(zip(rows, labels, strict=True)):
        place = min(row.live_percent, 90) + 2
        axes.text(at, place, label, ha="center", color=TEXT_COLOUR, fontsize=7)
    axes.set_title(title, loc="left", color=TEXT_COLOUR, fontsize=10)
    axes.set_ylim(0, 102)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Print the text and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images/generational-cleaning.svg"))
    arguments = parser.parse_args()
    result = example()
    print("\n".join(text(result)))
    draw(bars(result), arguments.out)


if __name__ == "__main__":
    main()
