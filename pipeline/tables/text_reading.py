"""Read CSV and JSON lines files as DataFrames, or refuse them: no character or number is changed.

Rules
- Text is UTF-8. Spark would replace other bytes without an error.
- CSV is that of RFC 4180: a field that contains a quote is in quotes, and its quotes are doubled.
- A JSON line is exactly one value. Spark would drop everything after the first one.
- Fractions in JSON are doubles. An integer in a column of fractions must be one exactly.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from config.json_text import is_unicode
from pipeline.errors import JobError
from pipeline.tables.columns import quoted

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

EXCERPT_CHARACTERS_MAX: Final = 80
_NULL: Final = "\0null\0"  # what Spark reads for an empty field without quotes


def read_csv(spark: "SparkSession", path: str) -> "DataFrame":
    """Read CSV files that have the same header line. Raises JobError, and errors of Spark."""
    lines = spark.read.text(path, lineSep="\n")
    _check_utf8(lines)
    _check_quotes(lines)
    header = lines.head()
    separator = "\n" if header is None else line_separator(header.value)
    options: dict[str, Any] = {
        "mode": "FAILFAST",
        "escape": '"',
        "unescapedQuoteHandling": "RAISE_ERROR",
        "multiLine": True,
        # Otherwise Spark replaces the line breaks within fields by its own.
        "lineSep": separator,
        "nullValue": _NULL,  # otherwise an empty field in quotes is null as well
    }
    _check_names(spark.read.csv(path, header=False, **options).head() or (), path)
    # Without `enforceSchema`, Spark compares the header lines of all files.
    rows = spark.read.csv(path, header=True, enforceSchema=False, **options)
    if separator == "\n":
        _check_line_ends(rows, path)
    elif len(rows.columns) == 1:
        _check_one_column(rows, path)
    return rows


def line_separator(header: str) -> str:
    """Return what separates the lines of a file; `header` is its text up to the first LF."""
    if "\r" in header.removesuffix("\r"):
        return "\r"
    return "\r\n" if header.endswith("\r") else "\n"


def read_json_lines(spark: "SparkSession", path: str) -> "DataFrame":
    """Read files with one JSON object per line. Raises JobError, and errors of Spark."""
    from pyspark.sql import functions as f

    lines = spark.read.text(path)
    _check_utf8(lines)
    rows = spark.read.json(path, mode="FAILFAST")
    located = lines.select("value", f.col("_metadata.file_path").alias("path"))
    faults = located.mapInArrow(JsonLines(rows.schema), "fault string").collect()
    if faults:
        raise JobError(faults[0].fault)
    return rows


def _check_utf8(lines: "DataFrame") -> None:
    from pyspark.sql import functions as f

    row = lines.where(~f.is_valid_utf8("value")).select("_metadata.file_path").head()
    if row is not None:
        raise JobError(f"{row.file_path} is not UTF-8. Convert it to UTF-8 first")


def _check_quotes(lines: "DataFrame") -> None:
    """Check that the quotes of each file are even: Spark ends an open field with its file."""
    from pyspark.sql import functions as f

    quotes = f.sum(f.regexp_count("value", f.lit('"')))
    counts = lines.groupBy(f.col("_metadata.file_path").alias("path")).agg(quotes.alias("quotes"))
    row = counts.where("quotes % 2 = 1").head()
    if row is not None:
        raise JobError(
            f"{row.path} has an odd number of quotes. A field that contains a quote must be in"
            " quotes, and its quotes must be doubled (RFC 4180)"
        )


def _check_names(names: Sequence[str | None], path: str) -> None:
    """Check that each column has a name of its own."""
    for n, name in enumerate(names):
        if not name:
            raise JobError(f"column {n + 1} of {path} has no name. Name it in the header line")
    counts = Counter(name.lower() for name in names if name)  # Spark ignores the case of names
    if twice := [name for name, count in counts.items() if count > 1]:
        raise JobError(f"{path} has several columns with the name {twice[0]}. Rename all but one")


def _check_one_column(rows: "DataFrame", path: str) -> None:
    """Check that no field contains the line end of other lines: no separators are missing then."""
    from pyspark.sql import functions as f

    if rows.where(f.col(quoted(rows.columns[0])).rlike("[\r\n]")).head() is not None:
        raise JobError(
            f"{path} has lines that end in different ways, or line breaks in its only column, which"
            " look the same. Let all lines end in LF"
        )


def _check_line_ends(rows: "DataFrame", path: str) -> None:
    """Check that no field ends with the CR of a line end that other lines do not have."""
    from pyspark.sql import functions as f

    last = rows.columns[-1] if rows.columns else ""
    if last.endswith("\r") or (
        last and rows.where(f.endswith(f.col(quoted(last)), f.lit("\r"))).head() is not None
    ):
        raise JobError(f"{path} has lines that end in LF, and others that end in CRLF")


class JsonLines:
    """Checks the lines of one task; pickled into the tasks."""

    def __init__(self, schema: "DataType") -> None:
        """`schema` is the one that Spark inferred from all lines."""
        self._schema = schema

    def __call__(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        """Return the first fault."""
        import pyarrow as pa

        for batch in batches:
            for line, path in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                if (fault := self.fault(line)) is not None:
                    yield pa.RecordBatch.from_pydict({"fault": [f"{path}: {fault}"]})
                    return

    def fault(self, line: str) -> str | None:
        """Return why a line cannot be read without a loss; None if it can, or is empty."""
        if not line.strip():
            return None
        try:
            # Spark reads NaN and Infinity, too.
            value = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError) as error:
            excerpt = line[:EXCERPT_CHARACTERS_MAX]
            return f"the line {excerpt!r} is not one JSON value: {error}"
        if "\\u" in line and not is_unicode(value):
            excerpt = line[:EXCERPT_CHARACTERS_MAX]
            return f"the line {excerpt!r} has half of a surrogate pair, which is no character"
        if (number := _inexact(value, self._schema)) is not None:
            return (
                f"the number {number} does not fit into a column of 64-bit fractions. Write the"
                " numbers of this column as strings"
            )
        return None


def _inexact(value: Any, kind: "DataType") -> int | float | None:
    """Return a number in a JSON value that becomes another one in the type of its column."""
    from pyspark.sql.types import ArrayType, DoubleType, StructType

    if isinstance(kind, DoubleType):
        return value if isinstance(value, int | float) and not _fits(value) else None
    inner: Iterator[int | float | None] = iter(())
    if isinstance(value, list):
        element = kind.elementType if isinstance(kind, ArrayType) else kind  # a line may be a list
        inner = (_inexact(item, element) for item in value)
    elif isinstance(value, dict) and isinstance(kind, StructType):
        inner = (_inexact(value.get(field.name), field.dataType) for field in kind.fields)
    return next((number for number in inner if number is not None), None)


def _fits(number: int | float) -> bool:
    """Return whether a double is this number; a fraction is the nearest one, unless too large."""
    try:
        return math.isfinite(number) and (isinstance(number, float) or int(float(number)) == number)
    except OverflowError:
        return False
