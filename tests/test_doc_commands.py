"""The commands of the documents run against a broker, or an exception names what runs instead.

The commands of a page run in their order, in one broker, with topics that exist for the page.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Final

import click
import pytest
from click.testing import CliRunner
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from admin.client import ApiClient, partition_path
from admin.profiles import VARIABLES
from broker import demo
from broker.cli import main
from config import exit_codes
from pipeline.cli import pipeline
from storage.env import RealEnv
from storage.format.batch import TRANSACTIONAL
from storage.segments.batch_scan import scan
from tests.support.draws import cases
from tests.support.ports import free_port
from tests.support.processes.fork_server import start_forked
from tests.support.shown_commands import (
    ROOT,
    ShownCommand,
    all_commands,
    called,
    commands_of,
    pages,
)
from tests.support.storage.logs import batch_of
from tests.support.varve import VarveBroker, running_varve
from tests.support.waiting import wait_until

# Commands that no test runs as they stand: patterns, what they need, and the
# file and name of the test that has what they do.
EXCEPTIONS: Final = {
    "docker compose *": (
        "Docker",
        "tests/deploy/test_compose.py",
        "test_the_parser_of_docker_compose_accepts_the_file",
    ),
    "docker *": (
        "Docker",
        "tests/deploy/test_image.py",
        "test_the_image_serves_and_stops_with_its_own_settings",
    ),
    "helm *": (
        "Kubernetes",
        "tests/deploy/test_kubernetes.py",
        "test_other_values_render_valid_resources",
    ),
    "kubectl *": (
        "Kubernetes",
        "tests/deploy/test_kubernetes.py",
        "test_the_schemas_of_kubernetes_accept_the_manifest",
    ),
    "systemctl reload *": (
        "systemd as process 1",
        "tests/broker/cleaning/test_cleaner_daemon.py",
        "test_a_reload_reads_the_token_anew",
    ),
    "systemctl *": (
        "systemd as process 1",
        "tests/test_shipping.py",
        "test_the_daemon_tells_systemd_when_it_is_ready_and_when_it_stops",
    ),
    "journalctl *": (
        "systemd as process 1",
        "tests/test_doc_commands.py",
        "test_a_log_line_that_a_page_searches_exists",
    ),
    "timedatectl *": (
        "systemd as process 1",
        "tests/deploy/test_prometheus.py",
        "test_every_alert_has_its_runbook_and_every_runbook_its_alert",
    ),
    "useradd *": (
        "a change of the machine's users",
        "tests/test_shipping.py",
        "test_the_unit_gives_the_broker_time_to_stop_and_a_user_of_its_own",
    ),
    "dmesg *": (
        "the right to read the kernel's log",
        "tests/deploy/test_prometheus.py",
        "test_every_alert_has_its_runbook_and_every_runbook_its_alert",
    ),
    "smartctl *": (
        "a disk of its own",
        "tests/deploy/test_prometheus.py",
        "test_every_alert_has_its_runbook_and_every_runbook_its_alert",
    ),
    "iostat *": (
        "a program of the package sysstat",
        "tests/deploy/test_prometheus.py",
        "test_every_alert_has_its_runbook_and_every_runbook_its_alert",
    ),
    "promtool *": (
        "Prometheus",
        "tests/deploy/test_prometheus.py",
        "test_promtool_accepts_the_configuration_and_the_rules",
    ),
    "pip install *": (
        "a registry of packages",
        "tests/test_shipping.py",
        "test_every_dependency_is_locked",
    ),
    "python3 -m venv *": (
        "a registry of packages",
        "tests/test_shipping.py",
        "test_the_wheel_has_every_module_the_console_and_the_built_in_settings",
    ),
    "pre-commit install": (
        "another program",
        "tests/test_shipping.py",
        "test_ci_is_lint_and_test_with_many_cases_and_stops_at_the_first_failure",
    ),
    "go install *": (
        "a registry of packages",
        "tests/deploy/test_kubernetes.py",
        "test_helm_accepts_the_chart",
    ),
    "make run": (
        "the default ports, which another broker may have",
        "tests/test_doc_commands.py",
        "test_a_broker_that_a_page_starts_is_ready_and_ends_at_ctrl_c",
    ),
    "varve serve": (
        "the default ports, which another broker may have",
        "tests/broker/test_cli.py",
        "test_serve_without_a_file_runs_on_the_built_in_one",
    ),
    "make [!r]*": (
        "these checks themselves, in minutes",
        "tests/test_shipping.py",
        "test_ci_is_lint_and_test_with_many_cases_and_stops_at_the_first_failure",
    ),
    "python -m *": (
        "checks, pictures and measurements that take minutes",
        "tests/test_doc_commands.py",
        "test_a_module_that_a_page_runs_exists_and_has_its_options",
    ),
    "varve demo --bootstrap kafka.example.org:9093 *": (
        "another broker, with TLS",
        "tests/broker/test_demo.py",
        "test_before_is_the_size_of_everything_that_was_produced",
    ),
    "varve cleaner status --http https://10.0.0.5:9644 *": (
        "another broker, with TLS",
        "tests/broker/http/test_https.py",
        "test_the_api_answers_over_tls_without_a_client_certificate",
    ),
    "varve pipeline warmup": (
        "half a minute and 190 MB; `make test` runs it first",
        "tests/test_shipping.py",
        "test_a_second_run_does_nothing_but_start",
    ),
    "varve pipeline compact orders --engine spark --master spark://host:7077*": (
        "a cluster",
        "tests/pipeline/jobs/test_compact.py",
        "test_a_cluster_that_shares_the_disk_works_on_it",
    ),
}
# Commands of `varve` that no page shows, and the tests that run them.
NOT_SHOWN: Final = {
    "acls remove": ("tests/admin/kafka/test_acls.py", '"remove"'),
    "cleaner abort": ("tests/broker/cleaning/test_cleaner_daemon.py", '"abort", "customers"'),
    "completion": ("tests/admin/test_profiles.py", '"completion", "bash"'),
    "leases end": ("tests/broker/cleaning/test_cleaner_daemon.py", '"end"'),
    "topics delete": ("tests/admin/kafka/test_topics.py", '"topics", "delete"'),
    "version": ("tests/broker/test_cli.py", 'main, ["version"]'),
    "warmup": ("tests/broker/test_cli.py", '["warmup"]'),
}
# Options of jobs whose effect is tested below the command line.
TESTED_BELOW: Final = {
    "--checkpoint": "test_a_table_follows_its_topic_over_restarts",
    "--null-keys": "test_a_view_is_held_against_its_own_rule",
    "--available-now": "test_the_tutorial_can_be_pasted",
    "--spark-log": "test_a_session_for_stages_has_a_small_jvm_unless_its_options_are_given",
    "--timestamp": "test_columns_become_keys_values_headers_and_times",
}
SETTINGS = {
    "cleaner": {"workers": 1, "dedupe_buffer_bytes": "16MiB"},
    "authorization": {"enabled": True, "super_users": ["User:ANONYMOUS"]},
    # An erasure waits for the files of replaced segments and of topics of the same name.
    "topic_defaults": {"file.delete.delay.ms": 1000},
}
COMPACT = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "min.cleanable.dirty.ratio": "1.0",  # nothing is cleaned before a command asks for it
}
VIEW = {"varve.view": "compacted"}
# The topics of the pages: partitions and settings.
TOPICS = {
    "clicks": (1, {}),
    "customers": (2, COMPACT),
    "greetings": (1, {}),
    "orders": (1, {}),
    "prices": (1, VIEW),
    "readings": (1, COMPACT),
}
# These guides have a view of the orders.
WITH_VIEW = ("docs/how-to/use-compacted-views.md", "docs/tutorials/getting-started.md")
REPAIR = "docs/how-to/repair-damaged-data.md"
DAMAGED_OFFSET = 4200  # of the orders, in the guide that repairs them
# Kafka left a transaction of this producer open in a topic that exists from the start.
HANGING = ("payments", 4711)
KAFKA, HTTP = "127.0.0.1:9092", "127.0.0.1:9644"  # the addresses of the pages
# What runs as any other program, in the root.
PLAIN = ("cp", "curl", "df", "free", "install", "kcat", "mkdir", "openssl", "sed")
# Options of commands that end at Ctrl-C, and the exit code then.
FOLLOWING = {"--follow": exit_codes.DONE, "--watch": exit_codes.DONE, "-N": -signal.SIGINT}


def exception_of(command: ShownCommand) -> str | None:
    """The pattern of the exception for a command."""
    return next((pattern for pattern in EXCEPTIONS if fnmatchcase(command.text, pattern)), None)


def is_lasting(command: ShownCommand) -> bool:
    """Whether a command starts a broker, or takes long: it runs once for all pages."""
    return command.words[:2] in (("varve", "serve"), ("varve", "demo"), ("make", "run"))


def is_of_another_test(command: ShownCommand) -> bool:
    """Whether the test of the jobs, of Kafka's tools or of lasting commands runs it."""
    is_job = command.words[:2] == ("varve", "pipeline")
    return is_job or command.program.startswith("kafka-") or is_lasting(command)


def distinct(*beginning: str) -> list[ShownCommand]:
    """The commands of all pages that begin so, each once."""
    found = {
        command.words: command
        for command in all_commands()
        if command.words[: len(beginning)] == beginning and exception_of(command) is None
    }
    return list(found.values())


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VarveBroker]:
    directory = tmp_path_factory.mktemp("pages")
    topic, producer_id = HANGING
    folder = directory / "data" / f"{topic}-0"
    folder.mkdir(parents=True)
    (directory / "data" / "meta.properties").write_text("version=1\nnode.id=1\n")
    writer = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": 0}
    batch = batch_of(b"paid", **writer, attributes=TRANSACTIONAL)
    (folder / "00000000000000000000.log").write_bytes(batch)
    with running_varve(directory, SETTINGS) as running:
        yield running


@pytest.fixture
def page(broker: VarveBroker, request: pytest.FixtureRequest) -> Iterator[str]:
    """A page whose topics and groups exist."""
    name: str = request.param
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    settings = {topic: config for topic, (_, config) in TOPICS.items()}
    if name in WITH_VIEW:
        settings["orders"] = VIEW
    new = [NewTopic(topic, TOPICS[topic][0], 1, config=settings[topic]) for topic in TOPICS]
    for future in admin.create_topics(new).values():
        future.result(30)
    # Batches end at each 100 records, however busy the machine is: a log is truncated between them.
    batches = {"batch.num.messages": 100, "linger.ms": 10_000}
    producer = Producer({"bootstrap.servers": broker.bootstrap, **batches})
    for topic in ("customers", "orders"):
        for number in range(6000):
            key = b"customer-%d" % (number % 50)
            producer.produce(topic, b"x" * 500, key, partition=number % TOPICS[topic][0])
            if (number + 1) % (100 * TOPICS[topic][0]) == 0:
                assert producer.flush(30) == 0
    for group in ("billing", "readers"):
        offsets = ConsumerGroupTopicPartitions(group, [TopicPartition("customers", 0, 10)])
        for future in admin.alter_consumer_group_offsets([offsets]).values():
            future.result(30)
    if name == REPAIR:
        damage(broker.data / "orders-0/00000000000000000000.log", DAMAGED_OFFSET)
    yield name
    named = [topic for topic in admin.list_topics(timeout=30).topics if not topic.startswith("__")]
    gone = [name for name in named if not name.endswith(".compacted") and name != HANGING[0]]
    for future in admin.delete_topics(gone).values():
        future.result(30)


def damage(path: Path, offset: int) -> None:
    """Change the last byte of the batch that has an offset."""
    file = RealEnv().open(str(path))
    (position,) = (
        batch.end_position - 1
        for batch in scan(file, 0, file.size(), whole=True)
        if batch.header.base_offset <= offset <= batch.header.last_offset
    )
    file.close()
    with path.open("r+b") as opened:
        opened.seek(position)
        (byte,) = opened.read(1)
        opened.seek(position)
        opened.write(bytes([byte ^ 1]))


class Shell:
    """Runs the commands of a page: their addresses and paths become those of the test."""

    def __init__(self, broker: VarveBroker, folder: Path) -> None:
        self._broker = broker
        self._folder = folder
        for name in ("varve.yaml", "my.yaml"):
            (folder / name).write_text("cleaner: {workers: 1}\n")
        (folder / "alice").write_text("a password of alice\n")
        (folder / "admin.properties").write_text("security.protocol=PLAINTEXT\n")
        profile = f"orders: {{bootstrap: '{broker.bootstrap}', http: '{broker.url}'}}\n"
        (folder / "profiles.yaml").write_text(profile)
        (folder / "systemd/system").mkdir(parents=True)
        self._places = {
            "/etc/varve": str(folder),
            "/run/secrets": str(folder),
            "/etc": str(folder),
            "/usr/share": str(folder),
            "/var/lib/varve/data": str(broker.data),
            KAFKA: broker.bootstrap,
            HTTP: broker.url.removeprefix("http://"),
        }
        self._environment = dict.fromkeys((*VARIABLES.values(), "VARVE_PROFILE")) | {
            "VARVE_HTTP": broker.url,
            "VARVE_BOOTSTRAP": broker.bootstrap,
            "VARVE_PROFILES": str(folder / "profiles.yaml"),
        }

    def run(self, command: ShownCommand) -> tuple[int, str]:
        """Run a command to its end; its exit code and what it printed."""
        words = self._adapted(command)
        if command.program == "varve":
            lines = command.lines or "y\n"  # the answer to a question
            if command.words[1:3] == ("users", "set"):
                lines = "a password\na password\n"
            ended = CliRunner().invoke(main, words[1:], input=lines, env=self._environment)
            return ended.exit_code, ended.output
        if command.program == "curl":
            words += ["--fail-with-body", "--silent", "--show-error", "--max-time", "30"]
        if command.program == "openssl":
            CliRunner().invoke(main, ["tls", "init", str(self._folder / "tls")])
        done = subprocess.run(
            words, cwd=ROOT, input=command.lines, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout + done.stderr

    def follow(self, command: ShownCommand) -> tuple[int, str]:
        """Run a command until it shows what happens meanwhile, then press Ctrl-C."""
        words, path = self._adapted(command), self._folder / "shown"
        with path.open("wb") as output:
            if command.program == "varve":
                environment = {name: value for name, value in self._environment.items() if value}
                process = start_forked(words[1:], output, output, environment)
            else:
                process = subprocess.Popen(words, stdout=output, stderr=output)
        try:
            wait_until(lambda: self._makes_a_change_shown(command, path), command.text)
            process.send_signal(signal.SIGINT)
            return process.wait(30), path.read_text()
        finally:
            process.send_signal(signal.SIGKILL)

    def _makes_a_change_shown(self, command: ShownCommand, path: Path) -> bool:
        if command.program == "curl":
            for action in ("pause", "resume"):
                ApiClient(self._broker.url).post(f"{partition_path('customers', 0)}/{action}")
            return "event: changed" in path.read_text()
        if "--watch" in command.words:
            return "customers" in path.read_text()
        producer = Producer({"bootstrap.servers": self._broker.bootstrap})
        producer.produce(command.words[2], b"new", b"key")
        assert producer.flush(30) == 0
        return "\tnew\n" in path.read_text()

    def _adapted(self, command: ShownCommand) -> list[str]:
        words = list(command.words)
        if words[1:4] == ["topics", "create", "customers"]:
            words[3] = "copied"  # the topic of the other commands exists
        places = re.compile("|".join(map(re.escape, self._places)))
        words = [places.sub(lambda found: self._places[found[0]], word) for word in words]
        return [word.replace('"name": "customers"', '"name": "copied"') for word in words]


RUN_HERE = [
    page
    for page in pages()
    if any(
        not is_of_another_test(command) and exception_of(command) is None
        for command in commands_of(page)
    )
]


@pytest.mark.parametrize("page", RUN_HERE, indirect=True)
def test_the_commands_of_a_page_run(
    broker: VarveBroker, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell(broker, tmp_path)
    missing = set()
    for command in commands_of(page):
        if is_of_another_test(command) or exception_of(command) is not None:
            continue
        if command.program != "varve" and shutil.which(command.program) is None:
            missing.add(command.program)
            continue
        following = FOLLOWING.keys() & set(command.words)
        code, output = shell.follow(command) if following else shell.run(command)
        expected = exit_codes.FAILED if command.is_refused else exit_codes.DONE
        if page == REPAIR and command.words[2] in ("dump", "verify"):
            expected = exit_codes.UNVERIFIED
        if following:
            expected = FOLLOWING[following.pop()]
        assert code == expected, (command.text, output)
    if missing:
        pytest.skip(f"the other commands ran; not installed: {', '.join(sorted(missing))}")


def free_addresses(words: list[str], folder: Path) -> tuple[int, list[str]]:
    """A port of HTTP, and the words of a command that then uses free ports, data in a folder."""
    port, http_port = free_port(), free_port()
    options = {
        "--listen 127.0.0.1:19092": f"--listen 127.0.0.1:{port}",
        "--http 127.0.0.1:19644": f"--http 127.0.0.1:{http_port}",
        "--data /mnt/disk1": f"--data {folder}/data",
    }
    for name in ("my.yaml", "varve.yaml"):
        (folder / name).write_text(
            f"{{listeners: ['127.0.0.1:{port}'], http: '127.0.0.1:{http_port}',"
            f" log_dirs: ['{folder}/data']}}\n"
        )
        options[name] = str(folder / name)
    for before, after in options.items():
        words = [word.replace(before, after) for word in words]
    return http_port, words


def checkout(folder: Path) -> Path:
    """The files that make looks at, with an environment in which everything is installed."""
    for path in (ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("requirements*.lock")):
        shutil.copy(path, folder)
    (folder / ".venv/bin").mkdir(parents=True)
    program = folder / ".venv/bin/varve"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m broker.cli "$@"\n')
    program.chmod(0o755)
    for stamp in (".made", ".installed", ".warm"):
        (folder / ".venv" / stamp).touch()
    return folder


@pytest.mark.parametrize(
    "command",
    [*distinct("varve", "serve"), *distinct("make", "run")],
    ids=lambda command: command.text,
)
def test_a_broker_that_a_page_starts_is_ready_and_ends_at_ctrl_c(
    command: ShownCommand, tmp_path: Path
) -> None:
    http_port, words = free_addresses(list(command.words), tmp_path)
    log = tmp_path / "log"
    with log.open("wb") as output:
        if command.program == "varve":
            process = start_forked(words[1:], output, output)
        else:
            if shutil.which("make") is None:
                pytest.skip("make is not installed")
            names = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKE_TERMOUT", "MAKE_TERMERR"}
            process = subprocess.Popen(
                words, cwd=checkout(tmp_path), stdout=output, stderr=output, start_new_session=True,
                env={name: value for name, value in os.environ.items() if name not in names},
            )  # fmt: skip
    try:
        wait_until(lambda: '"event": "ready"' in log.read_text(), command.text, 60)
        assert f'"http": "127.0.0.1:{http_port}"' in log.read_text()
        os.killpg(process.pid, signal.SIGINT)
        wait_until((tmp_path / "data/.kafka_cleanshutdown").exists, "a clean stop")
        code = process.wait(60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert code == exit_codes.DONE or command.program == "make"


@pytest.mark.parametrize("command", distinct("varve", "demo"), ids=lambda command: command.text)
def test_the_demo_of_a_page_shows_a_topic_shrink_and_checks_its_keys(
    broker: VarveBroker, command: ShownCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = cases(few=20_000, many=demo.UPDATES)
    monkeypatch.setattr(demo, "run", partial(demo.run, updates=updates, keys=updates // 20))
    words = [word.replace(KAFKA, broker.bootstrap) for word in command.words[1:]]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == exit_codes.DONE, done.output
    assert f"The last values of all {updates // 20:,} keys are correct" in done.output
    assert demo.UPDATES == 1_000_000  # as the pages say


def test_every_command_of_a_page_is_run_or_an_exception() -> None:
    left = [
        (command.page, command.text)
        for command in all_commands()
        if exception_of(command) is None
        and not is_of_another_test(command)
        and command.program not in ("varve", *PLAIN)
    ]
    assert left == []


def test_every_exception_occurs_on_a_page_and_names_a_test() -> None:
    used = {exception_of(command) for command in all_commands()}
    assert [pattern for pattern in EXCEPTIONS if pattern not in used] == []
    for _, file, name in EXCEPTIONS.values():
        assert f"def {name}(" in (ROOT / file).read_text()


def leaves(group: click.Group, *names: str) -> Iterator[tuple[str, click.Command]]:
    """The commands of a group and its groups, with names such as `cleaner run`."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, *names, name)
        else:
            yield " ".join((*names, name)), command


def test_every_command_of_varve_is_run_against_a_broker() -> None:
    shown = {called(command.words) for command in all_commands() if command.program == "varve"}
    assert "cleaner run" in shown
    assert dict(leaves(main)).keys() - shown == NOT_SHOWN.keys()
    for file, call in NOT_SHOWN.values():
        assert call in (ROOT / file).read_text()


def test_every_option_is_used_by_a_test() -> None:
    used = {word.partition("=")[0] for command in all_commands() for word in command.words}
    others = (path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    tests = "".join(path.read_text() for path in others)
    used |= set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", tests))
    defined = {
        option
        for group in (main, pipeline)
        for _, command in leaves(group)
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    assert defined - used == TESTED_BELOW.keys()
    for name in TESTED_BELOW.values():
        assert f"def {name}(" in tests


def test_a_log_line_that_a_page_searches_exists() -> None:
    """Of the broker, with `journalctl -g`."""
    folders = ("storage", "cleaner", "broker")
    code = "".join(path.read_text() for name in folders for path in (ROOT / name).rglob("*.py"))
    searched = [
        command.words[command.words.index("-g") + 1]
        for command in all_commands()
        if command.program == "journalctl" and "-g" in command.words and "-u" in command.words
    ]
    assert searched
    for text in searched:
        assert re.search(rf'"[^"]*\b{re.escape(text)}\b', code), text


def test_a_module_that_a_page_runs_exists_and_has_its_options() -> None:
    commands = [command for command in all_commands() if command.program == "python"]
    assert commands
    for command in commands:
        _, _, module, *arguments = command.words
        assert importlib.util.find_spec(module) is not None, module
        code = "".join(path.read_text() for path in (ROOT / module.split(".")[0]).rglob("*.py"))
        options = [word for word in arguments if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in code] == [], module
