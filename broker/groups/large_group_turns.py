"""Lets the requests of large groups run one after the other.

A request takes time in proportion to the members of its group, a tenth of a millisecond for
LARGE_GROUP of them. Without turns, those of a hundred connections would run in one round of the
event loop.
"""

from typing import Final

from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import yield_to_loop

LARGE_GROUP: Final = 100  # members


class LargeGroupTurns:
    """The turns of all groups; one request runs in a round of the event loop, by group."""

    def __init__(self) -> None:
        self._turns = FairSlots(1)

    async def wait(self, group_id: str, members: int) -> None:
        """Wait for a turn if the group has many members."""
        if members > LARGE_GROUP:
            async with self._turns.slot(group_id):
                await yield_to_loop()
