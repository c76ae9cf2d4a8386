"""Options of the commands that make tables."""

from collections.abc import Callable
from typing import ParamSpec

import click

from pipeline.client.topics import with_bootstrap
from pipeline.command import of_partitions, of_size, on_spark, with_broker
from pipeline.tables.columns import Form, FormType
from pipeline.tables.target import FORMATS

P = ParamSpec("P")


def table_options(function: Callable[P, None]) -> Callable[P, None]:
    """Adds where and how: the command gets `out`, `table_format`, `overwrite`, `key_as`,
    `value_as`, `null_malformed`."""
    options: list[Callable[[Callable[P, None]], Callable[P, None]]] = [
        click.option("--out", required=True, metavar="PATH", help="The table's folder."),
        click.option(
            "--format",
            "table_format",
            type=click.Choice(FORMATS),
            default="parquet",
            show_default=True,
        ),
        click.option("--overwrite", is_flag=True, help="Replace the table that is there."),
        _form("--key-as", "What keys become: binary, string, json:SCHEMA, json:@FILE."),
        _form("--value-as", "What values become."),
        click.option(
            "--null-malformed",
            is_flag=True,
            help="JSON that does not fit its schema becomes null; else the job ends.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _form(name: str, text: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    return click.option(
        name, type=FormType(), default=Form(), show_default="binary", metavar="FORM", help=text
    )


def reading_options(function: Callable[P, None]) -> Callable[P, None]:
    """Adds what is read and by whom: the command gets `partitions`, `transport`, `task_memory`,
    `task_size`, `spark_options`, `bootstrap`, `client`, `as_json`."""
    options: list[Callable[[Callable[P, None]], Callable[P, None]]] = [
        of_partitions,
        click.option(
            "--transport",
            type=click.Choice(["auto", "disk", "http"]),
            default="auto",
            show_default=True,
            help="How executors get at the log: the broker's disk, or its HTTP address.",
        ),
        of_size("--task-memory", "1GiB", "Memory for keys, of each task."),
        of_size("--task-size", "512MiB", "Log that one task reads."),
        on_spark,
        with_bootstrap,
        with_broker,
        click.option("--json", "as_json", is_flag=True, help="One JSON document."),
    ]
    for option in reversed(options):
        function = option(function)
    return function
