"""The in-progress map: the state of every partition that is not idle, and its transitions.

Rule 1. Only `apply` changes a state, and only the event loop calls it: no locks are needed.
Rule 2. Idle is never stored: a partition without an entry is idle.
Rule 3. A quarantine is part of the state, so every transition must deal with it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

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

# Transitions kept over all partitions: some minutes of a busy cleaner, a few hundred KB.
TRANSITIONS_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class TransitionRecord:
    """One transition, its wall time in ms and why it was requested, for operators."""

    at_ms: int
    partition: TopicPartition
    before: State
    event: Event
    after: State
    effects: tuple[Effect, ...]
    reason: str  # empty if the event says it


class InProgressMap:
    """The state of each partition; only events change it."""

    def __init__(self, transitions_max: int = TRANSITIONS_MAX) -> None:
        self._states: dict[TopicPartition, State] = {}
        self._quarantines: dict[TopicPartition, Quarantined] = {}  # in these states
        self._transitions: deque[TransitionRecord] = deque(maxlen=transitions_max)

    def state(self, partition: TopicPartition) -> State:
        """Return the partition's state; Idle for an unknown partition."""
        return self._states.get(partition, IDLE)

    def apply(
        self, partition: TopicPartition, event: Event, at_ms: int = 0, reason: str = ""
    ) -> tuple[Effect, ...]:
        """Change the partition's state and return the effects. Raises IllegalTransitionError."""
        before = self.state(partition)
        after, effects = transition(before, event)
        if isinstance(after, Idle):
            self._states.pop(partition, None)
        else:
            self._states[partition] = after
        quarantine = past_of(after)
        if quarantine is None:
            self._quarantines.pop(partition, None)
        else:
            self._quarantines[partition] = quarantine
        if after != before or effects:
            self._transitions.append(
                TransitionRecord(at_ms, partition, before, event, after, effects, reason)
            )
        return effects

    def transitions(self, partition: TopicPartition | None = None) -> list[TransitionRecord]:
        """Return the last transitions of one partition or of all, oldest first."""
        return [record for record in self._transitions if partition in (None, record.partition)]

    def states(self) -> dict[TopicPartition, State]:
        """Return a copy of the map."""
        return dict(self._states)

    def busy_partitions(self) -> Iterator[TopicPartition]:
        """Return the partitions whose files a worker or a journal owns."""
        return (partition for partition, state in self._states.items() if is_busy(state))

    def quarantines(self) -> dict[TopicPartition, Quarantined]:
        """Return all quarantines, also of partitions that are paused or being retried."""
        return dict(self._quarantines)

    def validate(self) -> None:
        """Assert the invariants; a failure shows the transitions of the partition."""
        assert self._quarantines.keys() <= self._states.keys(), self._quarantines
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
            quarantine = past_of(state)
            assert quarantine == self._quarantines.get(partition), partition
            assert quarantine is None or quarantine.failures >= 1, (
                partition,
                self.transitions(partition),
            )
