"""Open a topic to read it as a table: fetch its bounds, then lease its closed segments."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from admin.client import ApiClient
from cleaner.remote_compaction import Purpose
from config.security.clients import Cluster
from pipeline.client.lease import LeaseClient, LeaseRequestError
from pipeline.client.leased_work import choose_transport, interrupts_deferred
from pipeline.client.topics import TopicBounds, fetch_bounds, fetch_topic_id
from pipeline.progress import ProgressReporter
from pipeline.stages.planning import TASK_BYTES, TASK_MEMORY_BYTES, Limits
from pipeline.tables.state import Reading

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class Clients:
    """A broker's HTTP API client and its Kafka cluster."""

    client: ApiClient
    cluster: Cluster


@contextmanager
def open_topic(
    spark: "SparkSession",
    broker: Clients,
    topic: str,
    *,
    partitions: Sequence[int] | None = None,
    transport: str = AUTO,
    master: str | None = None,
    task_memory: int = TASK_MEMORY_BYTES,
    task_bytes: int = TASK_BYTES,
    reporter: ProgressReporter,
) -> Iterator[tuple[Reading, TopicBounds]]:
    """Lease the segments of a topic until the block ends; yield the reading and the topic's bounds.

    The bounds are fetched before the lease. The lease rolls the active segments first, so that it
    covers all committed records. `master` overrides the session's. Raises UnknownTopicError,
    WireError, LeaseRequestError.
    """
    from pipeline.engines.spark_engine import SparkEngine

    # The id comes first: if the topic is created again after this, the ids differ in a later check.
    topic_id = fetch_topic_id(broker.cluster, topic)
    bounds = fetch_bounds(broker.cluster, topic, partitions=partitions)
    reporter.note("leasing segments")
    with ExitStack() as stack:
        with interrupts_deferred():
            leases = LeaseClient(broker.client)
            lease = stack.enter_context(
                leases.open(topic, sorted(bounds.end), purpose=Purpose.READ, roll=True)
            )
        engine = SparkEngine(spark)
        way = choose_transport(transport, engine.name, master or session_master(spark), lease)
        limits = Limits(task_memory, task_bytes, engine.parallelism)
        reading = Reading(spark, engine, lease, way, limits, reporter, broker.cluster, topic_id)
        try:
            yield reading, bounds
        except LeaseRequestError:
            raise
        except Exception:
            # A lost lease, or a broker that does not answer, is the cause of the failure.
            lease.confirm()
            raise


def session_master(spark: "SparkSession") -> str:
    """Return the master of a session."""
    return str(spark.conf.get("spark.master", ""))
