"""Options of the commands that write tables."""

from collections.abc import Callable
from typing import ParamSpec

import click

from pipeline.client.topics import with_cluster
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
    """Add the options of the output: `out`, `table_format`, `overwrite`, `key_as`, `value_as`,
    `null_malformed`."""
    options: list[Callable[[Callable[P, None]], Callable[P, None]]] = [
        click.option("--out", required=True, metavar="PATH", help="Directory of the table."),
        click.option(
            "--format",
            "table_format",
            type=click.Choice(FORMATS),
            default="parquet",
            show_default=True,
            help="Format of the table.",
        ),
        click.option("--overwrite", is_flag=True, help="Replace an existing table."),
        _form("--key-as", "Type of the key column: binary, string, json:SCHEMA, json:@FILE."),
        _form("--value-as", "Type of the value column; as --key-as."),
        click.option(
            "--null-malformed",
            is_flag=True,
            help="Write JSON that does not match its schema as null instead of failing.",
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
    """Add the options of the input: `partitions`, `transport`, `task_memory`, `task_size`,
    `spark_options`, `cluster`, `client`, `as_json`."""
    options: list[Callable[[Callable[P, None]], Callable[P, None]]] = [
        with_partitions,
        with_lease_options,
        with_spark_options,
        with_cluster,
        with_broker,
        json_option,
    ]
    for option in reversed(options):
        function = option(function)
    return function
