"""Map the rows of a table to records: key, value, headers and timestamp. Pure Spark.

Rules
- One binary or string column is used as it is. Several columns, or any other type, become JSON with
  explicit nulls and times in microseconds, in the given order.
- A null value is a tombstone. JSON of columns that are all null is still a value.
- An unsupported type is an error before anything is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from config import exit_codes
from pipeline.errors import JobError
from pipeline.tables.columns import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

HEADERS: Final = "array<struct<key:string,value:binary>>"
RAW: Final = ("binary", "string")
MICROSECONDS: Final = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"
# Otherwise Spark omits nulls, and writes milliseconds.
JSON_OPTIONS: Final = {
    "ignoreNullFields": "false",
    "timestampFormat": f"{MICROSECONDS}ZZZZZ",  # Z, or such as +01:00
    "timestampNTZFormat": MICROSECONDS,
}
WHOLE: Final = ("bigint", "int", "smallint", "tinyint")


@dataclass(frozen=True, slots=True)
class RowMapping:
    """The columns of each part of a record. Empty `values`: all columns not used elsewhere."""

    keys: tuple[str, ...] = ()
    key_as: str = "auto"  # raw, json; auto: raw for one column of text or bytes, else json
    values: tuple[str, ...] = ()
    value_as: str = "auto"
    headers: tuple[tuple[str, str], ...] = ()  # name, column
    headers_column: str | None = None
    timestamp: str | None = None
    order_by: tuple[str, ...] = ()


def shaped(table: "DataFrame", mapping: RowMapping) -> "DataFrame":
    """Return `key`, `value`, `headers`, `timestamp_ms`, `order_0`, `order_1`, ... of each row.

    Raises JobError.
    """
    from pyspark.sql import functions as f

    kinds = dict(table.dtypes)
    used = [
        *mapping.keys,
        *mapping.values,
        *(column for _, column in mapping.headers),
        *(name for name in (mapping.headers_column, mapping.timestamp) if name is not None),
        *mapping.order_by,
    ]
    if unknown := [name for name in used if name not in kinds]:
        existing = ", ".join(kinds)
        raise JobError(
            f"the table has no column {unknown[0]}; its columns are {existing}", exit_codes.USAGE
        )
    consumed = {*used} - {*mapping.order_by}
    values = mapping.values or tuple(name for name in kinds if name not in consumed)
    if not values:
        raise JobError("no column is left for the value", exit_codes.USAGE)
    key = f.lit(None).cast("binary")
    if mapping.keys:
        key = _bytes(kinds, mapping.keys, mapping.key_as, "key", json_unless_named=False)
    value = _bytes(kinds, values, mapping.value_as, "value", json_unless_named=not mapping.values)
    orders = [f.col(quoted(name)).alias(f"order_{n}") for n, name in enumerate(mapping.order_by)]
    return table.select(
        key.alias("key"),
        value.alias("value"),
        _headers(kinds, mapping).alias("headers"),
        _timestamp_ms(kinds, mapping.timestamp).alias("timestamp_ms"),
        *orders,
    )


def _bytes(
    kinds: dict[str, str], names: Sequence[str], form: str, subject: str, *, json_unless_named: bool
) -> "Column":
    from pyspark.sql import functions as f

    is_raw = len(names) == 1 and kinds[names[0]] in RAW and not json_unless_named
    if form == "raw" and (len(names) != 1 or kinds[names[0]] not in RAW):
        reported = ", ".join(f"{name} {kinds[name]}" for name in names)
        raise JobError(
            f"a raw {subject} must be one binary or string column, not {reported}", exit_codes.USAGE
        )
    if form == "raw" or (form == "auto" and is_raw):
        return f.col(quoted(names[0])).cast("binary")
    text = f.to_json(f.struct(*(f.col(quoted(name)) for name in names)), JSON_OPTIONS)
    return text.cast("binary")


def _headers(kinds: dict[str, str], mapping: RowMapping) -> "Column":
    from pyspark.sql import functions as f

    if mapping.headers_column is not None:
        if kinds[mapping.headers_column] != HEADERS:
            kind = kinds[mapping.headers_column]
            reason = f"column {mapping.headers_column} must be {HEADERS}, not {kind}"
            raise JobError(reason, exit_codes.USAGE)
        return f.col(quoted(mapping.headers_column))
    for _, column in mapping.headers:
        if kinds[column] not in RAW:
            reason = f"header column {column} must be binary or string, not {kinds[column]}"
            raise JobError(reason, exit_codes.USAGE)
    if not mapping.headers:
        return f.lit(None).cast(HEADERS)
    pairs = [
        f.struct(f.lit(name).alias("key"), f.col(quoted(column)).cast("binary").alias("value"))
        for name, column in mapping.headers
    ]
    return f.array(*pairs).cast(HEADERS)


def _timestamp_ms(kinds: dict[str, str], name: str | None) -> "Column":
    from pyspark.sql import functions as f

    if name is None:
        return f.lit(None).cast("bigint")
    if kinds[name] == "timestamp":
        return f.unix_millis(quoted(name))
    if kinds[name] in WHOLE:
        return f.col(quoted(name)).cast("bigint")
    reason = f"timestamp column {name} must be a timestamp or integer ms, not {kinds[name]}"
    raise JobError(reason, exit_codes.USAGE)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of the rows, taken before any is written."""

    rows: int
    keyless: int
    tombstones: int
    duplicates: int  # rows beyond the first of their key
    largest_bytes: int  # key plus value
    without_order: int  # rows with a null in an order-by column
    too_early: int  # rows with a time not after 1970-01-01, which a producer cannot write

    @property
    def keys(self) -> int:
        """Return the number of distinct keys."""
        return self.rows - self.keyless - self.duplicates


def count_rows(rows: "DataFrame", mapping: RowMapping) -> RowCounts:
    """Count the rows in one pass."""
    from pyspark.sql import functions as f

    nothing = f.lit(0)
    unordered = f.lit(False)
    for n in range(len(mapping.order_by)):
        unordered |= f.col(f"order_{n}").isNull()
    sizes = f.coalesce(f.length("key"), nothing) + f.coalesce(f.length("value"), nothing)
    groups = rows.groupBy("key").agg(
        f.count(nothing).alias("rows"),
        f.count(f.when(f.col("value").isNull(), 1)).alias("tombstones"),
        f.max(sizes).alias("largest"),
        f.count(f.when(unordered, 1)).alias("unordered"),
        f.count(f.when(f.col("timestamp_ms") <= 0, 1)).alias("too_early"),
    )
    keyed = f.col("key").isNotNull()
    (result,) = groups.agg(
        f.sum("rows").alias("rows"),
        f.sum(f.when(~keyed, f.col("rows"))).alias("keyless"),
        f.sum("tombstones").alias("tombstones"),
        f.sum(f.when(keyed, f.col("rows") - 1)).alias("duplicates"),
        f.max("largest").alias("largest"),
        f.sum("unordered").alias("unordered"),
        f.sum("too_early").alias("too_early"),
    ).collect()
    return RowCounts(*(int(number or 0) for number in result))
