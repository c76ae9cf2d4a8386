"""What `varve verify` prints for people. Pure: the API's answers in, lines out."""

from collections.abc import Sequence

from admin.client import Json
from admin.tables import columns
from config.units import about_size

_HEADER = ("SEGMENT", "SIZE", "RECORDS", "LIVE", "DEAD", "TOMBSTONES", "NO KEY", "INDEX")
_NUMBERS = ("records", "live", "dead", "tombstones", "keyless")


def verified_lines(rows: Sequence[Json], *, with_segments: bool) -> list[str]:
    """Describe the checks of partitions: sums, differences, and the segments if requested."""
    lines: list[str] = []
    for row in rows:
        lines += _partition_lines(row)
        if with_segments and row["segments"]:
            table = [_HEADER, *(map(_segment_row, row["segments"]))]
            lines += ["", *columns(table, right={0, 1, 2, 3, 4, 5, 6}), ""]
    return lines or ["The topic has no partition that the broker serves."]


def _partition_lines(row: Json) -> list[str]:
    name, result = f"{row['topic']}-{row['partition']}", row["result"]
    if result is None:
        return [f"{name} was not verified: {row['reason']}"]
    size = about_size(result["size_bytes"])
    states = ", ".join(f"{count} {state}" for state, count in _index_states(row).items())
    sums = (
        f"below offset {result['end_offset']:,}: {result['keys']:,} keys, {size}; "
        f"{result['records']:,} records, {result['live']:,} live ({result['tombstones']:,} "
        f"tombstone{'' if result['tombstones'] == 1 else 's'}), {result['dead']:,} dead"
    )
    others = [
        f"{result[key]:,} {text}"
        for key, text in (("keyless", "without a key"), ("aborted", "aborted"))
        if result[key]
    ]
    sums = ", ".join([sums, *others])
    if states:
        sums += f"; key indexes: {states}"
    if compared := result["digests_compared"]:
        sums += "; 1 digest compared" if compared == 1 else f"; {compared} digests compared"
    differences = row["differences"]
    if not differences:
        return [f"{name}: nothing differs, {sums}"]
    count = "1 difference" if len(differences) == 1 else f"{len(differences)} differences"
    return [f"{name}: {count}, {sums}", *(f"  - {_difference_text(d)}" for d in differences)]


def _index_states(row: Json) -> dict[str, int]:
    states: dict[str, int] = {}
    for segment in row["segments"]:
        states[segment["index"]] = states.get(segment["index"], 0) + 1
    return dict(sorted(states.items()))


def _difference_text(difference: Json) -> str:
    last = difference["end_offset"] - 1
    return (
        f"{difference['kind']}, offsets {difference['first_offset']:,} to {last:,}: "
        f"{difference['text']}"
    )


def _segment_row(segment: Json) -> tuple[str, ...]:
    return (
        f"{segment['base_offset']:,}",
        about_size(segment["size_bytes"]),
        *(f"{segment[key]:,}" for key in _NUMBERS),
        "damaged segment" if segment["damage"] else segment["index"],
    )
