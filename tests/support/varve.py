"""The real daemon as a process, for tests that need to kill it, restart it or starve it."""

import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from tests.support.ports import free_port
from tests.support.processes.fork_server import Process, start_forked

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
STOP_SECONDS = 60


@dataclass
class VarveBroker:
    """A running daemon."""

    directory: Path
    port: int
    http_port: int
    process: Process
    has_https: bool = False

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Where its HTTP API is."""
        return f"{'https' if self.has_https else 'http'}://127.0.0.1:{self.http_port}"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log_text(self) -> str:
        return (self.directory / "varve.log").read_text(errors="replace")

    def get(self, path: str) -> str:
        """Body of an HTTP answer."""
        context = ssl._create_unverified_context() if self.has_https else None
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10, context=context) as answer:
            return str(answer.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics; 0 if it is not there."""
        expected = [f'{key}="{value}"' for key, value in labels.items()]
        for line in self.get("/metrics").splitlines():
            head = line.partition(" ")[0]
            if head.partition("{")[0] == name and all(label in head for label in expected):
                return float(line.rpartition(" ")[2])
        return 0.0

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def start_varve(
    directory: Path,
    settings: dict[str, Any] | None = None,
    *,
    port: int | None = None,
    http_port: int | None = None,
    environment: dict[str, str] | None = None,
) -> VarveBroker:
    """Start the daemon on `directory`/data, as left by an earlier one; wait until it is ready."""
    directory.mkdir(parents=True, exist_ok=True)
    port, http_port = port or free_port(), http_port or free_port()
    settings = settings or {}
    config = {
        "listeners": [f"127.0.0.1:{port}"],
        "http": f"127.0.0.1:{http_port}",
        "log_dirs": [str(directory / "data")],
        **settings,
        # Workers at the lowest priority starve while other tests use all cores.
        "cleaner": {"nice": 0, **settings.get("cleaner", {})},
    }
    (directory / "varve.yaml").write_text(yaml.safe_dump(config))
    arguments = ["serve", "--config", str(directory / "varve.yaml")]
    with (directory / "varve.log").open("ab") as output:
        process = _start(arguments, output, environment)
    broker = VarveBroker(directory, port, http_port, process, bool(config.get("http_tls")))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"varve ended with {process.poll()}: {broker.log_text[-3000:]}")
        try:
            broker.get("/readyz")
        except urllib.error.HTTPError as error:
            # Started, but not all of it is served: the text names what is not.
            if error.read().startswith((b"data directory ", b"partition ", b"partitions ")):
                return broker
            time.sleep(0.02)
            continue
        except OSError:
            time.sleep(0.02)
            continue
        return broker
    broker.kill()
    raise AssertionError(f"varve was not ready in {START_SECONDS} s: {broker.log_text[-3000:]}")


def _start(arguments: list[str], output: IO[bytes], environment: dict[str, str] | None) -> Process:
    """Start quickly, or with a new interpreter where the environment is another one."""
    if environment is None:
        return start_forked(arguments, output, output)
    command = [sys.executable, "-m", "broker.cli", *arguments]
    return subprocess.Popen(
        command, stdout=output, stderr=output, cwd=ROOT, env=environment, start_new_session=True
    )


@contextmanager
def running_varve(
    directory: Path, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[VarveBroker]:
    """A daemon for the length of a block; a clean stop is checked at the end."""
    broker = start_varve(directory, settings, **options)
    try:
        yield broker
    finally:
        if broker.process.poll() is None:
            code = broker.stop()
            assert code == 0, broker.log_text[-3000:]
