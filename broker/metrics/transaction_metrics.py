"""Metrics of transactions. Counters start at zero with the broker."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from broker.metrics.families import counter
from broker.transactions.coordinator import TransactionCoordinator
from broker.transactions.model import Status

SHOWN = tuple(status for status in Status if status < Status.DEAD)


def transaction_families(transactions: TransactionCoordinator) -> Iterator[Metric]:
    """Yield the transactional ids by status, and counters of how transactions ended."""
    stats = transactions.stats
    ids = GaugeMetricFamily(
        "varve_transactional_ids",
        "Number of transactional ids by the status of their transaction. Those that prepare a"
        " commit or an abort have markers to write",
        labels=["status"],
    )
    for status in SHOWN:
        ids.add_metric([status.name.lower()], stats.statuses[status])
    yield ids
    ended = CounterMetricFamily(
        "varve_transactions", "Number of transactions that ended", labels=["outcome"]
    )
    ended.add_metric(["committed"], stats.committed)
    ended.add_metric(["aborted"], stats.aborted)
    yield ended
    for name, text, value in (
        (
            "varve_transactions_timed_out",
            "Number of transactions aborted because they exceeded their timeout",
            stats.timed_out,
        ),
        (
            "varve_transactional_ids_expired",
            "Number of transactional ids deleted because no producer used them",
            stats.expired_ids,
        ),
        (
            "varve_transaction_marker_retries",
            "Number of attempts to write a marker that failed; each is repeated",
            stats.marker_retries,
        ),
        (
            "varve_transaction_append_errors",
            "Number of records of __transaction_state that could not be appended",
            stats.append_errors,
        ),
        (
            "varve_transaction_records_unknown",
            "Number of records of __transaction_state with a version that is not supported",
            stats.records_unknown,
        ),
        (
            "varve_transaction_records_invalid",
            "Number of records of __transaction_state that could not be decoded",
            stats.records_invalid,
        ),
    ):
        yield counter(name, text, value)
