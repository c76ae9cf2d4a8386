"""A model of a loaded broker for the scheduling rules: partitions, workers and time, no files.

Decisions are those of the product (cleaner/planning/scheduling_order.py and
cleaner/scheduler/wait_times.py); what is modelled is the load. Partitions grow at their own rates,
are cleaned at a rate that all workers share, are requested, paused and aborted at random, and the
wall clock jumps. Time goes in steps to the next event. The same seed gives the same history.
"""

import itertools
import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from cleaner.planning.dirty_section import DirtySection
from cleaner.planning.findings import Finding, Reason
from cleaner.planning.plan import Verdict
from cleaner.planning.scheduling_order import (
    NO_TURNS,
    Candidate,
    Lane,
    Requester,
    RunningJob,
    Start,
    StartKey,
    build_candidate,
    choose,
    is_long,
    start_key,
)
from cleaner.scheduler.wait_times import TopicRests, WaitingTimes
from storage.model import TopicPartition

SCAN_MS = 60_000
LANE_START_MS = 1_000
MIB = 1 << 20


@dataclass(slots=True)
class ModelPartition:
    """One partition. Bytes are kept as floats: it grows all the time."""

    partition: TopicPartition
    clean_bytes: float
    bytes_per_second: float
    lag_ms: int
    survives: float  # share of the dirty bytes that a clean leaves
    limit: int | None = None  # of the topic: the same for all of its partitions
    is_aborted_often: bool = False
    dirty_bytes: float = 0.0
    dirty_since_ms: int | None = None
    is_paused: bool = False
    requested_by: Hashable = Requester.NOBODY
    is_running: bool = False
    cleans: int = 0
    grown_ms: int = 0  # it has grown until then

    @property
    def is_requested(self) -> bool:
        """Return whether a clean is requested."""
        return self.requested_by is not Requester.NOBODY

    def grow(self, now_ms: int) -> None:
        """Let time pass."""
        if self.bytes_per_second > 0 and now_ms > self.grown_ms:
            self.dirty_bytes += self.bytes_per_second * (now_ms - self.grown_ms) / 1000
            if self.dirty_since_ms is None:
                self.dirty_since_ms = self.grown_ms
        self.grown_ms = now_ms

    def verdict(self, now_ms: int, clock_ms: int) -> Verdict:
        """What a scan finds. `clock_ms` is how far the wall clock has jumped."""
        self.grow(now_ms)
        wall_ms = now_ms + clock_ms
        deadline_ms = None if self.dirty_since_ms is None else self.dirty_since_ms + self.lag_ms
        dirty, clean = int(self.dirty_bytes), int(self.clean_bytes)
        section = DirtySection(0, 1, Reason.ACTIVE_SEGMENT, clean, dirty, deadline_ms, 0)
        findings = []
        if self.is_running:
            findings.append(Finding(Reason.IN_PROGRESS, True))
        if self.is_paused:
            findings.append(Finding(Reason.PAUSED_BY_BROKER, True))
        is_late = deadline_ms is not None and deadline_ms < wall_ms
        if dirty == 0 or not (is_late or self.is_requested or section.ratio > 0.5):
            findings.append(Finding(Reason.RATIO, True))
        return Verdict(
            self.partition,
            tuple(findings),
            section,
            run_now=self.is_requested and dirty > 0,
            bytes_per_second_max=self.limit,
        )


@dataclass(slots=True)
class Job:
    """A job under way."""

    candidate: Candidate
    model: ModelPartition
    lane: Lane
    begun_ms: int
    input_bytes: int
    left_bytes: float
    abort_at_ms: int | None
    moved_bytes: float = 0.0


@dataclass
class Wait:
    """One candidate's wait, as it is seen from outside."""

    since_ms: int
    is_small: bool


class ScheduleModel:
    """Runs the load and checks the promises at each start."""

    def __init__(
        self,
        seed: int,
        partitions: list[ModelPartition],
        *,
        workers: int = 1,
        bytes_per_second: float = 64.0 * MIB,
        request_every_ms: int | None = None,
        requesters: Sequence[Hashable] = (Requester.OPERATOR,),
        pause_every_ms: int | None = None,
        jump_every_ms: int | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.partitions = {partition.partition: partition for partition in partitions}
        self.now_ms = 0
        self.clock_ms = 0
        self.jobs: list[Job] = []
        self.waits: dict[TopicPartition, Wait] = {}
        self.requests: dict[TopicPartition, int] = {}
        self.longest_ms: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self._workers = workers
        self._bytes_per_second = bytes_per_second
        self._waiting = WaitingTimes()
        self._rests = TopicRests()
        self._siblings: dict[str, list[ModelPartition]] = {}  # by topic with a limit
        for partition in partitions:
            if partition.limit is not None:
                self._siblings.setdefault(partition.partition.topic, []).append(partition)
        self._allowed_ms: dict[str, float] = {}  # when the limit of a topic allows a clean
        self._changed = True
        self._last_start_ms: dict[TopicPartition, int] = {}
        self._last_start_of_topic_ms: dict[str, int] = {}
        self._requesters = itertools.cycle(requesters)
        self._turns = NO_TURNS
        self._lanes: dict[Lane, int] = {}  # ready from; once started a worker stays
        self._lane_ready_ms = 1 << 62
        self._verdicts: dict[TopicPartition, Verdict] = {}
        self._ranked: dict[tuple[Hashable, bool, str], list[tuple[StartKey, Candidate]]] = {}
        self._places: dict[TopicPartition, tuple[list[tuple[StartKey, Candidate]], StartKey]] = {}
        every = {"request": request_every_ms, "pause": pause_every_ms, "jump": jump_every_ms}
        self._every = {kind: ms for kind, ms in every.items() if ms is not None}
        self._due = dict(self._every)

    def run(self, hours: float) -> None:
        """Let time pass."""
        end_ms = self.now_ms + int(hours * 3_600_000)
        scan_ms = self.now_ms
        while self.now_ms < end_ms:
            if self.now_ms >= scan_ms:
                self._scan()
                scan_ms = self.now_ms + SCAN_MS
            if self._changed:
                self._changed = False
                self._start()
            self._advance(min([scan_ms, self._lane_ready_ms, *self._due.values(), *self._ends()]))
            self._changed |= self.now_ms >= self._lane_ready_ms

    def _ends(self) -> list[int]:
        share = self._share()
        ends = [job.abort_at_ms for job in self.jobs if job.abort_at_ms is not None]
        return ends + [self.now_ms + 1 + int(1000 * job.left_bytes / share) for job in self.jobs]

    def _share(self) -> float:
        return self._bytes_per_second / max(1, len(self.jobs))

    def _advance(self, to_ms: int) -> None:
        passed = max(1, to_ms - self.now_ms)
        share = self._share()
        self.now_ms += passed
        for job in list(self.jobs):
            job.left_bytes -= share * passed / 1000
            job.moved_bytes += share * passed / 1000
            if job.left_bytes <= 0:
                self._end(job, finished=True)
            elif job.abort_at_ms is not None and job.abort_at_ms <= self.now_ms:
                self._end(job, finished=False)
        for kind, due_ms in self._due.items():
            if due_ms <= self.now_ms:
                self._due[kind] = self.now_ms + self._every[kind]
                getattr(self, f"_{kind}")()

    def _end(self, job: Job, *, finished: bool) -> None:
        model = job.model
        self.jobs.remove(job)
        model.is_running = False
        if finished:
            model.cleans += 1
            model.grow(self.now_ms)
            model.clean_bytes = model.clean_bytes * 0.98 + model.dirty_bytes * model.survives
            model.dirty_bytes, model.dirty_since_ms = 0.0, None
            if model.is_requested:
                model.requested_by = Requester.NOBODY
                self.requests.pop(model.partition, None)
        if job.candidate.is_limited:
            assert model.limit is not None
            topic = model.partition.topic
            self._rests.ended(topic.encode(), int(job.moved_bytes))
            self._allowed_ms[topic] = job.begun_ms + 1000 * int(job.moved_bytes) / model.limit
            self._judge_siblings(model)
        self._judge(model)

    def _judge_siblings(self, model: ModelPartition) -> None:
        for sibling in self._siblings[model.partition.topic]:
            if sibling is not model:
                self._judge(sibling)

    def _scan(self) -> None:
        for model in self.partitions.values():
            self._judge(model)
        self._changed = True  # a job may have become a long one

    def _judge(self, model: ModelPartition) -> None:
        self._changed = True
        verdict = model.verdict(self.now_ms, self.clock_ms)
        rest = self._rests.find_rest(model.partition.topic.encode(), verdict, self.now_ms)
        if rest is not None:
            verdict = replace(verdict, findings=(*verdict.findings, rest))
        self._waiting.observe(verdict, self.now_ms)
        self._unrank(model.partition)
        if verdict.to_clean:
            self._rank(verdict)
            if model.partition not in self.waits:
                is_small = build_candidate(verdict, model.requested_by).is_small
                self.waits[model.partition] = Wait(self.now_ms, is_small)
        elif not model.is_paused and rest is None:
            self.waits.pop(model.partition, None)

    def _rank(self, verdict: Verdict) -> None:
        partition = verdict.partition
        candidate = build_candidate(verdict, self.partitions[partition].requested_by)
        since_ms = self._waiting.since_ms(partition)
        assert since_ms is not None
        earliest_ms = self._waiting.earliest_ms(partition)
        wall_ms = self.now_ms + self.clock_ms
        key = start_key(verdict, since_ms, wall_ms, earliest_ms=earliest_ms)
        kind = (candidate.requested_by, candidate.is_small, partition.topic)
        entries = self._ranked.setdefault(kind, [])
        insort(entries, (key, candidate), key=itemgetter(0))
        self._verdicts[partition] = verdict
        self._places[partition] = (entries, key)

    def _unrank(self, partition: TopicPartition) -> None:
        if self._verdicts.pop(partition, None) is not None:
            entries, key = self._places.pop(partition)
            at = bisect_left(entries, key, key=itemgetter(0))
            assert entries[at][1].partition == partition
            del entries[at]

    # What happens to partitions ------------------------------------------------------------

    def _request(self) -> None:
        model = self.random.choice(list(self.partitions.values()))
        if model.dirty_bytes > 0 and not model.is_paused:
            if not model.is_requested:
                model.requested_by = next(self._requesters)
            self.requests.setdefault(model.partition, self.now_ms)
            self._judge(model)

    def _pause(self) -> None:
        model = self.random.choice(list(self.partitions.values()))
        model.is_paused = not model.is_paused
        for job in self.jobs:
            if job.model is model and model.is_paused:
                self._end(job, finished=False)
                break
        self._judge(model)

    def _jump(self) -> None:
        self.clock_ms += self.random.choice([-1, 1]) * self.random.randrange(10**11)

    # Starting --------------------------------------------------------------------------------

    def _start(self) -> None:
        # The first few of each kind: the choice looks at no others.
        firsts = [entry for kind in self._ranked.values() for entry in kind[: self._workers + 2]]
        queue = [candidate for _, candidate in sorted(firsts, key=itemgetter(0))]
        busy = Counter(job.lane for job in self.jobs)
        idle = {Lane.REGULAR: self._workers - busy[Lane.REGULAR]}
        for lane, ready_ms in self._lanes.items():
            idle[lane] = int(ready_ms <= self.now_ms and not busy[lane])
        running = [
            RunningJob(job.lane, is_long(job.input_bytes, self.now_ms - job.begun_ms))
            for job in self.jobs
        ]
        choice = choose(queue, idle, running, self._turns, self._waiting.topics_ms)
        self._turns = choice.turns
        for start in choice.starts:
            self._begin(start)
        waiting = [candidate for candidate in queue if candidate.partition in self._verdicts]
        assert not waiting or idle[Lane.REGULAR] == sum(
            start.lane is Lane.REGULAR for start in choice.starts
        ), "a regular worker is idle while a candidate waits"
        for lane in choice.needed - self._lanes.keys():
            self._lanes[lane] = self.now_ms + LANE_START_MS
        self._lane_ready_ms = min(
            (ready for ready in self._lanes.values() if ready > self.now_ms), default=1 << 62
        )

    def _begin(self, start: Start) -> None:
        candidate, lane = start.candidate, start.lane
        partition = candidate.partition
        model, verdict = self.partitions[partition], self._verdicts[partition]
        self._unrank(partition)
        assert not model.is_running
        if candidate.is_limited:
            topic = partition.topic
            assert self.now_ms >= self._allowed_ms.get(topic, 0), f"{topic} exceeds its limit"
            assert not any(
                job.candidate.is_limited and job.candidate.partition.topic == topic
                for job in self.jobs
            ), f"{topic} is cleaned twice at once"
            self._rests.started(topic.encode(), self.now_ms)
        wait = self.waits.pop(partition)
        self._check(start)
        kind = "small partition" if candidate.is_small else "large partition"
        for name in (lane.value, kind, f"topic {partition.topic}"):
            self.longest_ms[name] = max(self.longest_ms[name], self.now_ms - wait.since_ms)
            self.starts[name] += 1
        if partition in self.requests:
            asked_ms = self.now_ms - self.requests[partition]
            self.longest_ms["request"] = max(self.longest_ms["request"], asked_ms)
        self._waiting.started(partition, self.now_ms)
        self._last_start_ms[partition] = self.now_ms
        self._last_start_of_topic_ms[partition.topic] = self.now_ms
        model.is_running = True
        if candidate.is_limited:
            self._judge_siblings(model)
        aborts = model.is_aborted_often
        self.jobs.append(
            Job(
                candidate,
                model,
                lane,
                self.now_ms,
                verdict.input_bytes,
                float(verdict.input_bytes) + verdict.input_bytes / 2,
                self.now_ms + self.random.randrange(1, 5000) if aborts else None,
            )
        )

    def _check(self, start: Start) -> None:
        """The bounds of decision 0024, at a start in the regular lane that nobody requested.

        A partition of a topic that rests is no candidate meanwhile. Requests take turns by user.
        """
        candidate = start.candidate
        topic = candidate.partition.topic
        last_ms = self._last_start_ms.get(candidate.partition)
        if start.by_topic:
            last_ms = self._last_start_of_topic_ms.get(topic)
        if start.lane is not Lane.REGULAR or candidate.is_requested or last_ms is None:
            return
        for partition, wait in self.waits.items():  # the one that has waited longest first
            if wait.since_ms >= last_ms:
                break
            is_overtaken = partition in self._verdicts and not self._verdicts[partition].run_now
            if start.by_topic and self._last_start_of_topic_ms.get(partition.topic, 0) >= last_ms:
                is_overtaken = False  # another partition of its topic has had the turn
            assert not is_overtaken, f"{partition} is overtaken again by {candidate.partition}"
