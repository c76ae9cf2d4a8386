"""`varve erase`: erase a key by a deadline, over the HTTP API; see admin/command.py."""

import sys
import time
from base64 import b64decode, b64encode
from pathlib import Path
from urllib.parse import quote

import click

from admin.client import ApiClient, Json
from admin.command import (
    POLL_SECONDS,
    TIMEOUT_HELP,
    api_command,
    fail,
    seconds_type,
    show,
    show_progress,
)
from admin.http.erase_text import erasure_lines, erasures_lines, progress_text
from admin.rangeless_option import RangelessOption
from config.units import parse_duration_ms


def _milliseconds(_context: click.Context, _parameter: click.Parameter, text: str) -> int:
    try:
        duration_ms = parse_duration_ms(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if duration_ms < 1000:
        raise click.BadParameter("give at least 1s")
    return duration_ms


@click.command(short_help="Erase a key from all files of a topic, by a deadline.")
@click.argument("topic")
@click.option("--key", metavar="TEXT",
              help="Key to erase. Other local users see it in the process list.")  # fmt: skip
@click.option("--key-base64", metavar="BASE64", help="Key to erase, in base64, if it is not UTF-8.")
@click.option("--key-file", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="Read the key from a file, without its last newline.")  # fmt: skip
@click.option("--partition", "partitions", multiple=True, type=click.IntRange(min=0),
              cls=RangelessOption, metavar="N",
              help="Only this partition; default: all. Repeatable.")  # fmt: skip
@click.option("--by", "within_ms", default="24h", show_default=True, callback=_milliseconds,
              metavar="TIME", help="Deadline, counted from now, such as 30min or 7d.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Wait for the receipt.")
@click.option("--status", is_flag=True, help="Show the erasures of the topic, or of one key.")
@click.option("--cancel", "cancelled", metavar="ID", help="Cancel the erasure ID.")
@click.option("--timeout", type=seconds_type, cls=RangelessOption, metavar="SECONDS",
              show_default="until the deadline", help=TIMEOUT_HELP)  # fmt: skip
@api_command
def erase(
    *,
    client: ApiClient,
    topic: str,
    key: str | None,
    key_base64: str | None,
    key_file: str | None,
    partitions: tuple[int, ...],
    within_ms: int,
    wait: bool,
    status: bool,
    cancelled: str | None,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Erase a key: remove its values from all files of the topic.

    The broker searches the files of all partitions, writes a tombstone where it finds a value, and
    rewrites the segments that have one. Then it searches every file again, including compacted
    views, leased and replaced segments. If it finds no value, it writes a receipt, which --status
    shows. The audit log has the request and how it ended.

    With --wait, the exit code is 1 if there is no receipt in time; the erasure goes on.
    """
    root = client.below(f"/api/v1/topics/{quote(topic, safe='')}/erasures")
    key_bytes = _key(key, key_base64, key_file)
    if status or cancelled is not None:
        if status and cancelled is not None:
            raise click.UsageError("give either --status or --cancel")
        if cancelled is not None:
            answer = root.delete(f"/{quote(cancelled, safe='')}")
            show(answer, as_json, erasure_lines)
            return
        query = {} if key_bytes is None else {"key_base64": b64encode(key_bytes).decode()}
        show(root.get("", **query), as_json, erasures_lines)
        return
    if key_bytes is None:
        raise click.UsageError("give the key: --key, --key-base64 or --key-file")
    body: Json = {
        "key_base64": b64encode(key_bytes).decode(),
        "within_seconds": within_ms // 1000,
    }
    if partitions:
        body["partitions"] = list(partitions)
    answer = root.post("", body)
    if wait:
        answer = _waited(root, answer, timeout, quiet=as_json)
    show(answer, as_json, erasure_lines)
    if not wait or answer["state"] == "complete":
        return
    if answer["state"] == "open":
        when = "by the deadline" if timeout is None else f"after {timeout:g} s"
        fail(f"erasure {answer['id']} has no receipt {when}; it goes on (--status shows it)")
    fail(f"erasure {answer['id']} is {answer['state']}")


def _key(text: str | None, encoded: str | None, path: str | None) -> bytes | None:
    """Return the bytes of the key, None without one. Raises UsageError."""
    if sum(value is not None for value in (text, encoded, path)) > 1:
        raise click.UsageError("give one of --key, --key-base64 and --key-file")
    if text is not None:
        return text.encode()
    if encoded is not None:
        try:
            return b64decode(encoded, validate=True)
        except ValueError:
            raise click.BadParameter("not base64", param_hint="--key-base64") from None
    if path is None:
        return None
    try:
        return Path(path).read_bytes().removesuffix(b"\n")
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")


def _waited(root: ApiClient, answer: Json, timeout: float | None, *, quiet: bool) -> Json:
    """Return the erasure when it has ended, or after the timeout; without one, at its deadline."""
    until = None if timeout is None else time.monotonic() + timeout
    is_shown = not quiet and sys.stderr.isatty()
    try:
        while answer["state"] == "open":
            if _is_overdue(answer) if until is None else time.monotonic() >= until:
                break
            if is_shown:
                show_progress(progress_text(answer))
            time.sleep(POLL_SECONDS)
            answer = root.get(f"/{answer['id']}")
    finally:
        if is_shown:
            show_progress("")
    return answer


def _is_overdue(answer: Json) -> bool:
    """Return whether the deadline has passed, by the clock of the broker."""
    return any(part["risk"] == "overdue" for part in answer["partitions"])
