"""deploy/compose.yaml: its files exist, its services are locked down and find each other.

No container runs here.
"""

import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from broker.cli import main
from config.loader import load
from tests.support.draws import only_in_ci
from tests.support.peers import other_programs

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ALL = pytest.mark.parametrize("name", SERVICES)


def volumes(name: str) -> dict[str, str]:
    """The source of each mount point."""
    parts = [volume.split(":") for volume in SERVICES[name].get("volumes", ())]
    return {part[1]: part[0] for part in parts}


def container_ports(name: str) -> set[int]:
    return {int(port.rpartition(":")[2]) for port in SERVICES[name]["ports"]}


def dockerfile(instruction: str) -> str:
    text = (ROOT / "Dockerfile").read_text()
    return re.findall(rf"^{instruction} (.*)$", text, re.MULTILINE)[-1]


@ALL
def test_every_service_has_a_read_only_root_and_no_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@ALL
def test_every_port_is_published_on_loopback_only(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


@ALL
def test_every_mounted_file_exists_and_every_volume_is_declared(name: str) -> None:
    for source in volumes(name).values():
        if source.startswith("."):
            assert (DEPLOY / source).exists(), source
        else:
            assert source in COMPOSE["volumes"]


def test_the_broker_keeps_its_data_in_the_volume_of_the_image() -> None:
    assert (DEPLOY / SERVICES["varve"]["build"] / "Dockerfile").exists()
    assert list(volumes("varve")) == [dockerfile("VOLUME")]
    assert container_ports("varve") == {int(port) for port in dockerfile("EXPOSE").split()}
    options = {flag for option in main.commands["serve"].params for flag in option.opts}
    assert {word for word in SERVICES["varve"]["command"] if word.startswith("-")} <= options


def test_the_broker_has_more_time_to_stop_than_it_takes() -> None:
    settings = load(str(DEPLOY / "container.yaml"))
    seconds = int(SERVICES["varve"]["stop_grace_period"].removesuffix("s"))
    assert seconds * 1000 > settings.shutdown_timeout_ms


def test_prometheus_scrapes_the_broker_with_the_shipped_configuration() -> None:
    mounted = DEPLOY / volumes("prometheus")["/etc/prometheus/prometheus.yml"]
    config = yaml.safe_load(mounted.read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0].pop("targets")
    host, _, port = target.partition(":")
    assert int(port) in container_ports(host)
    alone = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())
    del alone["scrape_configs"][0]["static_configs"][0]["targets"]
    assert config == alone
    assert {f"/etc/prometheus/{file}" for file in config["rule_files"]} < set(volumes("prometheus"))


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    folder = DEPLOY / volumes("grafana")["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    url = urlsplit(source["url"])
    assert url.port in container_ports(str(url.hostname))
    (provider,) = yaml.safe_load((folder / "dashboards/varve.yaml").read_text())["providers"]
    assert (DEPLOY / volumes("grafana")[provider["options"]["path"]] / "overview.json").exists()


@only_in_ci("the tests above read the file; Go compiles the parser")
def test_the_parser_of_docker_compose_accepts_the_file() -> None:
    reason = other_programs.unavailable("compose_go")
    if reason is not None:
        pytest.skip(f"the parser cannot be built here: {reason}")
    command = [*other_programs.command("compose_go"), str(DEPLOY / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)
