"""Whole searches by timestamp. The broker runs their steps apart, in threads."""

from storage.log.log import Log
from storage.model import TimestampOffset
from storage.segments.timestamp_lookup import Search, TimestampScan


def first_since(log: Log, timestamp_ms: int) -> TimestampOffset | None:
    """Return the first record with at least this timestamp."""
    return _result(log.reader.search_timestamp(timestamp_ms))


def first_of_largest(log: Log) -> TimestampOffset | None:
    """Return the first record with the largest timestamp."""
    return _result(log.reader.search_max_timestamp())


def _result(search: Search) -> TimestampOffset | None:
    result: TimestampOffset | None = None
    try:
        step = next(search)
        while True:
            result = step.find(step.read()) if isinstance(step, TimestampScan) else step.run()
            step = search.send(result)
    except StopIteration as stop:
        last: TimestampOffset | None = stop.value
        return last
