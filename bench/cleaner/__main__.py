"""Compare the cleaner with that of Apache Kafka 4.3.0 on the same segment files, in one run.

    python -m bench.cleaner [--rounds 5] [--rows 100B,1KB,...] [--quick] [--json FILE]

Every key is written ten times in random order, in batches of 16 KB (before compression) and
segments of 64 MiB, all in the page cache. In each round Varve appends the log and Kafka gets a copy
of its files. Both clean it in turns, one worker against one thread:

- Varve: the whole job through the pool and a worker process, from the plan to the last publication.
- Kafka: `Cleaner.clean` of its own jars with the sizes a default broker gives it, the log opened
  before the clock starts (bench/java/KafkaCleaner.java).
- cp: the log's segments copied by the command, for the largest records.

An uncounted round warms both up. Figures are medians, ratios those of the medians. Both must keep
the same number of records. The worker's memory is its largest resident size in the rounds of a row
minus its size after the start. Without Kafka's jars only Varve is measured.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.cleaner.clean_job import CODECS, OVERWRITES, Template, one_batch
from bench.report import markdown_table, median_ratio
from broker.logging import configure
from cleaner.job import CleanReport
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.env import RealEnv
from storage.format.batch import read_header
from storage.log.log import Log
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.cleaner.scheduler.log_host import LogHost
from tests.support.peers import kafka

CLEAN_SECONDS_MAX = 300.0
# Appending blocks the pool's loop: let its 20 ms pause between scans pass before the clock starts.
SETTLE_SECONDS = 0.1
BATCH_BYTES = 16_384
SEGMENT_BYTES = 64 << 20
CONFIG = TopicConfig(
    cleanup_policy=("compact",), segment_bytes=SEGMENT_BYTES, file_delete_delay_ms=0
)
PROGRAM = Path(__file__).parents[1] / "java" / "KafkaCleaner.java"
# What kafka-run-class.sh and kafka-server-start.sh hand to Java.
JAVA = ["java", "-server", "-Xmx1g", "-Xms1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"]
JAVA += ["-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"]


@dataclass(frozen=True)
class Row:
    """One row of the table: the size, codec and number of records."""

    name: str
    payload_bytes: int  # key and value of a record
    codec: str
    records: int
    unit: str  # M records/s, or MB/s of the log as stored
    beside_cp: bool = False


ROWS = (
    Row("100B", 100, "none", 5_000_000, "M records/s"),
    Row("1KB", 1024, "none", 500_000, "MB/s"),
    Row("1KB-lz4", 1024, "lz4", 750_000, "MB/s"),
    Row("1KB-zstd", 1024, "zstd", 500_000, "MB/s"),
    Row("10KB", 10_240, "none", 50_000, "MB/s", beside_cp=True),
)
QUICK_SHARE = 5  # of the records in a quick run


@dataclass
class Timings:
    """Seconds of each counted round, and the counts that both cleaners agree on."""

    varve: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)  # the worker's own part of `varve`
    cpu: list[float] = field(default_factory=list)  # the worker's processor seconds
    kafka: list[float] = field(default_factory=list)
    cp: list[float] = field(default_factory=list)
    records: int = 0
    kept: int = 0
    log_bytes: int = 0
    worker_peak_mb: float = 0.0


def make_batches(row: Row, seed: int) -> list[bytes]:
    """The batches of one log; the offsets in them are stamped when they are appended."""
    rng = np.random.default_rng(seed)
    template = Template(max(1, BATCH_BYTES // (row.payload_bytes + 10)), row.payload_bytes, rng)
    keys = rng.permutation(row.records) % max(1, row.records // OVERWRITES)
    return [
        one_batch(template, keys[first : first + template.count], 0, CODECS[row.codec])
        for first in range(0, row.records - template.count + 1, template.count)
    ]


class KafkaCleaner:
    """Kafka's cleaner in a Java process that cleans one directory after another."""

    def __init__(self, segment_bytes: int) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._classes = tempfile.mkdtemp(prefix="varve-bench-")
        jars = f"{kafka.LIB}/*"
        subprocess.run(["javac", "-cp", jars, "-d", self._classes, str(PROGRAM)], check=True)
        self._process = subprocess.Popen(
            [*JAVA, "-cp", f"{self._classes}:{jars}", PROGRAM.stem, str(segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )

    def clean(self, folder: str) -> tuple[float, int]:
        """Clean the whole log; return the seconds and how many records were kept."""
        words = self._clean(folder, 0)
        return float(words[1]), int(words[4])

    def clean_from(self, folder: str, first_dirty_offset: int) -> tuple[int, int]:
        """Clean the log from an offset on; return the bytes read and written."""
        words = self._clean(folder, first_dirty_offset)
        return int(words[5]), int(words[6])

    def _clean(self, folder: str, first_dirty_offset: int) -> list[str]:
        io, reported = self._process.stdin, self._process.stdout
        assert io is not None
        assert reported is not None
        with suppress(BrokenPipeError):
            print(f"{first_dirty_offset} {folder}", file=io, flush=True)
        for line in reported:
            words = line.split()
            if words[:1] == ["cleaned"]:
                return words
        self._complaints.seek(0)
        why = self._complaints.read().decode(errors="replace")
        raise RuntimeError(f"Kafka's cleaner ended with {self._process.wait(60)}: {why[-2000:]}")

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._process.communicate(timeout=60)
        self._complaints.close()
        shutil.rmtree(self._classes)


@contextmanager
def kafka_cleaner(segment_bytes: int = SEGMENT_BYTES) -> Iterator[KafkaCleaner | None]:
    """Start Kafka's cleaner; yield None, and print the reason, if it is not available."""
    reason = kafka.unavailable()
    if reason is not None:
        print(f"Apache Kafka is not measured: {reason}", file=sys.stderr)
        yield None
        return
    cleaner = KafkaCleaner(segment_bytes)
    try:
        yield cleaner
    finally:
        cleaner.close()


class Bench:
    """One data directory, one pool with its worker, a new partition in each round."""

    def __init__(self, directory: str, settings: CleanerSettings) -> None:
        self.directory = directory
        data = os.path.join(directory, "varve")
        os.mkdir(data)
        self._env = RealEnv()
        self._manager = LogManager(self._env, [data])
        self._manager.open(lambda _: CONFIG)
        self._host = LogHost(self._env, self._manager)
        self.pool = CleanerPool(self._host, settings, self._env)
        self._number = 0

    def worker_status(self, name: str) -> float:
        """A line of the worker's /proc status, in MB."""
        worker = self.pool.status().workers[0]
        for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1e3
        raise LookupError(name)

    def worker_cpu(self) -> float:
        """Processor seconds of the worker so far."""
        pid = self.pool.status().workers[0].pid
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def forget_peak(self) -> None:
        """Reset the worker's VmHWM."""
        pid = self.pool.status().workers[0].pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")

    async def round(
        self, row: Row, batches: list[bytes], cleaner: KafkaCleaner | None, timings: Timings | None
    ) -> None:
        """Write the log and clean it with each cleaner; `timings` None: an uncounted round."""
        self._number += 1
        partition = TopicPartition("bench", self._number)
        copy = os.path.join(self.directory, f"copy-{self._number}", "bench-0")
        kept_by_kafka = -1
        async with self.pool.control.paused(partition):
            log = self._append(partition, batches)
            if cleaner is not None:
                copy_segments(log.directory, copy)
            await asyncio.to_thread(os.sync)  # exclude the write-back of the log
            if cleaner is not None and self._number % 2:
                seconds, kept_by_kafka = await asyncio.to_thread(cleaner.clean, copy)
                if timings:
                    timings.kafka.append(seconds)
            if row.beside_cp:
                seconds = await asyncio.to_thread(seconds_of_cp, log.directory, self.directory)
                if timings:
                    timings.cp.append(seconds)
            before = sum(segment.size_bytes for segment in log.segment_facts())
            self._host.done.clear()
            await asyncio.sleep(SETTLE_SECONDS)
            cpu = self.worker_cpu()
            started = time.perf_counter()
        async with asyncio.timeout(CLEAN_SECONDS_MAX):
            await self.pool.wait_cleaned(partition, log.log_end_offset)
        seconds = time.perf_counter() - started
        reports = [report for _, report in self._host.done]
        assert not self._host.failures, self._host.failures
        if timings:
            timings.varve.append(seconds)
            timings.cpu.append(self.worker_cpu() - cpu)
            note(timings, reports, before)
        async with self.pool.control.paused(partition):
            self._manager.delete_all([partition])
            self._manager.purge_deleted(self._env.wall_ms())
        if cleaner is not None:
            if not self._number % 2:
                seconds, kept_by_kafka = await asyncio.to_thread(cleaner.clean, copy)
                if timings:
                    timings.kafka.append(seconds)
            # Kafka's scheduler still deletes files here; leftovers go with the directory.
            shutil.rmtree(os.path.dirname(copy), ignore_errors=True)
            assert kept_by_kafka == reports[-1].records_after, (kept_by_kafka, reports)

    def _append(self, partition: TopicPartition, batches: list[bytes]) -> Log:
        log = self._manager.create(partition, os.urandom(16), CONFIG)
        for batch in batches:
            log.append(bytearray(batch), read_header(batch), now_ms=self._env.wall_ms())
        log.roll(self._env.wall_ms())
        log.flush()
        return log

    def close(self) -> None:
        self._manager.close()


def note(timings: Timings, reports: list[CleanReport], log_bytes: int) -> None:
    """Add the worker's report of one round."""
    timings.passes.append(sum(r.map_seconds + r.rewrite_seconds for r in reports))
    timings.records = sum(report.records_before for report in reports)
    timings.kept = sum(report.records_after for report in reports)
    timings.log_bytes = log_bytes


def copy_segments(source: str, target: str) -> None:
    """The logs and indexes of a partition's folder."""
    os.makedirs(target)
    for name in os.listdir(source):
        if name.endswith((".log", ".index", ".timeindex")):
            shutil.copy(os.path.join(source, name), target)


def seconds_of_cp(source: str, directory: str) -> float:
    """Return the seconds that `cp` takes for the logs of a directory."""
    target = os.path.join(directory, "cp")
    os.mkdir(target)
    logs = [os.path.join(source, name) for name in sorted(os.listdir(source))]
    started = time.perf_counter()
    subprocess.run(["cp", *(log for log in logs if log.endswith(".log")), target], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


async def measure(
    bench: Bench, row: Row, cleaner: KafkaCleaner | None, arguments: argparse.Namespace
) -> Timings:
    timings = Timings()
    batches = make_batches(row, arguments.seed)
    await bench.round(row, batches, cleaner, None)
    bench.forget_peak()
    for _ in range(arguments.rounds):
        await bench.round(row, batches, cleaner, timings)
        last = [f"varve {timings.varve[-1]:.3f} (cpu {timings.cpu[-1]:.2f})"]
        last += [f"kafka {timings.kafka[-1]:.3f}"] if cleaner else []
        last += [f"cp {timings.cp[-1]:.3f}"] if row.beside_cp else []
        print(f"{row.name}: {', '.join(last)} s", file=sys.stderr, flush=True)
    timings.worker_peak_mb = bench.worker_status("VmHWM")
    return timings


def figures(row: Row, timings: Timings, idle_mb: float) -> dict[str, Any]:
    """Return one row: rates in the row's unit; ratios above one mean that Varve is faster."""
    amount = (timings.records if row.unit == "M records/s" else timings.log_bytes) / 1e6

    def rate(seconds: list[float]) -> float | None:
        return amount / statistics.median(seconds) if seconds else None

    def ratio(seconds: list[float]) -> float | None:
        return median_ratio(seconds, timings.varve) if seconds else None

    return {
        "row": row.name, "unit": row.unit, "records": timings.records, "kept": timings.kept,
        "log_bytes": timings.log_bytes, "varve": rate(timings.varve),
        "varve_passes": rate(timings.passes), "varve_cpu": rate(timings.cpu),
        "kafka": rate(timings.kafka),
        "kafka_ratio": ratio(timings.kafka), "cp": rate(timings.cp), "cp_ratio": ratio(timings.cp),
        "worker_idle_mb": idle_mb, "worker_grown_mb": timings.worker_peak_mb - idle_mb,
        "seconds": {"varve": timings.varve, "kafka": timings.kafka, "cp": timings.cp},
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    def shown(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    head = ["records", "unit", "Varve", "passes", "Kafka 4.3.0", "ratio", "cp", "of cp", "memory"]
    lines = []
    for row in rows:
        digits = 2 if row["unit"] == "M records/s" else 0
        line = [row["row"], row["unit"]]
        line += [shown(row[name], digits) for name in ("varve", "varve_passes", "kafka")]
        line += [shown(row["kafka_ratio"], 2), shown(row["cp"], 0), shown(row["cp_ratio"], 2)]
        lines.append([*line, f"+{row['worker_grown_mb']:.0f} MB"])
    return markdown_table(head, lines)


async def run(directory: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    settings = CleanerSettings(workers=1, nice=arguments.nice)
    bench = Bench(directory, settings)
    rows = []
    await bench.pool.start()
    try:
        while not any(status.ready for status in bench.pool.status().workers):  # noqa: ASYNC110  no event
            await asyncio.sleep(0.05)
        idle_mb = bench.worker_status("VmRSS")
        with kafka_cleaner() as cleaner:
            for row in arguments.rows_chosen:
                timings = await measure(bench, row, cleaner, arguments)
                rows.append(figures(row, timings, idle_mb))
    finally:
        await bench.pool.stop()
        bench.close()
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default=",".join(row.name for row in ROWS))
    parser.add_argument("--quick", action="store_true", help="a fifth of the records, two rounds")
    parser.add_argument("--nice", type=int, default=0, help="of the worker; Kafka's is 0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    names = arguments.rows.split(",")
    unknown = set(names) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}")
    if arguments.quick:
        arguments.rounds = 2
    share = QUICK_SHARE if arguments.quick else 1
    arguments.rows_chosen = [
        Row(r.name, r.payload_bytes, r.codec, r.records // share, r.unit, r.beside_cp)
        for r in ROWS
        if r.name in names
    ]
    return arguments


def main() -> None:
    arguments = parse()
    configure("warning")
    load = os.getloadavg()[0]
    directory = tempfile.mkdtemp(prefix="varve-bench-")
    try:
        rows = asyncio.run(run(directory, arguments))
    finally:
        shutil.rmtree(directory)
    print(table(rows))
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"load": load, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
