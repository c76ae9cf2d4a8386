"""Streaming reads: Spark keeps one offset per partition in its checkpoint.

Rules
- A planned range reads the same rows when it is read again.
- New partitions are read from their start.
- Offsets never go back. If the log end does (a re-created topic), or retention removed offsets, the
  query fails; with failOnDataLoss=false it logs a warning and continues.
- The checkpoint stores each offset with the leader epoch at that time. A truncation begins a new
  epoch, so the query notices it even if other records have the removed offsets by then (KIP-320).
"""

# ruff: noqa: N802  the names are Spark's

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from pipeline.client.kafka_client import EndOffset, WireClient
from pipeline.datasource.batch import RangePartition, connect, read_rows
from pipeline.datasource.offsets import (
    DataLossError,
    Offsets,
    Range,
    earliest_offsets,
    from_json,
    latest_offsets,
    limited,
    split,
    starting_offsets,
    subscribed_partitions,
    to_json,
)
from pipeline.datasource.options import SourceOptions
from storage.model import TopicPartition

_logger = logging.getLogger("varve.spark")


class VarveStreamReader(
    DataSourceStreamReader,  # type: ignore[misc]  # untyped
    SupportsTriggerAvailableNow,  # type: ignore[misc]
):
    """The reader of a streaming query. It lives on the driver; `read` runs in the tasks."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._client: WireClient | None = None
        # End offsets of an AvailableNow query.
        self._target: dict[TopicPartition, EndOffset] | None = None
        self._last_given = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        """Return the options, all that tasks need."""
        return {"_options": self._options}

    def initialOffset(self) -> dict[str, Any]:
        """Return the start offsets of a query without a checkpoint."""
        client = self._connected()
        partitions = subscribed_partitions(client, self._options)
        latest = latest_offsets(client, self._options, partitions)  # before the starting offsets
        starts = starting_offsets(client, self._options, partitions)
        return to_json({p: EndOffset(start, latest[p].leader_epoch) for p, start in starts.items()})

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of maxOffsetsPerTrigger, or else of minOffsetsPerTrigger."""
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.min_offsets_per_trigger is not None:
            return ReadMinRows(self._options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the current end offsets as the end of the query."""
        self._target = self._latest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end offsets of the next batch, or `start` if there is nothing to read."""
        reached = from_json(start)
        latest_ends = self._target if self._target is not None else self._latest()
        begin, latest = _offsets_of(reached), _offsets_of(latest_ends)
        begin |= self._beginnings(begin, latest)
        self._check_ends(begin, latest)
        self._check_epochs(reached, latest_ends)
        # Offsets of unsubscribed or truncated partitions stay as they are.
        ends = {which: max(begin.get(which, 0), end) for which, end in latest.items()}
        if self._waits_for_more(begin, ends):
            return start
        if isinstance(limit, ReadMaxRows):
            ends = limited(begin, ends, limit.max_rows)
        self._last_given = time.monotonic()
        # Without new records, a new epoch alone starts no batch.
        read = {
            p: EndOffset(end, latest_ends[p].leader_epoch)
            for p, end in ends.items()
            if p not in reached or end > reached[p].offset
        }
        return to_json(reached | read)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end offsets for the progress of the query."""
        return to_json(self._latest())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of one batch."""
        begin, ends = _offsets_of(from_json(start)), _offsets_of(from_json(end))
        begin |= self._beginnings(begin, ends)
        ranges = [Range(which, begin[which], last) for which, last in sorted(ends.items())]
        return [RangePartition(piece) for piece in split(ranges, self._options)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of one range."""
        assert isinstance(partition, RangePartition)
        yield from read_rows(self._options, partition.offset_range)

    def stop(self) -> None:
        """Close the connections."""
        if self._client is not None:
            self._client.close()

    def _connected(self) -> WireClient:
        if self._client is None:
            self._client = connect(self._options)
        return self._client

    def _latest(self) -> dict[TopicPartition, EndOffset]:
        client = self._connected()
        return latest_offsets(client, self._options, subscribed_partitions(client, self._options))

    def _beginnings(self, begin: Offsets, ends: Offsets) -> Offsets:
        """Return the start offsets of new partitions."""
        new = [partition for partition in ends if partition not in begin]
        if not new:
            return {}
        results = earliest_offsets(self._connected(), new)
        for partition, offset in results.items():
            if offset > 0:
                self._lost(f"{partition} is new, but its log starts at offset {offset}")
        return results

    def _check_ends(self, begin: Offsets, latest: Offsets) -> None:
        for partition, offset in begin.items():
            if partition not in latest:
                self._lost(f"{partition} no longer exists; it was read up to offset {offset}")
            elif latest[partition] < offset:
                self._lost(
                    f"{partition}: read up to {offset}, but the log ends at {latest[partition]}"
                )

    def _check_epochs(
        self,
        reached: Mapping[TopicPartition, EndOffset],
        latest: Mapping[TopicPartition, EndOffset],
    ) -> None:
        """Report logs that were truncated below the offset reached; they may be longer again."""
        changed = {
            partition: end
            for partition, end in reached.items()
            if partition in latest and latest[partition].leader_epoch != end.leader_epoch
        }
        for partition, end in self._connected().truncated(changed).items():
            self._lost(
                f"{partition}: read up to {reached[partition].offset}, but the log was truncated"
                f" to offset {end} since"
            )

    def _lost(self, subject: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLossError(subject)
        _logger.warning("requested offsets are gone", extra={"reason": subject})

    def _waits_for_more(self, begin: Offsets, ends: Offsets) -> bool:
        """Return whether to wait for minOffsetsPerTrigger, up to maxTriggerDelay."""
        least = self._options.min_offsets_per_trigger
        if least is None or self._target is not None:
            return False
        waited_ms = (time.monotonic() - self._last_given) * 1000
        waiting = sum(end - begin[partition] for partition, end in ends.items())
        return waiting < least and waited_ms < self._options.max_trigger_delay_ms


def _offsets_of(ends: Mapping[TopicPartition, EndOffset]) -> Offsets:
    return {partition: end.offset for partition, end in ends.items()}
