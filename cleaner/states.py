"""The state machine of one partition in the cleaner. Pure: no clock, no files, no asyncio.

Rule 1. Every change of a partition's cleaning state is a case in `transition`.
Rule 2. This module does not know the partition, its log or its worker.

A partition is *busy* while a worker owns its files or a journal is carried out (Cleaning,
Publishing, Aborting, Adopting). A pause is granted when the partition is not busy. Pauses nest:
each one needs one resume. A quarantine survives attempts and pauses; a successful clean ends it.
The groups of a remote clean are published by the owner of the only pause (Adopting).
"""

from dataclasses import dataclass
from typing import TypeAlias

# States -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Idle:
    """No worker owns the partition. Implicit: idle partitions are not in the in-progress map."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Not cleaned until a time (monotonic ms), after `failures` >= 1 in a row."""

    until_ms: int
    reason: str
    failures: int


@dataclass(frozen=True, slots=True)
class Cleaning:
    """A worker reads the files. `past` is the quarantine that this attempt may end."""

    past: Quarantined | None = None


@dataclass(frozen=True, slots=True)
class Publishing:
    """The journal of finished groups is carried out; the worker continues meanwhile."""

    past: Quarantined | None = None


@dataclass(frozen=True, slots=True)
class Aborting:
    """The job is stopping; its worker still owns the files. `pauses` is 0 if no caller waits."""

    pauses: int
    publishing: bool = False  # a journal is running: it is never interrupted
    past: Quarantined | None = None


@dataclass(frozen=True, slots=True)
class Paused:
    """Not cleaned because of `pauses` >= 1 callers. `past` is the state after the last resume."""

    pauses: int
    past: Quarantined | None = None


@dataclass(frozen=True, slots=True)
class Adopting:
    """The owner of the pause publishes the groups of a remote clean. `pauses` >= 1."""

    pauses: int
    past: Quarantined | None = None


State: TypeAlias = Idle | Quarantined | Cleaning | Publishing | Aborting | Paused | Adopting


# Events ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The scheduler chose the partition. Illegal before its quarantine ends."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class GroupsReady:
    """The worker finished groups, which one journal publishes."""


@dataclass(frozen=True, slots=True)
class Published:
    """The journal is done, or the groups were dropped because their sources are gone."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Some groups could not be published because the generation changed or the journal failed.

    The job's remaining output is useless.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker reported the whole job, after its last group was published.

    The offset is None if the job only removed expired tombstones and markers.
    """

    next_dirty_offset: int | None


@dataclass(frozen=True, slots=True)
class Stopped:
    """The worker stopped after an abort, or was killed because it ignored the abort."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed or the worker died. The next one starts after `until_ms` (monotonic).

    `next_dirty_offset` is set if the job ran to its end around a damaged segment.
    """

    reason: str
    until_ms: int
    next_dirty_offset: int | None = None


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """Stop a running clean, if any, without a pause afterwards."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """Stop a running clean and start none until Resumed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """End one pause, whether it was granted or the caller stopped waiting."""


@dataclass(frozen=True, slots=True)
class AdoptionBegun:
    """The owner of the only pause starts to publish a remote clean; further pauses wait."""


@dataclass(frozen=True, slots=True)
class AdoptionEnded:
    """The journal is done or was refused; the pauses remain."""


@dataclass(frozen=True, slots=True)
class RetryRequested:
    """Clear earlier failures: on an operator's request, or because the partition was replaced."""


Event: TypeAlias = (
    JobStarted
    | GroupsReady
    | Published
    | Refused
    | Finished
    | Stopped
    | Failed
    | AbortRequested
    | PauseRequested
    | Resumed
    | AdoptionBegun
    | AdoptionEnded
    | RetryRequested
)


# Effects: what the caller must do now ----------------------------------------


@dataclass(frozen=True, slots=True)
class StartJob:
    """Hand the chosen job to a worker."""


@dataclass(frozen=True, slots=True)
class SignalAbort:
    """Tell the worker to stop, and kill it if it does not."""


@dataclass(frozen=True, slots=True)
class PublishGroups:
    """Carry out the journal of the groups that are ready."""


@dataclass(frozen=True, slots=True)
class DropGroups:
    """Do not publish the groups: the attempt is being aborted."""


@dataclass(frozen=True, slots=True)
class GrantPause:
    """No worker owns the partition: let all waiting callers continue."""


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Everything below this offset is clean."""

    next_dirty_offset: int


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Report why the partition is quarantined, and until when."""

    quarantine: Quarantined


@dataclass(frozen=True, slots=True)
class WakeScheduler:
    """Scan soon: a partition or a worker is free."""


Effect: TypeAlias = (
    StartJob
    | SignalAbort
    | PublishGroups
    | DropGroups
    | GrantPause
    | SaveCheckpoint
    | ReportFailure
    | WakeScheduler
)
Step: TypeAlias = tuple[State, tuple[Effect, ...]]

IDLE = Idle()


class IllegalTransitionError(Exception):
    """A state does not accept an event: an error in the cleaner."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{state} does not accept {event}")
        self.state = state
        self.event = event


def is_busy(state: State) -> bool:
    """Return whether a worker or a journal owns the partition's files."""
    return isinstance(state, Cleaning | Publishing | Aborting | Adopting)


def past_of(state: State) -> Quarantined | None:
    """Return the quarantine that the state is in, or returns to unless a clean succeeds."""
    match state:
        case Quarantined():
            return state
        case Idle():
            return None
        case _:
            return state.past


def transition(state: State, event: Event) -> Step:
    """Return the state after `event` and the effects. Raises IllegalTransitionError."""
    step = _work(state, event) or _control(state, event) or _adoption(state, event)
    if step is None:
        raise IllegalTransitionError(state, event)
    return step


def _work(state: State, event: Event) -> Step | None:
    """Handle the events of a job: start, publication of groups, end."""
    match state, event:
        case Idle(), JobStarted():
            return Cleaning(), (StartJob(),)
        case Quarantined(until_ms), JobStarted(now_ms) if now_ms >= until_ms:
            return Cleaning(state), (StartJob(),)

        # Journals run one after the other: the next groups wait for this one.
        case Cleaning(past), GroupsReady():
            return Publishing(past), (PublishGroups(),)
        case Publishing(past), Published():
            return Cleaning(past), ()
        case Publishing(past), Refused():
            return Aborting(0, past=past), (SignalAbort(),)
        case Aborting(publishing=False), GroupsReady():
            return state, (DropGroups(),)
        case Aborting(n, True, past), Published() | Refused():
            return Aborting(n, False, past), ()

        case Cleaning(), Finished(offset):
            return IDLE, (*_save_checkpoint(offset), WakeScheduler())
        case Cleaning(past), Failed():
            quarantine = _next_quarantine(past, event)
            saved = _save_checkpoint(event.next_dirty_offset)
            return quarantine, (*saved, ReportFailure(quarantine), WakeScheduler())

        # The worker stops after an abort. A finished job saves no checkpoint: the log may be about
        # to be truncated.
        case Aborting(n, False, past), Finished() | Stopped():
            return _released(n, past)
        case Aborting(n, False, past), Failed():
            quarantine = _next_quarantine(past, event)
            after, effects = _released(n, quarantine)
            return after, (ReportFailure(quarantine), *effects)
    return None


# One branch for each pair of state and event, as in a state table.
def _control(state: State, event: Event) -> Step | None:  # noqa: C901, PLR0912
    """Handle pauses, resumes, aborts and retries."""
    match state, event:
        # Grant at once if not busy, otherwise when the worker and the journal have ended.
        case Idle(), PauseRequested():
            return Paused(1), (GrantPause(),)
        case Quarantined(), PauseRequested():
            return Paused(1, state), (GrantPause(),)
        case Paused(n, past), PauseRequested():
            return Paused(n + 1, past), (GrantPause(),)
        case Cleaning(past), PauseRequested():
            return Aborting(1, past=past), (SignalAbort(),)
        case Publishing(past), PauseRequested():
            return Aborting(1, True, past), (SignalAbort(),)
        case Aborting(n, publishing, past), PauseRequested():
            return Aborting(n + 1, publishing, past), ()

        case Paused(1, past), Resumed():
            return past or IDLE, (WakeScheduler(),)
        case Paused(n, past), Resumed():
            return Paused(n - 1, past), ()
        case Aborting(n, publishing, past), Resumed() if n > 0:
            return Aborting(n - 1, publishing, past), ()

        case Cleaning(past), AbortRequested():
            return Aborting(0, past=past), (SignalAbort(),)
        case Publishing(past), AbortRequested():
            return Aborting(0, True, past), (SignalAbort(),)
        case Idle() | Quarantined() | Paused() | Aborting(), AbortRequested():
            return state, ()

        case Quarantined(), RetryRequested():
            return IDLE, (WakeScheduler(),)
        case Idle(), RetryRequested():
            return IDLE, ()
        case Paused(n), RetryRequested():
            return Paused(n), ()
        case Cleaning(), RetryRequested():
            return Cleaning(), ()
        case Publishing(), RetryRequested():
            return Publishing(), ()
        case Aborting(n, publishing), RetryRequested():
            return Aborting(n, publishing), ()
    return None


def _adoption(state: State, event: Event) -> Step | None:
    """Handle the publication of a remote clean; pauses requested meanwhile wait for its end."""
    match state, event:
        case Paused(1, past), AdoptionBegun():
            return Adopting(1, past), ()
        case Adopting(n, past), PauseRequested():
            return Adopting(n + 1, past), ()
        case Adopting(n, past), Resumed() if n > 1:  # a waiting caller gave up
            return Adopting(n - 1, past), ()
        case Adopting(n, past), AdoptionEnded():
            return Paused(n, past), (GrantPause(),)
        case Adopting(), AbortRequested():
            return state, ()
        case Adopting(n), RetryRequested():
            return Adopting(n), ()
    return None


def _save_checkpoint(offset: int | None) -> tuple[Effect, ...]:
    return () if offset is None else (SaveCheckpoint(offset),)


def _next_quarantine(past: Quarantined | None, event: Failed) -> Quarantined:
    failures = 1 if past is None else past.failures + 1
    return Quarantined(event.until_ms, event.reason, failures)


def _released(pauses: int, past: Quarantined | None) -> Step:
    if pauses == 0:
        return past or IDLE, (WakeScheduler(),)
    return Paused(pauses, past), (GrantPause(),)
