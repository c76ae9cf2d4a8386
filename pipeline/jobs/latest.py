"""`varve pipeline latest`: write the current state of a topic as a table.

pipeline/tables/state_table.py writes the table. With `--stream`, pipeline/jobs/stream.py then
merges later records into it.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from admin.client import ApiClient
from admin.rangeless_option import RangelessOption
from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.topics import cluster_errors, reach_topic
from pipeline.command import SparkOptions, exit_on_error, show
from pipeline.errors import JobError
from pipeline.jobs.table_options import reading_options, table_options
from pipeline.progress import progress_bars
from pipeline.tables.columns import Form, Forms
from pipeline.tables.open_topic import Clients
from pipeline.tables.state_table import lines, make_table
from pipeline.tables.target import Format, target


@click.command("latest", short_help="Write the current state of a topic as a table.")
@exit_on_error
@cluster_errors
@click.argument("topic")
@table_options
@click.option("--stream", is_flag=True, help="Keep merging new records into the table.")
@click.option(
    "--checkpoint", metavar="DIR", help="Checkpoint of the stream; default: next to the table."
)
@click.option(
    "--available-now", is_flag=True, help="With --stream: exit when the table is up to date."
)
@click.option(
    "--every",
    "every_seconds",
    cls=RangelessOption,
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="With --stream: time between micro-batches.",
)
@reading_options
def command(
    *,
    topic: str,
    out: str,
    table_format: Format,
    overwrite: bool,
    key_as: Form,
    value_as: Form,
    null_malformed: bool,
    stream: bool,
    checkpoint: str | None,
    available_now: bool,
    every_seconds: float,
    partitions: Sequence[int] | None,
    transport: str,
    task_memory: int,
    task_size: int,
    spark_options: SparkOptions,
    cluster: Cluster,
    client: ApiClient,
    as_json: bool,
) -> None:
    """Write the current state of TOPIC, the last record of each key, as a table.

    The broker leases the closed segments. An index of their keys finds the live records, which
    become rows with the columns of Spark's Kafka source.
    """
    forms = Forms(key_as, value_as, null_malformed)
    broker = Clients(client, cluster)
    options: dict[str, Any] = {
        "partitions": partitions,
        "transport": transport,
        "master": spark_options.master,
        "task_memory": task_memory,
        "task_bytes": task_size,
    }
    if stream:
        from pipeline.jobs.stream import follow_command

        if partitions is not None:
            raise JobError("--stream follows all partitions; remove --partitions", exit_codes.USAGE)
        follow_command(
            broker, topic, out, table_format, overwrite=overwrite, forms=forms,
            checkpoint=checkpoint, every_seconds=None if available_now else every_seconds,
            options=options, spark_options=spark_options, as_json=as_json,
        )  # fmt: skip
        return
    if available_now or checkpoint is not None:
        raise JobError("--available-now and --checkpoint need --stream", exit_codes.USAGE)
    place = target(out, table_format, overwrite=overwrite)
    reach_topic(cluster, topic)
    with progress_bars(quiet=as_json) as reporter:
        started = time.monotonic()
        with spark_options.open_session("varve latest", reporter) as spark:
            session_seconds = time.monotonic() - started
            result = make_table(
                spark, broker, topic, place, forms=forms, reporter=reporter, **options
            )
    result.seconds = {"session": session_seconds, **result.seconds}
    show(asdict(result), as_json, lambda _: lines(result))
