"""A real Prometheus that scrapes a daemon, with the rules that are shipped."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.ports import free_port
from tests.support.waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy/prometheus"
INTERVAL = "1s"  # between two scrapes, and between two evaluations of the rules


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of its API, or raise AssertionError with the reason."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        assert answer["status"] == "success", answer
        return answer["data"]

    @property
    def is_ready(self) -> bool:
        """Return whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def running_prometheus(directory: Path, target: str) -> Iterator[Prometheus]:
    """A server with the shipped configuration, which scrapes `target` often."""
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "varve-rules.yaml", directory)
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={directory}/prometheus.yaml",
        f"--storage.tsdb.path={directory}/tsdb",
        f"--web.listen-address={address}",
    ]
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    server = Prometheus(f"http://{address}")
    try:
        wait_until(lambda: process.poll() is not None or server.is_ready, "prometheus is ready")
        assert process.poll() is None, log.read_text()
        yield server
    finally:
        process.terminate()
        process.wait(30)
