"""`varve view`: compacted views and their compaction, over the HTTP API; see admin/command.py."""

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
    timeout_option,
)
from admin.http.cleaner import select_partitions
from admin.http.view_text import compacted_text, view_lines
from admin.watch import watched
from config import exit_codes

ROOT = "/api/v1/view"
UNDER_WAY = ("waiting", "running")


@click.group(short_help="Show and compact compacted views.")
def view() -> None:
    """Show and compact the compacted views of topics.

    A view keeps the latest record of each key of a topic; consumers read it as TOPIC.compacted. Set
    varve.view=compacted on a topic to give it a view.
    """


@view.command(short_help="Show the views of all topics, or of one.")
@click.argument("topic", required=False)
@api_command
@watched
def status(client: ApiClient, topic: str | None, as_json: bool) -> None:
    """Show the views of all topics, or of one: horizon, lag in offsets, bytes to compact, size.

    Consumers of a view read compacted records below its view horizon, and the log from there on.
    """
    results = {"views": list(client.below(ROOT).pages("", "views", topic=topic))}
    show(results, as_json, lambda answer: view_lines(answer["views"], topic))


@view.command(short_help="Compact the view of a topic or partition.")
@optional_partition_arguments
@click.option("--from-scratch", is_flag=True, help="Rebuild the view from the records in the log.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the end.")
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
    topic, indexes = _partitions_with_view(client, topic, partition)
    deadline = time.monotonic() + timeout
    done = []
    for index in indexes:
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


@view.command(short_help="Abort the compaction of a view.")
@optional_partition_arguments
@api_command
def abort(client: ApiClient, topic: str, partition: int | None, as_json: bool) -> None:
    """Abort compactions of the view of a topic, or of one partition: running and queued ones.

    The view does not change.
    """
    api = client.below(ROOT)
    topic, indexes = _partitions_with_view(client, topic, partition)
    done = [api.post(f"{partition_path(topic, index)}/abort") for index in indexes]
    show({"views": done}, as_json, lambda _: list(map(_aborted_text, done)))


def _aborted_text(row: Json) -> str:
    text = "compaction aborted" if row["changed"] else "no compaction is running or queued"
    return f"{row['topic']}-{row['partition']}: {text}"


def _partitions_with_view(
    client: ApiClient, topic: str, partition: int | None
) -> tuple[str, list[int]]:
    """Return the topic and its partition that the arguments name, or all with a view."""
    selection = select_partitions(client, topic, partition)
    if selection.topic is None:
        ((topic, number),) = selection.partitions
        return topic, [number]
    views = client.below(ROOT).pages("", "views", topic=topic)
    indexes = [row["partition"] for row in views]
    if not indexes:
        fail(f"topic {topic} has no view; set varve.view=compacted first")
    return topic, indexes
