"""Start to ready with 100 partitions, and resident memory, of both brokers.

    python -m bench.broker.startup [--rounds 7] [--partitions 100]

Each round starts a broker on a data directory that was stopped cleanly and holds a topic with the
partitions (a few records in each, files in the page cache), and takes the time until it answers a
metadata request; then its resident memory after ten idle seconds, workers apart.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from bench.brokers import Broker, wait_until_ready
from bench.report import markdown_table
from tests.support.peers import kafka
from tests.support.ports import free_port

IDLE_SECONDS = 10.0


def start_varve(directory: Path, settings: str = "") -> tuple[Broker, Callable[[], None]]:
    """Start a broker on the data in a directory; `settings` is YAML."""
    port, http = free_port(), free_port()
    file = directory / "varve.yaml"
    file.write_text(settings)
    command = [sys.executable, "-m", "broker.cli", "serve", "--config", str(file)]
    command += ["--data", str(directory / "data")]
    command += ["--listen", f"127.0.0.1:{port}", "--http", f"127.0.0.1:{http}"]
    with (directory / "log").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    wait_until_ready(f"127.0.0.1:{port}", process, directory / "log")

    def stop() -> None:
        process.terminate()
        process.wait(60)

    return Broker("varve", f"127.0.0.1:{port}", process.pid, directory / "data"), stop


def start_kafka(directory: Path) -> tuple[Broker, Callable[[], None]]:
    server = kafka.start_kafka(directory, jvm=())
    return Broker("kafka", server.bootstrap, server.process.pid, server.data), server.stop


def fill(broker: Broker, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.create_topics([NewTopic("many", partitions, 1)]).values():
        future.result(120)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for index in range(partitions):
        for number in range(10):
            producer.produce("many", b"%d" % number, partition=index)
    assert producer.flush(60) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--partitions", type=int, default=100)
    arguments = parser.parse_args()
    starters = {"varve": start_varve}
    reason = kafka.unavailable()
    if reason is None:
        starters["kafka"] = start_kafka
    else:
        print(f"Apache Kafka is not measured: {reason}")
    paths = {name: Path(tempfile.mkdtemp(prefix=f"{name}-bench-")) for name in starters}
    seconds: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    for name, start in starters.items():
        broker, stop = start(paths[name])
        fill(broker, arguments.partitions)
        stop()
    for number in range(arguments.rounds):
        for name, start in starters.items():
            started = time.perf_counter()
            broker, stop = start(paths[name])
            seconds[name].append(time.perf_counter() - started)
            time.sleep(IDLE_SECONDS)
            memory[name].append(broker.resident_mb())
            stop()
            print(f"round {number} {name:6} {seconds[name][-1]:.2f} s {memory[name][-1]:.0f} MB")
    for home in paths.values():
        shutil.rmtree(home)
    head = [f"{arguments.partitions} partitions", *(name.title() for name in starters)]
    rows = [
        ["start to ready, s", *(f"{statistics.median(seconds[name]):.2f}" for name in starters)],
        ["resident, idle, MB", *(f"{statistics.median(memory[name]):.0f}" for name in starters)],
    ]
    print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
