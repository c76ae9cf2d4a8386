"""Check whole logs on an operator's request: what is alive, and what differs.

Rules
- One check runs at a time, in a worker process of its own that shares the cleaner's budgets. Others
  wait, and clients take turns. No answer to a client names the partition of another client.
- The cleaner does not clean the partition meanwhile. Retention may remove segments.
- The results of the last checks are kept in memory only. If nothing differs, the digests are stored
  with the state of the cleaner, for the next check.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeAlias

import structlog

from broker.event_loop.fair_slots import FairSlots
from broker.quotas.shares import Shares
from cleaner.host import CleanerHost, LogFacts
from cleaner.job import CleanAbortedError, CleanJob, new_job_id
from cleaner.planning.grouping import check_job
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.verification import IndexState, LogCheck, LogCheckRequest, SegmentCheck
from cleaner.workers.dedicated_worker import JobFailedError, LogChecker
from config.settings import CleanerSettings
from storage.env import Env
from storage.model import TopicPartition
from storage.swap.swap_journal import discard_outputs

RESULTS_MAX: Final = 16  # partitions; a result has about 300 bytes for each segment
CHECKS_MAX: Final = 64  # that run or wait, half of them of one client
LOGGED_MAX: Final = 5  # differences in a log line
STAGES: Final = ("map", "compare")  # each reads the log once

# A topic id with the partition: a deleted topic may be created again.
_Name: TypeAlias = tuple[bytes, TopicPartition]
State: TypeAlias = Literal["waiting", "running", "done", "failed", "aborted"]
StartChecker: TypeAlias = Callable[[], AbstractAsyncContextManager[LogChecker]]

logger = structlog.get_logger("broker.cleaning")


class CheckRefusedError(Exception):
    """The check cannot begin now."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as it must be, in the offsets [first, end)."""

    kind: str  # damage, lost records, superseded records, key index, offset index
    first_offset: int
    end_offset: int
    text: str


@dataclass(frozen=True, slots=True)
class CheckStatus:
    """A check that waits or runs, or the last one of a partition."""

    partition: TopicPartition
    state: State
    started_ms: int  # wall clock
    share: float = 0.0  # of the work that is done
    check: LogCheck | None = None  # if it is done
    differences: tuple[Difference, ...] = ()
    reason: str = ""  # if it failed
    topic_id: bytes = b""
    client: Hashable = None  # that began it

    @property
    def name(self) -> _Name:
        """Return what the check is known by."""
        return self.topic_id, self.partition


class LogChecks:
    """Runs checks, and keeps their results."""

    def __init__(
        self,
        env: Env,
        host: CleanerHost,
        pool: CleanerPool,
        worker: StartChecker,
        settings: Callable[[], CleanerSettings],
    ) -> None:
        self._env = env
        self._host = host
        self._pool = pool
        self._worker = worker
        self._settings = settings
        self._results: OrderedDict[_Name, CheckStatus] = OrderedDict()
        self._tasks: dict[_Name, asyncio.Task[CheckStatus]] = {}  # that run or wait
        self._shares = Shares(CHECKS_MAX)
        self._slots = FairSlots(1)

    def status(self, partition: TopicPartition) -> CheckStatus | None:
        """Return the present or the last check of a partition, not that of a deleted topic."""
        facts = self._host.facts_of(partition)
        return None if facts is None else self._results.get((facts.topic_id, partition))

    def begin(self, partition: TopicPartition, client: Hashable = None) -> CheckStatus:
        """Begin to check a served partition when it is the client's turn. Raises CheckRefusedError.

        None is a client without a share.
        """
        topic_id = self._facts_of(partition).topic_id
        begun = CheckStatus(
            partition, "waiting", self._env.wall_ms(), topic_id=topic_id, client=client
        )
        if begun.name in self._tasks:
            raise CheckRefusedError(f"{partition} is being verified: wait for the end, or abort it")
        if not self._shares.admits(client, len(self._tasks)):
            raise CheckRefusedError(
                f"{len(self._tasks)} checks run or wait. There may be {CHECKS_MAX}, half of them "
                "of one user: try again when some have ended"
            )
        task = asyncio.create_task(self._run(begun, client), name="log-check")
        self._tasks[begun.name] = task
        self._shares.add(str(begun.name), client)
        self._note(begun)
        task.add_done_callback(partial(self._ended, begun))
        return begun

    def abort(self, partition: TopicPartition) -> bool:
        """Abort the check of a partition; return whether there was one."""
        facts = self._host.facts_of(partition)
        task = None if facts is None else self._tasks.get((facts.topic_id, partition))
        if task is None:
            return False
        task.cancel()
        return True

    async def stop(self) -> None:
        """Abort all checks and wait for their ends."""
        for task in self._tasks.values():
            task.cancel()
        await self.wait_ended()

    async def wait_ended(self) -> None:
        """Wait for the end of all checks."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _note(self, status: CheckStatus) -> None:
        self._results[status.name] = status
        self._results.move_to_end(status.name)
        ended = [each for each in self._results.values() if each.name not in self._tasks]
        while len(ended) > RESULTS_MAX:  # the client with the most results loses its oldest
            client, _ = Counter(each.client for each in ended).most_common(1)[0]
            oldest = next(each for each in ended if each.client == client)
            ended.remove(oldest)
            del self._results[oldest.name]

    async def _run(self, begun: CheckStatus, client: Hashable) -> CheckStatus:
        async with self._slots.slot(client):
            running = replace(begun, state="running")
            self._note(running)
            return await self._checked(running)

    async def _checked(self, begun: CheckStatus) -> CheckStatus:
        partition = begun.partition
        try:
            check = await self._check(begun)
            differences = differences_of(check)
            self._log(partition, check, differences)
            return replace(begun, state="done", share=1.0, check=check, differences=differences)
        except (JobFailedError, CleanAbortedError, CheckRefusedError, OSError) as error:
            reason = str(error) or "the worker was stopped"
            logger.warning("log not verified", partition=str(partition), reason=reason)
        except Exception as error:
            reason = repr(error)
            logger.exception("log not verified", partition=str(partition))
        return replace(begun, state="failed", reason=reason)

    def _ended(self, begun: CheckStatus, task: asyncio.Task[CheckStatus]) -> None:
        """Note the result; an abort may come before the task has begun to run."""
        aborted = replace(begun, state="aborted", reason="an operator aborted it")
        del self._tasks[begun.name]
        self._shares.remove(str(begun.name))
        self._note(aborted if task.cancelled() else task.result())

    @staticmethod
    def _log(
        partition: TopicPartition, check: LogCheck, differences: tuple[Difference, ...]
    ) -> None:
        fields = {
            "partition": str(partition),
            "segments": len(check.segments),
            "keys": check.keys,
            "seconds": round(check.seconds, 3),
        }
        if differences:
            reason = "; ".join(difference.text for difference in differences[:LOGGED_MAX])
            logger.error("log differs", **fields, differences=len(differences), reason=reason)
        else:
            logger.info("log verified", **fields)

    async def _check(self, begun: CheckStatus) -> LogCheck:
        """Raises CheckRefusedError, JobFailedError, CleanAbortedError, OSError."""
        partition = begun.partition
        async with self._pool.paused(partition, "an operator verifies its log"):
            await self._host.load_job_inputs(partition)
            facts = self._facts_of(partition)
            if facts.topic_id != begun.topic_id:
                raise CheckRefusedError("the topic was deleted")
            job = self._job(facts)
            if job is None:
                return _nothing_to_check(facts)
            state = self._pool.state_of(partition)
            request = LogCheckRequest(facts.first_dirty_offset, state.digest_end, state.digests)
            try:
                async with self._worker() as checker:
                    check = await checker.check_log(job, request, self._on_progress(begun))
            finally:
                await asyncio.to_thread(discard_outputs, self._env, job.directory, job.job_id)
            if self._facts_of(partition).generation != job.generation:
                raise CheckRefusedError("the log was truncated or changed meanwhile: try again")
            if not differences_of(check):
                self._pool.store_digests(partition, check.end_offset, check.digests)
            return check

    def _facts_of(self, partition: TopicPartition) -> LogFacts:
        facts = self._host.facts_of(partition)
        if facts is None:
            raise CheckRefusedError("the partition is offline or was deleted")
        return facts

    def _job(self, facts: LogFacts) -> CleanJob | None:
        inputs = self._host.job_inputs(
            facts.partition, facts.log_start_offset, facts.log_end_offset
        )
        return check_job(
            facts,
            inputs,
            self._settings(),
            job_id=f"check-{new_job_id(self._env)}",
            now_ms=self._env.wall_ms(),
        )

    def _on_progress(self, begun: CheckStatus) -> Callable[[str, int, int], None]:
        def note(stage: str, done_bytes: int, total_bytes: int) -> None:
            place = STAGES.index(stage) if stage in STAGES else 0
            share = (place + done_bytes / max(total_bytes, 1)) / len(STAGES)
            self._results[begun.name] = replace(self._results[begun.name], share=share)

        return note


def _nothing_to_check(facts: LogFacts) -> LogCheck:
    return LogCheck(
        end_offset=facts.log_start_offset,
        segments=(),
        keys=0,
        uncleaned=0,
        digests=(),
        changed=(),
        compared=0,
        bytes_read=0,
        seconds=0.0,
    )


def differences_of(check: LogCheck) -> tuple[Difference, ...]:
    """Return everything that a check found to be wrong."""
    return (
        *(d for segment in check.segments for d in _of_segment(segment)),
        *_uncleaned(check),
        *(
            Difference(
                "lost records",
                changed.first_offset,
                changed.end_offset,
                f"the last records of the keys are not those that were there before: "
                f"{changed.records} are left in these offsets",
            )
            for changed in check.changed
        ),
    )


def _of_segment(segment: SegmentCheck) -> list[Difference]:
    differences = []
    first, end = segment.base_offset, segment.next_base_offset
    if segment.damage is not None:
        path, position, reason = segment.damage
        differences.append(
            Difference("damage", first, end, f"{path} is damaged at byte {position}: {reason}")
        )
    if segment.index is IndexState.WRONG:
        text = "the rows of its key index differed from its records; the index was removed"
        differences.append(Difference("key index", first, end, text))
    if segment.index is IndexState.DAMAGED:
        text = "a checksum of its key index did not match; the index was removed"
        differences.append(Difference("key index", first, end, text))
    if segment.misplaced:
        text = (
            f"{segment.misplaced} entries of its offset index are wrong, so consumers may miss "
            "records. Stop the broker, delete the index and start it again"
        )
        differences.append(Difference("offset index", first, end, text))
    return differences


def _uncleaned(check: LogCheck) -> list[Difference]:
    if not check.uncleaned:
        return []
    text = f"{check.uncleaned} superseded records are below the first dirty offset"
    return [Difference("superseded records", check.segments[0].base_offset, check.end_offset, text)]
