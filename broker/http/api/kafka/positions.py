"""Positions in a log as requests name them: earliest, latest, an offset or a time."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from broker.http.api.requests import ApiError

_OFFSET: Final = re.compile(r"[0-9]{1,18}", re.ASCII)
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ].*)?|[0-9]{8}(T.*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a log. One field is set; none means the end."""

    is_earliest: bool = False
    offset: int | None = None
    at_ms: int | None = None  # since 1970

    def within(self, start: int, end: int, at_time: int | None) -> int:
        """Return the offset, between the first and the end offset of a log.

        `at_time` is the first record that is not older than the time; None if there is none.
        """
        if self.is_earliest:
            return start
        offset = at_time if self.at_ms is not None else self.offset
        return end if offset is None else min(max(offset, start), end)


def parse_position(text: str, name: str) -> Position:
    """Return a position; a time without a zone is UTC. Raises ApiError 400."""
    if text in ("earliest", "latest"):
        return Position(is_earliest=text == "earliest")
    if _OFFSET.fullmatch(text):
        return Position(offset=int(text))
    try:
        if not _TIME.fullmatch(text):  # `fromisoformat` would take any 20 digits for a time
            raise ValueError
        time = datetime.fromisoformat(text)
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
        return Position(at_ms=max(0, round(time.timestamp() * 1000)))
    except (ValueError, OverflowError):
        raise ApiError(
            400,
            f"{name}: expected earliest, latest, an offset, or a time such as "
            f"2026-11-01T12:00:00Z, not {text[:40]!r}",
        ) from None
