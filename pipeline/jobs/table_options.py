"""Options of the commands that make tables."""

from collections.abc import Callable
from typing import ParamSpec

import click

from pipeline.client.topics import with_bootstrap
from pipeline.command import (
    json_option,
    with_broker,
    with_lease_options,
    with_partitions,
    with_spark_options,
)
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
        with_partitions,
        with_lease_options,
        with_spark_options,
        with_bootstrap,
        with_broker,
        json_option,
    ]
    for option in reversed(options):
        function = option(function)
    return function
