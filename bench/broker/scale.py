"""Many of everything, on both brokers: partitions in Metadata, idle connections, groups at a start.

    python -m bench.broker.scale [--rounds 5] [--connections 5000] [--groups 1000] [...]

- Metadata: the time of a request for one topic with that many partitions, median and p99.
- Connections: how much the broker's resident memory grows when that many clients connect, negotiate
  versions, and stay idle.
- Groups: the time from the start of the process until the broker has answered OffsetFetch for every
  group, a hundred in a request, after it was stopped cleanly.

Figures are medians over the rounds; every round starts both brokers again on their data.
"""

import argparse
import contextlib
import resource
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

from bench.broker.startup import fill, start_kafka, start_varve
from bench.brokers import Broker
from bench.report import markdown_table, median_ratio
from protocol import codec
from protocol import messages as m
from protocol.api import ApiKey
from tests.support.peers import kafka

METADATA_REQUESTS = 300
SPARE_CONNECTIONS = 100
GROUPS_PER_REQUEST = 100
TOPIC = "many"


class Client:
    """One connection that sends a request and waits for its response."""

    def __init__(self, broker: Broker) -> None:
        self._socket = socket.create_connection(("127.0.0.1", broker.port), 10)
        self._socket.settimeout(60)

    def send(self, key: ApiKey, version: int, body: m.Message) -> None:
        self._socket.sendall(codec.encode_request(key, version, 1, "bench", body))

    def receive(self) -> bytes:
        size = int.from_bytes(self._read(4))
        return self._read(size)

    def ask(self, key: ApiKey, version: int, body: m.Message) -> m.Message:
        self.send(key, version, body)
        return codec.decode_response(key, version, self.receive())[1]

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise ConnectionError("the broker closed the connection")
            data += piece
        return bytes(data)


def metadata_ms(broker: Broker) -> tuple[float, float]:
    """Return the median and the 99th percentile of a request, without decoding."""
    request = m.MetadataRequest(topics=[m.MetadataRequestTopic(name=TOPIC)])
    client = Client(broker)
    times = []
    for _ in range(METADATA_REQUESTS):
        started = time.perf_counter()
        client.send(ApiKey.METADATA, 12, request)
        client.receive()
        times.append((time.perf_counter() - started) * 1000)
    client.close()
    quantiles = statistics.quantiles(times, n=100)
    return quantiles[49], quantiles[98]


def connections_mb(broker: Broker, count: int) -> float:
    """Return how much resident memory `count` idle connections add."""
    before = broker.resident_mb()
    request = m.ApiVersionsRequest(client_software_name="bench", client_software_version="1")
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = Client(broker)
            stack.callback(client.close)
            clients.append(client)
            client.ask(ApiKey.API_VERSIONS, 3, request)
        return broker.resident_mb() - before


def group_name(number: int) -> str:
    return f"group-{number}"


def commit_groups(broker: Broker, count: int) -> None:
    """Commit an offset for each group, as consumers with partitions of their own do."""
    client = Client(broker)
    wait_coordinator(client)
    for number in range(count):
        partition = m.OffsetCommitRequestPartition(partition_index=0, committed_offset=number)
        request = m.OffsetCommitRequest(
            group_id=group_name(number),
            generation_id_or_member_epoch=-1,
            topics=[m.OffsetCommitRequestTopic(name=TOPIC, partitions=[partition])],
        )
        error_code = -1
        while error_code:  # while the offsets topic is loaded
            answer = client.ask(ApiKey.OFFSET_COMMIT, 8, request)
            assert isinstance(answer, m.OffsetCommitResponse)
            error_code = answer.topics[0].partitions[0].error_code
    client.close()


def wait_coordinator(client: Client) -> None:
    """Wait until the offsets topic exists."""
    request = m.FindCoordinatorRequest(key_type=0, coordinator_keys=[group_name(0)])
    while True:
        answer = client.ask(ApiKey.FIND_COORDINATOR, 4, request)
        assert isinstance(answer, m.FindCoordinatorResponse)
        if answer.coordinators[0].error_code == 0:
            return
        time.sleep(0.01)


def fetch_groups(broker: Broker, count: int) -> None:
    """Ask for the offsets of every group, many in a request, until each is answered."""
    client = Client(broker)
    left = list(range(count))
    while left:
        asked = left[:GROUPS_PER_REQUEST]
        request = m.OffsetFetchRequest(
            groups=[
                m.OffsetFetchRequestGroup(
                    group_id=group_name(number),
                    topics=[m.OffsetFetchRequestGroupTopic(name=TOPIC, partition_indexes=[0])],
                )
                for number in asked
            ]
        )
        answer = client.ask(ApiKey.OFFSET_FETCH, 8, request)
        assert isinstance(answer, m.OffsetFetchResponse)
        answered = set()
        for number, group in zip(asked, answer.groups, strict=True):
            assert group.group_id == group_name(number)
            if group.error_code == 0:
                assert group.topics[0].partitions[0].committed_offset == number
                answered.add(number)
        if not answered:
            time.sleep(0.01)
        left = [number for number in left if number not in answered]
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--partitions", type=int, default=1000)
    arguments = parser.parse_args()
    limits = f"limits:\n  connections: {arguments.connections + SPARE_CONNECTIONS}\n"
    starters = {"varve": partial(start_varve, settings=limits)}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reason = kafka.unavailable()
    if reason is None:
        starters["kafka"] = start_kafka
    else:
        print(f"Apache Kafka is not measured: {reason}")
    figures: dict[tuple[str, str], list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="varve-bench-") as directory,
        contextlib.ExitStack() as stack,
    ):
        for number in range(arguments.rounds + 1):  # the first round creates the data
            for name in [*starters][:: 1 if number % 2 else -1]:
                seconds, median, tail, growth = 0.0, 0.0, 0.0, 0.0
                for kind in ("groups", "partitions"):
                    folder = Path(directory, f"{name}-{kind}")
                    folder.mkdir(exist_ok=True)
                    began = time.perf_counter()
                    broker, stop = starters[name](folder)
                    stack.callback(stop)
                    if number == 0:
                        fill(broker, 1 if kind == "groups" else arguments.partitions)
                        if kind == "groups":
                            commit_groups(broker, arguments.groups)
                    elif kind == "groups":
                        fetch_groups(broker, arguments.groups)
                        seconds = time.perf_counter() - began
                    else:
                        median, tail = metadata_ms(broker)
                        growth = connections_mb(broker, arguments.connections)
                    stack.close()
                if number == 0:
                    continue
                for subject, value in (
                    (f"Metadata of {arguments.partitions} partitions, ms", median),
                    ("the same, p99, ms", tail),
                    (f"{arguments.connections} idle connections, MB", growth),
                    (f"start until {arguments.groups} groups are served, s", seconds),
                ):
                    figures[subject, name].append(value)
                print(f"round {number} {name:6} {median:.2f} {tail:.2f} {growth:.0f} "
                      f"{seconds:.2f}", flush=True)  # fmt: skip
    rows = []
    for subject in dict.fromkeys(subject for subject, _ in figures):
        local = figures[subject, "varve"]
        row = [subject, f"{statistics.median(local):.3g}"]
        if reason is None:
            remote = figures[subject, "kafka"]
            row += [f"{statistics.median(remote):.3g}", f"{median_ratio(remote, local):.2f}"]
        rows.append(row)
    print(
        markdown_table(["", "Varve", *(["Kafka 4.3.0", "ratio"] if reason is None else [])], rows)
    )


if __name__ == "__main__":
    main()
