"""Fetch 10 KB records in large responses, by the size of the batches they were produced in.

    python -m bench.broker.fetch_large [--rounds 15] [--megabytes 300]

Every broker holds the same records in a topic for each batch size. In each round confluent-kafka
reads every topic once from each broker, with `max.partition.fetch.bytes` of 8 MiB; the order of the
brokers alternates. Figures are medians over the rounds, in MB of values per second; the ratio is
that of the medians.
"""

import argparse
import statistics
from collections import defaultdict

from bench.broker.produce_fetch import fetch, produce
from bench.brokers import both
from bench.report import markdown_table, median_ratio

RECORD_BYTES = 10_000
BATCH_BYTES = (16_384, 65_536, 1_000_000)
FETCH_BYTES = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=300)
    arguments = parser.parse_args()
    count = arguments.megabytes * 1_000_000 // RECORD_BYTES
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    with both() as brokers:
        for broker in brokers:
            for batch_bytes in BATCH_BYTES:
                topic = f"fetch-{batch_bytes}"
                broker.create_topic(topic)
                produce(broker, topic, RECORD_BYTES, count, batch_bytes=batch_bytes)
        for number in range(-1, arguments.rounds):  # round -1 warms both up
            for batch_bytes in BATCH_BYTES:
                for broker in brokers if number % 2 == 0 else brokers[::-1]:
                    seconds = fetch(broker, f"fetch-{batch_bytes}", count, fetch_bytes=FETCH_BYTES)
                    if number >= 0:
                        rates[broker.name, batch_bytes].append(count * RECORD_BYTES / 1e6 / seconds)
        has_kafka = len(brokers) > 1
    rows = []
    for batch_bytes in BATCH_BYTES:
        local = rates["varve", batch_bytes]
        row = [f"{batch_bytes} B", f"{statistics.median(local):.0f}"]
        if has_kafka:
            remote = rates["kafka", batch_bytes]
            row += [f"{statistics.median(remote):.0f}", f"{median_ratio(local, remote):.2f}"]
        rows.append(row)
    head = ["MB/s, batches of", "Varve", *(["Kafka 4.3.0", "ratio"] if has_kafka else [])]
    print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
