"""The dashboards: current, well-formed, and every query runs in a real Prometheus.

No Grafana runs here: that a Grafana draws them is not tested.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana import build
from tests.deploy.test_prometheus import METRIC, names_of_series
from tests.support.prometheus import Prometheus
from tests.support.varve import VarveBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("prometheus")

GRAFANA = Path(__file__).parents[2] / "deploy/grafana"
DASHBOARDS = {
    path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").iterdir())
}
ALL = pytest.mark.parametrize("name", DASHBOARDS)
# What Grafana puts in place of its variables.
VALUES = {"$__rate_interval": "4s", "$instance": ".*", "$topic": "customers"}


def panels(name: str) -> list[dict[str, Any]]:
    return list(DASHBOARDS[name]["panels"])


def queries(name: str) -> list[str]:
    """The queries of panels, with values in place of variables."""
    exprs = [target["expr"] for panel in panels(name) for target in panel.get("targets", ())]
    for variable, value in VALUES.items():
        exprs = [expr.replace(variable, value) for expr in exprs]
    return exprs


def test_the_dashboards_are_current() -> None:
    assert list(DASHBOARDS) == sorted(dashboard.name for dashboard in build.DASHBOARDS)
    for dashboard in build.DASHBOARDS:
        written = (build.FOLDER / f"{dashboard.name}.json").read_text()
        assert written == build.text(dashboard), "run `make docs` and review the change"


def test_each_dashboard_has_a_uid_of_its_own() -> None:
    uids = [dashboard["uid"] for dashboard in DASHBOARDS.values()]
    assert len(set(uids)) == len(uids)


@ALL
def test_panels_have_ids_of_their_own_and_do_not_overlap(name: str) -> None:
    ids = [panel["id"] for panel in panels(name)]
    assert len(set(ids)) == len(ids)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels(name):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= build.COLUMNS, panel["title"]
        columns = range(place["x"], place["x"] + place["w"])
        for cell in itertools.product(columns, range(place["y"], place["y"] + place["h"])):
            assert taken.setdefault(cell, panel["title"]) == panel["title"]


@ALL
def test_every_panel_says_what_it_shows_and_every_variable_exists(name: str) -> None:
    variables = {entry["name"] for entry in DASHBOARDS[name]["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)", json.dumps(DASHBOARDS[name]))) <= variables
    for panel in panels(name):
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@ALL
def test_every_metric_of_a_dashboard_is_exported(name: str, broker: VarveBroker) -> None:
    exported = names_of_series(broker.get("/metrics"))
    named = {metric for expr in queries(name) for metric in METRIC.findall(expr)}
    assert len(named) > 10
    assert named - exported == set()


@ALL
def test_every_query_of_a_dashboard_runs_in_a_prometheus(name: str, prometheus: Prometheus) -> None:
    wait_until(
        lambda: prometheus.get("query", query="varve_ready == 1")["result"], "the broker is ready"
    )
    for expr in queries(name):
        prometheus.get("query", query=expr)


@pytest.mark.parametrize(
    ("topic", "query"),
    [
        ("customers", "kafka_log_log_size"),
        ("customers", "varve_cleaner_dirty_ratio"),
        ("customers", "kafka_consumergroup_lag_sum"),
        ("prices", "varve_view_ledger_records"),
    ],
)
def test_the_queries_of_a_topic_have_results(
    topic: str, query: str, prometheus: Prometheus
) -> None:
    (expr,) = [
        target["expr"]
        for panel in panels("topic")
        for target in panel.get("targets", ())
        if target["expr"].startswith((query, f"sum by (partition) ({query}"))
    ][:1]
    expr = expr.replace("$instance", ".*").replace("$topic", topic)
    wait_until(lambda: prometheus.get("query", query=expr)["result"], expr)


def test_the_provisioned_data_source_and_folder_are_those_of_the_files() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["type"] == build.SOURCE["type"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/varve.yaml").read_text())[
        "providers"
    ]
    assert provider["type"] == "file"
