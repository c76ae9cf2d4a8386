"""Writes the dashboards for Grafana: `make docs`, or `python deploy/grafana/build.py`.

Panels flow from left to right in rows of 24 columns. Queries use `$instance`, the broker, and on
the topic's dashboard `$topic`. Grafana replaces `$__rate_interval`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "dashboards"
COLUMNS: Final = 24  # of Grafana's grid
ROW_HEIGHT: Final = 8
STAT_HEIGHT: Final = 4
SCHEMA_VERSION: Final = 38  # of Grafana 10; later versions migrate it when they load it
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]
Colors = tuple[tuple[float | None, str], ...]  # (from this value on, colour)

RED_ABOVE_ZERO: Final[Colors] = ((None, "green"), (1, "red"))
RED_AT_ZERO: Final[Colors] = ((None, "red"), (1, "green"))


@dataclass(frozen=True)
class Query:
    """A query, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A diagram, or a single number if `colors` are given."""

    title: str
    description: str
    unit: str  # of Grafana: bytes, Bps, s, percentunit, short, ...
    queries: tuple[Query, ...]
    width: int = 8
    colors: Colors = ()

    @property
    def height(self) -> int:
        """Return the number of grid rows."""
        return STAT_HEIGHT if self.colors else ROW_HEIGHT


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """One file."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    has_topic: bool = False


def stat(title: str, description: str, expr: str, unit: str, colors: Colors) -> Panel:
    """Return a number that changes its colour."""
    return Panel(title, description, unit, (Query(expr),), width=4, colors=colors)


def graph(title: str, description: str, unit: str, *queries: Query, width: int = 8) -> Panel:
    """Return a diagram over time."""
    return Panel(title, description, unit, queries, width)


# Labels of every query: one broker, or all.
BROKER: Final = 'instance=~"$instance"'
TOPIC: Final = f'{BROKER}, topic="$topic"'


def _sum_rate(metric: str, by: str = "", labels: str = BROKER) -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric}{{{labels}}}[$__rate_interval]))"


def _quantile(metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    buckets = f"rate({metric}_bucket{{{BROKER}}}[$__rate_interval])"
    return f"histogram_quantile(0.99, sum by ({labels}) ({buckets}))"


OVERVIEW: Final = Dashboard(
    "overview",
    "Varve: overview",
    "Is the broker well, what moves, how long do clients wait?",
    (
        Row(
            "Health",
            (
                stat("Ready", "1 if clients are served, and every partition.",
                     f"min(varve_ready{{{BROKER}}})", "short", RED_AT_ZERO),
                stat("Alerts", "Firing alerts of the rules in deploy/prometheus.",
                     'count(ALERTS{alertname=~"Varve.*", alertstate="firing"}) or vector(0)',
                     "short", RED_ABOVE_ZERO),
                stat("Offline partitions", "Partitions whose disk failed or whose folder is gone.",
                     f"sum(kafka_server_replicamanager_offlinereplicacount{{{BROKER}}})", "short",
                     RED_ABOVE_ZERO),
                stat("Free disk space", "The fullest data directory.",
                     f"min(varve_disk_free_bytes{{{BROKER}}} / varve_disk_size_bytes{{{BROKER}}})",
                     "percentunit", ((None, "red"), (0.1, "orange"), (0.2, "green"))),
                stat("Partitions to clean", "Partitions that are due for cleaning.",
                     f"sum(varve_cleaner_candidates{{{BROKER}}})", "short", ((None, "green"),)),
                stat("In quarantine", "Partitions whose last clean failed.",
                     "sum(kafka_log_logcleanermanager_uncleanable_partitions_count"
                     f"{{{BROKER}}})", "short", RED_ABOVE_ZERO),
            ),
        ),
        Row(
            "Traffic",
            (
                graph("Bytes", "Bytes of batches received and sent.", "Bps",
                      Query(_sum_rate("kafka_server_brokertopicmetrics_bytesin_total"), "in"),
                      Query(_sum_rate("kafka_server_brokertopicmetrics_bytesout_total"), "out")),
                graph("Records received by topic", "The ten largest.", "short",
                      Query("topk(10, "
                            + _sum_rate("kafka_server_brokertopicmetrics_messagesin_total", "topic")
                            + ")", "{{topic}}")),
                graph("Connections", "Open connections of Kafka clients.", "short",
                      Query("sum by (listener) (kafka_server_socket_server_metrics_connection_count"
                            f"{{{BROKER}}})", "{{listener}}")),
                graph("Requests", "Requests by API.", "reqps",
                      Query(_sum_rate("kafka_network_requestmetrics_requests_total", "request"),
                            "{{request}}")),
                graph("Errors", "Error codes in responses; some are a normal part of the protocol.",
                      "short",
                      Query(_sum_rate("kafka_network_requestmetrics_errors_total", "error"),
                            "{{error}}")),
                graph("Throttled responses", "Responses delayed by a quota.", "short",
                      Query(_sum_rate("varve_quota_throttled_responses_total", "quota"),
                            "{{quota}}")),
            ),
        ),
        Row(
            "Latency",
            (
                graph("Requests, 99th percentile",
                      "From the complete request to its response. A Fetch waits for records.", "s",
                      Query(_quantile("varve_request_seconds", "request"), "{{request}}")),
                graph("Flushes, 99th percentile", "Duration of fsync.", "s",
                      Query(_quantile("varve_flush_seconds"), "flush")),
                graph("Longest holds of the event loop",
                      "Longest time since the start in which one step kept all clients waiting.",
                      "s",
                      Query("topk(5, max by (request) "
                            f"(varve_request_longest_hold_seconds{{{BROKER}}}))", "{{request}}"),
                      Query("topk(5, max by (task) "
                            f"(varve_background_longest_hold_seconds{{{BROKER}}}))", "{{task}}")),
            ),
        ),
        Row(
            "Resources",
            (
                graph("Disk space", "Free bytes of each data directory.", "bytes",
                      Query(f"varve_disk_free_bytes{{{BROKER}}}", "{{instance}} {{directory}}")),
                graph("CPU of the broker", "Cores in use, without the cleaner's workers.", "short",
                      Query(_sum_rate("process_cpu_seconds_total", "instance"), "{{instance}}")),
                graph("Memory of the broker", "Resident memory, without the cleaner's workers.",
                      "bytes",
                      Query(f"process_resident_memory_bytes{{{BROKER}}}", "{{instance}}")),
            ),
        ),
        Row(
            "Consumers",
            (
                graph("Lag", "Offsets that groups have not committed yet; the ten largest.",
                      "short",
                      Query("topk(10, sum by (consumergroup, topic) "
                            f"(kafka_consumergroup_lag_sum{{{BROKER}}}))",
                            "{{consumergroup}} {{topic}}"), width=16),
                graph("Groups", "Consumer groups, and rebalances per minute.", "short",
                      Query("sum(kafka_coordinator_group_groupmetadatamanager_numgroups"
                            f"{{{BROKER}}})", "groups"),
                      Query("60 * " + _sum_rate("varve_group_rebalances_total"), "rebalances")),
            ),
        ),
    ),
)  # fmt: skip

CLEANER: Final = Dashboard(
    "cleaner",
    "Varve: cleaner",
    "Does log compaction keep up, and what does it cost?",
    (
        Row(
            "Backlog",
            (
                stat("To clean", "Partitions that are due.",
                     f"sum(varve_cleaner_candidates{{{BROKER}}})", "short", ((None, "green"),)),
                stat("Dirty bytes", "Bytes written since the last clean that can be cleaned now.",
                     f"sum(varve_cleaner_cleanable_bytes{{{BROKER}}})", "bytes",
                     ((None, "green"),)),
                stat("Behind their deadline", "Partitions beyond max.compaction.lag.ms.",
                     f"sum(varve_cleaner_over_lag_partitions{{{BROKER}}})", "short",
                     RED_ABOVE_ZERO),
                stat("In quarantine", "Partitions whose last clean failed.",
                     "sum(kafka_log_logcleanermanager_uncleanable_partitions_count"
                     f"{{{BROKER}}})", "short", RED_ABOVE_ZERO),
                stat("Damaged", "Partitions with damaged batches.",
                     f"sum(varve_cleaner_damaged_partitions{{{BROKER}}})", "short",
                     RED_ABOVE_ZERO),
                stat("Missing workers", "Workers that died and are not replaced yet.",
                     f"sum(kafka_log_logcleaner_deadthreadcount{{{BROKER}}})", "short",
                     RED_ABOVE_ZERO),
            ),
        ),
        Row(
            "Partitions",
            (
                graph("Dirtiest partitions", "Dirty share of the cleanable bytes.", "percentunit",
                      Query(f"topk(10, varve_cleaner_dirty_ratio{{{BROKER}}})",
                            "{{topic}}-{{partition}}")),
                graph("Oldest uncleaned record", "The ten oldest.", "s",
                      Query(f"topk(10, varve_cleaner_oldest_dirty_age_seconds{{{BROKER}}})",
                            "{{topic}}-{{partition}}")),
                graph("Time left until max.compaction.lag.ms", "Negative: too late.", "s",
                      Query(f"bottomk(10, varve_cleaner_deadline_slack_seconds{{{BROKER}}})",
                            "{{topic}}-{{partition}}")),
                graph("Why partitions are not cleaned", "Partitions by reason; see `explain`.",
                      "short",
                      Query(f"count by (reason) (varve_cleaner_blocked{{{BROKER}}})",
                            "{{reason}}")),
                graph("Backlog of views", "Bytes that compacted views do not include yet.", "bytes",
                      Query(f"topk(10, varve_view_backlog_bytes{{{BROKER}}})",
                            "{{topic}}-{{partition}}"), width=16),
            ),
        ),
        Row(
            "Work",
            (
                graph("I/O", "Bytes that workers read and write.", "Bps",
                      Query(_sum_rate("varve_cleaner_read_bytes_total"), "read"),
                      Query(_sum_rate("varve_cleaner_written_bytes_total"), "written")),
                graph("Bytes removed", "Garbage that finished cleans removed.", "Bps",
                      Query(_sum_rate("varve_cleaner_bytes_before_total") + " - "
                            + _sum_rate("varve_cleaner_bytes_after_total"), "removed")),
                graph("Records removed", "Superseded records and expired tombstones.", "short",
                      Query(_sum_rate("varve_cleaner_records_before_total") + " - "
                            + _sum_rate("varve_cleaner_records_after_total"), "records"),
                      Query(_sum_rate("varve_cleaner_tombstones_removed_total"), "tombstones")),
                graph("Jobs", "Jobs per minute by outcome.", "short",
                      Query("60 * " + _sum_rate("varve_cleaner_cleans_total"), "finished"),
                      Query("60 * " + _sum_rate("varve_cleaner_failures_total"), "failed"),
                      Query("60 * " + _sum_rate("varve_cleaner_aborts_total"), "aborted"),
                      Query("60 * " + _sum_rate("varve_cleaner_stale_jobs_total"), "stale")),
                graph("Busy workers", "Seconds of work per second, and of waiting for budgets.",
                      "short",
                      Query(_sum_rate("varve_cleaner_seconds_total"), "in jobs"),
                      Query(_sum_rate("varve_cleaner_read_wait_seconds_total"), "wait to read"),
                      Query(_sum_rate("varve_cleaner_write_wait_seconds_total"), "wait to write")),
                graph("Key map", "Share in use at its fullest, and jobs that did not fit.",
                      "percent",
                      Query("max(kafka_log_logcleaner_max_buffer_utilization_percent"
                            f"{{{BROKER}}})", "fullest"),
                      Query("60 * " + _sum_rate("varve_cleaner_maps_full_total"),
                            "full maps per minute")),
                graph("Scans", "Duration of a scan of all partitions, and the age of the last.",
                      "s",
                      Query(f"max(varve_cleaner_scan_seconds{{{BROKER}}})", "duration"),
                      Query(f"max(varve_cleaner_last_scan_age_seconds{{{BROKER}}})", "age")),
                graph("Workers", "Processes started, died and killed, per minute.", "short",
                      Query("60 * " + _sum_rate("varve_cleaner_worker_starts_total"), "started"),
                      Query("60 * " + _sum_rate("varve_cleaner_worker_deaths_total"), "died"),
                      Query("60 * " + _sum_rate("varve_cleaner_worker_kills_total"), "killed")),
                graph("Remote compaction", "Bytes of segments exchanged with the pipeline.", "Bps",
                      Query(_sum_rate("varve_lease_sent_bytes_total"), "sent"),
                      Query(_sum_rate("varve_lease_received_bytes_total"), "received")),
            ),
        ),
    ),
)  # fmt: skip

ONE_TOPIC: Final = Dashboard(
    "topic",
    "Varve: topic",
    "One topic: traffic, size, cleaning and consumers.",
    (
        Row(
            "Traffic",
            (
                graph("Bytes", "Bytes of batches received and sent.", "Bps",
                      Query(_sum_rate("kafka_server_brokertopicmetrics_bytesin_total",
                                      labels=TOPIC), "in"),
                      Query(_sum_rate("kafka_server_brokertopicmetrics_bytesout_total",
                                      labels=TOPIC), "out")),
                graph("Records", "Records received.", "short",
                      Query(_sum_rate("kafka_server_brokertopicmetrics_messagesin_total",
                                      labels=TOPIC), "records")),
                graph("Failed requests", "Requests for this topic that were refused.", "reqps",
                      Query(_sum_rate("kafka_server_brokertopicmetrics_failedproducerequests_total",
                                      labels=TOPIC), "produce"),
                      Query(_sum_rate("kafka_server_brokertopicmetrics_failedfetchrequests_total",
                                      labels=TOPIC), "fetch"),
                      Query(_sum_rate("varve_log_damaged_fetches_total", labels=TOPIC),
                            "of damaged records")),
            ),
        ),
        Row(
            "Log",
            (
                graph("Size", "Bytes on disk by partition.", "bytes",
                      Query(f"sum by (partition) (kafka_log_log_size{{{TOPIC}}})",
                            "{{partition}}")),
                graph("Segments", "Segments by partition.", "short",
                      Query(f"sum by (partition) (kafka_log_log_numlogsegments{{{TOPIC}}})",
                            "{{partition}}")),
                graph("Offsets", "Log end offset minus log start offset, by partition.", "short",
                      Query(f"kafka_log_log_logendoffset{{{TOPIC}}} "
                            f"- kafka_log_log_logstartoffset{{{TOPIC}}}", "{{partition}}")),
            ),
        ),
        Row(
            "Cleaning",
            (
                graph("Size and what is alive", "Bytes on disk, and their expected size after a "
                      "clean, estimated from earlier cleans.", "bytes",
                      Query(f"sum(kafka_log_log_size{{{TOPIC}}})", "size"),
                      Query(f"sum(varve_cleaner_live_estimate_bytes{{{TOPIC}}})", "alive"),
                      Query(f"sum(varve_cleaner_dirty_bytes{{{TOPIC}}})", "dirty")),
                graph("Live and dead bytes", "In segments that cleans have read; the rest is "
                      "unresolved.", "bytes",
                      Query(f"sum(varve_cleaner_live_bytes{{{TOPIC}}})", "live"),
                      Query(f"sum(varve_cleaner_dead_bytes{{{TOPIC}}})", "dead"),
                      Query(f"sum(varve_cleaner_unresolved_bytes{{{TOPIC}}})", "unresolved")),
                graph("Dirty ratio", "Dirty share of the cleanable bytes, by partition.",
                      "percentunit",
                      Query(f"varve_cleaner_dirty_ratio{{{TOPIC}}}", "{{partition}}")),
                graph("Oldest uncleaned record", "By partition.", "s",
                      Query(f"varve_cleaner_oldest_dirty_age_seconds{{{TOPIC}}}",
                            "{{partition}}")),
                graph("Time since the last clean", "By partition.", "s",
                      Query(f"time() - varve_cleaner_last_clean_timestamp_seconds{{{TOPIC}}}",
                            "{{partition}}")),
                graph("Tombstones", "Tombstones that the last clean left, by partition.", "short",
                      Query(f"varve_cleaner_tombstones{{{TOPIC}}}", "{{partition}}")),
                graph("Why partitions are not cleaned", "Partitions by reason; see `explain`.",
                      "short",
                      Query(f"count by (reason) (varve_cleaner_blocked{{{TOPIC}}})",
                            "{{reason}}")),
            ),
        ),
        Row(
            "Consumers and view",
            (
                graph("Lag", "Offsets that groups have not committed yet.", "short",
                      Query(f"kafka_consumergroup_lag_sum{{{TOPIC}}}", "{{consumergroup}}")),
                graph("View", "Records in the compacted view, by partition.", "short",
                      Query(f"varve_view_ledger_records{{{TOPIC}}}", "{{partition}}")),
                graph("Backlog of the view", "Bytes that the view does not include yet.", "bytes",
                      Query(f"varve_view_backlog_bytes{{{TOPIC}}}", "{{partition}}")),
            ),
        ),
    ),
    has_topic=True,
)  # fmt: skip

DASHBOARDS: Final = (OVERVIEW, CLEANER, ONE_TOPIC)


def document(dashboard: Dashboard) -> Json:
    """Return the dashboard as Grafana reads it."""
    return {
        "uid": f"varve-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["varve"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["varve"], "title": "Varve", "asDropdown": True,
             "keepTime": True, "includeVars": True}
        ],
        "templating": {"list": list(_variables(dashboard))},
        "panels": list(_panels(dashboard.rows)),
    }  # fmt: skip


def _variables(dashboard: Dashboard) -> Iterator[Json]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource",
           "query": "prometheus"}  # fmt: skip
    everything = {"text": "All", "value": "$__all"}
    yield _variable("instance", "Broker", "label_values(varve_ready, instance)") | {
        "includeAll": True, "multi": True, "current": everything,
    }  # fmt: skip
    if dashboard.has_topic:
        yield _variable("topic", "Topic", f"label_values(kafka_log_log_size{{{BROKER}}}, topic)")


def _variable(name: str, label: str, query: str) -> Json:
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query,
        "definition": query, "refresh": 2, "sort": 1,
    }  # fmt: skip


def _panels(rows: Sequence[Row]) -> Iterator[Json]:
    number, top = 0, 0
    for row in rows:
        number += 1
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}}  # fmt: skip
        top += 1
        left, height = 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top = 0, top + height
            number += 1
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield _panel(panel, number, place)
            left, height = left + panel.width, panel.height
        top += height


def _panel(panel: Panel, number: int, place: Json) -> Json:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": query.expr,
         "legendFormat": query.legend or "__auto", "range": not panel.colors,
         "instant": bool(panel.colors)}
        for index, query in enumerate(panel.queries)
    ]  # fmt: skip
    defaults: Json = {"unit": panel.unit}
    if panel.colors:
        steps = [{"value": value, "color": color} for value, color in panel.colors]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        options: Json = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"}
    else:
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never", "axisSoftMin": 0}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": "stat" if panel.colors else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def text(dashboard: Dashboard) -> str:
    """Return the contents of the dashboard's file."""
    return json.dumps(document(dashboard), indent=1) + "\n"


def main() -> None:
    """Write all files."""
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.name}.json").write_text(text(dashboard))


if __name__ == "__main__":
    main()
