"""Counters of the daemon; broker/metrics/broker_metrics.py exports them."""

from collections import defaultdict
from collections.abc import Awaitable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TypeVar

from broker.event_loop.gc_pauses import GcPauses
from broker.event_loop.loop_turns import MeasuredTurns
from cleaner.host import Foreground

_T = TypeVar("_T")

LATENCY_BUCKETS = 40  # powers of two of 1 us: up to 6 days
UNSUPPORTED = -1  # the label of every version that this broker does not support
# The exported buckets have the upper bounds 2**n us (64 us to 17 s).
EXPORTED_BITS = (6, 8, 10, 12, 14, 16, 18, 20, 22, 24)
QUANTILES = (0.5, 0.75, 0.95, 0.99, 0.999)


@dataclass(slots=True)
class TopicStats:
    """Traffic of one topic."""

    messages_in: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_rejected: int = 0
    produce_requests: int = 0
    fetch_requests: int = 0
    failed_produce_requests: int = 0
    failed_fetch_requests: int = 0


@dataclass(slots=True)
class RejectStats:
    """Refused batches by reason, over all topics."""

    no_key_compacted_topic: int = 0
    invalid_message_crc: int = 0
    invalid_magic_number: int = 0
    invalid_offset_or_sequence: int = 0
    decompression_limit: int = 0


class LatencyHistogram:
    """Counts in buckets of powers of two of a microsecond; quantiles are exact to a factor of 2."""

    __slots__ = ("buckets", "count", "sum_us")

    def __init__(self) -> None:
        self.buckets = [0] * LATENCY_BUCKETS
        self.count = 0
        self.sum_us = 0

    def add(self, microseconds: int) -> None:
        """Count one request that took `microseconds`."""
        self.buckets[microseconds.bit_length()] += 1
        self.count += 1
        self.sum_us += microseconds

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (upper bound in seconds, count below it) for each exported bound."""
        return [(2**bits / 1e6, sum(self.buckets[: bits + 1])) for bits in EXPORTED_BITS]

    def quantile_ms(self, quantile: float) -> float:
        """Return an upper bound of the quantile in ms; 0 if nothing was counted."""
        requested = quantile * self.count
        seen = 0
        for index, count in enumerate(self.buckets):
            seen += count
            if count and seen >= requested:
                return float(1 << index) / 1000
        return 0.0


@dataclass(slots=True)
class RequestStats:
    """Requests of one API."""

    by_version: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    longest_turn_ns: int = 0  # the longest time that one turn of a request blocked the event loop

    def count(self, version: int, nanoseconds: int) -> None:
        """Count a request that was answered after `nanoseconds`."""
        self.by_version[version] += 1
        self.latency.add(nanoseconds // 1000)

    def note_turn(self, nanoseconds: int) -> None:
        """Record how long one turn blocked the event loop."""
        self.longest_turn_ns = max(self.longest_turn_ns, nanoseconds)


@dataclass(slots=True)
class HttpRouteStats:
    """HTTP requests of one method and route."""

    requests: int = 0
    loop_ns: int = 0  # the time that their turns occupied the event loop
    longest_turn_ns: int = 0

    def note_turn(self, nanoseconds: int) -> None:
        """Record how long one turn blocked the event loop."""
        self.loop_ns += nanoseconds
        self.longest_turn_ns = max(self.longest_turn_ns, nanoseconds)


@dataclass(slots=True)
class AuthenticationCounts:
    """Authentications of one listener with one mechanism."""

    successes: int = 0
    failures: int = 0
    reauthentications: int = 0
    reauthentication_failures: int = 0


@dataclass(slots=True)
class AuthenticationStats:
    """Authentications of all listeners."""

    # By the listener's name and the mechanism.
    by_mechanism: dict[tuple[str, str], AuthenticationCounts] = field(
        default_factory=lambda: defaultdict(AuthenticationCounts)
    )
    expired_connections: int = 0  # closed because their session had expired


@dataclass(slots=True)
class BrokerStats:
    """All counters of the request path."""

    topics: dict[str, TopicStats] = field(default_factory=lambda: defaultdict(TopicStats))
    rejects: RejectStats = field(default_factory=RejectStats)
    requests: dict[str, RequestStats] = field(default_factory=lambda: defaultdict(RequestStats))
    http: dict[tuple[str, str], HttpRouteStats] = field(  # by method and route
        default_factory=lambda: defaultdict(HttpRouteStats)
    )
    damaged_fetches: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by topic
    authentications: AuthenticationStats = field(default_factory=AuthenticationStats)
    errors: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    deleted_topics: TopicStats = field(default_factory=TopicStats)  # their sum
    flushes: LatencyHistogram = field(default_factory=LatencyHistogram)  # of one log each
    # The longest time that one turn of a background task blocked the event loop, by task.
    background_holds_ns: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    gc_pauses: GcPauses = field(default_factory=GcPauses)
    large_requests: int = 0  # requests whose rows are in memory now
    delayed_fetches: int = 0  # fetches that wait for records now
    delayed_produces: int = 0  # produce requests that wait for an fsync now

    async def measured(self, task: str, work: Awaitable[_T]) -> _T:
        """Await the work of a background task and record how long its turns block the loop."""
        self.background_holds_ns.setdefault(task, 0)
        return await MeasuredTurns(work, partial(self._note_background_hold, task))

    def _note_background_hold(self, task: str, nanoseconds: int) -> None:
        self.background_holds_ns[task] = max(self.background_holds_ns[task], nanoseconds)

    def foreground(self) -> Foreground:
        """Return the work done for clients so far, summed over all topics."""
        topics = [*self.topics.values(), self.deleted_topics]
        bytes_in = sum(topic.bytes_in for topic in topics)
        return Foreground(
            requests=sum(topic.produce_requests + topic.fetch_requests for topic in topics),
            bytes=bytes_in + sum(topic.bytes_out for topic in topics),
            bytes_in=bytes_in,
        )

    def drop_topic(self, name: str) -> None:
        """Forget a deleted topic; sums over all topics keep its counts."""
        dropped = self.topics.pop(name, None)
        if dropped is not None:
            for counter in fields(TopicStats):
                total = getattr(self.deleted_topics, counter.name) + getattr(dropped, counter.name)
                setattr(self.deleted_topics, counter.name, total)
