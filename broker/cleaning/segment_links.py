"""Linking segments of a log that retention may remove, or the cleaner replace, meanwhile."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")

ATTEMPTS: Final = 5  # each plans anew, so only a log that changes all the time needs more than two


class SegmentsReplacedError(Exception):
    """The cleaner replaced segments while they were linked."""


async def retry_links(link: Callable[[bool], Awaitable[T]]) -> T:
    """Return the result of `link(is_last)`; call it again if a segment was removed or replaced.

    `link` plans, links, and removes its links if it fails. Raises SegmentsReplacedError,
    FileNotFoundError, and what `link` raises.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await link(False)
        except (FileNotFoundError, SegmentsReplacedError):
            continue
    return await link(True)
