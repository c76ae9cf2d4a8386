"""`varve log`: verify a log, and skip what is damaged in it, over the HTTP API; api_command.py.

What damage is and what to do about it: docs/damaged-data.md.
"""

import sys
from typing import Final

import click

from broker.api_client import ApiClient, Json, partition_path
from broker.api_command import asking, fail, of_partition, show
from config import exit_codes
from config.units import about_size

ROOT: Final = "/api/v1/log"
offset_option = click.IntRange(0, (1 << 63) - 1)


@click.group("log", short_help="Verify a log; skip damaged batches.")
def log_group() -> None:
    """Verify the log of a partition, and skip damaged batches.

    Talks to the broker's HTTP address: --http, or VARVE_HTTP, or 127.0.0.1:9644.
    """


@log_group.command(short_help="Read a log and name every damaged range.")
@of_partition
@click.option("--from-offset", type=offset_option, help="Begin here, not at the log's start.")
@asking
def verify(
    client: ApiClient, topic: str, partition: int, from_offset: int | None, as_json: bool
) -> None:
    """Read the log of a partition and check every batch: length, offsets, checksum.

    Every damaged range is named, and refused to readers from then on. Exit code 4 if there is any.
    The broker reads in parts, beside its other work.
    """
    path = f"{partition_path(topic, partition)}/verify"
    below = client.below(ROOT)
    part = below.post(path if from_offset is None else f"{path}?from_offset={from_offset}")
    found: Json = dict(part)
    shown = not as_json and sys.stderr.isatty()
    while not part["done"]:
        if shown:
            text = f"{topic}-{partition}: offset {part['next_offset']} of {part['end_offset']}"
            click.echo(f"\r\033[K{text}", nl=False, err=True)
        query = f"from_offset={part['next_offset']}&end_offset={found['end_offset']}"
        part = below.post(f"{path}?{query}")
        for key in ("bytes", "batches", "records"):
            found[key] += part[key]
        found["damage"] = found["damage"] + part["damage"]
        found["next_offset"], found["done"] = part["next_offset"], part["done"]
    if shown:
        click.echo("\r\033[K", nl=False, err=True)
    show(found, as_json, verified_lines)
    if found["damage"]:
        sys.exit(exit_codes.UNVERIFIED)


@log_group.command(short_help="Give up damaged batches: readers go on behind them.")
@of_partition
@click.option("--offset", required=True, type=offset_option, help="An offset that is damaged.")
@click.option("--yes", is_flag=True, help="Do it; without this only say what would be given up.")
@asking
def skip(
    *, client: ApiClient, topic: str, partition: int, offset: int, yes: bool, as_json: bool
) -> None:
    """Cut the damaged range that holds OFFSET out of the log: readers go on at the next batch.

    The records in it are lost, if they cannot be restored from elsewhere. The damaged bytes are
    kept in a file beside the log. It is done when this returns, and cannot be undone.
    """
    below = client.below(ROOT)
    path, name = partition_path(topic, partition), f"{topic}-{partition}"
    if not yes:
        known = below.get(f"{path}/damage")["damage"]
        one = next((d for d in known if d["first_offset"] <= offset < d["next_offset"]), None)
        if one is None:
            fail(f"no damage is known at offset {offset} of {name}; see `varve log verify`")
        fail(f"{name}: this would give up {damage_text(one)}. Say --yes to do it.")
    done = below.post(f"{path}/skip?offset={offset}")
    show(done, as_json, lambda answer: [skipped_text(answer)])


def damage_text(damage: Json) -> str:
    """A damaged range in words."""
    return (
        f"offsets {damage['first_offset']} to {damage['next_offset'] - 1}, "
        f"{about_size(damage['end_position'] - damage['position'])} at byte {damage['position']} "
        f"of {damage['path']} ({damage['reason']})"
    )


def verified_lines(answer: Json) -> list[str]:
    """What was verified, and every damaged range."""
    name = f"{answer['topic']}-{answer['partition']}"
    read = (
        f"offsets {answer['first_offset']} to {answer['end_offset']}: {answer['batches']:,} whole "
        f"batches, {answer['records']:,} records, {about_size(answer['bytes'])}"
    )
    damage = answer["damage"]
    if not damage:
        return [f"{name} is whole, {read}"]
    count = "1 damaged range" if len(damage) == 1 else f"{len(damage)} damaged ranges"
    return [f"{name} has {count}, {read}", *(f"  - {damage_text(one)}" for one in damage)]


def skipped_text(answer: Json) -> str:
    """What was given up, and what readers do now."""
    return (
        f"{answer['topic']}-{answer['partition']}: {damage_text(answer)} are given up; readers go "
        f"on at offset {answer['next_offset']}. The bytes are kept as {answer['kept_as']}"
    )
