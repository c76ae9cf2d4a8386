"""The content that a compacted topic must have, in plain Spark SQL on decoded records.

Rules
- The check uses no code of the cleaner: Spark groups, joins and compares the given rows. Values
  and headers are compared by their SHA-256 digests.
- The latest record of a key in its partition has the largest rank, and among equal ranks the
  largest offset. The rank is constant, the timestamp, or a version in a header (8 bytes,
  big-endian, signed; the lowest value without the header).
- Records of a topic have `timestampMs`, the exact time. A table has only `timestamp`, in which
  times beyond the range of Spark are equal. Both sides have the same of these columns.
- Records that the source has lost exist only on the checked side and cannot be verified. They still
  compete: a later record of the source must be the one that is served.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

LOWEST: Final = -(1 << 63)

# Kinds of results. All but those in SOUND are faults.
SAME: Final = "same"
UNVERIFIABLE: Final = "unverifiable"  # the records that would decide are gone from the source
FORGOTTEN: Final = "forgotten"  # its tombstone is older than tombstones are kept
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
TOPIC_COLUMNS: Final = (*COLUMNS, "timestampMs")  # of a topic, see the rules
COMPARED: Final = ("offset", "timestamp", "headers")  # in addition to partition, key and value


@dataclass(frozen=True, slots=True)
class Rule:
    """Which columns are compared, and which record of a key is its latest."""

    strategy: str = "offset"  # or timestamp, header
    version_header: str = ""
    keeps_keyless: bool = False
    is_table: bool = True  # each key once, and no tombstones
    compares: frozenset[str] = frozenset(COMPARED)
    starts: Mapping[int, int] = field(default_factory=dict)  # log start offsets of the source
    is_whole: bool = True  # False: the source itself is compacted by offset
    forget_before_ms: int | None = None  # tombstones older than this may be gone
    # The end offsets of partitions that are compared below an offset that a clean has passed: the
    # records that superseded others are not compared, and the superseded ones may be gone.
    cleaned_beyond: Mapping[int, int] = field(default_factory=dict)

    @property
    def ranks(self) -> bool:
        """Return whether the latest record is not simply the one with the largest offset."""
        return self.strategy != "offset"


def prepared(records: "DataFrame", rule: Rule, side: int) -> "DataFrame":
    """Return the columns to compare; `side` is 0 for the source, 1 for the checked records."""
    from pyspark.sql import functions as f

    values = set(records.columns)
    timestamp_type = (
        f.col("timestampType") if "timestampType" in values else f.lit(None).cast("int")
    )
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
        _moment(values).alias("moment"),
        timestamp_type.alias("timestamp_type"),
        f.sha2(value.cast("binary"), 256).alias("value"),
        f.sha2(names.cast("binary"), 256).alias("headers"),
        f.lit(side).alias("side"),
    )


def _moment(values: set[str]) -> "Column":
    """Return the time of a record, in the unit that both sides have."""
    from pyspark.sql import functions as f

    if "timestampMs" in values:
        return f.col("timestampMs")
    return f.unix_micros("timestamp") if "timestamp" in values else f.lit(None).cast("bigint")


def _rank(rule: Rule, values: set[str]) -> "Column":
    from pyspark.sql import functions as f

    if rule.strategy == "timestamp":
        return _moment(values)
    if rule.strategy != "header" or "headers" not in values:
        return f.lit(0).cast("bigint")
    named = f.filter("headers", lambda item: item["key"] == f.lit(rule.version_header))
    version = f.try_element_at(named, f.lit(-1))["value"]
    number = f.conv(f.hex(version), 16, -10).cast("bigint")
    return f.when(f.length(version) == 8, number).otherwise(f.lit(LOWEST))


def classified(original: "DataFrame", served: "DataFrame", rule: Rule) -> "DataFrame":
    """Return one row for each key of each partition, with its kind.

    Columns: partition, key, expected and served (structs of rank, offset, moment, timestamp_type,
    value, headers; null if there is no record), originals and copies (record counts), kind.
    """
    from pyspark.sql import functions as f

    rows = prepared(original, rule, 0).unionByName(prepared(served, rule, 1))
    if not rule.keeps_keyless:
        # Ignored in the source; a fault on the checked side.
        rows = rows.where("key is not null or side = 1")
    if "offset" not in rule.compares:
        rows = rows.where("key is not null")  # without offsets they cannot be matched
    record = f.struct("rank", "offset", "moment", "timestamp_type", "value", "headers")
    is_served = f.col("side") == 1
    competes = f.col("side") == 0
    if rule.starts:
        competes |= is_served & (f.col("offset") < _of_partition(rule.starts))
    groups = rows.groupBy("partition", "key", "own").agg(
        f.max(f.when(competes, record)).alias("expected"),
        f.max(f.when(is_served, record)).alias("served"),
        f.count(f.when(~is_served, 1)).alias("originals"),
        f.count(f.when(is_served, 1)).alias("copies"),
    )
    return groups.withColumn("kind", _kind(rule))


def _of_partition(numbers: Mapping[int, int]) -> "Column":
    from pyspark.sql import functions as f

    pairs = [f.lit(element) for item in sorted(numbers.items()) for element in item]
    result = f.try_element_at(f.create_map(*pairs), f.col("partition"))
    return f.coalesce(result.cast("bigint"), f.lit(0).cast("bigint"))


def _kind(rule: Rule) -> "Column":
    """Return the kind of a row of `classified`."""
    from pyspark.sql import functions as f

    expected, served = f.col("expected"), f.col("served")
    nothing_expected = expected.isNull() | expected["value"].isNull()
    nothing_served = served.isNull() | served["value"].isNull()
    # If the rank is not the offset, a removed record may have been the latest.
    lost = f.lit(False)
    if rule.ranks:
        lost = _of_partition(rule.starts) > 0 if rule.starts else f.lit(False)
        lost = lost | f.lit(not rule.is_whole)
    superseded = f.lit(False)
    if rule.cleaned_beyond:
        end = _of_partition(rule.cleaned_beyond)
        # Offsets of another topic say nothing: there, only keys without a value are meant.
        superseded = (
            served["offset"] < end if "offset" in rule.compares else nothing_expected & (end > 0)
        )
    is_later = _is_later(served, expected) | f.lit("offset" not in rule.compares)
    checks: list[tuple[Column, str]] = []
    if not rule.keeps_keyless:
        checks.append((f.col("key").isNull(), KEYLESS))
    if rule.is_table:
        checks += [
            (f.col("copies") > 1, DUPLICATE),
            (served.isNotNull() & served["value"].isNull(), TOMBSTONE),
        ]
    checks += [
        (nothing_served & nothing_expected, SAME),
        (nothing_served & lost, UNVERIFIABLE),
        (nothing_served, MISSING),
        (is_later & (lost | superseded), UNVERIFIABLE),
        (expected.isNull(), EXTRA),
        (nothing_expected & _may_be_forgotten(rule), FORGOTTEN),
        (nothing_expected, DELETED),
    ]
    return _chosen([*checks, *_of_two_records(rule)])


def _of_two_records(rule: Rule) -> "list[tuple[Column, str]]":
    """Return the checks between the expected and the served record of a key."""
    from pyspark.sql import functions as f

    expected, served = f.col("expected"), f.col("served")

    def differs(name: str) -> "Column":
        return ~expected[name].eqNullSafe(served[name])

    checks: list[tuple[Column, str]] = []
    moments = differs("moment") | differs("timestamp_type")
    contents = differs("value")
    if "timestamp" in rule.compares:
        contents |= moments
    if "headers" in rule.compares:
        contents |= differs("headers")
    if "offset" in rule.compares:
        elsewhere = differs("offset")
        checks += [
            (elsewhere & ~contents, WRONG_OFFSET),
            (elsewhere & _is_later(expected, served), OLDER),
            (elsewhere, UNKNOWN),
        ]
    checks.append((differs("value"), WRONG_VALUE))
    if "timestamp" in rule.compares:
        checks.append((moments, WRONG_TIMESTAMP))
    if "headers" in rule.compares:
        checks.append((differs("headers"), WRONG_HEADERS))
    if rule.starts:
        checks.append((expected["offset"] < _of_partition(rule.starts), UNVERIFIABLE))
    return [*checks, (f.lit(True), SAME)]


def _is_later(item: "Column", other: "Column") -> "Column":
    """Return whether a record is later than another of its key, or there is no other."""
    from pyspark.sql import functions as f

    ranked = (item["rank"] > other["rank"]) | (
        (item["rank"] == other["rank"]) & (item["offset"] > other["offset"])
    )
    return f.coalesce(ranked, item.isNotNull())


def _may_be_forgotten(rule: Rule) -> "Column":
    """Return whether a tombstone is so old that the view may have forgotten it.

    Only a view has such a rule, and its records have the time in ms.
    """
    from pyspark.sql import functions as f

    if not rule.ranks or rule.forget_before_ms is None:
        return f.lit(False)
    expected, served = f.col("expected"), f.col("served")
    old = expected["moment"] < f.lit(rule.forget_before_ms)
    return f.coalesce(old & (served["offset"] > expected["offset"]), f.lit(False))


def _chosen(checks: "Sequence[tuple[Column, str]]") -> "Column":
    from pyspark.sql import functions as f

    result: Any = None
    for condition, kind in checks:
        result = f.when(condition, kind) if result is None else result.when(condition, kind)
    return result


def select_faults(rows: "DataFrame") -> "DataFrame":
    """Return the faults among `classified` rows; a record in another partition is one fault.

    Columns: partition, key, kind, expected_offset, served_offset.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    faults = rows.where(~f.col("kind").isin(*SOUND))
    content = f.coalesce("served", "expected")
    faults = faults.select(
        "partition",
        "key",
        "kind",
        f.col("expected")["offset"].alias("expected_offset"),
        f.col("served")["offset"].alias("served_offset"),
        content["value"].alias("value"),
        content["moment"].alias("moment"),
    )
    alike = Window.partitionBy("key", "value", "moment")
    faults = faults.withColumns(
        {
            "is_missing": f.max((f.col("kind") == MISSING).cast("int")).over(alike) == 1,
            "is_extra": f.max((f.col("kind") == EXTRA).cast("int")).over(alike) == 1,
        }
    )
    moved = f.col("is_missing") & f.col("is_extra")
    faults = faults.where(~moved | (f.col("kind") != MISSING))
    result = f.when(moved & (f.col("kind") == EXTRA), ELSEWHERE).otherwise(f.col("kind"))
    return faults.withColumn("kind", result).select(
        "partition", "key", "kind", "expected_offset", "served_offset"
    )


def select_faults_alone(records: "DataFrame") -> "DataFrame":
    """Return the faults of a log compacted by offset, below its first dirty offset.

    Columns as in `select_faults`; every record of a key but its last is a fault.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    slim = records.select("partition", "key", "offset")
    keys = Window.partitionBy("partition", "key")
    keyed = slim.where("key is not null").withColumn("last", f.max("offset").over(keys))
    older = keyed.where("offset < last").select(
        "partition",
        "key",
        f.lit(DUPLICATE).alias("kind"),
        f.col("last").alias("expected_offset"),
        f.col("offset").alias("served_offset"),
    )
    keyless = slim.where("key is null").select(
        "partition",
        "key",
        f.lit(KEYLESS).alias("kind"),
        f.lit(None).cast("bigint").alias("expected_offset"),
        f.col("offset").alias("served_offset"),
    )
    twice = slim.groupBy("partition", "offset").agg(
        f.count(f.lit(1)).alias("copies"), f.first("key").alias("key")
    )
    same_offset = twice.where("copies > 1").select(
        "partition",
        "key",
        f.lit(SAME_OFFSET).alias("kind"),
        f.col("offset").alias("expected_offset"),
        f.col("offset").alias("served_offset"),
    )
    return older.unionByName(keyless).unionByName(same_offset)
