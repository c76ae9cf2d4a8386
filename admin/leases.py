"""`varve leases`: list and end the leases of offline runs, over the HTTP API. See admin/command.py.

A remote compaction (docs/reference/remote-compaction.md) leases partitions of one topic to a
process outside the broker, such as `varve pipeline compact`. If that process dies, the lease
stays until it expires; `end` releases the partitions at once.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from urllib.parse import quote

import click

from admin.cleaner_text import columns
from admin.client import ApiClient, Json
from admin.command import api_command, show
from config.units import about_size

ROOT: Final = "/api/v1/offline-runs"
ALIVE: Final = ("open", "adopting")  # states of a partition that is still leased


@click.group(short_help="List and end the leases of offline runs.")
def leases() -> None:
    """List and end leases of partitions to offline runs, such as `varve pipeline compact`.

    Talks to the broker's HTTP address: --http, or VARVE_HTTP, or 127.0.0.1:9644.
    """


@leases.command("list", short_help="List leased partitions, their runs and expiry times.")
@click.option("--topic", help="Only runs of this topic.")
@click.option("--ended", is_flag=True, help="Include runs that ended recently, with the reason.")
@api_command
def list_leases(client: ApiClient, topic: str | None, ended: bool, as_json: bool) -> None:
    """List the leased partitions, the run that leases them, and when each lease expires.

    A run that is alive renews its lease long before it expires.
    """
    runs = [
        run
        for run in client.below(ROOT).get("")["runs"]
        if topic in (None, run["topic"]) and (ended or leased_partitions(run))
    ]
    show({"runs": runs}, as_json, lambda answer: lease_lines(answer["runs"]))


@leases.command("end", short_help="End the lease of a run whose process was killed.")
@click.argument("run_id", metavar="RUN")
@api_command
def end_lease(client: ApiClient, run_id: str, as_json: bool) -> None:
    """End the lease of a run: release its partitions and remove its files.

    Use this if the process of the run was killed. It does not change the log. If the process is
    still alive, it ends with exit code 3.
    """
    run = client.below(ROOT).delete(f"/{quote(run_id, safe='')}")
    show(run, as_json, lambda answer: [end_text(answer)])


def leased_partitions(run: Json) -> list[int]:
    """Return the partitions that are still leased to a run."""
    return [entry["partition"] for entry in run["partitions"] if entry["state"] in ALIVE]


def lease_lines(runs: Sequence[Json]) -> list[str]:
    """Return a table of runs and, below it, why runs ended."""
    if not runs:
        return ["No partition is leased."]
    table = [("RUN", "TOPIC", "PARTITIONS", "PURPOSE", "STATE", "PINNED", "LEASED UNTIL")]
    notes = []
    for run in runs:
        leased = leased_partitions(run)
        numbers = leased or [entry["partition"] for entry in run["partitions"]]
        pinned = sum(
            entry["inputs_bytes"] for entry in run["partitions"] if entry["state"] in ALIVE
        )
        until = datetime.fromtimestamp(run["expires_ms"] / 1000).astimezone()
        table.append(
            (
                run["run_id"],
                run["topic"],
                ",".join(map(str, numbers)) or "-",
                run["purpose"],
                run["state"],
                about_size(pinned),
                f"{until:%Y-%m-%d %H:%M:%S}" if leased else "-",
            )
        )
        reasons = {entry["reason"] for entry in run["partitions"] if entry["reason"]}
        notes += [f"{run['run_id']}: {reason}" for reason in sorted(reasons)]
    return [*columns(table, right={5}), *([""] if notes else []), *notes]


def end_text(run: Json) -> str:
    """Return one line on the result of ending a lease."""
    if leased := leased_partitions(run):
        names = ", ".join(f"{run['topic']}-{number}" for number in leased)
        return (
            f"the output of run {run['run_id']} is being published; the lease of {names} ends "
            "after that"
        )
    return f"run {run['run_id']} has ended; its partitions of {run['topic']} are released"
