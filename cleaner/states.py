"""What may happen to one partition in the cleaner. Pure: no clock, no files, no asyncio.

Rule 1. Every change of a partition's cleaning state is a case in `transition`.
Rule 2. This module does not know which partition, log or worker it is talking about.

A partition is *held* while a worker owns its files or a journal is being carried out (Cleaning,
Publishing, Aborting, Adopting). A pause is granted only when it is not held. Pauses nest: each one
is undone by one resume. A quarantine outlives attempts and pauses; a success ends it. What was made
outside is published by whoever has the one pause there is.
"""

from dataclasses import dataclass
from typing import TypeAlias

# States -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Idle:
    """Nobody holds the partition. The in-progress map does not store this state."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Left alone after a failure, until a time (monotonic ms). `failures` in a row, >= 1."""

    until_ms: int
    reason: str
    failures: int


@dataclass(frozen=True, slots=True)
class Cleaning:
    """A worker reads the files. `past` is the quarantine that this attempt may end."""

    past: Quarantined | None = None


@dataclass(frozen=True, slots=True)
class Publishing:
    """The journal of finished groups is being carried out; the worker goes on meanwhile."""

    past: Quarantined | None = None


@dataclass(frozen=True, slots=True)
class Aborting:
    """Asked to stop, still held. `pauses` may be 0: whoever asked gave up waiting."""

    pauses: int
    publishing: bool = False  # a journal was under way: it is waited for, never interrupted
    past: Quarantined | None = None


@dataclass(frozen=True, slots=True)
class Paused:
    """Held off by `pauses` >= 1 callers. `past` is what the last resume returns to."""

    pauses: int
    past: Quarantined | None = None


@dataclass(frozen=True, slots=True)
class Adopting:
    """Whoever paused it carries out a journal of groups that were made outside. `pauses` >= 1."""

    pauses: int
    past: Quarantined | None = None


State: TypeAlias = Idle | Quarantined | Cleaning | Publishing | Aborting | Paused | Adopting


# Events: what the outside reports -------------------------------------------


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The scheduler chose the partition. Illegal before its quarantine ends."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class GroupsReady:
    """The worker handed over finished groups, to be published by one journal."""


@dataclass(frozen=True, slots=True)
class Published:
    """The groups' journal is done, or they were dropped because their sources had gone."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Not all was published and the rest is of no use: stale generation, failed journal."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The worker reported the whole job, after its last group was published.

    No offset where nothing was dirty: the job only removed what had expired.
    """

    next_dirty_offset: int | None


@dataclass(frozen=True, slots=True)
class Stopped:
    """The worker let go after an abort, by itself or because it was killed for not heeding it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed or the worker died. Next attempt not before `until_ms` (monotonic).

    `next_dirty_offset` is set where part of the work stands: the job came to its end but had to
    leave a damaged segment as it was.
    """

    reason: str
    until_ms: int
    next_dirty_offset: int | None = None


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """Stop a running clean, if there is one, without holding the partition afterwards."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """Stop a running clean and hold the partition until one Resumed."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """One PauseRequested is over, granted or given up."""


@dataclass(frozen=True, slots=True)
class AdoptionBegun:
    """The only one who paused it publishes what was made outside; further pauses wait for that."""


@dataclass(frozen=True, slots=True)
class AdoptionEnded:
    """The journal is done, or was refused; what was paused is paused as before."""


@dataclass(frozen=True, slots=True)
class RetryRequested:
    """Earlier failures no longer count: an operator says so, or the partition was replaced."""


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


# Effects: what the outside must now do ----------------------------------------


@dataclass(frozen=True, slots=True)
class StartJob:
    """Hand the chosen job to a worker."""


@dataclass(frozen=True, slots=True)
class SignalAbort:
    """Tell the worker to stop, and watch that it does."""


@dataclass(frozen=True, slots=True)
class PublishGroups:
    """Carry out the journal of the groups that are ready."""


@dataclass(frozen=True, slots=True)
class DropGroups:
    """Do not publish them: the partition is being given back."""


@dataclass(frozen=True, slots=True)
class GrantPause:
    """Nobody holds the partition: let all who wait go on."""


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Everything below this offset is clean."""

    next_dirty_offset: int


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Say why the partition is left alone, and until when."""

    quarantine: Quarantined


@dataclass(frozen=True, slots=True)
class WakeScheduler:
    """A partition or a worker came free: choose again."""


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
    """A state was sent an event it does not accept: a mistake of ours."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{state} does not accept {event}")
        self.state = state
        self.event = event


def is_busy(state: State) -> bool:
    """Whether a worker or a journal has the partition's files."""
    return isinstance(state, Cleaning | Publishing | Aborting | Adopting)


def past_of(state: State) -> Quarantined | None:
    """The quarantine a state is in, or will fall back to unless a clean succeeds."""
    match state:
        case Quarantined():
            return state
        case Idle():
            return None
        case _:
            return state.past


def transition(state: State, event: Event) -> Step:
    """The state after `event` and what has to be done. Raises IllegalTransitionError."""
    step = _work(state, event) or _control(state, event) or _adoption(state, event)
    if step is None:
        raise IllegalTransitionError(state, event)
    return step


def _work(state: State, event: Event) -> Step | None:
    """A job's course: taken, published group by group, given back."""
    match state, event:
        case Idle(), JobStarted():
            return Cleaning(), (StartJob(),)
        case Quarantined(until_ms), JobStarted(now_ms) if now_ms >= until_ms:
            return Cleaning(state), (StartJob(),)

        # Groups come one after the other: the next is looked at when this journal is done.
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
            return IDLE, (*_saved(offset), WakeScheduler())
        case Cleaning(past), Failed():
            mark = _add_pause(past, event)
            saved = _saved(event.next_dirty_offset)
            return mark, (*saved, ReportFailure(mark), WakeScheduler())

        # The worker lets go after an abort. A finished job is not checkpointed: the abort may
        # have been asked for because the log is about to be truncated.
        case Aborting(n, False, past), Finished() | Stopped():
            return _released(n, past)
        case Aborting(n, False, past), Failed():
            mark = _add_pause(past, event)
            after, effects = _released(n, mark)
            return after, (ReportFailure(mark), *effects)
    return None


# One branch for each pair of state and event: the state table of the module docstring.
def _control(state: State, event: Event) -> Step | None:  # noqa: C901, PLR0912
    """Pausing, resuming, aborting, forgiving."""
    match state, event:
        # At once when not held, otherwise when the worker and the journal let go.
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
    """Publishing under a pause: alone at first, and whoever comes meanwhile waits."""
    match state, event:
        case Paused(1, past), AdoptionBegun():
            return Adopting(1, past), ()
        case Adopting(n, past), PauseRequested():
            return Adopting(n + 1, past), ()
        case Adopting(n, past), Resumed() if n > 1:  # who waited gave it up
            return Adopting(n - 1, past), ()
        case Adopting(n, past), AdoptionEnded():
            return Paused(n, past), (GrantPause(),)
        case Adopting(), AbortRequested():
            return state, ()
        case Adopting(n), RetryRequested():
            return Adopting(n), ()
    return None


def _saved(offset: int | None) -> tuple[Effect, ...]:
    return () if offset is None else (SaveCheckpoint(offset),)


def _add_pause(past: Quarantined | None, event: Failed) -> Quarantined:
    failures = 1 if past is None else past.failures + 1
    return Quarantined(event.until_ms, event.reason, failures)


def _released(pauses: int, past: Quarantined | None) -> Step:
    if pauses == 0:
        return past or IDLE, (WakeScheduler(),)
    return Paused(pauses, past), (GrantPause(),)
