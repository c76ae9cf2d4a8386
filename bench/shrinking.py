"""Draw how a compacted topic shrinks while producers write to it.

    python -m bench.shrinking [--seconds 60] [--rate-mib 8] [--out docs/images/log-shrinking.svg]

A producer writes 1 KB records over 20,000 keys, chosen at random from a printed seed, at a steady
rate. The picture shows the bytes that were produced and the bytes on disk (all files of the
partition), sampled ten times a second. The topic closes a segment every 16 MiB; everything else is
Varve's default. Needs matplotlib (the extra `pipeline`).
"""

import argparse
import os
import random
import time
from pathlib import Path

from confluent_kafka import Producer

from bench.brokers import varve

MIB = 1 << 20
KEYS = 20_000
VALUE_BYTES = 1000
SEGMENT_BYTES = 16 * MIB
SAMPLE_SECONDS = 0.1
TOPIC = "customers"
SEED = 7


def disk_bytes(directory: Path) -> int:
    """All files of the partition; a file that goes meanwhile counts nothing."""
    total = 0
    for entry in os.scandir(directory):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total


def measure(seconds: float, bytes_per_second: float) -> list[tuple[float, float, float]]:
    """Produce for a while. -> rows of (seconds, MiB produced, MiB on disk)"""
    rng, rows, produced = random.Random(SEED), [], 0
    with varve() as broker:
        broker.create_topic(
            TOPIC, **{"cleanup.policy": "compact", "segment.bytes": str(SEGMENT_BYTES)}
        )
        producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 20})
        folder, started, sampled = broker.data / f"{TOPIC}-0", time.monotonic(), 0.0
        while (now := time.monotonic() - started) < seconds:
            while produced < now * bytes_per_second:
                key = f"customer-{rng.randrange(KEYS)}"
                producer.produce(TOPIC, rng.randbytes(VALUE_BYTES // 2) * 2, key)
                produced += VALUE_BYTES
            producer.poll(0.005)
            if now - sampled >= SAMPLE_SECONDS:
                sampled = now
                rows.append((now, produced / MIB, disk_bytes(folder) / MIB))
        producer.flush(60)
    return rows


def draw(rows: list[tuple[float, float, float]], out: Path) -> None:
    """One picture: produced bytes as a line, bytes on disk as an area."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "varve"  # the same file from the same rows
    from matplotlib import pyplot

    seconds, produced, on_disk = zip(*rows, strict=True)
    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    axes.plot(seconds, produced, color="#7a7f87", linewidth=1.6)
    axes.fill_between(seconds, on_disk, color="#c98a2b", linewidth=0)
    axes.annotate("produced", (seconds[-1], produced[-1]), xytext=(-58, -4),
                  textcoords="offset points", color="#5b6068")  # fmt: skip
    axes.annotate("on disk", (seconds[-1], on_disk[-1]), xytext=(-48, 26),
                  textcoords="offset points", color="#94611a")  # fmt: skip
    axes.set(xlabel="seconds", ylabel="MiB", xlim=(0, seconds[-1]), ylim=(0, None))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate-mib", type=float, default=8)
    parser.add_argument("--out", type=Path, default=Path("docs/images/log-shrinking.svg"))
    arguments = parser.parse_args()
    print(f"seed {SEED}")
    rows = measure(arguments.seconds, arguments.rate_mib * MIB)
    draw(rows, arguments.out)
    print(
        f"{rows[-1][1]:.0f} MiB produced, {rows[-1][2]:.0f} MiB on disk at the end, "
        f"{max(row[2] for row in rows):.0f} MiB at most"
    )


if __name__ == "__main__":
    main()
