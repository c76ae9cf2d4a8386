"""What a load that was cut short has still to write: the rows of keys that the topic does not have.

Rules
- A key that has any committed record since the load began is left out, whatever its value. Somebody
  else may have written a newer one and compaction removed ours: the row would come behind it and
  undo it. A delete is a record, too.
- That can be told only as long as every record since then is still there. Where records are missing
  from a compacted topic, a key may have been written and deleted, and its delete removed: refused.
- A load began at offset 0 of each partition, unless the offsets are given.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from config import exit_codes
from pipeline.cli import JobError
from pipeline.topics import TopicBounds, bounds_of, read_topic, settings_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Offsets = Mapping[int, int]
_DIGEST: Final = "digest"


@dataclass(frozen=True, slots=True)
class Remaining:
    """The rows to write. `superseded`: rows left out whose key has other values only."""

    rows: "DataFrame"
    superseded: int


def since_option(began: Offsets) -> str:
    """Return the options that resume a load that began at these offsets."""
    if not any(began.values()):
        return "--resume"
    offsets = json.dumps({str(number): offset for number, offset in sorted(began.items())})
    return f"--resume --since '{offsets}'"


def remaining(
    spark: "SparkSession",
    rows: "DataFrame",
    bootstrap: str,
    topic: str,
    *,
    since: Offsets | None,
    end: Offsets,
) -> Remaining:
    """Return what is left of a load into [since, end), which reads committed records only.

    `end` is what an uncommitted reader sees. Raises JobError where it cannot be told.
    """
    from pyspark.sql import functions as f

    bounds = bounds_of(bootstrap, topic)
    began = dict.fromkeys(bounds.end, 0) | dict(since or {})
    _check_there(topic, bounds, began, end, is_given=since is not None)
    if "compact" in settings_of(bootstrap, topic).get("cleanup.policy", "").split(","):
        _check_whole(spark, bootstrap, topic, began, bounds)
    there = read_topic(spark, bootstrap, topic, began, bounds.end, columns=("key", "value"))
    there = there.select("key", f.sha2("value", 256).alias("there")).where("key IS NOT NULL")
    digests = rows.select("key", f.sha2("value", 256).alias(_DIGEST))
    same = f.col(_DIGEST).eqNullSafe(f.col("there"))
    known = digests.join(there, "key").groupBy("key").agg(f.max(same).alias("same"))
    left = rows.join(there.select("key").distinct(), "key", "left_anti")
    return Remaining(left.select(*rows.columns), known.where("NOT same").count())


def _check_there(
    topic: str, bounds: TopicBounds, began: Offsets, end: Offsets, *, is_given: bool
) -> None:
    """See that the log holds [began, end) and that all of it is decided. Raises JobError."""
    for number, first in bounds.first.items():
        where = f"{topic}-{number}"
        if first > began[number]:
            hint = "" if is_given else ": say with --since at which offsets the load began"
            raise JobError(
                f"{where} begins at offset {first}, and the load began at {began[number]}: which"
                f" keys were written since cannot be told{hint}"
            )
        if began[number] > bounds.end[number]:
            raise JobError(
                f"--since: {where} ends at {bounds.end[number]}, before {began[number]}",
                exit_codes.USAGE,
            )
        if bounds.end[number] < end.get(number, 0):
            raise JobError(
                f"a transaction is open in {where} from offset {bounds.end[number]} on: which keys"
                " it writes is not decided. Try again when it has ended",
                exit_codes.STALE,
            )


def _check_whole(
    spark: "SparkSession", bootstrap: str, topic: str, began: Offsets, bounds: TopicBounds
) -> None:
    """See that no offset of [began, end) lacks its record. Raises JobError."""
    numbers = read_topic(spark, bootstrap, topic, began, bounds.end, columns=("partition",))
    counts = {
        row["partition"]: row["count"] for row in numbers.groupBy("partition").count().collect()
    }
    for number, last in bounds.end.items():
        missing = last - began[number] - counts.get(number, 0)
        if missing > 0:
            raise JobError(
                f"{topic}-{number} lacks {missing:,} of its records from offset {began[number]} on,"
                " where the load began: it was compacted, or others wrote to it in transactions."
                " A key that was deleted since could not be told from one that was never written,"
                " so nothing is written. Load into a new topic, or write the keys that you know to"
                " be missing with --append"
            )
