"""Tables and times in the output of commands."""

from collections.abc import Sequence
from datetime import datetime


def columns(table: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    """Return rows of equal width; columns in `right` are aligned right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def local_time(at_ms: int) -> str:
    """Return a time, in milliseconds since 1970, in the time zone of this machine.

    Producers choose the times of records: one that is no day of the calendar stays a number.
    """
    try:
        return f"{datetime.fromtimestamp(at_ms / 1000).astimezone():%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
