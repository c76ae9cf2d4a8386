"""The statistic and the tables of the benchmarks.

Every figure of a table is the median of the counted rounds. A ratio is that of two such medians
over the same rounds, in which the competitors take turns, so it always agrees with its columns.
"""

import statistics
from collections.abc import Sequence


def median_ratio(rates: Sequence[float], other_rates: Sequence[float]) -> float:
    """Return the median of `rates` divided by that of `other_rates`, of the same rounds."""
    assert len(rates) == len(other_rates)
    return statistics.median(rates) / statistics.median(other_rates)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, with columns aligned for a terminal."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return (
            "| "
            + " | ".join([first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
            + " |"
        )

    rule = (
        "|"
        + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths))
        + "|"
    )
    return "\n".join([line(head), rule, *(line(row) for row in rows)])
