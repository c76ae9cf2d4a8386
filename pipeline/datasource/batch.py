"""Batch reads: offset ranges are fixed when the query is planned, one task per range."""

# ruff: noqa: N802  the names are Spark's

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from pipeline.client.kafka_client import NO_OFFSET, REACH_SECONDS, TIMEOUT_SECONDS, WireClient
from pipeline.client.range_reader import ReadOptions, read_range
from pipeline.client.wire_errors import OffsetsGoneError
from pipeline.datasource.filters import Narrowed
from pipeline.datasource.offsets import (
    DataLossError,
    Range,
    begins_at_start,
    earliest_offsets,
    ending_offsets,
    split,
    starting_offsets,
    subscribed_partitions,
)
from pipeline.datasource.options import SourceOptions

_logger = logging.getLogger("varve.spark")


@dataclass
class RangePartition(InputPartition):  # type: ignore[misc]  # untyped
    """The range that one task reads."""

    offset_range: Range


def connect(options: SourceOptions, *, reach_seconds: float = REACH_SECONDS) -> WireClient:
    """Return a client for these options; it connects on first use.

    On the driver, the first answer must come within REACH_SECONDS, so a wrong host fails before any
    task starts. Tasks know that the address is right and wait longer, for a broker that restarts.
    """
    return WireClient(options.cluster, client_id=options.client_id, reach_seconds=reach_seconds)


def read_rows(options: SourceOptions, offset_range: Range) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range, in a task. Raises DataLossError, WireError, CorruptBatchError."""
    reading = ReadOptions(
        columns=options.columns,
        isolation=options.isolation,
        fetch_bytes=options.fetch_bytes,
        stall_seconds=options.stall_seconds,
        from_start=offset_range.from_start,
    )
    if not options.fail_on_data_loss:
        reading = replace(reading, on_gone=_log_gone)
    with connect(options, reach_seconds=TIMEOUT_SECONDS) as client:
        try:
            yield from read_range(
                client, offset_range.partition, offset_range.first, offset_range.end, reading
            )
        except OffsetsGoneError as error:
            raise DataLossError(str(error)) from error


def _log_gone(error: OffsetsGoneError) -> None:
    _logger.warning("requested offsets are gone", extra={"reason": str(error)})


class VarveReader(DataSourceReader):  # type: ignore[misc]  # untyped
    """The reader of a batch query. Spark plans it once for all uses of a DataFrame."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._narrowed = Narrowed()

    def partitions(self) -> list[InputPartition]:
        """Fetch the bounds and cut the ranges between them into tasks."""
        with connect(self._options) as client:
            ranges = self._ranges(client)
        return [RangePartition(piece) for piece in split(ranges, self._options)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of one range; nothing for the placeholder of an empty partition list."""
        if isinstance(partition, RangePartition):
            yield from read_rows(self._options, partition.offset_range)
        else:
            assert partition.value is None

    def _ranges(self, client: WireClient) -> list[Range]:
        options, narrowed = self._options, self._narrowed
        # Resolve options for all partitions, so that errors do not depend on filters.
        partitions = subscribed_partitions(client, options)
        first = starting_offsets(client, options, partitions)
        end = ending_offsets(client, options, partitions)
        topic_partitions = [partition for partition in partitions if narrowed.includes(partition)]
        earliest = earliest_offsets(client, topic_partitions)
        ranges = []
        for which in topic_partitions:
            from_start = begins_at_start(options.starting, which)
            if first[which] < earliest[which] and first[which] < end[which]:
                if not from_start:
                    self._lost(which, first[which], earliest[which])
                first[which] = earliest[which]
            begin, last = max(first[which], narrowed.first_offset), narrowed.end_offset
            ranges.append(Range(which, begin, min(end[which], last), from_start=from_start))
        return self._from_time(client, ranges)

    def _from_time(self, client: WireClient, ranges: list[Range]) -> list[Range]:
        """Skip the records before the first one at or after the filtered time."""
        from_ms = self._narrowed.from_ms
        if from_ms is None:
            return ranges
        requested = {bounds.partition: from_ms for bounds in ranges if bounds.size}
        begins = client.offsets(requested, self._options.isolation)
        narrowed = []
        for offset_range in ranges:
            begin = begins.get(offset_range.partition, NO_OFFSET)
            if begin == NO_OFFSET:
                begin = offset_range.end  # no record is as late
            narrowed.append(replace(offset_range, first=max(offset_range.first, begin)))
        return narrowed

    def _lost(self, partition: Any, requested: int, earliest: int) -> None:
        subject = f"{partition}: offset {requested} requested, but the log starts at {earliest}"
        if self._options.fail_on_data_loss:
            raise DataLossError(subject)
        _logger.warning("requested offsets are gone", extra={"reason": subject})


class FilteringReader(VarveReader):
    """A reader that accepts filters and reads only what may pass them.

    Use it for a DataFrame that is scanned once. Spark 4.3.0 keeps the partitions that a Python
    source planned for the last filters, and gives them to every other use of the same DataFrame:
    after `df.where("partition = 1").count()`, `df.count()` counts that partition alone, and the two
    sides of a union read the partitions of the second. In a session without the setting
    spark.sql.python.filterPushdown.enabled Spark refuses a source that takes filters.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Narrow the ranges; return the filters that Spark must still apply."""
        for pushed in filters:
            if not self._narrowed.push(pushed):
                yield pushed
