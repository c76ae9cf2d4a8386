"""`varve verify`: check the logs of a topic, over the HTTP API; see admin/command.py."""

import sys
import time

import click

from admin.client import ApiClient, Json, partition_path
from admin.command import (
    POLL_SECONDS,
    api_command,
    fail,
    optional_partition_arguments,
    show,
    show_progress,
    timeout_option,
)
from admin.http.cleaner import PartitionSelection, select_partitions
from admin.http.verify_text import verified_lines
from config import exit_codes


@click.command(short_help="Check that compaction lost no live record.")
@optional_partition_arguments
@click.option("--segments", is_flag=True, help="List every segment, not only the sums.")
@timeout_option
@api_command
def verify(
    *,
    client: ApiClient,
    topic: str,
    partition: int | None,
    segments: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Find the live records of a partition or topic, and check that compaction lost none.

    The command reads the closed segments and compares the live records with the key indexes, with
    the first dirty offset, and with the digest of an earlier check or clean. To check only that
    every batch can be read, use `varve log verify`. The exit code is 4 if something differs.

    The broker reads each log twice, in a process of its own and within the read rate of the
    cleaner; it does not clean the partition meanwhile.
    """
    selection = select_partitions(client, topic, partition)
    deadline = time.monotonic() + timeout
    done = [
        _verified(client, where, deadline, timeout, quiet=as_json) for where in selection.partitions
    ]
    show(_answer(selection, done), as_json, lambda _: verified_lines(done, with_segments=segments))
    if any(row["state"] != "done" for row in done):
        sys.exit(exit_codes.FAILED)
    if any(row["differences"] for row in done):
        sys.exit(exit_codes.UNVERIFIED)


def _answer(selection: PartitionSelection, done: list[Json]) -> Json:
    return {"partitions": done} if selection.topic is not None else done[0]


def _verified(
    client: ApiClient, where: tuple[str, int], deadline: float, timeout: float, *, quiet: bool
) -> Json:
    """Verify one partition and return the result. Fails after the deadline, and aborts then."""
    path, name = f"{partition_path(*where)}/verify", f"{where[0]}-{where[1]}"
    row = client.post(path)
    is_shown = not quiet and sys.stderr.isatty()
    try:
        while row["state"] in ("waiting", "running"):
            if time.monotonic() >= deadline:
                client.post(f"{path}/abort")
                fail(f"{name}: not verified after {timeout:g} s; the check was aborted")
            if is_shown:
                show_progress(f"{name}: {row['share']:.0%}")
            time.sleep(POLL_SECONDS)
            row = client.get(path)
    except KeyboardInterrupt:
        client.post(f"{path}/abort")
        raise
    finally:
        if is_shown:
            show_progress("")
    return row
