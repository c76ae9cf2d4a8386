"""The summary of a group for ListGroups, the HTTP API and metrics."""

from dataclasses import dataclass
from enum import StrEnum


class GroupType(StrEnum):
    """The protocol of a group's members, as Kafka 4.3 spells it."""

    CLASSIC = "classic"
    CONSUMER = "consumer"


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group; `state` is Kafka's name of its state."""

    group_id: str
    type: GroupType
    protocol_type: str
    state: str
    members: int
