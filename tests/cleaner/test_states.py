"""The cleaner's state machine: a reviewed table, rules per edge, a model of counters."""

from collections import deque
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cleaner import states as s
from cleaner.scheduler.in_progress_map import InProgressMap
from storage.model import TopicPartition
from tests.conftest import Golden
from tests.support.draws import cases

ONE = TopicPartition("t", 0)
MARK = s.Quarantined(1000, "disk", 2)
SHAPES: list[s.State] = [
    s.IDLE,
    MARK,
    s.Cleaning(),
    s.Cleaning(MARK),
    s.Publishing(),
    s.Publishing(MARK),
    s.Aborting(0),
    s.Aborting(1),
    s.Aborting(2, past=MARK),
    s.Aborting(0, publishing=True),
    s.Aborting(1, publishing=True),
    s.Aborting(1, publishing=True, past=MARK),
    s.Paused(1),
    s.Paused(2),
    s.Paused(1, MARK),
    s.Paused(2, MARK),
    s.Adopting(1),
    s.Adopting(2, MARK),
]
EVENTS: list[s.Event] = [
    s.JobStarted(999),
    s.JobStarted(1000),
    s.GroupsReady(),
    s.Published(),
    s.Refused("stale"),
    s.Finished(7),
    s.Finished(None),
    s.Stopped(),
    s.Failed("boom", 5000),
    s.Failed("damage", 5000, 3),
    s.AbortRequested(),
    s.PauseRequested(),
    s.Resumed(),
    s.AdoptionBegun(),
    s.AdoptionEnded(),
    s.RetryRequested(),
]


def name_of(state: s.State) -> str:
    match state:
        case s.Idle():
            return "idle"
        case s.Quarantined(until_ms, _, failures):
            return f"quarantined(until {until_ms}, {failures} failures)"
        case s.Cleaning(past):
            return f"cleaning{_mark(past)}"
        case s.Publishing(past):
            return f"publishing{_mark(past)}"
        case s.Aborting(pauses, publishing, past):
            return f"aborting({pauses}{', publishing' * publishing}){_mark(past)}"
        case s.Paused(pauses, past):
            return f"paused({pauses}){_mark(past)}"
        case s.Adopting(pauses, past):
            return f"adopting({pauses}){_mark(past)}"


def _mark(past: s.Quarantined | None) -> str:
    return "" if past is None else f" past {past.failures} failures"


def event_name(event: s.Event) -> str:
    match event:
        case s.JobStarted(now_ms):
            return f"JobStarted({now_ms})"
        case s.Failed(_, _, offset):
            return "Failed" if offset is None else f"Failed(at {offset})"
        case s.Finished(offset):
            return "Finished(-)" if offset is None else "Finished"
    return type(event).__name__


def render() -> str:
    lines = []
    for before, event in product(SHAPES, EVENTS):
        start = f"{name_of(before):40} {event_name(event):14}"
        try:
            after, effects = s.transition(before, event)
        except s.IllegalTransitionError:
            lines.append(f"{start} ILLEGAL")
            continue
        names = ", ".join(type(effect).__name__ for effect in effects)
        lines.append(f"{start} -> {name_of(after):40} {names}".rstrip())
    return "\n".join(lines) + "\n"


def test_every_state_against_every_event_is_as_reviewed(golden: Golden) -> None:
    golden.check("cleaner_states.txt", render())


def explore(limit: int = 3) -> dict[tuple[s.State, s.Event], s.Step]:
    """Every edge reachable from idle with at most `limit` pauses and failures."""
    edges: dict[tuple[s.State, s.Event], s.Step] = {}
    seen: set[s.State] = {s.IDLE}
    todo = deque(seen)
    events = [event for event in EVENTS if event != s.JobStarted(999)]
    events[0] = s.JobStarted(9000)
    while todo:
        before = todo.popleft()
        for event in events:
            try:
                after, effects = s.transition(before, event)
            except s.IllegalTransitionError:
                continue
            past = s.past_of(after)
            if getattr(after, "pauses", 0) > limit or (past is not None and past.failures > limit):
                continue
            edges[before, event] = (after, effects)
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return edges


def pauses(state: s.State) -> int:
    return state.pauses if isinstance(state, s.Aborting | s.Paused | s.Adopting) else 0


def publishing(state: s.State) -> bool:
    return isinstance(state, s.Publishing) or (isinstance(state, s.Aborting) and state.publishing)


def test_the_rules_of_every_edge() -> None:
    for (before, event), (after, effects) in explore().items():
        kinds = [type(effect) for effect in effects]
        edge = (before, event, after, effects)
        begun = s.is_busy(after) and not isinstance(after, s.Adopting)
        assert (s.StartJob in kinds) == (begun and not s.is_busy(before)), edge
        assert not (s.StartJob in kinds and pauses(before)), edge
        quiet = s.Resumed | s.RetryRequested | s.AbortRequested
        granted = isinstance(after, s.Paused) and not isinstance(event, quiet)
        assert (s.GrantPause in kinds) == granted, edge
        reached = isinstance(event, s.Finished | s.Failed) and event.next_dirty_offset is not None
        saved = isinstance(before, s.Cleaning) and reached
        assert (s.SaveCheckpoint in kinds) == saved, edge
        signalled = isinstance(after, s.Aborting) and not isinstance(before, s.Aborting)
        assert (s.SignalAbort in kinds) == signalled, edge
        assert (s.ReportFailure in kinds) == isinstance(event, s.Failed), edge
        assert (s.PublishGroups in kinds) == (publishing(after) and not publishing(before)), edge
        freed = isinstance(after, s.Idle | s.Quarantined) and after != before
        assert (s.WakeScheduler in kinds) == freed, edge


def test_pauses_change_by_one_and_only_when_asked() -> None:
    for (before, event), (after, _) in explore().items():
        step = {s.PauseRequested: 1, s.Resumed: -1}.get(type(event), 0)
        assert pauses(after) == pauses(before) + step, (before, event, after)


def test_a_journal_under_way_is_never_let_go_of_unfinished() -> None:
    ends = s.Published | s.Refused
    for (before, event), (after, _) in explore().items():
        if publishing(before) and not publishing(after):
            assert isinstance(event, ends), (before, event, after)


def test_only_success_or_forgiveness_ends_a_quarantine() -> None:
    for (before, event), (after, _) in explore().items():
        if s.past_of(before) is not None and s.past_of(after) is None:
            succeeded = isinstance(before, s.Cleaning) and isinstance(event, s.Finished)
            assert succeeded or isinstance(event, s.RetryRequested), (before, event, after)


def test_idle_can_be_reached_from_everywhere() -> None:
    edges = explore()
    back: set[s.State] = {s.IDLE}
    while more := {b for (b, _), (a, _) in edges.items() if a in back} - back:
        back |= more
    assert back == {before for before, _ in edges} | {after for after, _ in edges.values()}


def test_a_second_pause_during_an_abort_is_counted() -> None:
    state, effects = s.transition(s.Aborting(1), s.PauseRequested())
    assert (state, effects) == (s.Aborting(2), ())


def test_a_resume_during_an_abort_is_legal() -> None:
    assert s.transition(s.Aborting(1), s.Resumed()) == (s.Aborting(0), ())


def test_a_quarantine_survives_a_pause() -> None:
    paused, effects = s.transition(MARK, s.PauseRequested())
    assert effects == (s.GrantPause(),)
    assert s.transition(paused, s.Resumed()) == (MARK, (s.WakeScheduler(),))


def test_a_quarantined_partition_is_not_grabbed_before_its_time() -> None:
    with pytest.raises(s.IllegalTransitionError):
        s.transition(MARK, s.JobStarted(MARK.until_ms - 1))


def test_failures_in_a_row_are_counted_across_attempts() -> None:
    state, _ = s.transition(MARK, s.JobStarted(MARK.until_ms))
    after, effects = s.transition(state, s.Failed("again", 9000))
    assert after == s.Quarantined(9000, "again", MARK.failures + 1)
    assert effects == (s.ReportFailure(after), s.WakeScheduler())


def test_the_registry_forgets_idle_partitions_and_tells_its_story() -> None:
    in_progress = InProgressMap(transitions_max=3)
    in_progress.apply(ONE, s.PauseRequested(), at_ms=5)
    in_progress.apply(TopicPartition("t", 1), s.PauseRequested(), at_ms=6)
    in_progress.apply(ONE, s.Resumed(), at_ms=7)
    assert in_progress.states() == {TopicPartition("t", 1): s.Paused(1)}
    assert [(e.at_ms, e.after) for e in in_progress.transitions(ONE)] == [
        (5, s.Paused(1)),
        (7, s.IDLE),
    ]
    in_progress.apply(ONE, s.PauseRequested())
    assert len(in_progress.transitions()) == 3
    in_progress.validate()


def test_the_registry_finds_what_may_not_be() -> None:
    in_progress = InProgressMap()
    in_progress._states[ONE] = s.Paused(0)
    with pytest.raises(AssertionError, match="t"):
        in_progress.validate()


class CleanerModel(RuleBasedStateMachine):
    """Counters only: who holds the files, which journal is open, how many pauses are owed."""

    def __init__(self) -> None:
        super().__init__()
        self.in_progress = InProgressMap()
        self.worker = self.journal = self.aborted = False
        self.pauses = self.granted = self.failures = 0
        self.until_ms = self.now_ms = 0

    def feed(self, event: s.Event) -> None:
        for effect in self.in_progress.apply(ONE, event):
            match effect:
                case s.StartJob():
                    assert not self.worker
                    assert self.pauses == 0
                    self.worker = True
                case s.SignalAbort():
                    assert self.worker
                    assert not self.aborted
                    self.aborted = True
                case s.PublishGroups():
                    assert self.worker
                    assert not self.aborted
                    self.journal = True
                case s.GrantPause():
                    assert not self.worker
                    assert not self.journal
                    self.granted = self.pauses
                case s.SaveCheckpoint():
                    assert not self.aborted
                case s.DropGroups():
                    assert self.aborted

    @rule(milliseconds=st.integers(1, 3000))
    def time_passes(self, milliseconds: int) -> None:
        self.now_ms += milliseconds

    @precondition(lambda self: not self.worker and not self.pauses)
    @rule()
    def grab(self) -> None:
        if self.failures and self.now_ms < self.until_ms:
            with pytest.raises(s.IllegalTransitionError):
                self.feed(s.JobStarted(self.now_ms))
        else:
            self.feed(s.JobStarted(self.now_ms))

    @rule()
    def pause(self) -> None:
        self.pauses += 1
        self.feed(s.PauseRequested())

    @precondition(lambda self: self.pauses)
    @rule()
    def resume(self) -> None:
        self.pauses -= 1
        self.granted = min(self.granted, self.pauses)
        self.feed(s.Resumed())

    @rule()
    def abort(self) -> None:
        self.feed(s.AbortRequested())

    @rule()
    def forgive(self) -> None:
        self.failures = 0
        self.feed(s.RetryRequested())

    @precondition(lambda self: self.worker and not self.journal)
    @rule()
    def group(self) -> None:
        self.feed(s.GroupsReady())

    @precondition(lambda self: self.journal)
    @rule(event=st.sampled_from([s.Published(), s.Refused("stale")]))
    def journal_ends(self, event: s.Event) -> None:
        self.journal = False
        self.feed(event)

    @precondition(lambda self: self.worker and not self.journal)
    @rule(finished=st.booleans(), offset=st.none() | st.just(9))
    def worker_lets_go(self, finished: bool, offset: int | None) -> None:
        if not finished and not self.aborted:
            return
        if finished and not self.aborted:
            self.failures = 0
        self.worker = False
        self.feed(s.Finished(offset) if finished else s.Stopped())
        self.aborted = False

    @precondition(lambda self: self.worker and not self.journal)
    @rule(wait_ms=st.integers(0, 3000))
    def worker_fails(self, wait_ms: int) -> None:
        self.worker = self.aborted = False
        self.failures += 1
        self.until_ms = self.now_ms + wait_ms
        self.feed(s.Failed("x", self.until_ms))

    @invariant()
    def agrees(self) -> None:
        self.in_progress.validate()
        state = self.in_progress.state(ONE)
        assert s.is_busy(state) == self.worker
        assert publishing(state) == self.journal
        assert isinstance(state, s.Aborting) == self.aborted
        assert pauses(state) == self.pauses
        past = s.past_of(state)
        assert (past.failures if past else 0) == self.failures
        if not self.worker:
            assert self.granted == self.pauses


TestCleanerModel = CleanerModel.TestCase
TestCleanerModel.settings = settings(
    max_examples=cases(few=25, many=150), stateful_step_count=40, deadline=None
)
