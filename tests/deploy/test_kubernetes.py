"""The Helm chart, and the manifest that is rendered from it. No cluster runs here."""

import copy
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from broker.cli import main
from broker.http.access import OPEN_PATHS
from config.loader import load

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/varve"
MANIFEST = ROOT / "deploy/kubernetes/varve.yaml"
KUBERNETES = ("1.29.0", "1.33.0", kubernetes_validate.latest_version())

Resources = list[dict[str, Any]]
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


def helm(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False)


def template(*settings: str) -> "subprocess.CompletedProcess[str]":
    """`helm template` as `make manifests` calls it, with other values."""
    options = [option for setting in settings for option in ("--set-json", setting)]
    # A helm that `go install` has built takes the cluster for one of version 1.20.
    where = ("--namespace", "varve", "--kube-version", "1.33")
    return helm("template", "varve", str(CHART), *where, *options)


def rendered(*settings: str) -> Resources:
    """The resources of the chart with other values."""
    done = template(*settings)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def shipped() -> Resources:
    return [document for document in yaml.safe_load_all(MANIFEST.read_text()) if document]


def of_kind(kind: str, resources: Resources | None = None) -> dict[str, Any]:
    found = [item for item in resources or shipped() if item["kind"] == kind]
    return found[0]


def container(resources: Resources | None = None) -> dict[str, Any]:
    (container,) = of_kind("StatefulSet", resources)["spec"]["template"]["spec"]["containers"]
    return dict(container)


def validate(resources: Resources) -> None:
    for resource in resources:
        for version in KUBERNETES:
            kubernetes_validate.validate(copy.deepcopy(resource), version, strict=True)


def test_the_schemas_of_kubernetes_accept_the_manifest() -> None:
    assert {item["kind"] for item in shipped()} == {
        "ConfigMap",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
        "StatefulSet",
    }
    validate(shipped())


def test_the_schemas_of_kubernetes_refuse_a_mistake() -> None:
    wrong = copy.deepcopy(of_kind("StatefulSet"))
    wrong["spec"]["replicas"] = "one"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate([wrong])


def test_the_settings_of_the_chart_are_good_and_those_of_the_pod(tmp_path: Path) -> None:
    data = of_kind("ConfigMap")["data"]
    file = tmp_path / "varve.yaml"
    file.write_text(data["varve.yaml"])
    advertised = container()["args"][1]
    settings = load(str(file), {"advertise": advertised})
    assert advertised.partition(".")[0] == of_kind("Service")["metadata"]["name"]
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"kafka": settings.listeners[0].address.port, "http": settings.http.port}
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert all(path.startswith(f"{mounts['data']}/") for path in settings.log_dirs)
    assert list(data) == ["varve.yaml"]
    assert f'"{mounts["settings"]}/varve.yaml"' in (ROOT / "Dockerfile").read_text()
    grace = of_kind("StatefulSet")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace * 1000 > settings.shutdown_timeout_ms


def test_the_arguments_of_the_pod_are_options_of_the_broker() -> None:
    options = {flag for option in main.commands["serve"].params for flag in option.opts}
    assert {word for word in container()["args"] if word.startswith("-")} <= options


def test_probes_ask_for_paths_that_need_no_credentials() -> None:
    probes = {name: container()[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    # Not readiness for the first two: a long recovery or an offline partition is no reason to
    # restart.
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    assert set(paths.values()) == OPEN_PATHS
    services = [item for item in shipped() if item["kind"] == "Service"]
    assert all(item["spec"]["publishNotReadyAddresses"] for item in services)


def test_the_pod_is_locked_down() -> None:
    pod = of_kind("StatefulSet")["spec"]["template"]["spec"]
    user = re.search(r"useradd --system --uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["fsGroup"] == int(user[1])
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "they would set variables such as VARVE_PORT"


def test_selectors_find_the_pod() -> None:
    labels = of_kind("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    for item in shipped():
        spec = item.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector:
            assert selector.get("matchLabels", selector).items() <= labels.items(), item["kind"]


def test_the_chart_has_the_version_of_the_program() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["appVersion"] == version
    assert container()["image"] == f"varve:{version}"


@needs_helm
def test_helm_accepts_the_chart() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_helm
def test_the_manifest_is_what_the_chart_renders() -> None:
    done = template()
    assert done.stdout == MANIFEST.read_text(), "run `make manifests`, review the change"


@needs_helm
def test_other_values_render_valid_resources() -> None:
    resources = rendered(
        'settings={"listeners": ["0.0.0.0:9092", {"name": "TLS", "protocol": "SSL", '
        '"address": "0.0.0.0:9093"}], "http": "0.0.0.0:9644", "http_tls": true, '
        '"log_dirs": ["/var/lib/varve/data"]}',
        'persistence={"size": "1Ti", "storageClassName": "fast"}',
        'serviceMonitor={"enabled": true, "labels": {"release": "prometheus"}}',
        'extraVolumes=[{"name": "tls", "secret": {"secretName": "varve-tls"}}]',
        'extraVolumeMounts=[{"name": "tls", "mountPath": "/etc/varve-tls"}]',
        'nodeSelector={"disk": "ssd"}',
        'imagePullSecrets=[{"name": "registry"}]',
        'podAnnotations={"example.org/owner": "us"}',
        'networkPolicy={"clients": [{"namespaceSelector": {}}], "egress": [{}]}',
    )
    monitor = of_kind("ServiceMonitor", resources)  # its schema is the operator's
    assert monitor["spec"]["endpoints"][0]["scheme"] == "https"
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    validate([item for item in resources if item is not monitor])
    ports = [port["containerPort"] for port in container(resources)["ports"]]
    assert ports == [9092, 9093, 9644]
    service = of_kind("Service", resources)
    names = {port["name"] for port in container(resources)["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


@needs_helm
def test_parts_can_be_switched_off() -> None:
    resources = rendered(
        'networkPolicy={"enabled": false}', 'podDisruptionBudget={"enabled": false}'
    )
    assert {item["kind"] for item in resources}.isdisjoint({"NetworkPolicy", "PodDisruptionBudget"})
    validate(resources)


@needs_helm
@pytest.mark.parametrize(
    "value",
    ["replicas=3", 'persistence={"size": "big"}', 'settings={"log_dirs": ["/elsewhere"]}'],
)
def test_values_that_make_no_sense_are_refused(value: str) -> None:
    done = template(value)
    assert done.returncode != 0
    assert value.partition("=")[0] in done.stderr
