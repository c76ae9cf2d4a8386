"""How the benchmarks print their tables."""

from collections.abc import Sequence


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, columns aligned for a terminal."""
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
