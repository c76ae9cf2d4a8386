"""`varve cleaner`: what the cleaner does and why, and its controls, over the HTTP API.

Exit codes: config/exit_codes.py. Plain columns, not boxes: they go through grep, cut and a mail.
"""

import sys
import time
from collections.abc import Callable

import click

from broker.api_client import ApiClient, Json, partition_path
from broker.api_command import POLL_SECONDS, P, asking, fail, longest_wait, of_partition, show
from broker.cleaner_text import (
    clean_text,
    explanation_lines,
    history_lines,
    nothing_to_clean,
    progress_text,
    status_lines,
)


@click.group(short_help="What the cleaner does and why; run, pause, resume, abort, retry.")
def cleaner() -> None:
    """What the cleaner does and why, and its controls.

    Talks to the broker's HTTP address: --http, or VARVE_HTTP, or 127.0.0.1:9644.
    """


@cleaner.command(short_help="Workers, and every compacted partition.")
@click.option("--topic", help="Only partitions of this topic, compacted or not.")
@asking
def status(client: ApiClient, topic: str | None, as_json: bool) -> None:
    """Workers, and every compacted partition: how dirty, what stands in the way."""
    found = client.get("")
    rows = list(client.pages("/partitions", "partitions", topic=topic))
    show({**found, "rows": rows}, as_json, lambda answer: status_lines(answer, rows, topic))


@cleaner.command(short_help="Why is this partition not being cleaned?")
@of_partition
@asking
def explain(client: ApiClient, topic: str, partition: int, as_json: bool) -> None:
    """Why is this partition not being cleaned? The whole chain of reasons."""
    show(client.get(partition_path(topic, partition)), as_json, explanation_lines)


@cleaner.command(short_help="Clean a partition next, whatever its ratio.")
@of_partition
@click.option("--roll", is_flag=True, help="Close the active segment first: clean everything.")
@click.option("--wait", is_flag=True, help="Wait until it is clean; show progress.")
@longest_wait
@asking
def run(
    *,
    client: ApiClient,
    topic: str,
    partition: int,
    roll: bool,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Clean a partition next, whatever its ratio, and forget earlier failures.

    It is wanted until it is clean up to where it could be cleaned when this was said; `abort`
    withdraws it.
    """
    path, name = partition_path(topic, partition), f"{topic}-{partition}"
    began = client.post(f"{path}/run", {"roll": roll})
    wanted = began["wanted_offset"]
    if wanted is None:
        text = nothing_to_clean(began, rolled=roll)
        if wait and began["hindrance"] is not None:
            fail(f"{name}: {text}")
        show(began, as_json, lambda _: [f"{name}: {text}"])
    elif not wait:
        show(began, as_json, lambda _: [f"{name} is cleaned next, up to offset {wanted}"])
    else:
        done = _wait_cleaned(client, path, began, timeout, quiet=as_json)
        show(done, as_json, lambda answer: [clean_text(answer)])


def of_partition_or_all(function: Callable[P, None]) -> Callable[P, None]:
    """Adds the arguments that name a partition, and the option for all of them."""
    option = click.option("--all", "all_of_them", is_flag=True, help="Every compacted partition.")
    number = click.argument("partition", type=click.IntRange(0, (1 << 31) - 1), required=False)
    return click.argument("topic", required=False)(number(option(function)))


@cleaner.command(short_help="Leave a partition, or all, alone until it is resumed.")
@of_partition_or_all
@asking
def pause(
    client: ApiClient, topic: str | None, partition: int | None, all_of_them: bool, as_json: bool
) -> None:
    """Leave a partition alone until it is resumed, also across restarts."""
    where = _one_or_all(topic, partition, all_of_them)
    _act(client, where, "pause", as_json=as_json, yes="is paused", no="was paused already")


@cleaner.command(short_help="End a pause, or all of them.")
@of_partition_or_all
@asking
def resume(
    client: ApiClient, topic: str | None, partition: int | None, all_of_them: bool, as_json: bool
) -> None:
    """End a pause."""
    where = _one_or_all(topic, partition, all_of_them)
    _act(client, where, "resume", as_json=as_json, yes="is resumed", no="was not paused")


@cleaner.command(short_help="Give up the job that runs, and what was asked for.")
@of_partition
@asking
def abort(client: ApiClient, topic: str, partition: int, as_json: bool) -> None:
    """Give up the job that runs, and a clean that was asked for.

    The partition may be chosen again at once.
    """
    where = topic, partition
    _act(client, where, "abort", as_json=as_json, yes="is given up", no="was not being cleaned")


@cleaner.command(short_help="End a quarantine: forget earlier failures.")
@of_partition
@asking
def retry(client: ApiClient, topic: str, partition: int, as_json: bool) -> None:
    """End a quarantine: forget earlier failures."""
    yes, no = "may be tried again", "was not in quarantine"
    _act(client, (topic, partition), "retry", as_json=as_json, yes=yes, no=no)


@cleaner.command("end-transaction", short_help="Abort a transaction that nobody else will end.")
@of_partition
@click.argument("producer_id", type=click.IntRange(0, (1 << 63) - 1))
@asking
def end_transaction(
    client: ApiClient, topic: str, partition: int, producer_id: int, as_json: bool
) -> None:
    """Abort a transaction that nobody else will end: its records are dropped.

    For one that Kafka left open in a folder: this broker has no transaction coordinator. Look
    first whether Kafka's had decided to commit it (docs/operating-the-cleaner.md).
    """
    path = f"{partition_path(topic, partition)}/transactions/{producer_id}/abort"
    text = f"{topic}-{partition}: the transaction of producer {producer_id} is aborted"
    show(client.post(path), as_json, lambda _: [text])


@cleaner.command(short_help="Jobs that are over, newest first.")
@click.argument("topic", required=False)
@click.argument("partition", required=False, type=click.IntRange(0, (1 << 31) - 1))
@click.option("--limit", type=click.IntRange(1, 2000), default=20, show_default=True)
@asking
def history(
    client: ApiClient, topic: str | None, partition: int | None, limit: int, as_json: bool
) -> None:
    """Jobs that are over, newest first; they survive a restart of the broker."""
    found = client.get("/history", topic=topic, partition=partition, limit=limit)
    show(found, as_json, lambda answer: history_lines(answer["jobs"]))


def _one_or_all(
    topic: str | None, partition: int | None, all_of_them: bool
) -> tuple[str, int] | None:
    """The partition that is named; None for all."""
    if topic is not None and partition is not None and not all_of_them:
        return topic, partition
    if topic is None and all_of_them:
        return None
    raise click.UsageError("name a topic and a partition, or say --all")


def _act(
    client: ApiClient,
    where: tuple[str, int] | None,
    action: str,
    *,
    as_json: bool,
    yes: str,
    no: str,
) -> None:
    done = client.post(f"/{action}" if where is None else f"{partition_path(*where)}/{action}")
    if where is None:
        count = done["changed"]
        text = f"{count} partition {yes}" if count == 1 else f"{count} partitions: each {yes}"
    else:
        text = f"{where[0]}-{where[1]} {yes if done['changed'] else no}"
    if not done.get("durable", True):
        text += "; it is in force, but could not be written: a restart now would forget it"
    show(done, as_json, lambda _: [text])


def _wait_cleaned(
    client: ApiClient, path: str, began: Json, timeout: float, *, quiet: bool
) -> Json:
    """Until everything that could be cleaned at the beginning is. Exits where it cannot be."""
    end, deadline = began["wanted_offset"], time.monotonic() + timeout
    shown = False
    while True:
        now = client.get(path)
        stuck = reason_to_stop_waiting(now, began)
        if stuck:
            fail(stuck)
        if _is_clean(now, end):
            break
        if time.monotonic() >= deadline:
            fail(f"not clean after {timeout:g} s: {now['sentences'][0]}")
        if not quiet and sys.stderr.isatty():
            click.echo(f"\r\033[K{progress_text(client.get(''), now)}", nl=False, err=True)
            shown = True
        time.sleep(POLL_SECONDS)
    if shown:
        click.echo("\r\033[K", nl=False, err=True)
    return now


def _is_clean(now: Json, end: int) -> bool:
    first, bound = now.get("first_dirty_offset"), now.get("end_offset")
    if first is None or bound is None:
        return False
    return bool(first >= end or (now["dirty_bytes"] == 0 and bound >= end))


def reason_to_stop_waiting(now: Json, began: Json) -> str:
    """Return why the requested clean will not happen, or an empty string while it may.

    `began` and `now` are answers of the partition's status, from the request and from this poll.
    """
    end = began["wanted_offset"]
    if now["state"] == "offline" or now["paused"]:
        return str(now["sentences"][0])
    job, before = now.get("last_job"), began.get("last_job")
    is_new = job is not None and (before is None or job["run_id"] != before["run_id"])
    if job is not None and is_new:
        if job["outcome"] == "failed":
            return f"the job failed: {job['reason']}"
        if job["outcome"] == "damaged":  # what is damaged is left as it is
            return f"the job is done, and not all is clean: {job['reason']}"
    if now["state"] == "aborting":
        return ""  # the job says who aborted it once it has ended
    if now["wanted_offset"] is None and not _is_clean(now, end):
        if job is not None and is_new and job["outcome"] == "aborted":
            return f"the job was given up: {job['reason']}"
        return f"an operator cancelled the clean request. {now['sentences'][0]}"
    return ""
