"""How fast is a whole clean through a real worker, from the plan to the last publication?

    python -m bench.cleaner.clean_worker [--records 5000000] [--rounds 7] [...]

A log of records of 100 bytes (16 of them the key, every key written ten times in random order) is
appended while cleaning is paused. The clock starts when it is resumed: the pool scans, plans and
sends the job; the worker process indexes, rewrites and syncs; each group is published by journal,
as the broker does it. It stops when everything is clean. Default settings, files in the page
cache; the first round starts the worker and is not counted.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from bench.cleaner.clean_job import CODECS, OVERWRITES, Template, one_batch
from bench.report import markdown_table
from broker.logging import configure
from cleaner.job import CleanReport
from cleaner.scheduler.cleaner_pool import CleanerPool
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.env import RealEnv
from storage.format.batch import read_header
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from tests.support.cleaner.scheduler.log_host import LogHost

PAYLOAD_BYTES = 100  # key and value of a record; the fields around them are 10 more
CLEAN_SECONDS_MAX = 300.0
CONFIG = TopicConfig(cleanup_policy=("compact",), segment_bytes=64 << 20)


def make_batches(arguments: argparse.Namespace) -> Iterator[bytes]:
    """The batches of one log; the offsets in them are stamped when they are appended."""
    rng = np.random.default_rng(arguments.seed)
    count = max(1, arguments.batch_bytes // (PAYLOAD_BYTES + 10))
    template = Template(count, PAYLOAD_BYTES, rng)
    keys = rng.permutation(arguments.records) % max(1, arguments.records // OVERWRITES)
    for first in range(0, arguments.records - template.count + 1, template.count):
        chosen = keys[first : first + template.count]
        yield one_batch(template, chosen, 0, CODECS[arguments.codec])


class Bench:
    """One data directory, one pool with its worker, a new partition in each round."""

    def __init__(self, directory: str, settings: CleanerSettings) -> None:
        self._env = RealEnv()
        self._manager = LogManager(self._env, [directory])
        self._manager.open(lambda _: CONFIG)
        self._host = LogHost(self._env, self._manager)
        self.pool = CleanerPool(self._host, settings, self._env)

    async def clean(self, number: int, batches: list[bytes]) -> tuple[float, list[CleanReport]]:
        """Seconds of one whole clean, and what the worker said of its job or jobs."""
        partition = TopicPartition("bench", number)
        self._host.done.clear()
        async with self.pool.control.paused(partition):
            log = self._manager.create(partition, os.urandom(16), CONFIG)
            for batch in batches:
                log.append(bytearray(batch), read_header(batch), now_ms=self._env.wall_ms())
            log.roll(self._env.wall_ms())
            log.flush()
            await asyncio.to_thread(os.sync)  # what was just written is not the clean's to pay
            started = time.perf_counter()
        async with asyncio.timeout(CLEAN_SECONDS_MAX):
            await self.pool.wait_cleaned(partition, log.log_end_offset)
        elapsed = time.perf_counter() - started
        assert not self._host.failures, self._host.failures
        reports = [report for _, report in self._host.done]
        async with self.pool.control.paused(partition):
            self._manager.delete_all([partition])
        return elapsed, reports

    def close(self) -> None:
        self._manager.close()


async def measure(directory: str, arguments: argparse.Namespace) -> None:
    bench = Bench(directory, CleanerSettings(workers=1, nice=arguments.nice))
    batches = list(make_batches(arguments))
    rates, inside = [], []
    await bench.pool.start()
    try:
        for number in range(arguments.rounds + 1):
            seconds, reports = await bench.clean(number, batches)
            records = sum(report.records_before for report in reports)
            worker = sum(report.map_seconds + report.rewrite_seconds for report in reports)
            retained = sum(report.records_after for report in reports)
            text = f"{records / seconds / 1e6:6.2f} M records/s, {seconds:.3f} s of which "
            text += f"{worker:.3f} s in the worker's passes, {retained} of {records} kept"
            print(f"round {number} {text}" if number else f"warm-up {text}", flush=True)
            if number:
                rates.append(records / seconds / 1e6)
                inside.append(records / worker / 1e6)
    finally:
        await bench.pool.stop()
        bench.close()
    row = [f"{arguments.codec}, {arguments.batch_bytes} B batches"]
    row += [f"{statistics.median(rates):.1f}", f"{statistics.median(inside):.1f}"]
    print(markdown_table(["M records/s", "plan to publication", "the worker's passes"], [row]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--batch-bytes", type=int, default=16_384)
    parser.add_argument("--codec", choices=sorted(CODECS), default="none")
    parser.add_argument("--nice", type=int, default=CleanerSettings().nice)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    configure("warning")
    directory = tempfile.mkdtemp(prefix="varve-bench-")
    try:
        asyncio.run(measure(directory, arguments))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
