"""`varve topics`, `varve groups`, `varve produce` and `varve consume` against a daemon."""

import json
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial
from os import SEEK_END
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer, Producer

from broker.cli import main
from config import exit_codes
from storage.format.batch import read_header
from storage.format.compression import ZSTD
from tests.support.ports import free_port
from tests.support.varve import VarveBroker, running_varve
from tests.support.waiting import wait_until


def run(broker: VarveBroker, *arguments: str, lines: bytes = b"") -> Result:
    return CliRunner().invoke(main, [*arguments, "--bootstrap", broker.bootstrap], input=lines)


def done(broker: VarveBroker, *arguments: str, lines: bytes = b"") -> str:
    """Run a command that has to succeed; return its standard output."""
    result = run(broker, *arguments, lines=lines)
    assert result.exit_code == 0, result.output
    return result.stdout


def answered(broker: VarveBroker, *arguments: str) -> Any:
    return json.loads(done(broker, *arguments, "--json"))


def refused(
    broker: VarveBroker, *arguments: str, lines: bytes = b"", code: int = exit_codes.FAILED
) -> str:
    """Run a command that has to fail; return its error."""
    result = run(broker, *arguments, lines=lines)
    assert (result.exit_code, result.stdout) == (code, ""), repr(result.exception)
    return result.stderr


def created(broker: VarveBroker, topic: str, partitions: int = 1) -> str:
    done(broker, "topics", "create", topic, "--partitions", str(partitions),
         "--set", "cleanup.policy=compact")  # fmt: skip
    return topic


def rows(text: str) -> list[list[str]]:
    """The fields of `varve consume` without the time."""
    fields = [line.split("\t") for line in text.splitlines()]
    return [[*row[:2], *row[3:]] for row in fields]


# --- topics ---------------------------------------------------------------------------------------


def test_a_topic_is_created_listed_changed_and_deleted(broker: VarveBroker) -> None:
    output = done(broker, "topics", "create", "t1", "--partitions", "2",
                  "--set", "cleanup.policy=compact", "--set", "segment.ms=60000")  # fmt: skip
    assert output == "t1 is created.\n"
    (row,) = [row for row in answered(broker, "topics", "list")["topics"] if row["topic"] == "t1"]
    assert row == {
        "topic": "t1",
        "partitions": 2,
        "cleanup_policy": "compact",
        "policy_unknown": False,
        "size_bytes": 0,
    }
    output = done(broker, "topics", "alter", "t1", "--unset", "segment.ms",
                  "--set", "min.cleanable.dirty.ratio=0.2", "--partitions", "3")  # fmt: skip
    assert output.splitlines() == [
        "t1: min.cleanable.dirty.ratio=0.2",
        "t1: segment.ms=604800000 (7 d), the default",
        "t1: 3 partitions",
    ]
    assert done(broker, "topics", "describe", "t1").splitlines() == [
        "t1: 3 partitions, compact",
        "",
        "Settings that are set; all others have their defaults:",
        "  cleanup.policy=compact",
        "  min.cleanable.dirty.ratio=0.2",
        "",
        "PARTITION  OFFSETS           SIZE",
        "        0  empty, next is 0   0 B",
        "        1  empty, next is 0   0 B",
        "        2  empty, next is 0   0 B",
    ]
    done(broker, "produce", "t1", "--partition", "1", lines=b"a\t1\nb\t2\n")
    assert "        1  0 to 1  " in done(broker, "topics", "describe", "t1")
    assert done(broker, "topics", "delete", "t1", "--yes") == "t1 is deleted.\n"
    assert "t1" not in done(broker, "topics", "list")


def test_a_setting_may_have_a_unit_as_in_the_settings_file(broker: VarveBroker) -> None:
    done(broker, "topics", "create", "units", "--set", "segment.bytes=64MiB")
    output = done(broker, "topics", "alter", "units", "--set", "retention.ms=7d")
    assert output == "units: retention.ms=604800000 (7 d)\n"
    settings = answered(broker, "topics", "describe", "units")["settings"]
    assert settings == {"retention.ms": "604800000", "segment.bytes": str(64 << 20)}


def test_a_setting_that_is_set_to_its_default_is_shown_as_such(broker: VarveBroker) -> None:
    done(broker, "topics", "create", "usual", "--set", "retention.ms=7d", "--set", "segment.ms=1d")
    lines = done(broker, "topics", "describe", "usual").splitlines()
    assert lines[3:5] == [
        "  retention.ms=604800000 (7 d), same as the default",
        "  segment.ms=86400000 (1 d)",
    ]
    assert answered(broker, "topics", "describe", "usual")["set_to_default"] == ["retention.ms"]


def test_a_setting_of_the_settings_file_is_shown_as_such(tmp_path: Path) -> None:
    in_file = {"cleanup.policy": "delete", "segment.bytes": 1 << 20}
    settings = {"topics": {"filed": in_file}, "topic_defaults": {"retention.ms": 60_000}}
    with running_varve(tmp_path, settings) as broker:
        done(broker, "topics", "alter", "filed", "--set", "cleanup.policy=compact")
        output = done(broker, "topics", "alter", "filed", "--unset", "cleanup.policy")
        assert output == "filed: cleanup.policy=delete, from the settings file\n"
        lines = done(broker, "topics", "describe", "filed").splitlines()
    assert lines[3:6] == [
        "  cleanup.policy=delete, from the settings file, same as the default",
        "  retention.ms=60000 (1 min), from the settings file",
        "  segment.bytes=1048576 (1 MiB), from the settings file",
    ]


def test_a_topic_that_is_missing_is_answered_with_a_similar_name(broker: VarveBroker) -> None:
    created(broker, "wholesalers")
    similar = "there is no topic wholesaler, or you may not describe it; did you mean wholesalers?"
    assert refused(broker, "topics", "delete", "wholesaler") == f"varve: {similar}\n"
    assert "topics create" not in refused(broker, "topics", "delete", "qqqq")
    assert "`varve topics create` makes" in refused(broker, "produce", "qqqq")


def compacted(broker: VarveBroker, topic: str) -> str:
    """Make a topic compacted; return what the command prints to standard error."""
    result = run(broker, "topics", "alter", topic, "--set", "cleanup.policy=compact,delete")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{topic}: cleanup.policy=compact,delete\n"
    return result.stderr


def test_a_topic_that_becomes_compacted_names_its_records_without_a_key(
    broker: VarveBroker,
) -> None:
    done(broker, "topics", "create", "readings", "--partitions", "2")
    lines = ["--partition", "0"], ["--partition", "1", "--separator", ""]
    for options in lines:
        done(broker, "produce", "readings", *options, lines=b"a\t1\nb\t2\nc\t3\n")
    assert compacted(broker, "readings") == (
        "varve: 3 of 6 records of readings have no key. A clean of a compacted topic removes them, "
        "and producers can write no others. Copy them to another topic first if you need them.\n"
    )
    assert compacted(broker, "readings") == "", "it was compacted already"


def test_a_large_topic_that_becomes_compacted_is_sampled(broker: VarveBroker) -> None:
    done(broker, "topics", "create", "large", "--partitions", "1")
    done(broker, "produce", "large", "--compression", "zstd", lines=b"key\tvalue\n" * 3000)
    (log,) = broker.data.glob("large-0/*.log")
    assert read_header(log.read_bytes()).codec == ZSTD
    done(broker, "produce", "large", "--separator", "", lines=b"value\n" * 3000)
    warning = compacted(broker, "large")
    assert warning.startswith("varve: About 3,000 of 6,000 (from a sample of 512) records of large")


def test_a_topic_whose_records_have_keys_becomes_compacted_in_silence(broker: VarveBroker) -> None:
    done(broker, "topics", "create", "keyed", "--partitions", "3")
    done(broker, "produce", "keyed", lines=b"a\t1\nb\t2\n")
    assert compacted(broker, "keyed") == ""


def test_a_record_for_a_view_is_refused_with_the_topic_to_write_to(broker: VarveBroker) -> None:
    done(broker, "topics", "create", "rates", "--set", "varve.view=compacted")
    text = refused(broker, "produce", "rates.compacted", lines=b"a\t1\n")
    assert "(a compacted view is read-only: write to rates)" in text
    assert "varve acls" not in text


def test_a_view_is_not_deleted_and_the_reason_says_how_to_remove_it(broker: VarveBroker) -> None:
    done(broker, "topics", "create", "bills", "--set", "varve.view=compacted")
    error = refused(broker, "topics", "delete", "bills.compacted", "--yes")
    assert "compacted view of bills" in error
    assert "`varve topics alter bills --set varve.view=none`" in error


def test_an_unknown_setting_to_unset_gets_a_suggestion(broker: VarveBroker) -> None:
    topic = created(broker, "unset")
    error = refused(
        broker, "topics", "alter", topic, "--unset", "segment.mss", code=exit_codes.USAGE
    )
    assert "did you mean segment.ms?" in error


def test_internal_topics_are_listed_on_request_only(broker: VarveBroker) -> None:
    created(broker, "visible")
    commit(broker, "visible", "a-group")
    assert "__consumer_offsets" not in done(broker, "topics", "list")
    assert "__consumer_offsets" in done(broker, "topics", "list", "--internal")


def test_nothing_is_deleted_without_confirmation(broker: VarveBroker) -> None:
    created(broker, "kept")
    result = run(broker, "topics", "delete", "kept", lines=b"n\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Delete kept with all records? [y/N]" in result.stderr
    assert "nothing was deleted; --yes deletes without a question" in result.stderr
    assert "--yes deletes without" in run(broker, "topics", "delete", "kept").stderr
    assert "kept" in done(broker, "topics", "list")


@pytest.mark.parametrize(
    ("kind", "reason"), [("topics", "there is no topic typo"), ("groups", "no such group: typo")]
)
def test_what_does_not_exist_is_named_before_a_confirmation(
    broker: VarveBroker, kind: str, reason: str
) -> None:
    error = refused(broker, kind, "delete", "typo", lines=b"y\n")
    assert reason in error
    assert "Delete" not in error


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("create", "there"), exit_codes.FAILED, "varve: topic there exists already\n"),
        (("create", "new", "--set", "a=b"), exit_codes.USAGE, "'--set': a: unknown setting\n"),
        (("create", "new", "--set", "partitions=3"), exit_codes.USAGE, "use --partitions"),
        (("create", "new", "--set", "retention.ms=7w"), exit_codes.USAGE, "ms, s, min, h, d, not"),
        (("create", "new", "--set", "a"), exit_codes.USAGE, "expected KEY=VALUE, not 'a'"),
        (
            ("alter", "there", "--set", "cleanup.policy", "compact"),
            exit_codes.USAGE,
            "'--set': expected KEY=VALUE, not 'cleanup.policy'",
        ),
        (
            ("alter", "there", "--set", "segment.msec=1"),
            exit_codes.USAGE,
            "did you mean segment.ms?",
        ),
        (("alter", "there"), exit_codes.USAGE, "give --set, --unset or --partitions"),
        (
            ("alter", "there", "--partitions", "1"),
            exit_codes.FAILED,
            "can only grow, so 1 is not possible",
        ),
        (
            ("describe", "missing"),
            exit_codes.FAILED,
            "there is no topic missing, or you may not",
        ),
        (("delete", "missing", "--yes"), exit_codes.FAILED, "there is no topic missing, or you"),
        (
            ("alter", "missing", "--set", "retention.ms=7d"),
            exit_codes.FAILED,
            "there is no topic missing; `varve topics list` shows all",
        ),
        (("alter", "missing", "--partitions", "9"), exit_codes.FAILED, "`varve topics list` shows"),
    ],
)
def test_a_refusal_names_its_reason_and_creates_nothing(
    broker: VarveBroker, arguments: tuple[str, ...], code: int, reason: str
) -> None:
    run(broker, "topics", "create", "there")
    assert reason in refused(broker, "topics", *arguments, code=code)
    names = {row["topic"] for row in answered(broker, "topics", "list")["topics"]}
    assert "there" in names
    assert not names & {"new", "missing"}


def test_a_broker_without_authorization_is_said_to_hide_nothing(tmp_path: Path) -> None:
    with running_varve(tmp_path / "varve", {}) as broker:
        assert done(broker, "groups", "list") == "There are no groups.\n"
        assert "There are no topics. " in done(broker, "topics", "list")
        assert "there is no topic missing; " in refused(broker, "topics", "describe", "missing")


def test_an_unknown_policy_is_called_so_and_an_empty_one_empty(tmp_path: Path) -> None:
    kept = {"cleanup.policy": "compact"}
    settings = {"topics": {"left": kept, "empty": {"cleanup.policy": ""}}}
    with running_varve(tmp_path, settings):
        pass
    settings["topics"].pop("left")
    with running_varve(tmp_path, settings) as broker:
        rows = done(broker, "topics", "list").splitlines()[1:]
        assert [row.split()[2:4] for row in rows] == [["policy", "empty"], ["policy", "unknown"]]
        described = done(broker, "topics", "describe", "left").splitlines()
        assert described[0] == "left: 1 partition, policy unknown"
        assert "neither cleans nor expires it until cleanup.policy is set" in described[1]
        assert "  cleanup.policy=, unknown" in described
        listed = answered(broker, "topics", "list")["topics"]
        assert [row["policy_unknown"] for row in listed] == [False, True]
        over_http = json.loads(broker.get("/api/v1/topics"))["topics"]
        assert [row["policy_unknown"] for row in over_http] == [False, True]


def test_a_broker_that_is_gone_is_unreachable() -> None:
    result = CliRunner().invoke(main, ["topics", "list", "--bootstrap", f"127.0.0.1:{free_port()}"])
    assert result.exit_code == exit_codes.UNREACHABLE
    assert ": Connection refused. Is the broker running, and is this its address" in result.stderr


def test_the_address_of_the_other_protocol_is_recognized(broker: VarveBroker) -> None:
    http = broker.url.removeprefix("http://")
    result = CliRunner().invoke(main, ["topics", "list", "--bootstrap", http])
    assert result.exit_code == exit_codes.UNREACHABLE
    assert f"varve: {http} answers with HTTP, not with the Kafka protocol. Give" in result.stderr
    result = CliRunner().invoke(main, ["cleaner", "status", "--http", broker.bootstrap])
    assert "It may be an address for Kafka clients: give the broker's HTTP" in result.stderr


def test_a_broker_that_closes_the_connection_may_need_tls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        refusal = threading.Thread(target=lambda: server.accept()[0].close())
        refusal.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        result = CliRunner().invoke(main, ["topics", "list", "--bootstrap", address])
        refusal.join()
    assert result.exit_code == exit_codes.UNREACHABLE
    assert "A listener with TLS or SASL needs --command-config" in result.stderr


# --- records --------------------------------------------------------------------------------------


def test_lines_become_records_and_records_lines(broker: VarveBroker) -> None:
    topic = created(broker, "devices")
    result = run(
        broker, "produce", topic, "--tombstone", "-", lines=b"a\ton\nb\toff\na\t-\nb\tx\ty"
    )
    assert (result.exit_code, result.stderr) == (0, "4 records written to devices.\n")
    expected = [
        ["0", "0", "a", "on"],
        ["0", "1", "b", "off"],
        ["0", "2", "a", "<tombstone>"],
        ["0", "3", "b", "x\\ty"],
    ]
    assert rows(done(broker, "consume", topic)) == expected
    assert rows(done(broker, "consume", topic, "--from", "2", "--max", "1")) == expected[2:3]
    assert rows(done(broker, "consume", topic, "--key", "a")) == [expected[0], expected[2]]
    assert rows(done(broker, "consume", topic, "--from", "2020-01-01T00:00:00Z")) == expected
    assert done(broker, "consume", topic, "--from", "2999-01-01T00:00:00Z") == ""
    assert done(broker, "consume", topic, "--from", "latest") == ""
    third = json.loads(done(broker, "consume", topic, "--json").splitlines()[2])
    assert third.pop("timestamp_ms") > 0
    assert third == {"topic": topic, "partition": 0, "offset": 2, "key": "a", "value": None}


def test_a_search_without_a_result_says_so(broker: VarveBroker) -> None:
    topic = created(broker, "searched")
    done(broker, "produce", topic, lines=b"k\tv\n")
    result = run(broker, "consume", topic, "--key", "nosuch")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "varve: searched: no record with this key was found\n"


def test_a_reader_that_follows_learns_of_an_outage_and_of_its_end(
    tmp_path: Path,
) -> None:
    port, errors = free_port(), tmp_path / "errors"
    command = [sys.executable, "-m", "broker.cli", "consume", "t", "--follow"]
    command += ["--bootstrap", f"127.0.0.1:{port}"]
    with ExitStack() as stack:
        with running_varve(tmp_path / "varve", {}, port=port) as broker, errors.open("wb") as file:
            created(broker, "t")
            done(broker, "produce", "t", lines=b"k\tv\n")
            reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file)
            stack.enter_context(reader)
            stack.callback(reader.kill)
            assert reader.stdout is not None
            assert reader.stdout.readline().endswith(b"k\tv\n")
        wait_until(lambda: "does not answer; waiting" in errors.read_text(), "an outage")
        stack.enter_context(running_varve(tmp_path / "varve", {}, port=port))
        wait_until(lambda: "answers again" in errors.read_text(), "its end")
        assert len(errors.read_text().splitlines()) == 2


def test_a_line_without_a_separator_stops_the_writing(broker: VarveBroker) -> None:
    topic = created(broker, "lines")
    text = refused(broker, "produce", topic, lines=b"a\t1\nb\nc\t3\n", code=exit_codes.USAGE)
    assert text.startswith("1 record written to lines.\nvarve: line 2 has no separator")
    assert rows(done(broker, "consume", topic)) == [["0", "0", "a", "1"]]
    text = refused(broker, "produce", topic, "--separator", "", lines=b"a\n")
    assert "a compacted topic takes no records without keys" in text


def test_hostile_bytes_are_escaped_for_a_terminal_and_whole_in_json(broker: VarveBroker) -> None:
    topic = created(broker, "hostile")
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    value = b"\x1b]0;title\x07\xff" + 3000 * b"x"
    producer.produce(topic, value, "key\u202e", headers=[("h", b"\xfe"), ("n", None)])
    assert producer.flush(30) == 0
    text = done(broker, "consume", topic)
    assert text.rstrip("\n").isascii()
    assert "\x1b" not in text
    assert text.endswith(f"... ({len(value):,} bytes)\n")
    row = json.loads(done(broker, "consume", topic, "--json"))
    assert row["key"] == "key\u202e"
    assert set(row) > {"value_base64"}
    assert row["headers"] == [{"name": "h", "value_base64": "/g=="}, {"name": "n", "value": None}]


def test_a_time_of_no_day_is_printed_as_a_number(broker: VarveBroker) -> None:
    topic = created(broker, "odd-times")
    latest = (1 << 63) - 1
    done(broker, "topics", "alter", topic, "--set", f"message.timestamp.after.max.ms={latest}")
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for at_ms in (1 << 62, 1_764_000_000_000):
        producer.produce(topic, b"v", b"k", timestamp=at_ms)
    assert producer.flush(30) == 0
    odd, usual = done(broker, "consume", topic).splitlines()
    assert odd.split("\t")[2] == f"{1 << 62} ms"
    assert usual.split("\t")[2].startswith("2025-11-2")


@pytest.mark.parametrize("command", ["produce", "consume"])
def test_a_topic_that_is_missing_is_not_created(broker: VarveBroker, command: str) -> None:
    assert "there is no topic typo, or" in refused(broker, command, "typo", lines=b"a\tb\n")
    assert "typo" not in done(broker, "topics", "list")


def test_a_partition_that_is_missing_is_named(broker: VarveBroker) -> None:
    topic = created(broker, "narrow")
    for command in ("produce", "consume"):
        text = refused(broker, command, topic, "--partition", "1", lines=b"a\tb\n")
        assert "narrow has no partition 1; its last one is 0" in text


def test_a_damaged_batch_ends_the_reading_and_the_error_names_the_next_command(
    broker: VarveBroker,
) -> None:
    topic = created(broker, "damaged")
    done(broker, "produce", topic, lines=b"lamp-1\ton\n")
    (log,) = broker.data.glob(f"{topic}-0/*.log")
    with log.open("r+b") as file:
        file.seek(-1, SEEK_END)
        file.write(b"\xff")
    verify = CliRunner().invoke(main, ["log", "verify", topic, "0", "--http", broker.url])
    assert verify.exit_code == exit_codes.UNVERIFIED
    error = refused(broker, "consume", topic)
    assert f"The log is damaged there; `varve log verify {topic} 0` names the damaged" in error


def test_records_of_open_transactions_are_printed_on_request(broker: VarveBroker) -> None:
    topic = created(broker, "transactional")
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "t"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, "v", "k")
    assert producer.flush(30) == 0
    assert done(broker, "consume", topic) == ""
    assert rows(done(broker, "consume", topic, "--uncommitted")) == [["0", "0", "k", "v"]]
    producer.abort_transaction(30)
    assert done(broker, "consume", topic) == ""


def run_as(
    broker: VarveBroker, folder: Path, user: str, *arguments: str, lines: bytes = b""
) -> Result:
    """Run a command as a user without permissions of its own."""
    (folder / "password").write_text("secret")
    done(broker, "users", "set", user, "--password", f"file:{folder / 'password'}")
    (folder / "user.properties").write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required "
        f'username="{user}" password="secret";\n'
    )
    address = f"127.0.0.1:{broker.sasl_port}"  # type: ignore[attr-defined]
    connection = ("--bootstrap", address, "--command-config", str(folder / "user.properties"))
    return CliRunner().invoke(main, [*arguments, *connection], input=lines)


def test_who_may_not_read_a_topic_learns_that_keys_were_not_looked_at(
    broker: VarveBroker, tmp_path: Path
) -> None:
    done(broker, "topics", "create", "secret")
    done(broker, "produce", "secret", lines=b"a\t1\n")
    rights = ("alter-configs", "describe-configs", "describe")
    done(broker, "acls", "add", "User:eve", *rights, "topic:secret")
    change = ("topics", "alter", "secret", "--set", "cleanup.policy=compact")
    result = run_as(broker, tmp_path, "eve", *change)
    assert (result.exit_code, result.stdout) == (0, "secret: cleanup.policy=compact\n")
    assert result.stderr.startswith("varve: cannot tell whether secret has records without a key")
    assert "authorization failed" in result.stderr


def test_a_reader_of_one_topic_needs_no_other_permission(
    broker: VarveBroker, tmp_path: Path
) -> None:
    mine, other = created(broker, "mine"), created(broker, "other")
    done(broker, "produce", mine, lines=b"k\tv\n")
    done(broker, "acls", "add", "User:ann", "read", "describe-configs", "topic:mine")
    as_ann = partial(run_as, broker, tmp_path, "ann")
    read = as_ann("consume", mine)
    assert (read.exit_code, rows(read.stdout)) == (0, [["0", "0", "k", "v"]]), read.output
    listed = as_ann("topics", "list")
    assert listed.stdout.splitlines()[1:] == ["mine            1  compact     -"]
    assert f"there is no topic {other}, or" in as_ann("consume", other).stderr
    written = as_ann("produce", mine, lines=b"k\tv2\n")
    assert written.exit_code == exit_codes.FAILED
    assert "key k: Topic authorization failed: the user needs WRITE on topic:mine" in written.stderr


def test_a_topic_is_listed_and_described_without_the_settings_that_its_reader_may_not_see(
    broker: VarveBroker, tmp_path: Path
) -> None:
    topic = created(broker, "plain")
    done(broker, "acls", "add", "User:joe", "read", "topic:plain")
    as_joe = partial(run_as, broker, tmp_path, "joe")
    assert as_joe("topics", "list").stdout.splitlines()[1:] == ["plain           1  -          -"]
    (row,) = json.loads(as_joe("topics", "list", "--json").stdout)["topics"]
    assert (row["cleanup_policy"], row["policy_unknown"]) == (None, False)
    assert as_joe("topics", "describe", topic).stdout.splitlines() == [
        "plain: 1 partition",
        "You may not see its settings: they need DESCRIBE_CONFIGS on topic:plain",
        "",
        "PARTITION  OFFSETS           SIZE",
        "        0  empty, next is 0     -",
    ]


@pytest.mark.parametrize(
    ("command", "needs"),
    [
        ("topics create new", "CREATE on topic:new or on the cluster"),
        ("topics alter seen --set segment.ms=1h", "ALTER_CONFIGS on topic:seen"),
        ("topics alter seen --partitions 9", "ALTER on topic:seen"),
        ("topics delete seen --yes", "DELETE on topic:seen"),
        ("consume seen", "READ on topic:seen"),
        ("groups describe g", "DESCRIBE on group:g"),
        ("groups reset-offsets g seen --to earliest", "READ on group:g and topic:seen"),
        ("users list", "DESCRIBE on the cluster"),
        ("acls list", "DESCRIBE on the cluster"),
        ("acls add User:kim all cluster", "ALTER on the cluster"),
    ],
)
def test_a_refusal_names_the_permission_that_the_command_needs(
    broker: VarveBroker, tmp_path: Path, command: str, needs: str
) -> None:
    if "seen" in command:
        run(broker, "topics", "create", "seen")
        done(broker, "produce", "seen", lines=b"k\tv\n")
    done(broker, "acls", "add", "User:kim", "describe", "topic:seen")
    result = run_as(broker, tmp_path, "kim", *command.split())
    assert result.exit_code == exit_codes.FAILED
    assert f": the user needs {needs} (`varve acls`)" in result.stderr


# --- groups ---------------------------------------------------------------------------------------


def commit(broker: VarveBroker, topic: str, group: str) -> None:
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": group,
                "auto.offset.reset": "earliest"}  # fmt: skip
    produce_one = Producer({"bootstrap.servers": broker.bootstrap})
    produce_one.produce(topic, "v", "k")
    assert produce_one.flush(30) == 0
    consumer = Consumer(settings)
    try:
        consumer.subscribe([topic])
        message = consumer.poll(30)
        assert message is not None
        consumer.commit(message, asynchronous=False)
    finally:
        consumer.close()


def test_a_group_shows_its_lag_is_moved_and_deleted(broker: VarveBroker) -> None:
    topic = created(broker, "orders")
    commit(broker, topic, "billing")
    done(broker, "produce", topic, lines=b"a\t1\nb\t2\n")
    listed = answered(broker, "groups", "list")["groups"]
    assert {"group": "billing", "state": "EMPTY", "type": "CLASSIC"} in listed
    assert done(broker, "groups", "describe", "billing").splitlines() == [
        "billing: empty, 0 members, lag 2",
        "",
        "PARTITION  COMMITTED  END  LAG  CLIENT  HOST",
        "orders-0           1    3    2  -       -",
    ]
    moved = ["PARTITION  BEFORE  AFTER", "orders-0        1      0"]
    reset = ("groups", "reset-offsets", "billing", topic, "--to", "earliest")
    dry = done(broker, *reset, "--dry-run").splitlines()
    assert dry == [*moved, "Nothing is changed: --dry-run."]
    assert answered(broker, "groups", "describe", "billing")["partitions"][0]["lag"] == 2
    assert done(broker, *reset).splitlines() == moved
    assert answered(broker, "groups", "describe", "billing")["partitions"][0]["lag"] == 3
    beyond = run(broker, *reset[:-1], "99")
    assert beyond.exit_code == exit_codes.DONE
    assert beyond.stderr == "varve: orders-0: offset 99 is beyond the end of the log, 3 is used\n"
    assert answered(broker, "groups", "describe", "billing")["partitions"][0]["lag"] == 0
    for options in ((), ("--dry-run",)):
        misspelt = refused(broker, *reset[:2], "biling", *reset[3:], *options)
        assert "no such group: biling; " in misspelt
    assert "biling" not in done(broker, "groups", "list")
    done(broker, *reset[:2], "auditing", *reset[3:], "--create")
    assert "auditing" in done(broker, "groups", "list")
    assert done(broker, "groups", "delete", "billing", "--yes") == "billing is deleted.\n"
    assert "no such group: billing" in refused(broker, "groups", "describe", "billing")


def test_the_offsets_of_a_group_with_members_stay(broker: VarveBroker) -> None:
    topic = created(broker, "busy")
    commit(broker, topic, "active")
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "active",
                         "auto.offset.reset": "earliest"})  # fmt: skip
    try:
        consumer.subscribe([topic])
        done(broker, "produce", topic, lines=b"a\t1\n")
        assert consumer.poll(30) is not None
        answer = answered(broker, "groups", "describe", "active")
        assert (answer["state"], answer["members"]) == ("STABLE", 1)
        assert answer["partitions"][0]["client_id"] == "rdkafka"
        refused(broker, "groups", "reset-offsets", "active", topic, "--to", "latest")
        assert "active: " in refused(broker, "groups", "delete", "active", "--yes")
    finally:
        consumer.close()


@pytest.mark.parametrize("position", ["soon", "-1", "1e3", "2026-13-01", "9" * 30])
def test_an_invalid_position_is_a_usage_error(broker: VarveBroker, position: str) -> None:
    result = run(broker, "consume", "any", f"--from={position}")
    assert result.exit_code == exit_codes.USAGE
    assert "expected earliest, latest, an offset, or a time" in result.stderr
