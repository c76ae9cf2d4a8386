"""Runs outside of the broker in numbers. Counters begin with the broker."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from broker.leases.leases import Leases
from broker.metrics.families import counter
from cleaner.remote_compaction import Purpose


def lease_families(runs: Leases) -> Iterator[Metric]:
    """Few: what is pinned now, and how runs ended."""
    alive = runs.alive()
    count = GaugeMetricFamily("varve_offline_runs", "Runs that hold a lease.", labels=["purpose"])
    pinned = GaugeMetricFamily(
        "varve_offline_pinned_bytes", "Bytes of segments that runs pin.", labels=["purpose"]
    )
    for purpose in Purpose:
        own = [run for run in alive if run.purpose is purpose]
        parts = [part for run in own for part in run.parts.values() if part.is_alive]
        count.add_metric([purpose.value], len(own))
        size_bytes = sum(part.record.plan.inputs_bytes for part in parts)
        pinned.add_metric([purpose.value], size_bytes)
    yield count
    yield pinned
    stats = runs.stats
    outcomes = CounterMetricFamily(
        "varve_offline_adoptions",
        "Partitions that were handed back, by what became of them.",
        labels=["outcome"],
    )
    for outcome, number in stats.outcomes.items():
        outcomes.add_metric([outcome.value], number)
    yield outcomes
    yield counter("varve_offline_leases_expired", "Leases that ran out.", stats.expired)
    yield counter("varve_offline_sent_bytes", "Bytes of files sent to runs.", stats.bytes_sent)
    yield counter(
        "varve_offline_received_bytes", "Bytes of files taken from runs.", stats.bytes_received
    )
