"""Metrics of remote compactions and their leases. Counters start at zero with the broker."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from broker.leases.leases import Leases
from broker.metrics.families import counter
from cleaner.remote_compaction import Purpose


def lease_families(leases: Leases) -> Iterator[Metric]:
    """Yield the metrics of leases now, and counters of how they ended."""
    alive = leases.table.alive()
    count = GaugeMetricFamily(
        "varve_remote_compactions",
        "Number of remote compactions with a lease",
        labels=["purpose"],
    )
    pinned = GaugeMetricFamily(
        "varve_lease_pinned_bytes", "Bytes of segments that leases pin", labels=["purpose"]
    )
    for purpose in Purpose:
        compactions = [compaction for compaction in alive if compaction.purpose is purpose]
        count.add_metric([purpose.value], len(compactions))
        size_bytes = sum(
            part.record.plan.inputs_bytes
            for compaction in compactions
            for part in compaction.parts.values()
            if part.is_alive
        )
        pinned.add_metric([purpose.value], size_bytes)
    yield count
    yield pinned
    stats = leases.table.stats
    outcomes = CounterMetricFamily(
        "varve_remote_compaction_adoptions",
        "Number of leased partitions whose output was adopted or refused",
        labels=["outcome"],
    )
    for outcome, number in stats.outcomes.items():
        outcomes.add_metric([outcome.value], number)
    yield outcomes
    yield counter("varve_lease_expirations", "Number of leases that expired", stats.expired)
    yield counter("varve_lease_sent_bytes", "Bytes of leased files downloaded", stats.bytes_sent)
    yield counter("varve_lease_received_bytes", "Bytes of output uploaded", stats.bytes_received)
