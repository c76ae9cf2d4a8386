"""`varve cleaner`: what the cleaner does and why, and its controls, over the HTTP API.

Exit codes: 0 done, or nothing to do; 1 refused, or failed, or not in time; 2 the command line makes
no sense; 3 no broker answered. Plain columns, not boxes: they go through grep, cut and a mail.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, ParamSpec

import click

from broker.api_client import ApiClient, ApiRefusedError, Json, UnreachableError, partition_path
from broker.cleaner_text import (
    clean_text,
    explanation_lines,
    history_lines,
    progress_text,
    status_lines,
)

DEFAULT_URL = "http://127.0.0.1:9644"
EXIT_REFUSED = 1
EXIT_UNREACHABLE = 3
POLL_SECONDS = 0.25
P = ParamSpec("P")


@click.group(short_help="What the cleaner does and why; run, pause, resume, abort, retry.")
def cleaner() -> None:
    """What the cleaner does and why, and its controls.

    Talks to the broker's HTTP address: --url, or VARVE_HTTP, or 127.0.0.1:9644.
    """


def _client(_context: click.Context, _parameter: click.Parameter, url: str) -> str:
    try:
        ApiClient(url)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return url


def asking(function: Callable[P, None]) -> Callable[P, None]:
    """Adds the options that every command has, and turns errors into exit codes."""

    @click.option(
        "--url",
        envvar="VARVE_HTTP",
        default=DEFAULT_URL,
        show_default=True,
        callback=_client,
        metavar="URL",
        help="The broker's HTTP address (VARVE_HTTP).",
    )
    @click.option(
        "--token-file",
        envvar="VARVE_TOKEN_FILE",
        metavar="FILE",
        help="File with the broker's HTTP token (VARVE_TOKEN_FILE).",
    )
    @click.option("--json", "as_json", is_flag=True, help="The API's answer as it is.")
    @wraps(function)
    def run(*args: Any, url: str, token_file: str | None, **options: Any) -> None:
        from config.token import TokenFileError, read_token

        try:
            token = None if token_file is None else read_token(token_file).decode()
            function(*args, client=ApiClient(url, token), **options)  # type: ignore[arg-type]
        except TokenFileError as error:
            _fail(str(error), EXIT_REFUSED)
        except ApiRefusedError as error:
            _fail(str(error), EXIT_REFUSED)
        except UnreachableError as error:
            _fail(str(error), EXIT_UNREACHABLE)

    return run  # type: ignore[return-value]


def of_partition(function: Callable[P, None]) -> Callable[P, None]:
    """Adds the arguments that name a partition."""
    function = click.argument("partition", type=click.IntRange(0, (1 << 31) - 1))(function)
    return click.argument("topic")(function)


@cleaner.command()
@click.option("--topic", help="Only partitions of this topic, compacted or not.")
@asking
def status(client: ApiClient, topic: str | None, as_json: bool) -> None:
    """Workers, and every compacted partition: how dirty, what stands in the way."""
    found = client.get("")
    rows = list(client.pages("/partitions", "partitions", topic=topic))
    _show({**found, "rows": rows}, as_json, lambda answer: status_lines(answer, rows))


@cleaner.command()
@of_partition
@asking
def explain(client: ApiClient, topic: str, partition: int, as_json: bool) -> None:
    """Why is this partition not being cleaned? The whole chain of reasons."""
    _show(client.get(partition_path(topic, partition)), as_json, explanation_lines)


@cleaner.command()
@of_partition
@click.option("--roll", is_flag=True, help="Close the active segment first: clean everything.")
@click.option("--wait", is_flag=True, help="Wait until it is clean; show progress.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait.",
)
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
    """Clean a partition next, whatever its ratio, and forget earlier failures."""
    path = partition_path(topic, partition)
    began = client.post(f"{path}/run", {"roll": roll})
    end = began["end_offset"]
    if not began["dirty_bytes"]:
        what = "nothing can be cleaned now; --roll closes the active segment first"
        text = "nothing is dirty" if roll else what
        _show(began, as_json, lambda _: [f"{topic}-{partition}: {text}", *began["sentences"][1:]])
    elif not wait:
        _show(
            began, as_json, lambda _: [f"{topic}-{partition} is cleaned next, up to offset {end}"]
        )
    else:
        done = _wait_cleaned(client, path, began, timeout, quiet=as_json)
        _show(done, as_json, lambda answer: [clean_text(answer)])


@cleaner.command()
@of_partition
@asking
def pause(client: ApiClient, topic: str, partition: int, as_json: bool) -> None:
    """Leave a partition alone until it is resumed, also across restarts."""
    _act(
        client, topic, partition, "pause", as_json=as_json, yes="is paused", no="was paused already"
    )


@cleaner.command()
@of_partition
@asking
def resume(client: ApiClient, topic: str, partition: int, as_json: bool) -> None:
    """End a pause."""
    _act(client, topic, partition, "resume", as_json=as_json, yes="is resumed", no="was not paused")


@cleaner.command()
@of_partition
@asking
def abort(client: ApiClient, topic: str, partition: int, as_json: bool) -> None:
    """Give up the job that runs; the partition may be chosen again at once."""
    _act(
        client,
        topic,
        partition,
        "abort",
        as_json=as_json,
        yes="is given up",
        no="was not being cleaned",
    )


@cleaner.command()
@of_partition
@asking
def retry(client: ApiClient, topic: str, partition: int, as_json: bool) -> None:
    """End a quarantine: forget earlier failures."""
    yes, no = "may be tried again", "was not in quarantine"
    _act(client, topic, partition, "retry", as_json=as_json, yes=yes, no=no)


@cleaner.command()
@click.argument("topic", required=False)
@click.argument("partition", required=False, type=click.IntRange(0, (1 << 31) - 1))
@click.option("--limit", type=click.IntRange(1, 2000), default=20, show_default=True)
@asking
def history(
    client: ApiClient, topic: str | None, partition: int | None, limit: int, as_json: bool
) -> None:
    """Jobs that are over, newest first; they survive a restart of the broker."""
    found = client.get("/history", topic=topic, partition=partition, limit=limit)
    _show(found, as_json, lambda answer: history_lines(answer["jobs"]))


def _act(
    client: ApiClient, topic: str, partition: int, action: str, *, as_json: bool, yes: str, no: str
) -> None:
    done = client.post(f"{partition_path(topic, partition)}/{action}")
    text = yes if done["changed"] else no
    _show(done, as_json, lambda _: [f"{topic}-{partition} {text}"])


def _wait_cleaned(
    client: ApiClient, path: str, began: Json, timeout: float, *, quiet: bool
) -> Json:
    """Until everything that could be cleaned at the beginning is. Exits where it cannot be."""
    end, deadline = began["end_offset"], time.monotonic() + timeout
    shown = False
    while True:
        now = client.get(path)
        first = now.get("first_dirty_offset")
        if now["state"] in ("idle", "cleaning", "publishing") and (first or 0) >= end:
            break
        stuck = _stuck(now, began)
        if stuck:
            _fail(stuck, EXIT_REFUSED)
        if time.monotonic() >= deadline:
            _fail(f"not clean after {timeout:g} s: {now['sentences'][0]}", EXIT_REFUSED)
        if not quiet and sys.stderr.isatty():
            click.echo(f"\r\033[K{progress_text(client.get(''), now)}", nl=False, err=True)
            shown = True
        time.sleep(POLL_SECONDS)
    if shown:
        click.echo("\r\033[K", nl=False, err=True)
    return now


def _stuck(now: Json, began: Json) -> str:
    """Why waiting has no end in sight; empty while it has."""
    if now["state"] in ("offline", "held"):
        return str(now["sentences"][0])
    job, before = now.get("last_job"), began.get("last_job")
    if job is None or (before is not None and job["run_id"] == before["run_id"]):
        return ""
    if job["outcome"] == "failed":
        return f"the job failed: {job['reason']}"
    if job["outcome"] == "finished" and job["reason"]:  # what is damaged is left as it is
        return f"the job is done, and not all is clean: {job['reason']}"
    return ""


def _show(answer: Json, as_json: bool, lines: Callable[[Json], list[str]]) -> None:
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        click.echo("\n".join(lines(answer)))


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"varve: {message}", err=True)
    sys.exit(code)
