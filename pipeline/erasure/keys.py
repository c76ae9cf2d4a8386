"""The keys to erase, and the partitions that have their records.

Rules
- Keys are distinct byte strings. They are kept in memory, at most KEYS_MAX.
- All records count, committed or not: aborted records are still on disk.
- The records decide the partitions of a key, not a partitioner.
"""

from base64 import b64decode
from binascii import Error as EncodingError
from binascii import unhexlify
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from config import exit_codes
from pipeline.errors import JobError
from pipeline.tables.table_reading import read_table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

KEYS_MAX: Final = 1_000_000
ENCODINGS: Final = ("utf8", "base64", "hex")
COLUMNS: Final = ("key", "value", "partition", "offset", "timestampMs")


def read_keys_from_table(
    spark: "SparkSession", path: str, table_format: str, column: str
) -> list[bytes]:
    """Read the keys from a column of a table. Raises JobError."""
    table = read_table(spark, path, table_format)
    if column not in table.columns:
        existing = ", ".join(table.columns)
        raise JobError(
            f"{path} has no column {column}; its columns are {existing}", exit_codes.USAGE
        )
    keys = table.select(table[column].alias("key"))
    kind = keys.dtypes[0][1]
    if kind not in ("binary", "string"):
        reason = f"the key column must be binary or string, not {kind}"
        raise JobError(reason, exit_codes.USAGE)
    rows = keys.select(keys["key"].cast("binary")).distinct().limit(KEYS_MAX + 1).collect()
    return _checked((row[0] for row in rows), path)


def read_keys_from_file(path: str, encoding: str) -> list[bytes]:
    """Read the keys from a file, one per line, in one of ENCODINGS.

    Raises JobError, also for an empty line: it is rather a mistake than the empty key.
    """
    try:
        with open(path, "rb") as file:
            lines = (line.rstrip(b"\r\n") for line in file)
            return _checked((_decoded(line, encoding, path) for line in lines), path)
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from error
    except EncodingError as error:
        raise JobError(f"{path}: a line is not {encoding}: {error}", exit_codes.USAGE) from error


def _decoded(line: bytes, encoding: str, path: str) -> bytes:
    if not line:
        raise JobError(
            f"{path} has an empty line: remove it. The empty key can be given in a table (--keys)",
            exit_codes.USAGE,
        )
    if encoding == "base64":
        return b64decode(line, validate=True)
    return unhexlify(line) if encoding == "hex" else line


def _checked(value: Iterable[bytes | None], path: str) -> list[bytes]:
    keys: set[bytes] = set()
    for key in value:
        if key is None:
            raise JobError(f"{path} has a row without a key")
        keys.add(bytes(key))
        if len(keys) > KEYS_MAX:
            raise JobError(f"{path} has more than {KEYS_MAX:,} keys; erase them in several runs")
    return sorted(keys)


@dataclass(slots=True)
class KeyRecords:
    """The records of one key in one partition. `version` and `latest_ms` are the largest ones."""

    partition: int
    key: bytes
    values: int = 0  # records with a value
    older: int = 0  # of these, below the limit of the partition
    tombstones: int = 0
    latest_ms: int = 0
    version: int | None = None

    def add(self, other: "KeyRecords") -> None:
        """Add the records found elsewhere."""
        self.values += other.values
        self.older += other.older
        self.tombstones += other.tombstones
        self.latest_ms = max(self.latest_ms, other.latest_ms)
        versions = [item for item in (self.version, other.version) if item is not None]
        self.version = max(versions, default=None)


def find_key_records(
    records: "DataFrame",
    keys: Sequence[bytes],
    below: Mapping[int, int] | None = None,
    version_header: str = "",
) -> list[KeyRecords]:
    """Count the records of the keys among `records`, by partition and key.

    `records` has COLUMNS, plus headers if `version_header` is set. Records below their
    partition's offset in `below` count as older; with None all records do.
    """
    from pyspark.sql import functions as f

    if not keys:
        return []
    spark = records.sparkSession
    requested = spark.createDataFrame([(key,) for key in keys], "key binary")
    has_value = f.col("value").isNotNull()
    older = f.lit(below is None)
    if below:
        pairs = [f.lit(element) for item in sorted(below.items()) for element in item]
        limit = f.try_element_at(f.create_map(*pairs), f.col("partition")).cast("bigint")
        older = f.col("offset") < f.coalesce(limit, f.lit(0).cast("bigint"))
    result = records.join(requested, "key", "left_semi").groupBy("partition", "key").agg(
        f.count(f.when(has_value, 1)).alias("with_value"),
        f.count(f.when(has_value & older, 1)).alias("older"),
        f.count(f.when(~has_value, 1)).alias("tombstones"),
        f.max("timestampMs").alias("latest_ms"),
        f.max(_version(version_header)).alias("version"),
    )  # fmt: skip
    return [
        KeyRecords(row.partition, bytes(row.key), row.with_value, row.older, row.tombstones,
                max(row.latest_ms or 0, 0), row.version)
        for row in result.collect()
    ]  # fmt: skip


def _version(header: str) -> "Column":
    from pyspark.sql import functions as f

    if not header:
        return f.lit(None).cast("bigint")
    named = f.filter("headers", lambda item: item["key"] == f.lit(header))
    version = f.try_element_at(named, f.lit(-1))["value"]
    return f.when(f.length(version) == 8, f.conv(f.hex(version), 16, -10).cast("bigint"))


def merge_key_records(*places: Iterable[KeyRecords]) -> dict[tuple[int, bytes], KeyRecords]:
    """Merge the records found in several places, by partition and key."""
    results: dict[tuple[int, bytes], KeyRecords] = {}
    for key_records in chain(*places):
        partition, key = key_records.partition, key_records.key
        results.setdefault((partition, key), KeyRecords(partition, key)).add(key_records)
    return results
