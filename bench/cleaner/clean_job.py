"""How fast is one clean? Generated segments, one core, files in the page cache.

    python -m bench.cleaner.clean_job [--records N] [--batch-bytes N] [--codec zstd] ...

Records have a 16-byte key and a value that make 100 bytes (--payload-bytes); every key is written
ten times, in random order. A clean is what the cleaner does: read, verify, index the keys, read
again, filter, checksum, write, index, sync. Prints records and bytes of the log per second, one
line per round; the kernels are compiled before.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from typing import Any

import numpy as np

from cleaner.engine.clean import run_clean
from cleaner.engine.kernels import warm_up
from cleaner.job import CleanJob, CleanReport, SourceSegment, UnlimitedControl
from storage.env import RealEnv
from storage.format import filenames
from storage.format.batch import HEADER_BYTES, Record, build_batch, crc_of
from storage.format.compression import compress
from storage.format.index import OffsetIndex
from storage.model import TopicPartition

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
KEY_BYTES = 16

OVERWRITES = 10
TIME_MS = 1_700_000_000_000


class Template:
    """One batch of `count` records as bytes, and where each key stands in it."""

    def __init__(self, count: int, payload_bytes: int, rng: np.random.Generator) -> None:
        value_bytes = payload_bytes - KEY_BYTES
        # Values that compress to about half, as records of services do.
        words = rng.integers(97, 113, size=(count, value_bytes), dtype=np.uint8)
        words[:, : value_bytes // 3] = 32
        records = [
            Record(i, TIME_MS + i, b"\1" * KEY_BYTES, words[i].tobytes()) for i in range(count)
        ]
        whole = bytes(build_batch(records))
        self.count = count
        self.bytes = np.frombuffer(whole, dtype=np.uint8)
        marks = np.flatnonzero(
            np.convolve(self.bytes == 1, np.ones(KEY_BYTES), "valid") == KEY_BYTES
        )
        assert len(marks) == count
        self.key_positions = marks[:, None] + np.arange(KEY_BYTES)


def key_bytes(keys: np.ndarray) -> np.ndarray:
    digits = np.empty((len(keys), KEY_BYTES), dtype=np.uint8)
    digits[:, :4] = np.frombuffer(b"key-", dtype=np.uint8)
    remaining = keys.copy()
    for column in range(KEY_BYTES - 1, 3, -1):
        digits[:, column] = 48 + remaining % 10
        remaining //= 10
    return digits


def generate(directory: str, args: argparse.Namespace) -> tuple[SourceSegment, ...]:
    rng = np.random.default_rng(args.seed)
    template = Template(
        max(1, args.batch_bytes // (args.payload_bytes + 10)), args.payload_bytes, rng
    )
    keys = rng.permutation(args.records) % max(1, args.records // OVERWRITES)
    sources: list[SourceSegment] = []
    offset = 0
    while offset + template.count <= args.records:
        base = offset
        index = OffsetIndex()
        with open(os.path.join(directory, filenames.file_name(base, filenames.LOG)), "wb") as file:
            while file.tell() < args.segment_bytes and offset + template.count <= args.records:
                chosen = keys[offset : offset + template.count]
                index.append(offset + template.count - 1 - base, file.tell())
                file.write(one_batch(template, chosen, offset, CODECS[args.codec]))
                offset += template.count
            with open(
                os.path.join(directory, filenames.file_name(base, filenames.INDEX)), "wb"
            ) as file_of_index:
                file_of_index.write(index.to_bytes())
            sources.append(SourceSegment(base, offset, file.tell(), TIME_MS, TIME_MS))
    return tuple(sources)


def one_batch(template: Template, keys: np.ndarray, offset: int, codec: int) -> bytes:
    batch = template.bytes.copy()
    batch[template.key_positions] = key_bytes(keys)
    out = bytearray(batch.tobytes())
    if codec:
        packed = compress(codec, bytes(out[HEADER_BYTES:]))
        del out[HEADER_BYTES:]
        out += packed
        out[22] |= codec
    out[0:8] = offset.to_bytes(8, "big")
    out[8:12] = (len(out) - 12).to_bytes(4, "big")
    out[17:21] = crc_of(out, 0, len(out)).to_bytes(4, "big")
    return bytes(out)


def clean(directory: str, sources: tuple[SourceSegment, ...], args: argparse.Namespace) -> Any:
    end = sources[-1].next_base_offset
    groups = tuple(sources[i : i + 4] for i in range(0, len(sources), 4))
    job = CleanJob(
        partition=TopicPartition("bench", 0), directory=directory, generation="g", job_id="bench",
        groups=groups, first_dirty_offset=int(end * args.clean_share) if args.clean_share else 0,
        end_offset=end, log_start_offset=0,
        log_end_offset_is_end=True, now_ms=TIME_MS, delete_retention_ms=86_400_000,
        drop_expired_tombstones=True, hash_key=os.urandom(16),
        dedupe_buffer_bytes=args.dedupe_bytes, read_buffer_bytes=args.read_buffer,
        decompressed_batch_bytes=64 << 20, max_message_bytes=1 << 20, index_interval_bytes=4096,
        segment_bytes=1 << 30, compression_levels=(),
    )  # fmt: skip
    control = UnlimitedControl()
    started = time.perf_counter()
    cpu = time.process_time()
    report = run_clean(RealEnv(), job, control, one_pass=not args.two_passes)
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    for group in control.groups:
        for written in group.output.files if group.output else ():
            os.unlink(os.path.join(directory, written.name))
    return report, took, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=5_000_000)
    parser.add_argument("--batch-bytes", type=int, default=16_384)
    parser.add_argument("--payload-bytes", type=int, default=100, help="of a record: key and value")
    parser.add_argument("--segment-bytes", type=int, default=64 << 20)
    parser.add_argument("--codec", choices=sorted(CODECS), default="none")
    parser.add_argument("--read-buffer", type=int, default=1 << 20)
    parser.add_argument("--dedupe-bytes", type=int, default=128 << 20)
    parser.add_argument("--clean-share", type=float, default=0.0, help="share not to be indexed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--two-passes", action="store_true", help="even where one would do")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    started = time.perf_counter()
    warm_up()
    print(f"kernels ready in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    directory = tempfile.mkdtemp(prefix="varve-bench-")
    try:
        sources = generate(directory, args)
        for _ in range(args.rounds):
            report, took, cpu = clean(directory, sources, args)
            show(report, took, cpu, args)
    finally:
        shutil.rmtree(directory)


def show(report: CleanReport, took: float, cpu: float, args: argparse.Namespace) -> None:
    figures = {
        "codec": args.codec, "batch_bytes": args.batch_bytes, "records": report.records_before,
        "records_kept": report.records_after, "bytes": report.bytes_before,
        "seconds": round(took, 3), "cpu_seconds": round(cpu, 3),
        "map_seconds": round(report.map_seconds, 3),
        "rewrite_seconds": round(report.rewrite_seconds, 3),
        "records_per_second": round(report.records_before / took),
        "megabytes_per_second": round(report.bytes_before / took / 1e6),
        "map_full": report.map_full,
        "resident_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip
    if args.json:
        print(json.dumps(figures))
    else:
        print(" ".join(f"{name}={value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
