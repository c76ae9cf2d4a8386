"""`varve demo`: shows a log that grows and shrinks without losing the last value of a key.

The demo produces a million updates of fifty thousand keys with a real client, shows the log's size
while the cleaner works, reads everything back and compares the value of each key. It uses a running
broker, or starts one in a temporary directory.

`min.compaction.lag.ms` prevents cleaning until all updates are produced, so that the size before
cleaning is the size of all updates.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not in its __all__
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from admin.kafka.client import KAFKA_ADDRESS_HINT, error_text, unreachable_text
from broker.banner import command_name
from config import exit_codes
from config.security.clients import Cluster
from config.units import about_size
from protocol.client.administration import LogDirClient, RefusedError
from protocol.client.connection import NotKafkaError, WireError
from protocol.client.librdkafka import connection_settings
from protocol.errors import ProtocolError
from storage.kernels import COMPILING, is_first_compilation

TOPIC_PREFIX = "varve-demo-"
UPDATES = 1_000_000
KEYS = 50_000
STRIDE = 7919  # a prime, so that the updates visit all keys before one repeats
START_SECONDS = 60.0
SHRINK_SECONDS = 120.0
IDLE_SECONDS = 30.0
ANSWER_SECONDS = 10.0  # for an administrative request
SETTLED_SECONDS = 3.0  # the cleaner is done when the size has not changed for this long
STILL_SECONDS = 0.5  # after which the demo says what it waits for
CLEAN_SIZE = 1.01  # of the last updates: then the cleaner is done, without waiting
TOPIC_CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": str(8 << 20),
    "segment.ms": "2000",  # the last segment rolls soon after the load ends
    "min.cleanable.dirty.ratio": "0.2",
    "min.compaction.lag.ms": "3600000",  # until CLEANING_CONFIG replaces it
}
PERMISSIONS_HINT = f"""\
The demo needs these permissions; --command-config passes the name and password of a user:
  varve acls add User:NAME describe cluster
  varve acls add User:NAME create write read alter-configs delete topic:{TOPIC_PREFIX} --prefix"""
CLEANING_CONFIG = {"min.compaction.lag.ms": "0", "max.compaction.lag.ms": "2000"}


class DemoError(Exception):
    """The demo cannot continue, or a check failed."""


class NoBrokerError(DemoError):
    """No Kafka broker answers at the address."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of the demo. Sizes are bytes on the broker's disk."""

    topic: str
    bytes_before: int  # all updates, before cleaning
    bytes_after: int
    records_produced: int
    records_read: int
    keys: int
    produce_seconds: float


def run(
    cluster: Cluster | None,
    *,
    updates: int = UPDATES,
    keys: int = KEYS,
    rate: int | None = None,
    keep: bool = False,
) -> int:
    """Run the demo, print the reason if it fails, and return the exit code.

    `rate`: updates per second; None: as fast as possible. With `keep`, the topic stays.
    """
    console = Console()
    try:
        if cluster is not None:
            outcome = _session(console, cluster, updates, keys, rate, keep=keep)
        else:
            with _own_broker(console) as address:
                outcome = _session(console, Cluster(address), updates, keys, rate, keep=False)
    except (DemoError, KafkaException, ProtocolError, RefusedError, WireError, OSError) as error:
        _print_failure(error)
        is_unreachable = isinstance(error, NoBrokerError)
        return exit_codes.UNREACHABLE if is_unreachable else exit_codes.FAILED
    _print_outcome(console, outcome)
    if cluster is not None and keep:
        _print_kept_topic(console, cluster, outcome.topic)
    return exit_codes.DONE


def _print_failure(error: Exception) -> None:
    refusal = error.args[0] if isinstance(error, KafkaException) else None
    text = error_text(refusal) if isinstance(refusal, KafkaError) else str(error)
    console = Console(stderr=True)
    console.print(f"varve: {text}", markup=False, soft_wrap=True)
    name = refusal.name() if isinstance(refusal, KafkaError) else getattr(error, "name", "")
    if name.endswith("AUTHORIZATION_FAILED"):
        console.print(PERMISSIONS_HINT, markup=False, soft_wrap=True)


def _print_kept_topic(console: Console, cluster: Cluster, topic: str) -> None:
    command = _deletion(cluster, [topic])
    console.print(f"The topic stays. To delete it: {command}", soft_wrap=True)


def _print_other_demos(console: Console, cluster: Cluster, admin: AdminClient) -> None:
    topics = admin.list_topics(timeout=ANSWER_SECONDS).topics
    others = sorted(name for name in topics if name.startswith(TOPIC_PREFIX))
    if others:
        console.print(
            "There are topics of other demos. To delete them, if those demos have ended: "
            f"{_deletion(cluster, others)}",
            soft_wrap=True,
        )


def _deletion(cluster: Cluster, topics: Sequence[str]) -> str:
    return f"{command_name()} topics delete {' '.join(topics)} --bootstrap {cluster}"


def _session(
    console: Console, cluster: Cluster, updates: int, keys: int, rate: int | None, *, keep: bool
) -> Outcome:
    with _connect(cluster) as sizes:
        topic = f"{TOPIC_PREFIX}{os.getpid()}-{int(time.time())}"
        admin = AdminClient({**connection_settings(cluster), "log_level": 0})
        _print_other_demos(console, cluster, admin)
        new = NewTopic(topic, num_partitions=1, replication_factor=1, config=TOPIC_CONFIG)
        admin.create_topics([new])[topic].result(ANSWER_SECONDS)
        console.print(
            f"topic [bold]{topic}[/bold] on {cluster}: cleanup.policy=compact, {keys:,} keys"
        )
        try:
            with _progress(console) as progress:
                last, seconds = _produce(
                    cluster,
                    topic,
                    updates=updates,
                    keys=keys,
                    rate=rate,
                    sizes=sizes,
                    progress=progress,
                )
                before = sizes.size_of(topic)
                _allow_cleaning(admin, topic)
                live = before * min(keys, updates) // updates
                after = _watch_shrink(topic, sizes, progress, before=before, live=live)
                records_read = _verify(cluster, topic, last, progress)
        except BaseException:  # such as Ctrl-C
            if keep:
                with _failure_printed(console, f"{topic} may not be cleaned for an hour"):
                    _allow_cleaning(admin, topic)
                _print_kept_topic(console, cluster, topic)
            raise
        finally:
            if not keep:
                with _failure_printed(console, f"topic {topic} was not deleted"):
                    admin.delete_topics([topic])[topic].result(ANSWER_SECONDS)
    return Outcome(topic, before, after, updates, records_read, keys, seconds)


def _connect(cluster: Cluster) -> LogDirClient:
    """Check that a broker answers: librdkafka would retry silently for 30 seconds."""
    try:
        client = LogDirClient(cluster)
    except NotKafkaError as error:
        raise NoBrokerError(f"{error}. {KAFKA_ADDRESS_HINT}") from error
    except WireError as error:
        raise DemoError(str(error)) from error
    except (OSError, ProtocolError) as error:
        raise _no_broker(cluster, error) from error
    try:
        client.sizes()  # fails without SASL where it is needed
    except (OSError, ProtocolError) as error:
        client.close()
        raise _no_broker(cluster, error) from error
    except (RefusedError, WireError):
        client.close()
        raise
    return client


def _no_broker(cluster: Cluster, error: OSError | ProtocolError) -> NoBrokerError:
    if not isinstance(error, OSError):
        return NoBrokerError(f"no Kafka broker answers at {cluster}: {error}")
    text = unreachable_text(cluster, error, cluster.security)
    if isinstance(error, ConnectionRefusedError):
        text += (
            " Start one with `varve serve`, or omit --bootstrap and --keep to use a temporary one"
        )
    return NoBrokerError(text)


def _allow_cleaning(admin: AdminClient, topic: str) -> None:
    entries = [
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
        for key, value in CLEANING_CONFIG.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(ANSWER_SECONDS)


@contextmanager
def _failure_printed(console: Console, consequence: str) -> Iterator[None]:
    """Print a failure of the broker instead of raising it over an earlier one."""
    try:
        yield
    except (KafkaException, TimeoutError) as error:
        console.print(f"{consequence}: {str(error) or 'the broker does not answer'}")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _produce(
    cluster: Cluster,
    topic: str,
    *,
    updates: int,
    keys: int,
    rate: int | None,
    sizes: LogDirClient,
    progress: Progress,
) -> tuple[list[int], float]:
    """Produce all updates; return the last update of each key, and the seconds it took."""
    failures: list[str] = []

    def delivered(error: Any, _message: Any) -> None:
        if error is not None:
            failures.append(str(error))

    producer = Producer(
        {
            **connection_settings(cluster),
            "acks": "all",
            "enable.idempotence": True,
            "linger.ms": 5,
            "queue.buffering.max.messages": 200_000,
            "log_level": 0,
        }
    )
    last = [-1] * keys
    task = progress.add_task("produce", total=updates, note="")
    started = measured_at = time.monotonic()
    for update in range(updates):
        key = update * STRIDE % keys
        while True:
            try:
                producer.produce(topic, _value(update), f"key-{key:05}", on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.05)
        last[key] = update
        if update % 2000 == 0:
            producer.poll(0)
            if rate is not None:  # not in poll(), which Ctrl-C can end with a SystemError
                time.sleep(max(0.0, started + update / rate - time.monotonic()))
            if time.monotonic() - measured_at > 0.25:
                measured_at = time.monotonic()
                progress.update(task, completed=update, note=_log_size(sizes.size_of(topic)))
    unacknowledged = producer.flush(60)
    seconds = time.monotonic() - started
    if unacknowledged or failures:
        raise DemoError(
            f"{unacknowledged + len(failures)} updates were not acknowledged {failures[:1]}"
        )
    progress.update(task, completed=updates, note=_log_size(sizes.size_of(topic)))
    return last, seconds


def _log_size(size: int) -> str:
    return f"log {about_size(size):>9}"


def _value(update: int) -> bytes:
    return b"update %09d " % update + b"." * 80


def _watch_shrink(
    topic: str, sizes: LogDirClient, progress: Progress, *, before: int, live: int
) -> int:
    """Wait until the cleaner has finished; return the size of the log.

    `live` is the approximate size of the last updates of all keys: there the bar is full.
    """
    task = progress.add_task("compact", total=100, note="")
    started = changed_at = time.monotonic()
    smallest = size = sizes.size_of(topic)
    while smallest >= before or (
        size > live * CLEAN_SIZE and time.monotonic() - changed_at < SETTLED_SECONDS
    ):
        if time.monotonic() - started > SHRINK_SECONDS:
            raise DemoError(
                f"the log did not shrink in {SHRINK_SECONDS:.0f} s: {before:,} bytes before, "
                f"{size:,} now. `varve cleaner status` shows whether a worker of the cleaner is "
                "idle: if it is still starting, run the demo again when it is idle. Otherwise "
                "look for errors in the broker's log"
            )
        time.sleep(0.1)
        size = sizes.size_of(topic)
        if size != smallest:
            smallest, changed_at = size, time.monotonic()
        done = 100 * (before - size) / max(1, before - live)
        waits = ""
        if size >= before:
            waits = ", waits for the cleaner"
            if time.monotonic() - started > SETTLED_SECONDS:
                waits += ", whose first start compiles native code"
        elif time.monotonic() - changed_at > STILL_SECONDS:
            waits = ", waits for the last segment to close"
        progress.update(task, completed=min(max(done, 0), 99), note=f"{_log_size(size)}{waits}")
    removed = 100 * (1 - size / before)
    progress.update(task, completed=100, note=f"{_log_size(size)}, {removed:.0f}% removed")
    return size


def _verify(cluster: Cluster, topic: str, last: list[int], progress: Progress) -> int:
    """Read everything, compare the last value of each key, return the number of records read."""
    consumer = Consumer(
        {
            **connection_settings(cluster),
            "group.id": topic,
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    task = progress.add_task("verify", total=100, note="")
    _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)
    consumer.assign([TopicPartition(topic, 0, 0)])
    seen: dict[str, bytes] = {}
    records, progress_at = 0, time.monotonic()
    while consumer.position([TopicPartition(topic, 0)])[0].offset < end:
        messages = consumer.consume(10_000, timeout=1.0)
        if messages:
            progress_at = time.monotonic()
        elif time.monotonic() - progress_at > IDLE_SECONDS:
            raise DemoError(
                f"no record arrived for {IDLE_SECONDS:.0f} s after the first {records:,}"
            )
        for message in messages:
            if error := message.error():
                if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                    continue  # the demo commits no offsets
                raise KafkaException(error)
            seen[(message.key() or b"").decode()] = message.value() or b""
        records += len(messages)
        if messages:
            done = 100 * ((messages[-1].offset() or 0) + 1) / end
            progress.update(task, completed=done, note=f"{records:,} records")
    consumer.close()
    progress.update(task, completed=100, note=f"{records:,} records")
    wrong = [
        key
        for key, update in enumerate(last)
        if update >= 0 and seen.get(f"key-{key:05}") != _value(update)
    ]
    if wrong or len(seen) != sum(1 for update in last if update >= 0):
        raise DemoError(f"{len(wrong)} keys have a wrong last value {wrong[:1]}")
    return records


def _print_outcome(console: Console, outcome: Outcome) -> None:
    table = Table(show_header=True, header_style="bold")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row(
        "size on disk",
        about_size(outcome.bytes_before),
        about_size(outcome.bytes_after),
    )
    table.add_row("records", f"{outcome.records_produced:,}", f"{outcome.records_read:,}")
    console.print(table)
    rate = outcome.records_produced / outcome.produce_seconds
    console.print(
        f"The last values of all {outcome.keys:,} keys are correct. Produced {rate:,.0f} updates/s."
    )


@contextmanager
def _own_broker(console: Console) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="varve-demo-") as directory:
        port, http = _free_port(), _free_port()
        command = [sys.executable, "-m", "broker.cli", "serve", "--data", f"{directory}/data"]
        command += ["--listen", f"127.0.0.1:{port}", "--http", f"127.0.0.1:{http}"]
        console.print(f"starting a broker on 127.0.0.1:{port}, data in {directory}")
        if is_first_compilation():
            console.print(COMPILING)
        with Path(directory, "broker.log").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            _wait_until_ready(process, http, Path(directory, "broker.log"))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: "subprocess.Popen[bytes]", http: int, output: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(f"the broker exited: {output.read_text(errors='replace')[-500:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/readyz", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise DemoError(f"the broker was not ready after {START_SECONDS:.0f} s")
