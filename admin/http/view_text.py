"""What `varve view` prints for people. Pure: the API's answers in, lines out."""

from collections.abc import Sequence

from admin.client import Json
from admin.tables import columns, local_time
from config.units import about_size, counted


def view_lines(rows: Sequence[Json], topic: str | None = None) -> list[str]:
    """Return a table of views, all or a topic's, and below it errors and missed records."""
    if not rows:
        subject = "No topic has a" if topic is None else f"{topic} has no"
        return [f"{subject} view (varve.view=compacted)."]
    table = [
        ("PARTITION", "STATE", "HORIZON", "LAG", "TO COMPACT", "SIZE", "RECORDS", "COMPACTED"),
    ]
    notes = []
    for row in rows:
        name = f"{row['topic']}-{row['partition']}"
        table.append(
            (
                name,
                state_text(row),
                f"{row['horizon']:,}",
                f"{row['log_end_offset'] - row['horizon']:,}",
                about_size(row["backlog_bytes"]),
                about_size(row["ledger_bytes"]),
                f"{row['ledger_records']:,}",
                _when(row["made_ms"]),
            )
        )
        if row["records_without_version"]:
            notes.append(
                f"{name}: {counted(row['records_without_version'], 'record')}"
                " without a readable version, ranked below all others"
            )
        if row["error"]:
            notes.append(f"{name}: {row['error']}")
        notes += [
            f"{name}: offsets {first} to {end - 1} expired before they were compacted"
            for first, end in row["missed"]
        ]
    return [*columns(table, right={2, 3, 4, 5, 6}), *([""] if notes else []), *notes]


def state_text(row: Json) -> str:
    """Return the state, with the position in the queue or the progress."""
    state: str = row["state"]
    if state == "waiting":
        return f"waiting ({row['place']})"
    if state != "running" or not row["total_bytes"]:
        return state
    share = row["done_bytes"] * 100 // row["total_bytes"]
    again = f", round {row['round']}" if row["round"] > 1 else ""
    return f"running {share}%{again}"


def compacted_text(row: Json) -> str:
    """Return one line on a requested compaction."""
    name = f"{row['topic']}-{row['partition']}"
    if row["state"] == "waiting":
        return f"view compaction of {name} is queued (position {row['place']})"
    if row["state"] == "running":
        then = f"; another compaction is queued (position {row['place']})" if row["place"] else ""
        return f"the view of {name} is being compacted{then}"
    if row["state"] != "done":
        return f"the view of {name} was not compacted: {row['error'] or row['state']}"
    size = about_size(row["ledger_bytes"])
    records = counted(row["ledger_records"], "record")
    return f"the view of {name} was compacted below offset {row['horizon']:,}: {records}, {size}"


def _when(at_ms: int) -> str:
    return "-" if at_ms < 0 else local_time(at_ms)
