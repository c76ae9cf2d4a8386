"""What is shipped can be installed, started and stopped: locks, wheel, Makefile, image, unit.

What needs a tool that is not there is skipped with its name.
"""

import configparser
import http.server
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.cli import main
from config.loader import load
from tests.support.varve import start_varve

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "deploy/varve.service"
# CI brings those that are missing.
PROGRAMS_OF_CI = (
    "prometheus", "kcat", "chromium-headless-shell", "buildah", "mmdebstrap", "helm",
    "python3",  # builds the programs in other languages
)  # fmt: skip
PACKAGES = ("config", "storage", "protocol", "cleaner", "admin", "broker")


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


def run(*command: str, cwd: Path = ROOT, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    """A command as a newcomer's shell runs it: not as a part of the make that runs the tests."""
    make = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKE_TERMOUT", "MAKE_TERMERR")
    inherited = (*make, "WORKERS", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )


# Locks ------------------------------------------------------------------------------------


def pins(lock: str) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each package of a lock."""
    entries = (ROOT / lock).read_text().replace("\\\n", " ").strip().splitlines()
    result = {}
    for entry in entries:
        name, version = re.match(r"([\w.-]+)==([^\s;]+)", entry).groups()  # type: ignore[union-attr]
        result[name] = (version, re.findall(r"--hash=(sha256:[0-9a-f]{64})\b", entry))
    return result


LOCKS = (
    "requirements.lock",
    "requirements-dev.lock",
    "requirements-docs.lock",
    "requirements-pipeline.lock",
    "requirements-build.lock",
)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_version_has_hashes(lock: str) -> None:
    assert pins(lock)
    assert [name for name, (_, hashes) in pins(lock).items() if not hashes] == []


def test_tests_run_on_the_versions_that_are_shipped() -> None:
    shipped, tested = pins("requirements.lock"), pins("requirements-dev.lock")
    assert {name: pin for name, pin in shipped.items() if tested.get(name) != pin} == {}
    extra = pins("requirements-pipeline.lock")
    assert {name: pin for name, pin in shipped.items() if extra.get(name) != pin} == {}
    for other in (extra, pins("requirements-docs.lock")):
        both = other.keys() & tested.keys()
        assert [name for name in both if other[name] != tested[name]] == []


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    expected = [re.split(r"[>=<;\[ ]", text)[0] for text in project["project"]["dependencies"]]
    assert set(expected) <= set(pins("requirements.lock"))
    locks = dict.fromkeys(("pipeline", "connect", "iceberg"), "pipeline")
    locks |= {"dev": "dev", "docs": "docs", "otel": "dev"}  # tested with what dev has
    assert set(locks) == set(project["project"]["optional-dependencies"])
    for extra, lock in locks.items():
        texts = project["project"]["optional-dependencies"][extra]
        named = {re.split(r"[>=<;\[ ]", text)[0] for text in texts}
        assert named <= set(pins(f"requirements-{lock}.lock")), extra
    assert project["build-system"]["requires"][0].startswith("setuptools")
    assert set(pins("requirements-build.lock")) == {"setuptools"}


# Makefile and CI --------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that make looks at."""
    for name in ("Makefile", "pyproject.toml", *LOCKS):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def fake_python(folder: Path, version: tuple[int, int]) -> str:
    """A `python` of some version, which can do nothing but tell it."""
    fake = folder / "old-python"
    body = f"""#!/bin/sh
case "$1" in
  -c) exec {sys.executable} -c "import sys; sys.version_info = {version}; $2" ;;
  --version) echo "Python {version[0]}.{version[1]}.0" ;;
esac
"""
    fake.write_text(body)
    fake.chmod(0o755)
    return str(fake)


@needs("make")
def test_an_old_python_is_refused_in_one_line(checkout: Path) -> None:
    done = run("make", f"PYTHON={fake_python(checkout, (3, 10))}", "run", cwd=checkout)
    assert done.returncode != 0
    assert "varve needs Python 3.11 or newer" in done.stderr
    assert "is Python 3.10.0" in done.stderr
    assert len(done.stderr.splitlines()) == 2  # ours, and make's own
    assert not (checkout / ".venv").exists()
    missing = run("make", "PYTHON=./no-such-python", "run", cwd=checkout)
    assert "varve needs Python 3.11 or newer" in missing.stderr


@needs("make")
def test_a_second_run_does_nothing_but_start(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    for stamp in (
        ".made",
        ".installed",
        ".installed-dev",
        ".warm",
        ".installed-pipeline",
        ".warm-pipeline",
    ):
        (checkout / ".venv" / stamp).touch()
    planned = run("make", "-n", "run", 'ARGS=--data "my data"', cwd=checkout)
    assert planned.stdout.splitlines() == ['exec .venv/bin/varve serve --data "my data"']
    planned = run("make", "-n", "test", "ARGS=-k swap", cwd=checkout)
    workers = "-n auto --dist loadgroup --no-loadscope-reorder"
    assert planned.stdout.splitlines() == [f".venv/bin/python -m pytest {workers} -k swap"]
    os.utime(checkout / "requirements.lock", (2**32 - 1, 2**32 - 1))
    assert "pip" in run("make", "-n", "run", cwd=checkout).stdout


def test_ci_is_lint_and_test_with_many_cases_and_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & stat.S_IXUSR
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "set -euo pipefail"
    assert [line for line in lines if line.startswith("make")] == [
        "make -j3 -O .venv/.warm-pipeline lint site sim-schedule SEEDS=0:10",
        "make sim SEEDS=2000",
    ]
    assert any(line.startswith("if ! make test ") for line in lines)
    assert "pipefail" in lines[0], "a pipe does not hide that the tests failed"
    assert "export CI=true" in lines
    assert run("bash", "-n", str(script)).returncode == 0


@pytest.mark.parametrize(
    ("failures", "later_failures", "attempts", "succeeds"),
    [(0, 0, 1, True), (3, 0, 2, True), (3, 1, 2, False), (4, 0, 1, False)],
)
def test_ci_gives_a_second_attempt_to_three_failed_tests_and_not_to_four(
    tmp_path: Path, failures: int, later_failures: int, attempts: int, *, succeeds: bool
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    (tmp_path / ".pytest_cache/v/cache").mkdir(parents=True)
    names = {f"tests/test_a.py::test[a case {number}]": True for number in range(failures)}
    (tmp_path / ".pytest_cache/v/cache/lastfailed").write_text(json.dumps(names))
    make = tmp_path / "bin/make"
    make.parent.mkdir()
    make.write_text(f"""#!/bin/sh
[ "$1" = test ] || exit 0
echo "$@" >>"{tmp_path}/attempts"
case "$*" in *--last-failed*) exit {later_failures};; *) exit {failures};; esac
""")
    make.chmod(0o755)
    for program in PROGRAMS_OF_CI:
        (make.parent / program).symlink_to("/bin/true")
    path = f"{make.parent}:{os.environ['PATH']}"
    ended = run("env", f"PATH={path}", "bash", str(tmp_path / ".ci/run"))
    assert (ended.returncode == 0) == succeeds, ended.stderr
    assert len((tmp_path / "attempts").read_text().splitlines()) == attempts
    assert all(name in ended.stdout for name in names)


@pytest.mark.parametrize("offered", [True, False], ids=["offered", "not offered"])
def test_ci_runs_the_tests_whether_or_not_prometheus_can_be_downloaded(
    tmp_path: Path, *, offered: bool
) -> None:
    programs = {
        "make": 'echo "make $*"; if [ "$1" = test ]; then promtool; prometheus; true; fi 2>&1',
        "apt-get": 'case "$*" in *download*) touch prometheus_2_amd64.deb;; esac' if offered
        else "echo no network >&2; exit 100",
        "dpkg": """mkdir -p "$3/usr/bin"; for program in prometheus promtool; do
printf '#!/bin/sh\necho %s runs\n' $program >"$3/usr/bin/$program"; done
chmod +x "$3"/usr/bin/*""",
    }  # fmt: skip
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    needed = (
        "bash",
        "dirname",
        "mktemp",
        "rm",
        "realpath",
        "timeout",
        "mkdir",
        "chmod",
        "touch",
        "mv",
        "tee",
        "grep",
        "sort",
        "sed",
    )
    for name in needed:
        where = shutil.which(name)
        assert where is not None
        (tmp_path / name).symlink_to(where)
    done = subprocess.run(
        [ROOT / ".ci/run"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    checks = "make -j3 -O .venv/.warm-pipeline lint site sim-schedule SEEDS=0:10"
    assert lines[:3] == [checks, "make sim SEEDS=2000", "make test"]
    for program in ("promtool", "prometheus"):
        assert (f"{program} runs" in lines) is offered
    assert ("prometheus is not available" in done.stderr) is not offered


def test_ci_says_at_its_end_what_it_skipped(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    make = tmp_path / "bin/make"
    make.parent.mkdir()
    make.write_text("""#!/bin/sh
[ "$1" = test ] || exit 0
echo "SKIPPED [1] tests/test_a.py:7: no engine is running"
""")
    make.chmod(0o755)
    for program in PROGRAMS_OF_CI:
        (make.parent / program).symlink_to("/bin/true")
    path = f"{make.parent}:{os.environ['PATH']}"
    ended = run("env", f"PATH={path}", "bash", str(tmp_path / ".ci/run"))
    assert ended.returncode == 0, ended.stderr
    _, _, report = ended.stderr.partition("NOT TESTED")
    assert "tests/test_a.py:7: no engine is running" in report


# Image ------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments of each line of the Dockerfile, continuations joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r" *\\\n\s*", " ", text).splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def copied() -> list[str]:
    """What the image takes from the checkout."""
    sources: list[str] = []
    for name, arguments in instructions():
        if name == "COPY" and "--from=" not in arguments:
            sources += [word for word in arguments.split()[:-1] if not word.startswith("--")]
    return sources


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines()
               if line.startswith("!")]  # fmt: skip
    assert set(PACKAGES) < set(copied())
    for source in copied():
        assert (ROOT / source).exists(), source
        assert source in allowed, source
    assert sorted(allowed) == sorted(copied())


def test_the_image_runs_as_nobody_special_and_installs_locked_versions() -> None:
    steps = instructions()
    names = [name for name, _ in steps]
    assert "ADD" not in names
    final = steps[len(names) - 1 - names[::-1].index("FROM") :]
    user = next(arguments for name, arguments in final if name == "USER")
    assert user not in ("root", "0")
    made = " ".join(arguments for name, arguments in final if name == "RUN")
    assert re.search(rf"useradd --system --uid [1-9]\d* .*\b{user}\b", made)
    installs = [part for name, arguments in steps if name == "RUN"
                for part in arguments.split("&&") if "pip install" in part]  # fmt: skip
    assert len(installs) == 3
    assert all("--require-hashes" in part or "--no-deps" in part for part in installs)


def test_the_image_serves_on_the_ports_it_exposes_and_keeps_data_in_its_volume() -> None:
    steps = dict(instructions())
    settings = load(str(ROOT / "deploy/container.yaml"))
    ports = [str(settings.listeners[0].address.port), str(settings.http.port)]
    assert steps["EXPOSE"].split() == ports
    assert settings.log_dirs[0].startswith(f"{steps['VOLUME']}/")
    command = json.loads(steps["ENTRYPOINT"])
    assert command[0] == "varve"
    assert command[1] in main.commands
    target = next(arguments.split()[-1] for name, arguments in instructions()
                  if name == "COPY" and "container.yaml" in arguments)  # fmt: skip
    assert command[2:] == ["--config", target]


def test_kernels_are_compiled_for_the_processor_they_are_run_on() -> None:
    stages = " ".join(f"{name} {arguments}\n" for name, arguments in instructions()).split("FROM ")
    for stage in stages[1:]:
        assert "NUMBA_CPU_NAME=$CPU_NAME NUMBA_CPU_FEATURES=$CPU_FEATURES" in stage
        assert "VARVE_KERNEL_CACHE=/opt/varve/kernels" in stage
        assert re.findall(r"ARG (.*)", stage) == ["CPU_NAME=x86-64-v2", "CPU_FEATURES=+sse4.2"]


@contextmanager
def answering(status: int) -> Iterator[int]:
    """An HTTP server that answers everything with one status; yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_of_the_image_asks_for_liveness(status: int, healthy: bool) -> None:
    arguments = dict(instructions())["HEALTHCHECK"]
    python, option, program = json.loads(arguments.partition("CMD ")[2])
    assert (python, option) == ("python", "-c")
    assert "127.0.0.1:9644" in program
    assert "/healthz" in program
    proxy = os.environ | {"http_proxy": "http://127.0.0.1:1"}  # which Docker sets in containers
    with answering(status) as port:
        command = [sys.executable, option, program.replace(":9644", f":{port}")]
        done = subprocess.run(command, env=proxy, capture_output=True, timeout=60)
    assert (done.returncode == 0) is healthy


def test_the_wheel_has_every_module_the_console_and_the_built_in_settings(tmp_path: Path) -> None:
    """Built, as the image builds it, from exactly what the image copies."""
    source = tmp_path / "source"
    source.mkdir()
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            (source / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('..'))"
    done = run(sys.executable, "-c", build, cwd=source)
    assert done.returncode == 0, done.stderr[-2000:]
    wheel = next(tmp_path.glob("varve-*.whl"))
    installed = tmp_path / "installed"
    shutil.unpack_archive(wheel, installed, "zip")
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.suffix in (".py", ".yaml") or (path.is_file() and "static" in path.parts):
                assert (installed / path.relative_to(ROOT)).exists(), path
    assert [path.name for path in installed.iterdir() if path.name == "tests"] == []
    program = "import config.loader as l; print(l.__file__); l.load(None)"
    environment = {"PYTHONPATH": str(installed)}
    loaded = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env=environment,
                            capture_output=True, text=True, timeout=60)  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.startswith(str(installed))
    entry_points = next(installed.glob("*.dist-info")) / "entry_points.txt"
    assert "varve = broker.cli:main" in entry_points.read_text()


# systemd ----------------------------------------------------------------------------------


def unit() -> configparser.ConfigParser:
    # Keys may be repeated in a unit (ExecStartPre); the last one is enough here.
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser


@needs("systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program that exists on this machine, and without a look at manual pages."""
    copy = tmp_path / "varve.service"
    copy.write_text(UNIT.read_text().replace("/opt/varve/bin/varve", shutil.which("true") or ""))
    done = run("systemd-analyze", "--man=no", "verify", str(copy))
    complaints = [line for line in done.stderr.splitlines() if "varve.service" in line]
    assert (done.returncode, complaints) == (0, [])


@needs("systemd-analyze")
def test_the_unit_is_locked_down() -> None:
    done = run("systemd-analyze", "security", "--offline=true", str(UNIT))
    level = re.search(r"Overall exposure level .*: ([\d.]+)", done.stdout)
    if level is None:
        pytest.skip("this systemd-analyze cannot judge a unit offline")
    assert float(level[1]) <= 2.0


def test_the_unit_gives_the_broker_time_to_stop_and_a_user_of_its_own() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["User"] not in ("", "root")
    example = load(str(ROOT / "deploy/varve.yaml"))
    assert int(service["TimeoutStopSec"]) * 1000 > example.shutdown_timeout_ms
    assert example.log_dirs[0].startswith(f"{service['WorkingDirectory']}/")


def test_the_commands_of_the_unit_exist() -> None:
    lines = re.findall(r"^Exec\w+=/opt/varve/bin/varve (\S+)(.*)$", UNIT.read_text(), re.MULTILINE)
    assert [name for name, _ in lines] == ["check-config", "warmup", "serve"]
    for name, arguments in lines:
        options = {flag for option in main.commands[name].params for flag in option.opts}
        assert {word for word in arguments.split() if word.startswith("--")} <= options


def test_the_daemon_tells_systemd_when_it_is_ready_and_when_it_stops(tmp_path: Path) -> None:
    # The path of a socket may have some hundred bytes only: a name in the abstract namespace.
    name = f"varve-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(f"\0{name}")
        channel.settimeout(60)
        broker = start_varve(tmp_path, environment={**os.environ, "NOTIFY_SOCKET": f"@{name}"})
        try:
            assert channel.recv(4096).splitlines()[0] == b"READY=1"
            broker.process.send_signal(signal.SIGTERM)
            assert channel.recv(4096).splitlines()[0] == b"STOPPING=1"
        finally:
            code = broker.stop()
    assert code == 0
    assert (broker.data / ".kafka_cleanshutdown").exists()


@contextmanager
def systemd_socket(name: str) -> Iterator[socket.socket]:
    """Receives what a service sends to NOTIFY_SOCKET=@name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(f"\0{name}")
        channel.settimeout(60)
        yield channel


def received_until_silence(channel: socket.socket) -> list[bytes]:
    received = []
    try:
        while len(received) < 1000:
            received.append(channel.recv(4096))
    except TimeoutError:
        return received
    raise AssertionError("it does not end")


def test_systemd_hears_from_the_watchdog_until_the_daemon_hangs(tmp_path: Path) -> None:
    name = f"varve-watchdog-{os.getpid()}"
    environment = {**os.environ, "NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "200000"}
    with systemd_socket(name) as channel:
        broker = start_varve(tmp_path, environment=environment)
        try:
            received = [channel.recv(4096)]
            while not received[-1].startswith(b"READY=1\n"):
                received.append(channel.recv(4096))
            assert received[0] == b"WATCHDOG=1", "it starts before the logs are opened"
            assert [channel.recv(4096) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            broker.process.send_signal(signal.SIGSTOP)
            channel.settimeout(1)
            assert len(received_until_silence(channel)) <= 2, "sent before the signal"
            broker.process.send_signal(signal.SIGABRT)  # as systemd does then
            broker.process.send_signal(signal.SIGCONT)
            assert broker.process.wait(60) == -signal.SIGABRT
        finally:
            if broker.process.poll() is None:
                broker.kill()
    stacks = broker.log_text.partition("Fatal Python error: Aborted")[2]
    assert "most recent call first" in stacks, "the log shows where each thread was"


def test_the_unit_has_a_watchdog_that_a_long_step_does_not_trigger() -> None:
    assert int(unit()["Service"]["WatchdogSec"]) >= 60


def test_sigterm_to_the_whole_group_stops_the_daemon_cleanly(tmp_path: Path) -> None:
    """`make run` and a terminal signal every process of the group, workers too, some twice."""
    broker = start_varve(tmp_path)
    os.killpg(broker.process.pid, signal.SIGTERM)
    os.killpg(broker.process.pid, signal.SIGTERM)
    assert broker.stop() == 0, broker.log_text[-2000:]
    assert (broker.data / ".kafka_cleanshutdown").exists()
