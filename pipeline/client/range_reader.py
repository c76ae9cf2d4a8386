"""Read a range of offsets of one partition from a broker, as Arrow batches.

Rules
- Reading ends only when every offset of the range was read or is known to have no record, as in the
  gaps of a compacted log. A range that the broker cannot serve is an error.
- The next fetch is in flight while the batches of the last one are decoded.
- Memory: two fetches, or one batch if that is larger.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from pipeline.client.kafka_client import FETCH_BYTES, LATEST, Fetched, Isolation, WireClient
from pipeline.client.wire_errors import OffsetsGoneError
from pipeline.records.columns import COLUMNS
from pipeline.records.decode import (
    BATCH_ROWS,
    LARGEST_OFFSET,
    BatchDecoder,
    Keep,
    Selection,
    with_slack,
)
from pipeline.records.kernels import offset_after
from protocol.client.connection import FRAME_BYTES_MAX, WireError
from storage.errors import (
    CorruptBatchError,
    DecompressionLimitError,
    UnsupportedCompressionError,
)
from storage.format.batch import (
    BatchHeader,
    ControlType,
    Record,
    control_type,
    iterate_records,
    walk_headers,
)
from storage.format.txn_index import TxnIndexEntry
from storage.model import TopicPartition

STALL_SECONDS: Final = 120.0  # as Spark's Kafka source
MARKER_BYTES_MAX: Final = 64 << 10  # decompressed; a marker has about 20 bytes


class StalledError(WireError):
    """The broker should have the range by its bounds, but returns nothing."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read.

    `on_gone` is called for lost offsets; None: they are an error. `from_start`: the range begins at
    the start of the log, where retention may remove offsets before the first fetch.
    """

    columns: Sequence[str] = COLUMNS
    isolation: Isolation = Isolation.READ_UNCOMMITTED
    fetch_bytes: int = FETCH_BYTES
    fetch_wait_ms: int = 500
    batch_rows: int = BATCH_ROWS
    stall_seconds: float = STALL_SECONDS
    keep: Keep | None = None
    on_gone: Callable[[OffsetsGoneError], None] | None = field(default=None)
    from_start: bool = False


def read_range(
    client: WireClient,
    partition: TopicPartition,
    first_offset: int,
    end_offset: int,
    options: ReadOptions | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of [first_offset, end_offset), in order.

    Raises OffsetsGoneError, StalledError, UnknownTopicError, WireError, and CorruptBatchError for
    batches that are damaged, with what was fetched as its path.
    """
    return _RangeReader(client, partition, end_offset, options or ReadOptions()).read(first_offset)


class _RangeReader:
    def __init__(
        self, client: WireClient, partition: TopicPartition, end: int, options: ReadOptions
    ) -> None:
        self._client = client
        self._partition = partition
        self._end = end
        self._options = options
        self._max_bytes = options.fetch_bytes
        self._has_begun = False  # a fetch has been answered
        self._decoder = BatchDecoder(
            Selection(
                topic=partition.topic,
                partition=partition.partition,
                columns=options.columns,
                end_offset=end,
                keep=options.keep,
                batch_rows=options.batch_rows,
            )
        )

    def read(self, position: int) -> Iterator[pa.RecordBatch]:
        deadline = time.monotonic() + self._options.stall_seconds
        while position < self._end:
            try:
                fetched = self._fetch(position)
            except OffsetsGoneError as error:
                position = self._skip_gap(position, error)
                continue
            self._has_begun = True
            next_position = yield from self._rows(position, fetched)
            if next_position > position:
                position = next_position
                deadline = time.monotonic() + self._options.stall_seconds
            elif fetched.records:
                self._widen(position, len(fetched.records))
            elif time.monotonic() > deadline:
                raise StalledError(self._stall_message(position, fetched))
            elif fetched.high_watermark <= position and self._options.on_gone is not None:
                position = self._skip_end(position, fetched)
        yield from self._decoder.finish()

    def _fetch(self, position: int) -> Fetched:
        options = self._options
        return self._client.fetch(
            self._partition,
            position,
            isolation=options.isolation,
            max_bytes=self._max_bytes,
            wait_ms=options.fetch_wait_ms,
        )

    def _rows(self, position: int, fetched: Fetched) -> Generator[pa.RecordBatch, None, int]:
        """Yield the rows of a fetch; return the next offset to fetch."""
        data = with_slack(fetched.records)
        end = len(fetched.records)
        next_offset = int(offset_after(data, end))
        if position < next_offset < self._end:
            self._client.send_fetch(
                self._partition,
                next_offset,
                isolation=self._options.isolation,
                max_bytes=self._max_bytes,
                wait_ms=self._options.fetch_wait_ms,
            )
        decoder = self._decoder
        decoder.go_to(position)
        try:
            if self._options.isolation is Isolation.READ_COMMITTED:
                decoder.set_aborted(_aborted_transactions(fetched))
            yield from decoder.decode(data, 0, end)
        except CorruptBatchError as error:
            path = f"{self._partition} fetched from offset {position}"
            raise CorruptBatchError(error.reason, error.position, path) from error
        return self._end if decoder.is_done else max(position, decoder.next_offset)

    def _widen(self, position: int, got_bytes: int) -> None:
        """Double the fetch size if not even one batch was whole: the broker enforces its limit."""
        if self._max_bytes >= FRAME_BYTES_MAX // 2:
            where = f"{self._partition}: the batch at offset {position}"
            raise WireError(f"{where} is larger than {self._max_bytes} bytes (got {got_bytes})")
        self._max_bytes *= 2

    def _skip_gap(self, position: int, error: OffsetsGoneError) -> int:
        """Return the offset after lost ones. Raises the error if they may not be lost."""
        is_below = position < error.log_start_offset
        if not (is_below and self._options.from_start and not self._has_begun):
            if self._options.on_gone is None:
                raise error
            self._options.on_gone(error)
        if is_below:
            return min(error.log_start_offset, self._end)
        return self._end  # the log was truncated below `position`

    def _skip_end(self, position: int, fetched: Fetched) -> int:
        """Return the end of the range if the log ends at `position`, else `position`.

        A new leader may know a lower end for a while; it does not list offsets meanwhile (KIP-207).
        """
        end = self._client.offsets({self._partition: LATEST})[self._partition]
        if end > position:
            return position
        error = OffsetsGoneError(self._partition, position, fetched.log_start_offset, end)
        return self._skip_gap(position, error)

    def _stall_message(self, position: int, fetched: Fetched) -> str:
        readable = fetched.readable_end(self._options.isolation)
        return (
            f"{self._partition}: no records from offset {position} on within"
            f" {self._options.stall_seconds:.0f} s; requested [{position}, {self._end}), the log is"
            f" [{fetched.log_start_offset}, {fetched.high_watermark}), readable up to {readable}"
        )


def _aborted_transactions(fetched: Fetched) -> list[TxnIndexEntry]:
    """Return the aborted transactions of a response, each up to its marker, if that is included.

    A response has only their first offsets. The first later marker of the same producer ends a
    transaction; without one, it extends over the rest of the response.
    """
    if not fetched.aborted:
        return []
    producers = {producer for producer, _ in fetched.aborted}
    markers: dict[int, list[int]] = {producer: [] for producer in producers}
    for position, header in walk_headers(fetched.records):
        if not header.is_control or header.producer_id not in producers or not header.record_count:
            continue
        record = _marker(fetched.records, header, position)
        if control_type(record) in (ControlType.ABORT, ControlType.COMMIT):
            markers[header.producer_id].append(record.offset)
    entries = []
    for producer, first in fetched.aborted:
        last = next((at for at in markers[producer] if at >= first), LARGEST_OFFSET)
        entries.append(TxnIndexEntry(producer, first, last, last))
    return entries


def _marker(data: bytes, header: BatchHeader, position: int) -> Record:
    """Return the only record of a control batch; ignore surplus ones."""
    try:
        return next(iterate_records(data, header, position, MARKER_BYTES_MAX))
    except (DecompressionLimitError, UnsupportedCompressionError) as error:
        raise CorruptBatchError(str(error), position) from error
