"""Choose the next candidates to clean, and the kind of worker for each. Pure.

Rules
1. Cleans that an operator requested start first. Users who request cleans of their own topics take
   turns with each other and with the candidates that nobody requested. While some of the latter
   wait, at most REQUESTS_IN_A_ROW requested cleans start in a row.
2. Candidates that nobody requested start in two orders, which take turns in each lane.
   - By waiting time. Urgent candidates get a head start, which counts as additional waiting time:
     for a missed deadline, for a high expected gain, and for dirty data beside expired tombstones.
     It is at most LATE_HEAD_START_MS, and does not reach back to the last job of the partition. A
     wait ends when a job starts, whatever the job's result. So while a partition waits, each other
     partition starts at most once before it, however often it is dirty or late again.
   - By topic: the topic whose last job started before those of the others, and of its candidates
     the first by waiting time. So while a topic waits, each other topic starts at most once before
     it, however many partitions are dirty or late.
3. A small job never waits for a long one. While long jobs occupy all regular workers, one
   additional worker runs small jobs, and another one runs requested cleans.
4. The cleans of a topic with a rate limit run one after another: only the first of its candidates
   may start. After a clean the topic rests (cleaner/scheduler/wait_times.py), and the order among
   its candidates is that of their waiting time.

For the reasons see docs/decisions/0024-scheduling-order.md.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from cleaner.planning.plan import Verdict
from storage.model import TopicPartition

MINUTE_MS: Final = 60_000
# Head starts. Half an hour is the longest extra wait of the least urgent partition behind those
# that become candidates later.
LATE_HEAD_START_MS: Final = 30 * MINUTE_MS  # its deadline has passed
LATE_EXPIRY_HEAD_START_MS: Final = 15 * MINUTE_MS  # the same for expired tombstones alone
GAIN_HEAD_START_MS: Final = 20 * MINUTE_MS  # times the expected gain, 0..1

REQUESTS_IN_A_ROW: Final = 4  # starts of requested cleans while others wait
TURNS_KEPT: Final = 64  # by lane; more users than this at a time start in the order of the queue
# A small job reads at most this. At the lowest rate, 64 MiB/s, it takes some seconds. All
# partitions of __consumer_offsets are smaller unless they were never cleaned.
SMALL_JOB_BYTES: Final = 256 << 20
SMALL_JOB_MS: Final = 30_000  # a job that has run for longer is a long one, whatever its size

StartKey: TypeAlias = tuple[int, int, float, float, TopicPartition]
NO_TIMES: Final[Mapping[str, int]] = {}


class Requester(Enum):
    """Who requested a clean, if it was no user with a share of the starts."""

    NOBODY = "nobody"
    OPERATOR = "operator"


class Lane(Enum):
    """Which worker may run a job. All but REGULAR have one worker, which is started on demand."""

    REGULAR = "regular"
    REQUESTED = "requested"
    SMALL = "small"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition that waits for a worker."""

    partition: TopicPartition
    requested_by: Hashable = Requester.NOBODY
    is_small: bool = False
    is_limited: bool = False  # by the rate of its topic

    @property
    def is_requested(self) -> bool:
        """Return whether anybody requested the clean."""
        return self.requested_by is not Requester.NOBODY


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that a worker runs."""

    lane: Lane
    is_long: bool


class Start(NamedTuple):
    """Start a candidate on an idle worker of a lane. `by_topic`: in the order of the topics."""

    candidate: Candidate
    lane: Lane
    by_topic: bool = False


Turns: TypeAlias = Mapping[Lane, tuple[Start, ...]]  # the last starts
NO_TURNS: Final[Turns] = {}


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates to start now, and the lanes that need a worker."""

    starts: tuple[Start, ...]
    needed: frozenset[Lane]  # lanes that must have a worker: they run a job, or one waits for it
    turns: Turns  # input of the next choice
    others_wait: bool  # another candidate waits for a regular worker


def head_start_ms(verdict: Verdict, wall_ms: int) -> int:
    """Return the head start: the wait counts as this much longer than it is."""
    deadline_ms = verdict.deadline_ms
    is_late = deadline_ms is not None and deadline_ms < wall_ms
    if verdict.expired is not None:
        return LATE_EXPIRY_HEAD_START_MS if is_late else 0
    if is_late:
        return LATE_HEAD_START_MS
    return int(2 * verdict.score * GAIN_HEAD_START_MS)


def start_key(
    verdict: Verdict, waiting_since_ms: int, wall_ms: int, *, earliest_ms: int | None = None
) -> StartKey:
    """Return the sort key of a candidate; the one to start first sorts first.

    The head start does not reach back beyond `earliest_ms`, of the clock of the waits. If two have
    waited equally long, the earlier deadline decides, then the gain, then the name.
    """
    deadline_ms = verdict.deadline_ms
    since_ms = waiting_since_ms - head_start_ms(verdict, wall_ms)
    return (
        0 if verdict.run_now else 1,
        since_ms if earliest_ms is None else max(since_ms, earliest_ms),
        float("inf") if deadline_ms is None else float(deadline_ms),
        -verdict.score,
        verdict.partition,
    )


def build_candidate(verdict: Verdict, requested_by: Hashable) -> Candidate:
    """Return the candidate for the job that a verdict requests."""
    return Candidate(
        verdict.partition,
        requested_by,
        is_small=verdict.input_bytes <= SMALL_JOB_BYTES,
        is_limited=verdict.is_limited,
    )


def is_long(input_bytes: int, running_ms: int) -> bool:
    """Return whether the job is so long that small jobs should not wait for it."""
    return input_bytes > SMALL_JOB_BYTES or running_ms >= SMALL_JOB_MS


def choose(
    queue: Sequence[Candidate],
    idle: Mapping[Lane, int],
    running: Collection[RunningJob],
    turns: Turns = NO_TURNS,
    topics_ms: Mapping[str, int] = NO_TIMES,
) -> Choice:
    """Return which candidates to start; `queue` is sorted, `idle` counts idle workers by lane.

    `topics_ms`: when the last job of each topic started (WaitingTimes.topics_ms).
    """
    waiting = _first_of_limited_topics(queue)
    starts: list[Start] = []
    after = dict(turns)
    started = Counter[str]()  # by topic

    def topic_order(candidate: Candidate) -> tuple[int, int]:
        topic = candidate.partition.topic
        return started[topic], topics_ms.get(topic, 0)

    def add(start: Start) -> None:
        starts.append(start)
        started[start.candidate.partition.topic] += 1
        after[start.lane] = (*after.get(start.lane, ()), start)[-TURNS_KEPT:]

    for _ in range(idle.get(Lane.REGULAR, 0)):
        first = _next(waiting, Lane.REGULAR, after, topic_order)
        if first is None:
            break
        waiting.remove(first.candidate)
        add(first)
    regular = [job for job in running if job.lane is Lane.REGULAR]
    is_blocked = bool(regular) and all(job.is_long for job in regular) and not starts
    needed: set[Lane] = {job.lane for job in running if job.lane is not Lane.REGULAR}
    for lane, eligible in (
        (Lane.REQUESTED, [candidate for candidate in waiting if candidate.is_requested]),
        (Lane.SMALL, [candidate for candidate in waiting if candidate.is_small]),
    ):
        chosen = {start.candidate for start in starts}
        unchosen = (candidate for candidate in eligible if candidate not in chosen)
        first = _next(unchosen, lane, turns, topic_order)
        if first is None:
            continue
        if is_blocked:
            needed.add(lane)
        if idle.get(lane, 0):
            add(first)
    others_wait = not {start.candidate for start in starts}.issuperset(waiting)
    return Choice(tuple(starts), frozenset(needed), after, others_wait)


def _next(
    queue: Iterable[Candidate],
    lane: Lane,
    turns: Turns,
    topic_order: Callable[[Candidate], tuple[int, int]],
) -> Start | None:
    """Return the next start in a lane; None if the queue is empty."""
    firsts: dict[Hashable, Candidate] = {}  # of each requester, in the order of the queue
    topics: dict[str, Candidate] = {}  # the first of each topic that nobody requested
    for candidate in queue:
        firsts.setdefault(candidate.requested_by, candidate)
        if not candidate.is_requested:
            topics.setdefault(candidate.partition.topic, candidate)
    if not firsts:
        return None
    requesters = [start.candidate.requested_by for start in turns.get(lane, ())]
    in_a_row = requesters[-REQUESTS_IN_A_ROW:]
    if len(in_a_row) == REQUESTS_IN_A_ROW and Requester.NOBODY not in in_a_row:
        first = firsts.get(Requester.NOBODY) or firsts.get(Requester.OPERATOR)
    else:
        first = firsts.get(Requester.OPERATOR)
    last_turns = {requester: number for number, requester in enumerate(requesters)}
    first = first or firsts[min(firsts, key=lambda each: last_turns.get(each, -1))]
    if first.is_requested or not _is_turn_of_topics(turns.get(lane, ())):
        return Start(first, lane)
    return Start(min(topics.values(), key=topic_order), lane, by_topic=True)


def _is_turn_of_topics(starts: Sequence[Start]) -> bool:
    unrequested = (start for start in reversed(starts) if not start.candidate.is_requested)
    last = next(unrequested, None)
    return last is not None and not last.by_topic


def first_candidates(
    queue: Sequence[Candidate], topics_ms: Mapping[str, int], count: int
) -> list[Candidate]:
    """Return the first `count` candidates of each requester, and the first of `count` topics.

    The queue and the result are sorted; `topics_ms` as in `choose`.
    """
    topics: dict[str, Candidate] = {}
    for candidate in queue:
        if not candidate.is_requested:
            topics.setdefault(candidate.partition.topic, candidate)
    of_topics = heapq.nsmallest(
        count, topics.values(), key=lambda each: topics_ms.get(each.partition.topic, 0)
    )
    partitions = {candidate.partition for candidate in of_topics}
    numbers = Counter[Hashable]()
    results = []
    for candidate in queue:
        numbers[candidate.requested_by] += 1
        if numbers[candidate.requested_by] <= count or candidate.partition in partitions:
            results.append(candidate)
    return results


def _first_of_limited_topics(queue: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates in their order, but of each topic with a limit only the first."""
    limited: set[str] = set()
    results = []
    for candidate in queue:
        topic = candidate.partition.topic
        if not (candidate.is_limited and topic in limited):
            results.append(candidate)
        if candidate.is_limited:
            limited.add(topic)
    return results
