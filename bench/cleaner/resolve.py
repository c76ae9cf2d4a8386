"""How fast a worker finds the live records of a log from its key indexes.

    python -m bench.cleaner.resolve [--records N] [--keys N] [--rounds N]

The rows of all key indexes are merged: in one shard, with a dedupe buffer for all rows, and in
shards, with one for a sixteenth of the keys. The indexes are written before the measurement and
are in the page cache. Figures are the medians of millions of rows for each second of processor
time, with all reading and checking of the indexes.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace

import numpy as np

from bench.cleaner.clean_job import Template
from bench.cleaner.key_sets import SPILL_BYTES_MAX, CleanedLog, Way
from bench.report import markdown_table
from cleaner.engine.kernels import warm_up
from cleaner.engine.key_map.map_size import SLOT_BYTES
from cleaner.engine.selective.resolve import Resolution
from cleaner.engine.spilled.scratch import Scratch
from cleaner.job import UnlimitedControl
from storage.env import RealEnv

PAYLOAD_BYTES = 40  # of a record: only its row matters
LARGE_BUFFER_BYTES = 1 << 30


def resolve(
    log: CleanedLog, dedupe_buffer_bytes: int, *, has_indexes: bool = True
) -> tuple[int, float]:
    """Return the rows of all key indexes, and the seconds of processor time to resolve them."""
    way = Way("resolve", dedupe_buffer_bytes, SPILL_BYTES_MAX)
    job = log.job(way)
    groups = tuple(tuple(replace(s, content_id=s.next_base_offset) for s in g) for g in job.groups)
    job = replace(job, groups=groups, slack=0.5)
    scratch = Scratch(RealEnv(), job, UnlimitedControl())
    resolution = Resolution(RealEnv(), job, UnlimitedControl(), scratch)
    started = time.process_time()
    resolution.run()
    seconds = time.process_time() - started
    scratch.close()
    if has_indexes:
        assert resolution.bytes_read == 0, "segments are read, not their indexes"
    return sum(resolution.records(s) for group in job.groups for s in group), seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--keys", type=int, default=2_500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--segment-bytes", type=int, default=16 << 20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default=None, help="of the log, instead of a new one")
    args = parser.parse_args()
    args.codec = "none"
    warm_up()
    rng = np.random.default_rng(args.seed)
    directory = tempfile.mkdtemp(prefix="varve-bench-", dir=args.directory)
    try:
        log = CleanedLog(directory, Template(200, PAYLOAD_BYTES, rng), args)
        log.append(rng.integers(0, args.keys, args.records))
        resolve(log, LARGE_BUFFER_BYTES, has_indexes=False)  # writes them
        table = []
        for name, buffer in (
            ("one shard", LARGE_BUFFER_BYTES),
            ("sixteen shards", args.keys // 16 * SLOT_BYTES),
        ):
            rounds = [resolve(log, buffer) for _ in range(args.rounds)]
            speed = statistics.median(rows / seconds / 1e6 for rows, seconds in rounds)
            table.append([name, f"{rounds[0][0]:,}", f"{speed:.1f}"])
        print(markdown_table(["key indexes merged in", "rows", "M rows/s"], table))
        print(f"load average {os.getloadavg()[0]:.1f}")
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
