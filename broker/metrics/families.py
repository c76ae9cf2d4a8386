"""Metric families with a single series, and families for latencies."""

from collections.abc import Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric

from broker.counters import QUANTILES, LatencyHistogram


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter without labels."""
    family = CounterMetricFamily(name, text)
    family.add_metric([], value)
    return family


class LatencyFamilies:
    """One kind of latency under two names: Kafka's summary in ms, and a histogram in seconds.

    Buckets of several brokers or intervals can be added, quantiles cannot. Kafka has quantiles
    only.
    """

    def __init__(self, *, kafkas: str, local: str, text: str, labels: Sequence[str] = ()) -> None:
        self._kafkas = kafkas
        self._labels = tuple(labels)
        note = "quantiles are accurate within a factor of two"
        self._summary = SummaryMetricFamily(kafkas, f"{text} in ms; {note}", labels=labels)
        self._histogram = HistogramMetricFamily(local, text, labels=labels)

    def add(self, values: Sequence[str], latency: LatencyHistogram) -> None:
        """Add the series of one set of label values."""
        labels = dict(zip(self._labels, values, strict=True))
        for quantile in QUANTILES:
            self._summary.add_sample(
                self._kafkas, {**labels, "quantile": str(quantile)}, latency.quantile_ms(quantile)
            )
        self._summary.add_sample(f"{self._kafkas}_count", labels, latency.count)
        self._summary.add_sample(f"{self._kafkas}_sum", labels, latency.sum_us / 1000)
        buckets = [(str(bound), float(count)) for bound, count in latency.cumulative()]
        self._histogram.add_metric(
            values, [*buckets, ("+Inf", latency.count)], sum_value=latency.sum_us / 1e6
        )

    def families(self) -> tuple[Metric, Metric]:
        """Return both families."""
        return self._summary, self._histogram
