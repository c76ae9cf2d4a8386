"""The command group `varve pipeline`: one command for each job.

Each job is a module of pipeline/jobs with a click command. The group imports that module when the
command is called, so `--help` loads neither Spark nor Numba. pipeline/command.py has the options
that the commands share.
"""

import importlib
import os
from collections.abc import Mapping
from typing import Final

import click

from admin.command import fail
from config import exit_codes
from config.extras import PIPELINE_PACKAGES, install_command
from pipeline.command import exit_on_error
from pipeline.errors import JobError

JOBS: Final[Mapping[str, str]] = {  # command -> short help
    "adopt": "Publish the output of `compact --no-adopt`.",
    "bootstrap": "Write the rows of a table to a topic.",
    "compact": "Compact a topic outside the broker, in local processes or on Spark.",
    "erase": "Erase keys from a topic and write a receipt.",
    "latest": "Write the current state of a topic as a table, once or continuously.",
    "snapshot": "Write a topic as a table, as it was at offsets or at a time.",
    "survey": "Count live and superseded records and recommend topic settings.",
    "verify": "Check that a view, compacted topic or table has the latest records.",
}


class _Jobs(click.Group):
    """Commands whose modules are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *JOBS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in JOBS:
            return super().get_command(ctx, cmd_name)
        try:
            command: click.Command = importlib.import_module(f"pipeline.jobs.{cmd_name}").command
        except ModuleNotFoundError as error:  # `varve` lets the help through without the extra
            if error.name not in PIPELINE_PACKAGES:
                raise
            command_line = install_command("pipeline")
            fail(f"this needs more packages: run {command_line}", exit_codes.USAGE)
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
    """Run jobs over whole topics, in local processes or on Spark.

    Exit codes, as for `varve`: 0 success; 1 failure; 2 invalid command line, or the topic does not
    allow the command; 3 the log changed or the lease ended, nothing was published, try again;
    4 a check failed; 5 no broker answered; 6 Spark did not start, or its master does not answer;
    130 interrupted.
    """


@pipeline.command(short_help="Prepare this machine; halves the time that Spark takes to start.")
@exit_on_error
def warmup() -> None:
    """Compile the native code and create an archive of Java classes for Spark's start.

    This takes half a minute and 190 MB of disk, once for each version of Java and of Spark.
    """
    from cleaner.engine.kernels import warm_up as warm_up_cleaner
    from pipeline.engines.class_archive import ArchiveError, make_archive
    from pipeline.engines.java import NoJavaError
    from pipeline.records.decode import warm_up as warm_up_records
    from storage.kernels import NUMBA_VARIABLE

    warm_up_cleaner()
    warm_up_records()
    click.echo(f"native code: {os.environ[NUMBA_VARIABLE]}")
    try:
        archive = make_archive()
    except (NoJavaError, ArchiveError) as error:
        raise JobError(str(error)) from error
    click.echo(f"class archive: {archive}")
