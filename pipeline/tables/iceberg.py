"""Iceberg tables, through pyiceberg; the catalog of a table is an SQLite file next to its data.

Rules
- The Parquet files that Spark wrote are moved to their final path and then added in one commit;
  readers of the catalog do not see them earlier.
- Paths in an Iceberg table are absolute, so its directory must not be moved.
- pyiceberg reads the limits of each column as times of Python, which has the years 1 to 9999.
"""

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from config.extras import install_command
from pipeline.engines.spark_session import first_line
from pipeline.errors import JobError
from pipeline.tables.target import Target, created_meanwhile

NAMESPACE: Final = "varve"
CATALOG: Final = "catalog.db"
TABLE: Final = "table"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST_US: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND


def open_catalog(path: Path) -> Any:
    """Open the catalog of a table's directory; its only table is NAMESPACE.TABLE."""
    from pyiceberg.catalog.sql import SqlCatalog

    return SqlCatalog("varve", uri=f"sqlite:///{path / CATALOG}", warehouse=path.as_uri())


def committed_metadata(path: Path) -> str:
    """Return the path of the metadata that the catalog of a table names. Raises JobError."""
    try:
        from pyiceberg.exceptions import NoSuchTableError
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError as error:
        raise JobError(f"missing packages: run {install_command('iceberg')}") from error
    try:
        with closing(open_catalog(path)) as catalog:
            location = str(catalog.load_table((NAMESPACE, TABLE)).metadata_location)
    except NoSuchTableError as error:
        raise JobError(
            f"{path} has no Iceberg table yet: the job that wrote it was interrupted. Run it again"
            " with --overwrite"
        ) from error
    except (SQLAlchemyError, ValueError, EOFError, OSError) as error:
        raise JobError(f"{path} is not an Iceberg table: {first_line(error)}") from error
    return location


def publish_iceberg(data: Path, place: Target, notes: Mapping[str, Any]) -> None:
    """Turn a Parquet directory into the table, or into its new content. Raises JobError."""
    import pyarrow.parquet as pq
    from pyiceberg.exceptions import (
        CommitFailedException,
        TableAlreadyExistsError,
        ValidationError,
        ValidationException,
    )
    from pyiceberg.expressions import AlwaysTrue
    from sqlalchemy.exc import SQLAlchemyError

    _check_times(sorted(data.glob("*.parquet")))
    path = place.path
    path.mkdir(exist_ok=True)
    folder = path / f"data-{uuid.uuid4().hex[:12]}"
    schema = pq.read_schema(next(data.glob("*.parquet")))
    properties = {"varve": json.dumps(dict(notes))}
    try:
        with closing(open_catalog(path)) as catalog:
            # The catalog comes first: --overwrite accepts one without a table, which an interrupted
            # job leaves, but not a directory with nothing but data.
            catalog.create_namespace_if_not_exists(NAMESPACE)
            data.rename(folder)
            files = [path.as_uri() for path in sorted(folder.glob("*.parquet"))]
            if catalog.table_exists((NAMESPACE, TABLE)):
                if not place.exists:
                    raise TableAlreadyExistsError
                table = catalog.load_table((NAMESPACE, TABLE))
                with table.transaction() as change:
                    with change.update_schema() as update:
                        update.union_by_name(schema)
                    change.delete(AlwaysTrue())
                    change.add_files(files, snapshot_properties=properties)
                return
            with catalog.create_table_transaction(
                (NAMESPACE, TABLE), schema=schema, location=path.as_uri()
            ) as change:
                change.add_files(files, snapshot_properties=properties)
    except TableAlreadyExistsError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise created_meanwhile(path) from error
    except (
        CommitFailedException, ValidationError, ValidationException, SQLAlchemyError, ValueError,
        OverflowError, EOFError, OSError,
    ) as error:  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
        raise JobError(f"cannot publish {path}: {first_line(error)}") from error


def _check_times(files: Sequence[Path]) -> None:
    """Check that Python has the time of each record. Raises JobError."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    names = ["partition", "offset", "timestamp"]
    for path in files:
        with pq.ParquetFile(path) as file:
            if not set(names) <= set(file.schema_arrow.names):
                continue
            for batch in file.iter_batches(columns=names):
                times_us = batch["timestamp"].cast(pa.int64())
                beyond = pc.or_(pc.less(times_us, _FIRST_US), pc.greater(times_us, _LAST_US))
                rows = batch.filter(beyond)
                if rows.num_rows:
                    partition, offset = rows["partition"][0], rows["offset"][0]
                    raise JobError(
                        f"the time of the record in partition {partition} at offset {offset} is"
                        " outside the years 1 to 9999, which is all that pyiceberg reads; use"
                        " --format delta or parquet"
                    )
