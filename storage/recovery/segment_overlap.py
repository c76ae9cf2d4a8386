"""Check whether the end of a segment contains only copies of records of the following segments.

A swap replaces its first source with the merged segment before it deletes the other sources. If the
journal is lost in between, the merged segment and the other sources have the same records. The
files themselves show this: every record of the merged segment at or above the next base offset is
also in a following segment. These copies can be truncated without losing a record; the swap then
has replaced its first source only.

Rules: a record is a copy if another record has the same offset, producer, key, value, headers and
timestamp. How records are grouped into batches, and how these are compressed, does not matter. A
record that cannot be read is not a copy. This module changes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from storage.env import File
from storage.errors import CorruptBatchError, DecompressionLimitError, UnsupportedCompressionError
from storage.format.batch import Record, iterate_records
from storage.segments.batch_scan import ScannedBatch, scan, verify

UNREADABLE = (CorruptBatchError, DecompressionLimitError, UnsupportedCompressionError)


class _Written(NamedTuple):
    """The fields by which two records with one offset are equal."""

    producer_id: int
    producer_epoch: int
    is_control: bool
    record: Record


class Tail(NamedTuple):
    """The bytes `[position, end_position)` of a log file."""

    file: File
    position: int
    end_position: int


def returns_below(tail: Tail) -> bool:
    """Return whether a later batch of the tail has a lower offset than its first: an error."""
    batches = scan(*tail, whole=False)
    first = next(batches).header
    try:
        return any(batch.header.base_offset <= first.last_offset for batch in batches)
    except CorruptBatchError:
        return False


def why_not_copied(tail: Tail, later: Sequence[File], go_on: Callable[[], None]) -> str:
    """Return why the files `later` do not have all records of `tail`; empty if they do.

    `later` are the log files of the following segments, in order.
    """
    try:
        return _first_difference(_records([tail], go_on), _records(_whole(later), go_on))
    except UNREADABLE as error:
        return str(error)


def _whole(files: Sequence[File]) -> Iterator[Tail]:
    return (Tail(file, 0, file.size()) for file in files)


def _first_difference(records: Iterator[_Written], candidates: Iterator[_Written]) -> str:
    candidate = next(candidates, None)
    for written in records:
        offset = written.record.offset
        while candidate is not None and candidate.record.offset < offset:
            candidate = next(candidates, None)
        if candidate is None or candidate.record.offset > offset:
            return f"no following segment has offset {offset}"
        if candidate != written:
            return f"a following segment has another record at offset {offset}"
    return ""


def _records(
    tails: Sequence[Tail] | Iterator[Tail], go_on: Callable[[], None]
) -> Iterator[_Written]:
    for tail in tails:
        for batch in scan(*tail, whole=True):
            go_on()
            yield from _records_of(batch, tail.file.path)


def _records_of(batch: ScannedBatch, path: str) -> Iterator[_Written]:
    verify(batch, path)
    header = batch.header
    for record in iterate_records(batch.buffer, header, batch.at):
        yield _Written(header.producer_id, header.producer_epoch, header.is_control, record)
