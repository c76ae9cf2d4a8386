"""`varve view`: compacted views and their compaction, over the HTTP API; see admin/command.py."""

import sys
import time

import click

from admin.client import ApiClient, partition_path
from admin.command import POLL_SECONDS, api_command, fail, partition_arguments, show, timeout_option
from admin.view_text import compacted_text, view_lines
from config import exit_codes

ROOT = "/api/v1/view"
UNDER_WAY = ("waiting", "running")


@click.group(short_help="Show and compact compacted views.")
def view() -> None:
    """Show and compact views: the latest record of each key of a topic, read as TOPIC.compacted.

    Set varve.view=compacted for a topic to give it a view. Talks to the broker's HTTP address:
    --http, or VARVE_HTTP, or 127.0.0.1:9644.
    """


@view.command(short_help="Show every view, or those of a topic.")
@click.argument("topic", required=False)
@api_command
def status(client: ApiClient, topic: str | None, as_json: bool) -> None:
    """Show every view, or those of a topic: horizon, size, records to compact."""
    results = client.below(ROOT).get("", topic=topic)
    show(results, as_json, lambda answer: view_lines(answer["views"]))


@view.command(short_help="Compact the view of a topic or partition.")
@click.argument("topic")
@click.argument("partition", required=False, type=click.IntRange(0, (1 << 31) - 1))
@click.option("--from-scratch", is_flag=True, help="Rebuild the view from the records in the log.")
@click.option("--no-wait", is_flag=True, help="Return without waiting for the end.")
@timeout_option
@api_command
def compact(
    *,
    client: ApiClient,
    topic: str,
    partition: int | None,
    from_scratch: bool,
    no_wait: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Compact the view of a topic, or of one partition, up to the end of the log."""
    api = client.below(ROOT)
    indexes = [partition]
    if partition is None:
        indexes = [row["partition"] for row in api.get("", topic=topic)["views"]]
    if not indexes:
        fail(f"topic {topic} has no view; set varve.view=compacted first")
    deadline = time.monotonic() + timeout
    done = []
    for index in indexes:
        assert index is not None
        path = partition_path(topic, index)
        row = api.post(f"{path}/compact", {"from_scratch": from_scratch})
        while not no_wait and (row["state"] in UNDER_WAY or row["place"]):
            if time.monotonic() >= deadline:
                fail(f"{topic}-{index}: not done after {timeout:g} s. The compaction continues")
            time.sleep(POLL_SECONDS)
            row = api.get(path)
        done.append(row)
    show({"views": done}, as_json, lambda _: [compacted_text(row) for row in done])
    if any(row["state"] in ("failed", "aborted") for row in done):
        sys.exit(exit_codes.FAILED)


@view.command()
@partition_arguments
@api_command
def abort(client: ApiClient, topic: str, partition: int, as_json: bool) -> None:
    """Abort the compaction of a view. The view does not change."""
    done = client.below(ROOT).post(f"{partition_path(topic, partition)}/abort")
    text = "compaction aborted" if done["changed"] else "was not being compacted"
    show(done, as_json, lambda _: [f"{topic}-{partition} {text}"])
