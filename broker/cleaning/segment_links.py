"""Hard links to segments, for leases and views that read them while the log changes.

Meanwhile retention may remove the segments, and the cleaner may replace them.

Rules
- Segments are linked between two swaps of the cleaner. If a swap begins meanwhile, they are planned
  and linked again: a mixture of old and new segments could bring deleted keys back.
- If retention removes a segment before it is linked, the remaining ones are planned again.
- An attempt that fails leaves no links.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Final, Protocol, TypeVar

from broker.topics.partition import Partition
from storage.model import TopicPartition

T = TypeVar("T")

ATTEMPTS: Final = 5  # each plans again, so only a log that changes all the time needs more than two


class SegmentsReplacedError(Exception):
    """The cleaner replaced segments while they were linked, or did not end doing so in time."""


class Swaps(Protocol):
    """The swaps of all logs: broker/cleaning/cleaner_host.py."""

    async def wait_for_swap(self, partition: Partition) -> bool:
        """Wait until the partition has no running swap; return False if that takes too long."""
        ...

    async def load_job_inputs(self, partition: TopicPartition) -> bool:
        """Read into memory what a plan needs of the log; see cleaner/host.py."""
        ...

    def stable_segments(self, partition: TopicPartition) -> AbstractContextManager[None]:
        """Raise SegmentsReplacedError at the end of the block if a swap began meanwhile."""
        ...


async def link_between_swaps(
    swaps: Swaps,
    partition: Partition,
    *,
    attempt: Callable[[bool], AbstractAsyncContextManager[None]],
    begin: Callable[[], T | None],
    link: Callable[[T], Awaitable[None]],
    discard: Callable[[T], Awaitable[None]],
) -> T | None:
    """Return what `begin` planned, with its segments linked; None if `begin` has nothing to do.

    `attempt(is_last)` surrounds each attempt. `begin` plans and creates the folder in the turn of
    the event loop in which no swap runs, so it does not wait. `link` links the planned segments,
    and `discard` removes what `begin` and `link` created.

    Raises SegmentsReplacedError, FileNotFoundError, and what the functions raise.
    """
    for number in range(1, ATTEMPTS + 1):
        is_last = number == ATTEMPTS
        async with attempt(is_last):
            await _wait_for_inputs(swaps, partition)
            try:
                planned = begin()
                if planned is None:
                    return None
                try:
                    with swaps.stable_segments(partition.partition):
                        await link(planned)
                except BaseException:
                    await discard(planned)
                    raise
            except (FileNotFoundError, SegmentsReplacedError):
                if is_last:
                    raise
            else:
                return planned
    raise AssertionError("the last attempt returns or raises")


async def _wait_for_inputs(swaps: Swaps, partition: Partition) -> None:
    """Return in a turn of the event loop in which no swap runs and the inputs are in memory.

    Raises SegmentsReplacedError.
    """
    for _ in range(ATTEMPTS):
        await _wait_for_swap(swaps, partition)
        if not await swaps.load_job_inputs(partition.partition):
            return  # no other task has run
    # The inputs cannot be read: whoever plans with them finds out.
    await _wait_for_swap(swaps, partition)


async def _wait_for_swap(swaps: Swaps, partition: Partition) -> None:
    if not await swaps.wait_for_swap(partition):
        raise SegmentsReplacedError(
            f"the cleaner is replacing segments of {partition.partition}: try again"
        )
