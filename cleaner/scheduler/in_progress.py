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
    is_busy,
    past_of,
    transition,
)
from storage.model import TopicPartition

# Transitions remembered over all partitions: some minutes of a busy cleaner, a few hundred KB.
STORY_ENTRIES = 1000


@dataclass(frozen=True, slots=True)
class TransitionRecord:
    """One transition, and when it happened (wall clock ms, for people only)."""

    at_ms: int
    partition: TopicPartition
    before: State
    event: Event
    after: State
    effects: tuple[Effect, ...]


class CleanerRegistry:
    """Partition -> state, by events only."""

    def __init__(self, transitions_max: int = STORY_ENTRIES) -> None:
        self._states: dict[TopicPartition, State] = {}
        self._transitions: deque[TransitionRecord] = deque(maxlen=transitions_max)

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
            self._transitions.append(
                TransitionRecord(at_ms, partition, before, event, after, effects)
            )
        return effects

    def transitions(self, partition: TopicPartition | None = None) -> list[TransitionRecord]:
        """The last transitions, oldest first: of one partition, or of all."""
        return [e for e in self._transitions if partition is None or e.partition == partition]

    def in_progress(self) -> dict[TopicPartition, State]:
        """A copy of the map: every partition that is not idle."""
        return dict(self._states)

    def busy_partitions(self) -> Iterator[TopicPartition]:
        """Partitions whose files a worker or a journal has."""
        return (partition for partition, state in self._states.items() if is_busy(state))

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
                    assert pauses >= 1, (partition, self.transitions(partition))
                case Adopting(pauses):
                    assert pauses >= 1, (partition, self.transitions(partition))
                case Aborting(pauses):
                    assert pauses >= 0, (partition, self.transitions(partition))
                case Quarantined() | Cleaning() | Publishing():
                    pass
            mark = past_of(state)
            assert mark is None or mark.failures >= 1, (partition, self.transitions(partition))
