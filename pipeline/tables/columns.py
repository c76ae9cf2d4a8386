"""Conversion of keys and values in a table: to bytes, text, or columns parsed from JSON.

Rules
- Invalid UTF-8 is replaced, as Java does.
- JSON is parsed by a given schema. A value that does not match it fails the job and is named by
  partition and offset, unless malformed values become null. Deletes have no row at all.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

import click

from config import exit_codes
from pipeline.engines.spark_session import first_line
from pipeline.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

Kind = Literal["binary", "string", "json"]
BINARY: Final = "binary"
_MARK: Final = "_varve_malformed"  # set by Spark for malformed text


@dataclass(frozen=True, slots=True)
class Form:
    """The target type of a column. `schema` is for JSON, in Spark's DDL or JSON form."""

    kind: Kind = BINARY
    schema: str = ""

    @classmethod
    def parse(cls, text: str) -> "Form":
        """Parse `binary`, `string`, `json:SCHEMA` or `json:@FILE`. Raises ValueError."""
        kind, sign, schema = text.partition(":")
        if kind == "json":
            if schema.startswith("@"):
                try:
                    with open(schema[1:], encoding="utf-8") as file:
                        schema = file.read()
                except (OSError, UnicodeDecodeError) as error:
                    raise ValueError(str(error)) from error
            if not schema.strip():
                raise ValueError("JSON needs a schema: json:SCHEMA, such as 'json:id long, n int'")
            return cls("json", schema.strip())
        if sign or kind not in ("binary", "string"):
            raise ValueError(f"expected binary, string, json:SCHEMA or json:@FILE, not {text[:80]}")
        return cls(cast(Kind, kind))


class FormType(click.ParamType[Form]):
    """The click type of a Form."""

    name = "form"

    def convert(
        self, value: "str | Form", param: click.Parameter | None, ctx: click.Context | None
    ) -> Form:
        """See click."""
        if isinstance(value, Form):
            return value
        try:
            return Form.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of key and value.

    `null_malformed` turns JSON that does not match its schema into null. `exact_keys` fails the job
    for keys that are not valid UTF-8, because replaced bytes could make two keys equal.
    """

    key: Form = Form()
    value: Form = Form()
    null_malformed: bool = False
    exact_keys: bool = False

    def check(self) -> None:
        """Check the schemas, in a session. Raises JobError (USAGE)."""
        from pyspark.errors import PySparkException

        for form in (self.key, self.value):
            if form.kind == "json":
                try:
                    parse_schema(form.schema)
                except (ValueError, PySparkException) as error:
                    text = form.schema[:80]
                    raise JobError(
                        f"{text!r} is not a schema: {first_line(error)}", exit_codes.USAGE
                    ) from error

    def applied(self, frame: "DataFrame") -> "DataFrame":
        """Return the frame with `key` and `value` converted by checked forms."""
        for name, form in (("key", self.key), ("value", self.value)):
            if form.kind != BINARY and name in frame.columns:
                frame = frame.withColumn(name, self._column(name, form))
        return frame

    def _column(self, name: str, form: Form) -> "Column":
        from pyspark.sql import functions as sql

        text = sql.make_valid_utf8(sql.col(name).cast("string"))
        if form.kind == "string" and name == "key" and self.exact_keys:
            value = sql.col(name).cast("string")
            where = _where("key", "UTF-8")
            return sql.when(sql.is_valid_utf8(value), value).when(
                value.isNotNull(), sql.raise_error(where)
            )
        if form.kind == "string":
            return text
        schema = parse_schema(form.schema)
        marked = type(schema)([*schema.fields]).add(_MARK, "string")
        options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _MARK}
        result = sql.from_json(text, marked, options)
        fields = [result[field.name].alias(field.name) for field in schema.fields]
        # Blank text becomes null and is not marked.
        fits = result.isNotNull() & result[_MARK].isNull()
        read = sql.when(fits, sql.struct(*fields))
        if not self.null_malformed:
            where = _where(name, "JSON of the given schema")
            read = read.when(text.isNotNull(), sql.raise_error(where))
        return read


def _where(name: str, subject: str) -> "Column":
    from pyspark.sql import functions as sql

    text = f"the {name} at partition %d, offset %d is not {subject}"
    return sql.format_string(text, sql.col("partition"), sql.col("offset"))


def parse_schema(text: str) -> "StructType":
    """Parse a schema. Raises ValueError, PySparkException."""
    from pyspark.sql.types import StructType

    if text.startswith("{"):
        try:
            return StructType.fromJson(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
    return StructType.fromDDL(text)


def quoted(name: str) -> str:
    """Quote a column name that may contain dots and backticks, for Spark."""
    return "`" + name.replace("`", "``") + "`"
