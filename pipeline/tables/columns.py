"""What keys and values become in a table: bytes, text, or columns of JSON.

Rules
- Bytes that are no UTF-8 are replaced, as Java does: a table's text is text.
- JSON is read by a schema that is given. A value that does not fit it ends the job, with its place,
  unless it is to be null: then a table tells it from a delete by the row being there at all.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

import click

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

Kind = Literal["binary", "string", "json"]
BINARY: Final = "binary"
_MARK: Final = "_varve_malformed"  # set by Spark where something was wrong with a text


@dataclass(frozen=True, slots=True)
class Form:
    """What a column becomes. `schema`: of JSON, in Spark's DDL or its JSON."""

    kind: Kind = BINARY
    schema: str = ""

    @classmethod
    def parse(cls, text: str) -> "Form":
        """From `binary`, `string`, `json:SCHEMA` or `json:@FILE`. Raises ValueError."""
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
    """A Form on a command line."""

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
    """What both become. `null_malformed`: JSON that does not fit its schema is null. `exact_keys`:
    keys that are no UTF-8 end the job, as they could not be told apart."""

    key: Form = Form()
    value: Form = Form()
    null_malformed: bool = False
    exact_keys: bool = False

    def applied(self, frame: "DataFrame") -> "DataFrame":
        """The frame with the columns `key` and `value` in these forms. Raises PySparkException for
        a schema that is none, ValueError."""
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
        # What is blank becomes null, and is not marked.
        fits = result.isNotNull() & result[_MARK].isNull()
        read = sql.when(fits, sql.struct(*fields))
        if not self.null_malformed:
            where = _where(name, "JSON of the schema that was given")
            read = read.when(text.isNotNull(), sql.raise_error(where))
        return read


def _where(name: str, subject: str) -> "Column":
    from pyspark.sql import functions as sql

    text = f"the {name} at partition %d, offset %d is not {subject}"
    return sql.format_string(text, sql.col("partition"), sql.col("offset"))


def parse_schema(text: str) -> "StructType":
    """The schema that a text names. Raises ValueError, PySparkException."""
    from pyspark.sql.types import StructType

    if text.startswith("{"):
        try:
            return StructType.fromJson(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"no schema of Spark: {error}") from error
    return StructType.fromDDL(text)
