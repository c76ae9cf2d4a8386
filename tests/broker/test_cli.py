import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import broker.daemon
from admin.client import ApiClient, ApiRefusedError
from admin.http.cleaner import reason_to_stop_waiting
from broker.banner import DEMO, ReadyFacts, command_name
from broker.cli import main
from config.address import Address
from config.security.clients import Cluster
from config.settings import Settings
from pipeline.cli import pipeline

ROOT = Path(__file__).parents[2]


def varve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "broker.cli", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that `varve serve` would have run on."""
    seen: list[Settings] = []

    def run(settings: Settings, load: object = None) -> int:
        seen.append(settings)
        return 7

    monkeypatch.setattr(broker.daemon, "run", run)
    monkeypatch.setattr("broker.logging.configure", lambda *_, **__: None)
    return seen


def test_serve_without_a_file_runs_on_the_built_in_one(served: list[Settings]) -> None:
    assert CliRunner().invoke(main, ["serve"]).exit_code == 7
    assert served == [Settings()]


def test_the_help_of_serve_names_the_defaults() -> None:
    text = " ".join(CliRunner().invoke(main, ["serve", "--help"]).output.split())
    defaults = Settings()
    assert f"data in {defaults.log_dirs[0]}, " in text
    assert f"Kafka clients at {defaults.listeners[0].address}, HTTP at {defaults.http}." in text


def test_serve_hands_flags_over(served: list[Settings], tmp_path: Path) -> None:
    file = tmp_path / "varve.yaml"
    file.write_text("http: 127.0.0.1:1\nlisteners: [127.0.0.1:2]\n")
    arguments = ["serve", "--config", str(file), "--listen", "127.0.0.1:3", "--data", "a",
                 "--data", "b", "--advertise", "example.org:4"]  # fmt: skip
    assert CliRunner().invoke(main, arguments).exit_code == 7
    assert served[0].listeners[0].address == Address("127.0.0.1", 3)
    assert served[0].http == Address("127.0.0.1", 1)
    assert served[0].log_dirs == ("a", "b")
    assert served[0].advertise == Address("example.org", 4)


def test_serve_and_check_config_say_the_same_of_a_bad_file(tmp_path: Path) -> None:
    file = tmp_path / "varve.yaml"
    file.write_text("http: 127.0.0.1:1\ntopics:\n  orders: {cleanup.policy: compakt}\nhtp: 2\n")
    checked, served = varve("check-config", str(file)), varve("serve", "--config", str(file))
    expected = (
        f"{file}:3: topics.orders.cleanup.policy: 'compakt' is not one of compact and delete\n"
        f"{file}:4: htp: unknown setting; did you mean http?\n"
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (1, "", expected)
    assert (served.returncode, served.stdout, served.stderr) == (1, "", expected)


def test_check_config_reads_the_files_and_variables_that_the_settings_name(tmp_path: Path) -> None:
    file = tmp_path / "varve.yaml"
    for text, reason in (
        ("http_token_file: absent\n", "absent: No such file"),
        ("sasl: {users: {admin: {env: VARVE_TEST_UNSET}}}\n", "VARVE_TEST_UNSET is not set"),
        ("tls: {certificate_file: absent.pem}\n", "absent.pem"),
        ("a:\n\tb: 1\n", "is indented with a tab"),
    ):
        file.write_text(text)
        done = CliRunner().invoke(main, ["check-config", str(file)])
        assert (done.exit_code, done.stdout) == (1, ""), text
        assert reason in done.stderr
    file.write_text("http_token_file: absent\ntls: {certificate_file: absent.pem}\n")
    text = CliRunner().invoke(main, ["check-config", str(file)]).stderr
    assert ["absent" in line for line in text.splitlines()] == [True, True], text
    settings_only = CliRunner().invoke(main, ["check-config", "--settings-only", str(file)])
    assert settings_only.exit_code == 0


def test_the_version_is_told_by_a_command_and_by_an_option() -> None:
    by_command, by_option = (
        CliRunner().invoke(main, [value]) for value in ("version", "--version")
    )
    assert (by_option.exit_code, by_option.output) == (0, by_command.output)
    assert re.fullmatch(r"varve \S+ \(Python 3\.\d+\.\d+\)\n", by_option.output)


@pytest.mark.parametrize("group", ["cleaner", "view", "leases", "pipeline"])
def test_every_command_that_asks_a_broker_names_its_address_by_http(group: str) -> None:
    commands = pipeline if group == "pipeline" else main.commands[group]
    assert isinstance(commands, click.Group)
    context = click.Context(commands)
    options = {
        option
        for name in commands.list_commands(context)
        for parameter in commands.get_command(context, name).params
        if parameter.name == "url"
        for option in parameter.opts
    }
    assert options == {"--http"}


def test_check_config_says_that_a_file_is_good_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "varve.yaml").write_text("topics: {orders: {}}\n")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["check-config", "varve.yaml"])
    assert (done.exit_code, done.stderr) == (0, "")
    listeners = "listeners PLAINTEXT://127.0.0.1:9092, the default"
    assert done.stdout == f"varve.yaml: valid; {listeners}; 1 topic\n"
    assert [path.name for path in tmp_path.iterdir()] == ["varve.yaml"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--listen", "nonsense"], 2, "command line: --listen: expected HOST:PORT"),
        (["serve", "--listen", "0.0.0.0:9092"], 2, "allow_insecure: true"),
        (["serve", "--http", "192.168.0.1:1"], 2, "command line: --http: "),
        (["serve", "--config", "absent.yaml"], 1, "absent.yaml: No such file"),
        (["serve", "--data", ""], 2, "command line: --data: may not be empty"),
        (["check-config", "absent.yaml"], 1, "absent.yaml: No such file"),
        (["check-config", "."], 1, ".: Is a directory"),
        (["check-config"], 2, "Missing argument"),
        (["serve", "--no-such-flag"], 2, "No such option"),
        (
            ["cleaner", "explain", "t", "0", "--bootstrap", "h:1"],
            2,
            "This command takes --http URL:",
        ),
        (["topics", "list", "--http", "h:1"], 2, "This command takes --bootstrap HOST:PORT:"),
        (["no-such-command"], 2, "No such command"),
        (["status"], 2, "Did you mean 'varve cleaner status' or 'varve view status'?"),
        (["demo", "--bootstrap", "nonsense"], 2, "expected HOST:PORT"),
        (["demo", "--keep"], 2, "--keep needs a running broker"),
    ],
)
def test_bad_input_ends_with_a_line_and_a_code_and_never_a_traceback(
    arguments: list[str], code: int, words: str
) -> None:
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, "Traceback" in done.output) == (code, False)
    assert words in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [(["serve"], 0, ""), (["demo"], 130, "varve: interrupted\n")],
)
def test_an_early_interrupt_ends_a_command_without_a_stack(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, output: str
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("broker.daemon.run", interrupted)
    monkeypatch.setattr("broker.logging.configure", lambda *_, **__: None)
    monkeypatch.setattr("broker.demo.run", interrupted)
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, done.output) == (code, output)


def test_an_output_to_a_full_disk_ends_with_a_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "broker.cli", "version"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=110,
        )
    text = "varve: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, text)


def test_an_interrupt_while_the_commands_are_imported_prints_nothing() -> None:
    program = (
        "import os, signal, sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'admin.http.views':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "import broker.cli\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_importing_the_commands_leaves_the_handler_of_interrupts_as_it_was() -> None:
    program = (
        "import signal; before = signal.getsignal(signal.SIGINT); import broker.cli;"
        " assert signal.getsignal(signal.SIGINT) is before"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=110)


@pytest.mark.parametrize(("status", "code"), [(400, 2), (409, 1), (503, 1)])
def test_a_request_that_the_topic_does_not_allow_is_an_error_of_usage(
    monkeypatch: pytest.MonkeyPatch, status: int, code: int
) -> None:
    def refuse(*_: object, **__: object) -> dict[str, object]:
        raise ApiRefusedError(status, "audit-0 is not compacted: its cleanup.policy is delete")

    monkeypatch.setattr(ApiClient, "post", refuse)
    monkeypatch.setattr(ApiClient, "get", refuse)
    for arguments in (["run", "audit", "0"], ["explain", "audit", "0"]):
        done = CliRunner().invoke(main, ["cleaner", *arguments])
        assert (done.exit_code, "is not compacted" in done.output) == (code, True)


def test_demo_is_handed_the_address_and_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Cluster | None, dict[str, object]]] = []
    monkeypatch.setattr("broker.demo.run", lambda *args, **options: seen.append((*args, options)))
    running = ["--bootstrap", "127.0.0.1:9092", "--rate", "10", "--keep"]
    CliRunner().invoke(main, ["demo", *running], catch_exceptions=False)
    CliRunner().invoke(main, ["demo"], catch_exceptions=False)
    assert seen == [
        (Cluster("127.0.0.1:9092"), {"rate": 10, "keep": True}),
        (None, {"rate": None, "keep": False}),
    ]


def test_version_is_that_of_the_project() -> None:
    version = CliRunner().invoke(main, ["version"]).output.split()[1]
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()


def test_warmup_tells_where_the_kernels_are_kept() -> None:
    for _ in range(2):  # what the first call imports must not hide what the second one calls
        done = CliRunner().invoke(main, ["warmup"])
        assert done.exit_code == 0
    folder = Path(done.output.strip().rpartition("cached in ")[2])
    assert any(folder.rglob("*.nbi"))


def test_the_ready_text_says_what_listens_where_data_is_and_what_to_try() -> None:
    facts = ReadyFacts(
        version="1.2",
        listeners=(Address("0.0.0.0", 9092), Address("127.0.0.1", 9093)),
        http=Address("localhost", 9644),
        http_scheme="https",
        log_dirs=("data",),
        topics=2,
        partitions=53,
        is_open=True,
    )
    text = facts.text()
    lines = text.splitlines()
    assert lines[0] == "varve 1.2 is ready"
    assert len(lines) <= 8
    for words in (
        "0.0.0.0:9092, 127.0.0.1:9093",
        "https://localhost:9644",
        str(Path("data").absolute()),
        "2 topics with 53 partitions",
        "demo --bootstrap 127.0.0.1:9092 --rate 50000 --keep",
        "kcat -b 127.0.0.1:9092 -L",
        f"(process {os.getpid()})",
    ):
        assert words in text
    for key in ("console", "stop"):  # whoever has only the log learns the same
        assert str(facts.fields()[key]) in text
    assert facts.fields()["console"] == "https://localhost:9644/"
    assert facts.fields()["pid"] == os.getpid()
    assert "--bootstrap" not in replace(facts, is_open=False).text(), "it would be refused"


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/getting-started.md"])
def test_every_page_recommends_the_demo_that_the_broker_recommends(page: str) -> None:
    assert f"varve {DEMO.format('127.0.0.1:9092')}" in (ROOT / page).read_text()


def test_a_wildcard_is_reached_over_loopback() -> None:
    assert Address("0.0.0.0", 1).here == Address("127.0.0.1", 1)
    assert Address("::", 1).here == Address("::1", 1)
    assert Address("10.0.0.1", 1).here == Address("10.0.0.1", 1)


def test_the_command_is_named_as_the_user_can_type_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv/bin/varve"), "serve"])
    assert command_name() == ".venv/bin/varve"
    monkeypatch.setattr(sys, "argv", ["/opt/varve/bin/varve"])
    assert command_name() == "/opt/varve/bin/varve"
    monkeypatch.setattr(sys, "argv", ["cli.py"])
    assert command_name() == "varve"


# Waiting for a clean ----------------------------------------------------------------------


def partition_status(**changes: object) -> dict[str, object]:
    """The status of a dirty partition whose clean up to offset 100 was requested."""
    return {
        "state": "idle",
        "paused": False,
        "requested_offset": 100,
        "first_dirty_offset": 0,
        "end_offset": 100,
        "dirty_bytes": 9,
        "last_job": None,
        "sentences": ["t-0 is not being cleaned."],
        **changes,
    }


def ended_job(outcome: str, reason: str) -> dict[str, object]:
    return {"job_id": "r1", "outcome": outcome, "reason": reason}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": "cleaning"}, ""),
        ({"state": "aborting", "requested_offset": None}, ""),
        (
            {"requested_offset": None, "last_job": ended_job("aborted", "an operator aborted it")},
            "the clean was aborted: an operator aborted it",
        ),
        (
            {"requested_offset": None},
            "an operator cancelled the clean request. t-0 is not being cleaned.",
        ),
        ({"requested_offset": None, "first_dirty_offset": 100}, ""),
        ({"paused": True}, "t-0 is not being cleaned."),
        ({"last_job": ended_job("failed", "disk full")}, "the clean failed: disk full"),
    ],
)
def test_a_wait_for_a_clean_ends_with_the_reason_of_the_job_and_not_before_it_has_ended(
    changes: dict[str, object], reason: str
) -> None:
    began = partition_status()
    assert reason_to_stop_waiting(partition_status(**changes), began) == reason


def commands_below(command: click.Command, path: str = "varve") -> list[tuple[str, click.Command]]:
    """Return the full name of each command, and the command."""
    if not isinstance(command, click.Group):
        return [(path, command)]
    context = click.Context(command)
    names = [
        name for name in command.list_commands(context) if (path, name) != ("varve", "pipeline")
    ]
    children = [(name, command.get_command(context, name)) for name in names]
    return [
        row for name, child in children if child for row in commands_below(child, f"{path} {name}")
    ]


def test_every_option_has_a_help_text_and_names_no_range_that_says_nothing() -> None:
    commands = commands_below(main) + commands_below(pipeline, "varve pipeline")
    assert len(commands) > 50
    for name, command in commands:
        text = command.get_help(click.Context(command, info_name=name, max_content_width=300))
        assert not re.search(r"(INTEGER|FLOAT) RANGE|x>=?[01]|9223372036854775807", text), name
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.help is not None, (name, option.opts)
                assert option.help.endswith("."), (name, option.opts)


def test_the_same_option_has_the_same_text_in_every_command() -> None:
    texts: dict[str, set[str | None]] = {}
    for _, command in commands_below(main) + commands_below(pipeline, "varve pipeline"):
        for option in command.params:
            if isinstance(option, click.Option):
                texts.setdefault(option.opts[0], set()).add(option.help)
    for name in ("--command-config", "--token-file", "--watch", "--conf", "--master", "--format"):
        assert len(texts[name]) == 1, texts[name]


@pytest.mark.parametrize(
    "command", ["cleaner abort", "cleaner retry", "cleaner estimate", "view compact", "log skip"]
)
def test_the_help_says_how_to_name_a_partition(command: str) -> None:
    text = CliRunner().invoke(main, [*command.split(), "--help"], max_content_width=100).output
    assert "Give `customers 0` or `customers-0` for a partition" in text
