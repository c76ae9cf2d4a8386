"""Spread 10,000 topics of 100 TB over independent brokers, and compute what each one carries.

    python -m bench.fleet

Prints the tables of docs/explanation/ten-thousand-topics.md; tests/test_guides.py compares them.
Nothing is measured here. Sizes follow from the formulae of docs/how-to/size-a-broker.md, speeds
from docs/reference/benchmarks.md, and waiting times from a simulation with the cleaner's own
scheduling rules (tests/support/cleaner/scheduler/schedule_model.py).
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.report import markdown_table
from storage.model import TopicPartition
from tests.support.cleaner.scheduler.schedule_model import ModelPartition, ScheduleModel

GB, TB, MIB, GIB = 10**9, 10**12, 1 << 20, 1 << 30
DAY_SECONDS: Final = 86_400
SEED: Final = 1

# The workload.
TOPICS: Final = 10_000
TOTAL_BYTES: Final = 100 * TB  # on disk, when every log has grown to its peak
DIRTY_RATIO: Final = 0.5  # min.cleanable.dirty.ratio
REWRITE_DAYS: Final = 10  # clients write as much as the live data in this time
PARTITION_BYTES_MAX: Final = 64 * GB
LARGE_BYTES: Final = 8 * GB  # partitions above it have segments of 1 GiB, others of 64 MiB

# A broker.
DISK_BYTES: Final = 16 * TB
FULL_SHARE: Final = 0.8
WORKERS: Final = 2
CLEANED_BYTES_PER_SECOND: Final = 298e6  # of one worker, records of 1 KB with zstd
CONNECTIONS: Final = 1_000
BROKER_BYTES: Final = 190e6
PARTITION_BYTES: Final = 20e3
SEGMENT_BYTES: Final = 2e3
CONNECTION_BYTES: Final = 9e3
REQUEST_BYTES: Final = 256 * MIB
WORKER_BYTES: Final = 65e6 + 192 * MIB  # the process, and a clean with the default buffer


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic; `bytes` on disk at its peak, over all partitions."""

    name: str
    bytes: float

    @property
    def partitions(self) -> int:
        """Return how many partitions it has."""
        return math.ceil(self.bytes / PARTITION_BYTES_MAX)

    @property
    def segments(self) -> int:
        """Return how many segments it has over all partitions."""
        each = self.bytes / self.partitions
        size = GIB if each > LARGE_BYTES else 64 * MIB
        return self.partitions * (math.ceil(each / size) + 1)


@dataclass(frozen=True, slots=True)
class Load:
    """What one broker carries."""

    topics: int
    partitions: int
    segments: int
    bytes: float

    @property
    def disk_share(self) -> float:
        """Return how full its disk is."""
        return self.bytes / DISK_BYTES

    @property
    def files(self) -> int:
        """Return the formula for open files."""
        return CONNECTIONS + 512 + self.segments + 5 * self.partitions

    @property
    def memory_bytes(self) -> float:
        """Return the formulae for memory, without the page cache."""
        logs = self.partitions * PARTITION_BYTES + self.segments * SEGMENT_BYTES
        fixed = BROKER_BYTES + REQUEST_BYTES + WORKERS * WORKER_BYTES
        return fixed + logs + CONNECTIONS * CONNECTION_BYTES

    @property
    def written_per_second(self) -> float:
        """Return the bytes that clients write."""
        return self.bytes * (1 - DIRTY_RATIO) / (REWRITE_DAYS * DAY_SECONDS)

    @property
    def worker_share(self) -> float:
        """Return the time that cleaning takes, as a share of one worker."""
        return self.written_per_second / DIRTY_RATIO / CLEANED_BYTES_PER_SECOND


def topics() -> list[Topic]:
    """Return the topics, the largest first: the size of number i is proportional to 1/i."""
    harmonic = sum(1 / rank for rank in range(1, TOPICS + 1))
    return [
        Topic(f"topic-{rank:05}", TOTAL_BYTES / (rank * harmonic)) for rank in range(1, TOPICS + 1)
    ]


def place_by_hash(all_topics: Sequence[Topic], brokers: int) -> list[list[Topic]]:
    """Place each topic by the checksum of its name."""
    placed: list[list[Topic]] = [[] for _ in range(brokers)]
    for topic in all_topics:
        placed[zlib.crc32(topic.name.encode()) % brokers].append(topic)
    return placed


def place_by_size(all_topics: Sequence[Topic], brokers: int) -> list[list[Topic]]:
    """Place the largest topics first, each on the broker that has the most free space."""
    placed: list[list[Topic]] = [[] for _ in range(brokers)]
    used = [0.0] * brokers
    for topic in sorted(all_topics, key=lambda topic: -topic.bytes):
        emptiest = used.index(min(used))
        placed[emptiest].append(topic)
        used[emptiest] += topic.bytes
    return placed


def load_of(placed: Sequence[Topic]) -> Load:
    """Return what a broker with these topics carries."""
    return Load(
        topics=len(placed),
        partitions=sum(topic.partitions for topic in placed),
        segments=sum(topic.segments for topic in placed),
        bytes=sum(topic.bytes for topic in placed),
    )


def brokers_needed(place: Callable[[Sequence[Topic], int], list[list[Topic]]]) -> int:
    """Return the smallest number of brokers with no disk fuller than FULL_SHARE."""
    all_topics, count = topics(), math.ceil(TOTAL_BYTES / (FULL_SHARE * DISK_BYTES))
    while max(load_of(placed).disk_share for placed in place(all_topics, count)) > FULL_SHARE:
        count += 1
        assert count < 100, "the largest topic does not fit on any broker"
    return count


def waits_after(paused_days: float, hours: float) -> ScheduleModel:
    """Simulate the fullest broker after its cleaner has been paused for some days.

    Before, the dirty sections of its partitions were spread evenly between empty and due.
    """
    placed = max(place_by_size(topics(), brokers_needed(place_by_size)), key=len)
    partitions = []
    for index, topic in enumerate(placed):
        live = topic.bytes * (1 - DIRTY_RATIO) / topic.partitions
        for number in range(topic.partitions):
            phase = (index * 0.618_034 + number * 0.414_214) % 1
            partitions.append(
                ModelPartition(
                    TopicPartition(topic.name, number),
                    clean_bytes=live,
                    dirty_bytes=live * (phase + paused_days / REWRITE_DAYS),
                    bytes_per_second=live / (REWRITE_DAYS * DAY_SECONDS),
                    lag_ms=1 << 60,
                    survives=0.02,  # as much as the model takes from the clean section
                    dirty_since_ms=0,
                )
            )
    # The model charges 1.5 bytes for each byte of a job.
    rate = 1.5 * WORKERS * CLEANED_BYTES_PER_SECOND
    model = ScheduleModel(SEED, partitions, workers=WORKERS, bytes_per_second=rate)
    model.run(hours)
    return model


def placement_table() -> str:
    """Return how both placements fill the brokers."""
    head = ["placement", "brokers", "fullest disk", "emptiest disk", "most topics", "fewest topics"]
    rows = []
    for name, place in (("by hash of the name", place_by_hash), ("by size", place_by_size)):
        count = brokers_needed(place)
        loads = [load_of(placed) for placed in place(topics(), count)]
        shares = sorted(load.disk_share for load in loads)
        numbers = sorted(load.topics for load in loads)
        rows.append(
            [name, str(count), f"{shares[-1]:.0%}", f"{shares[0]:.0%}",
             f"{numbers[-1]:,}", f"{numbers[0]:,}"]
        )  # fmt: skip
    return markdown_table(head, rows)


def broker_table() -> str:
    """Return what the brokers with the most of each carry, placed by size."""
    loads = [load_of(p) for p in place_by_size(topics(), brokers_needed(place_by_size))]
    rows = [
        ["on disk", f"{max(load.bytes for load in loads) / TB:.1f} TB"],
        ["partitions", f"{max(load.partitions for load in loads):,}"],
        ["segments", f"{max(load.segments for load in loads):,}"],
        ["open files", f"{max(load.files for load in loads):,}"],
        ["memory, without page cache", f"{max(load.memory_bytes for load in loads) / GB:.1f} GB"],
        ["written by clients", f"{max(load.written_per_second for load in loads) / 1e6:.0f} MB/s"],
        ["time of one cleaner worker", f"{max(load.worker_share for load in loads):.0%}"],
    ]
    return markdown_table(["of one broker", "at most"], rows)


def waits_table() -> str:
    """Return how long partitions wait after a pause of the cleaner."""
    rows = []
    for name, days, hours in (("a day", 1, 1.5), ("two days", 2, 2.5)):
        model = waits_after(days, hours)
        longest_ms = max(model.longest_ms.values())
        for wait in model.waits.values():
            assert model.now_ms - wait.since_ms <= longest_ms, "the simulation ended too early"
        cleans = sum(partition.cleans for partition in model.partitions.values())
        rows.append([name, str(cleans), f"{longest_ms / 60_000:.0f} minutes"])
    return markdown_table(["cleaner paused for", "cleans", "longest wait"], rows)


def main() -> None:
    """Print the tables."""
    print(placement_table(), broker_table(), waits_table(), sep="\n\n")


if __name__ == "__main__":
    main()
