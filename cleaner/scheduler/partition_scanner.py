"""Scan all partitions: which ones may be cleaned, and which checkpoints to correct.

planning/plan.py decides about a partition, planning/scheduling_order.py which candidate is next.

A scan takes several turns of the event loop, so that thousands of partitions do not block it. An
event of a partition during the scan makes its verdict void (`mark_changed`); the next scan
assesses it again.
"""

import asyncio
import heapq
from dataclasses import replace
from operator import itemgetter
from typing import Final

import structlog

from cleaner import states
from cleaner.host import CleanerHost, LogFacts
from cleaner.planning.findings import ClockReading, Finding, Reason
from cleaner.planning.plan import Strategy, Verdict, assess
from cleaner.planning.scheduling_order import StartKey, start_key
from cleaner.scheduler.clean_requests import CleanRequests
from cleaner.scheduler.cleaner_state_store import CleanerStateStore
from cleaner.scheduler.in_progress_map import InProgressMap
from cleaner.scheduler.offload import Offload
from cleaner.scheduler.wait_times import TopicRests, WaitingTimes
from cleaner.stats import PoolStats
from storage.env import Env
from storage.errors import StorageError
from storage.model import TopicPartition

# Limits of one turn of the loop: a log of thousands of segments takes a millisecond or two.
SCAN_CHUNK: Final = 32  # partitions
TURN_SECONDS: Final = 0.002
RANK_CHUNK: Final = 512  # candidates sorted in one turn

logger = structlog.get_logger("cleaner")


class ScanTurns:
    """Yields to the event loop regularly and adds up the time of a scan's own turns.

    A step over all partitions that takes a millisecond or two is a turn of its own (`end`).
    """

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self._clock = asyncio.get_running_loop().time
        self._began, self._count = self._clock(), 0

    async def take(self) -> None:
        """Count one partition; yield if the turn is over."""
        self._count += 1
        if self._count == SCAN_CHUNK or self._clock() - self._began >= TURN_SECONDS:
            await self.end()

    async def end(self) -> None:
        """End this turn and yield."""
        self.busy_seconds += self._clock() - self._began
        await asyncio.sleep(0)
        self._began, self._count = self._clock(), 0


# Kafka's max-dirty-percent ignores logs that are being cleaned, paused or uncleanable.
_NOT_RANKED: Final = frozenset(
    {Reason.IN_PROGRESS, Reason.PAUSED_BY_BROKER, Reason.PAUSED_BY_OPERATOR, Reason.QUARANTINED}
)


class _ScanTotals:
    """The figures of a scan."""

    def __init__(self) -> None:
        self._damaged = self._candidates = self._dirty_bytes = 0
        self._ratio_max = 0.0
        self._late = self._late_ms_max = 0

    def add(self, verdict: Verdict) -> None:
        """Add a verdict."""
        self._damaged += verdict.is_damaged
        self._candidates += verdict.to_clean
        if verdict.section is not None:
            if not any(
                finding.blocks and finding.reason in _NOT_RANKED for finding in verdict.findings
            ):
                self._ratio_max = max(self._ratio_max, verdict.dirty_ratio)
            self._dirty_bytes += verdict.section.dirty_bytes
        if verdict.over_lag_ms > 0:
            self._late += 1
            self._late_ms_max = max(self._late_ms_max, verdict.over_lag_ms)

    def publish(self, stats: PoolStats) -> None:
        """Put the figures into the pool's statistics."""
        stats.scans += 1
        stats.scanned_at = asyncio.get_running_loop().time()
        stats.damaged_partitions = self._damaged
        stats.candidates = self._candidates
        stats.dirty_ratio_max = self._ratio_max
        stats.cleanable_bytes = self._dirty_bytes
        stats.over_lag_partitions = self._late
        stats.over_lag_ms_max = self._late_ms_max


def _is_offloaded(verdict: Verdict) -> bool:
    """Return whether offloading is the only reason why the workers do not clean it."""
    return {finding.reason for finding in verdict.findings if finding.blocks} == {Reason.OFFLOADED}


def _with(verdict: Verdict, finding: Finding | None) -> Verdict:
    """Return the verdict with one more finding, if there is one."""
    if finding is None:
        return verdict
    return replace(verdict, findings=(*verdict.findings, finding))


class PartitionScanner:
    """The verdicts of the last scan, and the callers that wait for a clean partition."""

    def __init__(
        self,
        host: CleanerHost,
        in_progress: InProgressMap,
        env: Env,
        stats: PoolStats,
        state_store: CleanerStateStore,
        *,
        offload: Offload,
    ) -> None:
        self.verdicts: dict[TopicPartition, Verdict] = {}
        self.existing: frozenset[TopicPartition] = frozenset()
        self.queue: list[TopicPartition] = []  # the last scan's candidates in starting order
        self.busy_seconds = 0.0  # of the last scan's own turns of the loop
        self.strategy: Strategy = "dirty-ratio"
        self.requests = CleanRequests()
        self.waiting = WaitingTimes()
        self.rests = TopicRests()
        self._state_store = state_store
        self._offload = offload
        self._host = host
        self._in_progress = in_progress
        self._env = env
        self._stats = stats
        self.changed: set[TopicPartition] = set()  # since the last scan began
        self._awaiting: list[tuple[TopicPartition, int, asyncio.Future[None]]] = []

    def mark_changed(self, partition: TopicPartition) -> None:
        """Discard the verdict of the running scan: the partition's state has changed."""
        self.changed.add(partition)

    async def scan(self) -> list[tuple[Verdict, LogFacts]]:
        """Assess every partition; return the candidates in starting order.

        Candidates whose state changed during the scan are left out.
        """
        self.changed.clear()
        verdicts: dict[TopicPartition, Verdict] = {}
        all_facts: dict[TopicPartition, LogFacts] = {}
        existing: set[TopicPartition] = set()
        offloaded: list[Verdict] = []
        topics: set[str] = set()
        limited: set[bytes] = set()  # ids of topics with a rate limit
        turns, totals = ScanTurns(), _ScanTotals()
        began_ms = int(asyncio.get_running_loop().time() * 1000)  # so all found in it wait equally
        for facts in self._host.facts():
            existing.add(facts.partition)
            topics.add(facts.partition.topic)
            if facts.config.cleaner_bytes_per_second_max is not None:
                limited.add(facts.topic_id)
            verdict = self._assess_and_notify(facts)
            if verdict is not None:
                verdicts[facts.partition] = verdict
                totals.add(verdict)
                self.waiting.observe(verdict, began_ms)
                if verdict.to_clean:
                    all_facts[facts.partition] = facts
                elif _is_offloaded(verdict):
                    offloaded.append(verdict)
            await turns.take()
        order = await self._ranked([verdicts[partition] for partition in all_facts], turns)
        offloaded = await self._ranked(offloaded, turns)
        await turns.end()
        former, self.verdicts, self.existing = self.verdicts, verdicts, frozenset(existing)
        self.queue = [verdict.partition for verdict in order]
        self.requests.keep_only(self.existing)
        await turns.end()
        for _ in self.waiting.keep_only(self.existing, frozenset(topics)):
            await turns.end()
        while former:  # to free them all at once would take milliseconds
            former.popitem()
            await turns.take()
        self.rests.keep_only(limited)
        self._offload.update_due((verdict.partition for verdict in offloaded), self.existing)
        totals.publish(self._stats)
        self.busy_seconds = turns.busy_seconds
        return [
            (verdict, all_facts[verdict.partition])
            for verdict in order
            if verdict.partition not in self.changed
        ]

    def assess(self, facts: LogFacts) -> Verdict | None:
        """Assess one partition now; return None if its facts contradict each other."""
        partition = facts.partition
        now = ClockReading(self._env.wall_ms(), int(asyncio.get_running_loop().time() * 1000))
        try:
            verdict = self._assess_at(facts, now)
            offload = self._offload.find_offload(facts, verdict)
            if offload is not None and offload.blocks and verdict.strategy == "generational":
                # A remote compaction cleans the whole log, so it starts at the dirty ratio itself.
                whole = replace(facts.config, varve_cleaner_strategy="dirty-ratio")
                verdict = self._assess_at(replace(facts, config=whole), now)
                offload = self._offload.find_offload(facts, verdict)
            verdict = _with(verdict, offload)
            rest = self.rests.find_rest(facts.topic_id, verdict, now.monotonic_ms)
            return _with(verdict, rest)
        except Exception:
            # One log with impossible facts must not stop the cleaning of all others.
            self._stats.scan_failures += 1
            logger.exception("assessment failed", partition=str(partition))
            return None

    def _assess_at(self, facts: LogFacts, now: ClockReading) -> Verdict:
        request = self.requests.pending(facts)
        return assess(
            facts,
            self._in_progress.state(facts.partition),
            now,
            self._state_store.state_of(facts, now.wall_ms),
            strategy=self.strategy,
            run_now=request is not None,
            victims=() if request is None else request.victims,
        )

    def _assess_and_notify(self, facts: LogFacts) -> Verdict | None:
        """Assess a log, correct its checkpoint and notify the callers that wait for it."""
        partition = facts.partition
        verdict = self.assess(facts)
        if verdict is None:
            return None
        self.requests.discard_completed(facts, verdict.section)
        if verdict.checkpoint_offset is not None:
            self.save_checkpoint(partition, facts.generation, verdict.checkpoint_offset)
        elif verdict.section is not None and not states.is_busy(self._in_progress.state(partition)):
            self._notify_waiters(partition, verdict.section.clean_below)
        return verdict

    async def _ranked(self, candidates: list[Verdict], turns: ScanTurns) -> list[Verdict]:
        """Sort candidates in starting order; sorting 10,000 in one turn would take 10 ms."""
        now_ms = self._env.wall_ms()
        await turns.end()
        keyed = []
        for verdict in candidates:
            keyed.append((self._start_key(verdict, now_ms), verdict))
            await turns.take()
        runs = []
        for start in range(0, len(keyed), RANK_CHUNK):
            runs.append(sorted(keyed[start : start + RANK_CHUNK], key=itemgetter(0)))
            await turns.end()
        order = []
        for _, verdict in heapq.merge(*runs, key=itemgetter(0)):
            order.append(verdict)
            await turns.take()
        return order

    def _start_key(self, verdict: Verdict, wall_ms: int) -> StartKey:
        since_ms = self.waiting.since_ms(verdict.partition)
        if since_ms is None:  # its state has changed since the assessment
            since_ms = int(asyncio.get_running_loop().time() * 1000)
        earliest_ms = self.waiting.earliest_ms(verdict.partition)
        return start_key(verdict, since_ms, wall_ms, earliest_ms=earliest_ms)

    def save_checkpoint(self, partition: TopicPartition, generation: str, offset: int) -> None:
        """Save that everything below `offset` is clean, and notify the callers that wait for it."""
        try:
            self._host.checkpoint(partition, generation, offset)
        except (OSError, StorageError) as error:
            # Only work is lost: the same section will be cleaned again.
            logger.warning("checkpoint not saved", partition=str(partition), reason=str(error))
            return
        self._state_store.note_checkpoint(partition, offset)
        self.requests.cleaned_below(partition, offset)
        self._notify_waiters(partition, offset)

    def _notify_waiters(self, partition: TopicPartition, clean_below: int) -> None:
        for awaited, offset, done in self._awaiting:
            if awaited == partition and offset <= clean_below and not done.done():
                done.set_result(None)

    async def wait_cleaned(self, partition: TopicPartition, offset: int) -> None:
        """Wait until a scan or a finished job shows that everything below `offset` is clean."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (partition, offset, done)
        self._awaiting.append(entry)
        try:
            await done
        finally:
            self._awaiting.remove(entry)

    def stop(self) -> None:
        """Cancel all waiting callers: nothing more will be cleaned."""
        for _, _, waiter in self._awaiting:
            waiter.cancel()
