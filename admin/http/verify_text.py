"""What `varve verify` prints for people. Pure: the API's answers in, lines out."""

from collections.abc import Sequence

from admin.client import Json
from admin.tables import columns
from config.units import about_size, counted

_HEADER = ("SEGMENT", "SIZE", "RECORDS", "LIVE", "DEAD", "TOMBSTONES", "NO KEY", "INDEX")
_NUMBERS = ("records", "live", "dead", "tombstones", "keyless")
_COMPARED_INDEXES = {"current", "wrong"}
_INDEX_TEXTS = {"missing": "none"}  # most logs need no key indexes: "missing" would read as damage


def verified_lines(rows: Sequence[Json], *, with_segments: bool) -> list[str]:
    """Describe the checks of partitions: sums, differences, and the segments if requested."""
    lines: list[str] = []
    for row in rows:
        if with_segments and lines:
            lines.append("")
        lines += _partition_lines(row)
        if with_segments and row["segments"]:
            table = [_HEADER, *(map(_segment_row, row["segments"]))]
            lines += ["", *columns(table, right={0, 1, 2, 3, 4, 5, 6})]
    return lines or ["The topic has no partition that the broker serves."]


def _partition_lines(row: Json) -> list[str]:
    name, result = f"{row['topic']}-{row['partition']}", row["result"]
    if result is None:
        return [f"{name} was not verified: {row['reason']}"]
    size = about_size(result["size_bytes"])
    indexes = sum(segment["index"] in _COMPARED_INDEXES for segment in row["segments"])
    sums = (
        f"below offset {result['end_offset']:,}: {counted(result['keys'], 'key')}, {size}; "
        f"{counted(result['records'], 'record')}, {result['live']:,} live "
        f"({counted(result['tombstones'], 'tombstone')}), {result['dead']:,} dead"
    )
    others = [
        f"{result[key]:,} {text}"
        for key, text in (("keyless", "without a key"), ("aborted", "aborted"))
        if result[key]
    ]
    sums = ", ".join([sums, *others])
    if indexes:
        sums += f"; {counted(indexes, 'key index', 'es')} compared"
    if digests := result["digests_compared"]:
        sums += f"; {counted(digests, 'digest')} compared"
    differences = row["differences"]
    if not differences:
        return [f"{name}: nothing differs, {sums}"]
    count = counted(len(differences), "difference")
    return [f"{name}: {count}, {sums}", *(f"  - {_difference_text(d)}" for d in differences)]


def _difference_text(difference: Json) -> str:
    last = difference["end_offset"] - 1
    return (
        f"{difference['kind']}, offsets {difference['first_offset']:,} to {last:,}: "
        f"{difference['text']}"
    )


def _segment_row(segment: Json) -> tuple[str, ...]:
    index: str = segment["index"]
    return (
        f"{segment['base_offset']:,}",
        about_size(segment["size_bytes"]),
        *(f"{segment[key]:,}" for key in _NUMBERS),
        "damaged segment" if segment["damage"] else _INDEX_TEXTS.get(index, index),
    )
