"""Reading a topic as it grows: an offset per partition, kept by Spark in its checkpoint.

Rules
- A range once planned reads the same rows again: from its own offsets, whatever came meanwhile.
- Partitions that appear later are read from their beginning.
- An offset never goes back. Where the log says it does (a topic made anew), or where offsets were
  lost to retention, it is an error, or told and passed over with failOnDataLoss=false.
"""

# ruff: noqa: N802  the names are Spark's

import logging
import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from pipeline.client.kafka_client import WireClient
from pipeline.datasource.batch import RangePartition, connect, read_rows
from pipeline.datasource.offsets import (
    DataLossError,
    Offsets,
    Range,
    earliest_offsets,
    from_json,
    latest_offsets,
    limited,
    partitions_of,
    split,
    starting_offsets,
    to_json,
)
from pipeline.datasource.options import SourceOptions

_logger = logging.getLogger("varve.spark")


class VarveStreamReader(
    DataSourceStreamReader,  # type: ignore[misc]  # untyped
    SupportsTriggerAvailableNow,  # type: ignore[misc]
):
    """Of a streaming query. Lives on the driver; `read` runs in the tasks."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._client: WireClient | None = None
        self._target: Offsets | None = None  # where a query of AvailableNow ends
        self._last_given = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get the options alone."""
        return {"_options": self._options}

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        client = self._connected()
        partitions = partitions_of(client, self._options)
        return to_json(starting_offsets(client, self._options, partitions))

    def getDefaultReadLimit(self) -> ReadLimit:
        """maxOffsetsPerTrigger, or else minOffsetsPerTrigger; both are looked at below."""
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.min_offsets_per_trigger is not None:
            return ReadMinRows(self._options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """What is there now is where the query ends."""
        self._target = self._latest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """The end of the next batch; `start` again where there is nothing for it."""
        begin = from_json(start)
        latest = dict(self._target) if self._target is not None else self._latest()
        begin |= self._beginnings(begin, latest)
        self._check_ends(begin, latest)
        # What is not subscribed to any more, or ends before, stays where it is.
        ends = {which: max(begin.get(which, 0), end) for which, end in latest.items()}
        if self._waits_for_more(begin, ends):
            return start
        if isinstance(limit, ReadMaxRows):
            ends = limited(begin, ends, limit.max_rows)
        self._last_given = time.monotonic()
        return to_json(from_json(start) | ends)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """For the query's progress."""
        return to_json(self._latest())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of one batch."""
        begin, ends = from_json(start), from_json(end)
        begin |= self._beginnings(begin, ends)
        ranges = [Range(which, begin[which], last) for which, last in sorted(ends.items())]
        return [RangePartition(piece) for piece in split(ranges, self._options)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of one range."""
        assert isinstance(partition, RangePartition)
        yield from read_rows(self._options, partition.wanted)

    def stop(self) -> None:
        """Let go of the connections."""
        if self._client is not None:
            self._client.close()

    def _connected(self) -> WireClient:
        if self._client is None:
            self._client = connect(self._options)
        return self._client

    def _latest(self) -> Offsets:
        client = self._connected()
        return latest_offsets(client, self._options, partitions_of(client, self._options))

    def _beginnings(self, begin: Offsets, ends: Offsets) -> Offsets:
        """Where partitions begin that were not there before."""
        new = [partition for partition in ends if partition not in begin]
        if not new:
            return {}
        results = earliest_offsets(self._connected(), new)
        for partition, offset in results.items():
            if offset > 0:
                self._lost(f"{partition} is new, and its log begins at {offset}")
        return results

    def _check_ends(self, begin: Offsets, latest: Offsets) -> None:
        for partition, offset in begin.items():
            if partition not in latest:
                self._lost(f"{partition} is not there any more, {offset} was read of it")
            elif latest[partition] < offset:
                self._lost(
                    f"{partition}: {offset} was reached, the log ends at {latest[partition]}"
                )

    def _lost(self, subject: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLossError(subject)
        _logger.warning("Offsets that were to be read are gone.", extra={"reason": subject})

    def _waits_for_more(self, begin: Offsets, ends: Offsets) -> bool:
        """Whether there is less than minOffsetsPerTrigger, and not for too long yet."""
        least = self._options.min_offsets_per_trigger
        if least is None or self._target is not None:
            return False
        waited_ms = (time.monotonic() - self._last_given) * 1000
        waiting = sum(end - begin[partition] for partition, end in ends.items())
        return waiting < least and waited_ms < self._options.max_trigger_delay_ms
