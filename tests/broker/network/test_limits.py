"""The daemon at the end of what it may have: a full disk, a directory in use, a signal to stop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from protocol.errors import ErrorCode
from storage.format.batch import Record, build_batch
from tests.support.ports import free_port
from tests.support.processes.fork_server import run_forked
from tests.support.protocol.raw_client import RawClient
from tests.support.reading import read_topics
from tests.support.varve import ROOT, VarveBroker, running_varve, start_varve
from tests.support.waiting import wait_until

DISK_BYTES = 24 << 20
TOPIC = "spread"
QUICK: dict[str, Any] = {"checkpoint_interval_ms": 200, "retention_check_interval_ms": 200}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    directory = tmp_path / "small"
    directory.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs Linux and root")
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted: {done.stderr.strip()}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def batch(text: bytes, size_bytes: int = 0) -> bytes:
    record = Record(0, int(time.time() * 1000), b"k", text + b"x" * size_bytes, ())
    return bytes(build_batch([record], base_offset=0))


def partitions_in(directory: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in directory.glob(f"{TOPIC}-*"))


def create(broker: VarveBroker, *new: NewTopic) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    for future in admin.create_topics(list(new)).values():
        future.result(30)


def values(broker: VarveBroker, partition: int) -> list[bytes]:
    return [
        record.value or b"" for record in read_topics(broker.bootstrap, [TOPIC])[TOPIC, partition]
    ]


def values_by_raw(broker: VarveBroker, partition: int) -> tuple[int, int]:
    """Error code and high watermark of a fetch."""
    with RawClient(broker.port) as client:
        answer = client.fetch(TOPIC, partition=partition)
        return answer.error_code, answer.high_watermark


# A full disk ----------------------------------------------------------------------------------


def test_a_full_disk_refuses_what_is_sent_there_until_it_has_room_again(
    small_disk: Path, tmp_path: Path
) -> None:
    settings = {**QUICK, "log_dirs": [str(tmp_path / "roomy"), str(small_disk / "data")]}
    broker = start_varve(tmp_path, settings)
    try:
        create(broker, NewTopic(TOPIC, num_partitions=4))
        here, there = partitions_in(small_disk / "data"), partitions_in(tmp_path / "roomy")
        assert here
        assert there
        acked = fill_up(broker, small_disk, here[0])
        assert_all_online(broker, here, there, acked)
        # The creation of __consumer_offsets, which failed there, has freed its folders.
        leave_no_room(small_disk)
        with pytest.raises(KafkaException, match="No space left"):  # no disk is to know less
            create(broker, NewTopic("refused", num_partitions=1))
        (small_disk / "filler").unlink()
        still_served(broker, there)
        with RawClient(broker.port) as client:
            assert client.produce(TOPIC, batch(b"later"), here[0]).error_code == 0
        acked.append(b"later")
        leave_no_room(small_disk)
        assert broker.stop() == 0, broker.log_text[-2000:]
        (small_disk / "filler").unlink()
        broker = start_varve(tmp_path, settings)
        assert values(broker, here[0]) == acked
        with RawClient(broker.port) as client:
            for partition in here + there:
                assert client.produce(TOPIC, batch(b"again"), partition).error_code == 0
    finally:
        assert broker.stop() == 0


def free_bytes(disk: Path) -> int:
    return os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize


def leave_no_room(disk: Path) -> None:
    """Write until the disk is full, whatever else is written or freed meanwhile."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        page = partial(filler.write, bytes(4096))
        with pytest.raises(OSError, match="No space left"):
            all(iter(page, None))


def fill_up(broker: VarveBroker, disk: Path, partition: int) -> list[bytes]:
    """Leave 2 MB of room and produce until there is none. -> the values that were acknowledged"""
    (disk / "filler").write_bytes(bytes(free_bytes(disk) - (2 << 20)))
    acked: list[bytes] = []
    with RawClient(broker.port) as client:
        for number in range(200):
            text = b"value-%d-" % number
            answer = client.produce(TOPIC, batch(text, 100_000), partition)
            if answer.error_code:
                assert ErrorCode(answer.error_code) is ErrorCode.KAFKA_STORAGE_ERROR
                return acked
            acked.append(text + b"x" * 100_000)
    raise AssertionError("20 MB went into 2 MB")


def assert_all_online(
    broker: VarveBroker, here: list[int], there: list[int], acked: list[bytes]
) -> None:
    assert broker.metric("kafka_log_logmanager_offlinelogdirectorycount") == 0
    assert broker.metric("kafka_controller_kafkacontroller_offlinepartitionscount") == 0
    broker.get("/healthz")
    with RawClient(broker.port) as client:
        for partition in here:
            answer = client.produce(TOPIC, batch(b"no", 100_000), partition)
            assert ErrorCode(answer.error_code) is ErrorCode.KAFKA_STORAGE_ERROR
            assert client.fetch(TOPIC, partition=partition).error_code == 0
        for partition in there:
            assert client.produce(TOPIC, batch(b"yes"), partition).error_code == 0
    assert values(broker, here[0]) == acked
    assert "Traceback" not in broker.log_text
    assert '"exception"' not in broker.log_text


def still_served(broker: VarveBroker, there: list[int]) -> None:
    """Topics are created, deleted and written where there is room."""
    create(broker, NewTopic("elsewhere", num_partitions=2))
    view = read_topics(broker.bootstrap, ["elsewhere"])
    assert len(view) == 2
    assert [values_by_raw(broker, partition) for partition in there] == [(0, 1)] * len(there)


def test_a_partition_of_an_offline_directory_is_not_begun_anew(
    small_disk: Path, tmp_path: Path
) -> None:
    """A directory that cannot be opened at a start: its partitions are known, and offline."""
    settings = {**QUICK, "log_dirs": [str(tmp_path / "roomy"), str(small_disk / "data")]}
    with running_varve(tmp_path, settings) as broker:
        create(broker, NewTopic(TOPIC, num_partitions=4))
        here, there = partitions_in(small_disk / "data"), partitions_in(tmp_path / "roomy")
        with RawClient(broker.port) as client:
            for partition in here + there:
                assert client.produce(TOPIC, batch(b"kept"), partition).error_code == 0
    (small_disk / "data").rename(small_disk / "moved")
    (small_disk / "data").write_text("a file where the directory should be")
    with running_varve(tmp_path, settings) as broker:
        assert broker.metric("kafka_log_logmanager_offlinelogdirectorycount") == 1
        for partition in here:
            code, _ = values_by_raw(broker, partition)
            assert ErrorCode(code) is ErrorCode.KAFKA_STORAGE_ERROR
        assert [values_by_raw(broker, partition) for partition in there] == [(0, 1)] * len(there)
    (small_disk / "data").unlink()
    (small_disk / "moved").rename(small_disk / "data")
    with running_varve(tmp_path, settings) as broker:
        for partition in here + there:
            assert values(broker, partition) == [b"kept"]


# Two brokers, one directory -------------------------------------------------------------------


def reason_of_a_refused_start(stderr: str) -> str:
    """The reason in the one line of the log that says why; every other line is JSON, too."""
    (event,) = (
        event for line in stderr.splitlines() if (event := json.loads(line))["level"] == "error"
    )
    assert event["event"] == "cannot start"
    return str(event["reason"])


def test_a_second_broker_on_the_same_directory_does_not_start_and_says_why(tmp_path: Path) -> None:
    with running_varve(tmp_path, QUICK) as broker:
        create(broker, NewTopic(TOPIC))
        command = [sys.executable, "-m", "broker.cli", "serve", "--data", str(broker.data)]
        command += ["--listen", f"127.0.0.1:{free_port()}", "--http", "127.0.0.1:0"]
        second = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
        )
        assert second.returncode == 1
        assert second.stdout == ""
        reason = reason_of_a_refused_start(second.stderr)
        assert str(broker.data) in reason
        assert f"in use by another broker (process {broker.process.pid})." in reason
        with RawClient(broker.port) as client:
            assert client.produce(TOPIC, batch(b"first goes on")).error_code == 0


def test_a_port_in_use_is_told_in_one_line_and_the_directory_is_free_again(tmp_path: Path) -> None:
    with running_varve(tmp_path / "one", QUICK) as broker:
        arguments = ["serve", "--data", str(tmp_path / "two"), "--listen", broker.bootstrap]
        second = run_forked(*arguments, "--http", "127.0.0.1:0", url=broker.url)
        assert second.returncode == 1
        assert str(broker.port) in reason_of_a_refused_start(second.stderr)


# Stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_leaves_the_marker_and_the_next_start_recovers_nothing(
    tmp_path: Path, signum: signal.Signals
) -> None:
    broker = start_varve(tmp_path, QUICK)
    create(broker, NewTopic(TOPIC, num_partitions=3))
    acked: list[bytes] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0, "linger.ms": 1})
    for number in range(3000):
        producer.produce(
            TOPIC,
            b"%d" % number,
            partition=number % 3,
            on_delivery=lambda error, message: error or acked.append(message.value()),
        )
        producer.poll(0)
    wait_until(lambda: producer.poll(0) or len(acked) > 500, "some are acknowledged")
    broker.process.send_signal(signum)
    assert broker.process.wait(30) == 0, broker.log_text[-2000:]
    assert (broker.data / ".kafka_cleanshutdown").exists()
    assert "Traceback" not in broker.log_text
    reported = list(acked)
    mark = len(broker.log_text)
    producer.purge()
    with running_varve(tmp_path, QUICK) as again:
        assert not (again.data / ".kafka_cleanshutdown").exists(), "from now on a crash is a crash"
        started = [json.loads(t) for t in again.log_text[mark:].splitlines() if t.startswith("{")]
        assert not [line for line in started if line["level"] != "info"]
        assert not [line for line in started if "recover" in line["event"]]
        view = read_topics(again.bootstrap, [TOPIC])
        results = {record.value for records in view.values() for record in records}
        assert set(reported) <= results


@pytest.mark.parametrize("wait_ms", [20_000, 10])
def test_waiting_consumers_do_not_hold_up_a_stop(tmp_path: Path, wait_ms: int) -> None:
    """One that waits for long, and one that asks again as soon as it was answered."""
    broker = start_varve(tmp_path, QUICK)
    create(broker, NewTopic(TOPIC))
    options = {"bootstrap.servers": broker.bootstrap, "group.id": "g", "log_level": 0}
    consumer = Consumer({**options, "fetch.wait.max.ms": wait_ms})
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    name = "kafka_network_requestmetrics_requests_total"
    waiting = "kafka_server_delayedoperationpurgatory_purgatorysize"

    def fetches() -> bool:
        consumer.poll(0.01)
        if wait_ms > 1000:
            return broker.metric(waiting, delayedoperation="Fetch") == 1
        return broker.metric(name, request="Fetch") > 3

    wait_until(fetches, "the consumer fetches")
    started = time.monotonic()
    assert broker.stop() == 0
    assert time.monotonic() - started < 10
    consumer.close()


def test_an_unclean_stop_is_recovered_and_told(tmp_path: Path) -> None:
    """The other side of the clean one: here there is something to do."""
    broker = start_varve(tmp_path, QUICK)
    create(broker, NewTopic(TOPIC))
    with RawClient(broker.port) as client:
        for number in range(20):
            assert client.produce(TOPIC, batch(b"%d" % number)).error_code == 0
    broker.kill()
    log = broker.data / f"{TOPIC}-0" / "00000000000000000000.log"
    with log.open("ab") as torn:
        torn.write(batch(b"torn")[:-7])
    mark = len(broker.log_text)
    with running_varve(tmp_path, QUICK) as again:
        assert values(again, 0) == [b"%d" % number for number in range(20)]
        started = [json.loads(t) for t in again.log_text[mark:].splitlines() if t.startswith("{")]
        assert [line for line in started if line.get("partition") == f"{TOPIC}-0"]
