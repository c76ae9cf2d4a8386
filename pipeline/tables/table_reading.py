"""Read Parquet, Delta, Iceberg, CSV and JSON lines tables as DataFrames.

Rules
- Spark reads the files. deltalake and pyiceberg list the files of a table. Tables with features
  that plain files do not show (delete files, renamed columns) are refused.
- The catalog beside an Iceberg table says which of its metadata is committed: a job that is killed,
  or refused, leaves metadata that no reader may see. Only a table without it is read as of its
  newest metadata.
- Parquet pages that have a checksum must match it.
- `find_version` names a version, so that rows and offsets can be read from the same one while a job
  replaces the table.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from config.extras import install_command
from pipeline.engines.spark_session import first_line, spark_reason
from pipeline.errors import JobError
from pipeline.tables.delta import delta_reason
from pipeline.tables.iceberg import CATALOG, committed_metadata
from pipeline.tables.target import NOTES
from pipeline.tables.text_reading import read_csv, read_json_lines
from pipeline.tables.upsert import read_versions

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyiceberg.table import StaticTable
    from pyspark.sql import DataFrame, SparkSession

FORMATS: Final = ("parquet", "delta", "iceberg", "csv", "json")
# Spark writes a checksum with each page, and does not compare it by itself: a flipped bit of a
# compressed page is often another valid value.
_CHECKED: Final = ("parquet.page.verify-checksum.enabled", "true")


Version = int | str  # of a Delta table; the path of an Iceberg table's metadata


def find_version(path: str, table_format: str) -> Version | None:
    """Return the present version of a table; None if its format has none. Raises JobError."""
    if table_format == "delta":
        return int(_delta_table(path, None).version())
    return _metadata_path(path) if table_format == "iceberg" else None


def read_table(
    spark: "SparkSession", path: str, table_format: str, version: Version | None = None
) -> "DataFrame":
    """Read the table at `path`, in a version from `find_version` or the present one.

    Raises JobError.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if "://" not in path and not os.path.exists(path):
        raise JobError(f"{path} does not exist")
    try:
        match table_format:
            case "delta":
                return _delta(spark, path, version)
            case "iceberg":
                return _iceberg(spark, path, version)
            case "csv":
                return read_csv(spark, path)
            case "json":
                return read_json_lines(spark, path)
            case _:
                return _parquet(spark, path)
    except (PySparkException, Py4JError) as error:
        raise JobError(f"{path} cannot be read as {table_format}: {spark_reason(error)}") from error


def read_reach(
    path: str,
    table_format: str,
    topic: str,
    partitions: Sequence[int],
    version: Version | None = None,
) -> dict[int, int]:
    """Return the end offset of each partition in a table, from the metadata of that version.

    The result is empty if the metadata names another topic or none. Raises JobError.
    """
    if table_format == "delta":
        return read_versions(_delta_table(path, version), topic, partitions)
    try:
        notes = json.loads(_notes(path, table_format, version))
        if notes.get("topic") != topic:
            return {}
        return {int(number): int(end) for number, end in notes.get("end_offsets", {}).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise JobError(
            f"the metadata of {path} has no valid offsets: {first_line(error)}. Give them with"
            " --as-of-offsets, or write the table again"
        ) from error


def _notes(path: str, table_format: str, version: Version | None) -> str:
    """Return what the job that wrote a table stored with it, as JSON."""
    if table_format == "parquet" and (Path(path) / NOTES).is_file():
        return (Path(path) / NOTES).read_text()
    if table_format != "iceberg":
        return "{}"
    snapshot = _static_table(path, version).current_snapshot()
    summary = snapshot.summary if snapshot is not None else None
    return (summary and summary.get("varve")) or "{}"


def _parquet(spark: "SparkSession", *paths: str) -> "DataFrame":
    """Read Parquet files with the columns of all of them, not only of the first."""
    return spark.read.option(*_CHECKED).parquet(*paths, mergeSchema=True)


def _delta_table(path: str, version: Version | None) -> "DeltaTable":
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ImportError as error:
        raise JobError("missing packages: pip install deltalake") from error
    try:
        return DeltaTable(path, None if version is None else int(version))
    except DeltaError as error:
        raise JobError(f"{path} is not a Delta table: {delta_reason(error)}") from error


def _delta(spark: "SparkSession", path: str, version: Version | None) -> "DataFrame":
    table = _delta_table(path, version)
    from deltalake.exceptions import DeltaError

    try:
        files = table.file_uris()
        protocol = table.protocol()
        settings = table.metadata().configuration
    except DeltaError as error:
        raise JobError(f"{path} is not a Delta table: {delta_reason(error)}") from error
    features = set(protocol.reader_features or ()) - {"timestampNtz"}
    mapped = settings.get("delta.columnMapping.mode", "none") != "none"
    if features or mapped:
        named = ", ".join(sorted(features)) or "column mapping"
        raise JobError(f"{path} uses unsupported table features: {named}")
    schema = _schema(table.schema().to_arrow())
    if not files:
        return spark.createDataFrame([], schema)
    # A file has only the columns that the table had when the file was written.
    reader = spark.read.schema(schema).option(*_CHECKED).option("basePath", _plain(path))
    return reader.parquet(*map(_plain, files))


def _static_table(path: str, version: Version | None) -> "StaticTable":
    from pyiceberg.table import StaticTable

    return StaticTable.from_metadata(_metadata_path(path) if version is None else str(version))


def _iceberg(spark: "SparkSession", path: str, version: Version | None) -> "DataFrame":
    try:
        from pyiceberg.exceptions import ValidationError
        from pyiceberg.io.pyarrow import schema_to_pyarrow
    except ImportError as error:
        raise JobError(f"missing packages: run {install_command('iceberg')}") from error
    try:
        table = _static_table(path, version)
        tasks = list(table.scan().plan_files())
    except (ValidationError, ValueError, EOFError, OSError) as error:
        raise JobError(f"{path} is not an Iceberg table: {first_line(error)}") from error
    if any(task.delete_files for task in tasks):
        raise JobError(f"{path} has delete files, which are not supported")
    if not tasks:
        return spark.createDataFrame([], _schema(schema_to_pyarrow(table.schema())))
    return _only(table, _parquet(spark, *[_plain(task.file.file_path) for task in tasks]))


def _only(table: Any, rows: "DataFrame") -> "DataFrame":
    names: Sequence[str] = [field.name for field in table.schema().fields]
    missing = [name for name in names if name not in rows.columns]
    if missing:
        raise JobError(
            f"the table's files have no column {missing[0]}; renamed columns are not supported"
        )
    return rows.select(*names)


def _metadata_path(path: str) -> str:
    """Return the path of the committed metadata of an Iceberg table. Raises JobError."""
    if path.endswith(".metadata.json"):
        return path
    if (Path(path) / CATALOG).is_file():
        return committed_metadata(Path(path))
    paths = list(Path(path).glob("metadata/*.metadata.json"))
    if not paths:
        raise JobError(f"{path} is not an Iceberg table: it has no metadata")
    return str(max(paths, key=lambda path: (path.stat().st_mtime_ns, path.name)))


def _schema(arrow: Any) -> Any:
    import pyarrow as pa
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(pa.schema(arrow))


def _plain(path: str) -> str:
    return unquote(urlsplit(path).path) if path.startswith("file:") else path
