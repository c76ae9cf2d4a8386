"""`varve pipeline adopt`: have the broker publish what `compact --no-adopt` has made."""

import re
from collections.abc import Collection
from typing import Final

import click

from admin.client import ApiClient
from cleaner.remote_compaction import AdoptOutcome, AdoptResult, result_json
from config import exit_codes
from config.units import about_size
from pipeline.client.lease import LeaseClient, LeaseLostError
from pipeline.command import (
    exit_on_error,
    json_option,
    show,
    with_broker,
)

# What is refused for good comes before what can be tried again.
WORST_FIRST: Final = (
    (AdoptOutcome.INVALID, exit_codes.UNVERIFIED),
    (AdoptOutcome.NOTHING, exit_codes.FAILED),
    (AdoptOutcome.STALE, exit_codes.STALE),
    (AdoptOutcome.EXPIRED, exit_codes.STALE),
)


def worst_exit_code(outcomes: Collection[AdoptOutcome]) -> int:
    """The exit code of the worst of them."""
    for outcome, code in WORST_FIRST:
        if outcome in outcomes:
            return code
    return exit_codes.DONE


def result_line(result: AdoptResult) -> str:
    """A result for people."""
    if result.outcome is AdoptOutcome.ADOPTED:
        before, after = about_size(result.bytes_before), about_size(result.bytes_after)
        return f"{result.partition} is compacted: {before} to {after}"
    return f"{result.partition} stays as it was ({result.outcome.value}): {result.reason}"


@click.command("adopt", short_help="Publish what `compact --no-adopt` has made.")
@exit_on_error
@click.argument("compaction_id", metavar="ID")
@click.option("--abandon", is_flag=True, help="Give it up instead.")
@with_broker
@json_option
def command(*, compaction_id: str, abandon: bool, client: ApiClient, as_json: bool) -> None:
    """Publish the output of the remote compaction ID after the broker verified it, or end it."""
    if re.fullmatch(r"[0-9A-Za-z-]+", compaction_id, re.ASCII) is None:
        raise click.BadParameter("expected the ID of a remote compaction", param_hint="ID")
    with LeaseClient.of(client).reopen(compaction_id) as lease:
        lease.status()  # raises where there is none
        if abandon:
            lease.abandon()
            show({"abandoned": compaction_id}, as_json, lambda _: [f"{compaction_id} is given up"])
            return
        results = lease.try_adopt()
    if not results:
        raise LeaseLostError(f"remote compaction {compaction_id} has no output to adopt")
    matches = {
        "compaction_id": compaction_id,
        "partitions": [result_json(result) for result in results],
    }
    show(matches, as_json, lambda _: [result_line(result) for result in results])
    if (code := worst_exit_code({result.outcome for result in results})) != exit_codes.DONE:
        raise SystemExit(code)
