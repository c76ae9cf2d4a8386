"""The real daemon, its cleaner's API, the command line on it, and SIGHUP."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from admin.client import ApiClient, ApiRefusedError, UnreachableError
from config import exit_codes
from storage.format.batch import walk_headers
from tests.support.ports import free_port
from tests.support.processes.fork_server import run_forked
from tests.support.varve import VarveBroker, running_varve
from tests.support.waiting import wait_until

TOPICS: dict[str, Any] = {
    "customers": {"partitions": 2, "cleanup.policy": "compact", "segment.bytes": "1MiB"},
    "audit": {"cleanup.policy": "delete"},
}
KEYS = 500


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    with running_varve(tmp_path_factory.mktemp("steered"), {"topics": TOPICS}) as running:
        yield running


def produce(broker: VarveBroker, partition: int, count: int, tag: str) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 20})
    for number in range(count):
        key = f"key-{number % KEYS}"
        producer.produce("customers", f"{tag}-{number}-{'x' * 80}", key, partition)
    assert producer.flush(30) == 0


def varve(
    broker: VarveBroker, *arguments: str, url: str | None = None, group: str = "cleaner"
) -> subprocess.CompletedProcess[str]:
    return run_forked(group, *arguments, url=url or broker.url)


def answered(broker: VarveBroker, *arguments: str) -> Any:
    done = varve(broker, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- the command line -----------------------------------------------------------------------------


def test_a_partition_is_cleaned_on_demand_with_its_active_segment(broker: VarveBroker) -> None:
    produce(broker, 0, 5 * KEYS, "a")
    before = varve(broker, "run", "customers", "0")
    assert before.returncode == 0
    hint = "`varve cleaner run customers 0 --roll` rolls it now."
    assert hint in before.stdout
    estimate = varve(broker, "estimate", "customers", "0")
    assert (estimate.returncode, estimate.stdout) == (0, before.stdout)
    done = varve(broker, "run", "customers", "0", "--roll", "--wait", "--timeout", "60")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"customers-0 is clean below offset {5 * KEYS}" in done.stdout
    assert "2,500 records became 500" in done.stdout
    again = answered(broker, "run", "customers", "0", "--wait")
    assert again["dirty_bytes"] == 0

    result = answered(broker, "explain", "customers", "0")
    assert result["first_dirty_offset"] == 5 * KEYS
    assert result["last_job"]["records_after"] == KEYS
    assert result["transitions"][0]["event"] == "JobStarted"
    estimate = answered(broker, "estimate", "customers", "0")
    assert all(group["measured"] for group in estimate["groups"])
    assert estimate["freed_bytes"] == 0
    text = varve(broker, "estimate", "customers", "0", "--groups").stdout
    assert text.startswith("customers-0: there is nothing to clean now.")
    assert f"0 to {5 * KEYS - 1}" in text
    (job,) = answered(broker, "history", "customers", "0")["jobs"]
    assert (job["outcome"], job["tombstones_removed"]) == ("finished", 0)
    assert "customers-0  finished" in varve(broker, "history", "customers").stdout
    assert '"event": "clean finished"' in broker.log_text
    assert '"buffer_utilization_percent"' in broker.log_text
    labels = {"topic": "customers", "partition": "0"}
    assert broker.metric("varve_cleaner_dirty_ratio", **labels) == 0
    assert broker.metric("kafka_log_logcleaner_max_clean_time_secs") > 0


def test_a_log_is_verified_and_a_damaged_one_differs(tmp_path: Path) -> None:
    strategy = {"varve.cleaner.strategy": "generational"}
    settings = {"topics": {"customers": TOPICS["customers"] | strategy | {"partitions": 1}}}
    with running_varve(tmp_path, settings) as broker:
        produce(broker, 0, 4 * KEYS, "a")
        assert varve(broker, "run", "customers", "--roll", "--wait").returncode == 0
        produce(broker, 0, KEYS // 2, "b")
        assert varve(broker, "run", "customers", "--roll", "--wait").returncode == 0
        done = varve(broker, "customers", "0", "--segments", group="verify")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("customers-0: nothing differs, below offset 2,250: 500 keys")
        result = json.loads(varve(broker, "customers", "--json", group="verify").stdout)
        (row,) = result["partitions"]
        assert row["result"]["live"] == KEYS
        assert row["result"]["uncleaned"] == row["result"]["dead"] == 0
        (path, *_) = sorted((tmp_path / "data" / "customers-0").glob("*.log"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        done = varve(broker, "customers", group="verify")
        assert done.returncode == exit_codes.UNVERIFIED
        assert "damage, offsets 0 to " in done.stdout
        assert '"event": "log differs"' in broker.log_text
        missing = varve(broker, "nothing", "0", group="verify")
        hint = "`varve topics list` shows all"
        assert missing.stderr == f"varve: there is no topic nothing; {hint}\n"


def test_a_record_that_is_lost_after_a_verified_clean_is_noticed(tmp_path: Path) -> None:
    topics = {"customers": TOPICS["customers"] | {"partitions": 1}}
    settings = {"topics": topics, "cleaner": {"verify": True}}
    with running_varve(tmp_path, settings) as broker:
        produce(broker, 0, 4 * KEYS, "a")
        assert varve(broker, "run", "customers", "--roll", "--wait").returncode == 0
        done = varve(broker, "customers", "0", group="verify")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("1 digest compared\n")
    (path, *_) = sorted((tmp_path / "data" / "customers-0").glob("*.log"))
    data = path.read_bytes()
    headers = list(walk_headers(data))
    position, header = headers[len(headers) // 2]
    path.write_bytes(data[:position] + data[position + header.size_bytes :])
    for kind in (".index", ".timeindex"):
        path.with_suffix(kind).unlink()
    with running_varve(tmp_path, settings) as broker:
        done = varve(broker, "customers", "0", group="verify")
        assert done.returncode == exit_codes.UNVERIFIED
        left = KEYS - header.record_count
        assert f"{left} are left in these offsets" in done.stdout
        again = varve(broker, "customers", "0", group="verify")
        assert again.returncode == exit_codes.UNVERIFIED  # the digest stays


def test_a_paused_partition_is_left_alone_until_it_is_resumed(broker: VarveBroker) -> None:
    assert varve(broker, "pause", "customers", "1").stdout == "customers-1 is paused\n"
    assert varve(broker, "pause", "customers", "1").stdout == "customers-1 was paused already\n"
    produce(broker, 1, 5 * KEYS, "a")
    refused = varve(broker, "run", "customers", "1", "--roll", "--wait")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "varve: customers-1 is paused by an operator: resume it first\n"
    explained = varve(broker, "explain", "customers", "1").stdout.splitlines()
    assert explained[0] == "customers-1 is not being cleaned: paused by an operator."
    assert answered(broker, "explain", "customers", "1")["last_job"] is None
    status = varve(broker, "status").stdout
    assert "1 paused by an operator" in status
    assert "customers-1  paused" in status
    (paused,) = [line for line in status.splitlines() if line.startswith("customers-1 ")]
    assert "paused by an operator" in paused
    assert varve(broker, "resume", "customers", "1").stdout == "customers-1 is resumed\n"
    done = varve(broker, "run", "customers", "1", "--roll", "--wait")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_fresh_topic_that_is_all_in_its_active_segment_is_explained(tmp_path: Path) -> None:
    with running_varve(tmp_path, {"topics": TOPICS}) as broker:
        produce(broker, 0, 1000, "a")
        (row,) = varve(broker, "status", "--topic", "customers").stdout.splitlines()[3:4]
        head, *_ = varve(broker, "status", "--topic", "customers").stdout.splitlines()
        assert head.startswith("customers: 2 partitions, 0 due, 0 being cleaned, 0 paused; 0 B")
        assert row.split()[:2] == ["customers-0", "idle"]
        result = answered(broker, "explain", "customers", "0")
        assert result["waiting_bytes"] == result["size_bytes"] > 100_000
        assert result["live_bytes"] is None
        text = varve(broker, "explain", "customers", "0").stdout
        assert re.search(
            r"KiB, and no closed segment is dirty. It can be cleaned once it is rolled at 1.0 MiB "
            r"or in (24.0|23.9) h",
            text,
        ), text
        assert "would leave" not in text
        assert re.search(r"Next attempt: in .*, when its active segment is rolled", text)


def test_a_run_that_cannot_clean_what_is_dirty_says_why_and_fails_a_wait(tmp_path: Path) -> None:
    settings = {"topics": {"customers": TOPICS["customers"] | {"min.compaction.lag.ms": "1h"}}}
    with running_varve(tmp_path, settings) as broker:
        empty = varve(broker, "run", "customers", "0", "--roll", "--wait")
        assert (empty.returncode, empty.stdout) == (
            0,
            "customers-0: nothing to clean: it is empty\n",
        )
        produce(broker, 0, 1000, "a")
        done = varve(broker, "run", "customers", "0", "--roll", "--wait")
        assert (done.returncode, done.stdout) == (1, "")
        assert "records are younger than min.compaction.lag.ms (" in done.stderr
        process = varve(broker, "run", "customers", "0", "--roll")
        assert (process.returncode, "younger than" in process.stdout) == (0, True)


def test_a_run_that_a_view_bounds_says_so_and_fails_a_wait(tmp_path: Path) -> None:
    keys = {"varve.view": "compacted", "varve.view.min.bytes": -1}
    with running_varve(tmp_path, {"topics": {"customers": TOPICS["customers"] | keys}}) as broker:
        produce(broker, 0, 1000, "a")
        process = varve(broker, "compact", "customers", "0", group="view")
        assert process.returncode == 0, process.stderr
        assert varve(broker, "run", "customers", "0", "--roll", "--wait").returncode == 0
        produce(broker, 0, 1000, "b")
        done = varve(broker, "run", "customers", "0", "--roll", "--wait")
        assert (done.returncode, done.stdout) == (1, "")
        assert "the topic's compacted view has only the records below offset 1000" in done.stderr
        assert answered(broker, "explain", "customers", "0")["blocked_by"] == "compacted view"


def test_a_run_that_an_operator_aborts_fails_and_names_the_operator(tmp_path: Path) -> None:
    settings = {"topics": TOPICS, "cleaner": {"read_bytes_per_second": "64KiB"}}
    with running_varve(tmp_path, settings) as broker:
        produce(broker, 0, 20_000, "a")
        client = ApiClient(f"http://127.0.0.1:{broker.http_port}")
        path = "/partitions/customers/0"
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(varve, broker, "run", "customers", "0", "--roll", "--wait")
            wait_until(lambda: client.get(path)["state"] == "cleaning", "the clean")
            assert client.get(path)["job"]["job_id"]
            assert varve(broker, "abort", "customers", "0").stdout == "customers-0 aborted\n"
            done = running.result(60)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == "varve: the clean was aborted: an operator aborted it\n"
        (job,) = answered(broker, "history", "customers", "0")["jobs"]
        assert (job["outcome"], job["reason"]) == ("aborted", "an operator aborted it")


def test_all_are_paused_and_resumed_at_once(broker: VarveBroker) -> None:
    assert "2 partitions: each is paused;" in varve(broker, "pause", "--all").stdout
    assert varve(broker, "resume", "--all").stdout == "2 partitions: each is resumed\n"
    for wrong in (["pause"], ["resume", "customers", "0", "--all"]):
        assert varve(broker, *wrong).returncode == 2


def test_commands_take_a_whole_topic_or_one_partition_by_its_name(broker: VarveBroker) -> None:
    assert varve(broker, "pause", "customers-1").stdout == "customers-1 is paused\n"
    both = varve(broker, "pause", "customers").stdout.splitlines()
    assert both == ["customers-0 is paused", "customers-1 was paused already"]
    result = answered(broker, "explain", "customers")
    assert [row["partition"] for row in result["partitions"]] == [0, 1]
    assert answered(broker, "explain", "customers-1")["partition"] == 1
    text = varve(broker, "explain", "customers").stdout
    assert text.count("is not being cleaned: paused by an operator.") == 2
    assert varve(broker, "resume", "customers-0").stdout == "customers-0 is resumed\n"
    produce(broker, 0, KEYS, "a")
    done = varve(broker, "run", "customers", "--roll", "--wait")
    # One refuses, and the other one is cleaned all the same.
    assert done.returncode == 1
    assert done.stderr == "varve: customers-1 is paused by an operator: resume it first\n"
    assert done.stdout.startswith("customers-0 is clean below offset")
    assert varve(broker, "resume", "customers").returncode == 0


def test_a_partition_with_damage_is_cleaned_around_it_and_says_so(tmp_path: Path) -> None:
    # No log is more dirty than wholly so: the cleaner does nothing before the command.
    customers = {**TOPICS["customers"], "min.cleanable.dirty.ratio": 1.0}
    with running_varve(tmp_path, {"topics": {"customers": customers}}) as broker:
        produce(broker, 1, 20_000, "a")
        first = min((broker.data / "customers-1").glob("*.log"))
        data = bytearray(first.read_bytes())
        data[len(data) // 2] ^= 1
        first.write_bytes(data)
        done = varve(broker, "run", "customers", "1", "--roll", "--wait", "--timeout", "60")
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{first} is damaged at byte" in done.stderr
        document = [line for line in broker.log_text.splitlines() if str(first) in line]
        (line,) = [json.loads(item) for item in document]
        assert (line["event"], line["level"]) == ("clean finished with damage", "error")
        (job,) = answered(broker, "history", "customers", "1")["jobs"]
        assert job["outcome"] == "damaged"
        explained = varve(broker, "explain", "customers", "1").stdout
        assert "customers-1 is not being cleaned: quarantined." in explained
        assert "leaves that segment unchanged and cleans the rest" in explained
        labels = {"topic": "customers", "partition": "1"}
        assert broker.metric("varve_cleaner_quarantined", **labels) == 1
        assert broker.metric("varve_cleaner_quarantined_until_seconds", **labels) > time.time() - 60
        uncleanable = "kafka_log_logcleanermanager_uncleanable_partitions_count"
        assert broker.metric(uncleanable, logdirectory=str(broker.data)) == 1
        assert varve(broker, "retry", "customers", "1").stdout == "customers-1 left quarantine\n"
        again = varve(broker, "run", "customers", "1", "--roll", "--wait")
        assert (again.returncode, again.stdout) == (1, "")
        assert "leaves that segment unchanged" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["explain", "nowhere", "0"], 1, "no topic nowhere; `varve topics list` shows all"),
        (["explain", "customers", "9"], 1, "customers has no partition 9; its last one is 1"),
        (["run", "audit", "0"], 2, "audit-0 is not compacted: its cleanup.policy is delete"),
        (["estimate", "audit", "0"], 2, "audit-0 is not compacted: its cleanup.policy is delete"),
        (["explain"], 2, "Missing argument 'TOPIC'"),
        (["explain", "nowhere"], 1, "no topic nowhere; `varve topics list` shows all"),
        (["pause", "nowhere-1"], 1, "varve: there is no topic nowhere"),
        (["explain", "custmers", "0"], 1, "no topic custmers; did you mean customers?"),
        (["explain", "custmers"], 1, "no topic custmers; did you mean customers?"),
        (["explain", "data/customers-0"], 2, "is a path: name a topic, or read files with `varve"),
        (["explain", "customers-9"], 1, "customers has no partition 9; its last one is 1"),
        (["explain", "customers", "-1"], 2, "No such option"),
        (["explain", "customers", "x"], 2, "'x' is not a valid partition number"),
        (["status", "--http", "ftp://somewhere"], 2, "expected http://HOST:PORT"),
        (["status", "--token-file", "absent"], 1, "absent: No such file"),
        (["history", "nowhere", "0"], 1, "there is no topic nowhere"),
        (["history", "--limit", "0"], 2, "is not in the range"),
    ],
)
def test_bad_requests_end_with_a_line_and_a_code(
    broker: VarveBroker, arguments: list[str], code: int, words: str
) -> None:
    done = varve(broker, *arguments)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (code, "", False)
    assert words in done.stderr


def test_where_no_broker_answers_the_code_is_that_of_every_command(broker: VarveBroker) -> None:
    for url in (f"127.0.0.1:{free_port()}", broker.bootstrap):
        done = varve(broker, "status", url=url)
        assert (done.returncode, done.stdout) == (exit_codes.UNREACHABLE, "")
        assert done.stderr.startswith("varve: ")
        assert f"http://{url}" in done.stderr


def test_an_operator_lists_leases_and_ends_the_one_of_a_process_that_is_gone(
    broker: VarveBroker,
) -> None:
    produce(broker, 0, KEYS, "l")
    assert varve(broker, "list", group="leases").stdout == "No partition is leased.\n"
    client = ApiClient(f"http://127.0.0.1:{broker.http_port}").below("/api/v1/remote-compactions")
    run = client.post("", {"topic": "customers", "partitions": [0], "roll": True})["compaction_id"]
    listed = varve(broker, "list", "--topic", "customers", group="leases").stdout.splitlines()
    assert listed[0].split()[:2] == ["ID", "TOPIC"]
    assert listed[1].split()[:5] == [run, "customers", "0", "compact", "open"]
    ended = varve(broker, "end", run, group="leases")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{run} has ended. Its partitions of customers are released.\n"
    assert varve(broker, "list", group="leases").stdout == "No partition is leased.\n"
    listed = varve(broker, "list", "--ended", group="leases").stdout.splitlines()
    assert f"{run}: a request ended its lease" in listed
    again = varve(broker, "end", run, group="leases")
    assert (again.returncode, again.stdout) == (exit_codes.FAILED, "")
    assert "a request ended its lease" in again.stderr
    client.delete(f"/{client.post('', {'topic': 'customers', 'partitions': [0]})['compaction_id']}")


def test_a_client_tells_refusals_from_silence(broker: VarveBroker) -> None:
    client = ApiClient(f"http://127.0.0.1:{broker.http_port}")
    with pytest.raises(ApiRefusedError, match="unknown parameter"):
        client.get("", colour="green")
    with pytest.raises(UnreachableError):
        ApiClient(f"http://127.0.0.1:{free_port()}").get("")


# --- SIGHUP ---------------------------------------------------------------------------------------


def rewrite(broker: VarveBroker, **changes: Any) -> None:
    file = broker.directory / "varve.yaml"
    settings = yaml.safe_load(file.read_text()) | changes
    file.write_text(yaml.safe_dump(settings))


def hang_up(broker: VarveBroker, event: str) -> list[dict[str, Any]]:
    """Send SIGHUP; the lines that were written until `event` came."""
    before = len(broker.log_text.splitlines())
    broker.process.send_signal(signal.SIGHUP)

    def lines() -> list[dict[str, Any]]:
        document = broker.log_text.splitlines()[before:]
        return [json.loads(line) for line in document if line.startswith("{")]

    wait_until(lambda: any(line["event"] == event for line in lines()), event)
    return lines()


def alter(broker: VarveBroker, topic: str, key: str, value: str) -> None:
    entry = ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(timeout=30)


def test_a_reload_changes_topics_and_the_cleaner_while_clients_are_served(tmp_path: Path) -> None:
    with running_varve(tmp_path, {"topics": TOPICS}) as broker:
        produce(broker, 0, 5 * KEYS, "a")
        alter(broker, "customers", "min.cleanable.dirty.ratio", "0.7")
        client = ApiClient(f"http://127.0.0.1:{broker.http_port}")
        topics = {
            "customers": TOPICS["customers"] | {"partitions": 3, "min.cleanable.dirty.ratio": 0.1},
            "audit": {"cleanup.policy": "compact,delete"},
            "fresh": {},
        }
        rewrite(
            broker,
            topics=topics,
            cleaner={"workers": 2, "read_bytes_per_second": "50MiB", "enabled": False},
            checkpoint_interval_ms="5s",
        )
        lines = hang_up(broker, "settings reloaded")
        (hidden,) = [
            line for line in lines if line["event"] == "setting overridden by a dynamic setting"
        ]
        assert hidden["key"] == "topics.customers.min.cleanable.dirty.ratio"
        assert (hidden["value"], hidden["dynamic_value"]) == ("0.1", "0.7")
        fixed = [line for line in lines if line["event"] == "setting needs restart"]
        assert sorted(item["key"] for item in fixed) == [
            "checkpoint_interval_ms",
            "cleaner.enabled",
        ]
        status = client.get("")
        assert status["enabled"] is True
        assert (status["workers_wanted"], status["read_bytes_per_second"]) == (2, 50 << 20)
        assert status["partitions"]["compacted"] == 4
        assert len(client.get("/partitions", topic="fresh")["partitions"]) == 1
        wait_until(lambda: len(client.get("")["workers"]) == 2, "a second worker")
        produce(broker, 2, 1, "b")

        # Fewer partitions, and a topic that is gone from the file: neither is taken away.
        rewrite(broker, topics={"customers": TOPICS["customers"]})
        hang_up(broker, "settings reloaded")
        assert len(client.get("/partitions", topic="customers")["partitions"]) == 3
        audit = client.get("/partitions/audit/0")
        assert audit["cleanup_policy"] == []  # unknown: its records are kept
        assert answered(broker, "run", "customers", "0", "--roll", "--wait")["state"] == "idle"


def test_a_file_with_an_error_changes_nothing_and_says_where(tmp_path: Path) -> None:
    with running_varve(tmp_path, {"topics": TOPICS}) as broker:
        file = broker.directory / "varve.yaml"
        good = file.read_text()
        bad = good.replace("cleaner:\n", "cleaner:\n  workers: 4\n  backoff_ms: soon\n", 1)
        file.write_text(bad + "limitz: {}\n")
        lines = hang_up(broker, "settings not reloaded")
        at = bad.splitlines().index("  backoff_ms: soon") + 1
        end = len(bad.splitlines()) + 1
        wait_until(lambda: broker.log_text.count("settings not reloaded") == 2, "both errors")
        lines = [
            json.loads(splitline)
            for splitline in broker.log_text.splitlines()
            if "not reloaded" in splitline
        ]
        reasons = [line["reason"] for line in lines]
        assert reasons[0].startswith(f"{file}:{at}: cleaner.backoff_ms: expected")
        assert reasons[1] == f"{file}:{end}: limitz: unknown setting; did you mean limits?"
        client = ApiClient(f"http://127.0.0.1:{broker.http_port}")
        assert client.get("")["workers_wanted"] == 1

        # A file that is good in itself, and contradicts what a client set.
        alter(broker, "customers", "max.compaction.lag.ms", "60000")
        file.write_text(good.replace("cleanup.policy: compact", "min.compaction.lag.ms: 1h"))
        wait_until(lambda: "min.compaction.lag.ms" in file.read_text(), "the file")
        lines = hang_up(broker, "settings not reloaded")
        (line,) = [line for line in lines if line["event"] == "settings not reloaded"]
        assert "topics.customers" in line["reason"]
        assert "min.compaction.lag.ms" in line["reason"]
        assert client.get("/partitions/customers/0")["cleanup_policy"] == ["compact"]


def test_a_reload_reads_the_token_anew(tmp_path: Path) -> None:
    tokens = tmp_path / "token"
    tokens.write_text("0123456789abcdef\n")
    with running_varve(tmp_path / "run", {"http_token_file": str(tokens)}) as broker:
        url = f"http://127.0.0.1:{broker.http_port}"
        assert varve(broker, "status").returncode == 1
        assert varve(broker, "status", "--token-file", str(tokens)).returncode == 0
        tokens.write_text("fedcba9876543210")
        hang_up(broker, "settings reloaded")
        with pytest.raises(ApiRefusedError, match="wrong token"):
            ApiClient(url, "0123456789abcdef").get("")
        assert ApiClient(url, "fedcba9876543210").get("")["enabled"] is True
        tokens.write_text("short")
        hang_up(broker, "settings not reloaded")
        assert ApiClient(url, "fedcba9876543210").get("")["enabled"] is True


# --- retention beside the cleaner (KIP-71) --------------------------------------------------------


def test_retention_of_a_compacted_topic_goes_on_whatever_the_cleaner_does(tmp_path: Path) -> None:
    both = {"cleanup.policy": "compact,delete", "segment.bytes": "1MiB", "retention.bytes": "1MiB",
            "min.cleanable.dirty.ratio": 0.01}  # fmt: skip
    settings = {
        "topics": {"customers": both},
        "retention_check_interval_ms": "100ms",
        # A clean of this log takes a minute.
        "cleaner": {"read_bytes_per_second": "64KiB"},
    }
    with running_varve(tmp_path, settings) as broker:
        client = ApiClient(f"http://127.0.0.1:{broker.http_port}")
        produce(broker, 0, 40_000, "a")
        wait_until(lambda: client.get("")["partitions"]["in_progress"], "a clean")

        def start_offset() -> int:
            return int(client.get("/partitions/customers/0")["log_start_offset"])

        wait_until(lambda: start_offset() > 0, "retention beside a long clean")
        client.post("/partitions/customers/0/pause")
        paused_at = start_offset()
        produce(broker, 0, 30_000, "b")
        wait_until(lambda: start_offset() > paused_at, "retention of a paused partition")
        settled = {"group.id": "g", "auto.offset.reset": "earliest"}
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, **settled})
        consumer.subscribe(["customers"])
        first = consumer.poll(30)
        consumer.close()
        assert first is not None
        assert first.offset() >= paused_at


def test_a_clean_by_generations_rewrites_some_segments_and_can_be_estimated(tmp_path: Path) -> None:
    topic = TOPICS["customers"] | {"partitions": 1}
    with running_varve(tmp_path, {"topics": {"customers": topic}}) as broker:
        values = [os.urandom(4_000) for _ in range(KEYS)]  # 2 MB: three segments of 1 MiB
        producer = Producer({"bootstrap.servers": broker.bootstrap})

        def write(count: int) -> None:
            for number in range(count):
                producer.produce("customers", values[number], f"key-{number}", 0)
            assert producer.flush(30) == 0

        def clean() -> dict[str, Any]:
            done = varve(broker, "run", "customers", "0", "--roll", "--wait", "--timeout", "60")
            assert (done.returncode, done.stderr) == (0, "")
            job: dict[str, Any] = answered(broker, "history", "customers", "0")["jobs"][0]
            return job

        write(KEYS)
        clean()  # of the whole log
        for _ in range(10):
            write(KEYS // 10)
        job = clean()
        assert (job["outcome"], job["records_after"]) == ("finished", KEYS)
        assert job["keys_indexed"] == KEYS  # by the key indexes of all segments
        assert job["bytes_written"] < job["bytes_after"]  # segments without garbage stay
        estimate = answered(broker, "estimate", "customers", "0")
        assert all(group["measured"] for group in estimate["groups"])
        assert (estimate["selective"], estimate["freed_bytes"]) == (True, 0)
        (row,) = estimate["survival"]
        assert (row["written"], row["alive"]) == (2 * KEYS, KEYS)
        text = varve(broker, "estimate", "customers", "0", "--survival").stdout
        last = text.splitlines()[-1].split()
        assert last == ["younger", f"{2 * KEYS:,}", f"{KEYS:,}", "50.0%"]
        assert text.startswith("customers-0: there is nothing to clean now.")
        text = varve(broker, "estimate", "customers", "0", "--slack", "0.3").stdout
        assert re.search(r"^0\.3 ", text, re.MULTILINE), text
