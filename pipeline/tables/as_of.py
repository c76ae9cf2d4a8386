"""As of which offsets a topic can be read: from offsets or a time that somebody asks for.

Rules
- An offset is exclusive: the state as of 12 is made of the records with offsets below 12. As of a
  time it is made of what stands before the first record that is later.
- Where records below an offset were removed because of later ones, the state as of it is gone: it
  is refused with the earliest that can still be had, or that is taken where it was asked for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from admin.client import ApiClient
from cleaner.job import CleanJob
from config import exit_codes
from pipeline.client.kafka_client import NO_OFFSET, Isolation, WireClient
from pipeline.client.topics import TopicBounds, read_offsets
from pipeline.compaction.indexing import index_partitions
from pipeline.errors import JobError
from pipeline.stages.planning import source_segments
from pipeline.tables.state import Reading, below, fetch_cleaned_offset, lacks_offsets
from storage.model import TopicPartition

TIME_DIGITS: Final = 18  # of ms, which are 64 bits
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Moved:
    """A partition whose state as of `asked` is gone, and was taken as of `taken`."""

    partition: int
    asked: int
    taken: int


def parse_offsets(text: str, partitions: Sequence[int]) -> dict[int, int]:
    """Offsets by partition, of all of them: JSON, or the path of a file with it. Raises JobError
    (USAGE)."""
    value = text if text.lstrip().startswith("{") or text.startswith("@") else f"@{text}"
    results = read_offsets(value, partitions)
    if missing := sorted(set(partitions) - set(results)):
        raise JobError(
            f"the offsets name no partition {missing[0]}; --partitions leaves some out",
            exit_codes.USAGE,
        )
    return results


def parse_time(text: str) -> int:
    """A time in ms: ISO 8601, in UTC where it names no zone, or ms since 1970. Raises JobError."""
    refused = JobError(
        f"a time is such as 2026-05-01T12:00:00Z, or ms since 1970, not {text[:60]!r}",
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
    if result < _EPOCH:  # below 0 the protocol has no times, but names of places
        raise refused
    return (result - _EPOCH) // timedelta(milliseconds=1)  # as whole numbers: not a ms is lost


def offsets_as_of_time(
    bootstrap: str, topic: str, bounds: TopicBounds, time_ms: int
) -> dict[int, int]:
    """The first offset of each partition whose record is later; its end where none is. Raises
    WireError."""
    places = [TopicPartition(topic, number) for number in bounds.end]
    with WireClient(bootstrap) as client:
        results = client.offsets(dict.fromkeys(places, time_ms + 1), Isolation.READ_COMMITTED)
    return {
        partition.partition: bounds.end[partition.partition]
        if offset == NO_OFFSET
        else min(max(offset, bounds.first[partition.partition]), bounds.end[partition.partition])
        for partition, offset in results.items()
    }


def check_offsets(
    reading: Reading,
    client: ApiClient,
    bounds: TopicBounds,
    requested: Mapping[int, int],
    *,
    nearest: bool,
) -> tuple[dict[int, int], list[Moved]]:
    """See that the state as of these offsets can be had -> as of which it is taken, and what moved.

    To be asked when the run is open. Raises JobError.
    """
    topic = reading.run.plan.topic
    jobs = {planned.job.partition.partition: planned.job for planned in reading.run.plan.partitions}
    used, moved, refused = dict(requested), [], []
    for number, offset in sorted(requested.items()):
        where = f"{topic}-{number}"
        first, end = bounds.first[number], bounds.end[number]
        if offset > end:
            raise JobError(
                f"{where} as of {offset}: what is decided of it ends at {end}", exit_codes.USAGE
            )
        earliest = max(first, _earliest(reading, client, jobs.get(number), number, offset))
        if earliest <= offset:
            continue
        if nearest and earliest <= end:
            used[number] = earliest
            moved.append(Moved(number, offset, earliest))
            continue
        why = (
            f"its log begins at {first}"
            if offset < first
            else f"it was compacted up to {earliest}, and what stood below {offset} then was merged"
        )
        refused.append(f"{where} as of {offset} is gone: {why}")
    if refused:
        hint = "; --nearest takes the earliest state that can be had"
        raise JobError("; ".join(refused) + hint * (not nearest), exit_codes.FAILED)
    return used, moved


def _earliest(
    reading: Reading, client: ApiClient, job: CleanJob | None, number: int, offset: int
) -> int:
    """The earliest offset at or behind `offset` whose state is whole."""
    if job is None or not job.groups:
        return offset
    topic = reading.run.plan.topic
    cleaned = fetch_cleaned_offset(client, topic, number)
    if cleaned is not None and cleaned <= offset:
        return offset
    # The segments with any of the offsets below: where they lack none, nothing was removed.
    edges = [source.next_base_offset for source in source_segments(job)]
    edge = next((edge for edge in edges if edge >= offset), edges[-1])
    prefix = below(job, edge)
    if prefix is None or offset <= job.log_start_offset:
        return offset
    source = reading.run.source(reading.transport)
    (index,) = index_partitions(
        reading.engine, [prefix], lambda _: source, reading.limits, progress=reading.reporter
    )
    if not lacks_offsets(prefix, index.counts):
        return offset
    # Of a topic that is not compacted any more nobody knows how far it was.
    return job.end_offset if cleaned is None else cleaned


def offsets_text(offsets: Mapping[int, int]) -> str:
    """Offsets as `parse_offsets` takes them."""
    return json.dumps({str(number): offset for number, offset in sorted(offsets.items())})
