"""`varve leases`: the leases of runs outside of the broker, over the HTTP API; see api_command.py.

A run leases partitions of one topic to a process outside of the broker, such as `varve pipeline
compact`. If that process dies, its lease stays until its time is over; `end` frees the partitions
at once. What a run is: docs/offline-runs.md.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from urllib.parse import quote

import click

from broker.api_client import ApiClient, Json
from broker.api_command import asking, show
from broker.cleaner_text import columns
from config.units import about_size

ROOT: Final = "/api/v1/offline-runs"
ALIVE: Final = ("open", "adopting")  # states of a partition that is still leased


@click.group(short_help="Leases of runs outside of the broker: list, end.")
def leases() -> None:
    """Leases of partitions to runs outside of the broker, such as `varve pipeline compact`.

    Talks to the broker's HTTP address: --http, or VARVE_HTTP, or 127.0.0.1:9644.
    """


@leases.command("list", short_help="Which partitions are leased, to which run, until when.")
@click.option("--topic", help="Only runs over this topic.")
@click.option("--ended", is_flag=True, help="Runs that ended lately, too, and why.")
@asking
def list_leases(client: ApiClient, topic: str | None, ended: bool, as_json: bool) -> None:
    """List which partitions are leased, to which run, and until when.

    A run that is at work renews its lease long before that time.
    """
    runs = [
        run
        for run in client.below(ROOT).get("")["runs"]
        if topic in (None, run["topic"]) and (ended or leased_partitions(run))
    ]
    show({"runs": runs}, as_json, lambda answer: lease_lines(answer["runs"]))


@leases.command("end", short_help="End the lease of a run whose process is gone.")
@click.argument("run_id", metavar="RUN")
@asking
def end_lease(client: ApiClient, run_id: str, as_json: bool) -> None:
    """End the lease of a run: its partitions are free, its files are removed.

    For a run whose process was killed. The log is not changed. A process that is still at work on
    the run ends with exit code 3.
    """
    run = client.below(ROOT).delete(f"/{quote(run_id, safe='')}")
    show(run, as_json, lambda answer: [end_text(answer)])


def leased_partitions(run: Json) -> list[int]:
    """Return the partitions that a run still holds."""
    return [one["partition"] for one in run["partitions"] if one["state"] in ALIVE]


def lease_lines(runs: Sequence[Json]) -> list[str]:
    """Return a table of runs, and below it why those that ended did."""
    if not runs:
        return ["No partition is leased."]
    table = [("RUN", "TOPIC", "PARTITIONS", "PURPOSE", "STATE", "PINNED", "LEASED UNTIL")]
    notes = []
    for run in runs:
        held = leased_partitions(run)
        numbers = held or [one["partition"] for one in run["partitions"]]
        pinned = sum(one["inputs_bytes"] for one in run["partitions"] if one["state"] in ALIVE)
        until = datetime.fromtimestamp(run["expires_ms"] / 1000).astimezone()
        table.append(
            (
                run["run_id"],
                run["topic"],
                ",".join(map(str, numbers)) or "-",
                run["purpose"],
                run["state"],
                about_size(pinned),
                f"{until:%Y-%m-%d %H:%M:%S}" if held else "-",
            )
        )
        reasons = {one["reason"] for one in run["partitions"] if one["reason"]}
        notes += [f"{run['run_id']}: {reason}" for reason in sorted(reasons)]
    return [*columns(table, right={5}), *([""] if notes else []), *notes]


def end_text(run: Json) -> str:
    """Return one line about a run whose lease was to be ended."""
    if held := leased_partitions(run):
        which = ", ".join(f"{run['topic']}-{number}" for number in held)
        return f"the output of run {run['run_id']} is being published; {which} is free after that"
    return f"run {run['run_id']} has ended; the partitions of {run['topic']} are free"
