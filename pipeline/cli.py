"""The command group `varve pipeline`: one command for each job.

A job is a module of pipeline/jobs with a click command of its own. The group imports that module
when the command is called, so that `--help` loads neither Spark nor Numba. What the commands share
is in pipeline/command.py.
"""

import importlib
import os
from collections.abc import Mapping
from typing import Final

import click

from pipeline.command import exit_on_error
from pipeline.errors import JobError

JOBS: Final[Mapping[str, str]] = {  # command -> what it does, in a line
    "adopt": "Have published what `compact --no-adopt` has made.",
    "bootstrap": "Write the rows of a table to a topic.",
    "compact": "Compact a topic here or on Spark; the broker checks and publishes.",
    "erase": "Erase keys from a topic, with a receipt.",
    "latest": "Make a table of the current state of a topic, once or kept up to date.",
    "snapshot": "Make a table of a topic as of offsets or a time, or of all of its records.",
    "survey": "Say what topics hold, how long it lives, and how they should be kept.",
    "verify": "Check that what is compacted is the latest of what it was compacted from.",
}


class _Jobs(click.Group):
    """Commands whose modules are imported when they are called for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *JOBS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in JOBS:
            return super().get_command(ctx, cmd_name)
        command: click.Command = importlib.import_module(f"pipeline.jobs.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = dict(JOBS)
        for name in super().list_commands(ctx):
            command = super().get_command(ctx, name)
            assert command is not None
            rows[name] = command.get_short_help_str(80)
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows.items()))


@click.group(
    cls=_Jobs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def pipeline() -> None:
    """Work on whole topics, on this machine's processes or on Spark.

    Exit codes, as for `varve`: 0 done; 1 failed; 2 the command line is invalid, or not allowed
    for this topic; 3 the log changed during the run, or its lease ended: nothing was published,
    try again; 4 a check failed; 5 no broker answered; 6 Spark could not be started, or its master
    does not answer; 130 interrupted.
    """


@pipeline.command(short_help="Make Spark start in half the time from now on.")
@exit_on_error
def warmup() -> None:
    """Compile the kernels and make the archive of classes with which Spark starts faster.

    It takes half a minute and 180 MB of disk, once for each Java and each version of Spark.
    """
    from cleaner.engine.kernels import warm_up as warm_up_cleaner
    from pipeline.engines.class_archive import ArchiveError, make_archive
    from pipeline.engines.java import NoJavaError
    from pipeline.records.decode import warm_up as warm_up_records
    from storage.kernels import NUMBA_VARIABLE

    warm_up_cleaner()
    warm_up_records()
    click.echo(f"kernels are kept in {os.environ[NUMBA_VARIABLE]}")
    try:
        archive = make_archive()
    except (NoJavaError, ArchiveError) as error:
        raise JobError(str(error)) from error
    click.echo(f"classes are kept in {archive}")
