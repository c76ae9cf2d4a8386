"""Resolve the offsets of a snapshot from requested offsets or a requested time.

Rules
- An offset is exclusive: the state as of 12 has the records with offsets below 12. The state as of
  a time has the records before the first later record.
- If later records removed records below an offset, the state as of it is gone. The request is
  refused, or with `nearest` moved to the earliest state that is left.
- If offsets are missing before the first later record that is left, a missing record may have been
  the first later one. So the state as of a time is requested as of the offset after the last record
  of that time or before. If the record there is missing and a clean has reached it, that state is
  gone: the missing record may also have been of that time or before. If no record of that time or
  before is left, the state is requested as of the last offset before the log start.
- Times are taken to ascend in each partition. If they go back, a removed record anywhere below may
  have been the first later one, and nothing that is left shows it.
- A transaction marker is a record with the time at which the transaction ended.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from admin.client import ApiClient
from cleaner.job import CleanJob
from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.kafka_client import NO_OFFSET, Isolation, WireClient
from pipeline.client.topics import TopicBounds, read_offsets
from pipeline.compaction.indexing import index_partitions
from pipeline.errors import JobError
from pipeline.stages.planning import source_segments
from pipeline.tables.state import Reading, below, fetch_cleaned_end_offset, lacks_offsets
from storage.format.batch import decode_records, walk_headers
from storage.model import TopicPartition

TIME_DIGITS: Final = 18  # of ms, which are 64 bits
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Moved:
    """A partition whose state as of `requested` is gone; `taken` is the offset used instead."""

    partition: int
    requested: int
    taken: int


@dataclass(frozen=True, slots=True)
class TimeOffsets:
    """The offset of each partition as of a time; `missing`: partitions without a record there."""

    offsets: dict[int, int]
    missing: frozenset[int]


def parse_offsets(text: str, partitions: Sequence[int]) -> dict[int, int]:
    """Parse the offsets of all partitions from JSON or @FILE. Raises JobError (USAGE)."""
    results = read_offsets(text, partitions)
    if missing := sorted(set(partitions) - set(results)):
        raise JobError(
            f"no offset for partition {missing[0]}; add it, or select partitions with --partitions",
            exit_codes.USAGE,
        )
    return results


def parse_time(text: str) -> int:
    """Parse a time to ms: ISO 8601 (UTC without a zone) or ms since 1970. Raises JobError."""
    refused = JobError(
        f"expected a time such as 2026-05-01T12:00:00Z or ms since 1970, not {text[:60]!r}",
        exit_codes.USAGE,
    )
    if text.isascii() and text.isdecimal():
        if len(text) > TIME_DIGITS:
            raise refused
        return int(text)
    try:
        result = datetime.fromisoformat(text)
    except ValueError:
        raise refused from None
    if result.tzinfo is None:
        result = result.replace(tzinfo=UTC)
    if result < _EPOCH:  # negative timestamps have a special meaning in ListOffsets
        raise refused
    return (result - _EPOCH) // timedelta(milliseconds=1)  # integer arithmetic keeps every ms


def offsets_as_of_time(
    cluster: Cluster, topic: str, bounds: TopicBounds, time_ms: int
) -> TimeOffsets:
    """Return the offset of each partition's first record after a time, or its end offset.

    If that record may have been removed, return the first offset that it can have had, or an offset
    below the log start. Raises WireError, CorruptBatchError.
    """
    places = [TopicPartition(topic, number) for number in bounds.end]
    with WireClient(cluster) as client:
        results = client.offsets(dict.fromkeys(places, time_ms + 1), Isolation.READ_COMMITTED)
        offsets, missing = {}, set[int]()
        for partition, offset in results.items():
            number = partition.partition
            first, end = bounds.first[number], bounds.end[number]
            later = end if offset == NO_OFFSET else min(offset, end)
            offsets[number], is_missing = _first_later(client, partition, first, later, time_ms)
            if is_missing:
                missing.add(number)
    return TimeOffsets(offsets, frozenset(missing))


def _first_later(
    client: WireClient, partition: TopicPartition, first: int, later: int, time_ms: int
) -> tuple[int, bool]:
    """Return the lowest offset that the first record after a time can have had.

    Return also whether a record between two that are left is missing there. `later` is the offset
    of the first later record that is left, or the end of the log.
    """
    if later <= first:
        return max(0, first - 1), False
    is_missing = False  # an offset between the last record of that time or before and `later`
    above = later  # the lowest record left so far
    begin, count = later, 1
    while begin > first:
        begin, end = max(first, later - count), begin
        count *= 2  # the log may have a large gap
        for offset, at_ms in reversed(list(_records_left(client, partition, begin, end))):
            is_missing = is_missing or offset + 1 < above
            if at_ms is None or at_ms <= time_ms:
                return (offset + 1, offset + 1 < above) if is_missing else (later, False)
            above = offset
    if first > 0:
        return first - 1, False
    # The state as of 0 is empty, and never gone.
    return (1 if above > 0 else later), False


def _records_left(
    client: WireClient, partition: TopicPartition, begin: int, end: int
) -> Iterator[tuple[int, int | None]]:
    """Yield the offset of each record in [begin, end), and the time if it is a marker."""
    position = begin
    while position < end:
        before = position
        data = client.fetch(partition, position).records
        for at, header in walk_headers(data):
            offsets: Sequence[int] = range(header.base_offset, header.next_offset)
            if header.record_count != len(offsets):
                offsets = [record.offset for record in decode_records(data, header, at)]
            time_ms = header.base_timestamp if header.is_control else None
            yield from ((offset, time_ms) for offset in offsets if before <= offset < end)
            position = max(position, header.next_offset)
        if position == before:
            return  # no further batch


def check_offsets(
    reading: Reading,
    client: ApiClient,
    bounds: TopicBounds,
    requested: Mapping[int, int],
    *,
    missing: Collection[int] = (),
    nearest: bool,
) -> tuple[dict[int, int], list[Moved]]:
    """Check that the states as of these offsets exist; return the offsets to use and those moved.

    `missing`: see TimeOffsets. Call this while the lease is open. Raises JobError.
    """
    topic = reading.lease.plan.topic
    jobs = {
        planned.job.partition.partition: planned.job for planned in reading.lease.plan.partitions
    }
    # Before the indexing, which takes long: later cleans remove nothing from the leased segments.
    cleaned = {
        number: fetch_cleaned_end_offset(client, topic, number)
        for number, job in jobs.items()
        if number in requested and job.groups
    }
    used, moved, refused = dict(requested), [], []
    for number, offset in sorted(requested.items()):
        where = f"{topic}-{number}"
        job, is_missing = jobs.get(number), number in missing
        first, end = bounds.first[number], bounds.end[number]
        last = end  # as of which the state exists in any case
        if job is not None:  # records may have come and gone between the bounds and the lease
            first, last = max(first, job.log_start_offset), max(end, job.end_offset)
        if offset > end:
            raise JobError(
                f"{where} as of {offset}: its last stable offset is {end}", exit_codes.USAGE
            )
        earliest = _earliest(reading, job, cleaned.get(number), offset, is_missing=is_missing)
        earliest = max(first, earliest)
        if earliest <= offset:
            continue
        if nearest:
            used[number] = min(earliest, last)
            moved.append(Moved(number, offset, used[number]))
            continue
        why = (
            f"its log starts at offset {first}"
            if offset < first
            else f"it was compacted up to offset {earliest}, which removed earlier records"
        )
        refused.append(f"the state of {where} as of {offset} is gone: {why}")
    if refused:
        hint = "; use --nearest to take the earliest state that is left"
        raise JobError("; ".join(refused) + hint * (not nearest), exit_codes.FAILED)
    return used, moved


def _earliest(
    reading: Reading, job: CleanJob | None, cleaned: int | None, offset: int, *, is_missing: bool
) -> int:
    """Return the earliest offset at or after `offset` whose state is complete.

    `cleaned` is the end of all cleans, or None if it is unknown. `is_missing`: the record at the
    offset is, and the state is needed with it and without it.
    """
    if job is None or not job.groups:
        return offset
    if cleaned is not None and cleaned <= offset:
        return offset
    if is_missing:
        return job.end_offset if cleaned is None else cleaned
    # Segments with offsets below: if none of their offsets is missing, nothing was removed.
    edges = [source.next_base_offset for source in source_segments(job)]
    edge = next((edge for edge in edges if edge >= offset), edges[-1])
    prefix = below(job, edge)
    if prefix is None or offset <= job.log_start_offset:
        return offset
    source = reading.lease.source(reading.transport)
    (index,) = index_partitions(
        reading.engine, [prefix], lambda _: source, reading.limits, progress=reading.reporter
    )
    if not lacks_offsets(prefix, index.counts):
        return offset
    return job.end_offset if cleaned is None else cleaned


def offsets_text(offsets: Mapping[int, int]) -> str:
    """Format offsets for `parse_offsets`."""
    return json.dumps({str(number): offset for number, offset in sorted(offsets.items())})
