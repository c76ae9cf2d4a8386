"""Bytes that cleaners read and write for each byte that clients write, at equal peak space.

    python -m bench.cleaner.generational [--keys N] [--payload-bytes N] [--rounds N] [--plot FILE]

A log gets every key once and is cleaned. Then it gets `--rounds` times as many records, by these
workloads: uniform updates, updates by Zipf's law with exponent 0.99, 99 % of updates on 1 % of the
keys, and new keys only. After each closed segment a planner decides whether to clean:

- Kafka: `Cleaner.clean` of its own jars (bench/java/KafkaCleaner.java);
- dirty-ratio: our planner and engine;
- generational: our planner and engine, with the slack that follows from the dirty ratio.

By default the dirty ratio is 1/3 for the first two, and 0.337 for `generational`, with which the
log grows as far with whole segments: to about 1.56 times its live bytes with a constant live set.
`peak` is the largest size of the log in live bytes, without the active segment, the key indexes and
the output of a running job. With small records (cleaner/engine/selective/index_size.py),
`generational` cleans as `dirty-ratio` does. Bytes are those that the engines charge to their
budgets, and the key indexes that the broker writes. Scratch files count; `scratch` is what of
`written` goes to them. Kafka's statistics omit its first pass: the dirty bytes are added.

`--plot` draws how much disk the log takes meanwhile: its closed segments and their key indexes,
before and after each clean. It needs matplotlib (the extra `pipeline`).
"""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bench.cleaner.__main__ import KafkaCleaner, kafka_cleaner
from bench.cleaner.clean_job import Template, one_batch
from bench.report import markdown_table
from broker.cleaning.cleaner_host import RELEASE_SECONDS
from broker.cleaning.key_recorder import prepare_index
from cleaner.engine.clean import run_clean
from cleaner.engine.kernels import warm_up
from cleaner.engine.selective.appended_keys import AppendedKeys
from cleaner.job import CleanedGroup, CleanJob, UnlimitedControl
from cleaner.key_memory import KeyMemory
from cleaner.planning.cleaner_state import FRESH, state_after_job, state_of_log
from cleaner.planning.findings import ClockReading
from cleaner.planning.grouping import plan_job
from cleaner.planning.plan import assess
from cleaner.states import Idle
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.env import RealEnv
from storage.format import filenames
from storage.format.batch import build_batch, decode_records, read_header
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.cleaner.scheduler.log_host import LogHost

PARTITION = TopicPartition("bench", 0)
BATCH_BYTES = 16_384
ZIPF_EXPONENT = 0.99
HOT_KEYS_SHARE, HOT_UPDATES_SHARE = 0.01, 0.99
WORKLOADS = ("uniform", "zipf 0.99", "99 % on 1 %", "insert-only")
COLOURS = {"kafka": "#7a7f87", "dirty-ratio": "#4a8c86", "generational": "#c98a2b"}


def draw_keys(workload: str, args: argparse.Namespace) -> np.ndarray:
    """Return the keys of all records, in the order of the log."""
    rng = np.random.default_rng(args.seed)
    first = rng.permutation(args.keys)
    count = args.keys * args.rounds
    match workload:
        case "uniform":
            later = rng.integers(0, args.keys, count)
        case "zipf 0.99":
            weights = np.arange(1, args.keys + 1) ** -ZIPF_EXPONENT
            edges = np.cumsum(weights / weights.sum())
            ranks = np.minimum(np.searchsorted(edges, rng.random(count)), args.keys - 1)
            later = rng.permutation(args.keys)[ranks]
        case "99 % on 1 %":
            hot = max(1, int(args.keys * HOT_KEYS_SHARE))
            is_hot = rng.random(count) < HOT_UPDATES_SHARE
            later = np.where(
                is_hot, rng.integers(0, hot, count), rng.integers(hot, args.keys, count)
            )
        case _:
            later = np.arange(args.keys, args.keys + count)
    return np.concatenate([first, later])


@dataclass
class Figures:
    """What one cleaner did after the first clean; sizes in bytes."""

    ingested: int = 0
    read: int = 0
    written: int = 0
    scratch: int = 0  # of the bytes written
    cleans: int = 0
    peak: float = 0.0
    largest_write: int = 0  # of one clean
    # (bytes of clients, bytes on disk) before and after each clean, both in live bytes
    disk: list[tuple[float, float]] = field(default_factory=list)

    def count(self, read: int, written: int, scratch: int = 0) -> None:
        """Add a clean."""
        self.scratch += scratch
        self.cleans += 1
        self.read += read
        self.written += written
        self.largest_write = max(self.largest_write, written)


class VarveLog:
    """A log with our planner and engine; groups are published as they come."""

    def __init__(self, directory: str, config: TopicConfig) -> None:
        self.figures = Figures()
        self._env = RealEnv()
        self._manager = LogManager(self._env, [directory])
        self._manager.open(lambda _: config)
        self._host = LogHost(self._env, self._manager)
        self._log = self._manager.create(PARTITION, os.urandom(16), config)
        self._settings = CleanerSettings()
        self._state = FRESH
        self._jobs = 0
        self._segments = 1
        self._memory = KeyMemory()
        self._hash_key = self._host.job_inputs(PARTITION, 0, 0).hash_key
        self._keys: AppendedKeys | None = None  # of the active segment, as the broker records them
        if config.varve_cleaner_strategy == "generational":
            self._keys = self._new_keys()
            self._log.roller.on_roll = self._write_key_index

    def append(self, batch: bytes) -> bool:
        """Append a batch; return whether it closed a segment."""
        header, data = read_header(batch), bytearray(batch)
        info = self._log.append(data, header, now_ms=self._env.wall_ms())
        if self._keys is not None:
            self._keys.add(data, header, info.first_offset, None)
        self.figures.ingested += len(batch)
        is_closed = len(self._log.segments) > self._segments
        self._segments = len(self._log.segments)
        return is_closed

    def _new_keys(self) -> AppendedKeys:
        log = self._log
        return AppendedKeys(
            self._hash_key, log.log_end_offset, self._memory, log.segments.active.content_id
        )

    def _write_key_index(self) -> None:
        assert self._keys is not None
        write = prepare_index(self._env, self._log, self._keys, self._settings)
        if write is not None:
            self.figures.written += write()
        self._keys = self._new_keys()

    def closed_bytes(self) -> int:
        """Return the size of the closed segments."""
        return sum(segment.size_bytes for segment in self._log.segment_facts()[:-1])

    def index_bytes(self) -> int:
        """Return the size of the key indexes."""
        names = (name for name in os.listdir(self._log.directory) if name.endswith(filenames.KEYS))
        return sum(os.path.getsize(os.path.join(self._log.directory, name)) for name in names)

    async def clean(self, *, run_now: bool = False) -> None:
        """Clean the log if the planner decides so."""
        if run_now:
            self._log.roll(self._env.wall_ms())
        facts = self._host.facts_of(PARTITION)
        assert facts is not None
        now_ms = self._env.wall_ms()
        self._state = state_of_log(self._state, facts, now_ms)
        moment = ClockReading(now_ms, int(self._env.monotonic() * 1000))
        verdict = assess(facts, Idle(), moment, self._state, run_now=run_now)
        self._jobs += 1
        inputs = self._host.job_inputs(PARTITION, facts.log_start_offset, facts.log_end_offset)
        job = plan_job(
            facts, verdict, inputs, self._settings, job_id=f"bench{self._jobs}", now_ms=now_ms
        )
        if job is None:
            return
        assert verdict.section is not None
        control = _Publisher(self._host, job, asyncio.get_running_loop())
        report = await asyncio.to_thread(run_clean, self._env, job, control)
        after = self._host.facts_of(PARTITION)
        assert after is not None
        self._state, clean_below = state_after_job(
            self._state, job, report, after, dirty_bytes=verdict.section.dirty_bytes, alpha=0.3
        )
        self._host.checkpoint(PARTITION, job.generation, clean_below)
        self._log.retention.purge_deleted(now_ms)
        self._segments = len(self._log.segments)
        self.figures.count(control.read, control.written, report.spilled_bytes)

    def close(self) -> None:
        """Close the files."""
        self._manager.close()


class _Publisher(UnlimitedControl):
    """A control that publishes groups and counts the bytes charged."""

    def __init__(self, host: LogHost, job: CleanJob, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.read = self.written = 0
        self._host, self._job, self._loop = host, job, loop

    def read_bytes(self, count: int) -> None:
        self.read += count

    def write_bytes(self, count: int) -> None:
        self.written += count

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        publication = self._host.publish(self._job, groups)
        asyncio.run_coroutine_threadsafe(publication, self._loop).result()


class KafkaLog:
    """A folder of segments that Kafka's cleaner cleans in place at its dirty ratio."""

    def __init__(
        self, directory: str, cleaner: KafkaCleaner, segment_bytes: int, ratio: float
    ) -> None:
        self.figures = Figures()
        self._folder = os.path.join(directory, "bench-0")
        os.mkdir(self._folder)
        self._cleaner = cleaner
        self._segment_bytes = segment_bytes
        self._ratio = ratio
        self._end = self._dirty = 0
        self._active = bytearray()
        self._active_base = 0

    def append(self, batch: bytes) -> bool:
        """Append a batch; return whether it closed a segment."""
        is_closed = len(self._active) + len(batch) > self._segment_bytes
        if is_closed:
            self._close_segment()
        self._active += self._end.to_bytes(8, "big") + batch[8:]
        self._end += read_header(batch).record_count
        self.figures.ingested += len(batch)
        return is_closed

    def _close_segment(self) -> None:
        name = filenames.file_name(self._active_base, filenames.LOG)
        with open(os.path.join(self._folder, name), "wb") as file:
            file.write(self._active)
        self._active.clear()
        self._active_base = self._end

    def _create_active(self) -> None:
        """Create an empty segment: the cleaner stops at the active one."""
        path = os.path.join(self._folder, filenames.file_name(self._active_base, filenames.LOG))
        Path(path).touch()

    def _sizes(self) -> dict[int, int]:
        return {
            int(name[:20]): os.path.getsize(os.path.join(self._folder, name))
            for name in os.listdir(self._folder)
            if name.endswith(filenames.LOG)
        }

    def closed_bytes(self) -> int:
        """Return the size of the closed segments."""
        return sum(self._sizes().values())

    def index_bytes(self) -> int:
        """Return 0: Kafka has no key indexes."""
        return 0

    async def clean(self, *, run_now: bool = False) -> None:
        """Clean the log if its dirty ratio is exceeded."""
        if run_now and self._active:
            self._close_segment()
        sizes = self._sizes()
        dirty = sum(size for base, size in sizes.items() if base >= self._dirty)
        if not run_now and dirty <= self._ratio * sum(sizes.values()):
            return
        self._create_active()
        work = partial(self._cleaner.clean_from, self._folder, self._dirty)
        read, written = await asyncio.to_thread(work)
        self._dirty = self._active_base
        self.figures.count(read + dirty, written)

    def close(self) -> None:
        """Do nothing: Kafka closed its files."""


def batches(keys: np.ndarray, args: argparse.Namespace, deletes: float = 0.0) -> Iterator[bytes]:
    """Yield batches with these keys, and without values for the share `deletes` of the records."""
    rng = np.random.default_rng(args.seed)
    template = Template(BATCH_BYTES // (args.payload_bytes + 10), args.payload_bytes, rng)
    for first in range(0, len(keys) - template.count + 1, template.count):
        batch = one_batch(template, keys[first : first + template.count], 0, 0)
        yield _with_deletes(batch, deletes, rng) if deletes else batch


def _with_deletes(batch: bytes, share: float, rng: np.random.Generator) -> bytes:
    """Return the batch with this share of its records without their values."""
    records = [
        record._replace(value=None) if rng.random() < share else record
        for record in decode_records(batch, read_header(batch))
    ]
    return bytes(build_batch(records))


async def measure(
    way: str, workload: str, cleaner: KafkaCleaner | None, args: argparse.Namespace
) -> Figures:
    """Run a workload with one cleaner."""
    directory = tempfile.mkdtemp(prefix="varve-bench-", dir=args.directory)
    config = TopicConfig(
        cleanup_policy=("compact",),
        segment_bytes=args.segment_bytes,
        file_delete_delay_ms=0,
        retention_ms=-1,
        min_cleanable_dirty_ratio=args.ratio if way == "generational" else args.whole_ratio,
        varve_cleaner_strategy="default" if way == "kafka" else way,
        varve_compaction_slack=args.slack,
    )
    log: VarveLog | KafkaLog
    if way == "kafka":
        assert cleaner is not None
        log = KafkaLog(directory, cleaner, args.segment_bytes, args.whole_ratio)
    else:
        log = VarveLog(directory, config)
    try:
        keys = draw_keys(workload, args)
        for batch in batches(keys[: args.keys], args):
            log.append(batch)
        await log.clean(run_now=True)
        live_bytes = log.closed_bytes()
        log.figures = Figures()  # without the first clean
        for batch in batches(keys[args.keys :], args, args.deletes):
            if log.append(batch):
                log.figures.peak = max(log.figures.peak, log.closed_bytes() / live_bytes)
                _sample(log, live_bytes)
                await log.clean()
                _sample(log, live_bytes)
        return log.figures
    finally:
        log.close()
        shutil.rmtree(directory, ignore_errors=True)


def _sample(log: VarveLog | KafkaLog, live_bytes: int) -> None:
    figures, disk_bytes = log.figures, log.closed_bytes() + log.index_bytes()
    figures.disk.append((figures.ingested / live_bytes, disk_bytes / live_bytes))


async def measure_all(
    cleaner: KafkaCleaner | None, args: argparse.Namespace
) -> list[tuple[str, str, Figures]]:
    """Run all workloads with all cleaners."""
    ways = ["dirty-ratio", "generational"]
    results = []
    for workload in args.workload or WORKLOADS:
        for way in ways if cleaner is None else ["kafka", *ways]:
            figures = await measure(way, workload, cleaner, args)
            results.append((workload, way, figures))
            row = {**asdict(figures), "disk": max(size for _, size in figures.disk)}
            print(json.dumps({"workload": workload, "cleaner": way, **row}), flush=True)
    await asyncio.sleep(RELEASE_SECONDS)  # timers of the last publication
    return results


def draw(results: list[tuple[str, str, Figures]], out: Path) -> None:
    """Draw the disk use of all cleaners, a panel for each workload."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "varve"  # the same file from the same figures
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(workload for workload, _, _ in results))
    rows = (len(workloads) + 1) // 2
    figure, panels = pyplot.subplots(rows, 2, figsize=(8, 2.6 * rows), squeeze=False)
    for axes, workload in zip(panels.flat, workloads, strict=False):
        for name, way, figures in results:
            if name == workload:
                ingested, disk = zip(*figures.disk, strict=True)
                width = 2.6 if way == "kafka" else 1.2  # dirty-ratio covers it
                axes.plot(ingested, disk, color=COLOURS[way], linewidth=width, label=way)
        axes.set_title(workload, loc="left", color="#5b6068", fontsize=10)
        axes.set_ylim(0, None)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in panels.flat[len(workloads) :]:
        axes.set_visible(False)
    panels[0][0].legend(loc="lower right", frameon=False, fontsize=8)
    figure.supxlabel("bytes written by clients, of the live bytes at first", fontsize=9)
    figure.supylabel("bytes on disk, of the live bytes at first", fontsize=9)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=48_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--payload-bytes", type=int, default=1024)
    parser.add_argument("--segment-bytes", type=int, default=2 << 20)
    parser.add_argument("--ratio", type=float, default=0.337, help="of generational")
    parser.add_argument("--whole-ratio", type=float, default=1 / 3, help="of the others")
    parser.add_argument("--slack", type=float, default=0.5, help="of generational, at most")
    parser.add_argument("--deletes", type=float, default=0.0, help="share of the later records")
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the disk use as SVG")
    args = parser.parse_args()
    warm_up()
    with kafka_cleaner(args.segment_bytes) as cleaner:
        results = asyncio.run(measure_all(cleaner, args))
    if args.plot is not None:
        draw(results, args.plot)
    rows = []
    for workload, way, figures in results:
        shares = (figures.read, figures.written, figures.scratch, figures.read + figures.written)
        per_byte = [f"{share / figures.ingested:.2f}" for share in shares]
        largest = f"{figures.largest_write / 1e6:.1f}"
        cells = [f"{figures.peak:.2f}", largest, str(figures.cleans)]
        rows.append([f"{workload}, {way}", *per_byte, *cells])
    head = ["workload, cleaner", "read", "written", "scratch", "both", "peak", "job MB", "cleans"]
    print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
