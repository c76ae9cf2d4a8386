"""`varve log`: verify, repair and truncate logs over the HTTP API; dump files.

What damage is and what to do about it: docs/how-to/repair-damaged-data.md.
"""

import sys
from collections.abc import Sequence
from typing import Final

import click

from admin.client import ApiClient, Json, partition_path
from admin.command import (
    api_command,
    fail,
    optional_partition_arguments,
    partition_arguments,
    show,
    show_progress,
)
from admin.http.cleaner import select_partition, select_partitions
from admin.log_dump import dump
from admin.rangeless_option import RangelessOption
from admin.tables import columns
from admin.watch import watched
from config import exit_codes
from config.units import about_size, counted

ROOT: Final = "/api/v1/log"
offset_type = click.IntRange(0, (1 << 63) - 1)


@click.group("log", short_help="Verify, repair, truncate and dump logs; show data directories.")
def log_group() -> None:
    """Verify the log of a partition, skip damaged batches, or truncate it; dump files; show disks.

    `dump` reads files; the other commands use the HTTP API of the broker.
    """


log_group.add_command(dump)


@log_group.command("dirs", short_help="Show the data directories, their space and state.")
@api_command
@watched
def directories(client: ApiClient, as_json: bool) -> None:
    """Show the data directories: total and free bytes, and why one is offline."""
    answer = {"directories": client.below("/api/v1").get("/overview")["directories"]}
    show(answer, as_json, lambda answer: directory_lines(answer["directories"]))


def directory_lines(rows: Sequence[Json]) -> list[str]:
    """Return a table of data directories."""
    table = [("DIRECTORY", "STATE", "TOTAL", "FREE", "REASON")]
    for row in rows:
        total, free = row["total_bytes"], row["free_bytes"]
        table.append(
            (
                row["path"],
                "online" if row["online"] else "offline",
                "-" if total is None else about_size(total),
                "-" if not total else f"{about_size(free)} ({free / total:.0%})",
                row["reason"] or "",
            )
        )
    return columns(table, right={2, 3})


@log_group.command(short_help="Read a log and name every damaged range.")
@optional_partition_arguments
@click.option("--from-offset", type=offset_type, cls=RangelessOption, metavar="OFFSET",
              help="First offset to verify; default: the start of the log.")  # fmt: skip
@api_command
def verify(
    client: ApiClient, topic: str, partition: int | None, from_offset: int | None, as_json: bool
) -> None:
    """Read the log of a partition or topic; check length, offsets and checksum of every batch.

    The command names every damaged range; from then on the broker answers fetches there with
    CORRUPT_MESSAGE. The exit code is 4 if there is damage. The broker reads the log in small steps
    between other requests.
    """
    selection = select_partitions(client, topic, partition)
    done = [_verified(client, *where, from_offset, quiet=as_json) for where in selection.partitions]
    answer = {"partitions": done} if selection.topic is not None else done[0]
    show(answer, as_json, lambda _: [line for row in done for line in verified_lines(row)])
    if any(row["damage"] for row in done):
        sys.exit(exit_codes.UNVERIFIED)


def _verified(
    client: ApiClient, topic: str, partition: int, from_offset: int | None, *, quiet: bool
) -> Json:
    """Read the log of one partition and return the sums and the damaged ranges."""
    path = f"{partition_path(topic, partition)}/verify"
    below = client.below(ROOT)
    part = below.post(path if from_offset is None else f"{path}?from_offset={from_offset}")
    total: Json = dict(part)
    shown = not quiet and sys.stderr.isatty()
    while not part["done"]:
        if shown:
            text = f"{topic}-{partition}: offset {part['next_offset']} of {part['end_offset']}"
            show_progress(text)
        query = f"from_offset={part['next_offset']}&end_offset={total['end_offset']}"
        part = below.post(f"{path}?{query}")
        for key in ("bytes", "batches", "records"):
            total[key] += part[key]
        total["damage"] = total["damage"] + part["damage"]
        total["next_offset"], total["done"] = part["next_offset"], part["done"]
    if shown:
        show_progress("")
    return total


@log_group.command(short_help="Remove damaged batches so that readers can continue.")
@partition_arguments
@click.option("--offset", required=True, type=offset_type, cls=RangelessOption, metavar="OFFSET",
              help="An offset in the damaged range.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do it; default: only show what would be removed.")
@api_command
def skip(
    *, client: ApiClient, topic: str, partition: int | None, offset: int, yes: bool, as_json: bool
) -> None:
    """Remove the damaged range that contains --offset; readers continue at the next batch.

    A batch that is intact but cannot be cleaned, because its records are malformed or because it
    is too large, is removed in the same way. The records in the range are lost unless you restore
    them from elsewhere. The removed bytes are kept in a file beside the log. The change is durable
    when the command returns, and cannot be undone.
    """
    topic, partition = select_partition(client, topic, partition)
    below = client.below(ROOT)
    path, name = partition_path(topic, partition), f"{topic}-{partition}"
    if not yes:
        answer = below.get(f"{path}/damage")
        ranges = [*answer["damage"], *answer["uncleanable"]]
        damage = next((d for d in ranges if d["first_offset"] <= offset < d["next_offset"]), None)
        if damage is None:
            fail(
                f"no damage is known at offset {offset} of {name}. "
                f"Run `varve log verify {topic} {partition}` to look for it."
            )
        fail(
            f"{name}: this removes {damage_text(damage)} from the log for good. Nothing was "
            "changed. Run the command again with --yes to do it."
        )
    done = below.post(f"{path}/skip?offset={offset}")
    show(done, as_json, lambda answer: [skipped_text(answer)])


@log_group.command(short_help="Remove all records from an offset on.")
@partition_arguments
@click.option("--to", "end", required=True, type=offset_type, cls=RangelessOption, metavar="OFFSET",
              help="First offset to remove.")  # fmt: skip
@click.option("--force", is_flag=True, help="Remove acknowledged records, too.")
@api_command
def truncate(
    *, client: ApiClient, topic: str, partition: int | None, end: int, force: bool, as_json: bool
) -> None:
    """Remove all records from the offset --to on, as the last resort after a faulty producer.

    Without --force the command removes no acknowledged records; it names what --force would remove.
    The broker aborts a running clean. Consumers beyond the new end reset their position. The change
    is durable when the command returns, and cannot be undone.
    """
    topic, partition = select_partition(client, topic, partition)
    path = f"{partition_path(topic, partition)}/truncate?to={end}"
    done = client.below(ROOT).post(path, {"force": True} if force else None)
    show(done, as_json, lambda answer: [truncated_text(answer)])


def truncated_text(answer: Json) -> str:
    """Say which offsets were removed."""
    return (
        f"{answer['topic']}-{answer['partition']}: removed offsets {answer['end_offset']} to "
        f"{answer['former_end_offset'] - 1}, of which {answer['acknowledged']} were acknowledged. "
        f"The next record gets offset {answer['end_offset']}."
    )


def damage_text(damage: Json) -> str:
    """Describe a damaged range."""
    return (
        f"offsets {damage['first_offset']} to {damage['next_offset'] - 1}, "
        f"{about_size(damage['end_position'] - damage['position'])} at byte {damage['position']} "
        f"of {damage['path']} ({damage['reason']})"
    )


def verified_lines(answer: Json) -> list[str]:
    """Describe what was verified, and every damaged range."""
    name = f"{answer['topic']}-{answer['partition']}"
    first, end = answer["first_offset"], answer["end_offset"]
    if first == end:
        return [f"{name} has no records from offset {first} on"]
    read = (
        f"offsets {first} to {end - 1}: {counted(answer['batches'], 'whole batch', 'es')}, "
        f"{counted(answer['records'], 'record')}, {about_size(answer['bytes'])}"
    )
    damage = answer["damage"]
    if not damage:
        return [f"{name} has no damage, {read}"]
    count = "1 damaged range" if len(damage) == 1 else f"{len(damage)} damaged ranges"
    return [f"{name} has {count}, {read}", *(f"  - {damage_text(each)}" for each in damage)]


def skipped_text(answer: Json) -> str:
    """Say what was removed, and where readers continue."""
    return (
        f"{answer['topic']}-{answer['partition']}: removed {damage_text(answer)}; readers "
        f"continue at offset {answer['next_offset']}. The damaged bytes are kept in "
        f"{answer['kept_as']}"
    )
