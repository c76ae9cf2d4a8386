"""`varve pipeline adopt`: have the broker publish the output of `compact --no-adopt`."""

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

# Permanent failures come before failures that another attempt may resolve.
WORST_FIRST: Final = (
    (AdoptOutcome.INVALID, exit_codes.UNVERIFIED),
    (AdoptOutcome.NOTHING, exit_codes.FAILED),
    (AdoptOutcome.STALE, exit_codes.STALE),
    (AdoptOutcome.EXPIRED, exit_codes.STALE),
)


def worst_exit_code(outcomes: Collection[AdoptOutcome]) -> int:
    """Return the exit code of the worst outcome."""
    for outcome, code in WORST_FIRST:
        if outcome in outcomes:
            return code
    return exit_codes.DONE


def result_line(result: AdoptResult) -> str:
    """Return one line about an adopted or refused partition."""
    if result.outcome is AdoptOutcome.ADOPTED:
        before, after = about_size(result.bytes_before), about_size(result.bytes_after)
        return f"{result.partition}: compacted from {before} to {after}"
    return f"{result.partition}: not changed ({result.outcome.value}): {result.reason}"


@click.command("adopt", short_help="Publish the output of `compact --no-adopt`.")
@exit_on_error
@click.argument("compaction_id", metavar="ID")
@click.option("--abandon", is_flag=True, help="Discard the output instead.")
@with_broker
@json_option
def command(*, compaction_id: str, abandon: bool, client: ApiClient, as_json: bool) -> None:
    """Have the broker check and publish the output of remote compaction ID, or discard it."""
    if re.fullmatch(r"[0-9A-Za-z-]+", compaction_id, re.ASCII) is None:
        raise click.BadParameter("expected the ID of a remote compaction", param_hint="ID")
    with LeaseClient(client).reopen(compaction_id) as lease:
        lease.status()  # raises if it does not exist
        if abandon:
            lease.abandon()
            text = f"{compaction_id}: abandoned, its files are deleted"
            show({"abandoned": compaction_id}, as_json, lambda _: [text])
            return
        results = lease.adopt()
    if not results:
        raise LeaseLostError(f"remote compaction {compaction_id} has no output to adopt")
    matches = {
        "compaction_id": compaction_id,
        "partitions": [result_json(result) for result in results],
    }
    show(matches, as_json, lambda _: [result_line(result) for result in results])
    if (code := worst_exit_code({result.outcome for result in results})) != exit_codes.DONE:
        raise SystemExit(code)
