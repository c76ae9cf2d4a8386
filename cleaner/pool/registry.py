"""The in-progress map: every partition that is not idle, and how it got there.

Rule 1. `apply` is the only way in, and only the event loop calls it: no locks.
Rule 2. Idle is never stored; a partition without an entry is idle.
Rule 3. A quarantine is part of the state, so that it cannot outlive or miss a transition.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from cleaner.states import (
    IDLE,
    Aborting,
    Adopting,
    Cleaning,
    Effect,
    Event,
    Idle,
    Paused,
    Publishing,
    Quarantined,
    State,
    held,
    past_of,
    transition,
)
from storage.model import TopicPartition

# Transitions remembered over all partitions: some minutes of a busy cleaner, a few hundred KB.
STORY_ENTRIES = 1000


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """One transition, and when it happened (wall clock ms, for people only)."""

    at_ms: int
    partition: TopicPartition
    before: State
    event: Event
    after: State
    effects: tuple[Effect, ...]


class CleanerRegistry:
    """Partition -> state, by events only."""

    def __init__(self, story_entries: int = STORY_ENTRIES) -> None:
        self._states: dict[TopicPartition, State] = {}
        self._story: deque[StoryEntry] = deque(maxlen=story_entries)

    def state(self, partition: TopicPartition) -> State:
        """The partition's present state; Idle for one never heard of."""
        return self._states.get(partition, IDLE)

    def apply(self, partition: TopicPartition, event: Event, at_ms: int = 0) -> tuple[Effect, ...]:
        """Change the partition's state; what has to be done now. Raises IllegalTransitionError."""
        before = self.state(partition)
        after, effects = transition(before, event)
        if isinstance(after, Idle):
            self._states.pop(partition, None)
        else:
            self._states[partition] = after
        if after != before or effects:
            self._story.append(StoryEntry(at_ms, partition, before, event, after, effects))
        return effects

    def story(self, partition: TopicPartition | None = None) -> list[StoryEntry]:
        """The last transitions, oldest first: of one partition, or of all."""
        return [e for e in self._story if partition is None or e.partition == partition]

    def in_progress(self) -> dict[TopicPartition, State]:
        """A copy of the map: every partition that is not idle."""
        return dict(self._states)

    def holding(self) -> Iterator[TopicPartition]:
        """Partitions whose files a worker or a journal has."""
        return (partition for partition, state in self._states.items() if held(state))

    def quarantines(self) -> dict[TopicPartition, Quarantined]:
        """Partitions with failures behind them, also while paused or tried again."""
        marks = {partition: past_of(state) for partition, state in self._states.items()}
        return {partition: mark for partition, mark in marks.items() if mark is not None}

    def validate(self) -> None:
        """Assert what always holds; the message carries the story of the offender."""
        for partition, state in self._states.items():
            match state:
                case Idle():
                    raise AssertionError(f"{partition}: idle is stored")
                case Paused(pauses):
                    assert pauses >= 1, (partition, self.story(partition))
                case Adopting(pauses):
                    assert pauses >= 1, (partition, self.story(partition))
                case Aborting(pauses):
                    assert pauses >= 0, (partition, self.story(partition))
                case Quarantined() | Cleaning() | Publishing():
                    pass
            mark = past_of(state)
            assert mark is None or mark.failures >= 1, (partition, self.story(partition))
