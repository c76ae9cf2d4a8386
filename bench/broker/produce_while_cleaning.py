"""Measure the latency of produce requests while two cleaner workers are busy.

    python -m bench.broker.produce_while_cleaning [--rounds 5] [--seconds 6] [--flush-on-ack] [...]

Records of 1 KB, one a request, acks=all, are sent 5,000 times a second over eight connections to
eight partitions, at times fixed beforehand: a request that waits for its turn is waiting in the
figures too (latency counts from the time it was meant to be sent). In each round this is done for a
while beside idle workers, and then while two workers clean: logs of records of 100 bytes, every key
written ten times, which get their policy at that moment. What counts as "while" is seen from
outside: each worker has used CPU time in the last tenths of a second, waits for the disk, or for a
core; the window ends when one of them runs out of work. A round whose window is too short, or
beside which other programs used more than a fifth of a core, is shown and not counted.
"""

import argparse
import ctypes
import multiprocessing
import os
import select
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import yaml
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from bench.broker.small_requests import Shape, encode_request, wait_for_leader
from bench.brokers import Broker, varve
from bench.cleaner.clean_job import CODECS, OVERWRITES, Template, one_batch
from bench.report import markdown_table
from config.topics.keys import TopicConfig
from storage.env import RealEnv
from storage.format import filenames
from storage.format.batch import read_header
from storage.format.checkpoints import encode_partition_metadata
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition

LOAD = "load"
CONNECTIONS = 8
VALUE_BYTES = 1000
SAMPLE_SECONDS = 0.1
LEAD_SECONDS = 1.0  # the load runs for so long before anything is counted
WINDOW_SECONDS_MIN = 2.0
DRAIN_SECONDS_MAX = 300.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
QUANTILES = (50.0, 99.0, 99.9)


# Logs to be cleaned --------------------------------------------------------------------------


def prepare_logs(data: Path, arguments: argparse.Namespace) -> int:
    """Create directories of logs without a policy, which the broker does not clean yet; return the
    size of one.

    One log is written; the others are links to its segments, which do not change.
    """
    scratch = data.parent / "scratch"
    manager = LogManager(RealEnv(), [str(scratch)])
    scratch.mkdir()
    manager.open(lambda _: _config(arguments))
    log = manager.create(TopicPartition("dirty", 0), os.urandom(16), _config(arguments))
    rng = np.random.default_rng(arguments.seed)
    template = Template(max(1, arguments.batch_bytes // 110), 100, rng)
    keys = rng.permutation(arguments.records) % max(1, arguments.records // OVERWRITES)
    for first in range(0, arguments.records - template.count + 1, template.count):
        chosen = keys[first : first + template.count]
        batch = bytearray(one_batch(template, chosen, 0, CODECS[arguments.codec]))
        log.append(batch, read_header(batch), now_ms=int(time.time() * 1000))
    log.roll(int(time.time() * 1000))
    size_bytes = log.segments.size_bytes
    manager.close()
    data.mkdir()
    shutil.copy(scratch / filenames.META_PROPERTIES, data)  # it has data, so it needs an identity
    for number in range(arguments.rounds):
        topic_id = os.urandom(16)
        for partition in range(arguments.partitions):
            folder = data / f"{topic_name(number)}-{partition}"
            folder.mkdir(parents=True)
            for file in (scratch / "dirty-0").glob(f"*{filenames.LOG}"):
                if file.stat().st_size:
                    (folder / file.name).hardlink_to(file)
                else:
                    (folder / file.name).touch()  # the active segment, which is written to
            text = encode_partition_metadata(topic_id)
            (folder / filenames.PARTITION_METADATA).write_bytes(text)
    shutil.rmtree(scratch)
    return size_bytes


def _config(arguments: argparse.Namespace) -> TopicConfig:
    return TopicConfig(cleanup_policy=("compact",), segment_bytes=arguments.segment_bytes)


def topic_name(number: int) -> str:
    """The topic whose logs are cleaned in this round."""
    return f"dirty{number}"


def release(broker: Broker, number: int) -> None:
    """Give this round's logs the policy that makes them due."""
    expected = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in expected.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic_name(number), incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(30)


# The load --------------------------------------------------------------------------------------


@dataclass
class Producer:
    """One connection; answers come in the order of the requests."""

    socket: socket.socket
    request: bytes
    response_bytes: int = 0
    sent_for: deque[float] = field(default_factory=deque)  # when each was meant to be sent
    outgoing: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, intended: float) -> None:
        self.sent_for.append(intended)
        self.outgoing += self.request
        self.push()

    def push(self) -> None:
        """Send waiting bytes as far as the socket accepts them."""
        with suppress(BlockingIOError):
            del self.outgoing[: self.socket.send(self.outgoing)]

    def receive(self) -> Iterator[float]:
        """Yield the intended send times of the requests whose responses are complete."""
        data = self.socket.recv(1 << 16)
        assert data, "the broker closed the connection"
        self.received += data
        while len(self.received) >= 4:
            (size,) = struct.unpack_from(">i", self.received)
            if len(self.received) < 4 + size:
                return
            # Header, one topic with its name, one partition with its index: then the error code.
            error_at = 4 + 4 + 1 + 1 + 1 + len(LOAD) + 1 + 4
            (error,) = struct.unpack_from(">h", self.received, error_at)
            assert error == 0, f"error {error}"
            del self.received[: 4 + size]
            yield self.sent_for.popleft()


def connect(port: int, partition: int) -> Producer:
    """A producer for one partition."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    shape = Shape(value_bytes=VALUE_BYTES)
    request = encode_request(LOAD, 1, partition=partition, shape=shape, acks=-1)
    return Producer(sock, request)


def load(port: int, rate: float, orders: Connection) -> None:
    """Run in a process of its own: send at the rate until stopped, then report the latencies."""
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: sleep as exactly as can be
    producers = [connect(port, partition) for partition in range(CONNECTIONS)]
    seen: list[tuple[float, float]] = []  # (meant to be sent, seconds)
    began, number, stopped = time.monotonic(), 0, False
    watched = [*producers, orders]
    while not stopped or any(producer.sent_for for producer in producers):
        now = time.monotonic()
        intended = began + number / rate
        if not stopped and now >= intended:
            producers[number % CONNECTIONS].send(intended)
            number += 1
            continue
        wait = 0.05 if stopped else intended - now
        blocked = [producer for producer in producers if producer.outgoing]
        readable, writable, _ = select.select(watched, blocked, [], wait)
        for producer in writable:
            producer.push()
        for producer in readable:
            if producer is orders:
                stopped = True
                watched.remove(orders)
                continue
            times = list(producer.receive())
            now = time.monotonic()
            seen.extend((meant, now - meant) for meant in times)
    orders.send_bytes(np.array(seen, dtype=np.float64).tobytes())


@contextmanager
def loading(broker: Broker, rate: float) -> Iterator[list[np.ndarray]]:
    """The load for the length of a block; the list then holds rows of (intended time, seconds)."""
    connection, remote = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=load, args=(broker.port, rate, remote)
    )
    process.start()
    result: list[np.ndarray] = []
    try:
        time.sleep(LEAD_SECONDS)
        yield result
        connection.send(None)
        result.append(np.frombuffer(connection.recv_bytes(), dtype=np.float64).reshape(-1, 2))
    finally:
        process.join(30)
        process.kill()


# Watching the workers ----------------------------------------------------------------------------


def worker_pids(broker: Broker) -> list[int]:
    """Children of the broker that are workers."""
    path = Path(f"/proc/{broker.pid}/task/{broker.pid}/children")
    return [
        pid
        for pid in map(int, path.read_text().split())
        if b"cleaner.workers.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def cpu_ticks(pid: int) -> int:
    """CPU time of a process so far."""
    return _ticks_and_state(pid)[0]


def _ticks_and_state(pid: int) -> tuple[int, str]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]), fields[0]


class Others:
    """CPU time of everything on this machine that is not part of the benchmark, in cores."""

    def __init__(self, broker: Broker) -> None:
        self._pids = [broker.pid, os.getpid(), *worker_pids(broker)]
        self._pids += [child.pid for child in multiprocessing.active_children() if child.pid]
        self._began, self._before = time.monotonic(), self._ticks()

    def _ticks(self) -> int:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, soft, steal = map(int, fields[:8])
        own = sum(cpu_ticks(pid) for pid in self._pids)
        return user + nice + system + irq + soft + steal - own

    def cores(self) -> float:
        """Since this was made."""
        seconds = time.monotonic() - self._began
        return (self._ticks() - self._before) / TICKS_PER_SECOND / seconds


@dataclass
class Overlap:
    """When both workers were busy, with how much CPU time, and what else was going on."""

    began: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0
    others: float = 0.0


def watch_overlap(pids: list[int], quiet_samples: int = 3) -> Overlap:
    """From when both workers use CPU time until one has used none for a few samples in a row."""
    overlap, idle = Overlap(), dict.fromkeys(pids, 0)
    before = first = {pid: cpu_ticks(pid) for pid in pids}
    deadline = time.monotonic() + DRAIN_SECONDS_MAX
    while time.monotonic() < deadline:
        time.sleep(SAMPLE_SECONDS)
        now, states = time.monotonic(), {pid: _ticks_and_state(pid) for pid in pids}
        used = {pid: ticks for pid, (ticks, _) in states.items()}
        # It computes, or waits for the disk (D), or for a core (R).
        moved = [pid for pid in pids if used[pid] > before[pid] or states[pid][1] in "DR"]
        before = used
        if not overlap.began:
            if len(moved) == len(pids):
                overlap.began, first = now, used
            continue
        for pid in pids:
            idle[pid] = 0 if pid in moved else idle[pid] + 1
        if max(idle.values()) == 0:
            overlap.ended = now
            overlap.cpu_seconds = sum(used[p] - first[p] for p in pids) / TICKS_PER_SECOND
        elif max(idle.values()) >= quiet_samples:
            return overlap
    raise TimeoutError("the workers did not become idle in time")


def wait_drained(pids: list[int]) -> None:
    """Until no worker uses CPU time."""
    before = -1
    while (used := sum(map(cpu_ticks, pids))) != before:
        before = used
        time.sleep(0.5)


# The measurement -------------------------------------------------------------------------------


def quantiles_ms(rows: np.ndarray, began: float, ended: float) -> list[float]:
    """p50, p99 and p99.9 of the requests meant to be sent in the window."""
    inside = rows[(rows[:, 0] >= began) & (rows[:, 0] < ended), 1]
    return [float(value) * 1000 for value in np.percentile(inside, QUANTILES)]


def beside_idle_workers(
    broker: Broker, arguments: argparse.Namespace
) -> tuple[list[float], Overlap]:
    """Quantiles without cleaning."""
    with loading(broker, arguments.rate) as result:
        others, began = Others(broker), time.monotonic()
        time.sleep(arguments.seconds)
        window = Overlap(began, time.monotonic(), others=others.cores())
    return quantiles_ms(result[0], window.began, window.ended), window


def beside_busy_workers(
    broker: Broker, number: int, arguments: argparse.Namespace
) -> tuple[list[float], Overlap]:
    """Quantiles while both workers clean this round's logs."""
    pids = worker_pids(broker)
    assert len(pids) == arguments.workers, pids
    with loading(broker, arguments.rate) as result:
        others = Others(broker)
        release(broker, number)
        window = watch_overlap(pids)
        window.others = others.cores()
    wait_drained(pids)
    return quantiles_ms(result[0], window.began, window.ended), window


def measure(broker: Broker, arguments: argparse.Namespace, size_bytes: int) -> None:
    """All rounds, and their medians."""
    keys = {"varve.flush.on.ack": "true"} if arguments.flush_on_ack else {}
    broker.create_topic(LOAD, partitions=CONNECTIONS, **keys)
    wait_for_leader(broker, LOAD)
    seen: dict[str, list[list[float]]] = defaultdict(list)
    wait_drained(worker_pids(broker))  # they may have kernels to compile
    beside_idle_workers(broker, arguments)  # warm-up
    for number in range(arguments.rounds):
        os.sync()
        without, calm = beside_idle_workers(broker, arguments)
        os.sync()
        beside, busy = beside_busy_workers(broker, number, arguments)
        seconds = busy.ended - busy.began
        cores = busy.cpu_seconds / max(seconds, SAMPLE_SECONDS)
        foreign = max(calm.others, busy.others)
        why = ""
        if seconds < WINDOW_SECONDS_MIN:
            why = "; not counted: too short"
        elif foreign > arguments.others_max:
            why = "; not counted: the machine has other work"
        print(
            f"round {number}: without {show(without)}; beside {show(beside)} ms; both busy for"
            f" {seconds:.1f} s with {cores:.2f} cores; others {calm.others:.2f} and"
            f" {busy.others:.2f} cores{why}",
            flush=True,
        )
        if not why:
            seen["without cleaning"].append(without)
            seen["beside two workers"].append(beside)
    assert seen, "no round counted"
    rows = []
    for name, rounds in seen.items():
        middle = [statistics.median(column) for column in zip(*rounds, strict=True)]
        rows.append([name, *(f"{value:.2f}" for value in middle)])
    counted = len(seen["without cleaning"])
    print(f"{arguments.partitions} logs of {size_bytes / 1e6:.0f} MB, {arguments.codec}", end="; ")
    print(f"{counted} of {arguments.rounds} rounds counted")
    print(markdown_table(["latency, ms", "p50", "p99", "p99.9"], rows))


def show(figures: list[float]) -> str:
    """Quantiles for one line."""
    return " / ".join(f"{value:.2f}" for value in figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of the part without cleaning")
    parser.add_argument("--rate", type=float, default=5000.0, help="requests a second")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--flush-on-ack", action="store_true")
    parser.add_argument("--codec", choices=sorted(CODECS), default="none")
    parser.add_argument("--records", type=int, default=1_500_000, help="of one log to be cleaned")
    parser.add_argument("--partitions", type=int, default=24, help="logs to be cleaned a round")
    parser.add_argument("--others-max", type=float, default=0.2, help="cores of other programs")
    parser.add_argument("--batch-bytes", type=int, default=16_384)
    parser.add_argument("--segment-bytes", type=int, default=64 << 20)
    parser.add_argument("--set", action="append", default=[], help="cleaner setting, NAME=VALUE")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="varve-bench-"))
    try:
        cleaner = {"workers": arguments.workers}
        cleaner |= {
            name: yaml.safe_load(value)
            for name, _, value in (item.partition("=") for item in arguments.set)
        }
        (directory / "varve.yaml").write_text(yaml.safe_dump({"cleaner": cleaner}))
        size_bytes = prepare_logs(directory / "data", arguments)
        os.sync()
        with varve(directory / "data", directory / "varve.yaml") as broker:
            measure(broker, arguments, size_bytes)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
