"""Produce and fetch with confluent-kafka, one partition, uncompressed, against both brokers.

    python -m bench.broker.produce_fetch [--rounds 7] [--megabytes 100] [--tls] [--sizes 1000]

Each round produces to a fresh topic on each broker in turn and reads the same back five times; the
order of brokers alternates. Figures are medians over the rounds, in MB of values per second; the
ratio is that of the medians.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.brokers import Broker, both, both_with_tls
from bench.report import markdown_table, median_ratio

SIZES = (100, 1000, 10_000)
FETCHES = 5  # of the same records: a single one of 100 MB takes 0.1 s and varies too much


def produce(
    broker: Broker, topic: str, size: int, count: int, *, batch_bytes: int = 1_000_000
) -> float:
    """Seconds from the first record to the last acknowledgement."""
    producer = Producer(
        {
            **broker.connection,
            "linger.ms": 5,
            "acks": "all",
            "queue.buffering.max.messages": 1_000_000,
            "queue.buffering.max.kbytes": 1_048_576,
            "batch.size": batch_bytes,
        }
    )
    value = b"x" * size
    producer.list_topics(topic, timeout=10)
    started = time.perf_counter()
    for index in range(count):
        while True:
            try:
                producer.produce(topic, value, partition=0)
                break
            except BufferError:
                producer.poll(0.01)
        if index % 1000 == 0:
            producer.poll(0)
    remaining = producer.flush(120)
    assert remaining == 0, f"{remaining} records were not acknowledged"
    return time.perf_counter() - started


def fetch(broker: Broker, topic: str, count: int, *, fetch_bytes: int = 4_000_000) -> float:
    """Seconds from assignment to the last record."""
    consumer = Consumer(
        {
            **broker.connection,
            "group.id": "bench",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            "queued.min.messages": 1_000_000,
            "queued.max.messages.kbytes": 262_144,
            "fetch.message.max.bytes": fetch_bytes,
        }
    )
    consumer.list_topics(topic, timeout=10)
    started = time.perf_counter()
    consumer.assign([TopicPartition(topic, 0, 0)])
    seen = 0
    while seen < count:
        # consume() waits for all requested messages or its timeout: request only those left.
        messages = consumer.consume(min(10_000, count - seen), timeout=10)
        assert messages, f"received only {seen} of {count} records"
        seen += len(messages)
    elapsed = time.perf_counter() - started
    consumer.close()
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--tls", action="store_true", help="TLS 1.3, the same cipher for both")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    arguments = parser.parse_args()
    rates: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    with both_with_tls() if arguments.tls else both() as brokers:
        for number in range(-1, arguments.rounds):  # round -1 warms both up
            order = brokers if number % 2 == 0 else brokers[::-1]
            for size in arguments.sizes:
                count = min(arguments.megabytes * 1_000_000 // size, 1_000_000)
                for broker in order:
                    topic = f"bench-{size}-{number + 1}"
                    broker.create_topic(topic)
                    megabytes = size * count / 1e6
                    produced = megabytes / produce(broker, topic, size, count)
                    seconds = sum(fetch(broker, topic, count) for _ in range(FETCHES))
                    fetched = FETCHES * megabytes / seconds
                    broker.delete_topic(topic)
                    if number >= 0:
                        rates["produce", broker.name, size].append(produced)
                        rates["fetch", broker.name, size].append(fetched)
                        print(
                            f"round {number} {broker.name:6} {size:6} B  "
                            f"produce {produced:7.1f}  fetch {fetched:7.1f} MB/s",
                            flush=True,
                        )
        for broker in brokers:
            print(f"{broker.name}: resident memory {broker.resident_mb():.0f} MB")
    report(rates, arguments.sizes, kafka=len(brokers) > 1)


def report(
    rates: dict[tuple[str, str, int], list[float]], sizes: Sequence[int], *, kafka: bool
) -> None:
    rows = []
    for subject in ("produce", "fetch"):
        for size in sizes:
            local = rates[subject, "varve", size]
            row = [f"{subject} {size} B", f"{statistics.median(local):.0f}"]
            if kafka:
                remote = rates[subject, "kafka", size]
                row += [f"{statistics.median(remote):.0f}", f"{median_ratio(local, remote):.2f}"]
            rows.append(row)
    print(markdown_table(["MB/s", "Varve", *(["Kafka 4.3.0", "ratio"] if kafka else [])], rows))


if __name__ == "__main__":
    main()
