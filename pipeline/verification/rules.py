"""What a compacted topic has to be, in plain Spark SQL on decoded records.

Rules
- Nothing of the cleaner is used: groups, joins and comparisons of Spark alone, over whatever rows
  are given. Values and headers travel as SHA-256 digests.
- The latest record of a key, in its partition, is the one of the largest rank, and of equals the
  one of the largest offset. The rank is nothing, the timestamp, or a version in a header (8 bytes,
  big-endian, signed; without one: the lowest).
- What the original does not hold any more can be vouched for by the copy alone. It still competes:
  a record that is later in the original has to be the one that is served.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

LOWEST: Final = -(1 << 63)

# Kinds of what is found; all but the first three are faults.
SAME: Final = "same"
UNVERIFIABLE: Final = "unverifiable"  # the original has lost what would tell
FORGOTTEN: Final = "forgotten"  # its delete is older than deletes are remembered
MISSING: Final = "missing_key"
EXTRA: Final = "extra_key"
DELETED: Final = "deleted_key_served"
OLDER: Final = "older_record_served"
UNKNOWN: Final = "unknown_record"
DUPLICATE: Final = "duplicate_key"
TOMBSTONE: Final = "tombstone_served"
WRONG_VALUE: Final = "wrong_value"
WRONG_OFFSET: Final = "wrong_offset"
WRONG_TIMESTAMP: Final = "wrong_timestamp"
WRONG_HEADERS: Final = "wrong_headers"
ELSEWHERE: Final = "other_partition"
KEYLESS: Final = "record_without_key"
SAME_OFFSET: Final = "duplicate_offset"

SOUND: Final = (SAME, UNVERIFIABLE, FORGOTTEN)
COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp", "timestampType", "headers")
COMPARED: Final = ("offset", "timestamp", "headers")  # besides partition, key and value


@dataclass(frozen=True, slots=True)
class Rule:
    """What is compared, and by what a record is a key's latest."""

    strategy: str = "offset"  # or timestamp, header
    version_header: str = ""
    keeps_keyless: bool = False
    is_table: bool = True  # each key once, and no tombstones
    compares: frozenset[str] = frozenset(COMPARED)
    starts: Mapping[int, int] = field(default_factory=dict)  # below them the original has nothing
    is_whole: bool = True  # False: the original was compacted itself, by offset
    forget_before_ms: int | None = None  # deletes older than this need not be remembered

    @property
    def ranks(self) -> bool:
        """Whether anything but the offset counts."""
        return self.strategy != "offset"


def prepared(records: "DataFrame", rule: Rule, side: int) -> "DataFrame":
    """Records as they are compared; `side` is 0 for the original, 1 for what is served."""
    from pyspark.sql import functions as f

    values = set(records.columns)
    moment = f.unix_micros("timestamp") if "timestamp" in values else f.lit(None).cast("bigint")
    kind = f.col("timestampType") if "timestampType" in values else f.lit(None).cast("int")
    names = f.lit("")
    if "headers" in values:
        names = f.coalesce(f.to_json("headers"), f.lit("[]"))
    value = f.col("value") if "value" in values else f.lit(b"")
    return records.select(
        "partition",
        f.col("key").cast("binary").alias("key"),
        # A record without a key is its own group.
        f.when(f.col("key").isNull(), f.col("offset")).alias("own"),
        _rank(rule, values).alias("rank"),
        "offset",
        moment.alias("moment"),
        kind.alias("kind"),
        f.sha2(value.cast("binary"), 256).alias("value"),
        f.sha2(names.cast("binary"), 256).alias("headers"),
        f.lit(side).alias("side"),
    )


def _rank(rule: Rule, values: set[str]) -> "Column":
    from pyspark.sql import functions as f

    if rule.strategy == "timestamp":
        return f.unix_micros("timestamp")
    if rule.strategy != "header" or "headers" not in values:
        return f.lit(0).cast("bigint")
    named = f.filter("headers", lambda item: item["key"] == f.lit(rule.version_header))
    version = f.try_element_at(named, f.lit(-1))["value"]
    number = f.conv(f.hex(version), 16, -10).cast("bigint")
    return f.when(f.length(version) == 8, number).otherwise(f.lit(LOWEST))


def classified(original: "DataFrame", served: "DataFrame", rule: Rule) -> "DataFrame":
    """One row for each key of each partition: what is to be served, what is, and what of it.

    Columns: partition, key, wanted and served (structs of rank, offset, moment, kind, value,
    headers; null where there is none), originals, copies (records), found (one of the kinds).
    """
    from pyspark.sql import functions as f

    rows = prepared(original, rule, 0).unionByName(prepared(served, rule, 1))
    if not rule.keeps_keyless:
        # In the original they are passed over; served, they are too many.
        rows = rows.where("key is not null or side = 1")
    if "offset" not in rule.compares:
        rows = rows.where("key is not null")  # nothing tells which one is which
    record = f.struct("rank", "offset", "moment", "kind", "value", "headers")
    is_served = f.col("side") == 1
    competes = f.col("side") == 0
    if rule.starts:
        competes |= is_served & (f.col("offset") < _of_partition(rule.starts))
    groups = rows.groupBy("partition", "key", "own").agg(
        f.max(f.when(competes, record)).alias("wanted"),
        f.max(f.when(is_served, record)).alias("served"),
        f.count(f.when(~is_served, 1)).alias("originals"),
        f.count(f.when(is_served, 1)).alias("copies"),
    )
    return groups.withColumn("found", _found(rule))


def _of_partition(numbers: Mapping[int, int]) -> "Column":
    from pyspark.sql import functions as f

    pairs = [f.lit(element) for item in sorted(numbers.items()) for element in item]
    result = f.try_element_at(f.create_map(*pairs), f.col("partition"))
    return f.coalesce(result.cast("bigint"), f.lit(0).cast("bigint"))


def _found(rule: Rule) -> "Column":
    """The kind of one row of `classified`."""
    from pyspark.sql import functions as f

    requested, served = f.col("wanted"), f.col("served")
    nothing_wanted = requested.isNull() | requested["value"].isNull()
    nothing_served = served.isNull() | served["value"].isNull()
    # By another rule than the offset, something that is gone might have been the latest.
    lost = f.lit(False)
    if rule.ranks:
        lost = _of_partition(rule.starts) > 0 if rule.starts else f.lit(False)
        lost = lost | f.lit(not rule.is_whole)
    checks: list[tuple[Column, str]] = []
    if not rule.keeps_keyless:
        checks.append((f.col("key").isNull(), KEYLESS))
    if rule.is_table:
        checks += [
            (f.col("copies") > 1, DUPLICATE),
            (served.isNotNull() & served["value"].isNull(), TOMBSTONE),
        ]
    checks += [
        (nothing_served & nothing_wanted, SAME),
        (nothing_served & lost, UNVERIFIABLE),
        (nothing_served, MISSING),
        (_is_later(served, requested) & lost, UNVERIFIABLE),
        (requested.isNull(), EXTRA),
        (nothing_wanted & _may_be_forgotten(rule), FORGOTTEN),
        (nothing_wanted, DELETED),
    ]
    return _chosen([*checks, *_of_two_records(rule)])


def _of_two_records(rule: Rule) -> "list[tuple[Column, str]]":
    """What is wrong with the record that is served for a key that is to be served."""
    from pyspark.sql import functions as f

    requested, served = f.col("wanted"), f.col("served")

    def differs(name: str) -> "Column":
        return ~requested[name].eqNullSafe(served[name])

    checks: list[tuple[Column, str]] = []
    moments = differs("moment") | differs("kind")
    contents = differs("value")
    if "timestamp" in rule.compares:
        contents |= moments
    if "headers" in rule.compares:
        contents |= differs("headers")
    if "offset" in rule.compares:
        elsewhere = differs("offset")
        checks += [
            (elsewhere & ~contents, WRONG_OFFSET),
            (elsewhere & _is_later(requested, served), OLDER),
            (elsewhere, UNKNOWN),
        ]
    checks.append((differs("value"), WRONG_VALUE))
    if "timestamp" in rule.compares:
        checks.append((moments, WRONG_TIMESTAMP))
    if "headers" in rule.compares:
        checks.append((differs("headers"), WRONG_HEADERS))
    if rule.starts:
        checks.append((requested["offset"] < _of_partition(rule.starts), UNVERIFIABLE))
    return [*checks, (f.lit(True), SAME)]


def _is_later(item: "Column", other: "Column") -> "Column":
    """Whether a record is a later one of its key than another; also where there is no other."""
    from pyspark.sql import functions as f

    ranked = (item["rank"] > other["rank"]) | (
        (item["rank"] == other["rank"]) & (item["offset"] > other["offset"])
    )
    return f.coalesce(ranked, item.isNotNull())


def _may_be_forgotten(rule: Rule) -> "Column":
    """Whether a delete is so old that an older record may have come in behind it."""
    from pyspark.sql import functions as f

    if not rule.ranks or rule.forget_before_ms is None:
        return f.lit(False)
    requested, served = f.col("wanted"), f.col("served")
    old = requested["moment"] < f.lit(rule.forget_before_ms * 1000)
    return f.coalesce(old & (served["offset"] > requested["offset"]), f.lit(False))


def _chosen(checks: "Sequence[tuple[Column, str]]") -> "Column":
    from pyspark.sql import functions as f

    result: Any = None
    for condition, kind in checks:
        result = f.when(condition, kind) if result is None else result.when(condition, kind)
    return result


def select_faults(rows: "DataFrame") -> "DataFrame":
    """The faults among `classified` rows; a record that is in another partition is one of them.

    Columns: partition, key, found, wanted_offset, served_offset.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    faults = rows.where(~f.col("found").isin(*SOUND))
    content = f.coalesce("served", "wanted")
    faults = faults.select(
        "partition",
        "key",
        "found",
        f.col("wanted")["offset"].alias("wanted_offset"),
        f.col("served")["offset"].alias("served_offset"),
        content["value"].alias("value"),
        content["moment"].alias("moment"),
    )
    alike = Window.partitionBy("key", "value", "moment")
    faults = faults.withColumns(
        {
            "is_missing": f.max((f.col("found") == MISSING).cast("int")).over(alike) == 1,
            "is_extra": f.max((f.col("found") == EXTRA).cast("int")).over(alike) == 1,
        }
    )
    moved = f.col("is_missing") & f.col("is_extra")
    faults = faults.where(~moved | (f.col("found") != MISSING))
    result = f.when(moved & (f.col("found") == EXTRA), ELSEWHERE).otherwise(f.col("found"))
    return faults.withColumn("found", result).select(
        "partition", "key", "found", "wanted_offset", "served_offset"
    )


def select_faults_alone(records: "DataFrame") -> "DataFrame":
    """What is wrong with records that were compacted by offset: those below where it is clean.

    Columns as those of `select_faults`; of several records of a key, each but the last is a fault.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    slim = records.select("partition", "key", "offset")
    keys = Window.partitionBy("partition", "key")
    keyed = slim.where("key is not null").withColumn("last", f.max("offset").over(keys))
    older = keyed.where("offset < last").select(
        "partition",
        "key",
        f.lit(DUPLICATE).alias("found"),
        f.col("last").alias("wanted_offset"),
        f.col("offset").alias("served_offset"),
    )
    keyless = slim.where("key is null").select(
        "partition",
        "key",
        f.lit(KEYLESS).alias("found"),
        f.lit(None).cast("bigint").alias("wanted_offset"),
        f.col("offset").alias("served_offset"),
    )
    twice = slim.groupBy("partition", "offset").agg(
        f.count(f.lit(1)).alias("copies"), f.first("key").alias("key")
    )
    same_offset = twice.where("copies > 1").select(
        "partition",
        "key",
        f.lit(SAME_OFFSET).alias("found"),
        f.col("offset").alias("wanted_offset"),
        f.col("offset").alias("served_offset"),
    )
    return older.unionByName(keyless).unionByName(same_offset)
