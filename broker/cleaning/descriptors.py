"""Retries of operations that failed because no file descriptor was available.

Other programs, or many clients at once, can use up all descriptors for some seconds. An operation
that cannot be undone waits for one instead of taking its data directory offline, because nothing is
wrong with the device.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from storage.errors import NoRoomError, PartitionFolderError

T = TypeVar("T")
RETRY_SECONDS: Final = 0.5
ATTEMPTS_MAX: Final = 60  # half a minute: longer than a burst of connections


async def run_in_thread(
    call: Callable[[], T],
    folder: str,
    run: Callable[[Callable[[], T]], Awaitable[T]] = asyncio.to_thread,
) -> T:
    """Run `call` in a thread; repeat it while it raises NoRoomError, up to ATTEMPTS_MAX times.

    After that, raise PartitionFolderError for the partition in `folder`. `run` runs it in a thread.
    """
    for attempts_left in reversed(range(ATTEMPTS_MAX)):
        try:
            return await run(call)
        except NoRoomError as error:
            if not attempts_left:
                raise PartitionFolderError(
                    folder, f"failed {ATTEMPTS_MAX} times in a row: {error}"
                ) from error
        await asyncio.sleep(RETRY_SECONDS)
    raise AssertionError
