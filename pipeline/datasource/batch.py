"""Reading a topic once: ranges of offsets fixed when the query is planned, one task for each."""

# ruff: noqa: N802  the names are Spark's

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from pipeline.client.connection import OffsetsGoneError
from pipeline.client.kafka_client import NO_OFFSET, REACH_SECONDS, TIMEOUT_SECONDS, WireClient
from pipeline.client.range_reader import ReadOptions, read_range
from pipeline.datasource.filters import Narrowed
from pipeline.datasource.offsets import (
    DataLossError,
    Range,
    earliest_offsets,
    ending_offsets,
    partitions_of,
    split,
    starting_offsets,
)
from pipeline.datasource.options import SourceOptions

_logger = logging.getLogger("varve.spark")


@dataclass
class RangePartition(InputPartition):  # type: ignore[misc]  # untyped
    """What one task reads."""

    wanted: Range


def connect(options: SourceOptions, *, reach_seconds: float = REACH_SECONDS) -> WireClient:
    """A client of these options; it connects when it is used.

    On the driver a first answer has to come within REACH_SECONDS: a wrong host is an error before
    any task starts. Tasks know that the address is right, and wait for a broker that restarts.
    """
    return WireClient(options.bootstrap, client_id=options.client_id, reach_seconds=reach_seconds)


def read_rows(options: SourceOptions, offset_range: Range) -> Iterator[pa.RecordBatch]:
    """The rows of a range, in a task. Raises DataLossError, WireError, CorruptBatchError."""
    reading = ReadOptions(
        columns=options.columns,
        isolation=options.isolation,
        fetch_bytes=options.fetch_bytes,
        stall_seconds=options.stall_seconds,
    )
    if not options.fail_on_data_loss:
        reading = replace(reading, on_gone=_translated_error)
    with connect(options, reach_seconds=TIMEOUT_SECONDS) as client:
        try:
            yield from read_range(
                client, offset_range.partition, offset_range.first, offset_range.end, reading
            )
        except OffsetsGoneError as error:
            raise DataLossError(str(error)) from error


def _translated_error(error: OffsetsGoneError) -> None:
    _logger.warning("Offsets that were to be read are gone.", extra={"reason": str(error)})


class VarveReader(DataSourceReader):  # type: ignore[misc]  # untyped
    """Of a batch query. Spark plans it once: all uses of a DataFrame read the same ranges."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._narrowed = Narrowed()

    def partitions(self) -> list[InputPartition]:
        """Ask the cluster for the bounds, and cut what is between them into tasks."""
        with connect(self._options) as client:
            ranges = self._ranges(client)
        return [RangePartition(piece) for piece in split(ranges, self._options)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of one range; none of what Spark makes of an empty list of partitions."""
        if isinstance(partition, RangePartition):
            yield from read_rows(self._options, partition.wanted)
        else:
            assert partition.value is None

    def _ranges(self, client: WireClient) -> list[Range]:
        options, narrowed = self._options, self._narrowed
        # All of them: what the options say of partitions is checked before any is left out.
        partitions = partitions_of(client, options)
        first = starting_offsets(client, options, partitions)
        end = ending_offsets(client, options, partitions)
        topic_partitions = [partition for partition in partitions if narrowed.wants(partition)]
        earliest = earliest_offsets(client, topic_partitions)
        ranges = []
        for which in topic_partitions:
            if first[which] < earliest[which] and first[which] < end[which]:
                self._lost(which, first[which], earliest[which])
                first[which] = earliest[which]
            begin = max(first[which], narrowed.first_offset)
            ranges.append(Range(which, begin, min(end[which], narrowed.end_offset)))
        return self._from_time(client, ranges)

    def _from_time(self, client: WireClient, ranges: list[Range]) -> list[Range]:
        """Without what lies before the first record of a time that the query begins at."""
        from_ms = self._narrowed.from_ms
        if from_ms is None:
            return ranges
        requested = {bounds.partition: from_ms for bounds in ranges if bounds.size}
        begins = client.offsets(requested, self._options.isolation)
        narrowed = []
        for offset_range in ranges:
            begin = begins.get(offset_range.partition, NO_OFFSET)
            if begin == NO_OFFSET:
                begin = offset_range.end  # nothing is as late
            narrowed.append(replace(offset_range, first=max(offset_range.first, begin)))
        return narrowed

    def _lost(self, partition: Any, requested: int, earliest: int) -> None:
        subject = f"{partition}: offset {requested} was asked for, the log begins at {earliest}"
        if self._options.fail_on_data_loss:
            raise DataLossError(subject)
        _logger.warning("Offsets that were to be read are gone.", extra={"reason": subject})


class FilteringReader(VarveReader):
    """As well, and it takes filters: only what can pass them is read.

    For a DataFrame that is scanned once. Spark 4.3.0 keeps the partitions that a Python source
    planned for the last filters, and gives them to every other use of the same DataFrame: after
    `df.where("partition = 1").count()`, `df.count()` counts that partition alone, and the two sides
    of a union read what the second asked for. In a session without the setting
    spark.sql.python.filterPushdown.enabled Spark refuses a source that takes filters.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Narrow what is read; gives back what Spark has to filter itself."""
        for pushed in filters:
            if not self._narrowed.push(pushed):
                yield pushed
