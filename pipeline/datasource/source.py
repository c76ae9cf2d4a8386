"""The data source of Spark: creates readers and writers from options."""

# ruff: noqa: N802  the names are Spark's

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from pipeline.datasource.batch import FilteringReader, VarveReader
from pipeline.datasource.options import (
    OptionError,
    SourceOptions,
    read_columns,
    read_source_options,
)
from pipeline.datasource.sink import SinkOptions, VarveStreamWriter, VarveWriter
from pipeline.datasource.stream import VarveStreamReader
from pipeline.records.columns import NAMES, arrow_schema


class DefaultSource(DataSource):  # type: ignore[misc]  # untyped
    """Topics as a source and a sink."""

    @classmethod
    def name(cls) -> str:
        """Return the name used in `format(...)`."""
        return "varve"

    def schema(self) -> StructType:
        """Return the columns of Spark's Kafka source, or those in `columns`."""
        return from_arrow_schema(arrow_schema(read_columns(self.options)))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query. Raises OptionError."""
        options = self._source_options(schema, is_stream=False)
        return FilteringReader(options) if options.push_down_filters else VarveReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming query. Raises OptionError."""
        return VarveStreamReader(self._source_options(schema, is_stream=True))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch query, which appends. Raises OptionError."""
        return VarveWriter(self._sink_options(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of a streaming query, which appends. Raises OptionError."""
        return VarveStreamWriter(self._sink_options(schema, overwrite))

    def _source_options(self, schema: StructType, *, is_stream: bool) -> SourceOptions:
        columns = tuple(schema.fieldNames())
        unknown = [name for name in columns if name not in NAMES]
        if unknown:
            raise OptionError(
                f"unknown columns {', '.join(unknown)}; the columns are {', '.join(NAMES)}"
            )
        requested = arrow_schema(columns)
        if not requested.equals(to_arrow_schema(schema, timezone="UTC")):
            existing = from_arrow_schema(requested)
            raise OptionError(f"the schema must have the types {existing.simpleString()}")
        return read_source_options(self.options, columns=columns, is_stream=is_stream)

    def _sink_options(self, schema: StructType, overwrite: bool) -> SinkOptions:
        if overwrite:
            raise OptionError('topics can only be appended to: use mode("append")')
        return SinkOptions.read(self.options, schema)
