"""Lets the requests of large groups run one after the other.

A request takes time in proportion to the members of its group, a tenth of a millisecond for
LARGE_GROUP of them. Without turns, those of a hundred connections would run in one round of the
event loop.
"""

from collections.abc import Callable, Hashable
from typing import Final
from weakref import WeakValueDictionary

from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import yield_to_loop

LARGE_GROUP: Final = 100  # members


class LargeGroupTurns:
    """The turns of all groups; one request runs in a round of the event loop.

    Owners of groups take turns, and so do the groups of each: who has hundreds of large groups
    delays those of others by one request at a time.
    """

    def __init__(self, owner_of: Callable[[str], Hashable | None]) -> None:
        """`owner_of` returns the owner of a group; a group without one counts as its own."""
        self._owner_of = owner_of
        self._owners = FairSlots(1)
        # By owner, as long as a request waits: whose groups are next.
        self._groups: WeakValueDictionary[Hashable, FairSlots] = WeakValueDictionary()

    async def wait(self, group_id: str, members: int) -> None:
        """Wait for a turn if the group has many members."""
        if members <= LARGE_GROUP:
            return
        owner = self._owner_of(group_id)
        if owner is None:
            owner = group_id
        groups = self._groups.setdefault(owner, FairSlots(1))
        async with groups.slot(group_id), self._owners.slot(owner):
            await yield_to_loop()
