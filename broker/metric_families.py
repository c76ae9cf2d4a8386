"""Metric families of one series without labels."""

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


def gauge(name: str, text: str, value: float) -> Metric:
    """A value that goes up and down."""
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family


def counter(name: str, text: str, value: float) -> Metric:
    """A value that only grows."""
    family = CounterMetricFamily(name, text)
    family.add_metric([], value)
    return family
