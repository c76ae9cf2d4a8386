"""`varve leases`: list and end leases of partitions, over the HTTP API. See admin/command.py.

A remote compaction (docs/reference/remote-compaction.md) leases partitions of one topic to a
process outside the broker, such as `varve pipeline compact`. If that process dies, the lease
stays until it expires; `end` releases the partitions at once.
"""

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

import click

from admin.client import ApiClient, Json
from admin.command import api_command, show
from admin.tables import columns, local_time
from admin.watch import watched
from cleaner.lease_states import LIVE_STATES
from config.units import about_size

ROOT: Final = "/api/v1/remote-compactions"


@click.group(short_help="List and end leases of partitions to remote compactions.")
def leases() -> None:
    """List and end leases of partitions to remote compactions, such as `varve pipeline compact`."""


@leases.command("list", short_help="List leased partitions, their owners and expiry times.")
@click.option("--topic", metavar="TOPIC", help="Only this topic.")
@click.option("--ended", is_flag=True, help="Include leases that ended recently, with the reason.")
@api_command
@watched
def list_leases(client: ApiClient, topic: str | None, ended: bool, as_json: bool) -> None:
    """List the leased partitions, the remote compaction that leases them, and when leases expire.

    A process that is alive renews its lease long before it expires.
    """
    compactions = [
        compaction
        for compaction in client.below(ROOT).get("")["remote_compactions"]
        if topic in (None, compaction["topic"]) and (ended or leased_partitions(compaction))
    ]
    show(
        {"remote_compactions": compactions},
        as_json,
        lambda answer: lease_lines(answer["remote_compactions"]),
    )


@leases.command("end", short_help="End the lease of a process that was killed.")
@click.argument("compaction_id", metavar="ID")
@api_command
def end_lease(client: ApiClient, compaction_id: str, as_json: bool) -> None:
    """End the lease of remote compaction ID: release its partitions and remove its files.

    `varve leases list` shows the ID. Use this if the process of the remote compaction was killed.
    The log does not change. If the process is still alive, it ends with exit code 3.
    """
    compaction = client.below(ROOT).delete(f"/{quote(compaction_id, safe='')}")
    show(compaction, as_json, lambda answer: [end_text(answer)])


def leased_partitions(compaction: Json) -> list[int]:
    """Return the partitions that are still leased to a remote compaction."""
    return [
        entry["partition"] for entry in compaction["partitions"] if entry["state"] in LIVE_STATES
    ]


def lease_lines(compactions: Sequence[Json]) -> list[str]:
    """Return a table of remote compactions and, below it, why they ended."""
    if not compactions:
        return ["No partition is leased."]
    table = [("ID", "TOPIC", "PARTITIONS", "PURPOSE", "STATE", "PINNED", "LEASED UNTIL")]
    notes = []
    for compaction in compactions:
        leased = leased_partitions(compaction)
        numbers = leased or [entry["partition"] for entry in compaction["partitions"]]
        pinned = sum(
            entry["inputs_bytes"]
            for entry in compaction["partitions"]
            if entry["state"] in LIVE_STATES
        )
        table.append(
            (
                compaction["compaction_id"],
                compaction["topic"],
                ",".join(map(str, numbers)) or "-",
                compaction["purpose"],
                compaction["state"],
                about_size(pinned),
                local_time(compaction["expires_ms"]) if leased else "-",
            )
        )
        reasons = {entry["reason"] for entry in compaction["partitions"] if entry["reason"]}
        notes += [f"{compaction['compaction_id']}: {reason}" for reason in sorted(reasons)]
    return [*columns(table, right={5}), *([""] if notes else []), *notes]


def end_text(compaction: Json) -> str:
    """Return one line on the result of ending a lease."""
    if leased := leased_partitions(compaction):
        names = ", ".join(f"{compaction['topic']}-{number}" for number in leased)
        return (
            f"The broker is publishing the output of {compaction['compaction_id']}. The lease of "
            f"{names} ends after that."
        )
    return (
        f"{compaction['compaction_id']} has ended. Its partitions of {compaction['topic']} are "
        "released."
    )
