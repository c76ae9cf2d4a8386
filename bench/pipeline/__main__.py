"""The pipeline on Spark beside the local pool and the broker's own workers, on the same cores.

    python -m bench.pipeline [--parts compact,table,memory] [--rounds 5] [--quick] [--json FILE]

A broker holds the topics: 5 and 40 million records of 100 bytes in 4 partitions, every key written
ten times in random order (40 million: 4 x 1 million keys), and two of 10 million for tables. All is
in the page cache, and synced before each clock starts; engines take turns within a round, and a
round that is not counted warms them up. Figures are medians, ratios those of the medians.

- compact: from a warm session, with a run leased, up to the manifests. `local`: processes of this
  machine; `workers`: the broker's own worker code, as many processes; `spark`. Partitions as whole
  tasks, and forced into shards. Starting the session and leasing are apart, and so are checking and
  publishing, which is done once, at the end.
- table, over 10 million records: the index of all survivors; the scan of live rows through it; both
  together, which is `latest`, beside Spark SQL's max_by on format("varve"): the same rows.
- memory: what the driver grows by, JVM and Python, while topics with few and many keys are
  compacted and indexed. With a local master that JVM is the executor as well.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka.admin import AdminClient, NewTopic

from admin.client import ApiClient
from bench.pipeline.topics import TopicShape, fill
from bench.report import markdown_table, median_ratio
from cleaner.host import Foreground
from cleaner.job import CleanJob
from cleaner.remote_compaction import Purpose
from cleaner.workers.dedicated_worker import DedicatedWorker, open_dedicated_worker
from cleaner.workers.process import spawn_process
from cleaner.workers.throttle import Throttle
from pipeline.client.lease import Lease, LeaseClient
from pipeline.compaction.cleaning import clean_partitions
from pipeline.compaction.indexing import PartitionIndex, index_partitions
from pipeline.engines.engine import Engine, LocalEngine
from pipeline.engines.spark_engine import STAGE_SETTINGS, SparkEngine
from pipeline.engines.spark_session import build_session, stop_session
from pipeline.records.columns import COLUMNS
from pipeline.stages.planning import Limits
from pipeline.tables.rows import row_tasks, rows_of
from tests.support.varve import VarveBroker, running_varve

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHARDS = 4
TASK_BYTES = 512 << 20
SEGMENT_BYTES = 128 << 20
TTL_SECONDS = 600
QUICK_SHARE = 10  # of the records in a quick run
BROKER_SETTINGS = {"cleaner": {"enabled": False, "dedupe_buffer_bytes": "128MiB"}}
TOPIC_CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": str(SEGMENT_BYTES),
}
COMPACTED = (TopicShape.of("c5", 5_000_000), TopicShape.of("c40", 40_000_000))
TABLE = TopicShape.of("t10", 10_000_000)
MANY_KEYS = TopicShape.of("k10", 10_000_000, 4_000_000)
PARTS = ("compact", "table", "memory")


@dataclass
class Bench:
    """A broker with topics, a session, and the two engines of the pipeline."""

    broker: VarveBroker
    runs: LeaseClient
    local: LocalEngine
    session: "SparkSession"
    spark: SparkEngine
    cores: int
    rounds: int
    session_seconds: float

    @property
    def whole(self) -> Limits:
        """Partitions as one task each, if their keys are likely to fit."""
        return Limits(task_bytes=TASK_BYTES, parallelism=self.cores)

    @property
    def sharded(self) -> Limits:
        """Partitions are cut up."""
        return replace(self.whole, shards=SHARDS)

    @contextmanager
    def leased(self, topic: str, purpose: Purpose = Purpose.COMPACT) -> Iterator[Lease]:
        """A run over all of a topic, which changes nothing; the disks have nothing to do."""
        with self.runs.open(topic, purpose=purpose, roll=True, ttl_seconds=TTL_SECONDS) as run:
            os.sync()
            yield run

    def compact(self, run: Lease, engine: Engine, limits: Limits) -> None:
        """As `varve pipeline compact --no-adopt` does it."""
        jobs = [planned.job for planned in run.plan.partitions]
        source = run.source("disk")
        cleaned = clean_partitions(engine, jobs, lambda _: source, limits)
        for job, partition in zip(jobs, cleaned, strict=True):
            run.submit(
                job, partition.groups, partition.folders, partition.report, engine=engine.name
            )


# Compaction ---------------------------------------------------------------------------------------


class Workers:
    """The broker's own worker processes, without the broker."""

    def __init__(self, count: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()
        self._loop.run_until_complete(self._start(count))

    async def _start(self, count: int) -> None:
        throttle = Throttle(None, None, self._loop.time())

        def top_up(now: float) -> None:
            throttle.tick(now, lambda: Foreground(0, 0))

        self._workers = [
            await self._stack.enter_async_context(
                open_dedicated_worker(
                    spawn_process, 0, index=index, budgets=throttle, top_up=top_up
                )
            )
            for index in range(count)
        ]

    def compact(self, run: Lease) -> None:
        """Clean all partitions of a run, and let go of what was made."""
        jobs = [planned.job for planned in run.plan.partitions]
        self._loop.run_until_complete(self._compact(jobs))

    async def _compact(self, jobs: Sequence[CleanJob]) -> None:
        remaining = list(enumerate(jobs))

        async def work(worker: DedicatedWorker) -> None:
            while remaining:
                number, job = remaining.pop()
                out = f"{os.path.dirname(job.directory)}/out/alone-{number}"
                os.makedirs(out)
                await worker.run(replace(job, output_directory=out))

        await asyncio.gather(*(work(worker) for worker in self._workers))

    def close(self) -> None:
        self._loop.run_until_complete(self._stack.aclose())
        self._loop.close()


def compact_part(bench: Bench, shapes: Sequence[TopicShape], stack: ExitStack) -> dict[str, Any]:
    """Seconds of every way for every topic, and of what is apart."""
    workers = Workers(bench.cores)
    stack.callback(workers.close)
    ways: dict[str, Callable[[Lease], None]] = {
        "workers": workers.compact,
        "local, whole": lambda run: bench.compact(run, bench.local, bench.whole),
        "spark, whole": lambda run: bench.compact(run, bench.spark, bench.whole),
        "local, shards": lambda run: bench.compact(run, bench.local, bench.sharded),
        "spark, shards": lambda run: bench.compact(run, bench.spark, bench.sharded),
    }
    topics = []
    for shape in shapes:
        seconds: dict[str, list[float]] = defaultdict(list)
        for number in range(bench.rounds + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                with bench.leased(shape.name) as run:
                    leased = time.perf_counter() - began
                    spent = timed(lambda way=way, run=run: way(run))
                if number:
                    seconds[name].append(spent)
                    seconds["lease, sync included"].append(leased)
            print_round(shape.name, number, seconds)
        topics.append({"topic": shape.name, "records": shape.records, "seconds": dict(seconds)})
    return {"topics": topics, "publication": publication(bench, shapes[0])}


def publication(bench: Bench, shape: TopicShape) -> dict[str, float]:
    """What the broker takes to check and to publish; the topic is compacted afterwards."""
    with bench.leased(shape.name) as run:
        bench.compact(run, bench.spark, bench.whole)
        began = time.perf_counter()
        results = run.adopt()
        spent = time.perf_counter() - began
    size = sum(result.bytes_before for result in results)
    checked = sum(result.verify_seconds for result in results)
    return {"bytes": size, "seconds": spent, "verify_seconds": checked}


# Tables -------------------------------------------------------------------------------------------


def table_part(bench: Bench, shape: TopicShape) -> dict[str, Any]:
    """Seconds of the index, the scan and both, and of Spark SQL doing the same."""
    seconds: dict[str, list[float]] = defaultdict(list)
    results: set[tuple[int, int]] = set()
    for number in range(bench.rounds + 1):
        spent: dict[str, float] = {}
        with bench.leased(shape.name, Purpose.READ) as run:
            jobs = [planned.job for planned in run.plan.partitions]
            source = run.source("disk")
            # Spark ends Python workers that were idle for a minute, and max_by takes long.
            indexes = index_partitions(bench.spark, jobs, lambda _: source, bench.whole)  # noqa: B023
            totals(live_rows(bench, indexes))
            for engine in (bench.local, bench.spark):
                began = time.perf_counter()
                indexes = index_partitions(engine, jobs, lambda _: source, bench.whole)  # noqa: B023
                spent[f"index, {engine.name}"] = time.perf_counter() - began
            began = time.perf_counter()
            results.add(totals(live_rows(bench, indexes)))
            spent["live scan, spark"] = time.perf_counter() - began
        spent["latest"] = spent["index, spark"] + spent["live scan, spark"]
        began = time.perf_counter()
        results.add(totals(by_max_by(bench, shape)))
        spent["max_by"] = time.perf_counter() - began
        for name, value in spent.items():
            if number:
                seconds[name].append(value)
        print_round(shape.name, number, seconds)
    if len(results) != 1:
        raise AssertionError(f"rows and bytes of values differ: {results}")
    ((rows, _),) = results
    return {"records": shape.records, "rows": rows, "seconds": dict(seconds)}


def live_rows(bench: Bench, indexes: Sequence[PartitionIndex]) -> "DataFrame":
    """Every record that is the last of its key, and no delete, as `latest` reads them."""
    tasks = [
        task
        for index in indexes
        for task in row_tasks(
            index.job,
            {"kind": "disk"},
            COLUMNS,
            survivors=index.survivors,
            skip=frozenset(counts.base_offset for counts in index.counts if not counts.live),
            task_bytes=TASK_BYTES,
        )
    ]
    return rows_of(bench.session, tasks, COLUMNS)


def by_max_by(bench: Bench, shape: TopicShape) -> "DataFrame":
    """The latest rows as Spark SQL finds them."""
    from pyspark.sql import functions

    source = bench.session.read.format("varve").option("subscribe", shape.name)
    frame = source.option("kafka.bootstrap.servers", bench.broker.bootstrap).load()
    latest = functions.max_by("value", "offset").alias("value")
    return frame.groupBy("key").agg(latest).where("value is not null")


def totals(frame: "DataFrame") -> tuple[int, int]:
    """Rows, and bytes of their values: every row is made, and nothing is kept."""
    (row,) = frame.selectExpr("count(*)", "sum(length(value))").collect()
    return int(row[0]), int(row[1])


# Memory -------------------------------------------------------------------------------------------


def memory_part(bench: Bench, shapes: Sequence[TopicShape]) -> list[dict[str, Any]]:
    """Peaks of the driver's JVM and of its Python while each topic is compacted and indexed."""
    from pyspark import SparkContext

    jvm = SparkContext._gateway.proc.pid
    rows = []
    for shape in shapes:
        for pid in (jvm, os.getpid()):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM begins anew
        for limits in (bench.whole, bench.sharded):
            with bench.leased(shape.name) as run:
                bench.compact(run, bench.spark, limits)
            with bench.leased(shape.name, Purpose.READ) as run:
                jobs = [planned.job for planned in run.plan.partitions]
                index_partitions(bench.spark, jobs, lambda _: {"kind": "disk"}, limits)
        rows.append(
            {
                "topic": shape.name,
                "records": shape.records,
                "keys": shape.keys,
                "jvm_mb": peak_mb(jvm),
                "python_mb": peak_mb(os.getpid()),
            }
        )
        print(f"{shape.name}: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def peak_mb(pid: int) -> float:
    """The largest resident size since it was last reset."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


# All of it ----------------------------------------------------------------------------------------


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def print_round(name: str, number: int, seconds: dict[str, list[float]]) -> None:
    last = ", ".join(f"{way} {spent[-1]:.2f}" for way, spent in seconds.items())
    print(f"{name}, round {number}: {last or 'warm-up'}", file=sys.stderr, flush=True)


def ratio(seconds: dict[str, list[float]], name: str, beside: str) -> float:
    """Return how many times faster `name` is than `beside`: the ratio of the median times."""
    return median_ratio(seconds[beside], seconds[name])


def compact_table(part: dict[str, Any]) -> str:
    """Rates, and shares of the local pool's in the same form."""
    topics = part["topics"]
    head = ["M records/s"]
    for topic in topics:
        head += [f"{topic['records'] / 1e6:g} M", "of local"]
    rows = []
    names = [name for name in topics[0]["seconds"] if not name.startswith("lease")]
    for name in names:
        row = [name]
        form = name.partition(", ")[2] or "whole"
        for topic in topics:
            seconds = topic["seconds"]
            row.append(f"{topic['records'] / statistics.median(seconds[name]) / 1e6:.2f}")
            row.append(f"{ratio(seconds, name, f'local, {form}'):.2f}")
        rows.append(row)
    return markdown_table(head, rows)


def growth(part: dict[str, Any]) -> list[str]:
    """How much more time a record takes in the largest topic than in the smallest."""
    small, large = part["topics"][0], part["topics"][-1]
    reported = []
    for name in ("spark, whole", "spark, shards"):
        each = [
            statistics.median(topic["seconds"][name]) / topic["records"] for topic in (small, large)
        ]
        reported.append(f"{name}: {each[1] / each[0]:.2f} of the time a record")
    return reported


def table_table(part: dict[str, Any]) -> str:
    """Seconds, and what max_by takes beside."""
    seconds = part["seconds"]
    rows = [
        [name, f"{statistics.median(spent):.2f}", f"{ratio(seconds, name, 'max_by'):.1f}"]
        for name, spent in seconds.items()
    ]
    head = [f"{part['records'] / 1e6:g} M records, {part['rows']} rows", "seconds", "x max_by"]
    return markdown_table(head, rows)


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["driver, peak MB", "keys", "JVM", "Python"]
    lines = [
        [
            f"{row['records'] / 1e6:g} M records",
            f"{row['keys'] / 1e6:g} M",
            f"{row['jvm_mb']:.0f}",
            f"{row['python_mb']:.0f}",
        ]
        for row in rows
    ]
    return markdown_table(head, lines)


def report(figures: dict[str, Any]) -> None:
    """The tables on standard output."""
    print(f"starting the session: {figures['session_seconds']:.1f} s")
    if compacted := figures.get("compact"):
        print(f"\n{compact_table(compacted)}\n")
        first, last = (compacted["topics"][at]["records"] / 1e6 for at in (0, -1))
        print(f"from {first:g} to {last:g} M: {'; '.join(growth(compacted))}")
        reported = compacted["publication"]
        print(
            f"adoption of {reported['bytes'] / 1e6:.0f} MB: {reported['seconds']:.2f} s,"
            f" of which {reported['verify_seconds']:.2f} s are the check"
        )
    if table := figures.get("table"):
        print(f"\n{table_table(table)}")
    if memory := figures.get("memory"):
        print(f"\n{memory_table(memory)}")
    before, after = figures["load"]
    print(f"\nload average {before:.1f} before, {after:.1f} after")


def make_topics(broker: VarveBroker, shapes: Sequence[TopicShape], seed: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for shape in shapes:
        new = NewTopic(
            shape.name,
            num_partitions=shape.partitions,
            replication_factor=1,
            config=TOPIC_CONFIG,
        )
        for future in admin.create_topics([new]).values():
            future.result(30)
        began = time.perf_counter()
        fill(broker.port, shape, seed)
        took = time.perf_counter() - began
        print(f"{shape.name}: produced in {took:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def prepared(arguments: argparse.Namespace, shapes: Sequence[TopicShape]) -> Iterator[Bench]:
    """A broker with these topics, and engines that have done nothing yet."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="varve-bench-"))
        broker = stack.enter_context(running_varve(Path(folder), BROKER_SETTINGS))
        make_topics(broker, shapes, arguments.seed)
        local = stack.enter_context(LocalEngine(arguments.cores, nice=0))
        began = time.perf_counter()
        session = build_session(f"local[{arguments.cores}]", memory=arguments.memory)
        session_seconds = time.perf_counter() - began
        bench = Bench(
            broker=broker,
            runs=LeaseClient(ApiClient(f"http://127.0.0.1:{broker.http_port}")),
            local=local,
            session=session,
            spark=SparkEngine(session, parallelism=arguments.cores),
            cores=arguments.cores,
            rounds=arguments.rounds,
            session_seconds=session_seconds,
        )
        stack.callback(lambda: stop_session(bench.session))
        yield bench


def use_stage_session(bench: Bench, memory: str) -> None:
    """Replace the session by one for stages alone, as `varve pipeline compact` has it."""
    stop_session(bench.session)
    bench.session = build_session(f"local[{bench.cores}]", memory=memory, settings=STAGE_SETTINGS)
    bench.spark = SparkEngine(bench.session, parallelism=bench.cores)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the requested parts and return their figures."""
    share = QUICK_SHARE if arguments.quick else 1

    def sized(shape: TopicShape) -> TopicShape:
        return replace(shape, records=shape.records // share, keys=shape.keys // share)

    shapes_by_part = {
        "compact": [sized(shape) for shape in COMPACTED],
        "table": [sized(TABLE)],
        "memory": [sized(TABLE), sized(MANY_KEYS)],
    }
    by_name = {shape.name: shape for part in arguments.parts for shape in shapes_by_part[part]}
    load = os.getloadavg()[0]
    figures: dict[str, Any] = {"cores": arguments.cores, "rounds": arguments.rounds}
    with prepared(arguments, list(by_name.values())) as bench, ExitStack() as stack:
        figures["session_seconds"] = bench.session_seconds
        if "table" in arguments.parts:
            (shape,) = shapes_by_part["table"]
            figures["table"] = table_part(bench, shape)
        if "memory" in arguments.parts:
            figures["memory"] = memory_part(bench, shapes_by_part["memory"])
        if "compact" in arguments.parts:
            use_stage_session(bench, arguments.memory)
            figures["compact"] = compact_part(bench, shapes_by_part["compact"], stack)
    figures["load"] = [load, os.getloadavg()[0]]
    return figures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--memory", default="2g", help="of the driver's JVM")
    parser.add_argument("--quick", action="store_true", help="a tenth of the records, two rounds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    arguments.parts = arguments.parts.split(",")
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if arguments.quick:
        arguments.rounds = 2
    return arguments


def main() -> None:
    arguments = parse()
    figures = run(arguments)
    report(figures)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
