"""What a clean costs whose keys do not fit into the map: bytes read and written per ingested byte.

    python -m bench.cleaner.key_sets [--keys N] [--payload-bytes N] [--codec lz4] [--factor 10]

A log of `--keys` keys gets as many uniformly drawn updates per round as it has keys, and is cleaned
after each round (dirty ratio 0.5), by one worker's engine with:

- a map for all keys, in two passes and, where it is possible, in one;
- a map for one key in `--factor`, with a scratch file for the others;
- the same map without a scratch file: cleans follow each other until the log is clean.

Bytes are those that the engine charges to its budgets; the scratch file counts. All ways have to
leave the same bytes.
"""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.cleaner.clean_job import CODECS, TIME_MS, Template, one_batch
from bench.report import markdown_table
from cleaner.engine.clean import run_clean
from cleaner.engine.kernels import warm_up
from cleaner.engine.key_map.map_size import SLOT_BYTES
from cleaner.job import CleanJob, SourceSegment, UnlimitedControl
from storage.env import RealEnv
from storage.format import filenames
from storage.model import TopicPartition

HASH_KEY = bytes(range(16))
GROUP_BYTES = 256 << 20
SPILL_BYTES_MAX = 64 << 30


class Counting(UnlimitedControl):
    """A control that counts the bytes charged."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0

    def read_bytes(self, count: int) -> None:
        self.read += count

    def write_bytes(self, count: int) -> None:
        self.written += count


@dataclass(frozen=True)
class Way:
    """One way to clean the log."""

    name: str
    map_bytes: int
    spill_bytes_max: int = 0
    one_pass: bool = False


class CleanedLog:
    """The closed segments of a partition, appended to and cleaned in turns."""

    def __init__(self, directory: str, template: Template, args: argparse.Namespace) -> None:
        self.directory = directory
        self._template = template
        self._args = args
        self._segments: list[SourceSegment] = []
        self._end = self._dirty = 0
        self._runs = 0
        self.ingested = self.read = self.written = self.spilled = self.cleans = 0
        self.seconds = self.cpu_seconds = 0.0

    def append(self, keys: np.ndarray) -> None:
        """Write records with these keys, in segments of their own."""
        count, done = self._template.count, 0
        while done + count <= len(keys):
            base = self._end
            name = filenames.file_name(base, filenames.LOG)
            with open(os.path.join(self.directory, name), "wb") as file:
                while file.tell() < self._args.segment_bytes and done + count <= len(keys):
                    chosen = keys[done : done + count]
                    file.write(one_batch(self._template, chosen, self._end, self._codec))
                    done += count
                    self._end += count
                size_bytes = file.tell()
            self._segments.append(SourceSegment(base, self._end, size_bytes, TIME_MS, TIME_MS))
            self.ingested += size_bytes

    @property
    def _codec(self) -> int:
        return CODECS[self._args.codec]

    def clean(self, way: Way) -> None:
        """Clean until nothing is dirty."""
        while self._dirty < self._end:
            control = Counting()
            self._runs += 1
            job = self.job(way)
            started, cpu = time.perf_counter(), time.process_time()
            report = run_clean(RealEnv(), job, control, one_pass=way.one_pass)
            self.seconds += time.perf_counter() - started
            self.cpu_seconds += time.process_time() - cpu
            self._publish(control)
            self._dirty = report.next_dirty_offset
            assert not report.spill_refusal, report.spill_refusal
            self.read += control.read
            self.written += control.written
            self.spilled += report.spilled_bytes
            self.cleans += 1

    def job(self, way: Way) -> CleanJob:
        """Return a job for the whole log."""
        groups: list[list[SourceSegment]] = []
        for source in self._segments:
            if groups and sum(s.size_bytes for s in (*groups[-1], source)) <= GROUP_BYTES:
                groups[-1].append(source)
            else:
                groups.append([source])
        return CleanJob(
            partition=TopicPartition("bench", 0), directory=self.directory, generation="g",
            job_id=f"bench-{self._runs}", groups=tuple(map(tuple, groups)),
            first_dirty_offset=self._dirty, end_offset=self._end, log_start_offset=0,
            log_end_offset_is_end=True, now_ms=TIME_MS, delete_retention_ms=86_400_000,
            drop_expired_tombstones=True, hash_key=HASH_KEY, dedupe_buffer_bytes=way.map_bytes,
            read_buffer_bytes=4 << 20, decompressed_batch_bytes=64 << 20,
            max_message_bytes=1 << 20, index_interval_bytes=4096, segment_bytes=1 << 30,
            compression_levels=(), spill_bytes_max=way.spill_bytes_max,
        )  # fmt: skip

    def _publish(self, control: Counting) -> None:
        for group in control.groups:
            sources = [s for s in self._segments if s.base_offset in group.source_base_offsets]
            at = self._segments.index(sources[0])
            for source in sources:
                name = filenames.file_name(source.base_offset, filenames.LOG)
                os.unlink(os.path.join(self.directory, name))
                self._segments.remove(source)
            if group.output is None:
                continue
            for file in group.output.files:
                path = os.path.join(self.directory, file.name)
                parsed = filenames.parse_file_name(file.name)
                assert parsed is not None
                if parsed.kind == filenames.LOG:
                    name = filenames.file_name(parsed.base_offset, filenames.LOG)
                    os.rename(path, os.path.join(self.directory, name))
                else:
                    os.unlink(path)
            merged = SourceSegment(
                sources[0].base_offset, sources[-1].next_base_offset, group.bytes_after,
                TIME_MS, TIME_MS,
            )  # fmt: skip
            self._segments.insert(at, merged)

    def digest(self) -> str:
        """Return a digest of all segments."""
        digest = hashlib.sha256()
        for source in self._segments:
            name = filenames.file_name(source.base_offset, filenames.LOG)
            digest.update(Path(self.directory, name).read_bytes())
        return digest.hexdigest()


def measure(way: Way, args: argparse.Namespace) -> tuple[CleanedLog, str]:
    """Run all rounds in one way."""
    rng = np.random.default_rng(args.seed)
    per_batch = max(1, args.batch_bytes // (args.payload_bytes + 10))
    template = Template(per_batch, args.payload_bytes, rng)
    directory = tempfile.mkdtemp(prefix="varve-bench-", dir=args.directory)
    try:
        log = CleanedLog(directory, template, args)
        log.append(rng.permutation(args.keys))
        for _ in range(args.rounds):
            log.clean(way)
            log.append(rng.integers(0, args.keys, args.keys))
        log.clean(way)
        return log, log.digest()
    finally:
        shutil.rmtree(directory)


def main() -> None:
    """Measure all ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=500_000)
    parser.add_argument("--factor", type=int, default=10, help="keys per key of the small map")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--payload-bytes", type=int, default=1024)
    parser.add_argument("--batch-bytes", type=int, default=16_384)
    parser.add_argument("--segment-bytes", type=int, default=64 << 20)
    parser.add_argument("--codec", choices=sorted(CODECS), default="none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default=None, help="of the log, instead of a new one")
    parser.add_argument("--json", default="", help="file for the figures")
    args = parser.parse_args()
    warm_up()
    small = args.keys // args.factor * SLOT_BYTES * 10 // 9
    large = args.keys * 4 * SLOT_BYTES
    ways = [
        Way("all keys fit, two passes", large),
        Way("all keys fit, one pass", large, one_pass=True),
        Way(f"{args.factor} times the map, scratch file", small, SPILL_BYTES_MAX),
        Way(f"{args.factor} times the map, no scratch file", small),
    ]
    rows, digests = [], []
    for way in ways:
        log, digest = measure(way, args)
        digests.append(digest)
        per_byte = (log.read + log.written) / log.ingested
        rows.append(
            {
                "way": way.name, "cleans": log.cleans, "read": log.read / log.ingested,
                "written": log.written / log.ingested, "spilled": log.spilled / log.ingested,
                "total": per_byte, "seconds": log.seconds, "cpu_seconds": log.cpu_seconds,
            }
        )  # fmt: skip
    for row in rows:
        row["factor"] = float(row["total"]) / float(rows[0]["total"])
    names = [name for name in rows[0] if name != "way"]
    table = [[str(row["way"]), *(f"{row[name]:.2f}" for name in names)] for row in rows]
    print(markdown_table(["way", *names], table))
    load = os.getloadavg()[0]
    print(f"load average {load:.1f}, {args.keys} keys, {args.payload_bytes} B, {args.codec}")
    print(f"the same bytes in all ways: {len(set(digests)) == 1}")
    if args.json:
        figures = {"rows": rows, "load": load, "options": vars(args)}
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
