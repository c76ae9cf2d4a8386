"""Pushed-down filters on topic, partition, offset and timestamp.

Rule: a filter counts as applied only if no row that fails it is returned. All other filters go back
to Spark, even if they narrowed the ranges.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from storage.model import TopicPartition

_LARGEST = (1 << 63) - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER_NULL = frozenset(("topic", "partition", "offset", "timestamp", "timestampType"))


@dataclass(slots=True)
class Narrowed:
    """The part of the topics that is left to read."""

    first_offset: int = 0
    end_offset: int = _LARGEST
    first_partition: int = 0
    end_partition: int = _LARGEST
    partitions: set[int] | None = None
    topics: set[str] | None = None
    not_partitions: set[int] = field(default_factory=set)
    from_ms: int | None = None  # earlier rows are not needed

    def push(self, pushed: Filter) -> bool:
        """Apply one filter; return whether Spark can skip it."""
        if isinstance(pushed, Not):
            return self._negated(pushed.child)
        column = pushed.attribute[0] if len(pushed.attribute) == 1 else ""
        if isinstance(pushed, IsNotNull):
            return column in _NEVER_NULL
        value = getattr(pushed, "value", None)
        match column:
            case "offset" | "partition":
                return self._numbers(column, pushed, value)
            case "topic":
                return self._texts(pushed, value)
            case "timestamp":
                self._times(pushed, value)
        return False

    def includes(self, partition: TopicPartition) -> bool:
        """Return whether this partition may have matching rows."""
        number = partition.partition
        return (
            self.first_partition <= number < self.end_partition
            and number not in self.not_partitions
            and (self.partitions is None or number in self.partitions)
            and (self.topics is None or partition.topic in self.topics)
        )

    def _numbers(self, column: str, pushed: Filter, value: Any) -> bool:
        if isinstance(pushed, In):
            numbers = {number for number in pushed.value if number is not None}
            if not all(_is_number(number) for number in numbers):
                return False
            if column == "partition":
                self.partitions = _both(self.partitions, numbers)
                return True
            self._bound(column, min(numbers, default=0), max(numbers, default=-1) + 1)
            return len(numbers) == 0
        if not _is_number(value):
            return False
        match pushed:
            case EqualTo() | EqualNullSafe():
                self._bound(column, value, value + 1)
            case GreaterThan():
                self._bound(column, value + 1, _LARGEST)
            case GreaterThanOrEqual():
                self._bound(column, value, _LARGEST)
            case LessThan():
                self._bound(column, 0, value)
            case LessThanOrEqual():
                self._bound(column, 0, value + 1)
            case _:
                return False
        return True

    def _bound(self, column: str, first: int, end: int) -> None:
        if column == "offset":
            self.first_offset = max(self.first_offset, first)
            self.end_offset = min(self.end_offset, end)
        else:
            self.first_partition = max(self.first_partition, first)
            self.end_partition = min(self.end_partition, end)

    def _texts(self, pushed: Filter, value: Any) -> bool:
        if isinstance(pushed, EqualTo | EqualNullSafe) and isinstance(value, str):
            self.topics = _both(self.topics, {value})
            return True
        if isinstance(pushed, In) and all(isinstance(name, str | None) for name in pushed.value):
            self.topics = _both(self.topics, {name for name in pushed.value if name is not None})
            return True
        return False

    def _times(self, pushed: Filter, value: Any) -> None:
        """Narrow the start only: later records may have earlier timestamps."""
        if not isinstance(pushed, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual):
            return
        if not isinstance(value, datetime) or value.tzinfo is None:
            return
        if value >= _EPOCH:  # negative times have a special meaning in ListOffsets
            self.from_ms = max(self.from_ms or 0, (value - _EPOCH) // timedelta(milliseconds=1))

    def _negated(self, child: Filter) -> bool:
        named = isinstance(child, EqualTo) and child.attribute == ("partition",)
        if named and _is_number(child.value):
            self.not_partitions.add(child.value)
            return True
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _both(before: set[Any] | None, value: set[Any]) -> set[Any]:
    return value if before is None else before & value
