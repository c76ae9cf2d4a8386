"""One large partition, cleaned by one worker or by several: seconds through the pool.

    python -m bench.cleaner.shared_clean [--records N] [--payload-bytes N] [--codec lz4]

Every key is written `--overwrites` times in random order. With `--again`, that log is cleaned
first, and the clean after as many records again is measured. The dirty section has more offsets
than the map has room for, so that one worker needs two passes. One worker and several clean the
same log in turns; figures are medians. `cpu` is the processor time of all workers together,
`busiest` that of the worker that used most: on idle cores, the clean takes about that long.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.cleaner.clean_job import CODECS, Template, one_batch
from bench.report import markdown_table
from broker.logging import configure
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.env import RealEnv
from storage.format.batch import read_header
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.cleaner.scheduler.log_host import LogHost

BATCH_BYTES = 16_384
CLEAN_SECONDS_MAX = 600.0
PARTITION = TopicPartition("bench", 0)


def batches(args: argparse.Namespace, seed: int) -> Iterator[bytes]:
    """Yield batches of the log."""
    rng = np.random.default_rng(seed)
    per_batch = max(1, BATCH_BYTES // (args.payload_bytes + 10))
    template = Template(per_batch, args.payload_bytes, rng)
    keys = rng.permutation(args.records) % max(1, args.records // args.overwrites)
    for first in range(0, args.records - template.count + 1, template.count):
        yield one_batch(template, keys[first : first + template.count], 0, CODECS[args.codec])


async def clean_once(workers: int, args: argparse.Namespace) -> dict[str, float]:
    """Write the log and clean it; return the figures."""
    folder = tempfile.mkdtemp(prefix="varve-bench-", dir=args.directory)
    config = TopicConfig(
        cleanup_policy=("compact",), segment_bytes=args.segment_bytes, file_delete_delay_ms=0
    )
    settings = CleanerSettings(
        workers=workers, dedupe_buffer_bytes=args.dedupe_bytes, nice=0, backoff_ms=200
    )
    env = RealEnv()
    manager = LogManager(env, [folder])
    manager.open(lambda _: config)
    host = LogHost(env, manager)
    pool = CleanerPool(host, settings, env)
    await pool.start()
    try:
        log = manager.create(PARTITION, os.urandom(16), config)
        while sum(worker.ready for worker in pool.status().workers) < workers:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        pids = [worker.pid for worker in pool.status().workers]
        assert len(pids) == workers
        for seed in range(args.seed, args.seed + 1 + args.again):
            async with pool.control.paused(PARTITION):
                for batch in batches(args, seed):
                    log.append(bytearray(batch), read_header(batch), now_ms=env.wall_ms())
                log.roll(env.wall_ms())
                size_bytes = log.segments.size_bytes
                await asyncio.to_thread(os.sync)
                host.done.clear()
                cpu = [_cpu_seconds(pid) for pid in pids]
                started = time.perf_counter()
            async with asyncio.timeout(CLEAN_SECONDS_MAX):
                await pool.wait_cleaned(PARTITION, log.log_end_offset)
            seconds = time.perf_counter() - started
        used = [_cpu_seconds(pid) - before for pid, before in zip(pids, cpu, strict=True)]
        assert not host.failures, host.failures
        (job, report), *others = host.done
        assert not others
        assert report.next_dirty_offset == job.end_offset
        return {
            "seconds": seconds, "cpu": sum(used), "busiest": max(used),
            "MB": size_bytes / 1e6, "records": report.records_after, "keys": report.keys_indexed,
            "scratch MB": report.spilled_bytes / 1e6, "index s": report.map_seconds,
        }  # fmt: skip
    finally:
        await pool.stop()
        manager.close()
        shutil.rmtree(folder)


def _cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=3_000_000)
    parser.add_argument("--payload-bytes", type=int, default=1024)
    parser.add_argument("--codec", choices=sorted(CODECS), default="none")
    parser.add_argument("--overwrites", type=int, default=10)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dedupe-bytes", type=int, default=32 << 20)
    parser.add_argument("--segment-bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default=None)
    args = parser.parse_args()
    configure()
    figures: dict[int, list[dict[str, float]]] = {1: [], args.workers: []}
    for _ in range(args.rounds):
        for workers, rounds in figures.items():
            rounds.append(asyncio.run(clean_once(workers, args)))
            row = {name: round(value, 2) for name, value in rounds[-1].items()}
            print(workers, row, f"load {os.getloadavg()[0]:.1f}", flush=True)
    names = list(figures[1][0])
    medians = {
        workers: {name: statistics.median(row[name] for row in rounds) for name in names}
        for workers, rounds in figures.items()
    }
    rows = [
        [str(workers), *(f"{row[name]:.2f}" for name in names)] for workers, row in medians.items()
    ]
    print(markdown_table(["workers", *names], rows))
    one, many = medians[1], medians[args.workers]
    print(f"{args.payload_bytes} B, {args.codec}; load average {os.getloadavg()[0]:.1f}")
    print(f"seconds of one / several workers: {one['seconds'] / many['seconds']:.2f}")
    print(f"processor time of one / busiest of several: {one['cpu'] / many['busiest']:.2f}")


if __name__ == "__main__":
    main()
