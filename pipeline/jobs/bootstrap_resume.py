"""Which rows an interrupted load still has to write: those whose keys the topic does not have.

Rules
- Skip every key that has a committed record since the load began, whatever its value. Another
  producer may have written a newer value, and compaction may have removed ours; writing the row
  again would replace the newer value. A tombstone counts as a record.
- This holds only if every record since the load began is still in the log. If records are missing,
  a key may have been written and deleted, and its tombstone removed, so the job refuses to resume.
  The present `cleanup.policy` does not tell whether the topic was compacted before.
- The load began at offset 0 of each partition unless the caller gives other offsets.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.topics import TopicBounds, fetch_bounds, read_topic
from pipeline.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Offsets = Mapping[int, int]
_DIGEST: Final = "digest"
_COLUMNS: Final = ("partition", "key", "value")


@dataclass(frozen=True, slots=True)
class Remaining:
    """The rows to write, and the number of those to skip because the topic has their keys."""

    rows: "DataFrame"
    skipped: int
    superseded: int  # of these, keys whose values in the topic are others


def since_option(began: Offsets) -> str:
    """Return the options that resume a load that began at these offsets."""
    if not any(began.values()):
        return "--resume"
    offsets = json.dumps({str(number): offset for number, offset in sorted(began.items())})
    return f"--resume --since '{offsets}'"


def remaining(
    spark: "SparkSession",
    rows: "DataFrame",
    cluster: Cluster,
    topic: str,
    *,
    since: Offsets | None,
    end: Offsets,
) -> Remaining:
    """Return the rows that a load into [since, end) has not written; read committed records only.

    `end` is the end offset for `read_uncommitted`. Raises JobError if the rows cannot be known.
    """
    from pyspark.sql import functions as f

    bounds = fetch_bounds(cluster, topic)
    began = dict.fromkeys(bounds.end, 0) | dict(since or {})
    _check_there(topic, bounds, began, end, is_given=since is not None)
    records = read_topic(spark, cluster, topic, began, bounds.end, columns=_COLUMNS)
    digest = f.sha2("value", 256).alias("topic_digest")
    # Read once, and never again: a clean may remove records after they were counted.
    records = records.select("partition", "key", digest).localCheckpoint()
    _check_whole(records, topic, began, bounds)
    in_topic = records.select("key", "topic_digest").where("key IS NOT NULL")
    digests = rows.select("key", f.sha2("value", 256).alias(_DIGEST))
    same = f.col(_DIGEST).eqNullSafe(f.col("topic_digest"))
    written = digests.join(in_topic, "key").groupBy("key").agg(f.max(same).alias("same"))
    counts = written.agg(f.count(f.lit(1)), f.count(f.when(~f.col("same"), 1)))
    (skipped, superseded), *_ = counts.collect()
    rest = rows.join(in_topic.select("key").distinct(), "key", "left_anti")
    return Remaining(rest.select(*rows.columns), skipped, superseded)


def _check_there(
    topic: str, bounds: TopicBounds, began: Offsets, end: Offsets, *, is_given: bool
) -> None:
    """Check that the log holds [began, end) and no transaction is open in it. Raises JobError."""
    for number, first in bounds.first.items():
        where = f"{topic}-{number}"
        if first > began[number]:
            hint = "" if is_given else " Use --since to say at which offsets the load began."
            raise JobError(
                f"{where} begins at offset {first}, and the load began at {began[number]}, so the"
                f" keys written in between are unknown.{hint}"
            )
        if began[number] > bounds.end[number]:
            raise JobError(
                f"--since: {where} ends at {bounds.end[number]}, before {began[number]}",
                exit_codes.USAGE,
            )
        if bounds.end[number] < end.get(number, 0):
            raise JobError(
                f"a transaction is open in {where} from offset {bounds.end[number]} on, so the"
                " keys that it will write are unknown. Try again after it has ended",
                exit_codes.STALE,
            )


def _check_whole(records: "DataFrame", topic: str, began: Offsets, bounds: TopicBounds) -> None:
    """Check that every offset in [began, end) has a record. Raises JobError."""
    counts = {
        row["partition"]: row["count"] for row in records.groupBy("partition").count().collect()
    }
    for number, last in bounds.end.items():
        missing = last - began[number] - counts.get(number, 0)
        if missing > 0:
            raise JobError(
                f"{topic}-{number} lacks {missing:,} of its records from offset {began[number]} on,"
                " where the load began: it was compacted, or others wrote to it in transactions."
                " A key that was deleted since then looks like a key that was never written, so"
                " nothing was written. Load into a new topic, or write the missing keys with"
                " --append if you know them"
            )
