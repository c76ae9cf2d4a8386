"""When the open parts of erasures are expected to be done, and which of them are at risk. Pure.

Rules
- A part is the work of an erasure in one partition: searches of its files, and a clean, at the
  present rates. Parts take turns in the order of their deadlines.
- An obstacle that ends by itself delays a part until then. With any other obstacle, such as a
  pause, a part has no expected end.
- A part is at risk as soon as the forecast says that it will miss its deadline.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


class Risk(Enum):
    """Why a part is expected to miss its deadline."""

    OVERDUE = "overdue"  # the deadline has passed
    OBSTACLE = "obstacle"  # it waits for something that does not end in time, or not by itself
    RATE = "rate"  # there is too much to read and write before the deadline


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something that keeps a part from going on. Time in wall ms; None: it has no known end."""

    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionWork:
    """What is left to do for a part: bytes to read and write, and what it waits for."""

    deadline_ms: int
    read_bytes: int
    write_bytes: int
    read_rate: float  # bytes per second
    write_rate: float
    obstacle: Obstacle | None = None

    @property
    def seconds(self) -> float:
        """Return the time that the work takes at the present rates."""
        return self.read_bytes / self.read_rate + self.write_bytes / self.write_rate


@dataclass(frozen=True, slots=True)
class Forecast:
    """When a part is expected to be done (wall ms; None: not at all), and why that is too late."""

    expected_ms: int | None
    risk: Risk | None


def forecast(parts: Iterable[PartitionWork], now_ms: int) -> Iterator[Forecast]:
    """Yield the forecast of each part; `parts` are in the order of their turns."""
    busy_until_ms = float(now_ms)
    for part in parts:
        begin_ms = busy_until_ms
        if part.obstacle is not None:
            if part.obstacle.until_ms is None:
                risk = Risk.OVERDUE if now_ms > part.deadline_ms else Risk.OBSTACLE
                yield Forecast(None, risk)
                continue  # the others do not wait for it
            begin_ms = max(begin_ms, part.obstacle.until_ms)
        expected_ms = int(begin_ms + 1000 * part.seconds)
        busy_until_ms += 1000 * part.seconds
        yield Forecast(expected_ms, _risk(part, expected_ms, now_ms))


def _risk(part: PartitionWork, expected_ms: int, now_ms: int) -> Risk | None:
    if now_ms > part.deadline_ms:
        return Risk.OVERDUE
    if expected_ms <= part.deadline_ms:
        return None
    until_ms = None if part.obstacle is None else part.obstacle.until_ms
    if until_ms is not None and until_ms + 1000 * part.seconds > part.deadline_ms:
        return Risk.OBSTACLE
    return Risk.RATE


def work_left(
    log_bytes: int, rewritten_bytes: int, *, is_searched: bool, share_searched: float
) -> tuple[int, int]:
    """Return the bytes that are left to read and to write.

    Before the first search, every segment may have a value of the key. A clean reads the whole log
    once, to decide its keys, and rewrites the segments with a value.
    """
    if not is_searched:
        return int(log_bytes * (1 - share_searched)) + 3 * log_bytes, log_bytes
    if not rewritten_bytes:
        return int(log_bytes * (1 - share_searched)), 0
    return 2 * log_bytes + rewritten_bytes, rewritten_bytes
