"""Choose the groups that a selective clean rewrites. Pure.

Rules
- Groups are chosen until the rest of the garbage is at most `slack` times the live bytes. The order
  is by the garbage of a group for each byte that is read or written to free it, times a power of
  its age. So a young group waits longer than an old one with as much garbage: more of its records
  will be superseded soon, and then rewriting it frees more.
- A segment with much more gain than its group is a victim of its own: those around it need not be
  copied.
- A group of many segments is merged even if it has no garbage: otherwise a topic with small
  segments would collect files for ever.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

# A group of this many segments is merged. Each byte is copied once for a growth by this factor.
MERGED_SEGMENTS_MIN: Final = 8
# By simulation of uniform, Zipf-distributed and hot keys; 0.15 to 0.35 give about the same. The
# classic choice of log-structured file systems, 1, writes more than 0 here.
AGE_EXPONENT: Final = 0.25
# By simulation of Zipf-distributed keys; 1.25 to 2 give about the same, 1 a third more segments.
SPLIT_GAIN_MIN: Final = 1.5


@dataclass(frozen=True, slots=True)
class GroupLiveness:
    """The content of one group: its bytes, how many of them are alive, and its age."""

    segments: int
    size_bytes: int
    live_bytes: int
    age_offsets: int = 1  # from the middle of the group to the end of the job

    @property
    def gain(self) -> float:
        """Return how much it is worth to rewrite the group; 0 without garbage."""
        garbage = self.size_bytes - self.live_bytes
        age: float = self.age_offsets**AGE_EXPONENT
        return garbage / (self.size_bytes + self.live_bytes) * age if garbage else 0.0


class SizedSegment(Protocol):
    """A segment of a group: a SourceSegment or SegmentFacts."""

    @property
    def base_offset(self) -> int:
        """Return its first possible offset."""
        ...

    @property
    def next_base_offset(self) -> int:
        """Return the base offset of the segment after it."""
        ...

    @property
    def size_bytes(self) -> int:
        """Return the size of its log file."""
        ...


Segment = TypeVar("Segment", bound=SizedSegment)


def split_groups(
    groups: Iterable[Sequence[Segment]], live_bytes: Callable[[Segment], int], end_offset: int
) -> list[Sequence[Segment]]:
    """Return the groups; a segment with much more gain than its group is apart from the others.

    A group that is merged anyway stays whole.
    """

    def gain(segment: Segment) -> float:
        return liveness_of([segment], [live_bytes(segment)], end_offset).gain

    parts: list[Sequence[Segment]] = []
    for group in groups:
        if len(group) >= MERGED_SEGMENTS_MIN:
            parts.append(group)
            continue
        gains = [gain(segment) for segment in group]
        whole = liveness_of(group, map(live_bytes, group), end_offset).gain
        if max(gains) < SPLIT_GAIN_MIN * whole or whole == 0:
            parts.append(group)
            continue
        place = gains.index(max(gains))
        around = group[:place], group[place : place + 1], group[place + 1 :]
        parts += [part for part in around if part]
    return parts


def liveness_of(
    group: Sequence[SizedSegment], live_bytes: Iterable[int], end_offset: int
) -> GroupLiveness:
    """Return the liveness of a group, from the live bytes of each segment and the job's end."""
    middle = (group[0].base_offset + group[-1].next_base_offset) // 2
    return GroupLiveness(
        segments=len(group),
        size_bytes=sum(segment.size_bytes for segment in group),
        live_bytes=sum(live_bytes),
        age_offsets=max(1, end_offset - middle),
    )


def choose_victims(groups: Sequence[GroupLiveness], slack: float) -> list[int]:
    """Return the indexes of the groups to rewrite, ascending."""
    live_bytes = sum(group.live_bytes for group in groups)
    garbage_max = slack * live_bytes
    victims = {i for i, group in enumerate(groups) if group.segments >= MERGED_SEGMENTS_MIN}
    garbage = sum(
        group.size_bytes - group.live_bytes for i, group in enumerate(groups) if i not in victims
    )
    candidates = [
        (-group.gain, i)
        for i, group in enumerate(groups)
        if i not in victims and group.live_bytes < group.size_bytes
    ]
    for _, i in sorted(candidates):
        if garbage <= garbage_max:
            break
        victims.add(i)
        garbage -= groups[i].size_bytes - groups[i].live_bytes
    return sorted(victims)
