"""Opening a topic to read it as a table: its bounds, then a leased run over what is closed."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from admin.client import ApiClient
from cleaner.remote_compaction import Purpose
from pipeline.client.lease import LeaseClient, LeaseRequestError
from pipeline.client.leased_work import choose_transport, interrupts_deferred
from pipeline.client.topics import TopicBounds, fetch_bounds
from pipeline.progress import ProgressReporter
from pipeline.stages.planning import TASK_BYTES, TASK_MEMORY_BYTES, Limits
from pipeline.tables.state import Reading

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class Broker:
    """The two addresses of a broker: of its HTTP API, and of Kafka's protocol."""

    client: ApiClient
    bootstrap: str


@contextmanager
def opened(
    spark: "SparkSession",
    broker: Broker,
    topic: str,
    *,
    partitions: Sequence[int] | None = None,
    transport: str = AUTO,
    master: str | None = None,
    task_memory: int = TASK_MEMORY_BYTES,
    task_bytes: int = TASK_BYTES,
    reporter: ProgressReporter,
) -> Iterator[tuple[Reading, TopicBounds]]:
    """A topic whose segments stay where they are until the block ends, and its bounds before.

    The active segments are closed first, so that all that is decided is covered. `master`: Spark's,
    if it is not the session's. Raises UnknownTopicError, WireError, LeaseRequestError.
    """
    from pipeline.engines.spark_engine import SparkEngine

    bounds = fetch_bounds(broker.bootstrap, topic, partitions=partitions)
    reporter.note("the broker leases segments")
    with ExitStack() as stack:
        with interrupts_deferred():
            runs = LeaseClient.of(broker.client)
            run = stack.enter_context(
                runs.open(topic, sorted(bounds.end), purpose=Purpose.READ, roll=True)
            )
        engine = SparkEngine(spark)
        way = choose_transport(transport, engine.name, master or session_master(spark), run)
        limits = Limits(task_memory, task_bytes, engine.parallelism)
        reading = Reading(spark, engine, run, way, limits, reporter, broker.bootstrap)
        try:
            yield reading, bounds
        except LeaseRequestError:
            raise
        except Exception:
            run.check()  # what failed because the run is over fails for that reason
            run.status()  # raises where the broker is gone
            raise


def session_master(spark: "SparkSession") -> str:
    """The master of a session."""
    return str(spark.conf.get("spark.master", ""))
