"""How fast are the stages? Generated partitions on two processes, files in the page cache.

    python -m bench.pipeline.stages [--records N] [--partitions N] [--processes N] [--rounds N]

The log is that of clean_job.py. Each round cleans the partitions with the cleaner alone in this
process, then on a pool of processes: as whole tasks, and cut up into shards; then indexes them as
for a table. Outputs are synced. Processes are started, and kernels loaded, before the first round.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

from bench.cleaner.clean_job import generate
from cleaner.engine.clean import run_clean
from cleaner.engine.kernels import warm_up
from cleaner.job import CleanJob, SourceSegment, UnlimitedControl
from pipeline.compaction.cleaning import clean_partitions
from pipeline.compaction.indexing import index_partitions
from pipeline.engines.engine import LocalEngine
from pipeline.stages.planning import Limits
from storage.env import RealEnv
from storage.model import TopicPartition


def make_job(directory: str, sources: tuple[SourceSegment, ...], partition: int) -> CleanJob:
    end = sources[-1].next_base_offset
    return CleanJob(
        partition=TopicPartition("bench", partition), directory=directory, generation="g",
        job_id="bench", groups=tuple(sources[i : i + 4] for i in range(0, len(sources), 4)),
        first_dirty_offset=0, end_offset=end, log_start_offset=0, log_end_offset_is_end=False,
        now_ms=1_800_000_000_000, delete_retention_ms=86_400_000, drop_expired_tombstones=True,
        hash_key=bytes(range(16)), dedupe_buffer_bytes=1 << 30, read_buffer_bytes=1 << 20,
        decompressed_batch_bytes=64 << 20, max_message_bytes=1 << 20, index_interval_bytes=4096,
        segment_bytes=1 << 30, compression_levels=(),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_250_000, help="in each partition")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--payload-bytes", type=int, default=90)
    parser.add_argument("--batch-bytes", type=int, default=16_384)
    parser.add_argument("--segment-bytes", type=int, default=64 << 20)
    parser.add_argument("--codec", default="none")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="varve-bench-")
    try:
        measure(directory, args)
    finally:
        shutil.rmtree(directory)


def measure(directory: str, args: argparse.Namespace) -> None:
    jobs = []
    for partition in range(args.partitions):
        path = f"{directory}/{partition}/in"
        os.makedirs(path)
        jobs.append(make_job(path, generate(path, args), partition))
    records = sum(job.end_offset for job in jobs)
    size = sum(source.size_bytes for job in jobs for group in job.groups for source in group)
    warm_up()
    whole = Limits(parallelism=args.processes)
    cut = replace(whole, shards=args.shards, task_bytes=128 << 20)
    with LocalEngine(args.processes, nice=0) as engine:

        def source_for(job: CleanJob) -> dict[str, str]:
            return {"kind": "disk"}

        def alone() -> object:
            return [run_clean(RealEnv(), with_output(job), UnlimitedControl()) for job in jobs]

        ways: dict[str, Callable[[], object]] = {
            "cleaner, one process": alone,
            "whole": lambda: clean_partitions(engine, jobs, source_for, whole),
            f"{args.shards} shards": lambda: clean_partitions(engine, jobs, source_for, cut),
            "index": lambda: index_partitions(engine, jobs, source_for, whole),
            f"index, {args.shards} shards": lambda: index_partitions(engine, jobs, source_for, cut),
        }
        for number in range(args.rounds + 1):
            for name, way in ways.items():
                started = time.perf_counter()
                way()
                seconds = time.perf_counter() - started
                if number:
                    print(
                        f"{name:22} {seconds:6.2f} s {records / seconds / 1e6:6.2f} M records/s"
                        f" {size / seconds / 1e6:7.0f} MB/s"
                    )
                for job in jobs:
                    shutil.rmtree(f"{os.path.dirname(job.directory)}/out", ignore_errors=True)


def with_output(job: CleanJob) -> CleanJob:
    """The job, with a folder for its outputs."""
    path = f"{os.path.dirname(job.directory)}/out/alone"
    os.makedirs(path)
    return replace(job, output_directory=path)


if __name__ == "__main__":
    main()
