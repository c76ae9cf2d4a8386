"""Repeating what failed for want of file descriptors.

Other programs, or many clients at once, can use up all descriptors for some seconds. An operation
that cannot be undone then waits for one: it does not take its data directory offline, since nothing
is wrong with the device.
"""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from storage.errors import NoRoomError, PartitionFolderError

T = TypeVar("T")
RETRY_SECONDS: Final = 0.5
ATTEMPTS_MAX: Final = 60  # half a minute: longer than a burst of connections


async def run_in_thread(call: Callable[[], T], folder: str) -> T:
    """Run `call` in a thread, and again as long as it raises NoRoomError.

    Raises PartitionFolderError for the partition in `folder` if that lasts too long.
    """
    for attempts_left in reversed(range(ATTEMPTS_MAX)):
        try:
            return await asyncio.to_thread(call)
        except NoRoomError as error:
            if not attempts_left:
                raise PartitionFolderError(
                    folder, f"failed {ATTEMPTS_MAX} times in a row: {error}"
                ) from error
        await asyncio.sleep(RETRY_SECONDS)
    raise AssertionError
