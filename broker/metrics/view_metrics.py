"""Metrics of compacted views, by topic and partition. Counters start with the broker."""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from broker.views.scheduler import ViewCompactions
from broker.views.status import ViewStatus

_GAUGES: Final[tuple[tuple[str, str, Callable[[ViewStatus], float]], ...]] = (
    ("horizon", "First offset that is read from the log.", lambda status: status.horizon),
    ("ledger_bytes", "Bytes of the compacted ledger.", lambda status: status.ledger_bytes),
    ("ledger_records", "Records in the compacted ledger.", lambda status: status.ledger_records),
    (
        "backlog_bytes",
        "Bytes of closed segments behind the horizon.",
        lambda status: status.backlog_bytes,
    ),
    ("usable", "1 if the view can be read.", lambda status: status.is_usable),
    (
        "deleted_keys",
        "Deleted keys that are remembered, so that late records do not bring them back.",
        lambda status: status.deleted_keys,
    ),
    ("running", "1 while the view is compacted.", lambda status: status.state == "running"),
    (
        "queue_place",
        "Place of a compaction that was asked for among those that wait; 0: none does.",
        lambda status: status.place,
    ),
    (
        "progress_bytes",
        "Bytes read so far in the present round of a compaction.",
        lambda status: status.done_bytes,
    ),
    (
        "progress_total_bytes",
        "Bytes that the present round of a compaction has to read.",
        lambda status: status.total_bytes,
    ),
)
_COUNTERS: Final[tuple[tuple[str, str, Callable[[ViewStatus], float]], ...]] = (
    ("compactions", "Compactions that were published.", lambda status: status.compactions),
    ("compaction_failures", "Compactions that failed.", lambda status: status.failed),
    ("read_bytes", "Bytes that compactions read.", lambda status: status.bytes_read),
    ("written_bytes", "Bytes that compactions wrote.", lambda status: status.bytes_written),
    (
        "copied_bytes",
        "Bytes of sources that were copied, as they could not be linked.",
        lambda status: status.bytes_copied,
    ),
    (
        "records_without_version",
        "Records whose version is unknown, with the strategy `header`.",
        lambda status: status.records_without_version,
    ),
)
_LABELS: Final = ("topic", "partition")


def view_families(compactions: ViewCompactions) -> Iterator[Metric]:
    """Return the families; each has one sample per partition of a view."""
    rows = [
        ((str(view_status.partition.topic), str(view_status.partition.partition)), view_status)
        for view_status in compactions.status()
    ]
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(f"varve_view_{name}", text, labels=_LABELS)
        for labels, status in rows:
            gauge.add_metric(labels, value(status))
        yield gauge
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(f"varve_view_{name}", text, labels=_LABELS)
        for labels, status in rows:
            counter.add_metric(labels, value(status))
        yield counter
