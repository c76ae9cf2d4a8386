"""In which order candidates are started, and by which worker."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from cleaner.planning.dirty_section import DirtySection, ExpiredSection
from cleaner.planning.findings import Reason
from cleaner.planning.plan import Verdict
from cleaner.planning.scheduling_order import (
    LATE_HEAD_START_MS,
    NO_TURNS,
    REQUESTS_IN_A_ROW,
    SMALL_JOB_BYTES,
    SMALL_JOB_MS,
    Candidate,
    Lane,
    Requester,
    RunningJob,
    Start,
    build_candidate,
    choose,
    first_candidates,
    head_start_ms,
    is_long,
    start_key,
)
from storage.model import TopicPartition
from tests.support.draws import cases

NOW_MS = 1_000_000_000_000
LONG = RunningJob(Lane.REGULAR, is_long=True)
SHORT = RunningJob(Lane.REGULAR, is_long=False)
OPERATOR, NOBODY = Requester.OPERATOR, Requester.NOBODY


def name(number: int) -> TopicPartition:
    return TopicPartition("t", number)


def verdict(
    number: int,
    *,
    dirty: int = 100,
    clean: int = 0,
    deadline_ms: int | None = None,
    expired_since: int | None = None,
    run_now: bool = False,
    limit: int | None = None,
) -> Verdict:
    section = DirtySection(0, 10, Reason.ACTIVE_SEGMENT, clean, dirty, deadline_ms, 0)
    expired = None
    if expired_since is not None:
        expired = ExpiredSection((0,), clean, expired_since, expired_since + 1)
    return Verdict(
        name(number), (), section, expired=expired, run_now=run_now, bytes_per_second_max=limit
    )


def started_one_by_one(
    queue: Sequence[Candidate],
    idle: Mapping[Lane, int],
    count: int,
    running: Sequence[RunningJob] = (),
) -> list[Candidate]:
    """Return the first candidates that start if each ends before the next choice."""
    started: list[Candidate] = []
    turns = NO_TURNS
    topics_ms: dict[str, int] = {}
    for number in range(count):
        waiting = [candidate for candidate in queue if candidate not in started]
        choice = choose(waiting, idle, running, turns, topics_ms)
        turns = choice.turns
        started += [start.candidate for start in choice.starts]
        topics_ms |= dict.fromkeys(
            (start.candidate.partition.topic for start in choice.starts), number + 1
        )
    return started


def any_verdict(rng: random.Random, number: int) -> Verdict:
    deadlines = [None, NOW_MS - rng.randrange(10**11), NOW_MS + rng.randrange(10**9)]
    return verdict(
        number,
        dirty=rng.randrange(1, 10**12),
        clean=rng.randrange(10**12),
        deadline_ms=rng.choice(deadlines),
        expired_since=rng.choice([None, None, NOW_MS - rng.randrange(10**11)]),
    )


@pytest.mark.parametrize("seed", range(cases(few=6, many=20)))
def test_who_has_waited_for_the_longest_head_start_is_overtaken_by_no_newcomer(seed: int) -> None:
    rng = random.Random(seed)
    waits = any_verdict(rng, 0)
    for number in range(1, 200):
        newcomer = any_verdict(rng, number)
        assert 0 <= head_start_ms(newcomer, NOW_MS) <= LATE_HEAD_START_MS
        since_ms = LATE_HEAD_START_MS + 1 + rng.randrange(10**6)
        assert start_key(waits, 0, NOW_MS) < start_key(newcomer, since_ms, NOW_MS)


def test_a_missed_deadline_by_a_year_is_as_urgent_as_one_by_a_minute() -> None:
    year = verdict(0, deadline_ms=NOW_MS - 365 * 86_400_000)
    minute = verdict(1, deadline_ms=NOW_MS - 60_000)
    assert start_key(minute, 0, NOW_MS) < start_key(year, 1, NOW_MS)
    assert start_key(year, 0, NOW_MS) < start_key(minute, 0, NOW_MS)


def test_a_head_start_does_not_reach_back_beyond_the_last_start() -> None:
    late, patient = verdict(0, deadline_ms=0), verdict(1, dirty=1, clean=10**12)
    assert start_key(late, 100, NOW_MS, earliest_ms=0) < start_key(patient, 50, NOW_MS)
    assert start_key(patient, 50, NOW_MS) < start_key(late, 100, NOW_MS, earliest_ms=51)


def test_a_requested_clean_goes_before_everything_that_nobody_requested() -> None:
    late = verdict(0, deadline_ms=0)
    requested = verdict(1, clean=10**12, dirty=1, run_now=True)
    assert start_key(requested, 10**9, NOW_MS) < start_key(late, 0, NOW_MS)


def test_of_some_requested_cleans_in_a_row_one_start_goes_to_somebody_else() -> None:
    requested = [Candidate(name(number), OPERATOR) for number in range(20)]
    other = Candidate(name(99))
    started = started_one_by_one([*requested, other], {Lane.REGULAR: 1}, REQUESTS_IN_A_ROW + 2)
    assert started[:REQUESTS_IN_A_ROW] == requested[:REQUESTS_IN_A_ROW]
    assert started[REQUESTS_IN_A_ROW] == other
    assert started[-1] == requested[REQUESTS_IN_A_ROW]


def test_without_others_requested_cleans_go_on() -> None:
    requested = [Candidate(name(number), OPERATOR) for number in range(10)]
    assert started_one_by_one(requested, {Lane.REGULAR: 1}, 10) == requested


@pytest.mark.parametrize("lane", Lane)
def test_users_who_request_cleans_take_turns_with_each_other_and_with_other_candidates(
    lane: Lane,
) -> None:
    requested = [Candidate(name(number), "alice", is_small=True) for number in range(20)]
    late = Candidate(name(50), "bob", is_small=True)
    others = [Candidate(name(60 + number), is_small=True) for number in range(20)]
    queue = [*requested, late, *others]
    started = started_one_by_one(queue, {lane: 1}, 6, [] if lane is Lane.REGULAR else [LONG])
    if lane is Lane.REQUESTED:
        assert started == [requested[0], late, *requested[1:5]]
    else:
        assert started == [requested[0], late, others[0], requested[1], others[1], requested[2]]


def test_many_users_who_request_cleans_leave_one_of_some_starts_to_other_candidates() -> None:
    requested = [Candidate(name(number), f"user {number % 10}") for number in range(100)]
    others = [Candidate(name(200 + number)) for number in range(10)]
    started = started_one_by_one([*requested, *others], {Lane.REGULAR: 1}, 50)
    by_nobody = [number for number, each in enumerate(started) if not each.is_requested]
    assert by_nobody == list(range(REQUESTS_IN_A_ROW, 50, REQUESTS_IN_A_ROW + 1))
    of_users = Counter(each.requested_by for each in started if each.is_requested)
    assert set(of_users.values()) == {4}


def test_an_operator_goes_before_users() -> None:
    users = [Candidate(name(number), "alice") for number in range(3)]
    operator = Candidate(name(9), OPERATOR)
    assert choose([*users, operator], {Lane.REGULAR: 1}, []).starts[0].candidate == operator


def test_every_second_start_that_nobody_requested_goes_round_the_topics() -> None:
    large = [Candidate(name(number)) for number in range(10)]
    others = [Candidate(TopicPartition(topic, 0)) for topic in "abc"]
    queue = [*large, *others]
    choice = choose(queue, {Lane.REGULAR: 6}, [], topics_ms={"t": 4, "a": 3, "b": 1, "c": 2})
    started = [start.candidate for start in choice.starts]
    assert started == [large[0], others[1], large[1], others[2], large[2], others[0]]
    assert [start.by_topic for start in choice.starts] == [False, True] * 3


def test_requested_cleans_do_not_change_whose_turn_the_other_starts_are() -> None:
    requested = [Candidate(name(number), "alice") for number in range(20)]
    large = [Candidate(name(20 + number)) for number in range(20)]
    other = Candidate(TopicPartition("other", 0))
    started = started_one_by_one([*requested, *large, other], {Lane.REGULAR: 1}, 4)
    assert started == [requested[0], large[0], requested[1], other]


def test_the_first_candidates_are_those_of_each_requester_and_of_each_topic() -> None:
    large = [Candidate(name(number)) for number in range(10)]
    requested = [Candidate(name(20 + number), "alice") for number in range(10)]
    others = [Candidate(TopicPartition(topic, n)) for topic in "abc" for n in range(2)]
    firsts = first_candidates([*requested, *large, *others], {"t": 1, "a": 9, "b": 2, "c": 3}, 3)
    assert firsts == [*requested[:3], *large[:3], others[2], others[4]]


def test_a_small_job_does_not_wait_for_long_ones() -> None:
    large, small = Candidate(name(0)), Candidate(name(1), is_small=True)
    assert choose([large, small], {}, [LONG]).needed == {Lane.SMALL}
    choice = choose([large, small], {Lane.SMALL: 1}, [LONG])
    assert choice.starts == (Start(small, Lane.SMALL),)


def test_behind_a_short_job_no_other_worker_is_started() -> None:
    waiting = [Candidate(name(0), OPERATOR), Candidate(name(1), is_small=True)]
    assert choose(waiting, {}, [LONG, SHORT]).needed == frozenset()
    assert choose(waiting, {Lane.REGULAR: 1}, [LONG]).needed == frozenset()


def test_a_requested_clean_does_not_wait_for_long_jobs_whatever_its_size() -> None:
    large = Candidate(name(0), OPERATOR)
    assert choose([large], {}, [LONG]).needed == {Lane.REQUESTED}
    choice = choose([large], {Lane.REQUESTED: 1}, [LONG])
    assert choice.starts == (Start(large, Lane.REQUESTED),)


def test_a_large_job_that_nobody_requested_waits_for_a_regular_worker() -> None:
    choice = choose([Candidate(name(0))], {Lane.SMALL: 1, Lane.REQUESTED: 1}, [LONG])
    assert (choice.starts, choice.needed) == ((), frozenset())


def test_of_a_topic_with_a_rate_limit_only_the_first_candidate_starts() -> None:
    first, second = (Candidate(name(number), is_limited=True) for number in (1, 0))
    requested = Candidate(name(2), OPERATOR)
    other = Candidate(TopicPartition("other", 0), is_limited=True)
    choice = choose([requested, first, second, other], {Lane.REGULAR: 4}, [])
    assert [start.candidate for start in choice.starts] == [requested, first, other]
    assert not choice.others_wait
    small = Candidate(name(0), is_small=True, is_limited=True)
    choice = choose([first, small], {Lane.SMALL: 1}, [LONG])
    assert (choice.starts, choice.others_wait) == ((), True)


def test_one_candidate_is_started_once_and_a_lane_with_a_job_keeps_its_worker() -> None:
    both = Candidate(name(0), OPERATOR, is_small=True)
    choice = choose([both], {Lane.SMALL: 1, Lane.REQUESTED: 1}, [LONG])
    assert choice.starts == (Start(both, Lane.REQUESTED),)
    busy = RunningJob(Lane.SMALL, is_long=False)
    assert choose([], {Lane.REGULAR: 1}, [busy]).needed == {Lane.SMALL}


def test_what_is_small_and_what_is_limited() -> None:
    assert build_candidate(verdict(0, dirty=SMALL_JOB_BYTES // 2), NOBODY).is_small
    assert not build_candidate(verdict(0, dirty=SMALL_JOB_BYTES // 2 + 1), NOBODY).is_small
    assert build_candidate(verdict(0, clean=10, dirty=10**9, expired_since=0), NOBODY).is_small
    assert not build_candidate(verdict(0), NOBODY).is_limited
    assert build_candidate(verdict(0, limit=100), NOBODY).is_limited
    assert not build_candidate(verdict(0, limit=100, run_now=True), OPERATOR).is_limited


def test_a_small_job_that_takes_long_is_a_long_one() -> None:
    assert not is_long(1, SMALL_JOB_MS - 1)
    assert is_long(1, SMALL_JOB_MS)
    assert is_long(SMALL_JOB_BYTES + 1, 0)
