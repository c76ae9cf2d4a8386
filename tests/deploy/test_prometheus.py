"""The alert rules that are shipped: promtool accepts them, a real Prometheus evaluates them."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prometheus import DEPLOY, Prometheus
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("prometheus")

ROOT = Path(__file__).parents[2]
RUNBOOKS = (ROOT / "docs/how-to/runbooks.md").read_text()
RULES = yaml.safe_load((DEPLOY / "varve-rules.yaml").read_text())["groups"][0]["rules"]
METRIC = re.compile(r"\b(?:varve|kafka|process)_\w+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed"
)


def promtool(*arguments: str) -> None:
    command = ["promtool", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    promtool("check", "config", str(DEPLOY / "prometheus.yaml"))
    promtool("check", "rules", "--lint-fatal", str(DEPLOY / "varve-rules.yaml"))


@needs_promtool
def test_each_alert_fires_for_its_problem_and_none_for_a_restart() -> None:
    promtool("test", "rules", str(DEPLOY / "varve-rules-test.yaml"))


def test_the_tests_of_the_rules_have_every_alert() -> None:
    text = (DEPLOY / "varve-rules-test.yaml").read_text()
    tested = re.findall(r"labels: '\{alertname=\"(\w+)\"\}'", text)
    assert tested == [rule["alert"] for rule in RULES]


def test_every_alert_has_a_severity_a_summary_and_a_link_to_its_runbook() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "runbook_url"}, rule["alert"]
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / page).read_text() == RUNBOOKS
        assert anchor == rule["alert"].lower()


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    sections = re.split(r"^## ", RUNBOOKS, flags=re.MULTILINE)[1:]
    assert [section.split("\n", 1)[0] for section in sections] == [rule["alert"] for rule in RULES]
    for section, rule in zip(sections, RULES, strict=True):
        parts = re.findall(r"\*\*(\w+)[.:]\*\*", section)
        assert parts == ["Meaning", "Severity", "Check", "Remedy"], rule["alert"]
        assert f"**Severity:** {rule['labels']['severity']}." in section, rule["alert"]


def test_every_metric_of_the_rules_is_exported(broker: VarveBroker) -> None:
    exported = names_of_series(broker.get("/metrics"))
    for rule in RULES:
        named = set(METRIC.findall(rule["expr"]))
        assert named - exported == set(), rule["alert"]


def names_of_series(text: str) -> set[str]:
    """The names that a query may use: of families, and of the parts of histograms."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE):
        names.add(name)
        if kind in ("histogram", "summary"):
            names |= {f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    return names


def test_a_prometheus_scrapes_the_daemon_and_evaluates_every_rule(prometheus: Prometheus) -> None:
    def scraped() -> list[tuple[str, str]]:
        targets = prometheus.get("targets")["activeTargets"]
        return [(row["health"], row["lastError"]) for row in targets if row["health"] != "unknown"]

    wait_until(scraped, "the daemon is scraped")
    assert scraped() == [("up", "")]

    def rules() -> list[dict[str, Any]]:
        (group,) = prometheus.get("rules")["groups"]
        return list(group["rules"])

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "rules evaluated")
    assert [(rule["name"], rule["lastError"]) for rule in rules() if rule["health"] != "ok"] == []
    wait_until(
        lambda: prometheus.get("query", query="varve_ready == 1")["result"], "the broker is ready"
    )
    firing = {rule["name"] for rule in rules() if rule["state"] == "firing"}
    assert firing <= {"VarveLoopHeld"}  # on a busy machine, a step may take long
