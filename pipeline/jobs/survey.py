"""`varve pipeline survey`: count a topic's records and recommend its settings.

Rules
- A survey only reads. It rolls the active segment first, so that its records are counted too;
  with `--no-roll` they are left out.
- Counts are exact. Damaged segments are counted up to the damage and reported.
"""

import time
from base64 import b64decode
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import click

from admin.client import ApiClient
from cleaner.job import CleanJob
from cleaner.remote_compaction import Purpose
from config import exit_codes
from config.security.clients import Cluster
from config.units import about_size, counted
from pipeline.atomic_write import write_atomically
from pipeline.client.kafka_client import WireClient
from pipeline.client.lease import LeaseClient
from pipeline.client.leased_work import choose_transport, interrupts_deferred, lost_lease_reported
from pipeline.client.topics import (
    TopicBounds,
    cluster_errors,
    fetch_bounds,
    fetch_settings,
    reach_cluster,
    reach_topic,
    with_cluster,
)
from pipeline.command import (
    SparkOptions,
    exit_on_error,
    json_option,
    open_engine,
    show,
    with_broker,
    with_engine_options,
    with_lease_options,
)
from pipeline.compaction.indexing import PartitionIndex, index_partitions
from pipeline.compaction.stage_runs import StageRunner
from pipeline.engines.engine import Engine
from pipeline.errors import JobError
from pipeline.progress import ProgressReporter, progress_bars
from pipeline.records.key_text import key_text
from pipeline.report.figures import (
    PartitionFigures,
    SegmentFigures,
    TopicFigures,
    merge_skew,
    merge_survival,
    segment_figures,
    whole_from,
)
from pipeline.report.policy import advise
from pipeline.stages.histories import HistoriesResult, HistoriesTask
from pipeline.stages.planning import Limits
from pipeline.tables.open_topic import Clients

TOP_KEYS: Final = 20


@dataclass(slots=True)
class SurveyResult:
    """The surveyed topics, in the order of the command line."""

    topics: list[TopicFigures]
    seconds: dict[str, float] = field(default_factory=dict)


def survey_topic(
    engine: Engine,
    broker: Clients,
    topic: str,
    *,
    limits: Limits,
    engine_name: str,
    master: str = "",
    transport: str = "auto",
    roll: bool = True,
    reporter: ProgressReporter,
) -> TopicFigures:
    """Survey one topic.

    Raises UnknownTopicError, WireError, LeaseRequestError, StageFailedError.
    """
    bounds = fetch_bounds(broker.cluster, topic)
    figures = TopicFigures(topic, settings=fetch_settings(broker.cluster, topic))
    with ExitStack() as stack:
        with interrupts_deferred():
            leases = LeaseClient(broker.client)
            lease = stack.enter_context(leases.open(topic, purpose=Purpose.READ, roll=roll))
        way = choose_transport(transport, engine_name, master, lease)
        source = lease.source(way)
        jobs = [planned.job for planned in lease.plan.partitions]
        with lost_lease_reported(lease):
            indexes = index_partitions(engine, jobs, lambda _: source, limits, progress=reporter)
            histories = _histories(engine, indexes, source, limits, reporter)
        lease.check()
    by_partition = {index.job.partition.partition: index for index in indexes}
    for number in sorted(bounds.end):
        _add_partition(figures, number, bounds, by_partition.get(number))
    figures.skew = merge_skew(histories, TOP_KEYS)
    figures.survival = merge_survival(histories)
    advise(figures)
    return figures


def _histories(
    engine: Engine,
    indexes: Sequence[PartitionIndex],
    source: dict[str, Any],
    limits: Limits,
    reporter: ProgressReporter,
) -> list[HistoriesResult]:
    """Track keys over the uncleaned part of each partition, or over all of it if none is left."""
    tasks, sizes = [], []
    for index in indexes:
        first = whole_from(index.counts, index.job.log_start_offset)
        if first >= index.job.end_offset:
            first = index.job.log_start_offset
        tasks.append(HistoriesTask(source, index.job, first, limits.memory_bytes, TOP_KEYS))
        sizes.append(sum(counts.size_bytes for counts in index.counts))
    return StageRunner(engine, reporter).run("histories", tasks, sizes, HistoriesResult)


def _add_partition(
    figures: TopicFigures, number: int, bounds: TopicBounds, index: PartitionIndex | None
) -> None:
    counts = () if index is None else index.counts
    job: CleanJob | None = None if index is None else index.job
    segments = segment_figures(figures.topic, number, counts)
    figures.segments += segments
    first = bounds.first[number] if job is None else job.log_start_offset
    figures.partitions.append(
        PartitionFigures(
            partition=number,
            first_offset=first,
            end_offset=first if job is None else job.end_offset,
            **{name: _sum(segments, name) for name in _SUMMED},
            keys=0 if index is None else index.keys,
            whole_from=whole_from(counts, first),
            damaged=[]
            if index is None
            else [
                f"{damage.path} at byte {damage.position}: {damage.reason}"
                for damage in index.damaged
            ],
        )
    )


_SUMMED: Final = ("records", "live", "tombstones", "garbage", "keyless", "aborted", "size_bytes",
                  "live_bytes")  # fmt: skip


def _sum(segments: Sequence[SegmentFigures], name: str) -> int:
    return sum(int(getattr(segment, name)) for segment in segments)


def answer(result: SurveyResult) -> dict[str, Any]:
    """Return the result as JSON. Keys are in Base64, with their text alongside."""
    topics = []
    for topic in result.topics:
        reported = asdict(topic)
        reported["totals"] = {name: topic.total(name) for name in (*_SUMMED, "keys")}
        reported["skew"]["top"] = [
            {"key": key, "key_text": key_text(b64decode(key)), "records": count, "share": share}
            for key, count, share in topic.skew.top
        ]
        topics.append(reported)
    return {"topics": topics, "seconds": result.seconds}


def print_tables(result: SurveyResult) -> None:
    """Print the result on the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pipeline.report.figures import percent

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    table = Table(box=None, pad_edge=False)
    for name in ("topic", "records", "keys", "live", "superseded", "deletes", "keyless", "on disk",
                 "live bytes", "advice"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("topic", "advice") else "right")
    for topic in result.topics:
        table.add_row(
            escape(topic.topic), f"{topic.total('records'):,}", f"{topic.total('keys'):,}",
            percent(topic.share("live")), percent(topic.share("garbage")),
            f"{topic.total('tombstones'):,}", f"{topic.total('keyless'):,}",
            about_size(topic.total("size_bytes")), about_size(topic.total("live_bytes")),
            topic.policy,
        )  # fmt: skip
    console.print(table)
    for topic in result.topics:
        console.print(f"\n[bold]{escape(topic.topic)}[/]: {escape(topic.policy_why)}")
        for advice in topic.advice[1:]:
            subject = f"{advice.setting}={advice.advised} (now {advice.now})"
            console.print(f"  [bold]{escape(subject)}[/] {escape(advice.why)}")
        console.print(f"  [bold]space overhead[/] {escape(topic.overhead.why)}")
        for key, count, share in topic.skew.top[:3]:
            name = escape(key_text(b64decode(key)))
            console.print(f"  key {name} has {counted(count, 'record')}, {percent(share)}")
        for text in (text for figures in topic.partitions for text in figures.damaged):
            console.print(f"  [red]damaged[/] {escape(text)}")


def write_segments(result: SurveyResult, path: Path) -> None:
    """Write one row per segment to a Parquet file. Raises OSError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [asdict(segment) for topic in result.topics for segment in topic.segments]
    kinds = {"topic": pa.string(), "partition": pa.int32(), "live_share": pa.float64()}
    schema = pa.schema(
        [
            (dataclass_field.name, kinds.get(dataclass_field.name, pa.int64()))
            for dataclass_field in fields(SegmentFigures)
        ]
    )
    output = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema), output)
    write_atomically(path, output.getvalue().to_pybytes())


def write_report(result: SurveyResult, path: Path) -> None:
    """Write the HTML report. Raises OSError."""
    from pipeline.report.page import page

    text = page(result.topics, made_ms=int(time.time() * 1000))
    write_atomically(path, text)


def _selected_topics(topics: Sequence[str], is_all: bool, cluster: Cluster) -> list[str]:
    if bool(topics) == is_all:
        raise JobError("give topic names or --all, not both", exit_codes.USAGE)
    if not is_all:
        for topic in topics:
            reach_topic(cluster, topic)
        return list(dict.fromkeys(topics))
    reach_cluster(cluster)
    with WireClient(cluster) as client:
        return [topic for topic in client.topics() if not topic.endswith(".compacted")]


@click.command("survey", short_help="Count records and recommend settings.")
@exit_on_error
@cluster_errors
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option("--all", "is_all", is_flag=True, help="Survey every topic.")
@click.option("--html", "html_path", metavar="FILE", help="Write an HTML report with plots.")
@click.option("--out", metavar="FILE", help="Write one row per segment to a Parquet file.")
@click.option("--no-roll", is_flag=True, help="Leave the active segment open, and out of the job.")
@with_lease_options
@with_engine_options
@with_cluster
@with_broker
@json_option
def command(
    *,
    topics: Sequence[str],
    is_all: bool,
    html_path: str | None,
    out: str | None,
    no_roll: bool,
    transport: str,
    task_memory: int,
    task_size: int,
    engine_name: str,
    processes: int | None,
    spark_options: SparkOptions,
    cluster: Cluster,
    client: ApiClient,
    as_json: bool,
) -> None:
    """Count records of topics and recommend a cleanup policy and settings, with reasons.

    The job counts live and superseded records, tombstones and keys, and estimates how long records
    stay live. For example:

    varve pipeline survey orders customers --html report.html
    """
    requested = _selected_topics(topics, is_all, cluster)
    for path in (html_path, out):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise JobError(f"{Path(path).absolute().parent} is not a directory", exit_codes.USAGE)
        if path is not None and Path(path).is_dir():
            raise JobError(f"{path} is a directory", exit_codes.USAGE)
    result = SurveyResult([])
    with (
        progress_bars(quiet=as_json) as reporter,
        open_engine(engine_name, processes, spark_options, reporter) as engine,
    ):
        limits = Limits(task_memory, task_size, engine.parallelism)
        for topic in requested:
            started = time.monotonic()
            result.topics.append(
                survey_topic(
                    engine,
                    Clients(client, cluster),
                    topic,
                    limits=limits,
                    engine_name=engine_name,
                    master=spark_options.master,
                    transport=transport,
                    roll=not no_roll,
                    reporter=reporter,
                )
            )
            result.seconds[topic] = time.monotonic() - started
    if out is not None:
        write_segments(result, Path(out))
    if html_path is not None:
        write_report(result, Path(html_path))
    if as_json:
        show(answer(result), as_json, lambda _: [])
    else:
        print_tables(result)
    if any(figures.damaged for topic in result.topics for figures in topic.partitions):
        raise SystemExit(exit_codes.UNVERIFIED)
