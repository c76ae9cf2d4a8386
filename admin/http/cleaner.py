"""`varve cleaner`: show and control the cleaner, over the HTTP API.

Exit codes: config/exit_codes.py. Tables are plain columns, which work with grep, cut and mail.
"""

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import click

from admin.client import ApiClient, ApiRefusedError, Json, partition_path
from admin.command import (
    PARTITION_OR_TOPIC,
    POLL_SECONDS,
    P,
    add_partition_arguments,
    api_command,
    code_of_refusal,
    fail,
    optional_partition_arguments,
    partition_arguments,
    partition_type,
    refusal_text,
    show,
    show_progress,
    timeout_option,
)
from admin.http.cleaner_text import (
    clean_text,
    estimate_lines,
    explanation_lines,
    history_lines,
    nothing_to_clean,
    progress_text,
    status_lines,
    survival_lines,
)
from admin.rangeless_option import RangelessOption
from admin.watch import watched


@click.group(short_help="Show and control log compaction.")
def cleaner() -> None:
    """Show what the cleaner does and why, and control it."""


@cleaner.command(short_help="Show the workers and the compacted partitions.")
@click.option("--topic", metavar="TOPIC",
              help="Only this topic, with the partitions that are not compacted.")  # fmt: skip
@api_command
@watched
def status(client: ApiClient, topic: str | None, as_json: bool) -> None:
    """Show the workers and, for every compacted partition, its dirty ratio and what blocks it."""
    answer = client.get("")
    rows = list(client.pages("/partitions", "partitions", topic=topic))
    show({**answer, "rows": rows}, as_json, lambda answer: status_lines(answer, rows, topic))


class ActionRefusedError(Exception):
    """The requested action was not completed for a partition."""


@dataclass(frozen=True, slots=True)
class PartitionSelection:
    """The partitions that a command line names; `topic` is set if it names a whole topic."""

    partitions: tuple[tuple[str, int], ...]
    topic: str | None = None


def select_partitions(client: ApiClient, topic: str, partition: int | None) -> PartitionSelection:
    """Return the partitions that the arguments name.

    `customers 0` and `customers-0` name one partition, `customers` all partitions of the topic that
    the broker serves. If a topic is called `customers-0`, that name means the topic.
    """
    if "/" in topic:
        reason = f"{topic} is a path: name a topic, or read files with `varve log dump`"
        raise click.UsageError(reason)
    if partition is not None:
        return PartitionSelection(((topic, partition),))
    try:
        rows = list(client.pages("/partitions", "partitions", topic=topic))
    except ApiRefusedError as error:
        name, _, number = topic.rpartition("-")
        if (
            error.status != HTTPStatus.NOT_FOUND
            or not name
            or not re.fullmatch("[0-9]{1,9}", number)
        ):
            raise
        return PartitionSelection(((name, int(number)),))
    return PartitionSelection(tuple((topic, row["partition"]) for row in rows), topic)


def select_partition(client: ApiClient, topic: str, partition: int | None) -> tuple[str, int]:
    """Return the one partition that the arguments name. Raises UsageError if it is a topic."""
    selection = select_partitions(client, topic, partition)
    if selection.topic is not None:
        raise click.UsageError(f"name one partition, such as {topic} 0 or {topic}-0")
    return selection.partitions[0]


def _for_each(
    client: ApiClient,
    places: PartitionSelection,
    as_json: bool,
    act: Callable[[str, int], tuple[Json, Sequence[str]]],
    summarize: Callable[[Sequence[Json]], Sequence[str]] = lambda _: (),
) -> None:
    """Act on each partition and print the results; continue if the broker refuses one.

    With `as_json`, print one object with `partitions` for a topic, and the API's answer for a
    single partition. `summarize` returns the last lines of the text.
    """
    answers: list[Json] = []
    lines: list[str] = []
    refusals: list[ApiRefusedError | ActionRefusedError] = []
    for topic, number in places.partitions:
        try:
            answer, text = act(topic, number)
        except (ApiRefusedError, ActionRefusedError) as error:
            refusals.append(error)
            continue
        answers.append(answer)
        lines += text
    lines += summarize(answers)
    if places.topic is not None and (lines or as_json):
        show({"topic": places.topic, "partitions": answers}, as_json, lambda _: lines)
    elif answers:
        show(answers[0], as_json, lambda _: lines)
    if refusals:
        code = min(map(code_of_refusal, refusals))
        fail("\nvarve: ".join(refusal_text(error, client) for error in refusals), code)


@cleaner.command(short_help="Explain why a partition or topic is not being cleaned.")
@optional_partition_arguments
@api_command
@watched
def explain(client: ApiClient, topic: str, partition: int | None, as_json: bool) -> None:
    """Explain why a partition, or each partition of a topic, is not being cleaned."""

    def ask(name: str, number: int) -> tuple[Json, Sequence[str]]:
        answer = client.get(partition_path(name, number))
        return answer, explanation_lines(answer)

    _for_each(client, select_partitions(client, topic, partition), as_json, ask)


@cleaner.command(short_help="Estimate what the next clean would read, write and free.")
@optional_partition_arguments
@click.option(
    "--slack",
    metavar="SLACK",
    type=click.FloatRange(0, 100),
    help="Estimate with this varve.compaction.slack instead of the topic's.",
)
@click.option("--groups", is_flag=True, help="List every segment group, not only the sums.")
@click.option("--survival", is_flag=True, help="Show the share of live records by age.")
@api_command
def estimate(
    client: ApiClient,
    topic: str,
    partition: int | None,
    slack: float | None,
    *,
    groups: bool,
    survival: bool,
    as_json: bool,
) -> None:
    """Estimate what the next clean of a partition reads, writes and frees, and how long it takes.

    The figures come from earlier cleans; the command reads no records. For segments that no clean
    has read, it assumes the share of new data that survived earlier cleans.

    The tables compare other values of varve.compaction.slack and min.cleanable.dirty.ratio; *
    marks the value in effect. For a dirty ratio, LOG UP TO is the largest size of the log, CLEAN
    EVERY how much clients write between two cleans, and READS and WRITES the bytes of one clean.
    """

    def ask(name: str, number: int) -> tuple[Json, Sequence[str]]:
        query = "" if slack is None else f"?slack={slack:.9f}"
        path = partition_path(name, number)
        try:
            answer = client.get(f"{path}/estimate{query}")
        except ApiRefusedError as error:
            status = client.get(path) if error.status == HTTPStatus.CONFLICT else {}
            if status.get("end_offset") is None:  # it cannot be assessed
                raise
            reason = nothing_to_clean(status, rolled=False)
            obstacle = {"topic": name, "partition": number, "obstacle": reason, "survival": []}
            return obstacle, [f"{name}-{number}: {reason}"]
        return answer, estimate_lines(answer, with_groups=groups)

    def summarize(answers: Sequence[Json]) -> Sequence[str]:
        name = topic if partition is None else f"{topic}-{partition}"
        return survival_lines(name, answers) if survival else ()

    _for_each(client, select_partitions(client, topic, partition), as_json, ask, summarize)


@cleaner.command(short_help="Clean a partition or topic next, ignoring its dirty ratio.")
@optional_partition_arguments
@click.option(
    "--roll", is_flag=True, help="Close the active segment first, so that it is cleaned too."
)
@click.option("--wait", is_flag=True, help="Wait until the partition is clean, and show progress.")
@timeout_option
@api_command
def run(
    *,
    client: ApiClient,
    topic: str,
    partition: int | None,
    roll: bool,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Clean a partition or topic next, regardless of its dirty ratio and earlier failures.

    The request stays pending until everything that could be cleaned at the time of the request is
    clean; `abort` cancels it.
    """
    places = select_partitions(client, topic, partition)
    deadline = time.monotonic() + timeout
    begun: dict[tuple[str, int], Json | ApiRefusedError] = {}
    for where in places.partitions:  # request every clean before waiting for the first
        try:
            begun[where] = client.post(f"{partition_path(*where)}/run", {"roll": roll})
        except ApiRefusedError as error:
            begun[where] = error

    def finish(name: str, number: int) -> tuple[Json, Sequence[str]]:
        began, text = begun[name, number], f"{name}-{number}"
        if isinstance(began, ApiRefusedError):
            raise began
        end_offset = began["requested_offset"]
        if end_offset is None:
            reason = nothing_to_clean(began, rolled=roll)
            if wait and began["obstacle"] is not None:
                raise ActionRefusedError(f"{text}: {reason}")
            return began, [f"{text}: {reason}"]
        if not wait:
            return began, [f"{text} will be cleaned next, below offset {end_offset}"]
        path = partition_path(name, number)
        waited = CleanWait(client, path, began, deadline, timeout)
        done = _wait_cleaned(waited, quiet=as_json)
        return done, [clean_text(done)]

    _for_each(client, places, as_json, finish)


def partition_or_all_arguments(function: Callable[P, None]) -> Callable[P, None]:
    """Add the arguments that name a partition, and the option --all."""
    option = click.option(
        "--all", "all_of_them", is_flag=True, help="Apply to every compacted partition."
    )
    text = f"{PARTITION_OR_TOPIC}, or --all."
    return add_partition_arguments(option(function), text, required=False)


@cleaner.command(short_help="Stop cleaning a partition or topic until you resume it.")
@partition_or_all_arguments
@api_command
def pause(
    client: ApiClient, topic: str | None, partition: int | None, all_of_them: bool, as_json: bool
) -> None:
    """Stop cleaning a partition or topic until you resume it, also after restarts."""
    where = _selected_or_all(client, topic, partition, all_of_them)
    _act(client, where, "pause", as_json=as_json, yes="is paused", no="was paused already")


@cleaner.command(short_help="Resume cleaning of a paused partition or topic.")
@partition_or_all_arguments
@api_command
def resume(
    client: ApiClient, topic: str | None, partition: int | None, all_of_them: bool, as_json: bool
) -> None:
    """Resume cleaning of a paused partition, or of all partitions of a topic."""
    where = _selected_or_all(client, topic, partition, all_of_them)
    _act(client, where, "resume", as_json=as_json, yes="is resumed", no="was not paused")


@cleaner.command(short_help="Abort the running clean and cancel a requested one.")
@optional_partition_arguments
@api_command
def abort(client: ApiClient, topic: str, partition: int | None, as_json: bool) -> None:
    """Abort the running clean of a partition or topic, and cancel a requested one.

    The cleaner may start another clean at once. To prevent that, use `varve cleaner pause`.
    """
    where = select_partitions(client, topic, partition)
    _act(client, where, "abort", as_json=as_json, yes="aborted", no="was not being cleaned")


@cleaner.command(short_help="End the quarantine of a partition or topic.")
@optional_partition_arguments
@api_command
def retry(client: ApiClient, topic: str, partition: int | None, as_json: bool) -> None:
    """End the quarantine of a partition or topic, so that the cleaner tries again.

    A partition is in quarantine after a failed clean. Read the reason with `varve cleaner explain`
    and remove its cause first.
    """
    yes, no = "left quarantine", "was not in quarantine"
    where = select_partitions(client, topic, partition)
    _act(client, where, "retry", as_json=as_json, yes=yes, no=no)


@cleaner.command("end-transaction", short_help="Abort a transaction that nothing else ends.")
@partition_arguments
@click.option(
    "--producer-id",
    cls=RangelessOption,
    required=True,
    metavar="ID",
    type=click.IntRange(0, (1 << 63) - 1),
    help="Producer of the transaction; `varve cleaner explain` names it.",
)
@api_command
def end_transaction(
    client: ApiClient, topic: str, partition: int | None, producer_id: int, as_json: bool
) -> None:
    """Abort the open transaction of a producer: read_committed consumers skip its records.

    Use this for a hanging transaction, one that the transaction coordinator does not know. A log
    taken over from Kafka may have one. First check that Kafka had not decided to commit it
    (docs/how-to/operate-the-cleaner.md).
    """
    topic, partition = select_partition(client, topic, partition)
    path = f"{partition_path(topic, partition)}/transactions/{producer_id}/abort"
    text = f"{topic}-{partition}: the transaction of producer {producer_id} is aborted"
    show(client.post(path), as_json, lambda _: [text])


@cleaner.command(short_help="List the last cleans, newest first.")
@click.argument("topic", required=False)
@click.argument("partition", required=False, type=partition_type)
@click.option("--limit", type=click.IntRange(1, 2000), default=20, show_default=True, metavar="N",
              help="Maximum number of cleans to list.")  # fmt: skip
@api_command
@watched
def history(
    client: ApiClient, topic: str | None, partition: int | None, limit: int, as_json: bool
) -> None:
    """List the last cleans, newest first: finished, failed and aborted ones.

    The list survives a restart of the broker.
    """
    answer = client.get("/history", topic=topic, partition=partition, limit=limit)
    show(answer, as_json, lambda answer: history_lines(answer["jobs"]))


def _selected_or_all(
    client: ApiClient, topic: str | None, partition: int | None, all_of_them: bool
) -> PartitionSelection | None:
    """Return the partitions that the arguments name; None for all."""
    if topic is not None and not all_of_them:
        return select_partitions(client, topic, partition)
    if topic is None and all_of_them:
        return None
    raise click.UsageError("name a topic or a partition, or use --all")


def _act(
    client: ApiClient,
    where: PartitionSelection | None,
    action: str,
    *,
    as_json: bool,
    yes: str,
    no: str,
) -> None:
    if where is None:
        done = client.post(f"/{action}")
        count = done["changed"]
        text = f"{count} partition {yes}" if count == 1 else f"{count} partitions: each {yes}"
        if action == "pause":
            text += "; partitions that are created later are cleaned"
        show(done, as_json, lambda _: [text + _durability(done)])
        return

    def act(topic: str, number: int) -> tuple[Json, Sequence[str]]:
        done = client.post(f"{partition_path(topic, number)}/{action}")
        return done, [f"{topic}-{number} {yes if done['changed'] else no}{_durability(done)}"]

    _for_each(client, where, as_json, act)


def _durability(done: Json) -> str:
    if done.get("durable", True):
        return ""
    return ". The change is in effect but could not be saved: a restart undoes it"


@dataclass(frozen=True, slots=True)
class CleanWait:
    """A requested clean, and how long to wait for it."""

    client: ApiClient
    path: str
    began: Json
    deadline: float  # monotonic
    seconds: float


def _wait_cleaned(waited: CleanWait, *, quiet: bool) -> Json:
    """Wait until all that was cleanable at the request is clean. Raises ActionRefusedError."""
    client, began = waited.client, waited.began
    end = began["requested_offset"]
    shown = False
    try:
        while True:
            now = client.get(waited.path)
            stuck = reason_to_stop_waiting(now, began)
            if stuck:
                raise ActionRefusedError(stuck)
            if _is_clean(now, end):
                return now
            if time.monotonic() >= waited.deadline:
                raise ActionRefusedError(
                    f"not clean after {waited.seconds:g} s: {now['sentences'][0]}"
                )
            if not quiet and sys.stderr.isatty():
                show_progress(progress_text(client.get(""), now))
                shown = True
            time.sleep(POLL_SECONDS)
    finally:
        if shown:
            show_progress("")


def _is_clean(now: Json, end: int) -> bool:
    first, bound = now.get("first_dirty_offset"), now.get("end_offset")
    if first is None or bound is None:
        return False
    return bool(first >= end or (now["dirty_bytes"] == 0 and bound >= end))


def reason_to_stop_waiting(now: Json, began: Json) -> str:
    """Return why the requested clean will not happen, or an empty string while it may.

    `began` and `now` are answers of the partition's status, from the request and from this poll.
    """
    end = began["requested_offset"]
    if now["state"] == "offline" or now["paused"]:
        return str(now["sentences"][0])
    job, before = now.get("last_job"), began.get("last_job")
    is_new = job is not None and (before is None or job["job_id"] != before["job_id"])
    if job is not None and is_new:
        if job["outcome"] == "failed":
            return f"the clean failed: {job['reason']}"
        if job["outcome"] == "damaged":  # damaged segments are not cleaned
            return f"the clean finished but left damaged segments: {job['reason']}"
    if now["state"] == "aborting":
        return ""  # the job says who aborted it once it has ended
    if now["requested_offset"] is None and not _is_clean(now, end):
        if job is not None and is_new and job["outcome"] == "aborted":
            return f"the clean was aborted: {job['reason']}"
        return f"an operator cancelled the clean request. {now['sentences'][0]}"
    return ""
