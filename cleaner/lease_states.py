"""The states of a lease. Imports no other module of Varve, so that commands start fast."""

from enum import StrEnum
from typing import Final


class LeaseState(StrEnum):
    """The state of one partition within a remote compaction."""

    OPEN = "open"
    ADOPTING = "adopting"
    ADOPTED = "adopted"
    STALE = "stale"
    EXPIRED = "expired"
    INVALID = "invalid"
    ABANDONED = "abandoned"


LIVE_STATES: Final = (LeaseState.OPEN, LeaseState.ADOPTING)  # the partition is still leased
