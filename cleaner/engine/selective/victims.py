"""Choose the groups that a selective clean rewrites. Pure.

Rules
- Groups are chosen by their live fraction, the lowest first, until the rest of the garbage is at
  most `slack` times the live bytes. So every byte that is written again frees as many bytes as
  possible.
- A group of many segments is merged even if it has no garbage: otherwise a topic with small
  segments would collect files for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# A group of this many segments is merged. Each byte is copied once for a growth by this factor.
MERGED_SEGMENTS_MIN: Final = 8


@dataclass(frozen=True, slots=True)
class GroupLiveness:
    """The content of one group: its bytes, and how many of them are alive."""

    segments: int
    size_bytes: int
    live_bytes: int


def choose_victims(groups: Sequence[GroupLiveness], slack: float) -> list[int]:
    """Return the indexes of the groups to rewrite, ascending."""
    live_bytes = sum(group.live_bytes for group in groups)
    garbage_max = slack * live_bytes
    victims = {i for i, group in enumerate(groups) if group.segments >= MERGED_SEGMENTS_MIN}
    garbage = sum(
        group.size_bytes - group.live_bytes for i, group in enumerate(groups) if i not in victims
    )
    candidates = [
        (group.live_bytes / group.size_bytes, i)
        for i, group in enumerate(groups)
        if i not in victims and group.live_bytes < group.size_bytes
    ]
    for _, i in sorted(candidates):
        if garbage <= garbage_max:
            break
        victims.add(i)
        garbage -= groups[i].size_bytes - groups[i].live_bytes
    return sorted(victims)
