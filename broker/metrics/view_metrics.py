"""Metrics of compacted views, by topic and partition. Counters start with the broker."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from broker.views.scheduler import ViewScheduler
from broker.views.status import ViewStatus

_GAUGES: Final[tuple[tuple[str, str, Callable[[ViewStatus], float]], ...]] = (
    (
        "horizon",
        "View horizon: the first offset that consumers of the view read from the log",
        lambda status: status.horizon,
    ),
    ("ledger_bytes", "Bytes of the compacted ledger", lambda status: status.ledger_bytes),
    ("ledger_records", "Records in the compacted ledger", lambda status: status.ledger_records),
    (
        "backlog_bytes",
        "Bytes of closed segments from the view horizon on",
        lambda status: status.backlog_bytes,
    ),
    ("usable", "1 if the view can be read", lambda status: status.is_usable),
    (
        "deleted_keys",
        "Deleted keys that the view stores, so that late records do not restore them",
        lambda status: status.deleted_keys,
    ),
    ("running", "1 while the view is compacted", lambda status: status.state == "running"),
    (
        "queue_place",
        "Position of a requested compaction in the queue; 0 if none is queued",
        lambda status: status.place,
    ),
    (
        "progress_bytes",
        "Bytes read in the current round of a compaction",
        lambda status: status.done_bytes,
    ),
    (
        "progress_total_bytes",
        "Bytes to read in the current round of a compaction",
        lambda status: status.total_bytes,
    ),
)
_COUNTERS: Final[tuple[tuple[str, str, Callable[[ViewStatus], float]], ...]] = (
    ("compactions", "Compactions that were published", lambda status: status.compactions),
    ("compaction_failures", "Compactions that failed", lambda status: status.failed),
    ("read_bytes", "Bytes that compactions read", lambda status: status.bytes_read),
    ("written_bytes", "Bytes that compactions wrote", lambda status: status.bytes_written),
    (
        "copied_bytes",
        "Bytes of source segments that were copied because hard links are not possible",
        lambda status: status.bytes_copied,
    ),
    (
        "records_without_version",
        "Records without a valid version, with the strategy `header`",
        lambda status: status.records_without_version,
    ),
)
_LABELS: Final = ("topic", "partition")
# Between two points where other tasks may run: a status reads the facts of every segment.
STEP_PARTITIONS: Final = 8
STEP_SAMPLES: Final = 256


def view_families(compactions: ViewScheduler) -> Iterator[Metric | None]:
    """Yield the families, one sample per partition of a view; None where other tasks may run."""
    rows = []
    for view_status in compactions.each_status():
        partition = view_status.partition
        rows.append(((partition.topic, str(partition.partition)), view_status))
        if len(rows) % STEP_PARTITIONS == 0:
            yield None
    for name, text, value in _GAUGES:
        gauge = GaugeMetricFamily(f"varve_view_{name}", text, labels=_LABELS)
        yield from _add_samples(gauge, value, rows)
    for name, text, value in _COUNTERS:
        counter = CounterMetricFamily(f"varve_view_{name}", text, labels=_LABELS)
        yield from _add_samples(counter, value, rows)


def _add_samples(
    family: GaugeMetricFamily | CounterMetricFamily,
    value: Callable[[ViewStatus], float],
    rows: Sequence[tuple[tuple[str, str], ViewStatus]],
) -> Iterator[Metric | None]:
    for index, (labels, status) in enumerate(rows, 1):
        family.add_metric(labels, value(status))
        if index % STEP_SAMPLES == 0:
            yield None
    yield family
