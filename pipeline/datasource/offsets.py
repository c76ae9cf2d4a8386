"""Offset ranges of a read: resolve bounds against the log, split into tasks, limit per trigger.

Rules: a range is [first, end) of one partition. Resolved offsets lie within the log at the time of
the request, or are an error. In a compacted log, offsets are not record counts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeAlias

from pipeline.client.kafka_client import EARLIEST, LATEST, NO_OFFSET, EndOffset, WireClient
from pipeline.client.wire_errors import DATA_LOSS_HINT
from pipeline.datasource.options import (
    AtTime,
    Bound,
    Edge,
    ExplicitOffsets,
    OptionError,
    SourceOptions,
)
from storage.model import TopicPartition

Offsets: TypeAlias = dict[TopicPartition, int]


class DataLossError(Exception):
    """Requested offsets are no longer in the log."""

    def __init__(self, subject: str) -> None:
        super().__init__(
            f"{subject}. Retention may have removed records, or the topic was re-created."
            f"{DATA_LOSS_HINT}"
        )


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Offsets [first, end) of one partition.

    `from_start`: the query begins at the start of the log, and does not name an offset.
    """

    partition: TopicPartition
    first: int
    end: int
    from_start: bool = field(default=False, compare=False)

    @property
    def size(self) -> int:
        """Return the number of offsets; some may have no record."""
        return max(self.end - self.first, 0)


def subscribed_partitions(client: WireClient, options: SourceOptions) -> list[TopicPartition]:
    """Return the partitions subscribed to at present. Raises UnknownTopicError, WireError."""
    subscription = options.subscription
    if subscription.assigned:
        there = client.partitions(sorted({partition.topic for partition in subscription.assigned}))
        missing = [p for p in subscription.assigned if p.partition not in there[p.topic]]
        if missing:
            raise OptionError(f"assign: no such partition: {', '.join(map(str, missing))}")
        return list(subscription.assigned)
    topics: Sequence[str] = subscription.topics
    if subscription.pattern is not None:
        # As in Java's subscribe(Pattern), the whole name must match.
        pattern = re.compile(subscription.pattern)
        topics = [name for name in client.topics() if pattern.fullmatch(name)]
    if not topics:
        return []
    results = client.partitions(topics)
    return sorted(TopicPartition(name, n) for name, numbers in results.items() for n in numbers)


def starting_offsets(
    client: WireClient, options: SourceOptions, partitions: Sequence[TopicPartition]
) -> Offsets:
    """Return the offsets at which reading starts."""
    bound = options.starting
    results = _resolved(client, options, bound, partitions, "startingOffsets")
    unmatched = [partition for partition, offset in results.items() if offset == NO_OFFSET]
    if not unmatched:
        return results
    if not options.latest_if_no_time:
        raise OptionError(
            f"no record at or after the starting time in {', '.join(map(str, unmatched))};"
            " startingOffsetsByTimestampStrategy=latest starts at the end instead"
        )
    return results | client.offsets(dict.fromkeys(unmatched, LATEST), options.isolation)


def begins_at_start(bound: Bound, partition: TopicPartition) -> bool:
    """Return whether a starting bound is the start of the log, wherever that is."""
    if isinstance(bound, ExplicitOffsets):
        return bound.offsets.get(partition) == EARLIEST
    return bound is Edge.EARLIEST


def ending_offsets(
    client: WireClient, options: SourceOptions, partitions: Sequence[TopicPartition]
) -> Offsets:
    """Return the end offsets of a batch. A time after the last record means the end of the log."""
    results = _resolved(client, options, options.ending, partitions, "endingOffsets")
    unmatched = [partition for partition, offset in results.items() if offset == NO_OFFSET]
    return results | client.offsets(dict.fromkeys(unmatched, LATEST), options.isolation)


def latest_offsets(
    client: WireClient, options: SourceOptions, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, EndOffset]:
    """Return the end offsets under the configured isolation level, with their leader epochs."""
    return client.end_offsets(partitions, options.isolation)


def earliest_offsets(client: WireClient, partitions: Iterable[TopicPartition]) -> Offsets:
    """Return the log start offsets."""
    return client.offsets(dict.fromkeys(partitions, EARLIEST))


def _resolved(
    client: WireClient,
    options: SourceOptions,
    bound: Bound,
    partitions: Sequence[TopicPartition],
    name: str,
) -> Offsets:
    if isinstance(bound, Edge):
        when = EARLIEST if bound is Edge.EARLIEST else LATEST
        return client.offsets(dict.fromkeys(partitions, when), options.isolation)
    if isinstance(bound, AtTime):
        if bound.every_ms is not None:
            times = dict.fromkeys(partitions, bound.every_ms)
        else:
            times = dict(_all_named(f"{name}ByTimestamp", bound.each_ms, partitions))
        return client.offsets(times, options.isolation)
    values = dict(_all_named(name, bound.offsets, partitions))
    edges = {p: o for p, o in values.items() if o in (EARLIEST, LATEST)}
    return values | client.offsets(edges, options.isolation)


def _all_named(
    name: str, values: Mapping[TopicPartition, int], partitions: Sequence[TopicPartition]
) -> Mapping[TopicPartition, int]:
    if set(values) != set(partitions):
        missing = sorted(set(partitions) - set(values))
        surplus = sorted(set(values) - set(partitions))
        raise OptionError(
            f"{name} must name exactly the partitions that are read; missing:"
            f" {', '.join(map(str, missing)) or 'none'}, not read:"
            f" {', '.join(map(str, surplus)) or 'none'}"
        )
    return values


def split(ranges: Sequence[Range], options: SourceOptions) -> list[Range]:
    """Split ranges into tasks: one per partition, more for `minPartitions` or a record limit.

    Large ranges are cut and small ones are not merged, as in Spark's source.
    """
    offset_ranges = [offset_range for offset_range in ranges if offset_range.size]
    limit = options.max_records_per_partition
    pieces = [
        piece
        for offset_range in offset_ranges
        for piece in _cut(offset_range, 1 if limit is None else -(-offset_range.size // limit))
    ]
    least = options.min_partitions
    if least is None or len(pieces) >= least:
        return pieces
    total = sum(offset_range.size for offset_range in pieces)
    return [
        piece
        for offset_range in pieces
        for piece in _cut(offset_range, max(1, -(-offset_range.size * least // total)))
    ]


def _cut(whole: Range, count: int) -> list[Range]:
    count = min(count, whole.size)
    bounds = [whole.first + whole.size * n // count for n in range(count + 1)]
    return [replace(whole, first=first, end=end) for first, end in pairwise(bounds)]


def limited(start: Offsets, latest: Offsets, limit: int) -> Offsets:
    """Return end offsets for about `limit` offsets, shared among partitions by their backlog."""
    sizes = {partition: max(end - start[partition], 0) for partition, end in latest.items()}
    total = sum(sizes.values())
    if total <= limit:
        return latest
    ends: Offsets = {}
    for partition, end in latest.items():
        share = limit * sizes[partition] / total
        count = int(share) if share >= 1 else int(share > 0)
        ends[partition] = min(start[partition] + count, max(end, start[partition]))
    return ends


def to_json(offsets: Mapping[TopicPartition, EndOffset]) -> dict[str, dict[str, Any]]:
    """Return offsets in the form of a checkpoint, by topic and partition.

    Each is [offset, leader epoch], or a number without an epoch, as in earlier releases. The order
    is fixed, because Spark compares the text.
    """
    results: dict[str, dict[str, Any]] = {}
    for partition, (offset, epoch) in sorted(offsets.items()):
        value = offset if epoch < 0 else [offset, epoch]
        results.setdefault(partition.topic, {})[str(partition.partition)] = value
    return results


def from_json(offsets: Mapping[str, Any]) -> dict[TopicPartition, EndOffset]:
    """Parse the result of `to_json`."""
    return {
        TopicPartition(topic, int(partition)): EndOffset.parse(value)
        for topic, numbers in offsets.items()
        for partition, value in numbers.items()
    }
